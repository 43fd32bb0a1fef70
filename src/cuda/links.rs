//! The links between the ranks' GPUs, as a start qualifies them and `talon kernels --comm` times them:
//! exchanges of the real kernels, without a model.

use std::sync::Arc;

use super::backend::RanksOptions;
use super::fabric::{Fabric, FabricShape, Region};
use super::kernel_set::{Exchanges, require};
use super::layout::{CONTROL_BYTES, Exchange, NormRows};
use super::{Arg, Device, DeviceMemory, Graph, Kernel, Launch, Module, Pinned, Stream};
use crate::comm::{Links, Phase, Plan, Times, Variant, Way, qualify};
use crate::error::{Error, Result};

/// Threads of a block that exchanges (reduce_norm.cu).
const EXCHANGE_THREADS: u32 = 768;
/// Exchanges of a graph that is timed. The first of them waits for the last rank's launch, and does
/// not count.
const CHAIN: usize = 101;

/// A rank's buffers.
struct End {
    control: u64,
    partial: u64,
    residual: u64,
    gain: u64,
    normed: u64,
    /// When each exchange of a chain ended, in nanoseconds.
    trace: u64,
    carried: u64,
    stream: Stream,
    exchanges: Exchanges,
    copy: Kernel,
    host: Pinned,
    _memory: DeviceMemory,
}

/// The ranks' ends, one thread driving all of them.
pub struct DeviceLinks<'a> {
    fabric: &'a mut Fabric,
    ends: Vec<End>,
    epoch: u64,
    /// Copies do nothing, and say that all is well: what a test makes of the driver.
    lies: bool,
}

/// Bytes that are carried at most.
const CARRIED_BYTES: usize = 1 << 20;

impl<'a> DeviceLinks<'a> {
    /// Takes buffers on every device for exchanges of the fabric's shape.
    ///
    /// # Errors
    /// Runtime error if a device has no memory for them.
    pub fn new(fabric: &'a mut Fabric, lies: bool) -> Result<Self> {
        let shape = fabric.shape();
        let ends = (0..fabric.ranks()).map(|rank| End::new(fabric.device(rank), shape));
        let ends = ends.collect::<Result<Vec<_>>>()?;
        Ok(Self { fabric, ends, epoch: 1, lies })
    }

    /// Puts a chain of exchanges into a rank's stream.
    fn launch(
        &self,
        rank: usize,
        variant: Variant,
        (rows, hidden): (usize, usize),
        chain: usize,
        trace: bool,
    ) -> Result<()> {
        let end = &self.ends[rank];
        let phases = variant.phases().iter().fold(0, |bits, phase: &Phase| bits | phase.bit());
        let norm = NormRows {
            partial: end.partial,
            residual: end.residual,
            gain: end.gain,
            normed: end.normed,
            eps: 1e-5,
            hidden: hidden as i32,
            rows: rows as i32,
            padding: 0,
        };
        for collective in 0..chain {
            let exchange = Exchange {
                trace: if trace { end.trace + (collective * 8) as u64 } else { 0 },
                ..self.fabric.exchange(
                    rank,
                    Region::Sums(variant),
                    end.control,
                    collective as u32,
                    phases,
                )
            };
            let launch = Launch {
                grid: [self.fabric.blocks(rank, rows.min(MOST_BLOCKS)) as u32, 1, 1],
                block: EXCHANGE_THREADS,
                shared_bytes: (hidden * size_of::<f32>()) as u32,
                dependent: collective > 0,
            };
            end.stream.launch(
                end.exchanges.of(variant, self.fabric.has_mischief(variant)),
                launch,
                &[Arg::of(&exchange), Arg::of(&norm)],
            )?;
        }
        Ok(())
    }

    /// Sets the epoch of a chain on all ranks; kernels read it before they wait for anything.
    fn begin(&mut self, chain: usize) -> Result<()> {
        for end in &self.ends {
            let mut control = [0; CONTROL_BYTES];
            control[..8].copy_from_slice(&self.epoch.to_ne_bytes());
            end.stream.upload(end.control, &control)?;
        }
        self.epoch += chain as u64;
        Ok(())
    }

