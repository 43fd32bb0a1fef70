//! Promise: `talon verify --pack` cuts a checkpoint for a number of ranks without changing what the
//! model says; the pack stands alone, refuses what it was not made for, and is there whole or not at
//! all.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::{
    Copy, DEMO, Outcome, TINY, assert_one_line, command, generate, quantise, read_json, repository,
    talon,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use talon::engine::{Engine, LoadOptions};
use talon::weights::Source;
use tempfile::TempDir;

const PACK: &str = "talon-pack.json";
const PROMPT: [u32; 9] = [1, 2, 3, 50, 60, 70, 80, 90, 100];

/// A pack of a model in a folder that goes away with it.
struct Pack {
    folder: TempDir,
}

impl Pack {
    fn of(model: &str, tp: usize) -> Self {
        let pack = Self { folder: tempfile::tempdir().unwrap() };
        let outcome = pack.write(model, tp);
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        pack
    }

    fn write(&self, model: &str, tp: usize) -> Outcome {
        let tp = tp.to_string();
        talon(&["verify", "--model", model, "--tp", &tp, "--pack", self.arg(), "--json", "-"])
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("pack")
    }

    fn arg(&self) -> &'static str {
        self.path().display().to_string().leak()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// The file whose name ends so.
    fn shard(&self, end: &str) -> PathBuf {
        let found = files(&self.path()).into_keys().find(|name| name.ends_with(end));
        self.file(&found.unwrap_or_else(|| panic!("no {end}")))
    }

    fn edit_json(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut value = read_json(&self.file(name));
        edit(&mut value);
        std::fs::write(self.file(name), value.to_string()).unwrap();
    }
}

/// Names and sizes below a folder; none if it is not there.
fn files(folder: &Path) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            found.extend(files(&path).into_iter().map(|(sub, n)| (format!("{name}/{sub}"), n)));
        } else {
            found.insert(name, path.metadata().unwrap().len());
        }
    }
    found
}

/// Tokens and, bit for bit, the logits of a run.
fn answer(model: &str, more: &[&str]) -> (Value, Vec<u8>) {
    let logits = tempfile::NamedTempFile::new().unwrap();
    let file = logits.path().to_str().unwrap();
    let args = ["--max-tokens", "12", "--backend", "cpu", "--logits", file];
    let outcome = generate(model, &PROMPT, &[&args, more].concat());
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    (outcome.json()["tokens"].clone(), std::fs::read(logits.path()).unwrap())
}

fn assert_same(model: &str, ranks: &[usize], more: &[&str]) {
    for tp in ranks {
        let pack = Pack::of(model, *tp);
        let (count, number) = (tp.to_string(), ["--tp", &tp.to_string()].map(str::to_owned));
        let with_tp: Vec<&str> =
            number.iter().map(String::as_str).chain(more.iter().copied()).collect();
        let (tokens, logits) = answer(model, &with_tp);
        // A pack says for how many ranks it is.
        let (packed_tokens, packed_logits) = answer(pack.arg(), more);
        assert_eq!(tokens, packed_tokens, "{model} on {count}");
        assert!(logits == packed_logits, "{model} on {count}: other logits");
    }
}

#[test]
fn the_demo_says_the_same_from_a_pack() {
    for draft in ["none", "mtp", "auto"] {
        let ranks: &[usize] = if draft == "none" { &[1, 2, 4, 8] } else { &[2] };
        assert_same("demo", ranks, &["--draft", draft]);
    }
    assert_same("demo", &[4], &["--draft", "none", "--dense-weights", "fp8"]);
}

#[test]
fn the_random_model_says_the_same_from_a_pack() {
    assert_same(repository(TINY).to_str().unwrap(), &[1, 2, 4], &["--draft", "none"]);
}

