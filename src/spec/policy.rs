//! How many tokens to guess.
//!
//! A round of k guesses costs a verify step of k + 1 rows and the draft; it yields 1 + Σ S_i tokens,
//! S_i = probability that the first i guesses are right (facts/eagle3.md §5.1). The adaptive policy
//! learns both from what it sees and takes the k with the most tokens for the time, 0 included.

use std::time::Duration;

use crate::model::MAX_GUESSES;

/// How many tokens to guess in each round.
#[derive(Debug, Clone)]
pub enum Policy {
    /// Always this many.
    Fixed(usize),
    /// As many as pay.
    Adaptive(Box<AdaptivePolicy>),
}

/// What a round cost and gave.
#[derive(Debug, Clone, Copy)]
pub struct RoundCost {
    /// Guesses made.
    pub drafted: usize,
    /// Guesses that were right.
    pub accepted: usize,
    /// Time of the verify step.
    pub verify: Duration,
    /// Time of the draft.
    pub draft: Duration,
    /// The round before also guessed, so that the draft had only its own rows to run. After plain
    /// rounds it runs theirs too, which tells nothing of later drafts.
    pub follows_draft: bool,
}

/// Rounds after which an observation has lost half its weight.
const HALF_LIFE_ROUNDS: f64 = 24.0;
/// A drafter starts with the benefit of the doubt, for one round.
const PRIOR_ACCEPTANCE: f64 = 0.7;
/// Speculation must promise at least this gain, so that noise does not switch it on.
const WORTHWHILE: f64 = 1.05;
/// Plain rounds before the first guess, to know what a plain step costs.
const FIRST_PLAIN_ROUNDS: usize = 8;
/// Guessing rounds after which a plain one tells anew what a plain step costs.
const GUESSING_ROUNDS: usize = 16;
/// Share of the decode time that probing and misjudged rounds may cost.
const LOSS_BUDGET: f64 = 0.005;
/// Plain steps that may be lost at once, having been earned before: enough to learn from.
const LOSS_CREDIT_STEPS: f64 = 4.0;
/// Guesses after which a drafter that was never right is switched off.
const HOPELESS_GUESSES: usize = 200;

/// Chooses k from measured costs and acceptance.
#[derive(Debug, Clone)]
pub struct AdaptivePolicy {
    /// Milliseconds of a verify step by its rows, index 0 = 1 row.
    verify_ms: [Typical; MAX_GUESSES + 1],
    /// Milliseconds of a draft by its guesses, index 0 = 1 guess.
    draft_ms: [Typical; MAX_GUESSES],
    /// Milliseconds of a draft of one guess after plain rounds, whose rows it has to run first.
    restart_ms: Typical,
    /// Weighted rounds in which a guess at this position was tried, and was right.
    tried: [f64; MAX_GUESSES],
    right: [f64; MAX_GUESSES],
    /// Milliseconds that rounds took beyond what plain steps would have, less what may be lost:
    /// guessing stops while it is above 0.
    loss_ms: f64,
    /// Guessing rounds since the last plain one.
    guessing_rounds: usize,
    guesses: usize,
    ever_right: bool,
    switched_off: Option<String>,
}

impl Default for AdaptivePolicy {
    fn default() -> Self {
        Self {
            verify_ms: [Typical::default(); MAX_GUESSES + 1],
            draft_ms: [Typical::default(); MAX_GUESSES],
            restart_ms: Typical::default(),
            tried: [0.0; MAX_GUESSES],
            right: [0.0; MAX_GUESSES],
            loss_ms: 0.0,
            guessing_rounds: 0,
            guesses: 0,
            ever_right: false,
            switched_off: None,
        }
    }
}

impl Policy {
    /// As many as pay, beginning without knowledge.
    pub fn adaptive() -> Self {
        Policy::Adaptive(Box::default())
    }

    /// Guesses for the next round.
    pub fn choose(&self) -> usize {
        match self {
            Policy::Fixed(count) => *count,
            Policy::Adaptive(adaptive) => adaptive.choose(),
        }
    }

    /// Whether guesses are expected to pay, so that the drafter had better keep up.
    pub fn is_active(&self) -> bool {
        match self {
            Policy::Fixed(count) => *count > 0,
            Policy::Adaptive(adaptive) => adaptive.expects_gain(),
        }
    }

    /// Learns from a round.
    pub fn observe(&mut self, cost: RoundCost) {
        if let Policy::Adaptive(adaptive) = self {
            adaptive.observe(cost);
        }
    }
}

impl AdaptivePolicy {
    /// Why the drafter is not asked any more, if it is not.
    pub fn switched_off(&self) -> Option<&str> {
        self.switched_off.as_deref()
    }

    /// Milliseconds of a verify step of `rows` rows: measured, or drawn through what was.
    fn verify_cost(&self, rows: usize) -> Option<f64> {
        interpolate(&self.verify_ms.map(|cost| cost.median()), rows - 1)
    }

    fn draft_cost(&self, guesses: usize) -> Option<f64> {
        interpolate(&self.draft_ms.map(|cost| cost.median()), guesses - 1)
    }

