//! How fast a GPU by itself is, and the way from one to another: plain reads and copies, without a
//! model. What `talon doctor --deep` measures with.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::kernel_set::require;
use super::{Arg, Device, DeviceMemory, Event, Kernel, Launch, Module, Pinned, Stream};
use crate::error::{Error, Result};

/// Bytes of a read: at most, and where the device is too slow for more in [`PASS_MS`].
const MOST: usize = 1 << 30;
const LEAST: usize = 4 << 20;
/// A pass over that many takes about this long at most.
const PASS_MS: f64 = 10.0;
/// Pieces that are read in turn, so that nothing of one is in the cache from the turn before.
const PIECES: usize = 4;
/// Timings of a figure; the median counts.
const RUNS: usize = 5;
/// Threads of the kernels' blocks (read_roof.cu; peer_copy.cu takes any number), and enough blocks of
/// the copy to keep a link busy: each thread has 16 bytes under way.
const READ_THREADS: u32 = 512;
const COPY_THREADS: u32 = 256;
const COPY_BLOCKS: u32 = 256;
/// Bytes of a copy between host and device, or between devices: at most.
const COPIED: usize = 64 << 20;
/// Bytes of a copy that is compared.
const COMPARED: usize = 1 << 20;
/// Milliseconds from which on a copy between devices is timed once only.
const LONG_MS: f64 = 50.0;
/// Copies of 16 bytes, one behind the other, that a delay is taken from.
const CHAIN: usize = 200;

/// Which way bytes go between host and device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Toward {
    /// To the device.
    Device,
    /// To the host.
    Host,
}

/// The way from one GPU's memory to another's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathSpeed {
    /// Bytes a second of the driver's copies.
    pub copy: f64,
    /// Of loads of the receiving GPU.
    pub load: f64,
    /// Of stores of the sending GPU.
    pub store: f64,
    /// Microseconds by which one load from there takes longer than one from the GPU's own memory.
    pub delay_us: f64,
}

/// A GPU with what it is measured by.
pub struct Meter {
    stream: Stream,
    /// Copies beside the reads.
    copies: Stream,
    read: Kernel,
    copy: Kernel,
    /// Bytes of a piece, of which `memory` holds [`PIECES`]; behind them one place of 256 bytes.
    piece: usize,
    memory: DeviceMemory,
    host: Pinned,
    device: Arc<Device>,
}

impl Meter {
    /// Takes what is needed on GPU `ordinal`: 4 GiB of its memory at most, and 64 MiB of the host's.
    ///
    /// # Errors
    /// Input error if the GPU cannot be used; runtime error if it has no memory left.
    pub fn open(ordinal: usize) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let module = |stem: &str| Ok(Arc::new(Module::load(&device, stem, require(stem)?)?));
        let mut meter = Self {
            stream: Stream::new(&device)?,
            copies: Stream::new(&device)?,
            read: module("read_roof")?.kernel("read_roof")?,
            copy: module("peer_copy")?.kernel("peer_copy")?,
            piece: LEAST,
            memory: DeviceMemory::alloc(&device, PIECES * LEAST + 256)?,
            host: Pinned::alloc(&device, LEAST.min(COPIED))?,
            device,
        };
        // What a first launch takes is not a read's time.
        meter.passes(1, 2)?;
        let fits = PASS_MS / meter.passes(4, 2)?.max(1e-3) * 4.0 * LEAST as f64;
        let free = meter.device.free_bytes()? / (2 * PIECES);
        let piece = (fits as usize).clamp(LEAST, MOST).min(free.max(LEAST)) / 256 * 256;
        meter.memory = DeviceMemory::alloc(&meter.device, PIECES * piece + 256)?;
        meter.host = Pinned::alloc(&meter.device, piece.min(COPIED))?;
        meter.piece = piece;
        meter.stream.fill(meter.memory.address(), 0, meter.memory.len())?;
        meter.stream.synchronize()?;
        Ok(meter)
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes a second of the fastest plain read of its memory.
    ///
    /// # Errors
    /// Runtime error if the device fails.
    pub fn read_rate(&mut self) -> Result<f64> {
        let mut best: f64 = 0.0;
        for blocks in [1, 2, 4] {
            let count =
                (PASS_MS / self.passes(1, blocks)?.max(1e-3)).ceil().clamp(1.0, 64.0) as usize;
            let times =
                (0..RUNS).map(|_| self.passes(count, blocks)).collect::<Result<Vec<_>>>()?;
            best = best.max((count * self.piece) as f64 / (median(times) * 1e-3));
        }
        Ok(best)
    }

