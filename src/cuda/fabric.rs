//! The ranks' mailboxes, and how each rank sees them (kernels/exchange.cuh).

use std::sync::Arc;
use std::time::Duration;

use super::kernel_set::require;
use super::layout::{Exchange, FAULT_BYTES, Injection, MAX_RANKS};
use super::{Arg, Device, DeviceMemory, Kernel, Launch, Module, Pinned, Stream};
use crate::comm::{Phase, Variant};
use crate::error::{Error, Result};

/// Threads and blocks of a copy by loads and stores.
const COPY_THREADS: u32 = 256;
const COPY_BLOCKS: u32 = 16;

/// What mailboxes have room for.
#[derive(Debug, Clone, Copy)]
pub struct FabricShape {
    /// Rows of a collective.
    pub rows: usize,
    /// Values of a row.
    pub hidden: usize,
}

/// What a test makes go wrong between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// A bit of the first packet to `peer`.
    Flip,
    /// The first packet to `peer`.
    Drop,
    /// The rank itself, for longer than anyone waits.
    Stall,
}

/// When and where it goes wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Mischief {
    /// What; `None` for delays only.
    pub damage: Option<Damage>,
    /// In which variant; `None` for all.
    pub variant: Option<Variant>,
    /// The rank that sends.
    pub rank: usize,
    /// The rank that it sends to.
    pub peer: usize,
    /// The collective.
    pub epoch: u64,
    /// Random waits before each part of a collective, at most this long.
    pub delay_ns: u32,
    /// Of the waits.
    pub seed: u32,
}

/// What a wait that timed out was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedOut {
    /// The rank that nothing came from.
    pub peer: usize,
    /// The part of the collective.
    pub phase: Phase,
    /// The row.
    pub row: usize,
    /// The collective.
    pub epoch: u64,
}

/// Where one kind of exchange has its place in a rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Region {
    /// Partial sums.
    Sums(Variant),
    /// The best ids of the ranks' parts of the vocabulary; in the host's memory if GPUs do not reach
    /// each other.
    Best {
        /// In the host's memory.
        staged: bool,
    },
}

/// Byte offsets of the regions.
#[derive(Debug, Clone, Copy)]
struct Regions {
    pull: usize,
    owner: usize,
    best: usize,
    end: usize,
    /// Bytes that are zero at first: pull's. All others begin empty, with all bits set.
    pull_bytes: usize,
    best_bytes: usize,
}

impl Regions {
    fn new(ranks: usize, shape: FabricShape) -> Self {
        let pad = |bytes: usize| bytes.next_multiple_of(256);
        let row = shape.hidden * size_of::<f32>();
        let share = (shape.hidden / 4).div_ceil(ranks) * 16;
        let push_bytes = pad(2 * ranks * shape.rows * row);
        let pull_bytes = pad(2 * shape.rows * row + ranks * shape.rows * 8);
        let owner_bytes = pad(2 * ranks * shape.rows * share + 2 * shape.rows * row);
        let best_bytes = pad(2 * ranks * shape.rows * 8);
        let owner = push_bytes + pull_bytes;
        let best = owner + owner_bytes;
        Self { pull: push_bytes, owner, best, end: best + best_bytes, pull_bytes, best_bytes }
    }
}

/// One rank's mailboxes.
struct Endpoint {
    /// Pull's, then the best ids.
    host: Pinned,
    fault: Pinned,
    memory: DeviceMemory,
    copy: Kernel,
    device: Arc<Device>,
}

/// The mailboxes of all ranks of one model.
pub struct Fabric {
    endpoints: Vec<Endpoint>,
    regions: Regions,
    shape: FabricShape,
    timeout: Duration,
    /// What tests make go wrong.
    mischief: Option<(Mischief, Pinned)>,
    reaches: Vec<Vec<bool>>,
}

