//! The speed that a box should reach: what reading the weights and exchanging take by themselves
//! (facts/performance.md §2). A step cannot be faster; talon's own is slower by what its kernels leave idle.

use serde_json::{Value, json};

use super::facts::Facts;

/// Bytes of weights that one of 8 ranks reads in a step of one row of GLM-5.2 in NVFP4 with dense weights in
/// BF16, as `talon bench --rank-slice 0/8` counts them.
const RANK_BYTES: f64 = 8.49e9;
const RANKS: usize = 8;
/// Two for each of 78 layers, and one for the head.
const EXCHANGES: f64 = 157.0;
/// Bytes a second that an RTX PRO 6000 Blackwell reads in practice (facts/performance.md §2.6).
const CARD: (&str, f64) = ("RTX PRO 6000", 1.64e12);
/// Microseconds of one exchange of one row of 8 ranks over PCIe, published (facts/performance.md §2.5).
const PUBLISHED_US: f64 = 8.3;

/// The least time of a step on this box; null if it has not eight of the cards whose speed is known.
pub fn expected(facts: &Facts) -> Value {
    let known = |name: &Option<String>| name.as_ref().is_some_and(|name| name.contains(CARD.0));
    let gpus = &facts.nvml.gpus;
    if gpus.len() != RANKS || !gpus.iter().all(|gpu| known(&gpu.name)) {
        return Value::Null;
    }
    let measured = facts.measured.links.as_ref().and_then(|links| links.microseconds(1));
    let reduce_us = measured.unwrap_or(PUBLISHED_US);
    let step_ms = RANK_BYTES / CARD.1 * 1e3 + EXCHANGES * reduce_us / 1e3;
    json!({
        "model": "GLM-5.2, NVFP4, 8 ranks, one row",
        "rank_bytes": RANK_BYTES,
        "bandwidth": CARD.1,
        "exchanges": EXCHANGES as u64,
        "reduce_us": reduce_us,
        "reduce_us_from": if measured.is_some() { "measured on this box" } else { "published" },
        "formula": "rank_bytes / bandwidth + exchanges x reduce_us",
        "step_ms": step_ms,
        "tokens_per_second": 1e3 / step_ms,
    })
}
