//! Promise: `talon bench` reports what its contract says (DESIGN §4), and its numbers agree with each
//! other.

mod common;

use common::{assert_one_line, read_json, talon};
use serde_json::Value;

fn bench(args: &[&str]) -> Value {
    let outcome = talon(&[&["bench", "--json", "-"], args].concat());
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    outcome.json()
}

fn runs<'a>(report: &'a Value, mode: &str) -> Vec<&'a Value> {
    report["runs"].as_array().unwrap().iter().filter(|run| run["mode"] == mode).collect()
}

#[test]
fn the_report_holds_the_contract() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("report.json");
    let path = file.to_str().unwrap();
    let outcome = talon(&["bench", "--runs", "1", "--max-tokens", "8", "--json", path]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    for class in ["code", "prose", "chat", "json", "all"] {
        assert!(outcome.stdout.lines().any(|line| line.starts_with(class)), "{outcome:?}");
    }
    assert!(outcome.stdout.contains("text: identical"), "{outcome:?}");
    let few = "NOTE: few pairs for code, prose, chat, json; below 6";
    assert!(outcome.stdout.contains(few), "{outcome:?}");
    let report = read_json(&file);
    assert_eq!(report["schema"], 1);
    for (part, keys) in [
        ("talon", &["version", "commit"][..]),
        ("box", &["cpu", "cores", "memory_mib", "kernel", "os", "cuda_driver"]),
        ("model", &["name", "layout", "layers", "tp", "rank_slice"]),
        ("settings", &["max_tokens", "temperature", "backend", "draft", "draft_tokens"]),
        (
            "summary",
            &["baseline", "speculative", "speedup", "by_class", "identical", "first_divergence"],
        ),
    ] {
        for key in keys {
            assert!(report[part].as_object().unwrap().contains_key(*key), "{part}.{key}");
        }
    }
    assert_eq!(report["settings"]["draft"], "eagle3");
}

#[test]
fn every_run_and_summary_adds_up() {
    let report = bench(&["--runs", "2", "--max-tokens", "16", "--draft-tokens", "3"]);
    let (plain, guessed) = (runs(&report, "baseline"), runs(&report, "speculative"));
    assert_eq!((plain.len(), guessed.len()), (8, 8));
    for run in plain.iter().chain(&guessed) {
        let tokens = run["completion_tokens"].as_u64().unwrap();
        let steps = run["steps"].as_u64().unwrap();
        let rate = run["output_throughput"].as_f64().unwrap();
        let tpot = run["tpot_ms"].as_f64().unwrap();
        assert!((rate * tpot / 1000.0 - 1.0).abs() < 1e-9, "{run}");
        match run["mode"] == "baseline" {
            true => assert_eq!(steps, tokens - 1, "{run}"),
            false => assert!(steps < tokens, "a chain of 3 never paid: {run}"),
        }
    }
    let spec = &report["summary"]["speculative"];
    let number = |value: &Value| value.as_f64().unwrap();
    let product = number(&spec["steps_per_second"]) * number(&spec["tokens_per_step"]);
    let tokens: f64 = guessed.iter().map(|run| number(&run["completion_tokens"]) - 1.0).sum();
    let rate = |run: &&&Value| {
        (number(&run["completion_tokens"]) - 1.0) / number(&run["output_throughput"])
    };
    let seconds: f64 = guessed.iter().map(|run| rate(&run)).sum();
    assert!((product / (tokens / seconds) - 1.0).abs() < 1e-9, "{spec}");
    assert_eq!(spec["acceptance_length"], spec["tokens_per_step"]);
    let rates = spec["per_position_acceptance_rates"].as_array().unwrap();
    assert_eq!(rates.len(), 3);
    assert!(rates.iter().all(|rate| (0.0..=1.0).contains(&number(rate))));
    for summary in [&report["summary"], &report["summary"]["by_class"]["code"]] {
        for interval in [&summary["baseline"]["output_throughput"], &summary["speedup"]] {
            let value = |key: &str| number(&interval[key]);
            assert!(value("low") <= value("median") && value("median") <= value("high"));
        }
    }
    assert_eq!(report["summary"]["identical"], true);
    // Rows 1 (baseline, ends of outputs) and 4 (chains of 3) were run.
    let rows: Vec<u64> = report["step_ms_by_rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["rows"].as_u64().unwrap())
        .collect();
    assert!(rows.contains(&1) && rows.contains(&4), "{rows:?}");
}

#[test]
fn without_a_drafter_it_reports_the_baseline() {
    let report = bench(&["--draft", "none", "--runs", "1", "--max-tokens", "4"]);
    assert!(report["summary"]["speculative"].is_null());
    assert!(report["summary"]["identical"].is_null());
    assert_eq!(runs(&report, "speculative").len(), 0);
    assert_eq!(report["summary"]["baseline"]["tokens_per_step"], 1.0);
}

#[test]
fn a_sweep_tries_every_chain_length() {
    let report = bench(&["--draft", "mtp", "--runs", "1", "--max-tokens", "12", "--sweep"]);
    let sweep = report["sweep"].as_array().unwrap();
    let lengths: Vec<u64> =
        sweep.iter().map(|line| line["draft_tokens"].as_u64().unwrap()).collect();
    assert_eq!(lengths, [1, 2, 3, 4, 5, 6, 7]);
    assert!(sweep.iter().all(|line| line["speedup"]["median"].as_f64().unwrap() > 0.0));
}

#[test]
fn simulated_acceptance_comes_out_as_asked() {
    let args = ["--simulate-acceptance", "2.6", "--draft-tokens", "3", "--ignore-eos"];
    let report = bench(&[&args[..], &["--max-tokens", "64", "--runs", "4"]].concat());
    let length = report["summary"]["speculative"]["acceptance_length"].as_f64().unwrap();
    assert!((length - 2.6).abs() < 0.25, "{length}");
    assert_eq!(report["summary"]["identical"], true);
}

#[test]
fn prompts_of_ones_own_are_used_and_checked() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("prompts.jsonl");
    let path = file.to_str().unwrap();
    std::fs::write(&file, "{\"class\": \"mine\", \"prompt\": \"What is a whale?\"}\n").unwrap();
    let report = bench(&["--prompts", path, "--max-tokens", "4"]);
    assert_eq!(report["runs"][0]["class"], "mine");
    assert!(report["summary"]["by_class"]["mine"].is_object());
    for (line, words) in [
        ("nonsense", &["prompts.jsonl", "line 1"][..]),
        ("{\"class\": \"a\\u001b[31m\", \"prompt\": \"x\"}", &["line 1", "class"]),
        ("{\"class\": \"a\", \"id\": \"here\", \"raw\": \"\"}", &["prompt here"]),
        (
            "{\"class\": \"a\", \"id\": \"x\", \"raw\": \"1\"}\n\
             {\"class\": \"a\", \"id\": \"x\", \"raw\": \"2\"}",
            &["line 2", "second prompt x"],
        ),
    ] {
        std::fs::write(&file, line).unwrap();
        assert_one_line(&talon(&["bench", "--backend", "cpu", "--prompts", path]), words);
    }
}
