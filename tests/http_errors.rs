//! Promise: whatever a client sends, it gets a status and, where there can be one, a JSON error that
//! names the field; and the server goes on.

#[path = "common/http.rs"]
mod http;

use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use http::{Connection, Reply, Served, chat, content, request, weather_tool};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};
use talon::engine::{Limits, TextModel};
use talon::weights::demo;

const CHAT: &str = "/v1/chat/completions";

/// The error object of a reply.
fn error(reply: &Reply) -> Value {
    let body = reply.json();
    let error = body["error"].clone();
    assert!(error["message"].is_string() && error["type"].is_string(), "{body}");
    assert!(body["error"].get("param").is_some() && body["error"].get("code").is_some());
    error
}

#[test]
fn each_wrong_field_is_named() {
    let served = Served::start(&[]);
    let wrong = [
        ("messages", json!("hi"), "messages"),
        ("messages", json!([]), "messages"),
        ("messages", json!(["hi"]), "messages[0]"),
        ("messages", json!([{"content": "hi"}]), "messages[0].role"),
        ("messages", json!([{"role": "robot", "content": "hi"}]), "messages[0].role"),
        ("messages", json!([{"role": "user"}]), "messages[0].content"),
        ("messages", json!([{"role": "user", "content": 3}]), "messages[0].content"),
        ("messages", json!([{"role": "user", "content": [3]}]), "messages[0].content[0]"),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}]),
            "messages[0].content[0].type",
        ),
        (
            "messages",
            json!([{"role": "user", "content": "", "tool_calls": [{}]}]),
            "messages[0].tool_calls",
        ),
        (
            "messages",
            json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            "messages",
            json!([{"role": "assistant", "tool_calls": [{"function": {}}]}]),
            "messages[0].tool_calls[0].function.name",
        ),
        ("model", json!(3), "model"),
        ("temperature", json!("hot"), "temperature"),
        ("temperature", json!(-1), "temperature"),
        ("top_p", json!(0), "top_p"),
        ("top_p", json!(1.5), "top_p"),
        ("top_k", json!(-2), "top_k"),
        ("min_p", json!(2), "min_p"),
        ("max_tokens", json!(0), "max_tokens"),
        ("max_tokens", json!(-5), "max_tokens"),
        ("max_tokens", json!(1.5), "max_tokens"),
        ("max_completion_tokens", json!("10"), "max_completion_tokens"),
        ("min_tokens", json!(99999999), "min_tokens"),
        ("n", json!(2), "n"),
        ("n", json!(0), "n"),
        ("seed", json!("x"), "seed"),
        ("stop", json!(3), "stop"),
        ("stop", json!([3]), "stop[0]"),
        ("stop", json!(""), "stop"),
        ("stop", json!(vec!["x"; 17]), "stop"),
        ("presence_penalty", json!(3), "presence_penalty"),
        ("frequency_penalty", json!([]), "frequency_penalty"),
        ("repetition_penalty", json!(0), "repetition_penalty"),
        ("logit_bias", json!([]), "logit_bias"),
        ("logit_bias", json!({"x": 1}), "logit_bias"),
        ("logit_bias", json!({"99999999": 1}), "logit_bias"),
        ("logit_bias", json!({"5": 101}), "logit_bias.5"),
        ("logprobs", json!(3), "logprobs"),
        ("top_logprobs", json!(3), "top_logprobs"),
        ("top_logprobs", json!(21), "top_logprobs"),
        ("stream", json!("yes"), "stream"),
        ("stream_options", json!(true), "stream_options"),
        ("speculative", json!(3), "speculative"),
        ("speculative", json!({"draft_tokens": 8}), "speculative.draft_tokens"),
        ("response_format", json!({"type": "json_object"}), "response_format"),
        ("response_format", json!({"type": "json_schema", "json_schema": {}}), "response_format"),
        ("response_format", json!("json"), "response_format"),
        ("guided_json", json!({}), "guided_json"),
        ("tools", json!({}), "tools"),
        ("tools", json!([{"type": "web_search"}]), "tools[0].type"),
        ("tools", json!([{"type": "function"}]), "tools[0].function"),
        (
            "tools",
            json!([{"type": "function", "function": {"name": ""}}]),
            "tools[0].function.name",
        ),
        ("tool_choice", json!("required"), "tool_choice"),
        ("tool_choice", json!("sometimes"), "tool_choice"),
        ("tool_choice", json!({"type": "allowed_tools"}), "tool_choice"),
        ("functions", json!([]), "functions"),
        ("parallel_tool_calls", json!("no"), "parallel_tool_calls"),
        ("chat_template_kwargs", json!([]), "chat_template_kwargs"),
        (
            "chat_template_kwargs",
            json!({"enable_thinking": "no"}),
            "chat_template_kwargs.enable_thinking",
        ),
        ("reasoning_effort", json!(3), "reasoning_effort"),
        ("ignore_eos", json!(1), "ignore_eos"),
        ("stop_token_ids", json!([-1]), "stop_token_ids[0]"),
        ("prompt_logprobs", json!(1), "prompt_logprobs"),
        ("return_token_ids", json!("x"), "return_token_ids"),
    ];
    for (field, value, param) in wrong {
        let reply = served.post(CHAT, &chat("hi", json!({field: value})));
        assert_eq!(reply.status, 400, "{field}: {value}: {}", reply.text());
        let error = error(&reply);
        assert_eq!(error["param"], param, "{field}: {value}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        // null is as if it were not there, but for the messages.
        let null = served.post(CHAT, &chat("hi", json!({field: null, "max_completion_tokens": 1})));
        assert_eq!(null.status, if field == "messages" { 400 } else { 200 }, "{field}");
    }
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": 3}), "prompt"),
        (json!({"prompt": ["a", "b"]}), "prompt"),
        (json!({"prompt": [1, "b"]}), "prompt[1]"),
        (json!({"prompt": [4090]}), "prompt[0]"),
        (json!({"prompt": "a", "echo": true}), "echo"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix"),
        (json!({"prompt": "a", "logprobs": true}), "logprobs"),
        (json!({"prompt": "a", "best_of": 2}), "best_of"),
    ] {
        let reply = served.post("/v1/completions", &body);
        assert_eq!((reply.status, error(&reply)["param"].as_str()), (400, Some(param)), "{body}");
    }
    for (path, body) in [
        ("/tokenize", json!({})),
        ("/tokenize", json!({"prompt": 3})),
        ("/detokenize", json!({})),
        ("/detokenize", json!({"tokens": [-1]})),
    ] {
        assert_eq!(served.post(path, &body).status, 400, "{path} {body}");
    }
    let long = served.post("/v1/completions", &json!({"prompt": vec![5; 4096]}));
    assert_eq!(error(&long)["code"], "context_length_exceeded");
    let tools = json!({"tools": weather_tool(), "tool_choice":
        {"type": "function", "function": {"name": "other"}}});
    assert_eq!(error(&served.post(CHAT, &chat("hi", tools)))["param"], "tool_choice.function.name");
}

