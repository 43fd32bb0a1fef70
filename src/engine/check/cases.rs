//! The stages as they are checked: random inputs, and what the CPU backend makes of them.

use std::sync::Arc;

use super::compare::Wanted;
use super::random::{Random, half};
use crate::cpu::CpuRank;
use crate::cuda::{Buffer, Route};
use crate::error::Result;
use crate::model::{MlpParams, ModelConfig, Norm, Output, Row, Stages, Step};

/// Values of each row.
pub type Values = Vec<Vec<f32>>;
/// A stage, on either backend.
pub type Run = Box<dyn Fn(&mut dyn Stages) -> Result<()>>;

/// A stage with inputs, and what the CPU backend made of them.
pub struct Case {
    pub stage: &'static str,
    /// Which of several ways the stage is run in; empty where there is one.
    pub way: &'static str,
    pub layer: Option<usize>,
    pub rows: Vec<Row>,
    /// Some row sees more than `index_topk` positions.
    pub long: bool,
    /// Caches with the entries of each sequence.
    pub caches: Vec<(Buffer, Vec<Values>)>,
    pub inputs: Vec<(Buffer, Values)>,
    /// The rows' experts, for stages that read them.
    pub routes: Option<Vec<Route>>,
    /// Inputs that the stage overwrites.
    pub changed: Vec<(Buffer, Values)>,
    /// Buffers that the stage writes and only it reads.
    pub scratch: Vec<Buffer>,
    pub wanted: Vec<Wanted>,
    pub run: Run,
}

/// What the cases are made for.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Rows of a step.
    pub rows: usize,
    /// Tokens of a sequence, and sequences.
    pub context: usize,
    pub parallel: usize,
    /// Attention heads of the rank.
    pub heads: usize,
    /// Ids of the rank that can be an arg-max.
    pub vocab_limit: usize,
    /// Parts that the device sums a row's attention in, and positions of a part.
    pub splits: usize,
    pub split: usize,
}

/// Makes cases.
pub struct Cases {
    config: Arc<ModelConfig>,
    cpu: CpuRank,
    shape: Shape,
    random: Random,
}

/// How a stage is run that needs nothing but its layer.
fn of_layer(layer: usize, stage: fn(&mut dyn Stages, usize) -> Result<()>) -> Run {
    Box::new(move |stages| stage(stages, layer))
}

/// Rows of `width` values.
fn by_row(values: &[f32], width: usize) -> Values {
    values.chunks_exact(width).map(<[f32]>::to_vec).collect()
}

fn visible(row: &Row) -> usize {
    row.position + 1 - row.first
}

impl Cases {
    pub fn new(config: &Arc<ModelConfig>, cpu: CpuRank, shape: Shape) -> Self {
        Self { config: config.clone(), cpu, shape, random: Random::new(0x7A10) }
    }

    /// Makes all cases, with those stages of layers that `layers` have; `visit` gets each.
    ///
    /// # Errors
    /// What the CPU backend or `visit` returns.
    pub fn each(
        &mut self,
        layers: &[usize],
        mut visit: impl FnMut(Case) -> Result<()>,
    ) -> Result<()> {
        visit(self.embed()?)?;
        let longest = self.shape.context > self.config.index_topk;
        for &layer in layers {
            let shape = self.config.layers[layer];
            visit(self.reduce_norm(Norm::Input(layer), Some(layer))?)?;
            visit(self.reduce_norm(Norm::PostAttention(layer), Some(layer))?)?;
            visit(self.project_latents(layer)?)?;
            visit(self.project_queries(layer)?)?;
            if shape.indexer && longest {
                visit(self.score_keys(layer)?)?;
                visit(self.select_keys(layer)?)?;
            }
            visit(self.attend(layer, false)?)?;
            if longest {
                visit(self.attend(layer, true)?)?;
            }
            visit(self.project_values(layer)?)?;
            visit(self.project_output(layer)?)?;
            if shape.moe {
                visit(self.route(layer)?)?;
                visit(self.expert_gate_up(layer)?)?;
                visit(self.expert_down(layer)?)?;
            } else {
                visit(self.dense_gate_up(layer)?)?;
                visit(self.dense_down(layer)?)?;
            }
        }
        visit(self.reduce_norm(Norm::Final, None)?)?;
        visit(self.head()?)
    }

