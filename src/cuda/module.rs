//! Compiled kernels: the modules that hold them, and what one kernel is.

use std::ffi::{CString, c_int};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute, CUresult};

use super::check::{check, note};
use super::driver::not_recording;
use super::{Device, fatbin};
use crate::error::{Error, Result};

/// Kernels on a device, loaded from a fatbin. They stay there until the module and all its
/// [`Kernel`]s are dropped; a [`super::Graph`] does not count, so keep the module beside it.
#[derive(Debug)]
pub struct Module {
    loaded: Arc<Loaded>,
}

/// A module of the driver, unloaded when nothing refers to it any more.
#[derive(Debug)]
struct Loaded {
    device: Arc<Device>,
    handle: sys::CUmodule,
    name: String,
}

// SAFETY: the handle names an object of the driver, which may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above; the driver locks its own objects, and the other fields never change.
unsafe impl Sync for Loaded {}

impl Module {
    /// Loads what nvcc wrote with `-fatbin`; `name` is for messages.
    ///
    /// # Errors
    /// Runtime error when `fatbin` is not a whole fatbin, when it has no kernels for this device, or
    /// when the device has no memory left for them.
    pub fn load(device: &Arc<Device>, name: &str, fatbin: &[u8]) -> Result<Self> {
        let architectures = fatbin::architectures(fatbin).ok_or_else(|| {
            Error::runtime(format!(
                "module {name}: its {} bytes are not a whole fatbin, as nvcc writes with -fatbin; \
                 build talon again",
                fatbin.len()
            ))
        })?;
        let _lock = not_recording();
        device.make_current()?;
        let words = fatbin::aligned(fatbin);
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle to a valid address. The image has the lengths that it claims,
        // as `architectures` has seen; the driver keeps a copy of what it needs.
        let result = unsafe { sys::cuModuleLoadData(&mut handle, words.as_ptr().cast()) };
        check(result, "cuModuleLoadData", || {
            let (major, minor) = device.compute_capability();
            format!(
                "module {name}: this build has kernels for {architectures}, the GPU is \
                 sm_{major}{minor} ({})",
                device.name()
            )
        })?;
        let device = Arc::clone(device);
        Ok(Self { loaded: Arc::new(Loaded { device, handle, name: name.into() }) })
    }

    /// Looks a kernel up by its `extern "C"` name, and loads it onto the device.
    ///
    /// # Errors
    /// Runtime error when the module has no such kernel.
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        let _lock = not_recording();
        let module = Arc::clone(&self.loaded);
        module.device.make_current()?;
        let on = || format!("kernel {name} of module {}", module.name);
        let symbol = CString::new(name)
            .map_err(|_| Error::runtime(format!("{}: a name has no NUL", on())))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: writes one handle to a valid address; the name ends in NUL.
        let result =
            unsafe { sys::cuModuleGetFunction(&mut function, module.handle, symbol.as_ptr()) };
        check(result, "cuModuleGetFunction", on)?;
        // Loaded now, because a first launch that loads may wait for all running kernels.
        // SAFETY: the function is one of a loaded module.
        check(unsafe { sys::cuFuncLoad(function) }, "cuFuncLoad", on)?;
        let parameters = parameter_sizes(function, on)?;
        Ok(Kernel { module, function, name: name.into(), parameters })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let _lock = not_recording();
        if self.device.make_current().is_ok() {
            // SAFETY: loaded in `load`, in this context, and unloaded only here.
            note(unsafe { sys::cuModuleUnload(self.handle) }, "cuModuleUnload");
        }
    }
}

/// One kernel; it keeps its module loaded.
#[derive(Debug)]
pub struct Kernel {
    module: Arc<Loaded>,
    function: sys::CUfunction,
    name: String,
    parameters: Vec<usize>,
}

// SAFETY: the handle names an object of the driver, which may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; the driver locks its own objects, and the other fields never change.
unsafe impl Sync for Kernel {}

/// What the compiler made of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Registers of a thread.
    pub registers: u32,
    /// Shared memory of a block that the kernel itself declares, in bytes.
    pub static_shared_bytes: u32,
    /// Memory of a thread for what has no register, in bytes: more than 0 means spills or arrays.
    pub local_bytes: u32,
    /// The most threads that a block can have.
    pub max_threads: u32,
}

impl Kernel {
    /// The name that it was looked up by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The size of each parameter in bytes, in order.
    pub fn parameters(&self) -> &[usize] {
        &self.parameters
    }

    /// Lets launches ask for up to `bytes` bytes of dynamic shared memory; without this 48 KiB.
    ///
    /// # Errors
    /// Runtime error when the device does not have that much beside the kernel's static share.
    pub fn set_max_shared(&self, bytes: u32) -> Result<()> {
        self.device().make_current()?;
        let name = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function's module is loaded for as long as `self` lives.
        let result = unsafe { sys::cuFuncSetAttribute(self.function, name, value) };
        check(result, "cuFuncSetAttribute", || {
            let limit = self.device().max_shared_per_block();
            format!(
                "kernel {}, {bytes} bytes of dynamic shared memory; a block has at most {limit} on {}",
                self.name,
                self.device()
            )
        })
    }

    /// What the compiler made of it.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn attributes(&self) -> Result<Attributes> {
        Ok(Attributes {
            registers: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            static_shared_bytes: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            local_bytes: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            max_threads: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        })
    }

    /// How many blocks of `block` threads with `shared_bytes` bytes of dynamic shared memory one
    /// multiprocessor runs at a time; 0 when it cannot run any.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn occupancy(&self, block: u32, shared_bytes: u32) -> Result<u32> {
        self.device().make_current()?;
        let threads = c_int::try_from(block).unwrap_or(c_int::MAX);
        let mut blocks = 0;
        // SAFETY: writes one integer to a valid address; the function's module is loaded.
        let result = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                self.function,
                threads,
                shared_bytes as usize,
            )
        };
        check(result, "cuOccupancyMaxActiveBlocksPerMultiprocessor", || {
            format!("kernel {}, {block} threads, {shared_bytes} bytes shared", self.name)
        })?;
        Ok(blocks.unsigned_abs())
    }

    pub(super) fn function(&self) -> sys::CUfunction {
        self.function
    }

    fn device(&self) -> &Device {
        &self.module.device
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32> {
        self.device().make_current()?;
        let mut value = 0;
        // SAFETY: writes one integer to a valid address; the function's module is loaded.
        let result = unsafe { sys::cuFuncGetAttribute(&mut value, attribute, self.function) };
        check(result, "cuFuncGetAttribute", || format!("kernel {}, {attribute:?}", self.name))?;
        Ok(value.unsigned_abs())
    }
}

/// The sizes of a kernel's parameters in bytes. The driver has no call for their number: it answers
/// "invalid value" at the first index beyond them.
fn parameter_sizes(function: sys::CUfunction, on: impl Fn() -> String) -> Result<Vec<usize>> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: writes two integers to valid addresses; the function's module is loaded.
        let result =
            unsafe { sys::cuFuncGetParamInfo(function, sizes.len(), &mut offset, &mut size) };
        if result == CUresult::CUDA_ERROR_INVALID_VALUE {
            return Ok(sizes);
        }
        check(result, "cuFuncGetParamInfo", || format!("{}, parameter {}", on(), sizes.len()))?;
        sizes.push(size);
    }
}
