//! Messages over symmetric memory: a communicator for ranks that share a GPU, which NCCL refuses. It has what context parallelism asks for.
//!
//! A rank has a box for each other rank. One call is one mail to each rank that it sends to:
//!
//! 1. the sender takes EMPTY back, puts all messages of the call one after another into its box at the receiver, and sets FULL;
//! 2. the receiver takes FULL back, copies them out, and sets EMPTY.
//!
//! All is in stream order, so that a graph may hold it.

use std::sync::{Mutex, PoisonError};

use oxtile::comm::{Communicator, Member, Rank, ReduceOp, Reducible, SingleRank, WorldSize};
use oxtile::num::Pod;
use oxtile::symmetric::{Arena, Flags, SymmetricBuffer};
use oxtile::{Buffer, Error, Result, Stream};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

const FULL: u32 = 0;
const EMPTY: u32 = 1;
/// Where messages of a mail begin.
const ALIGNED: u64 = 16;

/// The mail of a team.
pub struct Mail {
    arena: Arena,
    member: Member,
    /// Those of all ranks, in the order of the team.
    boxes: SymmetricBuffer<u8>,
    /// What this rank sends to each, as its boxes are.
    outgoing: Mutex<Buffer<u8>>,
    /// Bytes of a box.
    room: u64,
    flags: Flags,
    /// Copies within the device.
    copies: SingleRank,
}

impl Mail {
    /// Takes boxes of so many bytes, and opens them. Meets all members.
    pub fn new(arena: &Arena, member: &Member, stream: &Stream, room: u64) -> Result<Self> {
        let ranks = u64::from(member.team().size().get());
        let (boxes, flags) = (arena.buffer(ranks * room)?, arena.flags("mail", 2)?);
        for other in member.others() {
            flags.open(stream, EMPTY, member.team().world_rank(other).expect("a rank of the team"))?;
        }
        let (outgoing, copies) = (Mutex::new(Buffer::zeros(stream, ranks * room)?), SingleRank::new(&stream.device()));
        Ok(Self { arena: arena.clone(), member: member.clone(), boxes, outgoing, room, flags, copies })
    }

    /// Bytes of symmetric memory that it takes.
    pub fn bytes(world: WorldSize, room: u64) -> u64 {
        u64::from(world.get()) * room
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        self.world().ranks()
    }

    fn world_rank(&self, rank: Rank) -> Rank {
        self.member.team().world_rank(rank).expect("a rank of the team")
    }

    /// Where a message of so many bytes lies in a mail, after those up to `end`.
    fn place(&self, end: &mut u64, bytes: u64) -> [u64; 2] {
        let start = *end;
        assert!(start + bytes <= self.room, "a mail of {} bytes in a box of {}", start + bytes, self.room);
        *end = (start + bytes).next_multiple_of(ALIGNED);
        [start, start + bytes]
    }

    fn send<T: Pod>(&self, stream: &Stream, to: Rank, messages: &[DeviceView<'_, T>]) -> Result<()> {
        let (there, first) = (self.world_rank(to), self.room * u64::from(to.index()));
        self.flags.take_back(stream, EMPTY, there)?;
        let mut outgoing = self.outgoing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut end = 0;
        for message in messages {
            let message = message.cast::<u8>();
            let [start, end] = self.place(&mut end, message.len()).map(|at| first + at);
            self.copies.all_gather(stream, message, outgoing.view_mut().slice_mut(start, end))?;
        }
        let at = self.room * u64::from(self.rank().index());
        self.boxes.peer(there)?.put(stream, &outgoing, first..first + end.min(self.room), at)?;
        self.flags.set(stream, FULL, there)
    }

    fn receive<T: Pod>(&self, stream: &Stream, from: Rank, messages: &[&DeviceViewMut<'_, T>]) -> Result<()> {
        let (there, first) = (self.world_rank(from), self.room * u64::from(from.index()));
        self.flags.take_back(stream, FULL, there)?;
        let mut end = 0;
        for message in messages {
            let target = again(message).cast::<u8>();
            let [start, end] = self.place(&mut end, target.len()).map(|at| first + at);
            self.copies.all_gather(stream, self.boxes.local().view().slice(start, end), target)?;
        }
        self.flags.set(stream, EMPTY, there)
    }

    fn refuse<R>(&self, what: &'static str) -> Result<R> {
        Err(Error::Invalid { what, why: "mail has exchanges and gathers alone".to_owned() })
    }
}

/// A view that is written by one call.
fn again<'a, T>(view: &DeviceViewMut<'a, T>) -> DeviceViewMut<'a, T> {
    let access = view.access("a message");
    // SAFETY: the same elements of the same owner; the caller of an exchange lends them to it, and one copy writes each.
    unsafe { DeviceViewMut::from_raw(access.address, view.len(), access.owner) }
}

