//! Promise: the demo's drafters compute what their goldens say, row by row; a checkpoint whose MTP
//! layer is absent or a placeholder is not drafted with; a head in the sub-folder `eagle3` is used.

mod common;
#[path = "common/engines.rs"]
mod engines;
#[path = "common/heads.rs"]
mod heads;

use std::path::Path;
use std::sync::Arc;

use common::{Copy, DEMO, Tensors};
use engines::{golden, greedy, repository_file, run, run_plain};
use heads::{Rows, draft_rows, opened};
use talon::cpu::{CpuOptions, CpuRanks};
use talon::engine::{DraftChoice, Engine, LoadOptions};
use talon::model::{DraftModel, Drafted, Eagle3Head, ModelConfig};
use talon::spec::ModelDrafter;
use talon::weights::{Source, demo, demo_eagle3};

const LAYER: &str = "model.layers.8.";

/// What a drafter on CPU ranks drafts over a golden's sequence.
fn draft(
    source: Source,
    draft: impl Fn(&ModelConfig) -> DraftModel,
    golden: &Rows,
    tp: usize,
) -> Vec<Vec<Drafted>> {
    let (config, weights) = opened(source);
    let draft_model = draft(&config);
    let vocab_limit = config.vocab_size;
    let options = CpuOptions { tp, context: 128, parallel: 1, vocab_limit };
    let mut ranks = CpuRanks::start(&Arc::new(config), &weights, &draft_model, options).unwrap();
    draft_rows(&mut ranks, golden, engines::golden("chat-1").prompt.len())
}

fn mtp(_: &ModelConfig) -> DraftModel {
    DraftModel::Mtp
}

fn eagle3(config: &ModelConfig) -> DraftModel {
    DraftModel::Eagle3(Box::new(Eagle3Head::open(demo_eagle3(), config, None).unwrap()))
}

/// Largest difference of the first guesses from the golden logits.
fn worst(drafted: &[Vec<Drafted>], golden: &Rows) -> f32 {
    apart(&logits(drafted, 0), &golden.logits)
}

/// Logits of every row's guess `index`.
fn logits(drafted: &[Vec<Drafted>], index: usize) -> Vec<Vec<f32>> {
    drafted.iter().map(|guesses| guesses[index].logits.clone()).collect()
}

/// Largest difference between the logits of two drafts.
fn apart(ours: &[Vec<f32>], theirs: &[Vec<f32>]) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    let differences = ours.iter().zip(theirs).flat_map(|(ours, theirs)| {
        assert_eq!(ours.len(), theirs.len());
        ours.iter().zip(theirs).map(|(ours, theirs)| (ours - theirs).abs())
    });
    differences.fold(0.0, f32::max)
}

#[test]
fn mtp_logits_are_the_goldens() {
    let golden = Rows::of_demo("mtp");
    for tp in [1, 2, 8] {
        let worst = worst(&draft(demo(), mtp, &golden, tp), &golden);
        println!("MTP on {tp} ranks: max |Δlogit| {worst:e}");
        assert!(worst < 2e-3, "on {tp} ranks: {worst}");
    }
}

#[test]
fn eagle3_logits_are_the_goldens() {
    let golden = Rows::of_demo("eagle3");
    for tp in [1, 2, 8] {
        let worst = worst(&draft(demo(), eagle3, &golden, tp), &golden);
        println!("EAGLE-3 on {tp} ranks: max |Δlogit| {worst:e}");
        assert!(worst < 2e-3, "on {tp} ranks: {worst}");
    }
}

fn edited(edit: impl FnOnce(&mut Tensors)) -> Copy {
    let copy = Copy::of(DEMO);
    copy.edit_tensors(edit);
    copy
}

fn directory(copy: &Copy) -> Source {
    Source::Directory(copy.path().to_owned())
}

