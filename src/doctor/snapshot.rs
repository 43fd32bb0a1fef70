//! What decides whether a box runs as it did: recorded as a flat list of names and values, and compared
//! with an earlier list. Toolkits and Python stacks are listed since they are installed without a word;
//! talon uses none of them.

use serde_json::{Map, Value, json};

use super::facts::{Facts, number};
use super::pci::{link, place};
use crate::error::{Error, Result};

const SCHEMA: u64 = 1;
/// Folders that hold packages of Python's, where `python3.N` stands for each of the box's.
const PACKAGES: [&str; 5] = [
    "usr/lib/python3/dist-packages",
    "usr/local/lib/python3.N/dist-packages",
    "usr/local/lib/python3.N/site-packages",
    "opt/conda/lib/python3.N/site-packages",
    "opt/venv/lib/python3.N/site-packages",
];
/// Packages that other engines stand on.
const STACK: [&str; 8] = [
    "torch",
    "vllm",
    "sglang",
    "flashinfer_python",
    "transformers",
    "triton",
    "nvidia_nccl_cu13",
    "nvidia_nccl_cu12",
];
/// Names of variables that change how CUDA or NCCL runs begin so.
const VARIABLES: [&str; 4] = ["CUDA_", "NCCL_", "NVIDIA_", "LD_LIBRARY_PATH"];

/// The list for a box; `model` is what identifies a checkpoint, if one was named.
pub fn snapshot(facts: &Facts, model: &Map<String, Value>) -> Value {
    let mut all = Map::new();
    let mut put = |name: String, value: Value| {
        if !value.is_null() {
            all.insert(name, value);
        }
    };
    let view = &facts.view;
    put("talon.version".into(), env!("CARGO_PKG_VERSION").into());
    put("talon.commit".into(), env!("TALON_COMMIT").into());
    for (name, value) in model {
        put(format!("model.{name}"), value.clone());
    }
    for (name, file) in [
        ("kernel", "proc/sys/kernel/osrelease"),
        ("kernel.command_line", "proc/cmdline"),
        ("driver.module", "sys/module/nvidia/version"),
        ("driver.parameters", "proc/driver/nvidia/params"),
        ("board", "sys/class/dmi/id/board_name"),
        ("board.bios", "sys/class/dmi/id/bios_version"),
    ] {
        put(name.into(), view.text(file).into());
    }
    let os = view.field("etc/os-release", "PRETTY_NAME", '=');
    put("os".into(), os.map(|name| name.trim_matches('"').to_owned()).into());
    put("cpu".into(), view.field("proc/cpuinfo", "model name", ':').into());
    put("memory".into(), view.field("proc/meminfo", "MemTotal", ':').into());
    put("driver.nvml".into(), facts.nvml.driver_version.clone().into());
    put("driver.cuda".into(), facts.nvml.cuda_version.clone().into());
    for gpu in facts.pci_gpus() {
        put(format!("bus.{}.below", gpu.address), gpu.above.join(" / ").into());
        put(format!("bus.{}.lanes", gpu.address), link(view, &gpu.address).width.into());
        let group = format!("{}/iommu_group/type", place(&gpu.address));
        put(format!("bus.{}.iommu", gpu.address), view.text(&group).into());
    }
    for (index, gpu) in facts.nvml.gpus.iter().enumerate() {
        let fields = serde_json::to_value(gpu).unwrap_or_default();
        for (field, value) in fields.as_object().into_iter().flatten() {
            // What it does at the moment says nothing of what it is.
            let passing = ["now", "load", "processes", "memory_used_mib", "ecc_uncorrected"];
            if !passing.contains(&field.as_str()) {
                put(format!("gpu.{index}.{field}"), value.clone());
            }
        }
    }
    for speed in facts.measured.deep.iter().flat_map(|deep| &deep.gpus) {
        put(format!("measured.{}.read", speed.pci), speed.read.into());
        put(format!("measured.{}.from_host", speed.pci), speed.from_host.into());
        put(format!("measured.{}.to_host", speed.pci), speed.to_host.into());
    }
    for path in facts.measured.deep.iter().flat_map(|deep| &deep.paths) {
        put(format!("measured.gpu.{}.to.{}", path.from, path.to), path.load.into());
    }
    if let Some(links) = &facts.measured.links {
        put("measured.exchange.us".into(), links.microseconds(1).into());
        put("exchange.variant".into(), links.variant(1).into());
    }
    for (name, value) in view.variables() {
        if VARIABLES.iter().any(|begin| name.starts_with(begin)) {
            put(format!("environment.{name}"), value.into());
        }
    }
    for name in view.names("usr/local").iter().filter(|name| name.starts_with("cuda")) {
        let version = view.bytes(&format!("usr/local/{name}/version.json"));
        let version = version.and_then(|text| serde_json::from_slice::<Value>(&text).ok());
        let version = version.map_or(Value::Null, |version| version["cuda"]["version"].clone());
        let shown = if version.is_null() { "present".into() } else { version };
        put(format!("toolkit./usr/local/{name}"), shown);
    }
    for folder in package_folders(facts) {
        for name in view.names(&folder) {
            let Some((package, version)) = package(&name) else { continue };
            put(format!("python./{folder}/{package}"), version.into());
        }
    }
    json!({ "schema": SCHEMA, "box": all })
}

