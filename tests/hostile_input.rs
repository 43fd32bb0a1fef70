//! Promise: no bytes in a shard's header, an index or a config make talon panic, hang or read outside
//! of a file. `PROPTEST_CASES=100000` soaks.

mod common;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use common::{Copy, INDEX, SHARD_1, TINY, read_json, repository};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use talon::engine::{Engine, Flow, LoadOptions, Request, Sampling};
use talon::model::{ModelConfig, Quantization};
use talon::weights::{Audit, Checkpoint, Manifest, Source, audit, read_header};

/// A sound small header and the length of its data.
static HEADER: LazyLock<(Map<String, Value>, usize)> = LazyLock::new(|| {
    let mut header = Map::new();
    let mut end = 0;
    for (name, dtype, shape) in [
        ("a", "F32", vec![4, 3]),
        ("b", "BF16", vec![16]),
        ("c", "U8", vec![]),
        ("d", "F8_E4M3", vec![2, 0, 3]),
        ("e", "I64", vec![1, 1, 1]),
    ] {
        let bits = [("F32", 32), ("BF16", 16), ("I64", 64)];
        let bits = bits.iter().find(|(name, _)| *name == dtype).map_or(8, |(_, bits)| *bits);
        let start = end;
        end += shape.iter().product::<usize>() * bits / 8;
        header.insert(
            name.into(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}),
        );
    }
    (header, end)
});

static CONFIGS: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let file = |name: &str| read_json(&repository(name));
    vec![
        file("weights-manifest/configs/glm-5.2.json"),
        file("weights-manifest/configs/glm-5.json"),
        file("tests/fixtures/tiny-random/config.json"),
        file("demo/glm-demo/config.json"),
        file("demo/glm-demo/hf_quant_config.json"),
    ]
});

/// Values that numbers and words in a file get replaced by.
fn odd_value() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0..64u32).prop_map(|bit| (1u64 << bit).into()),
        (0..64u32).prop_map(|bit| (u64::MAX >> bit).into()),
        (0..100u64).prop_map(Value::from),
    ];
    let words = vec![
        "F32",
        "F4",
        "F6_E2M3",
        "BF16",
        "full",
        "shared",
        "FFFS",
        "NVFP4",
        "yarn",
        "é\n\u{1b}\0",
    ];
    prop_oneof![
        4 => number,
        2 => prop::sample::select(words.to_vec()).prop_map(Value::from),
        1 => Just(Value::Null),
        1 => Just(json!([])),
        1 => Just(json!({})),
        1 => any::<bool>().prop_map(Value::from),
        1 => prop::collection::vec(any::<u32>(), 0..9).prop_map(Value::from),
        1 => (1..200usize).prop_map(|n| json!(vec!["shared"; n])),
        1 => (1..100usize).prop_map(nested),
    ]
}

fn nested(depth: usize) -> Value {
    (0..depth).fold(Value::Null, |value, _| json!([value]))
}

/// Replaces, removes or repeats values at places that `picks` choose.
fn mutate(value: &mut Value, picks: &[(usize, u8, Value)]) {
    for (pick, kind, odd) in picks {
        let mut places = Vec::new();
        pointers(value, String::new(), &mut places);
        let place = &places[pick % places.len()];
        match (kind % 4, value.pointer_mut(place)) {
            (0, Some(Value::Object(map))) => map.clear(),
            (1, Some(Value::Array(list))) => drop(list.pop()),
            (2, Some(Value::Array(list))) => list.push(odd.clone()),
            (_, Some(found)) => *found = odd.clone(),
            (_, None) => {}
        }
    }
}

fn pointers(value: &Value, at: String, places: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            map.iter().for_each(|(key, value)| pointers(value, format!("{at}/{key}"), places));
        }
        Value::Array(list) => {
            (0..).zip(list).for_each(|(i, value)| pointers(value, format!("{at}/{i}"), places));
        }
        _ => {}
    }
    places.push(at);
}

fn picks() -> impl Strategy<Value = Vec<(usize, u8, Value)>> {
    prop::collection::vec((any::<usize>(), any::<u8>(), odd_value()), 1..4)
}

/// On success the ranges tile the file's data; an error is one line that names the file.
fn check_header(bytes: &[u8]) {
    match read_header("shard", bytes) {
        Ok(header) => {
            let mut end_of_previous = 0;
            for (name, info) in &header.tensors {
                let (start, end) = info.data_offsets;
                assert!(start <= end && start == end_of_previous, "{name}: {start}..{end}");
                let bits = info.shape.iter().product::<usize>() * info.dtype.bitsize();
                assert_eq!(bits, (end - start) * 8, "{name}");
                end_of_previous = end;
            }
            assert_eq!(header.data_start + end_of_previous, bytes.len());
        }
        Err(error) => check_error(&error, "shard"),
    }
}

fn check_error(error: &talon::error::Error, file: &str) {
    let line = error.to_string();
    assert_eq!(error.exit_code(), 2, "{line}");
    assert!(line.contains(file) && !line.contains(char::is_control), "{line}");
    assert!(line.len() < 100_000, "a line of {} bytes", line.len());
}

