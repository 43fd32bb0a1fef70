//! The manifest: one declarative table of a model family's tensors, read by the audit, the loader,
//! the rank slicing and the memory plan. `weights-manifest/*.json` holds the tables.

use std::collections::HashMap;

use safetensors::Dtype;
use serde::Deserialize;

use crate::error::{Error, Result};

/// A family's tensors, from `weights-manifest/`.
#[derive(Debug, Deserialize)]
pub struct Manifest {
    /// `model_type` of the configs that it describes.
    pub family: String,
    /// Every way in which a module's numbers can be stored.
    pub formats: Vec<Format>,
    /// Every module of the family.
    pub entries: Vec<Entry>,
    /// Tensors that exporters add and that no engine needs, by the end of their name.
    pub unused_suffixes: Vec<String>,
}

/// One way to store a module: which tensors, of which dtype and shape.
#[derive(Debug, Deserialize)]
pub struct Format {
    /// `bf16`, `f32`, `nvfp4`, `nvfp4-packed` (compressed-tensors), `fp8-block`.
    pub name: String,
    /// Its tensors; the first one is what the format is recognised by.
    pub parts: Vec<Part>,
}

/// One tensor of a stored module.
#[derive(Debug, Deserialize)]
pub struct Part {
    /// What the tensor means to the decoder.
    pub role: Role,
    /// Its name: `{name}` is the module's entry name, `{module}` that without `.weight`.
    pub tensor: String,
    /// Its dtype as safetensors spells it.
    pub dtype: Dtype,
    /// Its shape, in terms of the module's.
    pub shape: PartShape,
    /// A part that may be absent.
    #[serde(default)]
    pub optional: bool,
}

/// What a tensor of a stored module means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The numbers, or their codes.
    Values,
    /// One scale per block.
    BlockScales,
    /// One scale for the module.
    GlobalScale,
    /// As [`Role::GlobalScale`], stored as 1/scale.
    GlobalScaleReciprocal,
    /// Belongs to the format and is not needed to decode (activation scales).
    Unused,
}

/// The shape of a part, in terms of the module's `[rows, columns]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PartShape {
    /// As the module.
    Full,
    /// `[rows, columns / 2]`: two 4-bit codes a byte.
    HalfColumns,
    /// `[rows, columns / 16]`.
    #[serde(rename = "per_16_columns")]
    Per16Columns,
    /// `[ceil(rows / 128), ceil(columns / 128)]`.
    #[serde(rename = "per_128x128")]
    Per128x128,
    /// One element, whatever the number of dimensions: `[]`, `[1]`, `[1, 1]`.
    Scalar,
}

/// A module that occurs once, or in some layers, or in every expert of some layers.
#[derive(Debug, Deserialize)]
pub struct Entry {
    /// Tensor name with `{layer}` and `{expert}`.
    pub name: String,
    /// The kind of module, for the summary of a checkpoint's layout.
    pub group: String,
    /// Where it occurs.
    pub layers: Layers,
    /// Sums of products of config values, e.g. `kv_lora_rank + qk_rope_head_dim`.
    pub shape: Vec<String>,
    /// Formats that it may be stored in.
    pub formats: Allowed,
    /// How ranks share it; absent = every rank holds all of it.
    pub slice: Option<SliceRule>,
    /// A module that may be absent.
    #[serde(default)]
    pub optional: bool,
}

/// Layers in which a module occurs; the MTP layer is a MoE layer with an own indexer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layers {
    /// Not in a layer.
    Once,
    /// All, the MTP layer included.
    Every,
    /// Layers with an own indexer.
    Indexer,
    /// Layers with a dense MLP.
    Dense,
    /// Layers with routed experts.
    Moe,
    /// The multi-token-prediction layer.
    Mtp,
}

/// Formats that a module may be stored in.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Allowed {
    /// Only these.
    Named(Vec<String>),
    /// `"linear"`: any format, as exporters quantise different linear modules.
    Linear(LinearWord),
}

/// The word `linear`.
#[derive(Debug, Deserialize)]
pub enum LinearWord {
    /// Any format.
    #[serde(rename = "linear")]
    Linear,
}

/// How the ranks of a tensor-parallel group share a module.
#[derive(Debug, Deserialize)]
pub struct SliceRule {
    /// Along which axis it is cut.
    pub axis: Axis,
    /// The config value that the number of ranks must divide.
    pub units: String,
}

/// An axis of a `[rows, columns]` module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Output dimension.
    Rows,
    /// Input dimension.
    Columns,
}

/// What the manifest needs to know of a config: the named sizes and the kind of each layer.
#[derive(Debug, Clone, Default)]
pub struct Geometry {
    /// Config values by name.
    pub sizes: HashMap<&'static str, usize>,
    /// The layers in order, MTP layers last.
    pub layers: Vec<LayerShape>,
}

/// The kind of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerShape {
    /// Routed experts (else a dense MLP).
    pub moe: bool,
    /// An own indexer (else it uses an earlier layer's list).
    pub indexer: bool,
    /// The multi-token-prediction layer.
    pub mtp: bool,
}

