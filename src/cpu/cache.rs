//! The KV cache of one rank: per sequence and layer, the latent with the roped key behind it, and
//! the index key where a layer owns an indexer. Every rank holds all of it, as MLA's latents are
//! shared by all heads.

use crate::model::ModelConfig;

/// Caches of all sequences.
pub struct KvCache {
    sequences: Vec<Vec<LayerCache>>,
}

/// One sequence's cache of one layer. Pages are touched only when a position is written.
pub struct LayerCache {
    /// `[context, kv_lora_rank + qk_rope_head_dim]`: what attention reads.
    pub latents: Vec<f32>,
    /// `[context, index_head_dim]`, empty in layers without an indexer.
    pub index_keys: Vec<f32>,
}

impl KvCache {
    /// Room for `parallel` sequences of `context` tokens in the first `layers` layers.
    pub fn new(config: &ModelConfig, layers: usize, context: usize, parallel: usize) -> Self {
        let layer = |index: usize| LayerCache {
            latents: vec![0.0; context * latent_width(config)],
            index_keys: match config.layers[index].indexer {
                true => vec![0.0; context * config.index_head_dim],
                false => Vec::new(),
            },
        };
        let sequence = |_| (0..layers).map(layer).collect();
        Self { sequences: (0..parallel).map(sequence).collect() }
    }

    /// The cache of `layer` for `sequence`.
    pub fn layer(&self, sequence: usize, layer: usize) -> &LayerCache {
        &self.sequences[sequence][layer]
    }

    /// As [`KvCache::layer`], to write.
    pub fn layer_mut(&mut self, sequence: usize, layer: usize) -> &mut LayerCache {
        &mut self.sequences[sequence][layer]
    }
}

/// Floats that attention reads for each position.
pub fn latent_width(config: &ModelConfig) -> usize {
    config.kv_lora_rank + config.qk_rope_head_dim
}