fn check_config(json: &[u8]) {
    let started = Instant::now();
    if let Err(error) = ModelConfig::from_json("config.json", json) {
        check_error(&error, "config.json");
    }
    for quantization in [
        Quantization::from_json(("config.json", json), None),
        Quantization::from_json(("config.json", b"{}"), Some(("config.json", json))),
    ] {
        if let Err(error) = quantization {
            check_error(&error, "config.json");
        }
    }
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

fn shard(header: &[u8], data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, &vec![0; data]].concat()
}

proptest! {
    #![proptest_config(settings(1))]

    #[test]
    fn headers_of_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        check_header(&bytes);
        check_header(&shard(&bytes, 5));
    }

    #[test]
    fn headers_with_odd_values(picks in picks(), more in 0..3usize) {
        let (header, data) = &*HEADER;
        let mut header = Value::Object(header.clone());
        mutate(&mut header, &picks);
        check_header(&shard(header.to_string().as_bytes(), data + more));
    }

    #[test]
    fn headers_with_odd_bytes(at in any::<usize>(), byte in any::<u8>(), cut in any::<usize>()) {
        let (header, data) = &*HEADER;
        let mut bytes = shard(&serde_json::to_vec(header).unwrap(), *data);
        let at = at % bytes.len();
        bytes[at] = byte;
        check_header(&bytes);
        bytes.truncate(cut % bytes.len());
        check_header(&bytes);
    }

    #[test]
    fn configs_of_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        check_config(&bytes);
    }

    #[test]
    fn configs_with_odd_values(which in any::<usize>(), picks in picks()) {
        let mut config = CONFIGS[which % CONFIGS.len()].clone();
        mutate(&mut config, &picks);
        check_config(config.to_string().as_bytes());
    }

    #[test]
    fn configs_with_odd_bytes(which in any::<usize>(), at in any::<usize>(), byte in any::<u8>()) {
        let mut bytes = CONFIGS[which % CONFIGS.len()].to_string().into_bytes();
        let at = at % bytes.len();
        bytes[at] = byte;
        check_config(&bytes);
        check_config(&bytes[..at]);
    }
}

/// As `PROPTEST_CASES` says; a failure prints its input and leaves no file.
fn settings(divisor: u32) -> ProptestConfig {
    let cases = ProptestConfig::default().cases / divisor;
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    // Each case opens a checkpoint.
    #![proptest_config(settings(8))]

    #[test]
    fn indexes_with_odd_values(picks in picks(), cut in any::<usize>()) {
        let checkpoint = Copy::of(TINY);
        let mut index = read_json(&checkpoint.file(INDEX));
        mutate(&mut index, &picks);
        let index = index.to_string();
        checkpoint.write(INDEX, &index);
        let _ = open(&checkpoint, &CONFIGS[2]);
        checkpoint.write(INDEX, &index.as_bytes()[..cut % index.len()]);
        let _ = open(&checkpoint, &CONFIGS[2]);
    }

    #[test]
    fn checkpoints_with_odd_headers_and_configs(header in picks(), config in picks()) {
        let checkpoint = Copy::of(TINY);
        checkpoint.edit_header(SHARD_1, |found| {
            let mut value = Value::Object(found.clone());
            mutate(&mut value, &header);
            if let Value::Object(changed) = value {
                *found = changed;
            }
        });
        let mut odd = CONFIGS[2].clone();
        mutate(&mut odd, &config);
        for config in [&odd, &CONFIGS[2]] {
            let _ = open(&checkpoint, config);
        }
    }
}

proptest! {
    #![proptest_config(settings(8))]

    /// What the audit lets through is loaded and run, or refused in one line.
    #[test]
    fn models_with_odd_configs(picks in picks()) {
        let checkpoint = Copy::of(TINY);
        let mut config = CONFIGS[2].clone();
        mutate(&mut config, &picks);
        checkpoint.write("config.json", config.to_string());
        let source = Source::Directory(checkpoint.path().into());
        match Engine::load(source, &LoadOptions::default(), &|_, _| ()) {
            Err(error) => check_error(&error, ""),
            Ok(mut engine) => {
                let request = Request {
                    prompt: &[1; 20],
                    max_tokens: 2,
                    sampling: Sampling::GREEDY,
                    stop_ids: &[],
                    keep_logits: false,
                    speculate: false,
                };
                if let Err(error) = engine.generate(&request, |_| Ok(Flow::Continue)) {
                    check_error(&error, "");
                }
            }
        }
    }
}

/// All that `verify` does before it prints.
fn open(checkpoint: &Copy, config: &Value) -> talon::error::Result<Audit> {
    let config = ModelConfig::from_json("config.json", config.to_string().as_bytes())?;
    let opened = Checkpoint::open(Source::Directory(checkpoint.path().into()), false)?;
    let manifest = Manifest::glm5().unwrap();
    let audit = audit(&opened, &manifest, &config.geometry()).unwrap();
    for problem in &audit.problems {
        assert!(!problem.line().contains(char::is_control), "{problem:?}");
    }
    audit.bytes_per_rank(&manifest, 8);
    Ok(audit)
}