    /// Waits for all ranks.
    fn finish(&self) -> Result<()> {
        self.ends.iter().try_for_each(|end| end.stream.synchronize())?;
        for rank in 0..self.ends.len() {
            if let Some(what) = self.fabric.timed_out(rank) {
                return Err(self.fabric.timeout_error(rank, what));
            }
        }
        Ok(())
    }

    /// Microseconds of each of at least `count` exchanges of `rows` rows of `hidden` values, one
    /// behind the other, as rank 0 sees them.
    ///
    /// # Errors
    /// Runtime error if a wait times out.
    pub fn durations(
        &mut self,
        variant: Variant,
        (rows, hidden): (usize, usize),
        count: usize,
    ) -> Result<Vec<f64>> {
        let record = |rank: usize| {
            self.ends[rank]
                .stream
                .capture(|_| self.launch(rank, variant, (rows, hidden), CHAIN, true))
        };
        let graphs = (0..self.ends.len()).map(record).collect::<Result<Vec<Graph>>>()?;
        let mut durations = Vec::with_capacity(count + CHAIN);
        while durations.len() < count {
            self.begin(CHAIN)?;
            for (graph, end) in graphs.iter().zip(&self.ends) {
                graph.launch(&end.stream)?;
            }
            self.finish()?;
            let mut bytes = vec![0; CHAIN * 8];
            self.ends[0].stream.download(self.ends[0].trace, &mut bytes)?;
            let ends = bytes.as_chunks::<8>().0.iter().map(|b| u64::from_ne_bytes(*b));
            let ends: Vec<u64> = ends.collect();
            durations
                .extend(ends.windows(2).map(|pair| pair[1].saturating_sub(pair[0]) as f64 / 1e3));
        }
        Ok(durations)
    }
}

/// Blocks of an exchange; each takes several rows of a large one.
const MOST_BLOCKS: usize = 16;

impl End {
    fn new(device: &Arc<Device>, shape: FabricShape) -> Result<Self> {
        let module = |stem: &str| Module::load(device, stem, require(stem)?);
        let values = shape.rows * shape.hidden;
        let sizes = [
            CONTROL_BYTES,
            values * 4,
            values * 4,
            shape.hidden * 4,
            values * 2,
            CHAIN * 8,
            CARRIED_BYTES,
        ];
        let sizes = sizes.map(|bytes| bytes.next_multiple_of(256));
        let memory = DeviceMemory::alloc(device, sizes.iter().sum())?;
        let mut next = memory.address();
        let [control, partial, residual, gain, normed, trace, carried] = sizes.map(|bytes| {
            let place = next;
            next += bytes as u64;
            place
        });
        let stream = Stream::new(device)?;
        stream.fill(memory.address(), 0, memory.len())?;
        let ones: Vec<u8> = (0..shape.hidden).flat_map(|_| 1.0f32.to_ne_bytes()).collect();
        stream.upload(gain, &ones)?;
        Ok(Self {
            control,
            partial,
            residual,
            gain,
            normed,
            trace,
            carried,
            exchanges: Exchanges::of_module(&Arc::new(module("reduce_norm")?))?,
            copy: Arc::new(module("peer_copy")?).kernel("peer_copy")?,
            host: Pinned::alloc(device, CARRIED_BYTES)?,
            stream,
            _memory: memory,
        })
    }
}

