//! `talon generate`: one prompt, one answer, streamed.

use std::io::{IsTerminal, Read};
use std::time::{Duration, SystemTime};

use argh::FromArgs;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use super::model_options::{DraftOptions, GpuOptions, ModelOptions};
use super::terminal::{check_writable, dim_stderr, print, print_stderr, write_json};
use crate::engine::{Engine, Flow, Generation, OutputText, Request, Sampling, opens_reasoning};
use crate::error::{Error, Result};
use crate::text::{SplitText, TemplateOptions};

/// Answer one prompt, streamed to the terminal.
#[derive(FromArgs)]
#[argh(
    subcommand,
    name = "generate",
    example = "{command_name} \"What is a whale?\"",
    example = "{command_name} --raw \"In the beginning God\" --max-tokens 40",
    example = "{command_name} --json - --no-think \"What is 17 + 25?\"",
    note = "The answer goes to stdout, reasoning to stderr."
)]
pub struct GenerateCommand {
    /// the prompt; - reads it from stdin
    #[argh(positional)]
    prompt: Option<String>,

    /// complete the text as it stands: no chat template, special tokens in it count
    #[argh(switch)]
    raw: bool,

    /// system message before the prompt
    #[argh(option, arg_name = "text")]
    system: Option<String>,

    /// answer without reasoning first
    #[argh(switch)]
    no_think: bool,

    /// end after this many tokens (default: 512)
    #[argh(option, default = "512", arg_name = "n")]
    max_tokens: usize,

    /// sampling temperature; 0 takes the likeliest token, the same every time (default: 0)
    #[argh(option, default = "0.0", arg_name = "t")]
    temperature: f32,

    /// sample from the likeliest tokens that reach this probability together (default: the
    /// checkpoint's)
    #[argh(option, arg_name = "p")]
    top_p: Option<f32>,

    /// sample from this many of the likeliest tokens; 0 is all (default: the checkpoint's)
    #[argh(option, arg_name = "n")]
    top_k: Option<usize>,

    /// sample from tokens with at least this share of the likeliest one's probability (default: 0)
    #[argh(option, default = "0.0", arg_name = "p")]
    min_p: f32,

    /// makes tokens that occurred, in the prompt or since, less likely; 1 is off (default: 1)
    #[argh(option, default = "1.0", arg_name = "x")]
    repetition_penalty: f32,

    /// taken from the logits of tokens that were generated (default: 0)
    #[argh(option, default = "0.0", arg_name = "x")]
    presence_penalty: f32,

    /// taken from the logits of tokens that were generated, for each time (default: 0)
    #[argh(option, default = "0.0", arg_name = "x")]
    frequency_penalty: f32,

    /// key of the random stream (default: a new one each time, told in --json)
    #[argh(option, arg_name = "n")]
    seed: Option<u64>,

    /// end before this text appears; may be given several times
    #[argh(option, arg_name = "text")]
    stop: Vec<String>,

    /// go on after the model's end of turn, up to --max-tokens
    #[argh(switch)]
    ignore_eos: bool,

    /// write text, tokens, usage and timings as JSON (- is stdout, instead of the text)
    #[argh(option, arg_name = "file")]
    json: Option<String>,

    /// take the prompt as a JSON list of token ids
    #[argh(option, arg_name = "file")]
    tokens: Option<String>,

    /// write the logits of every position as safetensors
    #[argh(option, arg_name = "file")]
    logits: Option<String>,

    /// drafter: auto (an EAGLE-3 head that came with the model, else MTP, else none), mtp, none, or
    /// the directory of an EAGLE-3 head; the text does not depend on it
    /// (default: auto)
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

    /// only the first layers of a synthetic model
    #[argh(option, arg_name = "n")]
    layers: Option<usize>,

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

    /// measure rank R of N alone on one GPU, such as 0/8: its work at its true shape, no answer
    #[argh(option, arg_name = "r/n")]
    rank_slice: Option<String>,

    /// tensor-parallel ranks: 1, 2, 4 or 8 (default: one for each GPU; 1 on the CPU)
    #[argh(option, arg_name = "n")]
    tp: Option<usize>,

    /// tokens that must fit (default: the model's maximum, at most 8192)
    #[argh(option, arg_name = "n")]
    context: Option<usize>,

    /// rows of a prefill step; the result does not depend on it (default: 64)
    #[argh(option, default = "64", arg_name = "n")]
    prefill_chunk: usize,

    /// epsilon of the latent norms; 1e-6 compares with transformers (default: rms_norm_eps)
    #[argh(option, arg_name = "x")]
    latent_eps: Option<f32>,

    /// go by the shards' own headers instead of model.safetensors.index.json
    #[argh(switch)]
    ignore_index: bool,
}