#[test]
fn names_repeated_in_a_header() {
    let info = r#"{"dtype":"U8","shape":[2],"data_offsets":[0,2]}"#;
    let other = info.replace("[0,2]", "[2,4]");
    check_header(&shard(format!(r#"{{"a":{info},"a":{other}}}"#).as_bytes(), 4));
    check_header(&shard(format!(r#"{{"a":{info},"a":{info}}}"#).as_bytes(), 2));
    let twice = r#"{"a":{"dtype":"U8","dtype":"F32","shape":[2],"data_offsets":[0,2]}}"#;
    assert!(read_header("shard", &shard(twice.as_bytes(), 2)).is_err());
}

#[test]
fn deep_nesting() {
    for depth in [10, 100, 1000, 1_000_000] {
        let deep = "[".repeat(depth) + &"]".repeat(depth);
        for text in [
            deep.clone(),
            format!(r#"{{"__metadata__": {deep}}}"#),
            format!(r#"{{"a": {deep}}}"#),
            format!(r#"{{"a": {{"dtype": "U8", "shape": {deep}, "data_offsets": [0, 0]}}}}"#),
            format!(r#"{{"quantization_config": {deep}, "quantization": {deep}}}"#),
        ] {
            check_header(&shard(text.as_bytes(), 0));
            check_config(text.as_bytes());
            let checkpoint = Copy::of(TINY);
            checkpoint.write(INDEX, &text);
            assert_eq!(checkpoint.verify(&[]).code, Some(2));
        }
    }
}

/// Sizes that are each plausible and absurd together are refused soon, in little memory.
#[test]
fn configs_that_are_huge_in_a_product() {
    let huge = [
        json!({"num_hidden_layers": 10_000, "n_routed_experts": 16_000_000}),
        json!({"num_hidden_layers": 1_000, "n_routed_experts": 1_000}),
        json!({"num_hidden_layers": 1_000, "n_routed_experts": 40}),
        json!({"num_hidden_layers": 6, "n_routed_experts": 6_666}),
        json!({"n_routed_experts": 16_000_000}),
        json!({"num_attention_heads": 16_000_000, "v_head_dim": 16_000_000}),
        json!({"index_n_heads": 16_000_000, "index_head_dim": 16_000_000}),
        json!({"vocab_size": 16_000_000, "hidden_size": 16_000_000}),
        json!({"moe_intermediate_size": 16_000_000, "n_shared_experts": 16_000_000}),
        json!({"index_topk": 16_000_000, "max_position_embeddings": 16_000_000}),
    ];
    for edits in huge {
        let checkpoint = Copy::of(TINY);
        checkpoint.edit_json("config.json", |config| {
            for key in ["indexer_types", "mlp_layer_types", "layer_types"] {
                config[key] = Value::Null;
            }
            config["first_k_dense_replace"] = 1.into();
            config["index_skip_topk_offset"] = 4.into();
            config["index_topk_freq"] = 100.into();
            for (key, value) in edits.as_object().unwrap() {
                config[key] = value.clone();
            }
        });
        let limit = format!("ulimit -v {}; exec \"$@\"", 2 << 20);
        let talon = env!("CARGO_BIN_EXE_talon");
        let started = Instant::now();
        let outcome = std::process::Command::new("sh")
            .args(["-c", &limit, "sh", talon, "verify", "--json", "-", "--model", checkpoint.arg()])
            // The limit is on addresses, of which every thread's arena reserves many.
            .env("MALLOC_ARENA_MAX", "1")
            .output()
            .unwrap();
        let words = String::from_utf8_lossy(&outcome.stderr);
        assert_eq!(outcome.status.code(), Some(2), "{edits}: {words}");
        assert!(started.elapsed() < Duration::from_secs(10), "{edits}: {:?}", started.elapsed());
        let generated = checkpoint.generate(&[1], &["--max-tokens", "1"]);
        assert_eq!(generated.code, Some(2), "{edits}: {generated:?}");
        assert_eq!(generated.stderr.lines().count(), 1, "{edits}: {generated:?}");
    }
}

#[test]
fn the_sound_ones_are_accepted() {
    let (header, data) = &*HEADER;
    assert!(read_header("shard", &shard(&serde_json::to_vec(header).unwrap(), *data)).is_ok());
    let whole = std::fs::read(repository(TINY).join(SHARD_1)).unwrap();
    assert!(read_header("shard", &whole).is_ok());
    assert!(CONFIGS[..4].iter().all(|config| {
        ModelConfig::from_json("config.json", config.to_string().as_bytes()).is_ok()
    }));
    let checkpoint = Copy::of(TINY);
    assert_eq!(open(&checkpoint, &CONFIGS[2]).unwrap().problems, []);
}
