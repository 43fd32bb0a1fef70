//! Runs a workload and records what each prompt took: plainly, and with speculation.
//!
//! Clock rules: loading, tokenising and the warm-up are outside; a run's time starts with its
//! prefill. The decode rate counts the tokens after the first over the time after the first, so
//! that a long prompt does not look like a slow model. Both runs of a pair have the same prompt and
//! follow each other at once; which comes first alternates, so that a drift of the box cancels out.

use serde_json::json;

use super::simulate::SimulatedDrafter;
use super::workload::{Prompt, PromptText};
use crate::engine::{Engine, Flow, Generation, Request, Sampling};
use crate::error::{Error, Result};
use crate::spec::{ModelDrafter, Policy};
use crate::text::TemplateOptions;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The prompts, each measured once in each mode.
    pub prompts: Vec<Prompt>,
    /// Tokens at which a run ends.
    pub max_tokens: usize,
    /// Go on after an end of turn.
    pub ignore_eos: bool,
    /// Chain lengths to try besides, each over one prompt of every class.
    pub sweep: Vec<usize>,
    /// Guesses come out right as often as this many tokens a step need, whatever the drafter says.
    pub simulated_acceptance: Option<f64>,
}

/// How a run decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// One token a step.
    Baseline,
    /// With the engine's drafter.
    Speculative,
}

impl Mode {
    /// The word in reports.
    pub fn word(self) -> &'static str {
        match self {
            Mode::Baseline => "baseline",
            Mode::Speculative => "speculative",
        }
    }
}

/// One measured generation.
#[derive(Debug, Clone)]
pub struct Run {
    /// How it decoded.
    pub mode: Mode,
    /// Class of its prompt.
    pub class: String,
    /// Name of its prompt.
    pub prompt_id: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// What was generated, and when.
    pub generation: Generation,
}

/// Everything that was measured.
#[derive(Debug, Clone, Default)]
pub struct Measured {
    /// The runs, in the order in which they ran.
    pub runs: Vec<Run>,
    /// Chain lengths that were tried besides, with their speculative runs.
    pub sweep: Vec<(usize, Vec<Run>)>,
    /// The first place where speculation changed the text, which it must not.
    pub first_divergence: Option<Divergence>,
}

/// Where a speculative run left its baseline.
#[derive(Debug, Clone, PartialEq)]
pub struct Divergence {
    /// Class of the prompt.
    pub class: String,
    /// Name of the prompt.
    pub prompt_id: String,
    /// Index of the first output token that differs.
    pub index: usize,
    /// The baseline's token; `None` if it had ended.
    pub baseline: Option<u32>,
    /// The speculative run's token; `None` if it had ended.
    pub speculative: Option<u32>,
    /// Baseline logit of its own token less that of the other; `None` if one of them had ended.
    pub logit_gap: Option<f32>,
}

/// Tokens of the warm-up runs, which map the weights, fill the caches and tell the costs of rounds.
const WARM_UP_TOKENS: usize = 48;

impl Run {
    fn new(mode: Mode, prompt: &Prompt, prompt_tokens: usize, generation: Generation) -> Self {
        Self {
            mode,
            class: prompt.class.clone(),
            prompt_id: prompt.id.clone(),
            prompt_tokens,
            generation,
        }
    }

    /// Decode tokens per second; `None` if there was one token only.
    pub fn output_throughput(&self) -> Option<f64> {
        let decoded = self.generation.tokens.len().checked_sub(1).filter(|tokens| *tokens > 0)?;
        Some(decoded as f64 / self.generation.decode_time().as_secs_f64())
    }
}

