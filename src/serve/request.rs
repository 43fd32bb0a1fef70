//! What a client asks for, checked: the body of a chat or completion request as a [`Task`] and what
//! is to become of its output.

use std::hash::{BuildHasher, Hasher, RandomState};

use serde_json::{Map, Value};

use super::errors::ApiError;
use super::fields::{Fields, wrong};
use super::messages::{Tools, messages, tools};
use crate::engine::{Limits, Sampling, Task, TextModel, opens_reasoning};
use crate::text::TemplateOptions;

/// A checked request.
#[derive(Debug)]
pub struct Generate {
    /// What the engine is to do.
    pub task: Task,
    /// Guesses a round, or as the engine thinks best.
    pub speculate: Option<usize>,
    /// A chat, or a plain completion.
    pub chat: bool,
    /// Text before which the output ends.
    pub stops: Vec<String>,
    /// The output begins inside the reasoning.
    pub thinking: bool,
    /// The tools that may be called.
    pub tools: Option<Value>,
    /// At most one call.
    pub single_call: bool,
    /// The answer comes in pieces.
    pub stream: bool,
    /// With a last piece that holds the usage.
    pub include_usage: bool,
    /// Each piece tells the timings so far.
    pub timings_per_token: bool,
    /// Each piece tells its token ids.
    pub token_ids: bool,
}

/// Names that ask for output of a certain form, which would have to be enforced.
const GRAMMARS: [&str; 7] = [
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "json_schema",
    "structured_outputs",
];
/// Stop strings of a request; each is looked for in every piece of text.
const MAX_STOPS: usize = 16;
/// The longest chain of guesses.
const MAX_GUESSES: u64 = 7;

/// Reads the body of a chat request.
///
/// # Errors
/// 400 that names the field.
pub fn chat(body: &Value, text: &TextModel, limits: Limits) -> Result<Generate, ApiError> {
    let fields = Fields::of(body, "")?;
    let tools = tools(fields)?;
    let prompt = chat_prompt(fields, &tools, text)?;
    let thinking = opens_reasoning(text, &prompt);
    let top = fields.count("top_logprobs", 0, 20)?;
    let logprobs = match (fields.bool("logprobs")?.unwrap_or(false), top) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, None | Some(0)) => None,
        (false, Some(_)) => return Err(ApiError::invalid("top_logprobs", "needs logprobs: true")),
    };
    let openings = openings(&tools.required, thinking, text)?;
    let mut generate = common(fields, prompt, text, limits)?;
    generate.task.logprobs = logprobs;
    generate.task.openings = openings;
    Ok(Generate {
        chat: true,
        thinking,
        tools: tools.definitions,
        single_call: tools.single,
        ..generate
    })
}

/// The ids of a chat's prompt, as `/tokenize` gives them too.
pub fn chat_prompt(fields: Fields, tools: &Tools, text: &TextModel) -> Result<Vec<u32>, ApiError> {
    let messages = messages(fields)?;
    let mut extra: Map<String, Value> =
        fields.object("chat_template_kwargs")?.cloned().unwrap_or_default();
    let asked = match extra.remove("enable_thinking") {
        None | Some(Value::Null) => None,
        Some(Value::Bool(on)) => Some(on),
        Some(value) => {
            return Err(wrong("chat_template_kwargs.enable_thinking", &value, "true or false"));
        }
    };
    let mut thinking = asked;
    if let Some(effort) = fields.string("reasoning_effort")? {
        thinking = thinking.or(Some(effort != "none"));
        extra.entry("reasoning_effort").or_insert(effort.into());
    }
    // A call that must come is the first thing that the model says.
    let enable_thinking = thinking.unwrap_or(true) && tools.required.is_empty();
    let options = TemplateOptions { enable_thinking, extra };
    text.chat(&messages, tools.definitions.as_ref(), &options)
        .map_err(|error| ApiError::invalid("messages", error))
}

/// How an output begins that must call one of these functions.
fn openings(names: &[String], thinking: bool, text: &TextModel) -> Result<Vec<Vec<u32>>, ApiError> {
    let tokenizer = text.tokenizer();
    let marker = |literal: &str| {
        tokenizer.token_id(literal).ok_or_else(|| {
            let fault = format!("this model has no token {literal}, so a call cannot be enforced");
            ApiError::invalid("tool_choice", fault)
        })
    };
    let mut openings = Vec::new();
    for name in names {
        let mut opening = Vec::new();
        if thinking {
            // A template that cannot leave the reasoning out.
            opening.push(marker("</think>")?);
        }
        opening.push(marker("<tool_call>")?);
        opening.extend(tokenizer.encode(name).map_err(|e| ApiError::invalid("tools", e))?);
        for end in ["<arg_key>", "</tool_call>"] {
            openings.push([&opening[..], &[marker(end)?]].concat());
        }
    }
    Ok(openings)
}

