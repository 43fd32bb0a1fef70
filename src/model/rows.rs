//! A step is a list of rows (DESIGN §1): decode, verification, several users and prefill are all
//! this one thing.

/// One token of one sequence, to be run at its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Slot of the sequence in the KV cache.
    pub sequence: usize,
    /// First position that the row sees: 0, but for a drafter whose cache begins later.
    pub first: usize,
    /// Position in the sequence; the row sees the sequence's cache up to and including it.
    pub position: usize,
    /// The token to embed.
    pub token: u32,
    /// What to return for this row.
    pub output: Output,
}

/// What a row returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Nothing: the row only fills the cache (all but the last row of a prompt).
    None,
    /// The arg-max token.
    ArgMax,
    /// The arg-max token and all logits.
    Logits,
}

/// One forward pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Its rows; rows of one sequence are at rising positions.
    pub rows: Vec<Row>,
}

/// What a row returned.
#[derive(Debug, Clone, PartialEq)]
pub struct RowResult {
    /// Index of the row in its step.
    pub row: usize,
    /// The most likely token; ties go to the lower id.
    pub argmax: u32,
    /// `[vocab_size]`, empty unless [`Output::Logits`] was asked for.
    pub logits: Vec<f32>,
}
