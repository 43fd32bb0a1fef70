//! An EAGLE-3 head as a drafter (facts/eagle3.md §2.1): `fuse_features`, `draft_attend` (in a file
//! of its own), a SwiGLU MLP, `draft_head`.

use std::sync::Arc;

use super::draft_attend::draft_attend;
use super::drafter::{DrafterKind, likeliest};
use super::ops::{Rope, linear, rms_norm, silu};
use super::rank::CpuRank;
use crate::error::Result;
use crate::model::{
    DraftRow, Drafted, Eagle3Attention, Eagle3AttentionConfig, Eagle3Config, Eagle3Params, Hidden,
};

/// A head on one rank, with its cache and what its stages hand to each other.
pub struct Eagle3 {
    /// Its configuration.
    pub config: Arc<Eagle3Config>,
    /// Its tensors.
    pub params: Eagle3Params,
    /// Target id of each draft id.
    pub draft_to_target: Option<Arc<Vec<u32>>>,
    /// Its rotary embedding.
    pub rope: Rope,
    /// `[context, entry]` for each sequence; an entry is the rank's keys and values (grouped-query
    /// attention), or latent and roped key (latent attention).
    pub cache: Vec<Vec<f32>>,
    /// The rows that are being run.
    pub rows: Vec<DraftRow>,
    /// Embedding, normed, `[n, H]`
    embedding: Vec<f32>,
    /// Fused feature or recycled hidden state, `[n, H]`; after the layer, its output
    hidden: Vec<f32>,
}

impl Eagle3 {
    /// A head with an empty cache for `parallel` sequences of `context` tokens on one of `ranks`.
    pub fn new(
        config: Arc<Eagle3Config>,
        params: Eagle3Params,
        draft_to_target: Option<Arc<Vec<u32>>>,
        ranks: usize,
        (context, parallel): (usize, usize),
    ) -> Self {
        let rope_width = match config.attention {
            Eagle3AttentionConfig::Gqa { head_dim, .. } => head_dim,
            Eagle3AttentionConfig::Mla { qk_rope_head_dim, .. } => qk_rope_head_dim,
        };
        let rope = Rope::new(rope_width, config.rope_theta);
        let cache = vec![vec![0.0; context * entry_width(&config, ranks)]; parallel];
        let (rows, embedding, hidden) = (Vec::new(), Vec::new(), Vec::new());
        Self { config, params, draft_to_target, rope, cache, rows, embedding, hidden }
    }
}

/// Floats that a rank keeps for each position.
pub fn entry_width(config: &Eagle3Config, ranks: usize) -> usize {
    match config.attention {
        Eagle3AttentionConfig::Gqa { num_key_value_heads, head_dim } => {
            2 * num_key_value_heads / ranks * head_dim
        }
        Eagle3AttentionConfig::Mla { kv_lora_rank, qk_rope_head_dim, .. } => {
            kv_lora_rank + qk_rope_head_dim
        }
    }
}

/// The rank's head and the parts of the rank that it works with.
macro_rules! head_of {
    ($rank:ident) => {
        match $rank.drafter.as_mut().map(|drafter| (&drafter.features, &mut drafter.kind)) {
            Some((features, DrafterKind::Eagle3(head))) => (features, head.as_mut()),
            _ => unreachable!("these stages are called for an EAGLE-3 head only"),
        }
    };
}

/// f = fc · features (normed first where the head wants it), or the recycled hidden state.
pub fn fuse_features(rank: &mut CpuRank, rows: &[DraftRow], hidden: Hidden) {
    let target_width = rank.config.hidden_size;
    let (features, head) = head_of!(rank);
    let (width, eps) = (head.config.hidden_size, head.config.rms_norm_eps);
    match hidden {
        Hidden::Target => {
            let mut fused: Vec<f32> = Vec::new();
            for row in rows {
                let feature = features.row(row.sequence, row.position);
                let mut normed = feature.to_vec();
                if let Some(gain) = &head.params.input_norm {
                    rms_norm(feature, gain, eps, &mut normed);
                }
                let chunks = feature.chunks_exact(target_width);
                let normed_chunks = normed.chunks_exact_mut(target_width);
                for ((x, y), gain) in chunks.zip(normed_chunks).zip(&head.params.fc_norm) {
                    rms_norm(x, gain, eps, y);
                }
                fused.extend(normed);
            }
            head.hidden = vec![0.0; rows.len() * width];
            linear(&head.params.fc, &fused, &mut head.hidden);
        }
        Hidden::Recycled => {
            let last = head.hidden.split_off(head.hidden.len() - width);
            head.hidden = last;
            if head.config.norm_output {
                let pre_norm = head.hidden.clone();
                rms_norm(&pre_norm, &head.params.norm, eps, &mut head.hidden);
            }
        }
    }
    let table = head.params.embed_tokens.as_ref().unwrap_or(&rank.params.embed_tokens);
    let mut embedding = vec![0.0; width];
    head.embedding = vec![0.0; rows.len() * width];
    for (row, normed) in rows.iter().zip(head.embedding.chunks_exact_mut(width)) {
        let token = row.token as usize;
        table.decode(token..token + 1, &mut embedding);
        rms_norm(&embedding, &head.params.input_layernorm, eps, normed);
    }
    head.rows = rows.to_vec();
}

