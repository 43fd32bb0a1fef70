//! The way from one GPU to another: where they meet, and who turns what passes there aside.

use super::NO_GPU;
use crate::doctor::check::{Check, Subject, list};
use crate::doctor::facts::Facts;
use crate::doctor::pci::{PciDevice, Redirection, place, redirection};

pub fn topology(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "topology",
        expected: "all GPUs near one processor, and neighbours in the order of the bus",
        cost: "28 to 42 GB/s between processors instead of 52 to 56; more traffic between groups",
        fix: "give the GPUs' order with --devices, one group after the other; cards in slots of one \
              processor are faster",
        renter: true,
    };
    let gpus = facts.pci_gpus();
    if gpus.is_empty() {
        return IS.unknown(if facts.has_gpu() { "no GPU in /sys/bus/pci" } else { NO_GPU });
    }
    let mut ports: Vec<&str> = Vec::new();
    let mut order: Vec<(usize, usize)> = Vec::new();
    for (index, gpu) in gpus.iter().enumerate() {
        let known = ports.iter().position(|port| *port == gpu.root_port());
        let group = known.unwrap_or_else(|| {
            ports.push(gpu.root_port());
            ports.len() - 1
        });
        order.push((group, index));
    }
    let nodes = numa_nodes(facts, &gpus);
    let sizes: Vec<usize> =
        (0..ports.len()).map(|port| order.iter().filter(|(of, _)| *of == port).count()).collect();
    let makers: Vec<String> = ports
        .iter()
        .zip(&sizes)
        .filter(|(_, size)| **size > 1)
        .filter_map(|(port, _)| {
            let below = gpus.iter().find(|gpu| gpu.root_port() == *port)?.above.get(1)?;
            Some(facts.pci.bridge(below)?.maker())
        })
        .collect();
    let mut value = match (gpus.len(), ports.len()) {
        (1, _) => "1 GPU".to_owned(),
        (count, groups) if groups == count => format!("{count} GPUs, each at the host"),
        (count, _) => format!("{count} GPUs, below ports of the host: {}", list(&sizes)),
    };
    if let Some(maker) = makers.first() {
        value += &format!(", switches of {maker}");
    }
    if nodes.len() > 1 {
        value += &format!(", near processors {}", list(&nodes));
    }
    let mut sorted = order.clone();
    sorted.sort();
    if sorted != order {
        let order: Vec<String> = sorted.iter().map(|(_, index)| index.to_string()).collect();
        return IS
            .warn(format!("{value}; groups are mixed in the order of the bus"))
            .by(format!("--devices {}", order.join(",")));
    }
    if nodes.len() > 1 { IS.warn(value) } else { IS.ok(value) }
}

/// Processors that the GPUs are near to.
pub fn numa_nodes(facts: &Facts, gpus: &[&PciDevice]) -> Vec<u64> {
    let node = |gpu: &&PciDevice| facts.view.number(&format!("{}/numa_node", place(&gpu.address)));
    let mut nodes: Vec<u64> = gpus.iter().filter_map(node).collect();
    nodes.sort();
    nodes.dedup();
    nodes
}

pub fn acs(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "acs",
        expected: "no port above a GPU redirects (access control services)",
        cost: "what goes from GPU to GPU goes up to the processor: half the bandwidth, and less \
               when all exchange",
        fix: "turn ACS off in the BIOS, or at each start: setpci -s ADDRESS ECAP_ACS+6.w=0000",
        renter: false,
    };
    let gpus = facts.pci_gpus();
    match gpus.len() {
        0 => return IS.unknown(if facts.has_gpu() { "no GPU in /sys/bus/pci" } else { NO_GPU }),
        1 => return IS.ok("one GPU, which passes nothing on"),
        _ => {}
    }
    let mut ports: Vec<&str> = gpus.iter().flat_map(|gpu| &gpu.above).map(String::as_str).collect();
    ports.retain(|port| facts.pci.bridge(port).is_some());
    ports.sort();
    ports.dedup();
    if ports.is_empty() {
        return IS.unknown("no port above the GPUs is shown here, as in a virtual machine");
    }
    let states: Vec<(&str, Redirection)> =
        ports.iter().map(|port| (*port, redirection(&facts.view, port))).collect();
    let of = |state: Redirection| -> Vec<&str> {
        states.iter().filter(|(_, found)| *found == state).map(|(port, _)| *port).collect()
    };
    let on = of(Redirection::On);
    if !on.is_empty() {
        let commands: Vec<String> =
            on.iter().map(|port| format!("setpci -s {port} ECAP_ACS+6.w=0000")).collect();
        return IS
            .fail(format!("on in {} of {} ports: {}", on.len(), ports.len(), list(&on)))
            .by(format!("turn ACS off in the BIOS, or at each start: {}", commands.join("; ")));
    }
    if !of(Redirection::Unreadable).is_empty() {
        return IS.unknown("needs root: the ports' registers are hidden from others");
    }
    IS.ok(format!("off in all {} ports", ports.len()))
}

pub fn iommu(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "iommu",
        expected: "off, or passing through",
        cost: "every access of a GPU to another is translated: hangs, wrong data, collapse when \
               several exchange",
        fix: "kernel command line: iommu=pt (or amd_iommu=off, intel_iommu=off), or off in the BIOS; \
              then restart",
        renter: false,
    };
    if !facts.has_gpu() {
        return IS.unknown(NO_GPU);
    }
    let view = &facts.view;
    let gpus = facts.pci_gpus();
    let kind = |gpu: &&PciDevice| view.text(&format!("{}/iommu_group/type", place(&gpu.address)));
    let kinds: Vec<String> = gpus.iter().filter_map(kind).collect();
    if let Some(translating) = kinds.iter().find(|kind| kind.starts_with("DMA")) {
        return IS.fail(format!("translating (type {translating})"));
    }
    if kinds.iter().any(|kind| kind == "identity") {
        return IS.ok("passing through");
    }
    let cmdline = view.text("proc/cmdline");
    let said = |words: &[&str]| {
        let all = cmdline.as_deref().unwrap_or_default();
        all.split_whitespace().find(|word| words.contains(word)).map(str::to_owned)
    };
    if view.exists("sys/class/iommu") {
        if view.names("sys/class/iommu").is_empty() {
            return IS.ok("off");
        }
        return match said(&["iommu=pt", "iommu.passthrough=1"]) {
            Some(word) => IS.ok(format!("passing through ({word})")),
            None => IS.unknown("on, and the type of the GPUs' groups cannot be read"),
        };
    }
    match said(&["iommu=off", "amd_iommu=off", "intel_iommu=off", "iommu=pt"]) {
        Some(word) => IS.ok(word),
        None => IS.unknown("neither /sys/class/iommu nor the kernel's command line tells"),
    }
}
