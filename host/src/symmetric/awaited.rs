//! What streams wait for: whom a deadline names.

use std::collections::{BTreeMap, BTreeSet};

use super::signal::Epoch;
use crate::comm::Rank;
use crate::runtime::Result;

/// A word that a rank is to set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    pub word: u64,
    pub from: Rank,
    /// To what it is to come; none for a flag, which is taken back and then says no more.
    pub epoch: Option<Epoch>,
}

/// What each stream waits for.
#[derive(Clone, Debug, Default)]
pub(super) struct Awaited {
    /// The last epoch, by stream, word and who writes it.
    epochs: BTreeMap<(u64, u64, Rank), Epoch>,
    flags: BTreeSet<(u64, Rank)>,
}

impl Awaited {
    pub fn note(&mut self, stream: u64, Expected { word, from, epoch }: Expected) {
        match epoch {
            Some(epoch) => {
                self.epochs.insert((stream, word, from), epoch);
            }
            None => {
                self.flags.insert((word, from));
            }
        }
    }

    /// Who has not signalled, by what `read` finds in the words. A rank behind an epoch is missing. Flags are 0 both before they are set and
    /// when they were taken back: they count where no epoch says who it is, and then the second is true: not all of these need be missing.
    pub fn missing(&self, read: impl Fn(u64) -> Result<u64>) -> Result<(Vec<Rank>, bool)> {
        let mut late = BTreeSet::new();
        for ((_, word, from), epoch) in &self.epochs {
            if !late.contains(from) && read(*word)? < epoch.0 {
                late.insert(*from);
            }
        }
        let are_flags = late.is_empty();
        for (word, from) in self.flags.iter().filter(|_| are_flags) {
            if !late.contains(from) && read(*word)? == 0 {
                late.insert(*from);
            }
        }
        let is_guess = are_flags && late.len() > 1;
        Ok((late.into_iter().collect(), is_guess))
    }
}