/// The decoder layer: attention over the drafter's own cache, then a SwiGLU MLP.
pub fn draft_layer(rank: &mut CpuRank) -> Result<()> {
    let ranks = rank.comm.ranks();
    let (_, head) = head_of!(rank);
    let (width, eps) = (head.config.hidden_size, head.config.rms_norm_eps);
    let count = head.rows.len();
    // u = [normed embedding, normed hidden]; the embedding has no part in the residual.
    let mut normed_hidden = vec![0.0; count * width];
    for (x, y) in head.hidden.chunks_exact(width).zip(normed_hidden.chunks_exact_mut(width)) {
        rms_norm(x, &head.params.hidden_norm, eps, y);
    }
    let joined: Vec<f32> = head
        .embedding
        .chunks_exact(width)
        .zip(normed_hidden.chunks_exact(width))
        .flat_map(|(embedding, hidden)| embedding.iter().chain(hidden))
        .copied()
        .collect();
    let attended = draft_attend(head, &joined, ranks);
    let mut residual =
        if head.config.norm_before_residual { normed_hidden } else { head.hidden.clone() };
    let mut partial = vec![0.0; count * width];
    let o_proj = match &head.params.attention {
        Eagle3Attention::Gqa { o_proj, .. } | Eagle3Attention::Mla { o_proj, .. } => o_proj,
    };
    linear(o_proj, &attended, &mut partial);
    let add = |residual: &mut Vec<f32>, partial: &[f32]| {
        for (sum, partial) in residual.iter_mut().zip(partial) {
            *sum += partial;
        }
    };
    rank.comm.exchange(&partial, |_, theirs| add(&mut residual, theirs))?;

    let mut x = vec![0.0; count * width];
    for (residual, x) in residual.chunks_exact(width).zip(x.chunks_exact_mut(width)) {
        rms_norm(residual, &head.params.post_attention_layernorm, eps, x);
    }
    let mut gate = vec![0.0; count * head.params.gate_proj.rows()];
    let mut up = gate.clone();
    linear(&head.params.gate_proj, &x, &mut gate);
    linear(&head.params.up_proj, &x, &mut up);
    for (gate, up) in gate.iter_mut().zip(&up) {
        *gate = silu(*gate) * up;
    }
    linear(&head.params.down_proj, &gate, &mut partial);
    rank.comm.exchange(&partial, |_, theirs| add(&mut residual, theirs))?;
    head.hidden = residual;
    Ok(())
}

/// The likeliest token after the last row.
pub fn draft_head(rank: &mut CpuRank, keep_logits: bool) -> Result<Drafted> {
    let vocab_limit = rank.vocab_limit;
    let (_, head) = head_of!(rank);
    let width = head.config.hidden_size;
    let last = &head.hidden[head.hidden.len() - width..];
    let mut normed = vec![0.0; width];
    rms_norm(last, &head.params.norm, head.config.rms_norm_eps, &mut normed);
    let lm_head = head.params.lm_head.clone().unwrap_or_else(|| rank.params.lm_head.clone());
    let draft_to_target = head.draft_to_target.clone();
    // Without a map draft ids are the target's, whose padding rows never count.
    let limit = match &draft_to_target {
        Some(ids) => ids.partition_point(|id| (*id as usize) < vocab_limit),
        None => vocab_limit,
    };
    let mut drafted = likeliest(rank, &lm_head, &normed, limit, keep_logits)?;
    if let Some(ids) = draft_to_target {
        drafted.token = ids[drafted.token as usize];
    }
    Ok(drafted)
}
