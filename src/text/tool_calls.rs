//! Tool calls in generated text, as they arrive:
//! `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>…</tool_call>`.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";

/// A piece of a text with tool calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolPart {
    /// Text outside any call.
    Text(String),
    /// A call begins.
    Begin(String),
    /// More of the JSON of the call's arguments; all of a call's pieces make one object.
    Arguments(String),
}

/// The types that a parameter's schema allows, by tool and parameter.
type Types = HashMap<String, HashMap<String, Vec<String>>>;

/// Tells tool calls from the text around them, and writes their arguments as JSON.
///
/// A value of a parameter whose schema says string is passed on piece by piece; any other is read
/// as JSON once it is whole, and is a string if that is not what the schema says. Blanks between
/// text and a call belong to the layout. What looks like the start of a marker is held back, so the
/// parts do not depend on how the text is cut.
#[derive(Debug)]
pub struct ToolCallParser {
    types: Types,
    state: State,
    /// Text that is not decided yet.
    held: String,
    calls: usize,
}

#[derive(Debug)]
enum State {
    Text,
    Name,
    Call(Call),
}

/// A call whose name is known.
#[derive(Debug)]
struct Call {
    name: String,
    keys: HashSet<String>,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// Before a key or the end.
    Between,
    /// In a key.
    Key,
    /// Between a key and its value.
    BeforeValue(Reading),
    /// In a value.
    Value(Reading),
}

/// What becomes of a value.
#[derive(Debug)]
enum Reading {
    /// A string that is passed on as it comes.
    Text,
    /// Read as JSON when it is whole; these types are allowed, or any if there are none.
    Json(Vec<String>),
    /// Its key was there before, so it is dropped.
    Repeated,
}

impl ToolCallParser {
    /// `tools` is the request's list of tools.
    pub fn new(tools: &Value) -> Self {
        let tools = tools.as_array().into_iter().flatten();
        let types = tools.filter_map(|tool| {
            let function = &tool["function"];
            let properties = function["parameters"]["properties"].as_object()?;
            let types = properties.iter().map(|(key, schema)| (key.clone(), types_of(schema)));
            Some((function["name"].as_str()?.to_owned(), types.collect()))
        });
        Self { types: types.collect(), state: State::Text, held: String::new(), calls: 0 }
    }

    /// Calls that have begun.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Whether the text is outside any call.
    pub fn is_outside(&self) -> bool {
        matches!(self.state, State::Text)
    }

    /// Adds the next piece of text.
    pub fn push(&mut self, text: &str) -> Vec<ToolPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// Ends the text. `whole`: the model ended it by itself, so a call that it did not close is
    /// closed; else a call that was cut off stays broken JSON, lest half a command be run.
    pub fn finish(mut self, whole: bool) -> Vec<ToolPart> {
        let mut parts = Vec::new();
        match &mut self.state {
            State::Text => push_text(&mut parts, std::mem::take(&mut self.held)),
            State::Name => push_text(&mut parts, format!("{OPEN}{}", self.held)),
            State::Call(_) if !whole => {}
            State::Call(call) => {
                let mut end = String::new();
                match &call.place {
                    Place::BeforeValue(Reading::Text | Reading::Json(_)) => end += "null",
                    Place::Value(Reading::Text) => end += &(escaped(&self.held) + "\""),
                    Place::Value(Reading::Json(types)) => end += &value_json(&self.held, types),
                    _ => {}
                }
                end += if call.keys.is_empty() { "{}" } else { "}" };
                parts.push(ToolPart::Arguments(end));
            }
        }
        parts
    }

