//! Which backend runs a model: the GPU where there is one that can, else the CPU.

use std::sync::Arc;

use super::{Limits, LoadOptions, memory};
use crate::cpu::{CpuOptions, CpuRanks, DraftModel, cache_bytes};
use crate::cuda::{CudaBackend, CudaOptions, Device, has_kernels};
use crate::error::{Error, Result};
use crate::model::{Backend, ModelConfig, Weights};
use crate::weights::Slice;

/// What `--backend` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackendChoice {
    /// The GPU where there is one that can run the model, else the CPU, with a line that says why.
    Auto,
    /// The reference backend.
    #[default]
    Cpu,
    /// The GPU.
    Cuda,
}

/// What a device reports about a loaded model.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceUse {
    /// Bytes of weights as the device stores them.
    pub weight_bytes: usize,
    /// Bytes of caches, and of buffers between stages.
    pub cache_bytes: usize,
    /// Bytes of weights that a step of one row reads.
    pub step_bytes: usize,
    /// Launches and copies of a step of one row.
    pub launches: usize,
}

/// A backend that runs, and its name in reports.
pub(super) struct Running {
    pub backend: Box<dyn Backend + Send>,
    pub name: &'static str,
    pub device: Option<DeviceUse>,
}

/// The backend that a load will use, decided before anything large is done; and why it is the CPU,
/// if the GPU was left.
///
/// # Errors
/// Input error if the GPU was asked for, by name or by `--rank-slice`, and there is none to use.
pub(super) fn choose(
    options: &LoadOptions,
    draft_asked: bool,
) -> Result<(BackendChoice, Option<String>)> {
    let sliced = options.rank_slice.is_some();
    let fault = match options.backend {
        BackendChoice::Cpu if sliced => {
            return Err(Error::input("--rank-slice needs a GPU: --backend cuda"));
        }
        BackendChoice::Cpu => return Ok((BackendChoice::Cpu, None)),
        _ => cuda_fault(options, draft_asked),
    };
    match (fault, options.backend) {
        (None, _) => Ok((BackendChoice::Cuda, None)),
        (Some(fault), BackendChoice::Cuda) if !sliced => {
            Err(Error::input(format!("--backend cuda: {fault}; use --backend cpu")))
        }
        (Some(fault), _) if sliced => Err(Error::input(format!("--rank-slice: {fault}"))),
        (Some(fault), _) => Ok((BackendChoice::Cpu, Some(fault))),
    }
}

/// Why the GPU cannot be used, as far as it can be told before a load.
fn cuda_fault(options: &LoadOptions, draft_asked: bool) -> Option<String> {
    if !has_kernels() {
        return Some("this build has no CUDA kernels (see talon version)".into());
    }
    match Device::count() {
        Err(error) => return Some(error.to_string()),
        Ok(0) => return Some("no GPU here, or no NVIDIA driver (see talon version)".into()),
        Ok(_) => {}
    }
    if let Err(error) = Device::open(options.device) {
        return Some(error.to_string());
    }
    if options.tp > 1 {
        return Some(format!("--tp {}: only one rank runs on a GPU yet", options.tp));
    }
    if draft_asked {
        return Some("drafters do not run on a GPU yet (--draft none does)".into());
    }
    None
}

/// Starts the backend; the weights stay mapped, or go to the device.
///
/// # Errors
/// Input error if the model does not fit or cannot be shared by the ranks.
pub(super) fn start(
    choice: BackendChoice,
    config: &Arc<ModelConfig>,
    weights: &Weights,
    draft: &DraftModel,
    (options, limits): (&LoadOptions, &Limits),
    progress: &dyn Fn(usize, usize),
) -> Result<Running> {
    if choice == BackendChoice::Cuda {
        let slice = options.rank_slice.unwrap_or(Slice { index: 0, of: 1 });
        let params = weights.params(config, slice)?;
        let cuda = CudaOptions {
            device: options.device,
            context: limits.context,
            parallel: limits.parallel,
            vocab_limit: limits.vocab_limit,
            rank: slice.index,
            ranks: slice.of,
        };
        let backend = CudaBackend::start(config, &params, &cuda, progress)?;
        let plan = backend.plan();
        let device = DeviceUse {
            weight_bytes: plan.weights,
            cache_bytes: plan.caches_and_buffers,
            step_bytes: backend.step_bytes(),
            launches: backend.launches(),
        };
        return Ok(Running { backend: Box::new(backend), name: "cuda", device: Some(device) });
    }
    let cpu = CpuOptions {
        tp: limits.tp,
        context: limits.context,
        parallel: limits.parallel,
        vocab_limit: limits.vocab_limit,
    };
    memory::check_fits(cache_bytes(config, &cpu, draft), limits)?;
    let ranks = CpuRanks::start(config, weights, draft, cpu)?;
    Ok(Running { backend: Box::new(ranks), name: "cpu", device: None })
}
