//! Promise: talon doctor finds on a recorded box what is wrong with it and nothing else, says so in its exit
//! code, and survives whatever the files hold.

#[path = "../common/mod.rs"]
mod common;
mod deep;
mod host;
mod kept;
mod recorded;

use std::fs;
use std::path::{Path, PathBuf};

use common::talon;
use proptest::prelude::*;
use recorded::{
    DRIVER, GPUS, PORTS, Recorded, gpu_address, link_box, load, pci, port_address, registers,
    windows,
};
use serde_json::{Value, json};

#[test]
fn a_healthy_box_with_idle_links_raises_no_alarm() {
    let recorded = Recorded::healthy();
    recorded.fails(&[]);
    let report = recorded.doctor().json();
    // Of no model that was named, there is nothing to say.
    let is_unknown = |check: &&Value| {
        check["status"] == "unknown" && !check["value"].as_str().unwrap().contains("--model DIR")
    };
    let unknown: Vec<&Value> =
        report["checks"].as_array().unwrap().iter().filter(is_unknown).collect();
    assert!(unknown.len() <= 2, "{unknown:#?}");
    let speed = &report["expected_speed"];
    // 8.49 GB at 1.64 TB/s and 157 exchanges of 9.1 us.
    assert!((speed["step_ms"].as_f64().unwrap() - 6.605).abs() < 0.01, "{speed}");
    assert_eq!(speed["reduce_us_from"], "measured on this box");
}

#[test]
fn access_control_is_found_with_its_port_and_its_command() {
    let recorded = Recorded::healthy();
    recorded.put_bytes(&format!("{}/config", pci(&port_address(2))), &registers(0x001d));
    recorded.fails(&["acs"]);
    let report = recorded.doctor().json();
    let checks = report["checks"].as_array().unwrap();
    let acs = checks.iter().find(|check| check["name"] == "acs").unwrap();
    let command = format!("setpci -s {} ECAP_ACS+6.w=0000", port_address(2));
    assert!(acs["fix"].as_str().unwrap().contains(&command), "{acs}");
    assert_eq!(acs["renter_can_fix"], false);
    // Without being root the registers end after 64 bytes.
    for address in PORTS.map(str::to_owned).into_iter().chain((0..GPUS).map(port_address)) {
        recorded.put_bytes(&format!("{}/config", pci(&address)), &registers(0)[..64]);
    }
    recorded.fails(&[]);
}

#[test]
fn a_translating_iommu_is_found() {
    let recorded = Recorded::healthy();
    for index in 0..GPUS {
        recorded.put(&format!("{}/iommu_group/type", pci(&gpu_address(index))), "DMA-FQ");
    }
    recorded.fails(&["iommu"]);
}

#[test]
fn narrow_and_slow_links_fail_under_load_only() {
    for (generation, width, fails) in [(5, 16, false), (5, 8, true), (4, 16, true)] {
        let mut recorded = Recorded::healthy();
        for gpu in recorded.nvml["gpus"].as_array_mut().unwrap() {
            gpu["load"] = load(5, 16);
        }
        recorded.nvml["gpus"][3]["load"] = load(generation, width);
        recorded.fails(if fails { &["link"] } else { &[] });
    }
    let recorded = Recorded::healthy();
    recorded.put(&format!("{}/current_link_width", pci(&gpu_address(3))), "8");
    recorded.warns(&["link"]);
}

#[test]
fn a_small_window_to_the_memory_is_found() {
    let mut recorded = Recorded::healthy();
    for index in 0..GPUS {
        recorded.put(&format!("{}/resource", pci(&gpu_address(index))), &windows(256 << 20));
        recorded.nvml["gpus"][index]["bar1_total_mib"] = 256.into();
    }
    recorded.fails(&["bar1"]);
}

#[test]
fn a_driver_that_does_not_fit_its_module_is_found() {
    let recorded = Recorded::healthy();
    fs::remove_file(recorded.path(&format!("usr/lib/x86_64-linux-gnu/libcuda.so.{DRIVER}")))
        .unwrap();
    recorded.put("usr/lib/x86_64-linux-gnu/libcuda.so.580.126.09", "");
    recorded.fails(&["driver-match"]);
}

#[test]
fn staged_peer_to_peer_is_found() {
    let recorded = Recorded::healthy();
    recorded.put(
        "links.json",
        &json!({
            "schema": 1, "box": link_box(), "choice": [[16, "staged"]], "faults": [],
            "times": [{ "rows": 1, "variant": "staged", "median_us": 52.0, "worst_us": 60.0 }],
        })
        .to_string(),
    );
    recorded.fails(&["exchange"]);
}

#[test]
fn a_throttled_card_is_found() {
    let mut recorded = Recorded::healthy();
    recorded.nvml["gpus"][5]["now"]["throttle"] = json!(["hw_power_brake"]);
    recorded.fails(&["throttle"]);
}

#[test]
fn left_over_variables_are_found() {
    let recorded = Recorded::healthy();
    recorded.put("environ", "PATH=/usr/bin\0CUDA_LAUNCH_BLOCKING=1\0NCCL_P2P_DISABLE=1\0");
    let [fails, warns] = recorded.found();
    assert_eq!([fails, warns].concat(), ["environment"]);
}

