//! `config.json` of GLM-5, 5.1, 5.2 and 5.3 (facts/glm5.md §1).
//!
//! Keys that change nothing for an engine are known and ignored; keys that nobody knows are listed,
//! so that a new switch in a new checkpoint does not pass unseen; values that would need code that
//! is not here are refused by name.

use std::collections::BTreeSet;
use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::weights::{Geometry, LayerShape};

/// Bound on every size in a config: far above any real model; products of two stay far inside 64 bits.
const MAX_SIZE: u64 = 16_000_000;
/// Bounds on what tensors are counted by, a dozen times and twice those of a real model: each tensor
/// takes memory in an audit before anything is known to be wrong.
const MAX_LAYERS: usize = 1_000;
const MAX_EXPERTS_IN_ALL: usize = 40_000;

/// Sizes and switches of a checkpoint, by their names in `config.json`.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // The fields carry config.json's own names.
pub struct ModelConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_nextn_predict_layers: usize,
    pub num_attention_heads: usize,
    pub q_lora_rank: usize,
    pub kv_lora_rank: usize,
    pub qk_nope_head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub v_head_dim: usize,
    pub intermediate_size: usize,
    pub moe_intermediate_size: usize,
    pub n_routed_experts: usize,
    pub n_shared_experts: usize,
    pub num_experts_per_tok: usize,
    pub routed_scaling_factor: f32,
    pub norm_topk_prob: bool,
    pub rms_norm_eps: f32,
    pub rope_theta: f32,
    pub index_n_heads: usize,
    pub index_head_dim: usize,
    pub index_topk: usize,
    pub max_position_embeddings: usize,
    pub eos_token_id: Vec<u32>,
    /// The layers in order, the MTP layers after the `num_hidden_layers`.
    pub layers: Vec<LayerShape>,
    /// Epsilon of the two latent norms (q_a_layernorm, kv_a_layernorm): `rms_norm_eps` unless asked
    /// otherwise; transformers uses 1e-6 (facts/glm5.md §3.1).
    pub latent_norm_eps: f32,
    /// Keys of the file that this reader does not know.
    pub unhandled: Vec<String>,
}

/// What a checkpoint says about its quantisation. Only refused or reported, never used to decide a
/// tensor's format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantization {
    /// `quant_method`, e.g. `modelopt`.
    pub method: String,
    /// `quant_algo` or compressed-tensors' `format`, e.g. `NVFP4`.
    pub algo: Option<String>,
}

