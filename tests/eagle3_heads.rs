//! Promise: every form of EAGLE-3 head drafts what an f64 reference drafts
//! (tests/fixtures/eagle3/make_heads.py), on one rank and on as many as can share it, and a head
//! that does not fit is refused. The reference's README shows how far each known mis-wiring is off:
//! at least ten times the tolerance here.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::SafeTensors;
use talon::cpu::{CpuOptions, CpuRanks, DraftModel};
use talon::engine::Opened;
use talon::model::{Backend, Draft, Drafted, Eagle3Head, ModelConfig, Output, Row, Step, Weights};
use talon::weights::Source;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn target() -> (ModelConfig, Weights) {
    let opened = Opened::new(Source::Directory(fixture("tiny-random")), false).unwrap();
    // The reference has transformers' epsilon.
    let config = ModelConfig { latent_norm_eps: 1e-6, ..opened.config };
    (config, Weights::new(opened.checkpoint, opened.manifest, opened.audit).unwrap())
}

fn head(name: &str, config: &ModelConfig) -> talon::error::Result<Eagle3Head> {
    Eagle3Head::open(Source::Directory(fixture("eagle3").join(name)), config, None)
}

struct Golden {
    ids: Vec<u32>,
    drafts: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

impl Golden {
    fn read(name: &str) -> Self {
        let bytes =
            std::fs::read(fixture("eagle3/golden").join(format!("{name}.safetensors"))).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let ids = |name: &str| {
            let data = file.tensor(name).unwrap().data().to_vec();
            data.as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id) as u32).collect()
        };
        let floats = |name: String| {
            let data = file.tensor(&name).unwrap().data().to_vec();
            data.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
        };
        let logits = (0..4).map(|step| floats(format!("logits.{step}"))).collect();
        Self { ids: ids("ids"), drafts: ids("drafts"), logits }
    }
}

/// Runs the prompt but its last token, cut at `cut`, and drafts four tokens after the last one.
fn draft(name: &str, tp: usize, cut: usize) -> Vec<Drafted> {
    let (config, weights) = target();
    let head = head(name, &config).unwrap();
    let options = CpuOptions { tp, context: 64, parallel: 2, vocab_limit: config.vocab_size };
    let draft_model = DraftModel::Eagle3(Box::new(head));
    let mut ranks = CpuRanks::start(&Arc::new(config), &weights, &draft_model, options).unwrap();
    let ids = Golden::read(name).ids;
    let (sequence, cached) = (1, ids.len() - 1);
    let mut drafted = Vec::new();
    for (start, end) in [(0, cut), (cut, cached)] {
        let row = |position: usize| Row {
            sequence,
            first: 0,
            position,
            token: ids[position],
            output: Output::None,
        };
        ranks.step(Step { rows: (start..end).map(row).collect() }).unwrap();
        // Each part's drafts leave rows behind that the next part must overwrite.
        drafted = ranks
            .draft(Draft {
                sequence,
                first: 0,
                position: start,
                tokens: ids[start + 1..=end].to_vec(),
                count: 4,
                keep_logits: true,
            })
            .unwrap();
    }
    drafted
}

fn assert_agrees(name: &str, tp: usize, cut: usize) {
    let golden = Golden::read(name);
    let drafted = draft(name, tp, cut);
    let tokens: Vec<u32> = drafted.iter().map(|drafted| drafted.token).collect();
    assert_eq!(tokens, golden.drafts, "{name} on {tp} ranks");
    for (step, (drafted, golden)) in drafted.iter().zip(&golden.logits).enumerate() {
        assert_eq!(drafted.logits.len(), golden.len(), "{name}: draft vocabulary");
        let differences = drafted.logits.iter().zip(golden).map(|(ours, golden)| ours - golden);
        let worst = differences.map(f32::abs).fold(0.0, f32::max);
        assert!(worst < 1e-3, "{name} on {tp} ranks, guess {step}: max |Δlogit| {worst}");
        // The confidence is the softmax's largest value.
        let best = golden.iter().copied().fold(f32::MIN, f32::max);
        let sum: f32 = golden.iter().map(|logit| (logit - best).exp()).sum();
        assert!((drafted.probability - 1.0 / sum).abs() < 1e-3, "{name}, guess {step}");
    }
}

const VARIANTS: [&str; 13] = [
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

#[test]
fn every_variant_drafts_what_its_reference_drafts() {
    for name in VARIANTS {
        assert_agrees(name, 1, 13);
    }
}

#[test]
fn the_cut_between_confirmed_rows_does_not_matter() {
    for cut in [1, 8, 24] {
        assert_agrees("midlayer", 1, cut);
        assert_agrees("mla", 1, cut);
    }
}

#[test]
fn ranks_share_a_head() {
    for name in VARIANTS {
        // Two key heads are shared by two ranks at most.
        assert_agrees(name, 2, 13);
    }
    for name in ["full-vocab", "mla"] {
        assert_agrees(name, 4, 13);
    }
}

#[test]
fn both_spellings_of_the_features_mean_the_same_layers() {
    let (config, _) = target();
    let boundaries = |name: &str| head(name, &config).unwrap().config.boundaries;
    assert_eq!(boundaries("midlayer"), [2, 3, 5]);
    assert_eq!(boundaries("layers0"), [2, 3, 5]);
    assert_eq!(boundaries("five-aux"), [2, 3, 4, 5, 6]);
    assert_eq!(boundaries("own-embed"), [2, 4, 6]);
}

/// One of speculators' layout carries the normed hidden state in its residual branch unless its
/// config says otherwise, the others do not.
#[test]
fn the_layout_decides_what_a_silent_config_means() {
    let (config, _) = target();
    let normed = |name: &str| head(name, &config).unwrap().config.norm_before_residual;
    assert!(normed("speculators") && normed("norm-before-residual"));
    assert!(!normed("midlayer") && !normed("model-prefix"));
}

#[test]
fn a_head_that_does_not_fit_is_refused_with_both_numbers() {
    let (config, _) = target();
    let refusal = |name: &str| {
        let error = head(name, &config).err().unwrap_or_else(|| panic!("{name} was taken"));
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    };
    let error = refusal("too-wide");
    assert!(error.contains("96") && error.contains("64"), "{error}");
    let error = refusal("wrong-fc");
    assert!(
        error.contains("fc.weight") && error.contains("96") && error.contains("192"),
        "{error}"
    );
}

#[test]
fn rope_theta_can_be_overridden() {
    let (config, _) = target();
    let source = || Source::Directory(fixture("eagle3/midlayer"));
    let theta = |theta| Eagle3Head::open(source(), &config, theta).unwrap().config.rope_theta;
    assert_eq!((theta(None), theta(Some(1e6))), (1e4, 1e6));
}
