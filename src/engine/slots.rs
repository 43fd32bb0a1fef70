//! Prefix reuse: a slot of the KV cache keeps the tokens of the sequence that left it, and a new
//! sequence takes the slot with which it has the most in common.
//!
//! The caches are one contiguous slot of `context` entries for each sequence, so whole slots are
//! what can be reused; the engine has no pages that two sequences could share.

use crate::spec::ModelDrafter;

/// A slot that no sequence is using.
#[derive(Debug, Default)]
struct Free {
    slot: usize,
    /// Whose cache entries are there.
    tokens: Vec<u32>,
    /// What the drafter's cache holds of them.
    drafter: ModelDrafter,
    /// When it was left; larger is later.
    left: u64,
}

/// A slot for a new sequence.
#[derive(Debug)]
pub struct Taken {
    /// The slot.
    pub slot: usize,
    /// Prompt tokens that are in its cache.
    pub cached: usize,
    /// The sequence's drafter, in step with that.
    pub drafter: ModelDrafter,
}

/// The free slots.
#[derive(Debug)]
pub struct PrefixSlots {
    free: Vec<Free>,
    clock: u64,
    drafts: bool,
}

impl PrefixSlots {
    /// `count` empty slots; `drafts`: the model has a drafter.
    pub fn new(count: usize, drafts: bool) -> Self {
        let slot = |slot| Free { slot, ..Free::default() };
        Self { free: (0..count).map(slot).collect(), clock: 0, drafts }
    }

    /// Whether a sequence could begin.
    pub fn any_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// The best free slot for a prompt of at least one token.
    pub fn take(&mut self, prompt: &[u32]) -> Option<Taken> {
        let common = |free: &Free| {
            free.tokens.iter().zip(prompt).take_while(|(mine, theirs)| mine == theirs).count()
        };
        // A slot is taken for what it has in common if that is at least half of it: a long history
        // is not given up for a system prompt that all share. Else the one that was left first
        // goes, and among those never used any; what it happens to share is used all the same.
        let rank = |free: &Free| {
            let common = common(free);
            let continues = common > 0 && 2 * common >= free.tokens.len();
            (continues, if continues { common } else { 0 }, std::cmp::Reverse(free.left))
        };
        let best = (0..self.free.len()).max_by_key(|index| rank(&self.free[*index]))?;
        let free = self.free.swap_remove(best);
        // The prompt's last token is run in any case, since its row gives the first token. With a
        // drafter so is the last common one: the drafter's row of it is made of its feature, which
        // the backend may have dropped, and of the token behind, which may be another.
        let common = common(&free) - usize::from(self.drafts && common(&free) > 0);
        let cached = common.min(prompt.len() - 1);
        let mut drafter = free.drafter;
        drafter.resume(cached);
        Some(Taken { slot: free.slot, cached, drafter })
    }

    /// A sequence leaves `slot`; its cache holds `tokens`.
    pub fn leave(&mut self, slot: usize, tokens: Vec<u32>, drafter: ModelDrafter) {
        self.clock += 1;
        self.free.push(Free { slot, tokens, drafter, left: self.clock });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leave(slots: &mut PrefixSlots, taken: Taken, tokens: &[u32]) {
        slots.leave(taken.slot, tokens.to_vec(), taken.drafter);
    }

    /// Runs sequences of these tokens one after the other in `count` slots.
    fn after(count: usize, drafts: bool, sequences: &[&[u32]]) -> PrefixSlots {
        let mut slots = PrefixSlots::new(count, drafts);
        for tokens in sequences {
            let taken = slots.take(tokens).unwrap();
            leave(&mut slots, taken, tokens);
        }
        slots
    }

    #[test]
    fn a_history_that_goes_on_is_found() {
        let mut slots = after(3, false, &[&[1, 2, 3, 4], &[5, 6, 7], &[8]]);
        let taken = slots.take(&[5, 6, 7, 8, 9]).unwrap();
        assert_eq!(taken.cached, 3);
        assert_eq!(slots.take(&[1, 2, 3, 4]).unwrap().cached, 3);
        assert_eq!(slots.take(&[9]).unwrap().cached, 0);
        assert!(slots.take(&[8]).is_none());
    }

    #[test]
    fn a_long_history_outlives_a_short_common_beginning() {
        let history: Vec<u32> = (0..100).collect();
        let mut slots = after(2, false, &[&[200, 201], &history]);
        let taken = slots.take(&[0, 1, 2, 77, 78]).unwrap();
        assert_eq!(taken.cached, 0);
        assert_eq!(slots.take(&history).unwrap().cached, 99);
        // With one slot there is no choice, and what is common is used.
        assert_eq!(after(1, false, &[&history]).take(&[0, 1, 2, 77]).unwrap().cached, 3);
    }

    #[test]
    fn what_was_left_first_goes_first() {
        let mut slots = after(2, false, &[&[1, 1], &[2, 2], &[1, 1, 1]]);
        assert!(slots.any_free());
        slots.take(&[9]).unwrap();
        assert_eq!(slots.take(&[1, 1, 1, 1]).unwrap().cached, 3);
        assert!(!slots.any_free());
    }

    #[test]
    fn a_drafter_needs_the_last_common_token_again() {
        assert_eq!(after(1, true, &[&[1, 2, 3]]).take(&[1, 2, 3, 4]).unwrap().cached, 2);
        assert_eq!(after(1, true, &[&[1, 2, 3]]).take(&[1, 2]).unwrap().cached, 1);
        assert_eq!(after(1, true, &[&[1]]).take(&[2]).unwrap().cached, 0);
    }
}
