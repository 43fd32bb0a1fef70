//! From logits to a token.
//!
//! The random stream is keyed by (seed, index of the output token), not by how many numbers were
//! drawn before, so a seeded run gives the same text however its steps are grouped into rows.

use std::collections::HashMap;

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token.
    pub temperature: f32,
    /// Keep the most likely tokens whose probabilities reach this sum.
    pub top_p: f32,
    /// Keep at most this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep tokens with at least this share of the likeliest one's probability; 0 keeps all.
    pub min_p: f32,
    /// Divides positive logits of tokens that have occurred, in the prompt or since, and
    /// multiplies negative ones; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Taken from the logits of tokens that were generated.
    pub presence_penalty: f32,
    /// Taken from the logits of tokens that were generated, for each time.
    pub frequency_penalty: f32,
    /// Key of the random stream.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        seed: 0,
    };

    /// Whether the arg-max of the logits is not enough.
    pub fn needs_logits(&self) -> bool {
        self.temperature != 0.0 || self.has_penalties()
    }

    fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }

    /// Chooses the token after `tokens` (the prompt's, then the output's) from `logits`, which end
    /// where the vocabulary ends.
    pub fn choose(&self, logits: &[f32], tokens: &[u32], prompt_len: usize) -> u32 {
        let mut logits = logits.to_vec();
        if self.has_penalties() {
            self.penalise(&mut logits, tokens, prompt_len);
        }
        match self.temperature == 0.0 {
            true => argmax(&logits),
            false => self.sample(&logits, tokens.len() - prompt_len),
        }
    }

    fn penalise(&self, logits: &mut [f32], tokens: &[u32], prompt_len: usize) {
        // (occurred at all, times generated)
        let mut counts: HashMap<u32, u32> = tokens.iter().map(|token| (*token, 0)).collect();
        for token in &tokens[prompt_len..] {
            *counts.entry(*token).or_default() += 1;
        }
        for (token, generated) in counts {
            let Some(logit) = logits.get_mut(token as usize) else {
                continue;
            };
            *logit = match *logit > 0.0 {
                true => *logit / self.repetition_penalty,
                false => *logit * self.repetition_penalty,
            };
            if generated > 0 {
                *logit -= self.presence_penalty + self.frequency_penalty * generated as f32;
            }
        }
    }

    /// Samples output token `index`.
    fn sample(&self, logits: &[f32], index: usize) -> u32 {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: f32| f64::from((logit - max) / self.temperature).exp();
        let mut candidates: Vec<(u32, f64)> =
            (0..).zip(logits).map(|(id, logit)| (id, weight(*logit))).collect();
        // The order of the cumulative sum is part of the result: likeliest first, ties by id.
        let likelier = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if self.top_k > 0 && self.top_k < candidates.len() {
            candidates.select_nth_unstable_by(self.top_k, likelier);
            candidates.truncate(self.top_k);
        }
        let uniform = uniform(self.seed, index as u64);
        // Few tokens have nearly all of the probability, and to sort a whole vocabulary takes as
        // long as a step.
        if candidates.len() > SORTED_FIRST {
            candidates.select_nth_unstable_by(SORTED_FIRST, likelier);
            let (first, rest) = candidates.split_at_mut(SORTED_FIRST);
            first.sort_unstable_by(likelier);
            let behind = rest.iter().map(|(_, weight)| weight).sum();
            if let Some(id) = self.draw(first, behind, uniform) {
                return id;
            }
        }
        candidates.sort_unstable_by(likelier);
        self.draw(&candidates, 0.0, uniform).unwrap_or_else(|| argmax(logits))
    }

    /// Draws from `candidates`, likeliest first, behind which there are others of this weight
    /// together; none if it takes those too.
    fn draw(&self, candidates: &[(u32, f64)], behind: f64, uniform: f64) -> Option<u32> {
        let all: f64 = candidates.iter().map(|(_, weight)| weight).sum::<f64>() + behind;
        let mut nucleus = 0.0;
        let reached = candidates.iter().position(|(_, weight)| {
            nucleus += weight;
            self.top_p < 1.0 && nucleus >= f64::from(self.top_p) * all
        });
        // The likeliest has weight 1.
        let likely = candidates.partition_point(|(_, weight)| *weight >= f64::from(self.min_p));
        let kept = reached.map_or(candidates.len(), |last| last + 1).min(likely);
        // Nothing cut it off, so what is behind counts, as far as a limit does not reach into it.
        let open = kept == candidates.len() && reached.is_none() && behind > 0.0;
        if open && (self.top_p < 1.0 || self.min_p > 0.0) {
            return None;
        }
        let kept_weight: f64 = candidates[..kept].iter().map(|(_, weight)| weight).sum();
        let mut rest = uniform * if open { all } else { kept_weight };
        for (id, weight) in &candidates[..kept] {
            rest -= weight;
            if rest < 0.0 {
                return Some(*id);
            }
        }
        // Rounding can leave a sliver beyond the last weight.
        if open { None } else { candidates[..kept].last().map(|(id, _)| *id) }
    }
}

/// Candidates that are sorted before it is known whether more are needed.
const SORTED_FIRST: usize = 1024;

/// Log-probabilities at a position, of the model's own distribution: before temperature, penalties
/// and limits.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token that was chosen.
    pub logprob: f32,
    /// The likeliest tokens with theirs, likeliest first, ties by id.
    pub top: Vec<(u32, f32)>,
}

