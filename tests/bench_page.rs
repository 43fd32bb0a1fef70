//! Promise: `bench --html` writes one page that says what the report says, whatever is in it, and
//! that fetches and runs nothing.

mod common;

use common::{assert_one_line, read_json, talon};
use serde_json::{Value, json};
use talon::bench::html;

const HOSTILE: &str = "<img src=x onerror=alert(1)>";

fn interval(median: f64) -> Value {
    json!({ "median": median, "low": median * 0.9, "high": median * 1.05 })
}

fn row(speedup: f64) -> Value {
    json!({
        "baseline": {
            "runs": 2, "completion_tokens": 64, "output_throughput": interval(100.0),
            "steps_per_second": 100.0, "tokens_per_step": 1.0, "ttft_ms": interval(30.0),
            "step_ms": { "p50": 9.5, "p99": 12.0 },
        },
        "speculative": {
            "runs": 2, "completion_tokens": 64, "output_throughput": interval(100.0 * speedup),
            "steps_per_second": 50.0, "tokens_per_step": 2.5, "ttft_ms": interval(31.0),
            "step_ms": { "p50": 20.0, "p99": 25.0 }, "rounds": 25, "acceptance_length": 2.5,
            "per_position_acceptance_rates": [0.9, 0.6], "draft_ms": 4.0, "verify_ms": 16.0,
        },
        "speedup": interval(speedup),
    })
}

fn sample() -> Value {
    let mut summary = row(1.25);
    summary["by_class"] = json!({ "code": row(1.25), HOSTILE: row(0.8), "<!--<script>": row(1.0) });
    summary["identical"] = true.into();
    json!({
        "schema": 1,
        "talon": { "version": "0.1.0", "commit": "abc" },
        "box": { "cpu": "A & B", "cores": 2, "memory_mib": 2048, "cuda_driver": null },
        "model": { "name": "</script><b>", "layout": "nvfp4", "layers": 8, "tp": 1 },
        "settings": { "draft": "mtp", "draft_tokens": "2", "max_tokens": 32 },
        "runs": [{ "mode": "baseline", "class": HOSTILE, "prompt_id": "</SCRIPT >" }],
        "summary": summary,
        "step_ms_by_rows": [
            { "rows": 1, "steps": 10, "p50": 9.5 }, { "rows": 3, "steps": 10, "p50": 16.0 },
        ],
        "sweep": [{ "draft_tokens": 2, "speculative": row(1.25)["speculative"],
                    "speedup": interval(1.25) }],
        "drafter_switched_off": null,
    })
}

/// What a browser finds between the tags of the JSON: it ends at the first `</script`.
fn embedded(page: &str) -> &str {
    let (_, json) =
        page.split_once("<script type=\"application/json\" id=\"talon-report\">").unwrap();
    let end = json.to_lowercase().find("</script").unwrap();
    &json[..end]
}

/// The page without the JSON and the style sheet.
fn visible(page: &str) -> String {
    let (style, end) = (page.find("<style>").unwrap(), page.find("</style>").unwrap());
    format!("{}{}", &page[..style], &page[end..]).replace(embedded(page), "")
}

#[test]
fn the_page_holds_the_whole_report() {
    let report = sample();
    let page = html(&report);
    let json = embedded(&page);
    // serde_json may read a number one bit off, so both sides are read once.
    let parse = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    assert_eq!(parse(json), parse(&report.to_string()));
    // A comment that opens and a script tag in it would hide the real end of the element.
    assert!(!json.contains('<'), "{json}");
    assert!(page.ends_with("</script>\n</body>\n</html>\n"));
}

#[test]
fn what_a_report_says_is_text_and_never_markup() {
    let mut report = sample();
    report["settings"]["draft"] = HOSTILE.into();
    report["box"]["os"] = HOSTILE.into();
    report["talon"]["commit"] = HOSTILE.into();
    report["drafter_switched_off"] = HOSTILE.into();
    report["summary"]["first_divergence"] =
        json!({ "class": HOSTILE, "prompt_id": HOSTILE, "index": 3, "baseline_token": 7 });
    let page = visible(&html(&report));
    for markup in ["<img", "<b>", "<!--", "</script><", "onerror=alert(1)>"] {
        assert!(!page.contains(markup), "{markup} in {page}");
    }
    // Class: verdict, few pairs, divergence, legend, table; it is cut in the plot.
    assert_eq!(page.matches("&lt;img src=x onerror=alert(1)&gt;").count(), 10, "{page}");
    assert!(page.contains("A &amp; B") && page.contains("&lt;/script&gt;&lt;b&gt;"));
}

#[test]
fn nothing_is_fetched_and_nothing_runs() {
    let page = html(&sample());
    for word in ["http:", "https:", "url(", "@import", " src=\"", " href=\"", "<script>"] {
        assert!(!visible(&page).contains(word), "{word}");
        assert!(!include_str!("../src/bench/page.css").contains(word), "{word}");
    }
    assert!(page.contains("default-src 'none'"));
}

