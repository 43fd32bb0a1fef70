//! One rank: its tensors, its caches, and the buffers that stages hand to each other.

use std::sync::Arc;

use super::cache::KvCache;
use super::drafter::Drafter;
use super::ops::Rope;
use super::{attention, head, indexer, mlp, residual};
use crate::comm::SharedMemory;
use crate::error::Result;
use crate::model::{ModelConfig, ModelParams, Norm, Row, RowResult, Stages, Step};

/// One rank of the reference backend.
pub struct CpuRank {
    pub(super) config: Arc<ModelConfig>,
    pub(super) params: ModelParams,
    pub(super) comm: SharedMemory,
    pub(super) cache: KvCache,
    pub(super) rope: Rope,
    /// Ids from here on are padding rows of lm_head, never an arg-max.
    pub(super) vocab_limit: usize,
    /// The drafter with what the target leaves for it, if there is one.
    pub(super) drafter: Option<Drafter>,
    pub(super) buffers: Buffers,
}

/// What one stage leaves for a later one; n rows, R ranks. Each buffer has one writer stage (the
/// partial sum has one a block) and is overwritten in the next layer.
#[derive(Default)]
pub struct Buffers {
    /// The step's rows.
    pub rows: Vec<Row>,
    /// The rows are the target's, so their features are kept for the drafter.
    pub capture: bool,
    /// (cos, sin) of each row's position, `[n][qk_rope_head_dim / 2]`
    pub angles: Vec<Vec<(f32, f32)>>,
    /// `[n, hidden_size]`
    pub residual: Vec<f32>,
    /// This rank's share of what is added to the residual next, `[n, hidden_size]`
    pub partial: Vec<f32>,
    /// RMSNorm of the residual, `[n, hidden_size]`
    pub normed: Vec<f32>,
    /// Normalised q latent, `[n, q_lora_rank]`
    pub query_latents: Vec<f32>,
    /// Absorbed queries with their roped part behind, `[n, heads / R, kv_lora_rank + rope]`
    pub queries: Vec<f32>,
    /// `[n, index_n_heads, index_head_dim]`
    pub index_queries: Vec<f32>,
    /// Weights of the index heads, `[n, index_n_heads]`
    pub index_weights: Vec<f32>,
    /// Indexer scores of each row's visible positions; empty where all are selected.
    pub scores: Vec<Vec<f32>>,
    /// Positions that each row attends to, rising. Kept for layers that share the list.
    pub selected: Vec<Vec<usize>>,
    /// Attention output in latent space, `[n, heads / R, kv_lora_rank]`
    pub attended: Vec<f32>,
    /// `[n, heads / R × v_head_dim]`
    pub values: Vec<f32>,
    /// Experts of each row with their weights, in rising order of the expert.
    pub routes: Vec<Vec<(usize, f32)>>,
    /// SwiGLU of each row's routed experts, in the order of `routes`, `[moe_intermediate_size / R]`
    pub expert_activations: Vec<Vec<Vec<f32>>>,
    /// SwiGLU of the shared expert or the dense MLP, `[n, width / R]`
    pub mlp_activations: Vec<f32>,
}

/// A buffer of `len` zeros, reusing its memory.
pub fn clear(buffer: &mut Vec<f32>, len: usize) {
    buffer.clear();
    buffer.resize(len, 0.0);
}

/// Each stage is the function of its name in the file of its block.
impl Stages for CpuRank {
    fn embed(&mut self, step: &Step) -> Result<()> {
        residual::embed(self, step);
        Ok(())
    }

    fn reduce_norm(&mut self, norm: Norm) -> Result<()> {
        residual::reduce_norm(self, norm)
    }

    fn project_latents(&mut self, layer: usize) -> Result<()> {
        attention::project_latents(self, layer);
        Ok(())
    }

    fn project_queries(&mut self, layer: usize) -> Result<()> {
        attention::project_queries(self, layer);
        Ok(())
    }

    fn score_keys(&mut self, layer: usize) -> Result<()> {
        indexer::score_keys(self, layer);
        Ok(())
    }

    fn select_keys(&mut self, _layer: usize) -> Result<()> {
        indexer::select_keys(self);
        Ok(())
    }

    fn attend(&mut self, layer: usize) -> Result<()> {
        attention::attend(self, layer);
        Ok(())
    }

    fn project_values(&mut self, layer: usize) -> Result<()> {
        attention::project_values(self, layer);
        Ok(())
    }

    fn project_output(&mut self, layer: usize) -> Result<()> {
        attention::project_output(self, layer);
        Ok(())
    }

    fn route(&mut self, layer: usize) -> Result<()> {
        mlp::route(self, layer);
        Ok(())
    }

    fn expert_gate_up(&mut self, layer: usize) -> Result<()> {
        mlp::expert_gate_up(self, layer);
        Ok(())
    }

    fn expert_down(&mut self, layer: usize) -> Result<()> {
        mlp::expert_down(self, layer);
        Ok(())
    }

    fn dense_gate_up(&mut self, layer: usize) -> Result<()> {
        mlp::dense_gate_up(self, layer);
        Ok(())
    }

    fn dense_down(&mut self, layer: usize) -> Result<()> {
        mlp::dense_down(self, layer);
        Ok(())
    }

    fn head(&mut self) -> Result<Vec<RowResult>> {
        head::head(self)
    }
}
