//! EAGLE-3 heads: configuration and tensors in the forms that producers write them in
//! (facts/eagle3.md §1).

use log::info;
use serde_json::Value;

use super::config::ModelConfig;
use super::params::Weights;
use crate::error::{Error, Result};
use crate::weights::{
    Checkpoint, Geometry, Manifest, Matrix, Needed, Slice, Source, audit, check_scales,
};

/// Configuration of a head.
#[derive(Debug, Clone, PartialEq)]
pub struct Eagle3Config {
    /// Width of the head's hidden state.
    pub hidden_size: usize,
    /// Width of its MLP.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Tokens that it can draft.
    pub draft_vocab_size: usize,
    /// Epsilon of all its norms.
    pub rms_norm_eps: f32,
    /// Base of its rotary embedding.
    pub rope_theta: f32,
    /// Boundaries of the target's residual stream that it reads (`FeatureSource::Boundaries`).
    pub boundaries: Vec<usize>,
    /// The residual branch carries the normed hidden state.
    pub norm_before_residual: bool,
    /// One norm over the concatenated features, before `fc`.
    pub norm_before_fc: bool,
    /// A norm for each feature, before `fc`.
    pub fc_norm: bool,
    /// The recycled hidden state is the one after the final norm (EAGLE-3.1).
    pub norm_output: bool,
    /// Its attention.
    pub attention: Eagle3AttentionConfig,
}

/// Sizes of a head's attention.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // The fields carry config.json's own names.
pub enum Eagle3AttentionConfig {
    /// Grouped-query attention, half-split rope.
    Gqa { num_key_value_heads: usize, head_dim: usize },
    /// Multi-head latent attention, interleaved rope.
    Mla {
        q_lora_rank: usize,
        kv_lora_rank: usize,
        qk_nope_head_dim: usize,
        qk_rope_head_dim: usize,
        v_head_dim: usize,
    },
}

/// A head's tensors on one rank; R = number of ranks, H = its hidden size.
pub struct Eagle3Params {
    /// `[H, features × target's hidden size]`
    pub fc: Matrix,
    /// `[features × target's hidden size]`, if `norm_before_fc`
    pub input_norm: Option<Vec<f32>>,
    /// `[target's hidden size]` for each feature, if `fc_norm`
    pub fc_norm: Vec<Vec<f32>>,
    /// `[H]`, applied to the embedding
    pub input_layernorm: Vec<f32>,
    /// `[H]`, applied to the feature or the recycled hidden state
    pub hidden_norm: Vec<f32>,
    /// The attention block, whose input is `[2 H]`: embedding, then hidden state.
    pub attention: Eagle3Attention,
    /// `[H]`
    pub post_attention_layernorm: Vec<f32>,
    /// `[intermediate / R, H]`
    pub gate_proj: Matrix,
    /// `[intermediate / R, H]`
    pub up_proj: Matrix,
    /// `[H, intermediate / R]`
    pub down_proj: Matrix,
    /// `[H]`
    pub norm: Vec<f32>,
    /// `[vocab_size, H]` if the head has its own; else the target's is used.
    pub embed_tokens: Option<Matrix>,
    /// `[draft_vocab_size / R, H]` if the head has its own; else the target's is used.
    pub lm_head: Option<Matrix>,
}

/// A head's attention block.
#[allow(missing_docs)] // The fields carry the tensors' own names.
pub enum Eagle3Attention {
    /// `[heads / R × head_dim, 2 H]`, twice `[kv heads / R × head_dim, 2 H]`,
    /// `[H, heads / R × head_dim]`
    Gqa { q_proj: Matrix, k_proj: Matrix, v_proj: Matrix, o_proj: Matrix },
    /// As the target's, with `[2 H]` in.
    Mla {
        q_a_proj: Matrix,
        q_a_layernorm: Vec<f32>,
        q_b_proj: Matrix,
        kv_a_proj_with_mqa: Matrix,
        kv_a_layernorm: Vec<f32>,
        kv_b_proj: Matrix,
        o_proj: Matrix,
    },
}

