//! `head`: each rank computes its part of the vocabulary; the arg-max and, where asked for, the
//! logits are put together from all ranks.

use super::ops::linear;
use super::rank::CpuRank;
use crate::error::{Error, Result};
use crate::model::{Output, RowResult};

pub fn head(rank: &mut CpuRank) -> Result<Vec<RowResult>> {
    let hidden = rank.config.hidden_size;
    let buffers = &rank.buffers;
    let lm_head = &rank.params.lm_head;
    let share = lm_head.rows();
    let first_id = share * rank.comm.rank();

    let wanted: Vec<usize> =
        (0..buffers.rows.len()).filter(|r| buffers.rows[*r].output != Output::None).collect();
    let mut x = Vec::with_capacity(wanted.len() * hidden);
    for r in &wanted {
        x.extend_from_slice(&buffers.normed[r * hidden..][..hidden]);
    }
    let mut logits = vec![0.0; wanted.len() * share];
    linear(lm_head, &x, &mut logits);

    // (logit, id) of this rank's best; an id is below 2^24, so f32 holds it exactly.
    let best: Vec<f32> = logits
        .chunks_exact(share)
        .flat_map(|row| best_of(row, first_id, rank.vocab_limit))
        .collect();
    let mut results: Vec<RowResult> =
        wanted.iter().map(|r| RowResult { row: *r, argmax: 0, logits: Vec::new() }).collect();
    let mut best_logits = vec![f32::NEG_INFINITY; wanted.len()];
    rank.comm.exchange(&best, |_, theirs| {
        for (i, pair) in theirs.as_chunks::<2>().0.iter().enumerate() {
            // Ranks come in the order of their ids, so a later equal logit loses.
            if pair[0] > best_logits[i] {
                best_logits[i] = pair[0];
                results[i].argmax = pair[1] as u32;
            }
        }
    })?;

    for (i, best) in best_logits.iter().enumerate() {
        if !best.is_finite() {
            return Err(Error::runtime(format!(
                "the logits at position {} are not finite numbers; the weights are damaged: talon \
                 verify --scales, or --check-hashes, finds where",
                buffers.rows[wanted[i]].position
            )));
        }
    }

    let keep: Vec<usize> =
        (0..wanted.len()).filter(|i| buffers.rows[wanted[*i]].output == Output::Logits).collect();
    if !keep.is_empty() {
        let kept: Vec<f32> =
            keep.iter().flat_map(|i| &logits[i * share..][..share]).copied().collect();
        let collects = rank.comm.is_first();
        rank.comm.exchange(&kept, |_, theirs| {
            if collects {
                for (i, part) in keep.iter().zip(theirs.chunks_exact(share)) {
                    results[*i].logits.extend_from_slice(part);
                }
            }
        })?;
    }
    Ok(results)
}

/// The best logit among the ids below `limit`, and its id. Ties: the lower id.
fn best_of(logits: &[f32], first_id: usize, limit: usize) -> [f32; 2] {
    let mut best = [f32::NEG_INFINITY, first_id as f32];
    for (id, logit) in (first_id..limit).zip(logits) {
        if *logit > best[0] {
            best = [*logit, id as f32];
        }
    }
    best
}