    /// Rows at places of their own: the last position, the first one, the last before a list is
    /// needed (or the first behind it), one whose sequence begins later, others anywhere.
    fn rows(&mut self, long: bool) -> Vec<Row> {
        let (top_k, context) = (self.config.index_topk, self.shape.context);
        let limit = if long { context } else { context.min(top_k) };
        let mut rows: Vec<Row> = Vec::new();
        for index in 0..self.shape.rows {
            let sequence = index % self.shape.parallel;
            let mut position = match index % 8 {
                0 => limit - 1,
                1 => 0,
                2 => top_k.min(limit - 1),
                3 => top_k.min(limit) - 1,
                4 if long => top_k + self.random.below(limit - top_k),
                _ => self.random.below(limit),
            };
            let taken = |at| rows.iter().any(|row| (row.sequence, row.position) == (sequence, at));
            while taken(position) {
                position = (position + 1) % limit;
            }
            let first = if index % 8 == 5 { position / 3 } else { 0 };
            let token = self.random.below(self.config.vocab_size) as u32;
            rows.push(Row { sequence, first, position, token, output: Output::Logits });
        }
        rows
    }

    /// A case without inputs and outputs. The CPU has its rows, as `embed` leaves them.
    fn begin(&mut self, stage: &'static str, layer: Option<usize>, run: Run) -> Result<Case> {
        let long = self.shape.context > self.config.index_topk;
        self.begin_at(stage, layer, long, run)
    }

    fn begin_at(
        &mut self,
        stage: &'static str,
        layer: Option<usize>,
        long: bool,
        run: Run,
    ) -> Result<Case> {
        let rows = self.rows(long);
        self.cpu.embed(&Step { rows: rows.clone() })?;
        Ok(Case {
            stage,
            way: "",
            layer,
            rows,
            long,
            caches: Vec::new(),
            inputs: Vec::new(),
            routes: None,
            changed: Vec::new(),
            scratch: Vec::new(),
            wanted: Vec::new(),
            run,
        })
    }

    fn halves(&mut self, width: usize) -> Values {
        self.random.halves(self.shape.rows, width)
    }

    fn singles(&mut self, width: usize) -> Values {
        self.random.singles(self.shape.rows, width)
    }

    /// Activations as the device holds them: f16, times 1 / 64.
    fn activations(&mut self, width: usize) -> Values {
        let mut values = self.singles(width);
        values.iter_mut().flatten().for_each(|value| *value = half(*value / 64.0) * 64.0);
        values
    }

    fn latent_width(&self) -> usize {
        self.config.kv_lora_rank + self.config.qk_rope_head_dim
    }

    /// Random entries at all positions of `layer`; `keys`: of the indexer's cache.
    fn fill_cache(&mut self, layer: usize, keys: bool) -> (Buffer, Vec<Values>) {
        let width = if keys { self.config.index_head_dim } else { self.latent_width() };
        let mut fill = |sequence: usize| {
            let entries = self.random.halves(self.shape.context, width);
            let cache = self.cpu.cache_mut(sequence, layer);
            *if keys { &mut cache.index_keys } else { &mut cache.latents } = entries.concat();
            entries
        };
        let sequences = (0..self.shape.parallel).map(&mut fill).collect();
        (if keys { Buffer::KeyCache(layer) } else { Buffer::LatentCache(layer) }, sequences)
    }

    fn embed(&mut self) -> Result<Case> {
        let mut case = self.begin("embed", None, Box::new(|_| Ok(())))?;
        let hidden = self.config.hidden_size;
        // The device's table is BF16.
        let buffers = self.cpu.buffers();
        let table = buffers.partial.iter().map(|value| half::bf16::from_f32(*value).to_f32());
        let table: Vec<f32> = table.collect();
        case.wanted = vec![
            Wanted::Values(Buffer::Partial, by_row(&table, hidden)),
            Wanted::Values(Buffer::Residual, by_row(&buffers.residual, hidden)),
        ];
        let step = Step { rows: case.rows.clone() };
        case.run = Box::new(move |stages| stages.embed(&step));
        Ok(case)
    }

