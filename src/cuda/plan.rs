//! What the device's memory is used for, summed before anything is allocated. Nothing is allocated
//! after a load.

use super::layout::{
    BEST_BYTES, CONTROL_BYTES, MAX_ROWS, RESULT_BYTES, ROUTING_BYTES, ROW_BYTES, SPLIT,
    STEP_HEAD_BYTES, UNIT,
};
use super::places::Places;
use super::upload::STAGING_BYTES;
use crate::error::{Error, Result};
use crate::model::ModelConfig;

const MIB: usize = 1 << 20;
/// Kernels, captured graphs and what the driver needs beside them: seen to take under 200 MiB for
/// GLM-5.2's 20 graphs of about 1,000 launches.
const DRIVER_BYTES: usize = 384 * MIB;
/// Blocks that a split matrix aims at: two for each multiprocessor of the largest device. A
/// constant, so that results do not depend on the device.
const BLOCKS: usize = 264;

/// Parts that the kernels can sum (common.cuh).
const MAX_SPLITS: usize = 4;

/// What one rank is sized for.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Attention heads of the rank.
    pub heads: usize,
    /// Logits of the rank, of the target or of a drafter.
    pub vocabulary: usize,
    /// Widths of the rank's dense, shared and routed MLPs; a drafter's counts as a dense one.
    pub dense_width: usize,
    pub shared_width: usize,
    pub expert_width: usize,
    /// The widest hidden state, of the target and of a drafter.
    pub hidden: usize,
    /// Layers that have a cache.
    pub layers: usize,
    /// Tokens of a sequence, and sequences.
    pub context: usize,
    pub parallel: usize,
}

/// Places of the buffers between stages and of the caches; addresses. Named and shaped as in the
/// kernels that write them.
#[derive(Debug, Clone, Default)]
pub struct Buffers {
    pub rows: u64,
    /// exchange.cuh's `Control`.
    pub control: u64,
    /// What stands in the host's place where a stage is run by itself: embed.cu's `Step`, and
    /// head.cu's results.
    pub step: u64,
    pub results: u64,
    pub partial: u64,
    pub residual: u64,
    pub normed: u64,
    pub latents: u64,
    pub query_latents: u64,
    pub without_rope: u64,
    pub queries: u64,
    pub index_queries: u64,
    pub index_weights: u64,
    pub scores: u64,
    pub selected: u64,
    pub parts: u64,
    pub bounds: u64,
    pub attended: u64,
    pub values: u64,
    pub router_logits: u64,
    pub shared_sums: u64,
    /// routing.cuh's `Routing`.
    pub routing: u64,
    pub activations: u64,
    pub mlp_activations: u64,
    pub logits: u64,
    pub best: u64,
    /// `[context][rope / 2]` of (cos, sin)
    pub angles: u64,
    /// Of each layer, `[parallel * context + 1][kv_lora_rank + rope]`; the last entry takes what
    /// rows write that only fill up a step.
    pub latent_caches: Vec<u64>,
    /// Of each layer that owns an indexer; 0 elsewhere.
    pub key_caches: Vec<u64>,
    /// Numbers of parts that the columns of a matrix are summed in.
    pub latent_splits: usize,
    pub route_splits: usize,
    /// Splits that `parts` has room for.
    pub attend_splits: usize,
}

/// Parts that a matrix's columns are cut into, so that enough blocks work on it. A part has at
/// least two units for each warp of a block.
pub(super) fn splits(tiles: usize, units: usize) -> usize {
    BLOCKS.div_ceil(tiles).min(units / 16).clamp(1, MAX_SPLITS)
}

