//! What the driver's management library (NVML) tells of the GPUs, as plain data: `nvml.rs` reads it on
//! this box, and a recorded box has it in a file. What could not be read is `None`.

use serde::{Deserialize, Serialize};

/// All GPUs, and the driver.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuStates {
    /// Why nothing else is here, if so.
    pub error: Option<String>,
    /// Of the library, such as "580.95.05"; the kernel's module must have the same.
    pub driver_version: Option<String>,
    /// Of CUDA, such as "13.0".
    pub cuda_version: Option<String>,
    /// In the library's order, which is that of the bus.
    pub gpus: Vec<GpuState>,
    /// Of all ordered pairs.
    pub peers: Vec<PeerState>,
}

/// One GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuState {
    /// As /sys names it, such as "0000:17:00.0".
    pub pci: Option<String>,
    /// The product.
    pub name: Option<String>,
    /// "GPU-" and what stays when the order changes.
    pub uuid: Option<String>,
    /// Version of its firmware.
    pub vbios: Option<String>,
    /// Version of the firmware of its own processor.
    pub gsp_firmware: Option<String>,
    /// Major and minor.
    pub compute_capability: Option<(u32, u32)>,
    /// Of the device.
    pub memory_total_mib: Option<u64>,
    /// By anybody.
    pub memory_used_mib: Option<u64>,
    /// The window through which others reach its memory.
    pub bar1_total_mib: Option<u64>,
    /// Whether its memory corrects errors.
    pub ecc: Option<bool>,
    /// Whether the driver stays ready without a user.
    pub persistence: Option<bool>,
    /// Whether it is cut into several.
    pub mig: Option<bool>,
    /// default, exclusive or prohibited.
    pub compute_mode: Option<String>,
    /// Generation of PCIe that GPU and slot can do.
    pub pcie_gen_max: Option<u32>,
    /// Lanes that GPU and slot can do.
    pub pcie_width_max: Option<u32>,
    /// The limit it is sold with.
    pub power_default_w: Option<f64>,
    /// The limit that is set.
    pub power_limit_w: Option<f64>,
    /// The limit that counts, whoever has set it.
    pub power_enforced_w: Option<f64>,
    /// The highest clock of its processors.
    pub sm_max_mhz: Option<u32>,
    /// The highest clock of its memory.
    pub memory_max_mhz: Option<u32>,
    /// Offsets that somebody has set.
    pub sm_offset_mhz: Option<i32>,
    /// As above, of the memory.
    pub memory_offset_mhz: Option<i32>,
    /// Uncorrected errors since the driver started.
    pub ecc_uncorrected: Option<u64>,
    /// Whether pages of memory wait for a restart to be retired.
    pub retired_pages_pending: Option<bool>,
    /// Whether rows of memory wait for a reset to be replaced.
    pub remap_pending: Option<bool>,
    /// Whether replacing them has failed.
    pub remap_failure: Option<bool>,
    /// Processes that compute on it.
    pub processes: Option<Vec<GpuProcess>>,
    /// When it was looked at, whatever it did.
    pub now: Sample,
    /// While all GPUs exchanged, if they were made to.
    pub load: Option<Sample>,
}

/// What changes from moment to moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// Generation of PCIe that its link runs at.
    pub pcie_gen: Option<u32>,
    /// Lanes of its link.
    pub pcie_width: Option<u32>,
    /// Packets sent again, since the driver started; of a load, during it.
    pub replays: Option<u64>,
    /// What it draws.
    pub power_w: Option<f64>,
    /// Of the chip.
    pub temperature_c: Option<u32>,
    /// Clock of its processors.
    pub sm_mhz: Option<u32>,
    /// Clock of its memory.
    pub memory_mhz: Option<u32>,
    /// Percent of the time that something ran.
    pub busy_percent: Option<u32>,
    /// Why its clocks are not higher, such as "hw_power_brake".
    pub throttle: Option<Vec<String>>,
}

/// A process that computes on a GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuProcess {
    /// Its number.
    pub pid: u32,
    /// What it holds on the GPU.
    pub memory_mib: Option<u64>,
}

/// Whether one GPU may touch another's memory, as the driver says: "ok", or why not.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerState {
    /// The one that reads or writes.
    pub from: usize,
    /// The one whose memory it is.
    pub to: usize,
    /// Whether it may read.
    pub read: Option<String>,
    /// Whether it may write.
    pub write: Option<String>,
}
