//! What tests that run the binary on a damaged or rewritten checkpoint share: running it, copying a
//! checkpoint, and an editor for the tensors in it.

// Every test binary compiles this module and uses only a part of it.
#![allow(dead_code)]

pub mod quantise;
// Both files of this folder use it, and some tests use both.
#[allow(clippy::duplicate_mod)]
mod repository;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

pub const DEMO: &str = "demo/glm-demo";
pub const TINY: &str = "tests/fixtures/tiny-random";
pub const INDEX: &str = "model.safetensors.index.json";
pub const SHARD_1: &str = "model-00001-of-00002.safetensors";
pub const SHARD_2: &str = "model-00002-of-00002.safetensors";

pub use repository::repository;

pub fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// How a run of the binary ended.
#[derive(Debug)]
pub struct Outcome {
    /// `None`: ended by a signal.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

/// The binary, with no logging but its own warnings.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_talon"));
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs the binary; one that hangs is killed and fails the test.
pub fn talon(args: &[&str]) -> Outcome {
    let mut child = command(args).spawn().unwrap();
    let stdout = drain(child.stdout.take().unwrap());
    let stderr = drain(child.stderr.take().unwrap());
    let deadline = Instant::now() + Duration::from_secs(60);
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("talon {args:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let text = |pipe: std::thread::JoinHandle<String>| pipe.join().unwrap();
    Outcome { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
}

/// Reads a child's pipe on a thread of its own, so that neither side waits for the other.
pub fn drain(mut pipe: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// A copy of a checkpoint that a test may damage.
pub struct Copy {
    directory: TempDir,
}

impl Copy {
    /// Copies the files of a checkpoint of the repository.
    pub fn of(checkpoint: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(repository(checkpoint)).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, directory.path().join(path.file_name().unwrap())).unwrap();
        }
        // The goldens beside a fixture are no part of its checkpoint.
        let _ = std::fs::remove_file(directory.path().join("golden.safetensors"));
        Self { directory }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The path as an argument.
    pub fn arg(&self) -> &str {
        self.path().to_str().unwrap()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.file(name), bytes).unwrap();
    }

    pub fn remove(&self, name: &str) {
        std::fs::remove_file(self.file(name)).unwrap();
    }

    /// Changes a JSON file in place.
    pub fn edit_json(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut value = read_json(&self.file(name));
        edit(&mut value);
        self.write(name, value.to_string());
    }

    /// Changes the bytes of a file.
    pub fn edit_bytes(&self, name: &str, edit: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = std::fs::read(self.file(name)).unwrap();
        edit(&mut bytes);
        self.write(name, bytes);
    }

    /// Changes the header of a shard and leaves its data as they are.
    pub fn edit_header(&self, shard: &str, edit: impl FnOnce(&mut Map<String, Value>)) {
        self.edit_bytes(shard, |bytes| {
            let (mut header, data) = split_shard(bytes);
            edit(&mut header);
            *bytes = join_shard(&header, &data);
        });
    }

    /// Changes tensors and writes shards and index again.
    pub fn edit_tensors(&self, edit: impl FnOnce(&mut Tensors)) {
        let mut tensors = Tensors::read(self.path());
        edit(&mut tensors);
        tensors.write(self.path());
    }

    /// `talon verify --json -` on this checkpoint.
    pub fn verify(&self, more: &[&str]) -> Outcome {
        talon(&[&["verify", "--model", self.arg(), "--json", "-"], more].concat())
    }

    /// `talon generate` with a prompt of ids.
    pub fn generate(&self, prompt: &[u32], more: &[&str]) -> Outcome {
        generate(self.arg(), prompt, more)
    }
}

/// `talon generate --json -` on a model, with a prompt of ids.
pub fn generate(model: &str, prompt: &[u32], more: &[&str]) -> Outcome {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), json!(prompt).to_string()).unwrap();
    let prompt = file.path().to_str().unwrap();
    let args = ["generate", "--model", model, "--tokens", prompt, "--ignore-eos", "--json", "-"];
    talon(&[&args, more].concat())
}