    /// Goes on by one marker; false if more text is needed.
    fn advance(&mut self, parts: &mut Vec<ToolPart>) -> bool {
        match &mut self.state {
            State::Text => {
                if let Some((before, after)) = self.held.split_once(OPEN) {
                    push_text(parts, before.trim_end().to_owned());
                    self.held = after.to_owned();
                    self.state = State::Name;
                    return true;
                }
                // Blanks before a call are dropped, and what may begin one waits.
                let undecided = undecided_len(&self.held, OPEN);
                let decided = self.held[..self.held.len() - undecided].trim_end().len();
                push_text(parts, self.held.drain(..decided).collect());
                false
            }
            State::Name => {
                let Some((at, marker)) = first_of(&self.held, &[KEY, CLOSE, OPEN]) else {
                    return false;
                };
                let name = self.held[..at].trim().to_owned();
                if marker == OPEN || !is_name(&name) {
                    // No call, so it was text.
                    let end = at + if marker == OPEN { 0 } else { marker.len() };
                    push_text(parts, format!("{OPEN}{}", &self.held[..end]));
                    self.held.drain(..end);
                    self.state = State::Text;
                    return true;
                }
                self.held.drain(..at);
                self.calls += 1;
                parts.push(ToolPart::Begin(name.clone()));
                let call = Call { name, keys: HashSet::new(), place: Place::Between };
                self.state = State::Call(call);
                true
            }
            State::Call(call) => match call.advance(&mut self.held, &self.types, parts) {
                Step::Wait => false,
                Step::Go => true,
                Step::Closed => {
                    self.state = State::Text;
                    true
                }
            },
        }
    }
}

enum Step {
    Wait,
    Go,
    Closed,
}

impl Call {
    fn advance(&mut self, held: &mut String, types: &Types, parts: &mut Vec<ToolPart>) -> Step {
        let mut arguments = |text: String| parts.push(ToolPart::Arguments(text));
        match &self.place {
            Place::Between => match first_of(held, &[KEY, CLOSE]) {
                None => return Step::Wait,
                Some((at, CLOSE)) => {
                    held.drain(..at + CLOSE.len());
                    arguments(if self.keys.is_empty() { "{}" } else { "}" }.to_owned());
                    return Step::Closed;
                }
                Some((at, marker)) => {
                    held.drain(..at + marker.len());
                    self.place = Place::Key;
                }
            },
            Place::Key => {
                let Some(key) = take_until(held, KEY_END) else {
                    return Step::Wait;
                };
                let key = key.trim().to_owned();
                let reading = if self.keys.contains(&key) {
                    Reading::Repeated
                } else {
                    let comma = if self.keys.is_empty() { "{" } else { "," };
                    arguments(format!("{comma}{}:", Value::from(key.as_str())));
                    match types.get(&self.name).and_then(|types| types.get(&key)) {
                        Some(types) if types == &["string"] => Reading::Text,
                        types => Reading::Json(types.cloned().unwrap_or_default()),
                    }
                };
                self.keys.insert(key);
                self.place = Place::BeforeValue(reading);
            }
            Place::BeforeValue(_) => {
                if take_until(held, VALUE).is_none() {
                    return Step::Wait;
                }
                let before = std::mem::replace(&mut self.place, Place::Between);
                if let Place::BeforeValue(reading) = before {
                    if matches!(reading, Reading::Text) {
                        arguments("\"".to_owned());
                    }
                    self.place = Place::Value(reading);
                }
            }
            Place::Value(Reading::Text) => {
                if let Some(rest) = take_until(held, VALUE_END) {
                    arguments(escaped(&rest) + "\"");
                    self.place = Place::Between;
                } else {
                    let safe = held.len() - undecided_len(held, VALUE_END);
                    let piece: String = held.drain(..safe).collect();
                    if !piece.is_empty() {
                        arguments(escaped(&piece));
                    }
                    return Step::Wait;
                }
            }
            Place::Value(reading) => {
                let Some(value) = take_until(held, VALUE_END) else {
                    return Step::Wait;
                };
                if let Reading::Json(types) = reading {
                    arguments(value_json(&value, types));
                }
                self.place = Place::Between;
            }
        }
        Step::Go
    }
}

fn push_text(parts: &mut Vec<ToolPart>, text: String) {
    if !text.is_empty() {
        parts.push(ToolPart::Text(text));
    }
}

/// Takes all up to a marker, and drops the marker.
fn take_until(held: &mut String, marker: &str) -> Option<String> {
    let at = held.find(marker)?;
    let taken = held[..at].to_owned();
    held.drain(..at + marker.len());
    Some(taken)
}

