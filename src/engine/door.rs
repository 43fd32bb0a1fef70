//! What the scheduler and those who wait for it share: how a task is handed in, what comes back,
//! and how it is called off.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Chosen, Finish, Task};
use crate::spec::SpeculationStats;

/// What a sequence tells whoever waits for it. After [`Event::Finished`] nothing comes; a receiver
/// that ends without it has lost its engine.
#[derive(Debug)]
pub enum Event {
    /// A slot was free and the prompt is being run; this many of its tokens were in the cache.
    Started {
        /// Prompt tokens that need not be run.
        cached: usize,
    },
    /// A step in which tokens were chosen.
    Step {
        /// The tokens, without a stop token.
        tokens: Vec<Chosen>,
        /// Guesses that were checked in it, none in the step of the first token.
        drafted: usize,
        /// Those that were right.
        accepted: usize,
    },
    /// The end.
    Finished {
        /// Why.
        finish: Finish,
        /// Tokens that were chosen, the end token included.
        generated: usize,
    },
}

/// Counters of the engine, for metrics.
#[derive(Debug, Default)]
pub struct Status {
    /// Tasks without a slot.
    pub waiting: AtomicUsize,
    /// Tasks with one.
    pub running: AtomicUsize,
    /// Cache entries of running sequences.
    pub cache_used: AtomicUsize,
    /// Prompt tokens of tasks that got a slot.
    pub prompt_tokens: AtomicU64,
    /// Those of them that were in the cache.
    pub cached_tokens: AtomicU64,
    /// Tokens that were chosen.
    pub generated_tokens: AtomicU64,
    /// Steps that were run.
    pub steps: AtomicU64,
    speculation: Mutex<SpeculationStats>,
}

impl Status {
    /// What speculation has done so far.
    pub fn speculation(&self) -> MutexGuard<'_, SpeculationStats> {
        // The counts are whole after each addition, so a panic elsewhere does not spoil them.
        self.speculation.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A task on its way to the scheduler.
pub(super) struct Job {
    pub task: Task,
    pub speculate: Option<usize>,
    pub events: Sender<Event>,
    pub cancelled: Arc<AtomicBool>,
}

/// Why a task was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The queue is full.
    Full,
    /// The engine has ended.
    Ended,
}

/// Where tasks are handed in; cloned for each thread that does.
#[derive(Clone)]
pub struct Door {
    pub(super) jobs: Sender<Job>,
    pub(super) status: Arc<Status>,
    pub(super) queue: usize,
}

impl Door {
    /// Hands in a task, whose prompt is in the vocabulary and fits the context with one token to
    /// spare. `speculate`: guesses a round, or as the engine's policy says.
    ///
    /// # Errors
    /// If the queue is full or the engine has ended.
    pub fn submit(&self, task: Task, speculate: Option<usize>) -> Result<Ticket, Refusal> {
        let waiting = &self.status.waiting;
        let enter = |count: usize| (count < self.queue).then_some(count + 1);
        waiting
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, enter)
            .map_err(|_| Refusal::Full)?;
        let (sender, events) = channel();
        let cancelled = Arc::new(AtomicBool::new(false));
        let job = Job { task, speculate, events: sender, cancelled: cancelled.clone() };
        if self.jobs.send(job).is_err() {
            waiting.fetch_sub(1, Ordering::SeqCst);
            return Err(Refusal::Ended);
        }
        Ok(Ticket { events, cancelled })
    }

    /// The engine's counters.
    pub fn status(&self) -> &Status {
        &self.status
    }
}

/// A task that was handed in. Dropping it calls the task off: in the queue, in its prompt or while
/// it decodes, before the next step.
pub struct Ticket {
    events: Receiver<Event>,
    cancelled: Arc<AtomicBool>,
}

impl Ticket {
    /// What the sequence tells.
    pub fn events(&self) -> &Receiver<Event> {
        &self.events
    }

    /// Set to call the task off from another thread.
    pub fn cancel_flag(&self) -> Arc<AtomicBool> {
        self.cancelled.clone()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::SeqCst);
    }
}
