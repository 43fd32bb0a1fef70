//! The machine around the GPUs: memory, power saving, processor.

use super::{NO_GPU, gib};
use crate::doctor::check::{Check, Subject, list};
use crate::doctor::facts::Facts;

pub fn power_saving(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "aspm",
        expected: "the kernel leaves the links awake (policy default or performance)",
        cost: "links that fall asleep answer later, and some go down for good",
        fix: "kernel command line: pcie_aspm=off pcie_port_pm=off; then restart",
        renter: false,
    };
    if !facts.has_gpu() {
        return IS.unknown(NO_GPU);
    }
    let cmdline = facts.view.text("proc/cmdline").unwrap_or_default();
    if cmdline.split_whitespace().any(|word| word == "pcie_aspm=off") {
        return IS.ok("off (pcie_aspm=off)");
    }
    let Some(text) = facts.view.text("sys/module/pcie_aspm/parameters/policy") else {
        return IS.unknown("the policy cannot be read");
    };
    match chosen(&text) {
        None => IS.unknown("the policy cannot be read"),
        Some(policy) if policy.starts_with("power") => IS.warn(format!("policy {policy}")),
        Some(policy) => IS.ok(format!("policy {policy}")),
    }
}

pub fn uvm(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "uvm-hmm",
        expected: "nvidia_uvm without heterogeneous memory (uvm_disable_hmm=1)",
        cost: "lock-ups of the driver were seen with it under peer-to-peer load",
        fix: "in /etc/modprobe.d: options nvidia_uvm uvm_disable_hmm=1, then restart",
        renter: false,
    };
    if !facts.has_gpu() {
        return IS.unknown(NO_GPU);
    }
    match facts.view.text("sys/module/nvidia_uvm/parameters/uvm_disable_hmm").as_deref() {
        Some("Y" | "1") => IS.ok("off"),
        Some("N" | "0") => IS.warn("on"),
        _ => IS.unknown("the parameter cannot be read"),
    }
}

/// MiB of a line of /proc/meminfo.
pub fn memory_mib(facts: &Facts, name: &str) -> Option<u64> {
    let text = facts.view.field("proc/meminfo", name, ':')?;
    Some(text.split_whitespace().next()?.parse::<u64>().ok()? / 1024)
}

pub fn memory(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "memory",
        expected: "memory for all weights, so that the next start reads none from the disk",
        cost: "each start reads the weights from the disk again: minutes instead of seconds",
        fix: "more memory, or a faster disk",
        renter: false,
    };
    let (Some(total), Some(free)) =
        (memory_mib(facts, "MemTotal"), memory_mib(facts, "MemAvailable"))
    else {
        return IS.unknown("/proc/meminfo cannot be read");
    };
    let value = format!("{}, {} free", gib(total), gib(free));
    match facts.weight_bytes().map(|bytes| bytes >> 20) {
        Some(weights) if total < weights => {
            IS.warn(format!("{value}; the weights are {}", gib(weights)))
        }
        Some(weights) if free < weights => IS
            .warn(format!("{value}; the weights are {}", gib(weights)))
            .by("end what holds the memory (after a crash: unload the driver, or restart)"),
        _ => IS.ok(value),
    }
}

pub fn memory_policy(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "memory-policy",
        expected: "no zone reclaim; no automatic NUMA balancing on several nodes; little swapped out",
        cost: "pages move or leave while the model runs: steps that take twice as long, now and then",
        fix: "sysctl vm.zone_reclaim_mode=0 kernel.numa_balancing=0 vm.swappiness=1",
        renter: false,
    };
    let view = &facts.view;
    let nodes = view.names("sys/devices/system/node");
    let nodes = nodes.iter().filter(|name| {
        name.strip_prefix("node").is_some_and(|number| number.parse::<u32>().is_ok())
    });
    let nodes = nodes.count();
    let (reclaim, balancing) = (
        view.number("proc/sys/vm/zone_reclaim_mode"),
        view.number("proc/sys/kernel/numa_balancing"),
    );
    let swap = memory_mib(facts, "SwapTotal").zip(memory_mib(facts, "SwapFree"));
    let swapped = swap.map(|(total, free)| total.saturating_sub(free));
    if reclaim.is_none() && balancing.is_none() && swap.is_none() {
        return IS.unknown("neither /proc/sys nor /proc/meminfo can be read");
    }
    let mut found: Vec<String> = Vec::new();
    if reclaim.is_some_and(|mode| mode != 0) {
        found.push("zone reclaim is on".into());
    }
    if balancing.is_some_and(|mode| mode != 0) && nodes > 1 {
        found.push(format!("NUMA balancing is on, with {nodes} nodes"));
    }
    if let Some(mib) = swapped.filter(|mib| *mib > 1024) {
        found.push(format!("{} swapped out", gib(mib)));
    }
    if found.is_empty() { IS.ok("as it should be") } else { IS.warn(list(&found)) }
}

