//! The decode loop: prefill, then rounds of propose, verify, accept (`spec`), until a stop rule.
//! Without a drafter every round has no guesses, which is plain decoding.

use std::time::{Duration, Instant};

use super::sampler::Sampling;
use super::session::step_of;
use super::{Engine, Limits};
use crate::error::{Error, Result};
use crate::model::{Backend, Output, RowResult};
use crate::spec::{
    Guess, History, ModelDrafter, Policy, Proposer, RoundCost, SpeculationStats, is_accepted,
    verify,
};

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

/// Why the output ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop token, or the caller found a stop string.
    Stop,
    /// `max_tokens`, or the context is full.
    Length,
}

impl Finish {
    /// The word that clients know.
    pub fn word(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
        }
    }
}

/// Whether the caller wants more tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Go on.
    Continue,
    /// End with [`Finish::Stop`].
    Stop,
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
    if request.prompt.is_empty() {
        return Err(Error::input("the prompt is empty; give at least one token of text"));
    }
    let start = Instant::now();
    let output = match request.keep_logits || request.sampling.needs_logits() {
        true => Output::Logits,
        false => Output::ArgMax,
    };
    let mut run = Run {
        request,
        vocabulary: limits.vocab_limit,
        tokens: request.prompt.to_vec(),
        ended: (request.max_tokens == 0).then_some(Finish::Length),
        logits: Vec::new(),
    };
    let last = request.prompt.len() - 1;
    // Tokens in the cache.
    let mut cached = 0;
    let mut results = Vec::new();
    for (i, chunk) in request.prompt.chunks(limits.prefill_chunk).enumerate() {
        let first = i * limits.prefill_chunk;
        let wanted = |row: usize| match first + row == last || request.keep_logits {
            true => output,
            false => Output::None,
        };
        results = backend.step(step_of(sequence, cached, chunk, wanted))?;
        cached += chunk.len();
        if policy.is_active() {
            let history = History { sequence, tokens: request.prompt, cached };
            proposer.follow(backend, history)?;
        }
        if cached < request.prompt.len() {
            run.keep(results.drain(..));
        }
    }
    let prompt_result = results.pop();
    run.keep(results.into_iter());
    let Some(prompt_result) = prompt_result else {
        return Err(Error::runtime("a step returned no result for its last row"));
    };
    if run.ended.is_none() {
        run.choose(&prompt_result, &mut on_token)?;
    }
    run.keep([prompt_result].into_iter());
    let time_to_first_token = start.elapsed();

    let mut rounds = Vec::new();
    while run.ended.is_none() {
        if cached == limits.context {
            run.ended = Some(Finish::Length);
            break;
        }
        let room = (request.max_tokens - run.generated() - 1).min(limits.context - cached - 1);
        let started = Instant::now();
        let guesses: Vec<Guess> = match policy.choose().min(room) {
            0 => Vec::new(),
            count => {
                let history = History { sequence, tokens: &run.tokens, cached };
                // What the target never chooses is wrong, and may be no row of its embedding.
                let possible = |guess: &Guess| (guess.token as usize) < limits.vocab_limit;
                let guesses = proposer.propose(backend, history, count)?;
                guesses.into_iter().take(count).take_while(possible).collect()
            }
        };
        let draft = started.elapsed();
        let pending = run.tokens[run.tokens.len() - 1];
        let position = cached;
        let started = Instant::now();
        let results = verify(backend, sequence, position, pending, &guesses, output)?;
        let verify = started.elapsed();

        let mut round = Round { drafted: guesses.len(), accepted: 0, tokens: 0, draft, verify };
        for (row, result) in results.into_iter().enumerate() {
            cached += 1;
            let chosen = run.choose(&result, &mut on_token)?;
            run.keep([result].into_iter());
            round.tokens += 1;
            let accepted = is_accepted(&guesses, row, chosen);
            round.accepted += usize::from(accepted);
            if !accepted || run.ended.is_some() {
                break;
            }
        }
        // A round that the end cut short says nothing about the guesses behind.
        if run.ended.is_none() {
            let Round { drafted, accepted, .. } = round;
            let follows_draft = rounds.last().is_some_and(|last: &Round| last.drafted > 0);
            policy.observe(RoundCost { drafted, accepted, verify, draft, follows_draft });
        }
        rounds.push(round);
    }
    Ok(Generation {
        finish: run.ended.unwrap_or(Finish::Length),
        time_to_first_token,
        rounds,
        logits: run.logits,
        tokens: run.tokens.split_off(request.prompt.len()),
    })
}

/// The state of a generation: its tokens, and whether it has ended.
struct Run<'a> {
    request: &'a Request<'a>,
    /// Ids from here on are never chosen.
    vocabulary: usize,
    /// Prompt and output.
    tokens: Vec<u32>,
    ended: Option<Finish>,
    logits: Vec<Vec<f32>>,
}

impl Run<'_> {
    fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    fn keep(&mut self, results: impl Iterator<Item = RowResult>) {
        if self.request.keep_logits {
            self.logits.extend(results.map(|result| result.logits));
        }
    }

    /// Chooses the next token from a row and applies the stop rules.
    fn choose(
        &mut self,
        result: &RowResult,
        on_token: &mut impl FnMut(u32) -> Result<Flow>,
    ) -> Result<u32> {
        let sampling = &self.request.sampling;
        let token = match sampling.needs_logits() {
            false => result.argmax,
            true => {
                let logits = &result.logits[..self.vocabulary.min(result.logits.len())];
                sampling.choose(logits, &self.tokens, self.request.prompt.len())
            }
        };
        self.tokens.push(token);
        // The end token is part of the output, but not of the text that the caller builds.
        if self.request.stop_ids.contains(&token) || on_token(token)? == Flow::Stop {
            self.ended = Some(Finish::Stop);
        } else if self.generated() == self.request.max_tokens {
            self.ended = Some(Finish::Length);
        }
        Ok(token)
    }
}
