//! What `talon doctor --deep` has measured: how fast memory, host, links and disk are.

use super::NO_GPU;
use crate::doctor::check::{Check, Status, Subject, list};
use crate::doctor::deep::{Deep, GpuSpeed, Path};
use crate::doctor::expected::known_card;
use crate::doctor::facts::Facts;

/// GPUs of one box read their memory at rates that differ by less than this, and at least at this share
/// of what is known of the card.
const SPREAD: f64 = 0.03;
const SLOW_CARD: f64 = 0.92;
/// Share of a link's raw rate that copies to and from page-locked memory reach at least: 52 to 56 GB/s
/// of 63 are seen on good boxes.
const SLOW_COPY: f64 = 0.7;
/// Bytes a second of one lane of PCIe, by generation from 1 on.
const LANE: [f64; 6] = [0.25e9, 0.5e9, 0.985e9, 1.969e9, 3.938e9, 7.563e9];
/// Bytes a second from GPU to GPU: 52 to 56e9 are good, 26 to 28e9 are an x8 or Gen4 link, 31e9 a way
/// across processors (facts/users.md §4).
const SLOW_PATH: f64 = 40e9;
/// Microseconds of a load from another GPU: 0.4 to 2 are good, 14 is the way through the host.
const SLOW_DELAY_US: f64 = 3.0;
const STAGED_DELAY_US: f64 = 8.0;
/// Share of the slowest way alone that is left when all GPUs load at once; less is a collapse.
const COLLAPSE: f64 = 0.4;
/// Minutes of a cold load that are worth a word.
const LONG_LOAD_MINUTES: f64 = 15.0;

/// Why nothing is known of a part, if so.
fn unmeasured(facts: &Facts, part: &str) -> Option<String> {
    match &facts.measured.deep {
        None => Some("not measured: talon doctor --deep does it".into()),
        Some(deep) => deep.why_not(part).map(|why| format!("not measured: {why}")),
    }
}

/// What was measured of the GPUs, or why nothing was.
fn measured<'a>(facts: &'a Facts, part: &str) -> Result<&'a Deep, String> {
    let deep = facts.measured.deep.as_ref();
    if !facts.has_gpu()
        && deep.is_none_or(|deep| deep.gpus.is_empty() && deep.why_not(part).is_none())
    {
        return Err(NO_GPU.into());
    }
    match (deep, unmeasured(facts, part)) {
        (Some(deep), None) => Ok(deep),
        (_, why) => Err(why.unwrap_or_default()),
    }
}

/// "1.62 to 1.65 TB/s".
fn range(rates: &[f64], unit: f64, name: &str, digits: usize) -> String {
    let least = rates.iter().copied().fold(f64::INFINITY, f64::min) / unit;
    let most = rates.iter().copied().fold(0.0, f64::max) / unit;
    let (least, most) = (format!("{least:.digits$}"), format!("{most:.digits$}"));
    if least == most { format!("{least} {name}") } else { format!("{least} to {most} {name}") }
}

pub fn read_rate(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "read-rate",
        expected: "all GPUs read their memory at one rate, to 3 %; an RTX PRO 6000 at 1.6 TB/s",
        cost: "a step of one row is mostly the reading of weights, and all wait for the slowest card",
        fix: "see throttle, clocks, power-limit and gpu-users; a card that stays slower must be exchanged",
        renter: false,
    };
    let deep = match measured(facts, "gpus") {
        Ok(deep) => deep,
        Err(why) => return IS.unknown(why),
    };
    let rates: Vec<f64> = deep.gpus.iter().filter_map(|gpu| gpu.read).collect();
    let Some(most) = rates.iter().copied().max_by(f64::total_cmp) else {
        return IS.unknown("no rate was kept");
    };
    let value = range(&rates, 1e12, "TB/s", 2);
    let known = |gpu: &GpuSpeed| {
        let states = &facts.nvml.gpus;
        let state = states.iter().find(|state| state.pci.as_deref() == Some(&gpu.pci))?;
        known_card(state.name.as_deref()?)
    };
    let those = |is_slow: &dyn Fn(&GpuSpeed, f64) -> bool| -> Vec<String> {
        let slow = deep.gpus.iter().filter(|gpu| gpu.read.is_some_and(|rate| is_slow(gpu, rate)));
        slow.map(|gpu| facts.gpu_name(&gpu.pci)).collect()
    };
    let slow = those(&|gpu, rate| known(gpu).is_some_and(|known| rate < SLOW_CARD * known));
    let behind = those(&|_, rate| rate < (1.0 - SPREAD) * most);
    match (slow.is_empty(), behind.is_empty()) {
        (false, _) => IS.fail(format!("{value}; too slow for the card: {}", list(&slow))),
        (true, false) => IS.warn(format!("{value}; behind the others: {}", list(&behind))),
        (true, true) => IS.ok(value),
    }
}