pub fn governor(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "governor",
        expected: "cores that do not save power (governor performance)",
        cost: "launches jitter, files are read slower",
        fix: "cpupower frequency-set -g performance",
        renter: false,
    };
    let folder = "sys/devices/system/cpu";
    let mut found: Vec<String> = Vec::new();
    for core in facts.view.names(folder) {
        if let Some(name) = facts.view.text(&format!("{folder}/{core}/cpufreq/scaling_governor")) {
            found.push(name);
        }
    }
    found.sort();
    found.dedup();
    if found.is_empty() {
        return IS.unknown("no governor is shown here, as in a virtual machine");
    }
    let driver = facts.view.text(&format!("{folder}/cpu0/cpufreq/scaling_driver"));
    // Drivers with a will of their own only call their balanced mode so.
    let is_active = driver.is_some_and(|name| name == "intel_pstate" || name == "amd-pstate-epp");
    let saves =
        found.iter().any(|name| name == "powersave" && !is_active || name == "conservative");
    if saves && facts.has_gpu() { IS.warn(list(&found)) } else { IS.ok(list(&found)) }
}

pub fn virtual_machine(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "virtual",
        expected: "the machine itself",
        cost: "ports, links and IOMMU are hidden, peer-to-peer is often off; in WSL2 about 20 % slower",
        fix: "rent bare metal, or ask for a machine with peer-to-peer passed through",
        renter: false,
    };
    let version = facts.view.text("proc/version").unwrap_or_default().to_lowercase();
    if version.contains("microsoft") {
        return IS.warn("Windows subsystem (WSL2)");
    }
    let Some(cpuinfo) = facts.view.text("proc/cpuinfo") else {
        return IS.unknown("/proc/cpuinfo cannot be read");
    };
    let is_virtual =
        cpuinfo.lines().any(|line| line.starts_with("flags") && line.contains(" hypervisor"));
    let product = facts.view.text("sys/class/dmi/id/product_name");
    let product = product.map_or(String::new(), |name| format!(" ({name})"));
    match is_virtual {
        // Where there is no GPU to hide, it is worth no word.
        true if facts.has_gpu() => IS.warn(format!("a virtual machine{product}")),
        true => IS.ok(format!("a virtual machine{product}, without GPUs")),
        false => IS.ok(format!("the machine itself{product}")),
    }
}

pub fn huge_pages(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "huge-pages",
        expected: "no memory set aside as huge pages, of which talon uses none",
        cost: "what is set aside holds no weights",
        fix: "sysctl vm.nr_hugepages=0 (also in /etc/sysctl.d and on the kernel's command line)",
        renter: false,
    };
    let Some(count) = facts.view.field("proc/meminfo", "HugePages_Free", ':') else {
        return IS.unknown("/proc/meminfo does not tell");
    };
    let size_kib = facts.view.field("proc/meminfo", "Hugepagesize", ':');
    let size_kib = size_kib.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
    let Ok(count) = count.parse::<u64>() else {
        return IS.unknown("/proc/meminfo does not tell");
    };
    let mib = count.saturating_mul(size_kib.unwrap_or(2048)) >> 10;
    let transparent = facts.view.text("sys/kernel/mm/transparent_hugepage/enabled");
    let mode = transparent.as_deref().and_then(chosen).unwrap_or("not told");
    let value = format!("{} set aside and unused; transparent ones: {mode}", gib(mib));
    if mib >= 1024 { IS.warn(value) } else { IS.ok(value) }
}

/// "always [madvise] never" is madvise.
fn chosen(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0)
}

/// Microseconds that a core may take to wake up. 400 were seen added to each read of a file
/// (facts/users.md §4).
const LONG_WAKE_US: u64 = 300;

pub fn sleep_states(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "sleep-states",
        expected: "no core sleeps so deep that it wakes up later than 300 us",
        cost: "each read of a file, and each step's first launch, may wait that long",
        fix: "cpupower idle-set -D 100; or on the kernel's command line: processor.max_cstate=1",
        renter: false,
    };
    let folder = "sys/devices/system/cpu/cpu0/cpuidle";
    let states = facts.view.names(folder).into_iter().filter_map(|state| {
        let of = |file: &str| facts.view.text(&format!("{folder}/{state}/{file}"));
        let is_off = of("disable").is_some_and(|text| text != "0");
        let latency: u64 = of("latency")?.parse().ok()?;
        (!is_off).then(|| (latency, of("name").unwrap_or(state.clone())))
    });
    let Some((latency, name)) = states.max() else {
        return IS.unknown("no sleep state is shown here, as in a virtual machine");
    };
    let value = format!("{name}, {latency} us to wake up");
    if latency >= LONG_WAKE_US && facts.has_gpu() { IS.warn(value) } else { IS.ok(value) }
}
