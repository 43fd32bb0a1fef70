//! A checkpoint against the manifest: which modules are there, in which format, what is wrong.
//!
//! `talon verify` prints what this finds; the loader refuses on the first error in it. A module's
//! format is what the file says, never what a quantisation list says (facts: such lists are wrong
//! in published checkpoints).

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::checkpoint::{Checkpoint, TensorRef};
use super::formats::check_share;
use super::manifest::{Entry, Geometry, Manifest, Module, Part, PartShape, Role};
use super::pack::Pack;
use crate::error::{Error, Result, one_line};

/// How bad a [`Problem`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// A load would be wrong or impossible: exit code 2.
    Error,
    /// A load can live with it.
    Warning,
}

/// One thing that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// A stable word for programs, e.g. `missing_tensor`.
    pub kind: &'static str,
    /// Whether a load must refuse.
    pub severity: Severity,
    /// The file at fault.
    pub file: String,
    /// The tensor at fault, if it is one tensor.
    pub tensor: Option<String>,
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub found: String,
    /// What to do about it.
    pub fix: String,
}

impl Problem {
    /// The problem as one line.
    pub fn line(&self) -> String {
        // A message that comes from a single file's reader is whole already.
        if self.found.starts_with(&self.file) {
            return one_line(self.found.clone());
        }
        let tensor = self.tensor.as_ref().map_or(String::new(), |tensor| format!(" {tensor}:"));
        one_line(format!(
            "{}:{tensor} expected {}, found {}; {}",
            self.file, self.expected, self.found, self.fix
        ))
    }
}

/// Whether the multi-token-prediction layer is in the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MtpState {
    /// The config has no such layer.
    None,
    /// All of it is there.
    Complete,
    /// Some of it is missing or unusable, which is an error.
    Partial,
    /// The config promises it and nothing of it is there.
    Absent,
}

impl MtpState {
    /// The word in reports.
    pub fn word(self) -> &'static str {
        match self {
            MtpState::None => "none",
            MtpState::Complete => "complete",
            MtpState::Partial => "partial",
            MtpState::Absent => "absent",
        }
    }
}

/// A module that the checkpoint holds: its place in the manifest, its format and its tensors.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// The module.
    pub module: Module,
    /// Index into [`Manifest::formats`].
    pub format: usize,
    /// Role and place of each tensor that is there.
    pub parts: Vec<(Role, TensorRef)>,
}

/// What an audit found.
pub struct Audit {
    /// What the checkpoint was cut for, if it is a pack.
    pack: Option<Pack>,
    /// Problems, errors first.
    pub problems: Vec<Problem>,
    /// The modules that are whole, by name.
    pub modules: HashMap<String, Resolved>,
    /// State of the MTP layer.
    pub mtp: MtpState,
    /// Formats by kind of module, e.g. `experts nvfp4, rest bf16`.
    pub layout: String,
}

impl Audit {
    /// The first error as an [`Error`], for the loader.
    ///
    /// # Errors
    /// Input error if any problem is one that a load must refuse.
    pub fn refuse_errors(&self) -> Result<()> {
        let mut errors = self.problems.iter().filter(|problem| problem.severity == Severity::Error);
        let Some(first) = errors.next() else {
            return Ok(());
        };
        let more = match errors.count() {
            0 => String::new(),
            n => format!(" (and {n} more: talon verify lists them)"),
        };
        Err(Error::input(format!("{}{more}", first.line())))
    }

    /// Whether `tp` ranks can share the modules in the formats that they are stored in.
    ///
    /// # Errors
    /// Input error that names the first module that they cannot share.
    pub fn check_ranks(&self, manifest: &Manifest, geometry: &Geometry, tp: usize) -> Result<()> {
        if let Some(pack) = &self.pack {
            // What they share is cut already.
            return pack.check_ranks(tp).and_then(|()| manifest.check_ranks(geometry, tp));
        }
        manifest.check_ranks(geometry, tp)?;
        let check = |resolved: &Resolved| {
            let Module { entry, name, shape, .. } = &resolved.module;
            let rule = manifest.entries[*entry].slice.as_ref()?;
            let format = &manifest.formats[resolved.format].name;
            check_share(name, format, rule.axis, shape, tp).err()
        };
        let refused = self.modules.values().filter_map(check);
        refused.min_by_key(|error| error.to_string()).map_or(Ok(()), Err)
    }