#[test]
fn bodies_that_are_no_request_are_refused() {
    let served = Served::start(&[]);
    let deep = |open: &str, close: &str| open.repeat(100_000) + &close.repeat(100_000);
    let nested = format!("{{\"messages\": {}}}", deep("[", "]"));
    let objects = deep("{\"a\":", "}");
    let mut bodies: Vec<Vec<u8>> = [
        "",
        " ",
        "{",
        "}",
        "[]",
        "3",
        "null",
        "\"x\"",
        "{\"messages\"}",
        "{\"messages\":}",
        "{'a': 1}",
        "{\"messages\": [}",
        "{\"messages\": []} x",
        "{\"a\": 01}",
        "{\"a\": 1e999}",
        "{\"a\": NaN}",
        "{\"a\": \"\\ud800\"}",
        "{\"a\": \"\u{1}\"}",
        "\u{feff}{}",
        "messages=hi",
        "{\"a\": tru}",
        &nested,
        &objects,
        &"[".repeat(1_000_000),
        "<?xml version=\"1.0\"?>",
    ]
    .iter()
    .map(|text| text.as_bytes().to_vec())
    .collect();
    for bytes in [&b"\xff\xfe"[..], b"{\"a\": \"\xff\"}", b"\x00", b"{\"\xc3\": 1}", &[0; 5000]] {
        bodies.push(bytes.to_vec());
    }
    // Cut off anywhere.
    let whole = chat("hi", json!({"stop": ["é"]})).to_string().into_bytes();
    bodies.extend((0..whole.len()).step_by(3).map(|end| whole[..end].to_vec()));
    assert!(bodies.len() > 50);
    for body in &bodies {
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        let reply = request(served.address, "POST", CHAT, &[], body);
        assert_eq!(reply.status, 400, "{shown}: {}", reply.text());
        error(&reply);
    }
    // 64 MB, told beforehand or not.
    let large = vec![b' '; 64 << 20];
    let reply = request(served.address, "POST", CHAT, &[], &large);
    assert_eq!(reply.status, 413);
    error(&reply);
    let mut connection = Connection::open(served.address);
    connection.send(
        format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n").as_bytes(),
    );
    for piece in large.chunks(1 << 20) {
        connection.try_send(format!("{:x}\r\n", piece.len()).as_bytes());
        connection.try_send(piece);
        connection.try_send(b"\r\n");
    }
    connection.try_send(b"0\r\n\r\n");
    assert_eq!(connection.reply("POST").status, 413);
    assert_eq!(content(&served.ask(CHAT, &chat("What is 17 + 25?", json!({})))), "17 + 25 = 42.");
}

