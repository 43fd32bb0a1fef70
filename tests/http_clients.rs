//! Promise: real clients work unchanged: the official openai package, LangChain, curl, and a browser
//! with the chat page. `make clients` installs the Python packages; CI requires all of them
//! (TALON_REQUIRE_CLIENTS), elsewhere a missing one is told and left out.

#[path = "common/http.rs"]
mod http;
#[path = "common/repository.rs"]
mod repository;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use http::{Served, chat};
use repository::repository;
use serde_json::{Value, json};

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

/// A headless Chromium, driven through its debugging pipe.
struct Browser {
    child: Child,
    requests: ChildStdin,
    replies: BufReader<ChildStdout>,
    session: Value,
    calls: usize,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Opens a page, if there is a Chromium here.
    fn open(url: &str) -> Option<Self> {
        let profile = tempfile::tempdir().expect("a folder");
        let names = ["chromium", "chromium-browser", "google-chrome"];
        let there = |name: &&str| Command::new(name).arg("--version").output().is_ok();
        let name = names.into_iter().find(there)?;
        // The pipe is on descriptors 3 and 4.
        let script = format!(
            "exec {name} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage \
             --no-first-run --disable-extensions --disable-background-networking --no-proxy-server \
             --remote-debugging-pipe --user-data-dir={} about:blank 3<&0 4>&1 </dev/null >/dev/null 2>&1",
            profile.path().display()
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a shell");
        let requests = child.stdin.take().expect("a pipe");
        let replies = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut browser =
            Self { child, requests, replies, session: Value::Null, calls: 0, _profile: profile };
        let target = browser.call("Target.createTarget", json!({"url": url}));
        let target = json!({"targetId": target["targetId"], "flatten": true});
        browser.session = browser.call("Target.attachToTarget", target)["sessionId"].clone();
        Some(browser)
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.calls += 1;
        let mut message = json!({"id": self.calls, "method": method, "params": params});
        if !self.session.is_null() {
            message["sessionId"] = self.session.clone();
        }
        self.requests.write_all(format!("{message}\0").as_bytes()).expect("the browser lives");
        loop {
            let mut reply = Vec::new();
            self.replies.read_until(0, &mut reply).expect("the browser lives");
            assert_eq!(reply.pop(), Some(0), "the browser has ended");
            let reply: Value = serde_json::from_slice(&reply).expect("JSON");
            if reply["id"] == self.calls {
                return reply["result"].clone();
            }
        }
    }

    /// The value of a JavaScript expression.
    fn value(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true});
        let result = self.call("Runtime.evaluate", params);
        assert!(result.get("exceptionDetails").is_none(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    fn wait(&mut self, condition: &str) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.value(condition) != json!(true) {
            let body = self.value("document.body?.innerText ?? ''");
            assert!(Instant::now() < deadline, "{condition}: {body}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Types a question and sends it; the text of the turn that answers.
    fn ask(&mut self, question: &str) -> String {
        let question = Value::from(question);
        self.value(&format!("$('input').value = {question}; $('form').requestSubmit()"));
        self.wait("running === null");
        self.value("$('log').lastChild.innerText").as_str().expect("text").to_owned()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_chat_page_works_in_a_browser() {
    let served = Served::start(&["--draft", "mtp", "--draft-tokens", "3"]);
    let Some(mut browser) = Browser::open(&format!("http://{}/", served.address)) else {
        return missing("a headless Chromium");
    };
    browser.wait("document.getElementById('model')?.textContent === 'demo'");
    browser.value("$('think').checked = false");
    let answer = browser.ask("What is 17 + 25?");
    for shown in ["17 + 25 = 42.", "tokens/s", "tokens per step", "guesses right"] {
        assert!(answer.contains(shown), "{shown}: {answer}");
    }
    // The history goes along, and finds itself in the cache.
    let again = browser.ask("What is 38 + 47?");
    assert!(again.contains("38 + 47 = 85.") && again.contains("prompt tokens cached"), "{again}");
    assert_eq!(browser.value("turns.length"), 4);
    // Reasoning is folded, and opens. This model thinks nothing, so the words are put in.
    browser.value(
        "fetch = async () => new Response('data: {\"choices\": [{\"delta\": \
         {\"reasoning_content\": \"so it is\"}}]}\\n\\ndata: {\"choices\": [{\"delta\": \
         {\"content\": \"<b>said</b>\"}}]}\\n\\ndata: [DONE]\\n\\n'); 0",
    );
    let thought = browser.ask("Think.");
    assert!(thought.contains("reasoning") && !thought.contains("so it is"), "{thought}");
    assert!(thought.contains("<b>said</b>"), "markup stays text: {thought}");
    browser.value("$('log').lastChild.querySelector('details').open = true");
    let open = browser.value("$('log').lastChild.innerText");
    assert!(open.as_str().expect("text").contains("so it is"), "{open}");
    // An error is told in words.
    browser.value(
        "fetch = async () => Response.json({error: {message: 'no such thing'}}, {status: 400}); 0",
    );
    assert!(browser.ask("x").contains("no such thing"));
}
