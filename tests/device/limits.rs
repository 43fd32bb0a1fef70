//! What does not fit or is not there is refused in one line; what was loaded goes away; two models
//! on one GPU do not disturb each other.

use talon::engine::{BackendChoice, DraftChoice, Engine, Finish, LoadOptions};
use talon::error::{Error, Kind};
use talon::weights::demo;

use crate::engines::{Golden, golden, greedy, long_golden, oracle, run, run_plain};
use crate::ranks::on;
use crate::{device, load, tiny, try_load, turn};

/// Memory that may stay taken: what the driver keeps for the next module or graph.
pub const SLACK: usize = 64 << 20;

fn refused(engine: talon::error::Result<Engine>) -> Error {
    let Err(error) = engine else { panic!("it was loaded") };
    println!("{error}");
    assert_eq!(error.kind(), Kind::Input);
    assert_eq!(error.to_string().lines().count(), 1);
    error
}

fn assert_says(error: &Error, words: &[&str]) {
    for word in words {
        assert!(error.to_string().contains(word), "expected {word:?} in {error}");
    }
}

#[test]
fn a_full_context_ends_the_text() {
    let Some(_turn) = turn() else { return };
    let Golden { prompt, .. } = golden("chat-3");
    let mut roomy = load(demo(), LoadOptions::default());
    let expected = run_plain(&mut roomy, &greedy(&prompt, 40)).tokens;
    drop(roomy);
    // The last one writes to the last position; the caches end there.
    for room in [0, 1, 2, 7, 17] {
        let context = Some(prompt.len() + room);
        let mut engine = load(demo(), LoadOptions { context, ..LoadOptions::default() });
        for guesses in [0, 1, 3, 7] {
            let mut drafter = oracle(&prompt, &expected);
            let generation = run(&mut engine, &greedy(&prompt, 1000), &mut drafter, guesses);
            assert_eq!(generation.finish, Finish::Length);
            assert_eq!(generation.tokens, expected[..room + 1], "{room}, {guesses} guesses");
        }
        let long = [&prompt[..], &expected[..room + 1]].concat();
        let error = engine.generate(&greedy(&long, 1), |_| Ok(talon::engine::Flow::Continue));
        assert_says(&error.expect_err("too long"), &["do not fit the context", "--context"]);
    }
}

#[test]
fn a_context_that_does_not_fit_is_refused() {
    let Some((_turn, device)) = device() else { return };
    // At its first load, the process loads what the driver keeps.
    drop(load(demo(), LoadOptions::default()));
    let free = device.free_bytes().expect("free bytes");
    for context in [1 << 28, 1 << 30] {
        let options = LoadOptions { context: Some(context), ..LoadOptions::default() };
        let error = refused(try_load(demo(), options));
        let asked = format!("--context {context}");
        assert_says(&error, &["MiB short", &asked, "lower --context"]);
    }
    let options = LoadOptions { parallel: 1 << 16, ..LoadOptions::default() };
    assert_says(&refused(try_load(demo(), options)), &["MiB short"]);
    let lost = free.abs_diff(device.free_bytes().expect("free bytes"));
    assert!(lost <= SLACK, "{lost} bytes of memory came or went");
    drop(load(demo(), LoadOptions::default()));
}

#[test]
fn what_the_gpu_cannot_do_is_refused() {
    let Some((_turn, _device)) = device() else { return };
    let plain = LoadOptions::default;
    let error = refused(try_load(demo(), LoadOptions { gpus: on(&[99]), ..plain() }));
    assert_says(&error, &["--backend cuda", "no GPU 99", "GPU 0"]);
    let error = refused(try_load(demo(), LoadOptions { tp: Some(99), ..plain() }));
    assert_says(&error, &["--backend cuda", "--tp 99", "--devices 0,0"]);
    let error = refused(try_load(demo(), LoadOptions { draft: DraftChoice::Mtp, ..plain() }));
    assert_says(&error, &["--backend cuda", "--draft none"]);
}

/// `auto` takes the GPU, and the CPU where the GPU cannot be had.
#[test]
fn auto_takes_the_gpu_that_is_there() {
    let Some((_turn, _device)) = device() else { return };
    let auto = LoadOptions { backend: BackendChoice::Auto, ..LoadOptions::default() };
    for (device, name) in [(0, "cuda"), (99, "cpu")] {
        let options = LoadOptions { gpus: on(&[device]), ..auto.clone() };
        let engine = Engine::load(demo(), &options, &|_, _| {}).expect("the demo loads");
        assert_eq!(engine.backend_name(), name);
    }
}

#[test]
fn loading_and_dropping_returns_the_memory() {
    let Some((_turn, device)) = device() else { return };
    let Golden { prompt, .. } = golden("chat-3");
    let mut expected = None;
    let mut once = || {
        let mut engine = load(demo(), LoadOptions { parallel: 16, ..LoadOptions::default() });
        let held = device.free_bytes().expect("free bytes");
        let tokens = run_plain(&mut engine, &greedy(&prompt, 8)).tokens;
        assert_eq!(*expected.get_or_insert(tokens.clone()), tokens);
        held
    };
    once();
    let free = device.free_bytes().expect("free bytes");
    for _ in 0..20 {
        assert!(once() < free, "a loaded model takes memory");
    }
    let after = device.free_bytes().expect("free bytes");
    println!("{} MiB free before, {} MiB after 20 loads", free >> 20, after >> 20);
    assert!(free.abs_diff(after) <= SLACK, "{free} bytes were free, {after} are");
}

/// The prompts' tokens, alternating between the engines.
#[test]
fn two_models_on_one_gpu() {
    let Some(_turn) = turn() else { return };
    let Golden { prompt, greedy: tokens, .. } = long_golden();
    let prompts = [prompt, golden("tool-4").prompt];
    let noise: Vec<u32> = (0..40).map(|at| at * 12 + 5).collect();
    let mut one = load(demo(), LoadOptions::default());
    let expected = prompts.each_ref().map(|p| run_plain(&mut one, &greedy(p, tokens.len())).tokens);
    let mut two = load(demo(), LoadOptions::default());
    let mut three = load(tiny(), LoadOptions { context: Some(128), ..LoadOptions::default() });
    let other = run_plain(&mut three, &greedy(&noise, 32)).tokens;
    for _ in 0..3 {
        for (prompt, expected) in prompts.iter().zip(&expected) {
            for engine in [&mut one, &mut two] {
                let request = greedy(prompt, tokens.len());
                assert_eq!(run_plain(engine, &request).tokens, *expected);
            }
            assert_eq!(run_plain(&mut three, &greedy(&noise, 32)).tokens, other);
        }
    }
    drop(one);
    assert_eq!(run_plain(&mut two, &greedy(&prompts[0], tokens.len())).tokens, expected[0]);
}

/// Threads that load, run and drop models of their own at the same time: one that allocates must
/// not break the graphs that another is recording.
#[test]
fn models_on_threads() {
    let Some(_turn) = turn() else { return };
    let Golden { prompt, .. } = golden("chat-3");
    let once = || {
        let mut engine = load(demo(), LoadOptions::default());
        run_plain(&mut engine, &greedy(&prompt, 16)).tokens
    };
    let expected = once();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..3).for_each(|_| assert_eq!(once(), expected)));
        }
    });
}
