//! Promise: forms of a checkpoint that mean the same give the same greedy tokens as the plain one,
//! or, where the stored numbers differ in form, the same logits.

mod common;

use std::sync::LazyLock;

use common::quantise::{dequantise_fp8, dequantise_nvfp4, fp8, nvfp4, packed};
use common::{Copy, DEMO, INDEX, SHARD_1, TINY, Tensor, Tensors, generate, read_json, repository};
use serde_json::{Value, json};

const EXPERT: &str = "model.layers.1.mlp.experts.3";
const CONFIG: &str = "config.json";
const QUANT: &str = "hf_quant_config.json";

/// Prompts of the demo's goldens, and the tokens of the plain checkpoint for each.
static PLAIN: LazyLock<Vec<(Vec<u32>, Value)>> = LazyLock::new(|| {
    let golden = read_json(&repository("demo/golden/greedy.json"));
    let prompts = golden["prompts"].as_array().unwrap().iter().step_by(13);
    let demo = repository(DEMO).display().to_string();
    prompts
        .map(|prompt| {
            let ids: Vec<u32> = serde_json::from_value(prompt["prompt_ids"].clone()).unwrap();
            let tokens = tokens(&demo, &ids, "");
            assert_eq!(
                tokens.as_array().unwrap()[..],
                prompt["greedy_ids"].as_array().unwrap()[..24]
            );
            (ids, tokens)
        })
        .collect()
});

fn tokens(model: &str, prompt: &[u32], warning: &str) -> Value {
    let outcome = generate(model, prompt, &["--max-tokens", "24"]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains(warning), "expected {warning:?} in {outcome:?}");
    outcome.json()["tokens"].clone()
}

/// Verifies, and generates what the plain checkpoint does; a warning, if any, contains `warning`.
fn assert_same_tokens(checkpoint: &Copy, warning: &str) -> Value {
    let verified = checkpoint.verify(&["--scales"]);
    assert_eq!(verified.code, Some(0), "{verified:?}");
    for (prompt, plain) in PLAIN.iter() {
        assert_eq!(tokens(checkpoint.arg(), prompt, warning), *plain);
    }
    verified.json()
}

/// Logits of the prompts.
fn logits(checkpoint: &Copy) -> Vec<f32> {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    let mut all = Vec::new();
    for (prompt, _) in PLAIN.iter() {
        let outcome = checkpoint.generate(prompt, &["--max-tokens", "1", "--logits", path]);
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        let (header, data) = common::split_shard(&std::fs::read(path).unwrap());
        let offsets = &header["logits"]["data_offsets"];
        let offset = |i: usize| offsets[i].as_u64().unwrap() as usize;
        let (values, _) = data[offset(0)..offset(1)].as_chunks();
        all.extend(values.iter().map(|value| f32::from_le_bytes(*value)));
    }
    all
}

fn assert_same_logits(one: &Copy, other: &Copy, tolerance: f32) {
    let (one, other) = (logits(one), logits(other));
    assert_eq!(one.len(), other.len());
    assert!(one.iter().any(|logit| logit.abs() > 1.0), "the model answers something");
    let worst = one.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= tolerance, "logits differ by {worst}");
}

fn edited(edit: impl FnOnce(&mut Tensors)) -> Copy {
    let checkpoint = Copy::of(DEMO);
    checkpoint.edit_tensors(edit);
    checkpoint
}

#[test]
fn single_scales_of_any_shape() {
    for shape in [vec![], vec![1], vec![1, 1]] {
        let checkpoint = edited(|tensors| {
            for (name, tensor) in &mut tensors.0 {
                if name.ends_with("weight_scale_2") || name.ends_with("input_scale") {
                    tensor.shape.clone_from(&shape);
                }
            }
        });
        assert_same_tokens(&checkpoint, "");
    }
}

