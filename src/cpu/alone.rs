//! One rank by itself, for what compares a backend with this one stage by stage.

use std::sync::Arc;

use super::cache::{KvCache, LayerCache};
use super::ops::Rope;
use super::rank::{Buffers, CpuRank};
use crate::comm::SharedMemory;
use crate::model::{ModelConfig, ModelParams};
use crate::weights::Slice;

impl CpuRank {
    /// The rank `slice` without the others: sums over ranks are its own share. It has room for
    /// `parallel` sequences of `context` tokens; ids from `vocab_limit` on are never an arg-max.
    pub fn alone(
        config: &Arc<ModelConfig>,
        params: ModelParams,
        slice: Slice,
        (context, parallel): (usize, usize),
        vocab_limit: usize,
    ) -> Self {
        Self {
            cache: KvCache::new(config, params.layers.len(), context, parallel),
            rope: Rope::new(config.qk_rope_head_dim, config.rope_theta),
            comm: SharedMemory::alone(slice.index, slice.of),
            vocab_limit: vocab_limit.min(config.vocab_size),
            drafter: None,
            buffers: Buffers::default(),
            config: config.clone(),
            params,
        }
    }

    /// Its tensors.
    pub fn params(&self) -> &ModelParams {
        &self.params
    }

    /// What stages leave for later ones.
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// As [`CpuRank::buffers`], to write a stage's input.
    pub fn buffers_mut(&mut self) -> &mut Buffers {
        &mut self.buffers
    }

    /// The cache of `layer` for `sequence`.
    pub fn cache(&self, sequence: usize, layer: usize) -> &LayerCache {
        self.cache.layer(sequence, layer)
    }

    /// As [`CpuRank::cache`], to write.
    pub fn cache_mut(&mut self, sequence: usize, layer: usize) -> &mut LayerCache {
        self.cache.layer_mut(sequence, layer)
    }
}
