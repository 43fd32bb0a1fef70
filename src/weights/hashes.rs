//! Size and SHA-256 of every file of a checkpoint, to prove that a box holds the right weights.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::audit::{Problem, Severity};
use super::source::Source;
use crate::error::{Error, Result};

/// Bytes hashed between two reports of progress.
const CHUNK_BYTES: usize = 8 << 20;

/// What `--write-hashes` records.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashList {
    /// The files, sorted by name.
    pub files: Vec<FileHash>,
}

impl HashList {
    /// Reads a record; `file` is its name in messages.
    ///
    /// # Errors
    /// Input error if it is none, lists nothing, or names files outside of a checkpoint.
    pub fn from_json(file: &str, json: &[u8]) -> Result<Self> {
        let refuse = |what: String| {
            Error::input(format!("{file}: not a record of --write-hashes: {what}; write it again"))
        };
        let list: Self = serde_json::from_slice(json).map_err(|e| refuse(e.to_string()))?;
        if list.files.is_empty() {
            return Err(refuse("it lists no file".into()));
        }
        let plain = |name: &str| name.split('/').all(Source::is_plain_name);
        match list.files.iter().find(|file| !plain(&file.name)) {
            None => Ok(list),
            Some(found) => {
                Err(refuse(format!("expected names inside the checkpoint, found {:?}", found.name)))
            }
        }
    }
}

/// One file's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHash {
    /// Name relative to the checkpoint.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 in lower-case hex.
    pub sha256: String,
}

/// Hashes `names` of `source`, one file a thread. `progress` is called with the bytes hashed since
/// its last call.
///
/// # Errors
/// Input error if a file is missing or cannot be read.
pub fn hash_files(
    source: &Source,
    names: &[String],
    progress: &(dyn Fn(u64) + Sync),
) -> Result<HashList> {
    let next = AtomicUsize::new(0);
    let hashed = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(names.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let file = hash_file(source, name, progress);
                    hashed.lock().unwrap_or_else(PoisonError::into_inner).push(file);
                }
            });
        }
    });
    let hashed = hashed.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut files = hashed.into_iter().collect::<Result<Vec<FileHash>>>()?;
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(HashList { files })
}

fn hash_file(source: &Source, name: &str, progress: &(dyn Fn(u64) + Sync)) -> Result<FileHash> {
    let bytes = source.require(name)?;
    let mut hasher = Sha256::new();
    for chunk in bytes.chunks(CHUNK_BYTES) {
        hasher.update(chunk);
        progress(chunk.len() as u64);
    }
    Ok(FileHash { name: name.to_owned(), bytes: bytes.len() as u64, sha256: hex(hasher) })
}

/// The SHA-256 of some bytes, in hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::new_with_prefix(bytes))
}

pub(super) fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Differences between a record and what `source` holds now. Files beside the recorded ones are
/// not looked at: a box may keep notes beside its weights.
///
/// # Errors
/// Input error if a file that is there cannot be read.
pub fn compare_hashes(
    source: &Source,
    recorded: &HashList,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Vec<Problem>> {
    let mut problems = Vec::new();
    let mut to_hash = Vec::new();
    for file in &recorded.files {
        let problem = |kind, expected: String, found: String| Problem {
            kind,
            severity: Severity::Error,
            file: source.display(&file.name),
            tensor: None,
            expected,
            found,
            fix: "fetch the file again".into(),
        };
        match source.open(&file.name)? {
            None => problems.push(problem(
                "missing_file",
                format!("{} bytes, as recorded", file.bytes),
                "no such file".into(),
            )),
            // A wrong size is a difference already; hashing 10 GB would add nothing.
            Some(bytes) if bytes.len() as u64 != file.bytes => problems.push(problem(
                "wrong_size",
                format!("{} bytes, as recorded", file.bytes),
                format!("{} bytes", bytes.len()),
            )),
            Some(_) => to_hash.push(file.name.clone()),
        }
    }
    let found = hash_files(source, &to_hash, progress)?;
    let recorded_hash =
        |name: &str| recorded.files.iter().find(|file| file.name == name).map(|file| &file.sha256);
    for file in found.files {
        let expected = recorded_hash(&file.name);
        if expected.is_some_and(|expected| !expected.eq_ignore_ascii_case(&file.sha256)) {
            problems.push(Problem {
                kind: "wrong_hash",
                severity: Severity::Error,
                file: source.display(&file.name),
                tensor: None,
                expected: format!("SHA-256 {}", expected.map_or("", |hash| hash)),
                found: file.sha256,
                fix: "fetch the file again".into(),
            });
        }
    }
    Ok(problems)
}
