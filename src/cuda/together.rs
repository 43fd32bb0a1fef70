//! Ranks in lock-step on one stream: each stage of all ranks before the next, each part of an exchange
//! of all ranks before the next part. No kernel ever waits for another one that has not run, so this
//! is safe and always the same, at any number of ranks on one device.

use super::collective::Reduction;
use super::stages::Recorder;
use crate::comm::Phase;
use crate::error::Result;
use crate::model::{Norm, RowResult, Stages, Step};

/// The recorders of all ranks that one stream runs; one alone does each exchange in one launch.
pub struct Together<'a>(pub Vec<Recorder<'a>>);

impl Together<'_> {
    /// Records a stage of all ranks.
    pub fn each(&mut self, stage: impl Fn(&mut Recorder) -> Result<()>) -> Result<()> {
        self.0.iter_mut().try_for_each(stage)
    }

    /// Records a `reduce_norm` of all ranks.
    pub fn reduce(&mut self, of: impl Fn(&Recorder) -> Reduction) -> Result<()> {
        if let [alone] = &mut self.0[..] {
            return alone.reduce(&of(alone));
        }
        for phase in self.0[0].phases_of(&of(&self.0[0])) {
            self.each(|rank| rank.reduce_in(&of(rank), phase.bit()))?;
        }
        self.each(|rank| {
            rank.end_collective(&of(rank));
            Ok(())
        })
    }

    /// Records the choice of a token, whose parts `choose` records by the bits of their phases.
    pub fn choose(&mut self, choose: impl Fn(&Recorder, i32) -> Result<()>) -> Result<()> {
        let (send, receive) = (Phase::Send.bit(), Phase::Receive.bit());
        let phases = if self.0.len() == 1 { vec![send | receive] } else { vec![send, receive] };
        for phases in phases {
            self.each(|rank| choose(rank, phases))?;
        }
        self.each(|rank| {
            rank.collectives += 1;
            Ok(())
        })
    }
}

impl Stages for Together<'_> {
    fn embed(&mut self, step: &Step) -> Result<()> {
        self.each(|rank| rank.embed(step))
    }

    fn reduce_norm(&mut self, norm: Norm) -> Result<()> {
        self.reduce(|rank| rank.reduction(norm))?;
        self.each(|rank| rank.keep_features(norm))
    }

    fn project_latents(&mut self, layer: usize) -> Result<()> {
        self.each(|rank| rank.project_latents(layer))
    }

    fn project_queries(&mut self, layer: usize) -> Result<()> {
        self.each(|rank| rank.project_queries(layer))
    }

    fn score_keys(&mut self, layer: usize) -> Result<()> {
        self.each(|rank| rank.score_keys(layer))
    }

    fn select_keys(&mut self, layer: usize) -> Result<()> {
        self.each(|rank| rank.select_keys(layer))
    }

    fn attend(&mut self, layer: usize) -> Result<()> {
        self.each(|rank| rank.attend(layer))
    }

    fn project_values(&mut self, layer: usize) -> Result<()> {
        self.each(|rank| rank.project_values(layer))
    }

    fn project_output(&mut self, layer: usize) -> Result<()> {
        self.each(|rank| rank.project_output(layer))
    }

    fn route(&mut self, layer: usize) -> Result<()> {
        self.each(|rank| rank.route(layer))
    }

    fn expert_gate_up(&mut self, layer: usize) -> Result<()> {
        self.each(|rank| rank.expert_gate_up(layer))
    }

    fn expert_down(&mut self, layer: usize) -> Result<()> {
        self.each(|rank| rank.expert_down(layer))
    }

    fn dense_gate_up(&mut self, layer: usize) -> Result<()> {
        self.each(|rank| rank.dense_gate_up(layer))
    }

    fn dense_down(&mut self, layer: usize) -> Result<()> {
        self.each(|rank| rank.dense_down(layer))
    }

    fn head(&mut self) -> Result<Vec<RowResult>> {
        if self.0[0].with_head {
            self.each(|rank| rank.project_logits())?;
            self.choose(|rank, phases| rank.choose_in(phases))?;
        }
        Ok(Vec::new())
    }
}
