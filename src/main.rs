//! Parse, dispatch, exit code; nothing else.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args = std::env::args_os().skip(1);
    // Arguments that are not UTF-8 can only be paths, and only lose characters that no file of ours
    // has; the file is then reported as missing.
    talon::cli::run(args.map(|arg| arg.to_string_lossy().into_owned()).collect())
}
