//! Promise: `talon serve` speaks OpenAI's API: chats and completions, whole and streamed, reasoning,
//! tools, log-probabilities, usage, and what stands around them.

#[path = "common/http.rs"]
mod http;

use http::{Connection, Served, chat, content, joined, weather_tool};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

#[test]
fn a_chat_is_answered() {
    let served = Served::start(&[]);
    let answer = served.ask(CHAT, &chat("What is 17 + 25?", json!({})));
    assert_eq!(content(&answer), "17 + 25 = 42.");
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "demo");
    let choice = &answer["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["logprobs"]), (&json!("stop"), &Value::Null));
    assert_eq!(choice["message"]["role"], "assistant");
    let usage = &answer["usage"];
    let count = |name: &str| usage[name].as_u64().expect("a count");
    assert_eq!(count("total_tokens"), count("prompt_tokens") + count("completion_tokens"));
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 0);
    assert_eq!(answer["timings"]["predicted_n"], usage["completion_tokens"]);
    // Content as parts, the developer's role, and what nobody knows.
    let parts = json!([{"type": "text", "text": "What is "}, {"type": "text", "text": "17 + 25?"}]);
    let messages = json!([{"role": "user", "content": parts}]);
    let more = json!({"messages": messages, "user": "x", "store": false, "metadata": {"a": 1}});
    assert_eq!(content(&served.ask(CHAT, &chat("", more))), "17 + 25 = 42.");
    let developer = json!({"role": "developer", "content": "You are helpful."});
    let messages = json!([developer, {"role": "user", "content": "Hello!"}]);
    assert!(!content(&served.ask(CHAT, &chat("", json!({"messages": messages})))).is_empty());
}

