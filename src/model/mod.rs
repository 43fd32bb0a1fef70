//! The GLM-5 family: its configuration, its named tensors, the rows of a step, and the forward
//! pass as a list of stages that a backend implements.

mod backend;
mod config;
mod draft;
mod draft_model;
mod eagle3;
mod forward;
mod params;
mod rows;
mod stages;

pub use backend::Backend;
pub use config::{ModelConfig, Quantization};
pub use draft::{
    Draft, DraftRow, DraftStages, Drafted, FEATURE_POSITIONS, FeatureSource, Hidden, MAX_GUESSES,
    draft,
};
pub use draft_model::{DraftModel, DraftParams, Eagle3Share, MtpJoin};
pub use eagle3::{Eagle3Attention, Eagle3AttentionConfig, Eagle3Config, Eagle3Head, Eagle3Params};
pub use forward::{decoder_layer, forward};
pub use params::{
    AttentionParams, DenseParams, DenseWeights, ExpertParams, ExpertSplit, IndexerParams,
    LayerParams, MlpParams, ModelParams, MoeParams, MtpParams, Weights,
};
pub use rows::{Output, Row, RowResult, Step};
pub use stages::{Norm, Stages};
