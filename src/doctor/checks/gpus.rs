//! The GPUs themselves, as NVML tells: which they are, how they are cut, and who else is on them.

use super::{NO_GPU, gib};
use crate::cuda::GpuState;
use crate::doctor::check::{Check, Subject, list};
use crate::doctor::facts::Facts;

/// What the kernels are made and measured for.
const CAPABILITY: (u32, u32) = (12, 0);
/// A GPU that is busy without doing anything, as after a hang: percent, and watts at most.
const SPINNING_PERCENT: u32 = 99;
const SPINNING_WATTS: f64 = 160.0;
/// Memory that a GPU without users may hold.
const IDLE_MIB: u64 = 1024;

/// Why these checks have nothing to say, if so.
pub fn nothing(facts: &Facts) -> Option<String> {
    match (facts.nvml.gpus.is_empty(), facts.has_gpu()) {
        (false, _) => None,
        (true, false) => Some(NO_GPU.into()),
        (true, true) => Some(facts.no_nvml()),
    }
}

/// GPUs of which something is true, by their numbers.
pub fn those(facts: &Facts, is_so: impl Fn(&GpuState) -> bool) -> Vec<usize> {
    let all = facts.nvml.gpus.iter().enumerate();
    all.filter(|(_, gpu)| is_so(gpu)).map(|(index, _)| index).collect()
}

/// Values of all GPUs, each once.
pub fn distinct<T: Ord + Clone>(facts: &Facts, of: impl Fn(&GpuState) -> Option<T>) -> Vec<T> {
    let mut values: Vec<T> = facts.nvml.gpus.iter().filter_map(of).collect();
    values.sort();
    values.dedup();
    values
}

pub fn gpus(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "gpus",
        expected: "1, 2, 4 or 8 GPUs of one kind with compute capability 12.0, firmware of one version",
        cost: "all wait for the slowest; other kinds were not measured",
        fix: "choose GPUs of one kind with --devices",
        renter: true,
    };
    if let Some(why) = nothing(facts) {
        return IS.unknown(why);
    }
    let count = facts.nvml.gpus.len();
    let names = distinct(facts, |gpu| gpu.name.clone());
    let capabilities = distinct(facts, |gpu| gpu.compute_capability);
    let memory = distinct(facts, |gpu| gpu.memory_total_mib);
    let mut value = format!("{count} x {}", list(&names));
    if let Some(least) = memory.first() {
        value += &format!(", {} each", gib(*least));
    }
    let dotted: Vec<String> =
        capabilities.iter().map(|(major, minor)| format!("{major}.{minor}")).collect();
    value += &format!(", compute capability {}", list(&dotted));
    let firmware = distinct(facts, |gpu| gpu.vbios.clone());
    if firmware.len() > 1 {
        value += &format!(", firmware {}", list(&firmware));
    }
    let is_usual = [1, 2, 4, 8].contains(&count)
        && names.len() <= 1
        && firmware.len() <= 1
        && capabilities.iter().all(|capability| *capability == CAPABILITY);
    if is_usual { IS.ok(value) } else { IS.warn(value) }
}

pub fn partition(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "gpu-mode",
        expected: "compute mode default (or exclusive), not cut into instances (MIG), ECC on",
        cost: "talon cannot start there, or sees a part of the card",
        fix: "nvidia-smi -c DEFAULT; nvidia-smi -mig 0; nvidia-smi -e 1",
        renter: false,
    };
    if let Some(why) = nothing(facts) {
        return IS.unknown(why);
    }
    let cut = those(facts, |gpu| gpu.mig == Some(true));
    let closed = those(facts, |gpu| gpu.compute_mode.as_deref() == Some("prohibited"));
    let no_ecc = those(facts, |gpu| gpu.ecc == Some(false));
    match (cut.is_empty(), closed.is_empty(), no_ecc.is_empty()) {
        (false, _, _) => IS.fail(format!("MIG is on: GPU {}", list(&cut))),
        (_, false, _) => IS.fail(format!("computing is prohibited: GPU {}", list(&closed))),
        (_, _, false) => IS.warn(format!("ECC is off: GPU {}", list(&no_ecc))),
        _ => IS.ok(list(&distinct(facts, |gpu| gpu.compute_mode.clone()))),
    }
}