/// A head that fits its target.
pub struct Eagle3Head {
    /// Its configuration.
    pub config: Eagle3Config,
    weights: Weights,
    /// Target id of each draft id; `None` if the head drafts from the whole vocabulary.
    pub draft_to_target: Option<Vec<u32>>,
}

impl Eagle3Config {
    /// Reads a head's config.json. `rope_theta` overrides the file's.
    ///
    /// # Errors
    /// Input error that names the key.
    pub fn from_json(
        file: &str,
        json: &[u8],
        target: &ModelConfig,
        rope_theta: Option<f32>,
    ) -> Result<Self> {
        let root: Value = serde_json::from_slice(json)
            .map_err(|e| Error::input(format!("{file}: not valid JSON: {e}; fetch it again")))?;
        let reader = Reader { file, root: &root };
        let hidden_size = reader.size("hidden_size")?;
        let heads = reader.size("num_attention_heads")?;
        let mla = reader.get("kv_lora_rank").is_some();
        let attention = if mla {
            Eagle3AttentionConfig::Mla {
                q_lora_rank: reader.size("q_lora_rank")?,
                kv_lora_rank: reader.size("kv_lora_rank")?,
                qk_nope_head_dim: reader.size("qk_nope_head_dim")?,
                qk_rope_head_dim: reader.size("qk_rope_head_dim")?,
                v_head_dim: reader.size("v_head_dim")?,
            }
        } else {
            let num_key_value_heads = reader.size_or("num_key_value_heads", heads)?;
            if !heads.is_multiple_of(num_key_value_heads) {
                return Err(Error::input(format!(
                    "{file}: {heads} query heads cannot share {num_key_value_heads} key heads"
                )));
            }
            let head_dim = reader.size_or("head_dim", hidden_size / heads)?;
            Eagle3AttentionConfig::Gqa { num_key_value_heads, head_dim }
        };
        let rope_width = match attention {
            Eagle3AttentionConfig::Gqa { head_dim, .. } => head_dim,
            Eagle3AttentionConfig::Mla { qk_rope_head_dim, .. } => qk_rope_head_dim,
        };
        if !rope_width.is_multiple_of(2) {
            return Err(Error::input(format!("{file}: rope width {rope_width} is odd")));
        }
        reader.refuse_unsupported()?;
        Ok(Self {
            hidden_size,
            intermediate_size: reader.size("intermediate_size")?,
            num_attention_heads: heads,
            draft_vocab_size: reader.size_or("draft_vocab_size", target.vocab_size)?,
            rms_norm_eps: reader.float("rms_norm_eps")?.unwrap_or(1e-5),
            rope_theta: match rope_theta {
                Some(theta) => theta,
                None => reader.rope_theta()?,
            },
            boundaries: reader.boundaries(target.num_hidden_layers)?,
            // vLLM's default for the speculators format is true, for the others false.
            norm_before_residual: reader
                .flag("norm_before_residual")?
                .unwrap_or(root.get("speculators_config").is_some()),
            norm_before_fc: reader.flag("norm_before_fc")?.unwrap_or(false),
            fc_norm: reader.flag("fc_norm")?.or(reader.flag("use_aux_norm")?).unwrap_or(false),
            norm_output: reader.flag("norm_output")?.unwrap_or(false),
            attention,
        })
    }

