//! What streams wait for: which ranks an error names when a deadline is over.

use std::collections::{BTreeMap, BTreeSet};

use super::signal::Epoch;
use crate::comm::Rank;
use crate::runtime::Result;

/// A word that a rank is to set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    pub word: u64,
    pub from: Rank,
    /// The epoch that is expected; none for a flag, which is reset after its wait and then says nothing any more.
    pub epoch: Option<Epoch>,
}

/// The ranks that have not signalled.
pub(super) struct Missing {
    pub ranks: Vec<Rank>,
    /// Whether some of them may not be missing.
    pub is_guess: bool,
    /// Whether flags alone name them: the verdict of a kernel that waits for one knows better.
    pub are_flags: bool,
    /// The word of a flag of the only one.
    pub flag: Option<u64>,
}

/// What each stream waits for.
#[derive(Clone, Debug, Default)]
pub(super) struct Awaited {
    /// The last epoch, by stream, word and the rank that writes it.
    epochs: BTreeMap<(u64, u64, Rank), Epoch>,
    flags: BTreeSet<(u64, Rank)>,
    /// Every stream that has waited.
    streams: BTreeSet<u64>,
}

impl Awaited {
    /// Returns how many streams have waited, if this is one more.
    pub fn note(&mut self, stream: u64, Expected { word, from, epoch }: Expected) -> Option<usize> {
        match epoch {
            Some(epoch) => {
                self.epochs.insert((stream, word, from), epoch);
            }
            None => {
                self.flags.insert((word, from));
            }
        }
        self.streams.insert(stream).then_some(self.streams.len())
    }

    /// The ranks that have not signalled, by what `read` finds in the words: a rank whose word is below its epoch is missing. Flags are 0 both before they
    /// are set and after they are reset: they count only where no epoch names a rank.
    pub fn missing(&self, read: impl Fn(u64) -> Result<u64>) -> Result<Missing> {
        let (mut late, mut flag) = (BTreeSet::new(), None);
        for ((_, word, from), epoch) in &self.epochs {
            if !late.contains(from) && read(*word)? < epoch.0 {
                late.insert(*from);
            }
        }
        let are_flags = late.is_empty();
        for (word, from) in self.flags.iter().filter(|_| are_flags) {
            if !late.contains(from) && read(*word)? == 0 {
                late.insert(*from);
                flag.get_or_insert(*word);
            }
        }
        let is_guess = are_flags && late.len() > 1;
        Ok(Missing { ranks: late.into_iter().collect(), is_guess, are_flags, flag: flag.filter(|_| !is_guess) })
    }
}

/// The hardware queues of a device, which its streams share: read from `CUDA_DEVICE_MAX_CONNECTIONS`, as the driver does.
pub(super) fn hardware_queues() -> usize {
    /// Without the variable.
    const DEFAULT: usize = 8;
    std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok().and_then(|queues| queues.parse().ok()).unwrap_or(DEFAULT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_that_wait_are_counted_once_each() {
        let mut awaited = Awaited::default();
        let mut note = |stream, epoch| awaited.note(stream, Expected { word: 0, from: Rank::ZERO, epoch });
        let found =
            [(1, None), (1, Some(Epoch::ZERO)), (2, None), (2, None), (3, Some(Epoch::ZERO))].map(|(stream, epoch)| note(stream, epoch));
        assert_eq!(found, [Some(1), None, Some(2), None, Some(3)]);
    }
}
