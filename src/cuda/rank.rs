//! One rank on one device: its weights, caches, buffers and kernels.

use std::sync::{Arc, Mutex, PoisonError};

use super::drafter::{DeviceDrafter, DraftKernels, DrafterBuffers, check_head};
use super::fabric::Fabric;
use super::kernel_set::KernelSet;
use super::layout::{
    MAX_EXPERTS, MAX_HIDDEN, MAX_INDEX_DIM, MAX_LATENT, MAX_SPLITS_OF_LIST, MAX_USED, SPLIT,
};
use super::places::Places;
use super::plan::{Buffers, MemoryPlan, Sizes};
use super::stages::{HostPlaces, Recorder};
use super::upload::Uploader;
use super::weights::DeviceWeights;
use super::{Device, DeviceMemory, Stream};
use crate::comm::Choice;
use crate::error::{Error, Result};
use crate::model::{DraftParams, MlpParams, ModelConfig, ModelParams};

/// Held from looking at a device's free memory to taking it.
static ALLOCATING: Mutex<()> = Mutex::new(());

/// Settings that a rank is built for.
#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// The device.
    pub device: usize,
    /// Tokens a sequence may have.
    pub context: usize,
    /// Sequences that may exist at a time.
    pub parallel: usize,
    /// Ids from here on are never an arg-max.
    pub vocab_limit: usize,
    /// Which rank of how many.
    pub rank: usize,
    /// Ranks that share the model.
    pub ranks: usize,
}

/// A rank's end of the exchange.
#[derive(Clone)]
pub struct RankComm {
    /// All ranks' mailboxes.
    pub fabric: Arc<Fabric>,
    /// This rank.
    pub rank: usize,
    /// The variants that it takes.
    pub choice: Arc<Choice>,
}

/// One rank.
pub struct CudaRank {
    pub(super) config: Arc<ModelConfig>,
    pub(super) sizes: Sizes,
    pub(super) kernels: KernelSet,
    pub(super) weights: DeviceWeights,
    pub(super) buffers: Buffers,
    /// Its drafter's kernels and buffers, if the weights have one.
    pub(super) drafter: Option<DeviceDrafter>,
    /// Kernels bring later ones' weights into the L2 cache, if TALON_L2_PREFETCH=1: it cost 6 % of a
    /// step on an H200 and may pay where the cache is larger.
    pub(super) prefetch: bool,
    /// Ids of this rank's part of the vocabulary that are real, and the id of its first.
    pub(super) vocab_limit: usize,
    pub(super) first_id: usize,
    /// The same limit in the whole vocabulary, and which rank this is.
    pub(super) vocab_limit_of_all: usize,
    pub(super) index: usize,
    /// How it exchanges with the other ranks, if it does.
    pub(super) comm: Option<RankComm>,
    pub(super) plan: MemoryPlan,
    pub(super) stream: Stream,
    pub(super) device: Arc<Device>,
    /// All of the above lies in it.
    _memory: DeviceMemory,
}

impl CudaRank {
    /// Loads a rank; `progress` is told of (bytes of weights placed since the last call, all of them).
    ///
    /// # Errors
    /// Input error if the model has a shape that the kernels do not take or does not fit.
    pub fn load(
        config: &Arc<ModelConfig>,
        params: &ModelParams,
        options: &CudaOptions,
        comm: Option<RankComm>,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Self> {
        let plan = memory_plan(config, params, options)?;
        let device = Device::open(options.device)?;
        let sizes = sizes(config, params, options);
        let name = format!("GPU {} ({})", options.device, device.name());
        let kernels = KernelSet::load(&device, attend_shared(config))?;
        let memory = {
            // Ranks that share a device each see what the others have taken.
            let _turn = ALLOCATING.lock().unwrap_or_else(PoisonError::into_inner);
            plan.check(device.free_bytes()?, options.context, &name)?;
            DeviceMemory::alloc(&device, plan.total())?
        };
        let mut places = Places::filling(memory.address(), Uploader::new(&device)?);
        let weights = DeviceWeights::place(config, params, &mut places, &mut |bytes| {
            progress(bytes, plan.weights);
        })?;
        let buffers = Buffers::place(config, &sizes, &mut places);
        let drafter = match place_drafter((config, params, options), &sizes, &mut places) {
            Some(buffers) => Some(DeviceDrafter { kernels: DraftKernels::load(&device)?, buffers }),
            None => None,
        };
        places.finish()?;

        let stream = Stream::new(&device)?;
        // Padding and unused entries are read by nothing that matters, but never as NaN.
        let first = buffers.rows;
        stream.fill(first, 0, plan.caches_and_buffers)?;
        let rope = (config.qk_rope_head_dim, config.rope_theta);
        stream.upload(buffers.angles, &angles(rope, options.context))?;
        if let (Some(DraftParams::Eagle3(head)), Some(drafter)) = (&params.drafter, &drafter)
            && let Some(own) = &drafter.buffers.head
        {
            stream
                .upload(own.angles, &angles((own.rope, head.config.rope_theta), options.context))?;
        }
        stream.synchronize()?;
        let share = weights.vocabulary;
        let vocab_limit = options.vocab_limit.saturating_sub(share * options.rank).min(share);
        Ok(Self {
            config: config.clone(),
            sizes,
            kernels,
            weights,
            buffers,
            drafter,
            prefetch: std::env::var_os("TALON_L2_PREFETCH").is_some_and(|value| value == "1"),
            vocab_limit,
            vocab_limit_of_all: options.vocab_limit,
            first_id: share * options.rank,
            index: options.rank,
            comm,
            plan,
            stream,
            device,
            _memory: memory,
        })
    }
}

impl CudaRank {
    /// A recorder for stages that run one by one, without a host that writes steps and reads results:
    /// these lie in the buffers.
    pub(super) fn recorder(&self, rows: usize, long: bool) -> Recorder<'_> {
        let host = HostPlaces { step: self.buffers.step, results: self.buffers.results };
        let stream = &self.stream;
        Recorder { rank: self, stream, rows, long, with_head: true, host, collectives: 0 }
    }
}

