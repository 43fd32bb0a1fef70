//! Promise: `talon verify` audits a checkpoint of the true size, and the manifest names exactly the
//! published tensors and bytes. The shards are sparse files: all of their headers, none of their data.

mod common;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use common::{INDEX, repository, talon};
use serde_json::{Map, Value, json};
use talon::model::ModelConfig;
use talon::weights::{Checkpoint, Geometry, Manifest, Module, Source, audit};

/// A tensor of a published layout: name, dtype, shape.
type Listed = (String, &'static str, Vec<usize>);

fn config_file(model: &str) -> std::path::PathBuf {
    repository(&format!("weights-manifest/configs/{model}.json"))
}

fn geometry(model: &str) -> Geometry {
    let json = std::fs::read(config_file(model)).unwrap();
    ModelConfig::from_json("config.json", &json).unwrap().geometry()
}

/// Modules that the published checkpoints hold, with their group; the optional copies of head and
/// embedding in the MTP layer are not among them.
fn modules(model: &str) -> Vec<(String, Module)> {
    let manifest = Manifest::glm5().unwrap();
    let modules = manifest.modules(&geometry(model)).unwrap().into_iter();
    let published = modules.filter(|module| !manifest.entries[module.entry].optional);
    published.map(|m| (manifest.entries[m.entry].group.clone(), m)).collect()
}

fn plain(module: &Module) -> Listed {
    let dtype = if module.name.ends_with("e_score_correction_bias") { "F32" } else { "BF16" };
    (module.name.clone(), dtype, module.shape.clone())
}

/// zai-org's BF16 checkpoints.
fn bf16_layout(model: &str) -> Vec<Listed> {
    modules(model).iter().map(|(_, module)| plain(module)).collect()
}

/// zai-org's FP8 checkpoints: every linear of a layer but the router, eh_proj and weights_proj.
fn fp8_layout(model: &str) -> Vec<Listed> {
    let mut tensors = Vec::new();
    for (group, module) in modules(model) {
        let linear = ["attention", "indexer", "dense", "shared", "experts"].contains(&&*group);
        if !linear || module.name.contains("weights_proj") {
            tensors.push(plain(&module));
            continue;
        }
        let blocks = module.shape.iter().map(|dim| dim.div_ceil(128)).collect();
        tensors.push((format!("{}_scale_inv", module.name), "F32", blocks));
        tensors.push((module.name, "F8_E4M3", module.shape));
    }
    tensors
}

/// nvidia's GLM-5.2-NVFP4: the routed experts of layers 3 to 77.
fn nvfp4_layout(model: &str) -> Vec<Listed> {
    let mut tensors = Vec::new();
    for (group, module) in modules(model) {
        if group != "experts" || module.layer == Some(78) {
            tensors.push(plain(&module));
            continue;
        }
        let (name, rows, columns) = (module.name, module.shape[0], module.shape[1]);
        let input_scale = name.replace(".weight", ".input_scale");
        tensors.push((format!("{name}_scale"), "F8_E4M3", vec![rows, columns / 16]));
        tensors.push((format!("{name}_scale_2"), "F32", vec![]));
        tensors.push((input_scale, "F32", vec![]));
        tensors.push((name, "U8", vec![rows, columns / 2]));
    }
    tensors
}

fn bytes((_, dtype, shape): &Listed) -> u64 {
    let size = match *dtype {
        "F32" => 4,
        "BF16" => 2,
        _ => 1,
    };
    shape.iter().product::<usize>() as u64 * size
}

fn totals(tensors: &[Listed]) -> (usize, u64) {
    (tensors.len(), tensors.iter().map(bytes).sum())
}

#[test]
fn the_manifest_names_the_published_tensors_and_bytes() {
    assert_eq!(totals(&bf16_layout("glm-5")), (59_870, 1_507_728_316_928));
    assert_eq!(totals(&bf16_layout("glm-5.1")), (59_870, 1_507_728_316_928));
    assert_eq!(totals(&bf16_layout("glm-5.2")), (59_585, 1_506_659_919_872));
    assert_eq!(totals(&bf16_layout("glm-5.3")), (59_585, 1_506_659_919_872));
    assert_eq!(totals(&fp8_layout("glm-5.3")), (118_629, 755_617_140_416));
    assert_eq!(totals(&fp8_layout("glm-5.1")), (119_028, 756_162_687_872));
    assert_eq!(totals(&nvfp4_layout("glm-5.2")), (232_385, 464_795_267_072));
}

/// Writes the shards' headers, the index and the configs; the data are holes.
fn write_sparse(directory: &Path, tensors: &[Listed], shards: usize) {
    let total: u64 = tensors.iter().map(bytes).sum();
    let shard_name = |shard: usize| format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
    let mut files: Vec<(Map<String, Value>, u64)> = vec![(Map::new(), 0); shards];
    let mut weight_map = Map::new();
    let mut before = 0;
    for tensor in tensors {
        let shard = (before * shards as u64 / total) as usize;
        before += bytes(tensor);
        let (header, data) = &mut files[shard];
        let offsets = [*data, *data + bytes(tensor)];
        *data = offsets[1];
        let (name, dtype, shape) = tensor;
        let info = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
        header.insert(name.clone(), info);
        weight_map.insert(name.clone(), shard_name(shard).into());
    }
    for (shard, (header, data)) in files.iter().enumerate() {
        let mut file = File::create(directory.join(shard_name(shard))).unwrap();
        let header = common::join_shard(header, &[]);
        file.write_all(&header).unwrap();
        file.set_len(header.len() as u64 + data).unwrap();
        let on_disk = file.metadata().unwrap().blocks() * 512;
        assert!(on_disk < 16 << 20, "the disk stores holes: {on_disk} bytes");
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    std::fs::write(directory.join(INDEX), index.to_string()).unwrap();
    std::fs::copy(config_file("glm-5.2"), directory.join("config.json")).unwrap();
    let quantization =
        json!({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16});
    let quantization = json!({"producer": {"name": "modelopt"}, "quantization": quantization});
    std::fs::write(directory.join("hf_quant_config.json"), quantization.to_string()).unwrap();
}

/// Bytes of one of 8 ranks, from the shapes alone.
fn bytes_per_rank() -> u64 {
    let (hidden, heads, latent, width) = (6144, 64, 512, 2048);
    let norms = 2 * hidden + 2048 + latent;
    let attention = 2048 * hidden + (latent + 64) * hidden;
    let indexer = 4096 * 2048 + 128 * hidden + 2 * 128 + 32 * hidden;
    let mtp = 3 * hidden + hidden * 2 * hidden;
    let everywhere = 154_880 * hidden + hidden + 79 * (norms + attention) + 22 * indexer + mtp;
    let router = 76 * (256 * hidden * 2 + 256 * 4);

    let heads_of_a_layer = heads * 256 * 2048 + heads * (192 + 256) * latent + hidden * heads * 256;
    let expert = 3 * width * hidden;
    let shared = 154_880 * hidden + 79 * heads_of_a_layer + 3 * 3 * 12_288 * hidden + 76 * expert;
    let mtp_experts = 256 * expert;
    let codes_and_scales = 75 * 256 * (expert / 2 + expert / 16);
    let single_scales = 75 * 256 * 3 * 2 * 4;
    2 * everywhere + router + (2 * shared + 2 * mtp_experts + codes_and_scales) / 8 + single_scales
}

#[test]
fn verify_audits_glm_5_2_at_full_scale() {
    let directory = tempfile::tempdir().unwrap();
    write_sparse(directory.path(), &nvfp4_layout("glm-5.2"), 47);
    let model = directory.path().to_str().unwrap();

    let started = Instant::now();
    let outcome = talon(&["verify", "--model", model, "--json", "-"]);
    println!("talon verify: {:?}", started.elapsed());
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let report = outcome.json();
    assert_eq!(report["ok"], true);
    assert_eq!(report["tensors"], 232_385);
    assert_eq!(report["bytes"], 464_795_267_072u64);
    assert_eq!(report["shards"], 47);
    assert_eq!(report["mtp"], "complete");
    assert_eq!(report["layout"], "experts nvfp4, rest bf16");
    assert_eq!((&report["tp"], &report["bytes_per_rank"]), (&8.into(), &bytes_per_rank().into()));
    let kinds: Vec<&Value> =
        report["problems"].as_array().unwrap().iter().map(|problem| &problem["kind"]).collect();
    assert_eq!(kinds, ["no_tokenizer"]);

    // Where the time goes, for those who look: cargo test --test full_scale -- --nocapture
    let source = Source::Directory(directory.path().to_owned());
    let manifest = Manifest::glm5().unwrap();
    let geometry = geometry("glm-5.2");
    let started = Instant::now();
    let checkpoint = Checkpoint::open(source, false).unwrap();
    println!("open: {:?}", started.elapsed());
    let started = Instant::now();
    let modules = manifest.modules(&geometry).unwrap();
    println!("manifest: {:?} for {} modules", started.elapsed(), modules.len());
    let started = Instant::now();
    let audit = audit(&checkpoint, &manifest, &geometry).unwrap();
    println!("audit: {:?}", started.elapsed());
    assert_eq!(audit.problems, []);
}
