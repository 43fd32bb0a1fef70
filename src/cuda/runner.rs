//! Ranks that one thread drives: one rank, or all ranks of a model in lock-step on one device. Holds
//! the captured graphs of a step by its number of rows, and what the host exchanges with them.

use std::collections::HashMap;

use super::drafter::DrafterWeights;
use super::layout::{MAX_ROWS, RESULT_BYTES, ROW_BYTES, STEP_HEAD_BYTES};
use super::rank::CudaRank;
use super::stages::{HostPlaces, Recorder};
use super::together::Together;
use super::{Graph, Pinned};
use crate::error::{Error, Result};
use crate::model::{MAX_GUESSES, Output, Row, Step, forward};

/// Numbers of rows that have a graph; a step is filled up to the next.
pub const BUCKETS: [usize; 9] = [1, 2, 3, 4, 5, 6, 8, 12, 16];
/// Page-locked bytes of a rank: a step, and its results.
const STEP_BYTES: usize = STEP_HEAD_BYTES + MAX_ROWS * ROW_BYTES;
const HOST_BYTES: usize = STEP_BYTES + MAX_ROWS * RESULT_BYTES;

/// What a graph runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Job {
    /// A step.
    Step,
    /// A draft's confirmed rows and the first token of its chain.
    Draft,
    /// So many further tokens of a chain, each from the one before.
    Chain(usize),
}

/// Which graph a step or a part of a draft takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub job: Job,
    pub rows: usize,
    pub long: bool,
    pub with_head: bool,
}

pub(super) struct Recorded {
    pub graph: Graph,
    /// Exchanges between ranks in it, and in those that it follows.
    pub collectives: u32,
}

/// What a row came to. All ranks must say the same of all but the logits.
#[derive(Debug, Clone)]
pub struct RowOutcome {
    /// Index of the row in its step.
    pub row: usize,
    /// The likeliest token.
    pub id: u32,
    /// Its logit; of a drafted token its probability.
    pub logit: f32,
    /// A hash of the row's last hidden state; 0 of a rank that is alone.
    pub hash: u32,
    /// The ranks' parts, one behind the other, if asked for.
    pub logits: Vec<f32>,
}

/// Some ranks, and their graphs.
pub struct Runner {
    // Graphs first: they hold addresses of what follows.
    pub(super) graphs: HashMap<Shape, Recorded>,
    /// A step and its results, of each rank.
    host: Pinned,
    pub(super) ranks: Vec<CudaRank>,
    /// Of the next step's first collective.
    pub(super) epoch: u64,
}

impl Runner {
    /// Captures all graphs of these ranks; nothing is allocated on the device afterwards.
    ///
    /// # Errors
    /// Runtime error if the driver refuses a graph.
    pub fn new(ranks: Vec<CudaRank>, epoch: u64) -> Result<Self> {
        let host = Pinned::alloc(&ranks[0].device, ranks.len() * HOST_BYTES)?;
        let mut runner = Self { graphs: HashMap::new(), host, ranks, epoch };
        let of_rows = |job: Job| {
            let with_head = BUCKETS.map(|rows| Shape { job, rows, long: false, with_head: true });
            [Shape { job, rows: MAX_ROWS, long: false, with_head: false }]
                .into_iter()
                .chain(with_head)
        };
        let mut shapes: Vec<Shape> = of_rows(Job::Step).collect();
        let first = &runner.ranks[0];
        if first.drafter.is_some() {
            shapes.extend(of_rows(Job::Draft));
            shapes.extend((1..MAX_GUESSES).map(Shape::of_chain));
        }
        if first.sizes.context > first.config.index_topk {
            let drafts_long = matches!(first.weights.drafter, Some(DrafterWeights::Mtp { .. }));
            let has_long = |shape: &&Shape| shape.job == Job::Step || drafts_long;
            let long = shapes.iter().filter(has_long).map(|s| Shape { long: true, ..*s });
            shapes.extend(long.collect::<Vec<Shape>>());
        }
        for shape in shapes {
            let recorded = runner.capture(shape)?;
            recorded.graph.upload(&runner.ranks[0].stream)?;
            runner.graphs.insert(shape, recorded);
        }
        runner.ranks[0].stream.synchronize()?;
        Ok(runner)
    }

