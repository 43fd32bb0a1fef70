//! `talon bench`: what this box reaches with this model, and what speculation is worth on it.

use std::process::ExitCode;

use argh::FromArgs;
use serde_json::Value;

use super::model_options::{DraftOptions, GpuOptions, ModelOptions, parse_rank_slice};
use super::progress::Progress;
use super::terminal::{check_writable, print, write_json, write_text};
use crate::bench::{self, Cards, Plan, Prompt, RunContext, Settings};
use crate::doctor;
use crate::error::{Error, Result};

/// Measure decoding with and without speculation, per class of text.
#[derive(FromArgs)]
#[argh(
    subcommand,
    name = "bench",
    example = "{command_name}",
    example = "{command_name} --model ./GLM-5.2-NVFP4 --tp 8 --json report.json",
    example = "{command_name} --draft mtp --draft-tokens 3 --sweep --html report.html",
    example = "{command_name} --model synthetic:glm-5.2 --layers 4 --simulate-acceptance 2.6",
    example = "{command_name} --diff before.json after.json",
    note = "Every prompt runs once plainly and once with speculation, one after the other; warm-up runs\nare not counted. tok/s is the tokens after the first over the time after the first.",
    error_code(3, "speculation changed the text, which it must not")
)]
pub struct BenchCommand {
    /// runs in each class (default: as many as there are prompts, 8 built-in ones)
    #[argh(option, arg_name = "n")]
    runs: Option<usize>,

    /// tokens at which a run ends (default: 128)
    #[argh(option, default = "128", arg_name = "n")]
    max_tokens: usize,

    /// prompts of your own: one JSON object a line with "class" and "prompt" (or "raw", or
    /// "messages" and "tools")
    #[argh(option, arg_name = "file")]
    prompts: Option<String>,

    /// go on after the model's end of turn, so that every run has --max-tokens tokens
    #[argh(switch)]
    ignore_eos: bool,

    /// drafter: auto (an EAGLE-3 head that came with the model, else MTP, else none), mtp, none, or
    /// the directory of an EAGLE-3 head (default: auto)
    #[argh(option, default = "\"auto\".into()", arg_name = "name")]
    draft: String,

    /// guesses in a round, 0 to 7, or auto: as many as pay (default: auto)
    #[argh(option, default = "\"auto\".into()", arg_name = "k")]
    draft_tokens: String,

    /// base of an EAGLE-3 head's rotary embedding, where its config.json is wrong
    #[argh(option, arg_name = "x")]
    draft_rope_theta: Option<f32>,

    /// also try chains of 1 to 7 guesses, over one prompt of each class
    #[argh(switch)]
    sweep: bool,

    /// let guesses be right so often that a step yields this many tokens, whatever the drafter says
    #[argh(option, arg_name = "tokens")]
    simulate_acceptance: Option<f64>,

    /// write the report as JSON (- is stdout, instead of the table)
    #[argh(option, arg_name = "file")]
    json: Option<String>,

    /// write the report as one page with plots, which needs no network (- is stdout, instead of the
    /// table)
    #[argh(option, arg_name = "file")]
    html: Option<String>,

    /// measure nothing and compare two reports that --json wrote: --diff A.json B.json
    #[argh(option, arg_name = "file")]
    diff: Option<String>,

    /// with --diff: the second report
    #[argh(positional, arg_name = "file")]
    second: Option<String>,

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

    /// with --rank-slice: TB/s that a card of the box reads to which its steps are projected (default:
    /// as doctor --deep has measured this box, if it has N GPUs; else 1.64, RTX PRO 6000)
    #[argh(option, arg_name = "tb/s")]
    card_bandwidth: Option<f64>,

    /// with --rank-slice: microseconds of one exchange between the cards (default: as measured on this
    /// box, if it has N GPUs; else published times of 8 cards by rows)
    #[argh(option, arg_name = "us")]
    reduce_us: Option<f64>,

    /// tensor-parallel ranks: 1, 2, 4 or 8 (default: one for each GPU; 1 on the CPU)
    #[argh(option, arg_name = "n")]
    tp: Option<usize>,

    /// tokens that must fit (default: the model's maximum, at most 8192)
    #[argh(option, arg_name = "n")]
    context: Option<usize>,

    /// rows of a prefill step (default: 64)
    #[argh(option, default = "64", arg_name = "n")]
    prefill_chunk: usize,

    /// epsilon of the latent norms (default: rms_norm_eps)
    #[argh(option, arg_name = "x")]
    latent_eps: Option<f32>,