/// Shares of rows and of columns in NVFP4, and FP8 with the blocks that a share may split.
#[test]
fn quantised_matrices_say_the_same_from_a_pack() {
    let nvfp4 = Copy::of(DEMO);
    nvfp4.edit_tensors(|tensors| {
        for module in ["self_attn.o_proj", "self_attn.q_b_proj", "mlp.down_proj", "mlp.gate_proj"] {
            quantise::nvfp4(tensors, &format!("model.layers.0.{module}"));
        }
    });
    assert_same(nvfp4.arg(), &[1, 2, 4], &["--draft", "none"]);
    let fp8 = Copy::of(DEMO);
    fp8.edit_tensors(|tensors| quantise::fp8(tensors, "model.layers.0.self_attn.o_proj"));
    assert_same(fp8.arg(), &[1], &["--draft", "none"]);
    let width =
        common::Tensors::read(fp8.path()).get("model.layers.0.self_attn.o_proj.weight").shape[1];
    let pack = Pack { folder: tempfile::tempdir().unwrap() };
    for tp in [2, 4, 8].into_iter().filter(|tp| !(width / tp).is_multiple_of(128)) {
        let outcome = pack.write(fp8.arg(), tp);
        assert_one_line(&outcome, &["o_proj", "block of 128", "smaller --tp"]);
        assert_eq!(files(pack.folder.path()), BTreeMap::new());
    }
}

/// What is not the model's is not in it, what is the model's is there once, and the drafter came along.
#[test]
fn a_pack_stands_alone() {
    let original = Copy::of(DEMO);
    original.write("LICENSE", "terms");
    original.write("notes.bin", "not the model's");
    let pack = Pack::of(original.arg(), 4);
    original.remove("config.json");
    let found = files(&pack.path());
    assert!(found.contains_key("LICENSE") && found.contains_key("tokenizer.json"), "{found:?}");
    assert!(!found.contains_key("notes.bin"), "{found:?}");
    assert_eq!(found.keys().filter(|name| name.ends_with(".safetensors")).count(), 5, "{found:?}");

    let verified = talon(&["verify", "--model", pack.arg(), "--scales", "--json", "-"]);
    assert_eq!(verified.code, Some(0), "{verified:?}");
    let report = verified.json();
    assert_eq!((&report["tp"], &report["mtp"]), (&json!(4), &json!("complete")), "{report}");
    assert_eq!(report["problems"], json!([]), "{report}");
    let whole = talon(&["verify", "--model", "demo", "--tp", "4", "--json", "-"]).json();
    // All but the activation scales, which nobody reads.
    let bytes = |report: &Value| report["bytes_per_rank"].as_f64().unwrap();
    let share = bytes(&report) / bytes(&whole);
    assert!(share <= 1.0 && share > 0.999, "{report} of {whole}");

    let text = talon(&["generate", "--model", pack.arg(), "--max-tokens", "8", "What is a whale?"]);
    let from = talon(&[
        "generate",
        "--model",
        "demo",
        "--tp",
        "4",
        "--max-tokens",
        "8",
        "What is a whale?",
    ]);
    assert_eq!((text.code, &text.stdout), (Some(0), &from.stdout), "{text:?}");
    // The demo in the binary has a head, which comes along.
    let with_head = Pack::of("demo", 2);
    assert!(files(&with_head.path()).contains_key("eagle3/model.safetensors"));
}

