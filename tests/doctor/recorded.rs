//! A recorded box with nothing wrong, for tests to damage.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{Outcome, talon};

pub const GPUS: usize = 8;
/// Root port of each group of four GPUs.
pub const PORTS: [&str; 2] = ["0000:00:01.1", "0000:80:01.1"];
pub const DRIVER: &str = "580.95.05";
pub const KERNEL: &str = "6.8.0-31-generic";

/// A recorded box: eight cards below two switches, idle, with nothing wrong.
pub struct Recorded {
    pub folder: TempDir,
    pub nvml: Value,
}

pub fn gpu_address(index: usize) -> String {
    format!("0000:{:02x}:00.0", 0x10 + 0x10 * index)
}

/// The switch's port above a GPU.
pub fn port_address(index: usize) -> String {
    format!("0000:{:02x}:00.0", 0x08 + 0x10 * index)
}

/// 4096 bytes of a port's registers whose first extended capability is access control, so set.
pub fn registers(acs_control: u16) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    bytes[256..260].copy_from_slice(&0x0001_000d_u32.to_le_bytes());
    bytes[262..264].copy_from_slice(&acs_control.to_le_bytes());
    bytes
}

impl Recorded {
    pub fn healthy() -> Self {
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
        recorded.put("proc/meminfo", "MemTotal: 1056000000 kB\nMemFree: 900000000 kB\nMemAvailable: 1000000000 kB\nSwapTotal: 0 kB\nHugePages_Free: 0\nHugepagesize: 2048 kB\n");
        recorded.put("free_bytes", "2000000000000");
        recorded.sleep_state(2, 100);
        recorded.put("proc/cpuinfo", "model name : AMD EPYC 9555\nflags : fpu sse\n");
        recorded.put("proc/version", "Linux version 6.8.0");
        recorded.put("proc/sys/kernel/osrelease", KERNEL);
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
                "schema": 1, "box": link_box(), "choice": [[4, "pull"], [16, "owner"]], "faults": [],
                "times": [{ "rows": 1, "variant": "pull", "median_us": 9.1, "worst_us": 12.0 }],
            })
            .to_string(),
        );
        recorded.put("deep.json", &deep().to_string());
        Self { nvml, ..recorded }
    }

    /// Gives the first core a sleep state.
    pub fn sleep_state(&self, number: usize, microseconds: u64) {
        let state = format!("sys/devices/system/cpu/cpu0/cpuidle/state{number}");
        self.put(&format!("{state}/name"), &format!("C{number}"));
        self.put(&format!("{state}/latency"), &microseconds.to_string());
        self.put(&format!("{state}/disable"), "0");
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    pub fn put(&self, path: &str, text: &str) {
        self.put_bytes(path, text.as_bytes());
    }

    pub fn put_bytes(&self, path: &str, bytes: &[u8]) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    pub fn doctor(&self) -> Outcome {
        if !self.nvml.is_null() {
            self.put("nvml.json", &self.nvml.to_string());
        }
        talon(&["doctor", "--root", self.folder.path().to_str().unwrap(), "--json", "-"])
    }

    /// Names of the checks that fail and of those that warn.
    pub fn found(&self) -> [Vec<String>; 2] {
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

    /// One check of the report.
    pub fn check(&self, name: &str) -> Value {
        let report = self.doctor().json();
        let mut checks = report["checks"].as_array().unwrap().iter();
        checks.find(|check| check["name"] == name).unwrap().clone()
    }

    #[track_caller]
    pub fn fails(&self, names: &[&str]) {
        assert_eq!(self.found(), [names.iter().map(|n| n.to_string()).collect(), vec![]]);
    }

    #[track_caller]
    pub fn warns(&self, names: &[&str]) {
        assert_eq!(self.found(), [vec![], names.iter().map(|n| n.to_string()).collect()]);
    }
}

/// The line of the box in what a start keeps of its links (comm/link_box.rs).
pub fn link_box() -> String {
    let gpus = (0..GPUS).map(|index| format!("GPU-{index} {}", gpu_address(index)));
    let gpus: Vec<String> = gpus.collect();
    format!("0.1.0 abc | CUDA 13.0, 8 devices | {KERNEL} | {} | 6144", gpus.join(" | "))
}

/// What --deep would have measured on the healthy box.
pub fn deep() -> Value {
    let gpu = |index: usize| json!({ "pci": gpu_address(index), "read": 1.64e12, "from_host": 55e9, "to_host": 54e9 });
    let pairs = (0..GPUS * GPUS).filter(|pair| pair / GPUS != pair % GPUS);
    let path = |pair: usize| {
        json!({
            "from": pair / GPUS, "to": pair % GPUS, "copy": 55e9, "load": 53e9, "store": 54e9,
            "delay_us": 0.9,
        })
    };
    json!({
        "date": "2026-12-07", "box": link_box(), "gpus": (0..GPUS).map(gpu).collect::<Vec<Value>>(),
        "paths": pairs.map(path).collect::<Vec<Value>>(),
        "together": { "from": 0, "to": 4, "load": 30e9 },
        "not_measured": { "disk": "no checkpoint on a disk was named: --model DIR" },
    })
}

pub fn pci(address: &str) -> String {
    format!("sys/bus/pci/devices/{address}")
}

/// A GPU's windows: registers, and a BAR1 of this many bytes.
pub fn windows(bar1: u64) -> String {
    let end = 0x40_0000_0000_u64 + bar1 - 1;
    let none = "0x0000000000000000 0x0000000000000000 0x0000000000000000";
    format!(
        "0x00000000d0000000 0x00000000d3ffffff 0x0000000000040200\n{none}\n0x0000004000000000 {end:#018x} 0x000000000014220c\n{none}\n"
    )
}

pub fn load(generation: u32, width: u32) -> Value {
    json!({
        "pcie_gen": generation, "pcie_width": width, "replays": 0, "power_w": 300.0, "temperature_c": 60,
        "sm_mhz": 2600, "memory_mhz": 14001, "busy_percent": 100, "throttle": [],
    })
}
