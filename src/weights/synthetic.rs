//! Synthetic weights: a published model's true shapes and formats with random numbers in them, so
//! that its speed can be measured without a download.
//!
//! Every tensor is a window into a pool of its dtype, at a place that depends on its name. So a
//! model of any size takes the memory of its largest tensor, and still no two tensors read the same
//! bytes in the same order.

use std::collections::{HashMap, HashSet};

use safetensors::Dtype;
use serde_json::Value;

use super::checkpoint::{Checkpoint, Shard, TensorRef};
use super::manifest::{Geometry, Manifest, PartShape, Role};
use super::mmap::Bytes;
use super::source::Source;
use crate::error::{Error, Result};

/// Configs of the published models, by the name behind `synthetic:`.
const CONFIGS: [(&str, &str); 4] = [
    ("glm-5", include_str!("../../weights-manifest/configs/glm-5.json")),
    ("glm-5.1", include_str!("../../weights-manifest/configs/glm-5.1.json")),
    ("glm-5.2", include_str!("../../weights-manifest/configs/glm-5.2.json")),
    ("glm-5.3", include_str!("../../weights-manifest/configs/glm-5.3.json")),
];

/// Random numbers that a pool repeats: more than any cache holds.
const BLOCK_BYTES: usize = 64 << 20;
/// Windows begin at multiples of this, so that every dtype and block of scales is aligned.
const ALIGNMENT: usize = 64;

/// config.json of the model called `name`, cut to its first `layers` layers.
///
/// # Errors
/// Input error if there is no such model or it has fewer layers.
pub fn config_json(name: &str, layers: Option<usize>) -> Result<Vec<u8>> {
    let found = CONFIGS.iter().find(|(known, _)| *known == name);
    let Some((_, json)) = found else {
        let known: Vec<&str> = CONFIGS.iter().map(|(name, _)| *name).collect();
        return Err(Error::input(format!(
            "--model synthetic:{name}: expected one of {}",
            known.join(", ")
        )));
    };
    let mut config: Value = serde_json::from_str(json)
        .map_err(|e| Error::runtime(format!("weights-manifest/configs/{name}.json: {e}")))?;
    let whole = config["num_hidden_layers"].as_u64().unwrap_or(0) as usize;
    if let Some(layers) = layers {
        if layers == 0 || layers > whole {
            return Err(Error::input(format!("--layers {layers}: {name} has 1 to {whole}")));
        }
        config["num_hidden_layers"] = layers.into();
        for key in ["indexer_types", "mlp_layer_types"] {
            if let Some(list) = config[key].as_array_mut() {
                list.truncate(layers);
            }
        }
    }
    Ok(config.to_string().into_bytes())
}

