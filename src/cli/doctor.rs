//! `talon doctor`: why this box is slow.

use std::cell::Cell;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::channel;

use argh::FromArgs;
use serde_json::{Map, Value, json};

use super::interrupt;
use super::progress::Progress;
use super::terminal::{check_writable, print, write_json};
use crate::cuda::leave;
use crate::doctor::{Diagnosis, Model, Room, Watch, changes, diagnose, table};
use crate::engine::room;
use crate::error::{Error, Result};
use crate::weights::{Checkpoint, INDEX, PACK, Source, sha256};

/// Check what makes a box slow or unsafe: driver, PCIe links, peer-to-peer, power, memory, limits.
#[derive(FromArgs)]
#[argh(
    subcommand,
    name = "doctor",
    example = "{command_name}",
    example = "{command_name} --json -",
    example = "{command_name} --model ./GLM-5.2-NVFP4",
    example = "{command_name} --deep --model ./GLM-5.2-NVFP4",
    example = "{command_name} --snapshot before.json",
    example = "{command_name} --against before.json",
    note = "Nothing is changed, and without --deep no GPU is loaded. What cannot be read is unknown, with the\nreason; some of it can be read as root.",
    note = "--deep makes all GPUs read, copy and exchange for some seconds. On some boxes that hangs or restarts\nthe machine: what is about to be measured is written to ~/.cache/talon/doctor.trying first, and the\nnext doctor names what never came back.",
    error_code(2, "bad arguments or bad input"),
    error_code(4, "a check has failed")
)]
pub struct DoctorCommand {
    /// write the checks as JSON (- is stdout, instead of the table)
    #[argh(option, arg_name = "file")]
    json: Option<String>,

    /// measure what shows only under load: clocks and links, memory, copies between host and GPUs and from
    /// GPU to GPU, exchanges, and the disk of --model; under a minute, GPUs should be idle
    #[argh(switch)]
    deep: bool,

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
/// And when it was interrupted.
const INTERRUPTED: u8 = 130;

impl DoctorCommand {
    /// Says what has changed since a snapshot.
    fn show(&self, changes: &[String]) -> Result<()> {
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
        Ok(())
    }

    pub fn run(self) -> Result<ExitCode> {
        for target in [&self.json, &self.snapshot].into_iter().flatten() {
            check_writable(target)?;
        }
        let model = self.model.as_deref().map(open_model).transpose()?;
        let diagnosis = self.diagnose(model)?;
        let code = self.report(&diagnosis)?;
        if diagnosis.hangs.is_some() {
            leave(code);
        }
        Ok(ExitCode::from(code))
    }

    /// Looks at the box, and measures it if that was asked for.
    fn diagnose(&self, model: Option<Model>) -> Result<Diagnosis> {
        let root = self.root.as_deref();
        if !self.deep {
            return diagnose(root, model, None);
        }
        let (sender, interruptions) = channel();
        interrupt::listen(sender, || ());
        let interrupted = Cell::new(false);
        let is_interrupted = || {
            interrupted.set(interrupted.get() || interruptions.try_recv().is_ok());
            interrupted.get()
        };
        let progress = Progress::words();
        let tell = |what: &str| {
            log::info!("measuring: {what}");
            progress.say(what);
        };
        let watch = Watch { tell: &tell, is_interrupted: &is_interrupted };
        let diagnosis = diagnose(root, model, Some(&watch));
        progress.finish();
        if interrupted.get() {
            leave(INTERRUPTED);
        }
        diagnosis
    }

    /// Writes and prints what was found; the exit code.
    fn report(&self, diagnosis: &Diagnosis) -> Result<u8> {
        // The old snapshot is read before the new one, which may take its place, is written.
        let compared = |file: &String| changed_since(file, &diagnosis.snapshot);
        let changes = self.against.as_ref().map(compared).transpose()?;
        if let Some(target) = &self.snapshot {
            write_json(target, &diagnosis.snapshot)?;
        }
        if let Some(changes) = changes {
            self.show(&changes)?;
            return Ok(0);
        }
        if let Some(target) = &self.json {
            write_json(target, &diagnosis.json())?;
        }
        let stdout_taken =
            [&self.json, &self.snapshot].map(|target| target.as_deref() == Some("-"));
        if !stdout_taken.contains(&true) {
            print(&table(diagnosis))?;
        }
        Ok(if diagnosis.fails() { FAILED } else { 0 })
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
    for file in ["config.json", INDEX, PACK] {
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
    let (resident, name) = (checkpoint.resident(), name.to_owned());
    let room = move |ranks: usize| {
        let room = Source::from_name(&name, None).and_then(|source| room(source, ranks));
        let room = room.map_err(|error| error.to_string())?;
        Ok(Room { bytes: room.bytes as u64, context: room.context })
    };
    Ok(Model { folder, bytes: bytes as u64, identity, resident, room: Box::new(room) })
}
