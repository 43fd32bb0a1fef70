//! Errors as OpenAI's clients read them.

use serde_json::{Value, json};

use crate::error::one_line;

/// An error that is answered with a status and a JSON object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// What is wrong and what to do.
    pub message: String,
    /// `type` of the object.
    pub kind: &'static str,
    /// The request's field that is wrong.
    pub param: Option<String>,
    /// A word for programs.
    pub code: Option<&'static str>,
    /// Seconds after which to try again.
    pub retry_after: Option<u32>,
}

impl ApiError {
    /// An error of this status.
    pub fn new(status: u16, kind: &'static str, message: impl Into<String>) -> Self {
        let message = one_line(message.into());
        Self { status, message, kind, param: None, code: None, retry_after: None }
    }

    /// 400: the request is wrong, at `param` if it names a field.
    pub fn invalid(param: &str, message: impl std::fmt::Display) -> Self {
        let text =
            if param.is_empty() { message.to_string() } else { format!("{param}: {message}") };
        let param = (!param.is_empty()).then(|| param.to_owned());
        Self { param, ..Self::new(400, "invalid_request_error", text) }
    }

    /// 503: try again in a moment.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { retry_after: Some(1), ..Self::new(503, "unavailable_error", message) }
    }

    /// 500: the engine has ended.
    pub fn engine_ended() -> Self {
        Self::new(500, "server_error", "the engine has ended; talon's log says why")
    }

    /// With a word for programs.
    pub fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// The JSON object.
    pub fn json(&self) -> Value {
        json!({"error": {
            "message": self.message, "type": self.kind, "param": self.param, "code": self.code,
        }})
    }
}
