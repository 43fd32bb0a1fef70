//! The JSON of answers, as OpenAI's clients read it, with talon's own `timings` beside it.

use std::time::{Duration, Instant, SystemTime};

use serde_json::{Map, Value, json};

use super::answer::{Delta, whole_calls};
use super::request::{Generate, random_u64};
use crate::engine::{Chosen, TextModel, TokenLogprobs};

/// Counts and times of a request so far.
pub struct Totals {
    arrived: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_step: Instant,
    prompt: usize,
    cached: usize,
    /// Tokens that were chosen, the end token included.
    pub generated: usize,
    /// Tokens of the reasoning.
    pub reasoning: usize,
    rounds: usize,
    drafted: usize,
    accepted: usize,
}

impl Totals {
    /// Of a request with this many prompt tokens.
    pub fn new(arrived: Instant, prompt: usize) -> Self {
        Self {
            arrived,
            started: None,
            first_token: None,
            last_step: arrived,
            prompt,
            cached: 0,
            generated: 0,
            reasoning: 0,
            rounds: 0,
            drafted: 0,
            accepted: 0,
        }
    }

    /// It got a slot.
    pub fn started(&mut self, cached: usize) {
        self.started = Some(Instant::now());
        self.cached = cached;
    }

    /// A step gave tokens; the time since the one before, if there was one.
    pub fn step(&mut self, drafted: usize, accepted: usize) -> Option<Duration> {
        let now = Instant::now();
        let since = now - std::mem::replace(&mut self.last_step, now);
        if self.first_token.is_none() {
            self.first_token = Some(now);
            return None;
        }
        self.rounds += 1;
        self.drafted += drafted;
        self.accepted += accepted;
        Some(since)
    }

    /// From arrival to a slot.
    pub fn queued(&self) -> Duration {
        self.started.map_or(Duration::ZERO, |started| started - self.arrived)
    }

    /// From arrival to the first token.
    pub fn to_first_token(&self) -> Duration {
        self.first_token.map_or(Duration::ZERO, |first| first - self.arrived)
    }

    /// From arrival to now.
    pub fn whole(&self) -> Duration {
        self.arrived.elapsed()
    }

    /// OpenAI's `usage`.
    pub fn usage(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        })
    }

    /// Times and what speculation did, under llama.cpp's names and talon's.
    pub fn timings(&self) -> Value {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let decode = self.first_token.map_or(Duration::ZERO, |first| self.last_step - first);
        let prefill = self.to_first_token().saturating_sub(self.queued());
        let per_second = |count: usize, time: Duration| match time.is_zero() {
            true => Value::Null,
            false => json!(count as f64 / time.as_secs_f64()),
        };
        let later = self.generated.saturating_sub(1);
        let acceptance = (self.rounds > 0).then(|| later as f64 / self.rounds as f64);
        json!({
            "cache_n": self.cached,
            "prompt_n": self.prompt - self.cached,
            "prompt_ms": ms(prefill),
            "prompt_per_second": per_second(self.prompt - self.cached, prefill),
            "predicted_n": self.generated,
            "predicted_ms": ms(decode),
            "predicted_per_second": per_second(later, decode),
            "queue_ms": ms(self.queued()),
            "ttft_ms": ms(self.to_first_token()),
            "steps": self.rounds,
            "draft_n": self.drafted,
            "draft_n_accepted": self.accepted,
            "acceptance_length": acceptance,
        })
    }
}

/// An answer that is sent as a whole.
#[derive(Default)]
pub struct Choice {
    delta: Delta,
    tokens: Vec<Chosen>,
}

impl Choice {
    /// Adds a piece.
    pub fn add(&mut self, delta: Delta, tokens: Vec<Chosen>) {
        self.delta.append(delta);
        self.tokens.extend(tokens);
    }
}

/// Writes one request's answer.
pub struct Format<'a> {
    text: &'a TextModel,
    id: String,
    created: u64,
    model: String,
    chat: bool,
    begun: bool,
    logprobs: Option<usize>,
    timings_per_token: bool,
    token_ids: bool,
    prompt_ids: Vec<u32>,
    /// Tokens whose text was not sent yet.
    pending: Vec<Chosen>,
    /// Bytes of text that the tokens told of so far stand for.
    offset: usize,
}

impl<'a> Format<'a> {
    /// For the answer to `request` with this prompt.
    pub fn new(text: &'a TextModel, model: &str, request: &Generate) -> Self {
        let kind = if request.chat { "chatcmpl" } else { "cmpl" };
        Self {
            text,
            id: format!("{kind}-{:016x}{:016x}", random_u64(), random_u64()),
            created: unix_seconds(),
            model: model.to_owned(),
            chat: request.chat,
            begun: false,
            logprobs: request.task.logprobs,
            timings_per_token: request.timings_per_token,
            token_ids: request.token_ids,
            prompt_ids: if request.token_ids { request.task.prompt.clone() } else { Vec::new() },
            pending: Vec::new(),
            offset: 0,
        }
    }

