//! Drafting: what a drafter is asked for, and the order of its stages.
//!
//! A drafter's row t was computed from (token t + 1, the target's feature of position t) at rope
//! position t (facts/eagle3.md §2.2). A draft first runs the rows that the target has confirmed
//! since the last one, over whatever an earlier draft left at their positions; the last of them
//! gives the first drafted token, and each further one comes from a row made of the token before
//! and the drafter's own hidden state.

use crate::error::Result;

/// Tokens of the longest chain.
pub const MAX_GUESSES: usize = 7;

/// Positions whose features are kept for a drafter. A drafter that has missed more begins anew.
pub const FEATURE_POSITIONS: usize = 512;

/// Which of the target's vectors a drafter reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FeatureSource {
    /// The residual stream at these boundaries, in this order: boundary k is what enters layer k,
    /// the number of layers is what enters the final norm (EAGLE-3).
    Boundaries(Vec<usize>),
    /// The hidden state after the final norm (MTP).
    FinalNorm,
}

impl FeatureSource {
    /// Vectors of the hidden size for each position.
    pub fn count(&self) -> usize {
        match self {
            FeatureSource::Boundaries(boundaries) => boundaries.len(),
            FeatureSource::FinalNorm => 1,
        }
    }
}

/// A draft of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Draft {
    /// Slot of the sequence.
    pub sequence: usize,
    /// First position that the drafter's cache holds.
    pub first: usize,
    /// Position of the first row to run.
    pub position: usize,
    /// The tokens that follow each row's position, one a row; at least one.
    pub tokens: Vec<u32>,
    /// Tokens to draft.
    pub count: usize,
    /// Return the drafter's logits, for tests.
    pub keep_logits: bool,
}

/// One row of a drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftRow {
    /// Slot of the sequence.
    pub sequence: usize,
    /// First position that the row sees.
    pub first: usize,
    /// Position of the feature, and of the row in the drafter's cache.
    pub position: usize,
    /// The token that follows that position.
    pub token: u32,
}

/// What a draft's row is fused from, besides its token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hidden {
    /// The target's feature of the row's position.
    Target,
    /// What the drafter recycles from its last row.
    Recycled,
}

/// A drafted token.
#[derive(Debug, Clone, PartialEq)]
pub struct Drafted {
    /// Its id in the target's vocabulary.
    pub token: u32,
    /// The probability that the drafter gives it.
    pub probability: f32,
    /// `[draft vocabulary]`, if asked for and on rank 0.
    pub logits: Vec<f32>,
}

/// The stages of a drafter on one rank.
pub trait DraftStages {
    /// MTP's `join_hidden` or EAGLE-3's `fuse_features`: rows from tokens and hidden states.
    fn join(&mut self, rows: &[DraftRow], hidden: Hidden) -> Result<()>;
    /// The drafter's decoder layer over these rows; writes its cache.
    fn draft_layer(&mut self) -> Result<()>;
    /// The likeliest token after the last row.
    fn draft_head(&mut self, keep_logits: bool) -> Result<Drafted>;
}

/// Runs a draft on one rank.
///
/// # Errors
/// Whatever a stage reports.
pub fn draft<S: DraftStages>(stages: &mut S, draft: &Draft) -> Result<Vec<Drafted>> {
    let row = |index: usize, token: u32| DraftRow {
        sequence: draft.sequence,
        first: draft.first,
        position: draft.position + index,
        token,
    };
    let confirmed: Vec<DraftRow> =
        draft.tokens.iter().enumerate().map(|(index, token)| row(index, *token)).collect();
    stages.join(&confirmed, Hidden::Target)?;
    stages.draft_layer()?;
    let mut drafted: Vec<Drafted> = Vec::with_capacity(draft.count);
    while drafted.len() < draft.count {
        if let Some(last) = drafted.last() {
            let next = row(confirmed.len() + drafted.len() - 1, last.token);
            stages.join(&[next], Hidden::Recycled)?;
            stages.draft_layer()?;
        }
        drafted.push(stages.draft_head(draft.keep_logits)?);
    }
    Ok(drafted)
}
