//! All ranks of a model, a thread each: starts them, hands every step to all of them, and compares
//! what they say. A rank that fails or stalls is named within seconds; nothing waits for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use super::layout::MAX_ROWS;
use super::rank::{CudaOptions, RankComm};
use super::rank_thread::{Loaded, RankThread, Report, Task};
use super::runner::{RowOutcome, check_same};
use crate::error::{Error, Result};
use crate::model::{ModelConfig, ModelParams};

/// How often a load looks at its ranks.
const GLANCE: Duration = Duration::from_millis(100);
/// How long a step's reports are polled for.
const POLLING: Duration = Duration::from_millis(20);
/// A rank that has placed nothing for so long, while others have, is stuck.
const STUCK: Duration = Duration::from_secs(9);
/// What the slowest step of [`MAX_ROWS`] rows may take besides its waits for other ranks.
const SLOWEST: Duration = Duration::from_secs(2);
/// How long ranks may take to end.
const FAREWELL: Duration = Duration::from_secs(5);

/// The ranks' threads.
pub struct RankGroup {
    ranks: Vec<RankThread>,
    reports: Receiver<(usize, Report)>,
    timeout: Duration,
    /// A rank has failed: the others may be in the middle of a step.
    failed: bool,
}

impl RankGroup {
    /// Starts a rank for each share and waits until all have loaded. A wait of one rank for another
    /// times out by itself after `timeout`.
    ///
    /// # Errors
    /// The first rank's that fails; runtime error if one is stuck.
    pub fn start(
        config: &Arc<ModelConfig>,
        shares: Vec<(ModelParams, CudaOptions, RankComm)>,
        epoch: u64,
        timeout: Duration,
        progress: &dyn Fn(usize, usize),
    ) -> Result<(Self, Loaded)> {
        let (sender, reports) = channel();
        let mut group = Self { ranks: Vec::new(), reports, timeout, failed: true };
        for (params, options, comm) in shares {
            let sender = sender.clone();
            group.ranks.push(RankThread::start(config, params, options, comm, epoch, sender)?);
        }
        drop(sender);
        let loaded = group.wait_for_load(progress)?;
        group.failed = false;
        Ok((group, loaded))
    }

    fn wait_for_load(&self, progress: &dyn Fn(usize, usize)) -> Result<Loaded> {
        let mut loaded: Vec<Option<Loaded>> = vec![None; self.ranks.len()];
        // Bytes of each rank, and when they last became more.
        let mut seen = vec![(0, Instant::now()); self.ranks.len()];
        let mut told = 0;
        let mut suspect = None;
        while loaded.iter().any(Option::is_none) {
            match self.reports.recv_timeout(GLANCE) {
                Ok((rank, Report::Loaded(result))) => loaded[rank] = Some(result?),
                Ok((rank, Report::Rows(_))) => {
                    return Err(Error::runtime(format!("rank {rank} ran a step while loading")));
                }
                // What a rank has sent before it ended comes in first.
                Err(_) => match self.gone(|rank| loaded[rank].is_none()) {
                    Some(rank) if suspect == Some(rank) => return Err(ended(rank)),
                    gone => suspect = gone,
                },
            }
            let counts = |of: fn(&RankThread) -> usize| self.ranks.iter().map(of).sum::<usize>();
            let done = counts(|rank| rank.placed.done.load(Ordering::Relaxed));
            let total = counts(|rank| rank.placed.total.load(Ordering::Relaxed));
            progress(done - told, total);
            told = done;
            for (rank, seen) in self.ranks.iter().zip(&mut seen) {
                let bytes = rank.placed.done.load(Ordering::Relaxed);
                if bytes != seen.0 {
                    *seen = (bytes, Instant::now());
                }
            }
            let newest = seen.iter().map(|(_, when)| *when).max().unwrap_or_else(Instant::now);
            let is_stuck = |rank: &usize| {
                let (bytes, when) = seen[*rank];
                loaded[*rank].is_none() && bytes > 0 && newest.duration_since(when) > STUCK
            };
            if let Some(rank) = (0..self.ranks.len()).find(is_stuck) {
                return Err(Error::runtime(format!(
                    "rank {rank} has loaded nothing for {} s while others have, at {} MiB; its GPU \
                     or the disk does not answer (dmesg says more)",
                    STUCK.as_secs(),
                    seen[rank].0 >> 20
                )));
            }
        }
        loaded[0].ok_or_else(|| Error::runtime("there is no rank 0"))
    }

