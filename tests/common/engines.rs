//! What tests of the decode loop share: engines, golden prompts, requests, and drafters that are
//! told what to guess.

// Every test binary compiles this module and uses only a part of it.
#![allow(dead_code)]

// Both files of this folder use it, and some tests use both.
#[allow(clippy::duplicate_mod)]
mod repository;

use serde_json::Value;
use talon::engine::{DraftChoice, Engine, Flow, Generation, LoadOptions, Request, Sampling};
use talon::error::Result;
use talon::model::Backend;
use talon::spec::{Guess, History, Policy, Proposer};
use talon::weights::{Source, demo};

/// What the environment variable TALON_SOAK multiplies the tokens or cases of a test by.
pub fn soak() -> usize {
    std::env::var("TALON_SOAK").map_or(1, |times| times.parse().expect("TALON_SOAK is a number"))
}

pub use repository::repository as repository_file;

pub fn load(source: Source, options: &LoadOptions) -> Engine {
    Engine::load(source, options, &|_, _| {}).expect("the checkpoint loads")
}

/// The demo model with one of its drafters.
pub fn demo_engine(draft: DraftChoice, tp: usize) -> Engine {
    load(demo(), &LoadOptions { tp: Some(tp), draft, ..LoadOptions::default() })
}

/// The random model of 512 tokens, which attends to 8 positions; with one of its random heads.
pub fn tiny_engine(head: Option<&str>, context: usize) -> Engine {
    let draft = match head {
        Some(head) => DraftChoice::Directory(repository_file("tests/fixtures/eagle3").join(head)),
        None => DraftChoice::None,
    };
    let source = Source::Directory(repository_file("tests/fixtures/tiny-random"));
    load(source, &LoadOptions { draft, context: Some(context), ..LoadOptions::default() })
}

pub fn read_json(path: &str) -> Value {
    let bytes = std::fs::read(repository_file(path)).expect("a committed file");
    serde_json::from_slice(&bytes).expect("JSON")
}

pub fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("a list of ids").iter();
    ids.map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// A prompt and what the model answers greedily.
pub struct Golden {
    pub id: String,
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
}

/// The 24 golden prompts with 64 tokens each; ends of turn are ignored.
pub fn goldens() -> Vec<Golden> {
    let file = read_json("demo/golden/greedy.json");
    let prompts = file["prompts"].as_array().expect("a list of prompts").iter();
    let golden = |prompt: &Value| Golden {
        id: prompt["id"].as_str().expect("a name").to_owned(),
        prompt: ids(&prompt["prompt_ids"]),
        greedy: ids(&prompt["greedy_ids"]),
    };
    prompts.map(golden).collect()
}

pub fn golden(id: &str) -> Golden {
    goldens().into_iter().find(|golden| golden.id == id).expect("a golden of that name")
}

/// The prompt of 603 tokens, of which the demo's indexer selects 256.
pub fn long_golden() -> Golden {
    let file = read_json("demo/golden/indexer.json");
    let (prompt, greedy) = (ids(&file["prompt_ids"]), ids(&file["greedy_ids"]));
    Golden { id: "indexer".to_owned(), prompt, greedy }
}

pub fn greedy(prompt: &[u32], max_tokens: usize) -> Request<'_> {
    Request {
        prompt,
        max_tokens,
        sampling: Sampling::GREEDY,
        stop_ids: &[],
        keep_logits: false,
        speculate: true,
    }
}

/// Generates with chains of `guesses`; 0 is the one-token path.
pub fn run(
    engine: &mut Engine,
    request: &Request,
    proposer: &mut dyn Proposer,
    guesses: usize,
) -> Generation {
    let mut policy = Policy::Fixed(guesses);
    engine
        .generate_with(request, proposer, &mut policy, |_| Ok(Flow::Continue))
        .expect("the prompt runs")
}

/// As [`run`], one token at a time.
pub fn run_plain(engine: &mut Engine, request: &Request) -> Generation {
    run(engine, request, &mut Guesser(|_: History, _| Vec::new()), 0)
}

pub fn accepted(generation: &Generation) -> Vec<usize> {
    generation.rounds.iter().map(|round| round.accepted).collect()
}

/// Guesses accepted and tokens that came out in a round.
pub type Accepted = (usize, usize);

pub fn accepted_and_tokens(generation: &Generation) -> Vec<Accepted> {
    generation.rounds.iter().map(|round| (round.accepted, round.tokens)).collect()
}

/// Bits of the logits, since -0 and 0 or two NaNs must not pass for each other.
pub fn bits(generation: &Generation) -> Vec<Vec<u32>> {
    let rows = generation.logits.iter();
    rows.map(|row| row.iter().map(|logit| logit.to_bits()).collect()).collect()
}

/// Guesses what a function of the history and the number of guesses says.
pub struct Guesser<F>(pub F);

impl<F: FnMut(History, usize) -> Vec<u32>> Proposer for Guesser<F> {
    fn propose(
        &mut self,
        _backend: &mut dyn Backend,
        history: History,
        count: usize,
    ) -> Result<Vec<Guess>> {
        let guess = |token: u32| Guess { token, probability: 1.0 };
        Ok((self.0)(history, count).into_iter().map(guess).collect())
    }
}

/// What follows the history in `prompt` + `output`, however much is left.
pub fn truth<'a>(prompt: &[u32], output: &'a [u32], history: History) -> &'a [u32] {
    &output[(history.tokens.len() - prompt.len()).min(output.len())..]
}

/// Knows the output in advance.
pub fn oracle(prompt: &[u32], output: &[u32]) -> impl Proposer {
    let (prompt, output) = (prompt.to_vec(), output.to_vec());
    Guesser(move |history: History, count: usize| {
        truth(&prompt, &output, history).iter().copied().take(count).collect()
    })
}

/// splitmix64, so that a failure can be run again.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}
