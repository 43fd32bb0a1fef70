//! The kernels by themselves: whether each stage leaves what the CPU backend leaves, and the same
//! bits every time.

mod cases;
mod compare;
mod formats;
mod random;
#[cfg(test)]
mod tests;

use std::collections::HashSet;

use cases::{Case, Cases, Shape, Values};
use compare::{Judgement, bound_of};
use formats::check_formats;

use super::LoadOptions;
use super::kernels::open_rank;
use crate::cpu::CpuRank;
use crate::cuda::{Buffer, CudaOptions, Probe, Route};
use crate::error::{Error, Result};
use crate::model::{ModelConfig, Output, Row, Stages};
use crate::weights::{Matrix, Slice, Source};

/// Positions beyond twice `index_topk` that a context has if none is asked for; no multiple of what
/// a block of any kernel takes.
const BEYOND_LISTS: usize = 77;

/// A stage at one number of rows, over all layers that it was run in.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StageCheck {
    /// Name of the stage (DESIGN §2), or the number format that is decoded.
    pub stage: String,
    /// Rows of the step.
    pub rows: usize,
    /// Root of the squared errors over that of the squared values, the worst of the outputs.
    pub relative_rms: f64,
    /// Largest absolute error of a value.
    pub largest: f64,
    /// Experts and arg-maxima that differ between candidates which the bound cannot tell apart.
    pub ties: usize,
    /// Times it was run again.
    pub repeats: usize,
    /// Those of them that gave the first run's bits.
    pub equal: usize,
    /// What is wrong, if anything: the first of it.
    pub fault: Option<String>,
}

impl StageCheck {
    /// Takes in the judgement on an output.
    fn add(&mut self, judged: Judgement) {
        self.relative_rms = self.relative_rms.max(judged.relative_rms);
        self.largest = self.largest.max(judged.largest);
        self.ties += judged.ties;
        self.fault = self.fault.take().or(judged.fault);
    }

    /// Takes in the same stage in another layer.
    fn join(&mut self, other: Self) {
        self.repeats += other.repeats;
        self.equal += other.equal;
        self.add(Judgement {
            relative_rms: other.relative_rms,
            largest: other.largest,
            ties: other.ties,
            fault: other.fault,
        });
    }
}

/// Loads a model onto the GPU and compares each stage at each of `rows` with the CPU backend; each
/// runs `repeats` times more. `progress` is told of (bytes loaded, all bytes).
///
/// # Errors
/// Input error if the model or the GPU cannot be used; runtime error if a kernel faults.
pub fn check_kernels(
    source: Source,
    options: &LoadOptions,
    rows: &[usize],
    repeats: usize,
    progress: &dyn Fn(usize, usize),
) -> Result<Vec<StageCheck>> {
    let (config, params, slice) = open_rank(source, options)?;
    let shape = shape(&config, options, slice, rows);
    let first_id = config.vocab_size / slice.of * slice.index;
    let cuda = CudaOptions {
        device: options.gpus.devices.first().copied().unwrap_or(0),
        context: shape.context,
        parallel: shape.parallel,
        vocab_limit: first_id + shape.vocab_limit,
        rank: slice.index,
        ranks: slice.of,
    };
    let probe = Probe::load(&config, &params, &cuda, progress)?;
    let places = (shape.context, shape.parallel);
    let cpu = CpuRank::alone(&config, params, slice, places, cuda.vocab_limit);
    let (splits, split) = probe.attend_splits();
    let cases = Cases::new(&config, cpu, Shape { splits, split, ..shape });
    check_all(&probe, cases, &config, rows, repeats)
}

/// What the cases are made for; the parts of attention are the device's to tell.
fn shape(config: &ModelConfig, options: &LoadOptions, slice: Slice, rows: &[usize]) -> Shape {
    let default = (2 * config.index_topk + BEYOND_LISTS).min(config.max_position_embeddings);
    let context = options.context.unwrap_or(default);
    let most = rows.iter().copied().max().unwrap_or(1);
    let share = config.vocab_size / slice.of;
    Shape {
        rows: most,
        context,
        // So that rows that see no more than `index_topk` positions have places of their own.
        parallel: most.div_ceil(config.index_topk.min(context)).max(2),
        heads: config.num_attention_heads / slice.of,
        // A kernel that forgets the limit is found where the best id is in the last quarter.
        vocab_limit: share - share / 4,
        splits: 0,
        split: 0,
    }
}

/// The first layer of each kind: with and without an indexer, with experts and without.
fn kinds_of_layers(config: &ModelConfig) -> Vec<usize> {
    let mut seen = HashSet::new();
    let layers = config.layers[..config.num_hidden_layers].iter().enumerate();
    let is_first =
        |(_, layer): &(usize, &crate::weights::LayerShape)| seen.insert((layer.indexer, layer.moe));
    layers.filter(is_first).map(|(index, _)| index).collect()
}

