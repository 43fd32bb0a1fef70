//! How a model's weights were read from the disk, or from the page cache.

use crate::error::Result;
use crate::weights::{Read, Reading};

/// What a load read, and how fast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadFigures {
    /// Bytes of the files that were needed and read.
    pub bytes: u64,
    /// The share of them that was in the page cache before.
    pub resident_before: f64,
    /// What the kernel says it fetched from disks for this process meanwhile; `None` if it does not.
    pub disk_bytes: Option<u64>,
    /// How long it took.
    pub seconds: f64,
}

/// Shares of resident pages from which on a cache counts as warm, and up to which as cold.
const WARM: f64 = 0.99;
const COLD: f64 = 0.01;

impl LoadFigures {
    /// Reads; there are no figures where nothing is read from a file.
    pub(super) fn measure(
        reading: &Reading,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(Read, Option<Self>)> {
        let before = fetched();
        let read = reading.run(progress)?;
        let figures = (read.bytes > 0).then(|| Self {
            bytes: read.bytes,
            resident_before: read.resident as f64 / read.bytes as f64,
            disk_bytes: fetched().zip(before).map(|(now, before)| now - before),
            seconds: read.seconds,
        });
        Ok((read, figures))
    }

    /// Bytes a second.
    pub fn rate(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }

    /// In a few words, for the log.
    pub(super) fn summary(&self) -> String {
        format!(
            "{:.2} GB of weights read in {:.3} s: {:.2} GB/s, page cache {}",
            self.bytes as f64 / 1e9,
            self.seconds,
            self.rate() / 1e9,
            self.cache()
        )
    }

    /// `warm`, `cold` or `mixed`.
    pub fn cache(&self) -> &'static str {
        match self.resident_before {
            share if share >= WARM => "warm",
            share if share <= COLD => "cold",
            _ => "mixed",
        }
    }
}

/// `read_bytes` of this process: what its reads made disks fetch. (`rchar` counts the bytes that
/// read calls copied, and mapped files take none.)
fn fetched() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("read_bytes:"))?.trim().parse().ok()
}
