//! `talon verify`: audits a checkpoint without loading it.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use argh::FromArgs;
use serde_json::{Value, json};

use super::model_options::check_tp;
use super::progress::Progress;
use super::terminal::{check_writable, print, thousands, write_json};
use crate::engine::{ModelConfig, Opened, TextModel, eagle3_fault};
use crate::error::{Error, Result};
use crate::weights::{
    Checkpoint, HashList, INDEX, PACK, Packing, Problem, Severity, Source, check_scales,
    compare_hashes, hash_files,
};

/// Audit a checkpoint by its headers: index, shards, dtype and shape of every tensor, MTP layer.
#[derive(FromArgs)]
#[argh(
    subcommand,
    name = "verify",
    example = "{command_name} --model ./GLM-5.2-NVFP4 --tp 8 --scales",
    example = "{command_name} --model ./GLM-5.2-NVFP4 --check-hashes glm-5.2.json",
    example = "{command_name} --model ./GLM-5.2-NVFP4 --tp 8 --pack ./GLM-5.2-for-8",
    note = "Exit code 2 if a load would be wrong or impossible; warnings leave it 0."
)]
pub struct VerifyCommand {
    /// checkpoint directory, or demo, the model in this binary (default: demo)
    #[argh(option, default = "\"demo\".into()", arg_name = "dir")]
    model: String,

    /// ranks to split the weights over, for the bytes of each: 1, 2, 4 or 8 (default: 8, or the
    /// ranks of a pack)
    #[argh(option, arg_name = "n")]
    tp: Option<usize>,

    /// cut the weights for --tp ranks and write them as a new folder, a checkpoint of its own that
    /// starts fastest
    #[argh(option, arg_name = "dir")]
    pack: Option<String>,

    /// go by the shards' own headers instead of model.safetensors.index.json
    #[argh(switch)]
    ignore_index: bool,

    /// also read every scale and check that it is finite (loading always does)
    #[argh(switch)]
    scales: bool,

    /// record size and SHA-256 of every file
    #[argh(option, arg_name = "file")]
    write_hashes: Option<String>,

    /// compare every file with such a record
    #[argh(option, arg_name = "file")]
    check_hashes: Option<String>,

    /// write the report as JSON (- is stdout, instead of the text)
    #[argh(option, arg_name = "file")]
    json: Option<String>,
}

/// Ranks where nothing says how many: a box of eight GPUs.
const DEFAULT_RANKS: usize = 8;
/// Problems of one kind that the text report shows; the JSON has them all.
const SHOWN_PER_KIND: usize = 5;

impl VerifyCommand {
    pub fn run(self) -> Result<ExitCode> {
        self.tp.map_or(Ok(()), check_tp)?;
        if self.write_hashes.as_deref() == Some("-") {
            return Err(Error::input(
                "--write-hashes -: expected a file; stdout is where the report goes",
            ));
        }
        let source = Source::from_name(&self.model, None)?;
        let mut problems = Vec::new();
        let mut report = match Opened::new(source.clone(), self.ignore_index) {
            Ok(opened) => {
                let mut report = self.audit(&opened, &mut problems)?;
                if let Some(target) = &self.pack {
                    report["packed"] = self.write_pack(&opened, target)?;
                }
                // The process ends soon; freeing hundreds of thousands of names would only delay it.
                std::mem::forget(opened);
                report
            }
            // Hashes tell which file is damaged, and a program that asked for JSON gets JSON.
            Err(error)
                if self.pack.is_none() && (self.check_hashes.is_some() || self.json.is_some()) =>
            {
                problems.push(unusable(&source, &error));
                json!({ "model": self.model })
            }
            Err(error) => return Err(error),
        };
        problems.extend(self.hashes(&source)?);
        problems.sort_by_key(|problem| problem.severity);
        let ok = !problems.iter().any(|problem| problem.severity == Severity::Error);
        report["ok"] = ok.into();
        report["problems"] = problems.iter().map(problem_json).collect();
        if let Some(target) = &self.json {
            write_json(target, &report)?;
        }
        if self.json.as_deref() != Some("-") {
            print(&text_report(&report, &problems))?;
        }
        Ok(ExitCode::from(if ok { 0 } else { 2 }))
    }

