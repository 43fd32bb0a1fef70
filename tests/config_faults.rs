//! Promise: a config.json or a quantisation that cannot be right is refused with exit code 2 and one
//! line that names the file and the key; what a load can live with is a warning and exit code 0.

mod common;

use common::{Copy, DEMO, INDEX, SHARD_1, TINY, assert_refused};
use serde_json::{Value, json};

const CONFIG: &str = "config.json";
const QUANT: &str = "hf_quant_config.json";

type Edit = fn(&mut Value);

/// A copy of `checkpoint` with an edited file.
fn edited(checkpoint: &str, file: &str, edit: impl FnOnce(&mut Value)) -> Copy {
    let copy = Copy::of(checkpoint);
    copy.edit_json(file, edit);
    copy
}

/// Kinds of the warnings of a `verify` that is content otherwise.
fn warnings(checkpoint: &Copy) -> Vec<String> {
    let verified = checkpoint.verify(&["--tp", "4"]);
    assert_eq!(verified.code, Some(0), "{verified:?}");
    let report = verified.json();
    assert_eq!(report["ok"], true);
    let problems = report["problems"].as_array().unwrap().clone();
    assert!(problems.iter().all(|problem| problem["severity"] == "warning"), "{verified:?}");
    problems.iter().map(|problem| problem["kind"].as_str().unwrap().to_owned()).collect()
}

