//! The links that GPUs are at. Idle links slow down to save power, so their speed counts only under
//! load; what they could do, and how wide they are, can be told at any time.

use super::NO_GPU;
use crate::cuda::{GpuState, Sample};
use crate::doctor::check::{Check, Status, Subject, list};
use crate::doctor::facts::Facts;
use crate::doctor::pci::{self, Link};

/// PCIe 5.0 with 16 lanes, as the card has.
const GENERATION: u32 = 5;
const WIDTH: u32 = 16;
/// Corrected errors since the start that are worth a word; a good link has none or few.
const MANY_CORRECTED: u64 = 1000;
/// Packets sent again under a load of seconds.
const MANY_REPLAYS: u64 = 100;

pub fn link(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "link",
        expected: "PCIe 5.0 x16 from each GPU to the host under load",
        cost: "26 to 28 GB/s instead of 52 to 56 for that GPU, and all others wait for it",
        fix: "put the card into an x16 slot of PCIe 5.0 and seat it anew; check riser, cable, and the \
              slot's settings in the BIOS (x8x8, Gen4)",
        renter: false,
    };
    let gpus = facts.pci_gpus();
    if gpus.is_empty() && facts.nvml.gpus.is_empty() {
        return IS.unknown(if facts.has_gpu() { "no GPU is shown" } else { NO_GPU });
    }
    let mut found: Vec<(Status, String)> = Vec::new();
    let mut known = 0;
    let mut loaded: Option<(u32, u32)> = None;
    for gpu in &facts.nvml.gpus {
        let Some(load) = &gpu.load else { continue };
        let (Some(generation), Some(width)) = (load.pcie_gen, load.pcie_width) else { continue };
        known += 1;
        let (least, narrowest) = loaded.unwrap_or((generation, width));
        loaded = Some((least.min(generation), narrowest.min(width)));
        let best = gpu.pcie_gen_max.unwrap_or(GENERATION).min(GENERATION);
        if generation < best || width < WIDTH {
            let name = facts.gpu_name(gpu.pci.as_deref().unwrap_or("?"));
            found
                .push((Status::Fail, format!("{name} ran at Gen{generation} x{width} under load")));
        }
    }
    for gpu in &gpus {
        let hops: Vec<(String, Link)> = gpu
            .above
            .iter()
            // A root port's own state is that of the link below it.
            .filter(|address| facts.pci.bridge(address).is_some())
            .chain([&gpu.address])
            .map(|address| (address.clone(), pci::link(&facts.view, address)))
            .collect();
        let name = facts.gpu_name(&gpu.address);
        if hops.last().is_some_and(|(_, link)| link.width.is_some()) {
            known += 1;
        }
        for (address, link) in &hops {
            let place = if *address == gpu.address {
                format!("{name}'s link")
            } else {
                format!("the link of port {address} above {name}")
            };
            if link.max_generation.is_some_and(|max| max < GENERATION)
                || link.max_width.is_some_and(|max| max < WIDTH)
            {
                let max = |n: Option<u32>| n.map_or("?".to_owned(), |n| n.to_string());
                let (generation, width) = (max(link.max_generation), max(link.max_width));
                found.push((
                    Status::Warn,
                    format!("{place} can do no more than Gen{generation} x{width}"),
                ));
            } else if let (Some(now), Some(max)) = (link.width, link.max_width)
                && now < max
            {
                found.push((Status::Warn, format!("{place} has {now} of {max} lanes")));
            }
        }
    }
    found.sort();
    found.dedup();
    // Under load a narrow link fails; that its slot is one says the same again.
    let worst = found.first().map(|(status, _)| *status);
    let texts: Vec<String> = found
        .iter()
        .filter(|(status, _)| Some(*status) == worst)
        .map(|(_, text)| text.clone())
        .collect();
    match (worst, loaded) {
        (Some(status), _) => IS.found(status, list(&texts)),
        (None, Some((generation, width))) => IS.ok(format!("Gen{generation} x{width} under load")),
        (None, None) if known == 0 => IS.unknown("no link's state can be read"),
        (None, None) => {
            IS.ok("x16, and able to run at Gen5 (the speed of an idle link says nothing)")
        }
    }
}

