//! Times of the kernels at a model's shapes: each stage over all layers in one graph, so that its
//! weights come from memory and not from a cache, and beside it the fastest plain read of as many
//! bytes.

use std::sync::Arc;

use super::kernel_set::require;
use super::layout::MAX_ROWS;
use super::rank::{CudaOptions, CudaRank};
use super::runner::row_bytes;
use super::stages::Recorder;
use super::weights::{DeviceLayer, DeviceMlp};
use super::{Event, Graph, Kernel, Launch, Module};
use crate::error::{Error, Result};
use crate::model::{ModelConfig, ModelParams, Norm, Output, Row, Stages};

/// A graph runs at least this long, so that its launch does not count.
const GRAPH_MS: f32 = 1.5;
/// Bytes of the read that the roof is taken from.
const LARGE: usize = 1 << 30;
/// Runs of a graph; the median is reported.
const RUNS: usize = 9;

/// The time of one stage.
#[derive(Debug, Clone, PartialEq)]
pub struct StageTime {
    /// Name of the stage (DESIGN §2).
    pub stage: &'static str,
    /// Rows of the step.
    pub rows: usize,
    /// Microseconds in one layer: median, fastest and slowest of the runs.
    pub microseconds: [f64; 3],
    /// Bytes that it has to read: weights, and cache entries.
    pub bytes: usize,
    /// Microseconds of the fastest plain read of as many bytes, launches included.
    pub read_microseconds: f64,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelTimes {
    /// Bytes a second of the fastest plain read of a large piece.
    pub read_roof: f64,
    /// Each stage at each number of rows.
    pub stages: Vec<StageTime>,
}

/// A stage as it is measured: launches it for one layer.
type Run = fn(&mut Recorder, usize) -> Result<()>;
/// Which layers have it.
type Has = fn(&DeviceLayer) -> bool;

fn any(_: &DeviceLayer) -> bool {
    true
}

fn indexer(layer: &DeviceLayer) -> bool {
    layer.indexer.wk.rows > 0
}

fn moe(layer: &DeviceLayer) -> bool {
    matches!(layer.mlp, DeviceMlp::Moe(_))
}

fn dense(layer: &DeviceLayer) -> bool {
    !moe(layer)
}

const STAGES: [(&str, Has, Run); 13] = [
    ("reduce_norm", any, |recorder, layer| recorder.reduce_norm(Norm::Input(layer))),
    ("project_latents", any, |recorder, layer| recorder.project_latents(layer)),
    ("project_queries", any, |recorder, layer| recorder.project_queries(layer)),
    ("score_keys", indexer, |recorder, layer| recorder.score_keys(layer)),
    ("select_keys", indexer, |recorder, layer| recorder.select_keys(layer)),
    ("attend", any, |recorder, layer| recorder.attend(layer)),
    ("project_values", any, |recorder, layer| recorder.project_values(layer)),
    ("project_output", any, |recorder, layer| recorder.project_output(layer)),
    ("route", moe, |recorder, layer| recorder.route(layer)),
    ("expert_gate_up", moe, |recorder, layer| recorder.expert_gate_up(layer)),
    ("expert_down", moe, |recorder, layer| recorder.expert_down(layer)),
    ("dense_gate_up", dense, |recorder, layer| recorder.dense_gate_up(layer)),
    ("dense_down", dense, |recorder, layer| recorder.dense_down(layer)),
];

/// Times every stage at each of `rows`, all rows at position `context - 1`. `progress` is told of
/// (bytes loaded, all bytes).
///
/// # Errors
/// As [`CudaRank::load`]; a runtime error if a kernel fails.
pub fn measure_kernels(
    config: &Arc<ModelConfig>,
    params: &ModelParams,
    options: &CudaOptions,
    rows: &[usize],
    progress: &dyn Fn(usize, usize),
) -> Result<KernelTimes> {
    let rank = CudaRank::load(config, params, options, None, progress)?;
    randomise_residual(&rank)?;
    let bench = Bench::new(&rank)?;
    let read_roof = bench.read_roof()?;
    let mut stages = Vec::new();
    for &rows in rows {
        bench.set_rows(rows)?;
        for (stage, has, run) in STAGES {
            let long = options.context > config.index_topk;
            if !long && matches!(stage, "score_keys" | "select_keys") {
                continue;
            }
            let layers: Vec<usize> = bench.layers(has);
            if layers.is_empty() {
                continue;
            }
            let microseconds = bench.stage_us(rows, long, &layers, run)?;
            let bytes = bench.stage_bytes(stage, rows, long, layers[0])?;
            let read_microseconds = bench.read_us(bytes.max(1 << 10))?;
            stages.push(StageTime { stage, rows, microseconds, bytes, read_microseconds });
        }
        let microseconds =
            bench.stage_us(rows, false, &[0], |recorder, _| recorder.head().map(drop))?;
        let bytes = bench.rank.weights.lm_head.bytes();
        let read_microseconds = bench.read_us(bytes)?;
        stages.push(StageTime { stage: "head", rows, microseconds, bytes, read_microseconds });
    }
    Ok(KernelTimes { read_roof, stages })
}

/// Bytes a second of plain reads of a large piece of a rank's weights; `None` where they are too few
/// to tell.
///
/// # Errors
/// Runtime error if the device fails.
pub fn read_roof(rank: &CudaRank) -> Result<Option<f64>> {
    // So that nothing of a piece is in the cache from the turn before.
    const PIECES: usize = 4;
    if rank.plan.weights < PIECES * LARGE {
        return Ok(None);
    }
    Bench::new(rank)?.read_roof().map(Some)
}

/// A random residual, so that rows choose different experts.
fn randomise_residual(rank: &CudaRank) -> Result<()> {
    let count = MAX_ROWS * rank.config.hidden_size;
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let residual: Vec<u8> = (0..count)
        .flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 40) as f32 / (1 << 24) as f32 - 0.5).to_ne_bytes()
        })
        .collect();
    rank.stream.upload(rank.buffers.residual, &residual)
}

