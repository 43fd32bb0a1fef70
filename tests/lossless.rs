//! Promise: greedy output with EAGLE-3 and with MTP, any number of guesses, fixed or adaptive, on 1,
//! 2 and 8 ranks, equals plain greedy output token for token; also where the indexer leaves
//! positions out, where the prompt is cut into chunks, and after a drafter has rested. And the
//! drafters live: a dead one would pass all of that.
//!
//! TALON_SOAK is the number of golden prompts, of 64 tokens each, that every combination of
//! drafter, ranks and guesses runs; 14 give 21,504 tokens for each drafter. At 1 the prompts are
//! shorter still.

#[path = "common/engines.rs"]
mod engines;

use engines::{
    Golden, Guesser, Random, accepted, bits, demo_engine, goldens, greedy, load, long_golden, run,
    run_plain, soak, tiny_engine, truth,
};
use talon::engine::{DraftChoice, Engine, Flow, Generation, LoadOptions, Request};
use talon::error::Result;
use talon::model::{Backend, Output};
use talon::spec::{Guess, History, ModelDrafter, Policy, Proposer, SpeculationStats};
use talon::weights::demo;

/// Fixed chains of 1 to 7, then as many as pay.
const CHAINS: [Option<usize>; 8] =
    [Some(1), Some(2), Some(3), Some(4), Some(5), Some(6), Some(7), None];

fn speculate(engine: &mut Engine, request: &Request, chain: Option<usize>) -> Generation {
    match chain {
        Some(guesses) => run(engine, request, &mut ModelDrafter::default(), guesses),
        None => engine.generate(request, |_| Ok(Flow::Continue)).expect("the prompt runs"),
    }
}

/// `tokens`: of a prompt, where TALON_SOAK does not ask for more.
fn output_is_plain(draft: &DraftChoice, tp: usize, tokens: usize) {
    let mut engine = demo_engine(draft.clone(), tp);
    let mut goldens = goldens();
    // Short prompts first.
    goldens.sort_by_key(|golden| golden.prompt.len());
    let (prompts, tokens) = if soak() == 1 { (1, tokens) } else { (soak(), 64) };
    let mut fixed = SpeculationStats::default();
    let mut total = 0;
    for (place, chain) in CHAINS.into_iter().enumerate() {
        // The adaptive policy first decodes plainly, to know what a plain step costs.
        let tokens = if chain.is_none() { tokens.max(16) } else { tokens };
        let mut drafted = 0;
        for i in 0..prompts {
            let Golden { id, prompt, greedy: expected } =
                &goldens[(place + tp + i) % goldens.len()];
            let generation = speculate(&mut engine, &greedy(prompt, tokens), chain);
            assert_eq!(generation.tokens, expected[..tokens], "{id}, {chain:?}, {tp} ranks");
            let stats = generation.stats();
            total += generation.tokens.len();
            drafted += stats.drafted.iter().sum::<usize>();
            if chain.is_some() {
                fixed.merge(&stats);
            }
        }
        assert!(drafted > 0, "no guess was made with {chain:?}");
    }
    let length = fixed.acceptance_length().expect("rounds");
    println!("{draft:?} on {tp} ranks: {total} tokens, {length:.2} a step with fixed chains");
    assert!(length > 1.2, "{draft:?} on {tp} ranks: {length} tokens a step");
}

macro_rules! on_ranks {
    ($($name:ident = $draft:ident, $tp:literal, $tokens:literal;)+) => {
        $(#[test]
        fn $name() {
            output_is_plain(&DraftChoice::$draft, $tp, $tokens);
        })+
    };
}

on_ranks! {
    eagle3_on_one_rank = Auto, 1, 24;
    eagle3_on_two_ranks = Auto, 2, 16;
    eagle3_on_eight_ranks = Auto, 8, 8;
    mtp_on_one_rank = Mtp, 1, 24;
    mtp_on_two_ranks = Mtp, 2, 16;
    mtp_on_eight_ranks = Mtp, 8, 8;
}

/// The model drafter, which rests where it is told to: it neither guesses nor follows the prompt.
struct Resting<F> {
    inner: ModelDrafter,
    rests: F,
}

