//! Promise: the table of kernels/README.md lists every kernel file, and the binary holds each of them
//! unless it was built without nvcc.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use talon::cuda::kernels::{FATBINS, TARGETS, fatbin};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// The stem of every `.cu` file.
fn stems() -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder()).expect("the folder of kernels");
    let names = entries.map(|entry| entry.expect("an entry").file_name().into_string().unwrap());
    names.filter_map(|name| name.strip_suffix(".cu").map(str::to_owned)).collect()
}

#[test]
fn the_table_lists_every_kernel_file_once() {
    let readme = std::fs::read_to_string(folder().join("README.md")).unwrap();
    let (_, table) =
        readme.split_once("\n| file | stage or job | launches |\n|---|---|---|\n").unwrap();
    let mut listed = BTreeSet::new();
    for row in table.lines().take_while(|line| line.starts_with('|')) {
        let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [file, job, launches] = cells[..] else { panic!("three cells expected: {row}") };
        assert!(!job.is_empty() && !launches.is_empty(), "an empty cell: {row}");
        let stem = file.trim_matches('`').strip_suffix(".cu");
        let stem = stem.unwrap_or_else(|| panic!("not a .cu file: {row}"));
        assert!(listed.insert(stem.to_owned()), "listed twice: {row}");
    }
    assert_eq!(listed, stems());
}

#[test]
fn the_binary_holds_every_kernel_file() {
    if TARGETS.is_empty() {
        assert!(FATBINS.is_empty());
        return;
    }
    assert_eq!(
        FATBINS.iter().map(|(stem, _)| (*stem).to_owned()).collect::<BTreeSet<_>>(),
        stems()
    );
    for (stem, bytes) in FATBINS {
        assert!(bytes.starts_with(&0xba55_ed50_u32.to_le_bytes()), "{stem}: not a fatbin");
        assert!(bytes.as_ptr().addr().is_multiple_of(16), "{stem}: not aligned");
        assert_eq!(fatbin(stem).map(<[u8]>::len), Some(bytes.len()));
    }
    assert!(fatbin("no such kernel").is_none());
}