struct Bench<'a> {
    rank: &'a CudaRank,
    read: Kernel,
}

impl<'a> Bench<'a> {
    fn new(rank: &'a CudaRank) -> Result<Self> {
        let module = Arc::new(Module::load(&rank.device, "read_roof", require("read_roof")?)?);
        Ok(Self { rank, read: module.kernel("read_roof")? })
    }

    /// Bytes a second of a plain read of a large piece.
    fn read_roof(&self) -> Result<f64> {
        Ok(LARGE as f64 / (self.read_us(LARGE)? * 1e-6))
    }

    fn layers(&self, has: Has) -> Vec<usize> {
        let layers = self.rank.weights.layers.iter().enumerate();
        layers.filter(|(_, layer)| has(layer)).map(|(index, _)| index).collect()
    }

    /// All rows at the last position of the context, each in a sequence of its own if there are
    /// enough.
    fn set_rows(&self, rows: usize) -> Result<()> {
        let sizes = &self.rank.sizes;
        let row = |index: usize| Row {
            sequence: index % sizes.parallel,
            first: 0,
            position: sizes.context - 1 - index / sizes.parallel,
            token: 0,
            output: Output::ArgMax,
        };
        let bytes: Vec<u8> = (0..rows).flat_map(|index| row_bytes(&row(index))).collect();
        self.rank.stream.upload(self.rank.buffers.rows, &bytes)
    }

    /// Median, fastest and slowest time of one layer.
    fn stage_us(&self, rows: usize, long: bool, layers: &[usize], run: Run) -> Result<[f64; 3]> {
        let capture = |turns: usize| {
            self.rank.stream.capture(|_| {
                let mut recorder = self.rank.recorder(rows, long);
                (0..turns).try_for_each(|_| {
                    layers.iter().try_for_each(|layer| run(&mut recorder, *layer))
                })
            })
        };
        self.time(capture, layers.len())
    }

