//! A rank's mailboxes: messages by kernels.

use anyhow::{Result, bail, ensure};
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
        Ok(Self { exchanges, shard, whole, arena: Some(arena) })
    }

    /// Buffers of this size, the shard's words told from those of other ranks.
    pub fn prepare(&mut self, rank: &HostRank, stream: &Stream, whole_bytes: u64) -> Result<()> {
        let words = whole_bytes / 4;
        if self.whole.len() != words {
            let shard = words / u64::from(rank.world().get());
            self.shard = Buffer::from_slice(stream, &vec![1 + rank.rank().index(); shard as usize])?;
            self.whole = Buffer::zeros(stream, words)?;
        }
        Ok(())
    }

    pub fn gather(&mut self, cut: usize, stream: &Stream, calls: u64) -> Result<[Event; 2]> {
        let Self { exchanges, shard, whole, .. } = self;
        let Some(exchange) = exchanges.get_mut(cut) else { bail!("there are {} cuts", CUTS.len()) };
        let start = stream.record()?;
        (0..calls).try_for_each(|_| exchange.all_gather(stream, shard, whole))?;
        Ok([start, stream.record()?])
    }

    /// Whether all went well, and every rank's words arrived.
    pub fn check(&mut self, stream: &Stream) -> Result<()> {
        self.exchanges.iter_mut().try_for_each(|exchange| exchange.check(stream))?;
        let (found, shard) = (self.whole.to_vec(stream)?, self.shard.len().max(1) as usize);
        let is_right = found.chunks(shard).zip(1..).all(|(words, rank)| words.iter().all(|word| *word == rank));
        ensure!(is_right, "a message did not arrive as it was sent");
        Ok(())
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        self.exchanges.clear();
        // An arena that cannot be closed keeps its memory, until the process ends.
        let _ = self.arena.take().map(|arena| arena.close().and_then(|closing| closing.finish()));
    }
}
