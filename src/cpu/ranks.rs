//! The ranks of the reference backend, one thread each, run in lock-step.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::cache::{KvCache, latent_width};
use super::drafter::{Drafter, DrafterKind};
use super::eagle3::{Eagle3, entry_width};
use super::features::Features;
use super::ops::Rope;
use super::rank::{Buffers, CpuRank};
use crate::comm::SharedMemory;
use crate::error::{Error, Result};
use crate::model::{
    Backend, Draft, DraftModel, DraftParams, Drafted, Eagle3Share, FEATURE_POSITIONS, ModelConfig,
    RowResult, Step, Weights, draft, forward,
};
use crate::weights::Slice;

/// Settings that the ranks are built for.
#[derive(Debug, Clone, Copy)]
pub struct CpuOptions {
    /// Number of ranks.
    pub tp: usize,
    /// Tokens a sequence may have.
    pub context: usize,
    /// Sequences that may exist at a time.
    pub parallel: usize,
    /// Ids from here on are never an arg-max.
    pub vocab_limit: usize,
}

/// What the ranks are asked to run.
enum Job {
    Step(Step),
    Draft(Draft),
}

enum Answer {
    Step(Result<Vec<RowResult>>),
    Draft(Result<Vec<Drafted>>),
}

/// The running ranks.
pub struct CpuRanks {
    jobs: Vec<Sender<Arc<Job>>>,
    answers: Receiver<Answer>,
    threads: Vec<JoinHandle<()>>,
}

/// Bytes of the KV caches of all ranks, a drafter's included.
pub fn cache_bytes(config: &ModelConfig, options: &CpuOptions, draft: &DraftModel) -> usize {
    let layers = &config.layers[..layers_with(config, draft)];
    let indexers = layers.iter().filter(|layer| layer.indexer).count();
    let mut floats = layers.len() * latent_width(config) + indexers * config.index_head_dim;
    if let DraftModel::Eagle3(head) = draft {
        floats += entry_width(&head.config, options.tp);
    }
    [options.context, options.parallel, options.tp, size_of::<f32>()]
        .iter()
        .fold(floats, |bytes, factor| bytes.saturating_mul(*factor))
}

/// Layers that have a cache.
fn layers_with(config: &ModelConfig, draft: &DraftModel) -> usize {
    config.num_hidden_layers + usize::from(matches!(draft, DraftModel::Mtp))
}

impl CpuRanks {
    /// Builds the ranks; tensors stay where they are mapped.
    ///
    /// # Errors
    /// Input error if the weights cannot be shared by this many ranks.
    pub fn start(
        config: &Arc<ModelConfig>,
        weights: &Weights,
        draft: &DraftModel,
        options: CpuOptions,
    ) -> Result<Self> {
        // Each rank on a thread of its own: a rank touches pages all over the files, and one after
        // the other would wait for the disk that many times.
        let options = &options;
        let built: Vec<Result<CpuRank>> = std::thread::scope(|scope| {
            let build =
                |comm| scope.spawn(move || build_rank(config, weights, draft, options, comm));
            let threads: Vec<_> = SharedMemory::group(options.tp).into_iter().map(build).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Result<CpuRank>>| {
                let ended = |_| Err(Error::runtime("a rank ended; its message is above"));
                thread.join().unwrap_or_else(ended)
            };
            threads.into_iter().map(join).collect()
        });
        let (answer_sender, answers) = channel();
        let mut ranks = Self { jobs: Vec::new(), answers, threads: Vec::new() };
        for (index, rank) in built.into_iter().enumerate() {
            let rank = rank?;
            let (sender, jobs) = channel();
            // All ranks compute the same results; rank 0 answers.
            let answer = (index == 0).then(|| answer_sender.clone());
            let thread = std::thread::Builder::new()
                .name(format!("rank {index}"))
                .spawn(move || run(rank, &jobs, answer.as_ref()))
                .map_err(|e| Error::runtime(format!("cannot start rank {index}: {e}")))?;
            ranks.jobs.push(sender);
            ranks.threads.push(thread);
        }
        Ok(ranks)
    }

    fn run(&mut self, job: Job) -> Result<Answer> {
        let ended = || Error::runtime("a rank ended; its message is above");
        let job = Arc::new(job);
        for rank in &self.jobs {
            rank.send(job.clone()).map_err(|_| ended())?;
        }
        self.answers.recv().map_err(|_| ended())
    }
}

impl Backend for CpuRanks {
    fn step(&mut self, step: Step) -> Result<Vec<RowResult>> {
        match self.run(Job::Step(step))? {
            Answer::Step(results) => results,
            Answer::Draft(_) => Err(Error::runtime("a step was answered with a draft")),
        }
    }

    fn draft(&mut self, draft: Draft) -> Result<Vec<Drafted>> {
        match self.run(Job::Draft(draft))? {
            Answer::Draft(drafted) => drafted,
            Answer::Step(_) => Err(Error::runtime("a draft was answered with a step")),
        }
    }

    fn feature_positions(&self) -> usize {
        FEATURE_POSITIONS
    }
}

/// A rank with its share of the weights and an empty cache.
fn build_rank(
    config: &Arc<ModelConfig>,
    weights: &Weights,
    draft: &DraftModel,
    options: &CpuOptions,
    comm: SharedMemory,
) -> Result<CpuRank> {
    let slice = Slice { index: comm.rank(), of: options.tp };
    let mut params = weights.params(config, slice)?;
    draft.join(&mut params, weights, config, slice)?;
    let drafter =
        params.drafter.take().map(|drafter| start_drafter(config, drafter, slice, options));
    Ok(CpuRank {
        params,
        cache: KvCache::new(config, layers_with(config, draft), options.context, options.parallel),
        rope: Rope::new(config.qk_rope_head_dim, config.rope_theta),
        vocab_limit: options.vocab_limit.min(config.vocab_size),
        drafter,
        buffers: Buffers::default(),
        config: config.clone(),
        comm,
    })
}

/// The drafter of a rank.
fn start_drafter(
    config: &ModelConfig,
    params: DraftParams,
    slice: Slice,
    options: &CpuOptions,
) -> Drafter {
    let features =
        Features::new(params.features(), config.hidden_size, FEATURE_POSITIONS, options.parallel);
    let kind = match params {
        DraftParams::Mtp(mtp) => DrafterKind::Mtp(Box::new(mtp)),
        DraftParams::Eagle3(share) => {
            let Eagle3Share { config, params, draft_to_target } = *share;
            let sizes = (options.context, options.parallel);
            let head = Eagle3::new(config, params, draft_to_target, slice.of, sizes);
            DrafterKind::Eagle3(Box::new(head))
        }
    };
    Drafter { features, kind }
}

impl Drop for CpuRanks {
    fn drop(&mut self) {
        self.jobs.clear();
        for thread in self.threads.drain(..) {
            // A rank that panicked has printed its message.
            let _ = thread.join();
        }
    }
}

fn run(mut rank: CpuRank, jobs: &Receiver<Arc<Job>>, answer: Option<&Sender<Answer>>) {
    let config = rank.config.clone();
    while let Ok(job) = jobs.recv() {
        let result = match &*job {
            Job::Step(step) => Answer::Step(forward(&mut rank, &config, step)),
            Job::Draft(request) => Answer::Draft(draft(&mut rank, request)),
        };
        if let Some(answer) = answer
            && answer.send(result).is_err()
        {
            return;
        }
    }
}
