//! The tensors of one rank on the device.

use super::drafter::DrafterWeights;
use super::layout::{DeviceMatrix, DownExperts, GateUpExperts, Globals};
use super::places::Places;
use crate::error::Result;
use crate::model::{DenseParams, LayerParams, MlpParams, ModelConfig, ModelParams, MoeParams};
use crate::weights::Matrix;

/// All tensors; vectors are addresses of f32 values.
pub struct DeviceWeights {
    /// `[vocab_size, hidden_size]`, BF16, row by row.
    pub embed_tokens: u64,
    /// The target's; behind them the MTP layer, if it drafts.
    pub layers: Vec<DeviceLayer>,
    pub norm: u64,
    /// Of the MTP layer.
    pub shared_head_norm: u64,
    /// What drafts, besides the MTP layer.
    pub drafter: Option<DrafterWeights>,
    pub lm_head: DeviceMatrix,
    /// Rows of `lm_head` without padding.
    pub vocabulary: usize,
}

/// A layer's tensors.
pub struct DeviceLayer {
    pub input_layernorm: u64,
    pub post_attention_layernorm: u64,
    pub q_a_proj: DeviceMatrix,
    pub q_a_layernorm: u64,
    pub q_b_proj: DeviceMatrix,
    pub kv_a_proj_with_mqa: DeviceMatrix,
    pub kv_a_layernorm: u64,
    /// W_UK of each head, transposed: `[kv_lora_rank, qk_nope_head_dim]`.
    pub w_uk: DeviceMatrix,
    /// W_UV of each head: `[v_head_dim, kv_lora_rank]`.
    pub w_uv: DeviceMatrix,
    pub o_proj: DeviceMatrix,
    /// Matrices of no rows and null vectors in layers without an indexer.
    pub indexer: DeviceIndexer,
    pub mlp: DeviceMlp,
}

#[derive(Default)]
pub struct DeviceIndexer {
    pub wq_b: DeviceMatrix,
    pub wk: DeviceMatrix,
    pub k_norm_weight: u64,
    pub k_norm_bias: u64,
    pub weights_proj: DeviceMatrix,
}

/// A layer's MLP; `width` is that of the rank's share.
pub enum DeviceMlp {
    Dense { gate_up: DeviceMatrix, globals: Globals, down: DeviceMatrix, width: usize },
    Moe(Box<DeviceMoe>),
}

/// A router, its experts and the shared one; widths are those of the rank's share.
pub struct DeviceMoe {
    pub router: DeviceMatrix,
    pub bias: u64,
    pub shared_gate_up: DeviceMatrix,
    pub shared_globals: Globals,
    pub shared_down: DeviceMatrix,
    pub shared_width: usize,
    pub gate_up: GateUpExperts,
    pub down: DownExperts,
    pub width: usize,
    /// Number of the rank's first routed expert, and how many it has.
    pub first_expert: usize,
    pub experts: usize,
}

