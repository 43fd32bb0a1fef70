//! Promise: an output that ends inside an accepted chain ends exactly as the one-token path does:
//! the same tokens, finish reason, callbacks and kept logits, for an end of turn, a caller who has
//! seen enough, a stop string, the token limit and the context limit, at every place of a chain.

#[path = "common/engines.rs"]
mod engines;

use std::sync::Arc;

use engines::{
    Golden, Guesser, Random, bits, demo_engine, golden, greedy, load, oracle, repository_file,
    tiny_engine,
};
use talon::engine::{
    DraftChoice, Engine, Finish, Flow, Generation, LoadOptions, OutputText, Request, Sampling,
    TextModel,
};
use talon::error::Error;
use talon::spec::{History, Policy, Proposer};
use talon::text::Detokenizer;
use talon::weights::Source;

/// Three chains of 7 guesses, so that an end falls on each of their places.
const TOKENS: usize = 25;

/// All that a caller can see of a generation, but its times and rounds.
#[derive(Debug, PartialEq)]
struct Ending {
    tokens: Vec<u32>,
    finish: Finish,
    callbacks: Vec<u32>,
    logits: Vec<Vec<u32>>,
}

/// Generates with `flow` told the tokens seen so far.
fn end(
    engine: &mut Engine,
    request: &Request,
    proposer: &mut dyn Proposer,
    k: usize,
    flow: &mut dyn FnMut(&[u32]) -> Flow,
) -> (Ending, Generation) {
    let mut callbacks = Vec::new();
    let mut policy = Policy::Fixed(k);
    let generation = engine
        .generate_with(request, proposer, &mut policy, |token| {
            callbacks.push(token);
            Ok(flow(&callbacks))
        })
        .expect("the prompt runs");
    let (tokens, finish, logits) =
        (generation.tokens.clone(), generation.finish, bits(&generation));
    (Ending { tokens, finish, callbacks, logits }, generation)
}

fn go_on(_: &[u32]) -> Flow {
    Flow::Continue
}

/// The one-token path's ending, after it was compared with the endings of long chains.
fn assert_same_end(
    engine: &mut Engine,
    request: &Request,
    output: &[u32],
    mut flow: impl FnMut(&[u32]) -> Flow,
) -> Ending {
    let mut silent = Guesser(|_: History, _| Vec::new());
    let (plain, _) = end(engine, request, &mut silent, 0, &mut flow);
    // The cache holds the prompt and every token but the last: that is what was run.
    let run = request.prompt.len() + plain.tokens.len().max(1) - 1;
    assert_eq!(plain.logits.len(), if request.keep_logits { run } else { 0 });
    for k in [3, 7] {
        let mut oracle = oracle(request.prompt, output);
        let (ending, generation) = end(engine, request, &mut oracle, k, &mut flow);
        assert!(ending == plain, "k = {k}:\n{ending:?}\nnot\n{plain:?}");
        let tokens: usize = generation.rounds.iter().map(|round| round.tokens).sum();
        assert_eq!(tokens, plain.tokens.len().max(1) - 1, "k = {k}");
        // Chains were in use: every round but the last gave k + 1 tokens.
        let rounds = generation.rounds.iter().rev().skip(1);
        assert!(rounds.clone().all(|round| round.tokens == k + 1), "k = {k}");
    }
    plain
}

fn tiny_prompt() -> Vec<u32> {
    let mut random = Random(4);
    (0..20).map(|_| random.below(512) as u32).collect()
}

/// A request, its output without an end, and all tokens of the output different.
fn different_tokens(engine: &mut Engine, prompt: &[u32]) -> (Sampling, Vec<u32>) {
    let seeds = 0..1000;
    let hot = |seed| Sampling { temperature: 1.0, seed, ..Sampling::GREEDY };
    let mut candidates = seeds.map(|seed| {
        let request = Request { sampling: hot(seed), ..greedy(prompt, TOKENS) };
        (hot(seed), engines::run_plain(engine, &request).tokens)
    });
    let differ = |tokens: &[u32]| {
        let different: std::collections::HashSet<&u32> = tokens.iter().collect();
        different.len() == tokens.len()
    };
    candidates.find(|(_, tokens)| differ(tokens)).expect("an output without repetition")
}

/// Calls `check` for greedy and sampled requests, with and without logits.
fn for_each_request(check: impl Fn(&mut Engine, &Request, &[u32])) {
    let mut engine = tiny_engine(None, 512);
    let prompt = tiny_prompt();
    let hot = Sampling { temperature: 0.9, seed: 2, ..Sampling::GREEDY };
    for sampling in [Sampling::GREEDY, hot] {
        let request = Request { sampling, ..greedy(&prompt, TOKENS) };
        let output = engines::run_plain(&mut engine, &request).tokens;
        for keep_logits in [false, true] {
            check(&mut engine, &Request { keep_logits, ..request.clone() }, &output);
        }
    }
}

#[test]
fn token_limit_at_every_place() {
    for_each_request(|engine, request, output| {
        for max_tokens in 0..=TOKENS {
            let request = Request { max_tokens, ..request.clone() };
            let ending = assert_same_end(engine, &request, output, go_on);
            assert_eq!(ending.tokens, output[..max_tokens]);
            assert_eq!(ending.callbacks, output[..max_tokens]);
            assert_eq!(ending.finish, Finish::Length);
        }
    });
}

