//! Checkpoints of every format that the repository can write: the GPU computes what the CPU backend
//! does, or refuses in one line that names the CPU.
//!
//! Both read the same file, so this holds the GPU's unpacking against the CPU's; tests/formats.rs
//! holds that against the formats' definitions.

use talon::cuda::Device;
use talon::engine::{Engine, LoadOptions};
use talon::error::Kind;
use talon::model::Output;
use talon::weights::Source;

use crate::common::quantise::{
    dequantise_nvfp4, fp8, nvfp4, packed, to_bf16, to_f32, to_f32_of_f16,
};
use crate::common::{Copy, DEMO, SHARD_1, TINY, Tensor, Tensors};
use crate::engines::{golden, load as load_on_cpu};
use crate::errors::{Errors, header};
use crate::limits::SLACK;
use crate::{Turn, on_cpu, try_load, turn};

/// Relative RMS error of all logits as one vector.
const BOUND: f64 = 0.02;
/// What the GPU multiplies BF16 with to store it as f16 (src/cuda/layout.rs).
const F16_FACTOR: f32 = 64.0;

fn open(checkpoint: &Copy) -> Source {
    Source::Directory(checkpoint.path().to_owned())
}

fn options() -> LoadOptions {
    LoadOptions { context: Some(512), ..LoadOptions::default() }
}

fn logits(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut session = engine.session().expect("a free sequence");
    let results = engine.extend(&mut session, tokens, |_| Output::Logits).expect("they run");
    results.into_iter().map(|result| result.logits).collect()
}

/// Prompts that a checkpoint is run with.
fn prompts(base: &str) -> Vec<Vec<u32>> {
    match base {
        DEMO => vec![golden("tool-0").prompt, golden("chat-3").prompt, golden("text-6").prompt],
        // 8 of these positions are attended to at most.
        _ => vec![(0..64).map(|at: u32| at.wrapping_mul(2_654_435_761) % 512).collect()],
    }
}

fn edited(base: &str, edit: impl FnOnce(&mut Tensors)) -> Copy {
    let checkpoint = Copy::of(base);
    checkpoint.edit_tensors(edit);
    checkpoint
}

fn compare(name: &str, base: &str, checkpoint: &Copy, mut gpu: Engine) {
    let mut cpu = load_on_cpu(open(checkpoint), &options());
    let mut errors = Errors::default();
    for prompt in prompts(base) {
        errors.add(&Errors::of(&logits(&mut gpu, &prompt), &logits(&mut cpu, &prompt)));
    }
    header();
    errors.line(name, "cpu");
    println!("of all logits: {:.2e} ({})", errors.total(), gpu.layout());
    // The random model is chaotic: on the CPU, weights that are off by 2e-4 move its FP8 form by 5e-2
    // in the median and a fifth of its arg-maxima. A layout that is read wrongly is off by more than
    // all of it.
    let (measured, bound) = match base == DEMO {
        true => (errors.total(), BOUND),
        false => (errors.median(), 0.5),
    };
    assert!(measured <= bound, "{name}: {measured:e}");
}

/// The GPU loads it and agrees with the CPU.
fn runs(name: &str, base: &str, edit: impl FnOnce(&mut Tensors)) {
    let Some(_turn) = turn() else { return };
    let checkpoint = edited(base, edit);
    let gpu = try_load(open(&checkpoint), options()).expect("the GPU takes it");
    compare(name, base, &checkpoint, gpu);
}

/// The GPU refuses it, the CPU takes it.
fn is_refused(base: &str, words: &[&str], edit: impl FnOnce(&mut Tensors)) {
    let Some(turn) = turn() else { return };
    refuses(&turn, &edited(base, edit), words);
}

