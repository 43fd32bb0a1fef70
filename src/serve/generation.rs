//! Answering a chat or a completion: from the engine's events to a stream or to one JSON object.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::answer::{Answer, Delta};
use super::errors::ApiError;
use super::format::{Choice, Format, Totals};
use super::http::{Answered, EventStream, Exchange};
use super::metrics::Metrics;
use super::request::Generate;
use super::{Model, Shared};
use crate::engine::{Chosen, Event, Finish, Refusal, Ticket};

/// Answers a checked request.
///
/// # Errors
/// What is to be answered instead.
pub fn generate(shared: &Shared, model: &Model, exchange: Exchange, request: Generate) -> Answered {
    if request.stream && !exchange.can_stream() {
        let fault = ApiError::invalid("stream", "a stream needs HTTP/1.1");
        return exchange.refuse(fault);
    }
    let answer = match Answer::new(&model.text, &request) {
        Ok(answer) => answer,
        Err(error) => return exchange.refuse(error),
    };
    let format = Format::new(&model.text, &model.name, &request);
    let totals = Totals::new(Instant::now(), request.task.prompt.len());
    let ticket = match model.door.submit(request.task.clone(), request.speculate) {
        Ok(ticket) => ticket,
        Err(refusal) => return exchange.refuse(refused(refusal)),
    };
    let _watch = exchange.client().map(|client| shared.watcher.watch(client, ticket.cancel_flag()));
    let run =
        Run { ticket, answer: Some(answer), totals, metrics: &shared.metrics, counted: false };
    match request.stream {
        true => stream(run, &request, format, exchange, shared.options.keep_alive),
        false => whole(run, format, exchange),
    }
}

fn refused(refusal: Refusal) -> ApiError {
    match refusal {
        Refusal::Full => ApiError {
            retry_after: Some(1),
            ..ApiError::new(429, "rate_limit_error", "the queue is full; try again in a moment")
        },
        Refusal::Ended => ApiError::engine_ended(),
    }
}

/// What a run of the engine gives next.
enum Piece {
    /// Nothing for a while.
    Quiet,
    /// Something to show, perhaps of no text.
    More(Delta, Vec<Chosen>),
    /// The last text, and the word for the end.
    End(Delta, Vec<Chosen>, &'static str),
}

/// Why there is no more to come.
enum Broken {
    Gone,
    EngineEnded,
}

/// A request on its way through the engine.
struct Run<'a> {
    ticket: Ticket,
    /// Until its end.
    answer: Option<Answer<'a>>,
    totals: Totals,
    metrics: &'a Metrics,
    /// Its end was counted.
    counted: bool,
}

