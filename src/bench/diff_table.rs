//! The comparison of two reports as a table for people.

use std::fmt::Write;

use serde_json::Value;

use super::table::{interval, number, plain, word};
use super::verdict::{Verdict, classes, few_pairs};

/// Settings without which the speculative speeds of two boxes are not those of one method.
const LOUD: [&str; 2] = ["settings.draft", "settings.draft_tokens"];

/// The table of a comparison that [`super::diff`] made.
pub fn diff_table(comparison: &Value) -> String {
    let mut text = String::new();
    for (letter, side) in [("A", &comparison["a"]), ("B", &comparison["b"])] {
        let (talon, model) = (&side["talon"], &side["model"]);
        text += &format!(
            "{letter}  {}: talon {} (commit {}), {}, {} layers, {}, {} rank(s)\n",
            word(&side["file"]),
            word(&talon["version"]),
            word(&talon["commit"]),
            word(&model["name"]),
            plain(&model["layers"]),
            word(&model["layout"]),
            plain(&model["tp"]),
        );
    }
    text += &differences(comparison);
    let summary = &comparison["summary"];
    let rows: Vec<(&str, &Value)> = classes(summary).chain([("all", summary)]).collect();
    // Writing to a String cannot fail.
    let _ = write_rows(&mut text, &rows);
    text += "\nB/A is the median over prompts, each against itself, with its 95 % interval; a box that \
             was busier during one report than the other is not in it\n";
    for (mode, name) in [("baseline", "plain"), ("speculative", "speculative")] {
        if summary[mode]["ratio"].is_null() {
            text += &format!("{name}: not in both reports, so not compared\n");
            continue;
        }
        let ratios = classes(summary).map(|(class, row)| (class, &row[mode]["ratio"]));
        let Verdict { faster, slower, unclear } = Verdict::of(ratios);
        let list = |names: &[&str]| match names.is_empty() {
            true => "-".to_owned(),
            false => names.join(", "),
        };
        text += &format!(
            "{name}: B is faster for {}; slower for {}; no clear difference for {}\n",
            list(&faster),
            list(&slower),
            list(&unclear)
        );
    }
    text += &few_pairs(classes(summary).map(|(class, row)| (class, &row["baseline"]["pairs"])));
    let lengths_differ =
        ["baseline", "speculative"].map(|mode| summary[mode]["lengths_differ"].as_u64());
    let lengths_differ: u64 = lengths_differ.into_iter().flatten().sum();
    if lengths_differ > 0 {
        text += &format!(
            "NOTE: {lengths_differ} runs gave more tokens in one report than in the other, so A and B \
             do not write the same text\n"
        );
    }
    // A report comes from another box: its texts must not steer this terminal.
    text.replace(|c: char| c.is_control() && c != '\n', " ")
}

/// What differs in box, build and settings.
fn differences(comparison: &Value) -> String {
    let found = comparison["differences"].as_array().map_or(&[][..], Vec::as_slice);
    if found.is_empty() {
        return "same box, build and settings\n".to_owned();
    }
    let (mut text, mut loud) = (String::from("differs:\n"), String::new());
    for difference in found {
        let field = word(&difference["field"]);
        let line =
            format!("{field}: {} in A, {} in B", plain(&difference["a"]), plain(&difference["b"]));
        match LOUD.contains(&field) {
            true => loud += &format!("ANOTHER WAY OF GUESSING: {line}\n"),
            false => text += &format!("  {line}\n"),
        }
    }
    if !loud.is_empty() {
        loud += "so speculative B/A compares the ways of guessing too, not only box and build\n";
    }
    match text.lines().count() {
        1 => loud,
        _ => text + &loud,
    }
}

fn write_rows(text: &mut String, rows: &[(&str, &Value)]) -> std::fmt::Result {
    writeln!(
        text,
        "\n{:<8}{:>6}  {:>15}  {:>17}  {:>15}  {:>17}  {:>13}  {:>13}  {:>15}",
        "class",
        "pairs",
        "plain tok/s A B",
        "B/A [95 %]",
        "spec tok/s A B",
        "B/A [95 %]",
        "speed-up A B",
        "tok/step A B",
        "plain ms A B"
    )?;
    for (name, row) in rows {
        let (plain, spec) = (&row["baseline"], &row["speculative"]);
        let speeds = |mode: &Value| both(&mode["a"]["median"], &mode["b"]["median"], 1);
        let speedup = &row["speedup"];
        let (accepted, step) = (&row["acceptance_length"], &row["step_ms_p50"]);
        writeln!(
            text,
            "{name:<8}{:>6}  {:>15}  {:>17}  {:>15}  {:>17}  {:>13}  {:>13}  {:>15}",
            number(&plain["pairs"], 0),
            speeds(plain),
            interval(&plain["ratio"], 2),
            speeds(spec),
            interval(&spec["ratio"], 2),
            both(&speedup["a"]["median"], &speedup["b"]["median"], 2),
            both(&accepted["a"], &accepted["b"], 2),
            both(&step["a"], &step["b"], 2),
        )?;
    }
    Ok(())
}

fn both(a: &Value, b: &Value, digits: usize) -> String {
    format!("{} {}", number(a, digits), number(b, digits))
}