pub fn link_errors(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "link-errors",
        expected: "no errors that were not corrected, and few that were",
        cost: "packets are sent again until the link fails, which kills the process or the box",
        fix: "seat the card anew, replace riser or cable; run the slot at Gen4 if nothing helps",
        renter: false,
    };
    let gpus = facts.pci_gpus();
    let mut addresses: Vec<&String> =
        gpus.iter().flat_map(|gpu| gpu.above.iter().chain([&gpu.address])).collect();
    addresses.sort();
    addresses.dedup();
    let mut found: Vec<(Status, String)> = Vec::new();
    let mut known = 0;
    for address in addresses {
        let Some([corrected, nonfatal, fatal]) = pci::error_counts(&facts.view, address) else {
            continue;
        };
        known += 1;
        let name = facts.gpu_name(address);
        if fatal > 0 {
            found.push((Status::Fail, format!("{name}: {fatal} fatal errors")));
        }
        if nonfatal > 0 {
            found.push((Status::Warn, format!("{name}: {nonfatal} errors not corrected")));
        }
        if corrected >= MANY_CORRECTED {
            found.push((Status::Warn, format!("{name}: {corrected} corrected errors")));
        }
    }
    let replays = |of: fn(&GpuState) -> Option<&Sample>, gpu| of(gpu).and_then(|s| s.replays);
    for gpu in &facts.nvml.gpus {
        let name = facts.gpu_name(gpu.pci.as_deref().unwrap_or("?"));
        known += usize::from(gpu.now.replays.is_some());
        if let Some(count) = replays(|gpu| gpu.load.as_ref(), gpu)
            && count >= MANY_REPLAYS
        {
            found.push((Status::Fail, format!("{name}: {count} packets sent again under load")));
        } else if let Some(count) = replays(|gpu| Some(&gpu.now), gpu)
            && count >= MANY_CORRECTED
        {
            found.push((
                Status::Warn,
                format!("{name}: {count} packets sent again since its start"),
            ));
        }
    }
    found.sort();
    match found.first() {
        Some((status, _)) => {
            let texts: Vec<&str> = found.iter().map(|(_, text)| text.as_str()).collect();
            IS.found(*status, list(&texts))
        }
        None if known == 0 && !facts.has_gpu() => IS.unknown(NO_GPU),
        None if known == 0 => IS.unknown("neither /sys nor NVML counts errors here"),
        None => IS.ok("few or none"),
    }
}

pub fn bar1(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "bar1",
        expected: "a window to the GPU's whole memory (BAR1, resizable)",
        cost: "GPUs cannot reach each other's memory",
        fix: "BIOS: Above 4G Decoding and Resizable BAR on; driver option EnableResizableBar=1",
        renter: false,
    };
    let mut small: Vec<String> = Vec::new();
    let mut sizes: Vec<u64> = Vec::new();
    let mut judge = |name: String, mib: u64, memory: Option<u64>| {
        sizes.push(mib);
        // Without knowing the memory, only what no card of this kind has is surely too small.
        if mib < memory.unwrap_or(1 << 14) {
            small.push(format!("{name}: {mib} MiB"));
        }
    };
    if facts.nvml.gpus.iter().any(|gpu| gpu.bar1_total_mib.is_some()) {
        for gpu in &facts.nvml.gpus {
            let name = facts.gpu_name(gpu.pci.as_deref().unwrap_or("?"));
            if let Some(mib) = gpu.bar1_total_mib {
                judge(name, mib, gpu.memory_total_mib);
            }
        }
    } else {
        for gpu in facts.pci_gpus() {
            let windows = pci::windows(&facts.view, &gpu.address);
            if let Some(bytes) = windows.and_then(|windows| windows.get(1).copied()) {
                judge(facts.gpu_name(&gpu.address), bytes >> 20, None);
            }
        }
    }
    match (small.is_empty(), sizes.iter().min()) {
        (false, _) => IS.fail(list(&small)),
        (true, Some(least)) => IS.ok(format!("{least} MiB")),
        (true, None) if !facts.has_gpu() => IS.unknown(NO_GPU),
        (true, None) => IS.unknown("neither NVML nor /sys tells its size"),
    }
}
