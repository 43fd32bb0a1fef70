//! Promise: text streamed in steps of any length is the text sent as a whole, in every script; nothing
//! of a stop string is shown; and an engine that dies is told to everybody.

#[path = "common/engines.rs"]
mod engines;
#[path = "common/http.rs"]
mod http;
#[path = "common/scripted.rs"]
mod scripted;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use engines::Random;
use http::{Connection, Reply, joined, request};
use scripted::{Script, Scripted, Scripts};
use serde_json::{Value, json};
use talon::engine::{Limits, Scheduler, TextModel};
use talon::error::Result;
use talon::serve::{Model, Options, Server, chat};
use talon::spec::Policy;
use talon::weights::demo;

const CHAT: &str = "/v1/chat/completions";
const END: u32 = 4044;

struct Running {
    server: Server,
    text: Arc<TextModel>,
    limits: Limits,
    scripts: Scripts,
    ended: Receiver<Result<()>>,
}

impl Running {
    fn start() -> Self {
        let text = TextModel::open(&demo(), &[END]).expect("the files").expect("a tokenizer");
        let text = Arc::new(text);
        let limits =
            Limits { context: 4096, parallel: 2, prefill_chunk: 64, tp: 1, vocab_limit: 4080 };
        let scripts = Scripts::default();
        let backend = Box::new(Scripted::new(scripts.clone(), 4096));
        let (scheduler, door) = Scheduler::new(backend, limits, Some(Policy::Fixed(0)), 64);
        let server = Server::bind(Options::default()).expect("a port");
        let health = request(server.address(), "GET", "/health", &[], b"");
        assert_eq!((health.status, health.json()["status"].as_str()), (503, Some("loading model")));
        let early = request(server.address(), "POST", CHAT, &[], b"{}");
        assert_eq!((early.status, early.header("retry-after")), (503, Some("1")));
        server.ready(Model { name: "scripted".into(), text: text.clone(), door, limits });
        let (sender, ended) = channel();
        server.run(scheduler, move |end| drop(sender.send(end))).expect("a thread");
        Self { server, text, limits, scripts, ended }
    }

    /// From now on `body` is answered with this text.
    fn script(&self, body: &Value, text: &str, panics_at: Option<usize>) -> usize {
        let mut output = self.text.tokenizer().encode(text).expect("ids");
        output.push(END);
        let tokens = output.len();
        let prompt = chat(body, &self.text, self.limits).expect("a request").task.prompt;
        self.scripts.add(Script { prompt, output, panics_at });
        tokens
    }

    fn post(&self, body: &Value) -> Reply {
        request(self.server.address(), "POST", CHAT, &[], body.to_string().as_bytes())
    }
}

/// A text of letters, signs and emoji of many scripts, some of several tokens each.
fn random_text(random: &mut Random) -> String {
    const PIECES: [&str; 24] = [
        "word",
        " ",
        "é",
        "ß",
        "日本",
        "中文字",
        "한국어",
        "עברית",
        "العربية",
        "ไทย",
        "हिन्दी",
        "🦀",
        "👩‍👩‍👧",
        "🏳️‍🌈",
        "e\u{301}",
        "\n",
        "  ",
        "\t",
        "«»",
        "…",
        "\u{FFFD}",
        "𝔘",
        "END",
        "0",
    ];
    (0..1 + random.below(30)).map(|_| PIECES[random.below(PIECES.len())]).collect()
}

