//! An opened checkpoint: its shards mapped, their headers read, the index compared with them.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use safetensors::Dtype;
use serde::Deserialize;

use super::audit::{Problem, Severity};
use super::header::{ShardHeader, read_header};
use super::mmap::Bytes;
use super::pack::Pack;
use super::source::Source;
use crate::error::{Error, Result};

/// The file that says which shard holds which tensor.
pub const INDEX: &str = "model.safetensors.index.json";

/// Where a tensor lies and what it is.
#[derive(Debug, Clone)]
pub struct TensorRef {
    /// Counts the tensors of a checkpoint.
    pub number: usize,
    /// Index into [`Checkpoint::shards`].
    pub shard: usize,
    /// Dtype from the header.
    pub dtype: Dtype,
    /// Shape from the header.
    pub shape: Vec<usize>,
    /// Bytes in the shard's file.
    pub range: Range<usize>,
}

/// One shard: its file name and its mapped bytes.
pub struct Shard {
    /// File name.
    pub name: String,
    bytes: Bytes,
}

/// A checkpoint whose headers were read.
pub struct Checkpoint {
    /// Where its files come from.
    pub source: Source,
    /// What it was cut for, if it is a pack.
    pub pack: Option<Pack>,
    /// The readable shards.
    pub shards: Vec<Shard>,
    /// All tensors in them, by name.
    pub tensors: HashMap<String, TensorRef>,
    /// What is wrong with the files themselves; [`super::audit`] adds what is wrong with the model.
    pub problems: Vec<Problem>,
    /// Tensors that the index places in shards that could not be read.
    pub lost: HashSet<String>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
    #[serde(default)]
    metadata: Option<IndexMetadata>,
}

#[derive(Deserialize)]
struct IndexMetadata {
    total_size: Option<serde_json::Number>,
}

impl Shard {
    /// A shard by its name and bytes.
    pub fn new(name: String, bytes: Bytes) -> Self {
        Self { name, bytes }
    }
}

impl Checkpoint {
    /// Opens the shards of `source`: those that a pack's description or the index names or, with
    /// `ignore_index` or without an index, all `*.safetensors` files. Reads headers only.
    ///
    /// Faults of single files become [`Checkpoint::problems`], so that an audit can list them all.
    ///
    /// # Errors
    /// Input error if there is nothing to open: no such directory, no shards, an unreadable index, a
    /// pack of another talon.
    pub fn open(source: Source, ignore_index: bool) -> Result<Self> {
        let files = source.file_names()?;
        let pack = Pack::of(&source)?;
        let index = if ignore_index || pack.is_some() { None } else { read_index(&source)? };
        let present: Vec<String> =
            files.into_iter().filter(|name| name.ends_with(".safetensors")).collect();
        let mut problems = Vec::new();
        let named: Option<HashSet<String>> = match (&pack, &index) {
            (Some(pack), _) => Some(pack.shards().into_iter().collect()),
            (None, Some(index)) => Some(index.weight_map.values().cloned().collect()),
            (None, None) => None,
        };
        let wanted = match named {
            None => present,
            Some(named) => {
                extra_shards(&source, &present, &named, &mut problems);
                let mut wanted: Vec<String> = named.into_iter().collect();
                wanted.sort();
                wanted
            }
        };
        if wanted.is_empty() {
            return Err(Error::input(format!(
                "{}: no tensors; expected *.safetensors files in a checkpoint directory",
                source.display("")
            )));
        }

        let mut checkpoint = Self {
            source,
            pack,
            shards: Vec::new(),
            tensors: HashMap::new(),
            problems,
            lost: HashSet::new(),
        };
        let opened = open_all(&checkpoint.source, &wanted);
        // All at once: a map that grows hashes every name again.
        let headers = opened.iter().flatten();
        checkpoint.tensors.reserve(headers.map(|(_, header)| header.tensors.len()).sum());
        let mut unreadable = HashSet::new();
        for (name, opened) in wanted.iter().zip(opened) {
            match opened {
                Ok((bytes, header)) => checkpoint.add_shard(name, bytes, header),
                Err(problem) => {
                    checkpoint.problems.push(*problem);
                    unreadable.insert(name.as_str());
                }
            }
        }
        if let Some(index) = &index {
            checkpoint.compare_index(index, &unreadable);
        }
        Ok(checkpoint)
    }

