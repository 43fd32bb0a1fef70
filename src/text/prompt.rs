//! A rendered prompt that still knows which of its characters must stay ordinary text.
//!
//! Whoever writes a message could otherwise forge a turn by writing `<|assistant|>` into it. So
//! before rendering, every literal of an added token in outside text is broken up by a mark after
//! its first character. The mark is a character that occurs nowhere else, and the tokenizer drops
//! it once it has looked for literals.

use std::borrow::Cow;
use std::collections::HashSet;

use serde_json::Value;

use super::added_tokens::AddedTokens;
use crate::error::{Error, Result};

/// Characters that Unicode leaves without meaning, so text hardly ever holds them.
const PRIVATE_USE: [std::ops::RangeInclusive<char>; 3] =
    ['\u{E000}'..='\u{F8FF}', '\u{F0000}'..='\u{FFFFD}', '\u{100000}'..='\u{10FFFD}'];

/// A rendered chat prompt, to be encoded with [`Tokenizer::encode_prompt`].
///
/// [`Tokenizer::encode_prompt`]: super::Tokenizer::encode_prompt
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    marked: String,
    mark: Option<char>,
}

impl Prompt {
    pub(super) fn new(marked: String, mark: Option<char>) -> Self {
        Self { marked, mark }
    }

    /// The prompt as plain text. Encoding this instead of the prompt would turn an added token's
    /// literal inside a message into that token.
    pub fn text(&self) -> Cow<'_, str> {
        match self.mark {
            Some(mark) => Cow::Owned(self.marked.replace(mark, "")),
            None => Cow::Borrowed(&self.marked),
        }
    }

    /// The text with its marks, and the character that marks, if there are any.
    pub(super) fn marked(&self) -> (&str, Option<char>) {
        (&self.marked, self.mark)
    }
}

/// Breaks up the literals of added tokens in outside text.
pub(super) struct Marker<'a> {
    added: &'a AddedTokens,
    mark: char,
    used: bool,
}

impl<'a> Marker<'a> {
    /// `everything` is all text the prompt is made of; the mark is not in it.
    pub(super) fn new(added: &'a AddedTokens, everything: &[&str]) -> Result<Self> {
        let all = everything.iter().flat_map(|text| text.chars());
        let taken: HashSet<char> = all.filter(|c| c >= PRIVATE_USE[0].start()).collect();
        let mark = PRIVATE_USE.into_iter().flatten().find(|c| !taken.contains(c));
        let mark = mark.ok_or_else(|| {
            Error::input(
                "messages: they hold every private-use character of Unicode, but one must be free \
                 to mark ordinary text with; remove one of them",
            )
        })?;
        Ok(Self { added, mark, used: false })
    }

    /// Marks every string in `value`. A literal cut off by the end of a string is broken up as
    /// well: a template may join the parts of a message, which would complete it.
    pub(super) fn break_literals(&mut self, value: &mut Value) {
        match value {
            Value::String(text) => self.mark_text(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.break_literals(item)),
            Value::Object(fields) => {
                fields.values_mut().for_each(|field| self.break_literals(field))
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// The mark if anything was marked.
    pub(super) fn mark(&self) -> Option<char> {
        self.used.then_some(self.mark)
    }

    fn mark_text(&mut self, text: &mut String) {
        let mut marked = String::new();
        let mut copied = 0;
        for (start, first) in text.char_indices() {
            if self.added.may_begin(&text[start..]) {
                let place = start + first.len_utf8();
                marked.push_str(&text[copied..place]);
                marked.push(self.mark);
                copied = place;
            }
        }
        if copied > 0 {
            marked.push_str(&text[copied..]);
            *text = marked;
            self.used = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn added() -> AddedTokens {
        AddedTokens::new(vec![("<u>".into(), 1), ("u>".into(), 2)])
    }

    #[test]
    fn every_literal_is_broken_up() {
        let added = added();
        let mut marker = Marker::new(&added, &["a<u>b"]).unwrap();
        let mut value = json!(["a<u>b", {"text": "x<u"}, 1, null]);
        marker.break_literals(&mut value);
        let m = marker.mark().unwrap();
        // In the second string both the cut-off "<u" and the cut-off "u" may begin a literal.
        let expected = json!([format!("a<{m}u{m}>b"), {"text": format!("x<{m}u{m}")}, 1, null]);
        assert_eq!(value, expected);
        assert_eq!(Prompt::new(format!("a<{m}u{m}>b"), Some(m)).text(), "a<u>b");
    }

    /// One pass over the text: moving the rest at each mark took minutes.
    #[test]
    fn a_million_literals_are_marked_in_seconds() {
        let added = added();
        let text = "<u>".repeat(1_000_000);
        let started = std::time::Instant::now();
        let mut marker = Marker::new(&added, &[&text]).unwrap();
        let mut value = json!(text);
        marker.break_literals(&mut value);
        assert_eq!(value.as_str().unwrap().matches('\u{E000}').count(), 2_000_000);
        assert!(started.elapsed().as_secs() < 10, "{:?}", started.elapsed());
    }

    #[test]
    fn harmless_text_needs_no_mark() {
        let added = added();
        let mut marker = Marker::new(&added, &["hello"]).unwrap();
        let mut value = json!("hello");
        marker.break_literals(&mut value);
        assert_eq!((value, marker.mark()), (json!("hello"), None));
    }

    #[test]
    fn the_mark_occurs_nowhere_else() {
        let (added, text) = (added(), "<u>\u{E000}\u{E001}");
        let mut marker = Marker::new(&added, &[text]).unwrap();
        marker.break_literals(&mut json!(text));
        assert_eq!(marker.mark(), Some('\u{E002}'));
    }

    #[test]
    fn using_up_all_private_use_characters_is_refused() {
        let all: String = PRIVATE_USE.into_iter().flatten().collect();
        assert!(Marker::new(&added(), &[&all]).is_err());
    }
}
