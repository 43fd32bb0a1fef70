//! The reference backend: every stage in plain f32 Rust, ranks as threads. It is the oracle that
//! the CUDA backend is compared with, so it is written to be read; nothing depends on the CPU's
//! instruction set, and the same model gives the same bits on every machine.

mod alone;
mod attention;
mod cache;
mod draft_attend;
mod drafter;
mod eagle3;
mod features;
mod head;
mod indexer;
mod mlp;
mod mtp;
mod ops;
mod rank;
mod ranks;
mod residual;

pub use cache::LayerCache;
pub use rank::{Buffers, CpuRank};
pub use ranks::{CpuOptions, CpuRanks, cache_bytes};
