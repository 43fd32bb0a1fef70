//! The kernels by themselves: how fast they are at a model's shapes.

use std::sync::Arc;

use super::backends::find_gpus;
use super::{DEFAULT_CONTEXT, LoadOptions, Opened};
use crate::cuda::{self, CudaOptions, Device, KernelTimes, LinkTime};
use crate::error::{Error, Result};
use crate::model::{ModelConfig, ModelParams, Weights};
use crate::weights::{Slice, Source};

/// Loads a model onto the GPU and times its kernels at each of `rows`.
///
/// # Errors
/// Input error if the model or the GPU cannot be used.
pub fn measure_kernels(
    source: Source,
    options: &LoadOptions,
    rows: &[usize],
    progress: &dyn Fn(usize, usize),
) -> Result<KernelTimes> {
    let (config, params, slice) = open_rank(source, options)?;
    let cuda = CudaOptions {
        device: options.gpus.devices.first().copied().unwrap_or(0),
        context: options.context.unwrap_or(config.max_position_embeddings.min(DEFAULT_CONTEXT)),
        parallel: options.parallel,
        vocab_limit: config.vocab_size,
        rank: slice.index,
        ranks: slice.of,
    };
    cuda::measure_kernels(&config, &params, &cuda, rows, progress)
}

/// How long exchanges between GPUs take.
#[derive(Debug, Clone, PartialEq)]
pub struct ExchangeTimes {
    /// Of each size: talon's variants, and NCCL's all-reduce if it was measured.
    pub times: Vec<LinkTime>,
    /// NCCL's version, or why it was not measured.
    pub nccl: Result<String>,
}

/// Times the exchanges between the GPUs in every variant; `tell` is told what is wrong with one.
/// Without devices, all that ranks can share a model on. Last comes NCCL's all-reduce, which may fail.
///
/// # Errors
/// Input error if a GPU cannot be used, or if there is only one rank; runtime error if no variant is
/// right.
pub fn measure_exchanges(
    options: &LoadOptions,
    count: usize,
    tell: &mut dyn FnMut(&str),
    progress: &dyn Fn(usize, usize),
) -> Result<ExchangeTimes> {
    let devices = find_gpus(options).map_err(|fault| Error::input(format!("--comm: {fault}")))?;
    if devices.len() < 2 {
        return Err(Error::input(
            "--comm: one rank has nothing to exchange; name several, as in --devices 0,1 or --devices \
             0,0",
        ));
    }
    let mut times = cuda::measure_links(&devices, count, options.gpus.timeout, tell, progress)?;
    let measured = times.len();
    let nccl = cuda::measure_nccl(&devices, count, &|done, all| {
        progress(done, measured + all);
    });
    let nccl = nccl.map(|found| {
        times.extend(found.times);
        found.version
    });
    times.sort_by_key(|time| time.bytes);
    Ok(ExchangeTimes { times, nccl })
}

/// A model's config and the tensors of the one rank that `options` ask for.
///
/// # Errors
/// Input error if the model or the GPU cannot be used.
pub(super) fn open_rank(
    source: Source,
    options: &LoadOptions,
) -> Result<(Arc<ModelConfig>, ModelParams, Slice)> {
    // Before a synthetic model is made, which takes seconds.
    Device::open(options.gpus.devices.first().copied().unwrap_or(0))?;
    let Opened { config, checkpoint, manifest, audit, .. } =
        Opened::new(source, options.ignore_index)?;
    let slice = options.rank_slice.unwrap_or(Slice { index: 0, of: 1 });
    audit.check_ranks(&manifest, &config.geometry(), slice.of)?;
    let weights = Weights::new(checkpoint, manifest, audit)?.with_dense(options.dense_weights);
    let params = weights.params(&config, slice)?;
    Ok((Arc::new(config), params, slice))
}
