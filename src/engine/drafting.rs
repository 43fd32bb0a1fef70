//! Which drafter a model is loaded with.

use std::path::PathBuf;

use log::info;

use crate::error::{Error, Result};
use crate::model::{DraftModel, Eagle3Head, ModelConfig};
use crate::weights::{Audit, Checkpoint, MtpState, Role, Source};

/// What `--draft` asks for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum DraftChoice {
    /// An EAGLE-3 head that came with the model, else the MTP layer, else none.
    #[default]
    Auto,
    /// The MTP layer.
    Mtp,
    /// No drafter.
    None,
    /// The EAGLE-3 head in this directory.
    Directory(PathBuf),
}

/// Opens the drafter that `choice` asks for; with its name in reports.
///
/// # Errors
/// Input error if it was asked for and cannot be had. `Auto` goes on without an MTP layer that is
/// not there.
pub fn open_drafter(
    choice: &DraftChoice,
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    audit: &Audit,
    rope_theta: Option<f32>,
) -> Result<(DraftModel, Option<String>)> {
    let eagle3 = |source: Source| -> Result<(DraftModel, Option<String>)> {
        let head = Eagle3Head::open(source, config, rope_theta)?;
        Ok((DraftModel::Eagle3(Box::new(head)), Some("eagle3".into())))
    };
    match choice {
        DraftChoice::None => Ok((DraftModel::None, None)),
        DraftChoice::Directory(path) => eagle3(Source::Directory(path.clone())),
        DraftChoice::Mtp => match mtp_fault(config, checkpoint, audit) {
            None => Ok((DraftModel::Mtp, Some("mtp".into()))),
            Some(fault) => Err(Error::input(format!("--draft mtp: {fault}"))),
        },
        DraftChoice::Auto => {
            if let Some(source) = checkpoint.source.eagle3_head() {
                return eagle3(source);
            }
            match mtp_fault(config, checkpoint, audit) {
                None => Ok((DraftModel::Mtp, Some("mtp".into()))),
                Some(fault) => {
                    info!("no drafter: {fault}");
                    Ok((DraftModel::None, None))
                }
            }
        }
    }
}

/// Why the MTP layer cannot draft, if it cannot.
fn mtp_fault(config: &ModelConfig, checkpoint: &Checkpoint, audit: &Audit) -> Option<String> {
    let layer = config.num_hidden_layers;
    match audit.mtp {
        MtpState::None => {
            return Some("config.json promises no MTP layer (num_nextn_predict_layers 0)".into());
        }
        MtpState::Absent => {
            return Some(format!(
                "the checkpoint has no tensor of the MTP layer: model.layers.{layer}.eh_proj, \
                 enorm, hnorm, shared_head.norm and its decoder layer are missing; use a checkpoint \
                 that ships it, or another --draft"
            ));
        }
        MtpState::Partial | MtpState::Complete => {}
    }
    let mut empty: Vec<&str> = audit
        .modules
        .values()
        .filter(|resolved| resolved.module.layer == Some(layer))
        .filter(|resolved| {
            let values = resolved.parts.iter().find(|(role, _)| *role == Role::Values);
            values.is_some_and(|(_, tensor)| is_zero(&checkpoint.bytes(tensor)))
        })
        .map(|resolved| resolved.module.name.as_str())
        .collect();
    empty.sort_unstable();
    let first = empty.first()?;
    Some(format!(
        "{} tensors of the MTP layer are filled with zeros, the first is {first}; use a checkpoint \
         that ships it, or another --draft",
        empty.len()
    ))
}

/// Whether a tensor's first 64 KiB are all zero: a placeholder is zero throughout, and no trained
/// tensor has that many zeros in a row.
fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().take(64 << 10).all(|byte| *byte == 0)
}