/// A pack's description is a record of its hashes.
#[test]
fn damage_is_found_by_the_packs_own_hashes() {
    let pack = Pack::of("demo", 2);
    let record = pack.file(PACK);
    let check = || {
        talon(&[
            "verify",
            "--model",
            pack.arg(),
            "--check-hashes",
            record.to_str().unwrap(),
            "--json",
            "-",
        ])
    };
    assert_eq!(check().code, Some(0));
    let shard = pack.shard("rank-1-of-2.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    let found = check();
    assert_eq!(found.code, Some(2), "{found:?}");
    assert_eq!(found.json()["problems"][0]["kind"], "wrong_hash", "{found:?}");
    assert_eq!(found.json()["problems"][0]["file"], shard.to_str().unwrap(), "{found:?}");
}

#[test]
fn what_a_pack_was_not_made_for_is_refused() {
    let pack = Pack::of("demo", 2);
    let refused = |more: &[&str], words: &[&str]| {
        let args = [&["--max-tokens", "1", "--backend", "cpu"][..], more].concat();
        assert_one_line(&generate(pack.arg(), &PROMPT, &args), words);
    };
    refused(&["--tp", "4"], &["--tp 4", "pack for 2 ranks", "use --tp 2"]);
    refused(&["--experts", "parallel"], &["--experts parallel", "pack", "--experts split"]);
    let again = Pack { folder: tempfile::tempdir().unwrap() };
    assert_one_line(&again.write(pack.arg(), 2), &["is a pack already"]);
    assert_one_line(&pack.write("demo", 2), &["is there already", "new folder"]);
    assert_one_line(
        &again.write(repository(DEMO).join("none").to_str().unwrap(), 2),
        &["config.json"],
    );

    let description = std::fs::read(pack.file(PACK)).unwrap();
    for (key, value, words) in [
        ("layout", json!(2), ["expected layout 1", "found 2"]),
        ("manifest", json!("0123"), ["another table of tensors", "found 0123"]),
        ("tp", json!(3), ["expected 1, 2, 4 or 8 ranks", "found 3"]),
        ("files", json!([]), ["config.json", "expected SHA-256"]),
        ("files", json!(7), ["not the description of a pack", PACK]),
    ] {
        pack.edit_json(PACK, |pack| pack[key] = value);
        refused(&[], &[words[0], words[1], "pack the checkpoint again"]);
        std::fs::write(pack.file(PACK), &description).unwrap();
    }
    let config = std::fs::read(pack.file("config.json")).unwrap();
    pack.edit_json("config.json", |config| config["rope_theta"] = 7.into());
    refused(&[], &["config.json", "not the file that was packed", "restore it"]);
    std::fs::write(pack.file("config.json"), config).unwrap();
    refused(&["--tp", "8"], &["--tp 8"]);
    assert_eq!(answer(pack.arg(), &[]).0, answer("demo", &["--tp", "2"]).0);
}

/// Files of two packs have different names, even if all their tensors have the same.
#[test]
fn shards_of_another_pack_are_refused() {
    let other = Copy::of(DEMO);
    let name = "model.layers.0.mlp.up_proj.weight";
    other.edit_tensors(|tensors| tensors.get(name).bytes[0] ^= 1);
    let (pack, other) = (Pack::of("demo", 2), Pack::of(other.arg(), 2));
    let own = pack.shard("rank-0-of-2.safetensors");
    let foreign = other.shard("rank-0-of-2.safetensors");
    std::fs::copy(&foreign, pack.file(foreign.file_name().unwrap().to_str().unwrap())).unwrap();
    std::fs::remove_file(&own).unwrap();
    let outcome = generate(pack.arg(), &PROMPT, &["--max-tokens", "1", "--backend", "cpu"]);
    assert_one_line(&outcome, &[own.to_str().unwrap(), "no such file"]);
}

/// The demo with a vocabulary of holes, so that packing it takes a while.
fn slow_to_pack() -> Copy {
    let checkpoint = Copy::of(DEMO);
    let hidden =
        read_json(&checkpoint.file("config.json"))["hidden_size"].as_u64().unwrap() as usize;
    let rows = (1 << 30) / (2 * hidden) / 8 * 8;
    checkpoint.edit_json("config.json", |config| config["vocab_size"] = rows.into());
    let mut head = None;
    checkpoint.edit_tensors(|tensors| {
        tensors.remove("model.embed_tokens.weight");
        head = Some(tensors.remove("lm_head.weight").shard);
    });
    let bytes = rows * hidden * 2;
    let tensor = |at: usize| json!({"dtype": "BF16", "shape": [rows, hidden], "data_offsets": [at * bytes, (at + 1) * bytes]});
    let header = json!({"model.embed_tokens.weight": tensor(0), "lm_head.weight": tensor(1)});
    let header = common::join_shard(header.as_object().unwrap(), &[]);
    let big = "model-00003-of-00003.safetensors";
    checkpoint.write(big, &header);
    let file = std::fs::File::options().write(true).open(checkpoint.file(big)).unwrap();
    file.set_len((header.len() + 2 * bytes) as u64).unwrap();
    checkpoint.edit_json(common::INDEX, |index| {
        for name in ["model.embed_tokens.weight", "lm_head.weight"] {
            index["weight_map"][name] = big.into();
        }
    });
    checkpoint
}

#[test]
fn killed_while_it_packs_it_leaves_no_pack() {
    let checkpoint = slow_to_pack();
    let pack = Pack { folder: tempfile::tempdir().unwrap() };
    let args = ["verify", "--model", checkpoint.arg(), "--tp", "2", "--pack", pack.arg()];
    let mut child = command(&args).spawn().unwrap();
    let aside = pack.folder.path().join("pack.partial");
    let deadline = Instant::now() + Duration::from_secs(30);
    while files(&aside).values().sum::<u64>() < 64 << 20 {
        assert!(Instant::now() < deadline, "nothing is written");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().code(), None, "it had ended before it was killed");
    assert!(!pack.path().exists());
    let refused = generate(aside.to_str().unwrap(), &PROMPT, &["--max-tokens", "1"]);
    assert_one_line(&refused, &["pack.partial", "config.json"]);
    // The next run does not take away what may be another's.
    assert_one_line(&pack.write("demo", 2), &["pack.partial", "remove the folder"]);
    std::fs::remove_dir_all(&aside).unwrap();
    assert_eq!(pack.write("demo", 2).code, Some(0));
}

/// A limit on the size of a file stands for a full disk: the write fails in the same place.
#[test]
fn a_disk_that_takes_no_more_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("pack");
    let limited =
        "trap '' XFSZ; ulimit -f 256; exec \"$0\" verify --model demo --tp 2 --pack \"$1\"";
    let outcome = Command::new("sh")
        .args(["-c", limited, env!("CARGO_BIN_EXE_talon"), target.to_str().unwrap()])
        .env_remove("RUST_LOG")
        .output()
        .unwrap();
    let stderr = String::from_utf8(outcome.stderr).unwrap();
    assert_eq!(outcome.status.code(), Some(1), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains("cannot write") && stderr.contains("nothing is left"), "{stderr}");
    assert_eq!(files(folder.path()), BTreeMap::new());
}