/// What a rank takes of its device; nothing is loaded, and no device is needed.
///
/// # Errors
/// Input error if the model has a shape that the kernels do not take.
pub fn memory_plan(
    config: &Arc<ModelConfig>,
    params: &ModelParams,
    options: &CudaOptions,
) -> Result<MemoryPlan> {
    check_shape(config)?;
    if let Some(DraftParams::Eagle3(head)) = &params.drafter {
        check_head(&head.config, config, options.ranks)?;
    }
    let sizes = sizes(config, params, options);
    let mut counted = Places::counting();
    DeviceWeights::place(config, params, &mut counted, &mut |_| {})?;
    let weights = counted.used();
    Buffers::place(config, &sizes, &mut counted);
    place_drafter((config, params, options), &sizes, &mut counted);
    Ok(MemoryPlan { weights, caches_and_buffers: counted.used() - weights })
}

/// Gives the buffers of a drafter, if there is one, their places.
fn place_drafter(
    (config, params, options): (&ModelConfig, &ModelParams, &CudaOptions),
    sizes: &Sizes,
    places: &mut Places,
) -> Option<DrafterBuffers> {
    let drafter = params.drafter.as_ref()?;
    Some(DrafterBuffers::place(config, drafter, sizes, options.ranks, places))
}

/// Shared memory of `attend`: positions and queries, padded against bank conflicts.
pub fn attend_shared(config: &ModelConfig) -> u32 {
    ((SPLIT + 8) * (config.kv_lora_rank + config.qk_rope_head_dim + 8) * 2) as u32
}

fn sizes(config: &ModelConfig, params: &ModelParams, options: &CudaOptions) -> Sizes {
    let mut sizes = Sizes {
        heads: config.num_attention_heads / options.ranks,
        vocabulary: params.lm_head.rows(),
        dense_width: 0,
        shared_width: 0,
        expert_width: 0,
        hidden: config.hidden_size,
        layers: params.layers.len(),
        context: options.context,
        parallel: options.parallel,
    };
    for layer in &params.layers {
        match &layer.mlp {
            MlpParams::Dense(dense) => sizes.dense_width = dense.gate_proj.rows(),
            MlpParams::Moe(moe) => {
                sizes.shared_width = moe.shared_experts.gate_proj.rows();
                sizes.expert_width = moe.experts[0].gate_proj.rows();
            }
        }
    }
    if let Some(DraftParams::Eagle3(head)) = &params.drafter {
        let own_logits = head.params.lm_head.as_ref().map_or(0, |lm_head| lm_head.rows());
        sizes.vocabulary = sizes.vocabulary.max(own_logits);
        sizes.dense_width = sizes.dense_width.max(head.params.gate_proj.rows());
        sizes.hidden = sizes.hidden.max(head.config.hidden_size);
    }
    sizes
}

/// (cos, sin) of every pair of a width at every position, computed as the CPU backend does.
fn angles((width, theta): (usize, f32), context: usize) -> Vec<u8> {
    let frequency = |pair: usize| 1.0 / theta.powf((2 * pair) as f32 / width as f32);
    let frequencies: Vec<f32> = (0..width / 2).map(frequency).collect();
    let turns = (0..context).flat_map(|position| {
        frequencies.iter().flat_map(move |frequency| {
            let (sin, cos) = (position as f32 * frequency).sin_cos();
            [cos, sin]
        })
    });
    turns.flat_map(f32::to_ne_bytes).collect()
}

/// Refuses shapes that the kernels do not take.
fn check_shape(config: &ModelConfig) -> Result<()> {
    let multiples = [
        ("hidden_size", config.hidden_size, 32),
        ("q_lora_rank", config.q_lora_rank, 16),
        ("kv_lora_rank", config.kv_lora_rank, 16),
        ("qk_nope_head_dim", config.qk_nope_head_dim, 8),
        ("qk_rope_head_dim", config.qk_rope_head_dim, 16),
        ("v_head_dim", config.v_head_dim, 8),
        ("index_n_heads", config.index_n_heads, 8),
        ("index_head_dim", config.index_head_dim, 32),
    ];
    for (name, value, multiple) in multiples {
        if !value.is_multiple_of(multiple) {
            return Err(Error::input(format!(
                "{name} {value}: the CUDA kernels need a multiple of {multiple}; use --backend cpu"
            )));
        }
    }
    let limits = [
        ("hidden_size", config.hidden_size, MAX_HIDDEN),
        ("n_routed_experts", config.n_routed_experts, MAX_EXPERTS),
        ("num_experts_per_tok", config.num_experts_per_tok, MAX_USED),
    ];
    let limits = limits.into_iter().chain([
        ("q_lora_rank", config.q_lora_rank, MAX_LATENT),
        ("kv_lora_rank", config.kv_lora_rank, MAX_LATENT),
        ("index_topk", config.index_topk, MAX_SPLITS_OF_LIST * SPLIT),
        ("index_head_dim", config.index_head_dim, MAX_INDEX_DIM),
    ]);
    for (name, value, limit) in limits {
        if value > limit {
            return Err(Error::input(format!(
                "{name} {value}: the CUDA kernels take at most {limit}; use --backend cpu"
            )));
        }
    }
    Ok(())
}
