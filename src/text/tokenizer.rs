//! The checkpoint's byte-level BPE tokenizer (`tokenizer.json`).

use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use tokenizers::{AddedVocabulary, DecoderWrapper, ModelWrapper, PostProcessorWrapper};

use super::added_tokens::AddedTokens;
use super::prompt::Prompt;
use super::token_bytes::{MAX_VOCAB, TokenBytes};
use crate::error::{Error, Result};

/// Turns text into token ids and gives the bytes of each id.
///
/// Added tokens are taken out of the text here and only the stretches between them go through
/// BPE, whose vocabulary has no added tokens. So which part of a text may become an added token is
/// decided in one place, and ordinary text never can.
pub struct Tokenizer {
    file_name: String,
    bpe: tokenizers::Tokenizer,
    added: AddedTokens,
    special: HashSet<u32>,
    token_bytes: TokenBytes,
}

/// The part of `tokenizer.json` whose ids the `tokenizers` crate does not keep as written.
#[derive(Deserialize)]
struct TokenizerJson {
    #[serde(default)]
    added_tokens: Vec<AddedTokenJson>,
}

#[derive(Deserialize)]
struct AddedTokenJson {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    special: bool,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. What this tokenizer would treat differently from the reference is
    /// refused: anything but byte-level BPE without a normalizer, and added tokens that strip
    /// blanks around them or match whole words only.
    pub fn from_bytes(file_name: &str, json: &[u8]) -> Result<Self> {
        let refuse = |what: &str| {
            Error::input(format!(
                "{file_name}: {what}; expected the byte-level BPE tokenizer.json of a GLM-5 \
                 checkpoint, take the file from the checkpoint again"
            ))
        };
        let unreadable = |e: &dyn std::fmt::Display| refuse(&format!("cannot be read: {e}"));
        let listed: TokenizerJson = serde_json::from_slice(json).map_err(|e| unreadable(&e))?;
        let mut bpe = tokenizers::Tokenizer::from_bytes(json).map_err(|e| unreadable(&e))?;
        if !matches!(bpe.get_model(), ModelWrapper::BPE(_)) {
            return Err(refuse("its model is not BPE"));
        }
        if !matches!(bpe.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return Err(refuse("its decoder is not ByteLevel"));
        }
        if bpe.get_normalizer().is_some() {
            return Err(refuse("it has a normalizer, expected null"));
        }
        let vocab = bpe.get_vocab(false);
        for token in &listed.added_tokens {
            if let Some(fault) = fault_of(token, &vocab, bpe.token_to_id(&token.content)) {
                return Err(refuse(&format!("added token {:?} {fault}", token.content)));
            }
        }
        bpe.with_added_vocabulary(AddedVocabulary::new());
        bpe.with_post_processor(None::<PostProcessorWrapper>);
        bpe.with_padding(None);
        bpe.with_truncation(None).map_err(|e| unreadable(&e))?;

        let literals = listed.added_tokens.iter().map(|t| (t.content.as_str(), t.id));
        let token_bytes = TokenBytes::new(&vocab, literals)
            .ok_or_else(|| refuse(&format!("it has a token id above {}", MAX_VOCAB - 1)))?;
        let special = listed.added_tokens.iter().filter(|t| t.special).map(|t| t.id).collect();
        let added = listed.added_tokens.into_iter().map(|t| (t.content, t.id)).collect();
        let added = AddedTokens::new(added);
        let tokenizer = Self { file_name: file_name.to_owned(), bpe, added, special, token_bytes };
        if !tokenizer.keeps_every_byte()? {
            return Err(refuse(
                "encoding a text and decoding it again does not give the same text (its \
                 pre-tokenizer is not plain ByteLevel or its vocabulary lacks some bytes)",
            ));
        }
        Ok(tokenizer)
    }

    /// 1 + the highest token id. Rows of the output head from here on are padding: no token.
    pub fn vocab_len(&self) -> usize {
        self.token_bytes.len()
    }

