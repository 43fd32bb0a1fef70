//! A drafter that is right as often as it is told to be: what would speculation be worth at that
//! acceptance? It replays the baseline's output and spoils guesses at random. If the engine has a
//! drafter, that one runs too, so that its cost is in the figures.

use crate::engine::Engine;
use crate::error::Result;
use crate::model::Backend;
use crate::spec::{Guess, History, ModelDrafter, Proposer};

/// Replays an output with simulated acceptance.
pub struct SimulatedDrafter<'a> {
    inner: Option<ModelDrafter>,
    prompt_len: usize,
    output: &'a [u32],
    acceptance_length: f64,
    state: u64,
    vocabulary: u32,
}

impl<'a> SimulatedDrafter<'a> {
    /// Replays `output`, which follows a prompt of `prompt_len` tokens, so that a step yields
    /// `acceptance_length` tokens in the mean.
    pub fn new(
        engine: &Engine,
        prompt_len: usize,
        output: &'a [u32],
        acceptance_length: f64,
    ) -> Self {
        Self {
            inner: engine.drafter().map(|_| ModelDrafter::default()),
            prompt_len,
            output,
            acceptance_length,
            state: 0x9E37_79B9_7F4A_7C15 ^ prompt_len as u64,
            vocabulary: engine.limits().vocab_limit as u32,
        }
    }

    fn uniform(&mut self) -> f64 {
        // xorshift64 (Marsaglia 2003)
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 11) as f64 / (1u64 << 53) as f64
    }
}

impl Proposer for SimulatedDrafter<'_> {
    fn propose(
        &mut self,
        backend: &mut dyn Backend,
        history: History,
        count: usize,
    ) -> Result<Vec<Guess>> {
        if let Some(inner) = &mut self.inner {
            inner.propose(backend, history, count)?;
        }
        let probability = guess_probability(self.acceptance_length, count);
        let known = history.tokens.len() - self.prompt_len;
        let output = self.output;
        let next = output.iter().skip(known).take(count);
        Ok(next
            .map(|token| {
                let right = self.uniform() < probability;
                let token = if right { *token } else { (token + 1) % self.vocabulary };
                Guess { token, probability: probability as f32 }
            })
            .collect())
    }

    fn follow(&mut self, backend: &mut dyn Backend, history: History) -> Result<()> {
        match &mut self.inner {
            Some(inner) => inner.follow(backend, history),
            None => Ok(()),
        }
    }
}

/// The probability p of a right guess for which a chain of `count` yields `length` tokens in the
/// mean: 1 + p + p² + … + p^count = length.
fn guess_probability(length: f64, count: usize) -> f64 {
    let tokens = |p: f64| (0..=count as i32).map(|i| p.powi(i)).sum::<f64>();
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..50 {
        let middle = (low + high) / 2.0;
        match tokens(middle) < length {
            true => low = middle,
            false => high = middle,
        }
    }
    (low + high) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probability_gives_the_length() {
        for (length, count) in [(1.0, 3), (2.6, 3), (1.5, 1), (4.0, 7)] {
            let p = guess_probability(length, count);
            let tokens: f64 = (0..=count as i32).map(|i| p.powi(i)).sum();
            assert!((tokens - length).abs() < 1e-6, "{length} with {count}: p {p}");
        }
        // More than a chain can give is as much as it can give.
        assert!((guess_probability(9.0, 3) - 1.0).abs() < 1e-6);
    }
}
