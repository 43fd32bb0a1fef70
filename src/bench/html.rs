//! The report as one self-contained page: it needs no network, runs no script, and holds the whole
//! JSON for whoever wants to compute with it.

use serde_json::Value;

use super::plots::plots;
use super::table::{factors, interval, number, plain, word};
use super::verdict::{ENOUGH, Verdict, classes, too_few};

/// Nothing that a report says can fetch or run anything: a class or a prompt is named by whoever
/// wrote the prompt file, and pages are passed on.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// The page of a report.
pub fn html(report: &Value) -> String {
    let title = format!("talon bench: {}", escape(word(&report["model"]["name"])));
    let style = include_str!("page.css");
    let (heading, verdict, plots) = (heading(report), verdict(report), plots(report));
    let (figures, reading) = (figures(report), reading(report));
    // No `<` is left, so that no text in the JSON can end the element or hide its end.
    let json = report.to_string().replace('<', "\\u003c");
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n\
         <h1>{title}</h1>\n{heading}{verdict}{plots}{figures}{reading}</main>\n\
         <script type=\"application/json\" id=\"talon-report\">{json}</script>\n</body>\n</html>\n"
    )
}

/// Text as it stands, in an element or a quoted attribute.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            c => escaped.push(c),
        }
    }
    escaped
}

/// What ran, on what, how.
fn heading(report: &Value) -> String {
    let (model, machine, talon) = (&report["model"], &report["box"], &report["talon"]);
    let mut what = format!(
        "{} layers, {}, {} rank(s)",
        number(&model["layers"], 0),
        word(&model["layout"]),
        number(&model["tp"], 0)
    );
    if !model["rank_slice"].is_null() {
        what += &format!(", only rank slice {}", plain(&model["rank_slice"]));
    }
    let memory = machine["memory_mib"].as_f64().map(|mib| format!("{:.1} GiB", mib / 1024.0));
    let cores = format!(
        "{} {}",
        number(&machine["cores"], 0),
        if machine["virtual"] == true { "virtual cores" } else { "cores" }
    );
    let kernel = match machine["kernel"].as_str() {
        Some(kernel) => format!("kernel {kernel}"),
        None => "-".into(),
    };
    let parts = [
        word(&machine["cpu"]),
        &cores,
        memory.as_deref().unwrap_or("-"),
        word(&machine["os"]),
        &kernel,
    ];
    let known: Vec<&str> = parts.into_iter().filter(|part| *part != "-").collect();
    let settings = report["settings"].as_object();
    let settings: Vec<String> = settings
        .into_iter()
        .flatten()
        .filter(|(name, value)| !value.is_null() || *name == "draft")
        .map(|(name, value)| format!("{} {}", name.replace('_', " "), plain(value)))
        .collect();
    let talon = format!("{} (commit {})", word(&talon["version"]), word(&talon["commit"]));
    let facts = [
        ("Model", what),
        ("Box", known.join(", ")),
        ("CUDA driver", word(&machine["cuda_driver"]).to_owned()),
        ("talon", talon),
        ("Settings", settings.join(", ")),
    ];
    let facts = facts.map(|(name, fact)| format!("<dt>{name}</dt><dd>{}</dd>\n", escape(&fact)));
    format!("<dl>\n{}</dl>\n", facts.concat())
}

