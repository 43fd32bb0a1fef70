//! From messages to token ids and from token ids back to text.
//!
//! On the way in, [`ChatTemplate`] renders messages to a [`Prompt`] and [`Tokenizer`] turns it into
//! ids. On the way out, [`Detokenizer`] turns ids into text as they arrive, [`StopStrings`] ends
//! the text at a stop string, [`ReasoningSplitter`] tells reasoning from answer, and
//! [`ToolCallParser`] tool calls from text.
//! [`GenerationConfig`] holds what the checkpoint says about sampling and stopping.

mod added_tokens;
mod detokenize;
mod generation;
mod prompt;
mod python_json;
mod reasoning;
mod stop;
mod template;
mod token_bytes;
mod tokenizer;
mod tool_calls;

pub use detokenize::Detokenizer;
pub use generation::GenerationConfig;
pub use prompt::Prompt;
pub use reasoning::{ReasoningSplitter, SplitText};
pub use stop::{Released, StopStrings};
pub use template::{ChatTemplate, TemplateOptions};
pub use tokenizer::Tokenizer;
pub use tool_calls::{ToolCallParser, ToolPart};
