//! Speculation: propose, verify, accept, commit.
//!
//! A round, for a sequence with L tokens in the cache and one pending token that is not:
//!
//! 1. *Propose*: a drafter guesses the k tokens after the pending one.
//! 2. *Verify*: the target runs k + 1 rows, the pending token and the guesses, at L..=L + k.
//! 3. *Accept*: row r gives the target's own token y_r, chosen exactly as without drafts. Tokens
//!    come out one by one while y_r equals guess r + 1; the first that differs, or the one after
//!    the last guess, is the new pending token.
//! 4. *Commit*: the rows whose input was right stay, L grows by their number. What lies behind is
//!    overwritten by the next round, so nothing is undone.
//!
//! Every token that comes out is the target's choice on its true history, so the text is the same
//! for any drafter, good or bad (facts/eagle3.md §4.2a: sample-and-match). Plain decoding is k = 0.

mod drafter;
mod policy;
mod stats;

pub use drafter::{Guess, History, ModelDrafter, Proposer};
pub use policy::{AdaptivePolicy, Policy, RoundCost};
pub use stats::SpeculationStats;

use crate::model::{Output, Row};

/// The rows of a round's verify step: the pending token at `position` and the guesses behind it.
pub fn verify_rows(
    sequence: usize,
    position: usize,
    pending: u32,
    guesses: &[Guess],
    output: Output,
) -> impl Iterator<Item = Row> {
    let tokens = std::iter::once(pending).chain(guesses.iter().map(|guess| guess.token));
    let row = move |(i, token)| Row { sequence, first: 0, position: position + i, token, output };
    tokens.enumerate().map(row)
}

/// Whether row `row`'s successor had the right input: `chosen` is what the target chose there.
pub fn is_accepted(guesses: &[Guess], row: usize, chosen: u32) -> bool {
    guesses.get(row).is_some_and(|guess| guess.token == chosen)
}