/// A wiring that is wrong is one that the golden tells from the right one: each of these edits of
/// the checkpoint is what the mistake would do.
#[test]
fn the_golden_sees_mtp_wired_wrongly() {
    let golden = Rows::of_demo("mtp");
    let seen = |what: &str, edit: &dyn Fn(&mut Tensors)| {
        let copy = edited(edit);
        let worst = worst(&draft(directory(&copy), mtp, &golden, 1), &golden);
        println!("{what}: max |Δlogit| {worst}");
        assert!(worst > 0.1, "{what}: {worst}");
    };
    seen("hidden state before embedding in eh_proj", &|tensors| {
        let matrix = tensors.get(&format!("{LAYER}eh_proj.weight"));
        let row = matrix.bytes.len() / matrix.shape[0];
        matrix.bytes.chunks_exact_mut(row).for_each(|row| row.rotate_left(row.len() / 2));
    });
    seen("enorm and hnorm swapped", &|tensors| {
        let enorm = tensors.get(&format!("{LAYER}enorm.weight")).bytes.clone();
        let hnorm = tensors.get(&format!("{LAYER}hnorm.weight"));
        let hnorm = std::mem::replace(&mut hnorm.bytes, enorm);
        tensors.get(&format!("{LAYER}enorm.weight")).bytes = hnorm;
    });
    seen("the model's norm for shared_head.norm", &|tensors| {
        let norm = tensors.get("model.norm.weight").bytes.clone();
        tensors.get(&format!("{LAYER}shared_head.norm.weight")).bytes = norm;
    });
}

/// Multiplies the columns of a BF16 tensor by `even`, 1 / `even`, `even`, …, exactly for powers of 2.
fn scale_columns(tensors: &mut Tensors, name: &str, even: f32) {
    let tensor = tensors.get(name);
    let width = *tensor.shape.last().unwrap();
    for (i, value) in tensor.bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let factor = if (i % width).is_multiple_of(2) { even } else { 1.0 / even };
        let scaled = f32::from_bits(u32::from(u16::from_le_bytes(*value)) << 16) * factor;
        *value = ((scaled.to_bits() >> 16) as u16).to_le_bytes();
    }
}

/// The gains of the model's final norm reach the MTP layer by the hidden state alone. One that read
/// the state before that norm would not see them.
#[test]
fn mtp_reads_the_hidden_state_behind_the_final_norm() {
    let golden = Rows::of_demo("mtp");
    let copy = edited(|tensors| scale_columns(tensors, "model.norm.weight", 2.0));
    let [right, scaled] = [demo(), directory(&copy)].map(|source| draft(source, mtp, &golden, 1));
    let moved = apart(&logits(&right, 0), &logits(&scaled, 0));
    println!("max |Δlogit| {moved}");
    assert!(moved > 0.1, "{moved}");
}

/// Gains of shared_head.norm that the head's columns undo leave the first guess as it is, and change
/// the second by the recycled hidden state alone. One from before that norm would not change it.
#[test]
fn mtp_recycles_the_hidden_state_behind_its_norm() {
    let golden = Rows::of_demo("mtp");
    let copy = edited(|tensors| {
        scale_columns(tensors, &format!("{LAYER}shared_head.norm.weight"), 2.0);
        scale_columns(tensors, "lm_head.weight", 0.5);
    });
    let [right, scaled] = [demo(), directory(&copy)].map(|source| draft(source, mtp, &golden, 1));
    assert_eq!(logits(&right, 0), logits(&scaled, 0));
    let moved = apart(&logits(&right, 1), &logits(&scaled, 1));
    println!("max |Δlogit| {moved}");
    assert!(moved > 0.1, "{moved}");
}

fn load(copy: &Copy, draft: DraftChoice) -> talon::error::Result<Engine> {
    let options = LoadOptions { draft, draft_tokens: Some(3), ..LoadOptions::default() };
    Engine::load(directory(copy), &options, &|_, _| {})
}

fn refusal(copy: &Copy) -> String {
    let error = load(copy, DraftChoice::Mtp).err().expect("--draft mtp was taken");
    assert_eq!(error.exit_code(), 2);
    error.to_string()
}

