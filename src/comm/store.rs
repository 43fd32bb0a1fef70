//! What a qualification chose, kept for the next start on the same box.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{Choice, Qualified, Variant};

/// Where it is kept: `$XDG_CACHE_HOME/talon` or `~/.cache/talon`; nowhere without either.
fn folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
    Some(cache.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")))?.join("talon"))
}

/// The file that choices are kept in.
const LINKS: &str = "links.json";

/// The choice that was stored for this box; `None` for another box, or if the file is not ours to
/// read or was damaged: then the links are qualified anew.
pub fn load_choice(fingerprint: &str) -> Option<Choice> {
    parse(&read_cached(LINKS)?, fingerprint)
}

/// What an earlier run keeps under this name for the box's user; `None` if nothing does.
pub fn read_cached(name: &str) -> Option<String> {
    std::fs::read_to_string(folder()?.join(name)).ok()
}

/// Keeps a text under a name for later runs; the file is replaced whole. What cannot be stored is done
/// without.
pub fn write_cached(name: &str, text: &str) {
    let Some(folder) = folder() else { return };
    let file = folder.join(name);
    let stored = std::fs::create_dir_all(&folder).and_then(|()| {
        let new = file.with_extension(format!("{}.new", std::process::id()));
        std::fs::write(&new, text)?;
        std::fs::rename(&new, &file)
    });
    if let Err(error) = stored {
        log::info!("{}: not stored: {error}", file.display());
    }
}

/// Stores a choice; what cannot be stored is measured again next time. The file is replaced whole.
pub fn store_choice(fingerprint: &str, found: &Qualified) {
    write_cached(LINKS, &text(fingerprint, found));
}

/// What lies on the disk while links are tried: some boxes go down when one GPU touches another's memory.
/// It goes away when this is dropped; a start that finds one knows that an earlier one never came back.
pub struct Breadcrumb(PathBuf);

impl Breadcrumb {
    const NAME: &str = "links.trying";

    /// Leaves one for this box, if there is a place for it.
    pub fn leave(fingerprint: &str) -> Option<Self> {
        Self::leave_in(folder()?, fingerprint)
    }

    /// Whether an earlier start on this box has left one.
    pub fn is_there(fingerprint: &str) -> bool {
        folder().is_some_and(|folder| Self::is_in(&folder, fingerprint))
    }

    fn leave_in(folder: PathBuf, fingerprint: &str) -> Option<Self> {
        std::fs::create_dir_all(&folder).ok()?;
        let path = folder.join(Self::NAME);
        // It must be on the disk itself before anything is tried.
        let mut file = std::fs::File::create(&path).ok()?;
        file.write_all(fingerprint.as_bytes()).and_then(|()| file.sync_all()).ok()?;
        Some(Self(path))
    }

    fn is_in(folder: &Path, fingerprint: &str) -> bool {
        std::fs::read_to_string(folder.join(Self::NAME)).is_ok_and(|text| text == fingerprint)
    }
}

impl Drop for Breadcrumb {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            log::info!("{}: {error}", self.0.display());
        }
    }
}

fn text(fingerprint: &str, found: &Qualified) -> String {
    let steps = found.choice.steps().iter();
    let times = found.times.iter().map(|(rows, variant, times)| {
        json!({
            "rows": rows, "variant": variant.name(), "median_us": times.median,
            "worst_us": times.worst,
        })
    });
    json!({
        "schema": 1,
        "box": fingerprint,
        "choice": steps.map(|(rows, v)| json!([rows, v.name()])).collect::<Vec<_>>(),
        "faults": found.faults,
        "times": times.collect::<Vec<_>>(),
    })
    .to_string()
}

fn parse(text: &str, fingerprint: &str) -> Option<Choice> {
    let stored: Value = serde_json::from_str(text).ok()?;
    if stored["schema"] != 1 || stored["box"] != fingerprint {
        return None;
    }
    let step = |step: &Value| {
        let rows = usize::try_from(step[0].as_u64()?).ok()?;
        Some((rows, Variant::from_name(step[1].as_str()?)?))
    };
    Choice::of(stored["choice"].as_array()?.iter().map(step).collect::<Option<Vec<_>>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_read_back_on_the_same_box_only() {
        let choice = Choice::of(vec![(1, Variant::Push), (16, Variant::Owner)]).expect("rising");
        let found = Qualified { choice: choice.clone(), faults: vec!["x".into()], times: vec![] };
        let text = text("this box", &found);
        assert_eq!(parse(&text, "this box"), Some(choice));
        assert_eq!(parse(&text, "another box"), None);
    }

    #[test]
    fn a_start_that_never_came_back_is_seen_by_the_next() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = || folder.path().join("talon");
        let crumb = Breadcrumb::leave_in(place(), "this box").expect("a place for it");
        assert!(Breadcrumb::is_in(&place(), "this box"));
        assert!(!Breadcrumb::is_in(&place(), "another box"));
        drop(crumb);
        assert!(!Breadcrumb::is_in(&place(), "this box"));
        std::mem::forget(Breadcrumb::leave_in(place(), "this box"));
        assert!(Breadcrumb::is_in(&place(), "this box"));
    }

    #[test]
    fn damaged_files_are_as_none() {
        for text in [
            "",
            "{",
            "[]",
            "null",
            r#"{"schema":1,"box":"b"}"#,
            r#"{"schema":1,"box":"b","choice":[]}"#,
            r#"{"schema":1,"box":"b","choice":[[1]]}"#,
            r#"{"schema":1,"box":"b","choice":[[1,"fly"]]}"#,
            r#"{"schema":1,"box":"b","choice":[[-1,"push"]]}"#,
            r#"{"schema":1,"box":"b","choice":[[4,"push"],[1,"pull"]]}"#,
            r#"{"schema":2,"box":"b","choice":[[1,"push"]]}"#,
        ] {
            assert_eq!(parse(text, "b"), None, "{text}");
        }
    }
}