    /// go by the shards' own headers instead of model.safetensors.index.json
    #[argh(switch)]
    ignore_index: bool,
}

impl BenchCommand {
    pub fn run(self) -> Result<ExitCode> {
        match (&self.diff, &self.second) {
            (Some(first), Some(second)) => return self.compare(first, second),
            (Some(first), None) => {
                return Err(Error::input(format!(
                    "--diff {first}: expected a second report, as in --diff {first} B.json"
                )));
            }
            (None, Some(second)) => {
                return Err(Error::input(format!(
                    "{second}: unexpected argument; a file without an option is the second of --diff"
                )));
            }
            (None, None) => {}
        }
        if self.max_tokens < 2 {
            return Err(Error::input(format!(
                "--max-tokens {}: expected at least 2, a rate needs a second token",
                self.max_tokens
            )));
        }
        let plan = Plan {
            prompts: self.prompts()?,
            max_tokens: self.max_tokens,
            // Random weights end a turn at random.
            ignore_eos: self.ignore_eos || self.model.starts_with("synthetic:"),
            sweep: if self.sweep { (1..=7).collect() } else { Vec::new() },
            simulated_acceptance: self.simulate_acceptance,
        };
        if self.simulate_acceptance.is_some_and(|length| !(1.0..=8.0).contains(&length)) {
            return Err(Error::input(
                "--simulate-acceptance: expected 1 to 8 tokens a step, the target's own included",
            ));
        }
        let cards = self.cards()?;
        self.check_targets()?;
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
        if self.sweep && engine.drafter().is_none() {
            return Err(Error::input("--sweep: there is no drafter to try; see --draft"));
        }
        let progress = Progress::count("measuring", bench::run_count(&engine, &plan) as u64);
        let measured = bench::measure(&mut engine, &plan, || progress.add(1))?;
        progress.finish();

        let settings =
            Settings { model: self.model.clone(), draft_tokens: self.draft_tokens.clone(), cards };
        let context = RunContext {
            engine: &engine,
            plan: &plan,
            settings: &settings,
            fingerprint: doctor::fingerprint(),
        };
        let report = bench::report(&context, &measured);
        doctor::keep_bench(&report);
        // Minutes of measuring are shown though a disk is full, and kept though nobody reads on.
        let json = self.json.as_ref().map_or(Ok(()), |target| write_json(target, &report));
        let page = |target| write_text(target, &bench::html(&report));
        let html = self.html.as_deref().map_or(Ok(()), page);
        let stdout_taken = [&self.json, &self.html].map(|target| target.as_deref() == Some("-"));
        let shown = match stdout_taken.contains(&true) {
            true => Ok(()),
            false => print(&bench::table(&report)),
        };
        json.and(html).and(shown)?;
        Ok(ExitCode::from(if measured.first_divergence.is_some() { 3 } else { 0 }))
    }

