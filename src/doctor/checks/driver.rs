//! The driver: its version, whether module and libraries fit, and what it was told at its start.

use super::NO_GPU;
use crate::doctor::check::{Check, Subject};
use crate::doctor::facts::Facts;

/// The oldest driver that knows CUDA 13, which the kernels are made for.
const OLDEST: u32 = 580;

/// Folders in which distributions, containers and WSL put the driver's libraries.
const LIBRARIES: [&str; 6] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib/x86_64-linux-gnu",
    "usr/local/nvidia/lib64",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
];

pub fn driver(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "driver",
        expected: "NVIDIA driver 580 or later, loaded",
        cost: "talon does not run on the GPUs",
        fix: "install driver 580 or later with its open kernel modules, and restart",
        renter: false,
    };
    let Some(version) = module_version(facts) else {
        return match facts.gpus() {
            0 if !facts.has_gpu() => IS.unknown(NO_GPU),
            0 => IS.unknown("/proc/driver/nvidia/version holds no version"),
            _ if facts.nvml.driver_version.is_some() => {
                IS.unknown("/proc/driver/nvidia/version cannot be read")
            }
            gpus => IS.fail(format!("{gpus} NVIDIA GPUs on the bus, and no driver is loaded")),
        };
    };
    match major(&version) {
        Some(major) if major >= OLDEST => IS.ok(version),
        Some(_) => IS.fail(version),
        None => IS.unknown(format!("version {version:?} is no number")),
    }
}

pub fn driver_match(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "driver-match",
        expected: "kernel module and libraries of one version",
        cost: "the GPUs do not start, or only without peer access",
        fix: "restart the box: the driver was updated and the old module is still loaded (in a \
              container: start it anew, so that it gets the host's libraries)",
        renter: false,
    };
    let mismatch =
        facts.nvml.error.as_ref().filter(|error| error.to_lowercase().contains("mismatch"));
    if let Some(error) = mismatch {
        return IS.fail(format!("NVML: {error}"));
    }
    let Some(module) = module_version(facts) else {
        return IS.unknown(if facts.has_gpu() { "no module's version to read" } else { NO_GPU });
    };
    let mut libraries: Vec<String> = facts.nvml.driver_version.iter().cloned().collect();
    libraries.extend(libcuda_versions(facts));
    match libraries.iter().find(|version| **version != module) {
        Some(other) => IS.fail(format!("module {module}, library {other}")),
        None if libraries.is_empty() => IS.unknown("no libcuda.so was found to compare with"),
        None => IS.ok(format!("both {module}")),
    }
}

pub fn registry(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "peer-settings",
        expected: "between GPUs under different ports of the host: RMForceP2PType=1 and \
                   RMPcieP2PType=2 in the driver's RegistryDwords",
        cost: "the driver may carry what goes from GPU to GPU through the host's memory: 242 us \
               instead of 16 for an exchange of 114 KB",
        fix: "in /etc/modprobe.d: options nvidia NVreg_RegistryDwords=\"ForceP2P=0x11;\
              RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1\", \
              then restart",
        renter: false,
    };
    if !facts.has_gpu() {
        return IS.unknown(NO_GPU);
    }
    let gpus = facts.pci_gpus();
    let apart = gpus
        .iter()
        .enumerate()
        .any(|(index, gpu)| gpus[..index].iter().any(|other| gpu.meets(other).is_none()));
    let Some(text) = facts.view.text("proc/driver/nvidia/params") else {
        return IS.unknown("/proc/driver/nvidia/params cannot be read");
    };
    let line = text.lines().find_map(|line| line.trim().strip_prefix("RegistryDwords:"));
    let keys = line.unwrap_or_default().trim().trim_matches('"');
    let has = |key: &str, value: u64| {
        keys.split(';')
            .filter_map(|pair| pair.split_once('='))
            .any(|(name, found)| name.trim() == key && parse_number(found.trim()) == Some(value))
    };
    let shown = if keys.is_empty() { "none set" } else { keys };
    if !apart || (has("RMForceP2PType", 1) && has("RMPcieP2PType", 2)) {
        return IS.ok(shown);
    }
    IS.warn(format!("{shown}, and some GPUs meet only at the host"))
}

/// "0x11" or "17".
fn parse_number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The version of the module that is loaded.
pub fn module_version(facts: &Facts) -> Option<String> {
    let loaded = facts.view.text("sys/module/nvidia/version").filter(|text| is_version(text));
    loaded.or_else(|| {
        let text = facts.view.text("proc/driver/nvidia/version")?;
        let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
        line.split_whitespace().find(|word| is_version(word)).map(str::to_owned)
    })
}

/// Versions of the libcuda that the system has, by the names of the files.
fn libcuda_versions(facts: &Facts) -> Vec<String> {
    let names = LIBRARIES.iter().flat_map(|folder| facts.view.names(folder));
    let version = |name: String| Some(name.strip_prefix("libcuda.so.")?.to_owned());
    let mut versions: Vec<String> = names.filter_map(version).filter(|v| is_version(v)).collect();
    versions.sort();
    versions.dedup();
    versions
}

/// "580.95.05", and not "1".
fn is_version(text: &str) -> bool {
    text.contains('.') && text.split('.').all(|part| part.parse::<u32>().is_ok())
}

fn major(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}
