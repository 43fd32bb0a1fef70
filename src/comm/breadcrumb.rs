//! What lies on the disk while something is tried that may take the whole box down.

use std::io::Write;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::store::folder;

/// What is being tried, and by whom.
#[derive(Debug, Clone, PartialEq)]
pub struct Trial {
    /// The box, in the words of whoever tries.
    pub place: String,
    /// What is tried, in words that go behind "never came back from".
    pub what: String,
    /// The process.
    pub pid: u32,
    /// When the process began, as /proc/PID/stat counts: a later one of the same number has another.
    pub began: Option<u64>,
}

impl Trial {
    /// Reads what a file holds. Whatever is in it, something was tried.
    pub fn parse(text: &str) -> Self {
        let stored: Value = serde_json::from_str(text).unwrap_or_default();
        let word = |name: &str| stored[name].as_str().map(str::to_owned);
        Self {
            place: word("box").unwrap_or_else(|| text.to_owned()),
            what: word("what").unwrap_or_else(|| "something that it tried".into()),
            pid: stored["pid"].as_u64().and_then(|pid| pid.try_into().ok()).unwrap_or(0),
            began: stored["began"].as_u64(),
        }
    }

    /// Whether the process is still at it; `stat` is its /proc/PID/stat.
    pub fn is_running(&self, stat: Option<&str>) -> bool {
        self.began.is_some() && stat.and_then(began) == self.began
    }

    fn text(&self) -> String {
        json!({
            "schema": 1, "box": self.place, "what": self.what, "pid": self.pid, "began": self.began,
        })
        .to_string()
    }
}

/// When a process began: the 22nd field, counted behind the name, which may hold anything.
fn began(stat: &str) -> Option<u64> {
    let (_, behind) = stat.rsplit_once(')')?;
    behind.split_whitespace().nth(19)?.parse().ok()
}

/// A file that says what is tried. It goes away when this is dropped; who finds one whose process is
/// gone knows that it never came back.
pub struct Breadcrumb(PathBuf);

impl Breadcrumb {
    /// While a start tries the links between GPUs.
    pub const LINKS: &str = "links.trying";
    /// While `talon doctor --deep` measures.
    pub const DOCTOR: &str = "doctor.trying";

    /// Leaves one, if there is a place for it; an earlier one of this name is replaced.
    pub fn leave(name: &str, place: &str, what: &str) -> Option<Self> {
        Self::leave_in(folder()?, name, place, what)
    }

    /// Whether one was left here by a process that is gone.
    pub fn is_left(name: &str, place: &str) -> bool {
        folder().is_some_and(|folder| Self::is_left_in(folder, name, place))
    }

    /// Goes away without its file, since what it tells of is still under way.
    pub fn keep(self) {
        std::mem::forget(self);
    }

    fn leave_in(folder: PathBuf, name: &str, place: &str, what: &str) -> Option<Self> {
        std::fs::create_dir_all(&folder).ok()?;
        let pid = std::process::id();
        let trial = Trial {
            place: place.to_owned(),
            what: what.to_owned(),
            pid,
            began: std::fs::read_to_string("/proc/self/stat").ok().as_deref().and_then(began),
        };
        let path = folder.join(name);
        // It must be on the disk itself before anything is tried, and so must its name.
        let mut file = std::fs::File::create(&path).ok()?;
        file.write_all(trial.text().as_bytes()).and_then(|()| file.sync_all()).ok()?;
        std::fs::File::open(&folder).and_then(|folder| folder.sync_all()).ok()?;
        Some(Self(path))
    }

    fn is_left_in(folder: PathBuf, name: &str, place: &str) -> bool {
        let Ok(text) = std::fs::read_to_string(folder.join(name)) else { return false };
        let trial = Trial::parse(&text);
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", trial.pid)).ok();
        trial.place == place && !trial.is_running(stat.as_deref())
    }
}

impl Drop for Breadcrumb {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            log::info!("{}: {error}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_that_never_came_back_is_seen_by_the_next() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = || folder.path().join("talon");
        let is_left = |here: &str| Breadcrumb::is_left_in(place(), "x", here);
        let crumb = Breadcrumb::leave_in(place(), "x", "this box", "a try").expect("room for it");
        // Its process, which is this one, is still at it.
        assert!(!is_left("this box"));
        let text = std::fs::read_to_string(place().join("x")).expect("it is there");
        crumb.keep();
        let gone = Trial { began: Some(1), ..Trial::parse(&text) };
        assert_eq!((gone.place.as_str(), gone.what.as_str()), ("this box", "a try"));
        std::fs::write(place().join("x"), gone.text()).expect("written");
        assert!(is_left("this box") && !is_left("another box"));
        drop(Breadcrumb::leave_in(place(), "x", "this box", "another try"));
        assert!(!is_left("this box"));
    }

    #[test]
    fn a_process_is_told_from_a_later_one_of_its_number() {
        let stat = "7 (a) b ( 1) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 1 1 1";
        let trial = |began| Trial { place: String::new(), what: String::new(), pid: 7, began };
        assert!(trial(Some(4711)).is_running(Some(stat)));
        for (began, stat) in
            [(Some(4712), Some(stat)), (Some(4711), None), (None, Some(stat)), (None, Some("7"))]
        {
            assert!(!trial(began).is_running(stat), "{began:?} {stat:?}");
        }
    }

    #[test]
    fn whatever_a_file_holds_something_was_tried() {
        for text in ["", "{", "[]", "an old one", r#"{"pid": -1}"#] {
            let trial = Trial::parse(text);
            assert_eq!((trial.place.as_str(), trial.pid), (text, 0));
            assert!(!trial.is_running(Some("0 (x) S")));
        }
    }
}