/// The log-probability of `token`, and of the `top` likeliest tokens.
pub(super) fn logprobs(logits: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    let log_sum = f64::from(max) + sum.ln();
    let logprob = |logit: f32| (f64::from(logit) - log_sum) as f32;
    let mut order: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    let likelier = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if top < order.len() {
        order.select_nth_unstable_by(top, likelier);
        order.truncate(top);
    }
    order.sort_unstable_by(likelier);
    TokenLogprobs {
        logprob: logits.get(token as usize).map_or(f32::NEG_INFINITY, |logit| logprob(*logit)),
        top: order.into_iter().map(|(id, logit)| (id, logprob(logit))).collect(),
    }
}

/// The largest logit; ties: the lower id.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, logit) in (0..).zip(logits) {
        if *logit > best.1 {
            best = (id, *logit);
        }
    }
    best.0
}

/// A number in [0, 1) that depends only on the key: splitmix64 (Steele, Lea, Flood 2014) of the
/// seed's stream at `index`.
fn uniform(seed: u64, index: u64) -> f64 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let gamma = 0x9E37_79B9_7F4A_7C15u64;
    let stream = mix(seed.wrapping_add(gamma));
    let bits = mix(stream.wrapping_add(gamma.wrapping_mul(index.wrapping_add(1))));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hot(seed: u64) -> Sampling {
        Sampling { temperature: 1.0, seed, ..Sampling::GREEDY }
    }

    /// Draws for many output indices.
    fn draws(sampling: Sampling, logits: &[f32], count: usize) -> Vec<u32> {
        (0..count).map(|index| sampling.sample(logits, index)).collect()
    }

    /// Probabilities 0.5, 0.3, 0.2 at temperature 1.
    fn three() -> [f32; 3] {
        [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()]
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let mut counts = [0usize; 3];
        for id in draws(hot(7), &three(), 20_000) {
            counts[id as usize] += 1;
        }
        for (count, expected) in counts.iter().zip([10_000.0, 6_000.0, 4_000.0]) {
            assert!((*count as f64 - expected).abs() < 250.0, "{counts:?}");
        }
    }

    #[test]
    fn filters_drop_the_tail() {
        for sampling in [
            Sampling { top_p: 0.79, ..hot(1) },
            Sampling { top_k: 2, ..hot(1) },
            Sampling { min_p: 0.5, ..hot(1) },
        ] {
            let drawn = draws(sampling, &three(), 1000);
            assert!(drawn.contains(&1) && !drawn.contains(&2), "{sampling:?}");
        }
        let drawn = draws(Sampling { top_p: 0.4, ..hot(1) }, &three(), 1000);
        assert!(drawn.into_iter().all(|id| id == 0));
    }

    #[test]
    fn penalties_count_prompt_and_output_as_they_say() {
        let logits = [2.0, 1.9, -1.0, -1.1];
        let choose = |sampling: Sampling, tokens: &[u32]| sampling.choose(&logits, tokens, 1);
        let greedy = Sampling::GREEDY;
        assert_eq!(choose(greedy, &[0]), 0);
        // The repetition penalty counts the prompt, the others only the output.
        assert_eq!(choose(Sampling { repetition_penalty: 1.2, ..greedy }, &[0]), 1);
        assert_eq!(choose(Sampling { presence_penalty: 0.2, ..greedy }, &[0]), 0);
        assert_eq!(choose(Sampling { presence_penalty: 0.2, ..greedy }, &[3, 0]), 1);
        assert_eq!(choose(Sampling { frequency_penalty: 0.06, ..greedy }, &[3, 0]), 0);
        assert_eq!(choose(Sampling { frequency_penalty: 0.06, ..greedy }, &[3, 0, 0]), 1);
        // A penalty pushes negative logits further down.
        let negative = [-1.0, -1.1];
        let sampling = Sampling { repetition_penalty: 1.2, ..greedy };
        assert_eq!(sampling.choose(&negative, &[0], 1), 1);
    }

    #[test]
    fn the_stream_depends_on_seed_and_index_alone() {
        let logits: Vec<f32> = (0..100).map(|i| (i % 10) as f32 / 10.0).collect();
        assert_eq!(hot(3).sample(&logits, 17), hot(3).sample(&logits, 17));
        assert_ne!(draws(hot(3), &logits, 50), draws(hot(4), &logits, 50));
    }

    /// Sorting only the likeliest first changes no draw, whatever the limits and the tail.
    #[test]
    fn a_large_vocabulary_is_drawn_from_as_if_it_were_sorted() {
        let peaked: Vec<f32> = (0..6000).map(|i| ((i * 7919) % 6000) as f32 / 150.0).collect();
        let flat: Vec<f32> = (0..6000).map(|i| ((i * 7919) % 6000) as f32 / 3000.0).collect();
        let limits = [(1.0, 0, 0.0), (0.9, 0, 0.0), (0.5, 0, 0.0), (1.0, 2000, 0.0), (1.0, 0, 0.9)];
        for logits in [peaked, flat] {
            for (top_p, top_k, min_p) in limits {
                let sampling = Sampling { top_p, top_k, min_p, ..hot(3) };
                let max = logits.iter().copied().fold(f32::MIN, f32::max);
                let mut sorted: Vec<(u32, f64)> =
                    (0..).zip(&logits).map(|(id, l)| (id, f64::from(l - max).exp())).collect();
                sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
                sorted.truncate(if top_k > 0 { top_k } else { sorted.len() });
                for index in 0..40 {
                    let expected = sampling.draw(&sorted, 0.0, uniform(3, index));
                    assert_eq!(Some(sampling.sample(&logits, index as usize)), expected);
                }
            }
        }
    }

    #[test]
    fn cold_temperatures_are_finite() {
        let cold = Sampling { temperature: 1e-6, ..Sampling::GREEDY };
        assert_eq!(cold.sample(&[1.0, 9.0, -3.0], 0), 1);
        assert_eq!(hot(0).sample(&[f32::NEG_INFINITY, 1.0], 5), 1);
    }
}
