//! Multi-head latent attention in absorbed form (facts/glm5.md §3.1): the cache holds one latent
//! and one roped key a position, W_UK is folded into the query, W_UV applied to the result.

use super::cache::latent_width;
use super::ops::{
    add_scaled, dot_rows, for_each_tile, layer_norm, linear, rms_norm, rotate, softmax,
};
use super::rank::{CpuRank, clear};

/// Epsilon of the indexer's k_norm, which is not `rms_norm_eps` (facts/glm5.md §3.2).
const K_NORM_EPS: f32 = 1e-6;

/// q_a and kv_a with their norms; the new positions' cache entries, index keys included; the
/// weights of the index heads.
pub fn project_latents(rank: &mut CpuRank, layer: usize) {
    let config = &rank.config;
    let params = &rank.params.layers[layer];
    let attention = &params.attention;
    let buffers = &mut rank.buffers;
    let count = buffers.rows.len();

    let q_rank = config.q_lora_rank;
    let mut q_a = vec![0.0; count * q_rank];
    linear(&attention.q_a_proj, &buffers.normed, &mut q_a);
    clear(&mut buffers.query_latents, count * q_rank);
    for (x, y) in q_a.chunks_exact(q_rank).zip(buffers.query_latents.chunks_exact_mut(q_rank)) {
        rms_norm(x, &attention.q_a_layernorm, config.latent_norm_eps, y);
    }

    let width = latent_width(config);
    let latent = config.kv_lora_rank;
    let mut kv_a = vec![0.0; count * width];
    linear(&attention.kv_a_proj_with_mqa, &buffers.normed, &mut kv_a);
    for (r, (row, kv_a)) in buffers.rows.iter().zip(kv_a.chunks_exact(width)).enumerate() {
        let cache = rank.cache.layer_mut(row.sequence, layer);
        let entry = &mut cache.latents[row.position * width..(row.position + 1) * width];
        let (normed, key) = entry.split_at_mut(latent);
        rms_norm(&kv_a[..latent], &attention.kv_a_layernorm, config.latent_norm_eps, normed);
        // The roped key is not normalised.
        key.copy_from_slice(&kv_a[latent..]);
        rotate(key, &buffers.angles[r]);
    }

    let Some(indexer) = &params.indexer else {
        return;
    };
    let (heads, dim) = (config.index_n_heads, config.index_head_dim);
    let mut keys = vec![0.0; count * dim];
    linear(&indexer.wk, &buffers.normed, &mut keys);
    for (r, (row, key)) in buffers.rows.iter().zip(keys.chunks_exact_mut(dim)).enumerate() {
        layer_norm(key, &indexer.k_norm_weight, &indexer.k_norm_bias, K_NORM_EPS);
        // Here the rope dimensions come first.
        rotate(&mut key[..config.qk_rope_head_dim], &buffers.angles[r]);
        let cache = rank.cache.layer_mut(row.sequence, layer);
        cache.index_keys[row.position * dim..(row.position + 1) * dim].copy_from_slice(key);
    }
    clear(&mut buffers.index_weights, count * heads);
    linear(&indexer.weights_proj, &buffers.normed, &mut buffers.index_weights);
    let scale = (heads as f32).powf(-0.5) * (dim as f32).powf(-0.5);
    for weight in &mut buffers.index_weights {
        *weight *= scale;
    }
}

