//! A sampled text depends on its seed alone: the same again, and with any drafter. It need not be the
//! CPU's, whose logits differ in their last bits.

use talon::engine::{LoadOptions, Request, Sampling};
use talon::weights::{Source, demo};

use crate::chains::{SCRIPTS, run_script};
use crate::engines::{golden, greedy, run_plain};
use crate::{load, tiny, turn};

fn seeds_decide(source: Source, prompt: &[u32]) {
    let mut engine = load(source, LoadOptions { context: Some(512), ..LoadOptions::default() });
    let hot = Sampling { temperature: 1.0, seed: 21, ..Sampling::GREEDY };
    let penalised = Sampling {
        top_p: 0.9,
        repetition_penalty: 1.2,
        presence_penalty: 0.3,
        frequency_penalty: 0.1,
        ..hot
    };
    let mut tokens = 0;
    for sampling in [hot, penalised] {
        let request =
            |seed| Request { sampling: Sampling { seed, ..sampling }, ..greedy(prompt, 96) };
        let plain = run_plain(&mut engine, &request(21)).tokens;
        assert_eq!(run_plain(&mut engine, &request(21)).tokens, plain, "the same seed");
        assert_ne!(run_plain(&mut engine, &request(22)).tokens, plain, "another seed");
        for script in SCRIPTS {
            for guesses in [1, 3, 7] {
                let generation =
                    run_script(&mut engine, &request(21), &plain, (script, guesses, 5));
                assert_eq!(generation.tokens, plain, "{script:?}, {guesses} guesses");
                tokens += plain.len();
            }
        }
    }
    println!("{tokens} sampled tokens equal with and without guesses");
}

#[test]
fn seeds_decide_demo() {
    let Some(_turn) = turn() else { return };
    seeds_decide(demo(), &golden("text-5").prompt);
}

#[test]
fn seeds_decide_random_model() {
    let Some(_turn) = turn() else { return };
    seeds_decide(tiny(), &[3, 14, 15, 92, 65, 35]);
}