impl<F: FnMut(History) -> bool> Proposer for Resting<F> {
    fn propose(
        &mut self,
        backend: &mut dyn Backend,
        history: History,
        count: usize,
    ) -> Result<Vec<Guess>> {
        match (self.rests)(history) {
            true => Ok(Vec::new()),
            false => self.inner.propose(backend, history, count),
        }
    }

    fn follow(&mut self, backend: &mut dyn Backend, history: History) -> Result<()> {
        match (self.rests)(history) {
            true => Ok(()),
            false => self.inner.follow(backend, history),
        }
    }
}

/// The demo attends to 256 of the 603 positions. A drafter that has followed the prompt, or one
/// that has `rested` so far and begins anew with the last positions.
fn long_prompt_is_plain(draft: DraftChoice, rested: bool) {
    let Golden { prompt, greedy: expected, .. } = long_golden();
    let mut engine = demo_engine(draft.clone(), 1);
    assert!(engine.config().index_topk < prompt.len());
    let rests = |history: History| rested && history.cached < prompt.len();
    let mut drafter = Resting { inner: ModelDrafter::default(), rests };
    let generation = run(&mut engine, &greedy(&prompt, expected.len()), &mut drafter, 3);
    assert_eq!(generation.tokens, expected, "{draft:?}");
    let length = generation.stats().acceptance_length().expect("rounds");
    println!("{draft:?}: {length:.2} tokens a step");
    assert!(length > 1.2, "{draft:?}: {length}");
}

#[test]
fn eagle3_after_a_long_prompt() {
    long_prompt_is_plain(DraftChoice::Auto, false);
}

#[test]
fn mtp_after_a_long_prompt_that_it_has_not_followed() {
    long_prompt_is_plain(DraftChoice::Mtp, true);
}

/// Rests for more tokens than the backend keeps features of, in the middle of the output.
fn woken_drafter_is_right_again(draft: DraftChoice) {
    const AWAKE: usize = 24;
    const REST: usize = 530;
    let mut engine = demo_engine(draft, 1);
    let Golden { prompt, .. } = engines::golden("text-0");
    let start = prompt.len() + AWAKE;
    let rests = |history: History| (start..start + REST).contains(&history.tokens.len());
    let mut drafter = Resting { inner: ModelDrafter::default(), rests };
    let tokens = AWAKE + REST + 40;
    let generation = run(&mut engine, &greedy(&prompt, tokens), &mut drafter, 3);
    let silent = generation.rounds.iter().filter(|round| round.drafted == 0).count();
    assert!(silent >= REST - 4, "it rested {silent} rounds");
    let woken = generation.rounds.iter().rev().take_while(|round| round.drafted > 0);
    let (rounds, tokens) = woken.fold((0, 0), |(n, sum), round| (n + 1, sum + round.tokens));
    println!("woken: {tokens} tokens in {rounds} steps");
    assert!(rounds > 0 && tokens as f64 > 1.2 * f64::from(rounds), "{tokens} in {rounds}");
    // Plain greedy output is that whose every token is the arg-max behind those before it; rows of
    // a prompt have the bits of one-token steps (tests/row_invariance.rs).
    let mut session = engine.session().expect("a free sequence");
    let all = [&prompt[..], &generation.tokens].concat();
    let results = engine.extend(&mut session, &all, |_| Output::ArgMax).expect("the tokens run");
    let behind = results[prompt.len() - 1..all.len() - 1].iter().map(|result| result.argmax);
    assert!(behind.eq(generation.tokens), "not the greedy output");
}

#[test]
fn eagle3_woken_after_a_rest() {
    woken_drafter_is_right_again(DraftChoice::Auto);
}

