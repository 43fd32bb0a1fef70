//! Continuous batching: each step holds the rows of all running sequences, a verify round's or one
//! of a plain decode, and at most one chunk of prompt rows. Rows do not see each other, so every
//! sequence comes out as if it were alone.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use super::door::{Door, Event, Job, Status};
use super::sequence::{Accepted, Chosen, Finish, Flow, Sequence};
use super::slots::{PrefixSlots, Taken};
use super::{Engine, Limits};
use crate::error::Result;
use crate::model::{Backend, RowResult, Step};
use crate::spec::{ModelDrafter, Policy, Proposer, RoundCost};

/// What is worth guessing depends on how many sequences share a step, so each of these numbers of
/// sequences, up to the next, has a policy of its own.
const LOADS: [usize; 6] = [1, 2, 3, 5, 9, 17];

/// Runs tasks on a backend, many at a time.
pub struct Scheduler {
    backend: Box<dyn Backend + Send>,
    limits: Limits,
    /// For each of [`LOADS`]; none without a drafter.
    policies: Vec<Policy>,
    slots: PrefixSlots,
    jobs: Receiver<Job>,
    waiting: VecDeque<Job>,
    running: Vec<Running>,
    status: Arc<Status>,
}

/// A sequence in a slot.
struct Running {
    sequence: Sequence,
    drafter: ModelDrafter,
    speculate: Option<usize>,
    events: Sender<Event>,
    cancelled: Arc<AtomicBool>,
    follows_draft: bool,
}

/// What one step is made of: for each sequence in it, its index and its number of rows.
struct Plan {
    decode: Vec<(usize, usize)>,
    prompts: Vec<(usize, usize)>,
    /// Guesses that the policy chose for all that follow it.
    guesses: usize,
    draft: Duration,
}

impl Engine {
    /// Hands the model over to a scheduler in which at most `queue` tasks wait.
    pub fn into_scheduler(self, queue: usize) -> (Scheduler, Door) {
        let policy = self.drafter.is_some().then_some(self.policy);
        Scheduler::new(self.backend, self.limits, policy, queue)
    }
}

impl Scheduler {
    /// A scheduler on any backend. `policy`: how many tokens to guess, if there is a drafter.
    pub fn new(
        backend: Box<dyn Backend + Send>,
        limits: Limits,
        policy: Option<Policy>,
        queue: usize,
    ) -> (Self, Door) {
        let (sender, jobs) = channel();
        let status = Arc::new(Status::default());
        let scheduler = Self {
            backend,
            limits,
            slots: PrefixSlots::new(limits.parallel, policy.is_some()),
            policies: policy.map_or(Vec::new(), |policy| vec![policy; LOADS.len()]),
            jobs,
            waiting: VecDeque::new(),
            running: Vec::new(),
            status: status.clone(),
        };
        (scheduler, Door { jobs: sender, status, queue: queue.max(1) })
    }

    /// Runs until all doors are gone and all tasks are done.
    ///
    /// # Errors
    /// Runtime error if the backend failed; tasks that were running lose their events' sender.
    pub fn run(mut self) -> Result<()> {
        while self.collect() {
            self.drop_cancelled();
            self.admit()?;
            if !self.running.is_empty() {
                self.step()?;
            }
        }
        Ok(())
    }

