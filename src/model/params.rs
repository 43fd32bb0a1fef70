//! The named tensors of a model, as one rank sees them: whole where ranks hold copies, its share
//! where the manifest says that ranks share. Shapes are `[out, in]`; R = number of ranks.

use std::collections::HashMap;
use std::ops::Range;

use super::config::ModelConfig;
use super::draft_model::DraftParams;
use crate::error::{Error, Result};
use crate::weights::{
    Audit, Checkpoint, Geometry, Manifest, Matrix, Needed, Resolved, Slice, share_name, to_fp8_rows,
};

/// How ranks share the routed experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExpertSplit {
    /// Each rank has some rows of every expert.
    #[default]
    Rows,
    /// Each rank has some experts, whole.
    Whole,
}

/// How the dense weights are held: those of attention, shared experts, dense MLPs and lm_head. (The
/// indexer and the router, whose small errors change what is chosen, stay as they are stored.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DenseWeights {
    /// As they are stored.
    #[default]
    Stored,
    /// E4M3 with a scale for each row, if they are stored in more bits (`weights::to_fp8_rows`).
    Fp8,
}

/// A checkpoint that passed its audit.
pub struct Weights {
    experts: ExpertSplit,
    dense: DenseWeights,
    checkpoint: Checkpoint,
    manifest: Manifest,
    modules: HashMap<String, Resolved>,
}

/// All tensors of the model.
pub struct ModelParams {
    /// `[vocab_size, hidden_size]`
    pub embed_tokens: Matrix,
    /// The main layers; behind them the MTP layer, if it drafts.
    pub layers: Vec<LayerParams>,
    /// `[hidden_size]` of the MTP layer, empty without one.
    pub shared_head_norm: Vec<f32>,
    /// `[hidden_size]`
    pub norm: Vec<f32>,
    /// `[vocab_size / R, hidden_size]`
    pub lm_head: Matrix,
    /// What drafts, besides the MTP layer's decoder layer.
    pub drafter: Option<DraftParams>,
}

/// The multi-token-prediction layer (facts/glm5.md §4).
pub struct MtpParams {
    /// `[hidden_size]`, applied to the embedding
    pub enorm: Vec<f32>,
    /// `[hidden_size]`, applied to the hidden state
    pub hnorm: Vec<f32>,
    /// `[hidden_size, 2 × hidden_size]`, the embedding's half first
    pub eh_proj: Matrix,
    /// The decoder layer.
    pub layer: LayerParams,
    /// `[hidden_size]`
    pub shared_head_norm: Vec<f32>,
}

/// One decoder layer.
pub struct LayerParams {
    /// `[hidden_size]`
    pub input_layernorm: Vec<f32>,
    /// The attention block.
    pub attention: AttentionParams,
    /// The indexer, in layers that own one.
    pub indexer: Option<IndexerParams>,
    /// `[hidden_size]`
    pub post_attention_layernorm: Vec<f32>,
    /// The feed-forward block.
    pub mlp: MlpParams,
}

/// Multi-head latent attention.
pub struct AttentionParams {
    /// `[q_lora_rank, hidden_size]`
    pub q_a_proj: Matrix,
    /// `[q_lora_rank]`
    pub q_a_layernorm: Vec<f32>,
    /// `[heads / R × (qk_nope_head_dim + qk_rope_head_dim), q_lora_rank]`
    pub q_b_proj: Matrix,
    /// `[kv_lora_rank + qk_rope_head_dim, hidden_size]`
    pub kv_a_proj_with_mqa: Matrix,
    /// `[kv_lora_rank]`
    pub kv_a_layernorm: Vec<f32>,
    /// `[heads / R × (qk_nope_head_dim + v_head_dim), kv_lora_rank]`
    pub kv_b_proj: Matrix,
    /// `[hidden_size, heads / R × v_head_dim]`
    pub o_proj: Matrix,
}

/// The lightning indexer.
pub struct IndexerParams {
    /// `[index_n_heads × index_head_dim, q_lora_rank]`
    pub wq_b: Matrix,
    /// `[index_head_dim, hidden_size]`
    pub wk: Matrix,
    /// `[index_head_dim]`
    pub k_norm_weight: Vec<f32>,
    /// `[index_head_dim]`
    pub k_norm_bias: Vec<f32>,
    /// `[index_n_heads, hidden_size]`
    pub weights_proj: Matrix,
}

/// The feed-forward block of a layer.
pub enum MlpParams {
    /// A SwiGLU MLP.
    Dense(DenseParams),
    /// Routed experts and a shared one.
    Moe(MoeParams),
}

