//! What is measured, in the order of its danger.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::disk::{self, Rates};
use super::runner::{Runner, Watch};
use super::{Deep, Disk, Exchange, GpuSpeed, Path, Together};
use crate::cuda::{
    self, Device, LinkTime, Meter, Nvml, PathSpeed, Sample, Toward, measure_links, measure_path,
    measure_together,
};
use crate::doctor::date::date;
use crate::error::Result;

/// How long each may take before it counts as hanging. A driver that is not kept awake takes seconds
/// for each GPU that is opened.
const OPEN: Duration = Duration::from_secs(60);
const USUAL: Duration = Duration::from_secs(20);
const EXCHANGES: Duration = Duration::from_secs(45);
/// How long pairs of GPUs may take together: where all are that slow, the first tell.
const ALL_PATHS: Duration = Duration::from_secs(30);
/// How long GPUs work before they are looked at, so that clocks and links have come up, and for how long
/// then.
const RAMP: Duration = Duration::from_millis(1200);
const LOOK: Duration = Duration::from_millis(1000);
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);
/// Exchanges of each size and variant.
const COUNT: usize = 200;
/// How long a rank waits for another.
const TIMEOUT: Duration = Duration::from_secs(3);
/// GPUs that can exchange.
pub(super) const MOST_RANKS: usize = 8;

/// What is to be measured.
pub struct Asked {
    /// The box, in comm's line.
    pub place: String,
    /// The folder of a model on the disk.
    pub model: Option<PathBuf>,
}

/// What has come of it.
pub struct Outcome {
    pub deep: Deep,
    /// What has not come back, and still holds a thread and maybe a GPU.
    pub hangs: Option<String>,
}

/// The GPUs under measurement. What hangs holds the lock, and nothing runs behind it.
type Meters = Arc<Mutex<Vec<Meter>>>;

fn lock(meters: &Meters) -> MutexGuard<'_, Vec<Meter>> {
    meters.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Measures all that can be on this box.
///
/// # Errors
/// Interrupted, if somebody wants it.
pub fn measure(asked: Asked, watch: &Watch) -> Result<Outcome> {
    let mut runner = Runner::new(Some(asked.place.clone()), watch);
    let mut deep = Deep { date: date(SystemTime::now()), place: asked.place, ..Deep::default() };
    let mut not = BTreeMap::new();
    let mut miss = |part: &str, why: String| {
        not.insert(part.to_owned(), why);
    };
    match asked.model {
        None => miss("disk", "no checkpoint on a disk was named: --model DIR".into()),
        Some(folder) => {
            let name = folder.display().to_string();
            let what = format!("reads of {name}");
            match runner.run(&what, USUAL, move || disk::measure(&folder))? {
                Ok(rates) => deep.disk = Some(Disk { folder: name, rates: rates as Rates }),
                Err(why) => miss("disk", why),
            }
        }
    }
    match open(&mut runner)? {
        Err(why) => {
            for part in ["gpus", "host", "paths", "exchanges"] {
                miss(part, why.clone());
            }
        }
        Ok((meters, addresses)) => {
            deep.gpus =
                addresses.into_iter().map(|pci| GpuSpeed { pci, ..GpuSpeed::default() }).collect();
            if let Err(why) = load_all(&mut runner, &meters, &mut deep.gpus)? {
                miss("gpus", why);
            }
            if let Err(why) = host_copies(&mut runner, &meters, &mut deep.gpus)? {
                miss("host", why);
            }
            match deep.gpus.len() {
                1 => {
                    for part in ["paths", "exchanges"] {
                        miss(part, "one GPU, which exchanges nothing".into());
                    }
                }
                count => {
                    if let Err(why) = paths(&mut runner, &meters, count, &mut deep)? {
                        miss("paths", why);
                    }
                    if let Err(why) = exchanges(&mut runner, count.min(MOST_RANKS), &mut deep)? {
                        miss("exchanges", why);
                    }
                }
            }
        }
    }
    deep.not_measured = not;
    Ok(Outcome { deep, hangs: runner.hangs().map(str::to_owned) })
}

