//! Memory of the device, and memory of the host that the device copies from and to.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;

use super::Device;
use super::check::{check, note};
use super::driver::not_recording;
use crate::error::{Error, Result};

const MIB: usize = 1 << 20;

/// Memory of the device, freed when this is dropped. Whoever launches kernels on its address keeps
/// it until they have ended. It cannot be made or dropped while a stream of this thread captures.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// `bytes` bytes with unknown content, aligned to 256 bytes.
    ///
    /// # Errors
    /// Runtime error when the device has not enough left; it says how much was asked and is free.
    pub fn alloc(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        let _lock = not_recording();
        device.make_current()?;
        let mut address = 0;
        // SAFETY: writes one address to a valid place. The driver refuses a size of 0.
        let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) };
        check(result, "cuMemAlloc", || {
            let free = device.free_bytes().map_or("?".into(), |free| (free / MIB).to_string());
            let total = device.total_bytes() / MIB;
            let asked = bytes.div_ceil(MIB);
            format!("asked for {asked} MiB, {free} MiB of {total} MiB are free on {device}")
        })?;
        Ok(Self { device: Arc::clone(device), address, bytes })
    }

    /// Where it begins, as kernels see it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _lock = not_recording();
        if self.device.make_current().is_ok() {
            // SAFETY: allocated in `alloc`, in this context, and freed only here.
            note(unsafe { sys::cuMemFree_v2(self.address) }, "cuMemFree");
        }
    }
}

/// Page-locked host memory, which streams copy from and to while the CPU goes on. It is freed when
/// this is dropped, which waits for all work on its device; copies by other devices must have ended.
/// It cannot be made or dropped while a stream of this thread captures.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its bytes, as a box does; the driver frees them from any thread.
unsafe impl Send for Pinned {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `bytes` bytes of zeros, page-locked for all devices.
    ///
    /// # Errors
    /// Runtime error when the host does not lock that much memory.
    pub fn alloc(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        let _lock = not_recording();
        device.make_current()?;
        let mut start = std::ptr::null_mut();
        // SAFETY: writes one address to a valid place. The driver refuses a size of 0.
        let result =
            unsafe { sys::cuMemHostAlloc(&mut start, bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) };
        let asked = || format!("asked for {} MiB of page-locked host memory", bytes.div_ceil(MIB));
        check(result, "cuMemHostAlloc", asked)?;
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| Error::runtime(format!("{}, the driver gave none", asked())))?;
        // SAFETY: the driver gave `bytes` bytes at `start`, and nothing else refers to them.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Self { device: Arc::clone(device), start, bytes })
    }

    /// Where it begins, as kernels of any device see it (unified addressing).
    pub fn address(&self) -> u64 {
        self.start.as_ptr().addr() as u64
    }

    /// The bytes. Synchronise with a copy to here before reading them.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `bytes` bytes at `start` are ours and were written in `alloc`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// The bytes. Synchronise with copies from and to here before writing them.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and nobody else refers to them while `self` is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _lock = not_recording();
        if self.device.make_current().is_ok() {
            // SAFETY: waits for the context that is current, so that no copy is on its way.
            note(unsafe { sys::cuCtxSynchronize() }, "cuCtxSynchronize");
            // SAFETY: allocated in `alloc` and freed only here.
            note(unsafe { sys::cuMemFreeHost(self.start.as_ptr().cast()) }, "cuMemFreeHost");
        }
    }
}
