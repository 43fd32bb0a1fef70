//! The forward pass: the list of stages, written once for all backends.

use super::config::ModelConfig;
use super::rows::{RowResult, Step};
use super::stages::{Norm, Stages};
use crate::error::Result;
use crate::weights::LayerShape;

/// Runs one step on one rank.
///
/// # Errors
/// Whatever a stage reports; the caches may then hold part of the step, which the next step at the
/// same positions overwrites.
pub fn forward<S: Stages>(
    stages: &mut S,
    config: &ModelConfig,
    step: &Step,
) -> Result<Vec<RowResult>> {
    stages.embed(step)?;
    for (layer, shape) in config.layers[..config.num_hidden_layers].iter().enumerate() {
        decoder_layer(stages, layer, *shape)?;
    }
    stages.reduce_norm(Norm::Final)?;
    stages.head()
}

/// One decoder layer; its output stays in the partial sums until the next `reduce_norm`.
///
/// # Errors
/// As [`forward`].
pub fn decoder_layer<S: Stages>(stages: &mut S, layer: usize, shape: LayerShape) -> Result<()> {
    stages.reduce_norm(Norm::Input(layer))?;
    stages.project_latents(layer)?;
    stages.project_queries(layer)?;
    // Other layers attend over the list of the nearest earlier layer that owns an indexer.
    if shape.indexer {
        stages.score_keys(layer)?;
        stages.select_keys(layer)?;
    }
    stages.attend(layer)?;
    stages.project_values(layer)?;
    stages.project_output(layer)?;

    stages.reduce_norm(Norm::PostAttention(layer))?;
    if shape.moe {
        stages.route(layer)?;
        stages.expert_gate_up(layer)?;
        stages.expert_down(layer)
    } else {
        stages.dense_gate_up(layer)?;
        stages.dense_down(layer)
    }
}
