//! Several ranks on one GPU: they compute what one computes, agree on every bit, and a link that lies or
//! a rank that stalls is named and left out, or ends the run within seconds.
//!
//! What one GPU cannot show is the bus between several: order, speed and loss on PCIe.

use std::time::{Duration, Instant};

use talon::comm::Variant;
use talon::cuda::{Damage, Mischief, RanksOptions, Sharing, exchange_many};
use talon::engine::{Engine, ExpertSplit, LoadOptions};
use talon::error::{Error, Kind};
use talon::weights::demo;

use crate::engines::{Golden, golden, goldens, greedy, oracle, run, run_plain};
use crate::{device, load, try_load};

/// Ranks on these GPUs, whatever an earlier start has found about them.
pub fn on(devices: &[usize]) -> RanksOptions {
    RanksOptions { devices: devices.to_vec(), requalify: true, ..RanksOptions::default() }
}

const BOTH: [Sharing; 2] = [Sharing::LockStep, Sharing::Concurrent];

/// Ranks that all share the first GPU.
fn ranks(count: usize, sharing: Sharing) -> RanksOptions {
    RanksOptions { sharing, ..on(&vec![0; count]) }
}

/// Waits before every part of every exchange, and a hash of all residuals.
fn delays(seed: u32) -> Mischief {
    Mischief { delay_ns: 3000, seed, ..Mischief::default() }
}

fn load_ranks(gpus: RanksOptions) -> Engine {
    load(demo(), LoadOptions { gpus, ..LoadOptions::default() })
}

fn reduce(engine: &Engine) -> &str {
    engine.device_use().and_then(|used| used.reduce.as_deref()).expect("several ranks")
}

/// The goldens of chat and tools, up to the end of the turn.
fn answers() -> Vec<Golden> {
    goldens().into_iter().filter(|golden| !golden.id.starts_with("text")).collect()
}

fn assert_golden(engine: &mut Engine, golden: &Golden, what: &str) {
    let ends = engine.text().expect("a tokenizer").generation().eos_token_ids.clone();
    let end = golden.greedy.iter().position(|token| ends.contains(token));
    let expected = &golden.greedy[..end.map_or(golden.greedy.len(), |end| end + 1)];
    let tokens = run_plain(engine, &greedy(&golden.prompt, expected.len())).tokens;
    assert_eq!(tokens, expected, "{}, {what}", golden.id);
}

#[test]
fn goldens_on_2_4_and_8_ranks_in_both_modes() {
    let Some((_turn, _device)) = device() else { return };
    for count in [2, 4, 8] {
        for sharing in BOTH {
            let mut engine = load_ranks(ranks(count, sharing));
            let what = format!("{count} ranks, {sharing:?}, {}", reduce(&engine));
            println!("{what}");
            for golden in answers() {
                assert_golden(&mut engine, &golden, &what);
            }
        }
    }
}

/// With a hash of the residuals after every exchange, which the ranks compare at the end of a step;
/// and the variants' tokens and logits are the same, bit for bit.
#[test]
fn every_variant_gives_the_same_bits_on_all_ranks() {
    let Some((_turn, _device)) = device() else { return };
    let Golden { prompt, greedy: tokens, .. } = golden("chat-3");
    let request = talon::engine::Request { keep_logits: true, ..greedy(&prompt, tokens.len()) };
    for count in [2, 8] {
        let mut first: Option<Vec<Vec<f32>>> = None;
        for sharing in BOTH {
            for variant in Variant::ALL {
                let reduce = Some(variant);
                let mischief = Some(delays(count as u32));
                let mut engine =
                    load_ranks(RanksOptions { reduce, mischief, ..ranks(count, sharing) });
                let logits = run_plain(&mut engine, &request).logits;
                let bits = |rows: &[Vec<f32>]| -> Vec<u32> {
                    rows.iter().flatten().map(|logit| logit.to_bits()).collect()
                };
                let first = first.get_or_insert_with(|| logits.clone());
                assert!(bits(&logits) == bits(first), "{count} ranks, {sharing:?}, {variant}");
            }
        }
    }
}