/// A length that is only claimed must not be believed: tiny_http would allocate it.
#[test]
fn claimed_lengths_do_no_harm() {
    let served = Served::start(&[]);
    for length in ["1073741825", "1000000000000", "1000000000000000000", "18446744073709551615"] {
        let mut connection = Connection::open(served.address);
        let head =
            format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{{}}");
        connection.send(head.as_bytes());
        let reply = connection.reply("POST");
        assert_eq!(reply.status, 413, "{length}: {reply:?}");
        error(&reply);
    }
    for (head, status) in [
        ("Content-Length: abc", 400),
        ("Content-Length: -1", 400),
        ("Content-Length: 99999999999999999999999", 400),
        ("Content-Length: 2\r\nContent-Length: 3", 400),
        ("Content-Length: 2\r\nTransfer-Encoding: chunked", 400),
        ("Transfer-Encoding: gzip", 400),
        ("Connection: upgrade\r\nUpgrade: h2c", 400),
        ("Expect: 200-ok", 417),
    ] {
        let mut connection = Connection::open(served.address);
        let head = format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n{{}}");
        connection.send(head.as_bytes());
        assert_eq!(connection.head().status, status, "{head}");
    }
    let padding = format!("X-Long: {}", "x".repeat(100_000));
    let mut connection = Connection::open(served.address);
    connection.send(format!("GET /health HTTP/1.1\r\n{padding}\r\n\r\n").as_bytes());
    assert_eq!(connection.reply("GET").status, 431);
    assert_eq!(served.get("/health").status, 200);
}

