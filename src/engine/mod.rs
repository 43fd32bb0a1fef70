//! The narrow door to the model: an [`Engine`] is a loaded checkpoint, a [`Session`] one timeline
//! in it. The command line, the benchmark and the server see only this.

mod backends;
mod check;
mod door;
mod drafting;
mod generate;
mod kernels;
mod load_figures;
mod memory;
mod output;
mod room;
mod sampler;
mod scheduler;
mod sequence;
mod session;
mod slots;
mod text_model;

pub use backends::{BackendChoice, DeviceUse};
pub use check::{StageCheck, check_kernels};
pub use door::{Door, Event, Refusal, Status, Ticket};
pub use drafting::DraftChoice;
pub use generate::{Generation, Request, Round, generate_on};
pub use kernels::{ExchangeTimes, measure_exchanges, measure_kernels};
pub use load_figures::LoadFigures;
pub use output::{OutputText, opens_reasoning};
pub use room::{Room, room};
pub use sampler::{Sampling, TokenLogprobs};
pub use scheduler::Scheduler;
pub use sequence::{Accepted, Chosen, Finish, Flow, Sequence, Task};
pub use session::Session;
pub use text_model::TextModel;

use std::sync::Arc;

use log::{info, warn};

use crate::cuda::RanksOptions;
use crate::error::{Error, Result, one_line};
pub use crate::model::ModelConfig;
use crate::model::{Backend, Eagle3Head, Quantization, Weights};
pub use crate::model::{DenseWeights, ExpertSplit};
use crate::spec::Policy;
use crate::weights::{
    Audit, Checkpoint, Manifest, Reading, Severity, Slice, Source, What, audit, synthetic,
};

/// Settings of a load.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Where it runs.
    pub backend: BackendChoice,
    /// The GPUs, as the driver counts, and how ranks on them exchange; no device is the default: as
    /// many as ranks can share the model. The CPU backend does not look at it.
    pub gpus: RanksOptions,
    /// Run only this rank's share of the model, without the others: a measurement, not an answer.
    pub rank_slice: Option<Slice>,
    /// How ranks share the routed experts.
    pub experts: ExpertSplit,
    /// How the dense weights are held.
    pub dense_weights: DenseWeights,
    /// Number of ranks; default: one for each GPU, or one on the CPU.
    pub tp: Option<usize>,
    /// Tokens that a sequence may have; default: the model's maximum, at most 8192.
    pub context: Option<usize>,
    /// Sequences that may exist at a time.
    pub parallel: usize,
    /// Rows of a prefill step.
    pub prefill_chunk: usize,
    /// Epsilon of the latent norms; default: `rms_norm_eps`.
    pub latent_eps: Option<f32>,
    /// Go by the shards' headers, not by the index.
    pub ignore_index: bool,
    /// The drafter.
    pub draft: DraftChoice,
    /// Guesses a round; default: as many as pay.
    pub draft_tokens: Option<usize>,
    /// Base of an EAGLE-3 head's rotary embedding, where its config is wrong.
    pub draft_rope_theta: Option<f32>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            backend: BackendChoice::default(),
            gpus: RanksOptions::default(),
            rank_slice: None,
            experts: ExpertSplit::default(),
            dense_weights: DenseWeights::default(),
            tp: None,
            context: None,
            parallel: 1,
            prefill_chunk: 64,
            latent_eps: None,
            ignore_index: false,
            draft: DraftChoice::None,
            draft_tokens: None,
            draft_rope_theta: None,
        }
    }
}

/// Contexts beyond this must be asked for.
const DEFAULT_CONTEXT: usize = 8192;

/// A loaded model.
pub struct Engine {
    config: Arc<ModelConfig>,
    text: Option<Arc<TextModel>>,
    layout: String,
    backend: Box<dyn Backend + Send>,
    backend_name: &'static str,
    device: Option<DeviceUse>,
    rank_slice: Option<Slice>,
    experts: ExpertSplit,
    slots: session::Slots,
    limits: Limits,
    drafter: Option<String>,
    policy: Policy,
    load: Option<LoadFigures>,
}

