//! What --deep measures: judged on recorded boxes, and measured where there is no GPU, or a false one.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{command, talon};
use crate::recorded::{GPUS, Recorded, deep, link_box, load};

/// A healthy box on which --deep has measured something else.
fn measured(damage: impl FnOnce(&mut Value)) -> Recorded {
    let recorded = Recorded::healthy();
    let mut deep = deep();
    damage(&mut deep);
    recorded.put("deep.json", &deep.to_string());
    recorded
}

#[test]
fn slow_cards_are_found() {
    measured(|deep| deep["gpus"][5]["read"] = 1.2e12.into()).fails(&["read-rate"]);
    let recorded = measured(|deep| deep["gpus"][5]["read"] = 1.57e12.into());
    recorded.warns(&["read-rate"]);
    let value = recorded.check("read-rate")["value"].as_str().unwrap().to_owned();
    assert!(value.contains("1.57 to 1.64 TB/s") && value.ends_with("GPU 5"), "{value}");
    let recorded = measured(|deep| deep["gpus"][2]["to_host"] = 26e9.into());
    recorded.warns(&["host-copies"]);
    assert_eq!(recorded.check("host-copies")["value"], "from GPU 2: 26.0 GB/s");
}

#[test]
fn a_load_that_was_measured_gives_clocks_and_links_a_verdict() {
    let loaded = |damage: &dyn Fn(&mut Value)| {
        measured(|deep| {
            for index in 0..GPUS {
                deep["gpus"][index]["load"] = load(5, 16);
            }
            damage(&mut deep["gpus"][3]["load"]);
        })
    };
    let recorded = loaded(&|_| {});
    recorded.fails(&[]);
    assert_eq!(recorded.check("clocks")["value"], "SM 2600 MHz, memory 14001 MHz");
    assert_eq!(recorded.check("link")["value"], "Gen5 x16 under load");
    loaded(&|load| load["pcie_gen"] = 4.into()).fails(&["link"]);
    loaded(&|load| load["sm_mhz"] = 1800.into()).warns(&["clocks"]);
    loaded(&|load| load["throttle"] = json!(["hw_thermal"])).fails(&["throttle"]);
    loaded(&|load| load["replays"] = 400.into()).fails(&["link-errors"]);
}

#[test]
fn ways_between_gpus_are_judged_and_the_worst_is_named() {
    // From GPU 0 to 1 is the first.
    let path =
        |name: &'static str, value: Value| measured(move |deep| deep["paths"][0][name] = value);
    let recorded = path("fault", "loads report success and move nothing".into());
    recorded.fails(&["peer-copies"]);
    let value = recorded.check("peer-copies")["value"].clone();
    assert_eq!(value, "GPU 0 to GPU 1: loads report success and move nothing");
    path("delay_us", 14.0.into()).fails(&["peer-copies"]);
    path("delay_us", 4.0.into()).warns(&["peer-copies"]);
    let recorded = path("load", 27e9.into());
    recorded.warns(&["peer-copies"]);
    let value = recorded.check("peer-copies")["value"].as_str().unwrap().to_owned();
    assert!(value.starts_with("loads 27.0 GB/s (GPU 0 to GPU 1)"), "{value}");
    measured(|deep| deep["together"]["load"] = 2.6e9.into()).warns(&["peer-copies"]);
}

#[test]
fn exchanges_count_as_qualified_ones_do() {
    let exchange = |variant: &str, us: f64| json!({ "variant": variant, "bytes": 24576, "median_us": us, "worst_us": 90.0 });
    let of = |us: f64| {
        measured(|deep| deep["exchanges"] = json!([exchange("push", us), exchange("staged", 70.0)]))
    };
    let recorded = of(7.5);
    recorded.fails(&[]);
    assert_eq!(recorded.check("exchange")["value"], "push, 7.5 us");
    let speed = recorded.doctor().json()["expected_speed"].clone();
    assert_eq!((&speed["reduce_us"], &speed["ranks"]), (&json!(7.5), &json!(8)), "{speed}");
    of(20.0).warns(&["exchange"]);
}