#[test]
fn http_itself_is_spoken_well() {
    let served = Served::start(&[]);
    let address = served.address;
    for (method, path, status) in [
        ("GET", "/nowhere", 404),
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/health?x=1", 200),
    ] {
        let reply = request(address, method, path, &[], b"");
        assert_eq!(reply.status, status, "{method} {path}");
        if status >= 400 {
            error(&reply);
        }
        assert_eq!(reply.header("allow").is_some(), status == 405);
    }
    let head = request(address, "HEAD", "/v1/models", &[], b"");
    assert_eq!((head.status, head.body.len()), (200, 0));
    let options = request(address, "OPTIONS", CHAT, &[], b"");
    assert_eq!((options.status, options.header("allow")), (204, Some("POST, OPTIONS")));
    assert_eq!(options.header("access-control-allow-origin"), None);

    let body = chat("What is 17 + 25?", json!({})).to_string();
    // One connection for several requests, the next one sent before the first was answered.
    let mut connection = Connection::open(address);
    connection.send_request("POST", CHAT, &[], body.as_bytes());
    connection.send_request("GET", "/v1/models", &[], b"");
    assert_eq!(content(&connection.reply("POST").json()), "17 + 25 = 42.");
    assert_eq!(connection.reply("GET").json()["object"], "list");
    // A body in chunks.
    connection.send(
        format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n").as_bytes(),
    );
    for piece in body.as_bytes().chunks(50) {
        connection.send(format!("{:x}\r\n", piece.len()).as_bytes());
        connection.send(piece);
        connection.send(b"\r\n");
    }
    connection.send(b"0\r\n\r\n");
    assert_eq!(content(&connection.reply("POST").json()), "17 + 25 = 42.");
    // A body that waits to be asked for.
    let length = body.len();
    connection.send(
        format!("POST {CHAT} HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n")
            .as_bytes(),
    );
    assert_eq!(connection.head().status, 100);
    connection.send(body.as_bytes());
    assert_eq!(connection.reply("POST").status, 200);
    // HTTP/1.0 has no chunks to stream in.
    let body = chat("hi", json!({"stream": true})).to_string();
    let mut old = Connection::open(address);
    old.send(
        format!("POST {CHAT} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len()).as_bytes(),
    );
    assert_eq!(old.reply("POST").status, 400);
}

#[test]
fn keys_and_origins_are_checked() {
    let served = Served::start(&["--api-key", "secret-7", "--cors", "http://localhost:3000"]);
    let address = served.address;
    let body = chat("What is 17 + 25?", json!({})).to_string();
    for authorization in [None, Some("Bearer secret-8"), Some("secret-7"), Some("Basic secret-7")] {
        let headers: Vec<_> =
            authorization.map(|value| ("Authorization", value)).into_iter().collect();
        let reply = request(address, "POST", CHAT, &headers, body.as_bytes());
        assert_eq!(reply.status, 401, "{authorization:?}");
        assert_eq!(error(&reply)["code"], "invalid_api_key");
        assert_eq!(request(address, "GET", "/v1/models", &headers, b"").status, 401);
    }
    let key = [("Authorization", "Bearer secret-7")];
    let reply = request(address, "POST", CHAT, &key, body.as_bytes());
    assert_eq!(content(&reply.json()), "17 + 25 = 42.");
    let origin = Some("http://localhost:3000");
    assert_eq!(reply.header("access-control-allow-origin"), origin);
    let preflight = request(address, "OPTIONS", CHAT, &[], b"");
    assert_eq!(preflight.header("access-control-allow-origin"), origin);
    for open in ["/health", "/metrics", "/"] {
        assert_eq!(served.get(open).status, 200, "{open}");
    }
}

/// A reader that does not read, and heads that do not end, hold up nobody else.
#[test]
fn slow_clients_stall_nobody() {
    let served = Served::start(&[]);
    let mut slow = Vec::new();
    for index in 0..20 {
        let mut connection = Connection::open(served.address);
        if index % 2 == 0 {
            connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Le");
        } else {
            let body = chat("What is a whale?", json!({"stream": true})).to_string();
            connection.send_request("POST", CHAT, &[], body.as_bytes());
        }
        slow.push(connection);
    }
    // Nor does a burst of connections that stay open.
    let mut burst: Vec<Connection> = (0..40).map(|_| Connection::open(served.address)).collect();
    for _ in 0..2 {
        burst.iter_mut().for_each(|connection| connection.send_request("GET", "/health", &[], b""));
        for connection in &mut burst {
            assert_eq!(connection.reply("GET").status, 200);
        }
    }
    let answer = served.ask(CHAT, &chat("What is 17 + 25?", json!({})));
    assert_eq!(content(&answer), "17 + 25 = 42.");
    drop(slow);
    std::thread::sleep(Duration::from_millis(50));
    served.wait_idle();
}

/// Without descriptors tiny_http takes no more connections and waits for ever; talon ends instead.
#[test]
fn out_of_descriptors_it_ends_instead_of_hanging() {
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -n 60; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_talon")]);
    let mut served = Served::start_by(shell, &[]);
    let connect = |_| TcpStream::connect(served.address).ok();
    let connections: Vec<Option<TcpStream>> = (0..60).map(connect).collect();
    assert_eq!(served.wait(), Some(1));
    drop(connections);
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z<>|é]{0,12}".prop_map(Value::from),
        prop::sample::select(vec![
            "user",
            "tool",
            "assistant",
            "function",
            "text",
            "required",
            "auto"
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        let key = prop::sample::select(vec![
            "role",
            "content",
            "type",
            "text",
            "function",
            "name",
            "arguments",
            "parameters",
            "tool_calls",
            "enable_thinking",
            "draft_tokens",
            "include_usage",
            "x",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..6)
                .prop_map(|fields| fields.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()),
        ]
    })
}

/// Any values in any fields: a checked request, or an error with a status from 400 to 499.
#[test]
fn the_request_parser_takes_anything() {
    let text = TextModel::open(&demo(), &[]).expect("the demo's files").expect("a tokenizer");
    let limits = Limits { context: 512, parallel: 1, prefill_chunk: 64, tp: 1, vocab_limit: 4080 };
    let fields = [
        "messages",
        "prompt",
        "tools",
        "tool_choice",
        "stop",
        "max_tokens",
        "temperature",
        "top_k",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "stream_options",
        "speculative",
        "n",
        "seed",
        "response_format",
        "chat_template_kwargs",
        "min_tokens",
        "stop_token_ids",
    ];
    let field = (prop::sample::select(fields.to_vec()), any_json());
    let bodies = prop::collection::vec(field, 0..6);
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::default() });
    let messages = json!([{"role": "user", "content": "hi"}]);
    let check = |values: Vec<(&str, Value)>, base: bool| {
        let mut body = if base { json!({"messages": messages, "prompt": "hi"}) } else { json!({}) };
        for (field, value) in values {
            body[field] = value;
        }
        for read in [talon::serve::chat, talon::serve::completion] {
            match read(&body, &text, limits) {
                Ok(request) => {
                    assert!(request.task.prompt.len() + request.task.max_tokens <= limits.context);
                }
                Err(error) => assert!((400..500).contains(&error.status), "{error:?}"),
            }
        }
    };
    runner
        .run(&(bodies, any::<bool>()), |(values, base)| {
            check(values, base);
            Ok(())
        })
        .expect("no panic");
}
