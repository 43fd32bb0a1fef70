//! `talon doctor`: why this box is slow.

use std::path::PathBuf;
use std::process::ExitCode;

use argh::FromArgs;

use super::terminal::{check_writable, print, write_json};
use crate::doctor::{diagnose, table};
use crate::error::Result;
use crate::weights::{Checkpoint, Source};

/// Check what makes a box slow or unsafe: driver, PCIe links, peer-to-peer, power, memory, limits.
#[derive(FromArgs)]
#[argh(
    subcommand,
    name = "doctor",
    example = "{command_name}",
    example = "{command_name} --json -",
    example = "{command_name} --model ./GLM-5.2-NVFP4",
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

    /// look at a recorded box: a folder with its proc, sys, etc, and environ
    #[argh(option, arg_name = "dir")]
    root: Option<PathBuf>,
}

/// The exit code when a check has failed (DESIGN §4).
const FAILED: u8 = 4;

impl DoctorCommand {
    pub fn run(self) -> Result<ExitCode> {
        if let Some(target) = &self.json {
            check_writable(target)?;
        }
        let model = self.model.as_deref().map(size_of_model).transpose()?;
        let diagnosis = diagnose(self.root.as_deref(), model)?;
        if let Some(target) = &self.json {
            write_json(target, &diagnosis.json())?;
        }
        if self.json.as_deref() != Some("-") {
            print(&table(&diagnosis))?;
        }
        Ok(if diagnosis.fails() { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
    }
}

/// A checkpoint's folder, and the bytes of its tensors.
fn size_of_model(name: &str) -> Result<(String, u64)> {
    let checkpoint = Checkpoint::open(Source::from_name(name, None)?, false)?;
    let bytes: usize = checkpoint.tensors.values().map(|tensor| tensor.range.len()).sum();
    Ok((name.to_owned(), bytes as u64))
}
