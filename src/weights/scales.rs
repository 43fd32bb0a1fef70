//! Reads every scale of a checkpoint and checks that it is a finite number, and that no tensor of
//! them is zero throughout.
//!
//! One NaN scale turns a whole block of weights into NaN and every answer into noise, so loading
//! does this too.

use safetensors::Dtype;

use super::audit::{Audit, Problem, Resolved, Severity};
use super::checkpoint::{Checkpoint, TensorRef};
use super::formats::decode_e4m3;
use super::manifest::{Manifest, Role};
use super::reading::{Needed, Reading, What};
use crate::error::Result;

/// Problems with the scales of all modules in `audit`, sorted by tensor. `progress` is called with
/// the bytes read since its last call and all of them, from several threads.
///
/// # Errors
/// Runtime error that names the file if it cannot be read.
pub fn check_scales(
    checkpoint: &Checkpoint,
    manifest: &Manifest,
    audit: &Audit,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Vec<Problem>> {
    let modules = audit.modules.values().collect();
    let needed = Needed { checkpoint, manifest, modules };
    Ok(Reading::new(&[needed], What::Scales).run(progress)?.problems)
}

/// What is wrong with a module's scales.
pub(super) fn check(
    checkpoint: &Checkpoint,
    manifest: &Manifest,
    module: &Resolved,
    role: Role,
    tensor: &TensorRef,
) -> Option<Problem> {
    let bytes = checkpoint.bytes(tensor);
    // No exporter writes such scales: they would make a whole module zero. Activation scales are
    // not used, whatever they are.
    let empty = role != Role::Unused && !bytes.is_empty() && bytes.iter().all(|byte| *byte == 0);
    let problem = |kind, expected: &str, found: String| {
        let name = &module.module.name;
        let part = manifest.formats[module.format].parts.iter().find(|part| part.role == role);
        Problem {
            kind,
            severity: Severity::Error,
            file: checkpoint.file_of(tensor),
            tensor: Some(part.map_or_else(|| name.clone(), |part| part.tensor_name(name))),
            expected: expected.into(),
            found,
            fix: "fetch the shard again and compare it with --check-hashes".into(),
        }
    };
    if empty {
        let found = "zero scales, as a hole in a download leaves them".into();
        return Some(problem("zero_scale", "scales above zero", found));
    }
    let (index, value) = match tensor.dtype {
        Dtype::F8_E4M3 => {
            let index = bytes.iter().position(|code| decode_e4m3(*code).is_nan())?;
            (index, f32::NAN)
        }
        Dtype::F32 => {
            let (values, _) = bytes.as_chunks::<4>();
            let mut values = values.iter().map(|value| f32::from_le_bytes(*value));
            let usable = |value: f32| {
                // The reciprocal of zero, or of next to nothing, is infinite.
                let reciprocal = role == Role::GlobalScaleReciprocal;
                value.is_finite() && (!reciprocal || (1.0 / value).is_finite())
            };
            values.by_ref().enumerate().find(|(_, value)| !usable(*value))?
        }
        _ => return None,
    };
    Some(problem("bad_scale", "finite scales", format!("{value} at element {index}")))
}
