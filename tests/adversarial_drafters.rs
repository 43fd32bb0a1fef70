//! Promise: a drafter cannot change the text. Whatever it guesses, always wrong, always right, by
//! chance, too much, too little or no token at all, the output is that of the one-token path; and
//! the number of steps is what the guesses deserve.

#[path = "common/engines.rs"]
mod engines;

use engines::{
    Golden, Guesser, Random, accepted, demo_engine, golden, greedy, oracle, run, run_plain, soak,
    tiny_engine, truth,
};
use talon::engine::{DraftChoice, Engine, Request, Sampling};
use talon::spec::{History, Proposer};

const TOKENS: usize = 40;

fn samplings() -> Vec<Sampling> {
    let hot = Sampling { temperature: 0.9, seed: 21, ..Sampling::GREEDY };
    let penalised = Sampling {
        top_p: 0.9,
        repetition_penalty: 1.2,
        presence_penalty: 0.3,
        frequency_penalty: 0.1,
        ..hot
    };
    vec![Sampling::GREEDY, hot, penalised]
}

/// Calls `check` with an output of the random model, for each way of sampling and each k.
fn for_each_chain(check: impl Fn(&mut Engine, &Request, &[u32], usize)) {
    let mut engine = tiny_engine(None, 512);
    let mut random = Random(9);
    for _ in 0..soak() {
        let prompt: Vec<u32> = (0..20).map(|_| random.below(512) as u32).collect();
        for sampling in samplings() {
            let request = Request { sampling, ..greedy(&prompt, TOKENS) };
            let output = run_plain(&mut engine, &request).tokens;
            assert_eq!(output.len(), TOKENS);
            for k in 1..=7 {
                check(&mut engine, &request, &output, k);
            }
        }
    }
}

/// Another token than `token`.
fn wrong(token: u32) -> u32 {
    (token + 1) % 512
}

#[test]
fn one_that_is_always_wrong_costs_one_step_a_token() {
    for_each_chain(|engine, request, output, k| {
        let mut drafter = Guesser(|history: History, count: usize| {
            let truth = truth(request.prompt, output, history).iter();
            truth.map(|token| wrong(*token)).take(count).collect()
        });
        let generation = run(engine, request, &mut drafter, k);
        assert_eq!(generation.tokens, output, "k = {k}");
        assert_eq!(generation.stats().acceptance_length(), Some(1.0), "k = {k}");
        // The first token comes from the prompt, and the last step has nothing left to guess.
        assert_eq!(generation.rounds.len(), TOKENS - 1);
        let drafted: Vec<usize> = generation.rounds.iter().map(|round| round.drafted).collect();
        let left = |round: usize| TOKENS - 2 - round;
        assert!(drafted.iter().enumerate().all(|(i, drafted)| *drafted == k.min(left(i))));
    });
}

fn assert_full_chains(rounds: &[engines::Accepted], tokens: usize, k: usize) {
    let full = (tokens - 1) / (k + 1);
    let rest = (tokens - 1) % (k + 1);
    let mut expected = vec![(k, k + 1); full];
    expected.extend((rest > 0).then(|| (rest - 1, rest)));
    assert_eq!(rounds, expected, "k = {k}");
}

#[test]
fn an_oracle_fills_every_chain() {
    for_each_chain(|engine, request, output, k| {
        let generation = run(engine, request, &mut oracle(request.prompt, output), k);
        assert_eq!(generation.tokens, output, "k = {k}");
        assert_full_chains(&engines::accepted_and_tokens(&generation), TOKENS, k);
    });
}

#[test]
fn an_oracle_fills_every_chain_of_the_demo() {
    let Golden { prompt, greedy: output, .. } = golden("chat-3");
    for tp in [1, 2] {
        let mut engine = demo_engine(DraftChoice::None, tp);
        for k in [1, 3, 7] {
            let request = greedy(&prompt, output.len());
            let generation = run(&mut engine, &request, &mut oracle(&prompt, &output), k);
            assert_eq!(generation.tokens, output, "k = {k} on {tp} ranks");
            assert_full_chains(&engines::accepted_and_tokens(&generation), output.len(), k);
        }
    }
}

