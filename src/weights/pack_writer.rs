//! Writes a pack (see `pack`): one thread for each file, from the mapped checkpoint, hashed on the way.
//!
//! The pack is made in a folder beside its own and gets its name when everything is on the disk, so
//! whatever ends the writing leaves nothing that looks like a pack.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use safetensors::tensor::TensorInfo;
use serde_json::{Map, Value, json};

use super::audit::{Audit, Resolved};
use super::checkpoint::{Checkpoint, TensorRef};
use super::hashed_file::{HashedFile, unwritable};
use super::hashes::{FileHash, sha256};
use super::manifest::{Axis, Geometry, Manifest, Part, PartShape, Role};
use super::mmap::{Bytes, PAGE};
use super::pack::{PACK, Pack, share_name, share_shape};
use crate::error::{Error, Result};

/// Bytes written at a time.
const CHUNK_BYTES: usize = 8 << 20;
/// What a pack takes along, besides an EAGLE-3 head: all that a load reads, and the terms of use.
const CARRIED: [&str; 6] = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
];
const TERMS: [&str; 2] = ["LICENSE", "NOTICE"];

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packed {
    /// Files, the description included.
    pub files: usize,
    /// Bytes of them.
    pub bytes: u64,
}

/// A checkpoint and what is to be made of it.
pub struct Packing<'a> {
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// Its family's table.
    pub manifest: &'a Manifest,
    /// Its audit.
    pub audit: &'a Audit,
    /// The model's sizes.
    pub geometry: &'a Geometry,
    /// Ranks to cut it for.
    pub tp: usize,
}

/// A tensor of a pack: where its bytes are in the checkpoint.
struct Piece {
    name: String,
    info: TensorInfo,
    whole: Bytes,
    part: Stretch,
}

/// What a share takes of a tensor's bytes.
enum Stretch {
    Run(Range<usize>),
    /// The same bytes of every row of so many.
    OfRows(usize, Range<usize>),
}

/// What the threads of a pack share.
struct Work<'a> {
    aside: &'a Path,
    progress: &'a (dyn Fn(u64, u64) + Sync),
    total: u64,
    /// The first thing that went wrong: the other threads stop for it.
    fault: Mutex<Option<Error>>,
}