/// A SwiGLU MLP: `[intermediate / R, hidden]`, `[intermediate / R, hidden]`,
/// `[hidden, intermediate / R]`.
#[allow(missing_docs)] // The fields carry the tensors' own names.
pub struct DenseParams {
    pub gate_proj: Matrix,
    pub up_proj: Matrix,
    pub down_proj: Matrix,
}

/// One routed expert is a SwiGLU MLP of `moe_intermediate_size`.
pub type ExpertParams = DenseParams;

/// Routed experts.
pub struct MoeParams {
    /// `[n_routed_experts, hidden_size]`
    pub gate: Matrix,
    /// `[n_routed_experts]`, always f32 on disk: its values near 7 do not survive bf16.
    pub e_score_correction_bias: Vec<f32>,
    /// The experts: every one of them cut to this rank's rows, or this rank's whole ones.
    pub experts: Vec<ExpertParams>,
    /// Number of the first of them.
    pub first_expert: usize,
    /// The shared expert.
    pub shared_experts: DenseParams,
}

impl Weights {
    /// Takes a checkpoint whose audit found no error.
    ///
    /// # Errors
    /// Input error that names the first error of the audit.
    pub fn new(checkpoint: Checkpoint, manifest: Manifest, audit: Audit) -> Result<Self> {
        audit.refuse_errors()?;
        let (experts, dense) = (ExpertSplit::default(), DenseWeights::default());
        Ok(Self { experts, dense, checkpoint, manifest, modules: audit.modules })
    }

    /// The same weights, with the routed experts shared in another way.
    pub fn with_experts(self, experts: ExpertSplit) -> Self {
        Self { experts, ..self }
    }

    /// The same weights, with the dense ones held in another way.
    pub fn with_dense(self, dense: DenseWeights) -> Self {
        Self { dense, ..self }
    }

    /// Whether the checkpoint has the module called `name`.
    pub fn has(&self, name: &str) -> bool {
        self.modules.contains_key(name)
    }

