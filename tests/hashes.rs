//! Promise: `--write-hashes` and `--check-hashes` prove that a box holds the right files: any other
//! byte, length or file is exit code 2 with its name.

mod common;

use std::path::PathBuf;

use common::{Copy, DEMO, INDEX, Outcome, SHARD_1, SHARD_2, TINY, read_json, repository, talon};
use serde_json::Value;

/// `sha256sum demo/glm-demo/config.json`
const DEMO_CONFIG_SHA256: &str = "433d32bd6aef7ee303d0c81d5be1284da2b5f6bbd94ab27a07a6b3b0b65ebc69";
/// `sha256sum demo/glm-demo/model-00002-of-00002.safetensors`
const DEMO_SHARD_2_SHA256: &str =
    "fb4ccc2fa20b91fa288ebeb7ee608b87d1c53a3e6267db047ec57571b716db37";

/// A copy of the small fixture and a record of its hashes outside of it.
fn recorded() -> (Copy, tempfile::TempDir, String) {
    let checkpoint = Copy::of(TINY);
    let directory = tempfile::tempdir().unwrap();
    let record = directory.path().join("hashes.json").to_str().unwrap().to_owned();
    let outcome = verify(&checkpoint, &["--write-hashes", &record]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    (checkpoint, directory, record)
}

fn verify(checkpoint: &Copy, more: &[&str]) -> Outcome {
    talon(&[&["verify", "--model", checkpoint.arg(), "--tp", "4"], more].concat())
}

fn check(checkpoint: &Copy, record: &str) -> Outcome {
    verify(checkpoint, &["--check-hashes", record])
}

fn assert_refused(outcome: &Outcome, words: &[&str]) {
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    common::assert_names(outcome, &(outcome.stdout.clone() + &outcome.stderr), words);
}

fn files(record: &str) -> Vec<Value> {
    read_json(&PathBuf::from(record))["files"].as_array().unwrap().clone()
}

#[test]
fn record_holds_size_and_sha256_of_every_file() {
    let (checkpoint, _directory, record) = recorded();
    let files = files(&record);
    let names: Vec<&str> = files.iter().map(|file| file["name"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        ["README.md", "config.json", "make_tiny.py", SHARD_1, SHARD_2, INDEX],
        "all of them, sorted"
    );
    for file in &files {
        let path = checkpoint.file(file["name"].as_str().unwrap());
        assert_eq!(file["bytes"], std::fs::metadata(path).unwrap().len());
        assert_eq!(file["sha256"].as_str().unwrap().len(), 64);
    }
    let outcome = check(&checkpoint, &record);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
}

#[test]
fn sha256_is_the_one_that_others_compute() {
    let directory = tempfile::tempdir().unwrap();
    let record = directory.path().join("hashes.json").to_str().unwrap().to_owned();
    let demo = repository(DEMO).display().to_string();
    let from_directory = talon(&["verify", "--model", &demo, "--write-hashes", &record]);
    assert_eq!(from_directory.code, Some(0), "{from_directory:?}");
    let files = files(&record);
    let hash = |name: &str| &files.iter().find(|file| file["name"] == name).unwrap()["sha256"];
    assert_eq!(hash("config.json"), DEMO_CONFIG_SHA256);
    assert_eq!(hash(SHARD_2), DEMO_SHARD_2_SHA256);
    // The model in the binary is the one in the repository.
    let embedded = talon(&["verify", "--model", "demo", "--check-hashes", &record]);
    assert_eq!(embedded.code, Some(0), "{embedded:?}");
}

#[test]
fn one_flipped_byte() {
    let (checkpoint, _directory, record) = recorded();
    for (file, from_end) in [(SHARD_2, 1), (SHARD_1, 300_000)] {
        let flip = |bytes: &mut Vec<u8>| {
            let at = bytes.len() - from_end;
            bytes[at] ^= 1;
        };
        checkpoint.edit_bytes(file, flip);
        assert_refused(&check(&checkpoint, &record), &[file, "SHA-256", "fetch the file again"]);
        checkpoint.edit_bytes(file, flip);
        assert_eq!(check(&checkpoint, &record).code, Some(0));
    }
}

#[test]
fn wrong_length_and_missing_file() {
    let (checkpoint, _directory, record) = recorded();
    checkpoint.edit_bytes("README.md", |bytes| bytes.truncate(10));
    assert_refused(&check(&checkpoint, &record), &["README.md", "10 bytes", "fetch the file"]);
    checkpoint.remove("README.md");
    assert_refused(&check(&checkpoint, &record), &["README.md", "no such file", "fetch"]);
}

#[test]
fn files_beside_the_recorded_ones_are_no_fault() {
    let (checkpoint, _directory, record) = recorded();
    checkpoint.write("notes.txt", "mine");
    assert_eq!(check(&checkpoint, &record).code, Some(0));
}

#[test]
fn record_that_is_none() {
    let (checkpoint, _directory, record) = recorded();
    for text in ["", "{", "[]", "{\"files\": 3}", "{\"files\": [{\"name\": \"a\"}]}"] {
        std::fs::write(&record, text).unwrap();
        let words = [record.as_str(), "not a record", "write it again"];
        assert_refused(&check(&checkpoint, &record), &words);
    }
    let (missing, outside) = ("{\"files\": []}", ["/etc/passwd", "../x", "a/../../x", ""]);
    std::fs::write(&record, missing).unwrap();
    assert_refused(&check(&checkpoint, &record), &["lists no file", "write it again"]);
    for name in outside {
        let file = serde_json::json!({"name": name, "bytes": 1, "sha256": ""});
        std::fs::write(&record, serde_json::json!({"files": [file]}).to_string()).unwrap();
        let words = [record.as_str(), &format!("found {name:?}"), "write it again"];
        assert_refused(&check(&checkpoint, &record), &words);
    }
    assert_refused(&check(&checkpoint, "/no/such/record"), &["/no/such/record", "--check-hashes"]);
}

/// A record kept in the checkpoint's folder does not record itself, however its path is spelt.
#[test]
fn record_inside_the_checkpoint() {
    let checkpoint = Copy::of(TINY);
    let spellings = [
        checkpoint.file("hashes.json").display().to_string(),
        format!("{}/../{}/./hashes.json", checkpoint.arg(), {
            checkpoint.path().file_name().unwrap().to_str().unwrap()
        }),
    ];
    // The second time the file of the first is there.
    for record in spellings.iter().chain(&spellings) {
        let outcome = verify(&checkpoint, &["--write-hashes", record]);
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        let outcome = check(&checkpoint, record);
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
    }
}

/// Finding the damaged file is what a record is for, also where the audit stops at that file.
#[test]
fn config_that_cannot_be_read() {
    let (checkpoint, _directory, record) = recorded();
    checkpoint.write("config.json", "{");
    let outcome = check(&checkpoint, &record);
    assert_refused(&outcome, &["config.json", "not valid JSON", "1 bytes"]);
}

#[test]
fn record_that_cannot_be_written() {
    let checkpoint = Copy::of(TINY);
    let outcome = verify(&checkpoint, &["--write-hashes", "-"]);
    common::assert_one_line(&outcome, &["--write-hashes -", "expected a file"]);
    let outcome = verify(&checkpoint, &["--write-hashes", "/no/such/folder/record"]);
    common::assert_one_line(&outcome, &["/no/such/folder/record", "another path"]);
}

/// "Every file" includes the EAGLE-3 head in its sub-folder, in a directory and in the binary.
#[test]
fn files_of_the_drafter() {
    let directory = tempfile::tempdir().unwrap();
    let record = directory.path().join("hashes.json").to_str().unwrap().to_owned();
    let demo = talon(&["verify", "--model", "demo", "--write-hashes", &record]);
    assert_eq!(demo.code, Some(0), "{demo:?}");
    let names = |record: &str| -> Vec<String> {
        files(record).iter().map(|file| file["name"].as_str().unwrap().to_owned()).collect()
    };
    assert!(names(&record).contains(&"eagle3/config.json".into()), "{:?}", names(&record));
    assert!(names(&record).contains(&"eagle3/model.safetensors".into()));

    let checkpoint = Copy::of(DEMO);
    std::fs::create_dir(checkpoint.file("eagle3")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        let sound = repository("demo/glm-demo-eagle3").join(file);
        std::fs::copy(sound, checkpoint.file("eagle3").join(file)).unwrap();
    }
    let outcome = check(&checkpoint, &record);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    checkpoint.edit_bytes("eagle3/model.safetensors", |bytes| *bytes.last_mut().unwrap() ^= 1);
    assert_refused(&check(&checkpoint, &record), &["eagle3/model.safetensors", "SHA-256"]);
}

#[test]
fn name_that_is_not_utf_8() {
    use std::os::unix::ffi::OsStrExt;
    let (checkpoint, _directory, record) = recorded();
    let name = std::ffi::OsStr::from_bytes(b"note\xFF.txt");
    std::fs::write(checkpoint.path().join(name), "mine").unwrap();
    let outcome = verify(&checkpoint, &["--write-hashes", &record]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains("not UTF-8"), "{outcome:?}");
    assert_eq!(files(&record).len(), 6);
}
