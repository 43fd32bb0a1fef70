//! The checks on a target that is the CPU backend itself, with the device's rounding: it passes, and
//! what is done to its outputs is found.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use super::cases::merge;
use super::*;
use crate::cuda::{Stored, encode_routes};
use crate::engine::Opened;
use crate::model::{Step, Weights};
use crate::weights::demo;

/// What is done to the bytes of a buffer; the number counts the reads of all buffers.
type Spoil = fn(Buffer, usize, &mut Vec<u8>);

struct CpuTarget {
    cpu: RefCell<CpuRank>,
    config: Arc<ModelConfig>,
    shape: Shape,
    parts: RefCell<Vec<Vec<f32>>>,
    reads: Cell<usize>,
    spoil: Spoil,
}

/// Of the demo's rank `index` of `of`.
fn target(slice: Slice, rows: &[usize], spoil: Spoil) -> (CpuTarget, Cases) {
    let Opened { config, checkpoint, manifest, audit, .. } =
        Opened::new(demo(), false).expect("the demo opens");
    let weights = Weights::new(checkpoint, manifest, audit).expect("the demo is sound");
    let config = Arc::new(config);
    let shape = Shape { split: 64, ..shape(&config, &LoadOptions::default(), slice, rows) };
    let splits = config.index_topk.div_ceil(shape.split);
    let shape = Shape { splits, ..shape };
    let cpu = || {
        let params = weights.params(&config, slice).expect("the slice fits");
        let limit = config.vocab_size / slice.of * slice.index + shape.vocab_limit;
        CpuRank::alone(&config, params, slice, (shape.context, shape.parallel), limit)
    };
    let target = CpuTarget {
        cpu: RefCell::new(cpu()),
        config: config.clone(),
        shape,
        parts: RefCell::default(),
        reads: Cell::new(0),
        spoil,
    };
    (target, Cases::new(&config, cpu(), shape))
}

fn listed(config: &ModelConfig, row: &Row) -> bool {
    row.position + 1 - row.first > config.index_topk
}

impl Target for CpuTarget {
    fn begin(&self, rows: &[Row]) -> Result<()> {
        self.cpu.borrow_mut().embed(&Step { rows: rows.to_vec() })
    }

    fn write(&self, buffer: Buffer, rows: &[Row], values: &[Vec<f32>]) -> Result<()> {
        let stored = buffer.stored();
        let device = |values: &Vec<f32>| stored.decode(&stored.encode(values.iter()));
        let values: Vec<Vec<f32>> = values.iter().map(device).collect();
        let mut cpu = self.cpu.borrow_mut();
        for (row, values) in rows.iter().zip(&values) {
            let place = |width: usize| row.position * width..(row.position + 1) * width;
            match buffer {
                Buffer::LatentCache(layer) => cpu.cache_mut(row.sequence, layer).latents
                    [place(values.len())]
                .copy_from_slice(values),
                Buffer::KeyCache(layer) => cpu.cache_mut(row.sequence, layer).index_keys
                    [place(values.len())]
                .copy_from_slice(values),
                _ => {}
            }
        }
        let width = self.config.moe_intermediate_size;
        let buffers = cpu.buffers_mut();
        match buffer {
            Buffer::Partial => buffers.partial = values.concat(),
            Buffer::Residual => buffers.residual = values.concat(),
            Buffer::Normed => buffers.normed = values.concat(),
            Buffer::QueryLatents => buffers.query_latents = values.concat(),
            Buffer::Queries => buffers.queries = values.concat(),
            Buffer::IndexQueries => buffers.index_queries = values.concat(),
            Buffer::IndexWeights => buffers.index_weights = values.concat(),
            Buffer::Values => buffers.values = values.concat(),
            Buffer::MlpActivations(_) => buffers.mlp_activations = values.concat(),
            Buffer::Scores => buffers.scores = values,
            Buffer::Activations(_) => {
                let experts = |row: &Vec<f32>| {
                    let each = row.len() / self.config.num_experts_per_tok;
                    assert!(width.is_multiple_of(each));
                    row.chunks_exact(each).map(<[f32]>::to_vec).collect()
                };
                buffers.expert_activations = values.iter().map(experts).collect();
            }
            Buffer::Selected => {
                let list = |list: &Vec<f32>| list.iter().map(|t| *t as usize).collect();
                buffers.selected = values.iter().map(list).collect();
            }
            Buffer::Parts => *self.parts.borrow_mut() = values,
            Buffer::Bounds => {
                let sizes = (self.shape.heads, self.config.kv_lora_rank);
                let of_row = |((row, parts), bounds): ((&Row, &Vec<f32>), &Vec<f32>)| {
                    let seen = (row.position + 1 - row.first).min(self.config.index_topk);
                    merge(parts, bounds, seen.div_ceil(self.shape.split), sizes)
                };
                let parts = self.parts.borrow();
                buffers.attended =
                    rows.iter().zip(parts.iter()).zip(&values).flat_map(of_row).collect();
            }
            Buffer::LatentCache(_) | Buffer::KeyCache(_) => {}
            other => panic!("{other:?} is no input"),
        }
        Ok(())
    }

