//! Verification with drafters that are told what to guess: whatever they guess, the output is the
//! plain greedy output.
//!
//! TALON_SOAK above 1 runs all goldens with every drafter and every number of guesses, more than
//! 30,000 tokens; each further 14 of it once more with other random guesses.

use talon::engine::{Engine, Generation, LoadOptions, Request};
use talon::spec::History;
use talon::weights::demo;

use crate::engines::{
    Golden, Guesser, Random, accepted, bits, goldens, greedy, long_golden, oracle, run, run_plain,
    soak, truth,
};
use crate::{load, tiny, turn};

/// How the guesses of a drafter are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Script {
    Right,
    Wrong,
    Mixed,
}

pub const SCRIPTS: [Script; 3] = [Script::Right, Script::Wrong, Script::Mixed];

/// Runs a request with a drafter that knows its plain `output`.
pub fn run_script(
    engine: &mut Engine,
    request: &Request,
    output: &[u32],
    (script, guesses, seed): (Script, usize, u64),
) -> Generation {
    let vocabulary = engine.limits().vocab_limit as u32;
    let wrong = |token: u32| (token + 1) % vocabulary;
    let mut random = Random(seed);
    let mut guess = |token: u32| match script {
        Script::Right => token,
        Script::Wrong => wrong(token),
        Script::Mixed if random.below(3) > 0 => token,
        Script::Mixed => wrong(token),
    };
    if script == Script::Right {
        return run(engine, request, &mut oracle(request.prompt, output), guesses);
    }
    let mut drafter = Guesser(|history: History, count: usize| {
        let known = truth(request.prompt, output, history).iter().take(count);
        known.map(|token| guess(*token)).collect()
    });
    run(engine, request, &mut drafter, guesses)
}

/// The drafter was what it should be.
pub fn check_rounds(generation: &Generation, script: Script, what: &str) {
    let drafted: usize = generation.rounds.iter().map(|round| round.drafted).sum();
    let accepted: usize = accepted(generation).iter().sum();
    assert!(drafted > 0, "no guess was made: {what}");
    match script {
        Script::Right => assert_eq!(accepted, drafted, "{what}"),
        Script::Wrong => assert_eq!(accepted, 0, "{what}"),
        Script::Mixed => {}
    }
}

#[test]
fn scripted_drafters_change_nothing() {
    let Some(_turn) = turn() else { return };
    let mut engine = load(demo(), LoadOptions::default());
    let mut goldens = goldens();
    goldens.push(long_golden());
    let plain = |engine: &mut Engine, golden: &Golden| {
        let request = greedy(&golden.prompt, golden.greedy.len());
        run_plain(engine, &request).tokens
    };
    let plains: Vec<Vec<u32>> = goldens.iter().map(|golden| plain(&mut engine, golden)).collect();
    let (mut tokens, mut drafted, mut right, mut place) = (0, 0, 0, 0);
    for seed in 0..soak().div_ceil(14) as u64 {
        for script in SCRIPTS {
            for guesses in 1..=7 {
                // The short version takes the goldens in turn, two at a time.
                let all: Vec<usize> = (0..goldens.len()).collect();
                let short = [place % goldens.len(), (place + 1) % goldens.len()];
                place += 2;
                for at in if soak() == 1 { short.to_vec() } else { all } {
                    let Golden { id, prompt, .. } = &goldens[at];
                    let what = format!("{id}, {script:?}, {guesses} guesses, seed {seed}");
                    let request = greedy(prompt, plains[at].len());
                    let generation =
                        run_script(&mut engine, &request, &plains[at], (script, guesses, seed));
                    assert_eq!(generation.tokens, plains[at], "{what}");
                    check_rounds(&generation, script, &what);
                    tokens += generation.tokens.len();
                    drafted += generation.rounds.iter().map(|round| round.drafted).sum::<usize>();
                    right += accepted(&generation).iter().sum::<usize>();
                }
            }
        }
    }
    println!("{tokens} tokens equal the plain output; {right} of {drafted} guesses were right");
    assert!(soak() == 1 || tokens >= 20_000, "{tokens} tokens");
}

/// The logits of the accepted rows have the bits of steps of one row.
fn logits_of_chains_are_plain(engine: &mut Engine, prompt: &[u32], tokens: usize) {
    let request = Request { keep_logits: true, ..greedy(prompt, tokens) };
    let plain = run_plain(engine, &request);
    for guesses in 1..=7 {
        for script in SCRIPTS {
            let generation = run_script(engine, &request, &plain.tokens, (script, guesses, 3));
            assert_eq!(generation.tokens, plain.tokens, "{script:?}, {guesses} guesses");
            assert!(bits(&generation) == bits(&plain), "{script:?}, {guesses} guesses: logits");
        }
    }
}

#[test]
fn logits_of_chains_are_plain_demo() {
    let Some(_turn) = turn() else { return };
    let mut engine = load(demo(), LoadOptions::default());
    for golden in [goldens().swap_remove(11), long_golden()] {
        logits_of_chains_are_plain(&mut engine, &golden.prompt, 40);
    }
}

#[test]
fn logits_of_chains_are_plain_random_model() {
    let Some(_turn) = turn() else { return };
    let mut engine = load(tiny(), LoadOptions { context: Some(256), ..LoadOptions::default() });
    // From a context that is attended to in whole into one that is selected from.
    for len in [1, 4, 60] {
        let mut random = Random(len);
        let prompt: Vec<u32> = (0..len).map(|_| random.below(512) as u32).collect();
        logits_of_chains_are_plain(&mut engine, &prompt, 60);
    }
}