    fn reduce_norm(&mut self, norm: Norm, layer: Option<usize>) -> Result<Case> {
        let run: Run = Box::new(move |stages| stages.reduce_norm(norm));
        let mut case = self.begin("reduce_norm", layer, run)?;
        let hidden = self.config.hidden_size;
        let (partial, residual) = (self.singles(hidden), self.singles(hidden));
        self.cpu.buffers_mut().partial = partial.concat();
        self.cpu.buffers_mut().residual = residual.concat();
        (case.run)(&mut self.cpu)?;
        let buffers = self.cpu.buffers();
        case.inputs = vec![(Buffer::Partial, partial)];
        case.changed = vec![(Buffer::Residual, residual)];
        case.wanted = vec![
            Wanted::Values(Buffer::Residual, by_row(&buffers.residual, hidden)),
            Wanted::Values(Buffer::Normed, by_row(&buffers.normed, hidden)),
        ];
        Ok(case)
    }

    /// Begins a case whose input is the normed residual.
    fn begin_normed(&mut self, stage: &'static str, layer: usize, run: Run) -> Result<Case> {
        let mut case = self.begin(stage, Some(layer), run)?;
        let normed = self.halves(self.config.hidden_size);
        self.cpu.buffers_mut().normed = normed.concat();
        (case.run)(&mut self.cpu)?;
        case.inputs = vec![(Buffer::Normed, normed)];
        Ok(case)
    }

    fn project_latents(&mut self, layer: usize) -> Result<Case> {
        let run = of_layer(layer, |stages, layer| stages.project_latents(layer));
        let mut case = self.begin_normed("project_latents", layer, run)?;
        let (config, cpu, width) = (&self.config, &self.cpu, self.latent_width());
        let latents = case.rows.iter().map(|row| {
            let latents = &cpu.cache(row.sequence, layer).latents;
            latents[row.position * width..][..width].to_vec()
        });
        case.wanted = vec![
            Wanted::Values(
                Buffer::QueryLatents,
                by_row(&cpu.buffers().query_latents, config.q_lora_rank),
            ),
            Wanted::Values(Buffer::LatentCache(layer), latents.collect()),
        ];
        if config.layers[layer].indexer {
            let dim = config.index_head_dim;
            let keys = case.rows.iter().map(|row| {
                let keys = &cpu.cache(row.sequence, layer).index_keys;
                keys[row.position * dim..][..dim].to_vec()
            });
            let weights = by_row(&cpu.buffers().index_weights, config.index_n_heads);
            case.wanted.push(Wanted::Values(Buffer::KeyCache(layer), keys.collect()));
            case.wanted.push(Wanted::Values(Buffer::IndexWeights, weights));
        }
        case.scratch = vec![Buffer::Latents(layer)];
        Ok(case)
    }

    fn project_queries(&mut self, layer: usize) -> Result<Case> {
        let run = of_layer(layer, |stages, layer| stages.project_queries(layer));
        let mut case = self.begin("project_queries", Some(layer), run)?;
        let latents = self.halves(self.config.q_lora_rank);
        self.cpu.buffers_mut().query_latents = latents.concat();
        (case.run)(&mut self.cpu)?;
        let (config, buffers) = (&self.config, self.cpu.buffers());
        let queries = by_row(&buffers.queries, self.shape.heads * self.latent_width());
        case.inputs = vec![(Buffer::QueryLatents, latents)];
        case.wanted = vec![Wanted::Values(Buffer::Queries, queries)];
        // The device computes them only where keys are scored.
        if config.layers[layer].indexer && case.long {
            let width = config.index_n_heads * config.index_head_dim;
            let queries = by_row(&buffers.index_queries, width);
            case.wanted.push(Wanted::Values(Buffer::IndexQueries, queries));
        }
        case.scratch = vec![Buffer::WithoutRope];
        Ok(case)
    }