/// What the engine was sized for.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Tokens of a sequence.
    pub context: usize,
    /// Sequences at a time.
    pub parallel: usize,
    /// Rows of a prefill step.
    pub prefill_chunk: usize,
    /// Number of ranks.
    pub tp: usize,
    /// Ids from here on are padding rows of the head and never sampled.
    pub vocab_limit: usize,
}

/// A checkpoint's config, shards and audit, before anything is loaded.
pub struct Opened {
    /// The configuration.
    pub config: ModelConfig,
    /// The quantisation that it claims.
    pub quantization: Option<Quantization>,
    /// The shards.
    pub checkpoint: Checkpoint,
    /// The family's manifest.
    pub manifest: Manifest,
    /// What is there and what is wrong.
    pub audit: Audit,
}

impl Opened {
    /// Reads config and headers of `source`.
    ///
    /// # Errors
    /// Input error if config.json is missing or wrong, or there are no shards. Faults of shards and
    /// tensors are in [`Opened::audit`].
    pub fn new(source: Source, ignore_index: bool) -> Result<Self> {
        let config_name = source.display("config.json");
        let config_json = source.require("config.json")?;
        let config = ModelConfig::from_json(&config_name, &config_json)?;
        let quant_name = source.display("hf_quant_config.json");
        let quant_json = source.open("hf_quant_config.json")?;
        let quantization = Quantization::from_json(
            (&config_name, &config_json),
            quant_json.as_deref().map(|json| (quant_name.as_str(), json)),
        )?;
        let manifest = Manifest::glm5()?;
        let checkpoint = match source {
            Source::Synthetic(..) => synthetic(source, &manifest, &config.geometry())?,
            source => Checkpoint::open(source, ignore_index)?,
        };
        let audit = audit(&checkpoint, &manifest, &config.geometry())?;
        Ok(Self { config, quantization, checkpoint, manifest, audit })
    }
}

/// Why an EAGLE-3 head cannot draft for a model of this config, if it cannot.
pub fn eagle3_fault(head: Source, config: &ModelConfig) -> Option<Error> {
    Eagle3Head::open(head, config, None).err()
}

