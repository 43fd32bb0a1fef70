//! `embed` and `reduce_norm`: the residual stream.

use super::ops::rms_norm;
use super::rank::{CpuRank, clear};
use crate::error::Result;
use crate::model::{Norm, Step};

pub fn embed(rank: &mut CpuRank, step: &Step) {
    let hidden = rank.config.hidden_size;
    let count = step.rows.len();
    let buffers = &mut rank.buffers;
    buffers.rows.clone_from(&step.rows);
    buffers.capture = true;
    buffers.angles = step.rows.iter().map(|row| rank.rope.angles(row.position)).collect();
    clear(&mut buffers.residual, count * hidden);
    clear(&mut buffers.normed, count * hidden);
    clear(&mut buffers.partial, count * hidden);
    // The table is whole on every rank; one of them contributes it.
    if rank.comm.is_first() {
        for (row, out) in step.rows.iter().zip(buffers.partial.chunks_exact_mut(hidden)) {
            let token = row.token as usize;
            rank.params.embed_tokens.decode(token..token + 1, out);
        }
    }
}

pub fn reduce_norm(rank: &mut CpuRank, norm: Norm) -> Result<()> {
    let hidden = rank.config.hidden_size;
    let buffers = &mut rank.buffers;
    let residual = &mut buffers.residual;
    rank.comm.exchange(&buffers.partial, |_, partial| {
        for (sum, partial) in residual.iter_mut().zip(partial) {
            *sum += partial;
        }
    })?;
    let boundary = match norm {
        Norm::Input(layer) => Some(layer),
        Norm::Final => Some(rank.config.num_hidden_layers),
        Norm::PostAttention(_) | Norm::SharedHead => None,
    };
    if let (true, Some(drafter), Some(boundary)) = (buffers.capture, &mut rank.drafter, boundary) {
        drafter.features.keep_boundary(boundary, &buffers.rows, &buffers.residual);
    }
    let gain = match norm {
        Norm::Input(layer) => &rank.params.layers[layer].input_layernorm,
        Norm::PostAttention(layer) => &rank.params.layers[layer].post_attention_layernorm,
        Norm::Final => &rank.params.norm,
        Norm::SharedHead => &rank.params.shared_head_norm,
    };
    let rows = buffers.residual.chunks_exact(hidden);
    for (x, y) in rows.zip(buffers.normed.chunks_exact_mut(hidden)) {
        rms_norm(x, gain, rank.config.rms_norm_eps, y);
    }
    if let (Norm::Final, Some(drafter)) = (norm, &mut rank.drafter) {
        drafter.features.keep_final(&buffers.rows, &buffers.normed);
    }
    Ok(())
}
