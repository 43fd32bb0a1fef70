//! Options that all commands which load a model share: their checks and what they become.

use crate::cuda::{RanksOptions, Sharing, Variant};
use crate::engine::{BackendChoice, DenseWeights, DraftChoice, Engine, ExpertSplit, LoadOptions};
use crate::error::{Error, Result};
use crate::weights::{Slice, Source};

use super::progress::Progress;

/// The values of the shared options, as each command's argh struct hands them over.
pub struct ModelOptions<'a> {
    pub model: &'a str,
    pub layers: Option<usize>,
    pub backend: &'a str,
    pub gpus: GpuOptions<'a>,
    pub rank_slice: Option<&'a str>,
    pub tp: Option<usize>,
    pub context: Option<usize>,
    pub prefill_chunk: usize,
    pub latent_eps: Option<f32>,
    pub ignore_index: bool,
    pub dense_weights: &'a str,
    pub draft: DraftOptions<'a>,
}

/// The values of the options about GPUs and the ranks on them.
pub struct GpuOptions<'a> {
    pub devices: Option<&'a str>,
    pub shared_gpu: &'a str,
    pub reduce: &'a str,
    pub experts: &'a str,
    pub requalify: bool,
}

impl GpuOptions<'_> {
    fn ranks(&self) -> Result<RanksOptions> {
        let devices = self.devices.map(parse_devices).transpose()?.unwrap_or_default();
        let sharing = match self.shared_gpu {
            "lock-step" => Sharing::LockStep,
            "concurrent" => Sharing::Concurrent,
            other => {
                return Err(Error::input(format!(
                    "--shared-gpu {other}: expected lock-step or concurrent"
                )));
            }
        };
        let reduce = match (self.reduce, Variant::from_name(self.reduce)) {
            ("auto", _) => None,
            (_, Some(variant)) => Some(variant),
            (other, None) => {
                return Err(Error::input(format!(
                    "--reduce {other}: expected auto, {}",
                    Variant::ALL.map(Variant::name).join(", ")
                )));
            }
        };
        let requalify = self.requalify;
        Ok(RanksOptions { devices, sharing, reduce, requalify, ..RanksOptions::default() })
    }
}

/// The values of the options about speculation.
pub struct DraftOptions<'a> {
    pub draft: &'a str,
    pub draft_tokens: &'a str,
    pub rope_theta: Option<f32>,
}

impl DraftOptions<'_> {
    fn choice(&self) -> DraftChoice {
        match self.draft {
            "auto" => DraftChoice::Auto,
            "mtp" => DraftChoice::Mtp,
            "none" => DraftChoice::None,
            directory => DraftChoice::Directory(directory.into()),
        }
    }

    fn tokens(&self) -> Result<Option<usize>> {
        match (self.draft_tokens, self.draft_tokens.parse::<usize>()) {
            ("auto", _) => Ok(None),
            (_, Ok(count)) if count <= 7 => Ok(Some(count)),
            (other, _) => Err(Error::input(format!(
                "--draft-tokens {other}: expected auto or a number from 0 to 7"
            ))),
        }
    }
}

