//! The stages in which ranks exchange: `reduce_norm`, and the choice among the parts of the vocabulary
//! in `head`. Each can be recorded part by part, for ranks that run in lock-step.

use super::fabric::Region;
use super::layout::{Exchange, NormRows, VocabularyPart};
use super::stages::{Recorder, int};
use super::{Arg, Kernel};
use crate::comm::{Phase, Variant};
use crate::error::Result;
use crate::model::Norm;

/// Threads of a block that norms a row alone, and of one that exchanges (reduce_norm.cu).
const NORM_THREADS: u32 = 1024;
const EXCHANGE_THREADS: u32 = 768;

/// One `reduce_norm`.
#[derive(Debug, Clone, Copy)]
pub struct Reduction {
    /// Address of the norm's gains, its epsilon, and values of a row.
    pub gain: u64,
    pub eps: f32,
    pub hidden: usize,
    /// Every rank has the whole sum already, such as the embedding that it looks up for itself.
    pub is_own: bool,
}

impl Recorder<'_> {
    /// What a norm of the target or of its MTP layer reduces.
    pub fn reduction(&self, norm: Norm) -> Reduction {
        let (rank, config) = (self.rank, &self.rank.config);
        let gain = match norm {
            Norm::Input(layer) => self.layer(layer).input_layernorm,
            Norm::PostAttention(layer) => self.layer(layer).post_attention_layernorm,
            Norm::Final => rank.weights.norm,
            Norm::SharedHead => rank.weights.shared_head_norm,
        };
        // The MTP layer's input is whole on each rank, too.
        let is_own = norm == Norm::Input(0) || norm == Norm::Input(config.num_hidden_layers);
        Reduction { gain, eps: config.rms_norm_eps, hidden: config.hidden_size, is_own }
    }

    /// The variant that this step's sums are exchanged by; `None` where there is nothing to exchange.
    fn variant(&self, reduction: &Reduction) -> Option<Variant> {
        let comm = self.rank.comm.as_ref().filter(|_| !reduction.is_own)?;
        Some(comm.choice.variant(self.rows))
    }

    /// The parts of a `reduce_norm`.
    pub fn phases_of(&self, reduction: &Reduction) -> &'static [Phase] {
        self.variant(reduction).map_or(&[Phase::Receive], Variant::phases)
    }

    /// Counts a `reduce_norm` whose parts are all recorded.
    pub fn end_collective(&mut self, reduction: &Reduction) {
        self.collectives += u32::from(self.variant(reduction).is_some());
    }

    /// Records a whole `reduce_norm`.
    pub fn reduce(&mut self, reduction: &Reduction) -> Result<()> {
        let phases = self.phases_of(reduction).iter().fold(0, |bits, phase| bits | phase.bit());
        self.reduce_in(reduction, phases)?;
        self.end_collective(reduction);
        Ok(())
    }

    /// Records the parts of a `reduce_norm` that `phases` has bits of.
    pub fn reduce_in(&self, reduction: &Reduction, phases: i32) -> Result<()> {
        let (rank, buffers) = (self.rank, &self.rank.buffers);
        let Reduction { gain, eps, hidden, .. } = *reduction;
        let Some((comm, variant)) = rank.comm.as_ref().zip(self.variant(reduction)) else {
            return self.launch(
                &rank.kernels.reduce_norm,
                [self.rows, 1, 1],
                NORM_THREADS,
                0,
                &[
                    buffers.partial.into(),
                    buffers.residual.into(),
                    gain.into(),
                    eps.into(),
                    buffers.normed.into(),
                    int(hidden),
                ],
            );
        };
        let fabric = &comm.fabric;
        let exchange = fabric.exchange(
            comm.rank,
            Region::Sums(variant),
            buffers.control,
            self.collectives,
            phases,
        );
        let rows = NormRows {
            partial: buffers.partial,
            residual: buffers.residual,
            gain,
            normed: buffers.normed,
            eps,
            hidden: hidden as i32,
            rows: self.rows as i32,
            padding: 0,
        };
        self.launch(
            rank.kernels.exchanges.of(variant, fabric.has_mischief(variant)),
            [fabric.blocks(comm.rank, self.rows), 1, 1],
            EXCHANGE_THREADS,
            (hidden * size_of::<f32>()) as u32,
            &[Arg::of(&exchange), Arg::of(&rows)],
        )
    }

    /// How the ranks tell each other their best ids; `phases` has the bits of the parts.
    pub fn exchange_of_best(&self, phases: i32) -> Exchange {
        let control = self.rank.buffers.control;
        match &self.rank.comm {
            Some(comm) => {
                let region = Region::Best { staged: !comm.choice.needs_peer_access() };
                comm.fabric.exchange(comm.rank, region, control, self.collectives, phases)
            }
            None => Exchange { control, ranks: 1, phases, ..Exchange::default() },
        }
    }

    /// Records lm_head.
    pub fn project_logits(&self) -> Result<()> {
        let (rank, buffers) = (self.rank, &self.rank.buffers);
        let lm_head = &rank.weights.lm_head;
        self.linear(
            rank.kernels.head.of(self.rows),
            [lm_head.tiles(), 1, 1],
            &[
                Arg::of(lm_head),
                buffers.normed.into(),
                buffers.logits.into(),
                int(rank.weights.vocabulary),
                int(self.rows),
            ],
        )
    }

    /// Records the parts of the arg-max that `phases` has bits of.
    pub fn choose_in(&self, phases: i32) -> Result<()> {
        let (rank, buffers) = (self.rank, &self.rank.buffers);
        let exchange = self.exchange_of_best(phases);
        let part = VocabularyPart {
            logits: buffers.logits,
            vocabulary: rank.weights.vocabulary as i32,
            limit: rank.vocab_limit as i32,
            first_id: rank.first_id as i32,
            hidden: rank.config.hidden_size as i32,
            normed: buffers.normed,
            own: buffers.best,
            results: self.host.results,
        };
        let kernel: &Kernel = &rank.kernels.argmax;
        self.launch(kernel, [self.rows, 1, 1], 1024, 0, &[Arg::of(&exchange), Arg::of(&part)])
    }
}
