//! A server under test, and a small client that shows what is on the wire.

// Every test binary compiles this module and uses only a part of it.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// `talon serve` on a free port, with the demo model on the CPU unless told otherwise.
pub struct Served {
    child: Child,
    pub address: SocketAddr,
    /// What it wrote to stderr so far.
    pub log: Arc<Mutex<String>>,
}

impl Served {
    pub fn start(args: &[&str]) -> Self {
        Self::start_by(Command::new(env!("CARGO_BIN_EXE_talon")), args)
    }

    /// Started by a command that takes talon's arguments.
    pub fn start_by(command: Command, args: &[&str]) -> Self {
        Self::start_at(0, command, args)
    }

    fn start_at(port: u16, mut command: Command, args: &[&str]) -> Self {
        let port = port.to_string();
        command.args(["serve", "--port", &port, "--backend", "cpu"]).args(args);
        command.env_remove("RUST_LOG").env_remove("TALON_API_KEY").stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary starts");
        let mut lines = BufReader::new(child.stderr.take().expect("stderr")).lines();
        let log = Arc::new(Mutex::new(String::new()));
        let address = loop {
            let line = lines.next().expect("a line that tells the address").expect("UTF-8");
            log.lock().expect("the log").push_str(&line);
            if let Some((_, rest)) = line.split_once(" at http://") {
                let address = rest.split(' ').next().expect("an address");
                break address.parse().expect("an address");
            }
        };
        let more = log.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                more.lock().expect("the log").push_str(&line);
            }
        });
        Self { child, address, log }
    }

    /// Another one with its address, once it has ended.
    pub fn start_again(&self, args: &[&str]) -> Self {
        Self::start_at(self.address.port(), Command::new(env!("CARGO_BIN_EXE_talon")), args)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &pid]).status().expect("kill");
        assert!(sent.success());
    }

    /// Waits for the end; the exit code.
    pub fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + Duration::from_secs(30);
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("the server does not end");
    }

    pub fn get(&self, path: &str) -> Reply {
        request(self.address, "GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        request(self.address, "POST", path, &[], body.to_string().as_bytes())
    }

    /// Posts and expects success.
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        let reply = self.post(path, body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    /// The value of a metric's line that begins with `name`.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("{name} in {text}"));
        line.rsplit(' ').next().expect("a value").parse().expect("a number")
    }

    /// Waits until nothing runs and nothing waits.
    pub fn wait_idle(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        let busy = || {
            let health = self.get("/health").json();
            health["running"].as_u64() != Some(0) || health["waiting"].as_u64() != Some(0)
        };
        while busy() {
            assert!(Instant::now() < deadline, "a request goes on");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What came back.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("UTF-8")
    }

    pub fn json(&self) -> Value {
        let text = self.text();
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {} {text}", self.status))
    }

    /// The JSON of a stream's events; the last one was [DONE].
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        let text = self.text();
        let mut data: Vec<&str> =
            text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{text}");
        data.into_iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
    }
}

/// A connection that may be used several times.
pub struct Connection {
    reader: BufReader<TcpStream>,
}

impl Connection {
    pub fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the server accepts");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        // Else a body behind its head waits for the head's acknowledgement.
        stream.set_nodelay(true).expect("an option");
        Self { reader: BufReader::new(stream) }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.reader.get_mut().write_all(bytes).expect("the server reads");
    }

    /// Sends what may no longer be read.
    pub fn try_send(&mut self, bytes: &[u8]) {
        let _ = self.reader.get_mut().write_all(bytes);
    }

    pub fn send_request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: talon\r\n");
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("Content-Length: {}\r\n\r\n", body.len());
        self.send(head.as_bytes());
        self.try_send(body);
    }

    /// One line without its end; empty at the end of the connection.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("the server writes");
        line.trim_end().to_owned()
    }

    /// Status and headers; what is before the body.
    pub fn head(&mut self) -> Reply {
        let first = self.line();
        let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status: {first:?}"));
        let mut headers = Vec::new();
        loop {
            let line = self.line();
            match line.split_once(": ") {
                Some((name, value)) => headers.push((name.to_lowercase(), value.to_owned())),
                None => break,
            }
        }
        Reply { status, headers, body: Vec::new() }
    }

    /// A chunk of a body; empty at its end.
    pub fn chunk(&mut self) -> Vec<u8> {
        let size = self.line();
        let size = usize::from_str_radix(&size, 16).unwrap_or_else(|_| panic!("size {size:?}"));
        let mut chunk = vec![0; size];
        self.reader.read_exact(&mut chunk).expect("a whole chunk");
        assert_eq!(self.line(), "");
        chunk
    }

    pub fn reply(&mut self, method: &str) -> Reply {
        let mut reply = self.head();
        if reply.status == 100 {
            reply = self.head();
        }
        if method == "HEAD" {
            return reply;
        }
        if reply.header("transfer-encoding") == Some("chunked") {
            loop {
                let chunk = self.chunk();
                if chunk.is_empty() {
                    return reply;
                }
                reply.body.extend(chunk);
            }
        }
        let length = reply.header("content-length").map_or(0, |n| n.parse().expect("a length"));
        reply.body = vec![0; length];
        self.reader.read_exact(&mut reply.body).expect("a whole body");
        reply
    }
}

pub fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Reply {
    let mut connection = Connection::open(address);
    connection.send_request(method, path, headers, body);
    connection.reply(method)
}

/// A chat of one question, greedy and without reasoning, with more fields.
pub fn chat(question: &str, more: Value) -> Value {
    let mut body = json!({
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": false},
    });
    let more = more.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(more);
    body
}

/// The text of an answer.
pub fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

/// A field of all events' deltas, joined.
pub fn joined(events: &[Value], field: &str) -> String {
    let text = |event: &Value| event["choices"][0]["delta"][field].as_str().map(str::to_owned);
    events.iter().filter_map(text).collect()
}

/// The tool of the demo model's training.
pub fn weather_tool() -> Value {
    let city = json!({"type": "string", "description": "City name"});
    json!([{"type": "function", "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {"type": "object", "properties": {"city": city}, "required": ["city"]},
    }}])
}
