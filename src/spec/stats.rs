//! What speculation did: rounds, guesses, acceptances.

use std::time::Duration;

/// Counts over the rounds of one or more generations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpeculationStats {
    /// Verify steps, those without a guess included.
    pub rounds: usize,
    /// Guesses made at each position of a chain.
    pub drafted: Vec<usize>,
    /// Guesses accepted at each position of a chain.
    pub accepted: Vec<usize>,
    /// Tokens that came out.
    pub tokens: usize,
    /// Time spent on guessing.
    pub draft_time: Duration,
    /// Time spent on verify steps.
    pub verify_time: Duration,
}

impl SpeculationStats {
    /// Adds a round: `drafted` guesses of which the first `accepted` were right.
    pub fn add_round(&mut self, drafted: usize, accepted: usize, tokens: usize) {
        self.rounds += 1;
        self.tokens += tokens;
        for (counts, upto) in [(&mut self.drafted, drafted), (&mut self.accepted, accepted)] {
            if counts.len() < upto {
                counts.resize(upto, 0);
            }
            counts[..upto].iter_mut().for_each(|count| *count += 1);
        }
    }

    /// Adds the counts of another generation.
    pub fn merge(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.tokens += other.tokens;
        self.draft_time += other.draft_time;
        self.verify_time += other.verify_time;
        for (mine, theirs) in
            [(&mut self.drafted, &other.drafted), (&mut self.accepted, &other.accepted)]
        {
            if mine.len() < theirs.len() {
                mine.resize(theirs.len(), 0);
            }
            mine.iter_mut().zip(theirs).for_each(|(mine, theirs)| *mine += theirs);
        }
    }

    /// Tokens per verify step, the target's own included: 1 where no guess is ever right.
    pub fn acceptance_length(&self) -> Option<f64> {
        (self.rounds > 0).then(|| self.tokens as f64 / self.rounds as f64)
    }

    /// Share of the rounds with a guess at a position in which it was accepted.
    pub fn per_position_acceptance_rates(&self) -> Vec<f64> {
        let accepted = self.accepted.iter().copied().chain(std::iter::repeat(0));
        let rate = |(drafted, accepted): (&usize, usize)| accepted as f64 / *drafted as f64;
        self.drafted.iter().zip(accepted).map(rate).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_of_different_lengths_add_up() {
        let mut stats = SpeculationStats::default();
        stats.add_round(3, 2, 3);
        stats.add_round(1, 0, 1);
        stats.add_round(0, 0, 1);
        assert_eq!((stats.drafted.clone(), stats.accepted.clone()), (vec![2, 1, 1], vec![1, 1]));
        assert_eq!(stats.acceptance_length(), Some(5.0 / 3.0));
        assert_eq!(stats.per_position_acceptance_rates(), [0.5, 1.0, 0.0]);
        let mut both = SpeculationStats::default();
        both.merge(&stats);
        both.merge(&stats);
        assert_eq!((both.rounds, both.drafted), (6, vec![4, 2, 2]));
    }
}
