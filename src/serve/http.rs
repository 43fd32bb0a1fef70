//! One request and its answer on tiny_http, with what tiny_http leaves to us: bounds on bodies, a
//! way to stream, and refusing what it would misread.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::str::FromStr;

use serde_json::Value;
use tiny_http::{HTTPVersion, Header, Method, Request, Response, StatusCode};

use super::errors::ApiError;

/// Bytes that a body may have: far more than a million tokens of text.
pub const MAX_BODY: usize = 32 << 20;
/// Bytes that all headers may have.
const MAX_HEADERS: usize = 64 << 10;
/// A body of more than this many bytes is not even read to its end.
const MAX_DISCARD: usize = 1 << 30;

/// A request that waits for its answer.
pub struct Exchange {
    request: Request,
    /// Origin that pages may call from, if any.
    cors: Option<String>,
    /// Its body is not what tiny_http takes it for.
    misread: bool,
}

/// A request that is to be answered with an error.
pub struct Refused {
    /// The request.
    pub exchange: Exchange,
    /// Its answer.
    pub error: ApiError,
}

/// What became of a request: answered, or still to be.
pub type Answered = Result<(), Box<Refused>>;

impl Exchange {
    /// Wraps a request; `None` if it was answered already, because it cannot be handled safely.
    pub fn new(request: Request, cors: Option<String>) -> Option<Self> {
        let mut exchange = Self { request, cors, misread: false };
        match exchange.fault() {
            None => Some(exchange),
            Some(fault) => {
                exchange.misread = true;
                exchange.error(&fault);
                None
            }
        }
    }

    /// What tiny_http accepts and would misread.
    fn fault(&self) -> Option<ApiError> {
        let bytes = |header: &Header| header.field.as_str().as_str().len() + header.value.len();
        if self.request.headers().iter().map(bytes).sum::<usize>() > MAX_HEADERS {
            let message = format!("headers of more than {MAX_HEADERS} bytes");
            return Some(ApiError::new(431, "invalid_request_error", message));
        }
        let transfer = self.header("Transfer-Encoding");
        let lengths: Vec<&str> = self.headers("Content-Length").collect();
        let fault = match (transfer, lengths.as_slice()) {
            (Some(_), [_, ..]) => "both Content-Length and Transfer-Encoding",
            (Some(coding), []) if !coding.eq_ignore_ascii_case("chunked") => {
                "Transfer-Encoding other than chunked"
            }
            (None, [length]) if length.parse::<u64>().is_err() => "Content-Length is no number",
            (None, [_, _, ..]) => "several Content-Length headers",
            _ if self
                .header("Connection")
                .is_some_and(|c| c.to_lowercase().contains("upgrade")) =>
            {
                "Connection: upgrade is not supported"
            }
            _ => return None,
        };
        Some(ApiError::invalid("", fault))
    }

    fn headers<'a>(&'a self, name: &'static str) -> impl Iterator<Item = &'a str> {
        let named = move |header: &&Header| header.field.equiv(name);
        self.request.headers().iter().filter(named).map(|header| header.value.as_str())
    }

    /// A header's value.
    pub fn header(&self, name: &'static str) -> Option<&str> {
        self.headers(name).next()
    }

    /// The method.
    pub fn method(&self) -> &Method {
        self.request.method()
    }

    /// The path, without a query.
    pub fn path(&self) -> &str {
        self.request.url().split(['?', '#']).next().unwrap_or_default()
    }

    /// The client's address.
    pub fn client(&self) -> Option<SocketAddr> {
        self.request.remote_addr().copied()
    }

    /// Whether an answer of unknown length can be sent.
    pub fn can_stream(&self) -> bool {
        *self.request.http_version() >= HTTPVersion(1, 1)
    }

    /// Reads the body.
    ///
    /// # Errors
    /// 413 if it is too long, 400 if it breaks off.
    pub fn body(&mut self) -> Result<Vec<u8>, ApiError> {
        if self.request.body_length().is_some_and(|length| length > MAX_BODY) {
            return Err(too_long());
        }
        let mut body = Vec::new();
        let limited = self.request.as_reader().take(MAX_BODY as u64 + 1);
        io::copy(&mut { limited }, &mut body)
            .map_err(|error| ApiError::invalid("", format!("the body breaks off: {error}")))?;
        if body.len() > MAX_BODY {
            return Err(too_long());
        }
        Ok(body)
    }

    /// To be answered with an error.
    ///
    /// # Errors
    /// That one, always.
    pub fn refuse(self, error: ApiError) -> Answered {
        Err(Box::new(Refused { exchange: self, error }))
    }

    /// Answers with JSON.
    pub fn json(self, status: u16, value: &Value) {
        self.reply(status, "application/json", value.to_string().into_bytes(), &[]);
    }