    /// The share of the shards that the page cache holds, by a look at one of sixteen MiB; `None` where
    /// they are no files. The kernel tells it to who owns the files; for others it says all.
    pub fn resident(&self) -> Option<f64> {
        const LOOK: usize = 1 << 20;
        const STEP: usize = 16 << 20;
        let mapped = self.shards.iter().filter(|shard| shard.bytes.is_mapped());
        let (mut seen, mut resident) = (0, 0);
        for bytes in mapped.map(|shard| &shard.bytes) {
            for start in (0..bytes.len()).step_by(STEP) {
                let part = bytes.slice(start..(start + LOOK).min(bytes.len()))?;
                seen += part.len();
                resident += part.resident();
            }
        }
        (seen > 0).then(|| resident as f64 / seen as f64)
    }

    /// The bytes of a tensor.
    pub fn bytes(&self, tensor: &TensorRef) -> Bytes {
        let bytes = &self.shards[tensor.shard].bytes;
        // The header check holds every range inside its file.
        bytes.slice(tensor.range.clone()).unwrap_or_else(|| Bytes::embedded(&[]))
    }

    /// The bytes of a shard's file.
    pub(super) fn shard_bytes(&self, shard: usize) -> &Bytes {
        &self.shards[shard].bytes
    }

    /// Name of the shard that holds a tensor, as messages show it.
    pub fn file_of(&self, tensor: &TensorRef) -> String {
        self.source.display(&self.shards[tensor.shard].name)
    }

    /// Gives every tensor another name, where producers spell one layout differently.
    pub fn rename(&mut self, name: impl Fn(&str) -> String) {
        self.tensors = self.tensors.drain().map(|(old, tensor)| (name(&old), tensor)).collect();
    }

    fn add_shard(&mut self, name: &str, bytes: Bytes, header: ShardHeader) {
        let shard = self.shards.len();
        self.shards.push(Shard { name: name.to_owned(), bytes });
        for (tensor, info) in header.tensors {
            let (start, end) = info.data_offsets;
            let range = header.data_start + start..header.data_start + end;
            let number = self.tensors.len();
            let found = TensorRef { number, shard, dtype: info.dtype, shape: info.shape, range };
            match self.tensors.entry(tensor) {
                Entry::Vacant(place) => drop(place.insert(found)),
                Entry::Occupied(first) => self.problems.push(Problem {
                    kind: "duplicate_tensor",
                    severity: Severity::Error,
                    file: self.source.display(name),
                    tensor: Some(first.key().clone()),
                    expected: "one shard that holds it".into(),
                    found: format!(
                        "a second copy, the first is in {}",
                        self.shards[first.get().shard].name
                    ),
                    fix: "remove the shard that does not belong to this checkpoint".into(),
                }),
            }
        }
    }

