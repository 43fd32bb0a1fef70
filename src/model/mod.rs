//! The GLM-5 family: its configuration, its named tensors, the rows of a step, and the forward
//! pass as a list of stages that a backend implements.

mod config;
mod forward;
mod params;
mod rows;
mod stages;

pub use config::{ModelConfig, Quantization};
pub use forward::forward;
pub use params::{
    AttentionParams, DenseParams, ExpertParams, IndexerParams, LayerParams, MlpParams, ModelParams,
    MoeParams, Weights,
};
pub use rows::{Output, Row, RowResult, Step};
pub use stages::{Norm, Stages};