    /// What is there, and into `problems` what is wrong with it.
    fn audit(&self, opened: &Opened, problems: &mut Vec<Problem>) -> Result<Value> {
        let Opened { config, quantization, checkpoint, manifest, audit } = opened;
        let source = &checkpoint.source;
        problems.extend(audit.problems.iter().cloned());
        problems.extend(side_problems(source, config)?);
        let tp = self.ranks(checkpoint);
        if let Err(error) = audit.check_ranks(manifest, &config.geometry(), tp) {
            // Only the split is impossible; the checkpoint may be sound.
            problems.push(Problem {
                kind: "tp",
                severity: Severity::Warning,
                file: source.display("config.json"),
                tensor: None,
                expected: format!("sizes that {tp} ranks can share"),
                found: error.to_string(),
                fix: "choose another --tp".into(),
            });
        }
        let head = source.eagle3_head().map(|head| head_summary(head, config, problems));
        if self.scales {
            let progress = Progress::bytes("reading scales");
            problems.extend(check_scales(checkpoint, manifest, audit, &|bytes, total| {
                progress.of(total);
                progress.add(bytes);
            })?);
            progress.finish();
        }
        let bytes: usize = checkpoint.tensors.values().map(|tensor| tensor.range.len()).sum();
        Ok(json!({
            "ok": false,
            "model": self.model,
            "tensors": checkpoint.tensors.len(),
            "bytes": bytes,
            "shards": checkpoint.shards.len(),
            "layout": audit.layout,
            "quantization": quantization.as_ref().map(|q| json!({
                "method": q.method, "algo": q.algo,
            })),
            "mtp": audit.mtp.word(),
            "eagle3": head,
            "tp": tp,
            "bytes_per_rank": audit.bytes_per_rank(manifest, tp),
            "pack_ranks": checkpoint.pack.as_ref().map(|pack| pack.tp),
        }))
    }

    /// Ranks that are asked for, or of the pack that is looked at.
    fn ranks(&self, checkpoint: &Checkpoint) -> usize {
        self.tp.or(checkpoint.pack.as_ref().map(|pack| pack.tp)).unwrap_or(DEFAULT_RANKS)
    }

    /// `--pack`.
    fn write_pack(&self, opened: &Opened, target: &str) -> Result<Value> {
        let Opened { config, checkpoint, manifest, audit, .. } = opened;
        let (geometry, tp) = (&config.geometry(), self.ranks(checkpoint));
        let packing = Packing { checkpoint, manifest, audit, geometry, tp };
        let progress = Progress::bytes("packing");
        let packed = packing.write(Path::new(target), &|bytes, total| {
            progress.of(total);
            progress.add(bytes);
        })?;
        progress.finish();
        Ok(json!({ "folder": target, "files": packed.files, "bytes": packed.bytes }))
    }

    /// `--write-hashes` and `--check-hashes`.
    fn hashes(&self, source: &Source) -> Result<Vec<Problem>> {
        let size = |names: &[String]| -> Result<u64> {
            let mut bytes = 0;
            for name in names {
                bytes += source.open(name)?.map_or(0, |file| file.len() as u64);
            }
            Ok(bytes)
        };
        let progress = Progress::bytes("hashing");
        if let Some(target) = &self.write_hashes {
            check_writable(target)?;
            let mut names = source.all_file_names()?;
            // A record inside the checkpoint's folder does not record itself, however it is spelt.
            if let Ok(record) = std::fs::canonicalize(target) {
                let is_record =
                    |path: String| std::fs::canonicalize(path).is_ok_and(|p| p == record);
                names.retain(|name| !is_record(source.display(name)));
            }
            progress.of(size(&names)?);
            let list = hash_files(source, &names, &|bytes| progress.add(bytes))?;
            let value = serde_json::to_value(list)
                .map_err(|e| Error::runtime(format!("cannot write JSON: {e}")))?;
            write_json(target, &value)?;
        }
        let problems = match &self.check_hashes {
            None => Vec::new(),
            Some(file) => {
                let recorded = read_hashes(file)?;
                let names: Vec<String> =
                    recorded.files.iter().map(|file| file.name.clone()).collect();
                progress.of(size(&names)?);
                compare_hashes(source, &recorded, &|bytes| progress.add(bytes))?
            }
        };
        progress.finish();
        Ok(problems)
    }
}

fn read_hashes(file: &str) -> Result<HashList> {
    let text = std::fs::read(file)
        .map_err(|e| Error::input(format!("{file}: cannot read: {e}; check --check-hashes")))?;
    HashList::from_json(file, &text)
}

/// A file that the loader refuses; the message names it.
fn unusable(source: &Source, error: &Error) -> Problem {
    let message = error.to_string();
    let names = ["config.json", "hf_quant_config.json", INDEX, PACK, "tokenizer.json"]
        .into_iter()
        .chain(["generation_config.json", "chat_template.jinja", "tokenizer_config.json", ""]);
    let mut files = names.map(|name| source.display(name));
    Problem {
        kind: "unusable_file",
        severity: Severity::Error,
        file: files.find(|file| message.starts_with(file)).unwrap_or_default(),
        tensor: None,
        expected: "a file that can be used".into(),
        found: message,
        fix: "fetch it again".into(),
    }
}