/// The marker that comes first.
fn first_of<'a>(text: &str, markers: &[&'a str]) -> Option<(usize, &'a str)> {
    markers.iter().filter_map(|marker| Some((text.find(marker)?, *marker))).min()
}

/// Bytes at the end of `text` that may begin the marker.
fn undecided_len(text: &str, marker: &str) -> usize {
    let longest = (marker.len() - 1).min(text.len());
    (1..=longest).rev().find(|len| text.ends_with(&marker[..*len])).unwrap_or(0)
}

/// What clients accept as a function's name.
fn is_name(name: &str) -> bool {
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    (1..=128).contains(&name.len()) && name.chars().all(fine)
}

/// The inside of a JSON string.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// A whole value as JSON: itself where it is JSON of an allowed type, else a string.
fn value_json(text: &str, types: &[String]) -> String {
    match serde_json::from_str::<Value>(text) {
        Ok(value) if allows(types, &value) => value.to_string(),
        _ => Value::from(text).to_string(),
    }
}

fn allows(types: &[String], value: &Value) -> bool {
    let names: &[&str] = match value {
        Value::Null => &["null"],
        Value::Bool(_) => &["boolean"],
        Value::Number(number) if number.is_f64() => &["number"],
        Value::Number(_) => &["number", "integer"],
        // A string parameter's text may look like a quoted string; the model writes it bare.
        Value::String(_) => return types.is_empty(),
        Value::Array(_) => &["array"],
        Value::Object(_) => &["object"],
    };
    types.is_empty() || types.iter().any(|allowed| names.contains(&allowed.as_str()))
}