    /// Time of one read of `bytes`, the fastest of a few grids, many reads one behind the other.
    fn read_us(&self, bytes: usize) -> Result<f64> {
        let window = bytes.next_multiple_of(256);
        let all = self.rank.plan.weights;
        if window > all {
            return Err(Error::input(format!(
                "the model's weights take {all} bytes, too few to measure a read of {window}; use \
                 more --layers"
            )));
        }
        let windows = (all / window).clamp(1, 64);
        let mut best = f64::INFINITY;
        for blocks in [1, 2, 4] {
            let grid = self.rank.device.multiprocessors() * blocks;
            let capture = |turns: usize| {
                self.rank.stream.capture(|stream| {
                    for turn in 0..turns * windows {
                        let at = self.rank.weights.embed_tokens + (turn % windows * window) as u64;
                        let launch = Launch {
                            grid: [grid, 1, 1],
                            block: 512,
                            shared_bytes: 0,
                            dependent: true,
                        };
                        let count = (bytes / 16) as u64;
                        let sink = self.rank.buffers.best;
                        stream.launch(
                            &self.read,
                            launch,
                            &[at.into(), count.into(), sink.into()],
                        )?;
                    }
                    Ok(())
                })
            };
            best = best.min(self.time(capture, windows)?[0]);
        }
        Ok(best)
    }

    /// Captures a graph of enough turns and runs it; microseconds of one part of a turn.
    fn time(&self, capture: impl Fn(usize) -> Result<Graph>, parts: usize) -> Result<[f64; 3]> {
        let stream = &self.rank.stream;
        let (before, after) = (Event::new(&self.rank.device)?, Event::new(&self.rank.device)?);
        let run = |graph: &Graph| -> Result<f32> {
            before.record(stream)?;
            graph.launch(stream)?;
            after.record(stream)?;
            after.synchronize()?;
            after.milliseconds_since(&before)
        };
        let once = capture(1)?;
        run(&once)?;
        let turns = ((GRAPH_MS / run(&once)?.max(1e-3)).ceil() as usize).clamp(1, 200);
        let graph = capture(turns)?;
        run(&graph)?;
        let mut times = (0..RUNS).map(|_| run(&graph)).collect::<Result<Vec<f32>>>()?;
        times.sort_by(f32::total_cmp);
        let one = |ms: f32| f64::from(ms) * 1e3 / (turns * parts) as f64;
        Ok([one(times[RUNS / 2]), one(times[0]), one(times[RUNS - 1])])
    }

    /// Bytes that a stage has to read.
    fn stage_bytes(&self, stage: &str, rows: usize, long: bool, layer: usize) -> Result<usize> {
        let (config, layer) = (&self.rank.config, &self.rank.weights.layers[layer]);
        let context = self.rank.sizes.context;
        let width = config.kv_lora_rank + config.qk_rope_head_dim;
        let indexer = &layer.indexer;
        let bytes = match (stage, &layer.mlp) {
            ("project_latents", _) => {
                layer.q_a_proj.bytes()
                    + layer.kv_a_proj_with_mqa.bytes()
                    + indexer.wk.bytes()
                    + indexer.weights_proj.bytes()
            }
            ("project_queries", _) => {
                let scored = if long { indexer.wq_b.bytes() } else { 0 };
                layer.q_b_proj.bytes() + layer.w_uk.bytes() + scored
            }
            ("score_keys", _) => context * config.index_head_dim * 2,
            ("select_keys", _) => rows * context * 4,
            ("attend", _) => context.min(config.index_topk) * width * 2,
            ("project_values", _) => layer.w_uv.bytes(),
            ("project_output", _) => layer.o_proj.bytes(),
            ("route", DeviceMlp::Moe(moe)) => moe.router.bytes() + moe.shared_gate_up.bytes(),
            ("expert_gate_up", DeviceMlp::Moe(moe)) => {
                self.distinct_experts()? * moe.gate_up.first.bytes()
            }
            ("expert_down", DeviceMlp::Moe(moe)) => {
                self.distinct_experts()? * moe.down.first.bytes() + moe.shared_down.bytes()
            }
            ("dense_gate_up", DeviceMlp::Dense { gate_up, .. }) => gate_up.bytes(),
            ("dense_down", DeviceMlp::Dense { down, .. }) => down.bytes(),
            _ => rows * config.hidden_size * 4,
        };
        Ok(bytes)
    }

    /// Experts that any of the rows uses, as `choose_experts` left them.
    fn distinct_experts(&self) -> Result<usize> {
        let mut count = [0; 4];
        self.rank.stream.download(self.rank.buffers.routing, &mut count)?;
        Ok(u32::from_ne_bytes(count) as usize)
    }
}
