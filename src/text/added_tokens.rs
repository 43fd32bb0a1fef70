//! The added tokens of a tokenizer: literals such as `<|user|>` that are taken out of the text
//! before byte-level BPE sees it.

/// Finds added-token literals in text. Where several begin at one place the longest wins, as in
/// the reference tokenizer.
#[derive(Debug)]
pub(super) struct AddedTokens {
    /// Longest first, so that the first match is the longest one.
    tokens: Vec<(String, u32)>,
    /// Whether some literal begins with this byte: most positions are ruled out by it.
    first_bytes: [bool; 256],
}

impl AddedTokens {
    /// Literals must not be empty.
    pub(super) fn new(mut tokens: Vec<(String, u32)>) -> Self {
        tokens.sort_by_key(|(literal, _)| std::cmp::Reverse(literal.len()));
        let mut first_bytes = [false; 256];
        for first in tokens.iter().filter_map(|(literal, _)| literal.bytes().next()) {
            first_bytes[usize::from(first)] = true;
        }
        Self { tokens, first_bytes }
    }

    /// The longest literal that `text` begins with: its length in bytes and its id.
    pub(super) fn match_at(&self, text: &str) -> Option<(usize, u32)> {
        self.candidates(text)
            .find(|(literal, _)| text.starts_with(literal.as_str()))
            .map(|(literal, id)| (literal.len(), *id))
    }

    /// Whether `text` begins with a literal, or ends within one that begins where `text` does.
    pub(super) fn may_begin(&self, text: &str) -> bool {
        self.candidates(text)
            .any(|(literal, _)| text.starts_with(literal.as_str()) || literal.starts_with(text))
    }

    /// The id of the added token with this literal.
    pub(super) fn id(&self, literal: &str) -> Option<u32> {
        self.tokens.iter().find(|(known, _)| known == literal).map(|(_, id)| *id)
    }

    fn candidates(&self, text: &str) -> impl Iterator<Item = &(String, u32)> {
        let possible =
            text.bytes().next().is_some_and(|first| self.first_bytes[usize::from(first)]);
        self.tokens.iter().take(if possible { self.tokens.len() } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens() -> AddedTokens {
        AddedTokens::new(vec![("<a".into(), 1), ("<ab>".into(), 2), ("[x]".into(), 3)])
    }

    #[test]
    fn longest_literal_wins() {
        assert_eq!(tokens().match_at("<ab>c"), Some((4, 2)));
        assert_eq!(tokens().match_at("<abc"), Some((2, 1)));
        assert_eq!(tokens().match_at("c<ab>"), None);
        assert_eq!(tokens().match_at(""), None);
    }

    #[test]
    fn a_literal_cut_off_by_the_end_may_begin() {
        assert!(tokens().may_begin("[x"));
        assert!(tokens().may_begin("[x] and more"));
        assert!(!tokens().may_begin("[y"));
        assert!(!tokens().may_begin(""));
    }

    #[test]
    fn ids_are_found_by_the_whole_literal() {
        assert_eq!(tokens().id("[x]"), Some(3));
        assert_eq!(tokens().id("[x"), None);
    }
}
