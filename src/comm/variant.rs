//! The ways in which GPUs exchange their partial sums.

use std::fmt;

/// One way; all give the same bits (kernels/reduce_norm.cu).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Variant {
    /// Each rank writes into all others' memory.
    Push,
    /// Each rank reads from all others' memory.
    Pull,
    /// Each rank sums a share of the columns and gives the sum to all: two phases, less traffic.
    Owner,
    /// As [`Variant::Pull`], through the host's memory: needs no access from one GPU to another.
    Staged,
}

/// A part of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// A rank's partial sums leave it.
    Send,
    /// An owner sums its share.
    Combine,
    /// The sums are taken.
    Receive,
}

impl Variant {
    /// All of them; where two are as fast, the first is taken.
    pub const ALL: [Self; 4] = [Self::Push, Self::Pull, Self::Owner, Self::Staged];

    /// Its name in reports and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Pull => "pull",
            Self::Owner => "owner",
            Self::Staged => "staged",
        }
    }

    /// The variant of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|variant| variant.name() == name)
    }

    /// Its parts, in order.
    pub fn phases(self) -> &'static [Phase] {
        match self {
            Self::Owner => &[Phase::Send, Phase::Combine, Phase::Receive],
            _ => &[Phase::Send, Phase::Receive],
        }
    }

    /// Whether a GPU touches another's memory.
    pub fn needs_peer_access(self) -> bool {
        self != Self::Staged
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Phase {
    /// Its bit in what kernels are told (kernels/exchange.cuh).
    pub fn bit(self) -> i32 {
        match self {
            Self::Send => 1,
            Self::Combine => 2,
            Self::Receive => 4,
        }
    }

    /// The phase of a bit.
    pub fn from_bit(bit: i32) -> Option<Self> {
        [Self::Send, Self::Combine, Self::Receive].into_iter().find(|phase| phase.bit() == bit)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Send => "send",
            Self::Combine => "combine",
            Self::Receive => "receive",
        })
    }
}
