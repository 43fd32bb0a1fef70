//! Promise: `--dense-weights fp8` costs as much of the model as docs/measurements.md says, keeps what speculation
//! and ranks promise, and leaves the default alone.

use std::path::Path;

use serde_json::Value;
use talon::engine::{DenseWeights, DraftChoice, Engine, Flow, LoadOptions, Request, Sampling};
use talon::model::Output;
use talon::weights::demo;

fn load(dense_weights: DenseWeights, options: LoadOptions) -> Engine {
    let options = LoadOptions { dense_weights, ..options };
    Engine::load(demo(), &options, &|_, _| {}).expect("the demo loads")
}

/// Prompts with the answers that the model gives to them.
fn texts() -> Vec<Vec<u32>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/golden/greedy.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let ids = |value: &Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let prompts = golden["prompts"].as_array().unwrap().iter();
    prompts
        .map(|prompt| [ids(&prompt["prompt_ids"]), ids(&prompt["greedy_ids"])].concat())
        .collect()
}

fn logits(engine: &mut Engine, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut session = engine.session().expect("a free sequence");
    let results = engine.extend(&mut session, ids, |_| Output::Logits).expect("the text runs");
    results.into_iter().map(|result| result.logits).collect()
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let best = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - best).exp()).sum();
    logits.iter().map(|logit| f64::from(logit - best) - sum.ln()).collect()
}

/// KL(wanted || found), nats.
fn divergence(wanted: &[f32], found: &[f32]) -> f64 {
    let (wanted, found) = (log_softmax(wanted), log_softmax(found));
    wanted.iter().zip(&found).map(|(wanted, found)| wanted.exp() * (wanted - found)).sum()
}

fn best(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).expect("a vocabulary")
}

/// Of each position: KL from the stored weights' distribution, and whether the likeliest token is the same.
fn compare(ours: DenseWeights, tp: usize) -> Vec<(f64, bool)> {
    let options = || LoadOptions { tp: Some(tp), ..LoadOptions::default() };
    let (mut stored, mut ours) = (load(DenseWeights::Stored, options()), load(ours, options()));
    let mut positions = Vec::new();
    for text in texts() {
        let pairs = logits(&mut stored, &text).into_iter().zip(logits(&mut ours, &text));
        positions.extend(
            pairs.map(|(wanted, found)| {
                (divergence(&wanted, &found), best(&wanted) == best(&found))
            }),
        );
    }
    positions
}

#[test]
fn the_divergence_is_the_documented_one() {
    for tp in [1, 2] {
        let positions = compare(DenseWeights::Fp8, tp);
        let mut divergences: Vec<f64> =
            positions.iter().map(|(divergence, _)| *divergence).collect();
        divergences.sort_by(f64::total_cmp);
        let count = divergences.len();
        let mean = divergences.iter().sum::<f64>() / count as f64;
        let (median, p99) = (divergences[count / 2], divergences[count * 99 / 100]);
        let agree = positions.iter().filter(|(_, same)| *same).count() as f64 / count as f64;
        println!(
            "{tp} ranks, {count} positions: KL mean {mean:.2e}, median {median:.2e}, p99 {p99:.2e} nats; \
             same likeliest token {:.2} %",
            agree * 100.0
        );
        // It is on at all, and no worse than it was measured to be.
        assert!(median > 1e-7, "{median}");
        assert!(mean < 1e-2 && agree > 0.98, "KL {mean}, agreement {agree}");
    }
}

#[test]
fn stored_is_the_default_and_changes_nothing() {
    assert_eq!(LoadOptions::default().dense_weights, DenseWeights::Stored);
    let positions = compare(DenseWeights::Stored, 1);
    assert!(positions.iter().all(|(divergence, same)| *divergence == 0.0 && *same));
}

#[test]
fn speculation_stays_lossless() {
    for draft in [DraftChoice::Auto, DraftChoice::Mtp] {
        let options = LoadOptions { draft, draft_tokens: Some(3), ..LoadOptions::default() };
        let mut engine = load(DenseWeights::Fp8, options);
        for text in texts().iter().take(6) {
            let mut tokens = |speculate| {
                let request = Request {
                    prompt: &text[..text.len() / 2],
                    max_tokens: 48,
                    sampling: Sampling::GREEDY,
                    stop_ids: &[],
                    keep_logits: false,
                    speculate,
                };
                engine.generate(&request, |_| Ok(Flow::Continue)).expect("it runs").tokens
            };
            assert_eq!(tokens(true), tokens(false));
        }
    }
}
