//! The decode loop of one sequence: prefill, then rounds of propose, verify, accept (`spec`), until a stop rule.
//! Without a drafter every round has no guesses, which is plain decoding.

use std::time::{Duration, Instant};

use super::sampler::Sampling;
use super::sequence::{Accepted, Chosen, Finish, Flow, Sequence, Task};
use super::{Engine, Limits};
use crate::error::Result;
use crate::model::{Backend, Step};
use crate::spec::{ModelDrafter, Policy, Proposer, RoundCost, SpeculationStats};

/// What to generate.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// Prompt tokens, at least one.
    pub prompt: &'a [u32],
    /// Stop after this many tokens.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the output; empty to ignore the model's end of turn.
    pub stop_ids: &'a [u32],
    /// Keep the logits of every position that was run.
    pub keep_logits: bool,
    /// Guess ahead with the engine's drafter, if it has one. The text does not depend on it.
    pub speculate: bool,
}

/// One round after the first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// Guesses made.
    pub drafted: usize,
    /// Guesses that were right.
    pub accepted: usize,
    /// Tokens that came out; fewer than accepted + 1 only where the output ended.
    pub tokens: usize,
    /// Time of the draft.
    pub draft: Duration,
    /// Time of the verify step.
    pub verify: Duration,
}

/// What was generated.
#[derive(Debug, Clone)]
pub struct Generation {
    /// All sampled tokens, the end token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// From the start to the first token.
    pub time_to_first_token: Duration,
    /// The rounds after the first token.
    pub rounds: Vec<Round>,
    /// `[positions][vocab_size]`, if asked for: the prompt's positions, then the generated ones
    /// that were run (all but the last token).
    pub logits: Vec<Vec<f32>>,
}

impl Generation {
    /// Time after the first token.
    pub fn decode_time(&self) -> Duration {
        self.rounds.iter().map(|round| round.draft + round.verify).sum()
    }

    /// What speculation did.
    pub fn stats(&self) -> SpeculationStats {
        let mut stats = SpeculationStats::default();
        for round in &self.rounds {
            stats.add_round(round.drafted, round.accepted, round.tokens);
            stats.draft_time += round.draft;
            stats.verify_time += round.verify;
        }
        stats
    }
}

impl Engine {
    /// Generates in a session of its own; `on_token` sees each token as it is chosen.
    ///
    /// # Errors
    /// Input error if the prompt is empty or does not fit the context; whatever `on_token` returns.
    pub fn generate(
        &mut self,
        request: &Request,
        on_token: impl FnMut(u32) -> Result<Flow>,
    ) -> Result<Generation> {
        let mut drafter = ModelDrafter::default();
        if !request.speculate || self.drafter.is_none() {
            return self.generate_with(request, &mut drafter, &mut Policy::Fixed(0), on_token);
        }
        let mut policy = self.policy.clone();
        let generation = self.generate_with(request, &mut drafter, &mut policy, on_token);
        // What was learnt serves the next request.
        self.policy = policy;
        generation
    }

    /// As [`Engine::generate`], with any proposer and policy.
    ///
    /// # Errors
    /// As [`Engine::generate`].
    pub fn generate_with(
        &mut self,
        request: &Request,
        proposer: &mut dyn Proposer,
        policy: &mut Policy,
        on_token: impl FnMut(u32) -> Result<Flow>,
    ) -> Result<Generation> {
        self.check_tokens(0, request.prompt)?;
        // The slot is free again when this returns.
        let session = self.session()?;
        let (limits, sequence) = (self.limits, session.sequence());
        generate_on(&mut *self.backend, &limits, sequence, request, proposer, policy, on_token)
    }
}

/// The loop itself, on any backend: fills the cache of `sequence` from its start. The prompt's
/// tokens are in the vocabulary and fit the context.
///
/// # Errors
/// Input error if the prompt is empty; whatever the backend or `on_token` returns.
pub fn generate_on(
    backend: &mut dyn Backend,
    limits: &Limits,
    sequence: usize,
    request: &Request,
    proposer: &mut dyn Proposer,
    policy: &mut Policy,
    mut on_token: impl FnMut(u32) -> Result<Flow>,
) -> Result<Generation> {
    let task = Task {
        max_tokens: request.max_tokens,
        sampling: request.sampling,
        stop_ids: request.stop_ids.to_vec(),
        ..Task::greedy(request.prompt.to_vec(), 0)
    };
    let mut run = Sequence::new(sequence, task, 0, (limits.context, limits.vocab_limit))?;
    if request.keep_logits {
        run = run.keep_logits();
    }
    let mut on_token = |chosen: Chosen| on_token(chosen.token);
    let start = Instant::now();
    while run.prompt_left() > 0 {
        let count = run.prompt_left().min(limits.prefill_chunk);
        let results = backend.step(Step { rows: run.prompt_rows(count).collect() })?;
        run.ran_prompt(count, results)?;
        if policy.is_active() {
            proposer.follow(backend, run.history())?;
        }
    }
    run.choose_first(&mut on_token)?;
    let time_to_first_token = start.elapsed();

    let mut rounds = Vec::new();
    while run.ended().is_none() {
        let started = Instant::now();
        let count = policy.choose().min(run.room());
        if count > 0 {
            let guesses = proposer.propose(backend, run.history(), count)?;
            run.guess(guesses, count);
        }
        let draft = started.elapsed();
        let started = Instant::now();
        let results = backend.step(Step { rows: run.round_rows().collect() })?;
        let verify = started.elapsed();
        let Accepted { drafted, accepted, tokens, cut_short } =
            run.accept(results, &mut on_token)?;
        if !cut_short {
            let follows_draft = rounds.last().is_some_and(|last: &Round| last.drafted > 0);
            policy.observe(RoundCost { drafted, accepted, verify, draft, follows_draft });
        }
        rounds.push(Round { drafted, accepted, tokens, draft, verify });
    }
    let finish = run.ended().unwrap_or(Finish::Length);
    let (tokens, logits) = run.into_output();
    Ok(Generation { tokens, finish, time_to_first_token, rounds, logits })
}
