//! Promise: every form of EAGLE-3 head drafts what an f64 reference drafts
//! (tests/fixtures/eagle3/make_heads.py), on one rank and on as many as can share it, and a head
//! that does not fit is refused. The reference's README shows how far each known mis-wiring is off:
//! at least ten times the tolerance here.

#[path = "common/heads.rs"]
mod heads;

use std::path::Path;
use std::sync::Arc;

use heads::{Golden, VARIANTS, draft_after, head, target};
use talon::cpu::{CpuOptions, CpuRanks};
use talon::model::{DraftModel, Drafted, Eagle3Head};
use talon::weights::Source;

/// Drafts four tokens behind a golden's sequence, which is run in two parts.
fn draft(name: &str, tp: usize, cut: usize) -> Vec<Drafted> {
    let (config, weights) = target();
    let draft_model = DraftModel::Eagle3(Box::new(head(name, &config).unwrap()));
    let options = CpuOptions { tp, context: 64, parallel: 2, vocab_limit: config.vocab_size };
    let mut ranks = CpuRanks::start(&Arc::new(config), &weights, &draft_model, options).unwrap();
    draft_after(&mut ranks, 1, &Golden::read(name).ids, cut)
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
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let source = || Source::Directory(fixtures.join("eagle3/midlayer"));
    let theta = |theta| Eagle3Head::open(source(), &config, theta).unwrap().config.rope_theta;
    assert_eq!((theta(None), theta(Some(1e6))), (1e4, 1e6));
}