#[test]
fn the_speed_of_any_card_follows_from_what_was_measured() {
    let others = |count: usize, mib: u64, rate: f64| {
        let mut recorded = measured(|deep| {
            deep["gpus"].as_array_mut().unwrap().truncate(count);
            deep["gpus"]
                .as_array_mut()
                .unwrap()
                .iter_mut()
                .for_each(|gpu| gpu["read"] = rate.into());
        });
        let gpus = recorded.nvml["gpus"].as_array_mut().unwrap();
        gpus.truncate(count);
        for gpu in gpus {
            (gpu["name"], gpu["memory_total_mib"]) = ("NVIDIA H200".into(), mib.into());
        }
        recorded.nvml["cuda_version"] = Value::Null;
        recorded.doctor().json()["expected_speed"].clone()
    };
    let speed = others(4, 143_771, 4.3e12);
    assert_eq!((&speed["ranks"], &speed["whole_model"]), (&json!(4), &json!(true)), "{speed}");
    // 2.88 + 44.88 / 4 GB at 4.3 TB/s, and 157 exchanges of 9.1 us.
    assert!((speed["step_ms"].as_f64().unwrap() - 4.708).abs() < 0.01, "{speed}");
    let speed = others(1, 143_771, 4.3e12);
    assert_eq!((&speed["ranks"], &speed["whole_model"]), (&json!(8), &json!(false)), "{speed}");
    assert!((speed["step_ms"].as_f64().unwrap() - 8.49 / 4.3).abs() < 0.01, "{speed}");
}

#[test]
fn what_was_measured_on_another_box_does_not_count() {
    let recorded = measured(|deep| deep["box"] = link_box().replace("GPU-2 ", "GPU-x ").into());
    recorded.fails(&[]);
    let check = recorded.check("read-rate");
    assert_eq!(check["status"], "unknown", "{check}");
    assert!(check["value"].as_str().unwrap().contains("talon doctor --deep does it"), "{check}");
}

#[test]
fn a_recorded_box_is_not_measured() {
    let recorded = Recorded::healthy();
    let outcome = talon(&["doctor", "--deep", "--root", recorded.folder.path().to_str().unwrap()]);
    assert_eq!((outcome.code, outcome.stderr.lines().count()), (Some(2), 1), "{outcome:?}");
}

/// Compiles a false library of the driver.
fn library(folder: &Path, name: &str, source: &str) {
    let file = folder.join("library.c");
    fs::write(&file, source).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let built = Command::new(compiler)
        .args(["-shared", "-fPIC", "-o"])
        .args([&folder.join(name), &file])
        .status()
        .unwrap();
    assert!(built.success());
}

/// doctor on this box, with the libraries of these folders and a home of its own.
fn doctor(home: &Path, libraries: &[&Path], args: &[&str]) -> Command {
    let paths: Vec<&str> = libraries.iter().map(|path| path.to_str().unwrap()).collect();
    let mut doctor = command(&[&["doctor"], args].concat());
    doctor.env("XDG_CACHE_HOME", home).env("LD_LIBRARY_PATH", paths.join(":"));
    doctor
}

fn report(mut doctor: Command) -> Value {
    let outcome = doctor.output().unwrap();
    assert!(matches!(outcome.status.code(), Some(0 | 4)), "{outcome:?}");
    serde_json::from_slice(&outcome.stdout).unwrap()
}

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["checks"].as_array().unwrap().iter().find(|check| check["name"] == name).unwrap()
}

/// A library in which one GPU idles at first, and works when it is asked for the third time.
const NVML: &str = r#"
#include <string.h>
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; };
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { *gpu = "gpu"; return 0; }
int nvmlDeviceGetPciInfo_v3(void *gpu, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    pci->domain = 0xffff; pci->bus = 0xff; pci->device = 0xff;
    strcpy(pci->address, "0000FFFF:FF:FF.0");
    return 0;
}
int nvmlDeviceGetName(void *gpu, char *name, unsigned bytes) { strncpy(name, "False", bytes); return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *gpu, unsigned *value) { *value = 5; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *gpu, unsigned *value) { *value = 16; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(void *gpu, unsigned *value) { *value = 16; return 0; }
int nvmlDeviceGetCurrPcieLinkGeneration(void *gpu, unsigned *value) {
    static int asked = 0;
    *value = ++asked > 2 ? 5 : 1;
    return 0;
}
int nvmlDeviceGetClockInfo(void *gpu, unsigned kind, unsigned *value) { *value = 1000 * kind; return 0; }
int nvmlDeviceGetTemperature(void *gpu, unsigned kind, unsigned *value) { *value = 55; return 0; }
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *value) { *value = 300000; return 0; }
int nvmlDeviceGetPcieReplayCounter(void *gpu, unsigned *value) { *value = 7; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *bits) { *bits = 4; return 0; }
"#;

