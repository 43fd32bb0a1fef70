//! The arithmetic that stages share. Every sum has an order fixed by its length alone.

use crate::weights::Matrix;

/// Partial sums of a dot product: element i goes to sum i mod 8. No fused or reassociated
/// arithmetic, so that the result is the same on every machine.
const LANES: usize = 8;
type Lanes = [f32; LANES];

fn multiply_add(sums: Lanes, a: &Lanes, b: &Lanes) -> Lanes {
    std::array::from_fn(|lane| sums[lane] + a[lane] * b[lane])
}

/// The elements beyond the last whole chunk, then the pairwise sum of the lanes.
fn finish(mut sums: Lanes, a_rest: &[f32], b_rest: &[f32]) -> f32 {
    for ((sum, a), b) in sums.iter_mut().zip(a_rest).zip(b_rest) {
        *sum += a * b;
    }
    let [a, b, c, d, e, f, g, h] = sums;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Σ a·b.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        sums = multiply_add(sums, a, b);
    }
    finish(sums, a_rest, b_rest)
}

/// [`dot`] of `b` with each of four vectors, bit for bit, at less than four times the cost: the
/// sums of one hide the latency of the others, and `b` is read once.
fn dot_four(a: [&[f32]; 4], b: &[f32]) -> [f32; 4] {
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let sums = four_chunked(a.map(|a| a.as_chunks::<LANES>().0), b_chunks);
    std::array::from_fn(|i| finish(sums[i], a[i].as_chunks::<LANES>().1, b_rest))
}

/// The loop of [`dot_four`]. Not inlined: beside the pairwise sums, the compiler would interleave
/// the four vectors and spend its time on shuffles.
#[inline(never)]
fn four_chunked(a: [&[Lanes]; 4], b: &[Lanes]) -> [Lanes; 4] {
    let [a0, a1, a2, a3] = a;
    let [mut s0, mut s1, mut s2, mut s3] = [[0.0; LANES]; 4];
    for (((c0, c1), (c2, c3)), b) in a0.iter().zip(a1).zip(a2.iter().zip(a3)).zip(b) {
        s0 = multiply_add(s0, c0, b);
        s1 = multiply_add(s1, c1, b);
        s2 = multiply_add(s2, c2, b);
        s3 = multiply_add(s3, c3, b);
    }
    [s0, s1, s2, s3]
}

/// y[i] = rows[i] · x, for `rows` of the width of x.
pub fn dot_rows(rows: &[f32], x: &[f32], y: &mut [f32]) {
    let width = x.len();
    let fours = rows.chunks_exact(4 * width);
    let rest = fours.remainder();
    let (y_fours, y_rest) = y.as_chunks_mut::<4>();
    for (rows, y) in fours.zip(y_fours) {
        *y = dot_four(std::array::from_fn(|i| &rows[i * width..][..width]), x);
    }
    for (row, y) in rest.chunks_exact(width).zip(y_rest) {
        *y = dot(row, x);
    }
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
        let rows = tile.len() / width;
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(out)) {
            dot_rows(tile, x, &mut y[first..first + rows]);
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
