//! `talon kernels`: how fast the GPU's kernels are at a model's shapes.

use std::fmt::Write;

use argh::FromArgs;
use serde_json::{Value, json};

use super::model_options::parse_rank_slice;
use super::progress::Progress;
use super::terminal::{check_writable, print, write_json};
use crate::cuda::KernelTimes;
use crate::engine::{LoadOptions, measure_kernels};
use crate::error::{Error, Result};
use crate::weights::Source;

/// Measure the GPU's kernels at a model's shapes.
#[derive(FromArgs)]
#[argh(
    subcommand,
    name = "kernels",
    example = "{command_name}",
    example = "{command_name} --rows 1,4 --context 32768 --json kernels.json",
    note = "Each stage runs over all layers in one graph, so that its weights come from memory; the\n\
            read beside it is the fastest plain read of as many bytes, launches included."
)]
pub struct KernelsCommand {
    /// model whose shapes are measured (default: synthetic:glm-5.2)
    #[argh(option, default = "\"synthetic:glm-5.2\".into()", arg_name = "dir")]
    model: String,

    /// layers of a synthetic model to load (default: 8)
    #[argh(option, default = "8", arg_name = "n")]
    layers: usize,

    /// the rank whose share is measured: R of N (default: 0/8)
    #[argh(option, default = "\"0/8\".into()", arg_name = "r/n")]
    rank_slice: String,

    /// rows of a step (default: 1,2,4,8,16)
    #[argh(option, default = "\"1,2,4,8,16\".into()", arg_name = "list")]
    rows: String,

    /// tokens of the context that rows are at the end of (default: 1024)
    #[argh(option, default = "1024", arg_name = "n")]
    context: usize,

    /// the GPU to use, by its number (default: 0)
    #[argh(option, default = "0", arg_name = "n")]
    devices: usize,

    /// write the times as JSON (- is stdout, instead of the table)
    #[argh(option, arg_name = "file")]
    json: Option<String>,
}

impl KernelsCommand {
    pub fn run(self) -> Result<()> {
        let rows = self.row_counts()?;
        if self.context < 32 {
            return Err(Error::input(format!(
                "--context {}: expected at least 32 tokens",
                self.context
            )));
        }
        if let Some(target) = &self.json {
            check_writable(target)?;
        }
        let synthetic = self.model.starts_with("synthetic:");
        let source = Source::from_name(&self.model, synthetic.then_some(self.layers))?;
        let options = LoadOptions {
            device: self.devices,
            rank_slice: Some(parse_rank_slice(&self.rank_slice)?),
            context: Some(self.context),
            ..LoadOptions::default()
        };
        let progress = Progress::bytes("loading");
        let times = measure_kernels(source, &options, &rows, &|bytes, total| {
            progress.of(total as u64);
            progress.add(bytes as u64);
        })?;
        progress.finish();
        if let Some(target) = &self.json {
            write_json(target, &self.report(&times))?;
        }
        if self.json.as_deref() != Some("-") {
            print(&self.table(&times))?;
        }
        Ok(())
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

    fn report(&self, times: &KernelTimes) -> Value {
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
        json!({
            "schema": 1,
            "talon": { "version": env!("CARGO_PKG_VERSION"), "commit": env!("TALON_COMMIT") },
            "model": { "name": self.model, "layers": self.layers, "rank_slice": self.rank_slice },
            "context": self.context,
            "read_roof_gb_per_s": times.read_roof / 1e9,
            "stages": stages,
        })
    }

    fn table(&self, times: &KernelTimes) -> String {
        let mut table = format!(
            "{}, rank {}, context {}; plain reads of 1 GiB: {:.0} GB/s\n\n\
             stage              rows        us [low high]        MB     GB/s   of roof   read us  of read\n",
            self.model,
            self.rank_slice,
            self.context,
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
}