    /// The ranks.
    pub fn ranks(&self) -> &[CudaRank] {
        &self.ranks
    }

    /// Launches of a step of one row in a short context.
    pub fn launches(&self) -> usize {
        let shape = Shape { job: Job::Step, rows: 1, long: false, with_head: true };
        self.graphs.get(&shape).map_or(0, |recorded| recorded.graph.nodes())
    }

    fn capture(&self, shape: Shape) -> Result<Recorded> {
        // A chain goes on with the numbers of the draft that it follows.
        let first = match shape.job {
            Job::Chain(_) => self.recorded(Shape { job: Job::Draft, ..shape })?.collectives,
            Job::Step | Job::Draft => 0,
        };
        let mut collectives = 0;
        let graph = self.ranks[0].stream.capture(|stream| {
            let recorders = self.ranks.iter().enumerate().map(|(index, rank)| Recorder {
                rank,
                stream,
                rows: shape.rows,
                long: shape.long,
                with_head: shape.with_head,
                host: self.places(index),
                collectives: first,
            });
            let mut together = Together(recorders.collect());
            match shape.job {
                Job::Step => {
                    forward(&mut together, &self.ranks[0].config, &Step { rows: Vec::new() })?;
                }
                Job::Draft => together.draft(shape.with_head)?,
                Job::Chain(count) => together.chain(count)?,
            }
            collectives = together.0[0].collectives;
            Ok(())
        })?;
        Ok(Recorded { graph, collectives })
    }

    fn places(&self, index: usize) -> HostPlaces {
        let step = self.host.address() + (index * HOST_BYTES) as u64;
        HostPlaces { step, results: step + STEP_BYTES as u64 }
    }

    /// Runs a step, at most [`MAX_ROWS`] rows at a time.
    ///
    /// # Errors
    /// Runtime error if a kernel faults, a wait for another rank times out, or the ranks here differ.
    pub fn step(&mut self, step: &Step) -> Result<Vec<RowOutcome>> {
        let mut outcomes = Vec::new();
        for (index, rows) in step.rows.chunks(MAX_ROWS).enumerate() {
            self.run(rows, index * MAX_ROWS, &mut outcomes)?;
        }
        Ok(outcomes)
    }

    /// Runs at most [`MAX_ROWS`] rows; `first` is the index of the first in its step.
    fn run(&mut self, rows: &[Row], first: usize, outcomes: &mut Vec<RowOutcome>) -> Result<()> {
        let bucket = BUCKETS.into_iter().find(|bucket| *bucket >= rows.len()).unwrap_or(MAX_ROWS);
        let top_k = self.ranks[0].config.index_topk;
        let wanted = rows.iter().any(|row| row.output != Output::None);
        let shape = Shape {
            job: Job::Step,
            rows: bucket,
            long: rows.iter().any(|row| row.position + 1 - row.first > top_k),
            with_head: wanted || bucket != MAX_ROWS,
        };
        self.hand_over(rows, bucket);
        self.launch(&[shape])?;
        let asked = rows.iter().enumerate().filter(|(_, row)| row.output != Output::None);
        for (index, row) in asked {
            let mut outcome = self.outcome(index)?;
            if !outcome.logit.is_finite() {
                return Err(Error::runtime(format!(
                    "the logits at position {} are not finite numbers; the weights are damaged: \
                     talon verify --scales, or --check-hashes, finds where",
                    row.position
                )));
            }
            if row.output == Output::Logits {
                for rank in &self.ranks {
                    let vocabulary = rank.weights.vocabulary;
                    let from = rank.buffers.logits + (index * vocabulary * size_of::<f32>()) as u64;
                    outcome.logits.extend(logits(rank, from, vocabulary)?);
                }
            }
            outcomes.push(RowOutcome { row: first + index, ..outcome });
        }
        Ok(())
    }

    pub(super) fn recorded(&self, shape: Shape) -> Result<&Recorded> {
        self.graphs
            .get(&shape)
            .ok_or_else(|| Error::runtime(format!("no graph was captured for {shape:?}")))
    }

