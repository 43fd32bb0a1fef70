//! From logits to a token.
//!
//! The random stream is keyed by (seed, index of the output token), not by how many numbers were
//! drawn before, so a seeded run gives the same text however its steps are grouped into rows.

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the most likely tokens whose probabilities reach this sum.
    pub top_p: f32,
    /// Key of the random stream.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, seed: 0 };

    /// Whether the arg-max is all that is needed.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Samples output token `index` from `logits`, which end where the vocabulary ends.
    pub fn sample(&self, logits: &[f32], index: usize) -> u32 {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: f32| f64::from((logit - max) / self.temperature).exp();
        let mut candidates: Vec<(u32, f64)> =
            (0..).zip(logits).map(|(id, logit)| (id, weight(*logit))).collect();
        // The order of the cumulative sum is part of the result: likeliest first, ties by id.
        candidates.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
        let mut nucleus = 0.0;
        let keep = candidates
            .iter()
            .position(|(_, weight)| {
                nucleus += weight;
                nucleus >= f64::from(self.top_p) * total
            })
            .map_or(candidates.len(), |last| last + 1);
        let kept: f64 = candidates[..keep].iter().map(|(_, weight)| weight).sum();
        let mut rest = uniform(self.seed, index as u64) * kept;
        for (id, weight) in &candidates[..keep] {
            rest -= weight;
            if rest < 0.0 {
                return *id;
            }
        }
        // Rounding can leave a sliver beyond the last weight.
        candidates[..keep].last().map_or(0, |(id, _)| *id)
    }
}

/// A number in [0, 1) that depends only on the key: splitmix64 (Steele, Lea, Flood 2014) of the
/// seed's stream at `index`.
fn uniform(seed: u64, index: u64) -> f64 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let gamma = 0x9E37_79B9_7F4A_7C15u64;
    let stream = mix(seed.wrapping_add(gamma));
    let bits = mix(stream.wrapping_add(gamma.wrapping_mul(index.wrapping_add(1))));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f32, top_p: f32, seed: u64) -> Sampling {
        Sampling { temperature, top_p, seed }
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        // Probabilities 0.5, 0.3, 0.2 at temperature 1.
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let mut counts = [0usize; 3];
        for index in 0..20_000 {
            counts[sampling(1.0, 1.0, 7).sample(&logits, index) as usize] += 1;
        }
        for (count, expected) in counts.iter().zip([10_000.0, 6_000.0, 4_000.0]) {
            assert!((*count as f64 - expected).abs() < 250.0, "{counts:?}");
        }
    }

    #[test]
    fn top_p_drops_the_tail() {
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let drawn: Vec<u32> =
            (0..1000).map(|index| sampling(1.0, 0.79, 1).sample(&logits, index)).collect();
        assert!(drawn.contains(&1) && !drawn.contains(&2));
        let drawn = (0..1000).map(|index| sampling(1.0, 0.4, 1).sample(&logits, index));
        assert!(drawn.into_iter().all(|id| id == 0));
    }

    #[test]
    fn the_stream_depends_on_seed_and_index_alone() {
        let logits: Vec<f32> = (0..100).map(|i| (i % 10) as f32 / 10.0).collect();
        let draw = |seed, index| sampling(1.0, 1.0, seed).sample(&logits, index);
        assert_eq!(draw(3, 17), draw(3, 17));
        let stream = |seed| (0..50).map(|index| draw(seed, index)).collect::<Vec<u32>>();
        assert_ne!(stream(3), stream(4));
    }

    #[test]
    fn cold_temperatures_are_finite() {
        assert_eq!(sampling(1e-6, 1.0, 0).sample(&[1.0, 9.0, -3.0], 0), 1);
        assert_eq!(sampling(1.0, 1.0, 0).sample(&[f32::NEG_INFINITY, 1.0], 5), 1);
    }
}
