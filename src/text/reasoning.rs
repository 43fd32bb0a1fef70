//! Telling the reasoning from the answer in generated text.

use std::mem;

/// Ends the reasoning.
const END_OF_REASONING: &str = "</think>";

/// A piece of generated text; either part may be empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SplitText {
    /// What the model thought.
    pub reasoning: String,
    /// What it says.
    pub answer: String,
}

/// Splits text that arrives in pieces.
///
/// With thinking on, the text begins inside the reasoning and `</think>` ends it; if that never
/// comes, all of it is reasoning. Line breaks around the reasoning and around the answer belong to
/// the layout and are dropped; all other blanks are kept. With thinking off, the text is
/// the answer and passes unchanged.
#[derive(Debug, Clone)]
pub struct ReasoningSplitter {
    state: State,
}

#[derive(Debug, Clone)]
enum State {
    Off,
    /// `pending` may be the start of `</think>`.
    Reasoning {
        pending: String,
        trimmer: LineBreakTrimmer,
    },
    Answer {
        trimmer: LineBreakTrimmer,
    },
}

impl ReasoningSplitter {
    /// `thinking` is what the prompt was rendered with.
    pub fn new(thinking: bool) -> Self {
        let state = if thinking {
            State::Reasoning { pending: String::new(), trimmer: LineBreakTrimmer::default() }
        } else {
            State::Off
        };
        Self { state }
    }

    /// Adds the next piece of text.
    pub fn push(&mut self, text: &str) -> SplitText {
        match &mut self.state {
            State::Off => SplitText { answer: text.to_owned(), ..SplitText::default() },
            State::Answer { trimmer } => {
                SplitText { answer: trimmer.push(text), ..SplitText::default() }
            }
            State::Reasoning { pending, trimmer } => {
                pending.push_str(text);
                if let Some((thought, said)) = pending.split_once(END_OF_REASONING) {
                    let reasoning = trimmer.push(thought);
                    let mut trimmer = LineBreakTrimmer::default();
                    let answer = trimmer.push(said);
                    self.state = State::Answer { trimmer };
                    return SplitText { reasoning, answer };
                }
                let undecided = pending.split_off(pending.len() - possible_start(pending));
                let decided = mem::replace(pending, undecided);
                SplitText { reasoning: trimmer.push(&decided), ..SplitText::default() }
            }
        }
    }

    /// Ends the text and returns what was held back.
    pub fn finish(self) -> SplitText {
        match self.state {
            State::Off | State::Answer { .. } => SplitText::default(),
            State::Reasoning { pending, mut trimmer } => {
                SplitText { reasoning: trimmer.push(&pending), ..SplitText::default() }
            }
        }
    }
}

/// The length of the end of `text` that may be the start of `</think>`.
fn possible_start(text: &str) -> usize {
    let longest = END_OF_REASONING.len().min(text.len());
    (1..=longest).rev().find(|&len| text.ends_with(&END_OF_REASONING[..len])).unwrap_or(0)
}

/// Drops line breaks at the start and at the end of a text that arrives in pieces.
#[derive(Debug, Clone, Default)]
struct LineBreakTrimmer {
    begun: bool,
    /// Line breaks that are dropped unless more text comes.
    held: String,
}

impl LineBreakTrimmer {
    fn push(&mut self, text: &str) -> String {
        let text = if self.begun { text } else { text.trim_start_matches(is_line_break) };
        let body = text.trim_end_matches(is_line_break);
        let breaks = &text[body.len()..];
        if body.is_empty() {
            self.held.push_str(breaks);
            return String::new();
        }
        self.begun = true;
        let mut released = mem::replace(&mut self.held, breaks.to_owned());
        released.push_str(body);
        released
    }
}

fn is_line_break(c: char) -> bool {
    matches!(c, '\n' | '\r')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The whole result for every way to cut the text in two, and for single characters.
    fn split(thinking: bool, text: &str) -> (String, String) {
        let run = |pieces: Vec<&str>| {
            let mut splitter = ReasoningSplitter::new(thinking);
            let mut parts: Vec<SplitText> = pieces.iter().map(|p| splitter.push(p)).collect();
            parts.push(splitter.finish());
            let reasoning: String = parts.iter().map(|p| p.reasoning.as_str()).collect();
            let answer: String = parts.iter().map(|p| p.answer.as_str()).collect();
            (reasoning, answer)
        };
        let whole = run(vec![text]);
        for (cut, _) in text.char_indices() {
            assert_eq!(run(vec![&text[..cut], &text[cut..]]), whole, "cut at {cut}");
        }
        assert_eq!(run(text.split("").collect()), whole);
        whole
    }

    fn pair(reasoning: &str, answer: &str) -> (String, String) {
        (reasoning.into(), answer.into())
    }

    #[test]
    fn the_marker_separates_wherever_it_is_cut() {
        assert_eq!(split(true, "so <</thin</think>é </think>"), pair("so <</thin", "é </think>"));
        assert_eq!(split(true, "</think>17"), pair("", "17"));
    }

    #[test]
    fn without_the_marker_all_is_reasoning() {
        assert_eq!(split(true, "I wonder</thi"), pair("I wonder</thi", ""));
    }

    #[test]
    fn line_breaks_around_both_parts_are_dropped() {
        let text = "\n\r\n so\n\nthen \n</think>\n\nanswer\n\n more \n\n";
        assert_eq!(split(true, text), pair(" so\n\nthen ", "answer\n\n more "));
    }

    #[test]
    fn with_thinking_off_text_passes_unchanged() {
        assert_eq!(split(false, "\na</think>b\n"), pair("", "\na</think>b\n"));
    }

    #[test]
    fn text_comes_as_soon_as_it_is_decided() {
        let mut splitter = ReasoningSplitter::new(true);
        assert_eq!(splitter.push("a<").reasoning, "a");
        assert_eq!(splitter.push("b\n").reasoning, "<b");
        assert_eq!(splitter.push("c").reasoning, "\nc");
        assert_eq!(splitter.push("</think>d").answer, "d");
    }
}
