//! A pack: a checkpoint that was cut beforehand for a number of ranks (`talon verify --pack`).
//!
//! One file holds what every rank has whole, and each rank has a file with its shares, all tensors in
//! the order of the layers. A share is a tensor of its own, `rank.3.model.layers…`, so everything that
//! reads checkpoints reads packs. The description names the files, which bear the pack's id, so those
//! of two packs do not mix; with their hashes, so it is a record for `--check-hashes` as well.

use serde::{Deserialize, Serialize};

use super::hashes::{FileHash, sha256};
use super::manifest::{Axis, Manifest, Module};
use super::source::Source;
use crate::error::{Error, Result};

/// The file that describes a pack.
pub const PACK: &str = "talon-pack.json";
/// Counts changes of what a pack looks like.
const LAYOUT: u64 = 1;

/// The description of a pack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pack {
    /// Version of what a pack looks like.
    layout: u64,
    /// The talon that wrote it.
    talon: String,
    /// SHA-256 of the manifest that it was cut by.
    manifest: String,
    /// Ranks that it is cut for.
    pub tp: usize,
    /// All other files of the pack.
    pub files: Vec<FileHash>,
}

/// What every version has.
#[derive(Deserialize)]
struct Version {
    layout: u64,
}

impl Pack {
    /// The description of a pack of these files.
    pub(super) fn new(tp: usize, files: Vec<FileHash>) -> Self {
        let talon = env!("CARGO_PKG_VERSION").to_owned();
        Self { layout: LAYOUT, talon, manifest: sha256(Manifest::GLM5.as_bytes()), tp, files }
    }

    /// The description of the pack that `source` is, if it is one.
    ///
    /// # Errors
    /// Input error if the description is damaged, or of another talon, manifest or config.json.
    pub fn of(source: &Source) -> Result<Option<Self>> {
        let Some(json) = source.open(PACK)? else {
            return Ok(None);
        };
        let file = source.display(PACK);
        let refuse = |what: String| {
            Error::input(format!(
                "{file}: {what}; pack the checkpoint again with talon verify --pack"
            ))
        };
        let damaged = |e: serde_json::Error| refuse(format!("not the description of a pack: {e}"));
        let Version { layout } = serde_json::from_slice(&json).map_err(damaged)?;
        if layout != LAYOUT {
            return Err(refuse(format!("expected layout {LAYOUT} of a pack, found {layout}")));
        }
        let pack: Self = serde_json::from_slice(&json).map_err(damaged)?;
        if !matches!(pack.tp, 1 | 2 | 4 | 8) {
            return Err(refuse(format!("expected 1, 2, 4 or 8 ranks, found {}", pack.tp)));
        }
        let plain = |name: &str| name.split('/').all(Source::is_plain_name);
        if let Some(found) = pack.files.iter().find(|file| !plain(&file.name)) {
            let name = &found.name;
            return Err(refuse(format!("expected names inside the pack, found {name:?}")));
        }
        let manifest = sha256(Manifest::GLM5.as_bytes());
        if pack.manifest != manifest {
            return Err(refuse(format!(
                "cut by another table of tensors, that of talon {}: expected manifest {manifest}, \
                 found {}",
                pack.talon, pack.manifest
            )));
        }
        let recorded = pack.files.iter().find(|file| file.name == "config.json");
        let recorded = recorded.map_or("none", |file| &file.sha256);
        let found = sha256(&source.require("config.json")?);
        if recorded != found {
            return Err(Error::input(format!(
                "{}: not the file that was packed: expected SHA-256 {recorded}, found {found}; \
                 restore it, or pack the checkpoint again with talon verify --pack",
                source.display("config.json")
            )));
        }
        Ok(Some(pack))
    }

    /// Names of the files that hold tensors, the head's in its folder left out.
    pub(super) fn shards(&self) -> Vec<String> {
        let names = self.files.iter().map(|file| &file.name);
        names
            .filter(|name| name.ends_with(".safetensors") && !name.contains('/'))
            .cloned()
            .collect()
    }

    /// Refuses another number of ranks than it is cut for.
    ///
    /// # Errors
    /// Input error that says how to get what was asked for.
    pub fn check_ranks(&self, tp: usize) -> Result<()> {
        if tp == self.tp {
            return Ok(());
        }
        Err(Error::input(format!(
            "--tp {tp}: the model is a pack for {} ranks; use --tp {0}, or the checkpoint that was \
             packed, which talon verify --pack DIR --tp {tp} packs for {tp}",
            self.tp
        )))
    }

    /// A module of the model as the pack holds it: whole, or a share for each rank.
    pub(super) fn stored(&self, manifest: &Manifest, module: Module) -> Vec<Module> {
        let Some(rule) = &manifest.entries[module.entry].slice else {
            return vec![module];
        };
        let share = |rank| Module {
            name: share_name(rank, &module.name),
            shape: share_shape(&module.shape, rule.axis, self.tp),
            ..module.clone()
        };
        (0..self.tp).map(share).collect()
    }
}

/// The name of a rank's share of a module or tensor.
pub fn share_name(rank: usize, name: &str) -> String {
    format!("rank.{rank}.{name}")
}

/// The shape of a rank's share.
pub(super) fn share_shape(whole: &[usize], axis: Axis, ranks: usize) -> Vec<usize> {
    let mut shape = whole.to_vec();
    let cut = if axis == Axis::Rows { shape.first_mut() } else { shape.last_mut() };
    cut.into_iter().for_each(|dim| *dim /= ranks);
    shape
}