/// A small pack in memory, for the tests of garbage.
fn load(folder: &Path) -> Option<String> {
    let options = LoadOptions::default();
    let loaded = Engine::load(Source::Directory(folder.into()), &options, &|_, _| ());
    loaded.err().map(|error| error.to_string())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// No description and no shard makes talon panic or hang, and what it refuses it refuses in one line.
    #[test]
    fn garbage_is_refused(
        description in any::<bool>(), cut in any::<bool>(),
        at in any::<prop::sample::Index>(), byte in any::<u8>(),
    ) {
        static SOUND: std::sync::LazyLock<Pack> =
            std::sync::LazyLock::new(|| Pack::of(repository(TINY).to_str().unwrap(), 2));
        let folder = tempfile::tempdir().unwrap();
        for name in files(&SOUND.path()).keys() {
            std::fs::copy(SOUND.file(name), folder.path().join(name)).unwrap();
        }
        let name = if description { SOUND.file(PACK) } else { SOUND.shard("rank-0-of-2.safetensors") };
        let path = folder.path().join(name.file_name().unwrap());
        let mut bytes = std::fs::read(&path).unwrap();
        // Of a shard the header is what can be wrong.
        let end = if description { bytes.len() } else { bytes.len().min(4096) };
        let at = at.index(end);
        if cut { bytes.truncate(at) } else { bytes[at] = byte }
        std::fs::write(&path, bytes).unwrap();
        if let Some(message) = load(folder.path()) {
            prop_assert_eq!(message.lines().count(), 1, "{}", message);
            prop_assert!(message.len() > 20, "{}", message);
        } else {
            prop_assert!(!cut, "a cut file was loaded");
        }
    }
}
