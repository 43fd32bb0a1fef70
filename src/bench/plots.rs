//! The figures of the page: what of a report each plot shows. A plot whose numbers were not measured
//! is left out.

use serde_json::Value;

use super::html::escape;
use super::statistics::Interval;
use super::svg::{Group, Slots, bars};
use super::table::number;
use super::verdict::classes;

/// Styles of the classes' lines; from the seventh class on they come again, dashed.
const STYLES: [&str; 6] = ["c0", "c1", "c2", "c3", "c4", "c5"];

/// All figures that a report has numbers for.
pub(super) fn plots(report: &Value) -> String {
    let figures = [speed(report), acceptance(report), step_cost(report), sweep(report)];
    let figures: String = figures.into_iter().flatten().collect();
    format!("<div class=\"plots\">\n{figures}</div>\n")
}

/// A `{median, low, high}` of the report.
fn interval(value: &Value) -> Option<Interval> {
    let part = |name: &str| value[name].as_f64();
    Some(Interval { median: part("median")?, low: part("low")?, high: part("high")? })
}

/// Tokens per second of every class, plain and speculative.
fn speed(report: &Value) -> Option<String> {
    let summary = &report["summary"];
    let mut groups = Vec::new();
    for (name, row) in classes(summary).chain([("all", summary)]) {
        let bar = |mode: &str, style| Some((style, interval(&row[mode]["output_throughput"])?));
        let bars: Vec<_> = [bar("baseline", "plain"), bar("speculative", "spec")].into();
        groups.push(Group { name, bars: bars.into_iter().flatten().collect() });
    }
    groups.retain(|group| !group.bars.is_empty());
    if groups.is_empty() {
        return None;
    }
    let mut legend = swatch("plain", "plain");
    if !summary["speculative"].is_null() {
        legend += &swatch("spec", "speculative");
    }
    let title = "Speed by class";
    let note = "Median over the runs of a class; the whisker is its 95 % interval.";
    Some(figure(title, &legend, &bars(title, "tokens per second", &groups), note))
}

/// Share of accepted guesses at each place of a chain.
fn acceptance(report: &Value) -> Option<String> {
    let summary = &report["summary"];
    let rates = |row: &Value| -> Vec<f64> {
        let rates = row["speculative"]["per_position_acceptance_rates"].as_array();
        rates.into_iter().flatten().map_while(Value::as_f64).collect()
    };
    let all = rates(summary);
    if all.is_empty() {
        return None;
    }
    let labels: Vec<(String, String)> =
        (1..=all.len()).map(|position| (position.to_string(), String::new())).collect();
    let title = "Acceptance by position";
    let mut plot = Slots::new(title, ("position in the chain", "share accepted"), &labels, 1.0);
    let mut legend = String::new();
    for (index, (name, row)) in classes(summary).enumerate() {
        let dashed = if index < STYLES.len() { "" } else { " dashed" };
        let style = format!("{}{dashed}", STYLES[index % STYLES.len()]);
        plot.line(&style, &rates(row));
        legend += &line_swatch(&style, name);
    }
    plot.line("all", &all);
    legend += &line_swatch("all", "all");
    let note = "Of the rounds that had a guess at this position, the share in which it and all \
                before it were right.";
    Some(figure(title, &legend, &plot.finish(), note))
}

/// What a step costs by its rows: a chain of k guesses is verified in k + 1 rows.
fn step_cost(report: &Value) -> Option<String> {
    let measured: Vec<(&Value, f64)> = report["step_ms_by_rows"]
        .as_array()?
        .iter()
        .filter_map(|row| Some((row, row["p50"].as_f64()?)))
        .collect();
    // One row only is the plain step, which the table has.
    if measured.len() < 2 {
        return None;
    }
    let label = |(row, _): &(&Value, f64)| {
        (number(&row["rows"], 0), format!("n={}", number(&row["steps"], 0)))
    };
    let labels: Vec<(String, String)> = measured.iter().map(label).collect();
    let plain = report["summary"]["baseline"]["step_ms"]["p50"].as_f64();
    let highest = measured.iter().map(|(_, p50)| *p50).chain(plain).fold(0.0, f64::max);
    let title = "Step cost by rows";
    let titles = ("rows of the step (n: steps measured)", "ms, median");
    let mut plot = Slots::new(title, titles, &labels, highest);
    for (slot, (_, p50)) in measured.iter().enumerate() {
        plot.column(slot, "spec", *p50);
    }
    let mut legend = swatch("spec", "step of that many rows");
    if let Some(plain) = plain {
        plot.level(plain);
        legend += &level_swatch(&format!("plain step, {plain:.2} ms"));
    }
    let note = "A chain of k guesses is verified in one step of k + 1 rows. The flatter this is, the \
                more guesses pay.";
    Some(figure(title, &legend, &plot.finish(), note))
}

/// Speed-up by the length of the chain.
fn sweep(report: &Value) -> Option<String> {
    let lines: Vec<(String, Interval)> = report["sweep"]
        .as_array()?
        .iter()
        .filter_map(|line| Some((number(&line["draft_tokens"], 0), interval(&line["speedup"])?)))
        .collect();
    if lines.is_empty() {
        return None;
    }
    let labels: Vec<(String, String)> =
        lines.iter().map(|(guesses, _)| (guesses.clone(), String::new())).collect();
    let highest = lines.iter().map(|(_, speedup)| speedup.high).fold(1.0, f64::max);
    let title = "Speed-up by chain length";
    let mut plot = Slots::new(title, ("guesses in a chain", "times plain"), &labels, highest);
    plot.level(1.0);
    for (slot, (_, speedup)) in lines.iter().enumerate() {
        plot.point(slot, "spec", speedup);
    }
    let legend = swatch("spec", "speed-up") + &level_swatch("1.0, as fast as plain");
    let note = "Over one prompt of each class, so the 95 % intervals are wide.";
    Some(figure(title, &legend, &plot.finish(), note))
}

fn figure(title: &str, legend: &str, plot: &str, note: &str) -> String {
    format!(
        "<figure><h2>{title}</h2><ul class=\"legend\">{legend}</ul>\n{plot}\
         <figcaption>{note}</figcaption></figure>\n"
    )
}

/// An entry of a legend, with `mark` drawn beside it.
fn entry(mark: &str, words: &str) -> String {
    let words = escape(words);
    format!("<li><svg viewBox=\"0 0 22 10\" aria-hidden=\"true\">{mark}</svg>{words}</li>")
}

fn swatch(style: &str, words: &str) -> String {
    entry(&format!("<rect class=\"fill {style}\" width=\"22\" height=\"10\"/>"), words)
}

fn line_swatch(style: &str, words: &str) -> String {
    entry(&format!("<path class=\"line {style}\" d=\"M0 5H22\"/>"), words)
}

fn level_swatch(words: &str) -> String {
    entry("<path class=\"level\" d=\"M0 5H22\"/>", words)
}
