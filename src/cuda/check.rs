//! What a result of the driver means to the user.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};

use crate::error::{Error, Result};

/// Turns the result of the driver function `operation` into ours. `context` says on what it worked;
/// it is called only on a failure. Call this only with results that came from the driver.
///
/// # Errors
/// Whatever the driver reports; an input error where the box has to be set up differently.
pub(super) fn check(
    result: CUresult,
    operation: &str,
    context: impl FnOnce() -> String,
) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(error(result, operation, &context(), &description(result)))
}

/// For what is given back in `drop`, where nobody can act on a failure: after a kernel fault, all
/// of these calls fail, and the fault itself has been reported.
pub(super) fn note(result: CUresult, operation: &str) {
    if result != CUresult::CUDA_SUCCESS {
        log::debug!("{operation}: {result:?}");
    }
}

/// The error for a result that is not success; `description` is the driver's own text for it.
fn error(result: CUresult, operation: &str, context: &str, description: &str) -> Error {
    if let Some(advice) = setup_advice(result) {
        return Error::input(format!("{advice} ({operation}: {result:?})"));
    }
    Error::runtime(match result {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => format!(
            "out of memory: {context} ({operation}); free some of it (nvidia-smi lists who holds \
             GPU memory) or ask for less"
        ),
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
        | CUresult::CUDA_ERROR_INVALID_PTX
        | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => format!(
            "no kernels for this GPU: {context} ({operation}: {result:?}); use a GPU of that list \
             or a build of talon for this GPU"
        ),
        _ if is_kernel_fault(result) => format!(
            "kernel fault: {description} ({result:?}), seen by {operation}, {context}; the process \
             cannot go on; run talon again with CUDA_LAUNCH_BLOCKING=1 to see where, and check \
             dmesg for Xid"
        ),
        _ => format!("{operation}, {context}: {description} ({result:?})"),
    })
}

/// What to change on the box, where that is the cause.
fn setup_advice(result: CUresult) -> Option<&'static str> {
    Some(match result {
        CUresult::CUDA_ERROR_NO_DEVICE => {
            "the NVIDIA driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"
        }
        CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "libcuda is the CUDA toolkit's stub and not the driver: take the toolkit's stubs folder \
             out of LD_LIBRARY_PATH"
        }
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "libcuda and the NVIDIA kernel module are of different versions: reboot, or install \
             the driver again"
        }
        CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "CUDA's forward compatibility does not cover this GPU: take the compat folder out of \
             LD_LIBRARY_PATH and update the NVIDIA driver to 580 or later"
        }
        CUresult::CUDA_ERROR_SYSTEM_NOT_READY => {
            "the GPUs are not ready: on a box with NVSwitch, start nvidia-fabricmanager"
        }
        _ => return None,
    })
}

/// Results after which the context is lost: every later call on it fails.
fn is_kernel_fault(result: CUresult) -> bool {
    matches!(
        result,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
    )
}

/// The driver's text for a result, such as "invalid argument".
fn description(result: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: writes one pointer to a valid address. The library is there: `result` came from it.
    let found = unsafe { sys::cuGetErrorString(result, &mut text) };
    if found != CUresult::CUDA_SUCCESS || text.is_null() {
        return "a failure that the driver does not describe".into();
    }
    // SAFETY: the driver's texts are constants that end in NUL.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn success_asks_for_no_context() {
        assert_eq!(check(CUresult::CUDA_SUCCESS, "cuInit", || panic!("called")), Ok(()));
    }

    #[test]
    fn failures_say_what_they_mean() {
        let text = |result| error(result, "cuCall", "on GPU 0", "driver's words").to_string();
        assert!(
            text(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
                .starts_with("out of memory: on GPU 0 (cuCall)")
        );
        for result in [
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
            CUresult::CUDA_ERROR_INVALID_PTX,
            CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        ] {
            assert!(text(result).starts_with("no kernels for this GPU: on GPU 0"));
        }
        for result in [CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, CUresult::CUDA_ERROR_ECC_UNCORRECTABLE]
        {
            let fault = text(result);
            assert!(fault.starts_with("kernel fault: driver's words (CUDA_ERROR_"), "{fault}");
            assert!(fault.contains("CUDA_LAUNCH_BLOCKING=1") && fault.contains("Xid"), "{fault}");
        }
        assert_eq!(
            text(CUresult::CUDA_ERROR_INVALID_VALUE),
            "cuCall, on GPU 0: driver's words (CUDA_ERROR_INVALID_VALUE)"
        );
    }

    #[test]
    fn only_the_set_up_of_the_box_is_an_input_error() {
        let kind = |result| error(result, "cuInit", "", "").kind();
        assert_eq!(kind(CUresult::CUDA_ERROR_NO_DEVICE), Kind::Input);
        assert_eq!(kind(CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH), Kind::Input);
        assert_eq!(kind(CUresult::CUDA_ERROR_OUT_OF_MEMORY), Kind::Runtime);
        assert_eq!(kind(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS), Kind::Runtime);
        assert_eq!(kind(CUresult::CUDA_ERROR_INVALID_VALUE), Kind::Runtime);
    }
}