impl ModelOptions<'_> {
    /// Loads the model, with a progress bar on a terminal.
    pub fn load(&self) -> Result<Engine> {
        self.load_for(1)
    }

    /// As [`ModelOptions::load`], with room for this many sequences at a time.
    pub fn load_for(&self, parallel: usize) -> Result<Engine> {
        let backend = match self.backend {
            "auto" => BackendChoice::Auto,
            "cpu" => BackendChoice::Cpu,
            "cuda" => BackendChoice::Cuda,
            other => {
                return Err(Error::input(format!("--backend {other}: expected auto, cuda or cpu")));
            }
        };
        self.tp.map_or(Ok(()), check_tp)?;
        let rank_slice = self.rank_slice.map(parse_rank_slice).transpose()?;
        if let (Some(_), Some(tp)) = (rank_slice, self.tp) {
            return Err(Error::input(format!(
                "--rank-slice and --tp {tp}: expected one of them, a slice says its own number of \
                 ranks"
            )));
        }
        let gpus = self.gpus.ranks()?;
        let experts = match self.gpus.experts {
            "split" => ExpertSplit::Rows,
            "parallel" => ExpertSplit::Whole,
            other => {
                return Err(Error::input(format!("--experts {other}: expected split or parallel")));
            }
        };
        check_devices(&gpus.devices, self.tp, rank_slice.is_some())?;
        if self.context == Some(0) {
            return Err(Error::input("--context 0: expected at least 1 token"));
        }
        if self.prefill_chunk == 0 {
            return Err(Error::input("--prefill-chunk 0: expected at least 1 row"));
        }
        let positive =
            |value: Option<f32>| value.is_none_or(|value| value.is_finite() && value > 0.0);
        if !positive(self.draft.rope_theta) {
            return Err(Error::input(
                "--draft-rope-theta: expected a positive number, such as 1e4",
            ));
        }
        if self.latent_eps.is_some_and(|eps| !eps.is_finite() || eps <= 0.0) {
            return Err(Error::input("--latent-eps: expected a positive number, such as 1e-6"));
        }
        let options = LoadOptions {
            backend,
            gpus,
            experts,
            dense_weights: parse_dense_weights(self.dense_weights)?,
            rank_slice,
            tp: self.tp,
            context: self.context,
            prefill_chunk: self.prefill_chunk,
            latent_eps: self.latent_eps,
            ignore_index: self.ignore_index,
            draft: self.draft.choice(),
            draft_tokens: self.draft.tokens()?,
            draft_rope_theta: self.draft.rope_theta,
            parallel,
        };
        let progress = Progress::bytes("loading");
        let engine =
            Engine::load(Source::from_name(self.model, self.layers)?, &options, &|bytes, total| {
                progress.of(total);
                progress.add(bytes);
            });
        progress.finish();
        engine
    }
}

/// How the dense weights are held.
pub fn parse_dense_weights(text: &str) -> Result<DenseWeights> {
    match text {
        "stored" => Ok(DenseWeights::Stored),
        "fp8" => Ok(DenseWeights::Fp8),
        other => Err(Error::input(format!("--dense-weights {other}: expected stored or fp8"))),
    }
}

/// Numbers of GPUs, in rank order.
pub fn parse_devices(text: &str) -> Result<Vec<usize>> {
    let numbers = text.split(',').map(|number| number.trim().parse().ok());
    numbers.collect::<Option<Vec<usize>>>().ok_or_else(|| {
        Error::input(format!(
            "--devices {text}: expected the numbers of GPUs, such as 0 or 0,1,4,5 (0,0 is two ranks \
             on GPU 0)"
        ))
    })
}

/// Refuses devices that do not go with the ranks that were asked for.
fn check_devices(devices: &[usize], tp: Option<usize>, sliced: bool) -> Result<()> {
    let count = devices.len();
    match tp {
        _ if count == 0 => Ok(()),
        _ if sliced && count > 1 => {
            Err(Error::input(format!("--rank-slice runs on one GPU, --devices names {count}")))
        }
        Some(tp) if tp != count => Err(Error::input(format!(
            "--tp {tp} and --devices with {count} entries: expected one for each rank; one of the \
             two options is enough"
        ))),
        _ => match check_tp(count) {
            Ok(()) => Ok(()),
            Err(_) => Err(Error::input(format!(
                "--devices: {count} ranks cannot share a model, whose heads and experts are cut into \
                 halves; expected 1, 2, 4 or 8 entries"
            ))),
        },
    }
}

/// `R/N`: rank R of N.
pub fn parse_rank_slice(text: &str) -> Result<Slice> {
    let parts = text
        .split_once('/')
        .and_then(|(index, of)| Some(Slice { index: index.parse().ok()?, of: of.parse().ok()? }));
    match parts {
        Some(slice) if [1, 2, 4, 8].contains(&slice.of) && slice.index < slice.of => Ok(slice),
        _ => Err(Error::input(format!(
            "--rank-slice {text}: expected R/N, rank R of N = 1, 2, 4 or 8, such as 0/8"
        ))),
    }
}

/// Rank counts that talon is built and tested for.
pub fn check_tp(tp: usize) -> Result<()> {
    match tp {
        1 | 2 | 4 | 8 => Ok(()),
        other => Err(Error::input(format!(
            "--tp {other}: expected 1, 2, 4 or 8 ranks; heads and experts are cut into halves"
        ))),
    }
}
