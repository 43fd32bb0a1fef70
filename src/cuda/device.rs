//! One GPU and its primary context.

use std::ffi::{CStr, c_char, c_int};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::check::{check, note};
use super::driver;
use crate::error::{Error, Result};

/// One GPU. It holds the device's primary context, which everything made on the device lives in;
/// the functions of this room make it current on the calling thread by themselves.
#[derive(Debug)]
pub struct Device {
    ordinal: usize,
    handle: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    uuid: String,
    compute_capability: (u32, u32),
    multiprocessors: u32,
    l2_bytes: usize,
    total_bytes: usize,
    max_shared_per_block: u32,
}

// SAFETY: the handles name objects of the driver, which may be used from any thread.
unsafe impl Send for Device {}
// SAFETY: as above; the driver locks its own objects, and the other fields never change.
unsafe impl Sync for Device {}

impl Device {
    /// The number of GPUs that the driver shows to this process (CUDA_VISIBLE_DEVICES counts);
    /// 0 where there is no driver.
    ///
    /// # Errors
    /// When there is a driver and it does not start.
    pub fn count() -> Result<usize> {
        if driver::is_present() { driver::device_count() } else { Ok(0) }
    }

    /// Starts the driver if need be, opens GPU `ordinal` and makes it current on this thread.
    ///
    /// # Errors
    /// Input error when there is no driver, when it is older than CUDA 13.0, or when there is no
    /// such GPU; runtime error when the GPU does not answer (another process may hold it for itself).
    pub fn open(ordinal: usize) -> Result<Arc<Self>> {
        let _lock = driver::not_recording();
        driver::start()?;
        let count = driver::device_count()?;
        let index = match c_int::try_from(ordinal) {
            Ok(index) if ordinal < count => index,
            _ => return Err(out_of_range(ordinal, count)),
        };
        let on = || format!("opening GPU {ordinal}");
        let mut handle = 0;
        // SAFETY: writes one handle to a valid address.
        check(unsafe { sys::cuDeviceGet(&mut handle, index) }, "cuDeviceGet", on)?;
        let read = |attribute| attribute_of(handle, attribute, ordinal);
        let major = read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let mut device = Self {
            ordinal,
            handle,
            context: std::ptr::null_mut(),
            name: name_of(handle, ordinal)?,
            uuid: uuid_of(handle, ordinal)?,
            compute_capability: (major, minor),
            multiprocessors: read(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            l2_bytes: read(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            total_bytes: total_bytes_of(handle, ordinal)?,
            max_shared_per_block: read(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
        };
        // SAFETY: writes one handle to a valid address; the device is one that the driver named.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&mut device.context, handle) };
        check(result, "cuDevicePrimaryCtxRetain", on)?;
        device.make_current()?;
        Ok(Arc::new(device))
    }

    /// Makes the device's context current on the calling thread. Everything in this room does so
    /// itself; other code that calls the driver on another thread needs it once there.
    ///
    /// # Errors
    /// When the context is lost, after a kernel fault.
    pub fn make_current(&self) -> Result<()> {
        // SAFETY: the context is retained for as long as `self` lives.
        let result = unsafe { sys::cuCtxSetCurrent(self.context) };
        check(result, "cuCtxSetCurrent", || self.to_string())
    }

    /// Bytes of device memory that nobody holds now, other processes included.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn free_bytes(&self) -> Result<usize> {
        self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers to valid addresses.
        let result = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        check(result, "cuMemGetInfo", || self.to_string())?;
        Ok(free)
    }

    /// Lets kernels of this device read and write `other`'s memory; false where the two cannot.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn reach(&self, other: &Self) -> Result<bool> {
        if self.handle == other.handle {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: writes one integer to a valid address.
        let result = unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.handle, other.handle) };
        let on = || format!("from {self} to {other}");
        check(result, "cuDeviceCanAccessPeer", on)?;
        if can == 0 {
            return Ok(false);
        }
        self.make_current()?;
        // SAFETY: both contexts are retained; the current one is this device's.
        let result = unsafe { sys::cuCtxEnablePeerAccess(other.context, 0) };
        if result == sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
            return Ok(true);
        }
        check(result, "cuCtxEnablePeerAccess", on)?;
        Ok(true)
    }

    /// The device's place on the PCI bus, such as "0000:17:00.0", as /sys names it.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn pci_address(&self) -> Result<String> {
        let mut text: [c_char; 32] = [0; 32];
        // SAFETY: writes at most 31 bytes and a NUL into 32, the last of which stays NUL.
        let result = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), 31, self.handle) };
        check(result, "cuDeviceGetPCIBusId", || self.to_string())?;
        // SAFETY: the buffer ends in a NUL.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().to_lowercase())
    }

    /// The index that the device was opened by.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The product's name, such as "NVIDIA H200".
    pub fn name(&self) -> &str {
        &self.name
    }

    /// "GPU-" and the identifier that nvidia-smi shows; it stays when the order of GPUs changes.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Major and minor: (9, 0) is sm_90.
    pub fn compute_capability(&self) -> (u32, u32) {
        self.compute_capability
    }

    /// The number of streaming multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Size of the L2 cache in bytes.
    pub fn l2_bytes(&self) -> usize {
        self.l2_bytes
    }

    /// Size of the device memory in bytes.
    pub fn total_bytes(&self) -> usize {
        self.total_bytes
    }

    /// The most shared memory that a block can have, in bytes, static and dynamic together; beyond
    /// 48 KiB a kernel must ask for it ([`super::Kernel::set_max_shared`]).
    pub fn max_shared_per_block(&self) -> u32 {
        self.max_shared_per_block
    }
}

