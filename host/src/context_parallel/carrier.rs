//! By what heads reach the ranks that attend with them, and results come back.
//!
//! By messages, tensors are packed into blocks of a rank each, sent, and brought into the order of tokens. By puts into [memory that ranks map](crate::symmetric), each
//! rank's heads go straight to their places among all tokens of the rank that attends with them, and results go into a block at the rank that has their tokens: what
//! travels is copied once, by copy engines. What a rank keeps of its own tokens is copied within the device ([`detour`](super::detour)). Packed sequences, whose places the device alone knows, go into blocks both ways.
//!
//! Puts are followed by flags that the receiver resets. A group of heads has two:
//!
//! 1. each rank puts heads at every other one, and sets GIVEN there;
//! 2. it takes GIVEN of all back, and attends;
//! 3. it puts results at every other rank, sets TAKEN, and takes TAKEN of all back.
//!
//! So nothing says that memory may be written again. Heads are given when the TAKEN of all was taken back: every other rank has attended to what lay there. Results are put when
//! the GIVEN of all was: every other rank has unpacked the results of the pass before. Both lie apart, since a rank may give heads for the next pass to one that has not unpacked yet
//! (docs/adr/0025-no-free-flag.md).

use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::Pod;

use super::detour::{Detour, Within};
use super::lane::{Lane, Order, Trade};
use super::launches::reader_of;
use super::memory::{Place, Scratch, bytes, bytes_mut, copy, note};
use super::messages::Messages;
use crate::comm::{Member, Rank};
use crate::runtime::{Result, Stream};
use crate::symmetric::{Arena, Flags, Pitched, Rows};
use crate::tensor::Heads;

/// Where a carrier comes from: what reaches the other ranks of a trade.
#[derive(Clone, Copy)]
pub(super) enum Reach<'t> {
    Messages(&'t dyn Messages),
    Memory(&'t Arena, &'t Member),
}

/// What carries heads.
pub(super) enum Carrier<'t> {
    Messages(&'t dyn Messages),
    Puts(Box<Puts>),
}

/// Symmetric memory of which every rank has the same lanes.
pub(super) struct Puts {
    arena: Arena,
    member: Member,
    flags: Flags,
    /// Groups of heads.
    groups: usize,
    /// Carries what stays on this device, so that nothing that travels waits for it.
    within: Stream,
    /// If attention holds the multiprocessors for longer than the way around takes.
    detour: Option<Detour>,
}

/// What is given: tensors of this rank's tokens, and numbers for each head and token.
pub(super) struct Given<'g, T> {
    pub tensors: Vec<(&'g Lane<T>, &'g Heads<'g, T>, Option<&'g Order>)>,
    pub numbers: Option<(&'g Lane<f32>, DeviceView<'g, f32>, Option<&'g Order>)>,
}

/// What is taken back: results of all tokens.
pub(super) struct Taken<'g, T> {
    pub lanes: Vec<(&'g Lane<T>, Option<&'g Order>)>,
    pub numbers: Option<(&'g Lane<f32>, Option<&'g Order>)>,
}

/// What errors name.
const WHAT: &str = "all-to-all";

/// Flags of a group.
const FLAGS: u32 = 2;

/// The flag of what is given of a group.
const fn given_of(group: usize) -> u32 {
    FLAGS * group as u32
}

/// The flag of what is taken back.
const fn taken_of(group: usize) -> u32 {
    given_of(group) + 1
}

impl<'t> Reach<'t> {
    /// The arena that lanes are taken from.
    pub fn arena(self) -> Option<&'t Arena> {
        match self {
            Self::Messages(_) => None,
            Self::Memory(arena, _) => Some(arena),
        }
    }

    /// What carries so many groups of heads, after their lanes were taken. Copies of so many bytes at once go around, if any do.
    pub fn carrier(self, stream: &Stream, groups: usize, around: Option<u64>) -> Result<Carrier<'t>> {
        Ok(match self {
            Self::Messages(messages) => Carrier::Messages(messages),
            Self::Memory(arena, member) => {
                // The last one is of numbers of all heads.
                let flags = arena.flags("heads of context parallelism", given_of(groups) + 1)?;
                let detour = around.map(|bytes| Detour::take(stream, arena, member, bytes)).transpose()?;
                let within = stream.device().urgent_stream()?;
                Carrier::Puts(Box::new(Puts { arena: arena.clone(), member: member.clone(), flags, groups, within, detour }))
            }
        })
    }
}

