//! Finished rows on their way to all members.

use std::sync::Arc;

use oxtile_tile::num::Pod;

use super::memory::Inner;
use crate::comm::Rank;
use crate::overlap::memory::Inner as Parts;
use crate::overlap::scattered::Shards;
use crate::runtime::memory::Memory;
use crate::runtime::{Buffer, Kind, Result, Stream, order};

/// Puts each run of finished rows to the other members, into their results, and tells them after the last one.
///
/// No flag tells a rank that the others' results may be written: it has read their parts of the same call, and a rank sends those after all that has read its result.
pub(in crate::overlap) struct Spread<'a> {
    of: &'a Inner,
    /// The bytes of each run of own rows, in memory of its own, and where they lie in the result.
    runs: Vec<(Buffer<u8>, u64)>,
    /// The other members, in the order in which they are put to.
    targets: Vec<Rank>,
    /// The other members that have rows.
    sources: Vec<Rank>,
}

impl<'a> Spread<'a> {
    /// Of runs of own rows, which lie in the result.
    pub(super) fn new<O: Pod>(of: &'a Inner, shards: &Shards, rows: &[Buffer<O>]) -> Self {
        let (parts, first) = (&of.parts.0, of.result().local().address());
        let me = parts.member.rank().index();
        let run = |rows: &Buffer<O>| {
            // SAFETY: the bytes of a buffer's elements, which share its uses.
            let bytes = unsafe { Buffer::<u8>::of(Arc::clone(rows.memory()), rows.len() * size_of::<O>() as u64) };
            (bytes, rows.address() - first)
        };
        let world = |members: Vec<u32>| members.into_iter().map(|member| parts.world_rank(member)).collect();
        let sources = shards.sources(me).filter(|source| !shards.shard(*source).is_empty()).collect();
        Self { of, runs: rows.iter().map(run).collect(), targets: world(shards.targets(me).collect()), sources: world(sources) }
    }
}

impl Spread<'_> {
    /// Before the products: all that has read the result comes before.
    pub fn begin(&self, compute: &Stream) -> Result<()> {
        let mut result = self.of.result();
        let memory = result.local().memory();
        order(&compute.0, |wait_for| memory.add_use(&compute.0, true, wait_for))?;
        if compute.0.runtime.kind() == Kind::Emulated {
            let all = 0..result.len();
            result.discard(compute, all)?;
        }
        Ok(())
    }

    /// Puts a run, after the work that `out` comes after already. If a wait of that work was not answered, the rows are garbage, and do not leave.
    pub fn put(&self, parts: &Parts, run: usize) -> Result<()> {
        let (result, (bytes, at)) = (self.of.result(), &self.runs[run]);
        let peers = self.targets.iter().map(|to| result.peer(*to)).collect::<Result<Vec<_>>>()?;
        let answered = parts.arena.batch(&parts.out).answered();
        let put = peers.iter().try_fold(answered, |batch, peer| batch.put(peer, bytes, 0..bytes.len(), *at))?;
        let is_last = run + 1 == self.runs.len();
        let told = self.targets.iter().filter(|_| is_last);
        told.copied().try_fold(put, |batch, to| batch.set(&self.of.rows, 0, to))?.enqueue()
    }

    /// The others' rows are there before later work.
    pub fn end(&self, parts: &Parts, compute: &Stream) -> Result<()> {
        let waited = self.sources.iter().try_fold(parts.arena.batch(compute), |batch, from| batch.wait_flag(&self.of.rows, 0, *from))?;
        self.sources.iter().try_fold(waited, |batch, from| batch.clear(&self.of.rows, 0, *from))?.enqueue()
    }

    /// The memory of the runs.
    pub fn memories(&self) -> impl Iterator<Item = &Arc<Memory>> {
        self.runs.iter().map(|(bytes, _)| bytes.memory())
    }
}