/// The GPUs that CUDA shows, and their addresses.
fn open(runner: &mut Runner) -> Result<std::result::Result<(Meters, Vec<String>), String>> {
    let opened = runner.run("opening the GPUs", OPEN, || {
        let meters = (0..Device::count()?).map(Meter::open).collect::<Result<Vec<Meter>>>()?;
        let addresses = meters.iter().map(|meter| meter.device().pci_address());
        let addresses = addresses.collect::<Result<Vec<String>>>()?;
        Ok((Arc::new(Mutex::new(meters)), addresses))
    })?;
    Ok(opened.and_then(|(meters, addresses)| match addresses.is_empty() {
        true => Err(match cuda::driver_summary() {
            none if none.starts_with("not found") => {
                "no CUDA driver: libcuda.so.1 was not found".into()
            }
            _ => "CUDA shows no GPU".into(),
        }),
        false => Ok((meters, addresses)),
    }))
}

/// What a GPU did while all worked: its read rate, and what NVML told.
type Loaded = (f64, Option<Sample>);

fn load_all(
    runner: &mut Runner,
    meters: &Meters,
    gpus: &mut [GpuSpeed],
) -> Result<std::result::Result<(), String>> {
    let (meters, addresses) =
        (Arc::clone(meters), gpus.iter().map(|gpu| gpu.pci.clone()).collect::<Vec<String>>());
    let loaded = runner.run("reads on all GPUs at once", USUAL, move || {
        let mut meters = lock(&meters);
        let samples = sample_under_load(&mut meters)?;
        let rates: Vec<f64> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                meters.iter_mut().map(|meter| scope.spawn(move || meter.read_rate())).collect();
            threads.into_iter().map(join).collect::<Result<_>>()
        })?;
        let sample = |pci: &String| {
            let of = samples.iter().filter(|(address, _)| address == pci);
            let of: Vec<Sample> = of.map(|(_, sample)| sample.clone()).collect();
            (!of.is_empty()).then(|| under_load(&of))
        };
        Ok(rates.into_iter().zip(addresses.iter().map(sample)).collect::<Vec<Loaded>>())
    })?;
    Ok(loaded.map(|loaded| {
        for (gpu, (rate, sample)) in gpus.iter_mut().zip(loaded) {
            (gpu.read, gpu.load) = (Some(rate), sample);
        }
    }))
}

fn join<T>(thread: std::thread::ScopedJoinHandle<Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|_| Err(crate::error::Error::runtime("it ended in a panic")))
}

/// What NVML tells of each GPU, by its address, while all work; nothing where it cannot be asked.
fn sample_under_load(meters: &mut [Meter]) -> Result<Vec<(String, Sample)>> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        let threads: Vec<_> =
            meters.iter_mut().map(|meter| scope.spawn(move || meter.work(stop))).collect();
        let mut samples = Vec::new();
        if let Ok(nvml) = Nvml::start() {
            samples.extend(nvml.samples());
            std::thread::sleep(RAMP);
            let begin = Instant::now();
            while begin.elapsed() < LOOK {
                samples.extend(nvml.samples());
                std::thread::sleep(BETWEEN_LOOKS);
            }
        }
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().try_for_each(join)?;
        Ok(samples)
    })
}

/// One sample of those of a load, of which the first is from its beginning: there only what is counted
/// is looked at.
fn under_load(samples: &[Sample]) -> Sample {
    let later = &samples[1.min(samples.len() - 1)..];
    let most = |of: fn(&Sample) -> Option<u32>| later.iter().filter_map(of).max();
    let middle = |of: fn(&Sample) -> Option<u32>| {
        let mut values: Vec<u32> = later.iter().filter_map(of).collect();
        values.sort_unstable();
        values.get(values.len() / 2).copied()
    };
    let mut reasons: Vec<String> =
        later.iter().filter_map(|sample| sample.throttle.clone()).flatten().collect();
    reasons.sort();
    reasons.dedup();
    let replays = |sample: &Sample| sample.replays;
    let counted = samples.first().and_then(replays).zip(samples.last().and_then(replays));
    Sample {
        pcie_gen: most(|sample| sample.pcie_gen),
        pcie_width: most(|sample| sample.pcie_width),
        replays: counted.map(|(first, last)| last.saturating_sub(first)),
        power_w: later.iter().filter_map(|sample| sample.power_w).max_by(f64::total_cmp),
        temperature_c: most(|sample| sample.temperature_c),
        sm_mhz: middle(|sample| sample.sm_mhz),
        memory_mhz: middle(|sample| sample.memory_mhz),
        busy_percent: most(|sample| sample.busy_percent),
        throttle: later.iter().any(|sample| sample.throttle.is_some()).then_some(reasons),
    }
}