/// Folders of packages that there are.
fn package_folders(facts: &Facts) -> Vec<String> {
    let mut folders = Vec::new();
    for pattern in PACKAGES {
        let Some((above, below)) = pattern.split_once("python3.N/") else {
            folders.push(pattern.to_owned());
            continue;
        };
        let names = facts.view.names(above.trim_end_matches('/'));
        let pythons = names.iter().filter(|name| name.starts_with("python3."));
        folders.extend(pythons.map(|name| format!("{above}{name}/{below}")));
    }
    folders
}

/// Package and version of a folder "torch-2.9.0.dist-info", if it is of the stack.
fn package(name: &str) -> Option<(&str, &str)> {
    let (package, version) = name.strip_suffix(".dist-info")?.split_once('-')?;
    STACK.contains(&package).then_some((package, version))
}

/// A line for each value that differs between an earlier list and now.
///
/// # Errors
/// Input error if `text` is no such list; `file` is its name.
pub fn changes(file: &str, text: &[u8], now: &Value) -> Result<Vec<String>> {
    let refuse = |what: String| {
        Error::input(format!("{file}: {what}; expected a file of talon doctor --snapshot"))
    };
    let before: Value = serde_json::from_slice(text).map_err(|e| refuse(e.to_string()))?;
    if before["schema"] != SCHEMA {
        return Err(refuse(format!("schema {}, this talon reads {SCHEMA}", before["schema"])));
    }
    let (Some(before), Some(now)) = (before["box"].as_object(), now["box"].as_object()) else {
        return Err(refuse("no box in it".into()));
    };
    let word = |value: Option<&Value>| match value {
        None => "nothing".to_owned(),
        Some(Value::String(text)) => crate::error::one_line(text.clone()),
        Some(other) => other.to_string(),
    };
    let mut names: Vec<&String> = before.keys().chain(now.keys()).collect();
    names.sort();
    names.dedup();
    let differ = names.into_iter().filter(|name| match (before.get(*name), now.get(*name)) {
        (before, now) if name.starts_with("measured.") => is_another(before, now),
        (before, now) => before != now,
    });
    Ok(differ
        .map(|name| format!("{name}: {} -> {}", word(before.get(name)), word(now.get(name))))
        .collect())
}

/// Whether a measured figure is another one: the same load is not measured twice alike, and what was
/// measured only once says nothing.
fn is_another(before: Option<&Value>, now: Option<&Value>) -> bool {
    const ALIKE: f64 = 0.1;
    let number = |value: Option<&Value>| value.and_then(number);
    let (Some(before), Some(now)) = (number(before), number(now)) else { return false };
    (before - now).abs() > ALIKE * before.abs().max(now.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_told_from_other_folders() {
        assert_eq!(package("torch-2.9.0+cu130.dist-info"), Some(("torch", "2.9.0+cu130")));
        assert_eq!(package("torchvision-0.1.dist-info"), None);
        assert_eq!(package("torch"), None);
    }

    #[test]
    fn measured_figures_differ_only_beyond_what_two_runs_do() {
        let list = |values: Value| json!({ "schema": 1, "box": values });
        let before =
            list(json!({ "measured.a": 100.0, "measured.b": 5, "measured.c": 1 })).to_string();
        let now = list(json!({ "measured.a": 91.0, "measured.b": 4, "measured.d": 1 }));
        assert_eq!(changes("f", before.as_bytes(), &now).unwrap(), ["measured.b: 5 -> 4"]);
    }

    #[test]
    fn what_changed_came_and_went_is_named() {
        let list = |values: Value| json!({ "schema": 1, "box": values });
        let before = list(json!({ "a": "1", "b": 2, "c": "same" })).to_string();
        let now = list(json!({ "a": "3", "c": "same", "d": [1] }));
        let found = changes("f", before.as_bytes(), &now).unwrap();
        assert_eq!(found, ["a: 1 -> 3", "b: 2 -> nothing", "d: nothing -> [1]"]);
        for bad in ["", "{}", "{\"schema\": 1}", "{\"schema\": 9, \"box\": {}}", "[1]"] {
            let error = changes("f.json", bad.as_bytes(), &now).expect_err(bad).to_string();
            assert!(error.contains("f.json") && error.contains("--snapshot"), "{error}");
        }
    }
}
