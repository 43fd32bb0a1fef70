//! The stages of a drafter as launches, in the order of `model::draft`. What differs from there: the
//! token that a chain's next row is made of stays on the device. The rows of a draft lie in falling
//! order of their positions, so that its last row, which the chain goes on from, is the first.

use super::collective::Reduction;
use super::drafter::{
    AttentionWeights, DRAFT_HEADS, DeviceDrafter, DrafterWeights, Eagle3Weights, HeadBuffers,
};
use super::kernel_set::LINEAR_WARPS;
use super::layout::{
    Ahead, DeviceMatrix, DraftPart, FeatureNorm, JoinLayout, KeyLayout, LatentLayout, QueryLayout,
    RESULT_BYTES, ResidualStart, Segments, TILE,
};
use super::stages::{ABSORB_WARPS, Recorder, VALUE_WARPS, int};
use super::together::Together;
use super::{Arg, Launch};
use crate::error::Result;
use crate::model::{FeatureSource, Hidden, Norm, Stages, decoder_layer};

/// Threads of the blocks that join and choose, and of those that attend (draft_*.cu).
const THREADS: u32 = 1024;
const ATTEND_THREADS: u32 = 256;

impl Together<'_> {
    /// A draft's confirmed rows, and the first token of its chain if `with_head`.
    ///
    /// # Errors
    /// Runtime error if the driver refuses a launch.
    pub fn draft(&mut self, with_head: bool) -> Result<()> {
        self.each(|rank| rank.take_draft())?;
        self.draft_rows(Hidden::Target)?;
        if with_head { self.draft_head(0) } else { Ok(()) }
    }

    /// The `count` tokens behind a chain's first.
    ///
    /// # Errors
    /// As [`Together::draft`].
    pub fn chain(&mut self, count: usize) -> Result<()> {
        for place in 1..=count {
            self.draft_rows(Hidden::Recycled)?;
            self.draft_head(place)?;
        }
        Ok(())
    }

    /// Joins the rows and runs the drafter's decoder layer; its normed output is what a token is
    /// drafted from.
    fn draft_rows(&mut self, hidden: Hidden) -> Result<()> {
        let config = self.0[0].rank.config.clone();
        match &self.0[0].rank.weights.drafter {
            Some(DrafterWeights::Eagle3(_)) => {
                self.each(|rank| rank.fuse_features(hidden))?;
                self.each(|rank| rank.draft_attend())?;
                self.reduce(|rank| rank.head_reduction(|head| head.post_attention_layernorm))?;
                self.each(|rank| rank.draft_mlp())?;
                self.reduce(|rank| rank.head_reduction(|head| head.norm))
            }
            _ => {
                self.each(|rank| rank.join_hidden(hidden))?;
                let layer = config.num_hidden_layers;
                decoder_layer(self, layer, config.layers[layer])?;
                self.reduce_norm(Norm::SharedHead)
            }
        }
    }

    fn draft_head(&mut self, place: usize) -> Result<()> {
        self.each(|rank| rank.draft_logits(place))?;
        self.choose(|rank, phases| rank.draft_choose(place, phases))
    }
}