    /// Runs one step or draft on all ranks.
    ///
    /// # Errors
    /// The first rank's error; runtime error that names the ranks if they differ, end, or do not
    /// answer in time.
    pub fn run(&mut self, task: Task) -> Result<Vec<RowOutcome>> {
        if self.failed {
            return Err(Error::runtime("a rank has failed before; the model must be loaded again"));
        }
        self.failed = true;
        let outcomes = self.run_or_fail(task)?;
        self.failed = false;
        Ok(outcomes)
    }

    fn run_or_fail(&self, task: Task) -> Result<Vec<RowOutcome>> {
        let parts = task.rows().div_ceil(MAX_ROWS) as u32;
        let limit = self.timeout + SLOWEST * parts.max(1);
        let task = Arc::new(task);
        for (index, rank) in self.ranks.iter().enumerate() {
            let sent = rank.tasks.as_ref().is_some_and(|tasks| tasks.send(task.clone()).is_ok());
            if !sent {
                return Err(ended(index));
            }
        }
        let begun = Instant::now();
        let mut suspect = None;
        let mut answers: Vec<Option<Vec<RowOutcome>>> = vec![None; self.ranks.len()];
        while answers.iter().any(Option::is_none) {
            match self.next_report() {
                Ok((rank, Report::Rows(outcomes))) => answers[rank] = Some(outcomes?),
                Ok((rank, Report::Loaded(_))) => {
                    return Err(Error::runtime(format!("rank {rank} loaded during a step")));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(ended(0)),
                Err(RecvTimeoutError::Timeout) => {
                    match self.gone(|rank| answers[rank].is_none()) {
                        Some(rank) if suspect == Some(rank) => return Err(ended(rank)),
                        gone => suspect = gone,
                    }
                    if begun.elapsed() > limit {
                        let missing = (0..answers.len()).filter(|rank| answers[*rank].is_none());
                        let names: Vec<String> = missing.map(|rank| rank.to_string()).collect();
                        return Err(Error::runtime(format!(
                            "rank {} has not answered for {:.0} s; its GPU does not answer any more \
                             (nvidia-smi and dmesg say more)",
                            names.join(", rank "),
                            limit.as_secs_f64()
                        )));
                    }
                }
            }
        }
        let mut answers = answers.into_iter().flatten();
        let mut outcomes = answers.next().unwrap_or_default();
        for (rank, others) in (1..).zip(answers) {
            for (outcome, other) in outcomes.iter_mut().zip(others) {
                check_same(outcome, 0, &other, rank)?;
                outcome.logits.extend(other.logits);
            }
        }
        Ok(outcomes)
    }

    /// A rank that is awaited and has ended: a panic, whose message is on the terminal.
    fn gone(&self, is_awaited: impl Fn(usize) -> bool) -> Option<usize> {
        (0..self.ranks.len()).find(|rank| is_awaited(*rank) && self.ranks[*rank].has_ended())
    }

    /// The next report. Polls at first, because a step is short; then looks up now and then.
    fn next_report(&self) -> std::result::Result<(usize, Report), RecvTimeoutError> {
        let begun = Instant::now();
        while begun.elapsed() < POLLING {
            match self.reports.try_recv() {
                Ok(report) => return Ok(report),
                Err(TryRecvError::Disconnected) => return Err(RecvTimeoutError::Disconnected),
                Err(TryRecvError::Empty) => std::hint::spin_loop(),
            }
        }
        self.reports.recv_timeout(GLANCE)
    }
}

fn ended(rank: usize) -> Error {
    Error::runtime(format!("rank {rank} has ended; its message is above"))
}

impl Drop for RankGroup {
    /// Waits for the ranks, but for none that has stopped answering: the process is about to end, and
    /// the driver frees what such a rank holds.
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            rank.tasks = None;
        }
        let begun = Instant::now();
        while begun.elapsed() < FAREWELL && self.ranks.iter().any(|rank| !rank.has_ended()) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
