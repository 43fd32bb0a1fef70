//! Text from token ids as they arrive.

use super::tokenizer::Tokenizer;

/// Turns a stream of token ids into text without ever giving out a part of a character.
///
/// A token may end within a UTF-8 character: such a tail waits for the next token. Bytes that no
/// later byte can complete become U+FFFD, as in [`String::from_utf8_lossy`]. Special tokens and
/// ids without a token add nothing.
pub struct Detokenizer<'a> {
    tokenizer: &'a Tokenizer,
    tail: Vec<u8>,
}

impl<'a> Detokenizer<'a> {
    /// Starts a new text.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, tail: Vec::new() }
    }

    /// Adds a token and returns the text that is complete by now, often nothing.
    pub fn push(&mut self, id: u32) -> String {
        if !self.tokenizer.is_special(id)
            && let Some(bytes) = self.tokenizer.token_bytes(id)
        {
            self.tail.extend_from_slice(bytes);
        }
        take_complete(&mut self.tail)
    }

    /// Ends the text: a character that was never completed becomes U+FFFD.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.tail).into_owned()
    }
}

/// Takes all of `bytes` but an unfinished character at their end.
fn take_complete(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut taken = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        taken += chunk.valid().len();
        let invalid = chunk.invalid();
        if invalid.is_empty() {
            continue;
        }
        let at_end = taken + invalid.len() == bytes.len();
        if at_end && std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none()) {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        taken += invalid.len();
    }
    bytes.drain(..taken);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_byte_at_a_time(bytes: &[u8]) -> Vec<String> {
        let mut tail = Vec::new();
        bytes
            .iter()
            .map(|&byte| {
                tail.push(byte);
                take_complete(&mut tail)
            })
            .collect()
    }

    #[test]
    fn characters_come_whole() {
        assert_eq!(one_byte_at_a_time("aé".as_bytes()), ["a", "", "é"]);
        assert_eq!(one_byte_at_a_time("🦀!".as_bytes()), ["", "", "", "🦀", "!"]);
    }

    #[test]
    fn bytes_that_cannot_be_completed_are_replaced_at_once() {
        assert_eq!(one_byte_at_a_time(b"\xffa"), ["\u{FFFD}", "a"]);
        assert_eq!(one_byte_at_a_time(b"\xf0\x9fa"), ["", "", "\u{FFFD}a"]);
    }

    #[test]
    fn an_unfinished_tail_waits() {
        let mut bytes = "x🦀".as_bytes()[..4].to_vec();
        assert_eq!(take_complete(&mut bytes), "x");
        assert_eq!(bytes, &"🦀".as_bytes()[..3]);
    }
}
