//! One rank on a thread of its own: it loads its share, captures its graphs, and then runs the tasks
//! that come in through its mailbox.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::measure::read_roof;
use super::numa::stay_near;
use super::plan::MemoryPlan;
use super::rank::{CudaOptions, CudaRank, RankComm};
use super::runner::{RowOutcome, Runner};
use crate::error::{Error, Kind, Result};
use crate::model::{Draft, ModelConfig, ModelParams, Step};

/// How long a rank polls its mailbox before it sleeps: between steps there is little time.
const POLLING: Duration = Duration::from_micros(500);

/// What a rank reports once it has loaded.
#[derive(Debug, Clone, Copy)]
pub struct Loaded {
    /// What its memory is used for.
    pub plan: MemoryPlan,
    /// Bytes of weights that a step of one row reads.
    pub step_bytes: usize,
    /// What one more routed expert adds to them, in all layers.
    pub expert_bytes: usize,
    /// Launches of such a step.
    pub launches: usize,
    /// Bytes a second of plain reads, if there is enough to read.
    pub read_roof: Option<f64>,
}

impl Loaded {
    /// Of the first rank of a runner.
    ///
    /// # Errors
    /// Runtime error if the device fails.
    pub fn of(runner: &Runner) -> Result<Self> {
        let rank = &runner.ranks()[0];
        let layers = rank.config.num_hidden_layers;
        let used = rank.config.num_experts_per_tok;
        let step_bytes = rank.weights.step_bytes(layers, used);
        Ok(Self {
            plan: rank.plan,
            step_bytes,
            expert_bytes: rank.weights.step_bytes(layers, used + 1) - step_bytes,
            launches: runner.launches(),
            read_roof: read_roof(rank)?,
        })
    }
}

/// What a rank sends.
pub enum Report {
    /// It has loaded.
    Loaded(Result<Loaded>),
    /// It has run a task.
    Rows(Result<Vec<RowOutcome>>),
}

/// What a rank is given to run.
pub enum Task {
    /// A step of the target.
    Step(Step),
    /// A draft.
    Draft(Draft),
}

impl Task {
    /// Rows of it, at most.
    pub fn rows(&self) -> usize {
        match self {
            Task::Step(step) => step.rows.len(),
            Task::Draft(draft) => draft.tokens.len() + draft.count,
        }
    }
}

/// Bytes of weights, of one rank.
#[derive(Debug, Default)]
pub struct Placed {
    /// That lie on the device.
    pub done: AtomicUsize,
    /// All of them, as soon as they are counted.
    pub total: AtomicUsize,
}

/// A running rank.
pub struct RankThread {
    /// Its mailbox; nothing more comes once it is dropped.
    pub tasks: Option<Sender<Arc<Task>>>,
    /// How far its load is.
    pub placed: Arc<Placed>,
    thread: JoinHandle<()>,
}

impl RankThread {
    /// Starts a rank; it reports to `reports` with its number.
    ///
    /// # Errors
    /// Runtime error if the system gives no thread.
    pub fn start(
        config: &Arc<ModelConfig>,
        params: ModelParams,
        options: CudaOptions,
        comm: RankComm,
        epoch: u64,
        reports: Sender<(usize, Report)>,
    ) -> Result<Self> {
        let (tasks, mailbox) = channel();
        let placed = Arc::new(Placed::default());
        let (config, counted) = (Arc::clone(config), Arc::clone(&placed));
        let rank = options.rank;
        let run = move || {
            stay_near(comm.fabric.device(rank));
            let name = format!("rank {rank} (GPU {})", options.device);
            let progress = |bytes: usize, total: usize| {
                counted.total.store(total, Ordering::Relaxed);
                counted.done.fetch_add(bytes, Ordering::Relaxed);
            };
            let loaded = CudaRank::load(&config, &params, &options, Some(comm), &progress);
            let runner = loaded.and_then(|rank| Runner::new(vec![rank], epoch));
            drop(params);
            let runner = runner.and_then(|runner| Ok((Loaded::of(&runner)?, runner)));
            match runner.map_err(|error| of_rank(&name, &error)) {
                Ok((loaded, runner)) => {
                    if reports.send((rank, Report::Loaded(Ok(loaded)))).is_ok() {
                        serve(runner, rank, &name, &mailbox, &reports);
                    }
                }
                // Nobody listens any more if another rank has failed before.
                Err(error) => drop(reports.send((rank, Report::Loaded(Err(error))))),
            }
        };
        let thread = std::thread::Builder::new()
            .name(format!("rank {rank}"))
            .spawn(run)
            .map_err(|error| Error::runtime(format!("cannot start rank {rank}: {error}")))?;
        Ok(Self { tasks: Some(tasks), placed, thread })
    }

    /// Whether it has ended: after its mailbox was closed, or in a panic.
    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }
}

/// Runs tasks until the mailbox is closed.
fn serve(
    mut runner: Runner,
    rank: usize,
    name: &str,
    mailbox: &Receiver<Arc<Task>>,
    reports: &Sender<(usize, Report)>,
) {
    while let Some(task) = next(mailbox) {
        let outcomes = match &*task {
            Task::Step(step) => runner.step(step),
            Task::Draft(draft) => runner.draft(draft),
        };
        let outcomes = outcomes.map_err(|error| of_rank(name, &error));
        if reports.send((rank, Report::Rows(outcomes))).is_err() {
            return;
        }
    }
}

/// The next task: polls for a while, then sleeps.
fn next<T>(mailbox: &Receiver<T>) -> Option<T> {
    let begun = Instant::now();
    while begun.elapsed() < POLLING {
        match mailbox.try_recv() {
            Ok(task) => return Some(task),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) => std::hint::spin_loop(),
        }
    }
    mailbox.recv().ok()
}

/// The same error, with the rank's name before it.
fn of_rank(name: &str, error: &Error) -> Error {
    let text = error.to_string();
    let text = if text.starts_with("rank ") { text } else { format!("{name}: {text}") };
    match error.kind() {
        Kind::Input => Error::input(text),
        _ => Error::runtime(text),
    }
}
