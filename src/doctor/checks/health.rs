//! What slows a card down or is about to end it: power, clocks, heat, memory, the kernel's log.

use super::NO_GPU;
use super::gpus::{nothing, those};
use crate::cuda::{GpuState, Sample};
use crate::doctor::check::{Check, Status, Subject, list};
use crate::doctor::facts::Facts;

/// Clocks of one box differ by less than this under one load.
const CLOCK_SPREAD: f64 = 0.03;
/// Celsius.
const HOT: u32 = 85;
/// Reasons for low clocks that are faults: brakes and heat. A limit of the power is a setting.
const FAULTS: [&str; 4] = ["hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal"];
/// Messages of the driver (Xid) after which a card or the box must be restarted.
const FATAL_XIDS: [u32; 6] = [48, 79, 95, 119, 120, 154];

pub fn power(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "power-limit",
        expected: "the limit that is enforced is the card's own, the same for all",
        cost: "prefill slows down (400 to 600 W), decoding hardly (about 300 W); one card slows all",
        fix: "nvidia-smi -pl WATTS; a lower limit that nobody has set is a power cable or the supply",
        renter: false,
    };
    if let Some(why) = nothing(facts) {
        return IS.unknown(why);
    }
    let limits = limits(facts);
    if limits.is_empty() {
        return IS.unknown("NVML does not tell");
    }
    let lowered: Vec<String> = limits
        .iter()
        .filter(|(_, enforced, default)| default.is_some_and(|default| *enforced < default - 0.5))
        .map(|(gpu, enforced, default)| {
            format!("GPU {gpu}: {enforced:.0} of {:.0} W", default.unwrap_or(f64::NAN))
        })
        .collect();
    let differs = limits.iter().any(|(_, watts, _)| (watts - limits[0].1).abs() > 0.5);
    match (lowered.is_empty(), differs) {
        (true, false) => IS.ok(format!("{:.0} W", limits[0].1)),
        (true, true) => IS.warn(format!(
            "differs: {} W",
            list(&limits.iter().map(|(_, watts, _)| format!("{watts:.0}")).collect::<Vec<_>>())
        )),
        (false, _) => IS.warn(lowered.join("; ")),
    }
}

/// Of each GPU that tells: number, enforced limit, default.
fn limits(facts: &Facts) -> Vec<(usize, f64, Option<f64>)> {
    let of = |(index, gpu): (usize, &GpuState)| {
        Some((index, gpu.power_enforced_w?, gpu.power_default_w))
    };
    facts.nvml.gpus.iter().enumerate().filter_map(of).collect()
}

pub fn throttle(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "throttle",
        expected: "nothing holds a card's clocks down but its idleness or its power limit",
        cost: "that card runs at a fraction of its clock, and all others wait for it",
        fix: "hw_power_brake, hw_slowdown: power cable, its sense pins, the supply; thermal: fans, \
              air, dust",
        renter: false,
    };
    if let Some(why) = nothing(facts) {
        return IS.unknown(why);
    }
    let mut known = false;
    let mut found: Vec<String> = Vec::new();
    for (index, gpu) in facts.nvml.gpus.iter().enumerate() {
        let samples = [gpu.load.as_ref().map(|s| (s, " under load")), Some((&gpu.now, ""))];
        for (sample, when) in samples.into_iter().flatten() {
            let Some(reasons) = &sample.throttle else { continue };
            known = true;
            let faults: Vec<&String> =
                reasons.iter().filter(|reason| FAULTS.contains(&reason.as_str())).collect();
            if !faults.is_empty() {
                found.push(format!("GPU {index}: {}{when}", list(&faults)));
                break;
            }
        }
    }
    match (known, found.is_empty()) {
        (false, _) => IS.unknown("NVML does not tell"),
        (true, true) => IS.ok("nothing"),
        (true, false) => IS.fail(found.join("; ")),
    }
}

pub fn clocks(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "clocks",
        expected: "the same clocks on all cards under load, to 3 %",
        cost: "all cards wait for the slowest",
        fix: "nvidia-smi -q -d CLOCK,PERFORMANCE; undo locked clocks: nvidia-smi -rgc, -rmc",
        renter: false,
    };
    if let Some(why) = nothing(facts) {
        return IS.unknown(why);
    }
    let loads: Vec<&Sample> = facts.nvml.gpus.iter().filter_map(|gpu| gpu.load.as_ref()).collect();
    if loads.is_empty() {
        return IS.unknown("clocks count under load, which only talon doctor --deep looks at");
    }
    let offsets = those(facts, |gpu| {
        [gpu.sm_offset_mhz, gpu.memory_offset_mhz].iter().flatten().any(|offset| *offset != 0)
    });
    let mut value = Vec::new();
    let mut status = Status::Ok;
    type ClockOf = fn(&Sample) -> Option<u32>;
    let kinds: [(&str, ClockOf); 2] =
        [("SM", |sample| sample.sm_mhz), ("memory", |sample| sample.memory_mhz)];
    for (name, of) in kinds {
        let clocks: Vec<u32> = loads.iter().filter_map(|load| of(load)).collect();
        let (Some(least), Some(most)) = (clocks.iter().min(), clocks.iter().max()) else {
            continue;
        };
        if f64::from(most - least) > CLOCK_SPREAD * f64::from(*most) {
            status = Status::Warn;
        }
        value.push(match least == most {
            true => format!("{name} {least} MHz"),
            false => format!("{name} {least} to {most} MHz"),
        });
    }
    if value.is_empty() {
        return IS.unknown("NVML does not tell");
    }
    if !offsets.is_empty() {
        value.push(format!("offsets are set on GPU {}", list(&offsets)));
    }
    IS.found(status, value.join(", "))
}

