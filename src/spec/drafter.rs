//! Who guesses.

use crate::error::Result;
use crate::model::{Backend, Draft};

/// A guessed token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Guess {
    /// Its id in the target's vocabulary.
    pub token: u32,
    /// The probability that the drafter gives it.
    pub probability: f32,
}

/// A sequence as its drafter sees it.
#[derive(Debug, Clone, Copy)]
pub struct History<'a> {
    /// Slot of the sequence.
    pub sequence: usize,
    /// All tokens: those in the target's cache, then those that are known and not run yet.
    pub tokens: &'a [u32],
    /// Tokens in the target's cache.
    pub cached: usize,
}

/// Guesses the tokens after a history. One proposer serves one sequence.
pub trait Proposer {
    /// At most `count` guesses of what follows `history.tokens`.
    ///
    /// # Errors
    /// As [`Backend::draft`].
    fn propose(
        &mut self,
        backend: &mut dyn Backend,
        history: History,
        count: usize,
    ) -> Result<Vec<Guess>>;

    /// Told of a part of the prompt that the target has run, so that features are used while the
    /// backend keeps them.
    ///
    /// # Errors
    /// As [`Backend::draft`].
    fn follow(&mut self, _backend: &mut dyn Backend, _history: History) -> Result<()> {
        Ok(())
    }
}

/// The drafter of the backend: an EAGLE-3 head or the MTP layer.
#[derive(Debug, Default)]
pub struct ModelDrafter {
    /// The drafter's cache holds rows `first..next`, made from the target's features.
    first: usize,
    next: usize,
}

impl ModelDrafter {
    /// Runs the rows that the target has confirmed and drafts `count` tokens.
    fn catch_up(
        &mut self,
        backend: &mut dyn Backend,
        history: History,
        count: usize,
    ) -> Result<Vec<Guess>> {
        // Row t needs the feature of position t and the token after it.
        let end = history.cached.min(history.tokens.len().saturating_sub(1));
        // What is older than the backend keeps is left out; the cache then begins anew.
        let oldest = history.cached.saturating_sub(backend.feature_positions());
        if self.next < oldest {
            (self.first, self.next) = (oldest, oldest);
        }
        if self.next >= end {
            return Ok(Vec::new());
        }
        let drafted = backend.draft(Draft {
            sequence: history.sequence,
            first: self.first,
            position: self.next,
            tokens: history.tokens[self.next + 1..=end].to_vec(),
            count,
            keep_logits: false,
        })?;
        self.next = end;
        let guess = |drafted: crate::model::Drafted| Guess {
            token: drafted.token,
            probability: drafted.probability,
        };
        Ok(drafted.into_iter().map(guess).collect())
    }
}

impl Proposer for ModelDrafter {
    fn propose(
        &mut self,
        backend: &mut dyn Backend,
        history: History,
        count: usize,
    ) -> Result<Vec<Guess>> {
        self.catch_up(backend, history, count)
    }

    fn follow(&mut self, backend: &mut dyn Backend, history: History) -> Result<()> {
        self.catch_up(backend, history, 0).map(drop)
    }
}