impl Links for DeviceLinks<'_> {
    fn ranks(&self) -> usize {
        self.ends.len()
    }

    fn reaches(&self, from: usize, to: usize) -> bool {
        self.fabric.reaches(from, to)
    }

    fn carry(&mut self, way: Way, from: usize, to: usize, words: &[u32]) -> Result<Vec<u32>> {
        let bytes = size_of_val(words);
        if bytes > CARRIED_BYTES {
            return Err(Error::runtime(format!("{bytes} bytes to carry: at most {CARRIED_BYTES}")));
        }
        let as_bytes = |flip: u32| -> Vec<u8> {
            words.iter().flat_map(|word| (word ^ flip).to_ne_bytes()).collect()
        };
        let (source, target) = (&self.ends[from], &self.ends[to]);
        source.stream.upload(source.carried, &as_bytes(0))?;
        // Nothing of what is there may be right by chance.
        target.stream.upload(target.carried, &as_bytes(!0))?;
        let (packets, grid) = ((bytes / 16) as i32, [16, 1, 1]);
        let launch = Launch { grid, block: 256, shared_bytes: 0, dependent: false };
        let args: [Arg; 3] = [source.carried.into(), target.carried.into(), packets.into()];
        match way {
            Way::Copy if self.lies => {}
            Way::Copy => target.stream.copy_between(target.carried, source.carried, bytes)?,
            Way::Load => target.stream.launch(&target.copy, launch, &args)?,
            Way::Store => source.stream.launch(&source.copy, launch, &args)?,
        }
        source.stream.synchronize()?;
        target.stream.synchronize()?;
        let mut arrived = vec![0; bytes];
        let end = &mut self.ends[to];
        end.stream.copy_from_device(&mut end.host, 0..bytes, end.carried)?;
        end.stream.synchronize()?;
        arrived.copy_from_slice(&end.host.as_slice()[..bytes]);
        Ok(arrived.as_chunks::<4>().0.iter().map(|b| u32::from_ne_bytes(*b)).collect())
    }

    fn reduce(
        &mut self,
        variant: Variant,
        rows: usize,
        partials: &[Vec<f32>],
    ) -> Result<Vec<Vec<f32>>> {
        let hidden = partials[0].len() / rows;
        for (end, partial) in self.ends.iter().zip(partials) {
            let bytes: Vec<u8> = partial.iter().flat_map(|value| value.to_ne_bytes()).collect();
            end.stream.fill(end.residual, 0, bytes.len())?;
            end.stream.upload(end.partial, &bytes)?;
        }
        self.begin(1)?;
        for rank in 0..self.ends.len() {
            self.launch(rank, variant, (rows, hidden), 1, false)?;
        }
        self.finish()?;
        let sums = self.ends.iter().map(|end| {
            let mut bytes = vec![0; rows * hidden * 4];
            end.stream.download(end.residual, &mut bytes)?;
            Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect())
        });
        sums.collect()
    }

    fn time(&mut self, variant: Variant, rows: usize, count: usize) -> Result<Times> {
        Ok(times_of(self.durations(variant, (rows, self.fabric.shape().hidden), count)?))
    }

    fn reset(&mut self) -> Result<()> {
        for end in &self.ends {
            end.stream.synchronize()?;
        }
        self.fabric.reset()?;
        self.epoch = 1;
        Ok(())
    }
}

