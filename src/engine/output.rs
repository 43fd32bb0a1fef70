//! From sampled tokens to the text that a user sees, piece by piece.

use super::TextModel;
use crate::error::Result;
use crate::text::{Detokenizer, ReasoningSplitter, SplitText, StopStrings};

/// Whether a prompt ends inside the model's reasoning: templates differ in what they open and
/// close, so the prompt itself is asked.
pub fn opens_reasoning(text: &TextModel, prompt: &[u32]) -> bool {
    let last = |literal: &str| {
        let id = text.tokenizer().token_id(literal)?;
        prompt.iter().rposition(|token| *token == id)
    };
    // A place counts for more than no place.
    last("<think>") > last("</think>")
}

/// Detokenises, ends at stop strings, and tells reasoning from answer.
pub struct OutputText<'a> {
    detokenizer: Detokenizer<'a>,
    stops: StopStrings,
    splitter: ReasoningSplitter,
}

impl<'a> OutputText<'a> {
    /// `thinking`: the output begins inside the reasoning.
    ///
    /// # Errors
    /// Input error if a stop string is empty.
    pub fn new(text: &'a TextModel, stops: Vec<String>, thinking: bool) -> Result<Self> {
        Ok(Self {
            detokenizer: Detokenizer::new(text.tokenizer()),
            stops: StopStrings::new(stops)?,
            splitter: ReasoningSplitter::new(thinking),
        })
    }

    /// Adds a token; returns the text that became visible and whether a stop string ended it.
    pub fn push(&mut self, token: u32) -> (SplitText, bool) {
        let released = self.stops.push(&self.detokenizer.push(token));
        (self.splitter.push(&released.text), released.stopped)
    }

    /// What was held back.
    pub fn finish(mut self) -> SplitText {
        let tail = self.detokenizer.finish();
        let released = self.stops.push(&tail);
        let mut split = self.splitter.push(&(released.text + &self.stops.finish()));
        let last = self.splitter.finish();
        split.reasoning += &last.reasoning;
        split.answer += &last.answer;
        split
    }
}
