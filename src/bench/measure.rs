//! Runs a workload and records what each prompt took.
//!
//! Clock rules: loading, tokenising and the warm-up are outside; a run's time starts with its
//! prefill. The decode rate counts the tokens after the first over the time after the first, so
//! that a long prompt does not look like a slow model.

use std::time::Duration;

use serde_json::json;

use super::workload::{Prompt, PromptText};
use crate::engine::{Engine, Flow, Generation, Request, Round, Sampling};
use crate::error::Result;
use crate::text::TemplateOptions;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The prompts, each measured once.
    pub prompts: Vec<Prompt>,
    /// Tokens at which a run ends.
    pub max_tokens: usize,
    /// Go on after an end of turn.
    pub ignore_eos: bool,
}

/// One measured generation.
#[derive(Debug, Clone)]
pub struct Run {
    /// Class of its prompt.
    pub class: String,
    /// Name of its prompt.
    pub prompt_id: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub completion_tokens: usize,
    /// Time to first token.
    pub time_to_first_token: Duration,
    /// The rounds after the first token.
    pub rounds: Vec<Round>,
}

/// Tokens of the warm-up run, which maps the weights and fills the caches.
const WARM_UP_TOKENS: usize = 16;

impl Run {
    /// Time from the first token to the last.
    pub fn decode_time(&self) -> Duration {
        self.rounds.iter().map(|round| round.draft + round.verify).sum()
    }

    /// Decode tokens per second; `None` if there was one token only.
    pub fn output_throughput(&self) -> Option<f64> {
        let decoded = self.completion_tokens.checked_sub(1).filter(|tokens| *tokens > 0)?;
        Some(decoded as f64 / self.decode_time().as_secs_f64())
    }
}

/// Measures every prompt of `plan` after one warm-up; `done` is called after each run.
///
/// # Errors
/// Input error if a prompt does not fit the context or the model has no tokenizer.
pub fn measure(engine: &mut Engine, plan: &Plan, mut done: impl FnMut()) -> Result<Vec<Run>> {
    let prompts: Vec<Vec<u32>> =
        plan.prompts.iter().map(|prompt| encode(engine, &prompt.text)).collect::<Result<_>>()?;
    let stop_ids = match plan.ignore_eos {
        true => Vec::new(),
        false => engine.text()?.generation().eos_token_ids.clone(),
    };
    let mut generate = |prompt: &[u32], max_tokens: usize| -> Result<Generation> {
        let request = Request {
            prompt,
            max_tokens,
            sampling: Sampling::GREEDY,
            stop_ids: &stop_ids,
            keep_logits: false,
            speculate: false,
        };
        engine.generate(&request, |_| Ok(Flow::Continue))
    };
    // Any prompt warms the box up, and no measured run starts from another's cache.
    if let Some(first) = prompts.first() {
        generate(first, WARM_UP_TOKENS)?;
    }
    let mut runs = Vec::with_capacity(prompts.len());
    for (prompt, ids) in plan.prompts.iter().zip(&prompts) {
        let generation = generate(ids, plan.max_tokens)?;
        runs.push(Run {
            class: prompt.class.clone(),
            prompt_id: prompt.id.clone(),
            prompt_tokens: ids.len(),
            completion_tokens: generation.tokens.len(),
            time_to_first_token: generation.time_to_first_token,
            rounds: generation.rounds,
        });
        done();
    }
    Ok(runs)
}

/// Questions are asked without thinking: an answer is what a class is about.
fn encode(engine: &Engine, prompt: &PromptText) -> Result<Vec<u32>> {
    let text = engine.text()?;
    let options = TemplateOptions { enable_thinking: false, ..TemplateOptions::default() };
    match prompt {
        PromptText::Raw { raw } => text.tokenizer().encode(raw),
        PromptText::Chat { prompt } => {
            text.chat(&json!([{ "role": "user", "content": prompt }]), None, &options)
        }
        PromptText::Messages { messages, tools } => text.chat(messages, tools.as_ref(), &options),
    }
}