impl Packing<'_> {
    /// Writes the pack as the new folder `target`. `progress` is called with the bytes written since
    /// its last call and all of them, from several threads.
    ///
    /// # Errors
    /// Input error if the checkpoint is not whole, is a pack, or cannot be cut so; runtime error if
    /// the disk does not take it. Nothing is left then.
    pub fn write(&self, target: &Path, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<Packed> {
        self.audit.refuse_errors()?;
        if self.checkpoint.pack.is_some() {
            let from = self.checkpoint.source.display("");
            return Err(Error::input(format!(
                "{from}: is a pack already; pack the checkpoint that it was made of"
            )));
        }
        self.audit.check_ranks(self.manifest, self.geometry, self.tp)?;
        let files = self.plan()?;
        let aside = aside(target)?;
        let packed = self.fill(&aside, files, progress).and_then(|packed| {
            std::fs::rename(&aside, target).map_err(|e| unwritable(target, &e))?;
            sync_folder_of(target);
            Ok(packed)
        });
        if packed.is_err() {
            // What was in the way of writing may be in the way of this as well; the name tells.
            let _ = std::fs::remove_dir_all(&aside);
        }
        packed
    }

    /// What all ranks hold whole, and behind it the shares of each.
    fn plan(&self) -> Result<Vec<Vec<Piece>>> {
        let mut files: Vec<Vec<Piece>> = Vec::new();
        files.resize_with(1 + self.tp, Vec::new);
        let mut modules = self.manifest.modules(self.geometry)?;
        modules.sort_by_key(|module| module.layer.map_or(0, |layer| layer + 1));
        for module in modules {
            let entry = &self.manifest.entries[module.entry];
            // The MTP layer's own copies of head and embedding, which nothing reads.
            let resolved = self.audit.modules.get(&module.name).filter(|_| !entry.optional);
            let Some(resolved) = resolved else {
                continue;
            };
            let format = &self.manifest.formats[resolved.format];
            for (role, tensor) in &resolved.parts {
                let part = format.parts.iter().find(|part| part.role == *role);
                let Some(part) = part.filter(|_| *role != Role::Unused) else {
                    continue;
                };
                match entry.slice.as_ref() {
                    None => files[0].push(self.piece(None, resolved, part, tensor)?),
                    Some(rule) => {
                        for rank in 0..self.tp {
                            let share = Some((rank, rule.axis));
                            files[1 + rank].push(self.piece(share, resolved, part, tensor)?);
                        }
                    }
                }
            }
        }
        Ok(files)
    }

    /// A tensor, or a rank's share of it.
    fn piece(
        &self,
        share: Option<(usize, Axis)>,
        resolved: &Resolved,
        part: &Part,
        tensor: &TensorRef,
    ) -> Result<Piece> {
        let whole = self.checkpoint.bytes(tensor);
        let module = &resolved.module;
        let name = part.tensor_name(&module.name);
        let piece = |name: String, shape: &[usize], part: Stretch| {
            let len = part.len();
            let info =
                TensorInfo { dtype: tensor.dtype, shape: shape.to_vec(), data_offsets: (0, len) };
            Piece { name, info, whole: whole.clone(), part }
        };
        let Some((rank, axis)) = share else {
            return Ok(piece(name, &tensor.shape, Stretch::Run(0..whole.len())));
        };
        let name = share_name(rank, &name);
        if part.shape == PartShape::Scalar {
            return Ok(piece(name, &tensor.shape, Stretch::Run(0..whole.len())));
        }
        let own = share_shape(&module.shape, axis, self.tp);
        let cut = if axis == Axis::Rows { own.first() } else { own.last() }.copied().unwrap_or(0);
        if part.shape == PartShape::Per128x128 && self.tp > 1 && !cut.is_multiple_of(128) {
            return Err(Error::input(format!(
                "tensor {name}: a share of {cut} splits a block of 128 that shares a scale; pack \
                 with a smaller --tp"
            )));
        }
        let (Some(shape), [rows, _]) = (part.shape.of(&own), &tensor.shape[..]) else {
            return Err(Error::input(format!(
                "tensor {name}: {} ranks cannot share it; pack with a smaller --tp",
                self.tp
            )));
        };
        let per_rank = |bytes: usize| rank * (bytes / self.tp)..(rank + 1) * (bytes / self.tp);
        let stretch = match axis {
            Axis::Rows => Stretch::Run(per_rank(whole.len())),
            Axis::Columns => Stretch::OfRows(*rows, per_rank(whole.len() / (*rows).max(1))),
        };
        Ok(piece(name, &shape, stretch))
    }

    /// Writes all files into the folder; the description last.
    fn fill(
        &self,
        aside: &Path,
        mut files: Vec<Vec<Piece>>,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Packed> {
        let bytes =
            |file: &Vec<Piece>| file.iter().map(|piece| piece.part.len() as u64).sum::<u64>();
        let total = files.iter().map(bytes).sum();
        let work = Work { aside, progress, total, fault: Mutex::new(None) };
        let written: Vec<Option<FileHash>> = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (index, pieces) in files.iter_mut().enumerate() {
                let name = match index {
                    0 => "whole.safetensors".to_owned(),
                    rank => format!("rank-{}-of-{}.safetensors", rank - 1, self.tp),
                };
                let work = &work;
                threads.push(scope.spawn(move || {
                    let done = work.write_tensors(&name, pieces);
                    done.map_err(|error| work.fault().get_or_insert(error).clone()).ok()
                }));
            }
            threads.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
        });
        if let Some(fault) = work.fault().take() {
            return Err(fault);
        }
        let written: Option<Vec<FileHash>> = written.into_iter().collect();
        let ended = || Error::runtime("a writer ended; its message is above");
        let mut files = written.ok_or_else(ended)?;
        // Files of two packs have different names, though their tensors may have the same.
        let hashes: String = files.iter().map(|file| file.sha256.as_str()).collect();
        let id = &sha256(hashes.as_bytes())[..12];
        for file in &mut files {
            let named = format!("pack-{id}-{}", file.name);
            let (from, to) = (aside.join(&file.name), aside.join(&named));
            std::fs::rename(&from, &to).map_err(|e| unwritable(&to, &e))?;
            file.name = named;
        }
        for name in self.carried()? {
            files.push(work.write_file(&name, &self.checkpoint.source.require(&name)?)?);
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        let bytes = files.iter().map(|file| file.bytes).sum::<u64>();
        let packed = Packed { files: files.len() + 1, bytes };
        let description = serde_json::to_string_pretty(&Pack::new(self.tp, files))
            .map_err(|e| Error::runtime(format!("cannot write JSON: {e}")))?;
        let description = work.write_file(PACK, description.as_bytes())?;
        File::open(aside)
            .and_then(|folder| folder.sync_all())
            .map_err(|e| unwritable(aside, &e))?;
        Ok(Packed { bytes: packed.bytes + description.bytes, ..packed })
    }

    /// The files that are copied.
    fn carried(&self) -> Result<Vec<String>> {
        let wanted = |name: &String| {
            CARRIED.contains(&name.as_str())
                || TERMS.iter().any(|terms| name.starts_with(terms))
                || name.starts_with("eagle3/")
        };
        Ok(self.checkpoint.source.all_file_names()?.into_iter().filter(wanted).collect())
    }
}