    /// `--diff`: the second report against the first.
    fn compare(&self, first: &str, second: &str) -> Result<ExitCode> {
        if let Some(target) = &self.html {
            return Err(Error::input(format!(
                "--html {target}: a comparison has no page; use --json, or leave --html out"
            )));
        }
        let ignored = self.measuring_options();
        if !ignored.is_empty() {
            return Err(Error::input(format!(
                "{}: --diff measures nothing; leave them out, or measure with --json first",
                ignored.join(", ")
            )));
        }
        let (a, b) = (read_report(first)?, read_report(second)?);
        let comparison = bench::diff((first, &a), (second, &b))?;
        if let Some(target) = &self.json {
            check_writable(target)?;
            write_json(target, &comparison)?;
        }
        if self.json.as_deref() != Some("-") {
            print(&bench::diff_table(&comparison))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Options that say how to measure, where they differ from their defaults.
    fn measuring_options(&self) -> Vec<&'static str> {
        let Ok(unset) = Self::from_args(&["bench"], &[]) else {
            return Vec::new();
        };
        let options = [
            ("--runs", self.runs != unset.runs),
            ("--max-tokens", self.max_tokens != unset.max_tokens),
            ("--prompts", self.prompts != unset.prompts),
            ("--ignore-eos", self.ignore_eos),
            ("--draft", self.draft != unset.draft),
            ("--draft-tokens", self.draft_tokens != unset.draft_tokens),
            ("--draft-rope-theta", self.draft_rope_theta != unset.draft_rope_theta),
            ("--sweep", self.sweep),
            ("--simulate-acceptance", self.simulate_acceptance != unset.simulate_acceptance),
            ("--model", self.model != unset.model),
            ("--layers", self.layers != unset.layers),
            ("--backend", self.backend != unset.backend),
            ("--devices", self.devices != unset.devices),
            ("--shared-gpu", self.shared_gpu != unset.shared_gpu),
            ("--reduce", self.reduce != unset.reduce),
            ("--experts", self.experts != unset.experts),
            ("--dense-weights", self.dense_weights != unset.dense_weights),
            ("--requalify", self.requalify),
            ("--rank-slice", self.rank_slice != unset.rank_slice),
            ("--card-bandwidth", self.card_bandwidth.is_some()),
            ("--reduce-us", self.reduce_us.is_some()),
            ("--tp", self.tp != unset.tp),
            ("--context", self.context != unset.context),
            ("--prefill-chunk", self.prefill_chunk != unset.prefill_chunk),
            ("--latent-eps", self.latent_eps != unset.latent_eps),
            ("--ignore-index", self.ignore_index),
        ];
        options.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }

    /// The cards to project to.
    fn cards(&self) -> Result<Cards> {
        for (option, value) in
            [("--card-bandwidth", self.card_bandwidth), ("--reduce-us", self.reduce_us)]
        {
            let Some(value) = value else { continue };
            if self.rank_slice.is_none() {
                return Err(Error::input(format!(
                    "{option}: only the steps of one rank are projected; give --rank-slice too"
                )));
            }
            if !value.is_finite() || value <= 0.0 {
                return Err(Error::input(format!("{option} {value}: expected a positive number")));
            }
        }
        let mut cards = Cards::default();
        let slice = self.rank_slice.as_deref().map(parse_rank_slice).transpose()?;
        if let Some(own) = slice.and_then(|slice| doctor::own_cards(slice.of)) {
            if let Some(bandwidth) = own.bandwidth {
                (cards.bandwidth, cards.bandwidth_from) = (bandwidth, "measured on this box");
            }
            if !own.exchanges.is_empty() {
                (cards.exchanges, cards.exchanges_from) = (own.exchanges, "measured on this box");
            }
        }
        if let Some(bandwidth) = self.card_bandwidth {
            (cards.bandwidth, cards.bandwidth_from) = (bandwidth * 1e12, "--card-bandwidth");
        }
        if let Some(us) = self.reduce_us {
            (cards.exchanges, cards.exchanges_from) = (vec![(1.0, us)], "--reduce-us");
        }
        Ok(cards)
    }

    /// A bad path should fail now, not after the measurement.
    fn check_targets(&self) -> Result<()> {
        if let (Some(json), Some(html)) = (&self.json, &self.html)
            && json == html
        {
            return Err(Error::input(format!(
                "--json {json} and --html {html}: expected two targets, give one of them another"
            )));
        }
        [&self.json, &self.html].into_iter().flatten().try_for_each(|target| check_writable(target))
    }

    /// The first `--runs` prompts of each class.
    fn prompts(&self) -> Result<Vec<Prompt>> {
        let prompts = match &self.prompts {
            None => bench::built_in_prompts(&self.model)?,
            Some(file) => {
                let text = std::fs::read_to_string(file).map_err(|e| {
                    Error::input(format!("{file}: cannot read: {e}; check --prompts"))
                })?;
                bench::read_prompts(file, &text)?
            }
        };
        let Some(limit) = self.runs else {
            return Ok(prompts);
        };
        let of_class = |class: &str| prompts.iter().filter(|p| p.class == class).count();
        if let Some(short) = prompts.iter().find(|p| of_class(&p.class) < limit) {
            return Err(Error::input(format!(
                "--runs {limit}: class {} has {} prompts and none is used twice; give more with \
                 --prompts",
                short.class,
                of_class(&short.class)
            )));
        }
        if limit == 0 {
            return Err(Error::input("--runs 0: expected at least 1"));
        }
        let mut kept: Vec<Prompt> = Vec::new();
        for prompt in prompts {
            if kept.iter().filter(|other| other.class == prompt.class).count() < limit {
                kept.push(prompt);
            }
        }
        Ok(kept)
    }
}

fn read_report(file: &str) -> Result<Value> {
    let bytes = std::fs::read(file)
        .map_err(|e| Error::input(format!("{file}: cannot read: {e}; check --diff")))?;
    serde_json::from_slice(&bytes).map_err(|e| {
        Error::input(format!(
            "{file}: not a talon report: {e}; expected a file that talon bench --json wrote"
        ))
    })
}
