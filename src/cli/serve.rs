//! `talon serve`: the HTTP endpoint, from its options to its end.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use argh::FromArgs;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::interrupt;
use super::model_options::{DraftOptions, GpuOptions, ModelOptions};
use super::terminal::print_stderr;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::serve::{Model, Options, Server};

/// Serve the model over HTTP to OpenAI's clients, with a chat page at /.
#[derive(FromArgs)]
#[argh(
    subcommand,
    name = "serve",
    example = "{command_name}",
    example = "{command_name} --model ./GLM-5.2-NVFP4 --tp 8 --context 65536 --parallel 8",
    note = "POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize; GET /v1/models, \
            /health, /metrics, / (a chat page). Ctrl-C or SIGTERM finishes what is running and \
            ends; a second one ends at once. It speaks plain HTTP: for the open net put a proxy \
            with TLS in front."
)]
pub struct ServeCommand {
    /// address to listen on; 0.0.0.0 is all of this box (default: 127.0.0.1)
    #[argh(option, default = "\"127.0.0.1\".into()", arg_name = "address")]
    host: String,

    /// port to listen on; 0 takes a free one (default: 8000)
    #[argh(option, default = "8000", arg_name = "n")]
    port: u16,

    /// what clients must send as their key (default: $TALON_API_KEY, else none is needed)
    #[argh(option, arg_name = "key")]
    api_key: Option<String>,

    /// origin whose web pages may call, such as http://localhost:3000; * is any (default: none)
    #[argh(option, arg_name = "origin")]
    cors: Option<String>,

    /// sequences that run at a time, each with a cache of --context tokens (default: 4)
    #[argh(option, default = "4", arg_name = "n")]
    parallel: usize,

    /// requests that may wait for one of them; more are refused with 429 (default: 128)
    #[argh(option, default = "128", arg_name = "n")]
    queue: usize,

    /// the model's name for clients (default: the last part of --model)
    #[argh(option, arg_name = "name")]
    name: Option<String>,

    /// drafter: auto (an EAGLE-3 head that came with the model, else MTP, else none), mtp, none, or
    /// the directory of an EAGLE-3 head; the text does not depend on it (default: auto)
    #[argh(option, default = "\"auto\".into()", arg_name = "name")]
    draft: String,

    /// guesses in a round, 0 to 7, or auto: as many as pay (default: auto)
    #[argh(option, default = "\"auto\".into()", arg_name = "k")]
    draft_tokens: String,

    /// base of an EAGLE-3 head's rotary embedding, where its config.json is wrong
    #[argh(option, arg_name = "x")]
    draft_rope_theta: Option<f32>,

    /// checkpoint directory; demo, the model in this binary; or synthetic:glm-5.2, true shapes with
    /// random weights (default: demo)
    #[argh(option, default = "\"demo\".into()", arg_name = "dir")]
    model: String,

    /// auto, cpu or cuda (default: auto, the GPU if it can run what is asked for, else the CPU)
    #[argh(option, default = "\"auto\".into()", arg_name = "name")]
    backend: String,

    /// GPUs by number, in rank order, such as 0,1,4,5; 0,0 is two ranks on one GPU (default: all)
    #[argh(option, arg_name = "list")]
    devices: Option<String>,

    /// ranks on one GPU: lock-step or concurrent (default: lock-step, in turn)
    #[argh(option, default = "\"lock-step\".into()", arg_name = "mode")]
    shared_gpu: String,

    /// how GPUs exchange sums: auto, push, pull, owner or staged (default: auto, the fastest that is
    /// right on this box)
    #[argh(option, default = "\"auto\".into()", arg_name = "name")]
    reduce: String,

    /// how ranks share the routed experts: split, some rows of each, or parallel, whole ones (default:
    /// split)
    #[argh(option, default = "\"split\".into()", arg_name = "how")]
    experts: String,

    /// attention, shared experts, dense MLPs and lm_head: stored, as in the checkpoint, or fp8, rounded
    /// to 8 bits with a scale for each row: half of their bytes (default: stored)
    #[argh(option, default = "\"stored\".into()", arg_name = "name")]
    dense_weights: String,

    /// test and time the links between GPUs again, though an earlier start has
    #[argh(switch)]
    requalify: bool,

    /// tensor-parallel ranks: 1, 2, 4 or 8 (default: one for each GPU; 1 on the CPU)
    #[argh(option, arg_name = "n")]
    tp: Option<usize>,

    /// tokens of a prompt with its answer (default: the model's maximum, at most 8192)
    #[argh(option, arg_name = "n")]
    context: Option<usize>,

    /// prompt rows of a step, beside those of the sequences that decode (default: 64)
    #[argh(option, default = "64", arg_name = "n")]
    prefill_chunk: usize,

    /// go by the shards' own headers instead of model.safetensors.index.json
    #[argh(switch)]
    ignore_index: bool,
}

/// What ends the waiting.
enum Event {
    Interrupted,
    EngineEnded(Result<()>),
}

