//! The checks for people: a line for each that is well, and what to do about the others.

use serde_json::Value;

use super::Diagnosis;
use super::check::{Check, Status};

/// Columns of the texts about a problem.
const WIDTH: usize = 96;
const INDENT: &str = "        ";

/// The table. What is wrong comes last, where it is seen.
pub fn table(diagnosis: &Diagnosis) -> String {
    let of = |status: Status| diagnosis.checks.iter().filter(move |check| check.status == status);
    let name_width = diagnosis.checks.iter().map(|check| check.subject.name.len()).max();
    let line = |check: &Check| {
        let width = name_width.unwrap_or(0);
        format!("{:8}{:width$}  {}\n", check.status.word(), check.subject.name, check.value)
    };
    let mut text = String::new();
    for check in of(Status::Ok) {
        text += &line(check);
    }
    // What could not be told for one reason is told once.
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for check in of(Status::Unknown) {
        match reasons.iter_mut().find(|(reason, _)| *reason == check.value) {
            Some((_, names)) => names.push(check.subject.name),
            None => reasons.push((&check.value, vec![check.subject.name])),
        }
    }
    for (reason, names) in reasons {
        text +=
            &wrapped(&format!("{}: {reason}", names.join(", "))).replacen(INDENT, "unknown ", 1);
    }
    for check in of(Status::Warn).chain(of(Status::Fail)) {
        text += "\n";
        text += &line(check);
        let who = if check.subject.renter { "" } else { " (whoever owns the box)" };
        for (label, what) in [
            ("expected", check.subject.expected.to_owned()),
            ("costs", check.subject.cost.to_owned()),
            ("fix", format!("{}{who}", check.fix())),
        ] {
            text += &wrapped(&format!("{label}: {what}"));
        }
    }
    let count = |status| of(status).count();
    text += &format!(
        "\n{} ok, {} unknown, {} to look at, {} failed\n",
        count(Status::Ok),
        count(Status::Unknown),
        count(Status::Warn),
        count(Status::Fail)
    );
    text += &speed_lines(&diagnosis.expected_speed, &diagnosis.last_bench);
    if let Some(why) = &diagnosis.bench_elsewhere {
        text += &format!("last bench: on another box, or before this one changed: {why}\n");
    }
    text
}

/// What the box should reach, beside what it has reached.
fn speed_lines(expected: &Value, bench: &Value) -> String {
    let mut text = String::new();
    if let (Some(rate), Some(ms)) =
        (expected["tokens_per_second"].as_f64(), expected["step_ms"].as_f64())
    {
        let (bytes, reduce) = (&expected["rank_bytes"], &expected["reduce_us"]);
        let word = |name: &str| expected[name].as_str().unwrap_or("?");
        let exchanges = match expected["exchanges"].as_u64() {
            None | Some(0) => String::new(),
            Some(count) => format!(
                "; {count} exchanges of {:.1} us, {}",
                reduce.as_f64().unwrap_or(0.0),
                word("reduce_us_from")
            ),
        };
        text += &format!(
            "should reach: at most {rate:.0} tokens/s without speculation with {} ({ms:.1} ms a step: {:.2} GB a \
             rank at {:.2} TB/s, {}{exchanges})\n",
            word("model"),
            bytes.as_f64().unwrap_or(0.0) / 1e9,
            expected["bandwidth"].as_f64().unwrap_or(0.0) / 1e12,
            word("bandwidth_from"),
        );
    }
    if let (Some(rate), Some(ms)) = (bench["tokens_per_second"].as_f64(), bench["step_ms"].as_f64())
    {
        let with = bench["speculative_tokens_per_second"]
            .as_f64()
            .map_or(String::new(), |rate| format!(", {rate:.1} with speculation"));
        text += &format!(
            "last bench ({}): {rate:.1} tokens/s{with} ({ms:.2} ms a plain step) with {}, {} backend\n",
            bench["date"].as_str().unwrap_or("no date was kept"),
            bench["model"]["name"].as_str().unwrap_or("?"),
            bench["settings"]["backend"].as_str().unwrap_or("?"),
        );
    }
    text
}

/// A text in lines of at most [`WIDTH`] characters, indented.
fn wrapped(text: &str) -> String {
    let mut lines = String::from(INDENT);
    let mut used = 0;
    for word in text.split_whitespace() {
        let width = word.chars().count();
        if used > 0 && used + 1 + width > WIDTH {
            lines += &format!("\n{INDENT}  ");
            used = 2;
        } else if used > 0 {
            lines.push(' ');
            used += 1;
        }
        lines += word;
        used += width;
    }
    lines.push('\n');
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_wrapped_and_keep_their_words() {
        let text = "word ".repeat(100);
        let lines = wrapped(&text);
        assert!(lines.lines().all(|line| line.len() <= WIDTH + INDENT.len()));
        assert_eq!(lines.split_whitespace().count(), 100);
    }
}
