//! A file of a pack, hashed as it is written.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::hashes::{FileHash, hex};
use crate::error::{Error, Result};

/// A file that is hashed as it is written.
pub struct HashedFile {
    path: PathBuf,
    name: String,
    file: File,
    bytes: u64,
    hasher: Sha256,
}

impl HashedFile {
    /// Makes the file `name` in a folder.
    pub fn create(folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(name);
        let file = File::create(&path).map_err(|e| unwritable(&path, &e))?;
        Ok(Self { path, name: name.to_owned(), file, bytes: 0, hasher: Sha256::new() })
    }

    /// Adds bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| unwritable(&self.path, &e))
    }

    /// Waits until it is on the disk.
    pub fn finish(self) -> Result<FileHash> {
        self.file.sync_all().map_err(|e| unwritable(&self.path, &e))?;
        Ok(FileHash { name: self.name, bytes: self.bytes, sha256: hex(self.hasher) })
    }
}

/// The error of a file that the disk does not take.
pub fn unwritable(path: &Path, error: &std::io::Error) -> Error {
    Error::runtime(format!(
        "{}: cannot write: {error}; nothing is left of the pack, choose a disk that takes it",
        path.display()
    ))
}