impl Fabric {
    /// Opens the ways between the ranks' devices, in rank order, and empties all mailboxes. A wait
    /// ends with an error after `timeout`.
    ///
    /// # Errors
    /// Runtime error if a device has no memory for them.
    pub fn new(
        devices: &[Arc<Device>],
        shape: FabricShape,
        timeout: Duration,
        mischief: Option<Mischief>,
    ) -> Result<Self> {
        assert!(devices.len() <= MAX_RANKS, "argument parsing allows 8 ranks");
        let regions = Regions::new(devices.len(), shape);
        let endpoints = devices.iter().map(|device| {
            let module = Module::load(device, "peer_copy", require("peer_copy")?)?;
            Ok(Endpoint {
                host: Pinned::alloc(device, regions.pull_bytes + regions.best_bytes)?,
                fault: Pinned::alloc(device, FAULT_BYTES)?,
                memory: DeviceMemory::alloc(device, regions.end)?,
                copy: Arc::new(module).kernel("peer_copy")?,
                device: Arc::clone(device),
            })
        });
        let endpoints = endpoints.collect::<Result<Vec<_>>>()?;
        let reach = |from: &Arc<Device>| devices.iter().map(|to| from.reach(to)).collect();
        let reaches = devices.iter().map(reach).collect::<Result<_>>()?;
        let mischief = match (mischief, devices.first()) {
            (Some(mischief), Some(device)) => Some((mischief, pinned_mischief(device, &mischief)?)),
            _ => None,
        };
        let mut fabric = Self { endpoints, regions, shape, timeout, mischief, reaches };
        fabric.reset()?;
        Ok(fabric)
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.endpoints.len()
    }

    /// What the mailboxes have room for.
    pub fn shape(&self) -> FabricShape {
        self.shape
    }

    /// The device of a rank.
    pub fn device(&self, rank: usize) -> &Arc<Device> {
        &self.endpoints[rank].device
    }

    /// Whether kernels of one rank's device can touch another's memory, as the driver says.
    pub fn reaches(&self, from: usize, to: usize) -> bool {
        self.reaches[from][to]
    }

    /// Whether tests make something go wrong in a variant.
    pub fn has_mischief(&self, variant: Variant) -> bool {
        let mischief = self.mischief.as_ref();
        mischief.is_some_and(|(m, _)| m.variant.is_none_or(|only| only == variant))
    }

    /// Ranks on the device of `rank`.
    pub fn ranks_on_device(&self, rank: usize) -> usize {
        let ordinal = self.device(rank).ordinal();
        self.endpoints.iter().filter(|other| other.device.ordinal() == ordinal).count()
    }

    /// Blocks of a kernel that waits for other ranks. Where ranks share a device, all of these
    /// together leave half of its multiprocessors to the kernels that they wait for.
    pub fn blocks(&self, rank: usize, rows: usize) -> usize {
        match self.ranks_on_device(rank) {
            1 => rows,
            ranks => {
                let multiprocessors = self.device(rank).multiprocessors() as usize;
                rows.min(multiprocessors / (2 * ranks)).max(1)
            }
        }
    }

    /// What a kernel of `rank` takes for the `collective`-th exchange of a step; `control` is the
    /// rank's `Control`.
    pub fn exchange(
        &self,
        rank: usize,
        region: Region,
        control: u64,
        collective: u32,
        phases: i32,
    ) -> Exchange {
        let mut boxes = [0; MAX_RANKS];
        for (place, endpoint) in boxes.iter_mut().zip(&self.endpoints) {
            let (memory, host) = (endpoint.memory.address(), endpoint.host.address());
            *place = match region {
                Region::Sums(Variant::Push) => memory,
                Region::Sums(Variant::Pull) => memory + self.regions.pull as u64,
                Region::Sums(Variant::Owner) => memory + self.regions.owner as u64,
                Region::Sums(Variant::Staged) => host,
                Region::Best { staged: false } => memory + self.regions.best as u64,
                Region::Best { staged: true } => host + self.regions.pull_bytes as u64,
            };
        }
        Exchange {
            boxes,
            control,
            fault: self.endpoints[rank].fault.address(),
            injection: self.mischief.as_ref().map_or(0, |(_, pinned)| pinned.address()),
            trace: 0,
            timeout_ns: self.timeout.as_nanos() as u64,
            collective,
            rank: rank as i32,
            ranks: self.ranks() as i32,
            capacity: self.shape.rows as i32,
            phases,
            shared_device: i32::from(self.ranks_on_device(rank) > 1),
        }
    }

