//! The box in a few words, for every report: figures without it cannot be compared.

use serde_json::{Value, json};

use super::root::{View, field};
use crate::cuda::{self, GpuStates};

/// CPU, memory, kernel, distribution and CUDA driver of this box. What cannot be read is null.
pub fn fingerprint() -> Value {
    of(&View::of_this_box(), &cuda::driver_summary())
}

/// The same of a recorded box.
pub(super) fn recorded(view: &View, nvml: &GpuStates) -> Value {
    let driver = match (&nvml.cuda_version, nvml.gpus.len()) {
        (None, _) => "not recorded".into(),
        (Some(version), 1) => format!("CUDA {version}, 1 device"),
        (Some(version), count) => format!("CUDA {version}, {count} devices"),
    };
    of(view, &driver)
}

fn of(view: &View, cuda_driver: &str) -> Value {
    let read = |path: &str| view.text(path);
    let cpuinfo = read("proc/cpuinfo").unwrap_or_default();
    let meminfo = read("proc/meminfo").unwrap_or_default();
    let os_release = read("etc/os-release").unwrap_or_default();
    let memory_kib = field(&meminfo, "MemTotal", ':')
        .and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    let cores = std::thread::available_parallelism().ok().map(usize::from);
    json!({
        "cpu": field(&cpuinfo, "model name", ':'),
        "cores": cores.filter(|_| !view.is_recorded()),
        "virtual": cpuinfo.lines().any(|line| line.starts_with("flags") && line.contains(" hypervisor")),
        "memory_mib": memory_kib.map(|kib| kib / 1024),
        "kernel": read("proc/sys/kernel/osrelease"),
        "os": field(&os_release, "PRETTY_NAME", '=').map(|name| name.trim_matches('"').to_owned()),
        "arch": std::env::consts::ARCH,
        "cuda_driver": cuda_driver,
    })
}

/// What tells that a figure with the fingerprint `there` is not of the box `here`, if anything does.
pub(super) fn difference(there: &Value, here: &Value) -> Option<String> {
    if !there.is_object() {
        return Some("it does not say on which box".into());
    }
    let differs = |name: &&str| there[*name] != here[*name];
    let name = ["cpu", "memory_mib", "kernel", "cuda_driver"].into_iter().find(differs)?;
    let word = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    Some(format!("{name} was {}, is {}", word(&there[name]), word(&here[name])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_box_has_a_core_and_is_itself() {
        let here = fingerprint();
        assert!(here["cores"].as_u64().is_some_and(|cores| cores > 0));
        assert_eq!(difference(&here, &here), None);
    }

    #[test]
    fn another_box_is_told_by_what_differs() {
        let of = |kernel: &str| json!({ "cpu": "x", "memory_mib": 7, "kernel": kernel });
        assert_eq!(difference(&of("6.8"), &of("6.9")).as_deref(), Some("kernel was 6.8, is 6.9"));
        assert!(difference(&Value::Null, &of("6.8")).is_some());
    }
}
