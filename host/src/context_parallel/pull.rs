//! Keys and values that are read from the memory of their owner, and gradients that are written to it.
//!
//! One round of a pair of ranks, by flags that are taken back by who waits for them, so that a graph may hold it:
//!
//! 1. the owner takes DONE of its reader, copies keys and values to where they can be read, and sets READY;
//! 2. the reader takes READY, reads, and sets DONE;
//! 3. in a backward pass the reader writes its gradients into its slot at the owner, and sets GIVEN;
//! 4. the owner takes GIVEN of all readers, and adds the slots up.
//!
//! A slot is written again after the READY of the next pass, which the owner sets after it has added up those of this one.

use std::sync::{Arc, Mutex};

use oxtile_tile::launch::DeviceViewMut;

use super::detour::{Detour, Within};
use super::memory::Scratch;
use super::mover::{Both, BothMut, Reads, is};
use super::numbers::Numbers;
use crate::comm::{Member, Rank};
use crate::runtime::runtime::lock;
use crate::runtime::{Buffer, Result, Stream};
use crate::symmetric::{Arena, Flags, Pitched, Rows, SymmetricBuffer};
use crate::thd::Share;

const READY: u32 = 0;
const DONE: u32 = 1;
const GIVEN: u32 = 2;

/// Symmetric memory of a rank's keys and values, and of the gradients that others give it.
pub(super) struct Pull {
    arena: Arena,
    member: Member,
    /// Keys, then values.
    shard: SymmetricBuffer<u8>,
    /// Bytes of the keys.
    keys: u64,
    /// Gradients of keys of each rank, then those of values.
    slots: SymmetricBuffer<f32>,
    /// Elements of a rank's gradients of keys, and of values.
    parts: [u64; 2],
    flags: Flags,
    /// If own keys are attended to for longer than the way around takes.
    detour: Option<Detour>,
    is_open: Mutex<bool>,
}

impl Pull {
    /// Bytes of what others read.
    pub fn shard_bytes(&self) -> u64 {
        self.shard.len()
    }

    /// Takes memory for keys and values of so many elements each, of so many bytes. Copies of so many bytes at once go around, if any do. All ranks of the arena take as much.
    pub fn take(stream: &Stream, arena: &Arena, member: &Member, parts: [u64; 2], size: u64, around: Option<u64>) -> Result<Self> {
        let ranks = u64::from(member.team().size().get());
        let shard = arena.buffer(parts.iter().sum::<u64>() * size)?;
        let slots = arena.buffer(ranks * parts.iter().sum::<u64>())?;
        let flags = arena.flags("keys of context parallelism", 3)?;
        Ok(Self {
            arena: arena.clone(),
            member: member.clone(),
            shard,
            keys: parts[0] * size,
            slots,
            parts,
            flags,
            detour: around.map(|bytes| Detour::take(stream, arena, member, bytes)).transpose()?,
            is_open: Mutex::default(),
        })
    }

    /// So many numbers of each rank, in the same arena.
    pub fn numbers(&self, stream: &Stream, len: u64) -> Result<Numbers<'static>> {
        Numbers::by_puts(stream, &self.arena, &self.member, len)
    }

    /// Before the first pass: nothing has been read so far, and nothing written. Meets all ranks.
    pub fn open(&self, stream: &Stream) -> Result<()> {
        let mut is_open = lock(&self.is_open);
        if !*is_open {
            for other in self.member.others_in_world() {
                self.flags.open(stream, DONE, other)?;
            }
            *is_open = true;
        }
        Ok(())
    }

    /// Where gradients of keys, and of values, arrive from each rank.
    pub fn slots(&self) -> Result<[Scratch<f32>; 2]> {
        let ranks = u64::from(self.member.team().size().get());
        let [keys, values] = self.parts.map(|part| ranks * part);
        let local = self.slots.local();
        let part = |start: u64, len| {
            // SAFETY: the elements lie inside the local buffer, whose memory keeps the arena and is told of streams.
            unsafe { Buffer::of_owner(&local.device(), local.address() + start * 4, len, Arc::clone(local.memory()) as _) }
        };
        Ok([Scratch::of(part(0, keys)?), Scratch::of(part(keys, values)?)])
    }

    /// The ranks of the arena that read this one's keys, by their ranks in the team.
    fn readers<'r>(&'r self, share: Share, reads: &'r Reads) -> impl Iterator<Item = Rank> + 'r {
        share
            .world
            .ranks()
            .filter(move |reader| *reader != share.rank && is(reads, *reader, share.rank))
            .map(|reader| self.world_rank(reader))
    }

    fn world_rank(&self, rank: Rank) -> Rank {
        self.member.team().world_rank(rank).unwrap_or_else(|| panic!("{rank} is not of {:?}", self.member.team()))
    }

    pub fn publish(&self, stream: &Stream, share: Share, own: Both<'_>, reads: &Reads) -> Result<()> {
        let batch = self.readers(share, reads).try_fold(self.arena.batch(stream), |batch, to| batch.take_back(&self.flags, DONE, to))?;
        batch.enqueue()?;
        let mut at = 0;
        for source in own {
            let whole = Pitched { start: 0, pitch: source.len() };
            let rows = Rows { count: 1, width: source.len(), from: whole, to: whole };
            let within = Within { stream, detour: self.detour.as_ref() };
            within.copy("keys of context parallelism", source, self.shard_part(at, source.len()), &[rows])?;
            at += source.len();
        }
        self.readers(share, reads).try_fold(self.arena.batch(stream), |batch, to| batch.set(&self.flags, READY, to))?.enqueue()
    }

    /// Share of what others read.
    fn shard_part(&self, start: u64, len: u64) -> DeviceViewMut<'_, u8> {
        let access = self.shard.local().view().access("shard");
        // SAFETY: bytes of a live buffer, which are written once no rank reads them: DONE was taken. The runtime orders the writes by the memory's uses.
        unsafe { DeviceViewMut::from_raw(access.address + start, len, access.owner) }
    }

    pub fn fetch(&self, stream: &Stream, owner: Rank, into: BothMut<'_>) -> Result<()> {
        let owner = self.world_rank(owner);
        self.arena.batch(stream).take_back(&self.flags, READY, owner)?.enqueue()?;
        let mut at = 0;
        for target in into {
            let len = target.len();
            self.shard.peer(owner)?.get_into(stream, at..at + len, target)?;
            at += len;
        }
        debug_assert!(at <= self.shard.len() && self.keys <= at, "keys and values lie one after another");
        self.arena.batch(stream).set(&self.flags, DONE, owner)?.enqueue()
    }

    pub fn deliver(&self, stream: &Stream, share: Share, owner: Rank, gradients: Both<'_>) -> Result<()> {
        let (me, ranks) = (u64::from(share.rank.index()), u64::from(share.world.get()));
        let owner = self.world_rank(owner);
        let peer = self.slots.peer(owner)?;
        let starts = [me * self.parts[0], ranks * self.parts[0] + me * self.parts[1]];
        for (source, start) in gradients.into_iter().zip(starts) {
            peer.put_from(stream, source, start * 4)?;
        }
        self.arena.batch(stream).set(&self.flags, GIVEN, owner)?.enqueue()
    }

    pub fn collect(&self, stream: &Stream, share: Share, reads: &Reads) -> Result<()> {
        self.readers(share, reads).try_fold(self.arena.batch(stream), |batch, from| batch.take_back(&self.flags, GIVEN, from))?.enqueue()
    }
}
