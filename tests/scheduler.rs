//! Promise: under load every sequence comes out as if it were alone, whatever else shares its steps;
//! what is called off frees its place; what was run once is not run again.

#[path = "common/engines.rs"]
mod engines;

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engines::{Golden, Random, goldens, load, long_golden, soak};
use talon::engine::{
    Chosen, Door, DraftChoice, Event, Finish, LoadOptions, Refusal, Sampling, Task, Ticket,
};
use talon::weights::demo;

struct Running {
    door: Door,
    thread: JoinHandle<()>,
}

impl Running {
    fn start(options: &LoadOptions, queue: usize) -> Self {
        let (scheduler, door) = load(demo(), options).into_scheduler(queue);
        let thread = std::thread::spawn(move || scheduler.run().expect("the backend runs"));
        Self { door, thread }
    }

    fn submit(&self, task: Task) -> Ticket {
        self.door.submit(task, None).expect("the queue has room")
    }

    /// Ends once all tickets are gone.
    fn stop(self) {
        drop(self.door);
        self.thread.join().expect("the scheduler ends by itself");
    }
}

fn options(draft: DraftChoice, draft_tokens: Option<usize>, parallel: usize) -> LoadOptions {
    LoadOptions { draft, draft_tokens, parallel, prefill_chunk: 24, ..LoadOptions::default() }
}

/// A sequence from its end.
struct Done {
    cached: usize,
    tokens: Vec<Chosen>,
    drafted: usize,
    accepted: usize,
    finish: Finish,
    generated: usize,
}

fn wait(ticket: &Ticket) -> Done {
    let (mut cached, mut tokens, mut guesses) = (0, Vec::new(), (0, 0));
    loop {
        match ticket.events().recv().expect("the scheduler lives") {
            Event::Started { cached: count } => cached = count,
            Event::Step { tokens: more, drafted, accepted } => {
                tokens.extend(more);
                guesses = (guesses.0 + drafted, guesses.1 + accepted);
            }
            Event::Finished { finish, generated } => {
                let (drafted, accepted) = guesses;
                return Done { cached, tokens, drafted, accepted, finish, generated };
            }
        }
    }
}

fn ids(tokens: &[Chosen]) -> Vec<u32> {
    tokens.iter().map(|chosen| chosen.token).collect()
}

fn task(golden: &Golden) -> Task {
    Task::greedy(golden.prompt.clone(), golden.greedy.len())
}

fn all_goldens() -> Vec<Golden> {
    let mut all = goldens();
    all.insert(4, long_golden());
    all
}

fn many_at_once(draft: DraftChoice, draft_tokens: Option<usize>) {
    let running = Running::start(&options(draft, draft_tokens, 5), 100);
    let goldens: Vec<Golden> =
        all_goldens().into_iter().step_by(if soak() > 1 { 1 } else { 2 }).collect();
    let mut random = Random(7);
    for _ in 0..soak() {
        let mut tickets = Vec::new();
        for golden in &goldens {
            tickets.push((golden, running.submit(task(golden))));
            if random.below(2) == 0 {
                continue;
            }
            // One that is called off at some point, in the queue, in its prompt or later.
            let doomed = running.submit(task(&goldens[random.below(goldens.len())]));
            let after = Duration::from_millis(random.below(300) as u64);
            std::thread::spawn(move || {
                std::thread::sleep(after);
                drop(doomed);
            });
        }
        for (golden, ticket) in tickets {
            let done = wait(&ticket);
            assert_eq!(ids(&done.tokens), golden.greedy, "{}", golden.id);
            assert_eq!((done.finish, done.generated), (Finish::Length, golden.greedy.len()));
        }
    }
    running.stop();
}

#[test]
fn plain_sequences_equal_their_solo_run() {
    many_at_once(DraftChoice::None, None);
}

#[test]
fn sequences_with_chains_of_eagle3_equal_their_solo_run() {
    many_at_once(DraftChoice::Auto, Some(3));
}

#[test]
fn sequences_with_adaptive_chains_of_mtp_equal_their_solo_run() {
    many_at_once(DraftChoice::Mtp, None);
}

#[test]
fn sampled_sequences_equal_their_solo_run() {
    let running = Running::start(&options(DraftChoice::Mtp, Some(2), 8), 100);
    let goldens = goldens();
    let hot = |seed: usize| Task {
        sampling: Sampling { temperature: 1.0, seed: seed as u64, ..Sampling::GREEDY },
        logprobs: Some(2),
        ..task(&goldens[seed])
    };
    let alone: Vec<_> = (0..8).map(|seed| wait(&running.submit(hot(seed))).tokens).collect();
    let tickets: Vec<_> = (0..8).map(|seed| running.submit(hot(seed))).collect();
    for (ticket, alone) in tickets.iter().zip(&alone) {
        // Log-probabilities as well, bit for bit.
        assert_eq!(&wait(ticket).tokens, alone);
    }
    running.stop();
}