    fn score_keys(&mut self, layer: usize) -> Result<Case> {
        let run = of_layer(layer, |stages, layer| stages.score_keys(layer));
        let mut case = self.begin("score_keys", Some(layer), run)?;
        let (heads, dim) = (self.config.index_n_heads, self.config.index_head_dim);
        let (queries, weights) = (self.halves(heads * dim), self.singles(heads));
        case.caches = vec![self.fill_cache(layer, true)];
        self.cpu.buffers_mut().index_queries = queries.concat();
        self.cpu.buffers_mut().index_weights = weights.concat();
        (case.run)(&mut self.cpu)?;
        let scores = self.cpu.buffers().scores.clone();
        case.inputs = vec![(Buffer::IndexQueries, queries), (Buffer::IndexWeights, weights)];
        case.wanted = vec![Wanted::Values(Buffer::Scores, scores)];
        Ok(case)
    }

    /// Scores of the rows that see more than `index_topk` positions, with many equal ones.
    fn scores(&mut self, rows: &[Row]) -> Values {
        let top_k = self.config.index_topk;
        let mut of_row = |row: &Row| match visible(row) > top_k {
            // Multiples of 1 / 64, of which a few hundred occur.
            true => {
                (0..visible(row)).map(|_| (self.random.normal() * 64.0).round() / 64.0).collect()
            }
            false => Vec::new(),
        };
        rows.iter().map(&mut of_row).collect()
    }

    /// The CPU's lists of those rows that have one on the device.
    fn lists(&self, rows: &[Row]) -> Values {
        let list = |(row, selected): (&Row, &Vec<usize>)| match visible(row) {
            seen if seen > self.config.index_topk => selected.iter().map(|t| *t as f32).collect(),
            _ => Vec::new(),
        };
        rows.iter().zip(&self.cpu.buffers().selected).map(list).collect()
    }

    fn select_keys(&mut self, layer: usize) -> Result<Case> {
        let run = of_layer(layer, |stages, layer| stages.select_keys(layer));
        let mut case = self.begin("select_keys", Some(layer), run)?;
        let scores = self.scores(&case.rows);
        self.cpu.buffers_mut().scores.clone_from(&scores);
        (case.run)(&mut self.cpu)?;
        case.inputs = vec![(Buffer::Scores, scores)];
        case.wanted = vec![Wanted::Values(Buffer::Selected, self.lists(&case.rows))];
        Ok(case)
    }

    /// The device leaves parts, which the next stage merges: both are run, and the result of the
    /// merging is what `attend` leaves on the CPU.
    fn attend(&mut self, layer: usize, long: bool) -> Result<Case> {
        let run = of_layer(layer, |stages, layer| {
            stages.attend(layer)?;
            stages.project_values(layer)
        });
        let mut case = self.begin_at("attend", Some(layer), long, run)?;
        case.way = if long { "long" } else { "short" };
        let heads = self.shape.heads;
        let queries = self.halves(heads * self.latent_width());
        let scores = self.scores(&case.rows);
        case.caches = vec![self.fill_cache(layer, false)];
        self.cpu.buffers_mut().scores = scores;
        self.cpu.select_keys(layer)?;
        self.cpu.buffers_mut().queries = queries.concat();
        (case.run)(&mut self.cpu)?;
        let attended = by_row(&self.cpu.buffers().attended, heads * self.config.kv_lora_rank);
        case.inputs = vec![(Buffer::Queries, queries)];
        if long {
            case.inputs.push((Buffer::Selected, self.lists(&case.rows)));
        }
        case.scratch = vec![Buffer::Parts, Buffer::Bounds, Buffer::Values];
        case.wanted = vec![Wanted::Values(Buffer::Attended, attended)];
        Ok(case)
    }