    fn geometry(&self, target: &ModelConfig) -> Geometry {
        let mut sizes = std::collections::HashMap::from([
            ("hidden_size", self.hidden_size),
            ("attention_input", 2 * self.hidden_size),
            ("feature_size", target.hidden_size),
            ("fc_input", self.boundaries.len() * target.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("draft_vocab_size", self.draft_vocab_size),
            ("vocab_size", target.vocab_size),
        ]);
        // The sizes of the other kind of attention are 0: its tensors are optional.
        let (gqa, mla) = match self.attention {
            Eagle3AttentionConfig::Gqa { num_key_value_heads, head_dim } => {
                ([num_key_value_heads, head_dim], [0; 5])
            }
            Eagle3AttentionConfig::Mla {
                q_lora_rank,
                kv_lora_rank,
                qk_nope_head_dim,
                qk_rope_head_dim,
                v_head_dim,
            } => (
                [0; 2],
                [q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim],
            ),
        };
        sizes.extend(["num_key_value_heads", "head_dim"].into_iter().zip(gqa));
        let mla_names =
            ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"];
        sizes.extend(mla_names.into_iter().zip(mla));
        let o_proj_input = match self.attention {
            Eagle3AttentionConfig::Gqa { head_dim, .. } => head_dim,
            Eagle3AttentionConfig::Mla { v_head_dim, .. } => v_head_dim,
        };
        sizes.insert("attention_output", self.num_attention_heads * o_proj_input);
        Geometry { sizes, layers: Vec::new() }
    }
}

impl Eagle3Head {
    /// Opens the head in `source` for a target.
    ///
    /// # Errors
    /// Input error that names what does not fit, with both numbers, or is damaged.
    pub fn open(source: Source, target: &ModelConfig, rope_theta: Option<f32>) -> Result<Self> {
        let config_name = source.display("config.json");
        let json = source.require("config.json")?;
        let config = Eagle3Config::from_json(&config_name, &json, target, rope_theta)?;
        let mut checkpoint = Checkpoint::open(source, false)?;
        checkpoint.rename(|name| {
            let name = name.strip_prefix("model.").unwrap_or(name);
            match name.strip_prefix("midlayer.") {
                Some(rest) => format!("layers.0.{rest}"),
                None => name.to_owned(),
            }
        });
        let own_embedding = checkpoint.tensors.contains_key("embed_tokens.weight");
        if config.hidden_size != target.hidden_size && !own_embedding {
            return Err(Error::input(format!(
                "{config_name}: hidden_size {} does not fit the target's {}, and the head has no \
                 embed_tokens of its own; use a head that was made for this model",
                config.hidden_size, target.hidden_size
            )));
        }
        let manifest = Manifest::eagle3()?;
        let audit = audit(&checkpoint, &manifest, &config.geometry(target))?;
        audit.refuse_errors()?;
        // A tensor that nobody reads is a variant that nobody knows: its drafts would be noise.
        if let Some(unknown) = audit.problems.iter().find(|p| p.kind == "unknown_tensors") {
            return Err(Error::input(unknown.line()));
        }
        if let Some(bad) = check_scales(&checkpoint, &manifest, &audit, &|_, _| {})?.first() {
            return Err(Error::input(bad.line()));
        }
        let draft_to_target = draft_to_target(&checkpoint, &config, target)?;
        let weights = Weights::new(checkpoint, manifest, audit)?;
        if !weights.has("lm_head.weight") && config.draft_vocab_size != target.vocab_size {
            return Err(Error::input(format!(
                "{config_name}: draft_vocab_size {} without an lm_head of that size, the target's \
                 has {}",
                config.draft_vocab_size, target.vocab_size
            )));
        }
        let head = Self { config, weights, draft_to_target };
        head.announce(&config_name);
        Ok(head)
    }

    /// Both spellings of the features, since mixing them up costs acceptance and nothing else.
    fn announce(&self, file: &str) {
        let outputs: Vec<String> =
            self.config.boundaries.iter().map(|k| (*k as isize - 1).to_string()).collect();
        info!(
            "{file}: features enter layers {:?} (are outputs of layers [{}]); rope theta {}, \
             norm_before_residual {}, norm_before_fc {}, fc_norm {}, norm_output {}",
            self.config.boundaries,
            outputs.join(", "),
            self.config.rope_theta,
            self.config.norm_before_residual,
            self.config.norm_before_fc,
            self.config.fc_norm,
            self.config.norm_output
        );
    }

    /// What a load reads of the head.
    pub fn needed(&self) -> Needed<'_> {
        self.weights.needed(1)
    }

