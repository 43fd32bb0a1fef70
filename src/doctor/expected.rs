//! The speed that a box should reach: what reading the weights and exchanging take by themselves
//! (facts/performance.md §2). A step cannot be faster; talon's own is slower by what its kernels leave idle.

use serde_json::{Value, json};

use super::facts::{FULL_MODEL_BYTES, Facts};

/// Bytes of weights that a step of one row of GLM-5.2 reads, in NVFP4 with dense weights in BF16: what
/// every rank reads, and what ranks share. One of 8 reads 8.49e9, as `talon bench --rank-slice 0/8` counts
/// them; of these 78 x 37.3e6 of attention, 75 x 30.6e6 of experts, 0.17e9 of dense layers and 0.24e9 of
/// the head are its share (facts/performance.md §2.2).
const EACH_READS: f64 = 2.88e9;
const RANKS_SHARE: f64 = 44.88e9;
/// Numbers of ranks that share the model.
const RANKS: [usize; 4] = [8, 4, 2, 1];
/// Of a GPU's memory, what weights may take: caches, graphs and the driver need the rest.
const FOR_WEIGHTS: f64 = 0.93;
/// Two for each of 78 layers, and one for the head.
const EXCHANGES: f64 = 157.0;
/// Bytes a second that an RTX PRO 6000 Blackwell reads in practice (facts/performance.md §2.6).
const CARD: (&str, f64) = ("RTX PRO 6000", 1.64e12);
/// Microseconds of one exchange of one row over PCIe by number of ranks, published
/// (facts/performance.md §2.5).
const PUBLISHED_US: [(usize, f64); 3] = [(8, 8.3), (4, 5.1), (2, 4.0)];

/// Bytes a second that a card of this name reads in practice, where it is known.
pub fn known_card(name: &str) -> Option<f64> {
    name.contains(CARD.0).then_some(CARD.1)
}

/// The least time of a step on this box; null if nothing is known of its GPUs.
pub fn expected(facts: &Facts) -> Value {
    let gpus = &facts.nvml.gpus;
    let measured = facts.measured.deep.as_ref().and_then(|deep| deep.read_rate());
    let known: Option<Vec<f64>> = gpus.iter().map(|gpu| known_card(gpu.name.as_deref()?)).collect();
    let known = known.and_then(|rates| rates.into_iter().min_by(f64::total_cmp));
    let Some(bandwidth) = measured.or(known).filter(|rate| *rate > 0.0) else {
        return Value::Null;
    };
    let memory = gpus.iter().filter_map(|gpu| gpu.memory_total_mib).min().unwrap_or(0);
    let memory = memory as f64 * f64::from(1 << 20) * FOR_WEIGHTS;
    let fits =
        |ranks: &usize| *ranks <= gpus.len() && FULL_MODEL_BYTES as f64 / *ranks as f64 <= memory;
    let ranks = RANKS.into_iter().find(fits);
    // What does not fit can still be measured: one rank's share, by itself.
    let (of, exchanges) = match ranks {
        Some(1) => (1, 0.0),
        Some(ranks) => (ranks, EXCHANGES),
        None => (8, 0.0),
    };
    let rank_bytes = EACH_READS + RANKS_SHARE / of as f64;
    // Between more GPUs an exchange takes longer, so those of fewer ranks are no slower.
    let links = facts.measured.links.as_ref().filter(|links| links.gpus >= of);
    let (reduce_us, from) = match links.and_then(|links| links.microseconds(1)) {
        _ if exchanges == 0.0 => (0.0, "none"),
        Some(us) => (us, "measured on this box"),
        None => {
            let published = PUBLISHED_US.iter().find(|(of_ranks, _)| *of_ranks == of);
            (published.map_or(PUBLISHED_US[0].1, |(_, us)| *us), "published, over PCIe")
        }
    };
    let step_ms = rank_bytes / bandwidth * 1e3 + exchanges * reduce_us / 1e3;
    json!({
        "model": match ranks {
            Some(_) => format!("GLM-5.2 in NVFP4 on {of} ranks"),
            None => format!("one rank of {of} of GLM-5.2 in NVFP4, by itself (--rank-slice 0/{of})"),
        },
        "ranks": of,
        "whole_model": ranks.is_some(),
        "rank_bytes": rank_bytes,
        "bandwidth": bandwidth,
        "bandwidth_from": if measured.is_some() { "measured on this box" } else { "published" },
        "exchanges": exchanges as u64,
        "reduce_us": reduce_us,
        "reduce_us_from": from,
        "formula": "rank_bytes / bandwidth + exchanges x reduce_us",
        "step_ms": step_ms,
        "tokens_per_second": 1e3 / step_ms,
    })
}
