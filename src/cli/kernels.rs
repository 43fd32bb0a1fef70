//! `talon kernels`: how fast the GPU's kernels are at a model's shapes, and whether they are right.

use std::fmt::Write;

use argh::FromArgs;
use serde_json::{Value, json};

use super::model_options::{parse_dense_weights, parse_devices, parse_rank_slice};
use super::progress::Progress;
use super::terminal::{check_writable, print, write_json};
use crate::cuda::{KernelTimes, RanksOptions};
use crate::doctor::fingerprint;
use crate::engine::{
    ExchangeTimes, LoadOptions, StageCheck, check_kernels, measure_exchanges, measure_kernels,
};
use crate::error::{Error, Result};
use crate::weights::Source;

/// Times that a stage is run again.
const DEFAULT_REPEATS: usize = 1000;
/// Exchanges of each size and variant.
const DEFAULT_EXCHANGES: usize = 10_000;

/// Measure the GPU's kernels at a model's shapes, or check them against the CPU backend.
#[derive(FromArgs)]
#[argh(
    subcommand,
    name = "kernels",
    example = "{command_name}",
    example = "{command_name} --rows 1,4 --context 32768 --json kernels.json",
    example = "{command_name} --check",
    example = "{command_name} --comm --devices 0,1,2,3,4,5,6,7",
    note = "Each stage runs over all layers in one graph, so that its weights come from memory; the\n\
            read beside it is the fastest plain read of as many bytes, launches included.",
    note = "--check gives each stage random inputs over NaN-filled outputs, compares every value with\n\
            the CPU backend's, and runs it again to see the same bits; then it decodes every stored\n\
            value of each number format.",
    note = "--comm also times NCCL's all-reduce at these sizes, where libnccl.so.2, or the file that\n\
            TALON_NCCL names, can be loaded: a yardstick, which sums and does nothing else."
)]
pub struct KernelsCommand {
    /// compare each stage with the CPU backend instead of measuring it; exit code 1 if one is wrong
    #[argh(switch)]
    check: bool,

    /// times that --check runs each stage again (default: 1000), or --comm each exchange (default:
    /// 10000)
    #[argh(option, arg_name = "n")]
    repeats: Option<usize>,

    /// model whose shapes are used: a directory, demo, synthetic:glm-5.2 and its like (default:
    /// synthetic:glm-5.2; demo with --check)
    #[argh(option, arg_name = "dir")]
    model: Option<String>,

    /// layers of a synthetic model to load (default: 8)
    #[argh(option, default = "8", arg_name = "n")]
    layers: usize,

    /// the rank whose share is used: R of N (default: 0/8; 0/1 of the demo)
    #[argh(option, arg_name = "r/n")]
    rank_slice: Option<String>,

    /// numbers of rows of a step, each from 1 to 16 (default: 1,2,4,8,16)
    #[argh(option, default = "\"1,2,4,8,16\".into()", arg_name = "list")]
    rows: String,

    /// tokens of the context that rows are at the end of (default: 1024; with --check more than
    /// twice what the indexer selects)
    #[argh(option, arg_name = "n")]
    context: Option<usize>,

    /// attention, shared experts, dense MLPs and lm_head: stored, or fp8 with a scale for each row
    /// (default: stored)
    #[argh(option, default = "\"stored\".into()", arg_name = "name")]
    dense_weights: String,

    /// time the exchanges between GPUs instead: microseconds of reduce_norm by variant and size
    #[argh(switch)]
    comm: bool,

    /// the GPU to use, by its number (default: 0); with --comm those of all ranks, in rank order
    /// (default: all)
    #[argh(option, arg_name = "list")]
    devices: Option<String>,

    /// write the results as JSON (- is stdout, instead of the table)
    #[argh(option, arg_name = "file")]
    json: Option<String>,
}

/// What was asked for, with the defaults.
struct Asked {
    model: String,
    rank_slice: String,
    context: Option<usize>,
    rows: Vec<usize>,
}

