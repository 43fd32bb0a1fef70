//! Records the commit that the binary was built from, so that every report can name it, and compiles
//! the CUDA kernels.

#[path = "build/nvcc.rs"]
mod nvcc;

use std::process::Command;

fn main() {
    record_commit();
    if let Err(message) = nvcc::embed_kernels() {
        for line in message.lines() {
            println!("cargo::error={line}");
        }
    }
}

fn record_commit() {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    // Outside a git checkout (a source archive) there is no commit to name.
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".into());
    println!("cargo::rustc-env=TALON_COMMIT={commit}");
    // The commit changes when HEAD moves or the branch that it names does.
    for name in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--git-path", name]) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
}
