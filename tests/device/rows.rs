//! A row's logits depend on its own sequence alone, bit for bit: not on the number of rows of its
//! step, on its place among them, on companions, on a longer sequence that puts the step on the
//! sparse path, on how the prompt was cut, or on wrong guesses that were there before.

use talon::engine::{Engine, Flow, LoadOptions};
use talon::error::Result;
use talon::model::{Backend, Output, Row, RowResult, Step};
use talon::spec::{Guess, History, Policy, Proposer};
use talon::weights::{Source, demo};

use crate::engines::{Random, greedy, soak};
use crate::{load, tiny, turn};

/// Sequences at a time.
const PARALLEL: usize = 16;
/// Tokens of a sequence: in both models beyond the positions that the indexer selects.
const CONTEXT: usize = 320;

/// Ids below which all are tokens, and positions that the indexer selects.
struct Model {
    engine: Engine,
    vocabulary: usize,
    selected: usize,
}

fn model(source: Source, prefill_chunk: usize) -> Model {
    let options = LoadOptions {
        context: Some(CONTEXT),
        parallel: PARALLEL,
        prefill_chunk,
        ..LoadOptions::default()
    };
    let engine = load(source, options);
    let (vocabulary, selected) = (engine.limits().vocab_limit, engine.config().index_topk);
    assert!(selected < CONTEXT);
    Model { engine, vocabulary, selected }
}

/// Bits of the logits, since -0 and 0 or two NaNs must not pass for each other.
fn bits(result: &RowResult) -> Vec<u32> {
    result.logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Hands the engine's backend to a function: a proposer is given it.
fn with_backend(engine: &mut Engine, work: impl FnMut(&mut dyn Backend)) {
    struct Borrow<F>(F);
    impl<F: FnMut(&mut dyn Backend)> Proposer for Borrow<F> {
        fn propose(
            &mut self,
            backend: &mut dyn Backend,
            _: History,
            _: usize,
        ) -> Result<Vec<Guess>> {
            (self.0)(backend);
            Ok(Vec::new())
        }
    }
    // Two tokens after the prompt leave room for one guess, once. What the generation itself does
    // afterwards is of no interest.
    let mut calls = 0;
    let mut work = work;
    let mut borrow = Borrow(|backend: &mut dyn Backend| {
        calls += 1;
        work(backend);
    });
    engine
        .generate_with(&greedy(&[1], 3), &mut borrow, &mut Policy::Fixed(1), |_| Ok(Flow::Continue))
        .expect("the steps run");
    assert_eq!(calls, 1);
}

/// A sequence, and what each of its rows gives alone.
struct Timeline {
    tokens: Vec<u32>,
    logits: Vec<Vec<u32>>,
    choices: Vec<u32>,
}

impl Timeline {
    /// Runs the tokens one row a step.
    fn alone(backend: &mut dyn Backend, tokens: Vec<u32>, vocabulary: usize) -> Self {
        let mut timeline = Self { tokens, logits: Vec::new(), choices: Vec::new() };
        for position in 0..timeline.tokens.len() {
            let row = timeline.row(3, position, Output::Logits);
            let results = backend.step(Step { rows: vec![row] }).expect("a step");
            let result = &results[0];
            let real = &result.logits[..vocabulary];
            assert!(real.iter().all(|logit| logit.is_finite()));
            let best = real.iter().copied().fold(f32::MIN, f32::max);
            let first = real.iter().position(|logit| *logit == best).expect("the largest");
            assert_eq!(result.argmax as usize, first, "arg-max at position {position}");
            timeline.logits.push(bits(result));
            timeline.choices.push(result.argmax);
        }
        timeline
    }

    fn row(&self, sequence: usize, position: usize, output: Output) -> Row {
        Row { sequence, first: 0, position, token: self.tokens[position], output }
    }

    fn check(&self, position: usize, output: Output, result: &RowResult, what: &str) {
        assert_eq!(result.argmax, self.choices[position], "position {position}: arg-max, {what}");
        if output == Output::Logits {
            assert!(bits(result) == self.logits[position], "position {position}: logits, {what}");
        }
    }
}

fn random_tokens(random: &mut Random, vocabulary: usize, len: usize) -> Vec<u32> {
    (0..len).map(|_| random.below(vocabulary) as u32).collect()
}

/// Runs a step whose rows are known; every one of them is checked.
fn run_known(
    backend: &mut dyn Backend,
    timelines: &[Timeline],
    rows: &[(usize, usize, Output)],
    what: &str,
) {
    let step = rows.iter().map(|(sequence, position, output)| {
        timelines[*sequence].row(*sequence, *position, *output)
    });
    let results = backend.step(Step { rows: step.collect() }).expect("a step");
    let wanted: Vec<usize> = (0..rows.len()).filter(|row| rows[*row].2 != Output::None).collect();
    assert_eq!(results.iter().map(|result| result.row).collect::<Vec<_>>(), wanted, "{what}");
    for result in &results {
        let (sequence, position, output) = rows[result.row];
        timelines[sequence].check(position, output, result, what);
    }
}

/// Lengths on both sides of what the indexer selects.
fn lengths(selected: usize) -> [usize; PARALLEL] {
    let long = (selected + 44).min(CONTEXT);
    let short = selected.min(60);
    std::array::from_fn(|sequence| match sequence % 4 {
        0 => long - sequence,
        1 => short / 2 + sequence,
        2 => selected - sequence % 3,
        _ => 1 + sequence,
    })
}

fn timelines(backend: &mut dyn Backend, vocabulary: usize, selected: usize) -> Vec<Timeline> {
    let mut random = Random(17);
    let tokens = lengths(selected).map(|len| random_tokens(&mut random, vocabulary, len));
    tokens.into_iter().map(|tokens| Timeline::alone(backend, tokens, vocabulary)).collect()
}

/// Steps of n rows of one sequence, from the short context into the long one.
fn rows_a_step_change_nothing(source: Source) {
    let Model { mut engine, vocabulary, selected } = model(source, 64);
    with_backend(&mut engine, |backend| {
        let tokens = random_tokens(&mut Random(5), vocabulary, (selected + 50).max(100));
        let timeline = [Timeline::alone(backend, tokens, vocabulary)];
        let len = timeline[0].tokens.len();
        for rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 33, 64] {
            for start in (0..len).step_by(rows) {
                let step: Vec<_> =
                    (start..(start + rows).min(len)).map(|at| (0, at, Output::Logits)).collect();
                run_known(backend, &timeline, &step, &format!("{rows} rows a step"));
            }
        }
        println!("{len} positions, bits equal for 1 to 64 rows a step");
    });
}