    /// Expected tokens of a round with `guesses` guesses.
    fn expected_tokens(&self, guesses: usize) -> f64 {
        let (mut survival, mut tokens) = (1.0, 1.0);
        // Where little was seen lately, a guess is taken to be as good as the one before it, so that
        // longer chains are tried again when the text becomes easy.
        let mut rate = PRIOR_ACCEPTANCE;
        for position in 0..guesses {
            rate = (self.right[position] + rate) / (self.tried[position] + 1.0);
            survival *= rate;
            tokens += survival;
        }
        tokens
    }

    /// Speed with `guesses` guesses over plain speed.
    fn gain(&self, guesses: usize) -> Option<f64> {
        let round = self.verify_cost(guesses + 1)? + self.draft_cost(guesses)?;
        Some(self.expected_tokens(guesses) * self.verify_cost(1)? / round)
    }

    /// The number of guesses with the largest gain, and the gain.
    fn best(&self) -> Option<(usize, f64)> {
        let gains = (1..=MAX_GUESSES).filter_map(|guesses| Some((guesses, self.gain(guesses)?)));
        gains.max_by(|a, b| a.1.total_cmp(&b.1))
    }

    fn choose(&self) -> usize {
        let refresh = self.guessing_rounds >= GUESSING_ROUNDS;
        let known = self.verify_ms[0].count >= FIRST_PLAIN_ROUNDS;
        if self.switched_off.is_some() || !known || refresh || self.loss_ms > 0.0 {
            return 0;
        }
        match self.best() {
            // Nothing is known of drafts yet: one short chain, then a longer one, tell the costs.
            None => 1,
            Some(_) if self.verify_ms[4].count == 0 && self.verify_ms[3].count == 0 => 3,
            Some((guesses, gain)) if gain >= WORTHWHILE => guesses,
            Some(_) => usize::from(self.can_afford_probe()),
        }
    }

    /// Whether what was earned pays for one guess that turns out to be wrong.
    fn can_afford_probe(&self) -> bool {
        let draft = self.restart_ms.median().or(self.draft_cost(1));
        let [Some(plain), Some(verify), Some(draft)] =
            [self.verify_cost(1), self.verify_cost(2), draft]
        else {
            return false;
        };
        // What costs more than the largest credit is tried when that is reached.
        let loss = (verify + draft - plain).min(LOSS_CREDIT_STEPS * plain);
        loss <= -self.loss_ms
    }

    /// Whether the next rounds are expected to gain by guesses; true before anything is known.
    fn expects_gain(&self) -> bool {
        let gains = self.best().is_none_or(|(_, gain)| gain >= WORTHWHILE);
        self.switched_off.is_none() && self.loss_ms <= 0.0 && gains
    }

    fn observe(&mut self, cost: RoundCost) {
        let RoundCost { drafted, accepted, verify, draft, follows_draft } = cost;
        let draft = draft.as_secs_f64() * 1e3;
        if drafted > MAX_GUESSES {
            return;
        }
        // Typical times, so that what else the machine does is not laid to the guesses.
        let verify = self.verify_ms[drafted].add(verify.as_secs_f64() * 1e3);
        let step = self.verify_cost(1).unwrap_or(verify);
        let plain = step * (accepted + 1) as f64;
        let loss = match drafted {
            0 => 0.0,
            1 if !follows_draft => verify + self.restart_ms.add(draft) - plain,
            _ if !follows_draft => verify + draft - plain,
            _ => verify + self.draft_ms[drafted - 1].add(draft) - plain,
        };
        // Credit is bounded, so old gains do not pay for long losses.
        self.loss_ms = (self.loss_ms + loss - LOSS_BUDGET * plain).max(-LOSS_CREDIT_STEPS * step);
        if drafted == 0 {
            self.guessing_rounds = 0;
            return;
        }
        self.guessing_rounds += 1;
        let decay = 0.5f64.powf(1.0 / HALF_LIFE_ROUNDS);
        for position in 0..MAX_GUESSES {
            // A guess behind the first wrong one was not judged.
            let judged = position < drafted.min(accepted + 1);
            let right = judged && position < accepted;
            self.tried[position] = self.tried[position] * decay + f64::from(u8::from(judged));
            self.right[position] = self.right[position] * decay + f64::from(u8::from(right));
        }
        self.guesses += drafted;
        self.ever_right |= accepted > 0;
        if !self.ever_right && self.guesses >= HOPELESS_GUESSES {
            self.switched_off = Some(format!(
                "none of its {} guesses was right; check that the drafter was made for this model",
                self.guesses
            ));
        }
    }
}

/// The last values of a cost.
#[derive(Debug, Clone, Copy, Default)]
struct Typical {
    recent: [f64; 15],
    count: usize,
}

impl Typical {
    /// Takes in a value; returns the median with it.
    fn add(&mut self, value: f64) -> f64 {
        self.recent[self.count % self.recent.len()] = value;
        self.count += 1;
        self.median().unwrap_or(value)
    }