/// Without a drafter the engine generates what it should, and guesses nothing.
fn auto_goes_on_without(copy: &Copy) {
    let mut engine = load(copy, DraftChoice::Auto).unwrap();
    assert_eq!(engine.drafter(), None);
    let golden = golden("chat-0");
    let generation =
        engine.generate(&greedy(&golden.prompt, 8), |_| Ok(talon::engine::Flow::Continue)).unwrap();
    assert_eq!(generation.tokens, golden.greedy[..8]);
    assert!(generation.rounds.iter().all(|round| round.drafted == 0));
}

#[test]
fn an_absent_mtp_layer_is_named_or_done_without() {
    let copy = edited(|tensors| tensors.0.retain(|name, _| !name.starts_with(LAYER)));
    let error = refusal(&copy);
    let named = ["--draft mtp", "model.layers.8.eh_proj", "enorm", "hnorm", "shared_head.norm"];
    for word in named {
        assert!(error.contains(word), "{word} is not in: {error}");
    }
    auto_goes_on_without(&copy);
}

#[test]
fn a_zero_filled_mtp_layer_is_named_or_done_without() {
    let copy = edited(|tensors| {
        let of_layer = tensors.0.iter_mut().filter(|(name, _)| name.starts_with(LAYER));
        of_layer.for_each(|(_, tensor)| tensor.bytes.fill(0));
    });
    let error = refusal(&copy);
    for word in ["--draft mtp", "zeros", LAYER] {
        assert!(error.contains(word), "{word} is not in: {error}");
    }
    auto_goes_on_without(&copy);
}

/// One empty matrix is enough to make the drafts noise.
#[test]
fn one_zero_filled_matrix_is_named() {
    let name = format!("{LAYER}eh_proj");
    let copy = edited(|tensors| tensors.get(&format!("{name}.weight")).bytes.fill(0));
    let error = refusal(&copy);
    assert!(error.contains(&name), "{error}");
    auto_goes_on_without(&copy);
}

#[test]
fn a_checkpoint_that_promises_no_mtp_layer_has_none() {
    let copy = edited(|tensors| tensors.0.retain(|name, _| !name.starts_with(LAYER)));
    copy.edit_json("config.json", |config| config["num_nextn_predict_layers"] = 0.into());
    assert!(refusal(&copy).contains("num_nextn_predict_layers"));
    auto_goes_on_without(&copy);
}

#[test]
fn auto_takes_the_sub_folder_eagle3_before_the_mtp_layer() {
    let copy = Copy::of(DEMO);
    let drafter = |draft| load(&copy, draft).unwrap().drafter().map(str::to_owned);
    assert_eq!(drafter(DraftChoice::Auto).as_deref(), Some("mtp"));
    let folder = copy.path().join("eagle3");
    std::fs::create_dir(&folder).unwrap();
    for file in ["config.json", "model.safetensors"] {
        let head = repository_file("demo/glm-demo-eagle3").join(file);
        std::fs::copy(head, Path::new(&folder).join(file)).unwrap();
    }
    assert_eq!(drafter(DraftChoice::Auto).as_deref(), Some("eagle3"));
    assert_eq!(drafter(DraftChoice::Mtp).as_deref(), Some("mtp"));
    assert_eq!(drafter(DraftChoice::None), None);

    // It drafts as the embedded one does.
    let golden = golden("chat-3");
    let request = greedy(&golden.prompt, 12);
    let mut engine = load(&copy, DraftChoice::Auto).unwrap();
    let mut embedded = engines::demo_engine(DraftChoice::Auto, 1);
    let ours = run(&mut engine, &request, &mut ModelDrafter::default(), 3);
    let theirs = run(&mut embedded, &request, &mut ModelDrafter::default(), 3);
    assert_eq!(ours.tokens, run_plain(&mut engine, &request).tokens);
    assert_eq!(engines::accepted(&ours), engines::accepted(&theirs));
    assert!(ours.stats().acceptance_length() > Some(1.2));

    // A damaged head is an error, not a reason to go on with something else.
    std::fs::write(folder.join("config.json"), "{}").unwrap();
    assert!(load(&copy, DraftChoice::Auto).is_err());
}
