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

/// Positions that a drafter reads again after a rest: a few are nearly as good as all of them for
/// the guess that tells whether speculation pays now, and cost little when it does not.
const RESTART_POSITIONS: usize = 32;

/// The drafter of the backend: an EAGLE-3 head or the MTP layer.
#[derive(Debug, Clone, Default)]
pub struct ModelDrafter {
    /// The drafter's cache holds rows `first..next`, made from the target's features.
    first: usize,
    next: usize,
}

impl ModelDrafter {
    /// Goes on with the first `cached` positions of a sequence whose slot held another one that
    /// began with the same `cached` + 1 tokens: row t is made of token t + 1 as well. Features
    /// behind them may be the other sequence's, so a drafter that had not come so far begins anew.
    pub fn resume(&mut self, cached: usize) {
        match self.next < cached {
            true => (self.first, self.next) = (cached, cached),
            false => self.next = cached,
        }
        self.first = self.first.min(self.next);
    }

    /// Runs the rows that the target has confirmed, of the last `positions` at most, and drafts
    /// `count` tokens.
    fn catch_up(
        &mut self,
        backend: &mut dyn Backend,
        history: History,
        positions: usize,
        count: usize,
    ) -> Result<Vec<Guess>> {
        // Row t needs the feature of position t and the token after it.
        let end = history.cached.min(history.tokens.len().saturating_sub(1));
        // What is older is left out; the cache then begins anew.
        let oldest = history.cached.saturating_sub(positions.min(backend.feature_positions()));
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
        self.catch_up(backend, history, RESTART_POSITIONS, count)
    }

    fn follow(&mut self, backend: &mut dyn Backend, history: History) -> Result<()> {
        self.catch_up(backend, history, usize::MAX, 0).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Drafted, RowResult, Step};

    /// Keeps some positions and writes down what it is asked for.
    struct Recorder {
        kept: usize,
        asked: Vec<Draft>,
    }

    impl Backend for Recorder {
        fn step(&mut self, _step: Step) -> Result<Vec<RowResult>> {
            unreachable!("a drafter runs no steps")
        }

        fn draft(&mut self, draft: Draft) -> Result<Vec<Drafted>> {
            let drafted = Drafted { token: 7, probability: 0.5, logits: Vec::new() };
            let answer = vec![drafted; draft.count];
            self.asked.push(draft);
            Ok(answer)
        }

        fn feature_positions(&self) -> usize {
            self.kept
        }
    }

    fn keeps(kept: usize) -> Recorder {
        Recorder { kept, asked: Vec::new() }
    }

    /// Asks for `count` guesses with 8 positions kept, `cached` of the tokens 0, 1, 2, … in the
    /// cache and one pending; returns (first, position, tokens) of the drafts that came of it.
    fn ask(
        drafter: &mut ModelDrafter,
        cached: usize,
        count: usize,
    ) -> Vec<(usize, usize, Vec<u32>)> {
        let mut backend = keeps(8);
        let tokens: Vec<u32> = (0..=cached as u32).collect();
        let history = History { sequence: 0, tokens: &tokens, cached };
        let guesses = drafter.propose(&mut backend, history, count).expect("a draft");
        assert_eq!(guesses.len(), if backend.asked.is_empty() { 0 } else { count });
        backend.asked.into_iter().map(|draft| (draft.first, draft.position, draft.tokens)).collect()
    }

    #[test]
    fn each_confirmed_row_runs_once_with_the_token_behind_it() {
        let mut drafter = ModelDrafter::default();
        assert_eq!(ask(&mut drafter, 3, 2), [(0, 0, vec![1, 2, 3])]);
        assert_eq!(ask(&mut drafter, 4, 2), [(0, 3, vec![4])]);
        assert_eq!(ask(&mut drafter, 7, 0), [(0, 4, vec![5, 6, 7])]);
        // There is nothing new to draft from.
        assert_eq!(ask(&mut drafter, 7, 2), []);
    }

    #[test]
    fn after_a_rest_it_begins_where_the_features_begin() {
        let mut drafter = ModelDrafter::default();
        ask(&mut drafter, 3, 2);
        // 8 positions are kept: 3..=10.
        assert_eq!(ask(&mut drafter, 11, 2), [(0, 3, (4..=11).collect())]);
        // 13..=20, and what was before them is not seen any more.
        assert_eq!(ask(&mut drafter, 21, 2), [(13, 13, (14..=21).collect())]);
        assert_eq!(ask(&mut drafter, 22, 2), [(13, 21, vec![22])]);
    }

    #[test]
    fn after_a_rest_it_reads_few_positions_and_of_a_prompt_all() {
        let tokens: Vec<u32> = (0..=90).collect();
        let history = History { sequence: 0, tokens: &tokens, cached: 90 };
        let mut backend = keeps(100);
        ModelDrafter::default().propose(&mut backend, history, 1).expect("a draft");
        ModelDrafter::default().follow(&mut backend, history).expect("a draft");
        let asked = backend.asked.iter().map(|draft| (draft.first, draft.position));
        assert!(asked.eq([(90 - RESTART_POSITIONS, 90 - RESTART_POSITIONS), (0, 0)]));
    }

    #[test]
    fn a_reused_slot_keeps_the_rows_of_the_common_prefix() {
        let mut drafter = ModelDrafter::default();
        ask(&mut drafter, 7, 2);
        drafter.resume(4);
        assert_eq!(ask(&mut drafter, 6, 1), [(0, 4, vec![5, 6])]);
        // Rows 6..9 were never made, and their features are gone.
        drafter.resume(9);
        assert_eq!(ask(&mut drafter, 11, 1), [(9, 9, vec![10, 11])]);
        // The cache began at 9; before it there is nothing to see.
        drafter.resume(3);
        assert_eq!(ask(&mut drafter, 5, 1), [(3, 3, vec![4, 5])]);
    }

    #[test]
    fn the_last_row_of_a_prompt_waits_for_the_first_token() {
        let mut drafter = ModelDrafter::default();
        let mut backend = keeps(8);
        let history = |cached| History { sequence: 0, tokens: &[0, 1, 2, 3], cached };
        drafter.follow(&mut backend, history(2)).expect("a draft");
        drafter.follow(&mut backend, history(4)).expect("a draft");
        let asked =
            backend.asked.iter().map(|draft| (draft.position, &draft.tokens[..], draft.count));
        assert!(asked.eq([(0, &[1, 2][..], 0), (2, &[3][..], 0)]));
        assert_eq!(ask(&mut drafter, 4, 1), [(0, 3, vec![4])]);
    }
}
