//! Which path does what.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use tiny_http::{Method, Request};

use super::errors::ApiError;
use super::fields::Fields;
use super::http::{Answered, Exchange};
use super::messages::tools;
use super::request::{chat, chat_prompt, completion, token_ids};
use super::{Generating, Model, Phase, Shared, generation};
use crate::text::Detokenizer;

/// The chat page.
const PAGE: &str = include_str!("page.html");

/// Paths with the methods that they know; HEAD goes with GET.
const ROUTES: [(&str, &str); 9] = [
    ("/", "GET"),
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/version", "GET"),
    ("/v1/models", "GET"),
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
];

/// Answers a request. `has_place`: not too many are being answered already.
pub fn answer(shared: &Arc<Shared>, request: Request, has_place: bool) {
    let Some(exchange) = Exchange::new(request, shared.options.cors.clone()) else {
        return;
    };
    if let Some(client) = exchange.client() {
        shared.watcher.heard_from(client);
    }
    if !has_place {
        return exchange.error(&ApiError::unavailable("too many requests at a time"));
    }
    if let Err(refused) = route(shared, exchange) {
        refused.exchange.error(&refused.error);
    }
}

fn route(shared: &Arc<Shared>, exchange: Exchange) -> Answered {
    let path = match exchange.path() {
        path if path.starts_with("/v1/models/") => "/v1/models",
        path => path,
    };
    let Some((path, method)) = ROUTES.into_iter().find(|(known, _)| *known == path) else {
        let message = format!("there is no {}; talon has {}", exchange.path(), known_paths());
        return exchange.refuse(ApiError::new(404, "not_found_error", message));
    };
    let allowed = if method == "GET" { "GET, HEAD, OPTIONS" } else { "POST, OPTIONS" };
    match (exchange.method(), method) {
        (Method::Options, _) => {
            exchange.reply(204, "text/plain", Vec::new(), &[("Allow", allowed.to_owned())]);
            return Ok(());
        }
        (Method::Get | Method::Head, "GET") | (Method::Post, "POST") => {}
        _ => {
            let message = format!("{path} knows {allowed}");
            let error = ApiError::new(405, "invalid_request_error", message);
            let body = error.json().to_string().into_bytes();
            exchange.reply(405, "application/json", body, &[("Allow", allowed.to_owned())]);
            return Ok(());
        }
    }
    // What tells nothing of anybody's requests is open, as in vLLM.
    let open = matches!(path, "/" | "/health" | "/metrics" | "/version");
    if !open && !has_key(shared, &exchange) {
        let message = "wrong or missing API key; send Authorization: Bearer KEY";
        let error = ApiError::new(401, "authentication_error", message);
        return exchange.refuse(error.with_code("invalid_api_key"));
    }
    match path {
        "/" => exchange.reply(200, "text/html; charset=utf-8", PAGE.into(), &[]),
        "/health" => health(shared, exchange),
        "/version" => exchange.json(200, &json!({"version": env!("CARGO_PKG_VERSION")})),
        _ => {
            // Metrics are there to the end.
            let known = shared.state().model.clone().filter(|_| path == "/metrics");
            let model = match known.map_or_else(|| model(shared), Ok) {
                Ok(model) => model,
                Err(error) => return exchange.refuse(error),
            };
            return with_model(shared, &model, path, exchange);
        }
    }
    Ok(())
}

fn with_model(shared: &Arc<Shared>, model: &Model, path: &str, mut exchange: Exchange) -> Answered {
    match path {
        "/metrics" => {
            let text = shared.metrics.text(&model.name, model.door.status(), model.limits);
            exchange.reply(200, "text/plain; version=0.0.4", text.into_bytes(), &[]);
            return Ok(());
        }
        "/v1/models" => return models(shared, model, exchange),
        _ => {}
    }
    let body = match exchange.body().and_then(|body| parse(&body)) {
        Ok(body) => body,
        Err(error) => return exchange.refuse(error),
    };
    let answered = match path {
        "/tokenize" => tokenize(model, &body),
        "/detokenize" => detokenize(model, &body),
        _ => {
            let read = if path == "/v1/completions" { completion } else { chat };
            let request = match read(&body, &model.text, model.limits) {
                Ok(request) => request,
                Err(error) => return exchange.refuse(error),
            };
            // A text may be long, and the request has what it needs of it.
            drop(body);
            let _generating = Generating::new(shared);
            // A drain that began meanwhile does not wait for this one.
            if let Err(error) = self::model(shared) {
                return exchange.refuse(error);
            }
            return generation::generate(shared, model, exchange, request);
        }
    };
    match answered {
        Ok(value) => {
            exchange.json(200, &value);
            Ok(())
        }
        Err(error) => exchange.refuse(error),
    }
}

fn known_paths() -> String {
    ROUTES.map(|(path, _)| path).join(", ")
}

