//! The report as a table for people.

use std::fmt::Write;

use serde_json::Value;

use super::projection::projection_lines;
use super::verdict::{Verdict, classes, few_pairs};

/// The table of a report.
pub fn table(report: &Value) -> String {
    let model = &report["model"];
    let settings = &report["settings"];
    let ranks = match model["rank_slice"].as_str() {
        Some(slice) => format!("ONLY rank {slice}, without the others: no answer, its work"),
        None => format!("{} rank(s)", model["tp"]),
    };
    let mut text = format!(
        "{}: {} layers, {}, {} backend, {ranks}, drafter {}\n",
        word(&model["name"]),
        model["layers"],
        word(&model["layout"]),
        word(&settings["backend"]),
        settings["draft"].as_str().unwrap_or("none"),
    );
    let summary = &report["summary"];
    text += &load_line(&report["load"]);
    text += &device_line(&report["device"], &summary["baseline"]["step_ms"]["p50"]);
    text.push('\n');
    let rows: Vec<(&str, &Value)> = classes(summary).chain([("all", summary)]).collect();
    let speculates = !summary["speculative"].is_null();
    // Writing to a String cannot fail.
    let _ = match speculates {
        true => write_pairs(&mut text, &rows),
        false => write_baseline(&mut text, &rows),
    };
    if speculates {
        text += &verdict(report);
    } else {
        text +=
            "\nbaseline: one token a step, greedy; medians over runs, the first token excluded\n";
    }
    if let Some(sweep) = report["sweep"].as_array().filter(|sweep| !sweep.is_empty()) {
        let _ = write_sweep(&mut text, sweep);
    }
    text + &projection_lines(&report["projection"])
}

/// What the load read of files, and how fast.
fn load_line(load: &Value) -> String {
    let number = |key: &str| load[key].as_f64();
    let (Some(bytes), Some(seconds), Some(rate)) =
        (number("bytes"), number("seconds"), number("gb_per_s"))
    else {
        return String::new();
    };
    format!(
        "loaded {:.2} GB in {seconds:.2} s: {rate:.2} GB/s, page cache {} ({:.0} % resident before)\n",
        bytes / 1e9,
        word(&load["cache"]),
        number("resident_before").unwrap_or(0.0) * 100.0
    )
}

/// What a plain step reads of the device's memory, and how fast.
fn device_line(device: &Value, step_ms: &Value) -> String {
    let (Some(bytes), Some(ms)) = (device["step_bytes"].as_f64(), step_ms.as_f64()) else {
        return String::new();
    };
    let rate = bytes / 1e-3 / ms;
    let of_roof = device["read_roof"].as_f64().map(|roof| {
        format!(", {:.0} % of plain reads at {:.0} GB/s", rate / roof * 100.0, roof / 1e9)
    });
    let gpus = device["gpus"].as_array().map_or(1, Vec::len);
    let reduce = device["reduce"].as_str().map(|how| format!("; {gpus} ranks add up by {how}"));
    format!(
        "{:.1} GB of weights on {}; a plain step reads {:.2} GB of them in {} launches: {:.0} GB/s{}{}\n",
        device["weight_bytes"].as_f64().unwrap_or(0.0) / 1e9,
        if gpus == 1 { "the GPU" } else { "each GPU" },
        bytes / 1e9,
        device["launches"],
        rate / 1e9,
        of_roof.unwrap_or_default(),
        reduce.unwrap_or_default()
    )
}

fn write_baseline(text: &mut String, rows: &[(&str, &Value)]) -> std::fmt::Result {
    writeln!(
        text,
        "{:<10}{:>5}{:>8}  {:>22}  {:>18}  {:>8}  {:>15}",
        "class",
        "runs",
        "tokens",
        "tok/s [95 %]",
        "steps/s x tok/step",
        "TTFT ms",
        "step ms p50 p99"
    )?;
    for (name, row) in rows {
        let row = &row["baseline"];
        let step = &row["step_ms"];
        writeln!(
            text,
            "{name:<10}{:>5}{:>8}  {:>22}  {:>18}  {:>8}  {:>15}",
            number(&row["runs"], 0),
            number(&row["completion_tokens"], 0),
            interval(&row["output_throughput"], 1),
            factors(row),
            number(&row["ttft_ms"]["median"], 1),
            format!("{} {}", number(&step["p50"], 2), number(&step["p99"], 2)),
        )?;
    }
    Ok(())
}

