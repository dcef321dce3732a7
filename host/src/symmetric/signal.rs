//! Signals: words that only grow.

/// The number of a signal of a channel. The first is 1; at 0 no signal has come yet. Epochs only grow, and a word is never reset, so a late waiter
/// cannot take an old signal for a new one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub(crate) u64);

impl Epoch {
    /// Before the first signal.
    pub const ZERO: Self = Self(0);

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The next epoch.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// The epoch `count` later.
    #[must_use]
    pub const fn later(self, count: u64) -> Self {
        Self(self.0 + count)
    }
}

/// A channel of an arena: on every rank a word for each rank, which that rank alone writes. Made by [`Arena::channel`](super::Arena::channel), and
/// valid in that rank's arena alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channel {
    /// The number of the arena that gave it.
    pub(super) arena: u64,
    pub(super) number: usize,
    pub(super) index: u64,
}