impl Run<'_> {
    /// Waits for the next piece, at most `patience`.
    fn next(&mut self, patience: Duration) -> Result<Piece, Broken> {
        loop {
            let event = match self.ticket.events().recv_timeout(patience) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => return Ok(Piece::Quiet),
                Err(RecvTimeoutError::Disconnected) => {
                    let gone = self.ticket.cancel_flag().load(Ordering::SeqCst);
                    return Err(if gone { Broken::Gone } else { Broken::EngineEnded });
                }
            };
            match event {
                Event::Started { cached } => {
                    self.totals.started(cached);
                    self.metrics.queue.add(self.totals.queued());
                }
                Event::Step { tokens, drafted, accepted } => {
                    match self.totals.step(drafted, accepted) {
                        None => self.metrics.first_token.add(self.totals.to_first_token()),
                        Some(since) => self.metrics.between_tokens.add(since),
                    }
                    return Ok(self.step(tokens));
                }
                Event::Finished { finish, generated } => {
                    self.totals.generated = generated;
                    return Ok(self.end(Delta::default(), Vec::new(), finish));
                }
            }
        }
    }

    /// Takes a step's tokens in, up to where the answer ends by its text.
    fn step(&mut self, mut tokens: Vec<Chosen>) -> Piece {
        let mut delta = Delta::default();
        let mut ended_at = None;
        if let Some(answer) = &mut self.answer {
            for (index, chosen) in tokens.iter().enumerate() {
                self.totals.generated += 1;
                let (more, ended) = answer.push(chosen.token);
                delta.append(more);
                if ended {
                    ended_at = Some(index);
                    break;
                }
            }
            self.totals.reasoning = answer.reasoning_tokens();
        }
        match ended_at {
            None => Piece::More(delta, tokens),
            Some(last) => {
                // The engine need not go on; it is called off when the ticket goes.
                tokens.truncate(last + 1);
                self.end(delta, tokens, Finish::Stop)
            }
        }
    }

    fn end(&mut self, mut delta: Delta, tokens: Vec<Chosen>, finish: Finish) -> Piece {
        let mut calls = false;
        if let Some(answer) = self.answer.take() {
            let (last, any) = answer.finish(finish == Finish::Stop);
            delta.append(last);
            calls = any;
        }
        self.count_end(finish.word());
        self.metrics.whole.add(self.totals.whole());
        let word = if calls && finish == Finish::Stop { "tool_calls" } else { finish.word() };
        Piece::End(delta, tokens, word)
    }

    fn broken(&mut self, broken: &Broken) {
        self.count_end(match broken {
            Broken::Gone => "abort",
            Broken::EngineEnded => "error",
        });
    }

    /// Counts the end that came first: writing its last words may fail as well.
    fn count_end(&mut self, reason: &'static str) {
        if !std::mem::replace(&mut self.counted, true) {
            self.metrics.count_end(reason);
        }
    }
}

/// Answers with one object at the end. A client that goes away is noticed by the watcher.
fn whole(mut run: Run, format: Format, exchange: Exchange) -> Answered {
    let mut choice = Choice::default();
    loop {
        match run.next(Duration::from_secs(3600)) {
            Ok(Piece::Quiet) => {}
            Ok(Piece::More(delta, tokens)) => choice.add(delta, tokens),
            Ok(Piece::End(delta, tokens, finish)) => {
                choice.add(delta, tokens);
                let body = format.whole(choice, finish, &run.totals);
                exchange.json(200, &body);
                return Ok(());
            }
            Err(broken) => {
                run.broken(&broken);
                return match broken {
                    // Nobody is there to be told.
                    Broken::Gone => Ok(()),
                    Broken::EngineEnded => exchange.refuse(ApiError::engine_ended()),
                };
            }
        }
    }
}

/// Answers with events as they come.
fn stream(
    mut run: Run,
    request: &Generate,
    format: Format,
    exchange: Exchange,
    keep_alive: Duration,
) -> Answered {
    let sent = exchange
        .stream()
        .and_then(|events| send_events(&mut run, request, format, events, keep_alive));
    if let Err(error) = sent {
        log::debug!("a client went away: {error}");
        run.broken(&Broken::Gone);
    }
    Ok(())
}

fn send_events(
    run: &mut Run,
    request: &Generate,
    mut format: Format,
    mut events: EventStream,
    keep_alive: Duration,
) -> io::Result<()> {
    let send = |events: &mut EventStream, value: Value| events.event(&value.to_string());
    loop {
        match run.next(keep_alive) {
            Ok(Piece::Quiet) => events.comment("keep-alive")?,
            Ok(Piece::More(delta, tokens)) => {
                if let Some(chunk) = format.chunk(delta, tokens, &run.totals) {
                    send(&mut events, chunk)?;
                }
            }
            Ok(Piece::End(delta, tokens, finish)) => {
                if let Some(chunk) = format.chunk(delta, tokens, &run.totals) {
                    send(&mut events, chunk)?;
                }
                send(&mut events, format.last_chunk(finish, &run.totals))?;
                if request.include_usage {
                    send(&mut events, format.usage_chunk(&run.totals))?;
                }
                events.event("[DONE]")?;
                return events.finish();
            }
            Err(broken) => {
                run.broken(&broken);
                if matches!(broken, Broken::EngineEnded) {
                    send(&mut events, ApiError::engine_ended().json())?;
                }
                return events.finish();
            }
        }
    }
}
