//! The one error type. A message is one line: what is wrong, where (file, tensor, value), what was
//! expected and what to do about it.

use std::fmt;

/// Why a command ended, as far as the exit code is concerned (DESIGN §4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Failed while running: exit code 1.
    Runtime,
    /// Bad arguments or bad input (checkpoint, prompt file): exit code 2.
    Input,
    /// The reader of our output went away, which is a success: exit code 0.
    BrokenPipe,
}

/// One line for the user, and the exit code's [`Kind`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    kind: Kind,
    message: String,
}

/// `Result` with talon's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Bad arguments or bad input.
    pub fn input(message: impl Into<String>) -> Self {
        Self { kind: Kind::Input, message: one_line(message.into()) }
    }

    /// A failure while running.
    pub fn runtime(message: impl Into<String>) -> Self {
        Self { kind: Kind::Runtime, message: one_line(message.into()) }
    }

    /// Writing to stdout failed: a closed pipe is a success, anything else is a failure.
    pub fn output(error: std::io::Error) -> Self {
        let kind = match error.kind() {
            std::io::ErrorKind::BrokenPipe => Kind::BrokenPipe,
            _ => Kind::Runtime,
        };
        Self { kind, message: format!("cannot write the output: {error}") }
    }

    /// What the exit code is derived from.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The process exit code of DESIGN §4.
    pub fn exit_code(&self) -> u8 {
        match self.kind {
            Kind::BrokenPipe => 0,
            Kind::Runtime => 1,
            Kind::Input => 2,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// Foreign messages and names of files and tensors may hold line breaks, or codes that a terminal
/// obeys; a message stays one line of text.
pub(crate) fn one_line(message: String) -> String {
    if message.contains(char::is_control) {
        message.replace(char::is_control, " ")
    } else {
        message
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_is_always_one_line() {
        assert_eq!(Error::input("a\nb\r\nc").to_string(), "a b  c");
        assert_eq!(Error::input("tensor a\u{1b}[2Jb").to_string(), "tensor a [2Jb");
    }

    #[test]
    fn exit_codes_follow_the_contract() {
        assert_eq!(Error::runtime("").exit_code(), 1);
        assert_eq!(Error::input("").exit_code(), 2);
        assert_eq!(Error::output(std::io::ErrorKind::BrokenPipe.into()).exit_code(), 0);
        assert_eq!(Error::output(std::io::ErrorKind::StorageFull.into()).exit_code(), 1);
    }
}
