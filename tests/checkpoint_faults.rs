//! Promise: every fault of a checkpoint's files is refused with exit code 2 and one line that names
//! the file or the tensor and what to do; never a panic, a signal or a hang.

mod common;

use common::{
    Copy, DEMO, INDEX, SHARD_1, SHARD_2, TINY, assert_names, assert_one_line, assert_refused,
    read_json, repository, talon,
};
use serde_json::{Value, json};
use talon::weights::read_header;

const EXPERT: &str = "model.layers.1.mlp.experts.3.gate_proj.weight";
const NORM: &str = "model.layers.1.input_layernorm.weight";
const BIAS: &str = "model.layers.1.mlp.gate.e_score_correction_bias";

/// New offsets for a tensor at start..end.
type Offsets = fn(u64, u64) -> Value;
type Edit = fn(&mut Value);

/// The greedy tokens of a sound checkpoint.
fn tokens(checkpoint: &Copy, more: &[&str]) -> Value {
    let outcome = checkpoint.generate(&[1, 2, 3], &[more, &["--max-tokens", "8"]].concat());
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    outcome.json()["tokens"].clone()
}

#[test]
fn missing_shard() {
    let checkpoint = Copy::of(TINY);
    checkpoint.remove(SHARD_2);
    assert_refused(&checkpoint, &[], &[SHARD_2, "no such file", "fetch"]);
    // By the shards that are there, it is a tensor that is missing.
    assert_refused(&checkpoint, &["--ignore-index"], &["model.", "no such tensor", "fetch"]);
}

/// Every length in and around the header, and a sweep of the data, in the process itself.
#[test]
fn truncated_at_any_byte() {
    let whole = std::fs::read(repository(TINY).join(SHARD_1)).unwrap();
    let data_start = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    assert!(read_header("shard", &whole).is_ok());
    let data = (data_start..whole.len()).step_by(997);
    for length in (0..data_start + 64).chain(data).chain(whole.len() - 64..whole.len()) {
        let error = read_header("shard", &whole[..length]).expect_err(&format!("{length} bytes"));
        assert_eq!(error.exit_code(), 2, "{length} bytes: {error}");
        assert!(error.to_string().starts_with("shard: "), "{length} bytes: {error}");
    }
}

#[test]
fn truncated_at_some_bytes_through_the_binary() {
    let checkpoint = Copy::of(TINY);
    let whole = std::fs::read(checkpoint.file(SHARD_2)).unwrap();
    let data_start = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for length in [0, 7, 8, 9, 4096, data_start - 1, data_start, whole.len() / 2, whole.len() - 1] {
        checkpoint.write(SHARD_2, &whole[..length]);
        assert_refused(&checkpoint, &[], &[SHARD_2, "fetch the file again"]);
    }
}

#[test]
fn absurd_header_length() {
    let checkpoint = Copy::of(TINY);
    let whole = std::fs::read(checkpoint.file(SHARD_1)).unwrap();
    let longer = whole.len() as u64;
    for length in [1 << 63, u64::MAX, u64::MAX - 7, i64::MAX as u64, longer, longer - 7, 0] {
        checkpoint.edit_bytes(SHARD_1, |bytes| bytes[..8].copy_from_slice(&length.to_le_bytes()));
        assert_refused(&checkpoint, &[], &[SHARD_1, "header", "fetch the file again"]);
    }
}