#[test]
fn no_input_scale() {
    let checkpoint = edited(|tensors| {
        let before = tensors.0.len();
        tensors.0.retain(|name, _| !name.ends_with("input_scale"));
        assert!(tensors.0.len() < before);
    });
    assert_same_tokens(&checkpoint, "");
}

#[test]
fn kv_cache_scales() {
    let checkpoint = edited(|tensors| {
        for layer in 0..8 {
            for name in ["k_proj.k_scale", "v_proj.v_scale"] {
                let name = format!("model.layers.{layer}.self_attn.{name}");
                tensors.0.insert(name, Tensor::f32(&[], &[0.5], SHARD_1));
            }
        }
    });
    let report = assert_same_tokens(&checkpoint, "");
    assert_eq!(report["problems"], json!([]), "scales of a cache are no surprise");
}

/// Twice the global scale and half of every block scale is the same matrix.
#[test]
fn gate_and_up_with_different_global_scales() {
    let checkpoint = edited(|tensors| {
        for expert in 0..16 {
            for layer in 1..8 {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight");
                let codes = &mut tensors.get(&format!("{name}_scale")).bytes;
                // Halving takes one from the exponent, exact where a normal number stays one.
                assert!(codes.iter().all(|code| *code >= 16 && *code < 0x7F), "{name}");
                codes.iter_mut().for_each(|code| *code -= 8);
                let scale = tensors.get(&format!("{name}_scale_2"));
                *scale = Tensor::f32(&scale.shape, &[scale.values()[0] * 2.0], &scale.shard);
            }
        }
    });
    assert_same_tokens(&checkpoint, "");
}

#[test]
fn unrelated_shard() {
    let checkpoint = Copy::of(DEMO);
    let head = repository("demo/glm-demo-eagle3/model.safetensors");
    std::fs::copy(head, checkpoint.file("unrelated.safetensors")).unwrap();
    assert_same_tokens(&checkpoint, "unrelated.safetensors");
}

/// The format of a tensor is what the file says, not what a list says.
#[test]
fn ignore_lists_that_disagree() {
    for list in [json!([]), json!(["*"]), json!(["model.layers.1.mlp.experts*"]), Value::Null] {
        let checkpoint = Copy::of(DEMO);
        checkpoint.edit_json(CONFIG, |c| c["quantization_config"]["ignore"] = list.clone());
        checkpoint.edit_json(QUANT, |c| c["quantization"]["exclude_modules"] = list.clone());
        assert_same_tokens(&checkpoint, "");
    }
}

#[test]
fn quantisation_stated_in_any_place() {
    for (inline, beside) in [(true, false), (false, true), (false, false)] {
        let checkpoint = Copy::of(DEMO);
        if !inline {
            checkpoint.edit_json(CONFIG, |config| {
                config.as_object_mut().unwrap().remove("quantization_config").unwrap();
            });
        }
        if !beside {
            checkpoint.remove(QUANT);
        }
        let report = assert_same_tokens(&checkpoint, "");
        assert_eq!(report["quantization"].is_null(), !inline && !beside);
    }
}

#[test]
fn unknown_config_keys_are_listed() {
    let checkpoint = Copy::of(DEMO);
    checkpoint.edit_json(CONFIG, |config| {
        config["sandwich_norm"] = false.into();
        config["zz_new"] = json!({"a": [1, 2]});
    });
    let report = assert_same_tokens(&checkpoint, "sandwich_norm, zz_new");
    assert_eq!(report["problems"][0]["kind"], "unhandled_config");
    assert_eq!(report["problems"][0]["found"], "sandwich_norm, zz_new");
}

#[test]
fn rope_theta_at_the_top() {
    let checkpoint = Copy::of(DEMO);
    checkpoint.edit_json(CONFIG, |config| {
        config["rope_theta"] = config["rope_parameters"]["rope_theta"].clone();
        config.as_object_mut().unwrap().remove("rope_parameters").unwrap();
    });
    assert_same_tokens(&checkpoint, "");
}