/// How long a failed server stays, to tell those who ask.
const LAST_WORDS: Duration = Duration::from_secs(2);

impl ServeCommand {
    pub fn run(self) -> Result<()> {
        for (option, value) in [("--parallel", self.parallel), ("--queue", self.queue)] {
            if value == 0 {
                return Err(Error::input(format!("{option} 0: expected at least 1")));
            }
        }
        let environment = || std::env::var("TALON_API_KEY").ok().filter(|key| !key.is_empty());
        let api_key = self.api_key.clone().or_else(environment);
        if api_key.as_deref() == Some("") {
            return Err(Error::input("--api-key: it is empty; leave the option out for no key"));
        }
        let is_origin = |text: &str| {
            text == "*"
                || text.split_once("://").is_some_and(|(scheme, host)| {
                    ["http", "https"].contains(&scheme) && !host.is_empty() && !host.contains('/')
                })
        };
        if let Some(origin) = self.cors.as_deref().filter(|text| !is_origin(text)) {
            return Err(Error::input(format!(
                "--cors {origin}: expected an origin such as http://localhost:3000, or *"
            )));
        }
        raise_file_limit();
        end_when_accepting_ends();
        let server = Server::bind(Options {
            host: self.host.clone(),
            port: self.port,
            api_key,
            cors: self.cors.clone(),
            ..Options::default()
        })?;
        let address = server.address();
        log::info!("http://{address}: loading {}", self.model);
        let engine = self.load()?;
        let (text, limits) = (engine.text()?, engine.limits());
        text.check_template()?;
        let drafter = engine.drafter().unwrap_or("no drafter").to_owned();
        let backend = engine.backend_name();
        let (scheduler, door) = engine.into_scheduler(self.queue);
        let name = self.served_name();
        let (sender, events) = channel();
        server.ready(Model { name: name.clone(), text, door, limits });
        interrupt::listen(sender.clone(), || Event::Interrupted);
        server.run(scheduler, move |ended| {
            // The other end is there as long as the process is.
            let _ = sender.send(Event::EngineEnded(ended));
        })?;
        print_stderr(&format!(
            "talon: {name} at http://{address} ({backend}, {drafter}, {} sequences of {} tokens); \
             Ctrl-C ends\n",
            limits.parallel, limits.context
        ));

        let mut draining = false;
        loop {
            match events.recv_timeout(Duration::from_millis(if draining { 20 } else { 500 })) {
                Ok(Event::Interrupted) if draining => std::process::exit(130),
                Ok(Event::Interrupted) => {
                    server.drain();
                    draining = true;
                    print_stderr("talon: finishing what is running; Ctrl-C again ends at once\n");
                }
                Ok(Event::EngineEnded(Err(error))) => {
                    // Streams get their last event, and /health its 503.
                    std::thread::sleep(LAST_WORDS);
                    return Err(error);
                }
                Ok(Event::EngineEnded(Ok(()))) | Err(RecvTimeoutError::Disconnected) => {
                    return Ok(());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if draining && server.wait_idle(Duration::ZERO) {
                return Ok(());
            }
            if let Some(error) = server.accept_error() {
                return Err(error);
            }
        }
    }

    fn load(&self) -> Result<Engine> {
        let model = ModelOptions {
            model: &self.model,
            layers: None,
            backend: &self.backend,
            gpus: GpuOptions {
                devices: self.devices.as_deref(),
                shared_gpu: &self.shared_gpu,
                reduce: &self.reduce,
                experts: &self.experts,
                requalify: self.requalify,
            },
            rank_slice: None,
            tp: self.tp,
            context: self.context,
            prefill_chunk: self.prefill_chunk,
            latent_eps: None,
            ignore_index: self.ignore_index,
            dense_weights: &self.dense_weights,
            draft: DraftOptions {
                draft: &self.draft,
                draft_tokens: &self.draft_tokens,
                rope_theta: self.draft_rope_theta,
            },
        };
        model.load_for(self.parallel)
    }

    fn served_name(&self) -> String {
        let last = || self.model.trim_end_matches('/').rsplit('/').next();
        self.name.clone().unwrap_or_else(|| last().unwrap_or(&self.model).to_owned())
    }
}

/// Each connection takes two descriptors, and tiny_http ends when there are none left.
fn raise_file_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        log::warn!("the limit of open files stays as it is: {error}");
    }
}

/// tiny_http's accepting thread panics when it cannot copy a socket or start a thread, and then the
/// server would hang for ever: better to end, so that whoever started it can start it again.
fn end_when_accepting_ends() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        let file = panic.location().map_or("", |place| place.file());
        let accepts = ["refined_tcp_stream.rs", "task_pool.rs"].iter().any(|f| file.ends_with(f));
        let message = panic.payload().downcast_ref::<String>().map_or("", String::as_str);
        if (file.contains("tiny_http") && accepts) || message.contains("failed to spawn thread") {
            std::process::exit(1);
        }
    }));
}
