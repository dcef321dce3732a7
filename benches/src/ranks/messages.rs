//! A rank's mailboxes: messages by kernels.

use anyhow::{Result, bail};
use oxtile::comm::HostRank;
use oxtile::symmetric::{Arena, ArenaOptions, BackendName, Exchange, ExchangeOptions};
use oxtile::{Buffer, Event, Stream};

use super::member::DEADLINE;

/// Lanes, and bytes of their slots: the second is the default.
pub const CUTS: [(u32, u32); 2] = [(1, 16 << 10), (8, 8 << 10)];

pub struct Messages {
    /// One for each of [`CUTS`].
    exchanges: Vec<Exchange>,
    shard: Buffer<u32>,
    whole: Buffer<u32>,
    /// The first word of the whole, which counts on from there; another one each time.
    first: u32,
    arena: Option<Arena>,
}

impl Messages {
    /// Every rank opens them.
    pub fn open(rank: &HostRank, stream: &Stream) -> Result<Self> {
        let arena = Arena::open(rank, ArenaOptions { backend: BackendName::Vmm, deadline: DEADLINE, ..ArenaOptions::default() })?;
        let exchange = |(lanes, slot_bytes)| {
            let options = ExchangeOptions { lanes, slot_bytes, ..ExchangeOptions::default() };
            Exchange::new(&arena, stream, options)
        };
        let exchanges = CUTS.into_iter().map(exchange).collect::<oxtile::Result<_>>()?;
        let (shard, whole) = (Buffer::zeros(stream, 0)?, Buffer::zeros(stream, 0)?);
        Ok(Self { exchanges, shard, whole, first: 0, arena: Some(arena) })
    }

    /// Buffers of this size.
    pub fn prepare(&mut self, rank: &HostRank, stream: &Stream, whole_bytes: u64) -> Result<()> {
        let words = whole_bytes / 4;
        if self.whole.len() != words {
            self.shard = Buffer::uninitialised(stream, words / u64::from(rank.world().get()))?;
            self.whole = Buffer::uninitialised(stream, words)?;
        }
        self.renew(rank, stream)
    }

    /// Writes words to the shard that no message had before, and clears the whole. All ranks do it the same number of times, each before the gather.
    pub fn renew(&mut self, rank: &HostRank, stream: &Stream) -> Result<()> {
        self.first = self.first.wrapping_add(self.whole.len() as u32 + 1);
        let shard = self.shard.len() as u32;
        let first = self.first.wrapping_add(rank.rank().index() * shard);
        let words: Vec<u32> = (0..shard).map(|i| first.wrapping_add(i)).collect();
        self.shard.copy_from_slice(stream, &words)?;
        Ok(self.whole.fill_zero(stream)?)
    }

    pub fn gather(&mut self, cut: usize, stream: &Stream, calls: u64) -> Result<[Event; 2]> {
        let Self { exchanges, shard, whole, .. } = self;
        let Some(exchange) = exchanges.get_mut(cut) else { bail!("there are {} cuts", CUTS.len()) };
        let start = stream.record()?;
        (0..calls).try_for_each(|_| exchange.all_gather(stream, &*shard, &mut *whole))?;
        Ok([start, stream.record()?])
    }

    /// Whether all went well, and every rank's words arrived since they were [renewed](Self::renew).
    pub fn check(&mut self, stream: &Stream) -> Result<()> {
        self.exchanges.iter_mut().try_for_each(|exchange| exchange.check(stream))?;
        if let Some((at, found)) = first_wrong(&self.whole.to_vec(stream)?, self.first) {
            let expected = self.first.wrapping_add(at as u32);
            bail!("a message did not arrive as it was sent: word {at} of the whole is {found}, not {expected}");
        }
        Ok(())
    }
}

/// Where words do not count on from `first`, and what is there.
fn first_wrong(words: &[u32], first: u32) -> Option<(usize, u32)> {
    words.iter().copied().enumerate().find(|&(at, word)| word != first.wrapping_add(at as u32))
}

impl Drop for Messages {
    fn drop(&mut self) {
        self.exchanges.clear();
        // An arena that cannot be closed keeps its memory, until the process ends.
        let _ = self.arena.take().map(|arena| -> oxtile::Result<()> { arena.close()?.finish() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_arrive_is_found() {
        assert_eq!(first_wrong(&[7, 8, 9, 10], 7), None);
        // Nothing, the words of the message before, and two ranks' words in each other's place.
        assert_eq!(first_wrong(&[7, 8, 0, 0], 7), Some((2, 0)));
        assert_eq!(first_wrong(&[7, 8, 4, 5], 7), Some((2, 4)));
        assert_eq!(first_wrong(&[9, 10, 7, 8], 7), Some((0, 9)));
    }
}
