//! Printing: results to stdout, everything else to stderr; a reader that goes away is no failure.

use std::io::{ErrorKind, IsTerminal, Write};

use serde_json::Value;

use crate::error::{Error, Result};

/// Prints to stdout as it stands, at once.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::output)
}

/// Prints to stderr, at once. Nothing can be done, or need be, if nobody can read it.
pub fn print_stderr(text: &str) {
    let mut err = std::io::stderr().lock();
    let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
}

/// Writes a report to `target`: a file, or stdout if it is `-`.
pub fn write_json(target: &str, value: &Value) -> Result<()> {
    let mut text = serde_json::to_string_pretty(value)
        .map_err(|e| Error::runtime(format!("cannot write JSON: {e}")))?;
    text.push('\n');
    write_text(target, &text)
}

/// Writes text to `target`: a file, or stdout if it is `-`.
pub fn write_text(target: &str, text: &str) -> Result<()> {
    if target == "-" {
        return print(text);
    }
    std::fs::write(target, text).map_err(|e| Error::runtime(cannot_write(target, &e)))
}

fn cannot_write(target: &str, error: &std::io::Error) -> String {
    let remedy = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "make room, or choose another disk",
        _ => "choose another path for the output",
    };
    format!("{target}: cannot write: {error}; {remedy}")
}

/// Refuses a report's path that cannot be written, before the work is done; leaves no file behind.
pub fn check_writable(target: &str) -> Result<()> {
    let path = std::path::Path::new(target);
    if target == "-" {
        return Ok(());
    }
    let is_new = !path.exists();
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
    opened.map(drop).map_err(|e| Error::input(cannot_write(target, &e)))?;
    if is_new {
        // What was just made is empty; if it cannot be removed it does no harm.
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// Dim text for a terminal; plain where colour is not wanted (NO_COLOR, TERM=dumb, a pipe).
pub fn dim_stderr(text: &str) -> String {
    let wanted = std::io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var("TERM").is_ok_and(|term| term != "dumb");
    if wanted { format!("\x1b[2m{text}\x1b[0m") } else { text.to_owned() }
}

/// `12345678` as `12,345,678`.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::thousands;

    #[test]
    fn digits_are_grouped_in_threes() {
        let grouped = [0, 999, 1000, 464_795_267_072].map(thousands);
        assert_eq!(grouped, ["0", "999", "1,000", "464,795,267,072"]);
    }
}