    /// Bytes of the weights that one of `tp` ranks holds.
    pub fn bytes_per_rank(&self, manifest: &Manifest, tp: usize) -> usize {
        let mut bytes = 0;
        for resolved in self.modules.values() {
            let shared = manifest.entries[resolved.module.entry].slice.is_some();
            for (_, part) in &resolved.parts {
                // A module's single scales go to every rank; a pack has them for each.
                let whole = !shared || (is_scalar(&part.shape) && self.pack.is_none());
                bytes += if whole { part.range.len() } else { part.range.len() / tp };
            }
        }
        bytes
    }
}

/// Audits `checkpoint` for a model of this geometry.
///
/// # Errors
/// Only if the manifest itself is broken.
pub fn audit(checkpoint: &Checkpoint, manifest: &Manifest, geometry: &Geometry) -> Result<Audit> {
    let mut auditor = Auditor {
        checkpoint,
        manifest,
        problems: checkpoint.problems.clone(),
        claimed: vec![false; checkpoint.tensors.len()],
    };
    let mut modules = HashMap::new();
    let mut mtp_missing = Vec::new();
    let mut mtp_present = 0usize;
    let mut mtp_lost = 0usize;
    let stored = |module: Module| match &checkpoint.pack {
        None => vec![module],
        Some(pack) => pack.stored(manifest, module),
    };
    for module in manifest.modules(geometry)?.into_iter().flat_map(stored) {
        let in_mtp = module.layer.is_some_and(|layer| geometry.layers[layer].mtp);
        let problems_before = auditor.problems.len();
        let resolved = auditor.resolve(&module);
        let optional = manifest.entries[module.entry].optional;
        if in_mtp && !optional {
            match &resolved {
                Some(_) => mtp_present += 1,
                // No problem of its own: it is in a shard that could not be read.
                None if auditor.problems.len() == problems_before => mtp_lost += 1,
                None => mtp_missing.extend(auditor.problems.drain(problems_before..)),
            }
        }
        if let Some(resolved) = resolved {
            modules.insert(module.name.clone(), resolved);
        }
    }
    let mtp = match (mtp_present, mtp_lost, mtp_missing.len()) {
        (0, 0, 0) => MtpState::None,
        (_, 0, 0) => MtpState::Complete,
        // The shard is a problem already.
        (_, _, 0) => MtpState::Partial,
        (0, 0, _) if mtp_missing.iter().all(|problem| problem.kind == "missing_tensor") => {
            auditor.mtp_absent(geometry);
            MtpState::Absent
        }
        _ => {
            auditor.mtp_partial(geometry, mtp_present, mtp_missing);
            MtpState::Partial
        }
    };
    auditor.unknown_tensors();
    let mut problems = auditor.problems;
    problems.sort_by_key(|problem| problem.severity);
    let layout = layout(manifest, geometry, &modules);
    Ok(Audit { pack: checkpoint.pack.clone(), problems, modules, mtp, layout })
}

struct Auditor<'a> {
    checkpoint: &'a Checkpoint,
    manifest: &'a Manifest,
    problems: Vec<Problem>,
    /// Whether a tensor belongs to a module, by its number.
    claimed: Vec<bool>,
}

impl<'a> Auditor<'a> {
    /// Finds the format and the tensors of `module`; reports and returns `None` if it is not whole.
    fn resolve(&mut self, module: &Module) -> Option<Resolved> {
        let manifest = self.manifest;
        let entry = &manifest.entries[module.entry];
        let Some((index, tensors)) = self.format_of(entry, module) else {
            self.report_absent(entry, module);
            return None;
        };
        let format = &manifest.formats[index];
        let mut parts = Vec::with_capacity(format.parts.len());
        let mut whole = true;
        for (part, found) in format.parts.iter().zip(tensors) {
            if let Some(found) = found {
                whole &= self.check_part(module, part, found);
                self.claimed[found.number] = true;
                parts.push((part.role, found.clone()));
            } else if !part.optional {
                whole = false;
                let name = part.tensor_name(&module.name);
                if !self.checkpoint.lost.contains(&name) {
                    self.problem(
                        "missing_scale",
                        &module.name,
                        name,
                        format!("{} beside the {} weight", part.dtype, format.name),
                        "no such tensor".into(),
                        "fetch a complete export of this checkpoint",
                    );
                }
            }
        }
        whole.then(|| Resolved { module: module.clone(), format: index, parts })
    }

