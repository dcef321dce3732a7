//! One call's way to the other members and back: copies of the shard, the flags of its chunks, and the word that a place was read.

use std::ops::Range;
use std::sync::Arc;

use super::memory::Inner;
use super::schedule::{Chunk, Schedule};
use crate::comm::Rank;
use crate::runtime::memory::Memory;
use crate::runtime::{Event, Kind, Result, Stream, order};
use crate::symmetric::{Batch, PutOrder, Rows, SymmetricBuffer};

/// What the copies of a call follow from.
#[derive(Clone, Copy)]
pub(super) struct Transfer<'t> {
    pub inner: &'t Inner,
    pub schedule: &'t Schedule,
    pub order: PutOrder,
}

impl Transfer<'_> {
    /// Puts this member's shard to the others, each once it has read what was in the place. A chunk is so many copies, in bytes of the place, and its flag is told after all of
    /// them. `shard` is the shard's own memory, if it has uses of its own. Outside of graphs the first wait for FREE, by [`PutOrder::ByChunk`] all of them, comes after what [used the place before](Inner::give), and not after what writes the shard.
    pub fn put(
        &self,
        from: &SymmetricBuffer<u8>,
        place: usize,
        shard: Option<&Arc<Memory>>,
        copies: impl Fn(&Chunk) -> Vec<Rows>,
    ) -> Result<()> {
        let (inner, schedule) = (self.inner, self.schedule);
        let me = inner.member.rank().index();
        let target = |target| (inner.world_rank(target), schedule.chunks(me, schedule.position(target, me)));
        let targets: Vec<(Rank, Vec<Chunk>)> = schedule.targets(me).map(target).collect();
        let at_once = if self.order == PutOrder::ByChunk { targets.len() } else { targets.len().min(1) };
        let batch = inner.arena.batch(&inner.out);
        let mut batch = targets[..at_once].iter().try_fold(batch, |batch, (to, _)| batch.take_back(&inner.free, place as u32, *to))?;
        if !inner.out.is_capturing() {
            batch.enqueue()?;
            batch = inner.arena.batch(&inner.out);
        }
        let memories = [from.local().memory()].into_iter().chain(shard);
        order(&inner.out.0, |wait_for| memories.for_each(|memory| memory.add_use(&inner.out.0, false, wait_for)))?;
        self.enqueue(batch, from, place, &targets, &copies)
    }

    fn enqueue<'b>(
        &'b self,
        mut batch: Batch<'b>,
        from: &'b SymmetricBuffer<u8>,
        place: usize,
        targets: &[(Rank, Vec<Chunk>)],
        copies: &impl Fn(&Chunk) -> Vec<Rows>,
    ) -> Result<()> {
        let inner = self.inner;
        let put = |batch: Batch<'b>, to, chunk: &Chunk| {
            let peer = from.peer(to)?;
            copies(chunk).into_iter().try_fold(batch, |batch, rows| batch.put_rows(&peer, from.local(), rows))
        };
        let set = |batch: Batch<'b>, to, chunk: &Chunk| batch.set(&inner.ready, Inner::ready_flag(place, chunk.number), to);
        match self.order {
            PutOrder::ByPeer | PutOrder::InStep => {
                for (step, (to, chunks)) in targets.iter().enumerate() {
                    if step > 0 && self.order == PutOrder::InStep {
                        batch = self.in_step(batch, place, step as u32)?;
                    }
                    if step > 0 {
                        batch = batch.take_back(&inner.free, place as u32, *to)?;
                    }
                    for chunk in chunks {
                        batch = set(put(batch, *to, chunk)?, *to, chunk)?;
                    }
                }
            }
            PutOrder::ByChunk => {
                for at in 0..targets.iter().map(|(_, chunks)| chunks.len()).max().unwrap_or(0) {
                    let together = || targets.iter().filter_map(move |(to, chunks)| Some((*to, chunks.get(at)?)));
                    batch = together().try_fold(batch, |batch, (to, chunk)| put(batch, to, chunk))?;
                    batch = together().try_fold(batch, |batch, (to, chunk)| set(batch, to, chunk))?;
                }
            }
        }
        batch.enqueue()
    }

    /// Waits for the last chunk of what was put to this member in the step before, so that all members put in step.
    fn in_step<'b>(&'b self, batch: Batch<'b>, place: usize, position: u32) -> Result<Batch<'b>> {
        let (inner, schedule) = (self.inner, self.schedule);
        let me = inner.member.rank().index();
        let source = schedule.sources(me).find(|source| schedule.position(me, *source) == position);
        let last = source.and_then(|source| Some((source, schedule.chunks(source, position).pop()?)));
        match last {
            Some((source, last)) => batch.wait_flag(&inner.ready, Inner::ready_flag(place, last.number), inner.world_rank(source)),
            None => Ok(batch),
        }
    }

    /// The others' chunks with their members, in the order in which they arrive.
    pub fn arrivals(&self) -> Vec<(u32, Chunk)> {
        let (schedule, me) = (self.schedule, self.inner.member.rank().index());
        let of = |source| schedule.chunks(source, schedule.position(me, source)).into_iter().map(move |chunk| (source, chunk));
        schedule.sources(me).flat_map(of).collect()
    }

    /// The flag of a member's chunk.
    pub fn flag(&self, place: usize, source: u32, chunk: &Chunk) -> (u32, Rank) {
        (Inner::ready_flag(place, chunk.number), self.inner.world_rank(source))
    }

    /// The flags of the others' chunks, in the order in which they arrive.
    pub fn awaited(&self, place: usize) -> Vec<(u32, Rank)> {
        self.arrivals().iter().map(|(source, chunk)| self.flag(place, *source, chunk)).collect()
    }
}

