//! Ranks as threads of one process, exchanging vectors through shared memory.
//!
//! Two sets of mailboxes take turns, so one barrier an exchange is enough: a rank that writes for
//! exchange n + 2 has passed the barrier of n + 1, which every rank enters only after it has read
//! the mailboxes of n.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::error::{Error, Result};

/// Polls before a waiting rank gives its core to another thread: with more ranks than cores the
/// rank that is waited for may need it.
const SPINS: usize = 200;

/// One rank's end of the exchange.
pub struct SharedMemory {
    shared: Arc<Shared>,
    rank: usize,
    ranks: usize,
    /// Its mailbox: the rank, but for one that is alone.
    mailbox: usize,
    turn: usize,
}

struct Shared {
    mailboxes: [Vec<RwLock<Vec<f32>>>; 2],
    arrived: AtomicUsize,
    round: AtomicUsize,
    aborted: AtomicBool,
}

impl Shared {
    fn new(mailboxes: usize) -> Self {
        let make = || (0..mailboxes).map(|_| RwLock::new(Vec::new())).collect();
        Self {
            mailboxes: [make(), make()],
            arrived: AtomicUsize::new(0),
            round: AtomicUsize::new(0),
            aborted: AtomicBool::new(false),
        }
    }
}

impl SharedMemory {
    /// The ends of `ranks` ranks, in rank order.
    pub fn group(ranks: usize) -> Vec<Self> {
        let shared = Arc::new(Shared::new(ranks));
        let end = |rank| Self { shared: shared.clone(), rank, ranks, mailbox: rank, turn: 0 };
        (0..ranks).map(end).collect()
    }

    /// The end of one of `ranks` ranks that runs without the others: it reads only what it
    /// publishes itself.
    pub fn alone(rank: usize, ranks: usize) -> Self {
        Self { shared: Arc::new(Shared::new(1)), rank, ranks, mailbox: 0, turn: 0 }
    }

    /// Number of ranks that share the model.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Whether this is the first of the ranks that exchange, which does what one of them has to.
    pub fn is_first(&self) -> bool {
        self.mailbox == 0
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Publishes `mine` and calls `read` with every rank's vector, in rank order. All ranks must
    /// call it the same number of times.
    ///
    /// # Errors
    /// If another rank ended before it published.
    pub fn exchange(&mut self, mine: &[f32], mut read: impl FnMut(usize, &[f32])) -> Result<()> {
        let mailboxes = &self.shared.mailboxes[self.turn];
        self.turn ^= 1;
        {
            let mut mailbox =
                mailboxes[self.mailbox].write().unwrap_or_else(PoisonError::into_inner);
            mailbox.clear();
            mailbox.extend_from_slice(mine);
        }
        self.barrier()?;
        for (rank, mailbox) in mailboxes.iter().enumerate() {
            read(rank, &mailbox.read().unwrap_or_else(PoisonError::into_inner));
        }
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        let shared = &self.shared;
        let round = shared.round.load(Ordering::Acquire);
        if shared.arrived.fetch_add(1, Ordering::AcqRel) + 1 == shared.mailboxes[0].len() {
            shared.arrived.store(0, Ordering::Relaxed);
            shared.round.store(round.wrapping_add(1), Ordering::Release);
            return Ok(());
        }
        let mut spins = 0;
        while shared.round.load(Ordering::Acquire) == round {
            // A rank may finish its last step and go away after this round was complete.
            if shared.aborted.load(Ordering::Acquire)
                && shared.round.load(Ordering::Acquire) == round
            {
                return Err(Error::runtime(format!(
                    "rank {}: another rank ended in the middle of a step; its message is above",
                    self.rank
                )));
            }
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

impl Drop for SharedMemory {
    /// A rank that goes away must not leave the others waiting.
    fn drop(&mut self) {
        self.shared.aborted.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_reads_all_vectors_in_rank_order() {
        let ends = SharedMemory::group(4);
        std::thread::scope(|scope| {
            for mut end in ends {
                scope.spawn(move || {
                    for round in 0..1000 {
                        let mine = vec![(end.rank() * 1000 + round) as f32; 1 + round % 3];
                        let mut seen = Vec::new();
                        end.exchange(&mine, |rank, theirs| seen.push((rank, theirs.to_vec())))
                            .expect("no rank ends early");
                        for (rank, theirs) in seen.iter().enumerate() {
                            let expected = vec![(rank * 1000 + round) as f32; 1 + round % 3];
                            assert_eq!(*theirs, (rank, expected));
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_alone_reads_its_own_vector() {
        let mut end = SharedMemory::alone(3, 8);
        assert_eq!((end.rank(), end.ranks(), end.is_first()), (3, 8, true));
        for round in 0..3 {
            let mut seen = Vec::new();
            end.exchange(&[round as f32], |_, theirs| seen.push(theirs.to_vec())).expect("alone");
            assert_eq!(seen, [[round as f32]]);
        }
    }

    #[test]
    fn a_rank_that_ends_releases_the_others() {
        let mut ends = SharedMemory::group(2);
        drop(ends.pop());
        let error = ends[0].exchange(&[1.0], |_, _| {}).expect_err("rank 1 is gone");
        assert!(error.to_string().starts_with("rank 0: another rank ended"), "{error}");
    }
}
