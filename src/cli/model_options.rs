//! Options that all commands which load a model share: their checks and what they become.

use crate::engine::{BackendChoice, DraftChoice, Engine, LoadOptions};
use crate::error::{Error, Result};
use crate::weights::{Slice, Source};

use super::progress::Progress;

/// The values of the shared options, as each command's argh struct hands them over.
pub struct ModelOptions<'a> {
    pub model: &'a str,
    pub layers: Option<usize>,
    pub backend: &'a str,
    pub devices: &'a str,
    pub rank_slice: Option<&'a str>,
    pub tp: usize,
    pub context: Option<usize>,
    pub prefill_chunk: usize,
    pub latent_eps: Option<f32>,
    pub ignore_index: bool,
    pub draft: DraftOptions<'a>,
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
        let backend = match self.backend {
            "auto" => BackendChoice::Auto,
            "cpu" => BackendChoice::Cpu,
            "cuda" => BackendChoice::Cuda,
            other => {
                return Err(Error::input(format!("--backend {other}: expected auto, cuda or cpu")));
            }
        };
        check_tp(self.tp)?;
        let rank_slice = self.rank_slice.map(parse_rank_slice).transpose()?;
        if rank_slice.is_some() && self.tp != 1 {
            return Err(Error::input(format!(
                "--rank-slice and --tp {}: expected one of them, a slice says its own number of \
                 ranks",
                self.tp
            )));
        }
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
            device: parse_device(self.devices)?,
            rank_slice,
            tp: self.tp,
            context: self.context,
            prefill_chunk: self.prefill_chunk,
            latent_eps: self.latent_eps,
            ignore_index: self.ignore_index,
            draft: self.draft.choice(),
            draft_tokens: self.draft.tokens()?,
            draft_rope_theta: self.draft.rope_theta,
            ..LoadOptions::default()
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

/// The number of one GPU.
pub fn parse_device(text: &str) -> Result<usize> {
    text.parse().map_err(|_| {
        Error::input(match text.contains(',') {
            true => format!(
                "--devices {text}: expected one number, such as 0; only one rank runs on a GPU yet"
            ),
            false => format!("--devices {text}: expected the number of a GPU, such as 0"),
        })
    })
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
        other => Err(Error::input(format!("--tp {other}: expected 1, 2, 4 or 8 ranks"))),
    }
}
