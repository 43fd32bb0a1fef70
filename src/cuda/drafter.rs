//! A drafter on one rank's device: its tensors, its caches and the buffers between its stages. What
//! it shares with the target (residual, partial sums, normed rows, logits) lies in the rank's own.

use std::sync::Arc;

use super::layout::{
    DeviceMatrix, DraftLayout, FeatureLayout, FeatureNorm, Globals, MAX_HIDDEN, MAX_LATENT,
    MAX_ROWS, UNIT,
};
use super::places::Places;
use super::plan::{Sizes, splits};
use super::weights::{KvDims, place_kv_b};
use super::{Device, Kernel, Module};
use crate::error::{Error, Result};
use crate::model::{
    DraftParams, Eagle3Attention, Eagle3AttentionConfig, Eagle3Config, Eagle3Share,
    FEATURE_POSITIONS, FeatureSource, ModelConfig, MtpJoin,
};

/// Positions of a chunk of `draft_attend`, and the most blocks that share a row's chunks.
const CHUNK: usize = 128;
const MAX_SPLITS: usize = 64;
/// Query heads that a block of it takes, and the widest value.
pub const DRAFT_HEADS: usize = 8;
const MAX_VALUE: usize = 512;

/// The drafter's own kernels; it also uses the target's.
pub struct DraftKernels {
    pub keep_residual: Kernel,
    pub keep_normed: Kernel,
    pub take_draft: Kernel,
    pub join_floats: Kernel,
    pub join_halves: Kernel,
    pub draft_keys: Kernel,
    pub draft_attend: Kernel,
    pub draft_merge: Kernel,
    pub draft_choose: Kernel,
}

impl DraftKernels {
    /// Loads them.
    ///
    /// # Errors
    /// Input error if this build has no kernels or none for the device.
    pub fn load(device: &Arc<Device>) -> Result<Self> {
        let module = |stem: &str| {
            let fatbin = super::kernel_set::require(stem)?;
            Ok::<_, Error>(Arc::new(Module::load(device, stem, fatbin)?))
        };
        let (keep, join) = (module("keep_features")?, module("draft_join")?);
        let (attend, choose) = (module("draft_attend")?, module("draft_choose")?);
        let kernels = Self {
            keep_residual: keep.kernel("keep_residual")?,
            keep_normed: keep.kernel("keep_normed")?,
            take_draft: join.kernel("take_draft")?,
            join_floats: join.kernel("join_floats")?,
            join_halves: join.kernel("join_halves")?,
            draft_keys: attend.kernel("draft_keys")?,
            draft_attend: attend.kernel("draft_attend")?,
            draft_merge: attend.kernel("draft_merge")?,
            draft_choose: choose.kernel("draft_choose")?,
        };
        for join in [&kernels.join_floats, &kernels.join_halves] {
            join.set_max_shared((MAX_HIDDEN * size_of::<f32>()) as u32)?;
        }
        Ok(kernels)
    }
}

/// A drafter's tensors; vectors are addresses of f32 values.
pub enum DrafterWeights {
    /// The MTP layer's own; its decoder layer stands behind the target's.
    Mtp { enorm: u64, hnorm: u64, eh_proj: DeviceMatrix },
    /// An EAGLE-3 head's.
    Eagle3(Box<Eagle3Weights>),
}

/// A head's tensors, as in `model::Eagle3Params`.
pub struct Eagle3Weights {
    pub config: Arc<Eagle3Config>,
    pub fc: DeviceMatrix,
    /// `input_norm` or the `fc_norm`s behind each other.
    pub feature_norm: FeatureNorm,
    pub input_layernorm: u64,
    pub hidden_norm: u64,
    pub attention: AttentionWeights,
    pub post_attention_layernorm: u64,
    pub gate_up: DeviceMatrix,
    pub globals: Globals,
    pub down: DeviceMatrix,
    /// Of the rank's share of the MLP.
    pub width: usize,
    pub norm: u64,
    /// The head's own, or the target's.
    pub embed_tokens: Option<u64>,
    pub lm_head: Option<DeviceMatrix>,
    /// Rows of `lm_head` without padding.
    pub vocabulary: usize,
    /// Address of the target id of each draft id, 0 where they are the same; and how many draft ids
    /// have a target id below a limit.
    pub target_ids: u64,
    pub draft_to_target: Option<Arc<Vec<u32>>>,
}

