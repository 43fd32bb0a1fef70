//! The arithmetic that stages share. Every sum has an order fixed by its length alone.

use crate::weights::Matrix;

/// Partial sums of a dot product. Wide enough to keep the adders busy without fused or
/// reassociated arithmetic, so that the result is the same on every machine.
const LANES: usize = 16;

/// Σ a·b, summed in [`LANES`] interleaved partial sums and then pairwise.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    for ((sum, a), b) in sums.iter_mut().zip(a_rest).zip(b_rest) {
        *sum += a * b;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

/// y += a·x.
pub fn add_scaled(y: &mut [f32], a: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// Decoded weights that [`linear`] works on at a time: 16 KiB, which the first-level cache holds.
const TILE: usize = 4096;

/// y = W x for each row of `x`: `[n, in]` to `[n, out]`. Stored rows are decoded once for all n.
pub fn linear(w: &Matrix, x: &[f32], y: &mut [f32]) {
    let (width, out) = (w.columns(), w.rows());
    for_each_tile(w, |first, tile| {
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(out)) {
            for (y, weights) in y[first..].iter_mut().zip(tile.chunks_exact(width)) {
                *y = dot(weights, x);
            }
        }
    });
}

/// Decodes `w` a few rows at a time: calls `visit` with the first row's index and the rows.
pub fn for_each_tile(w: &Matrix, mut visit: impl FnMut(usize, &[f32])) {
    let rows_per_tile = (TILE / w.columns().max(1)).max(1);
    let mut tile = vec![0.0; rows_per_tile.min(w.rows()) * w.columns()];
    for first in (0..w.rows()).step_by(rows_per_tile) {
        let rows = first..(first + rows_per_tile).min(w.rows());
        let tile = &mut tile[..rows.len() * w.columns()];
        w.decode(rows, tile);
        visit(first, tile);
    }
}

/// y = gain · x / sqrt(mean(x²) + eps).
pub fn rms_norm(x: &[f32], gain: &[f32], eps: f32, y: &mut [f32]) {
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    for ((y, x), gain) in y.iter_mut().zip(x).zip(gain) {
        *y = x * scale * gain;
    }
}

/// y = gain · (x − mean) / sqrt(variance + eps) + bias, in place.
pub fn layer_norm(x: &mut [f32], gain: &[f32], bias: &[f32], eps: f32) {
    let mean = x.iter().sum::<f32>() / x.len() as f32;
    for x in x.iter_mut() {
        *x -= mean;
    }
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    for ((x, gain), bias) in x.iter_mut().zip(gain).zip(bias) {
        *x = *x * scale * gain + bias;
    }
}

/// x · sigmoid(x).
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// Turns scores into probabilities, in place.
pub fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - max).exp();
        sum += *score;
    }
    for score in scores.iter_mut() {
        *score /= sum;
    }
}

/// Rotary position embedding on interleaved pairs (2j, 2j + 1) (facts/glm5.md §3.1).
pub struct Rope {
    /// theta^(−2j / d), `[d / 2]`
    inverse_frequencies: Vec<f32>,
}

impl Rope {
    /// For vectors of `width` elements.
    pub fn new(width: usize, theta: f32) -> Self {
        let inverse = |pair: usize| 1.0 / theta.powf((2 * pair) as f32 / width as f32);
        Self { inverse_frequencies: (0..width / 2).map(inverse).collect() }
    }

    /// (cos, sin) of every pair at `position`.
    pub fn angles(&self, position: usize) -> Vec<(f32, f32)> {
        let turn = |frequency: &f32| {
            let (sin, cos) = (position as f32 * frequency).sin_cos();
            (cos, sin)
        };
        self.inverse_frequencies.iter().map(turn).collect()
    }
}

/// Turns `x`, whose length is twice that of `angles`.
pub fn rotate(x: &mut [f32], angles: &[(f32, f32)]) {
    let (pairs, _) = x.as_chunks_mut::<2>();
    for ([even, odd], (cos, sin)) in pairs.iter_mut().zip(angles) {
        (*even, *odd) = (*even * cos - *odd * sin, *odd * cos + *even * sin);
    }
}

/// Positions of the `k` largest scores, rising. Ties: the lower position wins.
pub fn top_k(scores: &[f32], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    if k < order.len() {
        let better = |a: &usize, b: &usize| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b));
        if k > 0 {
            order.select_nth_unstable_by(k - 1, better);
        }
        order.truncate(k);
        order.sort_unstable();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_sums_every_element_of_any_length() {
        for length in 0..200 {
            let a: Vec<f32> = (0..length).map(|i| (i % 7) as f32).collect();
            let expected: f32 = a.iter().map(|x| x * x).sum();
            assert_eq!(dot(&a, &a), expected, "length {length}");
        }
    }

    #[test]
    fn top_k_prefers_the_lower_position_on_ties() {
        assert_eq!(top_k(&[1.0, 3.0, 2.0, 3.0, 3.0], 2), [1, 3]);
        assert_eq!(top_k(&[0.0, 0.0, 0.0], 1), [0]);
        assert_eq!(top_k(&[5.0, 1.0], 4), [0, 1]);
        assert_eq!(top_k(&[-1.0, 0.0, -0.0, 2.0], 2), [1, 3]);
    }

    #[test]
    fn softmax_of_equal_scores_is_uniform() {
        let mut scores = [1e30, 1e30, 1e30, 1e30];
        softmax(&mut scores);
        assert_eq!(scores, [0.25; 4]);
    }
}