    /// Its input is random parts and their bounds, merged here for the CPU.
    fn project_values(&mut self, layer: usize) -> Result<Case> {
        let run = of_layer(layer, |stages, layer| stages.project_values(layer));
        let mut case = self.begin("project_values", Some(layer), run)?;
        let Shape { rows, heads, splits, split, .. } = self.shape;
        let latent = self.config.kv_lora_rank;
        let parts = self.singles(splits * heads * latent);
        let mut bound = || [self.random.normal(), 1.0 + 63.0 * self.random.uniform()];
        let bounds: Values =
            (0..rows).map(|_| (0..splits * heads).flat_map(|_| bound()).collect()).collect();
        let attended: Values = (0..rows)
            .map(|r| {
                let listed = visible(&case.rows[r]).min(self.config.index_topk);
                merge(&parts[r], &bounds[r], listed.div_ceil(split), (heads, latent))
            })
            .collect();
        self.cpu.buffers_mut().attended = attended.concat();
        (case.run)(&mut self.cpu)?;
        let values = by_row(&self.cpu.buffers().values, heads * self.config.v_head_dim);
        case.inputs = vec![(Buffer::Parts, parts), (Buffer::Bounds, bounds)];
        case.wanted = vec![
            Wanted::Values(Buffer::Attended, attended),
            Wanted::Values(Buffer::Values, values),
        ];
        Ok(case)
    }

    fn project_output(&mut self, layer: usize) -> Result<Case> {
        let run = of_layer(layer, |stages, layer| stages.project_output(layer));
        let mut case = self.begin("project_output", Some(layer), run)?;
        let values = self.halves(self.shape.heads * self.config.v_head_dim);
        self.cpu.buffers_mut().values = values.concat();
        (case.run)(&mut self.cpu)?;
        case.inputs = vec![(Buffer::Values, values)];
        case.wanted = vec![self.partial()];
        Ok(case)
    }

    fn partial(&self) -> Wanted {
        let partial = by_row(&self.cpu.buffers().partial, self.config.hidden_size);
        Wanted::Values(Buffer::Partial, partial)
    }

    /// Width of the shared expert, or of a dense layer's MLP.
    fn mlp_width(&self, layer: usize) -> usize {
        match &self.cpu.params().layers[layer].mlp {
            MlpParams::Dense(dense) => dense.gate_proj.rows(),
            MlpParams::Moe(moe) => moe.shared_experts.gate_proj.rows(),
        }
    }

    fn expert_width(&self, layer: usize) -> usize {
        match &self.cpu.params().layers[layer].mlp {
            MlpParams::Dense(_) => 0,
            MlpParams::Moe(moe) => moe.experts[0].gate_proj.rows(),
        }
    }

    fn mlp_activations(&self, layer: usize) -> Wanted {
        let activations = &self.cpu.buffers().mlp_activations;
        Wanted::Values(Buffer::MlpActivations(layer), by_row(activations, self.mlp_width(layer)))
    }

    fn route(&mut self, layer: usize) -> Result<Case> {
        let run = of_layer(layer, |stages, layer| stages.route(layer));
        let mut case = self.begin_normed("route", layer, run)?;
        let routes = self.cpu.buffers().routes.clone();
        let choices = case.inputs[0].1.iter().map(|row| self.choices(layer, row)).collect();
        let used = self.config.num_experts_per_tok;
        case.wanted = vec![Wanted::Routes { routes, choices, used }, self.mlp_activations(layer)];
        case.scratch = vec![Buffer::RouterLogits, Buffer::SharedSums(layer)];
        Ok(case)
    }

    /// What each expert is chosen by: sigmoid(router logit) + bias, in f64.
    fn choices(&self, layer: usize, normed: &[f32]) -> Vec<f64> {
        let MlpParams::Moe(moe) = &self.cpu.params().layers[layer].mlp else {
            return Vec::new();
        };
        let mut weights = vec![0.0; normed.len()];
        let biases = moe.e_score_correction_bias.iter().enumerate();
        let choice = |(expert, bias): (usize, &f32)| {
            moe.gate.decode(expert..expert + 1, &mut weights);
            let products = weights.iter().zip(normed).map(|(w, x)| f64::from(*w) * f64::from(*x));
            1.0 / (1.0 + (-products.sum::<f64>()).exp()) + f64::from(*bias)
        };
        biases.map(choice).collect()
    }

    /// Random experts and weights for each row.
    fn routes(&mut self) -> Vec<Route> {
        let (experts, used) = (self.config.n_routed_experts, self.config.num_experts_per_tok);
        let mut route = |_| {
            let chosen = self.random.choose(used, experts);
            chosen.into_iter().map(|expert| (expert, self.random.uniform())).collect()
        };
        (0..self.shape.rows).map(&mut route).collect()
    }

