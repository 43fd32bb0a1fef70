//! Promise: a row's logits depend on its own sequence alone, bit for bit, never on how the prompt
//! was cut into steps or on the rows of other sequences in the same step (DESIGN §1).

use std::path::Path;

use proptest::prelude::*;
use talon::engine::{Engine, LoadOptions, Session};
use talon::model::{Output, RowResult};
use talon::weights::{Source, demo};

const PROMPT_LEN: usize = 40;

fn load(source: Source, tp: usize, prefill_chunk: usize) -> Engine {
    let options = LoadOptions {
        tp: Some(tp),
        prefill_chunk,
        parallel: 4,
        context: Some(512),
        ..LoadOptions::default()
    };
    Engine::load(source, &options, &|_, _| {}).expect("the fixture loads")
}

/// The random model selects 8 of its positions, so chunks cut through an active sparse path.
fn random_model() -> Source {
    Source::Directory(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-random"))
}

fn prompt(vocabulary: u32, seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) ^ seed) % vocabulary).collect()
}

/// Bits of the logits, since -0 and 0 or two NaNs must not pass for each other.
fn bits(results: &[RowResult]) -> Vec<Vec<u32>> {
    results
        .iter()
        .map(|result| result.logits.iter().map(|logit| logit.to_bits()).collect())
        .collect()
}

fn run(engine: &mut Engine, session: &mut Session, tokens: &[u32]) -> Vec<Vec<u32>> {
    bits(&engine.extend(session, tokens, |_| Output::Logits).expect("the tokens run"))
}

/// Runs `tokens` cut at `cuts`, each piece a call of its own.
fn run_in_pieces(engine: &mut Engine, tokens: &[u32], cuts: &[usize]) -> Vec<Vec<u32>> {
    let mut session = engine.session().expect("a free sequence");
    let mut logits = Vec::new();
    let mut start = 0;
    for end in cuts.iter().copied().chain([tokens.len()]) {
        logits.extend(run(engine, &mut session, &tokens[start..end]));
        start = end;
    }
    logits
}

fn any_split_gives_the_same_bits(source: fn() -> Source, tp: usize, cases: u32) {
    let mut one_step = load(source(), tp, 512);
    let vocabulary = one_step.limits().vocab_limit as u32;
    let tokens = prompt(vocabulary, 7, PROMPT_LEN);
    let whole = run_in_pieces(&mut one_step, &tokens, &[]);
    let single: Vec<usize> = (1..PROMPT_LEN).collect();
    assert!(run_in_pieces(&mut one_step, &tokens, &single) == whole, "one token a step differs");
    for chunk in [1, 7, 16] {
        let mut chunked = load(source(), tp, chunk);
        assert!(run_in_pieces(&mut chunked, &tokens, &[]) == whole, "chunk {chunk} differs");
    }
    let engine = std::cell::RefCell::new(one_step);
    let splits = prop::collection::btree_set(1..PROMPT_LEN, 0..6);
    proptest!(ProptestConfig::with_cases(cases), |(cuts in splits)| {
        let cuts: Vec<usize> = cuts.into_iter().collect();
        let pieces = run_in_pieces(&mut engine.borrow_mut(), &tokens, &cuts);
        prop_assert!(pieces == whole, "cut at {cuts:?}");
    });
}

#[test]
fn any_split_of_the_demo_prompt_gives_the_same_bits() {
    any_split_gives_the_same_bits(demo, 1, 8);
}

#[test]
fn any_split_gives_the_same_bits_on_two_ranks() {
    any_split_gives_the_same_bits(demo, 2, 4);
}

#[test]
fn any_split_gives_the_same_bits_with_sparse_attention() {
    any_split_gives_the_same_bits(random_model, 1, 32);
}

/// Decodes one sequence alone and among others of other lengths and contents.
fn companions_change_nothing(source: Source, tp: usize) {
    let mut engine = load(source, tp, 64);
    let vocabulary = engine.limits().vocab_limit as u32;
    let tokens = prompt(vocabulary, 7, PROMPT_LEN);
    let (head, tail) = tokens.split_at(20);

    let mut session = engine.session().expect("a free sequence");
    run(&mut engine, &mut session, head);
    let alone: Vec<Vec<u32>> =
        tail.iter().flat_map(|token| run(&mut engine, &mut session, &[*token])).collect();
    drop(session);

    let mut session = engine.session().expect("a free sequence");
    let mut long = engine.session().expect("a free sequence");
    let mut short = engine.session().expect("a free sequence");
    run(&mut engine, &mut long, &prompt(vocabulary, 99, 70));
    run(&mut engine, &mut session, head);
    run(&mut engine, &mut short, &prompt(vocabulary, 3, 2));
    let mut together = Vec::new();
    for (i, token) in tail.iter().enumerate() {
        let other = i as u32 % vocabulary;
        // The row changes its place among the others from step to step.
        let mut rows = [(&mut long, other), (&mut session, *token), (&mut short, *token)];
        let place = [1, 0, 2][i % 3];
        rows.swap(1, place);
        let results = engine.step_together(&mut rows, Output::Logits).expect("the rows run");
        together.push(bits(&results).swap_remove(place));
    }
    assert!(together == alone, "rows beside others differ from rows alone");
}

#[test]
fn companions_change_nothing_in_the_demo_model() {
    companions_change_nothing(demo(), 1);
}

#[test]
fn companions_change_nothing_on_two_ranks_with_sparse_attention() {
    companions_change_nothing(random_model(), 2);
}