impl Carrier<'_> {
    /// Brings heads of this rank's tokens to the ranks that attend with them, and waits for those of all others: then the lanes have all tokens.
    pub fn give<T: Pod>(&self, stream: &Stream, trade: Trade, group: usize, given: &Given<'_, T>) -> Result<()> {
        match self {
            Self::Messages(messages) => given.send(stream, trade, *messages),
            Self::Puts(puts) => puts.give(stream, trade, group, given),
        }
    }

    /// Cuts results into blocks, where they are sent as such: before they are [kept](Lane::keep) and taken.
    pub fn cut<T: Pod>(&self, stream: &Stream, taken: &Taken<'_, T>) -> Result<()> {
        for (lane, order) in &taken.lanes {
            if self.cuts(*order) {
                lane.cut(stream, *order)?;
            }
        }
        if let Some((lane, order)) = taken.numbers.filter(|(_, order)| self.cuts(*order)) {
            lane.cut_numbers(stream, order)?;
        }
        Ok(())
    }

    /// Brings results to the ranks that have their tokens, and waits for those of all others: then the lanes have received their blocks.
    pub fn take<T: Pod>(&self, stream: &Stream, trade: Trade, group: usize, taken: &Taken<'_, T>) -> Result<()> {
        match self {
            Self::Messages(messages) => taken.send(stream, trade, *messages),
            Self::Puts(puts) => puts.take(stream, trade, group, taken),
        }
    }

    /// The stream that it has beside the one of what travels.
    pub fn stream(&self) -> Option<&Stream> {
        match self {
            Self::Messages(_) => None,
            Self::Puts(puts) => Some(&puts.within),
        }
    }

    /// By what results that were taken back of a group are copied to the caller's tensors. `stream` is that of what travels.
    pub fn within<'w>(&'w self, stream: &'w Stream, group: usize) -> Within<'w> {
        match self {
            Self::Messages(_) => Within { stream, detour: None },
            Self::Puts(puts) => puts.within(group + 1 < puts.groups),
        }
    }

    /// Whether all tokens are cut into blocks before they are sent.
    fn cuts(&self, order: Option<&Order>) -> bool {
        matches!(self, Self::Messages(_)) || order.is_some()
    }

    /// Gives numbers of each rank's heads to all, of an operation of so many groups.
    pub fn gather_numbers(&self, stream: &Stream, trade: Trade, groups: usize, own: &Scratch<f32>, all: &Place<f32>) -> Result<()> {
        match self {
            Self::Messages(messages) => messages.gather_numbers(stream, own.view(), all.lend()),
            Self::Puts(puts) => puts.gather_numbers(stream, trade, given_of(groups), own, all),
        }
    }
}

/// The other ranks, from the next one on, so that no two give to one rank at once.
fn others(trade: Trade) -> impl Iterator<Item = Rank> {
    (1..trade.share.world.get()).map(move |step| reader_of(trade.share, step))
}

impl<T: Pod> Given<'_, T> {
    fn send(&self, stream: &Stream, trade: Trade, messages: &dyn Messages) -> Result<()> {
        self.tensors.iter().try_for_each(|(lane, tensor, _)| lane.pack(stream, tensor))?;
        exchange(stream, trade, messages, self.tensors.iter().map(|(lane, ..)| *lane), |_| true)?;
        self.tensors.iter().try_for_each(|(lane, _, order)| lane.order(stream, *order))?;
        let Some((lane, numbers, order)) = self.numbers else { return Ok(()) };
        lane.pack_numbers(stream, numbers)?;
        exchange(stream, trade, messages, [lane].into_iter(), |_| true)?;
        lane.order_numbers(stream, order)
    }
}

impl<T: Pod> Taken<'_, T> {
    fn send(&self, stream: &Stream, trade: Trade, messages: &dyn Messages) -> Result<()> {
        exchange(stream, trade, messages, self.lanes.iter().map(|(lane, _)| *lane), Lane::is_summed)?;
        self.numbers.map_or(Ok(()), |(lane, _)| exchange(stream, trade, messages, [lane].into_iter(), Lane::is_summed))
    }
}

/// All messages of some lanes at once. This rank's own block is copied if it is to be received too.
fn exchange<'l, T: Pod>(
    stream: &Stream,
    trade: Trade,
    messages: &dyn Messages,
    lanes: impl Iterator<Item = &'l Lane<T>> + Clone,
    is_own_received: impl Fn(&Lane<T>) -> bool,
) -> Result<()> {
    let me = trade.share.rank;
    let others = || trade.share.world.ranks().filter(|rank| *rank != me);
    let sends: Vec<_> = lanes.clone().flat_map(|lane| others().map(|to| (to, bytes(lane.sent.part(lane.block(to)))))).collect();
    let receives: Vec<_> =
        lanes.clone().flat_map(|lane| others().map(|from| (from, bytes_mut(lane.received.lend_part(lane.block(from)))))).collect();
    let mut own = lanes.filter(|lane| is_own_received(lane));
    own.try_for_each(|lane| copy(stream, lane.sent.part(lane.block(me)), lane.received.lend_part(lane.block(me))))?;
    messages.exchange(stream, &sends, &receives)
}

