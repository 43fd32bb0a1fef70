//! One sequence on its way from prompt to end: which rows it wants run next, and what it takes from
//! their results. Both the loop of a single sequence (`generate.rs`) and the scheduler of many run
//! on this, so a token is chosen in one place.

use super::sampler::{Sampling, TokenLogprobs, logprobs};
use super::session::rows_of;
use crate::error::{Error, Result};
use crate::model::{Output, Row, RowResult};
use crate::spec::{Guess, History, is_accepted, verify_rows};

/// What a sequence is to do.
#[derive(Debug, Clone)]
pub struct Task {
    /// Prompt tokens, at least one.
    pub prompt: Vec<u32>,
    /// Stop after this many tokens.
    pub max_tokens: usize,
    /// Choose no stop token before this many tokens.
    pub min_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that end the output; empty to ignore the model's end of turn.
    pub stop_ids: Vec<u32>,
    /// The output begins with one of these; empty: with anything.
    pub openings: Vec<Vec<u32>>,
    /// Tell each token's log-probability, and those of this many of the likeliest tokens.
    pub logprobs: Option<usize>,
}

impl Task {
    /// Answers `prompt` with at most `max_tokens` likeliest tokens, whatever they are.
    pub fn greedy(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            max_tokens,
            min_tokens: 0,
            sampling: Sampling::GREEDY,
            logit_bias: Vec::new(),
            stop_ids: Vec::new(),
            openings: Vec::new(),
            logprobs: None,
        }
    }
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

/// A token that the model chose.
#[derive(Debug, Clone, PartialEq)]
pub struct Chosen {
    /// Its id.
    pub token: u32,
    /// If asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// What a verify step gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accepted {
    /// Guesses made.
    pub drafted: usize,
    /// Guesses that were right.
    pub accepted: usize,
    /// Tokens that came out; fewer than accepted + 1 only where the output ended.
    pub tokens: usize,
    /// A stop rule cut the round short, so it says nothing about the guesses behind.
    pub cut_short: bool,
}

/// A sequence's tokens, how many of them are in the cache, and whether it has ended.
pub struct Sequence {
    slot: usize,
    task: Task,
    context: usize,
    /// Ids from here on are never chosen.
    vocabulary: usize,
    /// Prompt and output.
    tokens: Vec<u32>,
    /// Tokens in the cache.
    cached: usize,
    guesses: Vec<Guess>,
    /// The prompt's last row, until the first token is chosen from it.
    prompt_result: Option<RowResult>,
    ended: Option<Finish>,
    /// Of every position that was run, if they are kept.
    logits: Option<Vec<Vec<f32>>>,
}

impl Sequence {
    /// A sequence in `slot`, whose cache holds the first `cached` tokens of the prompt already:
    /// fewer than all of it. (context, vocabulary): the engine's limits.
    ///
    /// # Errors
    /// Input error if the prompt is empty.
    pub fn new(
        slot: usize,
        task: Task,
        cached: usize,
        (context, vocabulary): (usize, usize),
    ) -> Result<Self> {
        if task.prompt.is_empty() {
            return Err(Error::input("the prompt is empty; give at least one token of text"));
        }
        Ok(Self {
            slot,
            context,
            vocabulary,
            tokens: task.prompt.clone(),
            cached,
            guesses: Vec::new(),
            prompt_result: None,
            ended: (task.max_tokens == 0).then_some(Finish::Length),
            logits: None,
            task,
        })
    }

    /// Keeps the logits of every position that is run from here on.
    pub fn keep_logits(mut self) -> Self {
        self.logits = Some(Vec::new());
        self
    }

    /// Its slot in the KV cache.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// The tokens whose cache entries are right.
    pub fn cached_tokens(&self) -> &[u32] {
        &self.tokens[..self.cached]
    }

    /// Prompt tokens that were not run yet.
    pub fn prompt_left(&self) -> usize {
        self.prompt_len().saturating_sub(self.cached)
    }