#[test]
fn a_stream_has_the_same_text_and_openais_pieces() {
    let served = Served::start(&[]);
    for (question, more) in [
        ("What is 17 + 25?", json!({})),
        ("Define \"happy\".", json!({"speculative": {"draft_tokens": 3}})),
        ("Name three kinds of bird.", json!({"stop": ["par", "zzz"]})),
        ("What is a whale?", json!({"max_tokens": 7})),
        ("What is 38 + 47?", json!({"chat_template_kwargs": {"enable_thinking": true}})),
    ] {
        let body = chat(question, more);
        let whole = served.ask(CHAT, &body);
        let mut body = body;
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let events = served.post(CHAT, &body).events();
        let message = &whole["choices"][0]["message"];
        assert_eq!(joined(&events, "content"), message["content"].as_str().unwrap(), "{question}");
        let reasoning = message["reasoning_content"].as_str().unwrap_or_default();
        assert_eq!(joined(&events, "reasoning_content"), reasoning);
        assert!(events.iter().all(|event| event["id"] == events[0]["id"]));
        assert!(events.iter().all(|event| event["object"] == "chat.completion.chunk"));
        // The role comes with the first piece and not again.
        assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
        let roles = events.iter().filter(|e| e["choices"][0]["delta"].get("role").is_some());
        assert_eq!(roles.count(), 1);
        let [.., last, usage] = events.as_slice() else { panic!("{events:?}") };
        assert_eq!(last["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"]);
        assert_eq!(usage["choices"], json!([]));
        assert_eq!(usage["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
        assert!(last["timings"]["predicted_ms"].is_number());
    }
    // A stop string ends the text before it, and is not shown.
    let stopped = served.ask(CHAT, &chat("Name three kinds of bird.", json!({"stop": "par"})));
    assert_eq!(content(&stopped), "Three kinds of bird are hen, ");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let cut = served.ask(CHAT, &chat("What is a whale?", json!({"max_completion_tokens": 3})));
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    assert_eq!(cut["usage"]["completion_tokens"], 3);
}

#[test]
fn reasoning_is_told_apart_and_can_be_turned_off() {
    let served = Served::start(&[]);
    let with = |more: Value| {
        let messages = json!([{"role": "user", "content": "What is 38 + 47?"}]);
        let mut body = json!({"messages": messages, "temperature": 0, "max_tokens": 100});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        served.ask(CHAT, &body)
    };
    let thinking = with(json!({}));
    let details = &thinking["usage"]["completion_tokens_details"];
    assert!(details["reasoning_tokens"].as_u64().unwrap() > 0, "{thinking}");
    assert!(!content(&thinking).contains("</think>"));
    for off in [
        json!({"reasoning_effort": "none"}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
    ] {
        let plain = with(off);
        assert_eq!(plain["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
        assert_eq!(content(&plain), "38 + 47 = 85.");
    }
    assert!(with(json!({"reasoning_effort": "high"}))["usage"].is_object());
    // It can be sent again.
    let replay = json!([
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi.", "reasoning_content": "They greet."},
        {"role": "user", "content": "What is 17 + 25?"},
    ]);
    let answer = served.ask(CHAT, &chat("", json!({"messages": replay})));
    assert_eq!(content(&answer), "17 + 25 = 42.");
}

#[test]
fn tools_are_called_and_their_answers_used() {
    let served = Served::start(&[]);
    let question = "What is the weather in Oslo?";
    let body = chat(question, json!({"tools": weather_tool()}));
    let answer = served.ask(CHAT, &body);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], Value::Null);
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(
        (&call["type"], &call["function"]["name"]),
        (&json!("function"), &json!("get_weather"))
    );
    assert_eq!(call["function"]["arguments"], r#"{"city":"Oslo"}"#);
    let id = call["id"].as_str().expect("an id");

    // The same in pieces.
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = served.post(CHAT, &streamed).events();
    let pieces: Vec<&Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array())
        .flatten()
        .collect();
    assert_eq!(pieces[0]["function"]["name"], "get_weather");
    assert!(pieces.len() > 3 && pieces.iter().all(|piece| piece["index"] == 0), "{pieces:?}");
    let arguments: String =
        pieces.iter().filter_map(|piece| piece["function"]["arguments"].as_str()).collect();
    assert_eq!(arguments, r#"{"city":"Oslo"}"#);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    // The tool's answer is used.
    let messages = json!([
        {"role": "user", "content": question},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id,
         "content": "{\"temperature\": -4, \"condition\": \"snowy\"}"},
    ]);
    let answer =
        served.ask(CHAT, &chat("", json!({"messages": messages, "tools": weather_tool()})));
    assert_eq!(content(&answer), "The weather in Oslo is snowy with -4 degrees.");
}

#[test]
fn tool_choice_is_obeyed() {
    let served = Served::start(&[]);
    let ask = |question: &str, more: Value| {
        let mut body = chat(question, json!({"tools": weather_tool(), "max_tokens": 60}));
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        served.ask(CHAT, &body)["choices"][0].clone()
    };
    let none = ask("What is the weather in Oslo?", json!({"tool_choice": "none"}));
    assert!(none["message"].get("tool_calls").is_none());
    // A question that no model would call a tool for, in any mode.
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    for choice in [json!("required"), named] {
        for thinking in [true, false] {
            let kwargs = json!({"enable_thinking": thinking});
            let more = json!({"tool_choice": choice, "chat_template_kwargs": kwargs});
            let forced = ask("What is 17 + 25?", more);
            let calls = forced["message"]["tool_calls"].as_array().expect("a call");
            assert_eq!(calls[0]["function"]["name"], "get_weather");
        }
    }
    let single = json!({"tool_choice": "required", "parallel_tool_calls": false});
    let forced = ask("What is the weather in Paris?", single);
    assert_eq!(forced["message"]["tool_calls"].as_array().map(Vec::len), Some(1));
    assert_eq!(forced["finish_reason"], "tool_calls");
}

#[test]
fn completions_take_text_or_ids() {
    let served = Served::start(&[]);
    let ask = |prompt: Value, more: Value| {
        let mut body = json!({"prompt": prompt, "max_tokens": 12, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        served.ask("/v1/completions", &body)
    };
    let text = "[gMASK]<sop>In the beginning God";
    let answer = ask(json!(text), json!({}));
    assert_eq!(answer["object"], "text_completion");
    let written = answer["choices"][0]["text"].as_str().unwrap();
    assert!(written.starts_with(", and the beginning"), "{written}");
    let tokens = served.ask("/tokenize", &json!({"prompt": text}));
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    assert_eq!(served.ask("/tokenize", &json!({"content": text}))["tokens"], tokens["tokens"]);
    for prompt in [tokens["tokens"].clone(), json!([tokens["tokens"]]), json!([text])] {
        assert_eq!(ask(prompt, json!({}))["choices"][0]["text"], written);
    }
    let back = served.ask("/detokenize", &json!({"tokens": tokens["tokens"]}));
    assert_eq!(back["prompt"], "In the beginning God");
    let streamed = served.post(
        "/v1/completions",
        &json!({"prompt": text, "max_tokens": 12, "temperature": 0, "stream": true}),
    );
    let events = streamed.events();
    let joined: String =
        events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(joined, written);

    let told = ask(json!(text), json!({"logprobs": 2, "return_token_ids": true}));
    let logprobs = &told["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 12);
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    assert_eq!(told["choices"][0]["token_ids"].as_array().unwrap().len(), 12);
    assert_eq!(told["prompt_token_ids"], tokens["tokens"]);
}

/// The same whether a token was guessed or not.
#[test]
fn speculation_changes_neither_text_nor_logprobs() {
    let served = Served::start(&["--draft", "mtp"]);
    for more in [json!({}), json!({"temperature": 1, "seed": 5}), json!({"presence_penalty": 1})] {
        let ask = |guesses: usize| {
            let speculative = json!({"draft_tokens": guesses});
            let mut body = chat("What is a whale?", json!({"speculative": speculative}));
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            body["logprobs"] = true.into();
            body["top_logprobs"] = 3.into();
            served.ask(CHAT, &body)
        };
        let (plain, guessed) = (ask(0), ask(4));
        assert_eq!(plain["choices"], guessed["choices"]);
        assert_eq!(plain["timings"]["draft_n"], 0);
        assert!(guessed["timings"]["draft_n_accepted"].as_u64().unwrap() > 0);
        let told = plain["choices"][0]["logprobs"]["content"].as_array().expect("logprobs");
        let text: String = told.iter().map(|token| token["token"].as_str().unwrap()).collect();
        assert_eq!(text, content(&plain));
        for token in told {
            let top = token["top_logprobs"].as_array().unwrap();
            assert_eq!(top.len(), 3);
            assert!(top[0]["logprob"].as_f64() >= token["logprob"].as_f64());
        }
    }
    assert!(served.metric("vllm:spec_decode_num_accepted_tokens_total") > 0.0);
    assert!(served.metric("vllm:spec_decode_num_draft_tokens_total") > 0.0);
    let name =
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name=\"demo\",position=\"0\"}";
    assert!(served.metric(name) > 0.0);
}

#[test]
fn sampling_fields_have_their_effect() {
    let served = Served::start(&[]);
    let ask = |more: Value| served.ask(CHAT, &chat("What is a whale?", more))["choices"].clone();
    let hot = |seed: u64| ask(json!({"temperature": 1.5, "top_p": 1, "seed": seed}));
    assert_eq!(hot(3), hot(3));
    assert!((4..12).any(|seed| hot(seed) != hot(3)));
    let greedy = ask(json!({}));
    assert_eq!(ask(json!({"temperature": 1.5, "top_k": 1})), greedy);
    assert_eq!(ask(json!({"temperature": 1.5, "min_p": 1.0})), greedy);
    // A token that is pushed hard is all that comes.
    let x = served.ask("/tokenize", &json!({"prompt": "x"}))["tokens"][0].clone();
    let more = json!({"logit_bias": {x.to_string(): 100}, "max_tokens": 3});
    assert_eq!(ask(more)[0]["message"]["content"], "xxx");
    let least = served.ask(CHAT, &chat("Hello!", json!({"min_tokens": 40, "max_tokens": 50})));
    assert!(least["usage"]["completion_tokens"].as_u64().unwrap() >= 40);
    let more = json!({"ignore_eos": true, "max_tokens": 50});
    let through = served.ask(CHAT, &chat("Hello!", more));
    assert_eq!(through["usage"]["completion_tokens"], 50);
}

/// An agent sends its whole history again with each turn.
#[test]
fn a_second_turn_finds_the_first_in_the_cache() {
    let served = Served::start(&[]);
    let long = "The river runs to the sea. ".repeat(25);
    let mut messages = vec![
        json!({"role": "system", "content": long}),
        json!({"role": "user", "content": "What is 17 + 25?"}),
    ];
    let ask = |messages: &[Value]| served.ask(CHAT, &chat("", json!({"messages": messages})));
    let tokens = |messages: &[Value]| {
        let kwargs = json!({"enable_thinking": false});
        let body = json!({"messages": messages, "chat_template_kwargs": kwargs});
        served.ask("/tokenize", &body)["tokens"].as_array().unwrap().clone()
    };
    let first = ask(&messages);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let mut before = tokens(&messages);
    let answer = served.ask("/tokenize", &json!({"prompt": content(&first)}));
    before.extend(answer["tokens"].as_array().unwrap().clone());
    messages.push(json!({"role": "assistant", "content": content(&first)}));
    messages.push(json!({"role": "user", "content": "And what is 38 + 47?"}));
    let now = tokens(&messages);
    let common = before.iter().zip(&now).take_while(|(a, b)| a == b).count();
    assert!(common > before.len() * 9 / 10);
    let second = ask(&messages);
    let cached = &second["usage"]["prompt_tokens_details"]["cached_tokens"];
    let cached = cached.as_u64().unwrap() as usize;
    assert!(cached * 100 >= common * 99, "{cached} of {common}");
    assert_eq!(second["timings"]["cache_n"], cached);
    assert!(served.metric("vllm:prefix_cache_hits_total") as usize >= cached);
    // As if nothing had been there.
    let fresh = Served::start(&[]);
    let again = fresh.ask(CHAT, &chat("", json!({"messages": messages})));
    assert_eq!(content(&second), content(&again));
}

#[test]
fn models_health_metrics_and_the_page_are_there() {
    let served = Served::start(&["--name", "my \"model\""]);
    let models = served.get("/v1/models").json();
    assert_eq!(models["object"], "list");
    let model = &models["data"][0];
    for field in ["id", "root"] {
        assert_eq!(model[field], "my \"model\"");
    }
    assert_eq!((&model["object"], &model["owned_by"]), (&json!("model"), &json!("talon")));
    assert!(model["created"].is_u64() && model["max_model_len"].is_u64());
    assert_eq!(served.get("/v1/models/other").status, 404);
    let health = served.get("/health");
    assert_eq!((health.status, health.json()["status"].clone()), (200, json!("ok")));
    served.ask(CHAT, &chat("Hello!", json!({})));
    let text = served.get("/metrics").text();
    for name in [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_sum",
        "vllm:request_queue_time_seconds_count",
        "vllm:spec_decode_num_drafts_total",
    ] {
        let label = "{model_name=\"my \\\"model\\\"\"";
        assert!(text.contains(&format!("\n{name}{label}")), "{name} in {text}");
    }
    let name =
        "vllm:request_success_total{model_name=\"my \\\"model\\\"\",finished_reason=\"stop\"}";
    assert_eq!(served.metric(name), 1.0);
    assert_eq!(served.metric("vllm:time_to_first_token_seconds_count"), 1.0);
    let page = served.get("/");
    assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"));
    // It works without any network.
    assert!(!page.text().contains("http://") && !page.text().contains("https://"));
}

/// What a request said stays between it and its answer.
#[test]
fn nothing_of_a_request_is_logged() {
    let served = Served::start(&[]);
    served.ask(CHAT, &chat("Define \"xylophone\".", json!({})));
    served.post(CHAT, &json!({"messages": [{"role": "xylophone"}]}));
    let log = served.log.lock().expect("the log").clone();
    assert!(!log.contains("xylophone"), "{log}");
}

#[test]
fn events_come_one_by_one_as_they_are_made() {
    let served = Served::start(&[]);
    let more = json!({"stream": true, "ignore_eos": true, "max_tokens": 200});
    let body = chat("What is a whale?", more).to_string();
    let mut connection = Connection::open(served.address);
    connection.send_request("POST", CHAT, &[], body.as_bytes());
    assert_eq!(connection.head().status, 200);
    let first = String::from_utf8(connection.chunk()).expect("UTF-8");
    assert!(first.starts_with("data: {") && first.ends_with("\n\n"), "{first}");
    // Many tokens are yet to come.
    assert_eq!(served.metric("vllm:num_requests_running"), 1.0);
    while !connection.chunk().is_empty() {}
    // The connection can be used again.
    connection.send_request("GET", "/health", &[], b"");
    assert_eq!(connection.reply("GET").status, 200);
}