#[test]
fn the_verdict_names_who_gains_and_who_loses() {
    let page = html(&sample());
    assert!(
        page.contains(
            "worth it here for some classes.</strong> Faster for code. Slower for &lt;img"
        )
    );
    assert!(page.contains("No clear difference for &lt;!--&lt;script&gt;."));
    assert!(page.contains("Text identical with and without speculation in all 2 pairs."));
    assert!(!page.contains("SIMULATED") && !page.contains("DIFFERS"));
    // 2.5 tokens x 10 ms over 20 ms
    assert!(page.contains("2.50 × 10.00 ms ÷ (16.00 ms + 4.00 ms) = 1.25"), "{page}");
    assert!(page.contains("from 2.00 tokens per step on"), "{page}");
    for (class, answer) in [(0.8, "not worth it here."), (1.0, "no clear difference here.")] {
        let mut report = sample();
        report["summary"]["by_class"] = json!({ "code": row(class) });
        assert!(html(&report).contains(answer), "{class}");
    }
}

#[test]
fn what_must_not_be_overlooked_is_loud() {
    let mut report = sample();
    report["settings"]["simulated_acceptance"] = 2.5.into();
    report["drafter_switched_off"] = "no guess was right".into();
    report["summary"]["first_divergence"] = json!({
        "class": "code", "prompt_id": "code-1", "index": 12, "baseline_token": 5,
        "speculative_token": null, "logit_gap": 0.25,
    });
    let page = html(&report);
    assert!(page.contains("SIMULATED") && page.contains("to give 2.5 tokens a step"));
    assert!(page.contains("switched off:</strong> no guess was right"));
    assert!(page.contains("The text DIFFERS"), "{page}");
    assert!(page.contains("Few pairs:</strong> code, &lt;img"), "{page}");
    assert!(
        page.contains("prompt code-1, at output token 12: plain gave token 5, speculation the end")
    );
    assert!(!page.contains("Text identical"));
}

#[test]
fn plots_are_made_of_what_was_measured() {
    let titles = |report: &Value| -> Vec<bool> {
        let page = html(report);
        ["Speed by class", "Acceptance by position", "Step cost by rows", "Speed-up by chain"]
            .map(|title| page.contains(&format!("<figure><h2>{title}")))
            .into()
    };
    let mut report = sample();
    assert_eq!(titles(&report), [true; 4]);
    report["sweep"] = json!([]);
    assert_eq!(titles(&report), [true, true, true, false]);
    let classes = report["summary"]["by_class"].as_object_mut().unwrap();
    classes.values_mut().for_each(|class| class["speculative"] = Value::Null);
    report["summary"]["speculative"] = Value::Null;
    report["summary"]["speedup"] = Value::Null;
    report["step_ms_by_rows"].as_array_mut().unwrap().truncate(1);
    assert_eq!(titles(&report), [true, false, false, false]);
    let page = html(&report);
    assert!(page.contains("plain decoding only") && page.contains("TTFT ms"), "{page}");
    assert!(!page.contains("speculative</li>"), "{page}");
}

#[test]
fn what_was_not_measured_is_a_dash() {
    let mut hollow = sample();
    let mut pending = vec![&mut hollow];
    while let Some(value) = pending.pop() {
        match value {
            Value::Object(map) => pending.extend(map.values_mut()),
            Value::Array(items) => pending.extend(items),
            leaf => *leaf = Value::Null,
        }
    }
    for report in [hollow, json!({}), json!([1]), json!({ "summary": { "by_class": { "a": {} } } })]
    {
        let page = visible(&html(&report));
        for word in ["NaN", "null", "inf", "None"] {
            assert!(!page.contains(word), "{word} in {page}");
        }
    }
}

#[test]
fn bench_writes_the_page_beside_the_table() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (page, json) = (path("r.html"), path("r.json"));
    let small = ["bench", "--runs", "1", "--max-tokens", "4", "--draft", "mtp"];
    let outcome = talon(&[&small[..], &["--html", &page, "--json", &json]].concat());
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(outcome.stdout.contains("text: identical"), "{outcome:?}");
    let page = std::fs::read_to_string(page).unwrap();
    let report: Value = serde_json::from_str(embedded(&page)).unwrap();
    assert_eq!(report, read_json(json.as_ref()));
    assert!(page.contains("talon bench: demo"));
    // On stdout the page takes the place of the table.
    let outcome = talon(&[&small[..], &["--html", "-"]].concat());
    assert!(outcome.stdout.starts_with("<!doctype html>"), "{outcome:?}");
    assert!(outcome.stdout.ends_with("</html>\n"), "{outcome:?}");
}

#[test]
fn a_bad_target_fails_before_the_run() {
    for (args, words) in [
        (&["bench", "--html", "/dev/null/x.html"][..], &["/dev/null/x.html"][..]),
        (&["bench", "--json", "-", "--html", "-"], &["--json -", "--html -", "two targets"]),
        (&["bench", "--json", "x", "--html", "x"], &["--json x", "--html x", "two targets"]),
    ] {
        assert_one_line(&talon(args), words);
    }
}
