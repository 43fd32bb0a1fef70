//! What the checkpoint says about sampling and stopping (`generation_config.json`).

use serde_json::Value;

use crate::error::{Error, Result};

/// The checkpoint's defaults for sampling, and the tokens that end a turn.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationConfig {
    /// Tokens that end the output; GLM-5 has three. Empty if the file names none.
    pub eos_token_ids: Vec<u32>,
    /// Sampling temperature, at least 0; 1 if the file gives none.
    pub temperature: f32,
    /// Nucleus sampling: above 0 and at most 1; 1, which is no limit, if the file gives none.
    pub top_p: f32,
    /// How many of the likeliest tokens are sampled from; `None` for no limit.
    pub top_k: Option<u32>,
}

impl GenerationConfig {
    /// Reads the file's bytes. `null` counts as missing, and so does `top_k` 0.
    pub fn from_json(file_name: &str, bytes: &[u8]) -> Result<Self> {
        let json: Value = serde_json::from_slice(bytes).map_err(|e| {
            Error::input(format!(
                "{file_name}: not valid JSON: {e}; take the file from the checkpoint again"
            ))
        })?;
        if !json.is_object() {
            return Err(wrong(file_name, "the file", &json, "a JSON object"));
        }
        let field = |name: &str| json.get(name).filter(|value| !value.is_null());
        let eos_token_ids = match field("eos_token_id") {
            Some(Value::Array(ids)) => ids.iter().map(token_id).collect(),
            Some(id) => token_id(id).map(|id| vec![id]),
            None => Some(Vec::new()),
        };
        let number = |name: &str, valid: fn(f32) -> bool, expected: &str| match field(name) {
            None => Ok(1.0),
            // Sampling works in f32, as the reference does.
            Some(value) => match value.as_f64().map(|number| number as f32) {
                Some(number) if valid(number) => Ok(number),
                _ => Err(wrong(file_name, name, value, expected)),
            },
        };
        let top_k = match field("top_k") {
            None => None,
            Some(value) => match token_id(value) {
                Some(count) => (count > 0).then_some(count),
                None => return Err(wrong(file_name, "top_k", value, "a count of tokens")),
            },
        };
        Ok(Self {
            eos_token_ids: eos_token_ids.ok_or_else(|| {
                let expected = "a token id or a list of token ids";
                wrong(file_name, "eos_token_id", &json["eos_token_id"], expected)
            })?,
            temperature: number(
                "temperature",
                |t| t >= 0.0 && t.is_finite(),
                "a number that is at least 0",
            )?,
            top_p: number("top_p", |p| p > 0.0 && p <= 1.0, "a number above 0 and at most 1")?,
            top_k,
        })
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn wrong(file_name: &str, name: &str, value: &Value, expected: &str) -> Error {
    Error::input(format!(
        "{file_name}: {name} is {value}, expected {expected}; correct it or take the file from the \
         checkpoint again"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<GenerationConfig> {
        GenerationConfig::from_json("generation_config.json", json.as_bytes())
    }

    #[test]
    fn all_fields() {
        let json = r#"{"eos_token_id": [7, 8], "temperature": 0.6, "top_p": 0.95, "top_k": 40}"#;
        let expected = GenerationConfig {
            eos_token_ids: vec![7, 8],
            temperature: 0.6,
            top_p: 0.95,
            top_k: Some(40),
        };
        assert_eq!(read(json).unwrap(), expected);
        assert_eq!(read(r#"{"eos_token_id": 7}"#).unwrap().eos_token_ids, [7]);
    }

    #[test]
    fn missing_and_null_fields_have_defaults() {
        let defaults =
            GenerationConfig { eos_token_ids: vec![], temperature: 1.0, top_p: 1.0, top_k: None };
        assert_eq!(read("{}").unwrap(), defaults);
        let nulls = r#"{"eos_token_id": null, "temperature": null, "top_p": null, "top_k": 0}"#;
        assert_eq!(read(nulls).unwrap(), defaults);
    }

    #[test]
    fn bad_values_are_named() {
        for (json, name) in [
            ("[]", "the file is []"),
            (r#"{"eos_token_id": "x"}"#, r#"eos_token_id is "x""#),
            (r#"{"eos_token_id": [1, -1]}"#, "eos_token_id is [1,-1]"),
            (r#"{"eos_token_id": 4294967296}"#, "eos_token_id is 4294967296"),
            (r#"{"temperature": -0.5}"#, "temperature is -0.5"),
            (r#"{"temperature": 1e300}"#, "temperature is 1e+300"),
            (r#"{"top_p": 0}"#, "top_p is 0"),
            (r#"{"top_p": 1.5}"#, "top_p is 1.5"),
            (r#"{"top_k": 1.5}"#, "top_k is 1.5"),
            ("{", "not valid JSON"),
        ] {
            let error = read(json).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            let expected = format!("generation_config.json: {name}");
            assert!(error.to_string().starts_with(&expected), "{error}");
        }
    }
}