/// Measures every prompt of `plan` after a warm-up; `done` is called after each run.
///
/// # Errors
/// Input error if a prompt does not fit the context or the model has no tokenizer for it.
pub fn measure(engine: &mut Engine, plan: &Plan, mut done: impl FnMut()) -> Result<Measured> {
    let prompts: Vec<Vec<u32>> =
        plan.prompts.iter().map(|prompt| encode(engine, prompt)).collect::<Result<_>>()?;
    let stop_ids = match (plan.ignore_eos, engine.text_if_any()) {
        (false, Some(text)) => text.generation().eos_token_ids.clone(),
        (false, None) => engine.config().eos_token_id.clone(),
        (true, _) => Vec::new(),
    };
    let request = |prompt| Request {
        prompt,
        max_tokens: plan.max_tokens,
        sampling: Sampling::GREEDY,
        stop_ids: &stop_ids,
        keep_logits: false,
        speculate: false,
    };
    let speculates = engine.drafter().is_some() || plan.simulated_acceptance.is_some();
    let mut measured = Measured::default();

    let mut warm_up = prompts.iter().zip(&plan.prompts).filter(first_of_class()).peekable();
    while let Some((ids, _)) = warm_up.next() {
        let short = Request { max_tokens: WARM_UP_TOKENS.min(plan.max_tokens), ..request(ids) };
        // The baseline warms up once, the policy in every class.
        if warm_up.peek().is_none() {
            engine.generate(&short, |_| Ok(Flow::Continue))?;
        }
        if speculates && plan.simulated_acceptance.is_none() {
            engine.generate(&Request { speculate: true, ..short }, |_| Ok(Flow::Continue))?;
        }
    }

    for (index, (prompt, ids)) in plan.prompts.iter().zip(&prompts).enumerate() {
        let mut modes = vec![Mode::Baseline];
        if speculates {
            modes.push(Mode::Speculative);
            // A simulated drafter replays the baseline, which must come first.
            if index % 2 == 1 && plan.simulated_acceptance.is_none() {
                modes.reverse();
            }
        }
        let mut pair = Vec::new();
        for mode in modes {
            let generation = match (mode, plan.simulated_acceptance) {
                (Mode::Baseline, _) => engine.generate(&request(ids), |_| Ok(Flow::Continue))?,
                (Mode::Speculative, None) => engine
                    .generate(&Request { speculate: true, ..request(ids) }, |_| {
                        Ok(Flow::Continue)
                    })?,
                (Mode::Speculative, Some(acceptance)) => {
                    let baseline = pair.first().map_or(&[][..], |run: &Run| &run.generation.tokens);
                    let mut drafter =
                        SimulatedDrafter::new(engine, ids.len(), baseline, acceptance);
                    let mut policy = engine.policy().clone();
                    engine.generate_with(&request(ids), &mut drafter, &mut policy, |_| {
                        Ok(Flow::Continue)
                    })?
                }
            };
            pair.push(Run::new(mode, prompt, ids.len(), generation));
            done();
        }
        if measured.first_divergence.is_none() {
            measured.first_divergence = divergence(engine, ids, &pair)?;
        }
        measured.runs.append(&mut pair);
    }

    for count in &plan.sweep {
        let mut runs = Vec::new();
        for (ids, prompt) in prompts.iter().zip(&plan.prompts).filter(first_of_class()) {
            let generation = engine.generate_with(
                &request(ids),
                &mut ModelDrafter::default(),
                &mut Policy::Fixed(*count),
                |_| Ok(Flow::Continue),
            )?;
            runs.push(Run::new(Mode::Speculative, prompt, ids.len(), generation));
            done();
        }
        measured.sweep.push((*count, runs));
    }
    Ok(measured)
}

/// Runs that [`measure`] makes for a plan, for a progress bar.
pub fn run_count(engine: &Engine, plan: &Plan) -> usize {
    let speculates = engine.drafter().is_some() || plan.simulated_acceptance.is_some();
    let mut classes: Vec<&str> = plan.prompts.iter().map(|prompt| prompt.class.as_str()).collect();
    classes.sort_unstable();
    classes.dedup();
    plan.prompts.len() * if speculates { 2 } else { 1 } + plan.sweep.len() * classes.len()
}