    /// The head's tensors on a rank.
    ///
    /// # Errors
    /// Input error if a tensor that the config asks for is missing or the ranks cannot share it.
    pub fn params(&self, target: &ModelConfig, rank: Slice) -> Result<Eagle3Params> {
        self.weights.check_ranks(&self.config.geometry(target), rank.of)?;
        let matrix = |name: &str| self.weights.matrix(name, rank);
        let vector = |name: &str| self.weights.vector(name, rank);
        let attention = |name: &str| format!("layers.0.self_attn.{name}.weight");
        let optional = |name: &str| -> Result<Option<Matrix>> {
            self.weights.has(name).then(|| self.weights.matrix(name, rank)).transpose()
        };
        Ok(Eagle3Params {
            fc: matrix("fc.weight")?,
            input_norm: match self.config.norm_before_fc {
                true => Some(vector("input_norm.weight")?),
                false => None,
            },
            fc_norm: match self.config.fc_norm {
                true => (0..self.config.boundaries.len())
                    .map(|index| vector(&format!("fc_norm.{index}.weight")))
                    .collect::<Result<Vec<Vec<f32>>>>()?,
                false => Vec::new(),
            },
            input_layernorm: vector("layers.0.input_layernorm.weight")?,
            hidden_norm: vector("layers.0.hidden_norm.weight")?,
            attention: match self.config.attention {
                Eagle3AttentionConfig::Gqa { .. } => Eagle3Attention::Gqa {
                    q_proj: matrix(&attention("q_proj"))?,
                    k_proj: matrix(&attention("k_proj"))?,
                    v_proj: matrix(&attention("v_proj"))?,
                    o_proj: matrix(&attention("o_proj"))?,
                },
                Eagle3AttentionConfig::Mla { .. } => Eagle3Attention::Mla {
                    q_a_proj: matrix(&attention("q_a_proj"))?,
                    q_a_layernorm: vector(&attention("q_a_layernorm"))?,
                    q_b_proj: matrix(&attention("q_b_proj"))?,
                    kv_a_proj_with_mqa: matrix(&attention("kv_a_proj_with_mqa"))?,
                    kv_a_layernorm: vector(&attention("kv_a_layernorm"))?,
                    kv_b_proj: matrix(&attention("kv_b_proj"))?,
                    o_proj: matrix(&attention("o_proj"))?,
                },
            },
            post_attention_layernorm: vector("layers.0.post_attention_layernorm.weight")?,
            gate_proj: matrix("layers.0.mlp.gate_proj.weight")?,
            up_proj: matrix("layers.0.mlp.up_proj.weight")?,
            down_proj: matrix("layers.0.mlp.down_proj.weight")?,
            norm: vector("norm.weight")?,
            embed_tokens: optional("embed_tokens.weight")?,
            lm_head: optional("lm_head.weight")?,
        })
    }
}

/// d2t holds offsets: the target's id is the draft id plus its entry (facts/eagle3.md §1.4).
fn draft_to_target(
    checkpoint: &Checkpoint,
    config: &Eagle3Config,
    target: &ModelConfig,
) -> Result<Option<Vec<u32>>> {
    let Some(tensor) = checkpoint.tensors.get("d2t") else {
        if config.draft_vocab_size != target.vocab_size {
            return Err(Error::input(format!(
                "{}: no d2t, but draft_vocab_size {} is not the target's vocabulary of {}",
                checkpoint.source.display(""),
                config.draft_vocab_size,
                target.vocab_size
            )));
        }
        return Ok(None);
    };
    let bytes = checkpoint.bytes(tensor);
    let offsets = bytes.as_chunks::<8>().0.iter().map(|offset| i64::from_le_bytes(*offset));
    let mut ids: Vec<u32> = Vec::with_capacity(config.draft_vocab_size);
    for (draft_id, offset) in (0i64..).zip(offsets) {
        let id = draft_id.saturating_add(offset);
        let rising = ids.last().is_none_or(|last| i64::from(*last) < id);
        if !rising || id < 0 || id >= target.vocab_size as i64 {
            return Err(Error::input(format!(
                "{}: d2t[{draft_id}] = {offset} gives target id {id}, expected rising ids below {} \
                 (d2t holds offsets)",
                checkpoint.file_of(tensor),
                target.vocab_size
            )));
        }
        ids.push(id as u32);
    }
    Ok(Some(ids))
}

/// Look-ups in the places where producers put a key.
struct Reader<'a> {
    file: &'a str,
    root: &'a Value,
}

