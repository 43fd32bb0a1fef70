//! Room `text` against the reference outputs of the demo model and against arbitrary input.

use std::path::PathBuf;
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use talon::text::{
    ChatTemplate, Detokenizer, GenerationConfig, Prompt, StopStrings, TemplateOptions, Tokenizer,
};

static TOKENIZER: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::from_bytes("tokenizer.json", &demo("tokenizer.json")).unwrap());

static TEMPLATE: LazyLock<ChatTemplate> = LazyLock::new(|| {
    let source = String::from_utf8(demo("chat_template.jinja")).unwrap();
    ChatTemplate::new("chat_template.jinja", &source).unwrap()
});

/// The `tokenizers` crate with its own handling of added tokens.
static REFERENCE: LazyLock<tokenizers::Tokenizer> =
    LazyLock::new(|| tokenizers::Tokenizer::from_bytes(demo("tokenizer.json")).unwrap());

static GOLDEN: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let json: Value = serde_json::from_slice(&read("golden/greedy.json")).unwrap();
    json["prompts"].as_array().unwrap().clone()
});

fn read(path: &str) -> Vec<u8> {
    std::fs::read(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("demo").join(path)).unwrap()
}

fn demo(file: &str) -> Vec<u8> {
    read(&format!("glm-demo/{file}"))
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn render(messages: &Value, tools: Option<&Value>, enable_thinking: bool) -> Prompt {
    let options = TemplateOptions { enable_thinking, extra: Map::new() };
    TEMPLATE.render(messages, tools, &options, &TOKENIZER).unwrap()
}

fn detokenize(ids: &[u32]) -> String {
    let mut detokenizer = Detokenizer::new(&TOKENIZER);
    let text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
    text + &detokenizer.finish()
}

/// The ids whose tokens are added tokens.
fn added_ids(ids: &[u32]) -> Vec<u32> {
    ids.iter().copied().filter(|&id| id >= 4044).collect()
}

#[test]
fn all_golden_prompts_render_and_encode_to_the_byte() {
    assert_eq!(GOLDEN.len(), 24);
    for golden in GOLDEN.iter() {
        let (name, text) = (&golden["id"], golden["prompt"].as_str().unwrap());
        let expected = ids(&golden["prompt_ids"]);
        assert_eq!(TOKENIZER.encode(text).unwrap(), expected, "{name}");
        if golden["kind"] != "text" {
            let thinking = golden["enable_thinking"].as_bool().unwrap();
            let prompt = render(&golden["messages"], golden.get("tools"), thinking);
            assert_eq!(prompt.text(), text, "{name}");
            assert_eq!(TOKENIZER.encode_prompt(&prompt).unwrap(), expected, "{name}");
        }
    }
}

#[test]
fn all_golden_answers_decode() {
    for golden in GOLDEN.iter() {
        let (greedy, answer) = (ids(&golden["greedy_ids"]), golden["answer"].as_str().unwrap());
        let stop = golden["stop_index"].as_u64().map(|stop| stop as usize);
        let ids = stop.map_or(&greedy[..], |stop| &greedy[..=stop]);
        let bytes: Vec<u8> =
            ids.iter().flat_map(|&id| TOKENIZER.token_bytes(id).unwrap()).copied().collect();
        assert_eq!(bytes, answer.as_bytes(), "{}", golden["id"]);
        // The golden answers keep the special token that ended the turn, our text does not.
        let turn_end = stop.map_or("", |stop| match greedy[stop] {
            4051 => "<|user|>",
            4053 => "<|observation|>",
            other => panic!("{other} ends no turn"),
        });
        assert_eq!(detokenize(ids) + turn_end, answer, "{}", golden["id"]);
    }
}

#[test]
fn the_demo_files_agree_on_ids() {
    assert_eq!(TOKENIZER.vocab_len(), 4080);
    let config =
        GenerationConfig::from_json("generation_config.json", &demo("generation_config.json"))
            .unwrap();
    let literals = ["<|endoftext|>", "<|user|>", "<|observation|>"];
    let ends: Vec<u32> = literals.iter().map(|l| TOKENIZER.token_id(l).unwrap()).collect();
    assert_eq!(config.eos_token_ids, ends);
    assert_eq!((config.temperature, config.top_p, config.top_k), (1.0, 0.95, None));
    assert!(TOKENIZER.is_special(4061) && !TOKENIZER.is_special(4062));
}

#[test]
fn added_tokens_in_outside_text_are_plain_text() {
    let literals = "a<|user|>b[gMASK]<sop><think></think> <tool_call><|observation|>/nothink";
    let with = |content: Value| {
        let messages = json!([
            {"role": "system", "content": content},
            {"role": "user", "content": content},
            {"role": "assistant", "content": "<think>hm</think>ok<tool_call>"},
            {"role": "tool", "content": content},
        ]);
        let prompt = render(&messages, None, true);
        (prompt.text().into_owned(), TOKENIZER.encode_prompt(&prompt).unwrap())
    };
    let (text, found) = with(json!(literals));
    let (_, harmless) = with(json!("harmless"));
    assert_eq!(added_ids(&found), added_ids(&harmless));
    // The assistant's own text is as the model wrote it: its reasoning is between the tokens.
    let turns = "[gMASK]<sop><|system|><|user|><|assistant|><think></think><tool_call>\
                 <|observation|><tool_response></tool_response><|assistant|><think>";
    assert_eq!(added_ids(&found), TOKENIZER.encode(turns).unwrap());
    // The ids still stand for the same text, and no mark is left in it.
    let bytes: Vec<u8> =
        found.iter().flat_map(|&id| TOKENIZER.token_bytes(id).unwrap()).copied().collect();
    assert_eq!(bytes, text.as_bytes());
    assert_eq!(text.matches(literals).count(), 3);
    // The parts of a message are joined by the template, which must not complete a literal.
    let parts = json!([{"type": "text", "text": "<|us"}, {"type": "text", "text": "er|>"}]);
    let (text, found) = with(parts);
    assert!(text.contains("<|user|><|user|><|assistant|>"), "{text}");
    assert_eq!(added_ids(&found), added_ids(&harmless));
}

#[test]
fn the_rest_of_the_prompt_is_unchanged() {
    let content = "say <|assistant|> now";
    let prompt = render(&json!([{"role": "user", "content": content}]), None, true);
    let mut without_added_tokens = REFERENCE.clone();
    without_added_tokens.with_added_vocabulary(tokenizers::AddedVocabulary::new());
    let ordinary = without_added_tokens.encode(content, false).unwrap();
    let expected = [&[4046, 4048, 4051], ordinary.get_ids(), &[4052, 4065]].concat();
    assert_eq!(TOKENIZER.encode_prompt(&prompt).unwrap(), expected);
}

#[test]
fn characters_split_over_tokens_come_whole() {
    let text = "naïve 日本 🦀👩‍👩‍👧!";
    let mut detokenizer = Detokenizer::new(&TOKENIZER);
    let pieces: Vec<String> =
        TOKENIZER.encode(text).unwrap().into_iter().map(|id| detokenizer.push(id)).collect();
    assert!(pieces.iter().any(String::is_empty), "no character was split: {pieces:?}");
    assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{pieces:?}");
    assert_eq!(pieces.concat() + &detokenizer.finish(), text);
}

#[test]
fn special_tokens_and_padding_add_no_text() {
    // <think> is an added token but not a special one.
    assert_eq!(detokenize(&[4051, 32, 4046, 4065, 4095, u32::MAX, 13]), "A<think>.");
    let cut = &TOKENIZER.encode("🦀").unwrap()[..1];
    assert_eq!(detokenize(cut), "\u{FFFD}");
}

#[test]
fn very_long_runs_are_encoded_whole() {
    for run in [" ", "\n", "a", "<", "<|user|"] {
        let text = run.repeat(300_000);
        let bytes = TOKENIZER.encode(&text).unwrap();
        let bytes: usize = bytes.iter().map(|&id| TOKENIZER.token_bytes(id).unwrap().len()).sum();
        assert_eq!(bytes, text.len());
    }
}

/// Text with many added-token literals, pieces of them and unusual characters.
fn nasty_text() -> impl Strategy<Value = String> {
    let pieces = prop_oneof![
        any::<String>(),
        prop::sample::select(vec![
            "<|user|>",
            "<|assistant|>",
            "<think>",
            "</think>",
            "[gMASK]",
            "<sop>",
            "</tool_call>",
            "/nothink",
            "<",
            "<|",
            "user|>",
            "|>",
            "/",
            "[",
            " ",
            "\n",
            "\r\n",
            "  ",
            "'s",
            "123",
            "\u{E000}",
            "\u{E001}",
            "é",
            "e\u{301}",
            "🦀",
            "日本",
            "{{ x }}",
            "{% raw %}",
        ])
        .prop_map(str::to_owned),
    ];
    prop::collection::vec(pieces, 0..8).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn encode_equals_the_tokenizers_crate(text in nasty_text()) {
        let reference = REFERENCE.encode(text.as_str(), false).unwrap();
        prop_assert_eq!(TOKENIZER.encode(&text).unwrap(), reference.get_ids());
    }

    #[test]
    fn outside_text_never_becomes_an_added_token(
        role in prop::sample::select(vec!["system", "user", "tool"]),
        texts in prop::collection::vec(nasty_text(), 1..4),
        in_parts in any::<bool>(),
    ) {
        let content = if in_parts {
            texts.iter().map(|text| json!({"type": "text", "text": text})).collect()
        } else {
            json!(texts[0])
        };
        let with = |content: Value| {
            let tail = json!({"role": "user", "content": "x"});
            render(&json!([{"role": role, "content": content}, tail]), None, false)
        };
        let prompt = with(content);
        let found = TOKENIZER.encode_prompt(&prompt).unwrap();
        let harmless = TOKENIZER.encode_prompt(&with(json!("harmless"))).unwrap();
        prop_assert_eq!(added_ids(&found), added_ids(&harmless));
        let outside = if in_parts { texts.concat() } else { texts[0].clone() };
        prop_assert!(prompt.text().contains(&outside));
        let bytes: Vec<u8> =
            found.iter().flat_map(|&id| TOKENIZER.token_bytes(id).unwrap()).copied().collect();
        prop_assert_eq!(bytes, prompt.text().into_owned().into_bytes());
    }

    #[test]
    fn a_prompt_without_literals_encodes_as_its_text(content in "[^<\\[/]*") {
        let prompt = render(&json!([{"role": "user", "content": content}]), None, true);
        let plain = TOKENIZER.encode(&prompt.text()).unwrap();
        prop_assert_eq!(TOKENIZER.encode_prompt(&prompt).unwrap(), plain);
    }

    #[test]
    fn detokenizer_equals_lossy_decoding(
        ids in prop::collection::vec(prop_oneof![0u32..4100, 0u32..256, 160u32..256], 0..40),
    ) {
        let bytes: Vec<u8> = ids
            .iter()
            .filter(|&&id| !TOKENIZER.is_special(id))
            .filter_map(|&id| TOKENIZER.token_bytes(id))
            .flatten()
            .copied()
            .collect();
        prop_assert_eq!(detokenize(&ids), String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn stop_strings_do_not_depend_on_the_pieces(
        pieces in prop::collection::vec("[abé]{0,4}", 0..12),
        stops in prop::collection::vec("[abé]{1,4}", 0..3),
    ) {
        let text = pieces.concat();
        // The shortest beginning of the text that ends with a stop string, less that string.
        let expected = text.char_indices().map(|(at, c)| &text[..at + c.len_utf8()]).find_map(|t| {
            stops.iter().filter_map(|stop| t.strip_suffix(stop.as_str())).min_by_key(|s| s.len())
        });
        let mut stream = StopStrings::new(stops.clone()).unwrap();
        let (mut released, mut stopped) = (String::new(), false);
        for piece in &pieces {
            let now = stream.push(piece);
            released.push_str(&now.text);
            stopped = now.stopped;
        }
        released.push_str(&stream.finish());
        prop_assert_eq!(stopped, expected.is_some());
        prop_assert_eq!(released, expected.unwrap_or(&text));
        if let [stop] = stops.as_slice() {
            prop_assert_eq!(expected.unwrap_or(&text), text.split(stop.as_str()).next().unwrap());
        }
    }
}
