//! The messages and tools of a chat request, in the shape that chat templates read.

use serde_json::{Map, Value, json};

use super::errors::ApiError;
use super::fields::{Fields, wrong};

/// The `messages` of a request for the template: contents as strings, `developer` as `system`,
/// arguments of tool calls as objects.
pub fn messages(fields: Fields) -> Result<Value, ApiError> {
    let list = fields
        .list("messages")?
        .ok_or_else(|| ApiError::invalid("messages", "missing, expected a list of messages"))?;
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "empty, expected at least one message"));
    }
    let message = |(index, value)| message(value, &format!("messages[{index}]"));
    list.iter().enumerate().map(message).collect()
}

fn message(value: &Value, path: &str) -> Result<Value, ApiError> {
    let fields = Fields::of(value, path)?;
    let role = match fields.string("role")? {
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        other => {
            let found = other.map_or("missing".to_owned(), |role| format!("{role:?}"));
            return Err(ApiError::invalid(
                &fields.name("role"),
                format!("{found}, expected system, developer, user, assistant or tool"),
            ));
        }
    };
    let calls = fields.list("tool_calls")?.filter(|calls| !calls.is_empty());
    if role != "assistant" && calls.is_some() {
        let name = fields.name("tool_calls");
        return Err(ApiError::invalid(&name, "only an assistant's message has any"));
    }
    let content = content(fields)?;
    if content.is_none() && role != "assistant" {
        return Err(ApiError::invalid(&fields.name("content"), "missing, expected text"));
    }
    let mut message = Map::new();
    message.insert("role".into(), role.into());
    message.insert("content".into(), content.unwrap_or_default().into());
    if role == "assistant" {
        let reasoning = match fields.string("reasoning_content")? {
            None => fields.string("reasoning")?,
            reasoning => reasoning,
        };
        if let Some(reasoning) = reasoning {
            message.insert("reasoning_content".into(), reasoning.into());
        }
    }
    if let Some(calls) = calls {
        let name = fields.name("tool_calls");
        let call = |(index, value)| tool_call(value, &format!("{name}[{index}]"));
        let calls: Result<Value, ApiError> = calls.iter().enumerate().map(call).collect();
        message.insert("tool_calls".into(), calls?);
    }
    Ok(message.into())
}

/// The text of a message; parts are joined.
fn content(fields: Fields) -> Result<Option<String>, ApiError> {
    let name = fields.name("content");
    match fields.get("content") {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for (index, part) in parts.iter().enumerate() {
                let path = format!("{name}[{index}]");
                let part = Fields::of(part, &path)?;
                match part.string("type")? {
                    Some("text") => text += part.string("text")?.unwrap_or_default(),
                    other => {
                        let other = other.unwrap_or("missing");
                        return Err(ApiError::invalid(
                            &part.name("type"),
                            format!("{other}: this model reads text only"),
                        ));
                    }
                }
            }
            Ok(Some(text))
        }
        Some(value) => Err(wrong(&name, value, "text or a list of text parts")),
    }
}

fn tool_call(value: &Value, path: &str) -> Result<Value, ApiError> {
    let call = Fields::of(value, path)?;
    let function_path = call.name("function");
    let function = call.get("function").unwrap_or(&Value::Null);
    let function = Fields::of(function, &function_path)?;
    let name = function
        .string("name")?
        .ok_or_else(|| ApiError::invalid(&function.name("name"), "missing, expected a name"))?;
    // OpenAI's clients send the object as a string.
    let arguments = match function.get("arguments") {
        None => json!({}),
        Some(Value::String(text)) if text.trim().is_empty() => json!({}),
        Some(Value::String(text)) => serde_json::from_str(text).unwrap_or(Value::Null),
        Some(value) => value.clone(),
    };
    if !arguments.is_object() {
        return Err(ApiError::invalid(
            &function.name("arguments"),
            "expected a JSON object, as a string or as it is",
        ));
    }
    Ok(json!({"type": "function", "function": {"name": name, "arguments": arguments}}))
}

/// What a request says about tools.
#[derive(Debug, Default)]
pub struct Tools {
    /// The list for the template; none if there are no tools or none may be called.
    pub definitions: Option<Value>,
    /// One of these functions must be called.
    pub required: Vec<String>,
    /// At most one call.
    pub single: bool,
}

/// `tools`, `tool_choice` and `parallel_tool_calls` of a request.
pub fn tools(fields: Fields) -> Result<Tools, ApiError> {
    for old in ["functions", "function_call"] {
        if fields.get(old).is_some() {
            return Err(ApiError::invalid(old, "not supported; use tools and tool_choice"));
        }
    }
    let list = fields.list("tools")?.map_or(&[][..], Vec::as_slice);
    let mut names = Vec::new();
    for (index, tool) in list.iter().enumerate() {
        let path = format!("tools[{index}]");
        let tool = Fields::of(tool, &path)?;
        if tool.string("type")? != Some("function") {
            return Err(ApiError::invalid(&tool.name("type"), "expected \"function\""));
        }
        let path = tool.name("function");
        let function = Fields::of(tool.get("function").unwrap_or(&Value::Null), &path)?;
        function.object("parameters")?;
        match function.string("name")? {
            Some(name) if !name.is_empty() => names.push(name.to_owned()),
            _ => return Err(ApiError::invalid(&function.name("name"), "missing")),
        }
    }
    let some = || (!list.is_empty()).then(|| Value::Array(list.to_vec()));
    let single = fields.bool("parallel_tool_calls")? == Some(false);
    let free = || Tools { definitions: some(), required: Vec::new(), single };
    let must = |required: Vec<String>| Tools { required, ..free() };
    match fields.get("tool_choice") {
        None => Ok(free()),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Ok(free()),
            // What is not offered is not called.
            "none" => Ok(Tools::default()),
            "required" if names.is_empty() => {
                Err(ApiError::invalid("tool_choice", "required, but there are no tools"))
            }
            "required" => Ok(must(names)),
            _ => Err(ApiError::invalid(
                "tool_choice",
                "expected auto, none, required, or {\"type\": \"function\", \"function\": …}",
            )),
        },
        Some(value) => {
            let choice = Fields::of(value, "tool_choice")?;
            let name = choice.object("function")?.and_then(|function| function.get("name"));
            match (choice.string("type")?, name.and_then(Value::as_str)) {
                (Some("function"), Some(name)) if names.iter().any(|known| known == name) => {
                    Ok(must(vec![name.to_owned()]))
                }
                (Some("function"), Some(_)) => {
                    Err(ApiError::invalid("tool_choice.function.name", "not one of the tools"))
                }
                _ => Err(ApiError::invalid(
                    "tool_choice",
                    "expected {\"type\": \"function\", \"function\": {\"name\": …}}",
                )),
            }
        }
    }
}
