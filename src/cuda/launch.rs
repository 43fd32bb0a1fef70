//! What a launch of a kernel takes: its shape and its arguments.

use std::ffi::c_void;
use std::marker::PhantomData;

use crate::error::{Error, Result};

/// The shape of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, in x.
    pub block: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// Whether the kernel may start before the one ahead of it on the stream has ended
    /// (programmatic dependent launch). It must then call `cudaGridDependencySynchronize` before it
    /// touches what that one writes.
    pub dependent: bool,
}

/// One argument of a kernel: a number, or a reference to a plain struct.
#[derive(Debug, Clone, Copy)]
pub struct Arg<'a> {
    value: Value,
    bytes: usize,
    borrowed: PhantomData<&'a ()>,
}

#[derive(Debug, Clone, Copy)]
enum Value {
    /// A number, in the first bytes of the word.
    Word([u8; 8]),
    /// Where a struct lies. No slice of bytes, because a struct may have padding.
    Struct(*const c_void),
}

impl<'a> Arg<'a> {
    /// A struct that the kernel takes by value: `#[repr(C)]`, with the fields of the CUDA side.
    pub fn of<T: Copy + 'static>(value: &'a T) -> Self {
        let at = std::ptr::from_ref(value).cast();
        Self { value: Value::Struct(at), bytes: size_of::<T>(), borrowed: PhantomData }
    }

    fn number<const N: usize>(bytes: [u8; N]) -> Self {
        let mut word = [0; 8];
        word[..N].copy_from_slice(&bytes);
        Self { value: Value::Word(word), bytes: N, borrowed: PhantomData }
    }

    /// Where the value lies, for as long as `self` stays where it is and `'a` lasts.
    pub(super) fn address(&self) -> *mut c_void {
        match &self.value {
            Value::Word(word) => std::ptr::from_ref(word).cast_mut().cast(),
            Value::Struct(at) => at.cast_mut(),
        }
    }
}

/// An address on the device, or any 64-bit number.
impl From<u64> for Arg<'_> {
    fn from(value: u64) -> Self {
        Self::number(value.to_ne_bytes())
    }
}

impl From<i32> for Arg<'_> {
    fn from(value: i32) -> Self {
        Self::number(value.to_ne_bytes())
    }
}

impl From<u32> for Arg<'_> {
    fn from(value: u32) -> Self {
        Self::number(value.to_ne_bytes())
    }
}

impl From<f32> for Arg<'_> {
    fn from(value: f32) -> Self {
        Self::number(value.to_ne_bytes())
    }
}

/// Compares arguments with the sizes of the kernel's parameters.
///
/// # Errors
/// Runtime error that names the kernel and the first parameter that differs.
pub(super) fn match_arguments(kernel: &str, parameters: &[usize], args: &[Arg]) -> Result<()> {
    let differs = |index: usize, how: String| {
        Err(Error::runtime(format!(
            "kernel {kernel}, parameter {index}: {how}; talon and its kernels differ, build both \
             from the same source"
        )))
    };
    for (index, (size, arg)) in parameters.iter().zip(args).enumerate() {
        if *size != arg.bytes {
            return differs(index, format!("{} bytes given, {size} expected", arg.bytes));
        }
    }
    if parameters.len() == args.len() {
        return Ok(());
    }
    let counts = format!("{} arguments given, {} expected", args.len(), parameters.len());
    differs(parameters.len().min(args.len()), counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Shape {
        rows: u64,
        width: u32,
    }

    /// The bytes that a kernel would read.
    fn bytes_of<const N: usize>(arg: &Arg) -> [u8; N] {
        assert_eq!(arg.bytes, N);
        // SAFETY: the argument says that it has N bytes, and these tests leave no padding in them.
        unsafe { arg.address().cast::<[u8; N]>().read_unaligned() }
    }

    #[test]
    fn arguments_hold_their_bytes() {
        let address = 0x0123_4567_89ab_cdef_u64;
        assert_eq!(bytes_of(&Arg::from(address)), address.to_ne_bytes());
        assert_eq!(bytes_of(&Arg::from(-5_i32)), (-5_i32).to_ne_bytes());
        assert_eq!(bytes_of(&Arg::from(7_u32)), 7_u32.to_ne_bytes());
        assert_eq!(bytes_of(&Arg::from(1.5_f32)), 1.5_f32.to_ne_bytes());
        assert_eq!(bytes_of(&Arg::of(&[1_u8, 2, 3])), [1, 2, 3]);
    }

    #[test]
    fn the_first_parameter_that_differs_is_named() {
        let shape = Shape { rows: 1, width: 2 };
        let args = [Arg::from(shape.rows), Arg::from(shape.width), Arg::of(&shape)];
        let text = |parameters: &[usize]| {
            match_arguments("mix", parameters, &args).map_err(|error| error.to_string())
        };
        assert_eq!(text(&[8, 4, 16]), Ok(()));
        let tail = "; talon and its kernels differ, build both from the same source";
        for (parameters, head) in [
            (&[8, 8, 16][..], "kernel mix, parameter 1: 4 bytes given, 8 expected"),
            (&[8, 4, 12], "kernel mix, parameter 2: 16 bytes given, 12 expected"),
            (&[8, 4], "kernel mix, parameter 2: 3 arguments given, 2 expected"),
            (&[8, 4, 16, 4], "kernel mix, parameter 3: 3 arguments given, 4 expected"),
        ] {
            assert_eq!(text(parameters), Err(format!("{head}{tail}")));
        }
        assert_eq!(match_arguments("none", &[], &[]), Ok(()));
    }
}