/// Keys that are known and change nothing here.
const IGNORED: &[&str] = &[
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "ep_size",
    "head_dim",
    "index_share_for_mtp_iteration",
    "initializer_range",
    "layer_types",
    "max_window_layers",
    "moe_router_dtype",
    "name_or_path",
    "num_key_value_heads",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "qk_head_dim",
    "quantization_config",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

impl ModelConfig {
    /// Reads a `config.json`; `file` is its name in messages.
    ///
    /// # Errors
    /// Input error that names the file and the key.
    pub fn from_json(file: &str, json: &[u8]) -> Result<Self> {
        let value: Value = serde_json::from_slice(json)
            .map_err(|e| Error::input(format!("{file}: not valid JSON: {e}; fetch it again")))?;
        let Value::Object(map) = &value else {
            return Err(Error::input(format!("{file}: expected a JSON object")));
        };
        let mut reader = Reader { file, map, seen: IGNORED.iter().copied().collect() };
        reader.refuse_other_architectures()?;

        let num_hidden_layers = reader.size("num_hidden_layers")?;
        let num_nextn_predict_layers = reader.size_or("num_nextn_predict_layers", 0)?;
        let layers = reader.layers(num_hidden_layers, num_nextn_predict_layers)?;
        let rms_norm_eps = reader.float_or("rms_norm_eps", 1e-5)?;
        let config = Self {
            vocab_size: reader.size("vocab_size")?,
            hidden_size: reader.size("hidden_size")?,
            num_hidden_layers,
            num_nextn_predict_layers,
            num_attention_heads: reader.size("num_attention_heads")?,
            q_lora_rank: reader.size("q_lora_rank")?,
            kv_lora_rank: reader.size("kv_lora_rank")?,
            qk_nope_head_dim: reader.size("qk_nope_head_dim")?,
            qk_rope_head_dim: reader.size("qk_rope_head_dim")?,
            v_head_dim: reader.size("v_head_dim")?,
            intermediate_size: reader.size("intermediate_size")?,
            moe_intermediate_size: reader.size("moe_intermediate_size")?,
            n_routed_experts: reader.size("n_routed_experts")?,
            n_shared_experts: reader.positive_size_or("n_shared_experts", 1)?,
            num_experts_per_tok: reader.size("num_experts_per_tok")?,
            routed_scaling_factor: reader.float_or("routed_scaling_factor", 2.5)?,
            norm_topk_prob: reader.bool_or("norm_topk_prob", true)?,
            rms_norm_eps,
            rope_theta: reader.rope_theta()?,
            index_n_heads: reader.size("index_n_heads")?,
            index_head_dim: reader.size("index_head_dim")?,
            index_topk: reader.size("index_topk")?,
            max_position_embeddings: reader.size("max_position_embeddings")?,
            eos_token_id: reader.token_ids("eos_token_id")?,
            layers,
            latent_norm_eps: rms_norm_eps,
            unhandled: Vec::new(),
        };
        reader.refuse_unsupported_values()?;
        config.check(file)?;
        Ok(Self { unhandled: reader.unhandled(), ..config })
    }

    /// Sizes that must fit each other.
    fn check(&self, file: &str) -> Result<()> {
        let refuse = |what: String| Err(Error::input(format!("{file}: {what}")));
        if self.num_experts_per_tok > self.n_routed_experts {
            return refuse(format!(
                "num_experts_per_tok {} is more than n_routed_experts {}",
                self.num_experts_per_tok, self.n_routed_experts
            ));
        }
        if self.layers.len() * self.n_routed_experts > MAX_EXPERTS_IN_ALL {
            return refuse(format!(
                "{} layers of {} experts are not those of a GLM-5",
                self.layers.len(),
                self.n_routed_experts
            ));
        }
        if !self.qk_rope_head_dim.is_multiple_of(2) {
            return refuse(format!(
                "qk_rope_head_dim {} is odd; rope turns pairs",
                self.qk_rope_head_dim
            ));
        }
        if self.index_head_dim < self.qk_rope_head_dim {
            return refuse(format!(
                "index_head_dim {} is less than qk_rope_head_dim {}, which it must hold",
                self.index_head_dim, self.qk_rope_head_dim
            ));
        }
        if self.layers.first().is_some_and(|layer| !layer.indexer) {
            return refuse(
                "layer 0 shares an earlier layer's index list; expected \"full\"".into(),
            );
        }
        Ok(())
    }

    /// What the manifest needs to know of this config.
    pub fn geometry(&self) -> Geometry {
        let sizes = HashMap::from([
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", self.num_attention_heads),
            ("q_lora_rank", self.q_lora_rank),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("v_head_dim", self.v_head_dim),
            ("intermediate_size", self.intermediate_size),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("n_routed_experts", self.n_routed_experts),
            ("n_shared_experts", self.n_shared_experts),
            ("index_n_heads", self.index_n_heads),
            ("index_head_dim", self.index_head_dim),
        ]);
        Geometry { sizes, layers: self.layers.clone() }
    }
}

impl Quantization {
    /// Reads `quantization_config` of a config.json and `hf_quant_config.json`; the first is told
    /// where both are there, `None` if neither says anything.
    ///
    /// # Errors
    /// Input error that names a method or an algorithm that is not known, in either file.
    pub fn from_json(
        config: (&str, &[u8]),
        hf_quant_config: Option<(&str, &[u8])>,
    ) -> Result<Option<Self>> {
        let parse = |file: &str, json: &[u8]| {
            serde_json::from_slice::<Value>(json)
                .map_err(|e| Error::input(format!("{file}: not valid JSON: {e}; fetch it again")))
        };
        let text = |value: &Value, key: &str| value[key].as_str().map(str::to_owned);
        let mut found = Vec::new();
        let (file, json) = config;
        let inline = parse(file, json)?["quantization_config"].clone();
        if !inline.is_null() {
            let method = text(&inline, "quant_method").unwrap_or_else(|| "(none)".into());
            let algo = match method.as_str() {
                "compressed-tensors" => text(&inline, "format"),
                _ => text(&inline, "quant_algo"),
            };
            found.push((file, Self { method, algo }));
        }
        if let Some((file, json)) = hf_quant_config {
            let algo = text(&parse(file, json)?["quantization"], "quant_algo");
            found.push((file, Self { method: "modelopt".into(), algo }));
        }
        for (file, quantization) in &found {
            quantization.refuse_unknown(file)?;
        }
        Ok(found.into_iter().next().map(|(_, quantization)| quantization))
    }

    fn refuse_unknown(&self, file: &str) -> Result<()> {
        let algos: &[&str] = match self.method.as_str() {
            "modelopt" | "modelopt_fp4" => &["NVFP4", "MIXED_PRECISION"],
            "compressed-tensors" => &["nvfp4-pack-quantized"],
            "fp8" => &[],
            other => {
                return Err(Error::input(format!(
                    "{file}: unknown quant_method \"{other}\"; supported are modelopt (NVFP4), \
                     compressed-tensors (nvfp4-pack-quantized) and fp8 (128x128 blocks)"
                )));
            }
        };
        match &self.algo {
            Some(algo) if !algos.contains(&algo.as_str()) => Err(Error::input(format!(
                "{file}: unknown quant_algo \"{algo}\" of quant_method \"{}\"; supported: {}",
                self.method,
                if algos.is_empty() { "none".to_owned() } else { algos.join(", ") }
            ))),
            _ => Ok(()),
        }
    }
}

/// Typed look-ups that remember which keys were asked for.
struct Reader<'a> {
    file: &'a str,
    map: &'a Map<String, Value>,
    seen: BTreeSet<&'static str>,
}