/// Offsets that do not tile the data, each made from a sound header.
#[test]
fn wrong_offsets() {
    let cases: [(&str, Offsets); 6] = [
        ("overlap", |start, end| json!([start - 16, end - 16])),
        ("gap", |start, end| json!([start + 16, end + 16])),
        ("reversed", |start, end| json!([end, start])),
        ("beyond the file", |start, end| json!([start + (1 << 40), end + (1 << 40)])),
        ("overflow", |_, _| json!([u64::MAX - 1, u64::MAX])),
        ("negative", |_, end| json!([-1, end])),
    ];
    for (case, offsets) in cases {
        let checkpoint = Copy::of(TINY);
        checkpoint.edit_header(SHARD_1, |header| {
            let found = &mut header[NORM]["data_offsets"];
            let (start, end) = (found[0].as_u64().unwrap(), found[1].as_u64().unwrap());
            assert!(start > 16, "{case}: the first tensor cannot overlap another");
            *found = offsets(start, end);
        });
        assert_refused(&checkpoint, &[], &[SHARD_1, "tensor", "fetch the file again"]);
    }
}

/// A gap, an overlap and a tail that are the only fault: all later offsets move along.
#[test]
fn offsets_that_do_not_tile_the_data() {
    for (by, fault) in [(16i64, "(a gap)"), (-16, "overlap")] {
        let checkpoint = Copy::of(TINY);
        checkpoint.edit_bytes(SHARD_1, |bytes| {
            let (mut header, mut data) = common::split_shard(bytes);
            let offset = |info: &Value, i: usize| info["data_offsets"][i].as_i64().unwrap();
            let first = offset(&header[NORM], 0);
            for info in header.values_mut().filter(|info| info.get("dtype").is_some()) {
                let (start, end) = (offset(info, 0), offset(info, 1));
                if start >= first {
                    info["data_offsets"] = json!([start + by, end + by]);
                }
            }
            data.resize((data.len() as i64 + by) as usize, 0);
            *bytes = common::join_shard(&header, &data);
        });
        assert_refused(&checkpoint, &[], &[SHARD_1, NORM, fault, "fetch the file again"]);
    }
    let checkpoint = Copy::of(TINY);
    checkpoint.edit_bytes(SHARD_1, |bytes| bytes.push(0));
    assert_refused(&checkpoint, &[], &[SHARD_1, "from the header", "fetch the file again"]);
}

#[test]
fn header_that_is_no_table_of_tensors() {
    for header in ["[]", "{\"a\":1}", "nonsense", "{\"a\":{\"dtype\":\"X9\"}}", "\u{0}\u{0}", ""] {
        let checkpoint = Copy::of(TINY);
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        checkpoint.write(SHARD_1, bytes);
        assert_refused(&checkpoint, &[], &[SHARD_1, "header", "fetch the file again"]);
    }
}

#[test]
fn wrong_dtype() {
    for (tensor, dtype) in [(NORM, "F16"), (NORM, "I16"), (BIAS, "I32"), (EXPERT, "F16")] {
        let checkpoint = Copy::of(TINY);
        checkpoint.edit_tensors(|tensors| tensors.get(tensor).dtype = dtype.into());
        assert_refused(&checkpoint, &[], &["safetensors", tensor, dtype, "use an export"]);
    }
    // Values near 7 do not survive BF16, so a bias stored so has lost what it is for.
    let checkpoint = Copy::of(TINY);
    checkpoint.edit_tensors(|tensors| {
        let bias = tensors.get(BIAS);
        let shape = bias.shape.clone();
        bias.dtype = "BF16".into();
        bias.bytes = vec![0x40; 2 * shape[0]];
    });
    assert_refused(&checkpoint, &[], &[BIAS, "expected F32, found BF16", "use an export"]);
}

#[test]
fn wrong_shape() {
    for tensor in [NORM, EXPERT, BIAS, "lm_head.weight", "model.embed_tokens.weight"] {
        let checkpoint = Copy::of(TINY);
        checkpoint.edit_tensors(|tensors| {
            let shape = &mut tensors.get(tensor).shape;
            *shape = vec![2, shape.iter().product::<usize>() / 2];
        });
        assert_refused(&checkpoint, &[], &["safetensors", tensor, "shape [2, ", "config.json"]);
    }
}