/// A head's attention.
pub enum AttentionWeights {
    Gqa {
        q_proj: DeviceMatrix,
        k_proj: DeviceMatrix,
        v_proj: DeviceMatrix,
        o_proj: DeviceMatrix,
    },
    Mla {
        q_a_proj: DeviceMatrix,
        q_a_layernorm: u64,
        q_b_proj: DeviceMatrix,
        kv_a_proj_with_mqa: DeviceMatrix,
        kv_a_layernorm: u64,
        w_uk: DeviceMatrix,
        w_uv: DeviceMatrix,
        o_proj: DeviceMatrix,
    },
}

impl DrafterWeights {
    /// Places a rank's share.
    ///
    /// # Errors
    /// Input error if the device cannot take a tensor.
    pub fn place(params: &DraftParams, places: &mut Places) -> Result<Self> {
        match params {
            DraftParams::Mtp(MtpJoin { enorm, hnorm, eh_proj }) => Ok(Self::Mtp {
                enorm: places.floats(enorm)?,
                hnorm: places.floats(hnorm)?,
                eh_proj: places.matrix(eh_proj)?,
            }),
            DraftParams::Eagle3(head) => Ok(Self::Eagle3(Box::new(place_head(head, places)?))),
        }
    }
}

fn place_head(head: &Eagle3Share, places: &mut Places) -> Result<Eagle3Weights> {
    let (config, params) = (&head.config, &head.params);
    // A norm for each feature leaves nothing of one over all of them.
    let fc_norms = params.fc_norm.concat();
    let gain = if fc_norms.is_empty() { params.input_norm.as_ref() } else { Some(&fc_norms) };
    let feature_norm = match gain {
        None => FeatureNorm::default(),
        Some(gain) => FeatureNorm {
            gain: places.floats(gain)?,
            width: (gain.len() / params.fc_norm.len().max(1)) as i32,
            eps: config.rms_norm_eps,
        },
    };
    let (gate_up, globals) = places.gate_up(&params.gate_proj, &params.up_proj)?;
    Ok(Eagle3Weights {
        config: Arc::clone(config),
        // Its input is stored as small as that of a down projection (features.cuh).
        fc: places.down(&params.fc)?,
        feature_norm,
        input_layernorm: places.floats(&params.input_layernorm)?,
        hidden_norm: places.floats(&params.hidden_norm)?,
        attention: place_attention(config, &params.attention, places)?,
        post_attention_layernorm: places.floats(&params.post_attention_layernorm)?,
        gate_up,
        globals,
        down: places.down(&params.down_proj)?,
        width: params.gate_proj.rows(),
        norm: places.floats(&params.norm)?,
        embed_tokens: match &params.embed_tokens {
            Some(table) => Some(places.table(table)?),
            None => None,
        },
        lm_head: match &params.lm_head {
            Some(lm_head) => Some(places.matrix(lm_head)?),
            None => None,
        },
        vocabulary: params.lm_head.as_ref().map_or(0, |lm_head| lm_head.rows()),
        target_ids: match &head.draft_to_target {
            Some(ids) => places.ids(ids)?,
            None => 0,
        },
        draft_to_target: head.draft_to_target.clone(),
    })
}

fn place_attention(
    config: &Eagle3Config,
    attention: &Eagle3Attention,
    places: &mut Places,
) -> Result<AttentionWeights> {
    Ok(match attention {
        Eagle3Attention::Gqa { q_proj, k_proj, v_proj, o_proj } => AttentionWeights::Gqa {
            q_proj: places.matrix(q_proj)?,
            k_proj: places.matrix(k_proj)?,
            v_proj: places.matrix(v_proj)?,
            o_proj: places.matrix(o_proj)?,
        },
        Eagle3Attention::Mla {
            q_a_proj,
            q_a_layernorm,
            q_b_proj,
            kv_a_proj_with_mqa,
            kv_a_layernorm,
            kv_b_proj,
            o_proj,
        } => {
            let Eagle3AttentionConfig::Mla {
                qk_nope_head_dim: nope,
                v_head_dim: value,
                kv_lora_rank: latent,
                ..
            } = config.attention
            else {
                unreachable!("the tensors were read by the configuration");
            };
            let (w_uk, w_uv) = place_kv_b(&KvDims { nope, value, latent }, kv_b_proj, places)?;
            AttentionWeights::Mla {
                q_a_proj: places.matrix(q_a_proj)?,
                q_a_layernorm: places.floats(q_a_layernorm)?,
                q_b_proj: places.matrix(q_b_proj)?,
                kv_a_proj_with_mqa: places.matrix(kv_a_proj_with_mqa)?,
                kv_a_layernorm: places.floats(kv_a_layernorm)?,
                w_uk,
                w_uv,
                o_proj: places.matrix(o_proj)?,
            }
        }
    })
}