impl KernelsCommand {
    pub fn run(self) -> Result<()> {
        if let Some(target) = &self.json {
            check_writable(target)?;
        }
        let devices = self.devices.as_deref().map(parse_devices).transpose()?.unwrap_or_default();
        if self.comm {
            return self.measure_exchanges(devices);
        }
        let asked = self.asked()?;
        if devices.len() > 1 {
            return Err(Error::input(
                "--devices: the kernels of one rank run on one GPU; several are for --comm",
            ));
        }
        let synthetic = asked.model.starts_with("synthetic:");
        let source = Source::from_name(&asked.model, synthetic.then_some(self.layers))?;
        let options = LoadOptions {
            gpus: RanksOptions { devices, ..RanksOptions::default() },
            rank_slice: Some(parse_rank_slice(&asked.rank_slice)?),
            context: asked.context,
            dense_weights: parse_dense_weights(&self.dense_weights)?,
            ..LoadOptions::default()
        };
        let progress = Progress::bytes(if self.check { "checking" } else { "loading" });
        let loaded = |bytes: usize, total: usize| {
            progress.of(total as u64);
            progress.add(bytes as u64);
        };
        if self.check {
            let repeats = self.repeats.unwrap_or(DEFAULT_REPEATS);
            let checks = check_kernels(source, &options, &asked.rows, repeats, &loaded)?;
            progress.finish();
            self.show(self.check_report(&asked, &checks), &check_table(&checks))?;
            return refuse_faults(&checks);
        }
        let times = measure_kernels(source, &options, &asked.rows, &loaded)?;
        progress.finish();
        self.show(self.report(&asked, &times), &table(&asked, &times))
    }

