//! Whether what was asked for fits this box, told before anything is allocated.

use super::Limits;
use crate::error::{Error, Result};

const MIB: usize = 1 << 20;

/// Refuses a KV cache that the free memory cannot hold. The weights are mapped files, which the
/// kernel drops and reads again as it needs, so they do not count.
pub fn check_fits(cache_bytes: usize, limits: &Limits) -> Result<()> {
    let Some(available) = available_bytes() else {
        return Ok(());
    };
    if cache_bytes <= available {
        return Ok(());
    }
    Err(Error::input(format!(
        "--context {} --parallel {} --tp {}: the KV cache takes {} MiB, {} MiB of memory are \
         available, {} MiB short; lower one of the three",
        limits.context,
        limits.parallel,
        limits.tp,
        cache_bytes / MIB,
        available / MIB,
        (cache_bytes - available).div_ceil(MIB)
    )))
}

/// `MemAvailable` of /proc/meminfo; `None` where there is no such file.
fn available_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: usize = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}
