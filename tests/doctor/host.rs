//! The machine around the GPUs, and the room that a model needs in it.

use serde_json::{Value, json};

use crate::common::talon;
use crate::recorded::Recorded;

#[test]
fn memory_that_is_set_aside_as_huge_pages_is_found() {
    let recorded = Recorded::healthy();
    let meminfo = std::fs::read_to_string(recorded.path("proc/meminfo")).unwrap();
    recorded.put("proc/meminfo", &meminfo.replace("HugePages_Free: 0", "HugePages_Free: 8192"));
    recorded.put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never");
    recorded.warns(&["huge-pages"]);
    let value = recorded.check("huge-pages")["value"].clone();
    assert_eq!(value, "16 GiB set aside and unused; transparent ones: madvise");
}

#[test]
fn cores_that_sleep_deep_are_found() {
    let recorded = Recorded::healthy();
    recorded.sleep_state(3, 400);
    recorded.warns(&["sleep-states"]);
    assert_eq!(recorded.check("sleep-states")["value"], "C3, 400 us to wake up");
    recorded.put("sys/devices/system/cpu/cpu0/cpuidle/state3/disable", "1");
    recorded.warns(&[]);
}

#[test]
fn two_threads_of_a_core_are_not_two_cores() {
    let recorded = Recorded::healthy();
    let status = std::fs::read_to_string(recorded.path("proc/self/status")).unwrap();
    recorded.put("proc/self/status", &status.replace("0-63", "0-15"));
    recorded.fails(&[]);
    recorded.put("sys/devices/system/cpu/smt/active", "1");
    recorded.warns(&["cores"]);
    assert_eq!(recorded.check("cores")["value"], "16, two to a core, for 8 GPUs");
}

#[test]
fn a_disk_without_room_for_the_weights_is_found() {
    let recorded = Recorded::healthy();
    recorded.put("free_bytes", "100000000000");
    recorded.warns(&["free-space"]);
    let value = recorded.check("free-space")["value"].clone();
    assert_eq!(value, "100 GB here; GLM-5.2 in NVFP4 takes 464");
}

/// A check of a recorded box that a model is to run on.
fn of_model(recorded: &Recorded, model: &str, name: &str) -> Value {
    recorded.put("nvml.json", &recorded.nvml.to_string());
    let root = recorded.folder.path().to_str().unwrap();
    let report = talon(&["doctor", "--root", root, "--model", model, "--json", "-"]).json();
    let mut checks = report["checks"].as_array().unwrap().iter();
    checks.find(|check| check["name"] == name).unwrap().clone()
}

#[test]
fn a_model_that_does_not_fit_on_the_gpus_is_told_before_it_is_loaded() {
    let mut recorded = Recorded::healthy();
    recorded.nvml["gpus"].as_array_mut().unwrap().truncate(2);
    let check = of_model(&recorded, "demo", "gpu-room");
    assert_eq!(check["status"], "ok", "{check}");
    let value = check["value"].as_str().unwrap();
    assert!(value.contains(" of 97883 MiB on each of 2 GPUs, for one sequence of "), "{check}");
    recorded.nvml["gpus"][1]["memory_used_mib"] = json!(97_800);
    let check = of_model(&recorded, "demo", "gpu-room");
    assert_eq!(check["status"], "fail", "{check}");
    assert!(check["value"].as_str().unwrap().ends_with(" MiB short"), "{check}");
}

#[test]
fn what_is_in_memory_of_a_checkpoint_is_told() {
    let recorded = Recorded::healthy();
    let check = of_model(&recorded, "demo/glm-demo", "page-cache");
    assert_eq!(check["status"], "ok", "{check}");
    assert!(
        check["value"].as_str().unwrap().contains(" % of the weights are in memory"),
        "{check}"
    );
    assert_eq!(of_model(&recorded, "demo", "page-cache")["value"], "part of the program");
}