#[test]
fn missing_tensor() {
    for tensor in [NORM, EXPERT, BIAS, "lm_head.weight"] {
        let checkpoint = Copy::of(TINY);
        checkpoint.edit_tensors(|tensors| drop(tensors.remove(tensor)));
        assert_refused(&checkpoint, &[], &[tensor, "no such tensor", "fetch"]);
    }
}

#[test]
fn missing_scales() {
    for suffix in ["_scale", "_scale_2"] {
        let scale = format!("{EXPERT}{suffix}");
        let checkpoint = Copy::of(DEMO);
        checkpoint.edit_tensors(|tensors| drop(tensors.remove(&scale)));
        assert_refused(&checkpoint, &[], &["safetensors", &scale, "no such tensor", "fetch"]);
    }
}

#[test]
fn wrong_shape_or_dtype_of_a_scale() {
    let scale = format!("{EXPERT}_scale");
    let scale_2 = format!("{EXPERT}_scale_2");
    let checkpoint = Copy::of(DEMO);
    checkpoint.edit_tensors(|tensors| tensors.get(&scale).shape.swap(0, 1));
    assert_refused(&checkpoint, &[], &[&scale, "expected shape [128, 16]", "config.json"]);
    let checkpoint = Copy::of(DEMO);
    checkpoint.edit_tensors(|tensors| tensors.get(&scale).dtype = "F8_E5M2".into());
    assert_refused(&checkpoint, &[], &[&scale, "F8_E5M2", "use an export"]);
    let checkpoint = Copy::of(DEMO);
    checkpoint.edit_tensors(|tensors| {
        let scale = tensors.get(&scale_2);
        scale.shape = vec![2];
        scale.bytes.extend([0; 4]);
    });
    assert_refused(&checkpoint, &[], &[&scale_2, "expected a single number", "shape [2]"]);
}

/// NaN and infinite scales: loading refuses them, `verify` where it reads the data.
#[test]
fn scales_that_are_no_numbers() {
    let cases = [
        ("_scale", vec![0x7F]),
        ("_scale", vec![0xFF]),
        ("_scale_2", f32::NAN.to_le_bytes().to_vec()),
        ("_scale_2", f32::INFINITY.to_le_bytes().to_vec()),
    ];
    for (suffix, bytes) in cases {
        let scale = format!("{EXPERT}{suffix}");
        let checkpoint = Copy::of(DEMO);
        checkpoint.edit_tensors(|tensors| {
            let stored = &mut tensors.get(&scale).bytes;
            let at = stored.len() - bytes.len();
            stored[at..].copy_from_slice(&bytes);
        });
        assert_eq!(checkpoint.verify(&[]).code, Some(0), "headers are sound");
        let words = [scale.as_str(), "finite", "fetch the shard again"];
        let verified = checkpoint.verify(&["--scales"]);
        assert_eq!(verified.code, Some(2), "{verified:?}");
        assert_names(&verified, &verified.stdout, &words);
        assert_one_line(&checkpoint.generate(&[1], &["--max-tokens", "1"]), &words);
    }
}

/// What an interrupted download leaves of a file whose length was set beforehand.
#[test]
fn scales_in_a_hole() {
    for suffix in ["_scale", "_scale_2"] {
        let scale = format!("{EXPERT}{suffix}");
        let checkpoint = Copy::of(DEMO);
        checkpoint.edit_tensors(|tensors| tensors.get(&scale).bytes.fill(0));
        let words = [scale.as_str(), "zero scales, as a hole", "fetch the shard again"];
        let verified = checkpoint.verify(&["--scales"]);
        assert_eq!(verified.code, Some(2), "{verified:?}");
        assert_names(&verified, &verified.stdout, &words);
        assert_one_line(&checkpoint.generate(&[1], &["--max-tokens", "1"]), &words);
    }
}

