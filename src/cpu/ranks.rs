//! The ranks of the reference backend, one thread each, run in lock-step.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::cache::{KvCache, latent_width};
use super::ops::Rope;
use super::rank::{Buffers, CpuRank};
use crate::comm::SharedMemory;
use crate::error::{Error, Result};
use crate::model::{ModelConfig, RowResult, Step, Weights, forward};
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

/// The running ranks.
pub struct CpuRanks {
    steps: Vec<Sender<Arc<Step>>>,
    results: Receiver<Result<Vec<RowResult>>>,
    threads: Vec<JoinHandle<()>>,
}

/// Bytes of the KV caches of all ranks.
pub fn cache_bytes(config: &ModelConfig, options: &CpuOptions) -> usize {
    let layers = &config.layers[..config.num_hidden_layers];
    let indexers = layers.iter().filter(|layer| layer.indexer).count();
    let floats = layers.len() * latent_width(config) + indexers * config.index_head_dim;
    [options.context, options.parallel, options.tp, size_of::<f32>()]
        .iter()
        .fold(floats, |bytes, factor| bytes.saturating_mul(*factor))
}

impl CpuRanks {
    /// Builds the ranks; tensors stay where they are mapped.
    ///
    /// # Errors
    /// Input error if the weights cannot be shared by this many ranks.
    pub fn start(
        config: &Arc<ModelConfig>,
        weights: &Weights,
        options: CpuOptions,
    ) -> Result<Self> {
        let (result_sender, results) = channel();
        let mut ranks = Self { steps: Vec::new(), results, threads: Vec::new() };
        for comm in SharedMemory::group(options.tp) {
            let index = comm.rank();
            let rank = CpuRank {
                params: weights.params(config, Slice { index, of: options.tp })?,
                cache: KvCache::new(config, options.context, options.parallel),
                rope: Rope::new(config.qk_rope_head_dim, config.rope_theta),
                vocab_limit: options.vocab_limit.min(config.vocab_size),
                buffers: Buffers::default(),
                config: config.clone(),
                comm,
            };
            let (sender, steps) = channel();
            // All ranks compute the same results; rank 0 answers.
            let answer = (index == 0).then(|| result_sender.clone());
            let thread = std::thread::Builder::new()
                .name(format!("rank {index}"))
                .spawn(move || run(rank, &steps, answer.as_ref()))
                .map_err(|e| Error::runtime(format!("cannot start rank {index}: {e}")))?;
            ranks.steps.push(sender);
            ranks.threads.push(thread);
        }
        Ok(ranks)
    }

    /// Runs one step on all ranks.
    ///
    /// # Errors
    /// Runtime error if a rank ended.
    pub fn step(&mut self, step: Step) -> Result<Vec<RowResult>> {
        let ended = |_| Error::runtime("a rank ended; its message is above".to_owned());
        let step = Arc::new(step);
        for rank in &self.steps {
            rank.send(step.clone()).map_err(|_| ended(()))?;
        }
        self.results.recv().map_err(|_| ended(()))?
    }
}

impl Drop for CpuRanks {
    fn drop(&mut self) {
        self.steps.clear();
        for thread in self.threads.drain(..) {
            // A rank that panicked has printed its message.
            let _ = thread.join();
        }
    }
}

fn run(
    mut rank: CpuRank,
    steps: &Receiver<Arc<Step>>,
    answer: Option<&Sender<Result<Vec<RowResult>>>>,
) {
    let config = rank.config.clone();
    while let Ok(step) = steps.recv() {
        let result = forward(&mut rank, &config, &step);
        if let Some(answer) = answer
            && answer.send(result).is_err()
        {
            return;
        }
    }
}