    /// Writes rows to where the first kernel reads them, filled up to `bucket` with ones of their own
    /// in the entry behind all sequences.
    pub(super) fn hand_over(&mut self, rows: &[Row], bucket: usize) {
        let filling = Row {
            sequence: self.ranks[0].sizes.parallel,
            first: 0,
            position: 0,
            token: 0,
            output: Output::None,
        };
        let filled = rows.iter().copied().chain(std::iter::repeat(filling)).take(bucket);
        let bytes: Vec<u8> = filled.flat_map(|row| row_bytes(&row)).collect();
        for host in self.host.as_mut_slice().chunks_mut(HOST_BYTES) {
            host[..8].copy_from_slice(&self.epoch.to_ne_bytes());
            host[STEP_HEAD_BYTES..][..bytes.len()].copy_from_slice(&bytes);
        }
    }

    /// Runs graphs, one behind the other, and waits for the last.
    ///
    /// # Errors
    /// Runtime error if a kernel faults or a wait for another rank times out.
    pub(super) fn launch(&mut self, shapes: &[Shape]) -> Result<()> {
        let stream = &self.ranks[0].stream;
        let mut collectives = 0;
        for shape in shapes {
            let recorded = self.recorded(*shape)?;
            recorded.graph.launch(stream)?;
            collectives = recorded.collectives;
        }
        self.epoch += u64::from(collectives);
        stream.synchronize()?;
        if let Some(comm) = &self.ranks[0].comm {
            // Of all ranks: what one that has given up sends afterwards makes no sense elsewhere.
            for rank in 0..comm.fabric.ranks() {
                if let Some(what) = comm.fabric.timed_out(rank) {
                    return Err(comm.fabric.timeout_error(rank, what));
                }
            }
        }
        Ok(())
    }

    /// What the ranks say of a row.
    ///
    /// # Errors
    /// Runtime error if they differ.
    pub(super) fn outcome(&self, row: usize) -> Result<RowOutcome> {
        let outcome = self.outcome_of(0, row);
        for other in 1..self.ranks.len() {
            check_same(&outcome, 0, &self.outcome_of(other, row), other)?;
        }
        Ok(outcome)
    }

    fn outcome_of(&self, rank: usize, row: usize) -> RowOutcome {
        let at = rank * HOST_BYTES + STEP_BYTES + row * RESULT_BYTES;
        let words = self.host.as_slice()[at..at + RESULT_BYTES].as_chunks::<4>().0;
        RowOutcome {
            row,
            id: u32::from_ne_bytes(words[0]),
            logit: f32::from_ne_bytes(words[1]),
            hash: u32::from_ne_bytes(words[2]),
            logits: Vec::new(),
        }
    }
}

/// Refuses rows that two ranks see differently: they have computed from different sums.
///
/// # Errors
/// Runtime error that names the ranks.
pub fn check_same(a: &RowOutcome, a_rank: usize, b: &RowOutcome, b_rank: usize) -> Result<()> {
    let said = |outcome: &RowOutcome| (outcome.id, outcome.logit.to_bits(), outcome.hash);
    if said(a) == said(b) {
        return Ok(());
    }
    Err(Error::runtime(format!(
        "ranks {a_rank} and {b_rank} differ in row {}: token {} ({}, hash {:08x}) and token {} ({}, \
         hash {:08x}); what went between them was damaged, so nothing that follows can be trusted; \
         --requalify tests the links, --reduce staged does without them",
        a.row, a.id, a.logit, a.hash, b.id, b.logit, b.hash
    )))
}

/// A rank's part of a row's logits, which lies at `from`.
pub(super) fn logits(rank: &CudaRank, from: u64, vocabulary: usize) -> Result<Vec<f32>> {
    let mut bytes = vec![0; vocabulary * size_of::<f32>()];
    rank.stream.download(from, &mut bytes)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect())
}

/// A row as the kernels read it (common.cuh, `Row`).
pub(super) fn row_bytes(row: &Row) -> [u8; ROW_BYTES] {
    let fields = [row.token, row.position as u32, row.sequence as u32, row.first as u32];
    let mut bytes = [0; ROW_BYTES];
    for (field, out) in fields.iter().zip(bytes.as_chunks_mut::<4>().0) {
        *out = field.to_ne_bytes();
    }
    bytes
}
