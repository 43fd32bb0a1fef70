//! What this box is, and what is wrong with it: checks (one function each) over facts that are read once,
//! from this box or from a recorded tree of files.

mod cgroup;
mod check;
mod checks;
mod date;
mod deep;
mod expected;
mod facts;
mod fingerprint;
mod measured;
mod pci;
mod report;
mod root;
mod snapshot;

use std::path::Path;

use serde_json::{Map, Value, json};

pub use check::{Check, Status};
pub use deep::Watch;
pub use fingerprint::fingerprint;
pub use measured::{OwnCards, keep_bench, own_cards};
pub use report::table;
pub use snapshot::changes;

use crate::error::Result;
use facts::Facts;
use root::View;

/// What a look at a box has found.
pub struct Diagnosis {
    /// What decides whether the box runs as it did (`snapshot.rs`).
    pub snapshot: Value,
    /// In the order in which they were made.
    pub checks: Vec<Check>,
    /// The box in a few words; null for a recorded one.
    pub fingerprint: Value,
    /// The speed that the box should reach; null where nothing is known of its cards.
    pub expected_speed: Value,
    /// What the last `talon bench` found here; null if there was none.
    pub last_bench: Value,
    /// Why there is one that does not count: it was on another box.
    pub bench_elsewhere: Option<String>,
    /// What `--deep` has measured, now or the last time; null if it never has.
    pub measured: Value,
    /// What was measured and has not come back: it holds a thread, and maybe a GPU.
    pub hangs: Option<String>,
}

/// A checkpoint that is to run on the box.
pub struct Model {
    /// Its folder.
    pub folder: String,
    /// Of its tensors; memory and disk are judged by them.
    pub bytes: u64,
    /// What tells it from others, for the snapshot.
    pub identity: Map<String, Value>,
    /// Share of it that is in memory; `None` if it is no files.
    pub resident: Option<f64>,
    /// What each of that many ranks' GPUs must have free for it, or why it cannot be shared so.
    pub room: Box<dyn Fn(usize) -> std::result::Result<Room, String>>,
}

/// What a rank's GPU must have free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// For everything.
    pub bytes: u64,
    /// For one sequence of so many tokens.
    pub context: usize,
}

/// Looks at this box, or at the one recorded in the folder `root`. With a `watch`, measures it first.
///
/// # Errors
/// Input error if there is no such folder, or if it is to be measured; interrupted, if the watch says so.
pub fn diagnose(
    root: Option<&Path>,
    model: Option<Model>,
    watch: Option<&Watch>,
) -> Result<Diagnosis> {
    let view = root.map_or_else(|| Ok(View::of_this_box()), View::recorded)?;
    let identity = model.as_ref().map_or(Map::new(), |model| model.identity.clone());
    let mut facts = Facts::read(view, model);
    let hangs = watch.map_or(Ok(None), |watch| facts.measure(watch))?;
    let recorded = facts.view.is_recorded();
    Ok(Diagnosis {
        snapshot: snapshot::snapshot(&facts, &identity),
        checks: checks::run(&facts),
        expected_speed: expected::expected(&facts),
        fingerprint: if recorded { Value::Null } else { fingerprint() },
        last_bench: facts.measured.bench.unwrap_or_default(),
        bench_elsewhere: facts.measured.bench_elsewhere,
        measured: serde_json::to_value(&facts.measured.deep).unwrap_or_default(),
        hangs,
    })
}

impl Diagnosis {
    /// Whether a check fails.
    pub fn fails(&self) -> bool {
        self.checks.iter().any(|check| check.status == Status::Fail)
    }

    /// For programs.
    pub fn json(&self) -> Value {
        json!({
            "box": self.fingerprint,
            "checks": self.checks.iter().map(Check::json).collect::<Vec<Value>>(),
            "expected_speed": self.expected_speed,
            "measured": self.measured,
            "last_bench": self.last_bench,
        })
    }
}
