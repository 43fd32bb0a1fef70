//! Ranks that one thread drives: one rank, or all ranks of a model in lock-step on one device. Holds
//! the captured graphs of a step by its number of rows, and what the host exchanges with them.

use std::collections::HashMap;

use super::layout::{MAX_ROWS, RESULT_BYTES, ROW_BYTES, STEP_HEAD_BYTES};
use super::rank::CudaRank;
use super::stages::{HostPlaces, Recorder};
use super::together::Together;
use super::{Graph, Pinned};
use crate::error::{Error, Result};
use crate::model::{Output, Row, Step, forward};

/// Numbers of rows that have a graph; a step is filled up to the next.
pub const BUCKETS: [usize; 9] = [1, 2, 3, 4, 5, 6, 8, 12, 16];
/// Page-locked bytes of a rank: a step, and its results.
const STEP_BYTES: usize = STEP_HEAD_BYTES + MAX_ROWS * ROW_BYTES;
const HOST_BYTES: usize = STEP_BYTES + MAX_ROWS * RESULT_BYTES;

/// Which graph a step takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    rows: usize,
    long: bool,
    with_head: bool,
}

struct Recorded {
    graph: Graph,
    /// Exchanges between ranks in it.
    collectives: u32,
}

/// What a row came to. All ranks must say the same of all but the logits.
#[derive(Debug, Clone)]
pub struct RowOutcome {
    /// Index of the row in its step.
    pub row: usize,
    /// The likeliest token.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
    /// A hash of the row's last hidden state; 0 of a rank that is alone.
    pub hash: u32,
    /// The ranks' parts, one behind the other, if asked for.
    pub logits: Vec<f32>,
}

/// Some ranks, and their graphs.
pub struct Runner {
    // Graphs first: they hold addresses of what follows.
    graphs: HashMap<Shape, Recorded>,
    /// A step and its results, of each rank.
    host: Pinned,
    ranks: Vec<CudaRank>,
    /// Of the next step's first collective.
    epoch: u64,
}

impl Runner {
    /// Captures all graphs of these ranks; nothing is allocated on the device afterwards.
    ///
    /// # Errors
    /// Runtime error if the driver refuses a graph.
    pub fn new(ranks: Vec<CudaRank>, epoch: u64) -> Result<Self> {
        let host = Pinned::alloc(&ranks[0].device, ranks.len() * HOST_BYTES)?;
        let mut runner = Self { graphs: HashMap::new(), host, ranks, epoch };
        let mut shapes = vec![Shape { rows: MAX_ROWS, long: false, with_head: false }];
        shapes.extend(BUCKETS.map(|rows| Shape { rows, long: false, with_head: true }));
        let first = &runner.ranks[0];
        if first.sizes.context > first.config.index_topk {
            let long: Vec<Shape> = shapes.iter().map(|s| Shape { long: true, ..*s }).collect();
            shapes.extend(long);
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
        let shape = Shape { rows: 1, long: false, with_head: true };
        self.graphs.get(&shape).map_or(0, |recorded| recorded.graph.nodes())
    }

    fn capture(&self, shape: Shape) -> Result<Recorded> {
        let mut collectives = 0;
        let graph = self.ranks[0].stream.capture(|stream| {
            let recorders = self.ranks.iter().enumerate().map(|(index, rank)| Recorder {
                rank,
                stream,
                rows: shape.rows,
                long: shape.long,
                with_head: shape.with_head,
                host: self.places(index),
                collectives: 0,
            });
            let mut together = Together(recorders.collect());
            forward(&mut together, &self.ranks[0].config, &Step { rows: Vec::new() })?;
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
            rows: bucket,
            long: rows.iter().any(|row| row.position + 1 - row.first > top_k),
            with_head: wanted || bucket != MAX_ROWS,
        };
        let recorded = self
            .graphs
            .get(&shape)
            .ok_or_else(|| Error::runtime(format!("no graph was captured for {shape:?}")))?;
        // What fills the step up is a row of its own in the entry behind all sequences.
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
        self.epoch += u64::from(recorded.collectives);
        let stream = &self.ranks[0].stream;
        recorded.graph.launch(stream)?;
        stream.synchronize()?;
        if let Some(comm) = &self.ranks[0].comm {
            // Of all ranks: what one that has given up sends afterwards makes no sense elsewhere.
            for rank in 0..comm.fabric.ranks() {
                if let Some(what) = comm.fabric.timed_out(rank) {
                    return Err(comm.fabric.timeout_error(rank, what));
                }
            }
        }
        let asked = rows.iter().enumerate().filter(|(_, row)| row.output != Output::None);
        for (index, row) in asked {
            let mut outcome = self.outcome(0, index);
            for other in 1..self.ranks.len() {
                check_same(&outcome, 0, &self.outcome(other, index), other)?;
            }
            if !outcome.logit.is_finite() {
                return Err(Error::runtime(format!(
                    "the logits at position {} are not finite numbers; the weights are damaged: \
                     talon verify --scales, or --check-hashes, finds where",
                    row.position
                )));
            }
            if row.output == Output::Logits {
                for rank in &self.ranks {
                    outcome.logits.extend(logits(rank, index)?);
                }
            }
            outcomes.push(RowOutcome { row: first + index, ..outcome });
        }
        Ok(())
    }

    /// What a rank says of a row.
    fn outcome(&self, rank: usize, row: usize) -> RowOutcome {
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

/// A rank's part of a row's logits.
fn logits(rank: &CudaRank, row: usize) -> Result<Vec<f32>> {
    let mut bytes = vec![0; rank.weights.vocabulary * size_of::<f32>()];
    let from = rank.buffers.logits + (row * bytes.len()) as u64;
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