/// One occurrence of an entry.
#[derive(Debug, Clone)]
pub struct Module {
    /// Index into [`Manifest::entries`].
    pub entry: usize,
    /// The full name.
    pub name: String,
    /// Its layer, if it is in one.
    pub layer: Option<usize>,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl Manifest {
    /// The table of the GLM-5 family.
    pub(super) const GLM5: &str = include_str!("../../weights-manifest/glm5.json");

    /// The manifest of the GLM-5 family.
    ///
    /// # Errors
    /// Only if the embedded table is broken, which a test excludes.
    pub fn glm5() -> Result<Self> {
        Self::parse("glm5.json", Self::GLM5)
    }

    /// The manifest of EAGLE-3 heads.
    ///
    /// # Errors
    /// As [`Manifest::glm5`].
    pub fn eagle3() -> Result<Self> {
        Self::parse("eagle3.json", include_str!("../../weights-manifest/eagle3.json"))
    }

    fn parse(file: &str, json: &str) -> Result<Self> {
        serde_json::from_str(json)
            .map_err(|e| Error::runtime(format!("weights-manifest/{file}: {e}")))
    }

    /// All modules of a model with this geometry, in the order of the table.
    ///
    /// # Errors
    /// If the table names a size that the geometry lacks, which a test excludes.
    pub fn modules(&self, geometry: &Geometry) -> Result<Vec<Module>> {
        let mut modules = Vec::new();
        for (index, entry) in self.entries.iter().enumerate() {
            let shape = entry
                .shape
                .iter()
                .map(|expression| evaluate(expression, geometry))
                .collect::<Result<Vec<usize>>>()?;
            let mut push = |name: String, layer| {
                modules.push(Module { entry: index, name, layer, shape: shape.clone() });
            };
            if entry.layers == Layers::Once {
                push(entry.name.clone(), None);
                continue;
            }
            for (layer, kind) in geometry.layers.iter().enumerate() {
                if !entry.layers.include(*kind) {
                    continue;
                }
                let name = entry.name.replace("{layer}", &layer.to_string());
                match name.split_once("{expert}") {
                    None => push(name, Some(layer)),
                    Some((before, after)) => {
                        for expert in 0..size(geometry, "n_routed_experts")? {
                            push(format!("{before}{expert}{after}"), Some(layer));
                        }
                    }
                }
            }
        }
        Ok(modules)
    }

    /// The formats that `entry` may be stored in, with their index.
    pub fn formats_of(&self, entry: &Entry) -> impl Iterator<Item = (usize, &Format)> {
        self.formats.iter().enumerate().filter(|(_, format)| match &entry.formats {
            Allowed::Linear(_) => true,
            Allowed::Named(names) => names.contains(&format.name),
        })
    }

    /// Whether the number of ranks divides everything that ranks share.
    ///
    /// # Errors
    /// Input error that names the size that cannot be split.
    pub fn check_ranks(&self, geometry: &Geometry, tp: usize) -> Result<()> {
        for rule in self.entries.iter().filter_map(|entry| entry.slice.as_ref()) {
            let units = size(geometry, &rule.units)?;
            if tp == 0 || !units.is_multiple_of(tp) {
                return Err(Error::input(format!(
                    "--tp {tp}: {} is {units}, which {tp} ranks cannot share equally; choose a \
                     divisor",
                    rule.units
                )));
            }
        }
        Ok(())
    }
}

impl Layers {
    fn include(self, layer: LayerShape) -> bool {
        match self {
            Layers::Once => false,
            Layers::Every => true,
            Layers::Indexer => layer.indexer,
            Layers::Dense => !layer.moe,
            Layers::Moe => layer.moe,
            Layers::Mtp => layer.mtp,
        }
    }
}

impl Part {
    /// The tensor's name for the module called `name`.
    pub fn tensor_name(&self, name: &str) -> String {
        if let Some(suffix) = self.tensor.strip_prefix("{name}") {
            return format!("{name}{suffix}");
        }
        self.tensor.replace("{module}", name.strip_suffix(".weight").unwrap_or(name))
    }
}

impl PartShape {
    /// The shape for a module of shape `module`; `None` if the module cannot be stored so.
    /// [`PartShape::Scalar`] gives `[]`.
    pub fn of(self, module: &[usize]) -> Option<Vec<usize>> {
        match (self, module) {
            (PartShape::Full, _) => Some(module.to_vec()),
            (PartShape::Scalar, _) => Some(Vec::new()),
            (PartShape::HalfColumns, [rows, columns]) if columns.is_multiple_of(2) => {
                Some(vec![*rows, columns / 2])
            }
            (PartShape::Per16Columns, [rows, columns]) if columns.is_multiple_of(16) => {
                Some(vec![*rows, columns / 16])
            }
            (PartShape::Per128x128, [rows, columns]) => {
                Some(vec![rows.div_ceil(128), columns.div_ceil(128)])
            }
            _ => None,
        }
    }
}

/// A sum of products of sizes.
fn evaluate(expression: &str, geometry: &Geometry) -> Result<usize> {
    let mut sum = 0usize;
    for term in expression.split('+') {
        let mut product = 1usize;
        for factor in term.split('*') {
            product = product.saturating_mul(size(geometry, factor.trim())?);
        }
        sum = sum.saturating_add(product);
    }
    Ok(sum)
}

fn size(geometry: &Geometry, name: &str) -> Result<usize> {
    geometry.sizes.get(name).copied().ok_or_else(|| {
        Error::runtime(format!("weights-manifest: {name} is not a size of the config"))
    })
}
