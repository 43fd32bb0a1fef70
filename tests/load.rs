//! Promise: a load reads what it needs of the files, once, and no more; says how fast; a file that
//! changes meanwhile ends it with one line; and killed at any time it leaves nothing behind.

mod common;
#[path = "common/http.rs"]
mod http;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use common::{Copy, DEMO, INDEX, Tensors, command, drain, read_json, repository, talon};
use http::{Connection, Served};
use serde_json::{Value, json};

/// The shard that [`with_big_vocabulary`] adds.
const BIG: &str = "model-00003-of-00003.safetensors";

/// The demo model with so many padding rows in its vocabulary that two tensors take `bytes` together,
/// and one that nobody needs takes half of that; in holes of the file, unless they are `written`.
fn with_big_vocabulary(bytes: usize, written: bool) -> Copy {
    let checkpoint = Copy::of(DEMO);
    let hidden =
        read_json(&checkpoint.file("config.json"))["hidden_size"].as_u64().unwrap() as usize;
    let rows = bytes / 2 / (2 * hidden);
    checkpoint.edit_json("config.json", |config| config["vocab_size"] = rows.into());
    let mut begins = Vec::new();
    checkpoint.edit_tensors(|tensors| {
        for name in ["model.embed_tokens.weight", "lm_head.weight"] {
            begins.push((name, tensors.remove(name).bytes));
        }
    });
    let (each, half) = (rows * hidden * 2, rows / 2 * hidden * 2 * 2);
    let tensor = |shape: [usize; 2], start: usize, end: usize| json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
    let header = json!({
        "model.embed_tokens.weight": tensor([rows, hidden], 0, each),
        "lm_head.weight": tensor([rows, hidden], each, 2 * each),
        "nobody.needs.this": tensor([rows / 2 * 2, hidden], 2 * each, 2 * each + half),
    });
    let mut header = header.to_string().into_bytes();
    // As exporters do: the data begin at a multiple of 8.
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = File::create(checkpoint.file(BIG)).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&header).unwrap();
    for bytes in
        [begins[0].1.clone(), begins[1].1.clone(), Vec::new()].iter().zip([each, each, half])
    {
        let (begin, len) = bytes;
        file.write_all(begin).unwrap();
        if written {
            let ones = [0x80, 0x3F].repeat(1 << 19);
            let mut left = len - begin.len();
            while left > 0 {
                let count = left.min(ones.len());
                file.write_all(&ones[..count]).unwrap();
                left -= count;
            }
        } else {
            let at = std::io::Seek::stream_position(&mut file).unwrap();
            let end = at + (len - begin.len()) as u64;
            file.set_len(end).unwrap();
            std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(end)).unwrap();
        }
    }
    checkpoint.edit_json(INDEX, |index| {
        for name in header_names(&header) {
            index["weight_map"][name] = BIG.into();
        }
    });
    checkpoint
}

fn header_names(header: &[u8]) -> Vec<String> {
    let header: serde_json::Map<String, Value> = serde_json::from_slice(header).unwrap();
    header.keys().cloned().collect()
}

/// Drops a file's pages from the page cache, which `dd` does for a file whose pages are on the disk.
fn drop_pages(path: &Path) {
    let of = format!("of={}", path.display());
    let args = [&of, "oflag=nocache", "conv=notrunc,fdatasync", "count=0", "status=none"];
    assert!(Command::new("dd").args(args).status().unwrap().success());
}

fn bench(model: &str, draft: &str) -> Value {
    let outcome = talon(
        &[
            &["bench", "--model", model, "--draft", draft, "--runs", "1", "--max-tokens", "2"][..],
            &["--backend", "cpu", "--json", "-"],
        ]
        .concat(),
    );
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    outcome.json()["load"].clone()
}

/// Bytes of the demo model's tensors whose names `wanted` takes.
fn tensor_bytes(directory: &Path, wanted: impl Fn(&str) -> bool) -> u64 {
    let tensors = Tensors::read(directory).0;
    let wanted = tensors.iter().filter(|(name, _)| wanted(name));
    wanted.map(|(_, tensor)| tensor.bytes.len() as u64).sum()
}