impl GenerateCommand {
    pub fn run(self) -> Result<()> {
        self.check()?;
        for target in self.json.iter().chain(&self.logits) {
            check_writable(target)?;
        }
        let sampling_seed = self.seed.unwrap_or_else(fresh_seed);
        let prompt = self.prompt_text()?;
        let model = ModelOptions {
            model: &self.model,
            layers: self.layers,
            backend: &self.backend,
            gpus: GpuOptions {
                devices: self.devices.as_deref(),
                shared_gpu: &self.shared_gpu,
                reduce: &self.reduce,
                experts: &self.experts,
                requalify: self.requalify,
            },
            rank_slice: self.rank_slice.as_deref(),
            tp: self.tp,
            context: self.context,
            prefill_chunk: self.prefill_chunk,
            latent_eps: self.latent_eps,
            ignore_index: self.ignore_index,
            dense_weights: &self.dense_weights,
            draft: DraftOptions {
                draft: &self.draft,
                draft_tokens: &self.draft_tokens,
                rope_theta: self.draft_rope_theta,
            },
        };
        let mut engine = model.load()?;
        let prompt_ids = self.prompt_ids(&engine, prompt)?;
        let (answer, generation) = self.answer(&mut engine, &prompt_ids, sampling_seed)?;
        if let Some(file) = &self.logits {
            write_logits(file, &prompt_ids, &generation)?;
        }
        if let Some(target) = &self.json {
            write_json(target, &report(&answer, &prompt_ids, &generation, sampling_seed))?;
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return Err(Error::input(format!(
                "--temperature {}: expected 0 or more",
                self.temperature
            )));
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return Err(Error::input(format!("--min-p {}: expected 0 to 1", self.min_p)));
        }
        if !(self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0) {
            return Err(Error::input("--repetition-penalty: expected more than 0, such as 1.1"));
        }
        if !self.presence_penalty.is_finite() || !self.frequency_penalty.is_finite() {
            return Err(Error::input("--presence-penalty, --frequency-penalty: expected numbers"));
        }
        if self.top_p.is_some_and(|top_p| !(top_p > 0.0 && top_p <= 1.0)) {
            return Err(Error::input("--top-p: expected more than 0 and at most 1"));
        }
        if self.tokens.is_some() && self.prompt.is_some() {
            return Err(Error::input("a prompt and --tokens: give one of them"));
        }
        if (self.raw || self.tokens.is_some()) && (self.system.is_some() || self.no_think) {
            return Err(Error::input(
                "--system and --no-think shape a chat; leave them out with --raw or --tokens",
            ));
        }
        Ok(())
    }

    fn prompt_text(&self) -> Result<Option<String>> {
        match self.prompt.as_deref() {
            Some("-") => {
                let mut text = String::new();
                std::io::stdin().read_to_string(&mut text).map_err(|e| {
                    Error::input(format!("stdin: cannot read the prompt: {e}; expected UTF-8 text"))
                })?;
                Ok(Some(text))
            }
            Some(text) => Ok(Some(text.to_owned())),
            None if self.tokens.is_some() => Ok(None),
            None => {
                Err(Error::input("no prompt; for example: talon generate \"What is 17 + 25?\""))
            }
        }
    }

    fn prompt_ids(&self, engine: &Engine, prompt: Option<String>) -> Result<Vec<u32>> {
        let Some(prompt) = prompt else {
            return read_tokens(self.tokens.as_deref().unwrap_or_default());
        };
        let text = engine.text()?;
        if self.raw {
            return text.tokenizer().encode(&prompt);
        }
        let mut messages = Vec::new();
        if let Some(system) = &self.system {
            messages.push(json!({ "role": "system", "content": system }));
        }
        messages.push(json!({ "role": "user", "content": prompt }));
        let options =
            TemplateOptions { enable_thinking: !self.no_think, ..TemplateOptions::default() };
        text.chat(&Value::Array(messages), None, &options)
    }

    /// Generates and streams; returns the whole text as well.
    fn answer(
        &self,
        engine: &mut Engine,
        prompt_ids: &[u32],
        seed: u64,
    ) -> Result<(SplitText, Generation)> {
        // A prompt that is given as ids may belong to a checkpoint without a tokenizer.
        let text = match &self.tokens {
            Some(_) => engine.text_if_any(),
            None => Some(engine.text()?),
        };
        let stop_ids = match (&text, self.ignore_eos) {
            (_, true) => Vec::new(),
            (Some(text), _) => text.generation().eos_token_ids.clone(),
            (None, _) => engine.config().eos_token_id.clone(),
        };
        let defaults = text.as_ref().map(|text| text.generation());
        let default_top_p = defaults.map_or(1.0, |defaults| defaults.top_p);
        let default_top_k = defaults.and_then(|defaults| defaults.top_k).unwrap_or(0) as usize;
        let request = Request {
            prompt: prompt_ids,
            max_tokens: self.max_tokens,
            sampling: Sampling {
                temperature: self.temperature,
                top_p: self.top_p.unwrap_or(default_top_p),
                top_k: self.top_k.unwrap_or(default_top_k),
                min_p: self.min_p,
                repetition_penalty: self.repetition_penalty,
                presence_penalty: self.presence_penalty,
                frequency_penalty: self.frequency_penalty,
                seed,
            },
            stop_ids: &stop_ids,
            keep_logits: self.logits.is_some(),
            speculate: true,
        };
        let mut output = None;
        if let Some(text) = &text {
            // Only a chat is known to have a place for reasoning.
            let chat = !self.raw && self.tokens.is_none();
            let thinking = chat && opens_reasoning(text, prompt_ids);
            if thinking && self.no_think {
                log::warn!("--no-think: this model's chat template has no way to turn it off");
            }
            output = Some(OutputText::new(text, self.stop.clone(), thinking)?);
        }
        let mut sink =
            Sink { whole: SplitText::default(), quiet: self.json.as_deref() == Some("-") };
        let generation = engine.generate(&request, |token| {
            let Some(output) = &mut output else {
                return Ok(Flow::Continue);
            };
            let (split, stopped) = output.push(token);
            sink.show(split)?;
            Ok(if stopped { Flow::Stop } else { Flow::Continue })
        })?;
        if let Some(output) = output {
            sink.show(output.finish())?;
        }
        sink.end_line()?;
        Ok((sink.whole, generation))
    }
}

