//! The GPU backend ([`CudaBackend`]): one rank's weights, caches and stages on one device; and below
//! it the CUDA driver, as far as talon needs it: devices, their memory, streams, kernels and graphs.
//! The only importer of cudarc, of which only the raw functions are used: its safe layer lacks
//! attributes of launches and sizes of parameters.

mod backend;
mod buffer;
mod check;
mod device;
mod driver;
mod event;
mod fatbin;
mod graph;
mod kernel_set;
pub mod kernels;
mod launch;
mod layout;
mod measure;
mod memory;
mod module;
mod places;
mod plan;
mod probe;
mod rank;
mod routing;
mod stages;
mod stream;
mod upload;
mod weights;

pub use backend::CudaBackend;
pub use buffer::{Buffer, Stored};
pub use device::Device;
pub use event::Event;
pub use graph::Graph;
pub use launch::{Arg, Launch};
pub use measure::{KernelTimes, StageTime, measure_kernels};
pub use memory::{DeviceMemory, Pinned};
pub use module::{Attributes, Kernel, Module};
pub use plan::MemoryPlan;
pub use probe::Probe;
pub use rank::CudaOptions;
pub use routing::{Route, decode_routes, encode_routes};
pub use stream::Stream;

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
