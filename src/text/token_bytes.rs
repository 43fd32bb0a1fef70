//! The bytes that each token id stands for.

use std::collections::HashMap;

/// No real vocabulary comes near this; a wrong id must not make us allocate a table of 4 billion.
pub(super) const MAX_VOCAB: usize = 1 << 22;

/// The bytes of every token by id.
#[derive(Debug)]
pub(super) struct TokenBytes(Vec<Option<Box<[u8]>>>);

impl TokenBytes {
    /// `vocab` is written in the byte alphabet, `added` as it reads. `None` if an id is
    /// [`MAX_VOCAB`] or above.
    pub(super) fn new<'a>(
        vocab: &HashMap<String, u32>,
        added: impl Iterator<Item = (&'a str, u32)>,
    ) -> Option<Self> {
        let byte_of = byte_alphabet();
        let ordinary = vocab.iter().map(|(token, &id)| {
            let bytes: Option<Box<[u8]>> =
                token.chars().map(|c| byte_of.get(&c).copied()).collect();
            // A token outside the alphabet stands for itself, as in the reference decoder.
            (id, bytes.unwrap_or_else(|| token.as_bytes().into()))
        });
        let added = added.map(|(literal, id)| (id, literal.as_bytes().into()));
        let mut table = Vec::new();
        for (id, bytes) in ordinary.chain(added) {
            let id = usize::try_from(id).ok().filter(|&id| id < MAX_VOCAB)?;
            if id >= table.len() {
                table.resize(id + 1, None);
            }
            table[id] = Some(bytes);
        }
        Some(Self(table))
    }

    /// 1 + the highest id.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn get(&self, id: u32) -> Option<&[u8]> {
        self.0.get(usize::try_from(id).ok()?)?.as_deref()
    }
}

/// GPT-2's byte alphabet: each printable Latin-1 byte stands for itself, the others are written as
/// the characters from U+0100 on, in order.
pub(super) fn byte_alphabet() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let same = (0..=255).filter(|&byte| printable(byte)).map(|byte| (char::from(byte), byte));
    let moved = ('\u{100}'..).zip((0..=255).filter(|&byte| !printable(byte)));
    same.chain(moved).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_has_a_character_for_every_byte() {
        let byte_of = byte_alphabet();
        assert_eq!(byte_of.len(), 256);
        // As in GPT-2's vocabulary: Ġ is a blank, Ċ a line feed, Ń the soft hyphen (the last).
        let known = [('A', b'A'), ('Ġ', b' '), ('Ċ', b'\n'), ('Ń', 0xAD), ('ÿ', 0xFF)];
        for (character, byte) in known {
            assert_eq!(byte_of[&character], byte, "{character}");
        }
    }

    #[test]
    fn gaps_and_far_ids() {
        let vocab = HashMap::from([("Ġa".to_owned(), 3), ("日".to_owned(), 0)]);
        let table = TokenBytes::new(&vocab, [("<é>", 1)].into_iter()).unwrap();
        let bytes: Vec<_> = (0..5).map(|id| table.get(id)).collect();
        let expected =
            [Some("日".as_bytes()), Some("<é>".as_bytes()), None, Some(&b" a"[..]), None];
        assert_eq!((table.len(), bytes.as_slice()), (4, &expected[..]));
        let far = HashMap::from([("a".to_owned(), MAX_VOCAB as u32)]);
        assert!(TokenBytes::new(&far, std::iter::empty()).is_none());
    }
}