    /// The answer as a whole.
    pub fn whole(mut self, choice: Choice, finish: &str, totals: &Totals) -> Value {
        let Choice { delta, tokens } = choice;
        let object = if self.chat { "chat.completion" } else { "text_completion" };
        let logprobs = self.logprobs_of(&tokens);
        let mut entry = json!({"index": 0});
        if self.chat {
            let calls = whole_calls(&delta.tool_calls);
            // A message that only calls tools has no content.
            let content = match delta.content.is_empty() && !calls.is_empty() {
                true => Value::Null,
                false => delta.content.into(),
            };
            let mut message = json!({"role": "assistant", "content": content});
            if !delta.reasoning.is_empty() {
                message["reasoning_content"] = delta.reasoning.into();
            }
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
            }
            entry["message"] = message;
        } else {
            entry["text"] = delta.content.into();
        }
        entry["logprobs"] = logprobs;
        entry["finish_reason"] = finish.into();
        let mut answer = self.envelope(object, vec![entry]);
        if self.token_ids {
            answer["prompt_token_ids"] = json!(self.prompt_ids);
            answer["choices"][0]["token_ids"] = ids(&tokens);
        }
        answer["usage"] = totals.usage();
        answer["timings"] = totals.timings();
        answer
    }

    /// A piece of a stream; none if there is nothing to tell yet.
    pub fn chunk(&mut self, delta: Delta, tokens: Vec<Chosen>, totals: &Totals) -> Option<Value> {
        self.pending.extend(tokens);
        if delta.is_empty() {
            return None;
        }
        let mut chunk = self.piece(self.delta_json(delta), None);
        self.begun = true;
        if self.timings_per_token {
            chunk["timings"] = totals.timings();
        }
        Some(chunk)
    }

    /// The piece that tells why the answer ended.
    pub fn last_chunk(&mut self, finish: &str, totals: &Totals) -> Value {
        let mut chunk = self.piece(self.delta_json(Delta::default()), Some(finish));
        chunk["timings"] = totals.timings();
        chunk
    }

    /// The piece with the usage and no text.
    pub fn usage_chunk(&self, totals: &Totals) -> Value {
        let mut chunk = self.envelope(self.chunk_object(), Vec::new());
        chunk["usage"] = totals.usage();
        chunk
    }

    fn chunk_object(&self) -> &'static str {
        if self.chat { "chat.completion.chunk" } else { "text_completion" }
    }

    /// The role comes with the first text: tools take the first piece for the first token.
    fn delta_json(&self, delta: Delta) -> Value {
        if !self.chat {
            return delta.content.into();
        }
        let mut json = Map::new();
        if !self.begun {
            json.insert("role".into(), "assistant".into());
        }
        if !delta.reasoning.is_empty() {
            json.insert("reasoning_content".into(), delta.reasoning.into());
        }
        if !delta.content.is_empty() {
            json.insert("content".into(), delta.content.into());
        }
        if !delta.tool_calls.is_empty() {
            json.insert("tool_calls".into(), delta.tool_calls.into());
        }
        json.into()
    }

    fn piece(&mut self, delta: Value, finish: Option<&str>) -> Value {
        let tokens = std::mem::take(&mut self.pending);
        let mut entry = json!({"index": 0});
        entry[if self.chat { "delta" } else { "text" }] = delta;
        entry["logprobs"] = self.logprobs_of(&tokens);
        entry["finish_reason"] = finish.into();
        if self.token_ids {
            entry["token_ids"] = ids(&tokens);
        }
        self.envelope(self.chunk_object(), vec![entry])
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": concat!("talon-", env!("CARGO_PKG_VERSION"), "-", env!("TALON_COMMIT")),
            "choices": choices,
        })
    }

    fn logprobs_of(&mut self, tokens: &[Chosen]) -> Value {
        if self.logprobs.is_none() {
            return Value::Null;
        }
        let told: Vec<(u32, &TokenLogprobs)> = tokens
            .iter()
            .filter_map(|chosen| Some((chosen.token, chosen.logprobs.as_ref()?)))
            .collect();
        if self.chat {
            let entry = |(token, told): &(u32, &TokenLogprobs)| {
                let top: Vec<Value> =
                    told.top.iter().map(|(id, logprob)| self.logprob(*id, *logprob)).collect();
                let mut entry = self.logprob(*token, told.logprob);
                entry["top_logprobs"] = top.into();
                entry
            };
            return json!({"content": told.iter().map(entry).collect::<Vec<_>>()});
        }
        let mut offsets = Vec::new();
        for (token, _) in &told {
            offsets.push(self.offset);
            self.offset += self.token_text(*token).chars().count();
        }
        let top = |told: &TokenLogprobs| -> Map<String, Value> {
            told.top.iter().map(|(id, logprob)| (self.token_text(*id), finite(*logprob))).collect()
        };
        json!({
            "tokens": told.iter().map(|(token, _)| self.token_text(*token)).collect::<Vec<_>>(),
            "token_logprobs": told.iter().map(|(_, told)| finite(told.logprob)).collect::<Vec<_>>(),
            "top_logprobs": told.iter().map(|(_, told)| top(told)).collect::<Vec<_>>(),
            "text_offset": offsets,
        })
    }

    fn logprob(&self, token: u32, logprob: f32) -> Value {
        let bytes = self.text.tokenizer().token_bytes(token).unwrap_or_default();
        json!({"token": self.token_text(token), "logprob": finite(logprob), "bytes": bytes})
    }

    fn token_text(&self, token: u32) -> String {
        let bytes = self.text.tokenizer().token_bytes(token).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    }
}

/// JSON has no infinity; OpenAI writes this for what cannot be.
fn finite(logprob: f32) -> Value {
    json!(if logprob.is_finite() { logprob } else { -9999.0 })
}

fn ids(tokens: &[Chosen]) -> Value {
    tokens.iter().map(|chosen| Value::from(chosen.token)).collect()
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}
