//! The stages of a layer (DESIGN §2). A backend implements each under the same name, for one rank.

use super::rows::{RowResult, Step};
use crate::error::Result;

/// Which RMSNorm a [`Stages::reduce_norm`] applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    /// `input_layernorm` of a layer.
    Input(usize),
    /// `post_attention_layernorm` of a layer.
    PostAttention(usize),
    /// `model.norm`.
    Final,
    /// `shared_head.norm` of the MTP layer.
    SharedHead,
}

/// One rank's stages. State between stages (rows, residual, partial sums, queries, lists) lives in
/// the implementation; [`super::forward`] gives the order.
///
/// Row invariance: what a stage computes for a row depends only on that row and its sequence's
/// cache, bit for bit, never on the other rows of the step.
pub trait Stages {
    /// Takes the rows of the step; this rank's partial sum becomes its share of their embeddings,
    /// the residual zero.
    fn embed(&mut self, step: &Step) -> Result<()>;
    /// residual += Σ partial over ranks, in rank order; normed = RMSNorm(residual).
    fn reduce_norm(&mut self, norm: Norm) -> Result<()>;
    /// q_a, kv_a, the indexer's wk and head weights; norms, rope, cache writes.
    fn project_latents(&mut self, layer: usize) -> Result<()>;
    /// q_b, rope, absorb W_UK; the indexer's queries.
    fn project_queries(&mut self, layer: usize) -> Result<()>;
    /// Lightning-indexer scores of the visible positions, where there are more than `index_topk`.
    fn score_keys(&mut self, layer: usize) -> Result<()>;
    /// The `index_topk` best positions; ties: higher score, then lower position.
    fn select_keys(&mut self, layer: usize) -> Result<()>;
    /// Absorbed MLA over the selected positions.
    fn attend(&mut self, layer: usize) -> Result<()>;
    /// W_UV.
    fn project_values(&mut self, layer: usize) -> Result<()>;
    /// o_proj into the partial sum.
    fn project_output(&mut self, layer: usize) -> Result<()>;
    /// Router: sigmoid, bias, top-k, renormalised weights; the shared expert's gate and up.
    fn route(&mut self, layer: usize) -> Result<()>;
    /// SwiGLU of the routed experts.
    fn expert_gate_up(&mut self, layer: usize) -> Result<()>;
    /// Down projections, weighted sum, shared expert's down, into the partial sum.
    fn expert_down(&mut self, layer: usize) -> Result<()>;
    /// SwiGLU of a dense layer.
    fn dense_gate_up(&mut self, layer: usize) -> Result<()>;
    /// Down projection of a dense layer, into the partial sum.
    fn dense_down(&mut self, layer: usize) -> Result<()>;
    /// Vocabulary-parallel lm_head and arg-max over the ranks; results of the rows that asked for
    /// any, in row order. Every rank returns the same arg-max; only rank 0 returns logits.
    fn head(&mut self) -> Result<Vec<RowResult>>;
}
