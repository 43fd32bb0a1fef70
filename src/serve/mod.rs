//! The HTTP endpoint: OpenAI's API on tiny_http, in front of the engine's scheduler.
//!
//! One thread takes requests in, and each is answered on a thread of its own (`routes`), so a slow
//! reader stalls nobody else. A chat's body becomes a checked request (`request`, `messages`), the
//! scheduler's events become an answer (`answer`), and that is sent as a whole or in pieces
//! (`generation`, `format`, `http`).

mod answer;
mod connections;
mod errors;
mod fields;
mod format;
mod generation;
mod http;
mod messages;
mod metrics;
mod request;
mod routes;

use std::net::{SocketAddr, TcpListener};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::TimeVal;

pub use answer::{Answer, Delta};
pub use errors::ApiError;
pub use request::{Generate, chat, completion};

use crate::engine::{Door, Limits, Scheduler, TextModel};
use crate::error::{Error, Result};

/// Requests that are answered at a time; more are refused.
const MAX_EXCHANGES: usize = 1024;
/// Seconds after which a client that does not read what it is sent counts as gone.
const WRITE_TIMEOUT_SECONDS: i64 = 30;

/// How the endpoint behaves.
#[derive(Debug, Clone)]
pub struct Options {
    /// Address to listen on.
    pub host: String,
    /// Port; 0 takes a free one.
    pub port: u16,
    /// What clients must send as their key.
    pub api_key: Option<String>,
    /// Origin whose pages may call; `*` is any.
    pub cors: Option<String>,
    /// Time after which a silent stream gets a comment.
    pub keep_alive: Duration,
}

impl Default for Options {
    /// Loopback, a free port, no key.
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 0,
            api_key: None,
            cors: None,
            keep_alive: Duration::from_secs(5),
        }
    }
}

/// A model that answers.
pub struct Model {
    /// Its name for clients.
    pub name: String,
    /// Its tokenizer, template and defaults.
    pub text: Arc<TextModel>,
    /// Where tasks are handed in.
    pub door: Door,
    /// What the engine was sized for.
    pub limits: Limits,
}

/// What the endpoint can do at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    /// The model is not there yet.
    Loading,
    /// It answers.
    Ready,
    /// It finishes what it has, and takes nothing new.
    Draining,
    /// The engine has ended, for this reason.
    Failed(String),
}

struct State {
    phase: Phase,
    model: Option<Arc<Model>>,
    /// Requests that are being answered.
    exchanges: usize,
    /// Those of them that generate.
    generating: usize,
}