    /// Answers with an error.
    pub fn error(self, error: &ApiError) {
        let mut headers = Vec::new();
        if let Some(seconds) = error.retry_after {
            headers.push(("Retry-After", seconds.to_string()));
        }
        if error.status == 401 {
            headers.push(("WWW-Authenticate", "Bearer".to_owned()));
        }
        let body = error.json().to_string().into_bytes();
        self.reply(error.status, "application/json", body, &headers);
    }

    /// Answers with any body.
    pub fn reply(
        mut self,
        status: u16,
        content_type: &str,
        body: Vec<u8>,
        headers: &[(&str, String)],
    ) {
        let mut response = Response::from_data(body).with_status_code(StatusCode(status));
        let more = self.cors_headers();
        let content_type = [("Content-Type", content_type.to_owned())];
        for (name, value) in content_type.iter().chain(headers).chain(&more) {
            if let Ok(header) = Header::from_str(&format!("{name}: {value}")) {
                response.add_header(header);
            }
        }
        if self.request.body_length().is_some_and(|length| length > MAX_DISCARD) {
            return self.give_up(response);
        }
        self.discard_body();
        if let Err(error) = self.request.respond(response) {
            log::debug!("an answer could not be sent: {error}");
        }
    }

    /// Answers a request whose body is claimed to be huge. Dropping it would make tiny_http allocate
    /// all of the claimed length, and end the process if that fails. So the connection is given up:
    /// its thread and socket stay until the end.
    fn give_up(self, response: Response<io::Cursor<Vec<u8>>>) {
        log::warn!("a request claims a body of more than {MAX_DISCARD} bytes; it is not read");
        let status = response.status_code().0;
        let body = response.into_reader().into_inner();
        // The only way to a writer that does not drop the request. Clients skip what says 100.
        let mut stream = self.request.upgrade("close", Response::empty(100));
        let head = format!(
            "HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n",
            body.len()
        );
        let sent = stream.write_all(&[head.as_bytes(), &body].concat());
        if let Err(error) = sent.and_then(|()| stream.flush()) {
            log::debug!("an answer could not be sent: {error}");
        }
        std::mem::forget(stream);
    }

    fn cors_headers(&self) -> Vec<(&'static str, String)> {
        let Some(origin) = &self.cors else {
            return Vec::new();
        };
        vec![
            ("Access-Control-Allow-Origin", origin.clone()),
            ("Access-Control-Allow-Headers", "Authorization, Content-Type".to_owned()),
            ("Access-Control-Allow-Methods", "GET, POST, OPTIONS".to_owned()),
        ]
    }

    /// Reads what is left of the body in small pieces, which tiny_http would do in one. A client
    /// that waits to be told to go on will not send it.
    fn discard_body(&mut self) {
        if self.header("Expect").is_none() && !self.misread {
            let _ =
                io::copy(&mut self.request.as_reader().take(MAX_DISCARD as u64), &mut io::sink());
        }
    }

    /// Begins an answer of events, each of which is sent at once.
    ///
    /// # Errors
    /// If the client has gone.
    pub fn stream(self) -> io::Result<EventStream> {
        let mut head = String::from(
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n\
             X-Accel-Buffering: no\r\nTransfer-Encoding: chunked\r\n",
        );
        for (name, value) in self.cors_headers() {
            head += &format!("{name}: {value}\r\n");
        }
        // tiny_http's own responses go through an encoder that holds 8 KiB back; its raw writer
        // does not.
        let mut writer = self.request.into_writer();
        writer.write_all((head + "\r\n").as_bytes())?;
        writer.flush()?;
        Ok(EventStream { writer })
    }
}

fn too_long() -> ApiError {
    let message = format!("the body has more than {MAX_BODY} bytes");
    ApiError::new(413, "invalid_request_error", message)
}

/// An answer of server-sent events, in HTTP/1.1 chunks. Every write tells of a client that has
/// gone.
pub struct EventStream {
    writer: Box<dyn Write + Send>,
}

impl EventStream {
    /// Sends an event.
    ///
    /// # Errors
    /// If the client has gone or does not read.
    pub fn event(&mut self, data: &str) -> io::Result<()> {
        self.chunk(&format!("data: {data}\n\n"))
    }

    /// Sends a line that clients skip, which keeps the connection open.
    ///
    /// # Errors
    /// As [`EventStream::event`].
    pub fn comment(&mut self, text: &str) -> io::Result<()> {
        self.chunk(&format!(": {text}\n\n"))
    }

    fn chunk(&mut self, text: &str) -> io::Result<()> {
        write!(self.writer, "{:x}\r\n{text}\r\n", text.len())?;
        self.writer.flush()
    }

    /// Ends the answer; the connection may be used again.
    ///
    /// # Errors
    /// As [`EventStream::event`].
    pub fn finish(mut self) -> io::Result<()> {
        self.writer.write_all(b"0\r\n\r\n")?;
        self.writer.flush()
    }
}
