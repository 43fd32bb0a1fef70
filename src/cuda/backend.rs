//! The backend: captured graphs of a step by its number of rows, and the copies around them.

use std::collections::HashMap;
use std::sync::Arc;

use super::layout::MAX_ROWS;
use super::plan::MemoryPlan;
use super::rank::{CudaOptions, CudaRank};
use super::stages::Recorder;
use super::{Graph, Pinned};
use crate::error::{Error, Result};
use crate::model::{
    Backend, Draft, Drafted, ModelConfig, ModelParams, Output, Row, RowResult, Step, forward,
};

/// Numbers of rows that have a graph; a step is filled up to the next.
const BUCKETS: [usize; 9] = [1, 2, 3, 4, 5, 6, 8, 12, 16];
/// Bytes of a row as the kernels read it, and of a result.
const ROW_BYTES: usize = 16;
const BEST_BYTES: usize = 8;

/// Which graph a step takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    rows: usize,
    long: bool,
    with_head: bool,
}

/// One rank on one device, as a backend.
pub struct CudaBackend {
    // Graphs first: they hold addresses of what follows.
    graphs: HashMap<Shape, Graph>,
    /// The step's rows, and behind them its results.
    exchange: Pinned,
    rank: CudaRank,
    /// The id of the first row of this rank's part of the head.
    first_id: usize,
}

impl CudaBackend {
    /// Loads the model and captures all graphs; nothing is allocated on the device afterwards.
    ///
    /// # Errors
    /// Input error if the model does not fit, or this box or build cannot run it.
    pub fn start(
        config: &Arc<ModelConfig>,
        params: &ModelParams,
        options: &CudaOptions,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Self> {
        let rank = CudaRank::load(config, params, options, progress)?;
        let exchange = Pinned::alloc(&rank.device, MAX_ROWS * (ROW_BYTES + BEST_BYTES))?;
        let first_id = rank.weights.vocabulary * options.rank;
        let mut backend = Self { graphs: HashMap::new(), exchange, rank, first_id };
        let mut shapes = vec![Shape { rows: MAX_ROWS, long: false, with_head: false }];
        shapes.extend(BUCKETS.map(|rows| Shape { rows, long: false, with_head: true }));
        if options.context > config.index_topk {
            let long: Vec<Shape> = shapes.iter().map(|s| Shape { long: true, ..*s }).collect();
            shapes.extend(long);
        }
        for shape in shapes {
            let graph = backend.capture(shape)?;
            graph.upload(&backend.rank.stream)?;
            backend.graphs.insert(shape, graph);
        }
        backend.rank.stream.synchronize()?;
        Ok(backend)
    }

    /// What the device's memory is used for.
    pub fn plan(&self) -> MemoryPlan {
        self.rank.plan
    }

    /// Bytes of weights that a step of one row reads.
    pub fn step_bytes(&self) -> usize {
        self.rank.weights.step_bytes(self.rank.config.num_experts_per_tok)
    }

    /// Launches of a step of one row in a short context.
    pub fn launches(&self) -> usize {
        let shape = Shape { rows: 1, long: false, with_head: true };
        self.graphs.get(&shape).map_or(0, Graph::nodes)
    }

    fn capture(&mut self, shape: Shape) -> Result<Graph> {
        let (rank, exchange) = (&self.rank, &mut self.exchange);
        let config = rank.config.clone();
        rank.stream.capture(|stream| {
            stream.copy_to_device(rank.buffers.rows, exchange, 0..shape.rows * ROW_BYTES)?;
            let mut recorder =
                Recorder { rank, rows: shape.rows, long: shape.long, with_head: shape.with_head };
            forward(&mut recorder, &config, &Step { rows: Vec::new() })?;
            if shape.with_head {
                let results = MAX_ROWS * ROW_BYTES..;
                let end = results.start + shape.rows * BEST_BYTES;
                stream.copy_from_device(exchange, results.start..end, rank.buffers.best)?;
            }
            Ok(())
        })
    }

    /// Runs at most [`MAX_ROWS`] rows; `first` is the index of the first in its step.
    fn run(&mut self, rows: &[Row], first: usize, results: &mut Vec<RowResult>) -> Result<()> {
        let bucket = BUCKETS.into_iter().find(|bucket| *bucket >= rows.len()).unwrap_or(MAX_ROWS);
        let top_k = self.rank.config.index_topk;
        let wanted = rows.iter().any(|row| row.output != Output::None);
        let shape = Shape {
            rows: bucket,
            long: rows.iter().any(|row| row.position + 1 - row.first > top_k),
            with_head: wanted || bucket != MAX_ROWS,
        };
        // What fills the step up is a row of its own in the entry behind all sequences.
        let sizes = self.rank.sizes;
        let filling =
            Row { sequence: sizes.parallel, first: 0, position: 0, token: 0, output: Output::None };
        let filled = rows.iter().copied().chain(std::iter::repeat(filling)).take(bucket);
        for (row, out) in filled.zip(self.exchange.as_mut_slice().as_chunks_mut::<ROW_BYTES>().0) {
            *out = row_bytes(&row);
        }
        let graph = self
            .graphs
            .get(&shape)
            .ok_or_else(|| Error::runtime(format!("no graph was captured for {shape:?}")))?;
        graph.launch(&self.rank.stream)?;
        self.rank.stream.synchronize()?;

        let vocabulary = self.rank.weights.vocabulary;
        for (index, row) in rows.iter().enumerate() {
            if row.output == Output::None {
                continue;
            }
            let at = MAX_ROWS * ROW_BYTES + index * BEST_BYTES;
            let best = &self.exchange.as_slice()[at..at + BEST_BYTES];
            let id = u32::from_ne_bytes([best[0], best[1], best[2], best[3]]);
            let logit = f32::from_ne_bytes([best[4], best[5], best[6], best[7]]);
            if !logit.is_finite() {
                return Err(Error::runtime(format!(
                    "the logits at position {} are not finite numbers; the weights are damaged: \
                     talon verify --scales, or --check-hashes, finds where",
                    row.position
                )));
            }
            let mut logits = Vec::new();
            if row.output == Output::Logits {
                let mut bytes = vec![0; vocabulary * size_of::<f32>()];
                let from = self.rank.buffers.logits + (index * bytes.len()) as u64;
                self.rank.stream.download(from, &mut bytes)?;
                logits = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect();
            }
            let argmax = id + self.first_id as u32;
            results.push(RowResult { row: first + index, argmax, logits });
        }
        Ok(())
    }
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

impl Backend for CudaBackend {
    fn step(&mut self, step: Step) -> Result<Vec<RowResult>> {
        let mut results = Vec::new();
        for (index, rows) in step.rows.chunks(MAX_ROWS).enumerate() {
            self.run(rows, index * MAX_ROWS, &mut results)?;
        }
        Ok(results)
    }

    fn draft(&mut self, _draft: Draft) -> Result<Vec<Drafted>> {
        Err(Error::runtime("the CUDA backend was started without a drafter"))
    }

    fn feature_positions(&self) -> usize {
        0
    }
}
