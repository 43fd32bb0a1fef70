//! Where a checkpoint's files come from: a directory, or the demo model inside the binary.

use std::ffi::OsString;
use std::path::PathBuf;

use log::warn;

use super::demo::{demo, demo_eagle3};
use super::mmap::Bytes;
use super::synthetic::config_json;
use crate::error::{Error, Result, one_line};

/// A file that is part of the binary.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddedFile {
    /// Name relative to the checkpoint's root.
    pub name: &'static str,
    /// The whole content.
    pub bytes: &'static [u8],
}

/// A read-only collection of named files.
#[derive(Clone)]
pub enum Source {
    /// A checkpoint directory.
    Directory(PathBuf),
    /// Files inside the binary, and the name to show for them.
    Embedded(&'static str, &'static [EmbeddedFile]),
    /// A model of true shapes with random weights: its name and its config.json.
    Synthetic(String, Bytes),
}

impl Source {
    /// The source that `--model` names: `demo`, `synthetic:glm-5.2` and its like, or a directory.
    /// `layers` cuts a synthetic model to its first layers.
    ///
    /// # Errors
    /// Input error for a synthetic model that is not known, or layers of one that is not synthetic.
    pub fn from_name(model: &str, layers: Option<usize>) -> Result<Self> {
        if let Some(name) = model.strip_prefix("synthetic:") {
            let json = config_json(name, layers)?;
            return Ok(Source::Synthetic(model.to_owned(), Bytes::owned(json)));
        }
        if let Some(layers) = layers {
            return Err(Error::input(format!(
                "--layers {layers}: only synthetic models can be cut, such as --model \
                 synthetic:glm-5.2"
            )));
        }
        Ok(match model {
            "demo" => demo(),
            path => Source::Directory(PathBuf::from(path)),
        })
    }

    /// The EAGLE-3 head that came with this checkpoint: its sub-folder `eagle3`.
    pub fn eagle3_head(&self) -> Option<Self> {
        match self {
            Source::Embedded("demo", _) => Some(demo_eagle3()),
            Source::Embedded(..) | Source::Synthetic(..) => None,
            Source::Directory(directory) => {
                let head = directory.join("eagle3");
                head.is_dir().then_some(Source::Directory(head))
            }
        }
    }

    /// How messages name `file`: its path, or `demo/config.json`.
    pub fn display(&self, file: &str) -> String {
        match self {
            Source::Directory(directory) => directory.join(file).display().to_string(),
            Source::Embedded(name, _) => format!("{name}/{file}"),
            Source::Synthetic(name, _) => format!("{name}/{file}"),
        }
    }

    /// The bytes of `file`, or `None` if there is no such file.
    ///
    /// # Errors
    /// Input error if it exists and cannot be mapped.
    pub fn open(&self, file: &str) -> Result<Option<Bytes>> {
        match self {
            Source::Directory(directory) => {
                let path = directory.join(file);
                if path.exists() { Bytes::map(&path).map(Some) } else { Ok(None) }
            }
            Source::Embedded(_, files) => {
                if let Some(file) = file.strip_prefix("eagle3/") {
                    return self.eagle3_head().map_or(Ok(None), |head| head.open(file));
                }
                let found = files.iter().find(|embedded| embedded.name == file);
                Ok(found.map(|embedded| Bytes::embedded(embedded.bytes)))
            }
            Source::Synthetic(_, config) => Ok((file == "config.json").then(|| config.clone())),
        }
    }

    /// As [`Source::open`], for a file that must be there.
    ///
    /// # Errors
    /// Input error if it is missing or cannot be mapped.
    pub fn require(&self, file: &str) -> Result<Bytes> {
        self.open(file)?.ok_or_else(|| {
            Error::input(format!(
                "{}: not found; a checkpoint directory must hold it, so check --model and the \
                 download",
                self.display(file)
            ))
        })
    }

    /// Whether `name` is the plain name of a file in a folder: no path, no way out of the folder.
    pub fn is_plain_name(name: &str) -> bool {
        !matches!(name, "" | "." | "..") && !name.contains(['/', '\\', '\0'])
    }

    /// Names of the regular files, sorted; sub-folders are not entered, and names that are not UTF-8
    /// are left out.
    ///
    /// # Errors
    /// Input error if the directory cannot be listed.
    pub fn file_names(&self) -> Result<Vec<String>> {
        let names = self.raw_names()?.into_iter();
        Ok(names.filter_map(|name| name.into_string().ok()).collect())
    }

    /// As [`Source::file_names`], with those of the EAGLE-3 head as `eagle3/NAME`. Tells what it
    /// leaves out.
    ///
    /// # Errors
    /// Input error if a directory cannot be listed.
    pub fn all_file_names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for (prefix, source) in [("", Some(self.clone())), ("eagle3/", self.eagle3_head())] {
            let Some(source) = source else { continue };
            for name in source.raw_names()? {
                match name.to_str() {
                    Some(name) => names.push(format!("{prefix}{name}")),
                    None => warn!(
                        "{}: left out, its name is not UTF-8; rename it",
                        one_line(source.display(&name.to_string_lossy()))
                    ),
                }
            }
        }
        Ok(names)
    }

    fn raw_names(&self) -> Result<Vec<OsString>> {
        let directory = match self {
            Source::Directory(directory) => directory,
            Source::Embedded(_, files) => {
                return Ok(files.iter().map(|file| file.name.into()).collect());
            }
            Source::Synthetic(..) => return Ok(vec!["config.json".into()]),
        };
        let fail = |e| {
            Error::input(format!(
                "{}: cannot list the directory: {e}; --model takes a checkpoint directory or \
                 `demo`",
                directory.display()
            ))
        };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(directory).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            // Follows links: hub caches hold links to blobs.
            if entry.path().is_file() {
                names.push(entry.file_name());
            }
        }
        names.sort();
        Ok(names)
    }
}