#[test]
fn limits_of_a_container_are_found() {
    let recorded = Recorded::healthy();
    recorded.put("sys/fs/cgroup/memory.max", "34359738368");
    let [fails, warns] = recorded.found();
    assert_eq!([fails, warns].concat(), ["memory-limit"]);
}

#[test]
fn the_table_tells_what_to_do() {
    let recorded = Recorded::healthy();
    recorded.put_bytes(&format!("{}/config", pci(&port_address(2))), &registers(0x001d));
    recorded.put("nvml.json", &recorded.nvml.to_string());
    let outcome = talon(&["doctor", "--root", recorded.folder.path().to_str().unwrap()]);
    assert_eq!(outcome.code, Some(4), "{outcome:?}");
    for words in ["fail    acs", "expected: ", "costs: ", "setpci", "1 failed", "should reach"] {
        assert!(outcome.stdout.contains(words), "{words} in {}", outcome.stdout);
    }
}

#[test]
fn a_snapshot_names_what_has_changed_since() {
    let mut recorded = Recorded::healthy();
    recorded.put("nvml.json", &recorded.nvml.to_string());
    let root = recorded.folder.path().to_str().unwrap().to_owned();
    let file = recorded.path("before.json");
    let file = file.to_str().unwrap();
    let written = talon(&["doctor", "--root", &root, "--snapshot", file, "--model", "demo"]);
    assert_eq!(written.code, Some(0), "{written:?}");
    let same = talon(&["doctor", "--root", &root, "--against", file, "--model", "demo"]);
    assert_eq!((same.code, same.stdout.as_str()), (Some(0), "nothing has changed\n"), "{same:?}");

    recorded.put("sys/module/nvidia/version", "610.10");
    recorded.put("usr/local/cuda-13.2/version.json", "{\"cuda\": {\"version\": \"13.2.0\"}}");
    recorded.put("usr/local/lib/python3.12/dist-packages/torch-2.10.0.dist-info/METADATA", "");
    recorded.nvml["gpus"][1]["vbios"] = "98.02.60.00.01".into();
    recorded.nvml["gpus"][1]["now"]["power_w"] = 99.0.into();
    recorded.put("nvml.json", &recorded.nvml.to_string());
    let changed = talon(&["doctor", "--root", &root, "--against", file, "--model", "demo"]);
    let lines: Vec<&str> = changed.stdout.lines().collect();
    assert_eq!(
        lines,
        [
            "driver.module: 580.95.05 -> 610.10",
            "gpu.1.vbios: 98.02.52.00.02 -> 98.02.60.00.01",
            "python./usr/local/lib/python3.12/dist-packages/torch: nothing -> 2.10.0",
            "toolkit./usr/local/cuda-13.2: nothing -> 13.2.0",
        ]
    );
    // A new record in the old one's place is written behind the comparison.
    let both = ["--snapshot", file, "--against", file, "--model", "demo"];
    let replaced = talon(&[&["doctor", "--root", &root][..], &both].concat());
    assert_eq!(replaced.stdout, changed.stdout);
    let same = talon(&["doctor", "--root", &root, "--against", file, "--model", "demo"]);
    assert_eq!(same.stdout, "nothing has changed\n", "{same:?}");
    let other = talon(&["doctor", "--root", &root, "--against", file]);
    assert!(other.stdout.contains("model.config.json.sha256: "), "{other:?}");
    let bad = talon(&["doctor", "--root", &root, "--against", "/nowhere.json"]);
    assert_eq!((bad.code, bad.stderr.lines().count()), (Some(2), 1), "{bad:?}");
}

#[test]
fn no_such_box_is_refused_in_one_line() {
    let outcome = talon(&["doctor", "--root", "/nowhere/at/all"]);
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
}

/// All files below a folder, in order.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()).collect();
    entries.sort_by_key(|entry| entry.file_name());
    for entry in entries {
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => files(&entry.path(), found),
            kind if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any of the files cut, gone or full of noise: a report all the same.
    #[test]
    fn whatever_the_files_hold_there_is_a_report(
        seed in any::<u64>(),
        noise in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let recorded = Recorded::healthy();
        recorded.put("nvml.json", &recorded.nvml.to_string());
        recorded.put("last-bench.json", &kept::bench().to_string());
        recorded.put("doctor.trying", &kept::trial(&link_box(), "copies", 77));
        recorded.put("proc/4711/stat", "4711 (talon) S 1");
        let recorded = Recorded { nvml: Value::Null, ..recorded };
        let mut all = Vec::new();
        files(recorded.folder.path(), &mut all);
        for (index, file) in all.iter().enumerate() {
            match seed.rotate_left(index as u32 * 7) % 5 {
                0 => fs::write(file, &noise).unwrap(),
                1 => fs::remove_file(file).unwrap(),
                2 => {
                    let bytes = fs::read(file).unwrap();
                    fs::write(file, &bytes[..bytes.len() / 2]).unwrap();
                }
                _ => {}
            }
        }
        let outcome = recorded.doctor();
        prop_assert!(matches!(outcome.code, Some(0 | 4)), "{:?}", outcome);
        prop_assert_eq!(outcome.json()["checks"].as_array().unwrap().len(), 45);
    }
}