#[test]
fn without_a_gpu_each_part_says_why_it_was_not_measured() {
    let (home, libraries) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    library(libraries.path(), "libnvidia-ml.so.1", NVML);
    let report = report(doctor(home.path(), &[libraries.path()], &["--deep", "--json", "-"]));
    if report["box"]["cuda_driver"].as_str().unwrap().starts_with("not found") {
        for name in ["read-rate", "host-copies"] {
            let check = check(&report, name);
            assert_eq!(check["status"], "unknown", "{check}");
            assert!(check["value"].as_str().unwrap().contains("no CUDA driver"), "{check}");
        }
    }
    // Read through the library's own structures, and found idle.
    assert_eq!(check(&report, "temperature")["value"], "55 C at most");
    assert!(check(&report, "gpus")["value"].as_str().unwrap().contains("1 x False"));
    assert!(!home.path().join("talon/doctor.trying").exists());
    assert!(home.path().join("talon/deep.json").exists());
}

/// With the emulated GPU (tests/emulator), where it was built: its address is the false library's.
#[test]
fn a_gpu_is_measured_and_looked_at_under_load() {
    let emulator = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/emulator");
    if !emulator.join("libcuda.so.1").exists() {
        println!("skipped: make emulator builds the GPU");
        return;
    }
    let (home, libraries) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    library(libraries.path(), "libnvidia-ml.so.1", NVML);
    let both = [emulator.as_path(), libraries.path()];
    let report = report(doctor(home.path(), &both, &["--deep", "--json", "-"]));
    assert_eq!(check(&report, "link")["value"], "Gen5 x16 under load");
    assert_eq!(check(&report, "clocks")["value"], "SM 1000 MHz, memory 2000 MHz");
    let gpu = &report["measured"]["gpus"][0];
    assert!(gpu["read"].as_f64().unwrap() > 0.0, "{gpu}");
    assert!(gpu["from_host"].as_f64().unwrap() > 0.0 && gpu["to_host"].as_f64().unwrap() > 0.0);
    assert_eq!(gpu["load"]["replays"], 0, "{gpu}");
    assert_eq!(report["expected_speed"]["bandwidth"], gpu["read"]);
    // Later looks at the same box know it, but not the load.
    let later = crate::deep::report(doctor(home.path(), &both, &["--json", "-"]));
    assert_eq!(later["measured"], report["measured"]);
    assert_eq!(check(&later, "clocks")["status"], "unknown");
}

/// A driver that never answers when its GPU is opened.
const CUDA: &str = r#"
#include <unistd.h>
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { for (;;) sleep(1); }
"#;

#[test]
fn after_a_box_went_down_the_next_look_names_what_was_measured() {
    let (home, libraries) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    library(libraries.path(), "libcuda.so.1", CUDA);
    let mut hangs =
        doctor(home.path(), &[libraries.path()], &["--deep", "--json", "-"]).spawn().unwrap();
    let word = home.path().join("talon/doctor.trying");
    let begin = Instant::now();
    while !fs::read_to_string(&word).is_ok_and(|text| text.contains("opening the GPUs")) {
        assert!(begin.elapsed() < Duration::from_secs(30), "nothing is left on the disk");
        std::thread::sleep(Duration::from_millis(10));
    }
    let report = || report(doctor(home.path(), &[], &["--json", "-"]));
    assert_eq!(check(&report(), "earlier-run")["status"], "ok");
    hangs.kill().unwrap();
    hangs.wait().unwrap();
    let report = report();
    let earlier = check(&report, "earlier-run");
    assert_eq!(earlier["value"], "talon never came back from opening the GPUs", "{earlier}");
    assert!(earlier["fix"].as_str().unwrap().contains("talon doctor --deep"), "{earlier}");
}