fn write_pairs(text: &mut String, rows: &[(&str, &Value)]) -> std::fmt::Result {
    writeln!(
        text,
        "{:<8}{:>6}  {:>11}  {:>10}  {:>17}  {:>18}  {:>10}  {:>17}  accepted at 1, 2, …",
        "class",
        "pairs",
        "plain tok/s",
        "spec tok/s",
        "speed-up [95 %]",
        "steps/s x tok/step",
        "plain step",
        "verify + draft ms"
    )?;
    for (name, row) in rows {
        let (plain, spec) = (&row["baseline"], &row["speculative"]);
        let rates: Vec<String> = spec["per_position_acceptance_rates"]
            .as_array()
            .map(|rates| rates.iter().map(|rate| number(rate, 2)).collect())
            .unwrap_or_default();
        writeln!(
            text,
            "{name:<8}{:>6}  {:>11}  {:>10}  {:>17}  {:>18}  {:>10}  {:>17}  {}",
            number(&spec["runs"], 0),
            number(&plain["output_throughput"]["median"], 1),
            number(&spec["output_throughput"]["median"], 1),
            interval(&row["speedup"], 2),
            factors(spec),
            number(&plain["step_ms"]["p50"], 2),
            format!("{} + {}", number(&spec["verify_ms"], 2), number(&spec["draft_ms"], 2)),
            if rates.is_empty() { "no guess made".to_owned() } else { rates.join(" ") },
        )?;
    }
    Ok(())
}

fn write_sweep(text: &mut String, sweep: &[Value]) -> std::fmt::Result {
    writeln!(
        text,
        "\n{:<8}{:>17}  {:>18}  {:>17}",
        "guesses", "speed-up [95 %]", "steps/s x tok/step", "verify + draft ms"
    )?;
    for line in sweep {
        let spec = &line["speculative"];
        writeln!(
            text,
            "{:<8}{:>17}  {:>18}  {:>17}",
            number(&line["draft_tokens"], 0),
            interval(&line["speedup"], 2),
            factors(spec),
            format!("{} + {}", number(&spec["verify_ms"], 2), number(&spec["draft_ms"], 2)),
        )?;
    }
    Ok(())
}

/// Whether the text was the same, and for which classes speculation pays.
fn verdict(report: &Value) -> String {
    let summary = &report["summary"];
    let mut text = String::from("\n");
    match summary["first_divergence"].is_null() {
        true => {
            let pairs = &summary["speculative"]["runs"];
            text += &format!("text: identical with and without speculation in all {pairs} pairs\n");
        }
        false => {
            let at = &summary["first_divergence"];
            text += &format!(
                "text: DIFFERS, first in {} at output token {}: plain {}, speculative {}, logit gap \
                 {}; this is a fault, please report it with the JSON\n",
                word(&at["prompt_id"]),
                at["index"],
                at["baseline_token"],
                at["speculative_token"],
                number(&at["logit_gap"], 6),
            );
        }
    }
    let speedups = classes(summary).map(|(class, row)| (class, &row["speedup"]));
    let Verdict { faster, slower, unclear } = Verdict::of(speedups);
    let list = |names: &[&str]| if names.is_empty() { "-".to_owned() } else { names.join(", ") };
    text += &format!(
        "speculation: faster for {}; slower for {}; no clear difference for {}\n",
        list(&faster),
        list(&slower),
        list(&unclear)
    );
    text += &few_pairs(classes(summary).map(|(class, row)| (class, &row["speculative"]["runs"])));
    if let Some(reason) = report["drafter_switched_off"].as_str() {
        text += &format!("the drafter was switched off: {reason}\n");
    }
    if let Some(acceptance) = report["settings"]["simulated_acceptance"].as_f64() {
        text += &format!(
            "SIMULATED: guesses were made right so as to give {acceptance} tokens a step; speeds are \
             real, acceptance is not\n"
        );
    }
    text
}

/// Steps per second and tokens per step, whose product is the speed.
pub(super) fn factors(row: &Value) -> String {
    format!("{} x {}", number(&row["steps_per_second"], 1), number(&row["tokens_per_step"], 2))
}

/// `median [low high]`, or a dash.
pub(super) fn interval(value: &Value, digits: usize) -> String {
    match value.is_null() {
        true => "-".into(),
        false => format!(
            "{} [{} {}]",
            number(&value["median"], digits),
            number(&value["low"], digits),
            number(&value["high"], digits)
        ),
    }
}

/// A number, or a dash where nothing was measured.
pub(super) fn number(value: &Value, digits: usize) -> String {
    value.as_f64().map_or("-".to_owned(), |value| format!("{value:.digits$}"))
}

/// A text, or a dash.
pub(super) fn word(value: &Value) -> &str {
    value.as_str().unwrap_or("-")
}

/// A value of any kind in words.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn counts_stand_below_their_headings() {
        let row = json!({ "runs": 8, "completion_tokens": 1024 });
        let report = json!({ "summary": { "baseline": row } });
        let text = table(&report);
        let lines: Vec<&str> = text.lines().collect();
        let end = |word: &str, line: &str| line.find(word).map(|at| at + word.len());
        assert_eq!(end("runs", lines[2]), end(" 8", lines[3]), "{text}");
        assert_eq!(end("tokens", lines[2]), end("1024", lines[3]), "{text}");
    }
}