/// Whether the client sent the key. The time of the comparison does not tell how much of it was
/// right.
fn has_key(shared: &Shared, exchange: &Exchange) -> bool {
    let Some(key) = &shared.options.api_key else {
        return true;
    };
    let sent = exchange.header("Authorization").unwrap_or_default();
    let sent = match sent.split_once(' ') {
        Some((scheme, sent)) if scheme.eq_ignore_ascii_case("bearer") => sent.trim(),
        _ => "",
    };
    same(sent.as_bytes(), key.as_bytes())
}

fn same(sent: &[u8], key: &[u8]) -> bool {
    let mut difference = sent.len() ^ key.len();
    for (index, byte) in key.iter().enumerate() {
        difference |= usize::from(byte ^ sent.get(index).copied().unwrap_or(0));
    }
    std::hint::black_box(difference) == 0
}

/// The model, if it takes requests.
fn model(shared: &Shared) -> Result<Arc<Model>, ApiError> {
    let state = shared.state();
    match (&state.phase, &state.model) {
        (Phase::Ready, Some(model)) => Ok(model.clone()),
        (Phase::Failed(_), _) => Err(ApiError::engine_ended()),
        (Phase::Draining, _) => Err(ApiError::unavailable("talon is shutting down")),
        _ => Err(ApiError::unavailable("the model is loading; /health tells when it is there")),
    }
}

fn health(shared: &Shared, exchange: Exchange) {
    let state = shared.state();
    let (status, word) = match &state.phase {
        Phase::Ready => (200, "ok"),
        Phase::Loading => (503, "loading model"),
        Phase::Draining => (503, "shutting down"),
        Phase::Failed(_) => (503, "engine failed"),
    };
    let mut body = json!({"status": word});
    if let Phase::Failed(reason) = &state.phase {
        body["reason"] = reason.as_str().into();
    }
    if let Some(model) = &state.model {
        let status = model.door.status();
        body["running"] = status.running.load(Ordering::Relaxed).into();
        body["waiting"] = status.waiting.load(Ordering::Relaxed).into();
    }
    drop(state);
    exchange.json(status, &body);
}

fn models(shared: &Shared, model: &Model, exchange: Exchange) -> Answered {
    let entry = json!({
        "id": model.name,
        "object": "model",
        "created": shared.started,
        "owned_by": "talon",
        "root": model.name,
        "parent": null,
        "max_model_len": model.limits.context,
    });
    let asked = exchange.path().strip_prefix("/v1/models/").map(str::to_owned);
    match asked {
        None => exchange.json(200, &json!({"object": "list", "data": [entry]})),
        Some(name) if name == model.name => exchange.json(200, &entry),
        Some(name) => {
            let message = format!("there is no model {name:?}; this is {:?}", model.name);
            let error = ApiError::new(404, "not_found_error", message);
            return exchange.refuse(error.with_code("model_not_found"));
        }
    }
    Ok(())
}

fn parse(body: &[u8]) -> Result<Value, ApiError> {
    let value: Value = serde_json::from_slice(body)
        .map_err(|error| ApiError::invalid("", format!("the body is not valid JSON: {error}")))?;
    if !value.is_object() {
        return Err(ApiError::invalid("", "the body is no JSON object"));
    }
    Ok(value)
}

/// `prompt` (vLLM), `content` (llama.cpp) or `messages` as ids.
fn tokenize(model: &Model, body: &Value) -> Result<Value, ApiError> {
    let fields = Fields::of(body, "")?;
    let text = match fields.string("prompt")? {
        None => fields.string("content")?,
        prompt => prompt,
    };
    let ids = match text {
        Some(text) => {
            let encoded = model.text.tokenizer().encode(text);
            encoded.map_err(|error| ApiError::invalid("prompt", error))?
        }
        None if fields.get("messages").is_some() => {
            chat_prompt(fields, &tools(fields)?, &model.text)?
        }
        None => return Err(ApiError::invalid("prompt", "missing, expected text, or messages")),
    };
    Ok(json!({"count": ids.len(), "max_model_len": model.limits.context, "tokens": ids}))
}

fn detokenize(model: &Model, body: &Value) -> Result<Value, ApiError> {
    let tokens = Fields::of(body, "")?.list("tokens")?;
    let tokens = tokens.ok_or_else(|| ApiError::invalid("tokens", "missing, expected ids"))?;
    let ids = token_ids(tokens, "tokens", model.limits.vocab_limit)?;
    let mut detokenizer = Detokenizer::new(model.text.tokenizer());
    let mut text: String = ids.into_iter().map(|id| detokenizer.push(id)).collect();
    text += &detokenizer.finish();
    Ok(json!({"prompt": text, "content": text}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_the_same_only_if_they_are() {
        assert!(same(b"secret", b"secret"));
        for sent in ["", "secre", "secret1", "secres", "SECRET"] {
            assert!(!same(sent.as_bytes(), b"secret"), "{sent}");
        }
        assert!(same(b"", b""));
    }
}