/// Whole experts on each rank: other sums, the same text.
#[test]
fn goldens_with_whole_experts() {
    let Some((_turn, _device)) = device() else { return };
    for (count, sharing) in [(2, Sharing::LockStep), (8, Sharing::Concurrent)] {
        let gpus = ranks(count, sharing);
        let options = LoadOptions { gpus, experts: ExpertSplit::Whole, ..LoadOptions::default() };
        let mut engine = load(demo(), options);
        for golden in answers() {
            assert_golden(&mut engine, &golden, &format!("{count} ranks, whole experts"));
        }
    }
}

#[test]
fn speculation_on_ranks_is_lossless() {
    let Some((_turn, _device)) = device() else { return };
    let mut engine = load_ranks(ranks(4, Sharing::Concurrent));
    for golden in answers().iter().take(6) {
        let request = greedy(&golden.prompt, 48);
        let plain = run_plain(&mut engine, &request).tokens;
        for guesses in [1, 3, 7] {
            let mut drafter = oracle(&golden.prompt, &plain);
            let tokens = run(&mut engine, &request, &mut drafter, guesses).tokens;
            assert_eq!(tokens, plain, "{}, {guesses} guesses", golden.id);
        }
    }
}

/// 100,000 exchanges of every variant with random waits, across the 32-bit border of the epochs.
#[test]
fn a_hundred_thousand_exchanges_with_delays_are_exact() {
    let Some((_turn, _device)) = device() else { return };
    for (seed, count) in [(1, 8), (2, 2)] {
        for variant in Variant::ALL {
            let begun = Instant::now();
            let mischief = Some(Mischief { delay_ns: 2000, seed, ..Mischief::default() });
            let first_epoch = (1 << 32) - 5000;
            let options =
                RanksOptions { mischief, first_epoch, ..ranks(count, Sharing::Concurrent) };
            exchange_many(&options, variant, (2, 256), 100_000).expect("exact sums");
            println!("{count} ranks, {variant}: {:.1} s", begun.elapsed().as_secs_f64());
        }
    }
}

fn damage(damage: Damage, variant: Option<Variant>, epoch: u64) -> Option<Mischief> {
    Some(Mischief { damage: Some(damage), variant, rank: 1, peer: 0, epoch, ..Mischief::default() })
}

/// What a start finds wrong with a variant takes that variant out, and the model runs without it.
#[test]
fn a_start_leaves_out_what_is_damaged() {
    let Some((_turn, _device)) = device() else { return };
    for what in [Damage::Flip, Damage::Drop, Damage::Stall] {
        for variant in [Variant::Push, Variant::Pull, Variant::Owner] {
            let mischief = damage(what, Some(variant), 1);
            let timeout = Duration::from_millis(300);
            let mut engine =
                load_ranks(RanksOptions { mischief, timeout, ..ranks(2, Sharing::Concurrent) });
            println!("{what:?} in {variant}: {}", reduce(&engine));
            assert!(!reduce(&engine).contains(variant.name()), "{}", reduce(&engine));
            assert_golden(&mut engine, &golden("chat-3"), variant.name());
        }
    }
    // Copies that report success and move nothing: nothing that goes from GPU to GPU is used.
    let mut engine = load_ranks(RanksOptions { copies_lie: true, ..ranks(4, Sharing::Concurrent) });
    assert_eq!(reduce(&engine), "staged");
    assert_golden(&mut engine, &golden("chat-3"), "staged");
}

fn fails_within_seconds(mischief: Option<Mischief>, variant: Variant, words: &[&str]) {
    let gpus = RanksOptions { mischief, reduce: Some(variant), ..ranks(4, Sharing::Concurrent) };
    let mut engine = load_ranks(gpus);
    let Golden { prompt, .. } = golden("chat-3");
    let begun = Instant::now();
    let request = greedy(&prompt, 200);
    let error = engine.generate(&request, |_| Ok(talon::engine::Flow::Continue));
    let error = error.expect_err("it is damaged").to_string();
    println!("{error}");
    for word in words {
        assert!(error.contains(word), "expected {word:?} in {error}");
    }
    let again = engine.generate(&request, |_| Ok(talon::engine::Flow::Continue));
    assert!(again.is_err(), "a damaged model goes on");
    drop(engine);
    let seconds = begun.elapsed().as_secs_f64();
    assert!(seconds < 10.0, "it took {seconds:.1} s to end");
}

