//! Checkpoints: memory-mapped safetensors shards, the number formats in them, the manifest that
//! says which tensors a model family has, and the audit of a checkpoint against it.
//!
//! In: a directory or the embedded demo. Out: [`Resolved`] modules (a format and the bytes of its
//! parts) that `model::params` slices for a rank. Shards stay mapped; a load reads what it needs of them
//! once (`reading`).

mod audit;
mod checkpoint;
mod demo;
mod formats;
mod fp8_rows;
mod hashed_file;
mod hashes;
mod header;
mod manifest;
mod mmap;
mod pack;
mod pack_writer;
mod reading;
mod scales;
mod source;
mod synthetic;

pub use audit::{Audit, MtpState, Problem, Resolved, Severity, audit};
pub use checkpoint::{Checkpoint, INDEX, TensorRef};
pub use demo::{demo, demo_eagle3};
pub use formats::{Matrix, Slice, StoredFormat, decode_e4m3};
pub use fp8_rows::{encode_e4m3, to_fp8_rows};
pub use hashes::{FileHash, HashList, compare_hashes, hash_files, sha256};
pub use header::{ShardHeader, read_header};
pub use manifest::{Axis, Entry, Format, Geometry, LayerShape, Manifest, Module, PartShape, Role};
pub use mmap::Bytes;
pub use pack::{PACK, Pack, share_name};
pub use pack_writer::{Packed, Packing};
pub use reading::{Needed, Read, Reading, What};
pub use scales::check_scales;
pub use source::{EmbeddedFile, Source};
pub use synthetic::synthetic;