    /// Tokens that were chosen.
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len()
    }

    /// Why it ended, if it has.
    pub fn ended(&self) -> Option<Finish> {
        self.ended
    }

    /// The tokens that were chosen, and the logits if they were kept.
    pub fn into_output(mut self) -> (Vec<u32>, Vec<Vec<f32>>) {
        (self.tokens.split_off(self.task.prompt.len()), self.logits.unwrap_or_default())
    }

    /// The sequence as its drafter sees it.
    pub fn history(&self) -> History<'_> {
        History { sequence: self.slot, tokens: &self.tokens, cached: self.cached }
    }

    /// Rows of the next `count` prompt tokens; the prompt's last one gives the first token.
    pub fn prompt_rows(&self, count: usize) -> impl Iterator<Item = Row> {
        let (first, last, output) = (self.cached, self.prompt_len() - 1, self.output());
        let all = self.logits.is_some();
        rows_of(self.slot, first, &self.task.prompt[first..first + count], move |row| {
            if all || first + row == last { output } else { Output::None }
        })
    }

    /// The next `count` prompt tokens were run; `results` are their rows'.
    ///
    /// # Errors
    /// Runtime error if the prompt's last row returned nothing.
    pub fn ran_prompt(&mut self, count: usize, mut results: Vec<RowResult>) -> Result<()> {
        self.cached += count;
        if self.prompt_left() == 0 {
            self.prompt_result = results.pop();
            if self.prompt_result.is_none() {
                return Err(Error::runtime("a step returned no result for its last row"));
            }
        }
        results.into_iter().for_each(|result| self.keep(result));
        Ok(())
    }

    /// Chooses the first token, once the prompt has been run.
    ///
    /// # Errors
    /// Whatever `on_token` returns.
    pub fn choose_first(
        &mut self,
        on_token: &mut impl FnMut(Chosen) -> Result<Flow>,
    ) -> Result<()> {
        let Some(result) = self.prompt_result.take() else {
            return Ok(());
        };
        if self.ended.is_none() {
            self.choose(&result, on_token)?;
        }
        self.keep(result);
        self.end_if_full();
        Ok(())
    }

    /// Guesses that could still come out.
    pub fn room(&self) -> usize {
        (self.task.max_tokens - self.generated()).min(self.context - self.cached).saturating_sub(1)
    }

    /// The next round's guesses, at most `count`.
    pub fn guess(&mut self, guesses: Vec<Guess>, count: usize) {
        // What the target never chooses is wrong, and may be no row of its embedding.
        let possible = |guess: &Guess| (guess.token as usize) < self.vocabulary;
        self.guesses = guesses.into_iter().take(count).take_while(possible).collect();
    }

    /// Rows of the next round: the pending token and the guesses.
    pub fn round_rows(&self) -> impl Iterator<Item = Row> {
        let pending = self.tokens[self.tokens.len() - 1];
        verify_rows(self.slot, self.cached, pending, &self.guesses, self.output())
    }

    /// The round's rows were run: takes what was right.
    ///
    /// # Errors
    /// Whatever `on_token` returns.
    pub fn accept(
        &mut self,
        results: Vec<RowResult>,
        on_token: &mut impl FnMut(Chosen) -> Result<Flow>,
    ) -> Result<Accepted> {
        let guesses = std::mem::take(&mut self.guesses);
        let mut round =
            Accepted { drafted: guesses.len(), accepted: 0, tokens: 0, cut_short: false };
        for (row, result) in results.into_iter().enumerate() {
            self.cached += 1;
            let chosen = self.choose(&result, on_token)?;
            self.keep(result);
            round.tokens += 1;
            let accepted = is_accepted(&guesses, row, chosen);
            round.accepted += usize::from(accepted);
            if !accepted || self.ended.is_some() {
                break;
            }
        }
        round.cut_short = self.ended.is_some();
        self.end_if_full();
        Ok(round)
    }

    fn prompt_len(&self) -> usize {
        self.task.prompt.len()
    }

    /// What the next rows must return. A round's later rows need no more than its first.
    fn output(&self) -> Output {
        let opening = self.task.openings.iter().map(Vec::len).max().unwrap_or(0);
        let needs_logits = self.logits.is_some()
            || self.task.sampling.needs_logits()
            || self.task.logprobs.is_some()
            || !self.task.logit_bias.is_empty()
            || self.generated() < self.task.min_tokens.max(opening);
        if needs_logits { Output::Logits } else { Output::ArgMax }
    }

    fn keep(&mut self, result: RowResult) {
        if let Some(logits) = &mut self.logits {
            logits.push(result.logits);
        }
    }

    fn end_if_full(&mut self) {
        if self.cached == self.context {
            self.ended.get_or_insert(Finish::Length);
        }
    }

    /// Chooses the next token from a row and applies the stop rules.
    fn choose(
        &mut self,
        result: &RowResult,
        on_token: &mut impl FnMut(Chosen) -> Result<Flow>,
    ) -> Result<u32> {
        let logits = &result.logits[..self.vocabulary.min(result.logits.len())];
        let token = self.pick(result.argmax, logits);
        let chosen =
            Chosen { token, logprobs: self.task.logprobs.map(|top| logprobs(logits, token, top)) };
        self.tokens.push(token);
        // The end token is part of the output, but not of the text that the caller builds.
        if self.task.stop_ids.contains(&token) || on_token(chosen)? == Flow::Stop {
            self.ended = Some(Finish::Stop);
        } else if self.generated() == self.task.max_tokens {
            self.ended = Some(Finish::Length);
        }
        Ok(token)
    }

    fn pick(&self, argmax: u32, logits: &[f32]) -> u32 {
        let Task { sampling, logit_bias, .. } = &self.task;
        let openings = self.next_of_openings();
        let banned: &[u32] =
            if self.generated() < self.task.min_tokens { &self.task.stop_ids } else { &[] };
        if openings.is_empty() && banned.is_empty() && logit_bias.is_empty() {
            return match sampling.needs_logits() {
                false => argmax,
                true => sampling.choose(logits, &self.tokens, self.prompt_len()),
            };
        }
        let mut logits = logits.to_vec();
        for (token, bias) in logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        let mut ban = |token: usize| {
            if let Some(logit) = logits.get_mut(token) {
                *logit = f32::NEG_INFINITY;
            }
        };
        banned.iter().for_each(|token| ban(*token as usize));
        if !openings.is_empty() {
            (0..self.vocabulary).filter(|id| !openings.contains(&(*id as u32))).for_each(ban);
        }
        sampling.choose(&logits, &self.tokens, self.prompt_len())
    }

    /// The tokens that may come next while the output is still within one of the openings.
    fn next_of_openings(&self) -> Vec<u32> {
        let output = &self.tokens[self.prompt_len()..];
        let within = self.task.openings.iter().filter(|opening| opening.starts_with(output));
        within.filter_map(|opening| opening.get(output.len()).copied()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(logits: &[f32]) -> RowResult {
        let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        RowResult { row: 0, argmax: best as u32, logits: logits.to_vec() }
    }

    /// The tokens that a task chooses when every row returns these logits.
    fn chosen(task: Task, logits: &[f32]) -> (Vec<Chosen>, Option<Finish>) {
        let mut sequence = Sequence::new(0, task, 0, (64, logits.len())).unwrap();
        let mut tokens = Vec::new();
        let mut on_token = |token| {
            tokens.push(token);
            Ok(Flow::Continue)
        };
        sequence.ran_prompt(1, vec![result(logits)]).unwrap();
        sequence.choose_first(&mut on_token).unwrap();
        while sequence.ended().is_none() {
            sequence.accept(vec![result(logits)], &mut on_token).unwrap();
        }
        (tokens, sequence.ended())
    }

    fn ids(chosen: &[Chosen]) -> Vec<u32> {
        chosen.iter().map(|chosen| chosen.token).collect()
    }

    #[test]
    fn no_end_before_the_minimum() {
        let task = Task { min_tokens: 2, stop_ids: vec![3], ..Task::greedy(vec![0], 9) };
        let (tokens, finish) = chosen(task, &[0.0, 1.0, 2.0, 3.0]);
        assert_eq!((ids(&tokens), finish), (vec![2, 2], Some(Finish::Stop)));
    }

    #[test]
    fn bias_moves_the_choice_and_ids_beyond_the_vocabulary_are_let_be() {
        let task = Task { logit_bias: vec![(0, 9.0), (7, 1.0)], ..Task::greedy(vec![0], 1) };
        assert_eq!(ids(&chosen(task, &[0.0, 1.0, 2.0]).0), [0]);
    }

    #[test]
    fn the_output_begins_with_the_likelier_opening() {
        let openings = vec![vec![0, 1, 1], vec![0, 2], vec![3]];
        let task = Task { openings, ..Task::greedy(vec![0], 4) };
        assert_eq!(ids(&chosen(task, &[0.0, 1.0, 2.0, -1.0, 5.0]).0), [0, 2, 4, 4]);
    }

    #[test]
    fn logprobs_are_of_the_models_own_distribution() {
        let task =
            Task { logprobs: Some(2), logit_bias: vec![(0, 99.0)], ..Task::greedy(vec![0], 1) };
        let (tokens, _) = chosen(task, &[0.0, 3f32.ln(), 0.0]);
        let told = tokens[0].logprobs.clone().unwrap();
        assert_eq!(tokens[0].token, 0);
        assert!((told.logprob - 0.2f32.ln()).abs() < 1e-6);
        let top: Vec<u32> = told.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(top, [1, 0]);
    }
}
