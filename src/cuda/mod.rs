//! The GPU backend ([`CudaBackend`]): the ranks' weights, caches and stages on their devices, and the
//! mailboxes that they exchange through; and below them the CUDA driver, as far as talon needs it: devices, their memory, streams, kernels and graphs.
//! The only importer of cudarc, of which only the raw functions are used: its safe layer lacks
//! attributes of launches and sizes of parameters.

mod backend;
mod buffer;
mod check;
mod collective;
mod device;
mod draft_runner;
mod draft_stages;
mod drafter;
mod driver;
mod event;
mod fabric;
mod fatbin;
mod gpu_state;
mod graph;
mod group;
mod kernel_set;
pub mod kernels;
mod launch;
mod layout;
mod library;
mod links;
mod measure;
mod memory;
mod meter;
mod module;
mod nccl;
mod numa;
mod nvml;
mod places;
mod plan;
mod probe;
mod rank;
mod rank_thread;
mod routing;
mod runner;
mod stages;
mod stream;
mod together;
mod upload;
mod weights;

pub use backend::{CudaBackend, RanksOptions, Sharing, shares_a_device};
pub use buffer::{Buffer, Stored};
pub use device::Device;
pub use driver::leave;
pub use event::Event;
pub use fabric::{Damage, Mischief};
pub use gpu_state::{GpuProcess, GpuState, GpuStates, PeerState, Sample};
pub use graph::Graph;
pub use launch::{Arg, Launch};
pub use links::{LinkTime, exchange_many, measure_links};
pub use measure::{KernelTimes, StageTime, measure_kernels};
pub use memory::{DeviceMemory, Pinned};
pub use meter::{Meter, PathSpeed, Toward, measure_path, measure_together};
pub use module::{Attributes, Kernel, Module};
pub use nccl::{NcclTimes, measure_nccl};
pub use nvml::{Nvml, gpu_states};
pub use plan::MemoryPlan;
pub use probe::Probe;
pub use rank::{CudaOptions, memory_plan};
pub use routing::{Route, decode_routes, encode_routes};
pub use stream::Stream;

pub use crate::comm::{Times, Variant};

/// Whether this build has kernels.
pub fn has_kernels() -> bool {
    kernels::fatbin("embed").is_some()
}

/// One line on the driver and its devices, for reports. Never fails: a box without a GPU is normal.
pub fn driver_summary() -> String {
    if !driver::is_present() {
        return "not found (libcuda.so.1)".into();
    }
    match driver::version().and_then(|version| Ok((version, driver::device_count()?))) {
        Ok((version, 1)) => format!("CUDA {}, 1 device", driver::dotted(version)),
        Ok((version, count)) => format!("CUDA {}, {count} devices", driver::dotted(version)),
        Err(error) => format!("present, but it does not start: {error}"),
    }
}
