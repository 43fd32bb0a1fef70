//! The report of a benchmark as a value: the JSON of DESIGN §4 (schema 1). The table for people and
//! the page are made from it alone.

use serde_json::{Map, Value, json};

use super::measure::{Divergence, Measured, Mode, Plan, Run};
use super::projection::{Cards, Work, projection};
use super::statistics::{Interval, median_interval, percentile};
use crate::engine::{Engine, ExpertSplit};
use crate::spec::{Policy, SpeculationStats};

/// Version of the report's form: it goes up when a field changes its meaning or goes away.
pub(super) const SCHEMA: u32 = 1;

/// Settings that are not in the [`Plan`].
#[derive(Debug, Clone)]
pub struct Settings {
    /// `--model` as given.
    pub model: String,
    /// `--draft-tokens` as given.
    pub draft_tokens: String,
    /// The cards that one rank's steps are projected to.
    pub cards: Cards,
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
pub fn report(context: &RunContext, measured: &Measured) -> Value {
    let RunContext { engine, plan, settings, fingerprint } = context;
    let limits = engine.limits();
    let all: Vec<&Run> = measured.runs.iter().collect();
    let by_class: Map<String, Value> = classes(&all)
        .into_iter()
        .map(|class| {
            let of_class: Vec<&Run> =
                all.iter().copied().filter(|run| run.class == class).collect();
            (class.to_owned(), comparison(&of_class))
        })
        .collect();
    let mut summary = comparison(&all);
    summary["by_class"] = by_class.into();
    summary["identical"] = match summary["speculative"].is_null() {
        true => Value::Null,
        false => measured.first_divergence.is_none().into(),
    };
    summary["first_divergence"] =
        measured.first_divergence.as_ref().map_or(Value::Null, divergence_json);
    let switched_off = match engine.policy() {
        Policy::Adaptive(policy) => policy.switched_off().map(str::to_owned),
        Policy::Fixed(_) => None,
    };
    let steps = step_ms_by_rows(measured);
    let projected = work_of(engine)
        .map(|(work, ranks)| projection(&work, &settings.cards, ranks, &summary, &steps));
    json!({
        "schema": SCHEMA,
        "talon": { "version": env!("CARGO_PKG_VERSION"), "commit": env!("TALON_COMMIT") },
        "box": fingerprint,
        "model": {
            "name": settings.model,
            "layout": engine.layout(),
            "layers": engine.config().num_hidden_layers,
            "tp": limits.tp,
            "rank_slice": engine.rank_slice().map(|slice| format!("{}/{}", slice.index, slice.of)),
        },
        "device": engine.device_use().map(|device| json!({
            "gpus": device.devices,
            "reduce": device.reduce,
            "weight_bytes": device.weight_bytes,
            "cache_bytes": device.cache_bytes,
            "step_bytes": device.step_bytes,
            "expert_bytes": device.expert_bytes,
            "launches": device.launches,
            "read_roof": device.read_roof,
        })),
        "load": engine.load_figures().map(|load| json!({
            "bytes": load.bytes,
            "seconds": load.seconds,
            "gb_per_s": load.rate() / 1e9,
            "cache": load.cache(),
            "resident_before": load.resident_before,
            "disk_bytes": load.disk_bytes,
        })),
        "settings": {
            "backend": engine.backend_name(),
            "experts": match engine.experts() {
                ExpertSplit::Rows => "split",
                ExpertSplit::Whole => "parallel",
            },
            "draft": engine.drafter(),
            "draft_tokens": settings.draft_tokens,
            "simulated_acceptance": plan.simulated_acceptance,
            "prompts": plan.prompts.len(),
            "max_tokens": plan.max_tokens,
            "ignore_eos": plan.ignore_eos,
            "temperature": 0,
            "context": limits.context,
            "prefill_chunk": limits.prefill_chunk,
        },
        "runs": all.iter().map(|run| run_json(run)).collect::<Vec<Value>>(),
        "summary": summary,
        "step_ms_by_rows": steps,
        "projection": projected,
        "sweep": sweep(measured),
        "drafter_switched_off": switched_off,
    })
}

/// What one rank of several does in a step, and how many they are; `None` where all of them ran, or
/// where nothing tells how fast the device reads.
fn work_of(engine: &Engine) -> Option<(Work, usize)> {
    let (device, config) = (engine.device_use()?, engine.config());
    let work = Work {
        step_bytes: device.step_bytes as f64,
        expert_bytes: device.expert_bytes as f64,
        experts: config.n_routed_experts as f64,
        experts_used: config.num_experts_per_tok as f64,
        roof: device.read_roof?,
        exchanges: (2 * config.num_hidden_layers + 1) as f64,
    };
    Some((work, engine.rank_slice()?.of))
}

/// Baseline, speculative and their ratio over a set of runs.
fn comparison(runs: &[&Run]) -> Value {
    let of = |mode| -> Vec<&Run> { runs.iter().copied().filter(|run| run.mode == mode).collect() };
    let (baseline, speculative) = (of(Mode::Baseline), of(Mode::Speculative));
    let mut speculated = Value::Null;
    if !speculative.is_empty() {
        speculated = summary(&speculative);
        let stats = stats_of(&speculative);
        speculated["rounds"] = stats.rounds.into();
        speculated["acceptance_length"] = json!(stats.acceptance_length());
        speculated["per_position_acceptance_rates"] = json!(stats.per_position_acceptance_rates());
        let per_round = |total: std::time::Duration| {
            (stats.rounds > 0).then(|| total.as_secs_f64() * 1e3 / stats.rounds as f64)
        };
        speculated["draft_ms"] = json!(per_round(stats.draft_time));
        speculated["verify_ms"] = json!(per_round(stats.verify_time));
        speculated["draft_tokens_per_round"] =
            json!(stats.drafted.iter().sum::<usize>() as f64 / stats.rounds.max(1) as f64);
    }
    json!({
        "baseline": summary(&baseline),
        "speculative": speculated,
        "speedup": median_interval(&speedups(&baseline, &speculative)).map(interval_json),
    })
}

/// Speed with speculation over speed without, for each pair.
fn speedups(baseline: &[&Run], speculative: &[&Run]) -> Vec<f64> {
    let partner = |run: &Run| {
        let same = |other: &&&Run| other.class == run.class && other.prompt_id == run.prompt_id;
        baseline.iter().find(same)?.output_throughput()
    };
    let ratio = |run: &&Run| Some(run.output_throughput()? / partner(run)?);
    speculative.iter().filter_map(ratio).collect()
}

fn summary(runs: &[&Run]) -> Value {
    let throughput: Vec<f64> = runs.iter().filter_map(|run| run.output_throughput()).collect();
    let first_token: Vec<f64> =
        runs.iter().map(|run| run.generation.time_to_first_token.as_secs_f64() * 1e3).collect();
    let rounds: Vec<f64> = runs
        .iter()
        .flat_map(|run| &run.generation.rounds)
        .map(|round| (round.draft + round.verify).as_secs_f64() * 1e3)
        .collect();
    let stats = stats_of(runs);
    let decode_seconds: f64 =
        runs.iter().map(|run| run.generation.decode_time().as_secs_f64()).sum();
    json!({
        "runs": runs.len(),
        "completion_tokens": runs.iter().map(|run| run.generation.tokens.len()).sum::<usize>(),
        "output_throughput": median_interval(&throughput).map(interval_json),
        "steps_per_second": (stats.rounds > 0).then(|| stats.rounds as f64 / decode_seconds),
        "tokens_per_step": stats.acceptance_length(),
        "ttft_ms": median_interval(&first_token).map(interval_json),
        "step_ms": { "p50": percentile(&rounds, 50.0), "p99": percentile(&rounds, 99.0) },
    })
}

fn stats_of(runs: &[&Run]) -> SpeculationStats {
    let mut stats = SpeculationStats::default();
    runs.iter().for_each(|run| stats.merge(&run.generation.stats()));
    stats
}

/// Median time of a verify step by its rows, over everything that ran.
fn step_ms_by_rows(measured: &Measured) -> Vec<Value> {
    let swept = measured.sweep.iter().flat_map(|(_, runs)| runs);
    let mut by_rows: std::collections::BTreeMap<usize, Vec<f64>> = Default::default();
    for round in measured.runs.iter().chain(swept).flat_map(|run| &run.generation.rounds) {
        let milliseconds = round.verify.as_secs_f64() * 1e3;
        by_rows.entry(round.drafted + 1).or_default().push(milliseconds);
    }
    let row = |(rows, times): (&usize, &Vec<f64>)| json!({ "rows": rows, "steps": times.len(), "p50": percentile(times, 50.0) });
    by_rows.iter().map(row).collect()
}

/// The chain lengths that were tried besides, each against the baselines of its prompts.
fn sweep(measured: &Measured) -> Vec<Value> {
    let baseline: Vec<&Run> =
        measured.runs.iter().filter(|run| run.mode == Mode::Baseline).collect();
    let line = |(count, runs): &(usize, Vec<Run>)| {
        let mut together: Vec<&Run> = runs.iter().collect();
        let swept = |run: &&&Run| {
            runs.iter().any(|other| other.class == run.class && other.prompt_id == run.prompt_id)
        };
        together.extend(baseline.iter().filter(swept).copied());
        let compared = comparison(&together);
        json!({
            "draft_tokens": count,
            "speculative": compared["speculative"],
            "speedup": compared["speedup"],
        })
    };
    measured.sweep.iter().map(line).collect()
}

/// Classes in the order of their first run.
fn classes<'a>(runs: &[&'a Run]) -> Vec<&'a str> {
    let mut classes: Vec<&str> = Vec::new();
    for run in runs {
        if !classes.contains(&run.class.as_str()) {
            classes.push(&run.class);
        }
    }
    classes
}