/// An index that disagrees with sound shards; `--ignore-index` goes by the shards.
#[test]
fn stale_index() {
    let edits: [(&str, Edit); 3] = [
        ("no shard has it", |index| index["weight_map"]["model.ghost"] = SHARD_1.into()),
        ("only in model-0000", |index| {
            index["weight_map"].as_object_mut().unwrap().remove(NORM).unwrap();
        }),
        (SHARD_2, |index| {
            let shard = &mut index["weight_map"][NORM];
            *shard = if *shard == SHARD_1 { SHARD_2.into() } else { SHARD_1.into() };
        }),
    ];
    let sound = tokens(&Copy::of(TINY), &[]);
    for (found, edit) in edits {
        let checkpoint = Copy::of(TINY);
        checkpoint.edit_json(INDEX, edit);
        assert_refused(&checkpoint, &[], &[INDEX, found, "--ignore-index"]);
        let verified = checkpoint.verify(&["--ignore-index"]);
        assert_eq!(verified.code, Some(0), "{verified:?}");
        assert_eq!(tokens(&checkpoint, &["--ignore-index"]), sound);
    }
}

#[test]
fn unreadable_index() {
    for text in ["", "{", "[]", "{}", "{\"weight_map\": 3}", "{\"weight_map\": {\"a\": 1}}"] {
        let checkpoint = Copy::of(TINY);
        checkpoint.write(INDEX, text);
        assert_refused(&checkpoint, &[], &[INDEX, "not a shard index", "--ignore-index"]);
        assert_eq!(checkpoint.verify(&["--ignore-index"]).code, Some(0));
    }
}

#[test]
fn tensor_in_two_shards() {
    let checkpoint = Copy::of(TINY);
    std::fs::copy(checkpoint.file(SHARD_1), checkpoint.file("copy.safetensors")).unwrap();
    assert_refused(&checkpoint, &["--ignore-index"], &["second copy", "remove the shard"]);
    // The index names one of them, so the other is only a file too many.
    assert_eq!(checkpoint.verify(&[]).code, Some(0));
}

#[test]
fn tensor_twice_in_one_header() {
    let checkpoint = Copy::of(TINY);
    checkpoint.edit_bytes(SHARD_1, |bytes| {
        // Another tensor takes a name that is in the header already.
        let (header, data) = common::split_shard(bytes);
        let text = serde_json::to_string(&header).unwrap();
        let other = "model.layers.1.post_attention_layernorm.weight";
        let text = text.replace(other, NORM);
        *bytes = [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &data].concat();
    });
    assert_refused(&checkpoint, &["--ignore-index"], &[SHARD_1, NORM, "second copy"]);
}

/// What is named like a shard and is none must not be waited for.
#[test]
fn pipe_or_directory_in_a_shards_place() {
    let checkpoint = Copy::of(TINY);
    for kind in ["mkfifo", "mkdir"] {
        let path = checkpoint.file(SHARD_1);
        let _ = std::fs::remove_file(&path);
        let made = std::process::Command::new(kind).arg(&path).status().unwrap();
        assert!(made.success());
        assert_refused(&checkpoint, &[], &[SHARD_1, "not a regular file", "check"]);
        assert_refused(&checkpoint, &["--ignore-index"], &["no such tensor", "fetch"]);
    }
    checkpoint.remove("config.json");
    std::fs::create_dir(checkpoint.file("config.json")).unwrap();
    assert_refused(&checkpoint, &[], &["config.json", "not a regular file", "check"]);
}

#[test]
fn no_checkpoint_at_all() {
    for command in [&["generate", "hello"][..], &["verify"]] {
        let missing = talon(&[command, &["--model", "/no/such/model"]].concat());
        assert_one_line(&missing, &["/no/such/model", "--model"]);
    }
    let checkpoint = Copy::of(TINY);
    for file in [SHARD_1, SHARD_2, INDEX] {
        checkpoint.remove(file);
    }
    assert_refused(&checkpoint, &[], &["no tensors", "*.safetensors"]);
    let index = read_json(&repository(TINY).join(INDEX));
    checkpoint.write(INDEX, index.to_string());
    assert_refused(&checkpoint, &[], &[SHARD_1, "no such file"]);
}

