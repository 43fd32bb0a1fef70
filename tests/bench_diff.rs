//! Promise: `bench --diff` compares what was measured alike and refuses the rest, naming the field
//! and both values.

mod common;

use common::{Outcome, assert_one_line, talon};
use serde_json::{Value, json};
use tempfile::TempDir;

const PROMPTS: [(&str, usize); 3] = [("code", 0), ("code", 1), ("prose", 0)];

/// A report whose plain speeds are `speed` times 100, 200 and 400 tokens a second; speculation is
/// one and a half times as fast.
fn report(speed: f64) -> Value {
    let interval = |median: f64| json!({ "median": median, "low": median, "high": median });
    let row = |median: f64| {
        json!({
            "baseline": {
                "output_throughput": interval(median * speed), "step_ms": { "p50": 5.0 / speed },
            },
            "speculative": {
                "output_throughput": interval(1.5 * median * speed), "acceptance_length": 2.25,
            },
            "speedup": interval(1.5),
        })
    };
    let mut summary = row(200.0);
    summary["by_class"] = json!({ "code": row(150.0), "prose": row(400.0) });
    let run = |mode: &str, (class, id): (&str, usize), throughput: f64| {
        json!({
            "mode": mode, "class": class, "prompt_id": format!("{class}-{id}"), "prompt_tokens": 7,
            "completion_tokens": 32, "output_throughput": throughput * speed,
        })
    };
    let speeds = [100.0, 200.0, 400.0];
    let runs: Vec<Value> = PROMPTS
        .into_iter()
        .zip(speeds)
        .flat_map(|(prompt, speed)| {
            [run("baseline", prompt, speed), run("speculative", prompt, 1.5 * speed)]
        })
        .collect();
    json!({
        "schema": 1,
        "talon": { "version": "0.1.0", "commit": "aaa" },
        "box": { "cpu": "EPYC", "cores": 2, "cuda_driver": null },
        "model": { "name": "demo", "layout": "nvfp4", "layers": 8, "tp": 1, "rank_slice": null },
        "settings": {
            "backend": "cpu", "draft": "mtp", "draft_tokens": "3", "simulated_acceptance": null,
            "max_tokens": 32, "ignore_eos": false,
        },
        "runs": runs,
        "summary": summary,
    })
}

/// Writes A.json and B.json and runs `bench --diff` on them.
fn diff(a: &Value, b: &Value, more: &[&str]) -> Outcome {
    let directory = tempfile::tempdir().unwrap();
    let (a, b) = (write(&directory, "A.json", a), write(&directory, "B.json", b));
    talon(&[&["bench", "--diff", &a, &b], more].concat())
}

