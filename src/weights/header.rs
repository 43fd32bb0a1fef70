//! The header of a safetensors file: 8 bytes of little-endian length, then JSON that gives each
//! tensor's dtype, shape and byte range in the data that follows.
//!
//! The entries' types come from the `safetensors` crate. The checks are ours, because a checkpoint
//! fault must be reported with the tensor's name, which the crate's own checks leave out.

use std::fmt;

use safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::error::{Error, Result};

/// No real header comes near this (the largest seen is 1 MB); beyond it the length is garbage.
const MAX_HEADER_BYTES: u64 = 100 << 20;
const LENGTH_BYTES: usize = 8;

/// The tensors of one shard.
#[derive(Debug)]
pub struct ShardHeader {
    /// Tensors in the order of their data.
    pub tensors: Vec<(String, TensorInfo)>,
    /// Where the data begins in the file; `data_offsets` count from here.
    pub data_start: usize,
}

/// Reads and checks the header of a shard; `file` is its name in messages.
///
/// On success every tensor's byte range lies inside `bytes`, has the size that its dtype and shape
/// ask for, and overlaps no other.
///
/// # Errors
/// Input error that names the file and, where one is at fault, the tensor.
pub fn read_header(file: &str, bytes: &[u8]) -> Result<ShardHeader> {
    let fail = |what: String| Error::input(format!("{file}: {what}; fetch the file again"));
    let Some(prefix) = bytes.first_chunk::<LENGTH_BYTES>() else {
        return Err(fail(format!(
            "{} bytes, too short for a safetensors file (expected at least 8)",
            bytes.len()
        )));
    };
    let header_bytes = u64::from_le_bytes(*prefix);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(fail(format!(
            "header length {header_bytes} is beyond the {MAX_HEADER_BYTES} bytes that a \
             safetensors header may have"
        )));
    }
    let data_start = LENGTH_BYTES + header_bytes as usize;
    let Some(json) = bytes.get(LENGTH_BYTES..data_start) else {
        return Err(fail(format!(
            "truncated inside the header: expected at least {data_start} bytes, found {}",
            bytes.len()
        )));
    };
    let mut entries: Entries = serde_json::from_slice(json)
        .map_err(|e| fail(format!("the safetensors header is not valid: {e}")))?;
    entries.0.sort_by_key(|(_, info)| info.data_offsets);

    let data_bytes = bytes.len() - data_start;
    let mut end_of_previous = 0;
    for (index, (name, info)) in entries.0.iter().enumerate() {
        let (start, end) = info.data_offsets;
        let expected = tensor_bytes(info).ok_or_else(|| {
            fail(format!("tensor {name}: shape {:?} is impossibly large", info.shape))
        })?;
        if start.checked_add(expected) != Some(end) {
            return Err(fail(format!(
                "tensor {name}: {:?} {:?} takes {expected} bytes but the header gives it {start}..\
                 {end}",
                info.dtype, info.shape
            )));
        }
        if start < end_of_previous {
            let other = &entries.0[index - 1].0;
            return Err(fail(format!("tensors {other} and {name} overlap at data byte {start}")));
        }
        if start > end_of_previous {
            return Err(fail(format!(
                "tensor {name} starts at data byte {start}, expected {end_of_previous} (a gap)"
            )));
        }
        if end > data_bytes {
            return Err(fail(format!(
                "truncated: tensor {name} ends at byte {}, the file has {}",
                data_start + end,
                bytes.len()
            )));
        }
        end_of_previous = end;
    }
    if end_of_previous != data_bytes {
        return Err(fail(format!(
            "{} bytes, expected {} from the header",
            bytes.len(),
            data_start + end_of_previous
        )));
    }
    Ok(ShardHeader { tensors: entries.0, data_start })
}

/// Size in bytes of a tensor's data; `None` on overflow or a fraction of a byte.
fn tensor_bytes(info: &TensorInfo) -> Option<usize> {
    let elements = info.shape.iter().try_fold(1usize, |product, dim| product.checked_mul(*dim))?;
    let bits = elements.checked_mul(info.dtype.bitsize())?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// The header's JSON object without its `__metadata__`.
struct Entries(Vec<(String, TensorInfo)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct EntriesVisitor;
        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Entries, A::Error> {
                let mut tensors = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        let info = map
                            .next_value::<TensorInfo>()
                            .map_err(|e| serde::de::Error::custom(format!("tensor {name}: {e}")))?;
                        tensors.push((name, info));
                    }
                }
                Ok(Entries(tensors))
            }
        }
        deserializer.deserialize_map(EntriesVisitor)
    }
}
