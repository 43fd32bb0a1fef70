//! Promise: many clients at a time each get their own answer, the one that they would get alone;
//! those who go away free their place; memory stays flat; the end is orderly.

#[path = "common/engines.rs"]
mod engines;
#[path = "common/http.rs"]
mod http;

use std::sync::Arc;
use std::time::{Duration, Instant};

use engines::{Random, soak};
use http::{Connection, Served, chat, content, joined, request};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// Questions with answers of their own, of different lengths.
fn questions() -> Vec<String> {
    let words = ["happy", "whale", "river", "music", "table", "green", "storm", "bread"];
    let sums = (0..8).map(|i| format!("What is {} + {}?", 11 + 7 * i, 23 + 5 * i));
    words.iter().map(|word| format!("Define \"{word}\".")).chain(sums).collect()
}

/// A client's code word in a text of its own length, to be given back.
fn bodies() -> Vec<Value> {
    let question = |(index, question): (usize, String)| {
        let more = match index % 3 {
            0 => json!({}),
            1 => json!({"speculative": {"draft_tokens": 3}}),
            _ => json!({"ignore_eos": true, "max_tokens": 10 + 3 * index}),
        };
        let mut body = chat(&question, more);
        let code = json!({"role": "system", "content": format!("The code is {}.", "word".repeat(index + 1))});
        body["messages"].as_array_mut().expect("messages").insert(0, code);
        body
    };
    questions().into_iter().enumerate().map(question).collect()
}

/// 16 clients for some rounds, whole and streamed in turn; every now and then one goes away early.
#[test]
fn sixteen_clients_get_what_they_would_get_alone() {
    let served = Arc::new(Served::start(&["--parallel", "6", "--prefill-chunk", "16"]));
    let bodies = bodies();
    let alone: Vec<String> =
        bodies.iter().map(|body| content(&served.ask(CHAT, body)).to_owned()).collect();
    let rounds = if soak() > 1 { 72 * soak() } else { 3 };
    let clients: Vec<_> = bodies
        .into_iter()
        .zip(alone)
        .enumerate()
        .map(|(index, (body, alone))| {
            let served = served.clone();
            std::thread::spawn(move || {
                let mut random = Random(index as u64);
                let mut streamed = body.clone();
                streamed["stream"] = true.into();
                for round in 0..rounds {
                    if random.below(4) == 0 {
                        let mut leaving = Connection::open(served.address);
                        let body = if random.below(2) == 0 { &body } else { &streamed };
                        leaving.send_request("POST", CHAT, &[], body.to_string().as_bytes());
                        std::thread::sleep(Duration::from_millis(random.below(60) as u64));
                    }
                    let text = if (index + round) % 2 == 0 {
                        content(&served.ask(CHAT, &body)).to_owned()
                    } else {
                        joined(&served.post(CHAT, &streamed).events(), "content")
                    };
                    assert_eq!(text, alone, "client {index}, round {round}");
                }
            })
        })
        .collect();
    for client in clients {
        client.join().expect("the client is content");
    }
    served.wait_idle();
    assert!(served.metric("vllm:num_requests_running") == 0.0);
}

/// A long answer that nobody ends but the one who asked.
fn endless(more: Value) -> Vec<u8> {
    let mut body = chat("What is a whale?", json!({"ignore_eos": true}));
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body.to_string().into_bytes()
}