fn refuses(_turn: &Turn, checkpoint: &Copy, words: &[&str]) {
    load_on_cpu(open(checkpoint), &options());
    if on_cpu() {
        return;
    }
    let device = Device::open(0).expect("the first GPU");
    // What the process loads once is there already.
    assert!(try_load(open(&Copy::of(TINY)), options()).is_ok());
    let free = device.free_bytes().expect("free bytes");
    let Err(error) = try_load(open(checkpoint), options()) else { panic!("it was loaded") };
    println!("{error}");
    assert_eq!(error.kind(), Kind::Input);
    let text = error.to_string();
    assert_eq!(text.lines().count(), 1);
    for word in words.iter().chain(&["--backend cpu"]) {
        assert!(text.contains(word), "expected {word:?} in {text}");
    }
    let lost = free.abs_diff(device.free_bytes().expect("free bytes"));
    assert!(lost <= SLACK, "{lost} bytes came or went");
}

/// Modules that `linear` formats may have, with these ends of names.
fn modules(tensors: &Tensors, ends: &[&str]) -> Vec<String> {
    let names = tensors.0.keys().filter_map(|name| name.strip_suffix(".weight"));
    let wanted = names.filter(|name| ends.iter().any(|end| name.ends_with(end)));
    wanted.map(str::to_owned).collect()
}

const ATTENTION: [&str; 8] = [
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_b_proj",
    "self_attn.o_proj",
    "indexer.wq_b",
    "indexer.wk",
    "indexer.weights_proj",
];
const MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Makes the routed experts of the demo plain F32.
fn plain_experts(tensors: &mut Tensors) {
    for module in modules(tensors, &MLP) {
        if tensors.0.contains_key(&format!("{module}.weight_scale")) {
            dequantise_nvfp4(tensors, &module);
            tensors.0.remove(&format!("{module}.input_scale"));
        }
    }
}

fn each(tensors: &mut Tensors, ends: &[&str], change: impl Fn(&mut Tensors, &str)) {
    let modules = modules(tensors, ends);
    assert!(!modules.is_empty());
    modules.iter().for_each(|module| change(tensors, module));
}

#[test]
fn nvfp4_experts() {
    runs("demo: experts nvfp4", DEMO, |_| {});
}

#[test]
fn nvfp4_packed_experts() {
    runs("demo: experts nvfp4-packed", DEMO, packed);
}

/// Twice the global scale and half of every block scale is the same matrix.
#[test]
fn gate_and_up_with_different_global_scales() {
    runs("demo: two global scales", DEMO, |tensors| {
        let ups = modules(tensors, &["up_proj"]);
        for module in ups.iter().filter(|module| module.contains(".experts.")) {
            let Some(codes) = tensors.0.get_mut(&format!("{module}.weight_scale")) else {
                continue;
            };
            codes.bytes.iter_mut().for_each(|code| *code -= 8);
            let scale = tensors.get(&format!("{module}.weight_scale_2"));
            *scale = Tensor::f32(&scale.shape, &[scale.values()[0] * 2.0], SHARD_1);
        }
    });
}

#[test]
fn nvfp4_everywhere() {
    runs("demo: all nvfp4", DEMO, |tensors| {
        each(tensors, &ATTENTION, nvfp4);
        each(tensors, &["lm_head"], nvfp4);
        let plain = |tensors: &mut Tensors, module: &str| {
            if !tensors.0.contains_key(&format!("{module}.weight_scale")) {
                nvfp4(tensors, module);
            }
        };
        each(tensors, &MLP, plain);
    });
}

/// FP8 beside NVFP4 and BF16, blocks of 128 that end early among them.
#[test]
fn fp8_attention_and_shared_experts() {
    runs("demo: attention, shared fp8", DEMO, |tensors| {
        each(tensors, &ATTENTION, fp8);
        each(tensors, &["shared_experts.gate_proj", "shared_experts.up_proj"], fp8);
        each(tensors, &["shared_experts.down_proj"], fp8);
    });
}

#[test]
fn fp8_everywhere() {
    runs("demo: all fp8", DEMO, |tensors| {
        plain_experts(tensors);
        each(tensors, &ATTENTION, fp8);
        each(tensors, &MLP, fp8);
        each(tensors, &["lm_head"], fp8);
    });
}

#[test]
fn bf16_everywhere() {
    runs("demo: all bf16", DEMO, |tensors| {
        plain_experts(tensors);
        each(tensors, &MLP, to_bf16);
    });
}