/// Places of a drafter's caches and buffers; addresses. Named and shaped as in the kernels that write
/// them.
pub struct DrafterBuffers {
    /// Which of the target's vectors are kept, and how.
    pub source: FeatureSource,
    pub layout: FeatureLayout,
    pub ring: u64,
    /// `[MAX_ROWS][count * hidden]`
    pub features: u64,
    /// `[MAX_ROWS][2 H]`
    pub joined: u64,
    /// Of a head.
    pub head: Option<HeadBuffers>,
}

/// What an EAGLE-3 head needs besides.
pub struct HeadBuffers {
    pub layout: DraftLayout,
    /// `[parallel * context + 1][entry]`
    pub cache: u64,
    /// `[projection_splits][MAX_ROWS][width]`, the results of its first projections
    pub projected: u64,
    pub width: usize,
    pub projection_splits: usize,
    pub query_latents: u64,
    pub without_rope: u64,
    pub queries: u64,
    pub parts: u64,
    pub bounds: u64,
    pub attended: u64,
    pub values: u64,
    /// `[context][rope / 2]` of (cos, sin)
    pub angles: u64,
    /// Width of its rotary embedding.
    pub rope: usize,
}

impl DrafterBuffers {
    /// Gives each its place, on one of `ranks`.
    pub fn place(
        config: &ModelConfig,
        drafter: &DraftParams,
        sizes: &Sizes,
        ranks: usize,
        places: &mut Places,
    ) -> Self {
        const F16: usize = 2;
        let source = drafter.features();
        let width = source.count() * config.hidden_size;
        let (unit, hidden) = match drafter {
            DraftParams::Mtp(_) => (1.0, config.hidden_size),
            DraftParams::Eagle3(head) => {
                (super::layout::ACTIVATION_FACTOR, head.config.hidden_size)
            }
        };
        let layout = FeatureLayout {
            positions: FEATURE_POSITIONS as i32,
            count: source.count() as i32,
            hidden: config.hidden_size as i32,
            unit,
        };
        let entries = sizes.parallel * FEATURE_POSITIONS + 1;
        Self {
            ring: places.take(entries * width * F16),
            features: places.take((MAX_ROWS * width + UNIT) * F16),
            joined: places.take((MAX_ROWS * 2 * hidden + UNIT) * F16),
            head: match drafter {
                DraftParams::Mtp(_) => None,
                DraftParams::Eagle3(head) => {
                    Some(HeadBuffers::place(&head.config, sizes, ranks, places))
                }
            },
            source,
            layout,
        }
    }
}