/// "GPU 0 (NVIDIA H200)", for messages.
impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU {} ({})", self.ordinal, self.name)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.context.is_null() {
            return; // it was never retained
        }
        // SAFETY: retained once in `open`; whatever lives in the context keeps `self` alive.
        let result = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) };
        note(result, "cuDevicePrimaryCtxRelease");
    }
}

fn out_of_range(ordinal: usize, count: usize) -> Error {
    Error::input(match count {
        0 => format!(
            "there is no GPU {ordinal}: the driver shows none; check nvidia-smi and \
             CUDA_VISIBLE_DEVICES"
        ),
        1 => format!("there is no GPU {ordinal}: the driver shows one, GPU 0"),
        _ => {
            format!("there is no GPU {ordinal}: the driver shows {count}, GPU 0 to {}", count - 1)
        }
    })
}

fn attribute_of(device: sys::CUdevice, attribute: Attribute, ordinal: usize) -> Result<u32> {
    let mut value = 0;
    // SAFETY: writes one integer to a valid address.
    let result = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
    check(result, "cuDeviceGetAttribute", || format!("GPU {ordinal}, {attribute:?}"))?;
    Ok(value.unsigned_abs())
}

fn total_bytes_of(device: sys::CUdevice, ordinal: usize) -> Result<usize> {
    let mut bytes = 0;
    // SAFETY: writes one integer to a valid address.
    let result = unsafe { sys::cuDeviceTotalMem_v2(&mut bytes, device) };
    check(result, "cuDeviceTotalMem", || format!("GPU {ordinal}"))?;
    Ok(bytes)
}

fn name_of(device: sys::CUdevice, ordinal: usize) -> Result<String> {
    let mut name: [c_char; 256] = [0; 256];
    // SAFETY: writes at most 255 bytes and a NUL into 256, the last of which stays NUL.
    let result = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 255, device) };
    check(result, "cuDeviceGetName", || format!("GPU {ordinal}"))?;
    // SAFETY: the buffer ends in a NUL.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

fn uuid_of(device: sys::CUdevice, ordinal: usize) -> Result<String> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: writes 16 bytes to a valid address.
    let result = unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) };
    check(result, "cuDeviceGetUuid", || format!("GPU {ordinal}"))?;
    Ok(uuid_text(uuid.bytes.map(|byte| byte.to_ne_bytes()[0])))
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (index, byte) in bytes.iter().enumerate() {
        if [0, 4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn a_box_without_a_driver_is_named_and_counts_no_devices() {
        if driver::is_present() {
            return; // this box has one
        }
        assert_eq!(Device::count(), Ok(0));
        let error = Device::open(0).expect_err("no driver");
        assert_eq!(error.kind(), Kind::Input);
        assert!(error.to_string().contains("libcuda.so.1"), "{error}");
    }

    #[test]
    fn an_ordinal_that_is_out_of_range_names_the_range() {
        assert_eq!(
            out_of_range(8, 8).to_string(),
            "there is no GPU 8: the driver shows 8, GPU 0 to 7"
        );
        assert_eq!(out_of_range(3, 1).kind(), Kind::Input);
        assert!(out_of_range(0, 0).to_string().contains("CUDA_VISIBLE_DEVICES"));
    }

    #[test]
    fn uuids_read_as_nvidia_smi_prints_them() {
        let bytes = std::array::from_fn(|index| index as u8 * 17);
        assert_eq!(uuid_text(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