#[test]
fn one_that_is_right_by_chance_keeps_what_was_right() {
    for_each_chain(|engine, request, output, k| {
        let mut random = Random(k as u64);
        let mut deserved = Vec::new();
        let mut drafter = Guesser(|history: History, count: usize| {
            let right: Vec<bool> = (0..count).map(|_| random.below(3) > 0).collect();
            deserved.push(right.iter().take_while(|right| **right).count());
            let truth = truth(request.prompt, output, history).iter().zip(right);
            truth.map(|(token, right)| if right { *token } else { wrong(*token) }).collect()
        });
        let generation = run(engine, request, &mut drafter, k);
        assert_eq!(generation.tokens, output, "k = {k}");
        // A last step without room for guesses is not in the list.
        assert_eq!(accepted(&generation)[..deserved.len()], deserved, "k = {k}");
        assert!(deserved.contains(&0) && deserved.iter().any(|count| *count > 0), "k = {k}");
    });
}

/// Of more guesses than were asked for only those are taken, at the end of the output too.
#[test]
fn one_that_says_too_much_is_cut() {
    for_each_chain(|engine, request, output, k| {
        let mut drafter = Guesser(|history: History, _| {
            let truth = truth(request.prompt, output, history).iter().copied();
            truth.chain(std::iter::repeat_n(7, 1000)).collect()
        });
        let generation = run(engine, request, &mut drafter, k);
        assert_eq!(generation.tokens, output, "k = {k}");
        assert_full_chains(&engines::accepted_and_tokens(&generation), TOKENS, k);
    });
}

#[test]
fn one_that_says_nothing_or_little_is_plain_decoding() {
    for_each_chain(|engine, request, output, k| {
        let mut silent = Guesser(|_: History, _| Vec::new());
        let generation = run(engine, request, &mut silent, k);
        assert_eq!(generation.tokens, output, "k = {k}");
        assert!(generation.rounds.iter().all(|round| round.drafted == 0));

        let mut turn = 0;
        let mut reluctant = Guesser(|history: History, count: usize| {
            turn += 1;
            truth(request.prompt, output, history)
                .iter()
                .copied()
                .take(count.min(turn % 3))
                .collect()
        });
        let generation = run(engine, request, &mut reluctant, k);
        assert_eq!(generation.tokens, output, "k = {k}");
        assert!(generation.rounds.iter().any(|round| round.accepted > 0));
    });
}

/// Ids that no token has end the chain; what was right before them counts.
#[test]
fn guesses_outside_the_vocabulary_are_dropped() {
    for_each_chain(|engine, request, output, k| {
        for (place, id) in [(0, 512), (k / 2, 513), (k - 1, u32::MAX)] {
            let mut drafter = Guesser(|history: History, count: usize| {
                let mut guesses = truth(request.prompt, output, history).to_vec();
                guesses.truncate(count);
                if let Some(guess) = guesses.get_mut(place) {
                    *guess = id;
                }
                guesses
            });
            let generation = run(engine, request, &mut drafter, k);
            assert_eq!(generation.tokens, output, "k = {k}, {id} at {place}");
            let most = accepted(&generation).into_iter().max();
            assert_eq!(most, Some(place), "k = {k}, {id} at {place}");
        }
    });
}

/// The demo's ids from 4080 on are rows of the embedding that no token uses.
#[test]
fn padding_ids_are_dropped() {
    let Golden { prompt, greedy: output, .. } = golden("chat-0");
    let mut engine = demo_engine(DraftChoice::None, 2);
    let limit = engine.limits().vocab_limit as u32;
    assert!((limit as usize) < engine.config().vocab_size);
    for id in [limit, engine.config().vocab_size as u32, u32::MAX] {
        let mut drafter = Guesser(|_: History, count: usize| vec![id; count]);
        let generation = run(&mut engine, &greedy(&prompt, 8), &mut drafter, 3);
        assert_eq!(generation.tokens, output[..8]);
        assert!(generation.rounds.iter().all(|round| round.drafted == 0));
    }
}

/// One that fails ends the generation with its error, and its sequence is free again.
#[test]
fn one_that_fails_leaves_no_sequence_behind() {
    struct Failing;
    impl Proposer for Failing {
        fn propose(
            &mut self,
            _: &mut dyn talon::model::Backend,
            _: History,
            _: usize,
        ) -> talon::error::Result<Vec<talon::spec::Guess>> {
            Err(talon::error::Error::runtime("no idea"))
        }
    }
    let mut engine = tiny_engine(None, 512);
    let request = greedy(&[1, 2, 3], 8);
    let plain = run_plain(&mut engine, &request).tokens;
    for _ in 0..3 {
        let mut policy = talon::spec::Policy::Fixed(3);
        let generation = engine.generate_with(&request, &mut Failing, &mut policy, |_| {
            Ok(talon::engine::Flow::Continue)
        });
        assert!(generation.is_err_and(|error| error.to_string().contains("no idea")));
        assert_eq!(run_plain(&mut engine, &request).tokens, plain);
    }
}
