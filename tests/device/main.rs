//! Promise: the GPU computes what the CPU backend computes, and keeps every promise of the engine on
//! the way: rows that do not see each other, lossless speculation, limits that are told.
//!
//! One binary, so that it can be carried to a box with a GPU (run.sh, README.md). Without a GPU each
//! test passes and prints `skipped: no GPU`. TALON_DEVICE=cpu puts the CPU backend in the GPU's place,
//! which tests the tests.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/engines.rs"]
mod engines;
#[path = "../common/heads.rs"]
mod heads;

mod chains;
mod drafters;
mod errors;
mod goldens;
mod layouts;
mod limits;
mod meters;
mod ranks;
mod rows;
mod sampling;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use talon::cuda::{Device, has_kernels};
use talon::engine::{BackendChoice, Engine, LoadOptions};
use talon::weights::Source;

/// Tests take turns: some of them measure the device's free memory.
static TURN: Mutex<()> = Mutex::new(());

/// A test's turn on the GPU.
struct Turn {
    _turn: MutexGuard<'static, ()>,
}

fn on_cpu() -> bool {
    std::env::var("TALON_DEVICE").is_ok_and(|device| device == "cpu")
}

/// `None`, and a line that says why, where there is nothing to run on.
fn turn() -> Option<Turn> {
    if !on_cpu() && Device::count().expect("a driver that starts") == 0 {
        println!("skipped: no GPU");
        return None;
    }
    if !on_cpu() && !has_kernels() {
        println!("skipped: this build has no kernels");
        return None;
    }
    Some(Turn { _turn: TURN.lock().unwrap_or_else(PoisonError::into_inner) })
}

/// As [`turn`], for tests that only a true GPU can pass.
fn device() -> Option<(Turn, Arc<Device>)> {
    if on_cpu() {
        println!("skipped: TALON_DEVICE=cpu");
        return None;
    }
    let turn = turn()?;
    Some((turn, Device::open(0).expect("the first GPU")))
}

/// The backend under test.
fn backend() -> BackendChoice {
    if on_cpu() { BackendChoice::Cpu } else { BackendChoice::Cuda }
}

fn try_load(source: Source, options: LoadOptions) -> talon::error::Result<Engine> {
    Engine::load(source, &LoadOptions { backend: backend(), ..options }, &|_, _| {})
}

/// Loads a model on the GPU.
fn load(source: Source, options: LoadOptions) -> Engine {
    let engine = try_load(source, options).expect("the model loads");
    assert_eq!(engine.backend_name(), if on_cpu() { "cpu" } else { "cuda" });
    engine
}

/// The random model, which attends to 8 positions.
fn tiny() -> Source {
    Source::Directory(engines::repository_file("tests/fixtures/tiny-random"))
}