#[test]
fn the_caller_stops_at_every_place() {
    for_each_request(|engine, request, output| {
        for place in 1..=TOKENS {
            let enough = |seen: &[u32]| match seen.len() == place {
                true => Flow::Stop,
                false => Flow::Continue,
            };
            let ending = assert_same_end(engine, request, output, enough);
            assert_eq!(ending.tokens, output[..place]);
            assert_eq!(ending.callbacks, output[..place]);
            assert_eq!(ending.finish, Finish::Stop);
        }
    });
}

#[test]
fn end_of_turn_at_every_place() {
    let mut engine = tiny_engine(None, 512);
    let prompt = tiny_prompt();
    let (sampling, output) = different_tokens(&mut engine, &prompt);
    for place in 1..=TOKENS {
        let stop_ids = [511, output[place - 1], 510];
        let stop_ids: Vec<u32> =
            stop_ids.into_iter().filter(|id| !output[..place - 1].contains(id)).collect();
        for keep_logits in [false, true] {
            let request =
                Request { sampling, stop_ids: &stop_ids, keep_logits, ..greedy(&prompt, TOKENS) };
            let ending = assert_same_end(&mut engine, &request, &output, go_on);
            assert_eq!(ending.tokens, output[..place]);
            // The end of turn is no text.
            assert_eq!(ending.callbacks, output[..place - 1]);
            assert_eq!(ending.finish, Finish::Stop);
        }
    }
}

#[test]
fn context_limit_at_every_place() {
    let prompt = tiny_prompt();
    let output = engines::run_plain(&mut tiny_engine(None, 512), &greedy(&prompt, TOKENS)).tokens;
    // The last token needs no room in the cache.
    for room in 0..TOKENS {
        let source = Source::Directory(repository_file("tests/fixtures/tiny-random"));
        let context = Some(prompt.len() + room);
        let mut engine = load(source, &LoadOptions { context, ..LoadOptions::default() });
        for keep_logits in [false, true] {
            // Both limits at the same place, and the context alone.
            for max_tokens in [room + 1, 1000] {
                let request = Request { keep_logits, ..greedy(&prompt, max_tokens) };
                let ending = assert_same_end(&mut engine, &request, &output, go_on);
                assert_eq!(ending.tokens, output[..room + 1]);
                assert_eq!(ending.finish, Finish::Length);
            }
        }
    }
}

/// The text up to a stop string, which may end within a token, and how it was come by.
fn text_until(
    engine: &mut Engine,
    text: &Arc<TextModel>,
    request: &Request,
    stop: &str,
    proposer: &mut dyn Proposer,
    k: usize,
) -> (String, Ending) {
    let mut written = String::new();
    let stops = vec![stop.to_owned()];
    let mut output = OutputText::new(text, stops, false).expect("a stop string");
    let mut flow = |seen: &[u32]| {
        let (split, stopped) = output.push(seen[seen.len() - 1]);
        written += &split.answer;
        if stopped { Flow::Stop } else { Flow::Continue }
    };
    let (ending, _) = end(engine, request, proposer, k, &mut flow);
    written += &output.finish().answer;
    (written, ending)
}

#[test]
fn stop_string_at_every_place() {
    let mut engine = demo_engine(DraftChoice::None, 1);
    let text = engine.text().expect("the demo has a tokenizer");
    let Golden { prompt, greedy: output, .. } = golden("text-3");
    let mut detokenizer = Detokenizer::new(text.tokenizer());
    let whole: String = output[..16].iter().map(|token| detokenizer.push(*token)).collect();
    let request = greedy(&prompt, 18);
    let mut lengths = std::collections::BTreeSet::new();
    // Stop strings of three characters that end all over the text.
    let ends: Vec<usize> = whole.char_indices().map(|(at, c)| at + c.len_utf8()).collect();
    for window in ends.windows(4).step_by(2) {
        let stop = &whole[window[0]..window[3]];
        let mut silent = Guesser(|_: History, _| Vec::new());
        let plain = text_until(&mut engine, &text, &request, stop, &mut silent, 0);
        assert_eq!(plain.1.finish, Finish::Stop, "{stop:?}");
        assert!(whole.starts_with(&plain.0) && !plain.0.contains(stop), "{stop:?}: {plain:?}");
        let mut oracle = oracle(&prompt, &output);
        let chain = text_until(&mut engine, &text, &request, stop, &mut oracle, 7);
        assert_eq!(chain, plain, "{stop:?}");
        lengths.insert(plain.1.tokens.len());
    }
    // Ends fell on all places of a chain.
    assert!(lengths.len() >= 9, "{lengths:?}");
}

/// An error of the caller ends the generation inside a chain; the sequence is free again.
#[test]
fn the_callers_error_at_every_place() {
    let mut engine = tiny_engine(None, 512);
    let prompt = tiny_prompt();
    let request = greedy(&prompt, TOKENS);
    let output = engines::run_plain(&mut engine, &request).tokens;
    for place in 1..=TOKENS {
        let mut seen = 0;
        let generation = engine.generate_with(
            &request,
            &mut oracle(&prompt, &output),
            &mut Policy::Fixed(7),
            |_| {
                seen += 1;
                if seen == place {
                    Err(Error::runtime("the pipe is closed"))
                } else {
                    Ok(Flow::Continue)
                }
            },
        );
        assert!(generation.is_err_and(|error| error.to_string().contains("the pipe is closed")));
        assert_eq!(seen, place);
        let again = engines::run(&mut engine, &request, &mut oracle(&prompt, &output), 7);
        assert_eq!(again.tokens, output);
    }
}
