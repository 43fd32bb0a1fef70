//! Promise: talon doctor finds on a recorded box what is wrong with it and nothing else, says so in its exit
//! code, and survives whatever the files hold.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use common::{Outcome, talon};
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

const GPUS: usize = 8;
/// Root port of each group of four GPUs, and the class of its bridges.
const PORTS: [&str; 2] = ["0000:00:01.1", "0000:80:01.1"];
const DRIVER: &str = "580.95.05";

/// A recorded box: eight cards below two switches, idle, with nothing wrong.
struct Recorded {
    folder: TempDir,
    nvml: Value,
}

fn gpu_address(index: usize) -> String {
    format!("0000:{:02x}:00.0", 0x10 + 0x10 * index)
}

/// The switch's port above a GPU.
fn port_address(index: usize) -> String {
    format!("0000:{:02x}:00.0", 0x08 + 0x10 * index)
}

/// 4096 bytes of a port's registers whose first extended capability is access control, so set.
fn registers(acs_control: u16) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    bytes[256..260].copy_from_slice(&0x0001_000d_u32.to_le_bytes());
    bytes[262..264].copy_from_slice(&acs_control.to_le_bytes());
    bytes
}

impl Recorded {
    fn healthy() -> Self {
        let recorded = Self { folder: TempDir::new().unwrap(), nvml: Value::Null };
        let link = |speed: &str| {
            [
                ("current_link_speed", format!("{speed} GT/s PCIe")),
                ("current_link_width", "16".into()),
                ("max_link_speed", "32.0 GT/s PCIe".into()),
                ("max_link_width", "16".into()),
            ]
        };
        let device = |path: &str, class: &str, vendor: &str| {
            let place = format!("sys/devices/{path}");
            recorded.put(&format!("{place}/class"), class);
            recorded.put(&format!("{place}/vendor"), vendor);
            for file in ["correctable", "nonfatal", "fatal"] {
                let total = if file == "correctable" { "COR" } else { &file.to_uppercase() };
                recorded.put(&format!("{place}/aer_dev_{file}"), &format!("TOTAL_ERR_{total} 0"));
            }
            for (name, value) in link("2.5") {
                recorded.put(&format!("{place}/{name}"), &value);
            }
            let address = path.rsplit('/').next().unwrap();
            let devices = recorded.path("sys/bus/pci/devices");
            fs::create_dir_all(&devices).unwrap();
            if !devices.join(address).exists() {
                symlink(recorded.path(&place), devices.join(address)).unwrap();
            }
        };
        for index in 0..GPUS {
            let root = format!("pci{}/{}", &PORTS[index / 4][..7], PORTS[index / 4]);
            let port = format!("{root}/{}", port_address(index));
            device(&root, "0x060400", "0x1022");
            device(&port, "0x060400", "0x11f8");
            device(&format!("{port}/{}", gpu_address(index)), "0x030000", "0x10de");
            for address in [PORTS[index / 4], &port_address(index)] {
                recorded.put_bytes(&format!("{}/config", pci(address)), &registers(0));
            }
            let place = pci(&gpu_address(index));
            recorded.put(&format!("{place}/numa_node"), "0");
            recorded.put(&format!("{place}/iommu_group/type"), "identity");
            recorded.put(&format!("{place}/resource"), &windows(128 << 30));
        }
        recorded.put(
            "proc/driver/nvidia/version",
            &format!(
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build"
            ),
        );
        recorded.put("sys/module/nvidia/version", DRIVER);
        recorded.put(&format!("usr/lib/x86_64-linux-gnu/libcuda.so.{DRIVER}"), "");
        recorded.put(
            "proc/driver/nvidia/params",
            "RegistryDwords: \"ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2\"\n",
        );
        recorded.put("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 iommu=pt pcie_aspm=off");
        recorded.put("sys/module/pcie_aspm/parameters/policy", "default [performance] powersave");
        recorded.put("sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "Y");
        recorded.put("proc/meminfo", "MemTotal: 1056000000 kB\nMemFree: 900000000 kB\nMemAvailable: 1000000000 kB\nSwapTotal: 0 kB\n");
        recorded.put("proc/cpuinfo", "model name : AMD EPYC 9555\nflags : fpu sse\n");
        recorded.put("proc/version", "Linux version 6.8.0");
        recorded.put("proc/self/limits", "Limit Soft Limit Hard Limit Units\nMax locked memory         unlimited            unlimited            bytes\nMax open files            1048576              1048576              files\n");
        recorded.put("proc/self/cgroup", "0::/");
        recorded.put(
            "proc/self/status",
            "CapEff:\t000001ffffffffff\nSeccomp:\t0\nCpus_allowed_list:\t0-63\n",
        );
        recorded.put("proc/sys/vm/zone_reclaim_mode", "0");
        recorded.put("proc/sys/kernel/numa_balancing", "0");
        recorded.put("proc/1/cgroup", "0::/init.scope");
        recorded.put("sys/fs/cgroup/memory.max", "max");
        recorded.put("sys/fs/cgroup/cpu.max", "max 100000");
        recorded.put("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance");
        recorded.put("var/log/dmesg", "[    0.000000] Linux version 6.8.0\n");
        fs::create_dir_all(recorded.path("dev/shm")).unwrap();
        recorded.put("environ", "PATH=/usr/bin\0HOME=/root\0");
        let gpu = |index: usize| {
            json!({
                "pci": gpu_address(index), "name": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
                "uuid": format!("GPU-{index}"), "vbios": "98.02.52.00.02", "compute_capability": [12, 0],
                "memory_total_mib": 97887, "memory_used_mib": 4, "bar1_total_mib": 131072, "ecc": true,
                "persistence": true, "mig": false, "compute_mode": "default", "pcie_gen_max": 5,
                "pcie_width_max": 16, "power_default_w": 600.0, "power_limit_w": 600.0,
                "power_enforced_w": 600.0, "sm_max_mhz": 3090, "memory_max_mhz": 14001,
                "ecc_uncorrected": 0, "retired_pages_pending": false, "remap_pending": false,
                "remap_failure": false, "processes": [],
                "now": {
                    "pcie_gen": 1, "pcie_width": 16, "replays": 0, "power_w": 12.0, "temperature_c": 30,
                    "sm_mhz": 180, "memory_mhz": 405, "busy_percent": 0, "throttle": ["gpu_idle"],
                },
            })
        };
        let peers = (0..GPUS * GPUS).filter(|pair| pair / GPUS != pair % GPUS).map(
            |pair| json!({ "from": pair / GPUS, "to": pair % GPUS, "read": "ok", "write": "ok" }),
        );
        let nvml = json!({
            "driver_version": DRIVER, "cuda_version": "13.0",
            "gpus": (0..GPUS).map(gpu).collect::<Vec<Value>>(), "peers": peers.collect::<Vec<Value>>(),
        });
        recorded.put(
            "links.json",
            &json!({
                "schema": 1, "box": "x", "choice": [[4, "pull"], [16, "owner"]], "faults": [],
                "times": [{ "rows": 1, "variant": "pull", "median_us": 9.1, "worst_us": 12.0 }],
            })
            .to_string(),
        );
        Self { nvml, ..recorded }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn put(&self, path: &str, text: &str) {
        self.put_bytes(path, text.as_bytes());
    }

    fn put_bytes(&self, path: &str, bytes: &[u8]) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn doctor(&self) -> Outcome {
        if !self.nvml.is_null() {
            self.put("nvml.json", &self.nvml.to_string());
        }
        talon(&["doctor", "--root", self.folder.path().to_str().unwrap(), "--json", "-"])
    }

    /// Names of the checks that fail and of those that warn.
    fn found(&self) -> [Vec<String>; 2] {
        let outcome = self.doctor();
        let report = outcome.json();
        let of = |status: &str| -> Vec<String> {
            let checks = report["checks"].as_array().unwrap().iter();
            checks
                .filter(|c| c["status"] == status)
                .map(|c| c["name"].as_str().unwrap().into())
                .collect()
        };
        let found = [of("fail"), of("warn")];
        assert_eq!(outcome.code, Some(if found[0].is_empty() { 0 } else { 4 }), "{outcome:?}");
        found
    }

    #[track_caller]
    fn fails(&self, names: &[&str]) {
        assert_eq!(self.found(), [names.iter().map(|n| n.to_string()).collect(), vec![]]);
    }

    #[track_caller]
    fn warns(&self, names: &[&str]) {
        assert_eq!(self.found(), [vec![], names.iter().map(|n| n.to_string()).collect()]);
    }
}

fn pci(address: &str) -> String {
    format!("sys/bus/pci/devices/{address}")
}

/// A GPU's windows: registers, and a BAR1 of this many bytes.
fn windows(bar1: u64) -> String {
    let end = 0x40_0000_0000_u64 + bar1 - 1;
    let none = "0x0000000000000000 0x0000000000000000 0x0000000000000000";
    format!(
        "0x00000000d0000000 0x00000000d3ffffff 0x0000000000040200\n{none}\n0x0000004000000000 {end:#018x} 0x000000000014220c\n{none}\n"
    )
}

fn load(generation: u32, width: u32) -> Value {
    json!({
        "pcie_gen": generation, "pcie_width": width, "replays": 0, "power_w": 300.0, "temperature_c": 60,
        "sm_mhz": 2600, "memory_mhz": 14001, "busy_percent": 100, "throttle": [],
    })
}

#[test]
fn a_healthy_box_with_idle_links_raises_no_alarm() {
    let recorded = Recorded::healthy();
    recorded.fails(&[]);
    let report = recorded.doctor().json();
    let unknown: Vec<&Value> =
        report["checks"].as_array().unwrap().iter().filter(|c| c["status"] == "unknown").collect();
    assert!(unknown.len() <= 3, "{unknown:#?}");
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
            "schema": 1, "box": "x", "choice": [[16, "staged"]], "faults": [],
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
        prop_assert_eq!(outcome.json()["checks"].as_array().unwrap().len(), 36);
    }
}
