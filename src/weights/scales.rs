//! Reads every scale of a checkpoint and checks that it is a finite number, and that no tensor of
//! them is zero throughout.
//!
//! One NaN scale turns a whole block of weights into NaN and every answer into noise, so loading
//! does this too.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use safetensors::Dtype;

use super::audit::{Audit, Problem, Resolved, Severity};
use super::checkpoint::{Checkpoint, TensorRef};
use super::formats::decode_e4m3;
use super::manifest::{Manifest, Role};

/// Problems with the scales of all modules in `audit`, sorted by tensor. `progress` is called with
/// the bytes read since its last call, from several threads.
pub fn check_scales(
    checkpoint: &Checkpoint,
    manifest: &Manifest,
    audit: &Audit,
    progress: &(dyn Fn(u64) + Sync),
) -> Vec<Problem> {
    let mut quantised: Vec<&Resolved> =
        audit.modules.values().filter(|module| module.parts.len() > 1).collect();
    // In the order of the files: a disk reads ahead, and a page is read once.
    quantised.sort_by_key(|module| {
        module.parts.iter().map(|(_, tensor)| (tensor.shard, tensor.range.start)).min()
    });
    let next = AtomicUsize::new(0);
    let problems = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(module) = quantised.get(next.fetch_add(1, Ordering::Relaxed)) {
                    for (role, tensor) in module.parts.iter().filter(|(r, _)| *r != Role::Values) {
                        if let Some(problem) = check(checkpoint, manifest, module, *role, tensor) {
                            problems.lock().unwrap_or_else(PoisonError::into_inner).push(problem);
                        }
                        progress(tensor.range.len() as u64);
                    }
                }
            });
        }
    });
    let mut problems = problems.into_inner().unwrap_or_else(PoisonError::into_inner);
    problems.sort_by(|a: &Problem, b| a.tensor.cmp(&b.tensor));
    problems
}

/// Bytes that [`check_scales`] reads.
pub fn scale_bytes(audit: &Audit) -> u64 {
    let parts = audit.modules.values().filter(|m| m.parts.len() > 1).flat_map(|m| &m.parts);
    parts.filter(|(role, _)| *role != Role::Values).map(|(_, t)| t.range.len() as u64).sum()
}

fn check(
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
