//! `draft_attend`: an EAGLE-3 head's attention over its own cache, grouped-query or latent.

use super::eagle3::Eagle3;
use super::ops::{add_scaled, dot, linear, rms_norm, rotate, softmax};
use crate::model::{Eagle3Attention, Eagle3AttentionConfig};
use crate::weights::Matrix;

/// Writes the cache entries of the head's rows and attends from them. `joined` is `[n, 2 H]`; the
/// result is `[n, heads / R × value width]`.
pub fn draft_attend(head: &mut Eagle3, joined: &[f32], ranks: usize) -> Vec<f32> {
    match head.params.attention {
        Eagle3Attention::Gqa { .. } => grouped_query(head, joined, ranks),
        Eagle3Attention::Mla { .. } => latent(head, joined, ranks),
    }
}

/// W x for each row of `x`.
fn project(matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; x.len() / matrix.columns() * matrix.rows()];
    linear(matrix, x, &mut out);
    out
}

/// Keys and values of the rank's key heads lie behind each other in a position's cache entry.
fn grouped_query(head: &mut Eagle3, joined: &[f32], ranks: usize) -> Vec<f32> {
    let (
        Eagle3Attention::Gqa { q_proj, k_proj, v_proj, .. },
        Eagle3AttentionConfig::Gqa { num_key_value_heads, head_dim: dim },
    ) = (&head.params.attention, head.config.attention.clone())
    else {
        unreachable!("the tensors were read by the configuration");
    };
    let heads = head.config.num_attention_heads / ranks;
    let kv_heads = num_key_value_heads / ranks;
    let width = kv_heads * dim;
    let (mut q, mut k, v) =
        (project(q_proj, joined), project(k_proj, joined), project(v_proj, joined));
    for (r, row) in head.rows.iter().enumerate() {
        let angles = head.rope.angles(row.position);
        let queries = &mut q[r * heads * dim..][..heads * dim];
        queries.chunks_exact_mut(dim).for_each(|q| rotate_halves(q, &angles));
        let keys = &mut k[r * width..][..width];
        keys.chunks_exact_mut(dim).for_each(|k| rotate_halves(k, &angles));
        let entry = &mut head.cache[row.sequence][row.position * 2 * width..][..2 * width];
        entry[..width].copy_from_slice(keys);
        entry[width..].copy_from_slice(&v[r * width..][..width]);
    }
    let scale = (dim as f32).powf(-0.5);
    let mut out = vec![0.0; q.len()];
    for (i, (q, out)) in q.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
        let row = head.rows[i / heads];
        // Query heads share key heads in equal groups.
        let at = i % heads / (heads / kv_heads) * dim;
        let entry = |t: usize| &head.cache[row.sequence][t * 2 * width..][..2 * width];
        let mut scores: Vec<f32> =
            (row.first..=row.position).map(|t| dot(q, &entry(t)[at..at + dim]) * scale).collect();
        softmax(&mut scores);
        for (t, probability) in (row.first..).zip(&scores) {
            add_scaled(out, *probability, &entry(t)[width + at..][..dim]);
        }
    }
    out
}

/// Absorbed, as the target's own attention: a cache entry is the latent and the roped key.
fn latent(head: &mut Eagle3, joined: &[f32], ranks: usize) -> Vec<f32> {
    let (
        Eagle3Attention::Mla {
            q_a_proj,
            q_a_layernorm,
            q_b_proj,
            kv_a_proj_with_mqa,
            kv_a_layernorm,
            kv_b_proj,
            ..
        },
        Eagle3AttentionConfig::Mla {
            q_lora_rank,
            kv_lora_rank: latent,
            qk_nope_head_dim: nope,
            qk_rope_head_dim: rope,
            v_head_dim: value,
        },
    ) = (&head.params.attention, head.config.attention.clone())
    else {
        unreachable!("the tensors were read by the configuration");
    };
    let heads = head.config.num_attention_heads / ranks;
    let eps = head.config.rms_norm_eps;
    let width = latent + rope;
    let q_a = project(q_a_proj, joined);
    let mut q_latent = vec![0.0; q_a.len()];
    for (x, y) in q_a.chunks_exact(q_lora_rank).zip(q_latent.chunks_exact_mut(q_lora_rank)) {
        rms_norm(x, q_a_layernorm, eps, y);
    }
    let mut q = project(q_b_proj, &q_latent);
    let kv_a = project(kv_a_proj_with_mqa, joined);
    for (r, (row, kv_a)) in head.rows.iter().zip(kv_a.chunks_exact(width)).enumerate() {
        let angles = head.rope.angles(row.position);
        let entry = &mut head.cache[row.sequence][row.position * width..][..width];
        let (normed, key) = entry.split_at_mut(latent);
        rms_norm(&kv_a[..latent], kv_a_layernorm, eps, normed);
        key.copy_from_slice(&kv_a[latent..]);
        rotate(key, &angles);
        let queries = &mut q[r * heads * (nope + rope)..][..heads * (nope + rope)];
        queries.chunks_exact_mut(nope + rope).for_each(|q| rotate(&mut q[nope..], &angles));
    }
    // A drafter is small: its kv_b_proj is decoded whole.
    let kv_b = kv_b_proj.to_vec();
    let scale = ((nope + rope) as f32).powf(-0.5);
    let mut out = vec![0.0; head.rows.len() * heads * value];
    for (i, (q, out)) in q.chunks_exact(nope + rope).zip(out.chunks_exact_mut(value)).enumerate() {
        let row = head.rows[i / heads];
        let w = &kv_b[i % heads * (nope + value) * latent..][..(nope + value) * latent];
        let (w_uk, w_uv) = w.split_at(nope * latent);
        let mut query = vec![0.0; latent];
        for (q, w_uk) in q[..nope].iter().zip(w_uk.chunks_exact(latent)) {
            add_scaled(&mut query, *q, w_uk);
        }
        query.extend_from_slice(&q[nope..]);
        let entry = |t: usize| &head.cache[row.sequence][t * width..][..width];
        let mut scores: Vec<f32> =
            (row.first..=row.position).map(|t| dot(&query, entry(t)) * scale).collect();
        softmax(&mut scores);
        let mut attended = vec![0.0; latent];
        for (t, probability) in (row.first..).zip(&scores) {
            add_scaled(&mut attended, *probability, &entry(t)[..latent]);
        }
        for (out, w_uv) in out.iter_mut().zip(w_uv.chunks_exact(latent)) {
            *out = dot(w_uv, &attended);
        }
    }
    out
}

/// Rope on pairs (j, j + d / 2), as Llama-type heads are trained with.
fn rotate_halves(x: &mut [f32], angles: &[(f32, f32)]) {
    let (low, high) = x.split_at_mut(angles.len());
    for ((low, high), (cos, sin)) in low.iter_mut().zip(high).zip(angles) {
        (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
    }
}