    /// The format that the file's tensors spell: the first whose leading tensor is there with its
    /// dtype, preferring one that is there whole. With it, the tensors of its parts.
    fn format_of(
        &self,
        entry: &Entry,
        module: &Module,
    ) -> Option<(usize, Vec<Option<&'a TensorRef>>)> {
        let tensors = &self.checkpoint.tensors;
        // Most formats lead with the module's own name; a look-up takes its time in a map this big.
        let plain = tensors.get(&module.name);
        let mut candidate = None;
        for (index, format) in self.manifest.formats_of(entry) {
            let find = |part: &Part| match &*part.tensor {
                "{name}" => plain,
                _ => tensors.get(&part.tensor_name(&module.name)),
            };
            let leading = &format.parts[0];
            if find(leading).is_none_or(|found| found.dtype != leading.dtype) {
                continue;
            }
            let found: Vec<Option<&TensorRef>> = format.parts.iter().map(find).collect();
            let mut parts = format.parts.iter().zip(&found);
            if parts.all(|(part, found)| part.optional || found.is_some()) {
                return Some((index, found));
            }
            candidate.get_or_insert((index, found));
        }
        candidate
    }

    /// No format fits: the tensor is absent, or has a dtype that the module may not have.
    fn report_absent(&mut self, entry: &Entry, module: &Module) {
        let dtypes: BTreeSet<String> = self
            .manifest
            .formats_of(entry)
            .map(|(_, format)| format.parts[0].dtype.to_string())
            .collect();
        let dtypes = dtypes.into_iter().collect::<Vec<_>>().join(" or ");
        match self.checkpoint.tensors.get(&module.name) {
            Some(found) => {
                self.claimed[found.number] = true;
                let found = found.dtype.to_string();
                self.problem(
                    "wrong_dtype",
                    &module.name,
                    module.name.clone(),
                    dtypes,
                    found,
                    "use an export in a supported format",
                );
            }
            None if entry.optional || self.checkpoint.lost.contains(&module.name) => {}
            None => self.problem(
                "missing_tensor",
                &module.name,
                module.name.clone(),
                format!("{dtypes} {:?}", module.shape),
                "no such tensor".into(),
                "fetch the missing shard or a complete export; --ignore-index if the index is \
                 stale",
            ),
        }
    }

    fn check_part(&mut self, module: &Module, part: &Part, found: &TensorRef) -> bool {
        let Part { dtype, shape, .. } = *part;
        if found.dtype != dtype {
            self.problems.push(Problem {
                kind: "wrong_dtype",
                severity: Severity::Error,
                file: self.checkpoint.file_of(found),
                tensor: Some(part.tensor_name(&module.name)),
                expected: dtype.to_string(),
                found: found.dtype.to_string(),
                fix: "use an export in a supported format".into(),
            });
            return false;
        }
        let expected = shape.of(&module.shape);
        let right = match (shape, &expected) {
            (PartShape::Scalar, _) => is_scalar(&found.shape),
            (_, Some(expected)) => *expected == found.shape,
            (_, None) => false,
        };
        if !right {
            let expected = match (shape, expected) {
                (PartShape::Scalar, _) => "a single number".to_owned(),
                (_, Some(expected)) => format!("shape {expected:?}"),
                (_, None) => format!("a width that {} can hold", dtype),
            };
            self.problems.push(Problem {
                kind: "wrong_shape",
                severity: Severity::Error,
                file: self.checkpoint.file_of(found),
                tensor: Some(part.tensor_name(&module.name)),
                expected,
                found: format!("shape {:?}", found.shape),
                fix: "config.json and the weights must come from one checkpoint".into(),
            });
        }
        right
    }

    /// Reports a tensor that is not there or unusable; the file is where its module lives, if known.
    fn problem(
        &mut self,
        kind: &'static str,
        module: &str,
        tensor: String,
        expected: String,
        found: String,
        fix: &str,
    ) {
        let home = self.checkpoint.tensors.get(module);
        self.problems.push(Problem {
            kind,
            severity: Severity::Error,
            file: home.map_or_else(
                || self.checkpoint.source.display(""),
                |tensor| self.checkpoint.file_of(tensor),
            ),
            tensor: Some(tensor),
            expected,
            found,
            fix: fix.into(),
        });
    }