/// The cuts of the prompt change neither the text nor what is accepted.
fn chunks_change_nothing(draft: DraftChoice) {
    let Golden { prompt, greedy: expected, .. } = engines::golden("chat-3");
    let mut whole = None;
    for prefill_chunk in [512, 1, 7, 64] {
        let options = LoadOptions { prefill_chunk, draft: draft.clone(), ..LoadOptions::default() };
        let mut engine = load(demo(), &options);
        let generation = run(&mut engine, &greedy(&prompt, 20), &mut ModelDrafter::default(), 5);
        assert_eq!(generation.tokens, expected[..20], "chunk {prefill_chunk}");
        let rounds = accepted(&generation);
        assert_eq!(*whole.get_or_insert(rounds.clone()), rounds, "chunk {prefill_chunk}");
        assert!(rounds.iter().sum::<usize>() > 0);
    }
}

#[test]
fn chunks_of_the_prompt_change_nothing_for_eagle3() {
    chunks_change_nothing(DraftChoice::Auto);
}

#[test]
fn chunks_of_the_prompt_change_nothing_for_mtp() {
    chunks_change_nothing(DraftChoice::Mtp);
}

fn random_prompt(random: &mut Random, len: usize) -> Vec<u32> {
    (0..len).map(|_| random.below(512) as u32).collect()
}

/// The random model attends to 8 positions, its random heads to all. To the end of the context, so
/// that no cache is written beyond it.
#[test]
fn random_heads_are_lossless_on_the_sparse_path() {
    let heads = ["midlayer", "full-vocab", "mla", "eagle31", "wide"];
    for (seed, head) in (0..).zip(heads) {
        let mut engine = tiny_engine(Some(head), 100);
        let prompt = random_prompt(&mut Random(seed), 60);
        let plain = run_plain(&mut engine, &greedy(&prompt, 1000));
        assert_eq!(plain.tokens.len(), 41);
        for guesses in [1, 3, 7] {
            let generation =
                run(&mut engine, &greedy(&prompt, 1000), &mut ModelDrafter::default(), guesses);
            assert_eq!(generation.tokens, plain.tokens, "{head}, {guesses} guesses");
        }
    }
}

/// A row of a verify step selects its own positions: with right guesses before it and wrong ones
/// behind, its logits have the bits of a step of its own.
#[test]
fn rows_of_a_chain_have_their_own_selection() {
    let mut engine = tiny_engine(None, 512);
    let mut lengths = std::collections::BTreeSet::new();
    for case in 0..4 * soak() as u64 {
        let mut random = Random(case);
        let prompt = random_prompt(&mut random, 4 + 9 * case as usize % 60);
        let request = Request { keep_logits: true, ..greedy(&prompt, 48) };
        let plain = run_plain(&mut engine, &request);
        let mut drafter = Guesser(|history: History, count: usize| {
            let right = random.below(count + 1);
            let noise = |_| random.below(512) as u32;
            let known = truth(&prompt, &plain.tokens, history).iter().copied().take(right);
            let mut guesses: Vec<u32> = known.collect();
            guesses.extend((guesses.len()..count).map(noise));
            guesses
        });
        let chains = run(&mut engine, &request, &mut drafter, 7);
        assert_eq!(chains.tokens, plain.tokens, "case {case}");
        assert!(bits(&chains) == bits(&plain), "case {case}: logits differ");
        lengths.extend(accepted(&chains));
    }
    assert!(lengths.iter().copied().eq(0..=7), "{lengths:?}");
}

/// A drafter that rests for a few rounds now and then, with rows of guesses left in all caches.
#[test]
fn a_drafter_that_rests_now_and_then_is_lossless() {
    let mut engine = demo_engine(DraftChoice::Auto, 1);
    let Golden { prompt, greedy: expected, .. } = engines::golden("text-5");
    let mut random = Random(1);
    let rests = |_: History| random.below(3) == 0;
    let mut drafter = Resting { inner: ModelDrafter::default(), rests };
    let mut policy = Policy::Fixed(4);
    let generation = engine
        .generate_with(&greedy(&prompt, 48), &mut drafter, &mut policy, |_| Ok(Flow::Continue))
        .expect("the prompt runs");
    assert_eq!(generation.tokens, expected[..48]);
    let silent = generation.rounds.iter().filter(|round| round.drafted == 0).count();
    assert!(silent > 2 && generation.rounds.iter().any(|round| round.accepted > 0));
}
