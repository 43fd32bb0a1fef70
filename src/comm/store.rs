//! What a qualification chose, kept for the next start on the same box.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::{Choice, Qualified, Variant};

/// Where it is kept: `$XDG_CACHE_HOME/talon` or `~/.cache/talon`; nowhere without either.
pub(super) fn folder() -> Option<PathBuf> {
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