impl Reader<'_> {
    /// The value of `key`; absent and null are the same.
    fn get(&mut self, key: &'static str) -> Option<&Value> {
        self.seen.insert(key);
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, expected: &str, found: &Value) -> Error {
        let mut found = found.to_string();
        if found.chars().count() > 60 {
            found = found.chars().take(60).collect::<String>() + "…";
        }
        Error::input(format!("{}: {key}: expected {expected}, found {found}", self.file))
    }

    fn size_or(&mut self, key: &'static str, default: usize) -> Result<usize> {
        let Some(value) = self.get(key).cloned() else {
            return Ok(default);
        };
        match value.as_u64() {
            Some(size) if size <= MAX_SIZE => Ok(size as usize),
            _ => Err(self.wrong(key, "a whole number of at most 16 million", &value)),
        }
    }

    fn size(&mut self, key: &'static str) -> Result<usize> {
        match self.size_or(key, 0)? {
            0 => Err(Error::input(format!(
                "{}: {key} is missing or 0; a GLM-5 config.json must give it",
                self.file
            ))),
            size => Ok(size),
        }
    }

    /// As [`Reader::size_or`], for what the layers divide by.
    fn positive_size_or(&mut self, key: &'static str, default: usize) -> Result<usize> {
        match self.size_or(key, default)? {
            0 => Err(self.wrong(key, "a number of at least 1, as in every GLM-5", &Value::from(0))),
            size => Ok(size),
        }
    }

    fn float_or(&mut self, key: &'static str, default: f32) -> Result<f32> {
        match self.get(key).cloned() {
            None => Ok(default),
            Some(value) => self.positive(key, &value),
        }
    }

    fn positive(&self, key: &str, value: &Value) -> Result<f32> {
        match value.as_f64() {
            Some(number) if number > 0.0 && (number as f32).is_finite() => Ok(number as f32),
            _ => Err(self.wrong(key, "a positive number", value)),
        }
    }

    fn bool_or(&mut self, key: &'static str, default: bool) -> Result<bool> {
        match self.get(key).cloned() {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(value),
            Some(value) => Err(self.wrong(key, "true or false", &value)),
        }
    }

    fn token_ids(&mut self, key: &'static str) -> Result<Vec<u32>> {
        let value = self.get(key).cloned().unwrap_or(Value::Array(Vec::new()));
        let ids = match &value {
            Value::Array(ids) => ids.clone(),
            one => vec![one.clone()],
        };
        ids.iter()
            .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
            .collect::<Option<Vec<u32>>>()
            .ok_or_else(|| self.wrong(key, "a token id or a list of them", &value))
    }

    /// `rope_parameters.rope_theta`, else a `rope_theta` at the top (facts/glm5.md §1.2: a reader
    /// with a default is silently wrong).
    fn rope_theta(&mut self) -> Result<f32> {
        let nested = self.get("rope_parameters").cloned().unwrap_or(Value::Null);
        // Older files say it in rope_scaling, the oldest as `type`.
        let scaling = self.get("rope_scaling").cloned().unwrap_or(Value::Null);
        for (key, kind) in [
            ("rope_parameters.rope_type", nested.get("rope_type")),
            ("rope_scaling.rope_type", scaling.get("rope_type")),
            ("rope_scaling.type", scaling.get("type")),
        ] {
            if let Some(kind) = kind.filter(|kind| !kind.is_null() && **kind != "default") {
                return Err(self.wrong(key, "\"default\"", kind));
            }
        }
        let theta = nested.get("rope_theta").cloned().filter(|theta| !theta.is_null());
        let top = self.get("rope_theta").cloned();
        match theta.or(top) {
            Some(theta) => self.positive("rope_theta", &theta),
            None => Err(Error::input(format!(
                "{}: no rope_theta, neither in rope_parameters nor at the top; a guess would be \
                 silently wrong, so fetch the checkpoint's own config.json",
                self.file
            ))),
        }
    }

    /// The kind of every layer, MTP layers last.
    fn layers(&mut self, num_hidden_layers: usize, mtp: usize) -> Result<Vec<LayerShape>> {
        if num_hidden_layers > MAX_LAYERS || mtp > 16 {
            return Err(Error::input(format!(
                "{}: num_hidden_layers {num_hidden_layers} and num_nextn_predict_layers {mtp} \
                 are not those of a GLM-5",
                self.file
            )));
        }
        let moe = self.moe_layers(num_hidden_layers)?;
        let indexer = self.indexer_layers(num_hidden_layers)?;
        let mut layers: Vec<LayerShape> = moe
            .into_iter()
            .zip(indexer)
            .map(|(moe, indexer)| LayerShape { moe, indexer, mtp: false })
            .collect();
        layers.extend((0..mtp).map(|_| LayerShape { moe: true, indexer: true, mtp: true }));
        Ok(layers)
    }

    fn moe_layers(&mut self, count: usize) -> Result<Vec<bool>> {
        let dense = self.size_or("first_k_dense_replace", 3)?;
        match self.words("mlp_layer_types", count, &["dense", "sparse"])? {
            None => Ok((0..count).map(|layer| layer >= dense).collect()),
            Some(kinds) => Ok(kinds.into_iter().map(|kind| kind == "sparse").collect()),
        }
    }

    /// Which layers own an indexer: `indexer_types`, else `index_topk_pattern` (a letter a layer),
    /// else the rule of `index_topk_freq` and `index_skip_topk_offset`, else all.
    fn indexer_layers(&mut self, count: usize) -> Result<Vec<bool>> {
        let freq = self.size_or("index_topk_freq", 1)?.max(1);
        // transformers' and vLLM's default; the published configs state 3.
        let offset = self.size_or("index_skip_topk_offset", 2)?;
        let pattern = self.pattern("index_topk_pattern", count)?;
        if let Some(types) = self.words("indexer_types", count, &["full", "shared"])? {
            return Ok(types.into_iter().map(|kind| kind == "full").collect());
        }
        if let Some(pattern) = pattern {
            return Ok(pattern);
        }
        Ok((0..count)
            .map(|layer| (layer + 1).saturating_sub(offset).is_multiple_of(freq))
            .collect())
    }

    /// A letter for each of `count` layers: whether it is an F.
    fn pattern(&mut self, key: &'static str, count: usize) -> Result<Option<Vec<bool>>> {
        let Some(value) = self.get(key).cloned() else {
            return Ok(None);
        };
        let letters: Vec<char> = value.as_str().unwrap_or("").chars().collect();
        if letters.len() != count || !letters.iter().all(|letter| "FS".contains(*letter)) {
            let expected = format!(
                "{count} letters F or S, one a layer (num_hidden_layers), it has {}",
                letters.len()
            );
            return Err(self.wrong(key, &expected, &value));
        }
        Ok(Some(letters.into_iter().map(|letter| letter == 'F').collect()))
    }

    /// A list with one of `words` for each of `count` layers.
    fn words(
        &mut self,
        key: &'static str,
        count: usize,
        words: &[&str],
    ) -> Result<Option<Vec<String>>> {
        let Some(value) = self.get(key).cloned() else {
            return Ok(None);
        };
        let list: Option<Vec<String>> = value
            .as_array()
            .and_then(|list| list.iter().map(|word| word.as_str().map(str::to_owned)).collect());
        match list {
            Some(list)
                if list.len() == count && list.iter().all(|word| words.contains(&&**word)) =>
            {
                Ok(Some(list))
            }
            other => {
                let length = other.map_or(0, |list| list.len());
                let expected = format!(
                    "a list of {count} (num_hidden_layers) of \"{}\", it has {length}",
                    words.join("\" or \"")
                );
                Err(self.wrong(key, &expected, &value))
            }
        }
    }

    fn refuse_other_architectures(&mut self) -> Result<()> {
        let model_type = self.get("model_type").cloned().unwrap_or(Value::Null);
        match model_type.as_str() {
            Some("glm_moe_dsa") => Ok(()),
            Some("glm5_next") => Err(Error::input(format!(
                "{}: model_type glm5_next (GLM-5.3-Flash) is another architecture (linear \
                 attention, hyper-connections, vision) that talon does not run; use GLM-5, 5.1, \
                 5.2 or 5.3",
                self.file
            ))),
            _ => Err(self.wrong("model_type", "\"glm_moe_dsa\"", &model_type)),
        }
    }

    /// Switches that the family never sets and whose other values would need other code.
    fn refuse_unsupported_values(&mut self) -> Result<()> {
        let fixed: [(&'static str, Value); 13] = [
            ("hidden_act", "silu".into()),
            ("scoring_func", "sigmoid".into()),
            ("topk_method", "noaux_tc".into()),
            ("n_group", 1.into()),
            ("topk_group", 1.into()),
            ("moe_layer_freq", 1.into()),
            ("attention_bias", false.into()),
            ("mlp_bias", false.into()),
            ("tie_word_embeddings", false.into()),
            ("rope_interleave", true.into()),
            ("indexer_rope_interleave", true.into()),
            ("use_sliding_window", false.into()),
            ("sliding_window", Value::Null),
        ];
        for (key, only) in fixed {
            if let Some(found) = self.get(key).cloned()
                && found != only
            {
                return Err(self.wrong(key, &format!("{only}, as in every GLM-5"), &found));
            }
        }
        Ok(())
    }

    fn unhandled(&self) -> Vec<String> {
        self.map.keys().filter(|key| !self.seen.contains(key.as_str())).cloned().collect()
    }
}