    fn write_routes(&self, routes: &[Route]) -> Result<()> {
        self.cpu.borrow_mut().buffers_mut().routes = routes.to_vec();
        Ok(())
    }

    fn poison(&self, _buffer: Buffer, _rows: &[Row]) -> Result<()> {
        Ok(())
    }

    fn run(
        &self,
        _rows: usize,
        _long: bool,
        stage: &dyn Fn(&mut dyn Stages) -> Result<()>,
    ) -> Result<()> {
        let mut cpu = self.cpu.borrow_mut();
        // The device attends to all that a row sees where it has no list.
        let seen = |row: &Row| (row.first..=row.position).collect::<Vec<usize>>();
        let rows = cpu.buffers().rows.clone();
        cpu.buffers_mut().selected.resize_with(rows.len(), Vec::new);
        for (row, list) in rows.iter().zip(&mut cpu.buffers_mut().selected) {
            if !listed(&self.config, row) {
                *list = seen(row);
            }
        }
        stage(&mut *cpu)
    }

    fn read(&self, buffer: Buffer, rows: &[Row]) -> Result<Vec<u8>> {
        let mut cpu = self.cpu.borrow_mut();
        let head = matches!(buffer, Buffer::Logits | Buffer::Best);
        let results = if head { cpu.head()? } else { Vec::new() };
        let (buffers, cache) = (cpu.buffers(), |row: &Row, layer| cpu.cache(row.sequence, layer));
        let prefix =
            |values: &Vec<f32>| values[..values.len() / buffers.rows.len() * rows.len()].to_vec();
        let values: Vec<f32> = match buffer {
            Buffer::Partial => prefix(&buffers.partial),
            Buffer::Residual => prefix(&buffers.residual),
            Buffer::Normed => prefix(&buffers.normed),
            Buffer::QueryLatents => prefix(&buffers.query_latents),
            Buffer::Queries => prefix(&buffers.queries),
            Buffer::IndexQueries => prefix(&buffers.index_queries),
            Buffer::IndexWeights => prefix(&buffers.index_weights),
            Buffer::Attended => prefix(&buffers.attended),
            Buffer::Values => prefix(&buffers.values),
            Buffer::MlpActivations(_) => prefix(&buffers.mlp_activations),
            Buffer::Scores => buffers.scores.concat(),
            Buffer::Selected => {
                let long = rows.iter().zip(&buffers.selected);
                let long = long.filter(|(row, _)| listed(&self.config, row));
                long.flat_map(|(_, list)| list.iter().map(|t| *t as f32)).collect()
            }
            Buffer::Activations(_) => buffers.expert_activations.concat().concat(),
            Buffer::LatentCache(layer) => {
                let width = self.config.kv_lora_rank + self.config.qk_rope_head_dim;
                let entry = |row: &Row| &cache(row, layer).latents[row.position * width..][..width];
                rows.iter().flat_map(entry).copied().collect()
            }
            Buffer::KeyCache(layer) => {
                let dim = self.config.index_head_dim;
                let entry = |row: &Row| &cache(row, layer).index_keys[row.position * dim..][..dim];
                rows.iter().flat_map(entry).copied().collect()
            }
            Buffer::Logits => results.iter().flat_map(|result| result.logits.clone()).collect(),
            _ => Vec::new(),
        };
        let mut bytes = match buffer {
            Buffer::Routing => encode_routes(&buffers.routes, self.config.n_routed_experts),
            Buffer::Best => {
                let of_rank = |id: u32| id as usize % results[0].logits.len();
                let best = results.iter().map(|result| of_rank(result.argmax));
                let pairs = best.zip(&results);
                pairs
                    .flat_map(|(id, result)| {
                        let logit = result.logits[id].to_bits();
                        [(id as u32).to_ne_bytes(), logit.to_ne_bytes()].concat()
                    })
                    .collect()
            }
            _ => buffer.stored().encode(values.iter()),
        };
        self.reads.set(self.reads.get() + 1);
        (self.spoil)(buffer, self.reads.get(), &mut bytes);
        Ok(bytes)
    }

