//! `talon version`: what this binary is, what it was made from and what it can do here.

use argh::FromArgs;
use serde_json::{Map, Value, json};

use super::terminal::{check_writable, print, thousands, write_json};
use crate::cuda;
use crate::error::Result;
use crate::weights::{Source, demo, demo_eagle3};

/// Show the version, what is built in, and what this box has.
#[derive(FromArgs)]
#[argh(subcommand, name = "version")]
pub struct VersionCommand {
    /// write the same as JSON (- is stdout, instead of the text)
    #[argh(option, arg_name = "file")]
    json: Option<String>,
}

/// Columns that the list of crates may fill.
const WIDTH: usize = 100;

impl VersionCommand {
    pub fn run(self) -> Result<()> {
        self.json.as_deref().map_or(Ok(()), check_writable)?;
        let kernels = cuda::kernels::TARGETS;
        let driver = cuda::driver_summary();
        let (model, head) = (size(&demo())?, size(&demo_eagle3())?);
        if let Some(target) = &self.json {
            let crates: Map<String, Value> =
                crates().map(|(name, version)| (name.into(), version.into())).collect();
            write_json(
                target,
                &json!({
                    "version": env!("CARGO_PKG_VERSION"),
                    "commit": env!("TALON_COMMIT"),
                    "kernels": Some(kernels).filter(|targets| !targets.is_empty()),
                    "cuda_driver": driver,
                    "demo_bytes": { "model": model, "eagle3": head },
                    "rustc": env!("TALON_RUSTC"),
                    "crates": crates,
                }),
            )?;
        }
        if self.json.as_deref() == Some("-") {
            return Ok(());
        }
        print(&format!(
            "talon {} ({})\n\
             backends:      {}\n\
             kernels:       {}\n\
             CUDA driver:   {driver}\n\
             built in:      demo model ({} bytes), its EAGLE-3 head ({} bytes)\n\
             runs:          GLM-5, 5.1, 5.2, 5.3 (glm_moe_dsa) in BF16, F32, FP8 and NVFP4\n\
             compiled by:   {}\n\
             crates:        {}\n",
            env!("CARGO_PKG_VERSION"),
            env!("TALON_COMMIT"),
            if kernels.is_empty() { "cpu" } else { "cpu, cuda" },
            if kernels.is_empty() { "none: built without nvcc, CPU only" } else { kernels },
            thousands(model),
            thousands(head),
            env!("TALON_RUSTC"),
            wrapped(crates().map(|(name, version)| format!("{name} {version}"))),
        ))
    }
}

fn size(source: &Source) -> Result<u64> {
    let mut bytes = 0;
    for name in source.file_names()? {
        bytes += source.require(&name)?.len() as u64;
    }
    Ok(bytes)
}

/// The crates that talon itself names, with their versions (build/provenance.rs).
fn crates() -> impl Iterator<Item = (&'static str, &'static str)> {
    env!("TALON_CRATES").split(' ').filter_map(|entry| entry.split_once('='))
}

/// A list with commas, its further lines under the first.
fn wrapped(items: impl Iterator<Item = String>) -> String {
    let indent = " ".repeat("crates:        ".len());
    let mut lines = vec![String::new()];
    for item in items {
        let line = lines.last_mut().expect("starts with one line");
        if line.is_empty() {
            *line = item;
        } else if indent.len() + line.len() + ", ".len() + item.len() > WIDTH {
            line.push(',');
            lines.push(item);
        } else {
            *line += &format!(", {item}");
        }
    }
    lines.join(&format!("\n{indent}"))
}
