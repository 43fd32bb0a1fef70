//! Drafters on the reference backend: which one a rank has, and what both kinds share.

use super::eagle3::{self, Eagle3};
use super::features::Features;
use super::mtp;
use super::ops::linear;
use super::rank::CpuRank;
use crate::error::Result;
use crate::model::{DraftRow, DraftStages, Drafted, Hidden, MtpJoin, Row};
use crate::weights::Matrix;

/// A rank's drafter.
pub struct Drafter {
    /// What the target leaves for it.
    pub features: Features,
    /// The kind.
    pub kind: DrafterKind,
}

/// The kinds of drafters.
pub enum DrafterKind {
    /// An EAGLE-3 head.
    Eagle3(Box<Eagle3>),
    /// The MTP layer, whose decoder layer is the one behind the target's.
    Mtp(Box<MtpJoin>),
}

impl DraftStages for CpuRank {
    fn join(&mut self, rows: &[DraftRow], hidden: Hidden) -> Result<()> {
        match self.drafter.as_ref().map(|drafter| &drafter.kind) {
            Some(DrafterKind::Eagle3(_)) => eagle3::fuse_features(self, rows, hidden),
            Some(DrafterKind::Mtp(_)) => mtp::join_hidden(self, rows, hidden),
            None => unreachable!("a draft is only sent to ranks that have a drafter"),
        }
        Ok(())
    }

    fn draft_layer(&mut self) -> Result<()> {
        match self.drafter.as_ref().map(|drafter| &drafter.kind) {
            Some(DrafterKind::Eagle3(_)) => eagle3::draft_layer(self),
            _ => mtp::draft_layer(self),
        }
    }

    fn draft_head(&mut self, keep_logits: bool) -> Result<Drafted> {
        match self.drafter.as_ref().map(|drafter| &drafter.kind) {
            Some(DrafterKind::Eagle3(_)) => eagle3::draft_head(self, keep_logits),
            _ => mtp::draft_head(self, keep_logits),
        }
    }
}

/// The target's rows for a drafter's, to write caches and choose angles by.
pub fn as_rows(rows: &[DraftRow]) -> Vec<Row> {
    let row = |row: &DraftRow| Row {
        sequence: row.sequence,
        first: row.first,
        position: row.position,
        token: row.token,
        output: crate::model::Output::None,
    };
    rows.iter().map(row).collect()
}

/// The likeliest id of a vocabulary that ranks share, with its probability; ties: the lower id.
/// `limit`: ids from here on do not count.
pub fn likeliest(
    rank: &mut CpuRank,
    lm_head: &Matrix,
    x: &[f32],
    limit: usize,
    keep_logits: bool,
) -> Result<Drafted> {
    let share = lm_head.rows();
    let first = share * rank.comm.rank();
    let mut logits = vec![0.0; share];
    linear(lm_head, x, &mut logits);
    let counted = &logits[..limit.saturating_sub(first).min(share)];
    let (mut best, mut id) = (f32::NEG_INFINITY, first);
    for (i, logit) in counted.iter().enumerate() {
        if *logit > best {
            (best, id) = (*logit, first + i);
        }
    }
    // Each rank's Σ exp is relative to its own best; ids are below 2^24, so f32 holds them.
    let sum: f32 = counted.iter().map(|logit| (logit - best).exp()).sum();
    let mut all: Vec<[f32; 3]> = Vec::new();
    rank.comm.exchange(&[best, id as f32, sum], |_, theirs| {
        all.extend(theirs.as_chunks::<3>().0);
    })?;
    let mut winner = all[0];
    for candidate in &all[1..] {
        if candidate[0] > winner[0] {
            winner = *candidate;
        }
    }
    let total: f32 = all.iter().map(|[best, _, sum]| sum * (best - winner[0]).exp()).sum();
    let mut drafted =
        Drafted { token: winner[1] as u32, probability: 1.0 / total, logits: Vec::new() };
    if keep_logits {
        let collects = rank.comm.rank() == 0;
        rank.comm.exchange(&logits, |_, theirs| {
            if collects {
                drafted.logits.extend_from_slice(theirs);
            }
        })?;
    }
    Ok(drafted)
}