/// `verify` and `generate` both refuse, naming all of `words`.
pub fn assert_refused(checkpoint: &Copy, more: &[&str], words: &[&str]) {
    let verified = talon(&[&["verify", "--model", checkpoint.arg()], more].concat());
    assert_eq!(verified.code, Some(2), "{verified:?}");
    assert_names(&verified, &(verified.stdout.clone() + &verified.stderr), words);
    let prompt = [1, 2, 3];
    assert_one_line(&checkpoint.generate(&prompt, &[more, &["--max-tokens", "1"]].concat()), words);
}

/// One line on stderr, nothing on stdout, exit code 2.
pub fn assert_one_line(outcome: &Outcome, words: &[&str]) {
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    assert_eq!(outcome.stdout, "", "{outcome:?}");
    assert!(outcome.stderr.starts_with("talon: "), "{outcome:?}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
    assert_names(outcome, &outcome.stderr, words);
}

pub fn assert_names(outcome: &Outcome, text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "expected {word:?} in {outcome:?}");
    }
    assert!(!text.contains("panicked"), "{outcome:?}");
}

/// A file's header and data.
pub fn split_shard(bytes: &[u8]) -> (Map<String, Value>, Vec<u8>) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    (header, bytes[8 + length..].to_vec())
}

/// The file of a header and data, sound or not.
pub fn join_shard(header: &Map<String, Value>, data: &[u8]) -> Vec<u8> {
    let header = serde_json::to_vec(header).unwrap();
    [&(header.len() as u64).to_le_bytes(), header.as_slice(), data].concat()
}

/// A tensor as it is stored.
#[derive(Clone)]
pub struct Tensor {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
    /// The file that holds it.
    pub shard: String,
}

impl Tensor {
    pub fn f32(shape: &[usize], values: &[f32], shard: &str) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { dtype: "F32".into(), shape: shape.to_vec(), bytes, shard: shard.into() }
    }

    /// The values of an F32 or BF16 tensor.
    pub fn values(&self) -> Vec<f32> {
        match self.dtype.as_str() {
            "F32" => self.bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            "BF16" => self
                .bytes
                .as_chunks()
                .0
                .iter()
                .map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16))
                .collect(),
            other => panic!("{other} has no plain values"),
        }
    }
}

/// All tensors of a checkpoint, by name.
pub struct Tensors(pub BTreeMap<String, Tensor>);

impl Tensors {
    pub fn read(directory: &Path) -> Self {
        let mut tensors = BTreeMap::new();
        for shard in shards(directory) {
            let (header, data) = split_shard(&std::fs::read(directory.join(&shard)).unwrap());
            for (name, info) in header.iter().filter(|(name, _)| *name != "__metadata__") {
                let offset = |i: usize| info["data_offsets"][i].as_u64().unwrap() as usize;
                let tensor = Tensor {
                    dtype: info["dtype"].as_str().unwrap().into(),
                    shape: serde_json::from_value(info["shape"].clone()).unwrap(),
                    bytes: data[offset(0)..offset(1)].to_vec(),
                    shard: shard.clone(),
                };
                tensors.insert(name.clone(), tensor);
            }
        }
        Self(tensors)
    }

    /// Writes the shards that the tensors name, and an index of them.
    pub fn write(&self, directory: &Path) {
        for shard in shards(directory) {
            std::fs::remove_file(directory.join(shard)).unwrap();
        }
        let mut files: BTreeMap<&str, (Map<String, Value>, Vec<u8>)> = BTreeMap::new();
        let mut weight_map = Map::new();
        for (name, tensor) in &self.0 {
            let (header, data) = files.entry(&tensor.shard).or_default();
            let start = data.len();
            data.extend_from_slice(&tensor.bytes);
            let offsets = [start, data.len()];
            header.insert(
                name.clone(),
                json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}),
            );
            weight_map.insert(name.clone(), tensor.shard.clone().into());
        }
        for (shard, (header, data)) in &files {
            std::fs::write(directory.join(shard), join_shard(header, data)).unwrap();
        }
        let index = json!({"metadata": {}, "weight_map": weight_map});
        std::fs::write(directory.join(INDEX), index.to_string()).unwrap();
    }

    pub fn get(&mut self, name: &str) -> &mut Tensor {
        self.0.get_mut(name).unwrap_or_else(|| panic!("the checkpoint has no {name}"))
    }

    pub fn remove(&mut self, name: &str) -> Tensor {
        self.0.remove(name).unwrap_or_else(|| panic!("the checkpoint has no {name}"))
    }
}

fn shards(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".safetensors")).collect()
}
