//! Reads what a load needs of the shards: once, in the order of the files, by several readers, and not
//! a byte of what it does not need. Scales are checked as they come by.
//!
//! Reading means to bring the pages of the mapped files into the page cache and into this process
//! (`Bytes::read_in`). Nothing is copied: the CPU backend computes from these pages, and the CUDA
//! backend's uploads find them in memory, so they never wait for the disk.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::audit::{Problem, Resolved};
use super::checkpoint::{Checkpoint, TensorRef};
use super::manifest::{Manifest, Role};
use super::mmap::{Bytes, PAGE};
use super::scales::check;
use crate::error::{Error, Result};

/// What a reader takes at a time: all its requests go to the disk at once.
const UNIT_BYTES: usize = 16 << 20;

/// Modules of a checkpoint that a load needs.
pub struct Needed<'a> {
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// Its family's table.
    pub manifest: &'a Manifest,
    /// The modules.
    pub modules: Vec<&'a Resolved>,
}

/// Which of the modules' tensors are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// All.
    Everything,
    /// Only the scales, where the memory cannot hold the rest.
    Scales,
}

/// What is to be read, in its order.
pub struct Reading<'a> {
    units: Vec<Unit<'a>>,
    /// One of each file's bytes.
    shards: Vec<Bytes>,
}

/// What was read.
#[derive(Debug, Default)]
pub struct Read {
    /// Bytes that were needed of files; what lies in the binary or was made does not count.
    pub bytes: u64,
    /// Those of them that were in the page cache before.
    pub resident: u64,
    /// How long it took.
    pub seconds: f64,
    /// Scales that are not what they should be, sorted by tensor.
    pub problems: Vec<Problem>,
}

/// A stretch of a shard, and the scales in it.
struct Unit<'a> {
    bytes: Bytes,
    checks: Vec<Scales<'a>>,
}

/// A tensor of scales.
#[derive(Clone, Copy)]
struct Scales<'a> {
    checkpoint: &'a Checkpoint,
    manifest: &'a Manifest,
    module: &'a Resolved,
    role: Role,
    tensor: &'a TensorRef,
}

impl<'a> Reading<'a> {
    /// Plans the reading of `needed`.
    pub fn new(needed: &[Needed<'a>], what: What) -> Self {
        let mut units = Vec::new();
        let mut shards = Vec::new();
        for needed in needed {
            for (shard, parts) in by_shard(needed, what).into_iter().enumerate() {
                if !parts.is_empty() {
                    let bytes = needed.checkpoint.shard_bytes(shard);
                    add_units(bytes, parts, &mut units);
                    shards.push(bytes.clone());
                }
            }
        }
        Self { units, shards }
    }

    /// Bytes of files that [`Reading::run`] reads.
    pub fn bytes(&self) -> u64 {
        let mapped = self.units.iter().filter(|unit| unit.bytes.is_mapped());
        mapped.map(|unit| unit.bytes.len() as u64).sum()
    }

    /// Reads. `progress` is called with the bytes read since its last call and all of them, from several
    /// threads.
    ///
    /// # Errors
    /// Runtime error that names the file if the disk fails or the file has become shorter.
    pub fn run(&self, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<Read> {
        let begun = Instant::now();
        let total = self.units.iter().map(|unit| unit.bytes.len() as u64).sum();
        let next = AtomicUsize::new(0);
        let read = Mutex::new(Read::default());
        let fault: Mutex<Option<Error>> = Mutex::new(None);
        self.shards.iter().for_each(|shard| shard.read_exactly(true));
        std::thread::scope(|scope| {
            for _ in 0..readers().min(self.units.len()) {
                scope.spawn(|| {
                    while let Some(unit) = self.units.get(next.fetch_add(1, Ordering::Relaxed)) {
                        match unit.read() {
                            Ok(done) => {
                                read.lock().unwrap_or_else(PoisonError::into_inner).add(done)
                            }
                            Err(error) => {
                                // The others end with what they have in hand.
                                next.store(self.units.len(), Ordering::Relaxed);
                                let mut fault =
                                    fault.lock().unwrap_or_else(PoisonError::into_inner);
                                fault.get_or_insert(error);
                            }
                        }
                        progress(unit.bytes.len() as u64, total);
                    }
                });
            }
        });
        self.shards.iter().for_each(|shard| shard.read_exactly(false));
        let fault = fault.into_inner().unwrap_or_else(PoisonError::into_inner);
        // A file that was cut inside its last page has zeros there now, which no disk reports.
        let fault = fault.or_else(|| self.shards.iter().find_map(Bytes::changed));
        if let Some(fault) = fault {
            return Err(fault);
        }
        let mut read = read.into_inner().unwrap_or_else(PoisonError::into_inner);
        read.problems.sort_by(|a, b| a.tensor.cmp(&b.tensor));
        read.seconds = begun.elapsed().as_secs_f64();
        Ok(read)
    }
}

impl Unit<'_> {
    fn read(&self) -> Result<Read> {
        let mut read = Read::default();
        if self.bytes.is_mapped() {
            let (bytes, resident) = (self.bytes.len(), self.bytes.resident());
            self.bytes.read_in(resident < bytes)?;
            (read.bytes, read.resident) = (bytes as u64, resident as u64);
        }
        let problem = |s: &Scales| check(s.checkpoint, s.manifest, s.module, s.role, s.tensor);
        read.problems = self.checks.iter().filter_map(problem).collect();
        Ok(read)
    }
}

impl Read {
    fn add(&mut self, other: Read) {
        self.bytes += other.bytes;
        self.resident += other.resident;
        self.problems.extend(other.problems);
    }
}

/// Readers wait for the disk most of the time, so there are more of them than cores.
fn readers() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (2 * cores).clamp(4, 16)
}

