//! Promise: dependencies between rooms point one way, and `unsafe` stays where it is allowed
//! (ARCHITECTURE.md, "Rooms").

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What each room may use besides itself and `error`.
const ROOMS: [(&str, &[&str]); 13] = [
    ("main", &["cli"]),
    ("cli", &["bench", "cuda", "doctor", "engine", "serve", "text", "weights"]),
    ("serve", &["engine", "text"]),
    ("bench", &["engine", "model", "spec", "text"]),
    ("doctor", &["comm", "cuda"]),
    ("engine", &["cpu", "cuda", "model", "spec", "text", "weights"]),
    ("spec", &["model"]),
    ("cpu", &["comm", "model", "weights"]),
    ("cuda", &["comm", "model", "weights"]),
    ("model", &["weights"]),
    ("comm", &[]),
    ("weights", &[]),
    ("text", &[]),
];

fn source_files(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).expect("a source directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files.extend(source_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// (path below src, text) of every source file.
fn sources() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let read = |path: PathBuf| {
        let name = path.strip_prefix(&root).expect("below src").display().to_string();
        (name, std::fs::read_to_string(&path).expect("UTF-8 source"))
    };
    source_files(&root).into_iter().map(read).collect()
}

fn room_of(file: &str) -> &str {
    file.split(['/', '.']).next().unwrap_or(file)
}

/// Rooms named after `crate::` or, in main.rs, `talon::`.
fn rooms_used(file: &str, text: &str) -> Vec<String> {
    let prefix = if file == "main.rs" { "talon::" } else { "crate::" };
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let word = |rest: &str| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    code.flat_map(|line| line.split(prefix).skip(1)).map(word).collect()
}

#[test]
fn rooms_use_only_what_their_row_allows() {
    let allowed: BTreeMap<&str, &[&str]> = ROOMS.into_iter().collect();
    let mut checked = 0;
    for (file, text) in sources() {
        let room = room_of(&file);
        if room == "lib" || room == "error" {
            continue;
        }
        let row = allowed.get(room).unwrap_or_else(|| panic!("{file}: {room} has no row"));
        for used in rooms_used(&file, &text) {
            checked += 1;
            let fine = used == room || used == "error" || row.contains(&used.as_str());
            assert!(fine, "{file} uses {used}; {room} may use only {row:?}");
        }
    }
    assert!(checked > 50, "only {checked} uses were found, so the reading is broken");
}

#[test]
fn unsafe_and_cudarc_stay_in_their_rooms() {
    for (file, text) in sources() {
        let code: Vec<&str> =
            text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        let has = |word: &str| code.iter().any(|line| line.contains(word));
        let may_be_unsafe = file.starts_with("cuda/") || file == "weights/mmap.rs";
        assert!(may_be_unsafe || !has("unsafe "), "{file}: unsafe code outside its rooms");
        assert!(file.starts_with("cuda/") || !has("cudarc"), "{file}: cudarc outside src/cuda");
    }
}

#[test]
fn only_cli_prints() {
    for (file, text) in sources() {
        let prints = ["println!", "print!(", "eprint"].iter().any(|word| text.contains(word));
        // build scripts and the signal handler aside, which write by themselves
        assert!(file.starts_with("cli/") || !prints, "{file} prints");
    }
}
