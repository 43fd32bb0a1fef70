//! Which backend runs a model: the GPU where there is one that can, else the CPU.

use std::sync::Arc;

use super::{Limits, LoadOptions, memory};
use crate::cpu::{CpuOptions, CpuRanks, cache_bytes};
use crate::cuda::{CudaBackend, CudaOptions, Device, RanksOptions, has_kernels};
use crate::error::{Error, Result};
use crate::model::{Backend, DraftModel, ModelConfig, ModelParams, Weights};
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

/// What a device reports about a loaded model; of several, the first rank's.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceUse {
    /// The GPUs of the ranks, in rank order.
    pub devices: Vec<usize>,
    /// How the ranks exchange their sums, if there are several.
    pub reduce: Option<String>,
    /// Bytes of weights as the device stores them.
    pub weight_bytes: usize,
    /// Bytes of caches, and of buffers between stages.
    pub cache_bytes: usize,
    /// Bytes of weights that a step of one row reads.
    pub step_bytes: usize,
    /// What one more routed expert adds to them, in all layers.
    pub expert_bytes: usize,
    /// Launches of a step of one row.
    pub launches: usize,
    /// Bytes a second of plain reads, measured at this load; `None` for a model too small to tell.
    pub read_roof: Option<f64>,
}

/// A backend that runs, and its name in reports.
pub(super) struct Running {
    pub backend: Box<dyn Backend + Send>,
    pub name: &'static str,
    pub device: Option<DeviceUse>,
}

/// What a load will run on, decided before anything large is done.
pub(super) struct Chosen {
    pub backend: BackendChoice,
    /// Why it is the CPU, if the GPU was left.
    pub left_gpu: Option<String>,
    /// Ranks that share the model.
    pub ranks: usize,
    /// The GPUs of those that run.
    pub devices: Vec<usize>,
}

impl Chosen {
    fn cpu(options: &LoadOptions, left_gpu: Option<String>) -> Self {
        let ranks = options.tp.unwrap_or(1);
        Self { backend: BackendChoice::Cpu, left_gpu, ranks, devices: Vec::new() }
    }
}

/// Chooses the backend, the number of ranks and their GPUs.
///
/// # Errors
/// Input error if the GPU was asked for, by name or by `--rank-slice`, and there is none to use.
pub(super) fn choose(options: &LoadOptions) -> Result<Chosen> {
    let sliced = options.rank_slice.is_some();
    if options.backend == BackendChoice::Cpu {
        return match sliced {
            true => Err(Error::input("--rank-slice needs a GPU: --backend cuda")),
            false => Ok(Chosen::cpu(options, None)),
        };
    }
    match (find_gpus(options), options.backend) {
        (Ok(devices), _) => {
            let ranks = options.rank_slice.map_or(devices.len(), |slice| slice.of);
            Ok(Chosen { backend: BackendChoice::Cuda, left_gpu: None, ranks, devices })
        }
        (Err(fault), _) if sliced => Err(Error::input(format!("--rank-slice: {fault}"))),
        (Err(fault), BackendChoice::Cuda) => {
            Err(Error::input(format!("--backend cuda: {fault}; use --backend cpu")))
        }
        (Err(fault), _) => Ok(Chosen::cpu(options, Some(fault))),
    }
}

/// The GPUs of the ranks that run, or why they cannot be used, as far as it can be told before a load.
pub(super) fn find_gpus(options: &LoadOptions) -> std::result::Result<Vec<usize>, String> {
    if !has_kernels() {
        return Err("this build has no CUDA kernels (see talon version)".into());
    }
    let count = match Device::count() {
        Err(error) => return Err(error.to_string()),
        Ok(0) => return Err("no GPU here, or no NVIDIA driver (see talon version)".into()),
        Ok(count) => count,
    };
    let asked = &options.gpus.devices;
    let devices = match (asked.is_empty(), options.rank_slice, options.tp) {
        (false, _, _) => asked.clone(),
        (true, Some(_), _) => vec![0],
        (true, None, Some(tp)) if tp > count => {
            return Err(format!(
                "--tp {tp}: the driver shows {count} GPU(s); several ranks can share one, as in \
                 --devices {}",
                vec!["0"; tp].join(",")
            ));
        }
        (true, None, Some(tp)) => (0..tp).collect(),
        // All that there are, as far as ranks can share a model.
        (true, None, None) => {
            let ranks = [8, 4, 2].into_iter().find(|ranks| *ranks <= count).unwrap_or(1);
            (0..ranks).collect()
        }
    };
    for device in &devices {
        if let Err(error) = Device::open(*device) {
            return Err(error.to_string());
        }
    }
    Ok(devices)
}

/// Starts the backend; the weights stay mapped, or go to the device.
///
/// # Errors
/// Input error if the model does not fit or cannot be shared by the ranks.
pub(super) fn start(
    chosen: &Chosen,
    config: &Arc<ModelConfig>,
    weights: &Weights,
    draft: &DraftModel,
    (options, limits): (&LoadOptions, &Limits),
    progress: &dyn Fn(usize, usize),
) -> Result<Running> {
    if chosen.backend == BackendChoice::Cuda {
        return start_cuda(chosen, config, weights, draft, (options, limits), progress);
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

fn start_cuda(
    chosen: &Chosen,
    config: &Arc<ModelConfig>,
    weights: &Weights,
    draft: &DraftModel,
    (options, limits): (&LoadOptions, &Limits),
    progress: &dyn Fn(usize, usize),
) -> Result<Running> {
    let params = |index: usize| -> Result<ModelParams> {
        let rank = Slice { index, of: chosen.ranks };
        let mut params = weights.params(config, rank)?;
        draft.join(&mut params, weights, config, rank)?;
        Ok(params)
    };
    let rank = options.rank_slice.map_or(0, |slice| slice.index);
    let cuda = CudaOptions {
        device: chosen.devices[0],
        context: limits.context,
        parallel: limits.parallel,
        vocab_limit: limits.vocab_limit,
        rank,
        ranks: chosen.ranks,
    };
    let backend = if chosen.devices.len() == 1 {
        CudaBackend::start(config, &params(rank)?, &cuda, progress)?
    } else {
        let gpus = RanksOptions { devices: chosen.devices.clone(), ..options.gpus.clone() };
        CudaBackend::start_ranks(config, &params, &cuda, &gpus, progress)?
    };
    let plan = backend.plan();
    let device = DeviceUse {
        devices: chosen.devices.clone(),
        reduce: backend.reduce_summary(),
        weight_bytes: plan.weights,
        cache_bytes: plan.caches_and_buffers,
        step_bytes: backend.step_bytes(),
        expert_bytes: backend.expert_bytes(),
        launches: backend.launches(),
        read_roof: backend.read_roof(),
    };
    Ok(Running { backend: Box::new(backend), name: "cuda", device: Some(device) })
}