impl Reader<'_> {
    /// At the top, in `eagle_config`, or in speculators' `transformer_layer_config`.
    fn get(&self, key: &str) -> Option<&Value> {
        let places = [
            Some(self.root),
            self.root.get("eagle_config"),
            self.root.get("transformer_layer_config"),
        ];
        places.into_iter().flatten().filter_map(|place| place.get(key)).find(|v| !v.is_null())
    }

    fn wrong(&self, key: &str, expected: &str, found: &Value) -> Error {
        Error::input(format!("{}: {key}: expected {expected}, found {found}", self.file))
    }

    fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => match value.as_u64() {
                Some(size) if (1..=16_000_000).contains(&size) => Ok(size as usize),
                _ => Err(self.wrong(key, "a whole number from 1 to 16 million", value)),
            },
        }
    }

    fn size(&self, key: &str) -> Result<usize> {
        match self.size_or(key, 0)? {
            0 => Err(Error::input(format!(
                "{}: {key} is missing; an EAGLE-3 config.json must give it",
                self.file
            ))),
            size => Ok(size),
        }
    }

    fn float(&self, key: &str) -> Result<Option<f32>> {
        self.get(key).map(|value| self.positive(key, value)).transpose()
    }

    fn positive(&self, key: &str, value: &Value) -> Result<f32> {
        match value.as_f64() {
            Some(number) if number > 0.0 && (number as f32).is_finite() => Ok(number as f32),
            _ => Err(self.wrong(key, "a positive number", value)),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(value) => Err(self.wrong(key, "true or false", value)),
        }
    }

    fn rope_theta(&self) -> Result<f32> {
        let nested = |key: &str| self.get(key).and_then(|rope| rope.get("rope_theta"));
        let theta = nested("rope_parameters").or(self.get("rope_theta"));
        match theta.or(nested("rope_scaling")) {
            Some(theta) => self.positive("rope_theta", theta),
            None => Err(Error::input(format!(
                "{}: no rope_theta; give the one that the head was trained with as \
                 --draft-rope-theta (often 10000)",
                self.file
            ))),
        }
    }

    /// Switches that would need code that is not here.
    fn refuse_unsupported(&self) -> Result<()> {
        for key in ["attention_bias", "qkv_bias", "mlp_bias", "bias"] {
            if self.flag(key)? == Some(true) {
                return Err(self.wrong(key, "false", &Value::Bool(true)));
            }
        }
        for place in ["rope_scaling", "rope_parameters"] {
            for key in ["rope_type", "type"] {
                let kind = self.get(place).and_then(|rope| rope.get(key));
                if let Some(kind) = kind.filter(|kind| !kind.is_null() && **kind != "default") {
                    return Err(self.wrong(&format!("{place}.{key}"), "\"default\"", kind));
                }
            }
        }
        Ok(())
    }

    /// The features as boundaries of the residual stream (facts/eagle3.md §1.7): a first id of 1
    /// means outputs of layers, which are the boundaries one further, unless an id is the number of
    /// layers, which only a boundary can be.
    fn boundaries(&self, layers: usize) -> Result<Vec<usize>> {
        const KEY: &str = "eagle_aux_hidden_state_layer_ids";
        let Some(value) = self.get(KEY) else {
            if layers < 7 {
                return Err(Error::input(format!(
                    "{}: no {KEY}, and the usual three layers are not distinct in a target of \
                     {layers}",
                    self.file
                )));
            }
            return Ok(vec![2, layers / 2, layers - 3]);
        };
        let ids: Option<Vec<usize>> = value
            .as_array()
            .and_then(|ids| ids.iter().map(|id| id.as_u64().map(|id| id as usize)).collect());
        let ids =
            ids.filter(|ids| ids.len() >= 3 && ids.iter().all(|id| *id <= layers)).ok_or_else(
                || self.wrong(KEY, &format!("three or more layers of at most {layers}"), value),
            )?;
        if let Some(count) = self.get("num_aux_hidden_states").and_then(Value::as_u64)
            && count as usize != ids.len()
        {
            return Err(Error::input(format!(
                "{}: num_aux_hidden_states {count} but {KEY} has {}",
                self.file,
                ids.len()
            )));
        }
        let outputs = ids[0] == 1 && !ids.contains(&layers);
        Ok(if outputs { ids.iter().map(|id| id + 1).collect() } else { ids })
    }
}