#[test]
fn rows_a_step_change_nothing_demo() {
    let Some(_turn) = turn() else { return };
    rows_a_step_change_nothing(demo());
}

#[test]
fn rows_a_step_change_nothing_random_model() {
    let Some(_turn) = turn() else { return };
    rows_a_step_change_nothing(tiny());
}

/// Decodes 1 to 16 sequences side by side, their rows in changing order. Some are short and some
/// beyond what the indexer selects, so short rows also run on the sparse path.
fn companions_change_nothing(source: Source) {
    let Model { mut engine, vocabulary, selected } = model(source, 64);
    with_backend(&mut engine, |backend| {
        let timelines = timelines(backend, vocabulary, selected);
        let mut random = Random(23);
        let mut checked = 0;
        for beside in [1, 2, 3, 4, 5, 8, 16] {
            // Each sequence anew, up to its last eight positions, in steps of 16 rows.
            let mut group: Vec<usize> = (0..PARALLEL).collect();
            shuffle(&mut random, &mut group);
            group.truncate(beside);
            for sequence in &group {
                let stop = timelines[*sequence].tokens.len().saturating_sub(8);
                for start in (0..stop).step_by(16) {
                    let rows: Vec<_> = (start..(start + 16).min(stop))
                        .map(|at| (*sequence, at, Output::None))
                        .collect();
                    run_known(backend, &timelines, &rows, "prefill");
                }
            }
            for turn in 0..8 {
                shuffle(&mut random, &mut group);
                let row = |sequence: &usize| {
                    let len = timelines[*sequence].tokens.len();
                    let at = len.saturating_sub(8) + turn;
                    (at < len).then_some((*sequence, at, Output::Logits))
                };
                let rows: Vec<_> = group.iter().filter_map(row).collect();
                if !rows.is_empty() {
                    run_known(backend, &timelines, &rows, &format!("{beside} sequences"));
                }
                checked += rows.len();
            }
        }
        println!("{checked} rows beside others, bits equal");
    });
}

#[test]
fn companions_change_nothing_demo() {
    let Some(_turn) = turn() else { return };
    companions_change_nothing(demo());
}

#[test]
fn companions_change_nothing_random_model() {
    let Some(_turn) = turn() else { return };
    companions_change_nothing(tiny());
}

fn shuffle<T>(random: &mut Random, items: &mut [T]) {
    for at in (1..items.len()).rev() {
        items.swap(at, random.below(at + 1));
    }
}

