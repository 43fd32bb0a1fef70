//! The text side of a checkpoint: tokenizer, chat template, generation defaults.

use log::warn;
use serde_json::Value;

use crate::error::{Error, Result, one_line};
use crate::text::{ChatTemplate, GenerationConfig, TemplateOptions, Tokenizer};
use crate::weights::{Bytes, Source};

/// What turns messages into token ids and back.
pub struct TextModel {
    tokenizer: Tokenizer,
    /// Only chats need it, so only they fail.
    template: Result<Option<ChatTemplate>>,
    generation: GenerationConfig,
}

impl TextModel {
    /// Reads the text files of a checkpoint; `None` if it has no tokenizer. End-of-turn tokens that
    /// generation_config.json does not name come from config.json: `config_eos`.
    ///
    /// # Errors
    /// Input error that names the file that cannot be used.
    pub fn open(source: &Source, config_eos: &[u32]) -> Result<Option<Self>> {
        const TOKENIZER: &str = "tokenizer.json";
        const GENERATION: &str = "generation_config.json";
        let Some(json) = source.open(TOKENIZER)? else {
            let file = source.display(TOKENIZER);
            warn!(
                "{}",
                one_line(format!("{file}: not found; prompts can only be given as token ids"))
            );
            return Ok(None);
        };
        let tokenizer = Tokenizer::from_bytes(&source.display(TOKENIZER), &json)?;
        let json = source.open(GENERATION)?;
        let json = json.as_ref().map_or(b"{}".as_slice(), |json: &Bytes| json);
        let mut generation = GenerationConfig::from_json(&source.display(GENERATION), json)?;
        if generation.eos_token_ids.is_empty() {
            generation.eos_token_ids = config_eos.to_vec();
        }
        Ok(Some(Self { tokenizer, template: read_template(source), generation }))
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Sampling defaults and end-of-turn tokens.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// Whether the chat template, if there is one, can be used.
    ///
    /// # Errors
    /// Input error that names the file.
    pub fn check_template(&self) -> Result<()> {
        self.template.as_ref().map(|_| ()).map_err(Error::clone)
    }

    /// Token ids of a chat up to where the model's turn begins. Special tokens in the text of
    /// users, systems and tools are plain text.
    ///
    /// # Errors
    /// Input error if there is no chat template or it refuses the messages.
    pub fn chat(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        options: &TemplateOptions,
    ) -> Result<Vec<u32>> {
        let template = self.template.as_ref().map_err(Error::clone)?.as_ref().ok_or_else(|| {
            Error::input("the checkpoint has no chat template; use --raw for plain completion")
        })?;
        let prompt = template.render(messages, tools, options, &self.tokenizer)?;
        self.tokenizer.encode_prompt(&prompt)
    }
}

/// `chat_template.jinja`, else the `chat_template` of tokenizer_config.json as older exports have
/// it.
fn read_template(source: &Source) -> Result<Option<ChatTemplate>> {
    const JINJA: &str = "chat_template.jinja";
    const CONFIG: &str = "tokenizer_config.json";
    if let Some(bytes) = source.open(JINJA)? {
        let name = source.display(JINJA);
        let text = std::str::from_utf8(&bytes)
            .map_err(|e| Error::input(format!("{name}: not UTF-8 text: {e}; fetch it again")))?;
        return ChatTemplate::new(&name, text).map(Some);
    }
    let Some(bytes) = source.open(CONFIG)? else {
        return Ok(None);
    };
    let name = source.display(CONFIG);
    let config: Value = serde_json::from_slice(&bytes)
        .map_err(|e| Error::input(format!("{name}: not valid JSON: {e}; fetch it again")))?;
    config["chat_template"].as_str().map(|text| ChatTemplate::new(&name, text)).transpose()
}