    fn measure_exchanges(&self, devices: Vec<usize>) -> Result<()> {
        if self.check {
            return Err(Error::input("--check and --comm: expected one of them"));
        }
        if self.repeats == Some(0) {
            return Err(Error::input("--repeats 0: expected at least 1 exchange"));
        }
        let names = if devices.is_empty() {
            "all GPUs".into()
        } else {
            format!("GPUs {}", devices.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
        };
        let options = LoadOptions {
            gpus: RanksOptions { devices, ..RanksOptions::default() },
            ..LoadOptions::default()
        };
        let progress = Progress::count("timing", 0);
        let mut faults = Vec::new();
        let count = self.repeats.unwrap_or(DEFAULT_EXCHANGES);
        let times = measure_exchanges(
            &options,
            count,
            &mut |fault| faults.push(fault.to_owned()),
            &|done, all| {
                progress.up_to(all as u64);
                progress.add(done as u64);
            },
        );
        progress.finish();
        let measured = times?;
        let rows = measured.times.iter().map(|time| {
            json!({
                "variant": time.name, "bytes": time.bytes, "count": time.count,
                "us": { "median": time.times.median, "worst": time.times.worst },
            })
        });
        let report = json!({
            "schema": 1,
            "talon": { "version": env!("CARGO_PKG_VERSION"), "commit": env!("TALON_COMMIT") },
            "box": fingerprint(),
            "ranks": names,
            "faults": faults,
            "nccl": match &measured.nccl {
                Ok(version) => json!({ "version": version }),
                Err(why) => json!({ "not_measured": why.to_string() }),
            },
            "exchanges": rows.collect::<Vec<_>>(),
        });
        self.show(report, &exchange_table(&names, &measured, &faults))
    }

    fn show(&self, report: Value, table: &str) -> Result<()> {
        // The table is shown though the file cannot be written.
        let written = self.json.as_ref().map_or(Ok(()), |target| write_json(target, &report));
        let shown = if self.json.as_deref() == Some("-") { Ok(()) } else { print(table) };
        written.and(shown)
    }

    fn asked(&self) -> Result<Asked> {
        let rows = self.row_counts()?;
        if let Some(context) = self.context
            && context < 32
        {
            return Err(Error::input(format!("--context {context}: expected at least 32 tokens")));
        }
        if let (Some(repeats), false) = (self.repeats, self.check) {
            return Err(Error::input(format!("--repeats {repeats}: only --check repeats stages")));
        }
        let default = if self.check { "demo" } else { "synthetic:glm-5.2" };
        let model = self.model.clone().unwrap_or_else(|| default.into());
        let slice = if model == "demo" { "0/1" } else { "0/8" };
        Ok(Asked {
            rank_slice: self.rank_slice.clone().unwrap_or_else(|| slice.into()),
            context: if self.check { self.context } else { self.context.or(Some(1024)) },
            model,
            rows,
        })
    }

    fn row_counts(&self) -> Result<Vec<usize>> {
        let count = |text: &str| text.trim().parse().ok().filter(|rows| (1..=16).contains(rows));
        self.rows.split(',').map(count).collect::<Option<Vec<usize>>>().ok_or_else(|| {
            Error::input(format!(
                "--rows {}: expected numbers from 1 to 16, as in 1,4,8",
                self.rows
            ))
        })
    }

    fn head_of_report(&self, asked: &Asked) -> Value {
        json!({
            "schema": 1,
            "talon": { "version": env!("CARGO_PKG_VERSION"), "commit": env!("TALON_COMMIT") },
            "model": {
                "name": asked.model, "layers": self.layers, "rank_slice": asked.rank_slice
            },
            "context": asked.context,
        })
    }

    fn check_report(&self, asked: &Asked, checks: &[StageCheck]) -> Value {
        let stages: Vec<Value> = checks
            .iter()
            .map(|check| {
                json!({
                    "stage": check.stage,
                    "rows": check.rows,
                    "relative_rms": check.relative_rms,
                    "largest": check.largest,
                    "ties": check.ties,
                    "runs": check.repeats,
                    "equal_runs": check.equal,
                    "fault": check.fault,
                })
            })
            .collect();
        let mut report = self.head_of_report(asked);
        report["checks"] = stages.into();
        report
    }

    fn report(&self, asked: &Asked, times: &KernelTimes) -> Value {
        let stages: Vec<Value> = times
            .stages
            .iter()
            .map(|time| {
                let [median, low, high] = time.microseconds;
                json!({
                    "stage": time.stage,
                    "rows": time.rows,
                    "us": { "median": median, "low": low, "high": high },
                    "bytes": time.bytes,
                    "gb_per_s": time.bytes as f64 / median / 1e3,
                    "read_us": time.read_microseconds,
                })
            })
            .collect();
        let mut report = self.head_of_report(asked);
        report["read_roof_gb_per_s"] = (times.read_roof / 1e9).into();
        report["stages"] = stages.into();
        report
    }
}

fn table(asked: &Asked, times: &KernelTimes) -> String {
    let mut table = format!(
        "{}, rank {}, context {}; plain reads of 1 GiB: {:.0} GB/s\n\n\
         stage              rows        us [low high]        MB     GB/s   of roof   read us  of read\n",
        asked.model,
        asked.rank_slice,
        asked.context.unwrap_or_default(),
        times.read_roof / 1e9
    );
    for time in &times.stages {
        let [median, low, high] = time.microseconds;
        let rate = time.bytes as f64 / (median * 1e-6);
        let _ = writeln!(
            table,
            "{:<18} {:>4}  {:>8.2} [{:>6.2} {:>6.2}]  {:>8.2}  {:>7.0}   {:>5.0} %  {:>8.2}  {:>5.0} %",
            time.stage,
            time.rows,
            median,
            low,
            high,
            time.bytes as f64 / 1e6,
            rate / 1e9,
            rate / times.read_roof * 100.0,
            time.read_microseconds,
            time.read_microseconds / median * 100.0
        );
    }
    table
}

fn exchange_table(names: &str, measured: &ExchangeTimes, faults: &[String]) -> String {
    let mut table = format!(
        "reduce_norm between ranks on {names}: sum, residual, norm\n\n\
         variant      KiB   median us    worst us   exchanges\n"
    );
    for time in &measured.times {
        let _ = writeln!(
            table,
            "{:<8} {:>7}  {:>10.1}  {:>10.1}  {:>10}",
            time.name,
            time.bytes / 1024,
            time.times.median,
            time.times.worst,
            time.count
        );
    }
    let _ = match &measured.nccl {
        Ok(version) => writeln!(
            table,
            "\nnccl: ncclAllReduce of NCCL {version}, the sum alone, between events of a stream"
        ),
        Err(why) => writeln!(table, "\nNCCL was not measured: {why}"),
    };
    for fault in faults {
        let _ = writeln!(table, "\nnot used: {fault}");
    }
    table
}

fn check_table(checks: &[StageCheck]) -> String {
    let mut table = String::from(
        "stage                       rows  relative RMS   largest     bit-equal runs  verdict\n",
    );
    for check in checks {
        let runs = match check.repeats {
            0 => "-".into(),
            runs => format!("{}/{runs}", check.equal),
        };
        let verdict = match (&check.fault, check.ties) {
            (Some(_), _) => "WRONG".into(),
            (None, 0) => "ok".into(),
            (None, ties) => format!("ok, {ties} near ties"),
        };
        let _ = writeln!(
            table,
            "{:<26}  {:>4}  {:>12.1e}  {:>8.1e}  {:>17}  {verdict}",
            check.stage, check.rows, check.relative_rms, check.largest, runs
        );
    }
    for check in checks {
        if let Some(fault) = &check.fault {
            let _ = writeln!(table, "\n{}, {} rows: {fault}", check.stage, check.rows);
        }
    }
    table
}

/// One line for what is wrong, of which the table has the rest.
fn refuse_faults(checks: &[StageCheck]) -> Result<()> {
    let mut faults = checks.iter().filter_map(|check| Some((check, check.fault.as_ref()?)));
    let Some((check, fault)) = faults.next() else {
        return Ok(());
    };
    let more = match faults.count() {
        0 => String::new(),
        more => format!(" (and {more} more)"),
    };
    Err(Error::runtime(format!("{}, {} rows: {fault}{more}", check.stage, check.rows)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{LinkTime, Times};
    use crate::error::Kind;

    fn check(stage: &str, fault: Option<&str>) -> StageCheck {
        StageCheck {
            stage: stage.into(),
            rows: 4,
            relative_rms: 1.9e-4,
            largest: 0.002,
            repeats: 1000,
            equal: 1000,
            fault: fault.map(Into::into),
            ..StageCheck::default()
        }
    }

    #[test]
    fn the_table_has_a_line_for_each_check() {
        let near = StageCheck { ties: 2, ..check("route", None) };
        let format = StageCheck { repeats: 0, equal: 0, ..check("formats fp8", None) };
        let wrong = StageCheck { equal: 7, ..check("attend, long", Some("layer 0: attended: x")) };
        let table = check_table(&[check("embed", None), near, format, wrong]);
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[0].ends_with("verdict"), "{table}");
        assert!(lines[1].starts_with("embed") && lines[1].ends_with("1000/1000  ok"), "{table}");
        assert!(lines[1].contains("1.9e-4    2.0e-3"), "{table}");
        assert!(lines[2].ends_with("ok, 2 near ties"), "{table}");
        assert!(lines[3].ends_with("-  ok"), "{table}");
        assert!(lines[4].ends_with("7/1000  WRONG"), "{table}");
        assert_eq!(lines[6], "attend, long, 4 rows: layer 0: attended: x");
    }

    #[test]
    fn nccl_has_rows_of_its_own_or_a_line_that_says_why_not() {
        let times = Times { median: 20.25, worst: 31.5 };
        let time = |name| LinkTime { name, bytes: 12288, count: 2000, times };
        let nccl = Ok("2.27.5".into());
        let mut measured = ExchangeTimes { times: vec![time("push"), time("nccl")], nccl };
        let table = exchange_table("GPUs 0,1", &measured, &[]);
        assert!(
            table.contains("\nnccl          12        20.2        31.5        2000\n"),
            "{table}"
        );
        assert!(
            table.ends_with(
                "\nnccl: ncclAllReduce of NCCL 2.27.5, the sum alone, between events of a stream\n"
            ),
            "{table}"
        );
        measured.nccl = Err(Error::runtime("x"));
        let table = exchange_table("GPUs 0,1", &measured, &["pull: y".into()]);
        assert!(table.ends_with("\nNCCL was not measured: x\n\nnot used: pull: y\n"), "{table}");
    }

    #[test]
    fn the_first_fault_is_the_error() {
        assert_eq!(refuse_faults(&[check("embed", None)]), Ok(()));
        let faults = [check("route", Some("a")), check("head", Some("b"))];
        let error = refuse_faults(&faults).expect_err("faults");
        assert_eq!(error.kind(), Kind::Runtime);
        assert_eq!(error.to_string(), "route, 4 rows: a (and 1 more)");
    }
}