fn host_copies(
    runner: &mut Runner,
    meters: &Meters,
    gpus: &mut [GpuSpeed],
) -> Result<std::result::Result<(), String>> {
    for (index, gpu) in gpus.iter_mut().enumerate() {
        let meters = Arc::clone(meters);
        let what = format!("copies between the host and GPU {index}");
        let rates = runner.run(&what, USUAL, move || {
            let meter = &mut lock(&meters)[index];
            Ok((meter.host_rate(Toward::Device)?, meter.host_rate(Toward::Host)?))
        })?;
        match rates {
            Ok((from_host, to_host)) => {
                (gpu.from_host, gpu.to_host) = (Some(from_host), Some(to_host));
            }
            Err(why) => return Ok(Err(format!("GPU {index}: {why}"))),
        }
    }
    Ok(Ok(()))
}

/// All ordered pairs; a fault of one is its own. All at once only where each is right by itself.
fn paths(
    runner: &mut Runner,
    meters: &Meters,
    count: usize,
    deep: &mut Deep,
) -> Result<std::result::Result<(), String>> {
    let begin = Instant::now();
    for (from, to) in (0..count * count).map(|pair| (pair / count, pair % count)) {
        if from == to {
            continue;
        }
        let all = Arc::clone(meters);
        let what = format!("copies from GPU {from} to GPU {to}");
        let speed = runner.run(&what, USUAL, move || {
            let meters = lock(&all);
            measure_path(&meters[from], &meters[to])
        })?;
        deep.paths.push(path(from, to, speed));
        if runner.hangs().is_some() || begin.elapsed() > ALL_PATHS {
            return Ok(Ok(()));
        }
    }
    if deep.paths.iter().any(|path| path.fault.is_some()) {
        return Ok(Ok(()));
    }
    let all = Arc::clone(meters);
    let found = runner.run("copies between all GPUs at once", USUAL, move || {
        let meters = lock(&all);
        let mut slowest = Together { load: f64::INFINITY, ..Together::default() };
        for distance in 1..count {
            for (to, load) in measure_together(&meters, distance)?.into_iter().enumerate() {
                if load < slowest.load {
                    slowest = Together { from: (to + distance) % count, to, load };
                }
            }
        }
        Ok(slowest)
    })?;
    Ok(found.map(|slowest| deep.together = Some(slowest)))
}

fn path(from: usize, to: usize, speed: std::result::Result<PathSpeed, String>) -> Path {
    match speed {
        Err(fault) => Path { from, to, fault: Some(fault), ..Path::default() },
        Ok(speed) => Path {
            from,
            to,
            fault: None,
            copy: Some(speed.copy),
            load: Some(speed.load),
            store: Some(speed.store),
            delay_us: Some(speed.delay_us),
        },
    }
}

fn exchanges(
    runner: &mut Runner,
    ranks: usize,
    deep: &mut Deep,
) -> Result<std::result::Result<(), String>> {
    let timed = runner.run("exchanges between all GPUs", EXCHANGES, move || {
        let devices: Vec<usize> = (0..ranks).collect();
        let mut faults = Vec::new();
        let mut tell = |fault: &str| faults.push(fault.to_owned());
        let times = measure_links(&devices, COUNT, TIMEOUT, &mut tell, &|_, _| {})?;
        Ok((times, faults))
    })?;
    Ok(timed.map(|(times, faults)| {
        let exchange = |time: &LinkTime| Exchange {
            variant: time.name.to_owned(),
            bytes: time.bytes as u64,
            median_us: time.times.median,
            worst_us: time.times.worst,
        };
        deep.exchanges = times.iter().map(exchange).collect();
        deep.exchange_faults = faults;
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_its_later_samples_and_what_was_counted_during_it() {
        let sample = |generation, replays, sm_mhz, reason: &str| Sample {
            pcie_gen: Some(generation),
            replays: Some(replays),
            sm_mhz: Some(sm_mhz),
            throttle: Some(vec![reason.to_owned()]),
            ..Sample::default()
        };
        let samples = [
            sample(1, 100, 200, "idle"),
            sample(5, 100, 2600, "sw_power_cap"),
            sample(4, 102, 2500, "hw_power_brake"),
            sample(5, 107, 2400, "sw_power_cap"),
        ];
        let load = under_load(&samples);
        assert_eq!((load.pcie_gen, load.replays, load.sm_mhz), (Some(5), Some(7), Some(2500)));
        assert_eq!(load.throttle.unwrap(), ["hw_power_brake", "sw_power_cap"]);
        assert_eq!((load.power_w, load.pcie_width), (None, None));
        assert_eq!(under_load(&samples[..1]).pcie_gen, Some(1));
    }
}
