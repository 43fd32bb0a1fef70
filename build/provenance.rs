//! What the binary is made from: the commit, the compiler, and the crates at their locked versions.
//! Nothing of the machine or of the time goes in, so that two builds of one commit are the same bytes.

use std::{env, fs, process::Command};

/// All that goes into the binary, apart from what the toolchain brings. Documents and tests may
/// differ from the commit without a word.
const INPUTS: &[&str] = &[
    "Cargo.toml",
    "Cargo.lock",
    "build.rs",
    "build",
    "src",
    "kernels",
    "demo",
    "weights-manifest",
];

/// Sets `TALON_COMMIT`, `TALON_RUSTC` and `TALON_CRATES` for the crate; the error is what to tell the user.
pub fn record() -> Result<(), String> {
    println!("cargo::rustc-env=TALON_COMMIT={}", commit());
    let rustc = env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = output(&rustc, &["--version"]).unwrap_or_else(|| "unknown rustc".into());
    println!("cargo::rustc-env=TALON_RUSTC={version}");
    println!("cargo::rustc-env=TALON_CRATES={}", crates()?.join(" "));
    Ok(())
}

/// The commit, with `-dirty` where an input is not as committed; `unknown` outside a git checkout
/// (a source archive).
fn commit() -> String {
    let git = |args: &[&str]| output("git", &[&["--no-optional-locks"], args].concat());
    // HEAD moves, the branch that it names does, or an input changes.
    for name in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--git-path", name]) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    for input in INPUTS {
        println!("cargo::rerun-if-changed={input}");
    }
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else { return "unknown".into() };
    let changes = git(&[&["status", "--porcelain", "--"], INPUTS].concat());
    if changes.is_some_and(|list| list.is_empty()) { commit } else { commit + "-dirty" }
}

/// `name=version` of every crate that Cargo.toml's `[dependencies]` names, as Cargo.lock has it.
fn crates() -> Result<Vec<String>, String> {
    let read = |name: &str| fs::read_to_string(name).map_err(|error| format!("{name}: {error}"));
    let (manifest, lock) = (read("Cargo.toml")?, read("Cargo.lock")?);
    let section = manifest.lines().skip_while(|line| *line != "[dependencies]").skip(1);
    let names = section.take_while(|line| !line.starts_with('[')).filter_map(|line| {
        let (name, _) = line.split_once('=')?;
        Some(name.trim())
    });
    // talon's own entry adds the version to a name that is there in several.
    let own = lock.split("[[package]]").find(|entry| entry.contains("\nname = \"talon\"\n"));
    let own = own.ok_or("Cargo.lock: no package talon; git checkout Cargo.lock")?;
    names
        .map(|name| {
            let several = own.lines().find_map(|line| line.strip_prefix(&format!(" \"{name} ")));
            let only = || {
                let (_, entry) = lock.split_once(&format!("\nname = \"{name}\"\nversion = \""))?;
                entry.lines().next()
            };
            let version = several.or_else(only).map(|text| text.trim_end_matches(['"', ',']));
            let version = version.ok_or_else(|| format!("Cargo.lock: no package {name}"))?;
            Ok(format!("{name}={version}"))
        })
        .collect()
}

/// What a program printed, trimmed; none if it cannot be run or fails.
fn output(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