pub fn host_copies(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "host-copies",
        expected: "between host and GPU 70 % of what its link can carry: 44 GB/s or more at Gen5 x16",
        cost: "loads take longer; so does every exchange that goes over that link",
        fix: "see link, link-errors, iommu and memory (a channel without a module halves the host's rate)",
        renter: false,
    };
    let deep = match measured(facts, "host") {
        Ok(deep) => deep,
        Err(why) => return IS.unknown(why),
    };
    let mut rates = Vec::new();
    let mut slow = Vec::new();
    for gpu in &deep.gpus {
        let state = facts.nvml.gpus.iter().find(|state| state.pci.as_deref() == Some(&gpu.pci));
        let raw = state.and_then(|state| {
            let generation = usize::try_from(state.pcie_gen_max?).ok()?;
            let lane = LANE.get(generation.checked_sub(1)?)?;
            Some(lane * f64::from(state.pcie_width_max?))
        });
        for (way, rate) in [("to", gpu.from_host), ("from", gpu.to_host)] {
            let Some(rate) = rate else { continue };
            rates.push(rate);
            if raw.is_some_and(|raw| rate < SLOW_COPY * raw) {
                let name = facts.gpu_name(&gpu.pci);
                slow.push(format!("{way} {name}: {:.1} GB/s", rate / 1e9));
            }
        }
    }
    match (rates.is_empty(), slow.is_empty()) {
        (true, _) => IS.unknown("no rate was kept"),
        (_, true) => IS.ok(range(&rates, 1e9, "GB/s", 1)),
        (_, false) => IS.warn(list(&slow)),
    }
}

pub fn peer_copies(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "peer-copies",
        expected: "from each GPU to each other the right bytes, 40 GB/s or more, a load in at most 3 us; and \
                   not much less when all copy at once",
        cost: "every exchange waits for the slowest pair; wrong bytes are wrong answers",
        fix: "see acs, iommu, link and peer-settings; other slots, or another order of --devices",
        renter: false,
    };
    if facts.gpus() == 1 {
        return IS.ok("one GPU, which copies to no other");
    }
    let deep = match measured(facts, "paths") {
        Ok(deep) => deep,
        Err(why) => return IS.unknown(why),
    };
    // CUDA may count them in another order than the bus does, as which all checks name them.
    let name = |index: usize| {
        let gpu = deep.gpus.get(index);
        gpu.map_or_else(|| format!("CUDA's GPU {index}"), |gpu| facts.gpu_name(&gpu.pci))
    };
    let way = |from: usize, to: usize| format!("{} to {}", name(from), name(to));
    let pair = |path: &Path| way(path.from, path.to);
    let faults: Vec<String> = deep
        .paths
        .iter()
        .filter_map(|path| Some(format!("{}: {}", pair(path), path.fault.as_ref()?)))
        .collect();
    match faults.len() {
        0 => {}
        1..=3 => return IS.fail(list(&faults)),
        count => return IS.fail(format!("{}, and {} pairs more", faults[0], count - 1)),
    }
    let least = |of: fn(&Path) -> Option<f64>| {
        let rates = deep.paths.iter().filter_map(|path| Some((path, of(path)?)));
        rates.min_by(|a, b| a.1.total_cmp(&b.1))
    };
    let delays = deep.paths.iter().filter_map(|path| Some((path, path.delay_us?)));
    let delay = delays.max_by(|a, b| a.1.total_cmp(&b.1));
    let (Some((slowest, load)), Some((latest, delay))) = (least(|path| path.load), delay) else {
        return IS.unknown("no rate was kept");
    };
    let mut value = format!(
        "loads {:.1} GB/s ({}) and {delay:.1} us ({}) at worst",
        load / 1e9,
        pair(slowest),
        pair(latest)
    );
    for (name, of) in
        [("copies", (|path| path.copy) as fn(&Path) -> Option<f64>), ("stores", |path| path.store)]
    {
        if let Some((path, rate)) = least(of) {
            value += &format!(", {name} {:.1} GB/s ({})", rate / 1e9, pair(path));
        }
    }
    if let Some(together) = &deep.together {
        let way = way(together.from, together.to);
        value += &format!(", all at once {:.1} GB/s ({way})", together.load / 1e9);
    }
    let collapses = deep.together.as_ref().is_some_and(|all| all.load < COLLAPSE * load);
    let status = match delay {
        delay if delay > STAGED_DELAY_US => Status::Fail,
        delay if delay > SLOW_DELAY_US || load < SLOW_PATH || collapses => Status::Warn,
        _ => Status::Ok,
    };
    IS.found(status, value)
}

pub fn disk_rate(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "disk-rate",
        expected: "a cold load within 15 minutes",
        cost: "each first start after a boot waits for it",
        fix: "put the checkpoint onto local NVMe; --deep shows which number of readers helps",
        renter: true,
    };
    let Some(model) = &facts.model else {
        return IS.unknown("no checkpoint was named: --model DIR");
    };
    if let Some(why) = unmeasured(facts, "disk") {
        return IS.unknown(why);
    }
    let Some(disk) = facts.measured.deep.as_ref().and_then(|deep| deep.disk.as_ref()) else {
        return IS.unknown("no rate was kept");
    };
    if model.folder != disk.folder {
        return IS.unknown(format!("not measured: {} was, the last time", disk.folder));
    }
    let Some((_, best)) = disk.rates.iter().max_by(|a, b| a.1.total_cmp(&b.1)) else {
        return IS.unknown("no rate was kept");
    };
    let rates: Vec<String> = disk
        .rates
        .iter()
        .map(|(readers, rate)| format!("{:.2} GB/s with {readers}", rate / 1e9))
        .collect();
    let minutes = model.bytes as f64 / best.max(1.0) / 60.0;
    let value = format!("{} readers; a cold load takes {minutes:.1} min", list(&rates));
    if minutes > LONG_LOAD_MINUTES { IS.warn(value) } else { IS.ok(value) }
}