/// A checkpoint of this geometry in the layout of the published NVFP4 export: routed experts of the
/// main layers NVFP4, everything else BF16.
///
/// # Errors
/// Only if the manifest itself is broken.
pub fn synthetic(source: Source, manifest: &Manifest, geometry: &Geometry) -> Result<Checkpoint> {
    let mut tensors: Vec<(String, Pool, Dtype, Vec<usize>, usize)> = Vec::new();
    for module in manifest.modules(geometry)? {
        let entry = &manifest.entries[module.entry];
        if entry.optional {
            continue;
        }
        let in_mtp = module.layer.is_some_and(|layer| geometry.layers[layer].mtp);
        let wanted = if entry.group == "experts" && !in_mtp { "nvfp4" } else { "bf16" };
        let mut formats = manifest.formats_of(entry).map(|(_, format)| format);
        let first = formats.next();
        let format = formats.find(|format| format.name == wanted).filter(|_| wanted == "nvfp4");
        let Some(format) = format.or(first) else {
            continue;
        };
        for part in &format.parts {
            let shape = part.shape.of(&module.shape).unwrap_or_default();
            let bytes = shape.iter().product::<usize>() * part.dtype.bitsize() / 8;
            let pool = match (part.role, part.shape, module.shape.len()) {
                (_, PartShape::Scalar, _) => Pool::Scalars,
                (Role::BlockScales, ..) => Pool::BlockScales,
                (_, _, 1) if part.dtype == Dtype::F32 => Pool::Zeros,
                (_, _, 1) => Pool::Ones,
                _ if part.dtype == Dtype::U8 => Pool::Codes,
                _ => Pool::Values,
            };
            let name = part.tensor_name(&module.name);
            tensors.push((name, pool, part.dtype, shape, bytes));
        }
    }
    let mut sizes: HashMap<Pool, usize> = HashMap::new();
    for (_, pool, _, _, bytes) in &tensors {
        let size = sizes.entry(*pool).or_default();
        *size = (*size).max(*bytes);
    }
    let mut shards = Vec::new();
    let mut places = HashMap::new();
    for (pool, size) in sizes {
        places.insert(pool, (shards.len(), size));
        // Windows of the largest tensor still have room to differ.
        let bytes = pool.fill(size + BLOCK_BYTES.min(size));
        shards.push(Shard::new(format!("synthetic {pool:?}"), Bytes::owned(bytes)));
    }
    let mut checkpoint = Checkpoint {
        source,
        pack: None,
        shards,
        tensors: HashMap::with_capacity(tensors.len()),
        problems: Vec::new(),
        lost: HashSet::new(),
    };
    for (number, (name, pool, dtype, shape, bytes)) in tensors.into_iter().enumerate() {
        let (shard, size) = places[&pool];
        let slack = (size + BLOCK_BYTES.min(size) - bytes) / ALIGNMENT;
        let start = match pool {
            Pool::Scalars | Pool::Ones | Pool::Zeros => 0,
            _ => scramble(number as u64) as usize % (slack + 1) * ALIGNMENT,
        };
        let tensor = TensorRef { number, shard, dtype, shape, range: start..start + bytes };
        checkpoint.tensors.insert(name, tensor);
    }
    Ok(checkpoint)
}

/// Kinds of numbers, each with a pool of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Pool {
    /// BF16 values of the size of trained weights.
    Values,
    /// Random NVFP4 codes.
    Codes,
    /// E4M3 block scales between 0.5 and 2.
    BlockScales,
    /// F32 scales that make NVFP4 values as large as BF16 ones.
    Scalars,
    /// BF16 gains of norms.
    Ones,
    /// F32 biases of the router.
    Zeros,
}

impl Pool {
    fn fill(self, bytes: usize) -> Vec<u8> {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        let block_len = bytes.min(BLOCK_BYTES);
        let mut block: Vec<u8> = Vec::with_capacity(block_len + 8);
        let mut number = 0u64;
        while block.len() < block_len {
            let random = scramble(number).to_le_bytes();
            number += 1;
            match self {
                // Sign and mantissa are random, the exponent is that of 2^-7 to 2^-5.
                Pool::Values => block.extend(random.as_chunks::<2>().0.iter().flat_map(|pair| {
                    let exponent = 120 + u16::from(pair[1] & 1);
                    let bits =
                        u16::from(pair[1] & 0x80) << 8 | exponent << 7 | u16::from(pair[0] & 0x7F);
                    bits.to_le_bytes()
                })),
                Pool::Codes => block.extend(random),
                Pool::BlockScales => block.extend(random.map(|byte| 0x30 + (byte & 0x0F))),
                Pool::Scalars => block.extend([0.004f32, 0.004].map(f32::to_le_bytes).concat()),
                Pool::Ones => block.extend([0x80, 0x3F].repeat(4)),
                Pool::Zeros => block.extend([0; 8]),
            }
        }
        block.truncate(block_len);
        let mut filled = Vec::with_capacity(bytes);
        while filled.len() < bytes {
            filled.extend_from_slice(&block[..block_len.min(bytes - filled.len())]);
        }
        filled
    }
}

/// Bits of a number, mixed (splitmix64: Steele, Lea, Flood 2014).
fn scramble(number: u64) -> u64 {
    let mut z = number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