#[test]
fn one_file_without_an_index() {
    let checkpoint = edited(|tensors| {
        for tensor in tensors.0.values_mut() {
            tensor.shard = "model.safetensors".into();
        }
    });
    checkpoint.remove(INDEX);
    assert_same_tokens(&checkpoint, "");
}

/// compressed-tensors: other names, and the global scale's reciprocal.
#[test]
fn compressed_tensors() {
    let checkpoint = edited(packed);
    checkpoint.remove(QUANT);
    checkpoint.edit_json(CONFIG, |config| {
        config["quantization_config"] =
            json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"});
    });
    let verified = checkpoint.verify(&["--scales"]);
    assert_eq!(verified.code, Some(0), "{verified:?}");
    assert_eq!(verified.json()["problems"], json!([]));
    // 1/(1/x) is x but for its last bit.
    assert_same_logits(&checkpoint, &Copy::of(DEMO), 1e-4);
}

/// A shared expert and an attention matrix in NVFP4 beside BF16 neighbours, against the same
/// numbers in F32.
#[test]
fn any_linear_module_in_nvfp4() {
    let modules = [
        "model.layers.1.mlp.shared_experts.up_proj",
        "model.layers.2.self_attn.o_proj",
        "model.layers.3.self_attn.indexer.wk",
        "model.layers.0.mlp.down_proj",
        "lm_head",
    ];
    let quantised = edited(|tensors| modules.iter().for_each(|module| nvfp4(tensors, module)));
    let plain = edited(|tensors| {
        for module in modules {
            nvfp4(tensors, module);
            dequantise_nvfp4(tensors, module);
        }
    });
    assert_eq!(quantised.verify(&["--scales"]).json()["problems"], json!([]));
    assert_same_logits(&quantised, &plain, 1e-5);
}

/// FP8 with a scale for each 128x128 block, partial blocks among them, against F32.
#[test]
fn fp8_blocks() {
    let modules = [
        "model.layers.0.mlp.gate_proj",
        "model.layers.1.mlp.shared_experts.down_proj",
        "model.layers.2.self_attn.kv_a_proj_with_mqa",
        "model.layers.3.self_attn.q_b_proj",
    ];
    let quantised = edited(|tensors| modules.iter().for_each(|module| fp8(tensors, module)));
    let plain = edited(|tensors| {
        for module in modules {
            fp8(tensors, module);
            dequantise_fp8(tensors, module);
        }
    });
    assert_eq!(quantised.verify(&["--scales"]).json()["problems"], json!([]));
    assert_same_logits(&quantised, &plain, 1e-5);
    let routed = edited(|tensors| {
        dequantise_nvfp4(tensors, &format!("{EXPERT}.gate_proj"));
    });
    assert_same_tokens(&routed, "");
}

/// The one thing that a format forbids: ranks that share a scale. Told before anything is loaded.
#[test]
fn ranks_that_would_split_a_block() {
    let checkpoint = Copy::of(TINY);
    checkpoint.edit_tensors(|tensors| nvfp4(tensors, "model.layers.1.mlp.experts.3.down_proj"));
    let kinds = |tp: &str| -> Vec<Value> {
        let verified = checkpoint.verify(&["--tp", tp]);
        assert_eq!(verified.code, Some(0), "{verified:?}");
        let problems = verified.json()["problems"].as_array().unwrap().clone();
        problems.into_iter().filter(|problem| problem["kind"] == "tp").collect()
    };
    assert_eq!(kinds("2"), [] as [Value; 0]);
    let found = kinds("4");
    let message = found[0]["found"].as_str().unwrap();
    assert!(message.contains("experts.3.down_proj.weight: 32 columns over 4 ranks"), "{message}");
    let refused = checkpoint.generate(&[1], &["--max-tokens", "1", "--tp", "4"]);
    common::assert_one_line(&refused, &["down_proj", "32 columns over 4 ranks", "smaller --tp"]);
}
