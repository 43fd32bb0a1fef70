//! The CUDA driver, as far as talon needs it: devices, their memory, streams, kernels and graphs.
//! The only importer of cudarc, of which only the raw functions are used: its safe layer lacks
//! attributes of launches and sizes of parameters.

mod check;
mod device;
mod driver;
mod event;
mod fatbin;
mod graph;
pub mod kernels;
mod launch;
mod memory;
mod module;
mod stream;

pub use device::Device;
pub use event::Event;
pub use graph::Graph;
pub use launch::{Arg, Launch};
pub use memory::{DeviceMemory, Pinned};
pub use module::{Attributes, Kernel, Module};
pub use stream::Stream;

/// One line on the driver and its devices, for reports. Never fails: a box without a GPU is normal.
pub fn driver_summary() -> String {
    if !driver::is_present() {
        return "not found (libcuda.so.1)".into();
    }
    match driver::version().and_then(|version| Ok((version, driver::device_count()?))) {
        Ok((version, count)) => format!("CUDA {}, {count} devices", driver::dotted(version)),
        Err(error) => format!("present, but it does not start: {error}"),
    }
}