impl Recorder<'_> {
    fn drafter(&self) -> &DeviceDrafter {
        self.rank.drafter.as_ref().unwrap_or_else(|| unreachable!("only drafters' stages ask"))
    }

    /// The rank's head, and its buffers.
    fn head_parts(&self) -> (&Eagle3Weights, &HeadBuffers) {
        match (&self.rank.weights.drafter, &self.drafter().buffers.head) {
            (Some(DrafterWeights::Eagle3(head)), Some(buffers)) => (head, buffers),
            _ => unreachable!("these stages are recorded for an EAGLE-3 head only"),
        }
    }

    /// Keeps what the drafter reads of the target's rows, if it reads what `norm` leaves.
    pub fn keep_features(&self, norm: Norm) -> Result<()> {
        let Some(drafter) = &self.rank.drafter else { return Ok(()) };
        let (kernels, buffers) = (&drafter.kernels, &drafter.buffers);
        let rank = self.rank;
        let boundary = match norm {
            Norm::Input(layer) if layer < rank.config.num_hidden_layers => layer,
            Norm::Final => rank.config.num_hidden_layers,
            _ => return Ok(()),
        };
        let grid = [self.rows, 1, 1];
        let (rows, layout) = (rank.buffers.rows.into(), Arg::of(&buffers.layout));
        match &buffers.source {
            FeatureSource::Boundaries(boundaries) => {
                for (place, _) in boundaries.iter().enumerate().filter(|(_, b)| **b == boundary) {
                    let residual = rank.buffers.residual.into();
                    let args = [rows, layout, int(place), residual, buffers.ring.into()];
                    self.launch(&kernels.keep_residual, grid, THREADS, 0, &args)?;
                }
                Ok(())
            }
            FeatureSource::FinalNorm if norm == Norm::Final => {
                let args = [rows, layout, rank.buffers.normed.into(), buffers.ring.into()];
                self.launch(&kernels.keep_normed, grid, THREADS, 0, &args)
            }
            FeatureSource::FinalNorm => Ok(()),
        }
    }

    fn take_draft(&self) -> Result<()> {
        let (buffers, drafter) = (&self.rank.buffers, self.drafter());
        let norm = match &self.rank.weights.drafter {
            Some(DrafterWeights::Eagle3(head)) => head.feature_norm,
            _ => FeatureNorm::default(),
        };
        let launch = Launch {
            grid: [self.rows as u32, 1, 1],
            block: THREADS,
            shared_bytes: 0,
            // Nothing of the draft is there before it.
            dependent: false,
        };
        self.stream.launch(
            &drafter.kernels.take_draft,
            launch,
            &[
                self.host.step.into(),
                buffers.rows.into(),
                buffers.control.into(),
                Arg::of(&drafter.buffers.layout),
                drafter.buffers.ring.into(),
                Arg::of(&norm),
                drafter.buffers.features.into(),
            ],
        )
    }

    /// A matrix times `x` into rows of `width` values.
    fn linear_of(&self, matrix: &DeviceMatrix, x: u64, out: u64, width: usize) -> Result<()> {
        self.linear(
            self.rank.kernels.project_output.of(self.rows),
            [matrix.tiles(), 1, 1],
            &[Arg::of(matrix), x.into(), out.into(), int(width), int(self.rows)],
        )
    }

    /// The MTP layer's input: eh_proj of the joined norms, as a partial sum that every rank has whole.
    fn join_hidden(&self, hidden: Hidden) -> Result<()> {
        let (rank, drafter) = (self.rank, self.drafter());
        let Some(DrafterWeights::Mtp { enorm, hnorm, eh_proj }) = &rank.weights.drafter else {
            unreachable!("recorded for the MTP layer only");
        };
        let layout = JoinLayout {
            table: rank.weights.embed_tokens,
            embedding_gain: *enorm,
            hidden_gain: *hnorm,
            output_gain: 0,
            eps: rank.config.rms_norm_eps,
            hidden: rank.config.hidden_size as i32,
            residual: ResidualStart::Zero as i32,
            padding: 0,
        };
        let from = match hidden {
            Hidden::Target => drafter.buffers.features,
            Hidden::Recycled => rank.buffers.normed,
        };
        self.join(&layout, &drafter.kernels.join_halves, from)?;
        let (joined, partial) = (drafter.buffers.joined, rank.buffers.partial);
        self.linear_of(eh_proj, joined, partial, rank.config.hidden_size)
    }

    fn join(&self, layout: &JoinLayout, kernel: &super::Kernel, hidden: u64) -> Result<()> {
        let buffers = &self.rank.buffers;
        self.launch(
            kernel,
            [self.rows, 1, 1],
            THREADS,
            layout.hidden as u32 * size_of::<f32>() as u32,
            &[
                buffers.rows.into(),
                Arg::of(layout),
                hidden.into(),
                self.drafter().buffers.joined.into(),
                buffers.residual.into(),
            ],
        )
    }

    /// f = fc · features or the recycled hidden state, joined with the embedding.
    fn fuse_features(&self, hidden: Hidden) -> Result<()> {
        let (rank, drafter) = (self.rank, self.drafter());
        let (head, _) = self.head_parts();
        let config = &head.config;
        if hidden == Hidden::Target {
            let (features, partial) = (drafter.buffers.features, rank.buffers.partial);
            self.linear_of(&head.fc, features, partial, config.hidden_size)?;
        }
        let recycles_normed = hidden == Hidden::Recycled && config.norm_output;
        let start = match config.norm_before_residual {
            true => ResidualStart::Normed,
            false => ResidualStart::Hidden,
        };
        let layout = JoinLayout {
            table: head.embed_tokens.unwrap_or(rank.weights.embed_tokens),
            embedding_gain: head.input_layernorm,
            hidden_gain: head.hidden_norm,
            output_gain: if recycles_normed { head.norm } else { 0 },
            eps: config.rms_norm_eps,
            hidden: config.hidden_size as i32,
            residual: start as i32,
            padding: 0,
        };
        let from = match hidden {
            Hidden::Target => rank.buffers.partial,
            Hidden::Recycled => rank.buffers.residual,
        };
        self.join(&layout, &drafter.kernels.join_floats, from)
    }

    /// The head's attention block, into the partial sum.
    fn draft_attend(&self) -> Result<()> {
        let (head, own) = self.head_parts();
        let (kernels, rows) = (&self.drafter().kernels, self.rank.buffers.rows);
        match &head.attention {
            AttentionWeights::Gqa { q_proj, k_proj, v_proj, .. } => {
                self.project_joined([*q_proj, *k_proj, *v_proj, DeviceMatrix::default()])?;
                let layout = KeyLayout {
                    width: own.width as i32,
                    splits: own.projection_splits as i32,
                    key_at: q_proj.rows,
                    value_at: q_proj.rows + k_proj.rows,
                };
                self.launch(
                    &kernels.draft_keys,
                    [self.rows, 1, 1],
                    ATTEND_THREADS,
                    0,
                    &[
                        rows.into(),
                        Arg::of(&own.layout),
                        Arg::of(&layout),
                        own.projected.into(),
                        own.angles.into(),
                        own.queries.into(),
                        own.cache.into(),
                    ],
                )?;
            }
            AttentionWeights::Mla { .. } => self.latent_queries()?,
        }
        let group = own.layout.heads / own.layout.key_heads;
        let blocks = own.layout.key_heads as usize * (group as usize).div_ceil(DRAFT_HEADS);
        let args = [
            rows.into(),
            Arg::of(&own.layout),
            own.queries.into(),
            own.cache.into(),
            own.parts.into(),
            own.bounds.into(),
        ];
        let grid = [own.layout.splits as usize, self.rows, blocks];
        let shared = (DRAFT_HEADS * own.layout.key_dim as usize * size_of::<f32>()) as u32;
        self.launch(&kernels.draft_attend, grid, ATTEND_THREADS, shared, &args)?;
        let args = [
            rows.into(),
            Arg::of(&own.layout),
            own.parts.into(),
            own.bounds.into(),
            own.attended.into(),
        ];
        let grid = [own.layout.heads as usize, self.rows, 1];
        self.launch(&kernels.draft_merge, grid, ATTEND_THREADS, 0, &args)?;
        let (o_proj, values) = match &head.attention {
            AttentionWeights::Gqa { o_proj, .. } => (o_proj, own.attended),
            AttentionWeights::Mla { w_uv, o_proj, .. } => {
                self.latent_values(w_uv)?;
                (o_proj, own.values)
            }
        };
        self.linear_of(o_proj, values, self.rank.buffers.partial, head.config.hidden_size)
    }

    /// The first projections of the joined rows, as one matrix.
    fn project_joined(&self, parts: [DeviceMatrix; 4]) -> Result<()> {
        let (head, own) = self.head_parts();
        self.linear(
            self.rank.kernels.project_latents.of(self.rows),
            [own.width / TILE, own.projection_splits, 1],
            &[
                Arg::of(&Segments(parts)),
                self.drafter().buffers.joined.into(),
                int(2 * head.config.hidden_size),
                own.projected.into(),
                int(own.width),
                int(self.rows),
            ],
        )
    }

    /// Latent attention's cache entries and absorbed queries, by the target's kernels.
    fn latent_queries(&self) -> Result<()> {
        let (head, own) = self.head_parts();
        let (rank, rows) = (self.rank, self.rank.buffers.rows);
        let AttentionWeights::Mla {
            q_a_proj,
            q_a_layernorm,
            q_b_proj,
            kv_a_proj_with_mqa,
            kv_a_layernorm,
            w_uk,
            ..
        } = &head.attention
        else {
            unreachable!("called for latent attention only");
        };
        let none = DeviceMatrix::default();
        self.project_joined([*q_a_proj, *kv_a_proj_with_mqa, none, none])?;
        let heads = own.layout.heads as usize;
        let (kv_rank, rope) = (own.layout.value_dim, own.rope as i32);
        let layout = LatentLayout {
            width: own.width as i32,
            splits: own.projection_splits as i32,
            q_rank: q_b_proj.columns,
            kv_at: q_a_proj.rows,
            kv_rank,
            rope,
            key_at: 0,
            dim: 0,
            weights_at: 0,
            heads: 0,
            context: own.layout.context,
            eps: head.config.rms_norm_eps,
            key_eps: 0.0,
            weight_scale: 0.0,
        };
        let nothing = || Arg::from(0_u64);
        self.launch(
            &rank.kernels.norm_latents,
            [self.rows, 2, 1],
            512,
            0,
            &[
                rows.into(),
                own.projected.into(),
                Arg::of(&layout),
                (*q_a_layernorm).into(),
                (*kv_a_layernorm).into(),
                nothing(),
                nothing(),
                own.angles.into(),
                own.query_latents.into(),
                own.cache.into(),
                nothing(),
                nothing(),
            ],
        )?;
        let layout = QueryLayout {
            q_rank: q_b_proj.columns,
            nope: w_uk.columns,
            rope,
            heads: heads as i32,
            kv_rank,
            index_heads: 0,
            index_dim: 0,
        };
        self.linear(
            rank.kernels.project_queries.of(self.rows),
            [q_b_proj.tiles(), 1, 1],
            &[
                rows.into(),
                Arg::of(q_b_proj),
                Arg::of(&none),
                Arg::of(&layout),
                own.query_latents.into(),
                own.angles.into(),
                own.without_rope.into(),
                own.queries.into(),
                nothing(),
                int(self.rows),
            ],
        )?;
        let tiles = w_uk.tiles() / heads;
        self.linear(
            rank.kernels.absorb_queries.of(self.rows),
            [tiles.div_ceil(LINEAR_WARPS / ABSORB_WARPS), heads, 1],
            &[
                Arg::of(w_uk),
                Arg::of(&layout),
                own.without_rope.into(),
                own.queries.into(),
                Arg::of(&Ahead::default()),
                int(self.rows),
            ],
        )
    }

    fn latent_values(&self, w_uv: &DeviceMatrix) -> Result<()> {
        let (head, own) = self.head_parts();
        let heads = own.layout.heads as usize;
        let AttentionWeights::Mla { o_proj, .. } = &head.attention else {
            unreachable!("called for latent attention only");
        };
        let tiles = w_uv.tiles() / heads;
        self.linear(
            self.rank.kernels.project_values.of(self.rows),
            [tiles.div_ceil(LINEAR_WARPS / VALUE_WARPS), heads, 1],
            &[
                Arg::of(w_uv),
                own.attended.into(),
                own.values.into(),
                int(heads),
                int(o_proj.columns as usize / heads),
                Arg::of(&Ahead::default()),
                int(self.rows),
            ],
        )
    }

    /// One of the head's two sums over the ranks.
    fn head_reduction(&self, gain: impl Fn(&Eagle3Weights) -> u64) -> Reduction {
        let (head, _) = self.head_parts();
        let (hidden, eps) = (head.config.hidden_size, head.config.rms_norm_eps);
        Reduction { gain: gain(head), eps, hidden, is_own: false }
    }

    fn draft_mlp(&self) -> Result<()> {
        let (head, _) = self.head_parts();
        let (rank, buffers) = (self.rank, &self.rank.buffers);
        self.linear(
            rank.kernels.dense_gate_up.of(self.rows),
            [head.gate_up.tiles(), 1, 1],
            &[
                Arg::of(&head.gate_up),
                Arg::of(&head.globals),
                buffers.normed.into(),
                buffers.mlp_activations.into(),
                int(head.width),
                int(self.rows),
            ],
        )?;
        self.linear_of(
            &head.down,
            buffers.mlp_activations,
            buffers.partial,
            head.config.hidden_size,
        )
    }

    /// Logits after the draft's last row, which is the first; those of each token are kept.
    fn draft_logits(&self, place: usize) -> Result<()> {
        let (rank, vocabulary) = (self.rank, self.rank.draft_vocabulary());
        let lm_head = rank.draft_lm_head();
        self.linear(
            rank.kernels.head.of(1),
            [lm_head.tiles(), 1, 1],
            &[
                Arg::of(lm_head),
                rank.buffers.normed.into(),
                rank.draft_logits(place).into(),
                int(vocabulary),
                int(1),
            ],
        )
    }

    /// Records the parts of the choice that `phases` has bits of.
    fn draft_choose(&self, place: usize, phases: i32) -> Result<()> {
        let rank = self.rank;
        let exchange = self.exchange_of_best(phases);
        let vocabulary = rank.draft_vocabulary();
        let (target_ids, limit) = match &rank.weights.drafter {
            Some(DrafterWeights::Eagle3(head)) => match &head.draft_to_target {
                // Ids rise with their draft ids.
                Some(ids) => (
                    head.target_ids,
                    ids.partition_point(|id| (*id as usize) < rank.vocab_limit_of_all),
                ),
                None => (0, rank.vocab_limit_of_all),
            },
            _ => (0, rank.vocab_limit_of_all),
        };
        let first_id = vocabulary * rank.index;
        let part = DraftPart {
            logits: rank.draft_logits(place),
            limit: limit.saturating_sub(first_id).min(vocabulary) as i32,
            first_id: first_id as i32,
            target_ids,
            own: rank.buffers.best,
            result: self.host.results + (place * RESULT_BYTES) as u64,
            rows: rank.buffers.rows,
        };
        let kernel = &self.drafter().kernels.draft_choose;
        self.launch(kernel, [1, 1, 1], THREADS, 0, &[Arg::of(&exchange), Arg::of(&part)])
    }
}
