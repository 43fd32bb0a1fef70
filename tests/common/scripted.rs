//! A model that says what a script tells it, at the pace that it tells: tests of what stands in front
//! of a model need no real one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use talon::error::Result;
use talon::model::{Backend, Draft, Drafted, Output, RowResult, Step};

/// What to answer to a prompt.
pub struct Script {
    pub prompt: Vec<u32>,
    pub output: Vec<u32>,
    /// Panics instead of the token at this place.
    pub panics_at: Option<usize>,
}

/// Scripts, which may be added while the backend runs.
#[derive(Clone, Default)]
pub struct Scripts(Arc<Mutex<Vec<Script>>>);

impl Scripts {
    pub fn add(&self, script: Script) {
        self.0.lock().expect("the scripts").push(script);
    }

    /// The token after this history.
    fn next(&self, history: &[u32]) -> u32 {
        let scripts = self.0.lock().expect("the scripts");
        let fitting = |script: &&Script| history.starts_with(&script.prompt);
        let Some(script) = scripts.iter().filter(fitting).max_by_key(|s| s.prompt.len()) else {
            return 0;
        };
        let place = history.len() - script.prompt.len();
        assert!(script.panics_at.is_none_or(|at| at != place), "the script says so");
        script.output.get(place).copied().unwrap_or(0)
    }
}

/// The backend. It keeps features of any position, so drafts are as long as asked for.
pub struct Scripted {
    pub scripts: Scripts,
    pub vocabulary: usize,
    /// Tokens by slot.
    pub tokens: HashMap<usize, Vec<u32>>,
    /// Drafts are right up to the place that this counts through, so that steps of all lengths come.
    pub drafts: usize,
}

impl Scripted {
    pub fn new(scripts: Scripts, vocabulary: usize) -> Self {
        Self { scripts, vocabulary, tokens: HashMap::new(), drafts: 0 }
    }
}

impl Backend for Scripted {
    fn step(&mut self, step: Step) -> Result<Vec<RowResult>> {
        let mut results = Vec::new();
        for (index, row) in step.rows.iter().enumerate() {
            let tokens = self.tokens.entry(row.sequence).or_default();
            tokens.truncate(row.position);
            tokens.push(row.token);
            assert_eq!(tokens.len(), row.position + 1, "a row before the cache was filled");
            if row.output == Output::None {
                continue;
            }
            let argmax = self.scripts.next(tokens);
            let mut logits = Vec::new();
            if row.output == Output::Logits {
                logits = vec![0.0; self.vocabulary];
                logits[argmax as usize] = 50.0;
            }
            results.push(RowResult { row: index, argmax, logits });
        }
        Ok(results)
    }

    fn draft(&mut self, draft: Draft) -> Result<Vec<Drafted>> {
        let mut history = self.tokens[&draft.sequence][..=draft.position].to_vec();
        history.extend(&draft.tokens);
        self.drafts += 1;
        let right = self.drafts % (draft.count + 1);
        let mut drafted = Vec::new();
        for place in 0..draft.count {
            let token = self.scripts.next(&history);
            let token = if place < right { token } else { token ^ 1 };
            history.push(token);
            drafted.push(Drafted { token, probability: 0.9, logits: Vec::new() });
        }
        Ok(drafted)
    }

    fn feature_positions(&self) -> usize {
        1 << 20
    }
}
