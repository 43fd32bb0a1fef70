//! What a model drafts with, and a rank's share of it.

use std::sync::Arc;

use super::config::ModelConfig;
use super::draft::FeatureSource;
use super::eagle3::{Eagle3Config, Eagle3Head, Eagle3Params};
use super::params::{ModelParams, MtpParams, Weights};
use crate::error::Result;
use crate::weights::{Matrix, Needed, Slice};

/// What a model drafts with.
pub enum DraftModel {
    /// Nothing.
    None,
    /// The checkpoint's MTP layer.
    Mtp,
    /// An EAGLE-3 head.
    Eagle3(Box<Eagle3Head>),
}

/// A drafter's tensors on one rank.
pub enum DraftParams {
    /// The MTP layer; its decoder layer stands behind the target's layers.
    Mtp(MtpJoin),
    /// An EAGLE-3 head.
    Eagle3(Box<Eagle3Share>),
}

/// The MTP layer's own tensors.
pub struct MtpJoin {
    /// `[hidden_size]`, applied to the embedding
    pub enorm: Vec<f32>,
    /// `[hidden_size]`, applied to the hidden state
    pub hnorm: Vec<f32>,
    /// `[hidden_size, 2 × hidden_size]`, the embedding's half first
    pub eh_proj: Matrix,
}

/// A rank's share of an EAGLE-3 head.
pub struct Eagle3Share {
    /// Its configuration.
    pub config: Arc<Eagle3Config>,
    /// Its tensors.
    pub params: Eagle3Params,
    /// Target id of each draft id; `None` if the head drafts from the whole vocabulary.
    pub draft_to_target: Option<Arc<Vec<u32>>>,
}

impl DraftModel {
    /// What a load reads: the target's weights, and the drafter's own.
    pub fn needed<'a>(&'a self, weights: &'a Weights, config: &ModelConfig) -> Vec<Needed<'a>> {
        let layers = config.num_hidden_layers;
        match self {
            DraftModel::None => vec![weights.needed(layers)],
            DraftModel::Mtp => vec![weights.needed(layers + 1)],
            DraftModel::Eagle3(head) => vec![weights.needed(layers), head.needed()],
        }
    }

    /// Adds a rank's share of the drafter to `params`, its share of the target.
    ///
    /// # Errors
    /// Input error if a tensor is missing or the ranks cannot share it.
    pub fn join(
        &self,
        params: &mut ModelParams,
        weights: &Weights,
        config: &ModelConfig,
        rank: Slice,
    ) -> Result<()> {
        params.drafter = match self {
            DraftModel::None => None,
            DraftModel::Mtp => {
                let MtpParams { enorm, hnorm, eh_proj, layer, shared_head_norm } =
                    weights.mtp(config, rank)?;
                params.layers.push(layer);
                params.shared_head_norm = shared_head_norm;
                Some(DraftParams::Mtp(MtpJoin { enorm, hnorm, eh_proj }))
            }
            DraftModel::Eagle3(head) => Some(DraftParams::Eagle3(Box::new(Eagle3Share {
                config: Arc::new(head.config.clone()),
                params: head.params(config, rank)?,
                draft_to_target: head.draft_to_target.clone().map(Arc::new),
            }))),
        };
        Ok(())
    }
}

impl DraftParams {
    /// Which of the target's vectors it reads.
    pub fn features(&self) -> FeatureSource {
        match self {
            DraftParams::Mtp(_) => FeatureSource::FinalNorm,
            DraftParams::Eagle3(head) => FeatureSource::Boundaries(head.config.boundaries.clone()),
        }
    }
}