impl DeviceWeights {
    /// Places all tensors of a rank; `progress` is told of the bytes that were placed since the last
    /// call.
    ///
    /// # Errors
    /// Input error if the device cannot take a tensor.
    pub fn place(
        config: &ModelConfig,
        params: &ModelParams,
        places: &mut Places,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self> {
        let embed_tokens = places.table(&params.embed_tokens)?;
        let mut layers = Vec::with_capacity(params.layers.len());
        let mut placed = places.used();
        for layer in &params.layers {
            layers.push(place_layer(config, layer, places)?);
            progress(places.used() - placed);
            placed = places.used();
        }
        Ok(Self {
            embed_tokens,
            layers,
            norm: places.floats(&params.norm)?,
            shared_head_norm: places.floats(&params.shared_head_norm)?,
            drafter: match &params.drafter {
                Some(drafter) => Some(DrafterWeights::place(drafter, places)?),
                None => None,
            },
            lm_head: places.matrix(&params.lm_head)?,
            vocabulary: params.lm_head.rows(),
        })
    }

    /// Bytes of weights that a step of one row reads: all but the table, the drafter and the experts
    /// that are not used. `layers` is the number of the target's.
    pub fn step_bytes(&self, layers: usize, experts_used: usize) -> usize {
        let layers = self.layers[..layers].iter().map(|layer| layer.step_bytes(experts_used));
        layers.sum::<usize>() + self.lm_head.bytes()
    }
}

impl DeviceLayer {
    fn step_bytes(&self, experts_used: usize) -> usize {
        let attention = [
            &self.q_a_proj,
            &self.q_b_proj,
            &self.kv_a_proj_with_mqa,
            &self.w_uk,
            &self.w_uv,
            &self.o_proj,
            // wq_b is read only where keys are scored; the report counts the short context.
            &self.indexer.wk,
            &self.indexer.weights_proj,
        ];
        let mlp = match &self.mlp {
            DeviceMlp::Dense { gate_up, down, .. } => gate_up.bytes() + down.bytes(),
            DeviceMlp::Moe(moe) => {
                let expert = moe.gate_up.first.bytes() + moe.down.first.bytes();
                moe.router.bytes()
                    + moe.shared_gate_up.bytes()
                    + moe.shared_down.bytes()
                    + experts_used * expert
            }
        };
        attention.iter().map(|matrix| matrix.bytes()).sum::<usize>() + mlp
    }
}

fn place_layer(
    config: &ModelConfig,
    layer: &LayerParams,
    places: &mut Places,
) -> Result<DeviceLayer> {
    let attention = &layer.attention;
    let indexer = match &layer.indexer {
        None => DeviceIndexer::default(),
        Some(indexer) => DeviceIndexer {
            wq_b: places.matrix(&indexer.wq_b)?,
            wk: places.matrix(&indexer.wk)?,
            k_norm_weight: places.floats(&indexer.k_norm_weight)?,
            k_norm_bias: places.floats(&indexer.k_norm_bias)?,
            weights_proj: places.matrix(&indexer.weights_proj)?,
        },
    };
    let dims = KvDims {
        nope: config.qk_nope_head_dim,
        value: config.v_head_dim,
        latent: config.kv_lora_rank,
    };
    let (w_uk, w_uv) = place_kv_b(&dims, &attention.kv_b_proj, places)?;
    Ok(DeviceLayer {
        input_layernorm: places.floats(&layer.input_layernorm)?,
        post_attention_layernorm: places.floats(&layer.post_attention_layernorm)?,
        q_a_proj: places.matrix(&attention.q_a_proj)?,
        q_a_layernorm: places.floats(&attention.q_a_layernorm)?,
        q_b_proj: places.matrix(&attention.q_b_proj)?,
        kv_a_proj_with_mqa: places.matrix(&attention.kv_a_proj_with_mqa)?,
        kv_a_layernorm: places.floats(&attention.kv_a_layernorm)?,
        w_uk,
        w_uv,
        o_proj: places.matrix(&attention.o_proj)?,
        indexer,
        mlp: match &layer.mlp {
            MlpParams::Dense(dense) => place_dense(dense, places)?,
            MlpParams::Moe(moe) => place_moe(moe, places)?,
        },
    })
}

/// Sizes of kv_b: a head's key without rope, its value, and the latent that both come from.
pub(super) struct KvDims {
    pub nope: usize,
    pub value: usize,
    pub latent: usize,
}

/// kv_b as the two matrices that absorbed attention takes, in f16: W_UK is needed transposed,
/// across which no scale of a block can be kept.
pub(super) fn place_kv_b(
    dims: &KvDims,
    kv_b: &Matrix,
    places: &mut Places,
) -> Result<(DeviceMatrix, DeviceMatrix)> {
    let KvDims { nope, value, latent } = *dims;
    let heads = kv_b.rows() / (nope + value);
    let rows = |first: usize, count: usize| {
        let mut values = vec![0.0; count * latent];
        kv_b.decode(first..first + count, &mut values);
        values
    };
    let w_uk = places.heads((heads, latent, nope), |head| {
        let stored = rows(head * (nope + value), nope);
        (0..latent)
            .flat_map(|c| (0..nope).map(move |d| (d, c)))
            .map(|(d, c)| stored[d * latent + c])
            .collect()
    })?;
    let w_uv =
        places.heads((heads, value, latent), |head| rows(head * (nope + value) + nope, value))?;
    Ok((w_uk, w_uv))
}

fn place_dense(dense: &DenseParams, places: &mut Places) -> Result<DeviceMlp> {
    let (gate_up, globals) = places.gate_up(&dense.gate_proj, &dense.up_proj)?;
    let down = places.down(&dense.down_proj)?;
    Ok(DeviceMlp::Dense { gate_up, globals, down, width: dense.gate_proj.rows() })
}

fn place_moe(moe: &MoeParams, places: &mut Places) -> Result<DeviceMlp> {
    let shared = &moe.shared_experts;
    let (shared_gate_up, shared_globals) = places.gate_up(&shared.gate_proj, &shared.up_proj)?;
    let gates: Vec<(&Matrix, &Matrix)> =
        moe.experts.iter().map(|expert| (&expert.gate_proj, &expert.up_proj)).collect();
    let downs: Vec<&Matrix> = moe.experts.iter().map(|expert| &expert.down_proj).collect();
    let (first, gate_globals, up_globals) = places.gate_ups(&gates)?;
    let gate_up = GateUpExperts {
        first,
        gate_globals: places.floats(&gate_globals)?,
        up_globals: places.floats(&up_globals)?,
    };
    let (first, globals) = places.downs(&downs)?;
    let down = DownExperts { first, globals: places.floats(&globals)? };
    Ok(DeviceMlp::Moe(Box::new(DeviceMoe {
        router: places.matrix(&moe.gate)?,
        bias: places.floats(&moe.e_score_correction_bias)?,
        shared_gate_up,
        shared_globals,
        shared_down: places.down(&shared.down_proj)?,
        shared_width: shared.gate_proj.rows(),
        gate_up,
        down,
        width: moe.experts[0].gate_proj.rows(),
        first_expert: moe.first_expert,
        experts: moe.experts.len(),
    })))
}