/// `verify` refuses the text files that a load refuses.
#[test]
fn text_files_that_cannot_be_used() {
    for (file, text) in [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{\"added_tokens\": 3}"),
        ("generation_config.json", "{\"top_p\": 7}"),
    ] {
        let checkpoint = Copy::of(DEMO);
        checkpoint.write(file, text);
        assert_refused(&checkpoint, &[], &[file, "from the checkpoint again"]);
    }
}

/// A chat template is needed for chats alone.
#[test]
fn a_bad_template_is_refused_where_it_is_used() {
    let checkpoint = Copy::of(DEMO);
    checkpoint.write("chat_template.jinja", "a\n{% if %}");
    let words = ["chat_template.jinja", "line 2", "syntax error"];
    let verified = checkpoint.verify(&[]);
    assert_eq!(verified.code, Some(2), "{verified:?}");
    assert_names(&verified, &verified.stdout, &words);
    let file = checkpoint.file("chat_template.jinja").display().to_string();
    assert_eq!(verified.json()["problems"][0]["file"], file);
    let generate = |more: &[&str]| {
        let args = ["generate", "--model", checkpoint.arg(), "--backend", "cpu"];
        talon(&[&args[..], &["--max-tokens", "1", "hello"], more].concat())
    };
    assert_one_line(&generate(&[]), &words);
    let raw = generate(&["--raw"]);
    assert_eq!(raw.code, Some(0), "{raw:?}");
    assert_eq!(tokens(&checkpoint, &[]).as_array().unwrap().len(), 8);
}

/// An index reaches no file outside of its folder.
#[test]
fn index_with_paths() {
    for name in ["../x.safetensors", "a/x.safetensors", "/etc/passwd", "..", ""] {
        let checkpoint = Copy::of(TINY);
        checkpoint.edit_json(INDEX, |index| index["weight_map"][NORM] = name.into());
        assert_refused(&checkpoint, &[], &[INDEX, NORM, &format!("{name:?}"), "--ignore-index"]);
    }
}

/// A drafter that cannot be used is no fault of the model.
#[test]
fn damaged_drafter_folder() {
    let checkpoint = Copy::of(DEMO);
    let head = checkpoint.file("eagle3");
    std::fs::create_dir(&head).unwrap();
    let check = |word: &str| {
        let verified = checkpoint.verify(&[]);
        assert_eq!(verified.code, Some(0), "{verified:?}");
        let problem = &verified.json()["problems"][0];
        assert_eq!((&problem["kind"], &problem["severity"]), (&"eagle3".into(), &"warning".into()));
        assert_names(&verified, problem["found"].as_str().unwrap(), &["eagle3", word]);
    };
    check("not found");
    let sound = repository("demo/glm-demo-eagle3");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(sound.join(file), head.join(file)).unwrap();
    }
    let verified = checkpoint.verify(&[]);
    assert_eq!(verified.json()["problems"], json!([]), "{verified:?}");
    checkpoint.edit_bytes("eagle3/model.safetensors", |bytes| bytes.truncate(100));
    check("model.safetensors");
    assert_eq!(tokens(&checkpoint, &["--draft", "none"]).as_array().unwrap().len(), 8);
}

/// A program that asks for JSON gets JSON, whatever is wrong.
#[test]
fn report_of_a_checkpoint_that_cannot_be_opened() {
    let checkpoint = Copy::of(TINY);
    checkpoint.write("config.json", "{");
    let verified = checkpoint.verify(&[]);
    assert_eq!(verified.code, Some(2), "{verified:?}");
    let report = verified.json();
    assert_eq!(report["ok"], false);
    let problem = &report["problems"][0];
    assert_eq!(problem["severity"], "error");
    assert_eq!(problem["file"], checkpoint.file("config.json").display().to_string());
    assert_names(&verified, problem["found"].as_str().unwrap(), &["not valid JSON"]);
}