    /// Takes in new tasks, and waits for one if there is nothing to do; false at the end.
    fn collect(&mut self) -> bool {
        if self.running.is_empty() && self.waiting.is_empty() {
            match self.jobs.recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(_) => return false,
            }
        }
        loop {
            match self.jobs.try_recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return true,
            }
        }
    }

    fn drop_cancelled(&mut self) {
        let count = self.waiting.len();
        self.waiting.retain(|job| !job.cancelled.load(Ordering::SeqCst));
        self.status.waiting.fetch_sub(count - self.waiting.len(), Ordering::SeqCst);
        let mut index = 0;
        while index < self.running.len() {
            match self.running[index].cancelled.load(Ordering::SeqCst) {
                true => drop(self.leave(index)),
                false => index += 1,
            }
        }
    }

    /// Gives free slots to those that wait longest.
    fn admit(&mut self) -> Result<()> {
        while self.slots.any_free() {
            let Some(job) = self.waiting.pop_front() else {
                break;
            };
            let Some(Taken { slot, cached, drafter }) = self.slots.take(&job.task.prompt) else {
                break;
            };
            self.status.waiting.fetch_sub(1, Ordering::SeqCst);
            self.status.running.fetch_add(1, Ordering::SeqCst);
            self.status.prompt_tokens.fetch_add(job.task.prompt.len() as u64, Ordering::Relaxed);
            self.status.cached_tokens.fetch_add(cached as u64, Ordering::Relaxed);
            let limits = (self.limits.context, self.limits.vocab_limit);
            let started = job.events.send(Event::Started { cached });
            if started.is_err() {
                job.cancelled.store(true, Ordering::SeqCst);
            }
            self.running.push(Running {
                sequence: Sequence::new(slot, job.task, cached, limits)?,
                drafter,
                speculate: job.speculate,
                events: job.events,
                cancelled: job.cancelled,
                follows_draft: false,
            });
        }
        Ok(())
    }

    /// Takes a sequence out; its slot keeps its tokens.
    fn leave(&mut self, index: usize) -> Running {
        let running = self.running.remove(index);
        let tokens = running.sequence.cached_tokens().to_vec();
        self.slots.leave(running.sequence.slot(), tokens, running.drafter.clone());
        self.status.running.fetch_sub(1, Ordering::SeqCst);
        running
    }

    fn step(&mut self) -> Result<()> {
        let plan = self.plan()?;
        let mut rows = Vec::new();
        for (index, _) in &plan.decode {
            rows.extend(self.running[*index].sequence.round_rows());
        }
        for (index, count) in &plan.prompts {
            rows.extend(self.running[*index].sequence.prompt_rows(*count));
        }
        let started = Instant::now();
        let mut results = self.backend.step(Step { rows })?.into_iter().peekable();
        let verify = started.elapsed();
        self.status.steps.fetch_add(1, Ordering::Relaxed);

        let mut end = 0;
        let mut of_rows = |count: usize| -> Vec<RowResult> {
            end += count;
            std::iter::from_fn(|| results.next_if(|result| result.row < end)).collect()
        };
        let decoded: Vec<_> =
            plan.decode.iter().map(|(index, rows)| (*index, of_rows(*rows))).collect();
        let prompts: Vec<_> =
            plan.prompts.iter().map(|(index, rows)| (*index, *rows, of_rows(*rows))).collect();
        // Times of a step with prompt rows tell nothing of rounds.
        let told = plan.prompts.is_empty().then_some(verify);
        for (index, results) in decoded {
            self.take_round(index, results, &plan, told)?;
        }
        for (index, rows, results) in prompts {
            self.take_prompt(index, rows, results)?;
        }
        // Prompts take turns: the one that was served first is last next time.
        if let Some((index, _)) = plan.prompts.first() {
            let served = self.running.remove(*index);
            self.running.push(served);
        }
        self.finish_ended();
        let used = self.running.iter().map(|r| r.sequence.cached_tokens().len()).sum();
        self.status.cache_used.store(used, Ordering::Relaxed);
        Ok(())
    }

    /// Chooses the step's rows and lets the drafter guess. The row budget is a chunk and one row
    /// for each sequence: those that decode have theirs in any case, guesses and the prompt chunk
    /// share the rest.
    fn plan(&mut self) -> Result<Plan> {
        let is_prompt = |index: &usize| self.running[*index].sequence.prompt_left() > 0;
        let (prompts, decoding): (Vec<usize>, Vec<usize>) =
            (0..self.running.len()).partition(is_prompt);
        let chunk = self.limits.prefill_chunk;
        let spare = chunk + self.limits.parallel - decoding.len();
        let for_guesses = if prompts.is_empty() { spare } else { spare / 2 };
        let most = for_guesses / decoding.len().max(1);
        let guesses = self.policy(decoding.len()).map_or(0, |policy| policy.choose());

        let started = Instant::now();
        let mut decode = Vec::new();
        let mut drafted = 0;
        for index in decoding {
            let Running { sequence, drafter, speculate, .. } = &mut self.running[index];
            let wanted = if self.policies.is_empty() { 0 } else { speculate.unwrap_or(guesses) };
            let count = wanted.min(most).min(sequence.room());
            if count > 0 {
                let guesses = drafter.propose(&mut *self.backend, sequence.history(), count)?;
                sequence.guess(guesses, count);
            }
            let rows = sequence.round_rows().count();
            drafted += rows - 1;
            decode.push((index, rows));
        }
        let mut left = chunk.min(spare - drafted);
        let mut chunks = Vec::new();
        for index in prompts {
            let count = left.min(self.running[index].sequence.prompt_left());
            if count > 0 {
                chunks.push((index, count));
            }
            left -= count;
        }
        Ok(Plan { decode, prompts: chunks, guesses, draft: started.elapsed() })
    }

    /// The policy for this many sequences in a step, if there is a drafter.
    fn policy(&mut self, sequences: usize) -> Option<&mut Policy> {
        let load = LOADS.iter().rposition(|from| *from <= sequences).unwrap_or(0);
        self.policies.get_mut(load)
    }

    /// A sequence takes its round's results. `told`: the step's time, where it is only rounds'.
    fn take_round(
        &mut self,
        index: usize,
        results: Vec<RowResult>,
        plan: &Plan,
        told: Option<Duration>,
    ) -> Result<()> {
        let running = &mut self.running[index];
        let mut tokens = Vec::new();
        let round = running.sequence.accept(results, &mut collect_into(&mut tokens))?;
        let Accepted { drafted, accepted, tokens: count, cut_short } = round;
        running.send(tokens, drafted, accepted);
        self.status.generated_tokens.fetch_add(count as u64, Ordering::Relaxed);
        self.status.speculation().add_round(drafted, accepted, count);
        let follows_draft = std::mem::replace(&mut running.follows_draft, drafted > 0);
        // A policy learns from rounds as it chose them: each sequence counts the whole step's time
        // as its own, for what a guess gains and costs is then compared in equal shares.
        let as_chosen = running.speculate.is_none() && drafted == plan.guesses && !cut_short;
        if let (Some(verify), true) = (told, as_chosen) {
            let draft = plan.draft;
            if let Some(policy) = self.policy(plan.decode.len()) {
                policy.observe(RoundCost { drafted, accepted, verify, draft, follows_draft });
            }
        }
        Ok(())
    }

    /// A sequence takes the results of prompt rows.
    fn take_prompt(&mut self, index: usize, rows: usize, results: Vec<RowResult>) -> Result<()> {
        let load = self.running.len();
        let guesses_pay = self.policy(load).is_some_and(|policy| policy.is_active());
        let running = &mut self.running[index];
        running.sequence.ran_prompt(rows, results)?;
        let follows = running.speculate.map_or(guesses_pay, |count| count > 0);
        if follows && !self.policies.is_empty() {
            running.drafter.follow(&mut *self.backend, running.sequence.history())?;
        }
        let mut tokens = Vec::new();
        running.sequence.choose_first(&mut collect_into(&mut tokens))?;
        if running.sequence.prompt_left() == 0 {
            let count = running.sequence.generated() as u64;
            self.status.generated_tokens.fetch_add(count, Ordering::Relaxed);
            running.send(tokens, 0, 0);
        }
        Ok(())
    }

    fn finish_ended(&mut self) {
        let mut index = 0;
        while index < self.running.len() {
            match self.running[index].sequence.ended() {
                Some(finish) if self.running[index].sequence.prompt_left() == 0 => {
                    self.leave(index).finish(finish);
                }
                _ => index += 1,
            }
        }
    }
}

/// What takes tokens in as they are chosen.
fn collect_into(tokens: &mut Vec<Chosen>) -> impl FnMut(Chosen) -> Result<Flow> {
    |chosen| {
        tokens.push(chosen);
        Ok(Flow::Continue)
    }
}

impl Running {
    /// Hands on what a step gave; a reader who has gone calls the sequence off.
    fn send(&self, tokens: Vec<Chosen>, drafted: usize, accepted: usize) {
        if self.events.send(Event::Step { tokens, drafted, accepted }).is_err() {
            self.cancelled.store(true, Ordering::SeqCst);
        }
    }

    fn finish(self, finish: Finish) {
        // Nobody is there to tell if this fails.
        let _ = self.events.send(Event::Finished { finish, generated: self.sequence.generated() });
    }
}
