//! The CUDA driver, as far as talon needs it: whether it is here and what it drives. The only
//! importer of cudarc.

pub mod kernels;

use cudarc::driver::{result, sys};

/// One line on the driver and its devices, for reports. Never fails: a box without a GPU is normal.
pub fn driver_summary() -> String {
    // SAFETY: only looks for libcuda among the loader's libraries. It must come first: every other
    // call of cudarc panics where the library is absent.
    if !unsafe { sys::is_culib_present() } {
        return "not found (libcuda.so.1)".into();
    }
    match devices() {
        Ok((version, count)) => {
            format!("CUDA {}.{}, {count} devices", version / 1000, version % 1000 / 10)
        }
        Err(error) => format!("present, but it does not start: {error:?}"),
    }
}

/// The driver's CUDA version as 1000 · major + 10 · minor, and the number of devices.
fn devices() -> Result<(i32, i32), result::DriverError> {
    result::init()?;
    let mut version = 0;
    // SAFETY: writes one integer to a valid address.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
    Ok((version, result::device::get_count()?))
}
