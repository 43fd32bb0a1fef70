//! The decode loop: prefill, then one token a step until a stop rule.

use std::time::{Duration, Instant};

use super::Engine;
use super::sampler::Sampling;
use crate::error::{Error, Result};
use crate::model::{Output, RowResult};

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

/// What was generated.
#[derive(Debug, Clone)]
pub struct Generation {
    /// All sampled tokens, the end token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// From the start to the first token.
    pub time_to_first_token: Duration,
    /// Time of each decode step after the first token.
    pub step_times: Vec<Duration>,
    /// `[positions][vocab_size]`, if asked for: the prompt's positions, then the generated ones
    /// that were run (all but the last token).
    pub logits: Vec<Vec<f32>>,
}

impl Engine {
    /// Generates in a session of its own; `on_token` sees each token as it is chosen.
    ///
    /// # Errors
    /// Input error if the prompt is empty or does not fit the context; whatever `on_token` returns.
    pub fn generate(
        &mut self,
        request: &Request,
        mut on_token: impl FnMut(u32) -> Result<Flow>,
    ) -> Result<Generation> {
        if request.prompt.is_empty() {
            return Err(Error::input("the prompt is empty; give at least one token of text"));
        }
        let start = Instant::now();
        let mut session = self.session()?;
        let last = request.prompt.len() - 1;
        let wanted = match request.keep_logits || !request.sampling.is_greedy() {
            true => Output::Logits,
            false => Output::ArgMax,
        };
        let mut results = self.extend(&mut session, request.prompt, |i| {
            if i == last || request.keep_logits { wanted } else { Output::None }
        })?;
        let mut generation = Generation {
            tokens: Vec::new(),
            finish: Finish::Length,
            time_to_first_token: Duration::ZERO,
            step_times: Vec::new(),
            logits: Vec::new(),
        };
        while generation.tokens.len() < request.max_tokens {
            let Some(result) = results.last() else {
                return Err(Error::runtime("a step returned no result for its last row"));
            };
            let token = self.choose(request.sampling, result, generation.tokens.len());
            generation.tokens.push(token);
            if generation.tokens.len() == 1 {
                generation.time_to_first_token = start.elapsed();
            }
            let ended = request.stop_ids.contains(&token);
            if ended || on_token(token)? == Flow::Stop {
                generation.finish = Finish::Stop;
                break;
            }
            // The last token needs no step of its own.
            if generation.tokens.len() == request.max_tokens || session.len() == self.limits.context
            {
                break;
            }
            if request.keep_logits {
                generation.logits.extend(results.drain(..).map(|result| result.logits));
            }
            let step = Instant::now();
            results = self.extend(&mut session, &[token], |_| wanted)?;
            generation.step_times.push(step.elapsed());
        }
        if request.keep_logits {
            generation.logits.extend(results.drain(..).map(|result| result.logits));
        }
        Ok(generation)
    }

    fn choose(&self, sampling: Sampling, result: &RowResult, index: usize) -> u32 {
        if sampling.is_greedy() {
            return result.argmax;
        }
        let vocabulary = self.limits.vocab_limit.min(result.logits.len());
        sampling.sample(&result.logits[..vocabulary], index)
    }
}
