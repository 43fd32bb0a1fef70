//! Random inputs, the same in every run.

use half::f16;

/// A stream of random numbers (splitmix64: Steele, Lea, Flood 2014).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// Above 0 and at most 1.
    pub fn uniform(&mut self) -> f32 {
        ((self.next() >> 40) + 1) as f32 / (1u64 << 24) as f32
    }

    /// Of mean 0 and variance 1 (Box and Muller 1958).
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        radius * (std::f32::consts::TAU * self.uniform()).cos()
    }

    /// Rows of normal values.
    pub fn singles(&mut self, rows: usize, width: usize) -> Vec<Vec<f32>> {
        (0..rows).map(|_| (0..width).map(|_| self.normal()).collect()).collect()
    }

    /// Rows of normal values that an f16 holds.
    pub fn halves(&mut self, rows: usize, width: usize) -> Vec<Vec<f32>> {
        let mut values = self.singles(rows, width);
        values.iter_mut().flatten().for_each(|value| *value = half(*value));
        values
    }

    /// `count` different numbers below `limit`, rising.
    pub fn choose(&mut self, count: usize, limit: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..limit).collect();
        let count = count.min(limit);
        for i in 0..count {
            let other = i + self.below(limit - i);
            all.swap(i, other);
        }
        all.truncate(count);
        all.sort_unstable();
        all
    }
}

/// The nearest value that an f16 holds.
pub fn half(value: f32) -> f32 {
    f16::from_f32(value).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_values_have_mean_0_and_variance_1() {
        let values = Random::new(1).singles(1, 100_000).remove(0);
        let mean = values.iter().sum::<f32>() / 1e5;
        let variance = values.iter().map(|value| value * value).sum::<f32>() / 1e5;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
        assert!(Random::new(2).halves(1, 100)[0].iter().all(|value| half(*value) == *value));
    }

    #[test]
    fn choices_differ_and_rise() {
        let mut random = Random::new(3);
        for _ in 0..100 {
            let chosen = random.choose(8, 16);
            assert!(chosen.len() == 8 && chosen.is_sorted_by(|a, b| a < b) && chosen[7] < 16);
        }
        assert_eq!(random.choose(4, 4), [0, 1, 2, 3]);
    }
}