/// Reads the body of a plain completion.
///
/// # Errors
/// As [`chat`].
pub fn completion(body: &Value, text: &TextModel, limits: Limits) -> Result<Generate, ApiError> {
    let fields = Fields::of(body, "")?;
    if fields.bool("echo")? == Some(true) {
        return Err(ApiError::invalid("echo", "not supported; leave it out"));
    }
    if fields.get("suffix").is_some() {
        return Err(ApiError::invalid("suffix", "not supported; this model only goes on"));
    }
    let prompt = plain_prompt(fields.get("prompt"), text, limits)?;
    let mut generate = common(fields, prompt, text, limits)?;
    generate.task.logprobs = fields.count("logprobs", 0, 20)?;
    Ok(generate)
}

/// A prompt as text, as ids, or as a list of one of these.
fn plain_prompt(
    value: Option<&Value>,
    text: &TextModel,
    limits: Limits,
) -> Result<Vec<u32>, ApiError> {
    let expected = "text or a list of token ids";
    match value {
        None => Err(ApiError::invalid("prompt", format!("missing, expected {expected}"))),
        Some(Value::String(prompt)) => {
            text.tokenizer().encode(prompt).map_err(|error| ApiError::invalid("prompt", error))
        }
        Some(Value::Array(items)) => match items.as_slice() {
            [one @ (Value::String(_) | Value::Array(_))] => plain_prompt(Some(one), text, limits),
            [Value::String(_) | Value::Array(_), ..] => {
                Err(ApiError::invalid("prompt", "several prompts; send one in each request"))
            }
            ids => token_ids(ids, "prompt", limits.vocab_limit),
        },
        Some(value) => Err(wrong("prompt", value, expected)),
    }
}

/// A list of ids of the vocabulary.
pub fn token_ids(values: &[Value], name: &str, vocabulary: usize) -> Result<Vec<u32>, ApiError> {
    let id = |(index, value): (usize, &Value)| {
        let id = value.as_u64().filter(|id| *id < vocabulary as u64);
        id.map(|id| id as u32).ok_or_else(|| {
            let expected = format!("the id of a token, below {vocabulary}");
            wrong(&format!("{name}[{index}]"), value, &expected)
        })
    };
    values.iter().enumerate().map(id).collect()
}

/// What both kinds of request share.
fn common(
    fields: Fields,
    prompt: Vec<u32>,
    text: &TextModel,
    limits: Limits,
) -> Result<Generate, ApiError> {
    fields.string("model")?;
    refuse(fields)?;
    if prompt.is_empty() {
        return Err(ApiError::invalid("prompt", "empty, expected at least one token"));
    }
    if prompt.len() >= limits.context {
        let message = format!(
            "the prompt has {} tokens and the context {}, with at least one for the answer; \
             shorten the prompt or start talon with a larger --context",
            prompt.len(),
            limits.context
        );
        return Err(ApiError::invalid("", message).with_code("context_length_exceeded"));
    }
    // A checkpoint's tokenizer may know more tokens than its model.
    if let Some(id) = prompt.iter().find(|id| **id as usize >= limits.vocab_limit) {
        return Err(ApiError::invalid("prompt", format!("this model has no token {id}")));
    }
    let most = limits.context - prompt.len();
    let asked = match fields.count("max_completion_tokens", 1, u64::MAX)? {
        None => fields.count("max_tokens", 1, u64::MAX)?,
        asked => asked,
    };
    let max_tokens = asked.unwrap_or(most).min(most);
    let min_tokens = fields.count("min_tokens", 0, u64::MAX)?.unwrap_or(0);
    if min_tokens > max_tokens {
        let message =
            format!("{min_tokens} is more than the {max_tokens} that the output may have");
        return Err(ApiError::invalid("min_tokens", message));
    }
    let mut stop_ids = match fields.bool("ignore_eos")? {
        Some(true) => Vec::new(),
        _ => text.generation().eos_token_ids.clone(),
    };
    if let Some(ids) = fields.list("stop_token_ids")? {
        stop_ids.extend(token_ids(ids, "stop_token_ids", limits.vocab_limit)?);
    }
    let stream_options = fields.object("stream_options")?;
    let include_usage = stream_options.and_then(|options| options.get("include_usage"));
    let speculative = fields.get("speculative");
    let speculate = match speculative {
        None => None,
        Some(value) => Fields::of(value, "speculative")?.count("draft_tokens", 0, MAX_GUESSES)?,
    };
    Ok(Generate {
        task: Task {
            max_tokens,
            min_tokens,
            sampling: sampling(fields, text)?,
            logit_bias: logit_bias(fields, limits.vocab_limit)?,
            stop_ids,
            ..Task::greedy(prompt, 0)
        },
        speculate,
        chat: false,
        stops: stops(fields)?,
        thinking: false,
        tools: None,
        single_call: false,
        stream: fields.bool("stream")?.unwrap_or(false),
        include_usage: include_usage == Some(&Value::Bool(true)),
        timings_per_token: fields.bool("timings_per_token")?.unwrap_or(false),
        token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
    })
}