    fn decode(&self, matrix: &Matrix) -> Result<Vec<f32>> {
        Ok(matrix.to_vec())
    }
}

fn check(slice: Slice, rows: &[usize], repeats: usize, spoil: Spoil) -> Vec<StageCheck> {
    let (target, cases) = target(slice, rows, spoil);
    check_all(&target, cases, &target.config, rows, repeats).expect("the checks run")
}

const WHOLE: Slice = Slice { index: 0, of: 1 };

#[test]
fn the_cpu_backend_passes_its_own_check() {
    for (slice, rows) in [(WHOLE, &[1, 5, 16][..]), (Slice { index: 3, of: 4 }, &[2])] {
        let checks = check(slice, rows, 1, |_, _, _| {});
        for check in &checks {
            assert_eq!(check.fault, None, "{} at {} rows", check.stage, check.rows);
            assert!(check.relative_rms < 4.9e-4, "{check:?}");
            assert!(check.stage.starts_with("formats") || check.equal >= 1);
        }
        let stages: HashSet<&str> = checks.iter().map(|check| check.stage.as_str()).collect();
        assert_eq!(stages.len(), 16 + 5, "{stages:?}");
    }
}

fn faults(spoil: Spoil) -> Vec<String> {
    let checks = check(WHOLE, &[3], 2, spoil);
    checks.iter().filter_map(|c| Some(format!("{}: {}", c.stage, c.fault.as_ref()?))).collect()
}

#[test]
fn a_value_that_was_not_written_is_found() {
    let faults = faults(|buffer, _, bytes| {
        if buffer == Buffer::Queries {
            let last = bytes.len() - Stored::F16.encode([0.0].iter()).len();
            bytes[last..].fill(0xFF);
        }
    });
    let [fault] = &faults[..] else { panic!("{faults:?}") };
    assert!(fault.starts_with("project_queries: layer 0: queries: 1 of "), "{fault}");
}

#[test]
fn a_wrong_value_is_found_by_its_place() {
    let faults = faults(|buffer, _, bytes| {
        if buffer == Buffer::Logits {
            bytes[4..8].copy_from_slice(&100.0f32.to_ne_bytes());
        }
    });
    let [fault] = &faults[..] else { panic!("{faults:?}") };
    assert!(fault.starts_with("head: logits: relative RMS error"), "{fault}");
    assert!(fault.contains("row 0, at most 1e-4; value 1 is 1.000000e2, the CPU's "), "{fault}");
}

#[test]
fn other_bits_in_a_later_run_are_found() {
    let faults = faults(|buffer, reads, bytes| {
        if matches!(buffer, Buffer::Scores | Buffer::Routing) && reads.is_multiple_of(3) {
            bytes[0] ^= 1;
        }
    });
    assert!(faults.iter().any(|fault| fault.starts_with("score_keys: ")), "{faults:?}");
    assert!(faults.iter().any(|fault| fault.starts_with("route: ")), "{faults:?}");
    assert_eq!(faults.len(), 2, "{faults:?}");
}
