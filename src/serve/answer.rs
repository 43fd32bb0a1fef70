//! From tokens to what the client sees: text without stop strings, reasoning apart, tool calls as
//! JSON. A stream and a whole answer are made of the same pieces, so they cannot differ.

use serde_json::{Value, json};

use super::errors::ApiError;
use super::request::{Generate, random_u64};
use crate::engine::{OutputText, TextModel};
use crate::text::{SplitText, ToolCallParser, ToolPart};

/// What became visible.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Delta {
    /// More of the reasoning.
    pub reasoning: String,
    /// More of the answer.
    pub content: String,
    /// Pieces of tool calls, as OpenAI's streams have them.
    pub tool_calls: Vec<Value>,
}

impl Delta {
    /// Whether there is nothing to show.
    pub fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.content.is_empty() && self.tool_calls.is_empty()
    }

    /// Adds what became visible later.
    pub fn append(&mut self, later: Delta) {
        self.reasoning += &later.reasoning;
        self.content += &later.content;
        self.tool_calls.extend(later.tool_calls);
    }
}

/// An answer in the making.
pub struct Answer<'a> {
    output: OutputText<'a>,
    tools: Option<ToolCallParser>,
    single_call: bool,
    /// Ends the reasoning, while it lasts.
    reasoning_end: Option<u32>,
    reasoning_tokens: usize,
}

impl<'a> Answer<'a> {
    /// The answer to a request.
    ///
    /// # Errors
    /// 400 if a stop string cannot be used.
    pub fn new(text: &'a TextModel, request: &Generate) -> Result<Self, ApiError> {
        let output = OutputText::new(text, request.stops.clone(), request.thinking)
            .map_err(|error| ApiError::invalid("stop", error))?;
        let end = text.tokenizer().token_id("</think>");
        Ok(Self {
            output,
            tools: request.tools.as_ref().map(ToolCallParser::new),
            single_call: request.single_call,
            // An id that no token has: then all that comes is reasoning.
            reasoning_end: request.thinking.then(|| end.unwrap_or(u32::MAX)),
            reasoning_tokens: 0,
        })
    }

    /// Adds a token; what became visible, and whether the answer ends here: at a stop string, or
    /// behind the only call that it may make.
    pub fn push(&mut self, token: u32) -> (Delta, bool) {
        if let Some(end) = self.reasoning_end {
            self.reasoning_tokens += 1;
            if token == end {
                self.reasoning_end = None;
            }
        }
        let (split, stopped) = self.output.push(token);
        let delta = self.delta(split);
        let called = self.single_call
            && self.tools.as_ref().is_some_and(|tools| tools.calls() > 0 && tools.is_outside());
        (delta, stopped || called)
    }

    /// Ends the answer: what was held back, and whether it calls tools. `whole`: the model ended it
    /// by itself.
    pub fn finish(mut self, whole: bool) -> (Delta, bool) {
        let mut delta = Delta::default();
        let split = self.output.finish();
        delta.reasoning = split.reasoning;
        let Some(mut tools) = self.tools.take() else {
            delta.content = split.answer;
            return (delta, false);
        };
        let begun = tools.calls();
        let parts = tools.push(&split.answer);
        add_parts(&mut delta, parts, begun);
        let calls = tools.calls();
        add_parts(&mut delta, tools.finish(whole), calls);
        (delta, calls > 0)
    }

    /// Tokens of the reasoning, its end included.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    fn delta(&mut self, split: SplitText) -> Delta {
        let mut delta = Delta { reasoning: split.reasoning, ..Delta::default() };
        match &mut self.tools {
            None => delta.content = split.answer,
            Some(tools) => {
                let calls = tools.calls();
                let parts = tools.push(&split.answer);
                add_parts(&mut delta, parts, calls);
            }
        }
        delta
    }
}

/// Adds pieces of tool calls, of which `begun` had begun before.
fn add_parts(delta: &mut Delta, parts: Vec<ToolPart>, mut begun: usize) {
    for part in parts {
        match part {
            ToolPart::Text(text) => delta.content += &text,
            ToolPart::Begin(name) => {
                delta.tool_calls.push(json!({
                    "index": begun,
                    "id": format!("call_{:016x}", random_u64()),
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }));
                begun += 1;
            }
            ToolPart::Arguments(piece) => {
                let index = begun.saturating_sub(1);
                delta.tool_calls.push(json!({
                    "index": index, "function": {"arguments": piece},
                }));
            }
        }
    }
}

/// A whole answer's tool calls from the pieces of a stream.
pub fn whole_calls(pieces: &[Value]) -> Vec<Value> {
    let mut calls: Vec<Value> = Vec::new();
    for piece in pieces {
        let arguments = piece["function"]["arguments"].as_str().unwrap_or_default();
        match calls.last_mut() {
            Some(call) if piece.get("id").is_none() => {
                let joined = call["function"]["arguments"].as_str().unwrap_or_default();
                call["function"]["arguments"] = format!("{joined}{arguments}").into();
            }
            _ => {
                let mut call = piece.clone();
                if let Some(call) = call.as_object_mut() {
                    call.shift_remove("index");
                }
                calls.push(call);
            }
        }
    }
    calls
}
