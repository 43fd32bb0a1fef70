//! JSON as Python's `json.dumps(…, ensure_ascii=False)` writes it. Chat templates put tool
//! definitions into the prompt this way, so models have seen these separators and numbers.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// Writes `value` with the separators `", "` and `": "`.
pub(super) fn to_python_json(value: &impl Serialize) -> serde_json::Result<String> {
    let mut bytes = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut bytes, PythonFormatter))?;
    String::from_utf8(bytes).map_err(serde::ser::Error::custom)
}

struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }

    /// Rust and Python agree on when to use an exponent, but Python gives it a sign and two digits.
    fn write_f64<W: ?Sized + Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        let number = format!("{value:?}");
        match number.split_once('e') {
            None => write!(out, "{number}"),
            Some((digits, exponent)) => {
                let (sign, exponent) = match exponent.strip_prefix('-') {
                    Some(exponent) => ('-', exponent),
                    None => ('+', exponent),
                };
                write!(out, "{digits}e{sign}{exponent:0>2}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn separators_order_and_non_ascii() {
        let value = json!({"b": [1, "é\"\n\u{1}"], "a": {"x": null, "y": true}, "e": [], "f": {}});
        let expected =
            r#"{"b": [1, "é\"\n\u0001"], "a": {"x": null, "y": true}, "e": [], "f": {}}"#;
        assert_eq!(to_python_json(&value).unwrap(), expected);
    }

    #[test]
    fn numbers() {
        let value = json!([1.0, 0.5, 1e16, 1.5e-7, 1e-5, 1e-4, 123456789012345.0, 1e300, -2]);
        let expected = "[1.0, 0.5, 1e+16, 1.5e-07, 1e-05, 0.0001, 123456789012345.0, 1e+300, -2]";
        assert_eq!(to_python_json(&value).unwrap(), expected);
    }
}
