//! The stages as launches: [`Recorder`] puts them into a stream in the order of
//! `model::forward`, usually while a graph is being captured.

use super::kernel_set::{
    DOWN_THREADS, GATE_UP_SHARED, LINEAR_SHARED, LINEAR_THREADS, LINEAR_WARPS, down_shared,
};
use super::layout::{
    Ahead, AttendLayout, DeviceMatrix, LatentLayout, QueryLayout, RouteLayout, Segments,
    SharedExpert, TILE,
};
use super::rank::{CudaRank, attend_shared};
use super::weights::{DeviceLayer, DeviceMlp, DeviceMoe};
use super::{Arg, Kernel, Launch, Stream};
use crate::comm::Phase;
use crate::error::Result;
use crate::model::{Norm, RowResult, Stages, Step};

/// Epsilon of the indexer's k_norm, which is not `rms_norm_eps` (facts/glm5.md §3.2).
const K_NORM_EPS: f32 = 1e-6;
/// Positions that a block of `score_keys` takes.
const SCORED: usize = 128;
/// Blocks of a row in `select_keys`, which are one cluster.
const SELECT_BLOCKS: usize = 8;
/// Warps that share a tile in `absorb_queries` and `project_values`.
pub(super) const ABSORB_WARPS: usize = 2;
pub(super) const VALUE_WARPS: usize = 4;

/// Bytes that a kernel brings into the L2 cache for a later one, at most: what the bus can carry
/// while the kernels between wait for each other.
const PREFETCH_BYTES: usize = 16 << 20;

/// Puts one step into the rank's stream.
pub struct Recorder<'a> {
    pub rank: &'a CudaRank,
    /// The rank's own, or the one that all ranks in lock-step share.
    pub stream: &'a Stream,
    /// Rows of the step, the ones that only fill it up included.
    pub rows: usize,
    /// Some row sees more than `index_topk` positions.
    pub long: bool,
    /// Whether any row wants a result.
    pub with_head: bool,
    /// Where the host writes the step and reads its results.
    pub host: HostPlaces,
    /// Exchanges between ranks that are recorded so far.
    pub collectives: u32,
}

/// Addresses in page-locked memory: of embed.cu's `Step` and of head.cu's `Result` of each row.
#[derive(Debug, Clone, Copy)]
pub struct HostPlaces {
    pub step: u64,
    pub results: u64,
}

pub(super) fn int(value: usize) -> Arg<'static> {
    Arg::from(value as i32)
}

impl Recorder<'_> {
    /// A launch that may begin while the one before it ends.
    pub(super) fn launch(
        &self,
        kernel: &Kernel,
        grid: [usize; 3],
        block: u32,
        shared_bytes: u32,
        args: &[Arg],
    ) -> Result<()> {
        let launch =
            Launch { grid: grid.map(|size| size as u32), block, shared_bytes, dependent: true };
        self.stream.launch(kernel, launch, args)
    }

    pub(super) fn linear(&self, kernel: &Kernel, grid: [usize; 3], args: &[Arg]) -> Result<()> {
        self.launch(kernel, grid, LINEAR_THREADS, LINEAR_SHARED, args)
    }

    pub(super) fn layer(&self, layer: usize) -> &DeviceLayer {
        &self.rank.weights.layers[layer]
    }

    fn moe(&self, layer: usize) -> &DeviceMoe {
        match &self.layer(layer).mlp {
            DeviceMlp::Moe(moe) => moe,
            DeviceMlp::Dense { .. } => unreachable!("forward() routes only in MoE layers"),
        }
    }

    /// What to bring into the L2 cache of a matrix; nothing if that is switched off.
    fn ahead(&self, matrix: Option<&DeviceMatrix>) -> Ahead {
        let bytes = |m: &DeviceMatrix| m.code_bytes().min(PREFETCH_BYTES) as u32;
        match matrix.filter(|_| self.rank.prefetch) {
            Some(m) => Ahead { from: m.codes, bytes: bytes(m), padding: 0 },
            None => Ahead::default(),
        }
    }

    fn query_layout(&self) -> QueryLayout {
        let config = &self.rank.config;
        QueryLayout {
            q_rank: config.q_lora_rank as i32,
            nope: config.qk_nope_head_dim as i32,
            rope: config.qk_rope_head_dim as i32,
            heads: self.rank.sizes.heads as i32,
            kv_rank: config.kv_lora_rank as i32,
            index_heads: config.index_n_heads as i32,
            index_dim: config.index_head_dim as i32,
        }
    }

    fn attend_layout(&self) -> AttendLayout {
        let config = &self.rank.config;
        AttendLayout {
            heads: self.rank.sizes.heads as i32,
            kv_rank: config.kv_lora_rank as i32,
            rope: config.qk_rope_head_dim as i32,
            context: self.rank.sizes.context as i32,
            top_k: config.index_topk as i32,
            splits: self.rank.buffers.attend_splits as i32,
            scale: ((config.qk_nope_head_dim + config.qk_rope_head_dim) as f32).powf(-0.5),
        }
    }

    fn route_layout(&self, moe: &DeviceMoe) -> RouteLayout {
        let config = &self.rank.config;
        RouteLayout {
            experts: config.n_routed_experts as i32,
            used: config.num_experts_per_tok as i32,
            splits: self.rank.buffers.route_splits as i32,
            renormalise: i32::from(config.norm_topk_prob),
            scaling: config.routed_scaling_factor,
            first_own: moe.first_expert as i32,
            own: moe.experts as i32,
        }
    }

    /// A matrix times `x` into the partial sum.
    fn partial_of(&self, matrix: &DeviceMatrix, x: u64) -> Result<()> {
        self.linear(
            self.rank.kernels.project_output.of(self.rows),
            [matrix.tiles(), 1, 1],
            &[
                Arg::of(matrix),
                x.into(),
                self.rank.buffers.partial.into(),
                int(self.rank.config.hidden_size),
                int(self.rows),
            ],
        )
    }
}