/// Runs `count` exchanges of `rows` rows of `hidden` values, adding each to a residual, and compares
/// all ranks' residuals with the exact sum bit for bit: what tests put delays and damage into.
///
/// # Errors
/// Runtime error if a rank has another residual, or a wait times out.
pub fn exchange_many(
    options: &RanksOptions,
    variant: Variant,
    (rows, hidden): (usize, usize),
    count: usize,
) -> Result<()> {
    let devices: Vec<Arc<Device>> =
        options.devices.iter().map(|device| Device::open(*device)).collect::<Result<_>>()?;
    let shape = FabricShape { rows, hidden };
    let mut fabric = Fabric::new(&devices, shape, options.timeout, options.mischief)?;
    let mut links = DeviceLinks::new(&mut fabric, options.copies_lie)?;
    links.epoch = options.first_epoch;
    let value = |rank: usize, index: usize| ((index * 37 + rank * 11) % 101) as f32 / 64.0 - 0.75;
    let values = rows * hidden;
    let partials: Vec<Vec<f32>> =
        (0..links.ends.len()).map(|rank| (0..values).map(|i| value(rank, i)).collect()).collect();
    for (end, partial) in links.ends.iter().zip(&partials) {
        let bytes: Vec<u8> = partial.iter().flat_map(|value| value.to_ne_bytes()).collect();
        end.stream.upload(end.partial, &bytes)?;
    }
    let mut sums = partials[0].clone();
    for partial in &partials[1..] {
        sums.iter_mut().zip(partial).for_each(|(sum, value)| *sum += value);
    }
    let record = |rank: usize| {
        let end = &links.ends[rank];
        end.stream.capture(|_| links.launch(rank, variant, (rows, hidden), CHAIN, false))
    };
    let graphs = (0..links.ends.len()).map(record).collect::<Result<Vec<Graph>>>()?;
    let mut expected = vec![0.0f32; values];
    for _ in 0..count.div_ceil(CHAIN) {
        links.begin(CHAIN)?;
        for (graph, end) in graphs.iter().zip(&links.ends) {
            graph.launch(&end.stream)?;
        }
        links.finish()?;
        for _ in 0..CHAIN {
            expected.iter_mut().zip(&sums).for_each(|(total, sum)| *total += sum);
        }
        for (rank, end) in links.ends.iter().enumerate() {
            let mut bytes = vec![0; values * 4];
            end.stream.download(end.residual, &mut bytes)?;
            let found = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b));
            if let Some(at) = found.zip(&expected).position(|(a, b)| a.to_bits() != b.to_bits()) {
                return Err(Error::runtime(format!(
                    "{variant}: rank {rank} has a wrong sum at value {at} after collective {}",
                    links.epoch - 1
                )));
            }
        }
    }
    Ok(())
}

/// Median and worst of durations, of which there is at least one.
pub(super) fn times_of(mut durations: Vec<f64>) -> Times {
    durations.sort_by(f64::total_cmp);
    Times { median: durations[durations.len() / 2], worst: durations[durations.len() - 1] }
}

/// How long exchanges of one size take in one variant, or NCCL's all-reduces.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkTime {
    /// The variant's name, or `nccl`.
    pub name: &'static str,
    /// Bytes of a rank's partial sums.
    pub bytes: usize,
    /// Exchanges that were timed.
    pub count: usize,
    /// Microseconds of one.
    pub times: Times,
}

/// Sizes that are timed, in (rows, values of a row): 12 KiB to 8 MiB of f32.
pub(super) const SIZES: [(usize, usize); 9] = [
    (1, 3072),
    (1, 6144),
    (2, 6144),
    (4, 6144),
    (8, 6144),
    (16, 6144),
    (43, 6144),
    (128, 6144),
    (341, 6144),
];

/// Times at least `count` exchanges of each size in each variant that is right between these devices;
/// faults of those that are not go to `tell`.
///
/// # Errors
/// Input error if a device cannot be used; runtime error if no variant is right.
pub fn measure_links(
    devices: &[usize],
    count: usize,
    timeout: std::time::Duration,
    tell: &mut dyn FnMut(&str),
    progress: &dyn Fn(usize, usize),
) -> Result<Vec<LinkTime>> {
    let devices: Vec<Arc<Device>> =
        devices.iter().map(|device| Device::open(*device)).collect::<Result<_>>()?;
    let shape = FabricShape { rows: SIZES[SIZES.len() - 1].0, hidden: 6144 };
    let mut fabric = Fabric::new(&devices, shape, timeout, None)?;
    let mut links = DeviceLinks::new(&mut fabric, false)?;
    let plan = Plan { rows: &[1, 2, 4, 16, 341], hidden: 6144, known_sums: 2, timed: CHAIN };
    let right = qualify(&mut links, &plan, tell)?;
    let is_right = |variant: &Variant| right.times.iter().any(|(_, other, _)| other == variant);
    let variants: Vec<Variant> = Variant::ALL.into_iter().filter(is_right).collect();
    let mut times = Vec::new();
    for (rows, hidden) in SIZES {
        for variant in &variants {
            let durations = links.durations(*variant, (rows, hidden), count)?;
            times.push(LinkTime {
                name: variant.name(),
                bytes: rows * hidden * size_of::<f32>(),
                count: durations.len(),
                times: times_of(durations),
            });
            progress(1, SIZES.len() * variants.len());
        }
    }
    Ok(times)
}
