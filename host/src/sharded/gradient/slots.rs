//! Memory of an owner, in an arena, in which the parts of all ranks arrive, and its flags.

use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::Pod;

use super::super::memory::lend;
use super::layout::Layout;
use super::link::{Has, Link};
use crate::comm::{Member, Rank};
use crate::runtime::module::note;
use crate::runtime::{Buffer, Result, Stream};
use crate::symmetric::{Arena, Flags, SymmetricBuffer};

/// Slots of an owner, and buffers of whole gradients.
pub(super) const SLOTS: usize = 2;

/// The slot and the buffer of a weight.
pub(super) fn slot_of(weight: usize) -> usize {
    weight % SLOTS
}

/// The slots of a rank, which weights take in turn. In each, every other rank has a part of its own.
///
/// One round of a source and an owner, in a slot:
///
/// 1. the source takes FREE of the owner, puts the owner's rows into its part, and sets READY;
/// 2. the owner takes READY of all sources, adds the parts up, and sets FREE for all.
///
/// The waiting rank resets a flag before its writer sets it again, so a graph may hold a round.
pub(super) struct Slots<E> {
    arena: Arena,
    member: Member,
    memory: [SymmetricBuffer<E>; SLOTS],
    ready: Flags,
    free: Flags,
    is_open: bool,
}

impl<E: Pod> Slots<E> {
    /// Takes slots of so many elements, and flags: the same on every rank of the arena.
    pub fn take(arena: &Arena, member: &Member, len: u64) -> Result<Self> {
        let memory = [arena.buffer(len)?, arena.buffer(len)?];
        let ready = arena.flags("rows of a gradient", SLOTS as u32)?;
        let free = arena.flags("rows of a gradient were added", SLOTS as u32)?;
        Ok(Self { arena: arena.clone(), member: member.clone(), memory, ready, free, is_open: false })
    }

    /// Fails unless the stream is of the arena's device.
    pub fn check_stream(&self, stream: &Stream, what: &'static str) -> Result<()> {
        self.memory[0].local().check_stream(stream, what)
    }

    /// Tells the others what this rank makes. Does not wait.
    pub fn declare(&self, what: &str) -> Result<()> {
        self.arena.note(&self.name(), what)
    }

    fn name(&self) -> String {
        format!("gradients in allocation {}", self.ready.number())
    }

    /// The other members by their numbers in the team: the next one first, so that no two ranks begin with the same.
    fn members(&self) -> impl Iterator<Item = usize> + use<E> {
        self.member.others().map(|other| other.index() as usize)
    }

    /// The other members by their ranks in the world, in the same order.
    fn others(&self) -> impl Iterator<Item = Rank> + use<'_, E> {
        self.members().map(|other| self.member.team().members()[other])
    }

    fn me(&self) -> usize {
        self.member.rank().index() as usize
    }
}

impl<E: Pod> Link<E> for Slots<E> {
    /// Bytes of all slots.
    fn bytes(&self) -> u64 {
        self.memory.iter().map(|slot| slot.len() * size_of::<E>() as u64).sum()
    }

    /// Tells the others the order of a step, where the arena compares calls. Does not wait.
    fn declare_order(&mut self, _: &Stream, _: &[usize], words: String) -> Result<bool> {
        self.ready.declare(words, self.others()).map(|()| true)
    }

    /// Compares what the members make, and opens the slots, once. Waits for the others.
    fn open(&mut self, stream: &Stream, what: &str) -> Result<()> {
        if self.is_open {
            return Ok(());
        }
        stream.0.refuse_capture("the opening of gradients", "call GradientScatter::open before the graph is captured")?;
        self.arena.compare_notes(&self.name(), self.ready.number() as u64, what, self.others())?;
        for (slot, other) in (0..SLOTS as u32).flat_map(|slot| self.others().map(move |other| (slot, other))) {
            self.free.open(stream, slot, other)?;
        }
        self.is_open = true;
        Ok(())
    }

    /// Puts the rows of the other members into their slots, each after its FREE.
    fn send(&mut self, stream: &Stream, slot: usize, layout: &Layout, whole: &Buffer<E>) -> Result<()> {
        // After all that has used the buffer, a graph's replay too: else FREE of that one could be taken here.
        note(stream, &[whole.view().access("gradient")])?;
        let mut batch = self.arena.batch(stream);
        for (owner, to) in self.members().zip(self.others()).filter(|(owner, _)| layout.part(*owner) > 0) {
            let peer = self.memory[slot].peer(to)?;
            batch = batch.take_back(&self.free, slot as u32, to)?;
            // Parts lie in the order of their ranks, without the owner's.
            for rows in layout.copies(owner, self.me() - usize::from(self.me() > owner)) {
                batch = batch.put_rows(&peer, whole, rows)?;
            }
            batch = batch.set(&self.ready, slot as u32, to)?;
        }
        batch.enqueue()
    }

    /// Later work of the stream comes after what this rank has enqueued on the slot so far.
    fn note(&self, stream: &Stream, slot: usize) -> Result<()> {
        note(stream, &[lend(self.memory[slot].local()).access("slot")])
    }

    /// Later work of the stream may read the parts of all members.
    fn accept(&self, stream: &Stream, slot: usize) -> Result<()> {
        self.others().try_fold(self.arena.batch(stream), |batch, from| batch.take_back(&self.ready, slot as u32, from))?.enqueue()
    }

    /// The parts of the others: this rank's own is summed where it was computed.
    fn parts(&self, slot: usize, layout: &Layout) -> (DeviceView<'_, E>, Has) {
        (self.memory[slot].local().view().slice(0, layout.end_of(layout.parts_of_others(), self.me())), Has::Others)
    }

    /// The others may write again what the earlier work of the stream has read.
    fn release(&mut self, stream: &Stream, slot: usize, layout: &Layout) -> Result<()> {
        self.memory[slot].discard(stream, 0..layout.parts_of_others())?;
        self.others().try_fold(self.arena.batch(stream), |batch, to| batch.set(&self.free, slot as u32, to))?.enqueue()
    }
}