    fn expert_gate_up(&mut self, layer: usize) -> Result<Case> {
        let run = of_layer(layer, |stages, layer| stages.expert_gate_up(layer));
        let mut case = self.begin("expert_gate_up", Some(layer), run)?;
        let (routes, normed) = (self.routes(), self.halves(self.config.hidden_size));
        self.cpu.buffers_mut().routes.clone_from(&routes);
        self.cpu.buffers_mut().normed = normed.concat();
        (case.run)(&mut self.cpu)?;
        let activations = self.cpu.buffers().expert_activations.iter().map(|row| row.concat());
        case.wanted = vec![Wanted::Values(Buffer::Activations(layer), activations.collect())];
        case.inputs = vec![(Buffer::Normed, normed)];
        case.routes = Some(routes);
        Ok(case)
    }

    fn expert_down(&mut self, layer: usize) -> Result<Case> {
        let run = of_layer(layer, |stages, layer| stages.expert_down(layer));
        let mut case = self.begin("expert_down", Some(layer), run)?;
        let (width, used) = (self.expert_width(layer), self.config.num_experts_per_tok);
        let routes = self.routes();
        let experts = self.activations(used * width);
        let shared = self.activations(self.mlp_width(layer));
        let buffers = self.cpu.buffers_mut();
        buffers.routes.clone_from(&routes);
        buffers.expert_activations = experts.iter().map(|row| by_row(row, width)).collect();
        buffers.mlp_activations = shared.concat();
        (case.run)(&mut self.cpu)?;
        case.wanted = vec![self.partial()];
        case.inputs =
            vec![(Buffer::Activations(layer), experts), (Buffer::MlpActivations(layer), shared)];
        case.routes = Some(routes);
        Ok(case)
    }

    fn dense_gate_up(&mut self, layer: usize) -> Result<Case> {
        let run = of_layer(layer, |stages, layer| stages.dense_gate_up(layer));
        let mut case = self.begin_normed("dense_gate_up", layer, run)?;
        case.wanted = vec![self.mlp_activations(layer)];
        Ok(case)
    }

    fn dense_down(&mut self, layer: usize) -> Result<Case> {
        let run = of_layer(layer, |stages, layer| stages.dense_down(layer));
        let mut case = self.begin("dense_down", Some(layer), run)?;
        let activations = self.activations(self.mlp_width(layer));
        self.cpu.buffers_mut().mlp_activations = activations.concat();
        (case.run)(&mut self.cpu)?;
        case.wanted = vec![self.partial()];
        case.inputs = vec![(Buffer::MlpActivations(layer), activations)];
        Ok(case)
    }

    fn head(&mut self) -> Result<Case> {
        let run: Run = Box::new(|stages| stages.head().map(drop));
        let mut case = self.begin("head", None, run)?;
        let normed = self.halves(self.config.hidden_size);
        self.cpu.buffers_mut().normed = normed.concat();
        let results = self.cpu.head()?;
        let logits: Values = results.into_iter().map(|result| result.logits).collect();
        case.inputs = vec![(Buffer::Normed, normed)];
        case.wanted = vec![
            Wanted::Values(Buffer::Logits, logits.clone()),
            Wanted::Best { logits, limit: self.shape.vocab_limit },
        ];
        Ok(case)
    }
}

/// A row's attention from its first `splits` parts: Σ e^m · part / Σ e^m · sum, as an f16, with the
/// bounds (m, sum) of each part and head.
pub fn merge(
    parts: &[f32],
    bounds: &[f32],
    splits: usize,
    (heads, latent): (usize, usize),
) -> Vec<f32> {
    let value = |head: usize, d: usize| {
        let (mut above, mut below) = (0.0, 0.0);
        for split in 0..splits {
            let at = split * heads + head;
            let weight = f64::from(bounds[2 * at]).exp();
            above += weight * f64::from(parts[at * latent + d]);
            below += weight * f64::from(bounds[2 * at + 1]);
        }
        half((above / below) as f32)
    };
    (0..heads)
        .flat_map(|head| (0..latent).map(move |d| (head, d)))
        .map(|(h, d)| value(h, d))
        .collect()
}
