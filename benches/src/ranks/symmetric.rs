//! A rank's symmetric memory.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use oxtile::comm::{HostRank, Rank, Team, WorldSize};
use oxtile::num::bf16;
use oxtile::symmetric::{
    Arena, ArenaOptions, BackendName, Channel, ChunkedGather, Epoch, GatherMemory, PullGather, PushGather, PushMemory, SymmetricBuffer,
};
use oxtile::{Buffer, Event, Stream};

use super::member::DEADLINE;

/// In how many pieces shards are copied: the ways of a gather.
const WAYS: [u64; 2] = [1, 4];

pub struct Symmetric {
    rank: HostRank,
    backend: BackendName,
    copies: Stream,
    arrivals: Stream,
    open: Option<Open>,
}

/// An arena for shards of one size.
struct Open {
    shard_bytes: u64,
    /// One for each of the [`WAYS`].
    push: Vec<PushGather<bf16>>,
    pull: Vec<PullGather<bf16>>,
    /// The buffer that is put, and pushed.
    shard: Buffer<bf16>,
    /// The target of gets; `None` while a call has it.
    output: Option<Buffer<bf16>>,
    target: SymmetricBuffer<bf16>,
    pings: Channel,
    epoch: Epoch,
    arena: Arena,
}

impl Symmetric {
    pub fn new(rank: HostRank, backend: BackendName) -> Result<Self> {
        let (copies, arrivals) = (rank.device().stream()?, rank.device().stream()?);
        Ok(Self { rank, backend, copies, arrivals, open: None })
    }

    pub fn rank(&self) -> &HostRank {
        &self.rank
    }

    pub fn backend(&self) -> BackendName {
        self.backend
    }

    pub fn world(&self) -> WorldSize {
        self.rank.world()
    }

    pub fn copies(&self) -> &Stream {
        &self.copies
    }

