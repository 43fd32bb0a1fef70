//! A queue of copies and launches on a device.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUlaunchAttributeID as Attribute};

use super::check::{check, note};
use super::launch::match_arguments;
use super::{Arg, Device, Kernel, Launch, Pinned};
use crate::error::{Error, Result};

/// A queue on a device: what is put in runs in order, while the CPU goes on. Addresses on the device
/// are plain numbers: the caller sees to it that they lie in memory that lives until the work has
/// ended. A fault in a kernel shows in a later call.
///
/// One thread at a time uses a stream: a capture belongs to the thread that began it.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    handle: sys::CUstream,
}

// SAFETY: the handle names an object of the driver, which may be used from any thread.
unsafe impl Send for Stream {}

impl Stream {
    /// A stream that does not wait for the default stream.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        device.make_current()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle to a valid address.
        let result = unsafe { sys::cuStreamCreate(&mut handle, flags) };
        check(result, "cuStreamCreate", || device.to_string())?;
        Ok(Self { device: Arc::clone(device), handle })
    }

    /// Waits until everything that was put in has ended.
    ///
    /// # Errors
    /// Runtime error when any of it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.device.make_current()?;
        // SAFETY: the stream lives as long as `self`.
        let result = unsafe { sys::cuStreamSynchronize(self.handle) };
        check(result, "cuStreamSynchronize", || self.device.to_string())
    }

    /// Puts in a copy of `from[range]` to the address `to`. The bytes are read when the stream gets
    /// there: synchronise with it (or with an event behind the copy) before writing `from` again.
    ///
    /// # Errors
    /// Runtime error when `range` leaves `from`, or when the driver refuses the copy.
    pub fn copy_to_device(&self, to: u64, from: &Pinned, range: Range<usize>) -> Result<()> {
        let bytes = from.as_slice();
        let part = bytes.get(range.clone()).ok_or_else(|| leaves(&range, bytes.len()))?;
        self.write(to, part)
    }

    /// Puts in a copy from the address `from` to `to[range]`. The bytes are there when the stream has
    /// got so far: synchronise with it (or with an event behind the copy) before using `to`.
    ///
    /// # Errors
    /// Runtime error when `range` leaves `to`, or when the driver refuses the copy.
    pub fn copy_from_device(&self, to: &mut Pinned, range: Range<usize>, from: u64) -> Result<()> {
        let bytes = to.as_mut_slice();
        let length = bytes.len();
        let part = bytes.get_mut(range.clone()).ok_or_else(|| leaves(&range, length))?;
        self.read(from, part)
    }

    /// Copies `bytes` to the address `to`, behind what the stream has to do, and waits for it.
    ///
    /// # Errors
    /// Runtime error when the copy or anything before it failed.
    pub fn upload(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.write(to, bytes)?;
        self.synchronize()
    }

    /// Copies from the address `from` into `bytes`, behind what the stream has to do, and waits.
    ///
    /// # Errors
    /// Runtime error when the copy or anything before it failed.
    pub fn download(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.read(from, bytes)?;
        self.synchronize()
    }

    /// Puts in a copy of `bytes` bytes between two addresses, on one device or on two.
    ///
    /// # Errors
    /// Runtime error when the driver refuses it.
    pub fn copy_between(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.device.make_current()?;
        // SAFETY: queues a copy between device memories, which are no memory of Rust's.
        let result = unsafe { sys::cuMemcpyAsync(to, from, bytes, self.handle) };
        check(result, "cuMemcpyAsync", || self.transfer(bytes, "to", to))
    }

    /// Puts in a fill of `bytes` bytes at the address `at` with `byte`.
    ///
    /// # Errors
    /// Runtime error when the driver refuses it.
    pub fn fill(&self, at: u64, byte: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.device.make_current()?;
        // SAFETY: queues a write to device memory, which is no memory of Rust's.
        let result = unsafe { sys::cuMemsetD8Async(at, byte, bytes, self.handle) };
        check(result, "cuMemsetD8Async", || self.transfer(bytes, "at", at))
    }

    /// Puts in one launch of `kernel`. The arguments are copied before this returns.
    ///
    /// # Errors
    /// Runtime error when the arguments are not those that the kernel takes, or when the driver
    /// refuses the launch (a block too large, too much shared memory).
    pub fn launch(&self, kernel: &Kernel, launch: Launch, args: &[Arg]) -> Result<()> {
        match_arguments(kernel.name(), kernel.parameters(), args)?;
        self.device.make_current()?;
        let mut addresses: Vec<*mut c_void> = args.iter().map(Arg::address).collect();
        let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
        value.programmaticStreamSerializationAllowed = 1;
        let id = Attribute::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        let mut dependent = sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: self.handle,
            attrs: &mut dependent,
            numAttrs: u32::from(launch.dependent),
        };
        // SAFETY: there is an address for each parameter, with as many bytes behind it as the kernel
        // takes, as `match_arguments` has seen; `args` keeps them alive until the driver has copied
        // them. Config and attribute outlive the call, and the kernel keeps its module loaded.
        let result = unsafe {
            sys::cuLaunchKernelEx(
                &config,
                kernel.function(),
                addresses.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check(result, "cuLaunchKernelEx", || {
            format!("kernel {}, {launch:?}, on {}", kernel.name(), self.device)
        })
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Puts in a copy to the device; the callers see to it that `bytes` stay until it has ended.
    fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.device.make_current()?;
        // SAFETY: the bytes are valid; memory that is not page-locked is read before this returns or
        // before the caller's synchronisation. The target is device memory, no memory of Rust's.
        let result = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.handle)
        };
        check(result, "cuMemcpyHtoDAsync", || self.transfer(bytes.len(), "to", to))
    }

    /// Puts in a copy from the device; the callers see to it that `bytes` stay until it has ended.
    fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.device.make_current()?;
        // SAFETY: the bytes are valid for writes; nobody reads them before the synchronisation.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.handle)
        };
        check(result, "cuMemcpyDtoHAsync", || self.transfer(bytes.len(), "from", from))
    }

    fn transfer(&self, bytes: usize, direction: &str, address: u64) -> String {
        format!("{bytes} bytes {direction} {address:#x} on {}", self.device)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: made in `new`; the driver lets queued work end first.
            note(unsafe { sys::cuStreamDestroy_v2(self.handle) }, "cuStreamDestroy");
        }
    }
}

fn leaves(range: &Range<usize>, length: usize) -> Error {
    Error::runtime(format!(
        "a copy of the bytes {} to {} leaves the page-locked buffer of {length} bytes",
        range.start, range.end
    ))
}
