//! The lightning indexer (facts/glm5.md §3.2): which positions a row attends to.

use super::ops::{dot_rows, top_k};
use super::rank::CpuRank;

/// score[t] = Σ_h w_h · ReLU(q_h · k[t]) over the visible positions, the row's own included.
pub fn score_keys(rank: &mut CpuRank, layer: usize) {
    let config = &rank.config;
    let buffers = &mut rank.buffers;
    let (heads, dim) = (config.index_n_heads, config.index_head_dim);
    let mut products = vec![0.0; heads];
    buffers.scores.resize_with(buffers.rows.len(), Vec::new);
    for (r, row) in buffers.rows.iter().enumerate() {
        let visible = row.position + 1 - row.first;
        let scores = &mut buffers.scores[r];
        scores.clear();
        if visible <= config.index_topk {
            continue;
        }
        let cache = rank.cache.layer(row.sequence, layer);
        let queries = &buffers.index_queries[r * heads * dim..][..heads * dim];
        let weights = &buffers.index_weights[r * heads..][..heads];
        let keys = cache.index_keys.chunks_exact(dim).skip(row.first).take(visible);
        scores.extend(keys.map(|key| {
            dot_rows(queries, key, &mut products);
            products
                .iter()
                .zip(weights)
                .map(|(product, weight)| weight * product.max(0.0))
                .sum::<f32>()
        }));
    }
}

/// The `index_topk` best positions of each row; all visible ones where there are no more.
pub fn select_keys(rank: &mut CpuRank) {
    let index_topk = rank.config.index_topk;
    let buffers = &mut rank.buffers;
    let select = |(row, scores): (&crate::model::Row, &Vec<f32>)| match scores.is_empty() {
        true => (row.first..=row.position).collect(),
        false => top_k(scores, index_topk).into_iter().map(|t| row.first + t).collect(),
    };
    buffers.selected = buffers.rows.iter().zip(&buffers.scores).map(select).collect();
}