    /// The modules that a load reads: those of layers below `layers`, and those outside of layers.
    pub fn needed(&self, layers: usize) -> Needed<'_> {
        let loaded = |m: &&Resolved| m.module.layer.is_none_or(|layer| layer < layers);
        let modules = self.modules.values().filter(loaded).collect();
        Needed { checkpoint: &self.checkpoint, manifest: &self.manifest, modules }
    }

    /// Whether the number of ranks divides all sizes that ranks share.
    ///
    /// # Errors
    /// Input error that names the size.
    pub fn check_ranks(&self, geometry: &Geometry, tp: usize) -> Result<()> {
        self.manifest.check_ranks(geometry, tp)
    }

    /// A rank's share of the matrix called `name`.
    ///
    /// # Errors
    /// Input error if there is none, or the ranks cannot share it.
    pub fn matrix(&self, name: &str, rank: Slice) -> Result<Matrix> {
        let share = || {
            let pack = self.checkpoint.pack.as_ref().filter(|pack| pack.tp == rank.of)?;
            self.modules.get(&share_name(rank.index, name)).filter(|_| rank.index < pack.tp)
        };
        let resolved = self.modules.get(name).or_else(share).ok_or_else(|| {
            Error::input(format!(
                "{}: tensor {name} is missing; talon verify lists what else is",
                self.checkpoint.source.display("")
            ))
        })?;
        Matrix::new(&self.checkpoint, &self.manifest, resolved, rank)
    }

    /// A rank's share of a matrix of the dense weights.
    fn dense_matrix(&self, name: &str, rank: Slice) -> Result<Matrix> {
        let matrix = self.matrix(name, rank)?;
        match self.dense {
            DenseWeights::Stored => Ok(matrix),
            DenseWeights::Fp8 => to_fp8_rows(name, matrix),
        }
    }

    /// The values of the vector called `name`.
    ///
    /// # Errors
    /// As [`Weights::matrix`].
    pub fn vector(&self, name: &str, rank: Slice) -> Result<Vec<f32>> {
        Ok(self.matrix(name, rank)?.to_vec())
    }

    /// The target's tensors of a rank, without a drafter (see [`DraftModel::join`]).
    ///
    /// [`DraftModel::join`]: super::DraftModel::join
    ///
    /// # Errors
    /// Input error if the number of ranks cannot share the model.
    pub fn params(&self, config: &ModelConfig, rank: Slice) -> Result<ModelParams> {
        self.manifest.check_ranks(&config.geometry(), rank.of)?;
        let layers = (0..config.num_hidden_layers)
            .map(|layer| self.layer(config, layer, rank))
            .collect::<Result<Vec<LayerParams>>>()?;
        Ok(ModelParams {
            embed_tokens: self.matrix("model.embed_tokens.weight", rank)?,
            layers,
            shared_head_norm: Vec::new(),
            norm: self.vector("model.norm.weight", rank)?,
            lm_head: self.dense_matrix("lm_head.weight", rank)?,
            drafter: None,
        })
    }

    /// The MTP layer of a rank.
    ///
    /// # Errors
    /// Input error that names the first tensor that is missing.
    pub fn mtp(&self, config: &ModelConfig, rank: Slice) -> Result<MtpParams> {
        let layer = config.num_hidden_layers;
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        Ok(MtpParams {
            enorm: self.vector(&name("enorm.weight"), rank)?,
            hnorm: self.vector(&name("hnorm.weight"), rank)?,
            eh_proj: self.matrix(&name("eh_proj.weight"), rank)?,
            layer: self.layer(config, layer, rank)?,
            shared_head_norm: self.vector(&name("shared_head.norm.weight"), rank)?,
        })
    }

    /// The experts that a rank has, and its share of each.
    fn own_experts(&self, config: &ModelConfig, rank: Slice) -> Result<(Range<usize>, Slice)> {
        let all = config.n_routed_experts;
        if self.experts == ExpertSplit::Rows {
            return Ok((0..all, rank));
        }
        if self.checkpoint.pack.is_some() && rank.of > 1 {
            return Err(Error::input(
                "--experts parallel: the model is a pack, whose experts are cut into rows; use \
                 --experts split, or the checkpoint that was packed",
            ));
        }
        if !all.is_multiple_of(rank.of) {
            return Err(Error::input(format!(
                "--experts parallel: the model has {all} routed experts, which {} ranks cannot \
                 share equally; use --experts split or another --tp",
                rank.of
            )));
        }
        let each = all / rank.of;
        Ok((rank.index * each..(rank.index + 1) * each, Slice { index: 0, of: 1 }))
    }

    fn layer(&self, config: &ModelConfig, layer: usize, rank: Slice) -> Result<LayerParams> {
        let shape = config.layers[layer];
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let matrix = |part: &str| self.matrix(&name(part), rank);
        let vector = |part: &str| self.vector(&name(part), rank);
        let dense = |part: &str| self.dense_matrix(&name(part), rank);
        let swiglu = |block: &str, matrix: &dyn Fn(&str) -> Result<Matrix>| {
            let matrix = |part: &str| matrix(&format!("{block}.{part}.weight"));
            Ok::<_, Error>(DenseParams {
                gate_proj: matrix("gate_proj")?,
                up_proj: matrix("up_proj")?,
                down_proj: matrix("down_proj")?,
            })
        };
        let indexer = || -> Result<IndexerParams> {
            Ok(IndexerParams {
                wq_b: matrix("self_attn.indexer.wq_b.weight")?,
                wk: matrix("self_attn.indexer.wk.weight")?,
                k_norm_weight: vector("self_attn.indexer.k_norm.weight")?,
                k_norm_bias: vector("self_attn.indexer.k_norm.bias")?,
                weights_proj: matrix("self_attn.indexer.weights_proj.weight")?,
            })
        };
        let moe = || -> Result<MoeParams> {
            let (own, share) = self.own_experts(config, rank)?;
            let first_expert = own.start;
            let routed = |part: &str| self.matrix(&name(part), share);
            let expert = |expert: usize| swiglu(&format!("mlp.experts.{expert}"), &routed);
            Ok(MoeParams {
                gate: matrix("mlp.gate.weight")?,
                e_score_correction_bias: vector("mlp.gate.e_score_correction_bias")?,
                experts: own.map(expert).collect::<Result<Vec<ExpertParams>>>()?,
                first_expert,
                shared_experts: swiglu("mlp.shared_experts", &dense)?,
            })
        };
        Ok(LayerParams {
            input_layernorm: vector("input_layernorm.weight")?,
            attention: AttentionParams {
                q_a_proj: dense("self_attn.q_a_proj.weight")?,
                q_a_layernorm: vector("self_attn.q_a_layernorm.weight")?,
                q_b_proj: dense("self_attn.q_b_proj.weight")?,
                kv_a_proj_with_mqa: dense("self_attn.kv_a_proj_with_mqa.weight")?,
                kv_a_layernorm: vector("self_attn.kv_a_layernorm.weight")?,
                kv_b_proj: dense("self_attn.kv_b_proj.weight")?,
                o_proj: dense("self_attn.o_proj.weight")?,
            },
            indexer: shape.indexer.then(indexer).transpose()?,
            post_attention_layernorm: vector("post_attention_layernorm.weight")?,
            mlp: if shape.moe {
                MlpParams::Moe(moe()?)
            } else {
                MlpParams::Dense(swiglu("mlp", &dense)?)
            },
        })
    }
}
