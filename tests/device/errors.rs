//! How far logits are from others, position by position.

/// Errors that count as large.
const LARGE: f64 = 0.01;

/// Relative RMS error of each position's logits.
#[derive(Debug, Default, Clone)]
pub struct Errors {
    /// In the order of the positions.
    pub each: Vec<f64>,
    /// Positions whose likeliest token is the same.
    pub same_choice: usize,
    difference: f64,
    reference: f64,
}

impl Errors {
    /// Compares as many positions as both have.
    pub fn of(logits: &[Vec<f32>], reference: &[Vec<f32>]) -> Self {
        let mut errors = Self::default();
        for (ours, theirs) in logits.iter().zip(reference) {
            assert_eq!(ours.len(), theirs.len());
            assert!(ours.iter().all(|logit| logit.is_finite()), "logits that are no numbers");
            let sum = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>();
            let pairs = || ours.iter().zip(theirs).map(|(a, b)| (f64::from(*a), f64::from(*b)));
            let difference = sum(&mut pairs().map(|(a, b)| (a - b).powi(2)));
            let reference = sum(&mut pairs().map(|(_, b)| b * b));
            errors.each.push((difference / reference).sqrt());
            errors.same_choice += usize::from(likeliest(ours) == likeliest(theirs));
            errors.difference += difference;
            errors.reference += reference;
        }
        errors
    }

    pub fn add(&mut self, other: &Self) {
        self.each.extend(&other.each);
        self.same_choice += other.same_choice;
        self.difference += other.difference;
        self.reference += other.reference;
    }

    /// The error below which `share` of the positions are.
    pub fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.each.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[((sorted.len() - 1) as f64 * share).round() as usize]
    }

    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Of all positions as one vector.
    pub fn total(&self) -> f64 {
        (self.difference / self.reference).sqrt()
    }

    /// Positions above 1 %.
    pub fn large(&self) -> usize {
        self.each.iter().filter(|error| **error > LARGE || error.is_nan()).count()
    }

    /// A line of the table that [`header`] begins.
    pub fn line(&self, name: &str, reference: &str) {
        if self.each.is_empty() {
            return; // tokens differ from the first one on
        }
        println!(
            "{name:<28} {reference:<7} {:>9} {:>9.2e} {:>9.2e} {:>9.2e} {:>6} {:>9.1}",
            self.each.len(),
            self.median(),
            self.quantile(0.99),
            self.quantile(1.0),
            self.large(),
            100.0 * self.same_choice as f64 / self.each.len() as f64,
        );
    }
}

pub fn header() {
    println!(
        "\nrelative RMS error of the logits of a position\n{:<28} {:<7} {:>9} {:>9} {:>9} {:>9} {:>6} {:>9}",
        "what", "against", "positions", "median", "p99", "largest", "> 1 %", "same top%"
    );
}

/// Ties go to the lower id.
fn likeliest(logits: &[f32]) -> usize {
    (0..logits.len()).rev().max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap_or(0)
}