/// Steps of random runs of rows of random sequences, mixed with each other, some of them wrong
/// guesses that the next step overwrites; any output may be asked for.
fn random_steps_change_nothing(source: Source) {
    let Model { mut engine, vocabulary, selected } = model(source, 64);
    with_backend(&mut engine, |backend| {
        let timelines = timelines(backend, vocabulary, selected);
        let (mut steps, mut checked) = (0, 0);
        for case in 0..2 * soak() as u64 {
            let mut random = Random(case);
            let mut done = [0; PARALLEL];
            while let Some(left) = unfinished(&timelines, &done) {
                let mut chosen = left;
                shuffle(&mut random, &mut chosen);
                chosen.truncate(1 + random.below(6));
                let (mut rows, mut kinds) = (Vec::new(), Vec::new());
                for sequence in chosen {
                    let from = done[sequence];
                    let len = timelines[sequence].tokens.len();
                    let right = (1 + random.below(7)).min(len - from);
                    for position in from..from + right {
                        let output = [Output::Logits, Output::ArgMax, Output::None]
                            [random.below(6) / 3 + random.below(2)];
                        rows.push(timelines[sequence].row(sequence, position, output));
                        kinds.push(true);
                    }
                    done[sequence] += right;
                    let wrong = if random.below(3) == 0 { random.below(5) } else { 0 };
                    for position in from + right..(from + right + wrong).min(CONTEXT) {
                        let token = random.below(vocabulary) as u32;
                        let output = Output::Logits;
                        rows.push(Row { sequence, first: 0, position, token, output });
                        kinds.push(false);
                    }
                }
                let order = interleaved(&mut random, &rows);
                let rows: Vec<Row> = order.iter().map(|at| rows[*at]).collect();
                let results = backend.step(Step { rows: rows.clone() }).expect("a step");
                for result in results.iter().filter(|result| kinds[order[result.row]]) {
                    let row = rows[result.row];
                    let what = format!("case {case}, step {steps}, {} rows", rows.len());
                    timelines[row.sequence].check(row.position, row.output, result, &what);
                    checked += 1;
                }
                steps += 1;
            }
        }
        println!("{checked} rows in {steps} random steps, bits equal");
    });
}

/// Sequences with tokens left; `None` if there are none.
fn unfinished(timelines: &[Timeline], done: &[usize]) -> Option<Vec<usize>> {
    let left = (0..timelines.len()).filter(|at| done[*at] < timelines[*at].tokens.len());
    Some(left.collect::<Vec<_>>()).filter(|left| !left.is_empty())
}

/// A random order that keeps each sequence's rows at rising positions.
fn interleaved(random: &mut Random, rows: &[Row]) -> Vec<usize> {
    let mut places: Vec<usize> = (0..rows.len()).collect();
    shuffle(random, &mut places);
    // Each sequence's rows take the places that were drawn for them in their own order.
    let mut order = vec![0; rows.len()];
    let mut sequences: Vec<usize> = rows.iter().map(|row| row.sequence).collect();
    sequences.sort_unstable();
    sequences.dedup();
    for sequence in sequences {
        let own: Vec<usize> = (0..rows.len()).filter(|at| rows[*at].sequence == sequence).collect();
        let mut theirs: Vec<usize> = own.iter().map(|at| places[*at]).collect();
        theirs.sort_unstable();
        for (at, place) in own.into_iter().zip(theirs) {
            order[place] = at;
        }
    }
    order
}

#[test]
fn random_steps_change_nothing_demo() {
    let Some(_turn) = turn() else { return };
    random_steps_change_nothing(demo());
}

#[test]
fn random_steps_change_nothing_random_model() {
    let Some(_turn) = turn() else { return };
    random_steps_change_nothing(tiny());
}

/// The engine's own cuts of a prompt.
fn prefill_chunks_change_nothing(source: fn() -> Source) {
    let mut whole: Option<Vec<Vec<u32>>> = None;
    for chunk in [1, 3, 7, 16, 64] {
        let Model { mut engine, vocabulary, selected } = model(source(), chunk);
        let tokens = random_tokens(&mut Random(11), vocabulary, selected + 40);
        let mut session = engine.session().expect("a free sequence");
        let results = engine.extend(&mut session, &tokens, |_| Output::Logits).expect("they run");
        assert_eq!(results.len(), tokens.len());
        let logits: Vec<Vec<u32>> = results.iter().map(bits).collect();
        let first = whole.get_or_insert_with(|| logits.clone());
        let differs = first.iter().zip(&logits).position(|(a, b)| a != b);
        assert_eq!(differs, None, "position where chunks of {chunk} differ from chunks of 1");
    }
    println!("{} positions, bits equal for chunks of 1 to 64", whole.map_or(0, |rows| rows.len()));
}

#[test]
fn prefill_chunks_change_nothing_demo() {
    let Some(_turn) = turn() else { return };
    prefill_chunks_change_nothing(demo);
}

#[test]
fn prefill_chunks_change_nothing_random_model() {
    let Some(_turn) = turn() else { return };
    prefill_chunks_change_nothing(tiny);
}