/// Whether speculation pays here, and whatever a reader must know before believing a figure.
fn verdict(report: &Value) -> String {
    let summary = &report["summary"];
    if summary["speculative"].is_null() {
        let words = "This is plain decoding only: no speculation was measured, so the page says what \
                     this box reaches, not what a drafter would add.";
        return aside("", words);
    }
    let mut text = String::new();
    if let Some(acceptance) = report["settings"]["simulated_acceptance"].as_f64() {
        text += &aside(
            "bad",
            &format!(
                "<strong class=\"bad\">Acceptance was SIMULATED.</strong> Guesses were made right so \
                 as to give {acceptance} tokens a step. Step times are real; the speed-up is what a \
                 drafter of that quality would give, not what one gave."
            ),
        );
    }
    text += &identity(summary);
    let speedups = classes(summary).map(|(class, row)| (class, &row["speedup"]));
    let Verdict { faster, slower, unclear } = Verdict::of(speedups);
    let answer = match (faster.is_empty(), slower.is_empty()) {
        (false, true) if unclear.is_empty() => "Speculation is worth it here, for every class.",
        (false, _) => "Speculation is worth it here for some classes.",
        (true, false) => "Speculation is not worth it here.",
        (true, true) => "Speculation makes no clear difference here.",
    };
    let mut words = format!("<strong>{answer}</strong>");
    for (what, names) in
        [("Faster for", &faster), ("Slower for", &slower), ("No clear difference for", &unclear)]
    {
        if !names.is_empty() {
            words += &format!(" {what} {}.", escape(&names.join(", ")));
        }
    }
    words += &format!(
        " Over all {} pairs the speed-up is {}.",
        number(&summary["speculative"]["runs"], 0),
        interval(&summary["speedup"], 2)
    );
    text += &aside(if faster.is_empty() { "" } else { "good" }, &words);
    let few = too_few(classes(summary).map(|(class, row)| (class, &row["speculative"]["runs"])));
    if !few.is_empty() {
        let words = format!(
            "<strong>Few pairs:</strong> {}. Below {ENOUGH} pairs an interval is narrower than 95 % \
             and a verdict may be chance; measure with a larger --runs or more --prompts.",
            escape(&few.join(", "))
        );
        text += &aside("warn", &words);
    }
    if let Some(reason) = report["drafter_switched_off"].as_str() {
        let words = format!("<strong>The drafter was switched off:</strong> {}", escape(reason));
        text += &aside("warn", &words);
    }
    text
}

/// Whether speculation left the text as it was, which it must.
fn identity(summary: &Value) -> String {
    let at = &summary["first_divergence"];
    if at.is_null() {
        let pairs = number(&summary["speculative"]["runs"], 0);
        let words = format!("Text identical with and without speculation in all {pairs} pairs.");
        return aside("good", &words);
    }
    let token = |value: &Value| match value.is_null() {
        true => "the end".to_owned(),
        false => format!("token {}", number(value, 0)),
    };
    let words = format!(
        "<strong class=\"bad\">The text DIFFERS with speculation, which it must not.</strong> First \
         in class {}, prompt {}, at output token {}: plain gave {}, speculation {}; logit gap {}. \
         Please report this with the JSON inside this page.",
        escape(word(&at["class"])),
        escape(word(&at["prompt_id"])),
        number(&at["index"], 0),
        token(&at["baseline_token"]),
        token(&at["speculative_token"]),
        number(&at["logit_gap"], 6),
    );
    aside("bad", &words)
}

fn aside(kind: &str, words: &str) -> String {
    format!("<div class=\"box {kind}\">{words}</div>\n")
}

/// The tables of the terminal.
fn figures(report: &Value) -> String {
    let summary = &report["summary"];
    let rows: Vec<(&str, &Value)> = classes(summary).chain([("all", summary)]).collect();
    let speed = |row: &Value| interval(&row["output_throughput"], 1);
    let mut text = String::from("<h2>Figures</h2>\n");
    text += &match summary["speculative"].is_null() {
        true => table(
            "classes",
            &[
                "class",
                "runs",
                "tokens",
                "tok/s [95&nbsp;%]",
                "steps/s × tok/step",
                "TTFT ms",
                "step ms p50",
                "step ms p99",
            ],
            rows.iter().map(|(name, row)| {
                let row = &row["baseline"];
                let step = &row["step_ms"];
                vec![
                    (*name).to_owned(),
                    number(&row["runs"], 0),
                    number(&row["completion_tokens"], 0),
                    speed(row),
                    factors(row),
                    number(&row["ttft_ms"]["median"], 1),
                    number(&step["p50"], 2),
                    number(&step["p99"], 2),
                ]
            }),
        ),
        false => table(
            "classes",
            &[
                "class",
                "pairs",
                "plain tok/s [95&nbsp;%]",
                "spec tok/s [95&nbsp;%]",
                "speed-up [95&nbsp;%]",
                "steps/s × tok/step",
                "plain step ms",
                "verify + draft ms",
                "accepted at 1,&nbsp;2,&nbsp;…",
            ],
            rows.iter().map(|(name, row)| {
                let (plain, spec) = (&row["baseline"], &row["speculative"]);
                let rates = spec["per_position_acceptance_rates"].as_array();
                let rates: Vec<String> =
                    rates.into_iter().flatten().map(|rate| number(rate, 2)).collect();
                let no_guess = || "no guess made".to_owned();
                vec![
                    (*name).to_owned(),
                    number(&spec["runs"], 0),
                    speed(plain),
                    speed(spec),
                    interval(&row["speedup"], 2),
                    factors(spec),
                    number(&plain["step_ms"]["p50"], 2),
                    costs(spec),
                    if rates.is_empty() { no_guess() } else { rates.join(" ") },
                ]
            }),
        ),
    };
    let sweep = report["sweep"].as_array().filter(|sweep| !sweep.is_empty());
    if let Some(sweep) = sweep {
        text += "<h2>Chain lengths</h2>\n";
        let rows = sweep.iter().map(|line| {
            let spec = &line["speculative"];
            let guesses = number(&line["draft_tokens"], 0);
            vec![guesses, interval(&line["speedup"], 2), factors(spec), costs(spec)]
        });
        let columns =
            ["guesses", "speed-up [95&nbsp;%]", "steps/s × tok/step", "verify + draft ms"];
        text += &table("", &columns, rows);
    }
    text
}

