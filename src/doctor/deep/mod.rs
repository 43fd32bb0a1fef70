//! What is measured only when it is asked for (`talon doctor --deep`): under load, and on ways that have
//! taken boxes down. It is kept for later looks at the same box.

mod disk;
mod measure;
mod runner;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use measure::{Asked, Outcome, measure};
pub use runner::Watch;

use super::measured::Exchanges;
use crate::cuda::Sample;
use measure::MOST_RANKS;

/// The name under which it is kept.
pub const DEEP: &str = "deep.json";

/// Values of a row of partial sums that exchanges are timed with (cuda/links.rs), in f32.
const ROW_BYTES: u64 = 6144 * 4;

/// What was measured. Rates are bytes a second.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Deep {
    /// The day.
    pub date: String,
    /// The box, in comm's line.
    #[serde(rename = "box")]
    pub place: String,
    /// Of each GPU that CUDA shows, in its order.
    pub gpus: Vec<GpuSpeed>,
    /// Of all ordered pairs of them.
    pub paths: Vec<Path>,
    /// While all GPUs load from another at once: the slowest.
    pub together: Option<Together>,
    /// Of sums between all GPUs.
    pub exchanges: Vec<Exchange>,
    /// What is wrong with exchanges.
    pub exchange_faults: Vec<String>,
    /// Of the model's disk, past the page cache.
    pub disk: Option<Disk>,
    /// Parts that were not measured, and why.
    pub not_measured: BTreeMap<String, String>,
}

/// One GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuSpeed {
    /// As /sys names it.
    pub pci: String,
    /// Plain reads of its memory, while all others read too.
    pub read: Option<f64>,
    /// From page-locked memory of the host.
    pub from_host: Option<f64>,
    /// To it.
    pub to_host: Option<f64>,
    /// What NVML told meanwhile.
    pub load: Option<Sample>,
}

/// From one GPU's memory to another's.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Path {
    pub from: usize,
    pub to: usize,
    /// What is wrong with it.
    pub fault: Option<String>,
    /// Copies of the driver, loads of the receiver, stores of the sender.
    pub copy: Option<f64>,
    pub load: Option<f64>,
    pub store: Option<f64>,
    /// Microseconds by which a load takes longer than one from the GPU's own memory.
    pub delay_us: Option<f64>,
}

/// The slowest way while all are used.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Together {
    pub from: usize,
    pub to: usize,
    pub load: f64,
}

/// One size of an exchange in one variant.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Exchange {
    pub variant: String,
    pub bytes: u64,
    pub median_us: f64,
    pub worst_us: f64,
}

/// Reads of a model's files.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Disk {
    pub folder: String,
    /// Number of readers, and what they read together.
    pub rates: Vec<(usize, f64)>,
}

impl Deep {
    /// Why a part is not there; `None` if it is.
    pub fn why_not(&self, part: &str) -> Option<&str> {
        self.not_measured.get(part).map(String::as_str)
    }

    /// The slowest plain read of a GPU, if all were measured.
    pub fn read_rate(&self) -> Option<f64> {
        let rates: Option<Vec<f64>> = self.gpus.iter().map(|gpu| gpu.read).collect();
        rates?.into_iter().min_by(f64::total_cmp)
    }

    /// The exchanges, as a qualification would have kept them.
    pub fn exchanges(&self) -> Option<Exchanges> {
        let times = self.exchanges.iter().filter(|time| time.bytes.is_multiple_of(ROW_BYTES));
        let times: Vec<(u64, String, f64)> = times
            .map(|time| (time.bytes / ROW_BYTES, time.variant.clone(), time.median_us))
            .collect();
        let mut choice: Vec<(u64, String)> = Vec::new();
        for (rows, _, _) in &times {
            let of_rows = times.iter().filter(|(of, _, _)| of == rows);
            let fastest = of_rows.min_by(|a, b| a.2.total_cmp(&b.2));
            if let (Some((rows, variant, _)), false) =
                (fastest, choice.iter().any(|(known, _)| known == rows))
            {
                choice.push((*rows, variant.clone()));
            }
        }
        choice.sort();
        let faults = self.exchange_faults.clone();
        (!choice.is_empty()).then_some(Exchanges {
            gpus: self.gpus.len().min(MOST_RANKS),
            choice,
            faults,
            times,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_variant_of_each_size_counts() {
        let exchange = |variant: &str, bytes, median_us| Exchange {
            variant: variant.into(),
            bytes,
            median_us,
            worst_us: 99.0,
        };
        let deep = Deep {
            exchanges: vec![
                exchange("push", 12288, 1.0),
                exchange("push", 24576, 9.0),
                exchange("pull", 24576, 8.0),
                exchange("push", 49152, 11.0),
            ],
            ..Deep::default()
        };
        let found = deep.exchanges().unwrap();
        assert_eq!(found.choice, [(1, "pull".to_owned()), (2, "push".to_owned())]);
        assert_eq!(found.microseconds(1), Some(8.0));
        assert_eq!((Deep::default().exchanges(), Deep::default().read_rate()), (None, None));
    }
}