/// A second turn sends the first one's prompt and answer again.
fn second_turn(draft: DraftChoice, draft_tokens: Option<usize>) {
    let running = Running::start(&options(draft, draft_tokens, 3), 10);
    let first = long_golden().prompt[..200].to_vec();
    let Done { cached, tokens, .. } = wait(&running.submit(Task::greedy(first.clone(), 16)));
    assert_eq!(cached, 0);
    let mut history = first.clone();
    history.extend(ids(&tokens));
    // The last token was chosen and never run.
    let common = history.len() - 1;
    let mut prompt = history;
    prompt.extend(&goldens()[9].prompt);
    let again = wait(&running.submit(Task::greedy(prompt.clone(), 32)));
    assert!(again.cached * 100 >= common * 99, "{} of {common}", again.cached);
    let fresh = Running::start(&options(DraftChoice::None, None, 1), 10);
    assert_eq!(ids(&again.tokens), ids(&wait(&fresh.submit(Task::greedy(prompt, 32))).tokens));
    if draft_tokens.is_some() {
        assert!(again.accepted > 0, "the drafter lost its way");
    }
    // A prompt that is all in the cache still gives its first token.
    let same = wait(&running.submit(Task::greedy(first.clone(), 16)));
    assert!(same.cached * 100 >= first.len() * 99, "{}", same.cached);
    assert_eq!(ids(&same.tokens), ids(&tokens));
    fresh.stop();
    running.stop();
}

#[test]
fn a_second_turn_runs_only_what_is_new() {
    second_turn(DraftChoice::None, None);
}

#[test]
fn a_second_turn_keeps_the_drafters_caches_in_step() {
    second_turn(DraftChoice::Auto, Some(3));
    second_turn(DraftChoice::Mtp, Some(3));
}

#[test]
fn a_request_may_turn_speculation_off_or_on() {
    let running = Running::start(&options(DraftChoice::Mtp, Some(0), 2), 10);
    let golden = &goldens()[9];
    for (speculate, guesses) in [(None, false), (Some(0), false), (Some(4), true)] {
        let ticket = running.door.submit(task(golden), speculate).expect("room");
        let done = wait(&ticket);
        assert_eq!(ids(&done.tokens), golden.greedy);
        assert_eq!(done.drafted > 0, guesses);
    }
    running.stop();
}

#[test]
fn the_queue_has_an_end_and_cancelled_tasks_leave_it() {
    let running = Running::start(&options(DraftChoice::None, None, 1), 2);
    let long = Task::greedy(long_golden().prompt, 3000);
    let busy = running.submit(long.clone());
    assert!(matches!(busy.events().recv(), Ok(Event::Started { .. })));
    let waiting = running.submit(long.clone());
    let second = running.submit(long.clone());
    assert_eq!(running.door.submit(long.clone(), None).err(), Some(Refusal::Full));
    drop(second);
    let started = Instant::now();
    while running.door.status().waiting.load(std::sync::atomic::Ordering::SeqCst) == 2 {
        assert!(started.elapsed() < Duration::from_secs(20), "a cancelled task stays in the queue");
        std::thread::sleep(Duration::from_millis(1));
    }
    // The one that runs is called off within a step, so the next one begins.
    drop(busy);
    let golden = &goldens()[0];
    let ticket = running.submit(task(golden));
    drop(waiting);
    assert_eq!(ids(&wait(&ticket).tokens), golden.greedy);
    running.stop();
}

/// While a long prompt is run, those who decode get a token with every chunk of it.
#[test]
fn a_long_prompt_does_not_stall_decoding() {
    let running = Running::start(&options(DraftChoice::None, None, 2), 10);
    let golden = &goldens()[0];
    let decoding = running.submit(Task::greedy(golden.prompt.clone(), 2000));
    let wait_token = || while !matches!(decoding.events().recv(), Ok(Event::Step { .. })) {};
    wait_token();
    let long = running.submit(Task::greedy(long_golden().prompt.repeat(2), 1));
    assert!(matches!(long.events().recv(), Ok(Event::Started { .. })));
    let mut tokens = 0;
    while long.events().try_recv().is_err() {
        wait_token();
        tokens += 1;
    }
    let chunks = 603 * 2 / 24;
    assert!(tokens > chunks * 9 / 10, "{tokens} tokens in {chunks} chunks");
    drop((decoding, long));
    running.stop();
}
