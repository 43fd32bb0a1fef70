//! Promise: the command line keeps its contract (DESIGN §4): spellings, exit codes, one-line errors,
//! where output goes, what the JSON holds.

mod common;

use std::io::Write;
use std::process::Stdio;

use common::{Outcome, assert_one_line, command, read_json, repository, talon};
use safetensors::SafeTensors;
use serde_json::Value;
use talon::cuda::kernels::TARGETS;

fn golden(id: &str) -> Value {
    let greedy = read_json(&repository("demo/golden/greedy.json"));
    let prompts = greedy["prompts"].as_array().unwrap();
    prompts.iter().find(|prompt| prompt["id"] == id).unwrap().clone()
}

fn succeeds(args: &[&str]) -> Outcome {
    let outcome = talon(args);
    assert_eq!(outcome.code, Some(0), "{args:?}: {outcome:?}");
    outcome
}

/// `generate --json -` on the demo model.
fn generate(args: &[&str]) -> Value {
    succeeds(&[&["generate", "--json", "-"], args].concat()).json()
}

fn ids(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

#[test]
fn help_names_every_command_and_goes_to_stdout() {
    for args in [&["--help"][..], &["-h"]] {
        let help = succeeds(args);
        for command in ["bench", "generate", "kernels", "serve", "verify", "version"] {
            assert!(help.stdout.contains(command), "{help:?}");
        }
        assert_eq!(help.stderr, "");
    }
    for command in ["bench", "generate", "serve", "verify"] {
        let help = succeeds(&[command, "-h"]);
        // An option that takes a value says what happens without it, unless nothing does.
        let text = help.stdout.replace("\n                    ", " ");
        for option in ["  --model ", "  --tp "] {
            let line = text.lines().find(|line| line.starts_with(option)).unwrap();
            assert!(line.contains("(default: "), "{command}: {line}");
        }
    }
}

#[test]
fn version_tells_what_is_built_in() {
    let version = succeeds(&["version"]);
    assert!(version.stdout.starts_with(concat!("talon ", env!("CARGO_PKG_VERSION"))));
    assert!(version.stdout.contains("demo model"), "{version:?}");
    let kernels =
        version.stdout.lines().find_map(|line| line.strip_prefix("kernels:       ")).unwrap();
    if TARGETS.is_empty() {
        assert_eq!(kernels, "none: built without nvcc, CPU only");
    } else {
        assert!(kernels.starts_with("sm_") && kernels.contains(" (nvcc 1"), "{kernels}");
    }
    assert_eq!(succeeds(&["--version"]).stdout, version.stdout);
}

#[test]
fn version_names_the_commit_and_the_locked_crates() {
    let version = succeeds(&["version", "--json", "-"]).json();
    let text = succeeds(&["version"]).stdout;
    let commit = version["commit"].as_str().unwrap();
    let id = commit.strip_suffix("-dirty").unwrap_or(commit);
    let is_id = id.len() == 12 && id.chars().all(|c| c.is_ascii_hexdigit());
    assert!(is_id || commit == "unknown", "{commit}");
    assert!(text.lines().next().unwrap().ends_with(&format!("({commit})")), "{text}");
    assert!(version["rustc"].as_str().unwrap().starts_with("rustc 1."), "{version}");
    // Every crate of [dependencies], none of [dev-dependencies], each as Cargo.lock has it.
    let lock = std::fs::read_to_string(repository("Cargo.lock")).unwrap();
    let crates = version["crates"].as_object().unwrap();
    assert!(crates.contains_key("argh") && crates.contains_key("tokenizers"), "{version}");
    assert!(!crates.contains_key("proptest"), "{version}");
    for (name, version) in crates {
        let version = version.as_str().unwrap();
        let entry = format!("name = \"{name}\"\nversion = \"{version}\"\n");
        assert!(lock.contains(&entry), "{name} {version} is not in Cargo.lock");
        assert!(text.contains(&format!("{name} {version}")), "{text}");
    }
    assert!(text.lines().all(|line| line.len() <= 100), "{text}");
}

#[test]
fn bad_usage_is_one_line_and_exit_code_2() {
    // With --backend cpu where it is found behind a load, which may have told of the CPU by then.
    for (args, words) in [
        (&["generate", "--frobnicate", "x"][..], &["--frobnicate", "--help"][..]),
        (&["frobnicate"], &["frobnicate"]),
        (&["bench", "--runs", "x"], &["--runs x", "a whole number"]),
        (&["bench", "--runs", "-1"], &["--runs -1", "a whole number"]),
        (&["bench", "--latent-eps", "small"], &["--latent-eps small", "a number"]),
        (&["serve", "--cors", "localhost:3000"], &["--cors localhost:3000", "http://"]),
        (&["doctor", "--model", "synthetic:glm-5.2"], &["synthetic:glm-5.2", "directory or demo"]),
        (&["version", "--json", "/dev/null/x.json"], &["/dev/null/x.json"]),
        (&[], &["--help"]),
        (&["generate"], &["no prompt"]),
        (&["generate", "x", "--tokens", "f"], &["--tokens"]),
        (&["generate", "x", "--tp", "3"], &["--tp 3", "1, 2, 4 or 8"]),
        (&["generate", "x", "--temperature", "-1"], &["--temperature"]),
        (&["generate", "x", "--temperature=nan"], &["--temperature"]),
        (&["generate", "x", "--top-p", "0"], &["--top-p"]),
        (&["generate", "x", "--backend", "cpu", "--stop", ""], &["stop string"]),
        (&["generate", "x", "--raw", "--no-think"], &["--raw"]),
        (&["generate", "x", "--backend", "cuda"], &["--backend cuda", "cpu"]),
        (&["generate", "x", "--backend", "cpu", "--rank-slice", "0/8"], &["--rank-slice", "cuda"]),
        (&["generate", "x", "--backend", "tpu"], &["--backend tpu"]),
        (&["generate", "x", "--devices", "0,1,4"], &["--devices", "3 ranks", "1, 2, 4 or 8"]),
        (
            &["generate", "x", "--devices", "0,1", "--tp", "4"],
            &["--tp 4", "--devices", "2 entries"],
        ),
        (
            &["generate", "x", "--devices", "0,0", "--rank-slice", "0/8"],
            &["--rank-slice", "one GPU"],
        ),
        (&["generate", "x", "--experts", "some"], &["--experts some", "split or parallel"]),
        (&["generate", "x", "--shared-gpu", "often"], &["--shared-gpu often", "lock-step"]),
        (&["generate", "x", "--reduce", "nccl"], &["--reduce nccl", "push, pull, owner, staged"]),
        (&["kernels", "--devices", "0,1"], &["--devices", "--comm"]),
        (&["kernels", "--comm", "--check"], &["--check and --comm"]),
        (&["bench", "--devices", "GPU-1"], &["--devices GPU-1", "number"]),
        (&["generate", "x", "--backend", "cpu", "--context", "4"], &["--context"]),
        (
            &["generate", "x", "--backend", "cpu", "--context", "4000000000"],
            &["--context", "MiB short"],
        ),
        (&["generate", "x", "--prefill-chunk", "0"], &["--prefill-chunk"]),
        (&["generate", "x", "--latent-eps", "0"], &["--latent-eps"]),
        (&["generate", "--backend", "cpu", "--tokens", "/dev/null/none"], &["/dev/null/none"]),
        (&["generate", "--backend", "cpu", "--raw", ""], &["prompt is empty"]),
        (&["generate", "x", "--model", "/dev/null/none"], &["/dev/null/none", "--model"]),
        (&["serve", "--host", "nowhere.invalid"], &["nowhere.invalid:8000", "--host"]),
        (&["serve", "--port", "99999"], &["--port", "99999"]),
        (&["serve", "--parallel", "0"], &["--parallel 0"]),
        (&["serve", "--queue", "0"], &["--queue 0"]),
        (&["serve", "--api-key", ""], &["--api-key"]),
        (&["verify", "--model", "/dev/null/none"], &["/dev/null/none"]),
        (&["bench", "--card-bandwidth", "1.5"], &["--card-bandwidth", "--rank-slice"]),
        (&["bench", "--rank-slice", "0/8", "--reduce-us", "0"], &["--reduce-us 0", "positive"]),
        (&["bench", "--runs", "0"], &["--runs"]),
        (&["bench", "--runs", "100"], &["--runs 100", "--prompts"]),
        (&["bench", "--max-tokens", "1"], &["--max-tokens"]),
        (&["bench", "--prompts", "/dev/null/none"], &["/dev/null/none"]),
        (&["bench", "--json", "/dev/null/x.json"], &["/dev/null/x.json"]),
        (&["generate", "x", "--json", "/dev/null/x.json"], &["/dev/null/x.json"]),
        (&["generate", "x", "--logits", "/dev/null/x"], &["/dev/null/x"]),
        (&["generate", "-5 + 3"], &["-5 + 3", "behind --"]),
        (&["generate", "x", "--min-p", "2"], &["--min-p"]),
        (&["generate", "x", "--repetition-penalty", "0"], &["--repetition-penalty"]),
        (&["generate", "x", "--draft", "/dev/null/none"], &["/dev/null/none/config.json"]),
        (&["generate", "x", "--draft-tokens", "8"], &["--draft-tokens 8"]),
        (&["generate", "x", "--draft-rope-theta", "0"], &["--draft-rope-theta"]),
        (&["kernels", "--rows", "17"], &["--rows 17", "1 to 16"]),
        (&["kernels", "--repeats", "2"], &["--repeats 2", "--check"]),
        (&["kernels", "--check", "--context", "8"], &["--context 8"]),
        (&["bench", "--simulate-acceptance", "0.5"], &["--simulate-acceptance"]),
        (&["bench", "--backend", "cpu", "--sweep", "--draft", "none", "--runs", "1"], &["--sweep"]),
    ] {
        let outcome = talon(args);
        assert_one_line(&outcome, words);
    }
}

#[test]
fn kernels_without_a_gpu_are_one_line_and_exit_code_2() {
    for args in [&["kernels"][..], &["kernels", "--check"], &["kernels", "--comm"]] {
        let outcome = without_gpu(args);
        assert_one_line(&outcome, &["driver"]);
        assert!(!outcome.stderr.contains("--backend"), "kernels has no such option: {outcome:?}");
    }
}

/// Runs the binary where the driver, if there is one, shows no GPU.
fn without_gpu(args: &[&str]) -> Outcome {
    let output = command(args).env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    Outcome { code: output.status.code(), stdout, stderr }
}

#[test]
fn a_cpu_that_was_not_asked_for_is_told_in_one_line() {
    let ask = ["generate", "--no-think", "What is 17 + 25?"];
    for auto in [&[][..], &["--backend", "auto"]] {
        let answered = without_gpu(&[&ask, auto].concat());
        assert_eq!(answered.stdout, "17 + 25 = 42.\n", "{answered:?}");
        assert!(answered.stderr.starts_with("talon: warn: running on the CPU: "), "{answered:?}");
        assert_eq!(answered.stderr.lines().count(), 1, "{answered:?}");
        assert!(answered.stderr.trim_end().len() <= 100, "{answered:?}");
    }
    let chosen = without_gpu(&[&ask[..], &["--backend", "cpu"]].concat());
    assert_eq!((chosen.stdout.as_str(), chosen.stderr.as_str()), ("17 + 25 = 42.\n", ""));
    // A load that is refused has only its own line, and so has a GPU that was asked for.
    let refused = without_gpu(&[&ask[..], &["--context", "4000000000"]].concat());
    assert_one_line(&refused, &["--context", "MiB short"]);
    let cuda = without_gpu(&[&ask[..], &["--backend", "cuda"]].concat());
    assert_one_line(&cuda, &["--backend cuda", "--backend cpu"]);
    let slice = without_gpu(&[&ask[..], &["--rank-slice", "0/8"]].concat());
    assert_one_line(&slice, &["--rank-slice"]);
}

#[test]
fn answers_equal_the_goldens() {
    for (id, args) in [
        ("chat-3", &["--no-think", "What is 17 + 25?"][..]),
        ("chat-4", &["What is 38 + 47?"]),
        (
            "text-0",
            &["--raw", "[gMASK]<sop>In the beginning God", "--max-tokens=64", "--ignore-eos"],
        ),
    ] {
        let golden = golden(id);
        let report = generate(args);
        assert_eq!(report["usage"]["prompt_tokens"], ids(&golden["prompt_ids"]).len(), "{id}");
        let tokens = ids(&report["tokens"]);
        assert_eq!(tokens, ids(&golden["greedy_ids"])[..tokens.len()], "{id}");
        let end = golden["stop_index"].as_u64().map_or(64, |index| index + 1);
        assert_eq!(tokens.len() as u64, end, "{id}");
        assert_eq!(report["usage"]["completion_tokens"], end, "{id}");
    }
}

#[test]
fn json_holds_text_reasoning_usage_and_timings() {
    let report = generate(&["What is 38 + 47?"]);
    assert_eq!(report["text"], "38 + 47 = 85.");
    assert_eq!(report["reasoning"], "");
    assert_eq!(report["finish_reason"], "stop");
    assert!(report["timings"]["ttft_ms"].as_f64().unwrap() > 0.0);
    assert!(report["timings"]["output_throughput"].as_f64().unwrap() > 0.0);
    let cut = generate(&["What is a whale?", "--max-tokens", "3"]);
    assert_eq!(cut["finish_reason"], "length");
    assert_eq!(ids(&cut["tokens"]).len(), 3);
    let none = generate(&["What is a whale?", "--max-tokens", "0"]);
    assert_eq!((ids(&none["tokens"]).len(), &none["text"]), (0, &Value::from("")));
}

#[test]
fn text_goes_to_stdout_and_nothing_else_does() {
    let outcome = succeeds(&["generate", "--backend", "cpu", "--no-think", "What is 17 + 25?"]);
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("17 + 25 = 42.\n", ""));
    let logged = succeeds(&["generate", "-v", "--no-think", "What is 17 + 25?"]);
    assert_eq!(logged.stdout, "17 + 25 = 42.\n");
    assert!(logged.stderr.contains("talon: info: "), "{logged:?}");
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let report = generate(&["--no-think", "What is 17 + 25?", "--stop", " =", "--stop", "zzz"]);
    assert_eq!(report["text"], "17 + 25");
    assert_eq!(report["finish_reason"], "stop");
}