/// Problems with files beside the weights, and keys that nobody knows.
fn side_problems(source: &Source, config: &ModelConfig) -> Result<Vec<Problem>> {
    let warning = |kind, file: &str, expected: &str, found: String, fix: &str| Problem {
        kind,
        severity: Severity::Warning,
        file: source.display(file),
        tensor: None,
        expected: expected.into(),
        found,
        fix: fix.into(),
    };
    let mut problems = Vec::new();
    if source.open("tokenizer.json")?.is_none() {
        problems.push(warning(
            "no_tokenizer",
            "tokenizer.json",
            "a tokenizer",
            "no such file".into(),
            "without it prompts can only be given as token ids",
        ));
    } else {
        let text = TextModel::open(source, &config.eos_token_id);
        let checked = text.and_then(|text| text.map_or(Ok(()), |text| text.check_template()));
        problems.extend(checked.err().map(|error| unusable(source, &error)));
    }
    if !config.unhandled.is_empty() {
        problems.push(warning(
            "unhandled_config",
            "config.json",
            "keys that talon knows",
            config.unhandled.join(", "),
            "they are not used; a newer talon may know them",
        ));
    }
    Ok(problems)
}

/// Tensors and bytes of the EAGLE-3 head. The model loads without it, so its faults are warnings.
fn head_summary(head: Source, config: &ModelConfig, problems: &mut Vec<Problem>) -> Value {
    if let Some(error) = eagle3_fault(head.clone(), config) {
        problems.push(Problem {
            kind: "eagle3",
            severity: Severity::Warning,
            file: head.display(""),
            tensor: None,
            expected: "an EAGLE-3 head for this model".into(),
            found: error.to_string(),
            fix: "fetch the head again, or load with --draft none".into(),
        });
    }
    let Ok(head) = Checkpoint::open(head, false) else {
        return json!({ "tensors": 0, "bytes": 0 });
    };
    let bytes: usize = head.tensors.values().map(|tensor| tensor.range.len()).sum();
    json!({ "tensors": head.tensors.len(), "bytes": bytes })
}

fn problem_json(problem: &Problem) -> Value {
    json!({
        "kind": problem.kind,
        "severity": match problem.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        },
        "file": problem.file,
        "tensor": problem.tensor,
        "expected": problem.expected,
        "found": problem.found,
        "fix": problem.fix,
    })
}

fn text_report(report: &Value, problems: &[Problem]) -> String {
    let number = |key: &str| thousands(report[key].as_u64().unwrap_or(0));
    let word = |key: &str| report[key].as_str().unwrap_or("-").to_owned();
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<16}{value}");
    };
    line("model", word("model"));
    if report["tensors"].is_u64() {
        line("tensors", format!("{} in {} shards", number("tensors"), number("shards")));
        line("bytes", number("bytes"));
        line("per rank", format!("{} at --tp {}", number("bytes_per_rank"), report["tp"]));
        line("layout", word("layout"));
        if let Some(ranks) = report["pack_ranks"].as_u64() {
            line("pack", format!("cut for {ranks} ranks"));
        }
        line("MTP layer", word("mtp"));
        if let Some(head) = report["eagle3"].as_object() {
            let bytes = thousands(head["bytes"].as_u64().unwrap_or(0));
            line("EAGLE-3 head", format!("{} tensors, {bytes} bytes", head["tensors"]));
        }
        if let Some(packed) = report["packed"].as_object() {
            let bytes = thousands(packed["bytes"].as_u64().unwrap_or(0));
            let folder = packed["folder"].as_str().unwrap_or("-");
            line("packed", format!("{folder}: {} files, {bytes} bytes", packed["files"]));
        }
    }
    let mut shown: Vec<(&str, usize)> = Vec::new();
    for problem in problems {
        let count = match shown.iter_mut().find(|(kind, _)| *kind == problem.kind) {
            Some((_, count)) => count,
            None => {
                shown.push((problem.kind, 0));
                &mut shown.last_mut().expect("just pushed").1
            }
        };
        *count += 1;
        if *count <= SHOWN_PER_KIND {
            let word = match problem.severity {
                Severity::Error => "ERROR",
                Severity::Warning => "warning",
            };
            line(word, problem.line());
        }
    }
    for (kind, count) in shown.iter().filter(|(_, count)| *count > SHOWN_PER_KIND) {
        line("", format!("and {} more of {kind}; --json lists all", count - SHOWN_PER_KIND));
    }
    let ok = report["ok"].as_bool() == Some(true);
    line("verdict", if ok { "ok" } else { "NOT usable as it is" }.into());
    text
}