/// What a call has read, and what its release comes after.
pub(super) struct Read<'r> {
    pub place: usize,
    /// After the puts of the same call, for which `out` may wait for flags too.
    pub put: &'r Event,
    /// Whether a kernel of the call has waited for flags.
    pub has_waited: bool,
    pub flags: &'r [(u32, Rank)],
    /// Gives what the others have put, in bytes of the place. The emulator alone asks: no kernel may read it any more.
    pub others: &'r dyn Fn() -> Vec<Range<u64>>,
    /// The shard's own memory, if it has uses of its own.
    pub shard: Option<&'r Arc<Memory>>,
}

impl Inner {
    /// Tells the others that what they put has been read, after the work of `compute` so far. Outside of graphs
    /// later work of `compute` does not wait for that, but where a kernel has waited for its verdict: what follows would come of garbage.
    pub fn release(&self, compute: &Stream, of: &mut SymmetricBuffer<u8>, read: Read<'_>) -> Result<()> {
        let Read { place, put, has_waited, flags, others, shard } = read;
        let (aside, is_captured) = (self.aside(compute), compute.is_capturing());
        if !is_captured {
            if has_waited {
                self.arena.batch(compute).answered().enqueue()?;
            }
            aside.wait(&compute.mark()?)?;
        }
        aside.wait(put)?;
        if !is_captured {
            // All uses so far come before the release: those by other streams, which may have read the shard, too.
            let memory = of.local().memory();
            for memory in [memory].into_iter().chain(shard) {
                let known = [compute.0.id, self.out.0.id];
                order(&aside.0, |wait_for| wait_for.extend(memory.streams(true).into_iter().filter(|stream| !known.contains(&stream.id))))?;
                memory.forget_uses();
            }
            memory.add_use(&aside.0, true, &mut Vec::new());
        }
        if compute.0.runtime.kind() == Kind::Emulated {
            others().into_iter().try_for_each(|range| of.discard(aside, range))?;
        }
        let batch = self.arena.batch(aside);
        let batch = flags.iter().try_fold(batch, |batch, (flag, from)| batch.clear(&self.ready, *flag, *from))?;
        self.others().try_fold(batch, |batch, other| batch.set(&self.free, place as u32, other))?.enqueue()?;
        if is_captured { Ok(()) } else { self.released(place) }
    }
}

/// Later work waits for the flags.
pub(super) fn wait_for(inner: &Inner, stream: &Stream, flags: &[(u32, Rank)]) -> Result<()> {
    let batch = inner.arena.batch(stream);
    flags.iter().try_fold(batch, |batch, (flag, from)| batch.wait_flag(&inner.ready, *flag, *from))?.enqueue()
}
