//! Two reports side by side: two boxes, or two builds on one box. What was not measured alike is
//! refused, since a ratio of it would say nothing about box or build.

use serde_json::{Map, Value, json};

use super::report::SCHEMA;
use super::statistics::median_interval;
use super::table::plain;
use super::verdict::classes;
use crate::error::{Error, Result};

/// A report and the name of its file.
pub type Named<'a> = (&'a str, &'a Value);

/// Fields that must be equal, besides the prompts and the model's name.
const ALIKE: [&str; 7] = [
    "model.layout",
    "model.layers",
    "model.tp",
    "model.rank_slice",
    "settings.max_tokens",
    "settings.ignore_eos",
    "settings.simulated_acceptance",
];

/// Parts whose differences are listed, because they are what is compared.
const COMPARED: [&str; 3] = ["talon", "box", "settings"];

/// The comparison of report `b` with report `a`, as a value: what differs, and for every class the
/// ratio of the speeds, `b` over `a`, with its 95 % interval over the prompts.
///
/// # Errors
/// Input error that names the first field in which the two cannot be compared.
pub fn diff(a: Named, b: Named) -> Result<Value> {
    for (file, report) in [a, b] {
        let runs = report["runs"].as_array().is_some_and(|runs| !runs.is_empty());
        if !report["schema"].is_number() || !report["summary"].is_object() || !runs {
            return Err(Error::input(format!(
                "{file}: not a talon report; expected a file that talon bench --json wrote"
            )));
        }
    }
    check_alike(a, b)?;
    let (summary_a, summary_b) = (&a.1["summary"], &b.1["summary"]);
    let runs = |class| [Runs::of(a.1, class), Runs::of(b.1, class)];
    let mut summary = compare([summary_a, summary_b], &runs(None));
    let by_class: Map<String, Value> = classes(summary_a)
        .map(|(class, row)| {
            let rows = [row, &summary_b["by_class"][class]];
            (class.to_owned(), compare(rows, &runs(Some(class))))
        })
        .collect();
    summary["by_class"] = by_class.into();
    let named = |(file, report): Named| {
        let part = |name| (String::from(name), Value::clone(&report[name]));
        let parts = ["talon", "box", "model", "settings"].map(part);
        let mut side = Map::from_iter(parts);
        side.insert("file".into(), file.into());
        Value::Object(side)
    };
    Ok(json!({
        "schema": SCHEMA,
        "a": named(a),
        "b": named(b),
        "differences": differences(a.1, b.1),
        "summary": summary,
    }))
}

/// Refuses reports whose speeds cannot be compared.
fn check_alike(a: Named, b: Named) -> Result<()> {
    let refuse = |field: &str, of_a: &str, of_b: &str| {
        Err(Error::input(format!(
            "not comparable: {field} is {of_a} in {} and {of_b} in {}; measure both alike",
            a.0, b.0
        )))
    };
    let schemas = [&a.1["schema"], &b.1["schema"]];
    if schemas[0] != schemas[1] {
        return refuse("schema", &plain(schemas[0]), &plain(schemas[1]));
    }
    if *schemas[0] != SCHEMA {
        return Err(Error::input(format!(
            "{}: schema {}: expected {SCHEMA}; use the talon that wrote it",
            a.0, schemas[0]
        )));
    }
    // Two boxes keep one model in different directories.
    let name = |report: &Value| {
        let name = plain(&report["model"]["name"]);
        name.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_owned()
    };
    if name(a.1) != name(b.1) {
        return refuse("model.name", &plain(&a.1["model"]["name"]), &plain(&b.1["model"]["name"]));
    }
    for field in ALIKE {
        let [of_a, of_b] = [a.1, b.1].map(|report| look_up(report, field));
        if of_a != of_b {
            return refuse(field, &plain(of_a), &plain(of_b));
        }
    }
    let [prompts_a, prompts_b] = [a.1, b.1].map(prompts);
    let alone = |ours: &[(Prompt, u64)], theirs: &[(Prompt, u64)]| {
        ours.iter().find(|prompt| !theirs.contains(prompt)).cloned()
    };
    let odd = alone(&prompts_a, &prompts_b).or_else(|| alone(&prompts_b, &prompts_a));
    if let Some(((class, id), _)) = odd {
        let tokens = |prompts: &[(Prompt, u64)]| {
            let found = prompts.iter().find(|((c, i), _)| (c, i) == (&class, &id));
            found.map_or("absent".into(), |(_, tokens)| format!("{tokens} tokens long"))
        };
        let field = format!("prompt {id} of class {class}");
        return refuse(&field, &tokens(&prompts_a), &tokens(&prompts_b));
    }
    if prompts_a.len() != prompts_b.len() {
        let counts = [&prompts_a, &prompts_b].map(|prompts| prompts.len().to_string());
        return refuse("the number of prompts", &counts[0], &counts[1]);
    }
    Ok(())
}

