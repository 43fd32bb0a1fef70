//! What the engine asks of a backend: run a step, draft.

use super::draft::{Draft, Drafted};
use super::rows::{RowResult, Step};
use crate::error::Result;

/// The ranks of a backend, as one.
pub trait Backend {
    /// Runs one step; results of the rows that asked for any, in row order.
    ///
    /// # Errors
    /// Runtime error if a rank ended.
    fn step(&mut self, step: Step) -> Result<Vec<RowResult>>;

    /// Drafts; the backend was started with a drafter.
    ///
    /// # Errors
    /// As [`Backend::step`].
    fn draft(&mut self, draft: Draft) -> Result<Vec<Drafted>>;

    /// Positions whose features the backend keeps for its drafter.
    fn feature_positions(&self) -> usize;
}