    /// Reads memory and copies from and to the host until `stop` is set: a load under which clocks and
    /// links are looked at.
    ///
    /// # Errors
    /// Runtime error if the device fails.
    pub fn work(&mut self, stop: &AtomicBool) -> Result<()> {
        let count = (PASS_MS / self.passes(1, 2)?.max(1e-3)).ceil().clamp(1.0, 64.0) as usize;
        let at = self.memory.address();
        while !stop.load(Ordering::Relaxed) {
            self.launch_reads(count, 2)?;
            let all = 0..self.host.len();
            self.copies.copy_to_device(at, &self.host, all.clone())?;
            self.copies.copy_from_device(&mut self.host, all, at)?;
            self.copies.synchronize()?;
            self.stream.synchronize()?;
        }
        Ok(())
    }

    /// Bytes a second between page-locked memory of the host and the device.
    ///
    /// # Errors
    /// Runtime error if the device fails.
    pub fn host_rate(&mut self, toward: Toward) -> Result<f64> {
        let (at, bytes) = (self.memory.address(), self.host.len());
        let (before, after) = (Event::new(&self.device)?, Event::new(&self.device)?);
        let mut run = || {
            before.record(&self.copies)?;
            match toward {
                Toward::Device => self.copies.copy_to_device(at, &self.host, 0..bytes)?,
                Toward::Host => self.copies.copy_from_device(&mut self.host, 0..bytes, at)?,
            }
            after.record(&self.copies)?;
            after.synchronize()?;
            Ok(f64::from(after.milliseconds_since(&before)?))
        };
        run()?;
        let times = (0..RUNS).map(|_| run()).collect::<Result<Vec<f64>>>()?;
        Ok(bytes as f64 / (median(times).max(1e-6) * 1e-3))
    }

    /// Milliseconds of that many reads of a piece.
    fn passes(&self, count: usize, blocks: u32) -> Result<f64> {
        self.timed(|| self.launch_reads(count, blocks))
    }

    fn launch_reads(&self, count: usize, blocks: u32) -> Result<()> {
        let grid = [self.device.multiprocessors() * blocks, 1, 1];
        let launch = Launch { grid, block: READ_THREADS, shared_bytes: 0, dependent: true };
        let sink = self.memory.address() + (PIECES * self.piece) as u64;
        (0..count).try_for_each(|pass| {
            let at = self.memory.address() + (pass % PIECES * self.piece) as u64;
            let packets = (self.piece / 16) as u64;
            self.stream.launch(&self.read, launch, &[at.into(), packets.into(), sink.into()])
        })
    }

    /// Milliseconds of what `work` puts into the stream.
    fn timed(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let (before, after) = (Event::new(&self.device)?, Event::new(&self.device)?);
        before.record(&self.stream)?;
        work()?;
        after.record(&self.stream)?;
        after.synchronize()?;
        Ok(f64::from(after.milliseconds_since(&before)?))
    }

    /// Puts in a copy by loads and stores of this device.
    fn launch_copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        let packets = bytes / 16;
        let blocks = (packets as u32).div_ceil(COPY_THREADS).clamp(1, COPY_BLOCKS);
        let launch =
            Launch { grid: [blocks, 1, 1], block: COPY_THREADS, shared_bytes: 0, dependent: false };
        self.stream.launch(&self.copy, launch, &[from.into(), to.into(), Arg::from(packets as i32)])
    }

    /// Where bytes of a copy lie before it, and where after it.
    fn source(&self) -> u64 {
        self.memory.address()
    }

    fn target(&self) -> u64 {
        self.memory.address() + (2 * self.piece) as u64
    }

    /// Bytes of a copy between this GPU and another.
    fn copied(&self, other: &Self) -> usize {
        self.piece.min(other.piece).min(COPIED)
    }
}