    /// Encodes `text` as it stands: an added token's literal becomes that token, and nothing is
    /// put in front.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_marked(text, None)
    }

    /// Encodes a rendered prompt, in which added-token literals that came from outside are
    /// ordinary text.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        let (text, mark) = prompt.marked();
        self.encode_marked(text, mark)
    }

    /// The bytes that `id` stands for, or `None` if there is no such token. An added token stands
    /// for its literal. A token may hold only a part of a UTF-8 character.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.token_bytes.get(id)
    }

    /// Whether `id` is a special token (`<|user|>`), which is no part of the output text. Added
    /// tokens such as `<think>` or `<tool_call>` are not special.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The id of the added token with this literal, such as `</think>`.
    pub fn token_id(&self, literal: &str) -> Option<u32> {
        self.added.id(literal)
    }

    pub(super) fn added_tokens(&self) -> &AddedTokens {
        &self.added
    }

    /// `mark` is no part of the text; it only keeps what stands around it from being a literal.
    fn encode_marked(&self, text: &str, mark: Option<char>) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        let mut ordinary = String::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            if let Some((len, id)) = self.added.match_at(rest) {
                self.encode_ordinary(&ordinary, &mut ids)?;
                ordinary.clear();
                ids.push(id);
                rest = &rest[len..];
            } else {
                if Some(first) != mark {
                    ordinary.push(first);
                }
                rest = &rest[first.len_utf8()..];
            }
        }
        self.encode_ordinary(&ordinary, &mut ids)?;
        Ok(ids)
    }

    fn encode_ordinary(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let encoding = self.bpe.encode_fast(text, false).map_err(|e| {
            Error::runtime(format!("{}: cannot encode {} bytes: {e}", self.file_name, text.len()))
        })?;
        ids.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    /// Tries a text that holds every byte that UTF-8 can hold.
    fn keeps_every_byte(&self) -> Result<bool> {
        let two_bytes_at_most = '\0'..='\u{7FF}';
        let three_bytes = (1..16).filter_map(|lead| char::from_u32(lead << 12));
        let four_bytes = (0..5).filter_map(|lead| char::from_u32((lead << 18).max(0x10000)));
        let text: String = two_bytes_at_most.chain(three_bytes).chain(four_bytes).collect();
        let mut ids = Vec::new();
        self.encode_ordinary(&text, &mut ids)?;
        let bytes: Vec<u8> =
            ids.iter().filter_map(|&id| self.token_bytes(id)).flatten().copied().collect();
        Ok(bytes == text.as_bytes())
    }
}