    /// The first wait of a rank that timed out, as far as it has been written.
    pub fn timed_out(&self, rank: usize) -> Option<TimedOut> {
        let bytes = self.endpoints[rank].fault.as_slice();
        let word = |at: usize| {
            i32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let epoch = bytes[16..24].try_into().map_or(0, u64::from_ne_bytes);
        (word(0) != 0).then(|| TimedOut {
            peer: word(4) as usize,
            phase: Phase::from_bit(word(8)).unwrap_or(Phase::Receive),
            row: word(12) as usize,
            epoch,
        })
    }

    /// The error for what [`Fabric::timed_out`] says.
    pub fn timeout_error(&self, rank: usize, what: TimedOut) -> Error {
        Error::runtime(format!(
            "rank {rank} ({}) waited {:.1} s for rank {} ({}): nothing came for row {}, phase {}, \
             collective {}; that rank has failed or the link between them does (talon version, \
             dmesg for Xid; --requalify tests the links)",
            self.device(rank),
            self.timeout.as_secs_f64(),
            what.peer,
            self.device(what.peer),
            what.row,
            what.phase,
            what.epoch
        ))
    }

    /// Empties all mailboxes and forgets what has failed; no kernel may be under way. Epochs begin
    /// at 1 again.
    ///
    /// # Errors
    /// Runtime error if a device fails.
    pub fn reset(&mut self) -> Result<()> {
        let regions = self.regions;
        for endpoint in &mut self.endpoints {
            let (stream, memory) = (Stream::new(&endpoint.device)?, endpoint.memory.address());
            let pull = memory + regions.pull as u64;
            stream.fill(memory, 0xFF, regions.end)?;
            stream.fill(pull, 0, regions.pull_bytes)?;
            endpoint.copy(&stream, pull, endpoint.host.address(), regions.pull_bytes)?;
            let best = endpoint.host.address() + regions.pull_bytes as u64;
            endpoint.copy(&stream, memory + regions.best as u64, best, regions.best_bytes)?;
            stream.synchronize()?;
            endpoint.fault.as_mut_slice().fill(0);
        }
        Ok(())
    }
}

impl Endpoint {
    /// Puts in a copy by loads and stores of this device.
    fn copy(&self, stream: &Stream, from: u64, to: u64, bytes: usize) -> Result<()> {
        let launch = Launch {
            grid: [COPY_BLOCKS, 1, 1],
            block: COPY_THREADS,
            shared_bytes: 0,
            dependent: false,
        };
        let packets = (bytes / 16) as i32;
        let args = [from.into(), to.into(), Arg::from(packets)];
        stream.launch(&self.copy, launch, &args)
    }
}

fn pinned_mischief(device: &Arc<Device>, mischief: &Mischief) -> Result<Pinned> {
    let injection = Injection {
        kind: mischief.damage.map_or(0, |damage| damage as i32 + 1),
        rank: mischief.rank as i32,
        peer: mischief.peer as i32,
        seed: mischief.seed,
        epoch: mischief.epoch,
        delay_ns: mischief.delay_ns,
        padding: 0,
    };
    let mut pinned = Pinned::alloc(device, size_of::<Injection>())?;
    let fields = [injection.kind, injection.rank, injection.peer].map(i32::to_ne_bytes);
    let mut bytes: Vec<u8> = fields.concat();
    bytes.extend(injection.seed.to_ne_bytes());
    bytes.extend(injection.epoch.to_ne_bytes());
    bytes.extend(injection.delay_ns.to_ne_bytes());
    bytes.extend(injection.padding.to_ne_bytes());
    pinned.as_mut_slice().copy_from_slice(&bytes);
    Ok(pinned)
}
