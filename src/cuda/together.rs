//! Ranks in lock-step on one stream: each stage of all ranks before the next, each part of an exchange
//! of all ranks before the next part. No kernel ever waits for another one that has not run, so this
//! is safe and always the same, at any number of ranks on one device.

use super::stages::Recorder;
use crate::comm::Phase;
use crate::error::Result;
use crate::model::{Norm, RowResult, Stages, Step};

/// The recorders of all ranks that one stream runs; one alone does each exchange in one launch.
pub struct Together<'a>(pub Vec<Recorder<'a>>);

impl Together<'_> {
    fn each(&mut self, stage: impl Fn(&mut Recorder) -> Result<()>) -> Result<()> {
        self.0.iter_mut().try_for_each(stage)
    }
}

impl Stages for Together<'_> {
    fn embed(&mut self, step: &Step) -> Result<()> {
        self.each(|rank| rank.embed(step))
    }

    fn reduce_norm(&mut self, norm: Norm) -> Result<()> {
        if let [alone] = &mut self.0[..] {
            return alone.reduce_norm(norm);
        }
        for phase in self.0[0].phases_of(norm) {
            self.each(|rank| rank.reduce_norm_in(norm, phase.bit()))?;
        }
        self.each(|rank| {
            rank.end_collective(norm);
            Ok(())
        })
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
        if let [alone] = &mut self.0[..] {
            return alone.head();
        }
        if self.0[0].with_head {
            self.each(|rank| rank.project_logits())?;
            for phase in [Phase::Send, Phase::Receive] {
                self.each(|rank| rank.choose_in(phase.bit()))?;
            }
            self.each(|rank| {
                rank.collectives += 1;
                Ok(())
            })?;
        }
        Ok(Vec::new())
    }
}