/// Why an added token cannot be treated as the reference does, if so.
fn fault_of(
    token: &AddedTokenJson,
    vocab: &HashMap<String, u32>,
    id: Option<u32>,
) -> Option<String> {
    // A mark goes between the characters of a literal, see `Prompt`.
    if token.content.chars().count() < 2 {
        return Some("is too short, expected at least two characters".into());
    }
    if token.lstrip || token.rstrip || token.single_word {
        return Some("has lstrip, rstrip or single_word set, expected false".into());
    }
    if vocab.contains_key(&token.content) {
        return Some("is also in the BPE vocabulary, expected it in added_tokens alone".into());
    }
    // The reference numbers added tokens in file order after the vocabulary, whatever the file says.
    if id != Some(token.id) {
        return Some(format!("has id {}, expected ids in order after the vocabulary", token.id));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Byte-level BPE over the 256 bytes, no merges, with the added tokens given.
    fn bytes_only(added: Value) -> Value {
        let vocab: HashMap<String, u32> = crate::text::token_bytes::byte_alphabet()
            .into_iter()
            .map(|(c, b)| (c.to_string(), u32::from(b)))
            .collect();
        let byte_level = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
        });
        json!({
            "version": "1.0", "added_tokens": added, "normalizer": null,
            "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
            "model": { "type": "BPE", "vocab": vocab, "merges": [] }
        })
    }

    fn added(id: u32, content: &str) -> Value {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": id == 256
        })
    }

    fn load(json: &Value) -> Result<Tokenizer> {
        Tokenizer::from_bytes("tokenizer.json", json.to_string().as_bytes())
    }

    fn refusal(json: &Value) -> String {
        load(json).err().expect("the tokenizer should be refused").to_string()
    }

    #[test]
    fn ids_bytes_and_flags() {
        let tokenizer = load(&bytes_only(json!([added(256, "<u>"), added(257, "<é>")]))).unwrap();
        assert_eq!(tokenizer.vocab_len(), 258);
        assert_eq!(tokenizer.encode("a<u><é>\n").unwrap(), [97, 256, 257, 10]);
        assert_eq!(tokenizer.token_bytes(10), Some(&b"\n"[..]));
        assert_eq!(tokenizer.token_bytes(257), Some("<é>".as_bytes()));
        assert_eq!(tokenizer.token_bytes(258), None);
        assert_eq!(tokenizer.token_bytes(u32::MAX), None);
        assert!(tokenizer.is_special(256) && !tokenizer.is_special(257));
        assert_eq!(tokenizer.token_id("<u>"), Some(256));
        assert_eq!(tokenizer.token_id("a"), None);
    }

    #[test]
    fn marked_literals_stay_ordinary_text() {
        let tokenizer = load(&bytes_only(json!([added(256, "<u>")]))).unwrap();
        let prompt = Prompt::new("<u><*u><u>*".into(), Some('*'));
        assert_eq!(tokenizer.encode_prompt(&prompt).unwrap(), [256, 60, 117, 62, 256]);
    }

    #[test]
    fn tokenizers_we_would_treat_wrongly_are_refused() {
        let with = |change: &dyn Fn(&mut Value)| {
            let mut json = bytes_only(json!([added(256, "<u>")]));
            change(&mut json);
            refusal(&json)
        };
        assert!(with(&|j| j["decoder"] = Value::Null).contains("decoder is not ByteLevel"));
        assert!(with(&|j| j["normalizer"] = json!({"type": "NFC"})).contains("normalizer"));
        assert!(with(&|j| j["added_tokens"][0]["lstrip"] = json!(true)).contains("\"<u>\" has"));
        assert!(with(&|j| j["added_tokens"][0]["id"] = json!(300)).contains("\"<u>\" has id 300"));
        assert!(with(&|j| j["added_tokens"][0]["content"] = json!("")).contains("is too short"));
        let in_both = with(&|j| j["model"]["vocab"]["<u>"] = json!(256));
        assert!(in_both.contains("also in the BPE vocabulary"), "{in_both}");
        let far_id = with(&|j| {
            j["model"]["vocab"]["far"] = json!(u32::MAX - 9);
            j["added_tokens"] = json!([]);
        });
        assert!(far_id.contains("token id above"), "{far_id}");
        assert!(
            with(&|j| j["model"] = json!({"type": "WordLevel", "vocab": {}, "unk_token": ""}))
                .contains("not BPE")
        );
        assert!(with(&|j| j["pre_tokenizer"] = Value::Null).contains("the same text"));
        let missing_byte = with(&|j| {
            j["model"]["vocab"].as_object_mut().unwrap().shift_remove("\u{f4}");
            j["added_tokens"] = json!([]);
        });
        assert!(missing_byte.contains("the same text"), "{missing_byte}");
    }

    #[test]
    fn unreadable_files_are_named() {
        for bytes in [&b""[..], b"{}", b"[1", b"\xff", b"{\"added_tokens\": 3}"] {
            let error = Tokenizer::from_bytes("some/tokenizer.json", bytes).err().unwrap();
            assert!(error.to_string().starts_with("some/tokenizer.json: "), "{error}");
        }
    }
}