/// q_b with rope; W_UK folded in; the indexer's queries.
pub fn project_queries(rank: &mut CpuRank, layer: usize) {
    let config = &rank.config;
    let params = &rank.params.layers[layer];
    let buffers = &mut rank.buffers;
    let count = buffers.rows.len();
    let (nope, rope) = (config.qk_nope_head_dim, config.qk_rope_head_dim);
    let (latent, width) = (config.kv_lora_rank, latent_width(config));
    let heads = config.num_attention_heads / rank.comm.ranks();

    let mut q = vec![0.0; count * heads * (nope + rope)];
    linear(&params.attention.q_b_proj, &buffers.query_latents, &mut q);
    clear(&mut buffers.queries, count * heads * width);
    for head in 0..heads {
        let first = head * (nope + config.v_head_dim);
        let w_uk = params.attention.kv_b_proj.row_range(first..first + nope);
        for_each_tile(&w_uk, |first, tile| {
            for r in 0..count {
                let q_nope = &q[(r * heads + head) * (nope + rope) + first..];
                let query = &mut buffers.queries[(r * heads + head) * width..][..latent];
                for (w_uk, q_nope) in tile.chunks_exact(latent).zip(q_nope) {
                    add_scaled(query, *q_nope, w_uk);
                }
            }
        });
        for (r, angles) in buffers.angles.iter().enumerate() {
            let q_rope = &q[(r * heads + head) * (nope + rope) + nope..][..rope];
            let query = &mut buffers.queries[(r * heads + head) * width + latent..][..rope];
            query.copy_from_slice(q_rope);
            rotate(query, angles);
        }
    }

    let Some(indexer) = &params.indexer else {
        return;
    };
    let dim = config.index_head_dim;
    clear(&mut buffers.index_queries, count * config.index_n_heads * dim);
    linear(&indexer.wq_b, &buffers.query_latents, &mut buffers.index_queries);
    let per_row = buffers.index_queries.chunks_exact_mut(config.index_n_heads * dim);
    for (queries, angles) in per_row.zip(&buffers.angles) {
        for query in queries.chunks_exact_mut(dim) {
            rotate(&mut query[..rope], angles);
        }
    }
}

/// Softmax over the selected positions, weighted sum of their latents.
pub fn attend(rank: &mut CpuRank, layer: usize) {
    let config = &rank.config;
    let buffers = &mut rank.buffers;
    let (latent, width) = (config.kv_lora_rank, latent_width(config));
    let heads = config.num_attention_heads / rank.comm.ranks();
    let scale = ((config.qk_nope_head_dim + config.qk_rope_head_dim) as f32).powf(-0.5);
    clear(&mut buffers.attended, buffers.rows.len() * heads * latent);
    let mut of_heads = vec![0.0; heads];
    // [heads, selected]
    let mut scores = Vec::new();
    for (r, row) in buffers.rows.iter().enumerate() {
        let latents = &rank.cache.layer(row.sequence, layer).latents;
        let selected = &buffers.selected[r];
        let queries = &buffers.queries[r * heads * width..][..heads * width];
        clear(&mut scores, heads * selected.len());
        for (i, t) in selected.iter().enumerate() {
            dot_rows(queries, &latents[t * width..][..width], &mut of_heads);
            for (head, score) in of_heads.iter().enumerate() {
                scores[head * selected.len() + i] = score * scale;
            }
        }
        let out = &mut buffers.attended[r * heads * latent..][..heads * latent];
        for (scores, out) in
            scores.chunks_exact_mut(selected.len()).zip(out.chunks_exact_mut(latent))
        {
            softmax(scores);
            for (t, probability) in selected.iter().zip(scores) {
                add_scaled(out, *probability, &latents[t * width..][..latent]);
            }
        }
    }
}

/// W_UV: from latent space to each head's values.
pub fn project_values(rank: &mut CpuRank, layer: usize) {
    let config = &rank.config;
    let kv_b = &rank.params.layers[layer].attention.kv_b_proj;
    let buffers = &mut rank.buffers;
    let count = buffers.rows.len();
    let (nope, value, latent) = (config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank);
    let heads = config.num_attention_heads / rank.comm.ranks();
    clear(&mut buffers.values, count * heads * value);
    for head in 0..heads {
        let first = head * (nope + value) + nope;
        for_each_tile(&kv_b.row_range(first..first + value), |first, tile| {
            for r in 0..count {
                let attended = &buffers.attended[(r * heads + head) * latent..][..latent];
                let values = &mut buffers.values[(r * heads + head) * value + first..];
                dot_rows(tile, attended, &mut values[..tile.len() / latent]);
            }
        });
    }
}

pub fn project_output(rank: &mut CpuRank, layer: usize) {
    let o_proj = &rank.params.layers[layer].attention.o_proj;
    linear(o_proj, &rank.buffers.values, &mut rank.buffers.partial);
}
