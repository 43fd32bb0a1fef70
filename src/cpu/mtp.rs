//! The MTP layer as a drafter (facts/glm5.md §4): `join_hidden`, one decoder layer, the target's
//! head.

use super::drafter::{DrafterKind, as_rows, likeliest};
use super::ops::{linear, rms_norm};
use super::rank::{CpuRank, clear};
use crate::error::Result;
use crate::model::{DraftRow, Drafted, Hidden, Norm, Stages, decoder_layer};

/// x = eh_proj · [RMS(embedding of the next token), RMS(hidden state)]. What is recycled is the
/// vector after `shared_head.norm`.
pub fn join_hidden(rank: &mut CpuRank, rows: &[DraftRow], hidden: Hidden) {
    let width = rank.config.hidden_size;
    let eps = rank.config.rms_norm_eps;
    let Some(drafter) = &rank.drafter else {
        return;
    };
    let DrafterKind::Mtp(mtp) = &drafter.kind else {
        return;
    };
    let mut embedding = vec![0.0; width];
    let mut joined = vec![0.0; rows.len() * 2 * width];
    for (row, joined) in rows.iter().zip(joined.chunks_exact_mut(2 * width)) {
        let (left, right) = joined.split_at_mut(width);
        let token = row.token as usize;
        rank.params.embed_tokens.decode(token..token + 1, &mut embedding);
        rms_norm(&embedding, &mtp.enorm, eps, left);
        let h = match hidden {
            Hidden::Target => drafter.features.row(row.sequence, row.position),
            Hidden::Recycled => &rank.buffers.normed[rank.buffers.normed.len() - width..],
        };
        rms_norm(h, &mtp.hnorm, eps, right);
    }
    let buffers = &mut rank.buffers;
    clear(&mut buffers.residual, rows.len() * width);
    linear(&mtp.eh_proj, &joined, &mut buffers.residual);
    clear(&mut buffers.partial, rows.len() * width);
    clear(&mut buffers.normed, rows.len() * width);
    buffers.rows = as_rows(rows);
    buffers.capture = false;
    buffers.angles = rows.iter().map(|row| rank.rope.angles(row.position)).collect();
}

pub fn draft_layer(rank: &mut CpuRank) -> Result<()> {
    let layer = rank.config.num_hidden_layers;
    let shape = rank.config.layers[layer];
    decoder_layer(rank, layer, shape)?;
    rank.reduce_norm(Norm::SharedHead)
}

pub fn draft_head(rank: &mut CpuRank, keep_logits: bool) -> Result<Drafted> {
    let width = rank.config.hidden_size;
    let last = rank.buffers.normed[rank.buffers.normed.len() - width..].to_vec();
    let (lm_head, limit) = (rank.params.lm_head.clone(), rank.vocab_limit);
    likeliest(rank, &lm_head, &last, limit, keep_logits)
}