/// `generate` with ids works in spite of a warning and, where it is about the model, tells it.
fn assert_generates(checkpoint: &Copy, warning: &str) {
    let outcome = checkpoint.generate(&[1, 2, 3], &["--max-tokens", "1"]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert_eq!(outcome.json()["tokens"].as_array().unwrap().len(), 1);
    assert!(outcome.stderr.contains(warning), "expected {warning:?} in {outcome:?}");
}

#[test]
fn config_missing_or_no_object() {
    let checkpoint = Copy::of(TINY);
    for text in ["", "{", "[]", "3", "null", "\"text\"", "\u{0}"] {
        checkpoint.write(CONFIG, text);
        assert_refused(&checkpoint, &[], &[CONFIG, "JSON"]);
    }
    checkpoint.remove(CONFIG);
    assert_refused(&checkpoint, &[], &[CONFIG, "not found", "--model"]);
}

#[test]
fn no_rope_theta_anywhere() {
    for parameters in [json!({"rope_type": "default"}), json!({}), Value::Null] {
        let checkpoint = edited(TINY, CONFIG, |config| config["rope_parameters"] = parameters);
        assert_refused(&checkpoint, &[], &[CONFIG, "no rope_theta", "fetch"]);
    }
}

#[test]
fn rope_that_is_not_the_plain_one() {
    let yarn = json!({"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0});
    let checkpoint = edited(TINY, CONFIG, |config| config["rope_parameters"] = yarn.clone());
    assert_refused(&checkpoint, &[], &[CONFIG, "rope_type", "yarn"]);
    // The older place of the same switch, under either of its names.
    for scaling in [yarn, json!({"type": "yarn", "factor": 4.0})] {
        let checkpoint = edited(TINY, CONFIG, |config| config["rope_scaling"] = scaling);
        assert_refused(&checkpoint, &[], &[CONFIG, "rope_scaling", "yarn"]);
    }
}

#[test]
fn lists_of_the_wrong_length() {
    let cases = [
        ("indexer_types", json!(["full", "full", "full", "shared", "shared"])),
        ("indexer_types", json!(vec!["full"; 7])),
        ("indexer_types", json!([])),
        ("indexer_types", json!(["full", "full", "full", "shared", "shared", "none"])),
        ("indexer_types", json!("full")),
        ("index_topk_pattern", json!("FFFSS")),
        ("index_topk_pattern", json!("FFFSSFF")),
        ("index_topk_pattern", json!("FFFSSX")),
        ("index_topk_pattern", json!("")),
        ("index_topk_pattern", json!(3)),
        ("mlp_layer_types", json!(["dense"])),
    ];
    for (key, value) in cases {
        let checkpoint = edited(TINY, CONFIG, |config| {
            config[key] = value.clone();
        });
        assert_refused(&checkpoint, &[], &[CONFIG, key, "6"]);
        if key == "index_topk_pattern" {
            checkpoint.edit_json(CONFIG, |config| config["indexer_types"] = Value::Null);
            assert_refused(&checkpoint, &[], &[CONFIG, key, "6"]);
        }
    }
}

#[test]
fn unknown_quantisation_by_name() {
    let cases: [(&str, &str, Edit); 5] = [
        (CONFIG, "bitnet", |c| c["quantization_config"]["quant_method"] = "bitnet".into()),
        (CONFIG, "W4A8_MX", |c| c["quantization_config"]["quant_algo"] = "W4A8_MX".into()),
        (CONFIG, "int-quantized", |c| {
            c["quantization_config"] =
                json!({"quant_method": "compressed-tensors", "format": "int-quantized"});
        }),
        (CONFIG, "quant_method", |c| c["quantization_config"] = json!({"bits": 4})),
        // Beside a config.json that says something else.
        (QUANT, "W4A8_MX", |c| c["quantization"]["quant_algo"] = "W4A8_MX".into()),
    ];
    for (file, name, edit) in cases {
        let checkpoint = edited(DEMO, file, edit);
        assert_refused(&checkpoint, &[], &[file, name, "unknown quant_", "supported"]);
        if file == QUANT {
            checkpoint.edit_json(CONFIG, |config| config["quantization_config"] = Value::Null);
            assert_refused(&checkpoint, &[], &[file, name, "unknown quant_algo", "supported"]);
        }
    }
    let checkpoint = Copy::of(DEMO);
    checkpoint.write(QUANT, "{");
    assert_refused(&checkpoint, &[], &[QUANT, "not valid JSON"]);
}

#[test]
fn other_architectures_by_name() {
    let checkpoint = edited(TINY, CONFIG, |config| config["model_type"] = "glm5_next".into());
    assert_refused(&checkpoint, &[], &[CONFIG, "glm5_next", "GLM-5.3-Flash", "use GLM-5"]);
    for other in [json!("llama"), json!(3), Value::Null] {
        let checkpoint = edited(TINY, CONFIG, |config| config["model_type"] = other.clone());
        assert_refused(&checkpoint, &[], &[CONFIG, "model_type", &other.to_string()]);
    }
}

#[test]
fn values_of_other_models() {
    let cases = [
        ("n_group", json!(8)),
        ("scoring_func", json!("softmax")),
        ("attention_bias", json!(true)),
        ("tie_word_embeddings", json!(true)),
        ("hidden_act", json!("gelu")),
        ("indexer_rope_interleave", json!(false)),
        ("num_experts_per_tok", json!(9)),
        ("hidden_size", json!(-64)),
        ("hidden_size", json!(64.5)),
        ("hidden_size", json!("64")),
        ("vocab_size", json!(0)),
        ("n_shared_experts", json!(0)),
        ("index_topk", json!(0)),
        ("rms_norm_eps", json!(0)),
        ("eos_token_id", json!("end")),
        ("num_hidden_layers", json!(u64::MAX)),
    ];
    for (key, value) in cases {
        let checkpoint = edited(TINY, CONFIG, |config| config[key] = value);
        assert_refused(&checkpoint, &[], &[CONFIG, key]);
    }
}

#[test]
fn part_of_the_mtp_layer() {
    // One tensor short, and one tensor only.
    let first = "model.layers.8.enorm.weight";
    for keep in [false, true] {
        let checkpoint = Copy::of(DEMO);
        checkpoint.edit_tensors(|tensors| {
            tensors
                .0
                .retain(|name, _| !name.starts_with("model.layers.8.") || (name == first) == keep);
        });
        assert_eq!(checkpoint.verify(&[]).json()["mtp"], "partial");
        assert_refused(&checkpoint, &[], &["model.layers.8.", "all of layer 8", "fetch"]);
    }
    // A shard that cannot be read holds some of it, the other shard the rest.
    let checkpoint = Copy::of(DEMO);
    checkpoint.edit_tensors(|tensors| tensors.get(first).shard = SHARD_1.into());
    checkpoint.remove(SHARD_1);
    assert_eq!(checkpoint.verify(&[]).json()["mtp"], "partial");
    assert_refused(&checkpoint, &[], &[SHARD_1, "no such file"]);
}

#[test]
fn promised_mtp_layer_is_absent() {
    let checkpoint = Copy::of(DEMO);
    checkpoint.edit_tensors(|tensors| {
        tensors.0.retain(|name, _| !name.starts_with("model.layers.8."));
    });
    assert_eq!(warnings(&checkpoint), ["mtp_absent"]);
    assert_eq!(checkpoint.verify(&[]).json()["mtp"], "absent");
    assert_generates(&checkpoint, "layer 8");
}

#[test]
fn unknown_tensors_in_one_line() {
    let checkpoint = Copy::of(DEMO);
    checkpoint.edit_tensors(|tensors| {
        for number in 0..1000 {
            let tensor = common::Tensor::f32(&[1], &[0.0], SHARD_1);
            tensors.0.insert(format!("vision.blocks.{number}.weight"), tensor);
        }
    });
    assert_eq!(warnings(&checkpoint), ["unknown_tensors"]);
    assert_generates(&checkpoint, "1000 others: vision.blocks.0.weight");
}

#[test]
fn unrelated_shard() {
    let checkpoint = Copy::of(DEMO);
    let head = common::repository("demo/glm-demo-eagle3/model.safetensors");
    std::fs::copy(head, checkpoint.file("other.safetensors")).unwrap();
    assert_eq!(warnings(&checkpoint), ["extra_shard"]);
    assert_generates(&checkpoint, "other.safetensors");
    // It need not even be a shard.
    checkpoint.write("other.safetensors", "no shard");
    assert_eq!(warnings(&checkpoint), ["extra_shard"]);
    assert_generates(&checkpoint, "other.safetensors");
}

#[test]
fn no_tokenizer() {
    let checkpoint = Copy::of(DEMO);
    checkpoint.remove("tokenizer.json");
    assert_eq!(warnings(&checkpoint), ["no_tokenizer"]);
    assert_generates(&checkpoint, "");
    let outcome = common::talon(&["generate", "--model", checkpoint.arg(), "hello"]);
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    let last = outcome.stderr.lines().last().unwrap();
    assert!(last.contains("no tokenizer.json") && last.contains("--tokens"), "{outcome:?}");
}

#[test]
fn total_size_that_disagrees() {
    let checkpoint = edited(DEMO, INDEX, |index| index["metadata"]["total_size"] = 17.into());
    assert_eq!(warnings(&checkpoint), ["index_total_size"]);
    assert_generates(&checkpoint, "17 bytes");
}

#[test]
fn context_beyond_the_positions() {
    let checkpoint = edited(TINY, CONFIG, |config| config["max_position_embeddings"] = 16.into());
    let generate = |context: &str| {
        let outcome = checkpoint.generate(&[1], &["--max-tokens", "1", "--context", context]);
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        outcome.stderr
    };
    assert!(generate("17").contains("--context 17: the model was made for 16 positions"));
    assert!(!generate("16").contains("--context"));
}

/// A terminal would obey what stands in a key.
#[test]
fn keys_with_control_characters() {
    let checkpoint = edited(TINY, CONFIG, |config| config["a\u{1b}[2J\nb"] = 1.into());
    let outcome = checkpoint.generate(&[1], &["--max-tokens", "1"]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let line = outcome.stderr.lines().find(|line| line.contains("does not know")).unwrap();
    assert!(line.contains("a [2J b") && !outcome.stderr.contains('\u{1b}'), "{outcome:?}");
}