/// Keeps the first prompt of each class.
fn first_of_class<'a>() -> impl FnMut(&(&'a Vec<u32>, &'a Prompt)) -> bool {
    let mut seen: Vec<&str> = Vec::new();
    move |(_, prompt)| {
        let new = !seen.contains(&prompt.class.as_str());
        seen.push(&prompt.class);
        new
    }
}

/// Where the runs of a pair differ, if they do. The gap of the logits there tells a near tie from a
/// fault: it comes from one more plain run.
fn divergence(engine: &mut Engine, prompt: &[u32], pair: &[Run]) -> Result<Option<Divergence>> {
    let of = |mode| pair.iter().find(|run| run.mode == mode);
    let (Some(baseline), Some(speculative)) = (of(Mode::Baseline), of(Mode::Speculative)) else {
        return Ok(None);
    };
    let (plain, guessed) = (&baseline.generation.tokens, &speculative.generation.tokens);
    let Some(index) = first_difference(plain, guessed) else {
        return Ok(None);
    };
    let (ours, theirs) = (plain.get(index).copied(), guessed.get(index).copied());
    let mut logit_gap = None;
    if let (Some(ours), Some(theirs)) = (ours, theirs) {
        let request = Request {
            prompt,
            max_tokens: index + 1,
            sampling: Sampling::GREEDY,
            stop_ids: &[],
            keep_logits: true,
            speculate: false,
        };
        let again = engine.generate(&request, |_| Ok(Flow::Continue))?;
        if let Some(logits) = again.logits.get(prompt.len() - 1 + index) {
            logit_gap = Some(logits[ours as usize] - logits[theirs as usize]);
        }
    }
    Ok(Some(Divergence {
        class: baseline.class.clone(),
        prompt_id: baseline.prompt_id.clone(),
        index,
        baseline: ours,
        speculative: theirs,
        logit_gap,
    }))
}

/// The first index at which two outputs differ, the end of the shorter one included.
fn first_difference(a: &[u32], b: &[u32]) -> Option<usize> {
    let common = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (common < a.len().max(b.len())).then_some(common)
}

/// A prompt's ids, refused before anything is measured if they cannot run.
fn encode(engine: &Engine, prompt: &Prompt) -> Result<Vec<u32>> {
    let ids = encode_text(engine, &prompt.text)
        .map_err(|e| Error::input(format!("prompt {}: {e}", prompt.id)))?;
    let context = engine.limits().context;
    if ids.is_empty() || ids.len() >= context {
        return Err(Error::input(format!(
            "prompt {}: {} tokens, expected 1 to {} for a context of {context}; see --context",
            prompt.id,
            ids.len(),
            context - 1
        )));
    }
    Ok(ids)
}

/// Questions are asked without thinking: an answer is what a class is about.
fn encode_text(engine: &Engine, prompt: &PromptText) -> Result<Vec<u32>> {
    let options = TemplateOptions { enable_thinking: false, ..TemplateOptions::default() };
    match prompt {
        PromptText::Ids { ids } => Ok(ids.clone()),
        PromptText::Raw { raw } => engine.text()?.tokenizer().encode(raw),
        PromptText::Chat { prompt } => {
            engine.text()?.chat(&json!([{ "role": "user", "content": prompt }]), None, &options)
        }
        PromptText::Messages { messages, tools } => {
            engine.text()?.chat(messages, tools.as_ref(), &options)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_found_or_there_is_none() {
        assert_eq!(first_difference(&[1, 2, 3], &[1, 2, 3]), None);
        assert_eq!(first_difference(&[1, 2, 3], &[1, 4, 3]), Some(1));
        assert_eq!(first_difference(&[1, 2], &[1, 2, 3]), Some(2));
        assert_eq!(first_difference(&[], &[1]), Some(0));
    }
}