/// The JSON types that a schema names; none if it does not say.
fn types_of(schema: &Value) -> Vec<String> {
    let named = |value: &Value| match value {
        Value::String(name) => vec![name.clone()],
        Value::Array(names) => {
            names.iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect()
        }
        _ => Vec::new(),
    };
    let mut types = named(&schema["type"]);
    for choice in ["anyOf", "oneOf"] {
        for schema in schema[choice].as_array().into_iter().flatten() {
            types.extend(named(&schema["type"]));
        }
    }
    let strings = |values: &Vec<Value>| !values.is_empty() && values.iter().all(Value::is_string);
    if types.is_empty() && schema["enum"].as_array().is_some_and(strings) {
        types.push("string".to_owned());
    }
    types
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn tools() -> Value {
        let parameters = json!({"type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]},
            "deep": {"type": ["object", "null"]}, "any": {},
        }});
        json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}])
    }

    /// (text, [(name, arguments)]) for a text in these pieces.
    fn parse(pieces: &[&str], whole: bool) -> (String, Vec<(String, String)>) {
        let mut parser = ToolCallParser::new(&tools());
        let mut parts: Vec<ToolPart> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
        parts.extend(parser.finish(whole));
        let (mut text, mut calls) = (String::new(), Vec::new());
        for part in parts {
            match part {
                ToolPart::Text(piece) => text += &piece,
                ToolPart::Begin(name) => calls.push((name, String::new())),
                ToolPart::Arguments(piece) => calls.last_mut().expect("a call began").1 += &piece,
            }
        }
        (text, calls)
    }

    /// The same for every cut in two and for single characters.
    fn parsed(text: &str, whole: bool) -> (String, Vec<(String, String)>) {
        let all = parse(&[text], whole);
        for (cut, _) in text.char_indices() {
            assert_eq!(parse(&[&text[..cut], &text[cut..]], whole), all, "cut at {cut}");
        }
        assert_eq!(parse(&text.split("").collect::<Vec<_>>(), whole), all);
        all
    }

    fn call(arguments: &str) -> String {
        let (text, calls) = parsed(&format!("<tool_call>weather{arguments}</tool_call>"), true);
        assert_eq!((text.as_str(), calls.len()), ("", 1));
        assert_eq!(calls[0].0, "weather");
        calls[0].1.clone()
    }

    fn arg(key: &str, value: &str) -> String {
        format!("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>")
    }

    #[test]
    fn values_have_the_types_of_the_schema() {
        assert_eq!(call(""), "{}");
        assert_eq!(call(&arg("city", "Paris")), r#"{"city":"Paris"}"#);
        assert_eq!(call(&arg("city", "12")), r#"{"city":"12"}"#);
        assert_eq!(call(&arg("unit", "true")), r#"{"unit":"true"}"#);
        assert_eq!(call(&arg("days", "12")), r#"{"days":12}"#);
        assert_eq!(call(&arg("days", "soon")), r#"{"days":"soon"}"#);
        assert_eq!(call(&arg("deep", r#"{"a": [1]}"#)), r#"{"deep":{"a":[1]}}"#);
        assert_eq!(call(&arg("any", "[1, 2]")), r#"{"any":[1,2]}"#);
        assert_eq!(call(&arg("other", "a \"b\"\n")), r#"{"other":"a \"b\"\n"}"#);
        let two = format!("\n{}\n{}\n", arg("city", "a</b<é"), arg("days", "3"));
        assert_eq!(call(&two), r#"{"city":"a</b<é","days":3}"#);
        let repeated = arg("days", "1") + &arg("days", "2") + &arg("city", "x");
        assert_eq!(call(&repeated), r#"{"days":1,"city":"x"}"#);
    }

    #[test]
    fn text_and_calls_are_told_apart() {
        let one = format!("<tool_call>weather{}</tool_call>", arg("city", "Oslo"));
        let (text, calls) = parsed(&format!("I look.\n\n{one}\n{one} done "), true);
        assert_eq!((text.as_str(), calls.len()), ("I look. done ", 2));
        assert_eq!(parsed("a <tool_ca b \n", true), ("a <tool_ca b \n".to_owned(), vec![]));
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in
            ["<tool_call>two words</tool_call>!", "<tool_call>weath", "<tool_call></tool_call>"]
        {
            assert_eq!(parsed(text, true), (text.to_owned(), vec![]));
        }
        let (text, calls) = parsed("<tool_call>x<tool_call>weather</tool_call>", true);
        assert_eq!((text.as_str(), calls.len()), ("<tool_call>x", 1));
    }

    #[test]
    fn a_call_cut_off_is_closed_only_where_the_model_ended_it() {
        let cut = "<tool_call>weather<arg_key>city</arg_key><arg_value>Os\"l";
        let arguments = |whole| parsed(cut, whole).1[0].1.clone();
        assert_eq!(arguments(true), r#"{"city":"Os\"l"}"#);
        assert!(serde_json::from_str::<Value>(&arguments(false)).is_err());
        for end in ["<arg_key>ci", "<arg_key>city</arg_key>", "<arg_key>days</arg_key><arg_value>3"]
        {
            let text = format!("<tool_call>weather{}{end}", arg("unit", "C"));
            let calls = parsed(&text, true).1;
            let json: Value = serde_json::from_str(&calls[0].1).expect("valid JSON");
            assert_eq!(json["unit"], "C");
        }
    }

    proptest! {
        /// Markers in any order: never a panic, the same parts for any cut, and calls that are
        /// valid JSON objects.
        #[test]
        fn any_text_gives_valid_calls(
            words in prop::collection::vec(prop::sample::select(vec![
                OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END, "weather", "city", "days", "3",
                " ", "\n", "<", "tool_call>", "é🦀", "\"", "\\", "{", "null", "</", "\u{1}",
            ]), 0..40),
            cut in 0usize..200,
            whole in any::<bool>(),
        ) {
            let text = words.concat();
            let mut cut = cut.min(text.len());
            while !text.is_char_boundary(cut) {
                cut -= 1;
            }
            let all = parse(&[&text], whole);
            prop_assert_eq!(&parse(&[&text[..cut], &text[cut..]], whole), &all);
            let closed = if whole { all.1.len() } else { all.1.len().saturating_sub(1) };
            for (_, arguments) in &all.1[..closed] {
                let value: Value = serde_json::from_str(arguments)
                    .map_err(|e| TestCaseError::fail(format!("{arguments}: {e}")))?;
                prop_assert!(value.is_object());
            }
        }
    }
}