impl Buffers {
    /// Gives each its place. `rows` is the padded height of project_latents.
    pub fn place(config: &ModelConfig, sizes: &Sizes, places: &mut Places) -> Self {
        const F32: usize = size_of::<f32>();
        const BF16: usize = 2;
        let hidden = config.hidden_size;
        let width = config.kv_lora_rank + config.qk_rope_head_dim;
        let units = hidden.div_ceil(128);
        let pad = |rows: usize| rows.next_multiple_of(16);
        let latent_rows = pad(config.q_lora_rank)
            + pad(width)
            + pad(config.index_head_dim)
            + pad(config.index_n_heads);
        let route_rows = pad(config.n_routed_experts) + 2 * sizes.shared_width.next_multiple_of(8);
        let latent_splits = splits(latent_rows / 16, units);
        let route_splits = splits(route_rows / 16, units);
        let attend_splits = config.index_topk.min(sizes.context).div_ceil(SPLIT);
        let entries = sizes.parallel * sizes.context + 1;
        // Kernels read a unit of columns at a time, also where a vector ends before.
        let mut rows = |bytes: usize| places.take(MAX_ROWS * bytes + UNIT * BF16);
        let mlp_width = sizes.dense_width.max(sizes.shared_width);
        let mut buffers = Self {
            rows: rows(ROW_BYTES),
            control: rows(CONTROL_BYTES),
            step: rows(STEP_HEAD_BYTES + ROW_BYTES),
            results: rows(RESULT_BYTES),
            partial: rows(sizes.hidden * F32),
            residual: rows(sizes.hidden * F32),
            normed: rows(sizes.hidden * BF16),
            latents: rows(latent_splits * latent_rows * F32),
            query_latents: rows(config.q_lora_rank * BF16),
            without_rope: rows(sizes.heads * config.qk_nope_head_dim * BF16),
            queries: rows(sizes.heads * width * BF16),
            index_queries: rows(config.index_n_heads * config.index_head_dim * BF16),
            index_weights: rows(config.index_n_heads * F32),
            scores: rows(sizes.context * F32),
            selected: rows(config.index_topk * size_of::<i32>()),
            parts: rows(attend_splits * sizes.heads * config.kv_lora_rank * F32),
            bounds: rows(attend_splits * sizes.heads * 2 * F32),
            attended: rows(sizes.heads * config.kv_lora_rank * BF16),
            values: rows(sizes.heads * config.v_head_dim * BF16),
            router_logits: rows(route_splits * config.n_routed_experts * F32),
            shared_sums: rows(route_splits * 2 * sizes.shared_width.next_multiple_of(8) * F32),
            activations: rows(config.num_experts_per_tok * sizes.expert_width * BF16),
            mlp_activations: rows(mlp_width * BF16),
            logits: rows(sizes.vocabulary * F32),
            best: rows(BEST_BYTES),
            latent_splits,
            route_splits,
            attend_splits,
            ..Self::default()
        };
        buffers.routing = places.take(ROUTING_BYTES);
        buffers.angles = places.take(sizes.context * config.qk_rope_head_dim * F32);
        for shape in &config.layers[..sizes.layers] {
            buffers.latent_caches.push(places.take(entries * width * BF16));
            buffers.key_caches.push(match shape.indexer {
                true => places.take(entries * config.index_head_dim * BF16),
                false => 0,
            });
        }
        buffers
    }
}

/// The sum, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct MemoryPlan {
    /// Weights as the device stores them.
    pub weights: usize,
    /// Caches, and buffers between stages.
    pub caches_and_buffers: usize,
}

impl MemoryPlan {
    /// All that is allocated for as long as the model is loaded.
    pub fn total(&self) -> usize {
        self.weights + self.caches_and_buffers
    }

    /// What must be free: all that is allocated, and what loading and graphs take.
    pub fn needed(&self) -> usize {
        self.total() + STAGING_BYTES + DRIVER_BYTES
    }

    /// Refuses what does not fit in `free` bytes.
    ///
    /// # Errors
    /// Input error with the sums and the shortfall in MiB.
    pub fn check(&self, free: usize, context: usize, device: &str) -> Result<()> {
        let needed = self.needed();
        if needed <= free {
            return Ok(());
        }
        Err(Error::input(format!(
            "{device}: the model needs {} MiB (weights {}, KV cache and buffers {} at --context \
             {context}, loading and graphs {}), {} MiB are free, {} MiB short; lower --context, use \
             more ranks, or free the device's memory",
            needed.div_ceil(MIB),
            self.weights.div_ceil(MIB),
            self.caches_and_buffers.div_ceil(MIB),
            (STAGING_BYTES + DRIVER_BYTES) / MIB,
            free / MIB,
            (needed - free).div_ceil(MIB)
        )))
    }
}