#[test]
fn special_tokens_count_in_raw_text_and_are_plain_in_a_chat() {
    let tokens = |args: &[&str]| {
        generate(&[args, &["--max-tokens", "1"]].concat())["usage"]["prompt_tokens"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(tokens(&["--raw", "<|user|>Hi"]), tokens(&["--raw", "Hi"]) + 1);
    // As text, <|user|> takes several tokens.
    assert!(tokens(&["<|user|>Hi"]) > tokens(&["Hi"]) + 1);
}

#[test]
fn a_system_message_reaches_the_model() {
    let golden = golden("chat-7");
    let system = golden["messages"][0]["content"].as_str().unwrap();
    let with = generate(&["--system", system, "Hi", "--max-tokens", "1"]);
    let without = generate(&["Hi", "--max-tokens", "1"]);
    let tokens = |report: &Value| report["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens(&with) > tokens(&without) + 3);
}

#[test]
fn the_prompt_comes_from_stdin_too() {
    let mut child =
        command(&["generate", "--no-think", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"What is 17 + 25?").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "17 + 25 = 42.\n");
}

#[test]
fn a_closed_pipe_is_a_success() {
    let mut child = command(&["generate", "--raw", "In the", "--ignore-eos"]).spawn().unwrap();
    // The reader goes away before the first token.
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn sampling_repeats_with_a_seed_and_stays_in_the_vocabulary() {
    let hot = ["--raw", "Once", "--temperature", "50", "--top-p", "1", "--max-tokens", "200"];
    let sample = |seed: &str| {
        let args = [&hot[..], &["--seed", seed, "--ignore-eos"]].concat();
        ids(&generate(&args)["tokens"])
    };
    let first = sample("1");
    assert_eq!(first, sample("1"));
    assert_ne!(first, sample("2"));
    // At this temperature every id is about as likely; 4080..4096 are padding rows of the head.
    assert!(first.iter().all(|id| *id < 4080), "{first:?}");
    assert!(first.iter().any(|id| *id > 2000), "{first:?}");
}

#[test]
fn ranks_and_chunks_do_not_change_the_answer() {
    let answer = |args: &[&str]| ids(&generate(&[&["Define \"happy\"."], args].concat())["tokens"]);
    let plain = answer(&[]);
    for args in [&["--tp", "8"][..], &["--prefill-chunk", "1"], &["--prefill-chunk", "5"]] {
        assert_eq!(answer(args), plain, "{args:?}");
    }
}

#[test]
fn logits_of_every_position_are_written() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("logits.safetensors");
    let path = file.to_str().unwrap();
    let report = generate(&["What is a whale?", "--max-tokens", "3", "--logits", path]);
    let bytes = std::fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let prompt = report["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    // The last token was not run.
    let positions = prompt + 2;
    assert_eq!(tensors.tensor("logits").unwrap().shape(), [positions, 4096]);
    assert_eq!(tensors.tensor("ids").unwrap().shape(), [positions]);
    let values = tensors.tensor("logits").unwrap().data().to_vec();
    let last = &values.as_chunks::<4>().0[(positions - 1) * 4096..];
    let best = (0..4080)
        .max_by(|a, b| f32::from_le_bytes(last[*a]).total_cmp(&f32::from_le_bytes(last[*b])));
    assert_eq!(best, Some(ids(&report["tokens"])[2] as usize));
}

#[test]
fn a_full_context_ends_the_output() {
    let report = generate(&["--raw", "In the", "--ignore-eos", "--context", "10"]);
    assert_eq!(report["finish_reason"], "length");
    let usage = &report["usage"];
    // The last token needs no place: it is not run.
    assert_eq!(usage["total_tokens"], 11, "{usage}");
}

#[test]
fn bench_takes_prompts_of_ones_own() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("prompts.jsonl");
    std::fs::write(&file, "{\"class\": \"mine\", \"prompt\": \"What is a whale?\"}\n").unwrap();
    let path = file.to_str().unwrap();
    let report = succeeds(&["bench", "--prompts", path, "--max-tokens", "4", "--json", "-"]).json();
    assert_eq!(report["runs"][0]["class"], "mine");
    assert!(report["summary"]["by_class"]["mine"].is_object());
    std::fs::write(&file, "nonsense\n").unwrap();
    assert_one_line(&talon(&["bench", "--prompts", path]), &["prompts.jsonl", "line 1"]);
}

#[test]
fn a_full_disk_loses_no_measurement() {
    let args = ["--runs", "1", "--max-tokens", "2", "--backend", "cpu", "--json", "/dev/full"];
    let outcome = talon(&[&["bench"], &args[..]].concat());
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stdout.contains("text: identical"), "{outcome:?}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
    assert!(outcome.stderr.contains("/dev/full") && outcome.stderr.contains("make room"));
}

#[test]
fn a_full_or_closed_stderr_changes_no_exit_code() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let refused = command(&["generate", "hi", "--tp", "3"]).stderr(full()).status().unwrap();
    assert_eq!(refused.code(), Some(2));
    // With thinking on and a stop string before its end, all of the output is reasoning.
    let args = ["generate", "What is a whale?", "--stop", "</think>"];
    let reasoned = command(&args).stdout(Stdio::null()).stderr(full()).status().unwrap();
    assert_eq!(reasoned.code(), Some(0));
}

#[test]
fn an_interrupt_ends_with_130() {
    let args = ["generate", "--raw", "In the", "--ignore-eos", "--max-tokens", "4000"];
    let mut child = command(&args).spawn().unwrap();
    let mut first = [0];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn damaged_weights_are_not_answered_with_noise() {
    let copy = common::Copy::of(common::DEMO);
    copy.edit_tensors(|tensors| {
        let norm = tensors.get("model.norm.weight");
        norm.bytes.iter_mut().for_each(|byte| *byte = 0xFF);
    });
    let outcome = talon(&["generate", "--model", copy.arg(), "hi"]);
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("not finite"), "{outcome:?}");
}

#[test]
fn reasoning_is_told_by_what_the_template_opens() {
    let copy = common::Copy::of(common::DEMO);
    let template = std::fs::read_to_string(copy.file("chat_template.jinja")).unwrap();
    let answer = |more: &[&str]| {
        let args = ["generate", "--model", copy.arg(), "--json", "-", "What is 17 + 25?"];
        succeeds(&[&args, more].concat())
    };
    // A template that cannot turn reasoning off, as GLM-5.3's.
    let always = template.replace("enable_thinking is defined and not enable_thinking", "false");
    assert_ne!(always, template);
    copy.write("chat_template.jinja", always);
    let outcome = answer(&["--no-think"]);
    assert_eq!(outcome.json()["text"], "17 + 25 = 42.");
    assert!(outcome.stderr.contains("--no-think"), "{outcome:?}");
    // A template that never opens it.
    let never = template.replace("else '<think>'", "else '<think></think>'");
    assert_ne!(never, template);
    copy.write("chat_template.jinja", never);
    assert_eq!(answer(&[]).json()["text"], "17 + 25 = 42.");
}

#[test]
fn speculation_does_not_change_the_answer() {
    let answer = |args: &[&str]| generate(&[&["Define \"happy\"."], args].concat());
    let plain = answer(&["--draft", "none"]);
    assert_eq!(plain["timings"]["draft_n"], 0);
    let head = repository("demo/glm-demo-eagle3");
    for draft in ["auto", "mtp", head.to_str().unwrap()] {
        let guessed = answer(&["--draft", draft, "--draft-tokens", "3"]);
        assert_eq!(guessed["tokens"], plain["tokens"], "{draft}");
        assert!(guessed["timings"]["draft_n_accepted"].as_u64().unwrap() > 0, "{guessed}");
        let sampled = |draft: &str| {
            let hot =
                ["--temperature", "1", "--seed", "5", "--draft-tokens", "3", "--draft", draft];
            ids(&answer(&hot)["tokens"])
        };
        assert_eq!(sampled(draft), sampled("none"), "{draft}");
    }
}