    fn mtp_absent(&mut self, geometry: &Geometry) {
        self.problems.push(Problem {
            kind: "mtp_absent",
            severity: Severity::Warning,
            file: self.checkpoint.source.display(""),
            tensor: None,
            expected: format!("layer {}, as config.json promises", mtp_layer(geometry)),
            found: "none of its tensors".into(),
            fix: "speculation with --draft mtp needs a checkpoint that ships it".into(),
        });
    }

    fn mtp_partial(&mut self, geometry: &Geometry, present: usize, missing: Vec<Problem>) {
        let first = &missing[0];
        let tensor = first.tensor.clone().unwrap_or_default();
        self.problems.push(Problem {
            kind: "mtp_partial",
            severity: Severity::Error,
            file: first.file.clone(),
            tensor: first.tensor.clone(),
            expected: format!("all of layer {} or nothing of it", mtp_layer(geometry)),
            found: format!(
                "{present} of its {} modules usable, the first that is not: {tensor}",
                present + missing.len()
            ),
            fix: "fetch the shards that hold this layer again, or take all of it out".into(),
        });
        self.problems.extend(missing);
    }

    /// One summary line for everything that no module claims.
    fn unknown_tensors(&mut self) {
        let known = |name: &String| {
            self.manifest.unused_suffixes.iter().any(|suffix| name.ends_with(suffix))
        };
        let unclaimed = self.checkpoint.tensors.iter().filter(|(_, t)| !self.claimed[t.number]);
        let mut unknown: Vec<&String> =
            unclaimed.map(|(name, _)| name).filter(|name| !known(name)).collect();
        if unknown.is_empty() {
            return;
        }
        unknown.sort();
        let shown: Vec<&str> = unknown.iter().take(3).map(|name| name.as_str()).collect();
        let more = if unknown.len() > shown.len() { ", …" } else { "" };
        self.problems.push(Problem {
            kind: "unknown_tensors",
            severity: Severity::Warning,
            file: self.checkpoint.source.display(""),
            tensor: None,
            expected: format!("only tensors of {}", self.manifest.family),
            found: format!("{} others: {}{more}", unknown.len(), shown.join(", ")),
            fix: "they are not used; check that config.json belongs to these weights".into(),
        });
    }
}

/// One element, whatever the number of dimensions.
fn is_scalar(shape: &[usize]) -> bool {
    shape.iter().all(|dim| *dim == 1)
}

fn mtp_layer(geometry: &Geometry) -> usize {
    geometry.layers.iter().position(|layer| layer.mtp).unwrap_or(geometry.layers.len())
}

/// Formats by kind of module; the commonest is named last as the rest.
fn layout(manifest: &Manifest, geometry: &Geometry, modules: &HashMap<String, Resolved>) -> String {
    let mut by_group: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for resolved in modules.values() {
        let mut group = manifest.entries[resolved.module.entry].group.as_str();
        // Norms and the router are never quantised, so they say nothing about a layout.
        if group == "norm" || group == "router" {
            continue;
        }
        if resolved.module.layer.is_some_and(|layer| geometry.layers[layer].mtp) {
            group = "mtp";
        }
        let format = manifest.formats[resolved.format].name.as_str();
        by_group.entry(group).or_default().insert(format);
    }
    let word = |formats: &BTreeSet<&str>| formats.iter().copied().collect::<Vec<_>>().join("+");
    let mut groups_per_word: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (group, formats) in &by_group {
        groups_per_word.entry(word(formats)).or_default().push(group);
    }
    let mut words: Vec<(String, Vec<&str>)> = groups_per_word.into_iter().collect();
    words.sort_by_key(|(_, groups)| groups.len());
    let Some((rest, _)) = words.pop() else {
        return "empty".into();
    };
    let mut parts: Vec<String> =
        words.into_iter().map(|(word, groups)| format!("{} {word}", groups.join(" "))).collect();
    parts.push(if parts.is_empty() { format!("all {rest}") } else { format!("rest {rest}") });
    parts.join(", ")
}