/// What is checked: a rank whose buffers can be written and read between stages.
trait Target {
    /// Rows of the step; buffers between stages become zero.
    fn begin(&self, rows: &[Row]) -> Result<()>;
    fn write(&self, buffer: Buffer, rows: &[Row], values: &[Vec<f32>]) -> Result<()>;
    fn write_routes(&self, routes: &[Route]) -> Result<()>;
    /// Fills what a stage has to write.
    fn poison(&self, buffer: Buffer, rows: &[Row]) -> Result<()>;
    fn run(
        &self,
        rows: usize,
        long: bool,
        stage: &dyn Fn(&mut dyn Stages) -> Result<()>,
    ) -> Result<()>;
    fn read(&self, buffer: Buffer, rows: &[Row]) -> Result<Vec<u8>>;
    /// All values of a matrix as the kernels decode them.
    fn decode(&self, matrix: &Matrix) -> Result<Vec<f32>>;
}

impl Target for Probe {
    fn begin(&self, rows: &[Row]) -> Result<()> {
        Probe::begin(self, rows)
    }

    fn write(&self, buffer: Buffer, rows: &[Row], values: &[Vec<f32>]) -> Result<()> {
        Probe::write(self, buffer, rows, values)
    }

    fn write_routes(&self, routes: &[Route]) -> Result<()> {
        Probe::write_routes(self, routes)
    }

    fn poison(&self, buffer: Buffer, rows: &[Row]) -> Result<()> {
        Probe::poison(self, buffer, rows)
    }

    fn run(
        &self,
        rows: usize,
        long: bool,
        stage: &dyn Fn(&mut dyn Stages) -> Result<()>,
    ) -> Result<()> {
        Probe::run(self, rows, long, stage)
    }

    fn read(&self, buffer: Buffer, rows: &[Row]) -> Result<Vec<u8>> {
        Probe::read(self, buffer, rows)
    }

    fn decode(&self, matrix: &Matrix) -> Result<Vec<f32>> {
        Probe::decode(self, matrix)
    }
}

fn check_all(
    target: &dyn Target,
    mut cases: Cases,
    config: &ModelConfig,
    rows: &[usize],
    repeats: usize,
) -> Result<Vec<StageCheck>> {
    let mut checks: Vec<StageCheck> = Vec::new();
    cases.each(&kinds_of_layers(config), |case| {
        write_caches(target, &case)?;
        for &rows in rows {
            let check = check_case(target, &case, rows, repeats).map_err(|error| {
                Error::runtime(format!("{}, {rows} rows: {error}", stage_name(&case)))
            })?;
            let same = |known: &&mut StageCheck| (&known.stage, known.rows) == (&check.stage, rows);
            match checks.iter_mut().find(same) {
                None => checks.push(check),
                Some(known) => known.join(check),
            }
        }
        Ok(())
    })?;
    checks.extend(check_formats(target)?);
    Ok(checks)
}

fn stage_name(case: &Case) -> String {
    let way = if case.way.is_empty() { "" } else { ", " };
    format!("{}{way}{}", case.stage, case.way)
}

/// Writes every entry of the case's caches.
fn write_caches(target: &dyn Target, case: &Case) -> Result<()> {
    for (buffer, sequences) in &case.caches {
        for (sequence, entries) in sequences.iter().enumerate() {
            let entry =
                |position| Row { sequence, first: 0, position, token: 0, output: Output::None };
            let places: Vec<Row> = (0..entries.len()).map(entry).collect();
            target.write(*buffer, &places, entries)?;
        }
    }
    Ok(())
}

fn check_case(target: &dyn Target, case: &Case, rows: usize, repeats: usize) -> Result<StageCheck> {
    let places = &case.rows[..rows];
    target.begin(places)?;
    write_all(target, &case.inputs, places)?;
    if let Some(routes) = &case.routes {
        target.write_routes(&routes[..rows])?;
    }
    let first = run(target, case, places)?;
    let mut check = StageCheck { stage: stage_name(case), rows, ..StageCheck::default() };
    let bound = bound_of(case.stage);
    for (wanted, found) in case.wanted.iter().zip(&first) {
        check.add(wanted.judge(found, rows, &bound));
    }
    for _ in 0..repeats {
        check.repeats += 1;
        check.equal += usize::from(run(target, case, places)? == first);
    }
    if check.equal < repeats && check.fault.is_none() {
        let unequal = repeats - check.equal;
        check.fault = Some(format!("{unequal} of {repeats} runs gave other bits than the first"));
    }
    if let (Some(layer), Some(fault)) = (case.layer, &mut check.fault) {
        *fault = format!("layer {layer}: {fault}");
    }
    Ok(check)
}

/// Runs the stage once over poisoned outputs and returns them.
fn run(target: &dyn Target, case: &Case, places: &[Row]) -> Result<Vec<Vec<u8>>> {
    let outputs = || case.wanted.iter().map(|wanted| wanted.buffer());
    for buffer in case.scratch.iter().copied().chain(outputs()) {
        target.poison(buffer, places)?;
    }
    write_all(target, &case.changed, places)?;
    target.run(places.len(), case.long, &*case.run)?;
    outputs().map(|buffer| target.read(buffer, places)).collect()
}

fn write_all(target: &dyn Target, inputs: &[(Buffer, Values)], places: &[Row]) -> Result<()> {
    inputs
        .iter()
        .try_for_each(|(buffer, values)| target.write(*buffer, places, &values[..places.len()]))
}
