//! Ranks, and how many there are.

use std::fmt;
use std::num::NonZeroU32;

/// How many ranks there are; at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorldSize(NonZeroU32);

/// One of the ranks of a world, below its [`WorldSize`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(u32);

impl WorldSize {
    /// A single rank.
    pub const ONE: Self = Self(NonZeroU32::MIN);

    /// A world of `size` ranks; `None` for zero.
    pub const fn new(size: u32) -> Option<Self> {
        match NonZeroU32::new(size) {
            Some(size) => Some(Self(size)),
            None => None,
        }
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0.get()
    }

    /// All ranks, in order.
    pub fn ranks(self) -> impl ExactSizeIterator<Item = Rank> {
        (0..self.get()).map(Rank)
    }
}

impl Rank {
    /// The first rank of every world.
    pub const ZERO: Self = Self(0);

    /// Rank `index` of a world; `None` if the world has no such rank.
    pub const fn new(index: u32, world: WorldSize) -> Option<Self> {
        if index < world.get() { Some(Self(index)) } else { None }
    }

    /// Its number, from 0.
    pub const fn index(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ranks", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_belongs_to_its_world() {
        let world = WorldSize::new(3).unwrap();
        assert_eq!(WorldSize::new(0), None);
        assert_eq!(Rank::new(3, world), None);
        assert_eq!(world.ranks().map(Rank::index).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(Rank::new(2, world), world.ranks().last());
    }
}
