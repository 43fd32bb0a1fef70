//! EAGLE-3 heads and the MTP layer with their goldens, and drafts on any backend.

// Every test binary compiles this module and uses only a part of it.
#![allow(dead_code)]

// Several files of this folder use it, and some tests use more than one.
#[allow(clippy::duplicate_mod)]
#[path = "repository.rs"]
mod repository;

use repository::repository;
use safetensors::SafeTensors;
use talon::engine::Opened;
use talon::model::{
    Backend, Draft, DraftModel, Drafted, Eagle3Head, ModelConfig, Output, Row, Step, Weights,
};
use talon::weights::{Source, demo, demo_eagle3};

/// Every form of head that there is a fixture of.
pub const VARIANTS: [&str; 13] = [
    "midlayer",
    "layers0",
    "full-vocab",
    "own-embed",
    "norm-before-residual",
    "norm-before-fc",
    "eagle31",
    "five-aux",
    "mla",
    "wide",
    "f16",
    "speculators",
    "model-prefix",
];

/// The random model that the fixtures' heads were made for.
pub fn target() -> (ModelConfig, Weights) {
    let (config, weights) = opened(Source::Directory(repository("tests/fixtures/tiny-random")));
    // The reference has transformers' epsilon.
    (ModelConfig { latent_norm_eps: 1e-6, ..config }, weights)
}

/// A checkpoint's configuration and weights.
pub fn opened(source: Source) -> (ModelConfig, Weights) {
    let Opened { config, checkpoint, manifest, audit, .. } =
        Opened::new(source, false).expect("a checkpoint");
    (config, Weights::new(checkpoint, manifest, audit).expect("a whole checkpoint"))
}

/// The demo model with its EAGLE-3 head.
pub fn demo_head() -> (ModelConfig, Weights, DraftModel) {
    let (config, weights) = opened(demo());
    let head = Eagle3Head::open(demo_eagle3(), &config, None).expect("the demo's head");
    (config, weights, DraftModel::Eagle3(Box::new(head)))
}

pub fn head(name: &str, config: &ModelConfig) -> talon::error::Result<Eagle3Head> {
    let folder = repository("tests/fixtures/eagle3").join(name);
    Eagle3Head::open(Source::Directory(folder), config, None)
}

/// What the f64 reference drafts after a sequence.
pub struct Golden {
    pub ids: Vec<u32>,
    pub drafts: Vec<u32>,
    pub logits: Vec<Vec<f32>>,
}

impl Golden {
    pub fn read(name: &str) -> Self {
        let path = repository(&format!("tests/fixtures/eagle3/golden/{name}.safetensors"));
        let bytes = std::fs::read(path).expect("a committed file");
        let file = SafeTensors::deserialize(&bytes).expect("a whole file");
        let data = |name: &str| file.tensor(name).expect("a tensor").data().to_vec();
        let ids = |name: &str| ids_of(&data(name));
        let logits = (0..4).map(|step| floats_of(&data(&format!("logits.{step}")))).collect();
        Self { ids: ids("ids"), drafts: ids("drafts"), logits }
    }
}

fn ids_of(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id) as u32).collect()
}

fn floats_of(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
}

/// Runs `ids` but the last, cut at `cut`, in slot `sequence`, and drafts four tokens after the last.
pub fn draft_after(
    backend: &mut dyn Backend,
    sequence: usize,
    ids: &[u32],
    cut: usize,
) -> Vec<Drafted> {
    let mut drafted = Vec::new();
    for (start, end) in [(0, cut), (cut, ids.len() - 1)] {
        let rows = (start..end).map(|position| row(sequence, position, ids[position]));
        backend.step(Step { rows: rows.collect() }).expect("a step");
        // Each part's drafts leave rows behind that the next part must overwrite.
        drafted = backend
            .draft(Draft {
                sequence,
                first: 0,
                position: start,
                tokens: ids[start + 1..=end].to_vec(),
                count: 4,
                keep_logits: true,
            })
            .expect("a draft");
    }
    drafted
}

fn row(sequence: usize, position: usize, token: u32) -> Row {
    Row { sequence, first: 0, position, token, output: Output::None }
}

/// A sequence, and the logits of a drafter's first guess after its last prompt row and each behind.
pub struct Rows {
    pub sequence: Vec<u32>,
    pub logits: Vec<Vec<f32>>,
}

impl Rows {
    /// Of the demo's drafter `name`, mtp or eagle3.
    pub fn of_demo(name: &str) -> Self {
        let path = repository(&format!("demo/golden/{name}.safetensors"));
        let bytes = std::fs::read(path).expect("a committed file");
        let file = SafeTensors::deserialize(&bytes).expect("a whole file");
        let logits = if name == "mtp" { "mtp_logits" } else { "draft_logits" };
        let tensor = file.tensor(logits).expect("a tensor");
        Self {
            sequence: ids_of(file.tensor("sequence_ids").expect("a tensor").data()),
            logits: floats_of(tensor.data())
                .chunks_exact(tensor.shape()[1])
                .map(<[f32]>::to_vec)
                .collect(),
        }
    }
}

/// Runs a golden's sequence and drafts two tokens after each of its rows behind the prompt.
pub fn draft_rows(backend: &mut dyn Backend, golden: &Rows, prompt: usize) -> Vec<Vec<Drafted>> {
    let rows = golden.sequence.iter().enumerate().map(|(position, id)| row(0, position, *id));
    backend.step(Step { rows: rows.collect() }).expect("a step");
    let mut next = 0;
    let drafts = (prompt..prompt + golden.logits.len()).map(|end| {
        let tokens = golden.sequence[next + 1..=end].to_vec();
        let request =
            Draft { sequence: 0, first: 0, position: next, tokens, count: 2, keep_logits: true };
        next = end;
        // The second guess leaves a row behind that the next draft must overwrite.
        backend.draft(request).expect("a draft")
    });
    drafts.collect()
}