/// What would have to be done and is not is refused, never left out in silence.
fn refuse(fields: Fields) -> Result<(), ApiError> {
    for name in ["n", "best_of"] {
        if !matches!(fields.count(name, 0, u64::MAX)?, None | Some(1)) {
            return Err(ApiError::invalid(name, "only 1 is supported; send several requests"));
        }
    }
    if let Some(format) = fields.get("response_format") {
        let kind = Fields::of(format, "response_format")?.string("type")?;
        if kind != Some("text") {
            let message = "only text is supported: the output is not constrained to a grammar; ask \
                           for JSON in the prompt, or offer a tool with tool_choice required";
            return Err(ApiError::invalid("response_format", message));
        }
    }
    if let Some(name) = GRAMMARS.iter().find(|name| fields.get(name).is_some()) {
        return Err(ApiError::invalid(name, "not supported; leave it out"));
    }
    if fields.bool("use_beam_search")? == Some(true) {
        return Err(ApiError::invalid("use_beam_search", "not supported; leave it out"));
    }
    if fields.get("prompt_logprobs").is_some() {
        return Err(ApiError::invalid("prompt_logprobs", "not supported; leave it out"));
    }
    if fields.get("audio").is_some() {
        return Err(ApiError::invalid("audio", "this model writes text only"));
    }
    Ok(())
}

fn sampling(fields: Fields, text: &TextModel) -> Result<Sampling, ApiError> {
    let defaults = text.generation();
    let top_p = fields.number("top_p", 0.0, 1.0)?;
    if top_p == Some(0.0) {
        return Err(ApiError::invalid("top_p", "expected more than 0"));
    }
    let repetition_penalty = fields.number("repetition_penalty", 0.0, 100.0)?.unwrap_or(1.0);
    if repetition_penalty == 0.0 {
        return Err(ApiError::invalid("repetition_penalty", "expected more than 0, such as 1.1"));
    }
    // -1 is how some say "all".
    let top_k = match fields.get("top_k").and_then(Value::as_i64) {
        Some(-1) => Some(0),
        _ => fields.count("top_k", 0, u64::MAX)?,
    };
    let seed = match fields.get("seed") {
        None => random_u64(),
        Some(value) => value
            .as_u64()
            .or_else(|| value.as_i64().map(|seed| seed as u64))
            .ok_or_else(|| wrong("seed", value, "a whole number"))?,
    };
    Ok(Sampling {
        temperature: fields.number("temperature", 0.0, 100.0)?.unwrap_or(defaults.temperature),
        top_p: top_p.unwrap_or(defaults.top_p),
        top_k: top_k.unwrap_or(defaults.top_k.unwrap_or(0) as usize),
        min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(0.0),
        repetition_penalty,
        presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        seed,
    })
}

fn logit_bias(fields: Fields, vocabulary: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let entry = |(id, bias): (&String, &Value)| {
        let name = format!("logit_bias.{id}");
        let token = id.parse::<u32>().ok().filter(|id| (*id as usize) < vocabulary);
        let token = token.ok_or_else(|| {
            ApiError::invalid(
                "logit_bias",
                format!("{id:?}: expected token ids below {vocabulary}"),
            )
        })?;
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        let bias = bias.ok_or_else(|| ApiError::invalid(&name, "expected -100 to 100"))?;
        Ok((token, bias as f32))
    };
    fields.object("logit_bias")?.into_iter().flatten().map(entry).collect()
}

fn stops(fields: Fields) -> Result<Vec<String>, ApiError> {
    let expected = "text or a list of texts, none of them empty";
    let stops = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(Value::Array(stops)) => {
            let stop = |(index, stop): (usize, &Value)| {
                let text = stop.as_str().map(str::to_owned);
                text.ok_or_else(|| wrong(&format!("stop[{index}]"), stop, "text"))
            };
            stops.iter().enumerate().map(stop).collect::<Result<_, _>>()?
        }
        Some(value) => return Err(wrong("stop", value, expected)),
    };
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::invalid("stop", format!("expected {expected}")));
    }
    if stops.len() > MAX_STOPS {
        return Err(ApiError::invalid("stop", format!("expected at most {MAX_STOPS}")));
    }
    Ok(stops)
}

/// A number that nobody can guess: the standard library keys its hash tables with such.
pub fn random_u64() -> u64 {
    RandomState::new().build_hasher().finish()
}