/// Where the streamed text goes.
struct Sink {
    whole: SplitText,
    quiet: bool,
}

impl Sink {
    fn show(&mut self, split: SplitText) -> Result<()> {
        if !self.quiet {
            if !split.reasoning.is_empty() {
                print_stderr(&dim_stderr(&split.reasoning));
            }
            if !split.answer.is_empty() {
                if self.whole.answer.is_empty() && !self.whole.reasoning.is_empty() {
                    print_stderr("\n");
                }
                print(&split.answer)?;
            }
        }
        self.whole.reasoning += &split.reasoning;
        self.whole.answer += &split.answer;
        Ok(())
    }

    /// A terminal's next prompt begins on a new line; so does a file's last line end.
    fn end_line(&self) -> Result<()> {
        if self.quiet || (self.whole.answer.is_empty() && !std::io::stdout().is_terminal()) {
            return Ok(());
        }
        print("\n")
    }
}

fn fresh_seed() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // JSON readers hold whole numbers up to 2^53.
    now.as_nanos() as u64 & ((1 << 53) - 1)
}

fn read_tokens(file: &str) -> Result<Vec<u32>> {
    let text = std::fs::read(file)
        .map_err(|e| Error::input(format!("{file}: cannot read: {e}; check --tokens")))?;
    serde_json::from_slice(&text).map_err(|e| {
        Error::input(format!("{file}: expected a JSON list of token ids, such as [1, 2, 3]: {e}"))
    })
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn report(answer: &SplitText, prompt: &[u32], generation: &Generation, seed: u64) -> Value {
    let decode = generation.decode_time();
    let stats = generation.stats();
    let per_second = match decode.is_zero() {
        true => Value::Null,
        false => json!(stats.tokens as f64 / decode.as_secs_f64()),
    };
    json!({
        "text": answer.answer,
        "reasoning": answer.reasoning,
        "tokens": generation.tokens,
        "finish_reason": generation.finish.word(),
        "seed": seed,
        "usage": {
            "prompt_tokens": prompt.len(),
            "completion_tokens": generation.tokens.len(),
            "total_tokens": prompt.len() + generation.tokens.len(),
        },
        "timings": {
            "ttft_ms": milliseconds(generation.time_to_first_token),
            "decode_ms": milliseconds(decode),
            "steps": stats.rounds,
            "draft_n": stats.drafted.iter().sum::<usize>(),
            "draft_n_accepted": stats.accepted.iter().sum::<usize>(),
            "acceptance_length": stats.acceptance_length(),
            "output_throughput": per_second,
        },
    })
}

/// `logits` `[positions, vocab_size]` F32 and the `ids` that were run, `[positions]` I64.
fn write_logits(file: &str, prompt: &[u32], generation: &Generation) -> Result<()> {
    let positions = generation.logits.len();
    let vocabulary = generation.logits.first().map_or(0, Vec::len);
    let logits: Vec<u8> =
        generation.logits.iter().flatten().flat_map(|logit| logit.to_le_bytes()).collect();
    let run = prompt.iter().chain(&generation.tokens).take(positions);
    let ids: Vec<u8> = run.flat_map(|id| i64::from(*id).to_le_bytes()).collect();
    let failed = |e: safetensors::SafeTensorError| {
        Error::runtime(format!("{file}: cannot write: {e}; check the path of --logits"))
    };
    let views = [
        ("ids", TensorView::new(Dtype::I64, vec![positions], &ids).map_err(failed)?),
        (
            "logits",
            TensorView::new(Dtype::F32, vec![positions, vocabulary], &logits).map_err(failed)?,
        ),
    ];
    let bytes = safetensors::serialize(views, None).map_err(failed)?;
    std::fs::write(file, bytes).map_err(|e| {
        Error::runtime(format!("{file}: cannot write: {e}; check the path of --logits"))
    })
}