    /// Index against headers, both ways.
    fn compare_index(&mut self, index: &Index, unreadable: &HashSet<&str>) {
        let file = self.source.display(INDEX);
        let stale = |kind, tensor: &str, expected: String, found: String| Problem {
            kind,
            severity: Severity::Error,
            file: file.clone(),
            tensor: Some(tensor.to_owned()),
            expected,
            found,
            fix: "fetch the index and the shards of one revision, or go by the shards with \
                  --ignore-index"
                .into(),
        };
        let mut problems = Vec::new();
        let mut listed = 0;
        for (tensor, shard) in &index.weight_map {
            if !unreadable.is_empty() && unreadable.contains(shard.as_str()) {
                self.lost.insert(tensor.clone());
                continue;
            }
            match self.tensors.get(tensor) {
                None => problems.push(stale(
                    "index_tensor_missing",
                    tensor,
                    format!("in {shard}, as the index says"),
                    "no shard has it".into(),
                )),
                Some(found) => {
                    listed += 1;
                    let home = &self.shards[found.shard].name;
                    if home != shard {
                        let expected = format!("in {shard}, as the index says");
                        let found = format!("in {home}");
                        problems.push(stale("index_wrong_shard", tensor, expected, found));
                    }
                }
            }
        }
        // Only then is it worth to look up hundreds of thousands of names once more.
        if listed < self.tensors.len() {
            for (tensor, found) in &self.tensors {
                if !index.weight_map.contains_key(tensor) {
                    problems.push(stale(
                        "index_stale",
                        tensor,
                        "listed in the index".into(),
                        format!("only in {}", self.shards[found.shard].name),
                    ));
                }
            }
        }
        let total: usize = self.tensors.values().map(|tensor| tensor.range.len()).sum();
        let said = index.metadata.as_ref().and_then(|m| m.total_size.as_ref());
        if let Some(said) = said.and_then(serde_json::Number::as_u64)
            && said != total as u64
            && unreadable.is_empty()
        {
            problems.push(Problem {
                kind: "index_total_size",
                severity: Severity::Warning,
                file: file.clone(),
                tensor: None,
                expected: format!("{said} bytes of tensors, as the index says"),
                found: format!("{total}"),
                fix: "compare with the published sizes, or --check-hashes".into(),
            });
        }
        problems.sort_by(|a, b| a.tensor.cmp(&b.tensor));
        self.problems.append(&mut problems);
    }
}

fn read_index(source: &Source) -> Result<Option<Index>> {
    let Some(bytes) = source.open(INDEX)? else {
        return Ok(None);
    };
    let file = source.display(INDEX);
    let fix = "fetch it again or go by the shards with --ignore-index";
    let index: Index = serde_json::from_slice(&bytes)
        .map_err(|e| Error::input(format!("{file}: not a shard index: {e}; {fix}")))?;
    let mut shards = index.weight_map.iter();
    match shards.find(|(_, shard)| !Source::is_plain_name(shard)) {
        None => Ok(Some(index)),
        Some((tensor, shard)) => Err(Error::input(format!(
            "{file}: {tensor}: expected the name of a file beside the index, found {shard:?}; {fix}"
        ))),
    }
}

fn extra_shards(
    source: &Source,
    present: &[String],
    wanted: &HashSet<String>,
    problems: &mut Vec<Problem>,
) {
    for name in present.iter().filter(|name| !wanted.contains(*name)) {
        problems.push(Problem {
            kind: "extra_shard",
            severity: Severity::Warning,
            file: source.display(name),
            tensor: None,
            expected: "a shard that the index names".into(),
            found: "a file that the index does not name; it is not used".into(),
            fix: "remove it if it does not belong here".into(),
        });
    }
}

type Opened = std::result::Result<(Bytes, ShardHeader), Box<Problem>>;

/// Maps the shards and reads their headers, on as many threads as there are cores.
fn open_all(source: &Source, names: &[String]) -> Vec<Opened> {
    let next = AtomicUsize::new(0);
    let opened: Mutex<BTreeMap<usize, Opened>> = Mutex::new(BTreeMap::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(names.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((i, name)) = {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    names.get(i).map(|name| (i, name))
                } {
                    let shard = open_shard(source, name);
                    opened.lock().unwrap_or_else(PoisonError::into_inner).insert(i, shard);
                }
            });
        }
    });
    opened.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
}

fn open_shard(source: &Source, name: &str) -> Opened {
    let problem = |kind, expected: &str, found: String, fix: &str| {
        Box::new(Problem {
            kind,
            severity: Severity::Error,
            file: source.display(name),
            tensor: None,
            expected: expected.into(),
            found,
            fix: fix.into(),
        })
    };
    let bytes = match source.open(name) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => {
            return Err(problem(
                "missing_shard",
                "a shard that the index names",
                "no such file".into(),
                "fetch it, or go by the shards that are there with --ignore-index",
            ));
        }
        Err(error) => {
            return Err(problem(
                "unreadable_shard",
                "a readable file",
                error.to_string(),
                "check its permissions and the disk",
            ));
        }
    };
    match read_header(&source.display(name), &bytes) {
        Ok(header) => Ok((bytes, header)),
        Err(error) => Err(problem(
            "bad_shard",
            "a whole safetensors file",
            error.to_string(),
            "fetch the file again",
        )),
    }
}
