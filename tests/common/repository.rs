//! Where the files of the repository are when a test runs.

use std::path::{Path, PathBuf};

/// A file of the repository: below TALON_REPOSITORY, if that is set; else where the test was built; or,
/// on a box to which only the test's binary and a checkout were carried, below the current directory.
pub fn repository(path: &str) -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR"));
    match std::env::var_os("TALON_REPOSITORY") {
        Some(folder) => Path::new(&folder).join(path),
        None if built.is_dir() => built.join(path),
        None => PathBuf::from(path),
    }
}