impl Engine {
    /// Loads a model. `progress` is called with (bytes read or uploaded since the last call, all such
    /// bytes), from several threads.
    ///
    /// # Errors
    /// Input error that names what is wrong with the checkpoint or does not fit.
    pub fn load(
        source: Source,
        options: &LoadOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self> {
        let Opened { mut config, checkpoint, manifest, audit, .. } =
            Opened::new(source, options.ignore_index)?;
        audit.refuse_errors()?;
        for warning in audit.problems.iter().filter(|p| p.severity == Severity::Warning) {
            warn!("{}", warning.line());
        }
        if !config.unhandled.is_empty() {
            // The keys are foreign text.
            let line = format!(
                "{}: keys that talon does not know: {}",
                checkpoint.source.display("config.json"),
                config.unhandled.join(", ")
            );
            warn!("{}", one_line(line));
        }
        // A pack says for how many ranks it is.
        let tp = options.tp.or(checkpoint.pack.as_ref().map(|pack| pack.tp));
        let options = &LoadOptions { tp, ..options.clone() };
        let chosen = backends::choose(options)?;
        audit.check_ranks(&manifest, &config.geometry(), chosen.ranks)?;

        config.latent_norm_eps = options.latent_eps.unwrap_or(config.latent_norm_eps);
        let text = TextModel::open(&checkpoint.source, &config.eos_token_id)?.map(Arc::new);
        let vocabulary =
            text.as_ref().map_or(config.vocab_size, |text| text.tokenizer().vocab_len());
        let limits = Limits {
            context: options.context.unwrap_or(config.max_position_embeddings.min(DEFAULT_CONTEXT)),
            parallel: options.parallel,
            prefill_chunk: options.prefill_chunk.max(1),
            tp: chosen.ranks,
            vocab_limit: vocabulary.min(config.vocab_size),
        };
        // A slice is there to be timed, and what it says is noise.
        let slice_without_drafter =
            options.rank_slice.is_some() && options.draft == DraftChoice::Auto;
        let (draft, drafter) = drafting::open_drafter(
            if slice_without_drafter { &DraftChoice::None } else { &options.draft },
            &config,
            &checkpoint,
            &audit,
            options.draft_rope_theta,
        )?;
        let layout = match options.dense_weights {
            DenseWeights::Stored => audit.layout.clone(),
            DenseWeights::Fp8 => format!("{}, dense weights held in fp8", audit.layout),
        };
        let weights = Weights::new(checkpoint, manifest, audit)?
            .with_experts(options.experts)
            .with_dense(options.dense_weights);
        let config = Arc::new(config);
        let needed = draft.needed(&weights, &config);
        let everything = Reading::new(&needed, What::Everything);
        let bytes = everything.bytes() as usize;
        if chosen.backend == BackendChoice::Cpu {
            memory::warn_if_larger_than_memory(bytes);
        }
        // Files that do not fit would push their own pages out before they are used.
        let reading = match memory::holds(bytes) {
            true => everything,
            false => Reading::new(&needed, What::Scales),
        };
        let (read, load) = LoadFigures::measure(&reading, progress)?;
        if let Some(load) = &load {
            info!("{}", load.summary());
        }
        if let Some(first) = read.problems.first() {
            return Err(Error::input(first.line()));
        }
        let total = read.bytes as usize;
        // The bar goes on with the weights that go to a device.
        let uploaded = |bytes: usize, all: usize| progress(bytes as u64, (total + all) as u64);
        let backends::Running { backend, name, device } =
            backends::start(&chosen, &config, &weights, &draft, (options, &limits), &uploaded)?;
        info!("{layout}; {name} backend, {} ranks, context {}", limits.tp, limits.context);
        // Behind what may refuse the load, whose message would otherwise be a second line.
        if limits.context > config.max_position_embeddings {
            warn!(
                "--context {}: the model was made for {} positions (max_position_embeddings); \
                 answers beyond them may be noise",
                limits.context, config.max_position_embeddings
            );
        }
        if let Some(fault) = &chosen.left_gpu {
            warn!("running on the CPU: {fault}");
        }
        let slots = session::Slots::new(limits.parallel);
        let policy = match options.draft_tokens {
            Some(count) => Policy::Fixed(count),
            None => Policy::adaptive(),
        };
        Ok(Self {
            config,
            text,
            layout,
            backend,
            backend_name: name,
            device,
            rank_slice: options.rank_slice,
            experts: options.experts,
            slots,
            limits,
            drafter,
            policy,
            load,
        })
    }

    /// `cpu` or `cuda`.
    pub fn backend_name(&self) -> &'static str {
        self.backend_name
    }

    /// How the weights were read, if it was from files.
    pub fn load_figures(&self) -> Option<&LoadFigures> {
        self.load.as_ref()
    }

    /// What the model takes of a device, where it runs on one.
    pub fn device_use(&self) -> Option<&DeviceUse> {
        self.device.as_ref()
    }

    /// How ranks share the routed experts.
    pub fn experts(&self) -> ExpertSplit {
        self.experts
    }

    /// The only rank that is run, if it is not all of them.
    pub fn rank_slice(&self) -> Option<Slice> {
        self.rank_slice
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What the engine was sized for.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// `eagle3`, `mtp`, or nothing.
    pub fn drafter(&self) -> Option<&str> {
        self.drafter.as_deref()
    }

    /// How many tokens are guessed, and what was learnt about it.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Formats of the weights by kind of module.
    pub fn layout(&self) -> &str {
        &self.layout
    }

    /// As [`Engine::text`], where a checkpoint without a tokenizer will do.
    pub fn text_if_any(&self) -> Option<Arc<TextModel>> {
        self.text.clone()
    }

    /// Tokenizer, chat template and generation defaults.
    ///
    /// # Errors
    /// Input error if the checkpoint came without a tokenizer.
    pub fn text(&self) -> Result<Arc<TextModel>> {
        self.text.clone().ok_or_else(|| {
            Error::input(
                "the checkpoint has no tokenizer.json; give the prompt as ids with --tokens, or \
                 fetch the tokenizer",
            )
        })
    }
}