    /// The middle of the last values, if there are any.
    fn median(&self) -> Option<f64> {
        let mut sorted = self.recent;
        let known = &mut sorted[..self.count.min(self.recent.len())];
        known.sort_by(f64::total_cmp);
        known.get(known.len() / 2).copied()
    }
}

/// The value at `index`, or one on the line through the nearest known neighbours.
fn interpolate(known: &[Option<f64>], index: usize) -> Option<f64> {
    if let Some(value) = known[index] {
        return Some(value);
    }
    let at = |i: usize| known[i].map(|value| (i as f64, value));
    let below = (0..index).rev().find_map(at);
    let above = (index + 1..known.len()).find_map(at);
    let ((x0, y0), (x1, y1)) = match (below, above) {
        (Some(below), Some(above)) => (below, above),
        (Some(below), None) => {
            let second = (0..below.0 as usize).rev().find_map(at);
            // With one known point the cost is taken to grow in proportion.
            (second.unwrap_or((-1.0, 0.0)), below)
        }
        (None, above) => return above.map(|(_, value)| value),
    };
    let value = y0 + (y1 - y0) * (index as f64 - x0) / (x1 - x0);
    // Noise may make the line fall; more rows never cost less.
    Some(if index as f64 > x1 { value.max(y1) } else { value })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes `rounds` rounds with a simulated drafter; returns (tokens, milliseconds).
    fn simulate(
        policy: &mut Policy,
        rounds: usize,
        acceptance: f64,
        verify_ms: impl Fn(usize) -> f64,
        draft_ms: f64,
    ) -> (f64, f64) {
        let mut state = 7u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let (mut tokens, mut time) = (0.0, 0.0);
        let mut follows_draft = false;
        for _ in 0..rounds {
            let drafted = policy.choose();
            let accepted = (0..drafted).take_while(|_| uniform() < acceptance).count();
            let (verify, draft) = (verify_ms(drafted + 1), draft_ms * drafted as f64);
            let duration = |ms: f64| Duration::from_secs_f64(ms / 1e3);
            policy.observe(RoundCost {
                drafted,
                accepted,
                verify: duration(verify),
                draft: duration(draft),
                follows_draft,
            });
            follows_draft = drafted > 0;
            tokens += (accepted + 1) as f64;
            time += verify + draft;
        }
        (tokens, time)
    }

    #[test]
    fn where_it_pays_it_comes_near_the_best_fixed_chain() {
        let cost = |rows: usize| 10.0 + 1.0 * rows as f64;
        for acceptance in [0.6, 0.8, 0.95] {
            let speed = |policy: &mut Policy| {
                let (tokens, time) = simulate(policy, 3000, acceptance, cost, 1.0);
                tokens / time
            };
            let best = (1..=7).map(|k| speed(&mut Policy::Fixed(k))).fold(0.0, f64::max);
            let found = speed(&mut Policy::adaptive());
            assert!(found > 0.97 * best, "acceptance {acceptance}: {found} of {best}");
        }
    }

    #[test]
    fn where_it_does_not_pay_it_costs_less_than_two_percent() {
        // Cost in proportion to the rows: nothing can be gained.
        for acceptance in [0.0, 0.3, 0.7, 1.0] {
            for draft in [0.1, 3.0] {
                let mut policy = Policy::adaptive();
                let (tokens, time) =
                    simulate(&mut policy, 2000, acceptance, |m| 10.0 * m as f64, draft);
                let slow_down = time / (tokens * 10.0);
                assert!(slow_down < 1.02, "acceptance {acceptance}, draft {draft}: {slow_down}");
            }
        }
    }

    #[test]
    fn it_follows_a_change_of_text() {
        let cost = |rows: usize| 10.0 + 2.0 * rows as f64;
        let mut policy = Policy::adaptive();
        simulate(&mut policy, 500, 0.1, cost, 1.0);
        simulate(&mut policy, 1500, 0.95, cost, 1.0);
        assert!(policy.choose() >= 4, "chooses {}", policy.choose());
        simulate(&mut policy, 300, 0.05, cost, 1.0);
        assert_eq!(policy.choose(), 0);
    }

    #[test]
    fn a_drafter_that_is_never_right_is_switched_off_with_a_reason() {
        let mut policy = Policy::adaptive();
        simulate(&mut policy, 200_000, 0.0, |rows| 10.0 + 0.01 * rows as f64, 0.01);
        let Policy::Adaptive(adaptive) = &policy else { unreachable!() };
        assert!(adaptive.switched_off().is_some_and(|reason| reason.contains("none of its")));
        assert_eq!(policy.choose(), 0);
    }

    #[test]
    fn unknown_costs_lie_on_the_line_through_known_ones() {
        let known = [Some(10.0), None, Some(14.0), None, None];
        assert_eq!(interpolate(&known, 1), Some(12.0));
        assert_eq!(interpolate(&known, 4), Some(18.0));
        assert_eq!(interpolate(&[Some(3.0), None, None], 2), Some(9.0));
        assert_eq!(interpolate(&[None, None], 0), None);
        assert_eq!(interpolate(&[Some(9.0), Some(3.0), None], 2), Some(3.0));
    }
}