impl HeadBuffers {
    fn place(config: &Eagle3Config, sizes: &Sizes, ranks: usize, places: &mut Places) -> Self {
        const F16: usize = 2;
        const F32: usize = size_of::<f32>();
        let pad = |rows: usize| rows.next_multiple_of(16);
        let heads = config.num_attention_heads / ranks;
        let blocks = sizes.context.div_ceil(CHUNK).min(MAX_SPLITS);
        let shape = DraftLayout {
            heads: heads as i32,
            key_heads: 1,
            key_dim: 0,
            value_dim: 0,
            value_at: 0,
            entry: 0,
            context: sizes.context as i32,
            splits: blocks as i32,
            scale: 0.0,
        };
        // Sizes of the latents and of the values that latent attention makes of what it has attended to.
        let (layout, width, rope, q_rank, without, values) = match config.attention {
            Eagle3AttentionConfig::Gqa { num_key_value_heads, head_dim } => {
                let key_heads = num_key_value_heads / ranks;
                let layout = DraftLayout {
                    key_heads: key_heads as i32,
                    key_dim: head_dim as i32,
                    value_dim: head_dim as i32,
                    value_at: (key_heads * head_dim) as i32,
                    entry: (2 * key_heads * head_dim) as i32,
                    scale: (head_dim as f32).powf(-0.5),
                    ..shape
                };
                let width = pad(heads * head_dim) + 2 * pad(key_heads * head_dim);
                (layout, width, head_dim, 0, 0, 0)
            }
            Eagle3AttentionConfig::Mla {
                q_lora_rank,
                kv_lora_rank,
                qk_nope_head_dim,
                qk_rope_head_dim,
                v_head_dim,
            } => {
                let entry = kv_lora_rank + qk_rope_head_dim;
                let layout = DraftLayout {
                    key_dim: entry as i32,
                    value_dim: kv_lora_rank as i32,
                    entry: entry as i32,
                    scale: ((qk_nope_head_dim + qk_rope_head_dim) as f32).powf(-0.5),
                    ..shape
                };
                let width = pad(q_lora_rank) + pad(entry);
                let values = heads * v_head_dim;
                (layout, width, qk_rope_head_dim, q_lora_rank, heads * qk_nope_head_dim, values)
            }
        };
        let projection_splits = splits(width / 16, (2 * config.hidden_size).div_ceil(UNIT));
        let (key, value) = (layout.key_dim as usize, layout.value_dim as usize);
        let mut rows = |bytes: usize| places.take(MAX_ROWS * bytes + UNIT * F16);
        let mut buffers = Self {
            layout,
            cache: 0,
            projected: rows(projection_splits * width * F32),
            width,
            projection_splits,
            query_latents: rows(q_rank * F16),
            without_rope: rows(without * F16),
            queries: rows(heads * key * F16),
            parts: rows(blocks * heads * value * F32),
            bounds: rows(blocks * heads * 2 * F32),
            attended: rows(heads * value * F16),
            values: rows(values * F16),
            angles: 0,
            rope,
        };
        let entries = sizes.parallel * sizes.context + 1;
        buffers.cache = places.take(entries * layout.entry as usize * F16);
        buffers.angles = places.take(sizes.context * rope * F32);
        buffers
    }
}

/// Refuses heads that the kernels do not take.
///
/// # Errors
/// Input error that names the size.
pub fn check_head(config: &Eagle3Config, target: &ModelConfig, ranks: usize) -> Result<()> {
    let refuse = |what: String| {
        Err(Error::input(format!(
            "EAGLE-3 head: {what}; use --backend cpu, or --draft none for the model without it"
        )))
    };
    // Ranks exchange in mailboxes that have the target's layout.
    if ranks > 1 && config.hidden_size != target.hidden_size {
        return refuse(format!(
            "hidden_size {}, and several CUDA ranks need the target's {}",
            config.hidden_size, target.hidden_size
        ));
    }
    let (mut multiples, mut limits) = (
        vec![
            ("hidden_size", config.hidden_size, 8),
            ("intermediate_size", config.intermediate_size, 8),
        ],
        vec![("hidden_size", config.hidden_size, MAX_HIDDEN)],
    );
    match config.attention {
        Eagle3AttentionConfig::Gqa { head_dim, .. } => {
            multiples.push(("head_dim", head_dim, 8));
            limits.push(("head_dim", head_dim, MAX_VALUE));
        }
        Eagle3AttentionConfig::Mla {
            q_lora_rank,
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
        } => {
            multiples.extend([
                ("q_lora_rank", q_lora_rank, 16),
                ("kv_lora_rank", kv_lora_rank, 16),
                ("qk_nope_head_dim", qk_nope_head_dim, 8),
                ("qk_rope_head_dim", qk_rope_head_dim, 8),
                ("v_head_dim", v_head_dim, 8),
            ]);
            limits.extend([
                ("q_lora_rank", q_lora_rank, MAX_LATENT),
                ("kv_lora_rank", kv_lora_rank, MAX_VALUE),
            ]);
        }
    }
    for (name, value, multiple) in multiples {
        if !value.is_multiple_of(multiple) {
            return refuse(format!("{name} {value}, and CUDA needs a multiple of {multiple}"));
        }
    }
    for (name, value, limit) in limits {
        if value > limit {
            return refuse(format!("{name} {value}, and CUDA takes at most {limit}"));
        }
    }
    Ok(())
}

/// A drafter that is ready.
pub struct DeviceDrafter {
    pub kernels: DraftKernels,
    pub buffers: DrafterBuffers,
}