#[test]
fn a_stream_joined_is_the_whole_text_in_every_script() {
    let running = Running::start();
    let mut random = Random(1);
    let mut pieces = [0; 9];
    for index in 0..1000 {
        let (thought, said) = (random_text(&mut random), random_text(&mut random));
        let thinking = index % 3 == 0;
        let stops = if index % 2 == 0 { json!(["END", "🦀!"]) } else { Value::Null };
        let mut body = json!({
            "messages": [{"role": "user", "content": format!("{index}")}],
            "temperature": 0,
            "stop": stops,
            "chat_template_kwargs": {"enable_thinking": thinking},
            "speculative": {"draft_tokens": index % 8},
            "return_token_ids": true,
        });
        let script = if thinking { format!("{thought}</think>{said}") } else { said.clone() };
        let tokens = running.script(&body, &script, None);
        let whole = running.post(&body).json();
        body["stream"] = true.into();
        let events = running.post(&body).events();

        let message = &whole["choices"][0]["message"];
        let (content, reasoning) = (&message["content"], &message["reasoning_content"]);
        assert_eq!(joined(&events, "content"), content.as_str().unwrap());
        assert_eq!(joined(&events, "reasoning_content"), reasoning.as_str().unwrap_or_default());
        let finish = &whole["choices"][0]["finish_reason"];
        assert_eq!(&events.last().unwrap()["choices"][0]["finish_reason"], finish);
        let shown = joined(&events, "content") + &joined(&events, "reasoning_content");
        let stopped = !stops.is_null() && script.contains("END");
        if stopped {
            assert!(!shown.contains("END"), "{script:?}: {shown:?}");
        } else {
            if !thinking {
                assert_eq!(content, said.as_str());
            }
            assert_eq!(whole["usage"]["completion_tokens"], tokens);
        }
        for event in &events {
            let ids = event["choices"][0]["token_ids"].as_array().map_or(0, Vec::len);
            pieces[ids.min(8)] += 1;
        }
    }
    // Steps of all lengths occurred.
    assert!(pieces[1..=8].iter().all(|count| *count > 50), "{pieces:?}");
}

#[test]
fn tool_calls_come_as_pieces_of_valid_json() {
    let running = Running::start();
    let parameters = json!({"type": "object", "properties": {
        "path": {"type": "string"}, "lines": {"type": "integer"}, "deep": {"type": "object"}}});
    let tools =
        json!([{"type": "function", "function": {"name": "edit", "parameters": parameters}}]);
    let call = "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a \"é🦀\"\n</b></arg_value>\n\
                <arg_key>lines</arg_key><arg_value>12</arg_value><arg_key>deep</arg_key>\
                <arg_value>{\"a\": [1, null]}</arg_value></tool_call>";
    let script = format!("I edit.\n{call}\n{call}");
    for guesses in 0..8 {
        let body = json!({
            "messages": [{"role": "user", "content": format!("edit {guesses}")}],
            "tools": tools, "stream": true, "temperature": 0,
            "speculative": {"draft_tokens": guesses},
            "chat_template_kwargs": {"enable_thinking": false},
        });
        running.script(&body, &script, None);
        let events = running.post(&body).events();
        assert_eq!(joined(&events, "content"), "I edit.");
        let mut calls = vec![String::new(), String::new()];
        for event in &events {
            for piece in event["choices"][0]["delta"]["tool_calls"].as_array().into_iter().flatten()
            {
                let index = piece["index"].as_u64().expect("an index") as usize;
                calls[index] += piece["function"]["arguments"].as_str().unwrap_or_default();
            }
        }
        for arguments in calls {
            let value: Value = serde_json::from_str(&arguments).expect("JSON");
            let expected =
                json!({"path": "a \"é🦀\"\n</b>", "lines": 12, "deep": {"a": [1, null]}});
            assert_eq!(value, expected);
        }
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    }
}

#[test]
fn a_panic_in_the_engine_is_told_to_everybody() {
    let running = Running::start();
    let body = |text: &str, stream: bool| json!({"messages": [{"role": "user", "content": text}], "stream": stream, "temperature": 0});
    running.script(&body("dies", true), &"word ".repeat(50), Some(30));
    // Many guesses a step are no way around it.
    let address = running.server.address();
    let mut stream = Connection::open(address);
    stream.send_request("POST", CHAT, &[], body("dies", true).to_string().as_bytes());
    let reply = stream.reply("POST");
    let text = reply.text();
    let last =
        text.lines().filter_map(|line| line.strip_prefix("data: ")).next_back().expect("data");
    let last: Value = serde_json::from_str(last).expect("JSON");
    assert_eq!(last["error"]["type"], "server_error");
    assert!(text.matches("data: ").count() > 10, "{text}");

    let ended = running.ended.recv_timeout(Duration::from_secs(5)).expect("it ended");
    assert_eq!(ended.expect_err("a failure").exit_code(), 1);
    let health = request(address, "GET", "/health", &[], b"");
    assert_eq!((health.status, health.json()["status"].as_str()), (503, Some("engine failed")));
    let after = running.post(&body("hi", false));
    assert_eq!((after.status, after.json()["error"]["type"].as_str()), (500, Some("server_error")));
}
