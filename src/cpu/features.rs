//! What the target leaves for a drafter: for each of a sequence's last positions, the vectors that
//! the drafter reads. A ring, since a drafter that is switched off for long need not catch up with
//! everything that it missed.

use crate::model::{FeatureSource, Row};

/// Feature vectors of all sequences.
pub struct Features {
    source: FeatureSource,
    hidden: usize,
    positions: usize,
    /// `[positions, features, hidden_size]` for each sequence
    rings: Vec<Vec<f32>>,
}

impl Features {
    /// Keeps `positions` positions of each of `parallel` sequences.
    pub fn new(source: FeatureSource, hidden: usize, positions: usize, parallel: usize) -> Self {
        let ring = vec![0.0; positions * source.count() * hidden];
        Self { source, hidden, positions, rings: vec![ring; parallel] }
    }

    /// All features of a position, one behind the other.
    pub fn row(&self, sequence: usize, position: usize) -> &[f32] {
        let width = self.source.count() * self.hidden;
        &self.rings[sequence][position % self.positions * width..][..width]
    }

    /// Keeps the residual stream at `boundary`, if the drafter reads it.
    pub fn keep_boundary(&mut self, boundary: usize, rows: &[Row], residual: &[f32]) {
        let FeatureSource::Boundaries(boundaries) = &self.source else {
            return;
        };
        let places: Vec<usize> =
            (0..boundaries.len()).filter(|place| boundaries[*place] == boundary).collect();
        for place in places {
            self.keep(place, rows, residual);
        }
    }

    /// Keeps the hidden state after the final norm, if the drafter reads it.
    pub fn keep_final(&mut self, rows: &[Row], normed: &[f32]) {
        if self.source == FeatureSource::FinalNorm {
            self.keep(0, rows, normed);
        }
    }

    fn keep(&mut self, place: usize, rows: &[Row], values: &[f32]) {
        let count = self.source.count();
        for (row, values) in rows.iter().zip(values.chunks_exact(self.hidden)) {
            let at = (row.position % self.positions * count + place) * self.hidden;
            self.rings[row.sequence][at..at + self.hidden].copy_from_slice(values);
        }
    }
}