fn write(directory: &TempDir, name: &str, report: &Value) -> String {
    let path = directory.path().join(name);
    std::fs::write(&path, report.to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

/// The line of the table that starts with `name`, in words.
fn line(outcome: &Outcome, name: &str) -> Vec<String> {
    let mut lines = outcome.stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let line = lines.find(|words| words.first() == Some(&name));
    line.unwrap_or_else(|| panic!("no {name} in {outcome:?}"))
        .into_iter()
        .map(String::from)
        .collect()
}

#[test]
fn speeds_stand_side_by_side_with_their_ratio() {
    let outcome = diff(&report(1.0), &report(2.0), &[]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
    assert_eq!(
        line(&outcome, "code").join(" "),
        "code 2 150.0 300.0 2.00 [2.00 2.00] 225.0 450.0 2.00 [2.00 2.00] 1.50 1.50 2.25 2.25 5.00 2.50"
    );
    assert_eq!(line(&outcome, "all")[..4], ["all", "3", "200.0", "400.0"]);
    for mode in ["plain", "speculative"] {
        let verdict = format!("{mode}: B is faster for code, prose; slower for -; no clear");
        assert!(outcome.stdout.contains(&verdict), "{outcome:?}");
    }
    assert!(outcome.stdout.contains("same box, build and settings"), "{outcome:?}");
    assert!(outcome.stdout.contains("NOTE: few pairs for code, prose; below 6"), "{outcome:?}");
}

#[test]
fn a_ratio_is_that_of_each_prompt_with_itself() {
    let mut b = report(1.0);
    // The order of B does not matter; each prompt has a ratio of its own: 1, 3 and 1/2.
    b["runs"].as_array_mut().unwrap().reverse();
    for run in b["runs"].as_array_mut().unwrap() {
        let factor = match run["prompt_id"].as_str().unwrap() {
            "code-0" => 1.0,
            "code-1" => 3.0,
            _ => 0.5,
        };
        run["output_throughput"] = json!(run["output_throughput"].as_f64().unwrap() * factor);
    }
    let compared = diff(&report(1.0), &b, &["--json", "-"]).json();
    let ratio = |row: &Value, mode: &str| {
        let ratio = &row[mode]["ratio"];
        ["median", "low", "high"].map(|part| ratio[part].as_f64().unwrap())
    };
    let summary = &compared["summary"];
    for mode in ["baseline", "speculative"] {
        assert_eq!(ratio(summary, mode), [1.0, 0.5, 3.0], "{mode}");
        assert_eq!(ratio(&summary["by_class"]["code"], mode), [2.0, 1.0, 3.0], "{mode}");
        assert_eq!(ratio(&summary["by_class"]["prose"], mode), [0.5; 3], "{mode}");
    }
    let outcome = diff(&report(1.0), &b, &[]);
    let verdict = "plain: B is faster for -; slower for prose; no clear difference for code";
    assert!(outcome.stdout.contains(verdict), "{outcome:?}");
}

#[test]
fn box_and_build_are_listed_and_another_drafter_is_said_loudly() {
    let mut b = report(1.0);
    b["box"]["cpu"] = "Xeon \u{1b}[31m".into();
    b["talon"]["commit"] = "bbb".into();
    b["model"]["name"] = "demo".into();
    let outcome = diff(&report(1.0), &b, &[]);
    assert!(outcome.stdout.contains("  talon.commit: aaa in A, bbb in B\n"), "{outcome:?}");
    assert!(outcome.stdout.contains("  box.cpu: EPYC in A, Xeon  [31m in B\n"), "{outcome:?}");
    assert!(!outcome.stdout.contains("ANOTHER") && !outcome.stdout.contains("same box"));
    b["settings"]["draft"] = "eagle3".into();
    b["settings"]["draft_tokens"] = "auto".into();
    let outcome = diff(&report(1.0), &b, &[]);
    for words in
        ["settings.draft: mtp in A, eagle3 in B", "settings.draft_tokens: 3 in A, auto in B"]
    {
        assert!(
            outcome.stdout.contains(&format!("ANOTHER WAY OF GUESSING: {words}")),
            "{outcome:?}"
        );
    }
    let compared = diff(&report(1.0), &b, &["--json", "-"]).json();
    let fields: Vec<&str> = compared["differences"]
        .as_array()
        .unwrap()
        .iter()
        .map(|difference| difference["field"].as_str().unwrap())
        .collect();
    assert_eq!(fields, ["talon.commit", "box.cpu", "settings.draft", "settings.draft_tokens"]);
    assert_eq!(compared["b"]["box"]["cores"], 2);
}

#[test]
fn one_model_may_lie_in_two_directories() {
    let (mut a, mut b) = (report(1.0), report(1.0));
    a["model"]["name"] = "./GLM-5.2-NVFP4".into();
    b["model"]["name"] = "/data/GLM-5.2-NVFP4/".into();
    assert_eq!(diff(&a, &b, &[]).code, Some(0));
    b["model"]["name"] = "/data/GLM-5.1-NVFP4".into();
    let words = ["model.name is ./GLM-5.2-NVFP4 in ", " and /data/GLM-5.1-NVFP4 in "];
    assert_one_line(&diff(&a, &b, &[]), &words);
}

#[test]
fn what_was_not_measured_alike_is_refused() {
    for (part, field, value, was, is) in [
        ("model", "layout", json!("bf16"), "nvfp4", "bf16"),
        ("model", "layers", json!(4), "8", "4"),
        ("model", "tp", json!(2), "1", "2"),
        ("model", "rank_slice", json!("0/8"), "none", "0/8"),
        ("settings", "max_tokens", json!(64), "32", "64"),
        ("settings", "ignore_eos", json!(true), "no", "yes"),
        ("settings", "simulated_acceptance", json!(2.5), "none", "2.5"),
    ] {
        let mut b = report(1.0);
        b[part][field] = value;
        let words = [format!("{part}.{field} is {was} in "), format!("A.json and {is} in ")];
        let words = [words[0].as_str(), words[1].as_str(), "B.json"];
        assert_one_line(&diff(&report(1.0), &b, &["--json", "-"]), &words);
    }
    let mut b = report(1.0);
    b["schema"] = 2.into();
    assert_one_line(&diff(&report(1.0), &b, &[]), &["schema is 1 in ", "A.json and 2 in "]);
    assert_one_line(&diff(&b, &b, &[]), &["A.json: schema 2: expected 1"]);
}

#[test]
fn other_prompts_are_refused() {
    // prose-0 has two runs, at the end; they are the last of the list.
    let mut fewer = report(1.0);
    fewer["runs"].as_array_mut().unwrap().truncate(4);
    let words = ["prompt prose-0 of class prose is 7 tokens long in ", "A.json and absent in "];
    assert_one_line(&diff(&report(1.0), &fewer, &[]), &words);
    let words = ["prompt prose-0 of class prose is absent in ", "A.json and 7 tokens long in "];
    assert_one_line(&diff(&fewer, &report(1.0), &[]), &words);
    let mut longer = report(1.0);
    longer["runs"][0]["prompt_tokens"] = 9.into();
    let words = ["prompt code-0 of class code is 7 tokens long in ", "and 9 tokens long in "];
    assert_one_line(&diff(&report(1.0), &longer, &[]), &words);
    let mut twice = report(1.0);
    let again = twice["runs"][0].clone();
    twice["runs"].as_array_mut().unwrap().push(again);
    let words = ["number of prompts is 3 in ", "A.json and 4 in "];
    assert_one_line(&diff(&report(1.0), &twice, &[]), &words);
}

#[test]
fn plain_reports_and_texts_of_other_lengths_are_said() {
    let mut b = report(2.0);
    let runs = b["runs"].as_array_mut().unwrap();
    runs.retain(|run| run["mode"] == "baseline");
    runs[0]["completion_tokens"] = 31.into();
    runs[1]["output_throughput"] = Value::Null;
    b["summary"]["speculative"] = Value::Null;
    b["summary"]["speedup"] = Value::Null;
    let outcome = diff(&report(1.0), &b, &[]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(outcome.stdout.contains("speculative: not in both reports"), "{outcome:?}");
    assert!(outcome.stdout.contains("NOTE: 1 runs gave more tokens"), "{outcome:?}");
    let words = line(&outcome, "all");
    assert_eq!(
        words[4..],
        ["2.00", "[2.00", "2.00]", "300.0", "-", "-", "1.50", "-", "2.25", "-", "5.00", "2.50"]
    );
}

#[test]
fn bad_usage_is_told_in_one_line() {
    let directory = tempfile::tempdir().unwrap();
    let a = write(&directory, "A.json", &report(1.0));
    let other = write(&directory, "other.json", &json!({ "ok": true }));
    let text = directory.path().join("text.json");
    std::fs::write(&text, "class runs\n").unwrap();
    let text = text.to_str().unwrap();
    for (args, words) in [
        (&["bench", "--diff", &a][..], &["A.json", "expected a second report"][..]),
        (&["bench", &a], &["A.json", "--diff"]),
        (&["bench", "--diff", &a, &a, &a], &["A.json"]),
        (&["bench", "--diff", &a, "/dev/null/none.json"], &["/dev/null/none.json", "cannot read"]),
        (&["bench", "--diff", "/dev/null/none.json", &a], &["/dev/null/none.json", "cannot read"]),
        (&["bench", "--diff", &a, &other], &["other.json", "not a talon report", "--json"]),
        (&["bench", "--diff", text, &a], &["text.json", "not a talon report", "--json"]),
        (&["bench", "--diff", &a, &a, "--html", "x.html"], &["--html x.html", "no page"]),
        (&["bench", "--diff", &a, &a, "--json", "/dev/null/x"], &["/dev/null/x"]),
        (
            &["bench", "--diff", &a, &a, "--tp", "2", "--sweep", "--runs", "8"],
            &["--runs, --sweep, --tp", "--diff measures nothing"],
        ),
    ] {
        assert_one_line(&talon(args), words);
    }
}

#[test]
fn what_bench_writes_can_be_compared() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (a, b, compared) = (path("A.json"), path("B.json"), path("diff.json"));
    for (file, draft) in [(&a, "mtp"), (&b, "none")] {
        let small = ["bench", "--runs", "1", "--max-tokens", "4", "--draft", draft, "--json", file];
        assert_eq!(talon(&small).code, Some(0));
    }
    let outcome = talon(&["bench", "--diff", &a, &b, "--json", &compared]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(outcome.stdout.contains("settings.draft: mtp in A, none in B"), "{outcome:?}");
    let compared = common::read_json(compared.as_ref());
    assert_eq!(compared["summary"]["baseline"]["pairs"], 4);
    assert!(compared["summary"]["baseline"]["ratio"]["median"].as_f64().unwrap() > 0.0);
}