pub fn peer_access(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "peer-access",
        expected: "each GPU may read and write each other's memory",
        cost: "exchanges go through the host's memory: several times slower",
        fix: "rent a box with peer-to-peer; or: open kernel modules, no virtual machine, IOMMU off, \
              the driver options of peer-settings",
        renter: false,
    };
    if let Some(why) = nothing(facts) {
        return IS.unknown(why);
    }
    if facts.nvml.gpus.len() == 1 {
        return IS.ok("one GPU, which needs none");
    }
    let denied =
        |status: &Option<String>| status.as_ref().filter(|status| *status != "ok").cloned();
    let mut pairs: Vec<String> = Vec::new();
    let mut reasons: Vec<String> = Vec::new();
    for peer in &facts.nvml.peers {
        if let Some(reason) = denied(&peer.read).or(denied(&peer.write)) {
            pairs.push(format!("{}-{}", peer.from, peer.to));
            reasons.push(reason);
        }
    }
    reasons.sort();
    reasons.dedup();
    let is_known = |peer: &crate::cuda::PeerState| peer.read.is_some() || peer.write.is_some();
    let known = facts.nvml.peers.iter().filter(|peer| is_known(peer)).count();
    match pairs.len() {
        0 if known == 0 => IS.unknown("NVML does not tell"),
        0 => IS.ok(format!("{known} of {known} pairs, says the driver")),
        // All pairs of eight cards are no news to anybody.
        count if count > 8 => {
            IS.fail(format!("{count} of {known} pairs may not ({})", list(&reasons)))
        }
        _ => IS.fail(format!("pairs {} may not ({})", list(&pairs), list(&reasons))),
    }
}

pub fn users(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "gpu-users",
        expected: "nobody else on the GPUs",
        cost: "less memory and less speed; a GPU that spins after a hang starts nothing any more",
        fix: "end those processes (nvidia-smi names them); a GPU that is busy without one: \
              nvidia-smi --gpu-reset -i N, or restart",
        renter: true,
    };
    if let Some(why) = nothing(facts) {
        return IS.unknown(why);
    }
    let has_none = |gpu: &GpuState| gpu.processes.as_ref().is_some_and(Vec::is_empty);
    let spinning = those(facts, |gpu| {
        has_none(gpu)
            && gpu.now.busy_percent.is_some_and(|percent| percent >= SPINNING_PERCENT)
            && gpu.now.power_w.is_some_and(|watts| watts < SPINNING_WATTS)
    });
    if !spinning.is_empty() {
        return IS.fail(format!("busy without a process: GPU {}", list(&spinning)));
    }
    let mut found: Vec<String> = Vec::new();
    for (index, gpu) in facts.nvml.gpus.iter().enumerate() {
        let pids: Vec<u32> = gpu.processes.iter().flatten().map(|process| process.pid).collect();
        let held = gpu.memory_used_mib.filter(|mib| *mib > IDLE_MIB);
        match (pids.is_empty(), held) {
            (true, None) => {}
            (true, Some(mib)) => {
                found.push(format!("GPU {index}: {} held, no process shown", gib(mib)))
            }
            (false, held) => {
                let held = held.map_or(String::new(), |mib| format!(", {} held", gib(mib)));
                found.push(format!("GPU {index}: process {}{held}", list(&pids)));
            }
        }
    }
    match found.is_empty() {
        true if facts.nvml.gpus.iter().all(|gpu| gpu.memory_used_mib.is_none()) => {
            IS.unknown("NVML does not tell")
        }
        true => IS.ok("nobody"),
        false => IS.warn(found.join("; ")),
    }
}

pub fn room(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "gpu-room",
        expected: "the model, its caches and graphs fit into what is free on each GPU",
        cost: "it is refused when it starts",
        fix: "free the GPUs (see gpu-users), more GPUs, a smaller --context, or --dense-weights fp8",
        renter: true,
    };
    if let Some(why) = nothing(facts) {
        return IS.unknown(why);
    }
    let Some(model) = &facts.model else {
        return IS.unknown("no checkpoint was named: --model DIR");
    };
    let (ranks, room) = match &model.room {
        None => return IS.unknown("NVML does not tell"),
        Some((ranks, Err(why))) => return IS.fail(format!("{ranks} ranks: {why}")),
        Some((ranks, Ok(room))) => (ranks, room),
    };
    let free = facts.nvml.gpus.iter().take(*ranks).map(|gpu| {
        let used = gpu.memory_used_mib.unwrap_or(0);
        gpu.memory_total_mib.map(|total| total.saturating_sub(used))
    });
    let Some(least) = free.collect::<Option<Vec<u64>>>().and_then(|free| free.into_iter().min())
    else {
        return IS.unknown("NVML does not tell");
    };
    let needed = room.bytes.div_ceil(1 << 20);
    let value = format!(
        "{needed} of {least} MiB on each of {ranks} GPUs, for one sequence of {} tokens",
        room.context
    );
    match needed.checked_sub(least) {
        None | Some(0) => IS.ok(value),
        Some(short) => IS.fail(format!("{value}: {short} MiB short")),
    }
}

pub fn persistence(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "persistence",
        expected: "on",
        cost: "seconds at each start, and settings are forgotten when the last user leaves",
        fix: "nvidia-smi -pm 1, or the service nvidia-persistenced",
        renter: false,
    };
    if let Some(why) = nothing(facts) {
        return IS.unknown(why);
    }
    let off = those(facts, |gpu| gpu.persistence == Some(false));
    match facts.nvml.gpus.iter().any(|gpu| gpu.persistence.is_some()) {
        false => IS.unknown("NVML does not tell"),
        true if off.is_empty() => IS.ok("on"),
        true => IS.warn(format!("off: GPU {}", list(&off))),
    }
}