pub fn temperature(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "temperature",
        expected: "below 85 C",
        cost: "clocks fall when it gets hotter",
        fix: "fans, air, dust; space between the cards",
        renter: false,
    };
    if let Some(why) = nothing(facts) {
        return IS.unknown(why);
    }
    let hottest = |gpu: &GpuState| {
        let load = gpu.load.as_ref().and_then(|load| load.temperature_c);
        load.max(gpu.now.temperature_c)
    };
    let Some(most) = facts.nvml.gpus.iter().filter_map(hottest).max() else {
        return IS.unknown("NVML does not tell");
    };
    let hot = those(facts, |gpu| hottest(gpu).is_some_and(|celsius| celsius >= HOT));
    match hot.is_empty() {
        true => IS.ok(format!("{most} C at most")),
        false => IS.warn(format!("{most} C at most; GPU {}", list(&hot))),
    }
}

pub fn memory_errors(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "gpu-memory",
        expected: "no uncorrected errors, nothing that waits to be replaced",
        cost: "wrong results or a process that ends in the middle of a step",
        fix: "nvidia-smi --gpu-reset -i N (or restart) replaces what waits; a card where that fails \
              must be exchanged",
        renter: false,
    };
    if let Some(why) = nothing(facts) {
        return IS.unknown(why);
    }
    let failed = those(facts, |gpu| gpu.remap_failure == Some(true));
    let waits = those(facts, |gpu| {
        gpu.remap_pending == Some(true) || gpu.retired_pages_pending == Some(true)
    });
    let wrong = those(facts, |gpu| gpu.ecc_uncorrected.is_some_and(|count| count > 0));
    let is_known = |gpu: &GpuState| gpu.ecc_uncorrected.is_some() || gpu.remap_pending.is_some();
    match (failed.is_empty(), waits.is_empty(), wrong.is_empty()) {
        (false, _, _) => IS.fail(format!("a replacement failed: GPU {}", list(&failed))),
        (_, false, _) => IS.fail(format!("a replacement waits for a reset: GPU {}", list(&waits))),
        (_, _, false) => IS.warn(format!("uncorrected errors: GPU {}", list(&wrong))),
        _ if facts.nvml.gpus.iter().any(is_known) => IS.ok("none"),
        _ => IS.unknown("NVML does not tell"),
    }
}

pub fn kernel_log(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "kernel-log",
        expected: "no Xid of the driver, no PCIe errors, no link down",
        cost: "79: a card fell off the bus; 119, 120: its firmware hangs; 154: it needs a reset; 31, \
               109: a process touched wrong memory or hung",
        fix: "dmesg | grep -e Xid -e AER; after 79, 119, 120, 154 restart the box, then look at power, \
              riser and slot",
        renter: false,
    };
    if !facts.has_gpu() {
        return IS.unknown(NO_GPU);
    }
    let text = facts.view.text("dev/kmsg").or_else(|| facts.view.text("var/log/dmesg"));
    let Some(text) = text else {
        return IS.unknown("needs root: the kernel's log is hidden from others");
    };
    let xids: Vec<u32> = text.lines().filter_map(xid).collect();
    let mut kinds = xids.clone();
    kinds.sort();
    kinds.dedup();
    let count = |words: &[&str]| {
        let has = |line: &&str| words.iter().all(|word| line.contains(word));
        text.lines().filter(has).count()
    };
    let (errors, down) = (count(&["AER:", "rror"]), count(&["pciehp", "Link Down"]));
    let mut value = Vec::new();
    if !kinds.is_empty() {
        value.push(format!("{} messages, Xid {}", xids.len(), list(&kinds)));
    }
    if errors > 0 {
        value.push(format!("{errors} PCIe errors"));
    }
    if down > 0 {
        value.push(format!("{down} times link down"));
    }
    if kinds.iter().any(|kind| FATAL_XIDS.contains(kind)) {
        IS.fail(value.join(", "))
    } else if value.is_empty() {
        IS.ok("none")
    } else {
        IS.warn(value.join(", "))
    }
}

/// "NVRM: Xid (PCI:0000:17:00): 79, ..." is 79.
fn xid(line: &str) -> Option<u32> {
    let (_, rest) = line.split_once("NVRM: Xid")?;
    let (_, rest) = rest.split_once("): ")?;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::xid;

    #[test]
    fn xids_are_read() {
        let line = "4,1,2,-;NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', GPU has fallen off";
        assert_eq!(xid(line), Some(79));
        assert_eq!(xid("NVRM: Xid (PCI:0000:17:00): x"), None);
        assert_eq!(xid("NVRM: loading"), None);
    }
}