/// What all threads share.
struct Shared {
    options: Options,
    started: u64,
    state: Mutex<State>,
    changed: Condvar,
    metrics: metrics::Metrics,
    watcher: connections::Watcher,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change of the state is a single assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The running endpoint.
pub struct Server {
    shared: Arc<Shared>,
    http: Arc<tiny_http::Server>,
    address: SocketAddr,
    failed: Receiver<Error>,
}

impl Server {
    /// Listens and answers; until a model is given, that it is loading.
    ///
    /// # Errors
    /// Input error if the address cannot be used.
    pub fn bind(options: Options) -> Result<Self> {
        let name = format!("{}:{}", options.host, options.port);
        let unusable = |error: &dyn std::fmt::Display| {
            Error::input(format!(
                "cannot listen on {name}: {error}; choose another --host or --port"
            ))
        };
        let listener = TcpListener::bind((options.host.as_str(), options.port))
            .map_err(|error| unusable(&error))?;
        // Connections inherit both: a client that does not read cannot hold a thread for ever, and
        // events go out at once.
        let timeout = TimeVal::new(WRITE_TIMEOUT_SECONDS, 0);
        setsockopt(&listener, sockopt::SendTimeout, &timeout).map_err(|e| unusable(&e))?;
        setsockopt(&listener, sockopt::TcpNoDelay, &true).map_err(|e| unusable(&e))?;
        let address = listener.local_addr().map_err(|error| unusable(&error))?;
        let http = tiny_http::Server::from_listener(listener, None).map_err(|e| unusable(&e))?;
        let http = Arc::new(http);
        let shared = Arc::new(Shared {
            options,
            started: format::unix_seconds(),
            state: Mutex::new(State {
                phase: Phase::Loading,
                model: None,
                exchanges: 0,
                generating: 0,
            }),
            changed: Condvar::new(),
            metrics: metrics::Metrics::default(),
            watcher: connections::Watcher::new(address),
        });
        let (sender, failed) = channel();
        let accepting = (http.clone(), shared.clone());
        std::thread::Builder::new()
            .name("accept".into())
            .spawn(move || accept(&accepting.0, &accepting.1, &sender))
            .map_err(|e| Error::runtime(format!("cannot start a thread: {e}")))?;
        Ok(Self { shared, http, address, failed })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on `model` answers.
    pub fn ready(&self, model: Model) {
        let mut state = self.shared.state();
        state.model = Some(Arc::new(model));
        state.phase = Phase::Ready;
    }

    /// Runs the model's scheduler on a thread of its own. When it fails or panics, what is open ends
    /// with an error, nothing new is taken, and /health says so; then `on_end` is told.
    ///
    /// # Errors
    /// Runtime error if there can be no thread.
    pub fn run(
        &self,
        scheduler: Scheduler,
        on_end: impl FnOnce(Result<()>) + Send + 'static,
    ) -> Result<()> {
        let shared = self.shared.clone();
        let run = move || {
            // Nothing of the scheduler is looked at after a panic.
            let ended = catch_unwind(AssertUnwindSafe(|| scheduler.run())).unwrap_or_else(|_| {
                Err(Error::runtime("the engine panicked; its message is above"))
            });
            if let Err(error) = &ended {
                shared.state().phase = Phase::Failed(error.to_string());
            }
            on_end(ended);
        };
        let spawned = std::thread::Builder::new().name("engine".into()).spawn(run);
        spawned.map(drop).map_err(|e| Error::runtime(format!("cannot start a thread: {e}")))
    }

    /// From now on nothing new is taken; what is there is finished.
    pub fn drain(&self) {
        let mut state = self.shared.state();
        if state.phase != Phase::Loading {
            state.phase = Phase::Draining;
        }
    }

    /// Waits until no request is being answered; false if some still are after `patience`.
    pub fn wait_idle(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.shared.state();
        while state.generating > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Why no more connections come in, if so.
    pub fn accept_error(&self) -> Option<Error> {
        self.failed.try_recv().ok()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.phase = Phase::Draining;
        // The scheduler ends when the last of those who answer is done.
        state.model = None;
        drop(state);
        self.http.unblock();
    }
}

/// Takes requests in, and answers each on a thread of its own.
fn accept(http: &tiny_http::Server, shared: &Arc<Shared>, failed: &Sender<Error>) {
    loop {
        let request = match http.recv() {
            Ok(request) => request,
            Err(error) => {
                // Also how `unblock` ends this thread; then nobody reads it.
                let message = format!("no more connections are accepted: {error}");
                let _ = failed.send(Error::runtime(message));
                return;
            }
        };
        let permit = Permit::new(shared);
        let shared = shared.clone();
        let spawned = std::thread::Builder::new().name("request".into()).spawn(move || {
            // A request dropped here is answered with 500 by tiny_http.
            routes::answer(&shared, request, permit.is_some());
            drop(permit);
        });
        if let Err(error) = spawned {
            log::error!("a request could not be answered: {error}");
        }
    }
}

/// A place among those that are answered at a time.
struct Permit(Arc<Shared>);

impl Permit {
    fn new(shared: &Arc<Shared>) -> Option<Self> {
        let mut state = shared.state();
        if state.exchanges >= MAX_EXCHANGES {
            return None;
        }
        state.exchanges += 1;
        drop(state);
        Some(Self(shared.clone()))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.state().exchanges -= 1;
    }
}

/// Counts a request among those that generate, which draining waits for.
struct Generating<'a>(&'a Shared);

impl<'a> Generating<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.state().generating += 1;
        Self(shared)
    }
}

impl Drop for Generating<'_> {
    fn drop(&mut self) {
        self.0.state().generating -= 1;
        self.0.changed.notify_all();
    }
}