#[test]
fn drafters_read_only_their_own_bytes() {
    let checkpoint = Copy::of(DEMO);
    let layers = read_json(&checkpoint.file("config.json"))["num_hidden_layers"].as_u64().unwrap();
    let mtp = format!("model.layers.{layers}.");
    let target = tensor_bytes(checkpoint.path(), |name| !name.starts_with(&mtp));
    let with_mtp = tensor_bytes(checkpoint.path(), |_| true);
    let head = repository("demo/glm-demo-eagle3");
    let with_head = target + tensor_bytes(&head, |name| name != "d2t");
    assert!(target < with_mtp && target < with_head);
    for (draft, needed) in
        [("none", target), ("mtp", with_mtp), (head.to_str().unwrap(), with_head)]
    {
        let load = bench(checkpoint.arg(), draft);
        let bytes = load["bytes"].as_u64().unwrap();
        assert!(bytes >= needed, "{draft}: {needed} are needed, {load}");
        assert!(bytes as f64 <= needed as f64 * 1.02, "{draft}: {needed} are needed, {load}");
    }
}

/// What the kernel counts as fetched from the disk. (`rchar` would count what read calls copy: a load
/// reads mapped pages, so it has none.) Where the temporary folder is not on a disk nothing is fetched.
#[test]
fn the_disk_gives_each_byte_once() {
    const BYTES: usize = 192 << 20;
    let checkpoint = with_big_vocabulary(BYTES, true);
    for entry in std::fs::read_dir(checkpoint.path()).unwrap() {
        drop_pages(&entry.unwrap().path());
    }
    let mut child = command(&endless(checkpoint.arg(), "In the beginning God")).spawn().unwrap();
    let mut first = [0];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let io = std::fs::read_to_string(format!("/proc/{}/io", child.id())).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let fetched = io.lines().find_map(|line| line.strip_prefix("read_bytes: ")).unwrap();
    let fetched: u64 = fetched.parse().unwrap();
    // Besides the weights: index, tokenizer, config.
    let others = ["tokenizer.json", INDEX, "config.json", "chat_template.jinja"];
    let small: u64 =
        others.iter().map(|file| checkpoint.file(file).metadata().unwrap().len()).sum();
    let needed = BYTES as u64 + tensor_bytes(&repository(DEMO), |_| true) + small;
    assert!(fetched as f64 <= needed as f64 * 1.02, "{fetched} of {needed} bytes");

    for entry in std::fs::read_dir(checkpoint.path()).unwrap() {
        drop_pages(&entry.unwrap().path());
    }
    let cold = bench(checkpoint.arg(), "none");
    let warm = bench(checkpoint.arg(), "none");
    for load in [&cold, &warm] {
        assert!(load["bytes"].as_u64().unwrap() >= BYTES as u64, "{load}");
        assert!(load["gb_per_s"].as_f64().unwrap() > 0.0, "{load}");
    }
    assert_eq!(warm["cache"], "warm", "{warm}");
    assert_eq!(warm["disk_bytes"], 0, "{warm}");
    // A folder in memory cannot be cold; a little is fetched of the binary itself.
    if fetched > BYTES as u64 / 2 {
        // The system may keep some pages all the same.
        assert_ne!(cold["cache"], "warm", "{cold}");
        assert!(cold["resident_before"].as_f64().unwrap() < 0.2, "{cold}");
        assert!(fetched > BYTES as u64, "{fetched}");
    }
}

/// What lies in the binary is not loaded from anywhere.
#[test]
fn the_embedded_model_has_no_figures() {
    assert_eq!(bench("demo", "none"), Value::Null);
}

#[test]
fn nothing_is_drawn_in_a_pipe() {
    let checkpoint = with_big_vocabulary(160 << 20, false);
    let args = ["--raw", "--max-tokens", "1", "--backend", "cpu", "--draft", "none", "In"];
    let outcome = talon(&[&["generate", "--model", checkpoint.arg()][..], &args].concat());
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let told: Vec<&str> = outcome.stderr.lines().collect();
    assert!(told.iter().all(|line| line.contains("nobody.needs.this")), "{outcome:?}");
}

/// Arguments of a run that goes on until it is ended.
fn endless<'a>(model: &'a str, prompt: &'a str) -> Vec<&'a str> {
    let args = ["--ignore-eos", "--max-tokens", "4000", "--context", "8000", "--backend", "cpu"];
    [&["generate", "--draft", "none", "--model", model, "--raw", prompt][..], &args].concat()
}