impl Communicator for Mail {
    fn rank(&self) -> Rank {
        self.member.rank()
    }

    fn world(&self) -> WorldSize {
        self.member.team().size()
    }

    fn all_gather<'a, T: Pod>(
        &self,
        stream: &Stream,
        shard: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()> {
        let (shard, output) = (shard.into(), output.into());
        let sends: Vec<_> = self.ranks().map(|to| (to, shard)).collect();
        let mut receives = Vec::new();
        let mut rest = output;
        for from in self.ranks() {
            let (part, after) = rest.split_at(shard.len());
            receives.push((from, part));
            rest = after;
        }
        self.exchange(stream, &sends, &receives)
    }

    fn exchange<T: Pod>(
        &self,
        stream: &Stream,
        sends: &[(Rank, DeviceView<'_, T>)],
        receives: &[(Rank, DeviceViewMut<'_, T>)],
    ) -> Result<()> {
        let sent_to = |rank| sends.iter().filter(move |(to, _)| *to == rank).map(|(_, view)| *view).collect::<Vec<_>>();
        let received_from = |rank| receives.iter().filter(move |(from, _)| *from == rank).map(|(_, view)| view).collect::<Vec<_>>();
        for (source, target) in sent_to(self.rank()).into_iter().zip(received_from(self.rank())) {
            self.copies.all_gather(stream, source, again(target))?;
        }
        let others = || self.ranks().filter(|rank| *rank != self.rank());
        // All mails are sent before the first is waited for.
        for to in others().filter(|to| sends.iter().any(|(rank, _)| rank == to)) {
            self.send(stream, to, &sent_to(to))?;
        }
        for from in others().filter(|from| receives.iter().any(|(rank, _)| rank == from)) {
            self.receive(stream, from, &received_from(from))?;
        }
        Ok(())
    }

    fn wait(&self, stream: &Stream) -> Result<()> {
        self.arena.ticket(stream)?.wait()
    }

    fn all_reduce<'a, T: Reducible>(&self, _: &Stream, _: impl Into<DeviceViewMut<'a, T>>, _: ReduceOp) -> Result<()> {
        self.refuse("Mail::all_reduce")
    }

    fn reduce_scatter<'a, T: Reducible>(
        &self,
        _: &Stream,
        _: impl Into<DeviceView<'a, T>>,
        _: impl Into<DeviceViewMut<'a, T>>,
        _: ReduceOp,
    ) -> Result<()> {
        self.refuse("Mail::reduce_scatter")
    }

    fn broadcast<'a, T: Pod>(&self, _: &Stream, _: impl Into<DeviceViewMut<'a, T>>, _: Rank) -> Result<()> {
        self.refuse("Mail::broadcast")
    }

    fn all_to_all<'a, T: Pod>(&self, _: &Stream, _: impl Into<DeviceView<'a, T>>, _: impl Into<DeviceViewMut<'a, T>>) -> Result<()> {
        self.refuse("Mail::all_to_all")
    }

    fn group<R>(&self, _: impl FnOnce() -> Result<R>) -> Result<R> {
        self.refuse("Mail::group")
    }

    fn split(&self, _: Option<u32>, _: u32) -> Result<Option<Self>> {
        self.refuse("Mail::split")
    }

    fn barrier(&self, _: &Stream) -> Result<()> {
        self.refuse("Mail::barrier")
    }
}