/// Class and id.
type Prompt = (String, String);

/// The prompts of a report with their lengths: under the same id, another version of talon may ask
/// something else.
fn prompts(report: &Value) -> Vec<(Prompt, u64)> {
    let prompt = |run: &&Value| {
        let name = (plain(&run["class"]), plain(&run["prompt_id"]));
        (name, run["prompt_tokens"].as_u64().unwrap_or_default())
    };
    Runs::of(report, None).baseline.iter().map(prompt).collect()
}

/// A field by its path.
fn look_up<'a>(report: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(report, |value, name| &value[name])
}

/// Fields of box, build and settings that differ, in the order of the report.
fn differences(a: &Value, b: &Value) -> Vec<Value> {
    let mut found = Vec::new();
    for part in COMPARED {
        let names = |report: &Value| -> Vec<String> {
            report[part].as_object().into_iter().flatten().map(|(name, _)| name.clone()).collect()
        };
        let mut fields = names(a);
        fields.extend(names(b).into_iter().filter(|name| a[part].get(name).is_none()));
        for name in fields {
            let (of_a, of_b) = (&a[part][&name], &b[part][&name]);
            if of_a != of_b {
                found.push(json!({ "field": format!("{part}.{name}"), "a": of_a, "b": of_b }));
            }
        }
    }
    found
}

/// The runs of a report, or of one class of it.
struct Runs<'a> {
    baseline: Vec<&'a Value>,
    speculative: Vec<&'a Value>,
}

impl<'a> Runs<'a> {
    fn of(report: &'a Value, class: Option<&str>) -> Self {
        let of_mode = |mode: &str| {
            let runs = report["runs"].as_array().into_iter().flatten();
            let wanted = |run: &&Value| {
                run["mode"] == mode && class.is_none_or(|class| run["class"] == class)
            };
            runs.filter(wanted).collect()
        };
        Self { baseline: of_mode("baseline"), speculative: of_mode("speculative") }
    }
}

/// Two rows of summaries and the ratios of their runs.
fn compare([a, b]: [&Value; 2], [runs_a, runs_b]: &[Runs; 2]) -> Value {
    let both = |path: &str| json!({ "a": look_up(a, path), "b": look_up(b, path) });
    let mode = |mode: &str, runs_a: &[&Value], runs_b: &[&Value]| {
        let pairs = pairs(runs_a, runs_b);
        let lengths_differ =
            pairs.iter().filter(|(a, b)| a["completion_tokens"] != b["completion_tokens"]).count();
        let mut value = both(&format!("{mode}.output_throughput"));
        value["ratio"] = median_interval(&ratios(&pairs)).map_or(
            Value::Null,
            |ratio| json!({ "median": ratio.median, "low": ratio.low, "high": ratio.high }),
        );
        value["pairs"] = pairs.len().into();
        value["lengths_differ"] = lengths_differ.into();
        value
    };
    json!({
        "baseline": mode("baseline", &runs_a.baseline, &runs_b.baseline),
        "speculative": mode("speculative", &runs_a.speculative, &runs_b.speculative),
        "speedup": both("speedup"),
        "acceptance_length": both("speculative.acceptance_length"),
        "step_ms_p50": both("baseline.step_ms.p50"),
    })
}

/// Runs of one prompt in both reports. An id that is used twice pairs in order.
fn pairs<'a>(a: &[&'a Value], b: &[&'a Value]) -> Vec<(&'a Value, &'a Value)> {
    let mut left = b.to_vec();
    let partner = |run: &&'a Value| {
        let same = |other: &&Value| ["class", "prompt_id"].iter().all(|key| run[key] == other[key]);
        let at = left.iter().position(same)?;
        Some((*run, left.remove(at)))
    };
    a.iter().filter_map(partner).collect()
}

/// Speed of the second run of each pair over that of the first.
fn ratios(pairs: &[(&Value, &Value)]) -> Vec<f64> {
    let speed = |run: &Value| run["output_throughput"].as_f64().filter(|speed| *speed > 0.0);
    pairs.iter().filter_map(|(a, b)| Some(speed(b)? / speed(a)?)).collect()
}
