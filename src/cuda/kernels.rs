//! The kernels inside the binary: one fatbin for each file of kernels/, compiled by build/nvcc.rs.

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Bytes where the driver may read a fatbin's header in place: `include_bytes!` promises no
/// alignment, nvcc's own embedding promises 8. A build without nvcc has nothing to align.
#[allow(dead_code)]
#[repr(C, align(16))]
struct Aligned<const N: usize>([u8; N]);

/// The fatbin of `kernels/STEM.cu`. `None` without nvcc at build time.
pub fn fatbin(stem: &str) -> Option<&'static [u8]> {
    FATBINS.iter().find(|(name, _)| *name == stem).map(|(_, bytes)| *bytes)
}