/// The parts to read, by shard: start, end, and what to check.
type Part<'a> = (usize, usize, Option<Scales<'a>>);

fn by_shard<'a>(needed: &Needed<'a>, what: What) -> Vec<Vec<Part<'a>>> {
    let Needed { checkpoint, manifest, ref modules } = *needed;
    let mut shards: Vec<Vec<Part>> = Vec::new();
    shards.resize_with(checkpoint.shards.len(), Vec::new);
    for &module in modules {
        for (role, tensor) in &module.parts {
            let (start, end) = (tensor.range.start, tensor.range.end);
            let parts = &mut shards[tensor.shard];
            if module.parts.len() > 1 && *role != Role::Values {
                let scales = Scales { checkpoint, manifest, module, role: *role, tensor };
                parts.push((start, end, Some(scales)));
            } else if what == What::Everything && checkpoint.shard_bytes(tensor.shard).is_mapped() {
                let ends = |start: usize| (start + UNIT_BYTES).min(end);
                parts.extend((start..end).step_by(UNIT_BYTES).map(|from| (from, ends(from), None)));
            }
        }
    }
    for parts in &mut shards {
        parts.sort_by_key(|(start, ..)| *start);
    }
    shards
}

/// Parts that lie side by side are read together.
fn add_units<'a>(shard: &Bytes, parts: Vec<Part<'a>>, units: &mut Vec<Unit<'a>>) {
    let mut stretch = 0..0;
    let mut checks: Vec<Scales> = Vec::new();
    let mut close = |stretch: std::ops::Range<usize>, checks: &mut Vec<Scales<'a>>| {
        // The header check holds every range inside its file.
        if let Some(bytes) = shard.slice(stretch).filter(|bytes| !bytes.is_empty()) {
            units.push(Unit { bytes, checks: std::mem::take(checks) });
        }
    };
    for (start, end, scales) in parts {
        if start > stretch.end + PAGE || end.max(stretch.end) - stretch.start > UNIT_BYTES {
            close(stretch, &mut checks);
            stretch = start..end;
        }
        stretch.end = stretch.end.max(end);
        checks.extend(scales);
    }
    close(stretch, &mut checks);
}
