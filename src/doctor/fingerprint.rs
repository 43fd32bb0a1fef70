//! The box in a few words, for every report: figures without it cannot be compared.

use serde_json::{Value, json};

use super::root::field;
use crate::cuda;

/// CPU, memory, kernel, distribution and CUDA driver. What cannot be read is null.
pub fn fingerprint() -> Value {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let cpuinfo = read("/proc/cpuinfo").unwrap_or_default();
    let meminfo = read("/proc/meminfo").unwrap_or_default();
    let os_release = read("/etc/os-release").unwrap_or_default();
    let memory_kib = field(&meminfo, "MemTotal", ':')
        .and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    json!({
        "cpu": field(&cpuinfo, "model name", ':'),
        "cores": std::thread::available_parallelism().ok().map(usize::from),
        "virtual": cpuinfo.lines().any(|line| line.starts_with("flags") && line.contains(" hypervisor")),
        "memory_mib": memory_kib.map(|kib| kib / 1024),
        "kernel": read("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned()),
        "os": field(&os_release, "PRETTY_NAME", '=').map(|name| name.trim_matches('"').to_owned()),
        "arch": std::env::consts::ARCH,
        "cuda_driver": cuda::driver_summary(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_box_has_a_core() {
        assert!(fingerprint()["cores"].as_u64().is_some_and(|cores| cores > 0));
    }
}