impl Puts {
    fn give<T: Pod>(&self, stream: &Stream, trade: Trade, group: usize, given: &Given<'_, T>) -> Result<()> {
        let to_rank = |to: Rank| {
            for (lane, tensor, _) in &given.tensors {
                self.put(stream, tensor.view(), lane.arrival(), to, &lane.given(tensor.layout(), to))?;
            }
            given.numbers.map_or(Ok(()), |(lane, numbers, _)| self.put(stream, numbers, lane.arrival(), to, &lane.given_numbers(to)))
        };
        // Nothing is computed before the first group is there.
        let here = |within: Within<'_>| {
            for (lane, tensor, _) in &given.tensors {
                within.copy(WHAT, tensor.view(), lane.arrival().lend(), &lane.given(tensor.layout(), trade.share.rank))?;
            }
            given.numbers.map_or(Ok(()), |(lane, numbers, _)| {
                within.copy(WHAT, numbers, lane.arrival().lend(), &lane.given_numbers(trade.share.rank))
            })
        };
        here(self.within(group > 0))?;
        self.to_all(stream, trade, given_of(group), to_rank)?;
        // What lies there is used after the flags.
        let lanes = given.tensors.iter().map(|(lane, ..)| lane.arrival().access(true));
        let numbers = given.numbers.iter().map(|(lane, ..)| lane.arrival().access(true));
        note(stream, &lanes.chain(numbers).collect::<Vec<_>>())?;
        for (lane, _, order) in &given.tensors {
            if order.is_some() {
                lane.order(stream, *order)?;
            }
        }
        match given.numbers {
            Some((lane, _, order)) if order.is_some() => lane.order_numbers(stream, order),
            _ => Ok(()),
        }
    }

    fn take<T: Pod>(&self, stream: &Stream, trade: Trade, group: usize, taken: &Taken<'_, T>) -> Result<()> {
        // Nothing is computed after the last group.
        let (within, me) = (self.within(group + 1 < self.groups), trade.share.rank);
        for (lane, _) in taken.lanes.iter().filter(|(lane, _)| lane.is_summed()) {
            within.copy(WHAT, lane.results().view(), lane.received.lend(), &lane.taken(me))?;
        }
        self.to_all(stream, trade, taken_of(group), |to| {
            for (lane, _) in &taken.lanes {
                self.put(stream, lane.results().view(), &lane.received, to, &lane.taken(to))?;
            }
            taken.numbers.map_or(Ok(()), |(lane, _)| self.put(stream, lane.results().view(), &lane.received, to, &lane.taken_numbers(to)))
        })?;
        // What was received is copied to the caller's tensors there.
        self.within.wait(&stream.mark()?)
    }

    fn gather_numbers(&self, stream: &Stream, trade: Trade, flag: u32, own: &Scratch<f32>, all: &Place<f32>) -> Result<()> {
        let start = u64::from(trade.share.rank.index()) * own.len();
        let at = |start| Pitched { start, pitch: own.len() };
        let rows = Rows { count: 1, width: own.len(), from: at(0), to: at(start) };
        Rows::copy_all(stream, WHAT, own.view(), all.lend(), &[rows])?;
        self.to_all(stream, trade, flag, |to| self.put(stream, own.view(), all, to, &[rows]))
    }

    /// By what copies within this device are made.
    fn within(&self, is_beside_attention: bool) -> Within<'_> {
        Within { stream: &self.within, detour: self.detour.as_ref().filter(|_| is_beside_attention) }
    }

    /// Puts at each other rank and sets the flag there, and takes the flags of all others back.
    fn to_all(&self, stream: &Stream, trade: Trade, flag: u32, put: impl Fn(Rank) -> Result<()>) -> Result<()> {
        for to in others(trade) {
            put(to)?;
            self.arena.batch(stream).set(&self.flags, flag, self.world_rank(to))?.enqueue()?;
        }
        let all = self.arena.batch(stream);
        others(trade).try_fold(all, |batch, from| batch.take_back(&self.flags, flag, self.world_rank(from)))?.enqueue()
    }

    fn put<E: Pod>(&self, stream: &Stream, source: DeviceView<'_, E>, target: &Place<E>, to: Rank, rows: &[Rows]) -> Result<()> {
        let symmetric = target.symmetric().expect("lanes of puts are of the arena");
        symmetric.put_rows_each(stream, source, self.world_rank(to), rows)
    }

    /// The rank of the arena that a rank of the team is.
    fn world_rank(&self, rank: Rank) -> Rank {
        self.member.team().world_rank(rank).unwrap_or_else(|| panic!("{rank} is not of {:?}", self.member.team()))
    }
}
