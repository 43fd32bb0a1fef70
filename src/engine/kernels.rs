//! The kernels by themselves: how fast they are at a model's shapes.

use std::sync::Arc;

use super::{DEFAULT_CONTEXT, LoadOptions, Opened};
use crate::cuda::{self, CudaOptions, Device, KernelTimes};
use crate::error::Result;
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
        device: options.device,
        context: options.context.unwrap_or(config.max_position_embeddings.min(DEFAULT_CONTEXT)),
        parallel: options.parallel,
        vocab_limit: config.vocab_size,
        rank: slice.index,
        ranks: slice.of,
    };
    cuda::measure_kernels(&config, &params, &cuda, rows, progress)
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
    Device::open(options.device)?;
    let Opened { config, checkpoint, manifest, audit, .. } =
        Opened::new(source, options.ignore_index)?;
    let slice = options.rank_slice.unwrap_or(Slice { index: 0, of: 1 });
    audit.check_ranks(&manifest, &config.geometry(), slice.of)?;
    let weights = Weights::new(checkpoint, manifest, audit)?;
    let params = weights.params(&config, slice)?;
    Ok((Arc::new(config), params, slice))
}