/// The parts of one launch each in another format.
#[test]
fn every_layer_another_mixture() {
    runs("demo: mixtures", DEMO, |tensors| {
        each(tensors, &["q_a_proj", "kv_a_proj_with_mqa", "indexer.wk"], fp8);
        each(tensors, &["indexer.weights_proj", "o_proj"], nvfp4);
        let mixed = modules(tensors, &["q_b_proj", "indexer.wq_b", "shared_experts.down_proj"]);
        for (place, module) in mixed.iter().enumerate() {
            match place % 3 {
                0 => fp8(tensors, module),
                1 => nvfp4(tensors, module),
                _ => {}
            }
        }
    });
}

/// F32 whose values f16 holds loses nothing on the GPU.
#[test]
fn f32_that_f16_holds() {
    runs("demo: attention f32 of f16", DEMO, |tensors| {
        each(tensors, &ATTENTION, |t, module| to_f32_of_f16(t, module, F16_FACTOR));
        each(tensors, &["lm_head", "mlp.gate"], |t, module| to_f32_of_f16(t, module, F16_FACTOR));
        for name in ["model.embed_tokens", "model.norm"] {
            to_f32(tensors, name);
        }
    });
}

#[test]
fn tiny_bf16() {
    runs("tiny: bf16", TINY, |_| {});
}

#[test]
fn tiny_fp8() {
    runs("tiny: all fp8", TINY, |tensors| {
        each(tensors, &ATTENTION, fp8);
        each(tensors, &MLP, fp8);
        each(tensors, &["lm_head"], fp8);
    });
}

/// Matrices of 32 columns: two blocks of scales, a fraction of what a kernel reads at a time.
#[test]
fn tiny_nvfp4() {
    runs("tiny: all nvfp4", TINY, |tensors| {
        each(tensors, &ATTENTION, nvfp4);
        each(tensors, &MLP, nvfp4);
        each(tensors, &["lm_head"], nvfp4);
    });
}

#[test]
fn tiny_f32() {
    runs("tiny: f32 of f16", TINY, |tensors| {
        let change =
            |tensors: &mut Tensors, module: &str| to_f32_of_f16(tensors, module, F16_FACTOR);
        each(tensors, &ATTENTION, change);
        each(tensors, &MLP, change);
    });
}

#[test]
fn f32_that_f16_does_not_hold_is_refused() {
    is_refused(DEMO, &["f16"], |tensors| {
        let tensor = tensors.get("model.layers.1.self_attn.o_proj.weight");
        let mut values = tensor.values();
        values[7] = 0.1;
        *tensor = Tensor::f32(&tensor.shape, &values, &tensor.shard);
    });
}

#[test]
fn bf16_that_f16_does_not_hold_is_refused() {
    is_refused(DEMO, &["f16"], |tensors| {
        let tensor = tensors.get("model.layers.1.self_attn.o_proj.weight");
        tensor.bytes[..2].copy_from_slice(&half::bf16::from_f32(2048.0).to_le_bytes());
    });
}

#[test]
fn experts_of_two_formats_are_refused() {
    is_refused(DEMO, &["experts of a layer differ"], |tensors| {
        dequantise_nvfp4(tensors, "model.layers.1.mlp.experts.3.gate_proj");
    });
    is_refused(DEMO, &["experts of a layer differ"], |tensors| {
        dequantise_nvfp4(tensors, "model.layers.2.mlp.experts.15.down_proj");
    });
}

/// Gate and up run as one matrix.
#[test]
fn gate_and_up_of_two_formats_are_refused() {
    is_refused(DEMO, &["differ"], |tensors| {
        fp8(tensors, "model.layers.0.mlp.gate_proj");
    });
    is_refused(DEMO, &["differ"], |tensors| {
        nvfp4(tensors, "model.layers.1.mlp.shared_experts.up_proj");
    });
}

/// Shapes that the kernels do not take, named with their limits.
#[test]
fn a_selection_that_is_too_large_is_refused() {
    let Some(turn) = turn() else { return };
    let checkpoint = Copy::of(TINY);
    checkpoint.edit_json("config.json", |config| config["index_topk"] = 100_000.into());
    refuses(&turn, &checkpoint, &["index_topk 100000", "at most"]);
}
