//! What a model takes of each GPU, told without one.

use std::sync::Arc;

use super::{DEFAULT_CONTEXT, DraftChoice, Opened, drafting};
use crate::cuda::{CudaOptions, memory_plan};
use crate::error::Result;
use crate::model::Weights;
use crate::weights::{Slice, Source};

/// What a rank's GPU must have free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Weights, caches, buffers, and what loading and graphs take.
    pub bytes: usize,
    /// Tokens of the one sequence that it is for.
    pub context: usize,
}

/// What each of `ranks` GPUs must have free for `source` as `serve` and `bench` load it by default: with
/// its drafter, for one sequence of the default context. Only headers, norms and scales are read.
///
/// # Errors
/// Input error if the checkpoint is wrong or the ranks cannot share it.
pub fn room(source: Source, ranks: usize) -> Result<Room> {
    let Opened { config, checkpoint, manifest, audit, .. } = Opened::new(source, false)?;
    audit.check_ranks(&manifest, &config.geometry(), ranks)?;
    let (draft, _) =
        drafting::open_drafter(&DraftChoice::Auto, &config, &checkpoint, &audit, None)?;
    let weights = Weights::new(checkpoint, manifest, audit)?;
    let context = config.max_position_embeddings.min(DEFAULT_CONTEXT);
    let rank = Slice { index: 0, of: ranks };
    let mut params = weights.params(&config, rank)?;
    draft.join(&mut params, &weights, &config, rank)?;
    let options = CudaOptions {
        device: 0,
        context,
        parallel: 1,
        vocab_limit: config.vocab_size,
        rank: 0,
        ranks,
    };
    let plan = memory_plan(&Arc::new(config), &params, &options)?;
    Ok(Room { bytes: plan.needed(), context })
}
