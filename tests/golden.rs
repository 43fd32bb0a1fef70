//! Promise: the model computes what transformers computes. The demo model against demo/golden, a
//! random one with an active sparse path against tests/fixtures/tiny-random, on 1, 2, 4, 8 ranks.

use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;
use talon::engine::{Engine, ExpertSplit, Flow, LoadOptions, Request, Sampling};
use talon::model::Output;
use talon::weights::{Source, demo};

fn load(source: Source, tp: usize, latent_eps: Option<f32>) -> Engine {
    let options = LoadOptions { tp: Some(tp), latent_eps, ..LoadOptions::default() };
    Engine::load(source, &options, &|_, _| {}).expect("the fixture loads")
}

fn read(path: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect("a committed file")
}

fn ids_of(file: &SafeTensors, name: &str) -> Vec<u32> {
    let bytes = file.tensor(name).expect("a golden tensor").data().to_vec();
    bytes.as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id) as u32).collect()
}

fn floats_of(file: &SafeTensors, name: &str) -> Vec<f32> {
    let bytes = file.tensor(name).expect("a golden tensor").data().to_vec();
    bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
}

/// Largest difference from the golden logits over all positions.
fn worst_logit_difference(engine: &mut Engine, ids: &[u32], golden: &[f32]) -> f32 {
    let mut session = engine.session().expect("a free sequence");
    let results = engine.extend(&mut session, ids, |_| Output::Logits).expect("the prompt runs");
    assert_eq!(results.len(), ids.len());
    let logits: Vec<f32> = results.into_iter().flat_map(|result| result.logits).collect();
    assert_eq!(logits.len(), golden.len());
    logits.iter().zip(golden).map(|(ours, golden)| (ours - golden).abs()).fold(0.0, f32::max)
}

fn greedy(engine: &mut Engine, prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let request = Request {
        prompt,
        max_tokens,
        sampling: Sampling::GREEDY,
        stop_ids: &[],
        keep_logits: false,
        speculate: false,
    };
    engine.generate(&request, |_| Ok(Flow::Continue)).expect("the prompt runs").tokens
}

fn token_list(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("a list of ids").iter();
    ids.map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn demo_logits_agree(tp: usize) {
    let mut engine = load(demo(), tp, None);
    let bytes = read("demo/golden/logits.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    for prompt in ["chat-0", "chat-3", "text-6"] {
        let ids = ids_of(&file, &format!("{prompt}.ids"));
        let golden = floats_of(&file, &format!("{prompt}.logits"));
        let worst = worst_logit_difference(&mut engine, &ids, &golden);
        println!("{prompt} on {tp} ranks: max |Δlogit| {worst:e}");
        assert!(worst < 1e-3, "{prompt} on {tp} ranks: max |Δlogit| {worst}");
    }
}

fn demo_greedy_tokens_agree(tp: usize) {
    let mut engine = load(demo(), tp, None);
    let golden: Value = serde_json::from_slice(&read("demo/golden/greedy.json")).expect("JSON");
    let prompts = golden["prompts"].as_array().expect("a list of prompts");
    assert_eq!(prompts.len(), 24);
    for prompt in prompts {
        let expected = token_list(&prompt["greedy_ids"]);
        let tokens = greedy(&mut engine, &token_list(&prompt["prompt_ids"]), expected.len());
        assert_eq!(tokens, expected, "{} on {tp} ranks", prompt["id"]);
    }
}

/// Ranks with whole experts each: other sums, the same text.
#[test]
fn greedy_with_whole_experts() {
    let golden: Value = serde_json::from_slice(&read("demo/golden/greedy.json")).expect("JSON");
    for tp in [2, 8] {
        let options =
            LoadOptions { tp: Some(tp), experts: ExpertSplit::Whole, ..LoadOptions::default() };
        let mut engine = Engine::load(demo(), &options, &|_, _| {}).expect("the demo loads");
        for prompt in golden["prompts"].as_array().expect("prompts").iter().take(6) {
            let expected = token_list(&prompt["greedy_ids"]);
            let tokens = greedy(&mut engine, &token_list(&prompt["prompt_ids"]), expected.len());
            assert_eq!(tokens, expected, "{}, {tp} ranks", prompt["id"]);
        }
    }
}

/// A prompt of 603 tokens, so that the indexer (index_topk 256) leaves positions out.
fn demo_long_prompt_agrees(tp: usize) {
    let mut engine = load(demo(), tp, None);
    let golden: Value = serde_json::from_slice(&read("demo/golden/indexer.json")).expect("JSON");
    let expected = token_list(&golden["greedy_ids"]);
    let tokens = greedy(&mut engine, &token_list(&golden["prompt_ids"]), expected.len());
    assert_eq!(tokens, expected, "on {tp} ranks");
}

fn random_model_agrees(tp: usize) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-random");
    let mut engine = load(Source::Directory(directory), tp, Some(1e-6));
    let bytes = read("tests/fixtures/tiny-random/golden.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let worst =
        worst_logit_difference(&mut engine, &ids_of(&file, "ids"), &floats_of(&file, "logits"));
    println!("random model on {tp} ranks: max |Δlogit| {worst:e}");
    assert!(worst < 1e-4, "on {tp} ranks: max |Δlogit| {worst}");
}

macro_rules! on_ranks {
    ($check:ident: $($name:ident = $tp:literal),+) => {
        $(#[test]
        fn $name() {
            $check($tp);
        })+
    };
}

on_ranks!(demo_logits_agree: logits_tp1 = 1, logits_tp2 = 2, logits_tp4 = 4, logits_tp8 = 8);
on_ranks!(demo_greedy_tokens_agree: greedy_tp1 = 1, greedy_tp2 = 2, greedy_tp4 = 4, greedy_tp8 = 8);
on_ranks!(demo_long_prompt_agrees: sparse_tp1 = 1, sparse_tp8 = 8);
on_ranks!(random_model_agrees: random_tp1 = 1, random_tp2 = 2, random_tp4 = 4);