/// Measures the way from one GPU's memory to another's, each way of copying with known bytes first.
///
/// # Errors
/// Runtime error that says what is wrong with it.
pub fn measure_path(from: &Meter, to: &Meter) -> Result<PathSpeed> {
    if !to.device.reach(&from.device)? || !from.device.reach(&to.device)? {
        return Err(Error::runtime("no peer access, says the driver"));
    }
    let bytes = from.copied(to);
    let (source, target) = (from.source(), to.target());
    let copy = |bytes| to.stream.copy_between(target, source, bytes);
    let load = |bytes| to.launch_copy(source, target, bytes);
    let store = |bytes| from.launch_copy(source, target, bytes);
    let rate = |driver: &Meter, work: &dyn Fn(usize) -> Result<()>| {
        let first = driver.timed(|| work(bytes))?;
        let runs = if first > LONG_MS { 1 } else { RUNS };
        let times = (0..runs).map(|_| driver.timed(|| work(bytes)));
        let times = times.collect::<Result<Vec<f64>>>()?;
        Ok::<f64, Error>(bytes as f64 / (median(times).max(1e-6) * 1e-3))
    };
    compare(from, to, "copies", &|| copy(COMPARED), to)?;
    compare(from, to, "loads", &|| load(COMPARED), to)?;
    compare(from, to, "stores", &|| store(COMPARED), from)?;
    let chain =
        |from: u64| to.timed(|| (0..CHAIN).try_for_each(|_| to.launch_copy(from, target, 16)));
    chain(source)?;
    let delays = |from: u64| (0..RUNS).map(|_| chain(from)).collect::<Result<Vec<f64>>>();
    let (there, here) = (median(delays(source)?), median(delays(to.source())?));
    Ok(PathSpeed {
        copy: rate(to, &copy)?,
        load: rate(to, &load)?,
        store: rate(from, &store)?,
        delay_us: ((there - here) * 1e3 / CHAIN as f64).max(0.0),
    })
}

/// Refuses a way on which other bytes arrive than were sent.
fn compare(
    from: &Meter,
    to: &Meter,
    name: &str,
    work: &dyn Fn() -> Result<()>,
    driver: &Meter,
) -> Result<()> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let sent: Vec<u8> = (0..COMPARED / 8)
        .flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_ne_bytes()
        })
        .collect();
    let inverse: Vec<u8> = sent.iter().map(|byte| !byte).collect();
    from.stream.upload(from.source(), &sent)?;
    // Nothing of what is there may be right by chance.
    to.stream.upload(to.target(), &inverse)?;
    work()?;
    driver.stream.synchronize()?;
    let mut arrived = vec![0; COMPARED];
    to.stream.download(to.target(), &mut arrived)?;
    let wrong = sent.iter().zip(&arrived).filter(|(a, b)| a != b).count();
    match wrong {
        0 => Ok(()),
        COMPARED => Err(Error::runtime(format!("{name} report success and move nothing"))),
        _ => Err(Error::runtime(format!("{name}: {wrong} of {COMPARED} bytes arrive damaged"))),
    }
}

/// Bytes a second that each GPU loads from the one `distance` places behind it, all at once.
///
/// # Errors
/// Runtime error if a device fails.
pub fn measure_together(meters: &[Meter], distance: usize) -> Result<Vec<f64>> {
    let of = |index: usize| &meters[(index + distance) % meters.len()];
    let marks = meters
        .iter()
        .map(|meter| Ok((Event::new(&meter.device)?, Event::new(&meter.device)?)))
        .collect::<Result<Vec<_>>>()?;
    for (index, (meter, (before, after))) in meters.iter().zip(&marks).enumerate() {
        before.record(&meter.stream)?;
        for _ in 0..2 * RUNS {
            let bytes = meter.copied(of(index));
            meter.launch_copy(of(index).source(), meter.target(), bytes)?;
        }
        after.record(&meter.stream)?;
    }
    let rate = |(index, (meter, (before, after))): (usize, (&Meter, &(Event, Event)))| {
        after.synchronize()?;
        let milliseconds = f64::from(after.milliseconds_since(before)?).max(1e-6);
        Ok((2 * RUNS * meter.copied(of(index))) as f64 / (milliseconds * 1e-3))
    };
    meters.iter().zip(&marks).enumerate().map(rate).collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
