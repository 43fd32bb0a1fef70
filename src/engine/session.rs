//! One timeline: the tokens of a sequence that are in the KV cache.

use std::sync::{Arc, Mutex, PoisonError};

use super::Engine;
use crate::error::{Error, Result};
use crate::model::{Output, Row, RowResult, Step};

/// A sequence in the KV cache; its slot is free again when it is dropped.
pub struct Session {
    sequence: usize,
    len: usize,
    slots: Slots,
}

/// Free slots of the KV cache.
#[derive(Clone)]
pub struct Slots(Arc<Mutex<Vec<usize>>>);

impl Slots {
    pub(super) fn new(count: usize) -> Self {
        Self(Arc::new(Mutex::new((0..count).rev().collect())))
    }

    fn with<T>(&self, change: impl FnOnce(&mut Vec<usize>) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Session {
    /// Tokens in the cache.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Slot in the KV cache.
    pub(super) fn sequence(&self) -> usize {
        self.sequence
    }

    /// Whether no token was run yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.slots.with(|free| free.push(self.sequence));
    }
}

/// The rows of `tokens` of a sequence from `position` on; `output` is told the row.
pub(super) fn rows_of(
    sequence: usize,
    position: usize,
    tokens: &[u32],
    output: impl Fn(usize) -> Output,
) -> impl Iterator<Item = Row> {
    tokens.iter().enumerate().map(move |(i, token)| Row {
        sequence,
        first: 0,
        position: position + i,
        token: *token,
        output: output(i),
    })
}

impl Engine {
    /// An empty sequence.
    ///
    /// # Errors
    /// Runtime error if `--parallel` sequences exist already.
    pub fn session(&self) -> Result<Session> {
        let sequence = self.slots.with(Vec::pop).ok_or_else(|| {
            Error::runtime(format!(
                "all {} sequences are in use; start with a larger --parallel",
                self.limits.parallel
            ))
        })?;
        Ok(Session { sequence, len: 0, slots: self.slots.clone() })
    }

    /// Refuses tokens that cannot be run behind the first `len` of a sequence.
    pub(super) fn check_tokens(&self, len: usize, tokens: &[u32]) -> Result<()> {
        if len + tokens.len() > self.limits.context {
            return Err(Error::input(format!(
                "{} tokens do not fit the context of {}; start with a larger --context (the model \
                 was made for {})",
                len + tokens.len(),
                self.limits.context,
                self.config.max_position_embeddings
            )));
        }
        let vocabulary = self.config.vocab_size;
        match tokens.iter().find(|token| **token as usize >= vocabulary) {
            Some(token) => {
                Err(Error::input(format!("token {token} is not in the vocabulary of {vocabulary}")))
            }
            None => Ok(()),
        }
    }

    /// Runs `tokens` at the end of `session`, in steps of at most the prefill chunk. `output` says
    /// what each token returns; [`RowResult::row`] counts from the first of them.
    ///
    /// # Errors
    /// Input error if they do not fit the context or a token is not in the vocabulary.
    pub fn extend(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        output: impl Fn(usize) -> Output,
    ) -> Result<Vec<RowResult>> {
        self.check_tokens(session.len, tokens)?;
        let mut results = Vec::new();
        let chunk_len = self.limits.prefill_chunk;
        for (chunk_index, chunk) in tokens.chunks(chunk_len).enumerate() {
            let first = chunk_index * chunk_len;
            let rows = rows_of(session.sequence, session.len, chunk, |row| output(first + row));
            let done = self.backend.step(Step { rows: rows.collect() })?;
            session.len += chunk.len();
            results.extend(done.into_iter().map(|r| RowResult { row: first + r.row, ..r }));
        }
        Ok(results)
    }

    /// Runs one token of each of several sessions as one step; results in the order of `rows`.
    ///
    /// # Errors
    /// As [`Engine::extend`].
    pub fn step_together(
        &mut self,
        rows: &mut [(&mut Session, u32)],
        output: Output,
    ) -> Result<Vec<RowResult>> {
        let mut step = Step { rows: Vec::new() };
        for (session, token) in rows.iter() {
            if session.len >= self.limits.context || *token as usize >= self.config.vocab_size {
                return Err(Error::input(format!(
                    "token {token} at position {}: outside the vocabulary of {} or the context of \
                     {}",
                    session.len, self.config.vocab_size, self.limits.context
                )));
            }
            let (sequence, position) = (session.sequence, session.len);
            step.rows.push(Row { sequence, first: 0, position, token: *token, output });
        }
        let results = self.backend.step(step)?;
        for (session, _) in rows {
            session.len += 1;
        }
        Ok(results)
    }
}
