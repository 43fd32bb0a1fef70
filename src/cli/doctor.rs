//! `talon doctor`: why this box is slow.

use std::path::PathBuf;
use std::process::ExitCode;

use argh::FromArgs;
use serde_json::{Map, Value, json};

use super::terminal::{check_writable, print, write_json};
use crate::doctor::{Model, changes, diagnose, table};
use crate::error::{Error, Result};
use crate::weights::{Checkpoint, INDEX, Source, sha256};

/// Check what makes a box slow or unsafe: driver, PCIe links, peer-to-peer, power, memory, limits.
#[derive(FromArgs)]
#[argh(
    subcommand,
    name = "doctor",
    example = "{command_name}",
    example = "{command_name} --json -",
    example = "{command_name} --model ./GLM-5.2-NVFP4",
    example = "{command_name} --snapshot before.json",
    example = "{command_name} --against before.json",
    note = "Nothing is changed and no GPU is loaded. What cannot be read is unknown, with the reason; some of\nit can be read as root.",
    error_code(2, "bad arguments or bad input"),
    error_code(4, "a check has failed")
)]
pub struct DoctorCommand {
    /// write the checks as JSON (- is stdout, instead of the table)
    #[argh(option, arg_name = "file")]
    json: Option<String>,

    /// a checkpoint that is to be run here: memory and disk are judged by its size (default: GLM-5.2 in
    /// NVFP4, 465 GB, where there are GPUs)
    #[argh(option, arg_name = "dir")]
    model: Option<String>,

    /// record what decides whether this box runs as it did: driver, kernel, firmware, topology, limits,
    /// toolkits, the model
    #[argh(option, arg_name = "file")]
    snapshot: Option<String>,

    /// name what has changed since a snapshot, one line each, and end
    #[argh(option, arg_name = "file")]
    against: Option<String>,

    /// look at a recorded box: a folder with its proc, sys, etc, and environ
    #[argh(option, arg_name = "dir")]
    root: Option<PathBuf>,
}

/// The exit code when a check has failed (DESIGN §4).
const FAILED: u8 = 4;

impl DoctorCommand {
    /// Says what has changed since a snapshot.
    fn show(&self, changes: &[String]) -> Result<ExitCode> {
        if let Some(target) = &self.json {
            write_json(target, &json!({ "changes": changes }))?;
        }
        let stdout_taken =
            [&self.json, &self.snapshot].map(|target| target.as_deref() == Some("-"));
        if !stdout_taken.contains(&true) {
            let lines = match changes {
                [] => "nothing has changed\n".to_owned(),
                changes => changes.join("\n") + "\n",
            };
            print(&lines)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    pub fn run(self) -> Result<ExitCode> {
        for target in [&self.json, &self.snapshot].into_iter().flatten() {
            check_writable(target)?;
        }
        let model = self.model.as_deref().map(open_model).transpose()?;
        let diagnosis = diagnose(self.root.as_deref(), model)?;
        // The old snapshot is read before the new one, which may take its place, is written.
        let compared = |file: &String| changed_since(file, &diagnosis.snapshot);
        let changes = self.against.as_ref().map(compared).transpose()?;
        if let Some(target) = &self.snapshot {
            write_json(target, &diagnosis.snapshot)?;
        }
        if let Some(changes) = changes {
            return self.show(&changes);
        }
        if let Some(target) = &self.json {
            write_json(target, &diagnosis.json())?;
        }
        let stdout_taken =
            [&self.json, &self.snapshot].map(|target| target.as_deref() == Some("-"));
        if !stdout_taken.contains(&true) {
            print(&table(&diagnosis))?;
        }
        Ok(if diagnosis.fails() { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
    }
}

/// What has changed since the snapshot `file`.
fn changed_since(file: &str, now: &Value) -> Result<Vec<String>> {
    let text = std::fs::read(file).map_err(|e| {
        Error::input(format!("{file}: cannot read: {e}; check the path of --against"))
    })?;
    changes(file, &text, now)
}

/// A checkpoint: its size, and what tells it from others: config and index, and the shards' sizes.
fn open_model(name: &str) -> Result<Model> {
    let source = Source::from_name(name, None)?;
    if let Source::Synthetic(..) = source {
        return Err(Error::input(format!(
            "--model {name}: has no files to look at; expected a checkpoint directory or demo"
        )));
    }
    let mut identity = Map::new();
    for file in ["config.json", INDEX] {
        if let Some(bytes) = source.open(file)? {
            identity.insert(format!("{file}.sha256"), sha256(&bytes).into());
        }
    }
    let checkpoint = Checkpoint::open(source, false)?;
    let bytes: usize = checkpoint.tensors.values().map(|tensor| tensor.range.len()).sum();
    identity.insert("tensors".into(), checkpoint.tensors.len().into());
    identity.insert("bytes".into(), bytes.into());
    // Mounts are named from the root on.
    let folder =
        std::fs::canonicalize(name).map_or(name.to_owned(), |path| path.display().to_string());
    Ok(Model { folder, bytes: bytes as u64, identity })
}