fn interval_json(interval: Interval) -> Value {
    json!({ "median": interval.median, "low": interval.low, "high": interval.high })
}

fn divergence_json(divergence: &Divergence) -> Value {
    json!({
        "class": divergence.class,
        "prompt_id": divergence.prompt_id,
        "index": divergence.index,
        "baseline_token": divergence.baseline,
        "speculative_token": divergence.speculative,
        "logit_gap": divergence.logit_gap,
    })
}

fn run_json(run: &Run) -> Value {
    let seconds = (run.generation.time_to_first_token + run.generation.decode_time()).as_secs_f64();
    let stats = run.generation.stats();
    let mut value = json!({
        "mode": run.mode.word(),
        "class": run.class,
        "prompt_id": run.prompt_id,
        "prompt_tokens": run.prompt_tokens,
        "completion_tokens": run.generation.tokens.len(),
        "seconds": seconds,
        "steps": run.generation.rounds.len(),
        "output_throughput": run.output_throughput(),
        "ttft_ms": run.generation.time_to_first_token.as_secs_f64() * 1e3,
        "tpot_ms": run.output_throughput().map(|rate| 1e3 / rate),
    });
    if run.mode == Mode::Speculative {
        value["acceptance_length"] = json!(stats.acceptance_length());
        value["drafted"] = stats.drafted.iter().sum::<usize>().into();
        value["accepted"] = stats.accepted.iter().sum::<usize>().into();
        value["draft_ms"] = json!(stats.draft_time.as_secs_f64() * 1e3);
    }
    value
}
