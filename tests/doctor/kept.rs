//! What earlier runs of talon have left on a box counts on that box only.

use std::fs;

use serde_json::{Value, json};

use crate::common::talon;
use crate::recorded::{KERNEL, Recorded, link_box};

fn links(place: &str) -> String {
    json!({
        "schema": 1, "box": place, "choice": [[16, "staged"]], "faults": [],
        "times": [{ "rows": 1, "variant": "staged", "median_us": 52.0, "worst_us": 60.0 }],
    })
    .to_string()
}

#[test]
fn exchanges_of_another_box_are_not_this_ones() {
    for (place, why) in [
        (link_box().replace("GPU-3 ", "GPU-9 "), "GPU-9"),
        (link_box().replace("0000:40", "0000:41"), "0000:41"),
        (link_box().replace(KERNEL, "6.9.1"), "kernel was 6.9.1"),
        (link_box().replace("CUDA 13.0", "CUDA 13.2"), "driver was CUDA 13.2"),
        ("x".to_owned(), "does not say"),
    ] {
        let recorded = Recorded::healthy();
        recorded.put("links.json", &links(&place));
        recorded.fails(&[]);
        let check = recorded.check("exchange");
        assert_eq!(check["status"], "unknown", "{check}");
        assert!(check["value"].as_str().unwrap().contains(why), "{check}");
        assert_eq!(
            recorded.doctor().json()["expected_speed"]["reduce_us_from"],
            "published, over PCIe"
        );
    }
}

/// A summary of a bench with the fingerprint of the healthy box.
pub fn bench() -> Value {
    json!({
        "schema": 1, "date": "2026-12-07", "gpus": ["GPU-0", "GPU-7"],
        "box": {
            "cpu": "AMD EPYC 9555", "memory_mib": 1_031_250, "kernel": KERNEL,
            "cuda_driver": "CUDA 13.0, 8 devices",
        },
        "model": { "name": "GLM-5.2-NVFP4" }, "settings": { "backend": "cuda" },
        "tokens_per_second": 120.5, "step_ms": 8.3,
    })
}

fn table(recorded: &Recorded) -> String {
    recorded.put("nvml.json", &recorded.nvml.to_string());
    let outcome = talon(&["doctor", "--root", recorded.folder.path().to_str().unwrap()]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    outcome.stdout
}

#[test]
fn the_last_bench_has_its_date_and_is_of_this_box() {
    let recorded = Recorded::healthy();
    recorded.put("last-bench.json", &bench().to_string());
    let shown = table(&recorded);
    assert!(shown.contains("last bench (2026-12-07): 120.5 tokens/s"), "{shown}");
    type Damage = fn(&mut Value);
    let damages: [(&str, Damage); 4] = [
        ("kernel was 5.15", |bench| bench["box"]["kernel"] = "5.15".into()),
        ("cpu was Xeon", |bench| bench["box"]["cpu"] = "Xeon".into()),
        ("GPU-8 is not here", |bench| bench["gpus"][1] = "GPU-8".into()),
        ("does not say", |bench| bench["box"] = Value::Null),
    ];
    for (why, damage) in damages {
        let mut other = bench();
        damage(&mut other);
        recorded.put("last-bench.json", &other.to_string());
        let shown = table(&recorded);
        assert!(shown.contains("on another box") && shown.contains(why), "{why}: {shown}");
        assert!(!shown.contains("120.5"), "{shown}");
        assert!(recorded.doctor().json()["last_bench"].is_null());
    }
}

/// What a process that is gone has left.
pub fn trial(place: &str, what: &str, began: u64) -> String {
    json!({ "schema": 1, "box": place, "what": what, "pid": 4711, "began": began }).to_string()
}

#[test]
fn what_never_came_back_is_named_with_what_tries_it_again() {
    for (file, again) in
        [("links.trying", "talon bench --requalify"), ("doctor.trying", "talon doctor --deep")]
    {
        let recorded = Recorded::healthy();
        recorded.put(file, &trial(&link_box(), "copies from GPU 2 to GPU 5", 77));
        recorded.fails(&["earlier-run"]);
        let check = recorded.check("earlier-run");
        assert!(
            check["value"].as_str().unwrap().ends_with("copies from GPU 2 to GPU 5"),
            "{check}"
        );
        assert!(check["fix"].as_str().unwrap().contains(again), "{check}");
        // Nor is a file that was damaged when the box went down as none.
        recorded.put(file, "{");
        recorded.fails(&["earlier-run"]);
    }
}

#[test]
fn a_trial_that_is_under_way_or_of_another_box_is_no_fault() {
    let recorded = Recorded::healthy();
    recorded.put("links.trying", &trial(&link_box(), "trying", 77));
    let stat = |began: u64| format!("4711 (talon) S{} {began} 1 2", " 1".repeat(18));
    recorded.put("proc/4711/stat", &stat(77));
    recorded.fails(&[]);
    // Its number was given to another process.
    recorded.put("proc/4711/stat", &stat(78));
    recorded.fails(&["earlier-run"]);
    recorded.put("links.trying", &trial(&link_box().replace("GPU-1 ", "GPU-x "), "trying", 77));
    recorded.fails(&[]);
}

#[test]
fn cores_are_limited_by_every_group_above_the_process() {
    let recorded = Recorded::healthy();
    recorded.put("proc/self/cgroup", "0::/machine.slice/talon.service");
    recorded.put("sys/fs/cgroup/machine.slice/cpu.max", "400000 100000");
    recorded.put("sys/fs/cgroup/machine.slice/talon.service/cpu.max", "max 100000");
    recorded.fails(&["cores"]);
    let check = recorded.check("cores");
    assert_eq!(check["value"], "64, of which 4.0 at a time for 8 GPUs", "{check}");
    // A sibling's limit is not the process's.
    recorded.put("proc/self/cgroup", "0::/user.slice");
    recorded.fails(&[]);
    // Version 1 keeps a tree for each controller.
    fs::remove_dir_all(recorded.path("sys/fs/cgroup")).unwrap();
    recorded.put("proc/self/cgroup", "4:cpu,cpuacct:/docker/x\n3:memory:/docker/x");
    let cpu = "sys/fs/cgroup/cpu,cpuacct/docker/x";
    recorded.put(&format!("{cpu}/cpu.cfs_quota_us"), "-1");
    recorded.put(&format!("{cpu}/cpu.cfs_period_us"), "100000");
    recorded.fails(&[]);
    recorded.put(&format!("{cpu}/cpu.cfs_quota_us"), "200000");
    recorded.fails(&["cores"]);
}