impl Stretch {
    fn len(&self) -> usize {
        match self {
            Stretch::Run(range) => range.len(),
            Stretch::OfRows(rows, range) => rows * range.len(),
        }
    }
}

impl Work<'_> {
    fn fault(&self) -> MutexGuard<'_, Option<Error>> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a file of tensors.
    fn write_tensors(&self, name: &str, pieces: &mut [Piece]) -> Result<FileHash> {
        let mut header = Map::new();
        let mut end = 0;
        for piece in pieces.iter_mut() {
            let TensorInfo { dtype, shape, .. } = &piece.info;
            let begin = end;
            end += piece.part.len();
            let info = json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, end] });
            header.insert(piece.name.clone(), info);
        }
        let mut header = Value::from(header).to_string().into_bytes();
        // The data begin on a page.
        header.resize((8 + header.len()).next_multiple_of(PAGE) - 8, b' ');
        let mut file = HashedFile::create(self.aside, name)?;
        file.write(&(header.len() as u64).to_le_bytes())?;
        file.write(&header)?;
        for piece in pieces {
            self.write_piece(piece, &mut file)?;
        }
        file.finish()
    }

    fn write_piece(&self, piece: &Piece, file: &mut HashedFile) -> Result<()> {
        match &piece.part {
            Stretch::Run(range) => {
                for start in range.clone().step_by(CHUNK_BYTES) {
                    let chunk = start..(start + CHUNK_BYTES).min(range.end);
                    let bytes = read(&piece.whole, chunk)?;
                    self.write_chunk(&bytes, file)?;
                }
            }
            Stretch::OfRows(rows, range) => {
                let width = (piece.whole.len() / (*rows).max(1)).max(1);
                let at_a_time = (CHUNK_BYTES / width).max(1);
                for first in (0..*rows).step_by(at_a_time) {
                    let count = at_a_time.min(rows - first);
                    let bytes = read(&piece.whole, first * width..(first + count) * width)?;
                    let mut own = Vec::with_capacity(count * range.len());
                    for row in bytes.chunks_exact(width) {
                        own.extend_from_slice(&row[range.clone()]);
                    }
                    self.write_chunk(&own, file)?;
                }
            }
        }
        Ok(())
    }

    fn write_chunk(&self, bytes: &[u8], file: &mut HashedFile) -> Result<()> {
        if let Some(fault) = &*self.fault() {
            return Err(fault.clone());
        }
        file.write(bytes)?;
        (self.progress)(bytes.len() as u64, self.total);
        Ok(())
    }

    /// Writes a whole file, maybe in a sub-folder.
    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<FileHash> {
        if let Some((folder, _)) = name.rsplit_once('/') {
            let folder = self.aside.join(folder);
            std::fs::create_dir_all(&folder).map_err(|e| unwritable(&folder, &e))?;
        }
        let mut file = HashedFile::create(self.aside, name)?;
        file.write(bytes)?;
        file.finish()
    }
}

/// A part of a tensor, read in.
fn read(whole: &Bytes, range: Range<usize>) -> Result<Bytes> {
    // The ranges are made of the tensor's own size.
    let bytes = whole.slice(range).unwrap_or_else(|| Bytes::embedded(&[]));
    bytes.read_in(true)?;
    Ok(bytes)
}

/// The folder in which the pack `target` is made.
fn aside(target: &Path) -> Result<PathBuf> {
    let refuse =
        |path: &Path, what: &str| Err(Error::input(format!("--pack {}: {what}", path.display())));
    let Some(name) = target.file_name() else {
        return refuse(target, "expected the name of a new folder");
    };
    if target.symlink_metadata().is_ok() {
        return refuse(target, "is there already; choose a new folder, or remove it");
    }
    let mut name = name.to_owned();
    name.push(".partial");
    let aside = target.with_file_name(name);
    match std::fs::create_dir(&aside) {
        Ok(()) => Ok(aside),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => refuse(
            &aside,
            "another run is writing there, or was ended while it did; if it was, remove the folder",
        ),
        Err(e) => Err(Error::input(format!(
            "--pack {}: cannot make the folder: {e}; check the path and its permissions",
            aside.display()
        ))),
    }
}

/// A new name lasts when its folder is on the disk; where that cannot be had, the system writes it soon.
fn sync_folder_of(path: &Path) {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let _ = File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
}
