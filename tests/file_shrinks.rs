//! Promise: a file that shrinks while it is mapped ends the process with one line that names it and
//! exit code 1, not with a bare SIGBUS.

mod common;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use common::{Copy, DEMO, SHARD_1, SHARD_2, command, drain};

/// Cuts a file to its first page.
fn shrink(path: &Path) {
    File::options().write(true).open(path).unwrap().set_len(4096).unwrap();
}

/// Waits for the end; a child that does not end is killed and fails the test.
fn wait(mut child: Child) -> Option<i32> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("talon goes on without its file");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Shrinks `shard` once the first text has come.
fn assert_ends_with_a_message(shard: &str, tp: &str) {
    let checkpoint = Copy::of(DEMO);
    let mut child = command(
        &[
            &["generate", "--model", checkpoint.arg(), "--raw", "In the beginning God"][..],
            &["--ignore-eos", "--max-tokens", "4000", "--backend", "cpu", "--tp", tp],
        ]
        .concat(),
    )
    .spawn()
    .unwrap();
    let stderr = drain(child.stderr.take().unwrap());
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0];
    stdout.read_exact(&mut first).unwrap();
    let rest = drain(stdout);

    shrink(&checkpoint.file(shard));
    let code = wait(child);
    let stderr = stderr.join().unwrap();
    assert_eq!(code, Some(1), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    let path = checkpoint.file(shard).display().to_string();
    assert!(stderr.starts_with(&format!("talon: {path}: shrank")), "{stderr}");
    assert!(stderr.contains("restore the file"), "{stderr}");
    rest.join().unwrap();
}

#[test]
fn while_one_rank_generates() {
    assert_ends_with_a_message(SHARD_1, "1");
}

/// Several threads fault at the same time and still only one line is written.
#[test]
fn while_eight_ranks_generate() {
    for shard in [SHARD_1, SHARD_2, SHARD_1, SHARD_2] {
        assert_ends_with_a_message(shard, "8");
    }
}

/// Hashing reads a file once, front to back: one that takes seconds is cut when its first pages are
/// in memory.
#[test]
fn while_it_is_hashed() {
    let checkpoint = Copy::of(DEMO);
    let big = checkpoint.file("big.bin");
    File::create(&big).unwrap().set_len(4 << 30).unwrap();
    let record = checkpoint.path().join("hashes.json");
    let args = ["verify", "--model", checkpoint.arg(), "--write-hashes", record.to_str().unwrap()];
    let mut child = command(&args).spawn().unwrap();
    let stderr = drain(child.stderr.take().unwrap());
    let stdout = drain(child.stdout.take().unwrap());
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_being_read(child.id(), "big.bin") {
        assert!(Instant::now() < deadline, "never read");
    }
    shrink(&big);
    let code = wait(child);
    let stderr = stderr.join().unwrap();
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("big.bin: shrank") && stderr.lines().count() == 1, "{stderr}");
    assert_eq!(stdout.join().unwrap(), "");
}

/// Whether a process has pages of a mapped file in memory.
fn is_being_read(process: u32, file: &str) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{process}/smaps")).unwrap_or_default();
    let mut lines = maps.lines().skip_while(|line| !line.ends_with(file));
    lines.find(|line| line.starts_with("Rss:")).is_some_and(|line| !line.contains(" 0 kB"))
}
