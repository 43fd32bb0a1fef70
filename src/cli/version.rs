//! `talon version`: what this binary is and what it can do here.

use argh::FromArgs;

use super::terminal::{print, thousands};
use crate::cuda;
use crate::error::Result;
use crate::weights::{demo, demo_eagle3};

/// Show the version, what is built in, and what this box has.
#[derive(FromArgs)]
#[argh(subcommand, name = "version")]
pub struct VersionCommand {}

impl VersionCommand {
    pub fn run(self) -> Result<()> {
        let size = |source: crate::weights::Source| -> Result<u64> {
            let mut bytes = 0;
            for name in source.file_names()? {
                bytes += source.require(&name)?.len() as u64;
            }
            Ok(bytes)
        };
        let kernels = cuda::kernels::TARGETS;
        print(&format!(
            "talon {} ({})\n\
             backends:      {}\n\
             kernels:       {}\n\
             CUDA driver:   {}\n\
             built in:      demo model ({} bytes), its EAGLE-3 head ({} bytes)\n\
             runs:          GLM-5, 5.1, 5.2, 5.3 (glm_moe_dsa) in BF16, F32, FP8 and NVFP4\n",
            env!("CARGO_PKG_VERSION"),
            env!("TALON_COMMIT"),
            if kernels.is_empty() { "cpu" } else { "cpu, cuda" },
            if kernels.is_empty() { "none: built without nvcc, CPU only" } else { kernels },
            cuda::driver_summary(),
            thousands(size(demo())?),
            thousands(size(demo_eagle3())?),
        ))
    }
}
