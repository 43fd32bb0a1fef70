//! Prompts to measure with, in classes: what speculation is worth depends on the kind of text.

use serde::Deserialize;
use serde_json::Value;

use crate::error::{Error, Result};

/// The built-in classes, in the order of the report.
pub const CLASSES: [&str; 4] = ["code", "prose", "chat", "json"];

/// A prompt of a workload; one JSON object a line in a prompt file.
#[derive(Debug, Clone, Deserialize)]
pub struct Prompt {
    /// Its class, e.g. `code`.
    pub class: String,
    /// Its name in the report, unique in its class; numbered if absent.
    #[serde(default)]
    pub id: String,
    /// What is asked.
    #[serde(flatten)]
    pub text: PromptText,
}

/// A prompt's content.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub enum PromptText {
    /// Token ids.
    Ids {
        /// The ids.
        ids: Vec<u32>,
    },
    /// Plain text to complete.
    Raw {
        /// The text as it stands.
        raw: String,
    },
    /// A question to the chat model.
    Chat {
        /// The user's message.
        prompt: String,
    },
    /// A whole conversation, with tools.
    Messages {
        /// Messages as the chat template takes them.
        messages: Value,
        /// Tools as the chat template takes them.
        #[serde(default)]
        tools: Option<Value>,
    },
}

/// The prompts for a model: the demo model is asked for what it knows.
///
/// # Errors
/// Only if the embedded files are broken, which a test excludes.
pub fn built_in_prompts(model: &str) -> Result<Vec<Prompt>> {
    if model.starts_with("synthetic:") {
        return Ok((0..8).map(random_prompt).collect());
    }
    match model {
        "demo" => read_prompts("built-in prompts", include_str!("prompts/demo.jsonl")),
        _ => read_prompts("built-in prompts", include_str!("prompts/general.jsonl")),
    }
}

/// A few random ids: random weights make nothing of words, and have no tokenizer.
fn random_prompt(number: u32) -> Prompt {
    let id = |i: u32| (number * 8 + i).wrapping_mul(2_654_435_761) >> 16;
    Prompt {
        class: "random".into(),
        id: format!("random-{number}"),
        text: PromptText::Ids { ids: (0..8).map(id).collect() },
    }
}

/// Reads a prompt file: one JSON object a line with `class` and `prompt`, `raw` or `messages`.
///
/// # Errors
/// Input error that names the file and the line.
pub fn read_prompts(file: &str, text: &str) -> Result<Vec<Prompt>> {
    let mut prompts: Vec<Prompt> = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let mut prompt: Prompt = serde_json::from_str(line).map_err(|e| {
            Error::input(format!(
                "{file}: line {number}: {e}; expected {{\"class\": \"code\", \"prompt\": \"…\"}} \
                 (or \"raw\", or \"messages\" and \"tools\")"
            ))
        })?;
        // They are printed in tables.
        let is_name = |name: &str| name.len() <= 40 && !name.contains(char::is_control);
        if prompt.class.is_empty() || !is_name(&prompt.class) || !is_name(&prompt.id) {
            return Err(Error::input(format!(
                "{file}: line {number}: class and id must be short printable names"
            )));
        }
        if prompt.id.is_empty() {
            let before = prompts.iter().filter(|other| other.class == prompt.class).count();
            prompt.id = format!("{}-{before}", prompt.class);
        }
        if prompts.iter().any(|other| other.class == prompt.class && other.id == prompt.id) {
            return Err(Error::input(format!(
                "{file}: line {number}: a second prompt {} of class {}; runs are paired by it",
                prompt.id, prompt.class
            )));
        }
        prompts.push(prompt);
    }
    if prompts.is_empty() {
        return Err(Error::input(format!("{file}: no prompts; expected one JSON object a line")));
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_prompts_are_distinct_and_in_all_classes() {
        for model in ["demo", "./GLM-5.2-NVFP4"] {
            let prompts = built_in_prompts(model).expect("they parse");
            for class in CLASSES {
                let of_class = prompts.iter().filter(|prompt| prompt.class == class);
                let texts: std::collections::BTreeSet<String> =
                    of_class.clone().map(|prompt| format!("{:?}", prompt.text)).collect();
                assert!(texts.len() >= 8, "{model}: {class} has {} prompts", texts.len());
                assert_eq!(texts.len(), of_class.count(), "{model}: {class} repeats a prompt");
            }
        }
    }

    #[test]
    fn a_bad_line_is_named() {
        let error =
            read_prompts("mine.jsonl", "{\"class\":\"a\",\"prompt\":\"x\"}\n\n{\"class\":1}")
                .expect_err("line 3 is bad");
        assert!(error.to_string().starts_with("mine.jsonl: line 3: "), "{error}");
        let error = read_prompts("mine.jsonl", "\n").expect_err("nothing there");
        assert!(error.to_string().contains("no prompts"), "{error}");
    }
}