    /// Waits for both streams, within the deadline. On virtual GPUs a wait of the driver would end with an error where another rank has not
    /// come so far.
    pub fn settle(&self) -> Result<()> {
        let begin = Instant::now();
        for end in [self.copies.record()?, self.arrivals.record()?] {
            while !end.is_done()? {
                ensure!(begin.elapsed() < DEADLINE, "{}: a round is not done after {DEADLINE:?}", self.rank.rank());
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Every rank asks for the same: arenas are opened and closed together.
    pub fn prepare(&mut self, shard_bytes: u64) -> Result<()> {
        if self.open.as_ref().is_some_and(|open| open.shard_bytes == shard_bytes) {
            return Ok(());
        }
        self.close()?;
        let (world, len) = (self.world(), shard_bytes / 2);
        let backend = self.backend;
        // The places of gathers and the shard that is pulled, of both kinds, and the target of puts, each rounded up.
        let ways = WAYS.len() as u64;
        let bytes = shard_bytes * (ways * (u64::from(world.get()) + 1) + 1) + 4096;
        let arena = Arena::open(&self.rank, ArenaOptions { backend, bytes, deadline: DEADLINE, ..ArenaOptions::default() })?;
        let member = Team::all(world).member(self.rank.rank()).context("every rank is of the world")?;
        let (mut push, mut pull) = (Vec::new(), Vec::new());
        for chunks in WAYS {
            let memory = PushMemory::take(&arena, len, world.get())?;
            let mut one = PushGather::new(&arena, &member, memory, [&self.copies, &self.arrivals], chunks)?;
            one.shard(&self.copies)?.fill_zero(&self.copies)?;
            push.push(one);
            let mut one = PullGather::new(&arena, &member, GatherMemory::take(&arena, len)?, &self.copies, chunks)?;
            one.shard(&self.copies)?.fill_zero(&self.copies)?;
            pull.push(one);
        }
        let (target, pings) = (arena.buffer(len)?, arena.channel()?);
        let shard = Buffer::zeros(&self.copies, len)?;
        let output = Some(Buffer::zeros(&self.copies, len)?);
        self.copies.synchronize()?;
        self.open = Some(Open { shard_bytes, push, pull, shard, output, target, pings, epoch: Epoch::ZERO, arena });
        Ok(())
    }

    /// Gathers with all that belongs to them: the results are released for the next. Those in place put what was written there once.
    pub fn push(&mut self, way: usize, is_in_place: bool, calls: u64) -> Result<[Event; 2]> {
        let Open { push, shard, .. } = self.open.as_mut().context("it was prepared")?;
        let push = &mut push[way];
        let start = self.copies.record()?;
        for _ in 0..calls {
            let ready = if is_in_place { push.start()? } else { push.start_from(&[shard])? };
            ready.whole(&self.arrivals)?;
            push.release(ready)?;
        }
        Ok([start, self.arrivals.record()?])
    }

    /// Gathers, the shard ready to be written again before each.
    pub fn pull(&mut self, way: usize, calls: u64) -> Result<[Event; 2]> {
        let Open { pull, .. } = self.open.as_mut().context("it was prepared")?;
        let pull = &mut pull[way];
        let start = self.copies.record()?;
        for _ in 0..calls {
            pull.shard(&self.copies)?;
            let ready = pull.start()?;
            ready.whole(&self.copies)?;
            pull.release(ready)?;
        }
        Ok([start, self.copies.record()?])
    }

    pub fn put(&mut self, calls: u64) -> Result<[Event; 2]> {
        let next = self.next();
        let Open { target, shard, .. } = self.open.as_ref().context("it was prepared")?;
        let start = self.copies.record()?;
        for _ in 0..calls {
            target.peer(next)?.put(&self.copies, shard, 0..shard.len(), 0)?;
        }
        Ok([start, self.copies.record()?])
    }

    pub fn get(&mut self, calls: u64) -> Result<[Event; 2]> {
        let next = self.next();
        let Open { target, shard, output, .. } = self.open.as_mut().context("it was prepared")?;
        let start = self.copies.record()?;
        for _ in 0..calls {
            let into = output.take().context("the output is back")?;
            *output = Some(target.peer(next)?.get(&self.copies, 0..shard.len(), into, 0)?.then(&self.copies)?);
        }
        Ok([start, self.copies.record()?])
    }

    /// Rank 0 signals rank 1, which signals back; what a rank does for one trip is a batch, or two calls.
    pub fn round_trip(&mut self, rank: Rank, is_batch: bool, calls: u64) -> Result<[Event; 2]> {
        let (next, world) = (self.next(), self.world());
        let Open { arena, pings, epoch, .. } = self.open.as_mut().context("it was prepared")?;
        let (stream, pings) = (&self.copies, *pings);
        let start = stream.record()?;
        for _ in 0..calls {
            *epoch = epoch.next();
            let (to, waits_first) = match rank.index() {
                0 => (next, false),
                1 if world.get() > 1 => (Rank::ZERO, true),
                _ => continue,
            };
            match (is_batch, waits_first) {
                (true, false) => arena.batch(stream).signal(pings, to, *epoch)?.wait(pings, to, *epoch)?.enqueue()?,
                (true, true) => arena.batch(stream).wait(pings, to, *epoch)?.signal(pings, to, *epoch)?.enqueue()?,
                (false, false) => {
                    arena.signal(stream, pings, to, *epoch)?;
                    arena.wait(stream, pings, to, *epoch)?;
                }
                (false, true) => {
                    arena.wait(stream, pings, to, *epoch)?;
                    arena.signal(stream, pings, to, *epoch)?;
                }
            }
        }
        Ok([start, stream.record()?])
    }

    fn next(&self) -> Rank {
        let world = self.world();
        Rank::new((self.rank.rank().index() + 1) % world.get(), world).unwrap_or(Rank::ZERO)
    }

    fn close(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        let Open { push, pull, target, arena, .. } = open;
        drop((push, pull, target));
        Ok(arena.close().map_err(oxtile::Error::from)?.finish()?)
    }
}

impl Drop for Symmetric {
    fn drop(&mut self) {
        // An arena that cannot be closed keeps its memory, until the process ends.
        let _ = self.close();
    }
}