/// Waits until a process has pages of a file in memory.
fn wait_for_pages(process: u32, file: &str, kib: u64) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let resident = || {
        let maps = std::fs::read_to_string(format!("/proc/{process}/smaps")).unwrap_or_default();
        let mut lines = maps.lines().skip_while(|line| !line.ends_with(file));
        let line = lines.find_map(|line| line.strip_prefix("Rss:"))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    while resident().is_none_or(|found| found < kib) {
        assert!(Instant::now() < deadline, "{file} is never read");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A file that is cut while it is being loaded, and one cut when only its last page is lost.
#[test]
fn a_shard_that_shrinks_during_the_load() {
    let checkpoint = with_big_vocabulary(3 << 30, false);
    let shard = checkpoint.file(BIG);
    let mut child = command(&endless(checkpoint.arg(), "In")).spawn().unwrap();
    let stderr = drain(child.stderr.take().unwrap());
    wait_for_pages(child.id(), BIG, 64 << 10);
    File::options().write(true).open(&shard).unwrap().set_len(1 << 20).unwrap();
    let status = child.wait().unwrap();
    let stderr = stderr.join().unwrap();
    assert_eq!(status.code(), Some(1), "{stderr}");
    let told: Vec<&str> =
        stderr.lines().filter(|line| !line.contains("nobody.needs.this")).collect();
    assert_eq!(told.len(), 1, "{stderr}");
    assert!(told[0].contains(shard.to_str().unwrap()), "{stderr}");
    assert!(told[0].contains("restore the file"), "{stderr}");
}

/// Files in the folders where shared memory and huge pages would stay behind.
fn left_behind() -> BTreeSet<String> {
    let folders =
        ["/dev/shm", "/dev/hugepages"].into_iter().filter_map(|f| std::fs::read_dir(f).ok());
    folders.flatten().map(|entry| entry.unwrap().path().display().to_string()).collect()
}

/// A process holds no memory that would outlive it.
fn holds_nothing_that_stays(process: u32) {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    for kept in ["/dev/shm", "/dev/hugepages", "/SYSV", "/anon_hugepage"] {
        assert!(!maps.contains(kept), "{kept} in {maps}");
    }
}

/// Kills a run with SIGKILL when `there` says so, and looks at what it held.
fn kill_and_look(mut child: Child, there: impl FnOnce(&mut Child)) {
    there(&mut child);
    holds_nothing_that_stays(child.id());
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().code(), None, "it had ended before it was killed");
}

/// Killed in the load, in the prompt, while it decodes, in a benchmark and while it serves: the next
/// start works, and nothing stays in /dev/shm or /dev/hugepages. (On a GPU the driver frees what a process held; that
/// cannot be seen without one.)
#[test]
fn killed_at_any_time_it_leaves_nothing() {
    let before = left_behind();
    let small = Copy::of(DEMO);
    let big = with_big_vocabulary(2 << 30, false);
    // Its log tells when the load is over.
    let start = |args: &[&str]| command(args).arg("-v").spawn().unwrap();
    let loaded = |child: &mut Child| {
        let mut stderr = child.stderr.take().unwrap();
        let mut text = Vec::new();
        let mut byte = [0];
        while !String::from_utf8_lossy(&text).contains("cpu backend") {
            stderr.read_exact(&mut byte).expect("the load ends");
            text.push(byte[0]);
        }
        // Nobody reads on: a full pipe would stop the run.
        drain(stderr);
    };
    let long = "In the beginning God created the heaven and the earth. ".repeat(300);

    kill_and_look(start(&endless(big.arg(), "In")), |child| {
        wait_for_pages(child.id(), BIG, 1 << 10)
    });
    kill_and_look(start(&endless(small.arg(), &long)), |child| {
        loaded(child);
        std::thread::sleep(Duration::from_millis(100));
    });
    kill_and_look(start(&endless(small.arg(), "In")), |child| {
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    });
    let bench = ["bench", "--model", small.arg(), "--backend", "cpu", "--json", "-"];
    kill_and_look(start(&bench), |child| {
        loaded(child);
        std::thread::sleep(Duration::from_millis(100));
    });

    // A client that is still there does not keep the address from the next server.
    let served = ["--model", small.arg()];
    let mut killed = Served::start(&served);
    let mut client = Connection::open(killed.address);
    let body = json!({"prompt": "In", "stream": true, "ignore_eos": true, "max_tokens": 4000});
    client.send_request("POST", "/v1/completions", &[], body.to_string().as_bytes());
    assert_eq!(client.head().status, 200);
    client.chunk();
    holds_nothing_that_stays(killed.pid());
    killed.signal("KILL");
    assert_eq!(killed.wait(), None, "it had ended before it was killed");
    let next = killed.start_again(&served);
    let answer = next.ask("/v1/completions", &json!({"prompt": "In", "max_tokens": 4}));
    assert_eq!(answer["usage"]["completion_tokens"], 4, "{answer}");

    let outcome = small.generate(&[1, 2, 3], &["--max-tokens", "4"]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let new: Vec<String> = left_behind().difference(&before).cloned().collect();
    assert!(new.iter().all(|name| !name.contains("talon")), "{new:?}");
}