fn demo_layers() -> usize {
    let engine = load_ranks(on(&[0]));
    engine.config().num_hidden_layers
}

/// While decoding there is nothing to fall back to: the run ends and names the rank.
#[test]
fn damage_while_decoding_is_named() {
    let Some((_turn, _device)) = device() else { return };
    // A step of the prompt exchanges twice a layer, one with a result once more for the head; the
    // embedding is no exchange, the last norm is one. Epoch 1 is the first.
    let layers = demo_layers();
    let prompt = golden("chat-3").prompt.len();
    let in_prefill = 12;
    let in_decode = (prompt.div_ceil(16) * 2 * layers + 1 + 20 * (2 * layers + 1) + 5) as u64;
    // Not owner: what is damaged on the way to an owner is the same for all afterwards.
    for variant in [Variant::Push, Variant::Pull] {
        for epoch in [in_prefill, in_decode] {
            let flip = damage(Damage::Flip, None, epoch);
            fails_within_seconds(flip, variant, &["ranks 0 and", "differ", "damaged"]);
        }
    }
    let number = format!("collective {in_decode}");
    let words = ["waited 3.0 s for rank 1", number.as_str()];
    for variant in [Variant::Push, Variant::Owner] {
        fails_within_seconds(damage(Damage::Drop, None, in_decode), variant, &words);
    }
    for variant in Variant::ALL {
        fails_within_seconds(damage(Damage::Stall, None, in_decode), variant, &words);
    }
    let stall = damage(Damage::Stall, None, in_prefill);
    fails_within_seconds(stall, Variant::Push, &["for rank 1", "collective 12"]);
}

/// A flag that is lost is made good by the next one: the data was there all the time.
#[test]
fn a_lost_flag_is_survived() {
    let Some((_turn, _device)) = device() else { return };
    for variant in [Variant::Pull, Variant::Staged] {
        let mischief = damage(Damage::Drop, None, 200);
        let gpus =
            RanksOptions { mischief, reduce: Some(variant), ..ranks(4, Sharing::Concurrent) };
        assert_golden(&mut load_ranks(gpus), &golden("chat-3"), variant.name());
    }
}

fn refused(gpus: RanksOptions) -> Error {
    let Err(error) = try_load(demo(), LoadOptions { gpus, ..LoadOptions::default() }) else {
        panic!("it was loaded")
    };
    println!("{error}");
    assert_eq!(error.to_string().lines().count(), 1);
    error
}

#[test]
fn what_cannot_be_shared_is_refused() {
    let Some((_turn, _device)) = device() else { return };
    assert_eq!(refused(on(&[0, 99])).kind(), Kind::Input);
    // Everything is damaged, at every epoch that a start tries: there is no way left.
    let mischief =
        Some(Mischief { damage: Some(Damage::Drop), rank: 1, epoch: 1, ..Mischief::default() });
    let timeout = Duration::from_millis(200);
    let error = refused(RanksOptions { mischief, timeout, ..ranks(2, Sharing::Concurrent) });
    for variant in Variant::ALL {
        assert!(error.to_string().contains(&format!("{variant}: rank 0")), "{error}");
    }
}

/// A rank that does not fit ends the load, and what the others have taken is free again.
#[test]
fn a_rank_that_cannot_load_ends_the_load() {
    let Some((_turn, device)) = device() else { return };
    drop(load_ranks(ranks(2, Sharing::Concurrent)));
    let before = device.free_bytes().expect("a number");
    for sharing in BOTH {
        let context = Some(3 << 20);
        let begun = Instant::now();
        let gpus = ranks(8, sharing);
        let result = try_load(
            demo(),
            LoadOptions { gpus, context, parallel: 4096, ..LoadOptions::default() },
        );
        let Err(error) = result else { panic!("it fits") };
        println!("{error}");
        assert!(error.to_string().contains("MiB short"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
    std::thread::sleep(Duration::from_secs(1));
    let after = device.free_bytes().expect("a number");
    assert!(after + crate::limits::SLACK >= before, "{before} bytes were free, now {after}");
}
