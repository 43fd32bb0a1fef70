//! The report of a benchmark: the JSON of DESIGN §4 (schema 1) and the table for people.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::measure::{Plan, Run};
use super::statistics::{Interval, median_interval, percentile};
use crate::engine::Engine;

/// Settings that are not in the [`Plan`].
#[derive(Debug, Clone)]
pub struct Settings {
    /// `--model` as given.
    pub model: String,
    /// The backend that ran.
    pub backend: &'static str,
}

/// Everything that a report is made of.
pub struct RunContext<'a> {
    /// The model that ran.
    pub engine: &'a Engine,
    /// What was asked for.
    pub plan: &'a Plan,
    /// How.
    pub settings: &'a Settings,
    /// The box, from `doctor::fingerprint`.
    pub fingerprint: Value,
}

/// The whole report as JSON.
pub fn report(context: &RunContext, runs: &[Run]) -> Value {
    let RunContext { engine, plan, settings, fingerprint } = context;
    let limits = engine.limits();
    let by_class: Map<String, Value> = classes(runs)
        .into_iter()
        .map(|class| {
            let of_class: Vec<&Run> = runs.iter().filter(|run| run.class == class).collect();
            (class.to_owned(), json!({ "baseline": summary(&of_class) }))
        })
        .collect();
    json!({
        "schema": 1,
        "talon": { "version": env!("CARGO_PKG_VERSION"), "commit": env!("TALON_COMMIT") },
        "box": fingerprint,
        "model": {
            "name": settings.model,
            "layout": engine.layout(),
            "layers": engine.config().num_hidden_layers,
            "tp": limits.tp,
            "rank_slice": Value::Null,
        },
        "settings": {
            "backend": settings.backend,
            "prompts": plan.prompts.len(),
            "max_tokens": plan.max_tokens,
            "ignore_eos": plan.ignore_eos,
            "temperature": 0,
            "context": limits.context,
            "prefill_chunk": limits.prefill_chunk,
            "warm_up_runs": 1,
        },
        "runs": runs.iter().map(run_json).collect::<Vec<Value>>(),
        "summary": {
            "baseline": summary(&runs.iter().collect::<Vec<&Run>>()),
            "speculative": Value::Null,
            "speedup": Value::Null,
            "by_class": by_class,
            "identical": Value::Null,
            "first_divergence": Value::Null,
        },
    })
}

/// The report as a table.
pub fn table(context: &RunContext, runs: &[Run]) -> String {
    let RunContext { engine, settings, .. } = context;
    let mut text = format!(
        "{}: {} layers, {}, {} backend, {} rank(s)\n\n",
        settings.model,
        engine.config().num_hidden_layers,
        engine.layout(),
        settings.backend,
        engine.limits().tp,
    );
    let _ = writeln!(
        text,
        "{:<10}{:>5}{:>8}  {:>22}  {:>18}  {:>8}  {:>15}",
        "class",
        "runs",
        "tokens",
        "tok/s [95 %]",
        "steps/s x tok/step",
        "TTFT ms",
        "step ms p50 p99"
    );
    for class in classes(runs) {
        let of_class: Vec<&Run> = runs.iter().filter(|run| run.class == class).collect();
        text += &row(class, &of_class);
    }
    text += &row("all", &runs.iter().collect::<Vec<&Run>>());
    text += "\nbaseline: one token a step, greedy; medians over runs, the first token excluded\n";
    text
}

fn row(name: &str, runs: &[&Run]) -> String {
    let tokens: usize = runs.iter().map(|run| run.completion_tokens).sum();
    let number = |value: Option<f64>, digits: usize| {
        value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
    };
    let throughput = throughput(runs).map_or("-".to_owned(), |interval| {
        format!("{:.1} [{:.1} {:.1}]", interval.median, interval.low, interval.high)
    });
    let steps = step_milliseconds(runs);
    format!(
        "{name:<10}{:>5}{tokens:>8}  {throughput:>22}  {:>18}  {:>8}  {:>15}\n",
        runs.len(),
        format!("{} x 1.00", number(steps_per_second(runs), 1)),
        number(median_interval(&first_token_milliseconds(runs)).map(|i| i.median), 1),
        format!("{} {}", number(percentile(&steps, 50.0), 2), number(percentile(&steps, 99.0), 2)),
    )
}

/// Classes in the order of their first run.
fn classes(runs: &[Run]) -> Vec<&str> {
    let mut classes: Vec<&str> = Vec::new();
    for run in runs {
        if !classes.contains(&run.class.as_str()) {
            classes.push(&run.class);
        }
    }
    classes
}

fn throughput(runs: &[&Run]) -> Option<Interval> {
    let values: Vec<f64> = runs.iter().filter_map(|run| run.output_throughput()).collect();
    median_interval(&values)
}

/// Median over runs of decode steps per second.
fn steps_per_second(runs: &[&Run]) -> Option<f64> {
    let rates: Vec<f64> = runs
        .iter()
        .filter(|run| !run.rounds.is_empty())
        .map(|run| run.rounds.len() as f64 / run.decode_time().as_secs_f64())
        .collect();
    percentile(&rates, 50.0)
}

fn first_token_milliseconds(runs: &[&Run]) -> Vec<f64> {
    runs.iter().map(|run| run.time_to_first_token.as_secs_f64() * 1e3).collect()
}

fn step_milliseconds(runs: &[&Run]) -> Vec<f64> {
    runs.iter().flat_map(|run| &run.rounds).map(|round| round.verify.as_secs_f64() * 1e3).collect()
}

fn summary(runs: &[&Run]) -> Value {
    let steps = step_milliseconds(runs);
    json!({
        "runs": runs.len(),
        "completion_tokens": runs.iter().map(|run| run.completion_tokens).sum::<usize>(),
        "output_throughput": throughput(runs).map(interval_json),
        "steps_per_second": steps_per_second(runs),
        "tokens_per_step": 1.0,
        "ttft_ms": median_interval(&first_token_milliseconds(runs)).map(interval_json),
        "step_ms": { "p50": percentile(&steps, 50.0), "p99": percentile(&steps, 99.0) },
    })
}

fn interval_json(interval: Interval) -> Value {
    json!({ "median": interval.median, "low": interval.low, "high": interval.high })
}

fn run_json(run: &Run) -> Value {
    let seconds = (run.time_to_first_token + run.decode_time()).as_secs_f64();
    let tpot = run.output_throughput().map(|rate| 1e3 / rate);
    json!({
        "mode": "baseline",
        "class": run.class,
        "prompt_id": run.prompt_id,
        "prompt_tokens": run.prompt_tokens,
        "completion_tokens": run.completion_tokens,
        "seconds": seconds,
        "steps": run.rounds.len(),
        "output_throughput": run.output_throughput(),
        "ttft_ms": run.time_to_first_token.as_secs_f64() * 1e3,
        "tpot_ms": tpot,
    })
}