/// Milliseconds of a round for verifying and for guessing.
fn costs(spec: &Value) -> String {
    format!("{} + {}", number(&spec["verify_ms"], 2), number(&spec["draft_ms"], 2))
}

fn table(style: &str, columns: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let head: String = columns.iter().map(|column| format!("<th>{column}</th>")).collect();
    let row = |cells: Vec<String>| {
        let cells = cells.iter().map(|cell| format!("<td>{}</td>", escape(cell)));
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    };
    let body: String = rows.map(row).collect();
    format!(
        "<div class=\"scroll\"><table class=\"{style}\">\n<tr>{head}</tr>\n{body}</table></div>\n"
    )
}

/// How the figures hang together, with the numbers of this run.
fn reading(report: &Value) -> String {
    let summary = &report["summary"];
    let spec = &summary["speculative"];
    let mut text = String::from(
        "<h2>How to read this</h2>\n<p>tok/s counts the tokens after the first over the time after \
         the first, so a long prompt does not make a model look slow; it is always steps per second × \
         tokens per step. [low high] is the 95 % interval of a median.</p>\n",
    );
    if !spec.is_null() {
        text += "<p>The two runs of a pair have the same prompt and follow each other at once. A class \
                 counts as faster or slower only if the whole interval of its speed-up is above or \
                 below 1.</p>\n<p class=\"formula\">speed-up = tokens per step × plain step ÷ (verify \
                 step + draft)</p>\n";
        text += &formula(summary).unwrap_or_default();
    }
    text + "<p>The whole report, with every run, is inside this page as JSON: the element \
            <code>talon-report</code> at its end.</p>\n"
}

/// The formula with the numbers of all runs together. Mean step times, because means multiply to the
/// exact ratio and medians do not.
fn formula(summary: &Value) -> Option<String> {
    let (plain, spec) = (&summary["baseline"], &summary["speculative"]);
    let tokens = spec["tokens_per_step"].as_f64()?;
    let step = 1e3 / plain["steps_per_second"].as_f64().filter(|rate| *rate > 0.0)?;
    let (verify, draft) = (spec["verify_ms"].as_f64()?, spec["draft_ms"].as_f64()?);
    let round = verify + draft;
    Some(format!(
        "<p>Here, over all runs together and with mean times (the plain step is 1000 ÷ {:.1} steps/s):\
         </p>\n<p class=\"formula\">{tokens:.2} × {step:.2} ms ÷ ({verify:.2} ms + {draft:.2} ms) = \
         {:.2}</p>\n<p>The {} of the verdict is a median over pairs, so the two differ a little. A \
         round with guesses costs {:.2} plain steps here: it pays from {:.2} tokens per step on, and \
         this drafter reached {tokens:.2}.</p>\n",
        1e3 / step,
        tokens * step / round,
        number(&summary["speedup"]["median"], 2),
        round / step,
        round / step,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_text_can_end_neither_an_element_nor_an_attribute() {
        assert_eq!(escape("<&>\"'a"), "&lt;&amp;&gt;&quot;&#39;a");
    }
}
