//! A mark on a stream: whether the device has got there, and when.

use std::sync::Arc;

use cudarc::driver::sys;

use super::check::{check, note};
use super::{Device, Stream};
use crate::error::Result;

/// A mark on a stream, with the time at which the device passed it.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    handle: sys::CUevent,
}

// SAFETY: the handle names an object of the driver, which may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// A mark that is nowhere yet.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        device.make_current()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: writes one handle to a valid address.
        check(unsafe { sys::cuEventCreate(&mut handle, flags) }, "cuEventCreate", || {
            device.to_string()
        })?;
        Ok(Self { device: Arc::clone(device), handle })
    }

    /// Puts the mark behind everything that is in `stream` now; an earlier place is forgotten.
    ///
    /// # Errors
    /// Runtime error when the stream is on another device.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.device.make_current()?;
        // SAFETY: event and stream live.
        let result = unsafe { sys::cuEventRecord(self.handle, stream.handle()) };
        check(result, "cuEventRecord", || stream.device().to_string())
    }

    /// Waits until the device has passed the mark; at once where it was never recorded.
    ///
    /// # Errors
    /// Runtime error when any work before it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.device.make_current()?;
        // SAFETY: the event lives.
        let result = unsafe { sys::cuEventSynchronize(self.handle) };
        check(result, "cuEventSynchronize", || self.device.to_string())
    }

    /// Milliseconds of device time from `earlier` to this mark, to about half a microsecond.
    ///
    /// # Errors
    /// Runtime error when the device has not passed both: synchronise with the later one first.
    pub fn milliseconds_since(&self, earlier: &Self) -> Result<f32> {
        self.device.make_current()?;
        let mut milliseconds = 0.0;
        // SAFETY: writes one number to a valid address; both events live.
        let result =
            unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, earlier.handle, self.handle) };
        check(result, "cuEventElapsedTime", || self.device.to_string())?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: made in `new` and destroyed only here.
            note(unsafe { sys::cuEventDestroy_v2(self.handle) }, "cuEventDestroy");
        }
    }
}
