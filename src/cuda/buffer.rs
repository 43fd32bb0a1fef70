//! The buffers between stages by their names, and how their values are stored.

use half::f16;

use super::layout::ACTIVATION_FACTOR;

/// A buffer between stages, by its name in the plan, or the cache of a layer. Those whose width
/// depends on the layer have it with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names are those of the plan.
pub enum Buffer {
    Partial,
    Residual,
    Normed,
    Latents(usize),
    QueryLatents,
    WithoutRope,
    Queries,
    IndexQueries,
    IndexWeights,
    Scores,
    Selected,
    Parts,
    Bounds,
    Attended,
    Values,
    RouterLogits,
    SharedSums(usize),
    Routing,
    Activations(usize),
    MlpActivations(usize),
    Logits,
    Best,
    LatentCache(usize),
    KeyCache(usize),
}

/// How a buffer's values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// 16-bit floats.
    F16,
    /// 16-bit floats, of values times 1 / 64.
    Activation,
    /// 32-bit floats.
    F32,
    /// Whole numbers.
    I32,
}

impl Buffer {
    /// Its name without the layer.
    pub fn name(self) -> &'static str {
        match self {
            Buffer::Partial => "partial",
            Buffer::Residual => "residual",
            Buffer::Normed => "normed",
            Buffer::Latents(_) => "latents",
            Buffer::QueryLatents => "query_latents",
            Buffer::WithoutRope => "without_rope",
            Buffer::Queries => "queries",
            Buffer::IndexQueries => "index_queries",
            Buffer::IndexWeights => "index_weights",
            Buffer::Scores => "scores",
            Buffer::Selected => "selected",
            Buffer::Parts => "parts",
            Buffer::Bounds => "bounds",
            Buffer::Attended => "attended",
            Buffer::Values => "values",
            Buffer::RouterLogits => "router_logits",
            Buffer::SharedSums(_) => "shared_sums",
            Buffer::Routing => "routing",
            Buffer::Activations(_) => "activations",
            Buffer::MlpActivations(_) => "mlp_activations",
            Buffer::Logits => "logits",
            Buffer::Best => "best",
            Buffer::LatentCache(_) => "latent_caches",
            Buffer::KeyCache(_) => "key_caches",
        }
    }

    /// How its values are stored.
    pub fn stored(self) -> Stored {
        match self {
            Buffer::Normed
            | Buffer::QueryLatents
            | Buffer::WithoutRope
            | Buffer::Queries
            | Buffer::IndexQueries
            | Buffer::Attended
            | Buffer::Values
            | Buffer::LatentCache(_)
            | Buffer::KeyCache(_) => Stored::F16,
            Buffer::Activations(_) | Buffer::MlpActivations(_) => Stored::Activation,
            Buffer::Selected | Buffer::Routing | Buffer::Best => Stored::I32,
            _ => Stored::F32,
        }
    }
}

impl Stored {
    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            Stored::F16 | Stored::Activation => 2,
            Stored::F32 | Stored::I32 => 4,
        }
    }

    /// Values as the device stores them.
    pub fn encode<'a>(self, values: impl Iterator<Item = &'a f32>) -> Vec<u8> {
        let half = |value: f32| f16::from_f32(value).to_le_bytes();
        match self {
            Stored::F16 => values.flat_map(|value| half(*value)).collect(),
            Stored::Activation => {
                values.flat_map(|value| half(*value / ACTIVATION_FACTOR)).collect()
            }
            Stored::F32 => values.flat_map(|value| value.to_ne_bytes()).collect(),
            Stored::I32 => values.flat_map(|value| (*value as i32).to_ne_bytes()).collect(),
        }
    }

    /// The values of bytes that came from the device.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let halves = || bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32());
        let words = || bytes.as_chunks::<4>().0.iter();
        match self {
            Stored::F16 => halves().collect(),
            Stored::Activation => halves().map(|value| value * ACTIVATION_FACTOR).collect(),
            Stored::F32 => words().map(|b| f32::from_ne_bytes(*b)).collect(),
            Stored::I32 => words().map(|b| i32::from_ne_bytes(*b) as f32).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back() {
        let values = [0.0, -1.5, 1024.0];
        for stored in [Stored::F16, Stored::Activation, Stored::F32] {
            assert_eq!(stored.decode(&stored.encode(values.iter())), values, "{stored:?}");
        }
        assert_eq!(Stored::Activation.encode([64.0].iter()), f16::ONE.to_le_bytes());
        assert_eq!(Stored::I32.decode(&Stored::I32.encode([7.0, 0.0].iter())), [7.0, 0.0]);
    }
}