fn open_endless(served: &Served, more: Value) -> Connection {
    let mut connection = Connection::open(served.address);
    connection.send_request("POST", CHAT, &[], &endless(more));
    connection
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn who_goes_away_frees_the_place_in_queue_prompt_and_answer() {
    let served = Served::start(&["--parallel", "1"]);
    let health = |field: &str| served.get("/health").json()[field].as_u64().expect("a count");
    for stream in [false, true] {
        let running = open_endless(&served, json!({"stream": stream}));
        eventually("it runs", || health("running") == 1);
        let waiting = open_endless(&served, json!({"stream": stream}));
        eventually("it waits", || health("waiting") == 1);
        // In the queue.
        drop(waiting);
        eventually("it left the queue", || health("waiting") == 0);
        assert_eq!(health("running"), 1);
        // While it decodes.
        drop(running);
        let closed = Instant::now();
        eventually("it left its slot", || health("running") == 0);
        assert!(closed.elapsed() < Duration::from_secs(3), "{:?}", closed.elapsed());
        // In its prompt.
        let prompt = json!({"stream": stream, "messages": [
            {"role": "user", "content": "The river runs to the sea. ".repeat(400)}]});
        let prompt = open_endless(&served, prompt);
        eventually("it runs", || health("running") == 1);
        drop(prompt);
        eventually("it left its prompt", || health("running") == 0);
    }
    let aborted =
        served.metric("vllm:request_success_total{model_name=\"demo\",finished_reason=\"abort\"}");
    assert_eq!(aborted, 6.0);
    let answer = served.ask(CHAT, &chat("What is 17 + 25?", json!({})));
    assert_eq!(content(&answer), "17 + 25 = 42.");
}

#[test]
fn a_full_queue_is_told_with_a_time_to_come_back() {
    let served = Served::start(&["--parallel", "1", "--queue", "1"]);
    let running = open_endless(&served, json!({}));
    eventually("it runs", || served.metric("vllm:num_requests_running") == 1.0);
    let waiting = open_endless(&served, json!({}));
    eventually("it waits", || served.metric("vllm:num_requests_waiting") == 1.0);
    let refused = request(served.address, "POST", CHAT, &[], &endless(json!({})));
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    drop((running, waiting));
}

#[test]
fn sigterm_finishes_what_runs_and_takes_nothing_new() {
    let mut served = Served::start(&["--parallel", "2"]);
    let mut running = open_endless(&served, json!({"stream": true, "max_tokens": 600}));
    assert_eq!(running.head().status, 200);
    running.chunk();
    served.signal("TERM");
    eventually("it drains", || served.get("/health").status == 503);
    assert_eq!(served.get("/health").json()["status"], "shutting down");
    let refused = served.post(CHAT, &chat("hi", json!({})));
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    let mut last = Vec::new();
    loop {
        let chunk = running.chunk();
        if chunk.is_empty() {
            break;
        }
        last = chunk;
    }
    assert_eq!(last, b"data: [DONE]\n\n");
    assert_eq!(served.wait(), Some(0));
}

#[test]
fn a_second_signal_ends_at_once() {
    for (first, second) in [("TERM", "TERM"), ("INT", "INT")] {
        let mut served = Served::start(&[]);
        let mut running = open_endless(&served, json!({"stream": true}));
        running.head();
        served.signal(first);
        eventually("it drains", || served.get("/health").status == 503);
        served.signal(second);
        assert_eq!(served.wait(), Some(130));
    }
    let mut idle = Served::start(&[]);
    idle.signal("INT");
    assert_eq!(idle.wait(), Some(0));
}

/// Resident memory in KiB.
fn resident(served: &Served) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", served.pid())).expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.split_whitespace().next().expect("a number").parse().expect("a number")
}

#[test]
fn memory_stays_flat() {
    let served = Served::start(&["--parallel", "2"]);
    let ask = |count: usize| {
        for index in 0..count {
            let question = format!("What is {} + {}?", index % 90, index % 70);
            let stream = index % 2 == 0;
            let body = chat(&question, json!({"max_tokens": 4, "stream": stream}));
            assert_eq!(served.post(CHAT, &body).status, 200);
        }
    };
    ask(100);
    let before = resident(&served);
    let requests = if soak() > 1 { 10_000 } else { 200 };
    ask(requests);
    let after = resident(&served);
    println!("{before} KiB before, {after} KiB after {requests} requests");
    assert!(after < before + 4096, "{before} KiB before, {after} KiB after {requests} requests");
}
