//! Drafts on the ranks that one thread drives: which graphs a draft takes, and what comes of it. A
//! chain's first token and all others are two graphs on the stream without the host between them.

use super::drafter::DrafterWeights;
use super::layout::{DeviceMatrix, MAX_ROWS};
use super::rank::CudaRank;
use super::runner::{BUCKETS, Job, RowOutcome, Runner, Shape, logits};
use crate::error::{Error, Result};
use crate::model::{Draft, MAX_GUESSES, Output, Row};

impl Shape {
    /// A chain of `count` tokens behind its first.
    pub fn of_chain(count: usize) -> Self {
        Self { job: Job::Chain(count), rows: 1, long: false, with_head: true }
    }
}

impl Runner {
    /// Runs a draft's confirmed rows, at most [`MAX_ROWS`] at a time, and its chain; an outcome's id
    /// is one of the target's.
    ///
    /// # Errors
    /// Runtime error if there is no drafter, the draft does not fit, a kernel faults, a wait for
    /// another rank times out, or the ranks here differ.
    pub fn draft(&mut self, draft: &Draft) -> Result<Vec<RowOutcome>> {
        self.check(draft)?;
        let row = |index: usize, token: u32| Row {
            sequence: draft.sequence,
            first: draft.first,
            position: draft.position + index,
            token,
            output: Output::None,
        };
        let rows: Vec<Row> =
            draft.tokens.iter().enumerate().map(|(index, token)| row(index, *token)).collect();
        let parts = rows.len().div_ceil(MAX_ROWS);
        for (index, part) in rows.chunks(MAX_ROWS).enumerate() {
            let guesses = if index + 1 == parts { draft.count } else { 0 };
            self.run_part(part, guesses)?;
        }
        (0..draft.count).map(|place| self.drafted(place, draft.keep_logits)).collect()
    }

    fn check(&self, draft: &Draft) -> Result<()> {
        let sizes = &self.ranks[0].sizes;
        if self.ranks[0].drafter.is_none() {
            return Err(Error::runtime("the CUDA backend was started without a drafter"));
        }
        let end = draft.position + draft.tokens.len() + draft.count.saturating_sub(1);
        if draft.count > MAX_GUESSES || end > sizes.context || draft.sequence >= sizes.parallel {
            return Err(Error::runtime(format!(
                "a draft of {} tokens up to position {end} of sequence {}: there is room for \
                 {MAX_GUESSES}, {} and {}",
                draft.count, draft.sequence, sizes.context, sizes.parallel
            )));
        }
        Ok(())
    }

    /// Runs some confirmed rows; behind the last ones a chain of `guesses`.
    fn run_part(&mut self, rows: &[Row], guesses: usize) -> Result<()> {
        let rank = &self.ranks[0];
        let top_k = rank.config.index_topk;
        // Only the MTP layer has an indexer.
        let selects = matches!(rank.weights.drafter, Some(DrafterWeights::Mtp { .. }));
        let is_long =
            |row: &Row, behind: usize| selects && row.position + behind + 1 - row.first > top_k;
        let bucket = BUCKETS.into_iter().find(|bucket| *bucket >= rows.len()).unwrap_or(MAX_ROWS);
        let last = rows.len() - 1;
        let mut shapes = vec![Shape {
            job: Job::Draft,
            rows: bucket,
            long: is_long(&rows[last], 0),
            with_head: guesses > 0 || bucket != MAX_ROWS,
        }];
        if guesses > 1 {
            let long = is_long(&rows[last], guesses - 1);
            shapes.push(Shape { long, ..Shape::of_chain(guesses - 1) });
        }
        let falling: Vec<Row> = rows.iter().rev().copied().collect();
        self.hand_over(&falling, bucket);
        self.launch(&shapes)
    }

    fn drafted(&self, place: usize, keep_logits: bool) -> Result<RowOutcome> {
        let mut outcome = self.outcome(place)?;
        if !outcome.logit.is_finite() {
            return Err(Error::runtime(
                "the drafter's logits are not finite numbers; its weights are damaged: talon verify \
                 --scales, or --check-hashes, finds where; --draft none does without it",
            ));
        }
        if keep_logits {
            for rank in &self.ranks {
                let from = rank.draft_logits(place);
                outcome.logits.extend(logits(rank, from, rank.draft_vocabulary())?);
            }
        }
        Ok(outcome)
    }
}

impl CudaRank {
    /// What a drafter's tokens are chosen by: a head's own matrix, or the target's.
    pub(super) fn draft_lm_head(&self) -> &DeviceMatrix {
        match &self.weights.drafter {
            Some(DrafterWeights::Eagle3(head)) => {
                head.lm_head.as_ref().unwrap_or(&self.weights.lm_head)
            }
            _ => &self.weights.lm_head,
        }
    }

    /// Logits of the drafter on this rank.
    pub(super) fn draft_vocabulary(&self) -> usize {
        match &self.weights.drafter {
            Some(DrafterWeights::Eagle3(head)) if head.lm_head.is_some() => head.vocabulary,
            _ => self.weights.vocabulary,
        }
    }

    /// Where those of a chain's token lie.
    pub(super) fn draft_logits(&self, place: usize) -> u64 {
        self.buffers.logits + (place * self.draft_vocabulary() * size_of::<f32>()) as u64
    }
}