impl Stages for Recorder<'_> {
    fn embed(&mut self, _step: &Step) -> Result<()> {
        let (rank, buffers) = (self.rank, &self.rank.buffers);
        let launch = Launch {
            grid: [self.rows as u32, 1, 1],
            block: 1024,
            shared_bytes: 0,
            // Nothing of the step is there before it.
            dependent: false,
        };
        self.stream.launch(
            &rank.kernels.embed,
            launch,
            &[
                self.host.step.into(),
                buffers.rows.into(),
                buffers.control.into(),
                rank.weights.embed_tokens.into(),
                buffers.partial.into(),
                buffers.residual.into(),
                int(rank.config.hidden_size),
            ],
        )
    }

    fn reduce_norm(&mut self, norm: Norm) -> Result<()> {
        self.reduce(&self.reduction(norm))?;
        self.keep_features(norm)
    }

    fn project_latents(&mut self, layer: usize) -> Result<()> {
        let (rank, buffers, config) = (self.rank, &self.rank.buffers, &self.rank.config);
        let params = self.layer(layer);
        let indexer = &params.indexer;
        let parts = [params.q_a_proj, params.kv_a_proj_with_mqa, indexer.wk, indexer.weights_proj];
        let heights = parts.map(|part| part.rows as usize);
        let width: usize = heights.iter().sum();
        let segments = Segments(parts);
        self.linear(
            rank.kernels.project_latents.of(self.rows),
            [width / TILE, buffers.latent_splits, 1],
            &[
                Arg::of(&segments),
                buffers.normed.into(),
                int(config.hidden_size),
                buffers.latents.into(),
                int(width),
                int(self.rows),
            ],
        )?;
        let (heads, dim) = (config.index_n_heads, config.index_head_dim);
        let layout = LatentLayout {
            width: width as i32,
            splits: buffers.latent_splits as i32,
            q_rank: config.q_lora_rank as i32,
            kv_at: heights[0] as i32,
            kv_rank: config.kv_lora_rank as i32,
            rope: config.qk_rope_head_dim as i32,
            key_at: (heights[0] + heights[1]) as i32,
            dim: if indexer.wk.rows > 0 { dim as i32 } else { 0 },
            weights_at: (heights[0] + heights[1] + heights[2]) as i32,
            heads: heads as i32,
            context: rank.sizes.context as i32,
            eps: config.latent_norm_eps,
            key_eps: K_NORM_EPS,
            weight_scale: (heads as f32).powf(-0.5) * (dim as f32).powf(-0.5),
        };
        let longest = config.q_lora_rank.max(config.kv_lora_rank).max(dim);
        self.launch(
            &rank.kernels.norm_latents,
            [self.rows, 3, 1],
            512,
            (longest * size_of::<f32>()) as u32,
            &[
                buffers.rows.into(),
                buffers.latents.into(),
                Arg::of(&layout),
                params.q_a_layernorm.into(),
                params.kv_a_layernorm.into(),
                indexer.k_norm_weight.into(),
                indexer.k_norm_bias.into(),
                buffers.angles.into(),
                buffers.query_latents.into(),
                buffers.latent_caches[layer].into(),
                buffers.key_caches[layer].into(),
                buffers.index_weights.into(),
            ],
        )
    }

    fn project_queries(&mut self, layer: usize) -> Result<()> {
        let (rank, buffers) = (self.rank, &self.rank.buffers);
        let params = self.layer(layer);
        let layout = self.query_layout();
        // Scores are needed only where a row cannot attend to all it sees.
        let scored = if self.long { params.indexer.wq_b.tiles() } else { 0 };
        self.linear(
            rank.kernels.project_queries.of(self.rows),
            [params.q_b_proj.tiles() + scored, 1, 1],
            &[
                buffers.rows.into(),
                Arg::of(&params.q_b_proj),
                Arg::of(&params.indexer.wq_b),
                Arg::of(&layout),
                buffers.query_latents.into(),
                buffers.angles.into(),
                buffers.without_rope.into(),
                buffers.queries.into(),
                buffers.index_queries.into(),
                int(self.rows),
            ],
        )?;
        let tiles = params.w_uk.tiles() / rank.sizes.heads;
        self.linear(
            rank.kernels.absorb_queries.of(self.rows),
            [tiles.div_ceil(LINEAR_WARPS / ABSORB_WARPS), rank.sizes.heads, 1],
            &[
                Arg::of(&params.w_uk),
                Arg::of(&layout),
                buffers.without_rope.into(),
                buffers.queries.into(),
                Arg::of(&self.ahead(Some(&params.o_proj))),
                int(self.rows),
            ],
        )
    }

    fn score_keys(&mut self, layer: usize) -> Result<()> {
        if !self.long {
            return Ok(());
        }
        let (rank, buffers, config) = (self.rank, &self.rank.buffers, &self.rank.config);
        self.launch(
            &rank.kernels.score_keys,
            [rank.sizes.context.div_ceil(SCORED), self.rows, 1],
            128,
            0,
            &[
                buffers.rows.into(),
                buffers.index_queries.into(),
                buffers.index_weights.into(),
                buffers.key_caches[layer].into(),
                buffers.scores.into(),
                int(rank.sizes.context),
                int(config.index_n_heads),
                int(config.index_head_dim),
                int(rank.sizes.context),
                int(config.index_topk),
            ],
        )
    }

    fn select_keys(&mut self, _layer: usize) -> Result<()> {
        if !self.long {
            return Ok(());
        }
        let (rank, buffers) = (self.rank, &self.rank.buffers);
        self.launch(
            &rank.kernels.select_keys,
            [SELECT_BLOCKS, self.rows, 1],
            512,
            0,
            &[
                buffers.rows.into(),
                buffers.scores.into(),
                int(rank.sizes.context),
                buffers.selected.into(),
                int(rank.config.index_topk),
            ],
        )
    }

    fn attend(&mut self, layer: usize) -> Result<()> {
        let (rank, buffers) = (self.rank, &self.rank.buffers);
        let layout = self.attend_layout();
        self.launch(
            &rank.kernels.attend,
            [buffers.attend_splits, self.rows, rank.sizes.heads.div_ceil(8)],
            256,
            attend_shared(&rank.config),
            &[
                buffers.rows.into(),
                Arg::of(&layout),
                buffers.queries.into(),
                buffers.latent_caches[layer].into(),
                buffers.selected.into(),
                Arg::from(i32::from(!rank.config.layers[layer].indexer)),
                buffers.parts.into(),
                buffers.bounds.into(),
            ],
        )
    }

    fn project_values(&mut self, layer: usize) -> Result<()> {
        let (rank, buffers, config) = (self.rank, &self.rank.buffers, &self.rank.config);
        let layout = self.attend_layout();
        self.launch(
            &rank.kernels.merge_splits,
            [rank.sizes.heads, self.rows, config.kv_lora_rank.div_ceil(128)],
            128,
            0,
            &[
                buffers.rows.into(),
                Arg::of(&layout),
                buffers.parts.into(),
                buffers.bounds.into(),
                buffers.attended.into(),
            ],
        )?;
        let w_uv = &self.layer(layer).w_uv;
        let after = match &self.layer(layer).mlp {
            DeviceMlp::Moe(moe) => Some(&moe.shared_gate_up),
            DeviceMlp::Dense { gate_up, .. } => Some(gate_up),
        };
        let tiles = w_uv.tiles() / rank.sizes.heads;
        self.linear(
            rank.kernels.project_values.of(self.rows),
            [tiles.div_ceil(LINEAR_WARPS / VALUE_WARPS), rank.sizes.heads, 1],
            &[
                Arg::of(w_uv),
                buffers.attended.into(),
                buffers.values.into(),
                int(rank.sizes.heads),
                int(config.v_head_dim),
                Arg::of(&self.ahead(after)),
                int(self.rows),
            ],
        )
    }

    fn project_output(&mut self, layer: usize) -> Result<()> {
        self.partial_of(&self.layer(layer).o_proj, self.rank.buffers.values)
    }

    fn route(&mut self, layer: usize) -> Result<()> {
        let (rank, buffers, config) = (self.rank, &self.rank.buffers, &self.rank.config);
        let moe = self.moe(layer);
        self.linear(
            rank.kernels.route.of(self.rows),
            [moe.router.tiles() + moe.shared_gate_up.tiles(), buffers.route_splits, 1],
            &[
                Arg::of(&moe.router),
                Arg::of(&moe.shared_gate_up),
                buffers.normed.into(),
                int(config.hidden_size),
                buffers.router_logits.into(),
                int(config.n_routed_experts),
                buffers.shared_sums.into(),
                int(self.rows),
            ],
        )?;
        let layout = self.route_layout(moe);
        let shared = SharedExpert {
            sums: buffers.shared_sums,
            activations: buffers.mlp_activations,
            splits: buffers.route_splits as i32,
            pitch: moe.shared_gate_up.rows,
            width: moe.shared_width as i32,
            globals: moe.shared_globals,
            padding: 0,
        };
        self.launch(
            &rank.kernels.choose_experts,
            [1 + self.rows, 1, 1],
            1024,
            0,
            &[
                Arg::of(&layout),
                Arg::of(&shared),
                buffers.router_logits.into(),
                moe.bias.into(),
                buffers.routing.into(),
                int(self.rows),
            ],
        )
    }

    fn expert_gate_up(&mut self, layer: usize) -> Result<()> {
        let (rank, buffers, config) = (self.rank, &self.rank.buffers, &self.rank.config);
        let moe = self.moe(layer);
        let kernel = rank.kernels.expert_gate_up.of(self.rows);
        let layers = &rank.weights.layers[..config.num_hidden_layers];
        let next = layers.get(layer + 1).map(|next| &next.q_a_proj);
        let used = (self.rows * config.num_experts_per_tok).min(moe.experts);
        let tiles = moe.gate_up.first.tiles();
        // Each multiprocessor has as many blocks, which go through as many experts.
        let at_once = kernel.occupancy(LINEAR_THREADS, GATE_UP_SHARED)?.max(1)
            * rank.device.multiprocessors();
        let sharing = (at_once as usize / tiles).clamp(1, used);
        self.launch(
            kernel,
            [tiles, sharing, 1],
            LINEAR_THREADS,
            GATE_UP_SHARED,
            &[
                Arg::of(&moe.gate_up),
                buffers.routing.into(),
                buffers.normed.into(),
                buffers.activations.into(),
                int(config.num_experts_per_tok),
                int(moe.width),
                Arg::of(&self.ahead(next)),
                int(self.rows),
            ],
        )
    }

    fn expert_down(&mut self, layer: usize) -> Result<()> {
        let (rank, buffers, config) = (self.rank, &self.rank.buffers, &self.rank.config);
        let moe = self.moe(layer);
        self.launch(
            rank.kernels.expert_down.of(self.rows),
            [moe.down.first.tiles(), 1, 1],
            DOWN_THREADS,
            down_shared(config.num_experts_per_tok, self.rows),
            &[
                Arg::of(&moe.down),
                Arg::of(&moe.shared_down),
                buffers.routing.into(),
                int(moe.experts),
                int(config.num_experts_per_tok),
                buffers.activations.into(),
                buffers.mlp_activations.into(),
                buffers.partial.into(),
                int(config.hidden_size),
                int(moe.width),
                int(self.rows),
            ],
        )
    }

    fn dense_gate_up(&mut self, layer: usize) -> Result<()> {
        let (rank, buffers) = (self.rank, &self.rank.buffers);
        let DeviceMlp::Dense { gate_up, globals, width, .. } = &self.layer(layer).mlp else {
            unreachable!("forward() runs dense stages only in dense layers");
        };
        self.linear(
            rank.kernels.dense_gate_up.of(self.rows),
            [gate_up.tiles(), 1, 1],
            &[
                Arg::of(gate_up),
                Arg::of(globals),
                buffers.normed.into(),
                buffers.mlp_activations.into(),
                int(*width),
                int(self.rows),
            ],
        )
    }

    fn dense_down(&mut self, layer: usize) -> Result<()> {
        let DeviceMlp::Dense { down, .. } = &self.layer(layer).mlp else {
            unreachable!("forward() runs dense stages only in dense layers");
        };
        self.partial_of(down, self.rank.buffers.mlp_activations)
    }

    /// The results lie where the host reads them after the step.
    fn head(&mut self) -> Result<Vec<RowResult>> {
        if self.with_head {
            self.project_logits()?;
            self.choose_in(Phase::Send.bit() | Phase::Receive.bit())?;
            self.collectives += 1;
        }
        Ok(Vec::new())
    }
}
