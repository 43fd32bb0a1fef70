//! A box as a tree of files and an environment: this one, or one that was recorded.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// No file that is looked at needs more; a longer one is cut.
const MOST_BYTES: usize = 4 << 20;

/// Where checks read. Paths are below the root, without a leading slash.
pub struct View {
    root: PathBuf,
    environment: BTreeMap<String, String>,
    recorded: bool,
}

impl View {
    /// This box.
    pub fn of_this_box() -> Self {
        let variables = std::env::vars_os();
        let text = |os: std::ffi::OsString| os.to_string_lossy().into_owned();
        Self {
            root: PathBuf::from("/"),
            environment: variables.map(|(name, value)| (text(name), text(value))).collect(),
            recorded: false,
        }
    }

    /// A recorded box: a folder that holds proc, sys and the like, and `environ` for the environment
    /// (as /proc/self/environ has it, or a variable a line).
    ///
    /// # Errors
    /// Input error if there is no such folder.
    pub fn recorded(root: &Path) -> Result<Self> {
        let root = root.canonicalize().ok().filter(|root| root.is_dir()).ok_or_else(|| {
            Error::input(format!(
                "--root {}: no such folder; expected one that holds proc, sys and etc of a box",
                root.display()
            ))
        })?;
        let mut view = Self { root, environment: BTreeMap::new(), recorded: true };
        let text = view.text("environ").unwrap_or_default();
        let variables = text.split(['\0', '\n']).filter_map(|line| line.split_once('='));
        view.environment =
            variables.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Ok(view)
    }

    /// Whether this is a recorded box, of which nothing can be measured.
    pub fn is_recorded(&self) -> bool {
        self.recorded
    }

    /// The content of a file; `None` if it cannot be read. Neither pipes nor devices hold it up.
    pub fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        let open = |path: PathBuf| {
            OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()
        };
        let mut file = open(self.root.join(path))?;
        let mut bytes = Vec::new();
        let mut part = vec![0; 64 << 10];
        while bytes.len() < MOST_BYTES {
            match file.read(&mut part) {
                Ok(0) => break,
                Ok(read) => bytes.extend_from_slice(&part[..read]),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // A device that has no more to say now, as the kernel's log.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                // Records of the kernel's log that were overwritten meanwhile.
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
                Err(_) if bytes.is_empty() => return None,
                Err(_) => break,
            }
        }
        Some(bytes)
    }

    /// The content of a file as text, without space around it; `None` also for an empty one.
    pub fn text(&self, path: &str) -> Option<String> {
        let bytes = self.bytes(path)?;
        let text = String::from_utf8_lossy(&bytes).trim().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// The number that a file holds.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// The names in a folder, in order; none if it cannot be read.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.root.join(path));
        let mut names: Vec<String> = entries
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    /// Whether there is a file or folder.
    pub fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// Bytes of a file, as its folder has them.
    pub fn size(&self, path: &str) -> Option<u64> {
        Some(std::fs::metadata(self.root.join(path)).ok()?.len())
    }

    /// Bytes that its user may still write to the disk of a folder; a recorded box has them in the file
    /// `free_bytes`.
    pub fn free_bytes(&self, folder: &str) -> Option<u64> {
        if self.recorded {
            return self.number("free_bytes");
        }
        let disk = nix::sys::statvfs::statvfs(folder).ok()?;
        Some(disk.blocks_available().saturating_mul(disk.fragment_size()))
    }

    /// Where a path leads, links followed; `None` if it leads out of the tree.
    pub fn resolve(&self, path: &str) -> Option<String> {
        let target = self.root.join(path).canonicalize().ok()?;
        Some(target.strip_prefix(&self.root).ok()?.to_str()?.to_owned())
    }

    /// Variables in the order of their names.
    pub fn variables(&self) -> impl Iterator<Item = (&str, &str)> {
        self.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The value of the first `name: value` line of a file (`separator` between them).
    pub fn field(&self, path: &str, name: &str, separator: char) -> Option<String> {
        field(&self.text(path)?, name, separator)
    }
}

/// The value of the first `name: value` line (`separator` between them).
pub(super) fn field(text: &str, name: &str, separator: char) -> Option<String> {
    let (_, value) = text
        .lines()
        .filter_map(|line| line.split_once(separator))
        .find(|(found, _)| found.trim() == name)?;
    Some(value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_and_trimmed() {
        let text = "MemTotal:       24610912 kB\nMemFree: 1 kB\n";
        assert_eq!(field(text, "MemTotal", ':').as_deref(), Some("24610912 kB"));
        assert_eq!(field(text, "SwapTotal", ':'), None);
        assert_eq!(field("PRETTY_NAME=\"X 12\"", "PRETTY_NAME", '=').as_deref(), Some("\"X 12\""));
    }

    #[test]
    fn a_recorded_tree_is_read_and_not_left() {
        let folder = tempfile::tempdir().expect("a folder");
        let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text);
        put("environ", "A=1\0B=x=y\0").expect("written");
        put("number", " 12\n").expect("written");
        std::os::unix::fs::symlink("/etc", folder.path().join("out")).expect("a link");
        std::os::unix::fs::symlink("number", folder.path().join("in")).expect("a link");
        let view = View::recorded(folder.path()).expect("a folder");
        assert!(view.variables().any(|variable| variable == ("B", "x=y")));
        assert_eq!(view.number("number"), Some(12));
        assert_eq!(view.number("environ"), None);
        assert_eq!(view.resolve("in").as_deref(), Some("number"));
        assert_eq!((view.resolve("out"), view.text("none")), (None, None));
        assert!(View::recorded(&folder.path().join("none")).is_err());
    }

    #[test]
    fn pipes_and_folders_hold_nothing_up() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        let view = View::recorded(folder.path()).expect("a folder");
        if made.is_ok_and(|status| status.success()) {
            assert_eq!(view.text("pipe"), None);
        }
        assert_eq!(view.bytes("."), None);
    }
}
