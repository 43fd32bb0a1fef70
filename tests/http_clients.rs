//! Promise: real clients work unchanged: the official openai package, LangChain, curl, and a browser
//! with the chat page. `make clients` installs the Python packages; CI requires all of them
//! (TALON_REQUIRE_CLIENTS), elsewhere a missing one is told and left out.

#[path = "common/http.rs"]
mod http;
#[path = "common/repository.rs"]
mod repository;

use std::process::{Command, Output};

use http::{Served, chat};
use repository::repository;
use serde_json::json;

/// Whether a client that is not here may be left out.
fn missing(what: &str) {
    assert!(std::env::var_os("TALON_REQUIRE_CLIENTS").is_none(), "{what} is not here");
    println!("left out: {what} is not here");
}

fn succeeds(mut command: Command) -> String {
    let Output { status, stdout, stderr } = command.output().expect("it runs");
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n{stdout}\n{stderr}");
    stdout.into_owned()
}

fn python_client(script: &str) {
    let python = repository(".toolchain/python/bin/python");
    if !python.exists() {
        return missing("the Python clients' environment (make clients)");
    }
    let served = Served::start(&["--api-key", "secret-7"]);
    let mut command = Command::new(python);
    command.arg(repository("tests/clients").join(script));
    command.arg(format!("http://{}", served.address)).arg("secret-7");
    // Proxies are for the network.
    command.env("NO_PROXY", "127.0.0.1");
    println!("{}", succeeds(command));
}

#[test]
fn the_openai_package_finds_nothing_wrong() {
    python_client("openai_client.py");
}

#[test]
fn langchain_finds_nothing_wrong() {
    python_client("langchain_client.py");
}

#[test]
fn curl_streams() {
    if Command::new("curl").arg("--version").output().is_err() {
        return missing("curl");
    }
    let served = Served::start(&[]);
    let url = format!("http://{}/v1/chat/completions", served.address);
    let body = chat("What is 17 + 25?", json!({"stream": true})).to_string();
    let mut command = Command::new("curl");
    command.args(["-sSN", "--noproxy", "*", "-H", "Expect: 100-continue", "-d", &body, &url]);
    let text = succeeds(command);
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
}

/// The page asks the question of its address, streams the answer, and tells the speed.
#[test]
fn the_chat_page_works_in_a_browser() {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let Some(browser) =
        names.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok())
    else {
        return missing("a headless Chromium");
    };
    let served = Served::start(&["--draft", "mtp", "--draft-tokens", "3"]);
    let page = |query: &str| {
        let profile = tempfile::tempdir().expect("a folder");
        let mut command = Command::new(browser);
        command
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--no-first-run", "--disable-extensions", "--disable-background-networking"])
            .args(["--no-proxy-server", "--virtual-time-budget=20000", "--dump-dom"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg(format!("http://{}/?{query}", served.address));
        succeeds(command)
    };
    let dom = page("nothink&ask=What%20is%2017%20%2B%2025%3F");
    for shown in [
        "17 + 25 = 42.",
        "<span id=\"model\">demo</span>",
        "tokens/s",
        "tokens per step",
        "data-done",
    ] {
        assert!(dom.contains(shown), "{shown}: {dom}");
    }
    // Reasoning is there, and folded.
    let dom = page("ask=What%20is%2038%20%2B%2047%3F");
    assert!(!dom.contains("<details open"), "{dom}");
    assert!(dom.contains("38 + 47"), "{dom}");
    // An error is told in words.
    let dom = page(&format!("nothink&ask={}", "x%20".repeat(5000)));
    assert!(dom.contains("the prompt has"), "{dom}");
}
