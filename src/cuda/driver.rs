//! The driver itself: whether it is here, its version, and its start.

use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use cudarc::driver::sys::{self, CUresult};

use super::check::check;
use crate::error::{Error, Result};

/// CUDA 13.0, as the driver counts: 1000 · major + 10 · minor. Older drivers lack functions that are
/// called here (cudarc panics where one is missing) and do not load the kernels.
const OLDEST: u32 = 13000;

/// Held to record a graph, and shared by what would spoil it: memory that any thread takes or gives
/// back, and modules, end a recording on an H200 with driver 580, though it is the thread's own.
static RECORDING: RwLock<()> = RwLock::new(());

/// Nothing takes or gives back memory or modules while this is held.
pub(super) fn recording() -> RwLockWriteGuard<'static, ()> {
    RECORDING.write().unwrap_or_else(PoisonError::into_inner)
}

/// No graph is recorded while this is held.
pub(super) fn not_recording() -> RwLockReadGuard<'static, ()> {
    RECORDING.read().unwrap_or_else(PoisonError::into_inner)
}

/// Whether libcuda can be loaded. Every other call of cudarc panics where it cannot.
pub(super) fn is_present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: only looks for libcuda among the loader's libraries.
    *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() })
}

/// Makes the driver ready for use.
///
/// # Errors
/// Input error when there is no driver, when it is too old, or when it finds no device.
pub(super) fn start() -> Result<()> {
    if !is_present() {
        return Err(Error::input(
            "no CUDA driver: libcuda.so.1 was not found; install the NVIDIA driver 580 or later",
        ));
    }
    supported(version()?)?;
    // SAFETY: starts the library, which is there; may be called again.
    check(unsafe { sys::cuInit(0) }, "cuInit", || "starting the NVIDIA driver".into())
}

/// Ends the process without the driver's own end, which waits for kernels that hang.
pub fn leave(code: u8) -> ! {
    // SAFETY: ends the process; nothing of it runs any more, so nothing is left in a wrong state.
    unsafe { libc::_exit(code.into()) }
}

/// The CUDA version that the driver supports. Needs [`is_present`].
///
/// # Errors
/// When the driver does not answer.
pub(super) fn version() -> Result<u32> {
    let mut version = 0;
    // SAFETY: writes one integer to a valid address; it needs no start.
    let result = unsafe { sys::cuDriverGetVersion(&mut version) };
    check(result, "cuDriverGetVersion", || "asking for the version".into())?;
    Ok(version.unsigned_abs())
}

/// The number of devices, whatever the driver's version. Needs [`is_present`].
///
/// # Errors
/// When the driver does not start; no device is no error.
pub(super) fn device_count() -> Result<usize> {
    // SAFETY: starts the library, which is there; may be called again.
    let started = unsafe { sys::cuInit(0) };
    if started == CUresult::CUDA_ERROR_NO_DEVICE {
        return Ok(0);
    }
    check(started, "cuInit", || "starting the NVIDIA driver".into())?;
    let mut count = 0;
    // SAFETY: writes one integer to a valid address.
    let result = unsafe { sys::cuDeviceGetCount(&mut count) };
    check(result, "cuDeviceGetCount", || "counting the GPUs".into())?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// `version` as people write it: 12040 is "12.4".
pub(super) fn dotted(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn supported(version: u32) -> Result<()> {
    if version >= OLDEST {
        return Ok(());
    }
    Err(Error::input(format!(
        "driver supports CUDA {}, talon's kernels need {}: update the NVIDIA driver to 580 or later",
        dotted(version),
        dotted(OLDEST)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_drivers_are_refused_by_their_version() {
        assert_eq!(supported(13000), Ok(()));
        assert_eq!(supported(13020), Ok(()));
        assert_eq!(
            supported(12040),
            Err(Error::input(
                "driver supports CUDA 12.4, talon's kernels need 13.0: update the NVIDIA driver to \
                 580 or later"
            ))
        );
    }
}
