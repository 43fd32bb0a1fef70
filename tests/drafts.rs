//! Promise: the demo's drafters draft what their goldens say, round by round, and their chains are
//! as long as they were measured to be.

use serde_json::Value;
use talon::engine::{DraftChoice, Engine, Flow, Generation, LoadOptions, Request, Sampling};
use talon::error::Result;
use talon::model::Backend;
use talon::spec::{Guess, History, ModelDrafter, Policy, Proposer};
use talon::weights::demo;

fn load(draft: DraftChoice, tp: usize) -> Engine {
    let options = LoadOptions { tp: Some(tp), draft, ..LoadOptions::default() };
    Engine::load(demo(), &options, &|_, _| {}).expect("the demo loads")
}

fn read(path: &str) -> Value {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    serde_json::from_slice(&std::fs::read(path).expect("a committed file")).expect("JSON")
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("a list of ids").iter();
    ids.map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// The model's drafter, with a record of what it guessed in each round.
#[derive(Default)]
struct Recorder {
    inner: ModelDrafter,
    drafts: Vec<Vec<u32>>,
}

impl Proposer for Recorder {
    fn propose(
        &mut self,
        backend: &mut dyn Backend,
        history: History,
        count: usize,
    ) -> Result<Vec<Guess>> {
        let guesses = self.inner.propose(backend, history, count)?;
        self.drafts.push(guesses.iter().map(|guess| guess.token).collect());
        Ok(guesses)
    }

    fn follow(&mut self, backend: &mut dyn Backend, history: History) -> Result<()> {
        self.inner.follow(backend, history)
    }
}

/// The generation, and what was guessed in its rounds.
fn generate(
    engine: &mut Engine,
    prompt: &[u32],
    max_tokens: usize,
    guesses: usize,
) -> (Generation, Vec<Vec<u32>>) {
    let request = Request {
        prompt,
        max_tokens,
        sampling: Sampling::GREEDY,
        stop_ids: &[],
        keep_logits: false,
        speculate: true,
    };
    let mut policy = Policy::Fixed(guesses);
    let mut drafter = Recorder::default();
    let generation = engine
        .generate_with(&request, &mut drafter, &mut policy, |_| Ok(Flow::Continue))
        .expect("the prompt runs");
    (generation, drafter.drafts)
}

/// Chains of 5 guess and accept in each round what the golden rounds guess and accept.
fn rounds_agree(draft: DraftChoice, golden: &str, tp: usize) {
    let mut engine = load(draft, tp);
    for prompt in read(golden)["prompts"].as_array().expect("a list of prompts") {
        let sequence = ids(&prompt["sequence_ids"]);
        let prompt_len = prompt["prompt_tokens"].as_u64().expect("a count") as usize;
        let generated = sequence.len() - prompt_len;
        let (generation, drafts) = generate(&mut engine, &sequence[..prompt_len], generated, 5);
        assert_eq!(generation.tokens, sequence[prompt_len..], "{}", prompt["prompt"]);
        let accepted: Vec<u64> =
            generation.rounds.iter().map(|round| round.accepted as u64).collect();
        let rounds = prompt["rounds"].as_array().expect("a list of rounds");
        let golden: Vec<u64> =
            rounds.iter().map(|round| round["accepted"].as_u64().expect("a count")).collect();
        // The golden script guesses beyond the end of the sequence; we stop there.
        let whole = golden.len() - 1;
        assert_eq!(accepted[..whole], golden[..whole], "{}", prompt["prompt"]);
        for (draft, round) in drafts.iter().zip(rounds) {
            assert_eq!(*draft, ids(&round["draft"])[..draft.len()], "{}", prompt["prompt"]);
        }
        assert!(drafts.len() >= whole);
    }
}

#[test]
fn eagle3_accepts_what_its_golden_accepts() {
    rounds_agree(DraftChoice::Auto, "demo/golden/eagle3.json", 1);
}

#[test]
fn eagle3_accepts_the_same_on_eight_ranks() {
    rounds_agree(DraftChoice::Auto, "demo/golden/eagle3.json", 8);
}

#[test]
fn mtp_accepts_what_its_golden_accepts() {
    rounds_agree(DraftChoice::Mtp, "demo/golden/mtp.json", 1);
}

#[test]
fn mtp_accepts_the_same_on_two_ranks() {
    rounds_agree(DraftChoice::Mtp, "demo/golden/mtp.json", 2);
}

/// Mean tokens per verify step with chains of 3 over the golden chats and tool calls, to the end of
/// the turn.
fn acceptance_length(draft: DraftChoice) -> f64 {
    let mut engine = load(draft, 1);
    let (mut tokens, mut rounds) = (0, 0);
    let golden = read("demo/golden/greedy.json");
    let prompts = golden["prompts"].as_array().expect("a list of prompts").iter();
    for prompt in prompts.filter(|prompt| prompt["kind"] != "text") {
        let expected = ids(&prompt["greedy_ids"]);
        let end = prompt["stop_index"].as_u64().expect("an end of turn") as usize + 1;
        let (generation, _) = generate(&mut engine, &ids(&prompt["prompt_ids"]), end, 3);
        assert_eq!(generation.tokens, expected[..end], "{}", prompt["id"]);
        let stats = generation.stats();
        tokens += stats.tokens;
        rounds += stats.rounds;
    }
    tokens as f64 / rounds as f64
}

#[test]
fn acceptance_lengths_are_those_of_live_drafters() {
    let eagle3 = acceptance_length(DraftChoice::Auto);
    let mtp = acceptance_length(DraftChoice::Mtp);
    println!("acceptance length with chains of 3: EAGLE-3 {eagle3:.2}, MTP {mtp:.2}");
    assert!(eagle3 >= 2.4, "EAGLE-3: {eagle3}");
    assert!(mtp >= 2.8, "MTP: {mtp}");
}
