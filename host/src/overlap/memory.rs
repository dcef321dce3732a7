//! The memory in which operands and parts arrive, and the flags of their chunks.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use oxtile_tile::arrivals::WaitsArgument;
use oxtile_tile::num::Pod;

use super::config::Cut;
use crate::comm::{Member, Rank};
use crate::runtime::memory::Memory;
use crate::runtime::runtime::lock;
use crate::runtime::{Buffer, Error, Event, Result, Stream, order};
use crate::symmetric::{Arena, Flags, SymmetricBuffer};

/// Memory of an arena in which a team gathers operands, and parts of sums, lent to all operations of a model: two places, which the calls take in turn, so that what the next call needs
/// arrives while that of this one is read. A cheap handle.
///
/// All operations on one memory are called in one order on all ranks of the team, and on one stream, or on streams that events order. None of them allocates
/// device memory afterwards.
#[derive(Clone)]
pub struct OverlapMemory(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub arena: Arena,
    pub member: Member,
    /// Carries the copies to the others.
    pub out: Stream,
    /// Tells the others what was read, beside later work of the stream that read it.
    back: Stream,
    /// Carry copies beside `out`, outside of graphs, where these wait for a kernel of this rank one by one.
    pub beside: [Stream; 2],
    bytes: u64,
    places: Mutex<[SymmetricBuffer<u8>; PLACES]>,
    /// Set by who has put a chunk: of each place, one for each chunk of a shard.
    pub ready: Flags,
    /// Set by who has read a place.
    pub free: Flags,
    state: Arc<Mutex<State>>,
    /// The first: what is dequantized of operands. The others: products that are put to other members.
    rooms: Mutex<Vec<Buffer<u8>>>,
}

#[derive(Default)]
struct State {
    operations: u64,
    is_open: bool,
    calls: Calls,
    /// The call into whose place a shard was written, and the capture that this was in: a [`Given`] has both.
    given: Option<(u64, Option<u64>)>,
    /// Of each place the end of its last release outside of graphs.
    released: [Option<Released>; PLACES],
    /// The last capture with a call or a shard.
    captured: Option<u64>,
    /// After the puts of the last kernel of all rows, and the room that these were from.
    staged: Option<(u64, Event)>,
}

/// The calls so far: what a capture that is given up has changed is undone.
#[derive(Clone, Default)]
struct Calls {
    /// How many; the next one takes this place, in turn.
    turn: u64,
    /// The stream of the last call.
    last: Option<Stream>,
    /// Whether the call that has a place was begun, and is not finished.
    under_way: [bool; PLACES],
    /// Of each place the stream on which its last call was finished.
    ended: [Option<Stream>; PLACES],
    /// The last call that has put from [`Inner::room`].
    sent: Option<u64>,
}

/// The flags of a place are reset, and the others know that it was read.
struct Released {
    event: Event,
    /// The stream that waits for it already.
    seen: Option<u64>,
}

/// A call whose copies are enqueued, and what reads what the others put here is not.
pub(super) struct Begun {
    pub turn: u64,
    /// After the copies.
    pub put: Event,
}

impl Begun {
    pub fn place(&self) -> usize {
        place_of(self.turn)
    }
}

/// The call that a product's shard was handed out for, which no other product takes meanwhile: it would overwrite the shard, or be overwritten by it.
pub(super) struct Given {
    inner: Arc<Inner>,
    turn: Option<u64>,
    /// The capture that the shard is written in.
    capture: Option<u64>,
}

impl Given {
    pub fn new(inner: &Arc<Inner>) -> Self {
        Self { inner: Arc::clone(inner), turn: None, capture: None }
    }

    /// Gives out the place of the next call: later work of `stream` comes after all uses of it. Returns the call's number.
    pub fn give(&mut self, stream: &Stream, what: &'static str) -> Result<u64> {
        let turn = self.inner.give(stream, what, self.turn.map(|turn| (turn, self.capture)))?;
        (self.turn, self.capture) = (Some(turn), stream.0.capture().map(|capture| capture.number));
        Ok(turn)
    }

    /// The call, which is made now on a stream, of a shard that `lender` gave out.
    ///
    /// # Errors
    /// Where no shard was written for it, or one in another capture: a replay would send what the last one left.
    pub fn take_for(&mut self, compute: &Stream, what: &'static str, lender: &str) -> Result<u64> {
        if self.turn.is_some() && self.capture != compute.0.capture().map(|capture| capture.number) {
            let why = "the shard was written in another capture, or outside of this one: write it and run the product inside the same capture, or both outside".to_owned();
            return Err(Error::Invalid { what, why });
        }
        self.take().ok_or_else(|| {
            let why = format!("the shard of this call was not written: write what {lender} gives, before each call");
            Error::Invalid { what, why }
        })
    }

    /// The call, which is made now, or never will be.
    pub fn take(&mut self) -> Option<u64> {
        let turn = self.turn.take()?;
        let given = &mut lock(&self.inner.state).given;
        *given = given.filter(|given| *given != (turn, self.capture));
        Some(turn)
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        self.take();
    }
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.turn.fmt(f)
    }
}

/// Places that are taken in turn.
pub(super) const PLACES: usize = 2;

/// The place of a call.
pub(super) fn place_of(turn: u64) -> usize {
    (turn % PLACES as u64) as usize
}

impl OverlapMemory {
    /// Takes two places of `bytes` bytes for a member of a team of the arena's world, and flags. Every rank takes as much, in one order with all else, also one
    /// of another team. `out` carries the copies to the others, outside of graphs beside two streams of the memory where panels of one kernel are put: best a stream [of high priority](crate::Device::urgent_stream) that carries nothing
    /// else.
    ///
    /// Members count the calls of a memory, captured ones too, and take its places in turn. A capture that fails on one of them counts nothing there: that member captures the same again before its next
    /// call, or the others capture nothing either.
    ///
    /// [`AllGatherConfig::bytes`](super::AllGatherConfig::bytes) and [`ReduceScatterConfig::bytes`](super::ReduceScatterConfig::bytes) say how many bytes a product needs: take the most of all layers.
    ///
    /// # Errors
    /// As [`Arena::buffer`] and [`Arena::flags`]; [`Error::Invalid`] for a team of another world, or a stream of another device; as [`Device::urgent_stream`](crate::Device::urgent_stream).
    pub fn take(arena: &Arena, member: &Member, bytes: u64, out: &Stream) -> Result<Self> {
        arena.check_member("OverlapMemory::take", member)?;
        // Before anything is taken: the other ranks take as much.
        arena.check_stream(out)?;
        let (back, beside) = (out.device().urgent_stream()?, [out.device().urgent_stream()?, out.device().urgent_stream()?]);
        // Whole elements of every type, as the kernels' views of a place have them.
        let whole = bytes.checked_next_multiple_of(256).unwrap_or(bytes);
        let places = [arena.buffer(whole)?, arena.buffer(whole)?];
        let ready = arena.flags("chunk", PLACES as u32 * Cut::CHUNKS)?;
        let free = arena.flags("place was read", PLACES as u32)?;
        let (arena, member, out) = (arena.clone(), member.clone(), out.clone());
        let (places, state, rooms) = (Mutex::new(places), Arc::default(), Mutex::default());
        Ok(Self(Arc::new(Inner { arena, member, out, back, beside, bytes, places, ready, free, state, rooms })))
    }

    /// Fails unless so many bytes fit a place.
    pub(super) fn check_room(&self, what: &'static str, needed: u64) -> Result<()> {
        if needed <= self.bytes() {
            return Ok(());
        }
        let why = format!("an operation that needs {needed} bytes for a memory of {}: take the most of all layers", self.bytes());
        Err(Error::Invalid { what, why })
    }

    /// The bytes of each place.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// The member whose memory it is.
    pub fn member(&self) -> &Member {
        &self.0.member
    }
}

impl Inner {
    /// The number of an operation that is made on it.
    pub fn next_operation(&self) -> u64 {
        let mut state = lock(&self.state);
        state.operations += 1;
        state.operations - 1
    }

    /// The name of an operation, by which members compare what they made.
    pub fn operation(&self, number: u64) -> String {
        format!("overlap in allocation {}, operation {number}", self.ready.number())
    }

    /// Before the first call: all places of this rank are empty. Meets all ranks.
    pub fn open(&self, stream: &Stream) -> Result<()> {
        let mut state = lock(&self.state);
        if !state.is_open {
            for (place, other) in (0..PLACES as u32).flat_map(|place| self.others().map(move |other| (place, other))) {
                self.free.open(stream, place, other)?;
            }
            state.is_open = true;
        }
        Ok(())
    }

    /// The number of the next call.
    pub fn turn(&self) -> u64 {
        lock(&self.state).calls.turn
    }

    /// Gives out the place of the next call to a product, which may have it already.
    fn give(&self, stream: &Stream, what: &'static str, own: Option<(u64, Option<u64>)>) -> Result<u64> {
        self.arena.glance()?;
        let turn = self.turn();
        // Of a capture that was given up, a product may still have the number.
        if own.is_none() || own != lock(&self.state).given {
            self.check_not_given(turn, what)?;
        }
        self.check_finished(turn, what)?;
        let places = self.places();
        let memory = places[place_of(turn)].local().memory();
        memory.check_stream(&stream.0, what)?;
        self.after_release(stream, turn, memory)?;
        if !self.out.is_capturing() {
            // What has used the place and is no call of this memory: replays. They took FREE before this call does.
            order(&self.out.0, |wait_for| wait_for.extend(memory.streams(true)))?;
        }
        order(&stream.0, |wait_for| memory.add_use(&stream.0, true, wait_for))?;
        self.remember(stream);
        lock(&self.state).given = Some((turn, stream.0.capture().map(|capture| capture.number)));
        Ok(turn)
    }

    /// Fails where the shard of another product lies in the place of call `turn`.
    fn check_not_given(&self, turn: u64, what: &'static str) -> Result<()> {
        if lock(&self.state).given.is_none_or(|(given, _)| given != turn) {
            return Ok(());
        }
        let why = "the shard of a gathered product was written into the place of this call: call that product first, or drop it before its shard is written".to_owned();
        Err(Error::Invalid { what, why })
    }

    /// Fails unless both streams are in one graph, or in none.
    pub fn check_captures(&self, compute: &Stream, what: &'static str) -> Result<()> {
        match (compute.0.capture(), self.out.0.capture()) {
            (None, None) => Ok(()),
            (Some(one), Some(other)) if Arc::ptr_eq(&one, &other) => Ok(()),
            _ => {
                let why = "one of the stream and the memory's stream for copies is being captured: name both in Graph::capture".to_owned();
                Err(Error::Invalid { what, why })
            }
        }
    }

    /// Room of a number, which all operations share: the calls come one after another. It grows with what is asked for.
    pub fn room<T: Pod>(&self, stream: &Stream, number: usize, len: u64) -> Result<Buffer<T>> {
        let (mut rooms, bytes) = (lock(&self.rooms), len * size_of::<T>() as u64);
        while rooms.len() <= number {
            rooms.push(Buffer::uninitialised(stream, 0)?);
        }
        if rooms[number].len() < bytes {
            rooms[number] = Buffer::uninitialised(stream, bytes)?;
        }
        // SAFETY: so many elements of any bits lie there, as was looked at; allocations are aligned to 256 bytes.
        Ok(unsafe { Buffer::of(Arc::clone(rooms[number].memory()), len) })
    }

    /// Fails where the call that has the place of call `turn` is not finished.
    fn check_finished(&self, turn: u64, what: &'static str) -> Result<()> {
        if lock(&self.state).calls.under_way[place_of(turn)] {
            let why = "the call before the last one on this memory was begun, and is not finished; this one would take its place: finish it first; one that was dropped is lost, and takes a new arena".to_owned();
            return Err(Error::Invalid { what, why });
        }
        Ok(())
    }

    /// Later work of a stream comes after the release of the call that had the place of call `turn`, which is no use of the place any more. Replays of what is captured come after all uses.
    fn after_release(&self, stream: &Stream, turn: u64, place: &Memory) -> Result<()> {
        if let Some(released) = &mut lock(&self.state).released[place_of(turn)]
            && !stream.is_capturing()
        {
            if released.seen != Some(stream.raw()) {
                stream.wait(&released.event)?;
                released.seen = Some(stream.raw());
            }
            place.forget_uses_of(&self.back.0);
        }
        Ok(())
    }

    /// Begins call `turn` on a stream, after the calls before it and all that has used its place.
    pub fn begin(&self, turn: u64, place: &Memory, stream: &Stream, what: &'static str) -> Result<()> {
        if self.turn() != turn {
            let why = "another operation on this memory was called since the shard was handed out: write the shard just before the call"
                .to_owned();
            return Err(Error::Invalid { what, why });
        }
        self.check_not_given(turn, what)?;
        self.check_finished(turn, what)?;
        self.after_release(stream, turn, place)?;
        self.remember(stream);
        let calls = &mut lock(&self.state).calls;
        // The call that had the place is finished on a stream of its own choice.
        let graph = |stream: &Stream| stream.0.capture().map(|capture| capture.number);
        for earlier in [&calls.last, &calls.ended[place_of(turn)]].into_iter().flatten() {
            if earlier.raw() != stream.raw() && graph(earlier) == graph(stream) {
                stream.wait(&earlier.mark()?)?;
            }
        }
        calls.turn += 1;
        calls.last = Some(stream.clone());
        Ok(())
    }

    /// Before the first change in a capture: if there is no graph in the end, the calls and shards are those before it. Else this rank alone would have gone on to the other place.
    fn remember(&self, stream: &Stream) {
        let (Some(capture), state) = (stream.0.capture(), &mut *lock(&self.state)) else { return };
        if state.captured.replace(capture.number) != Some(capture.number) {
            let (own, before, number) = (Arc::clone(&self.state), state.calls.clone(), capture.number);
            capture.if_given_up(move || {
                let state = &mut *lock(&own);
                state.calls = before;
                state.given = state.given.filter(|(_, capture)| *capture != Some(number));
            });
        }
    }

    /// The copies of call `turn` are enqueued: its place is not given out again before it is [finished](Self::finished).
    pub fn copies_enqueued(&self, turn: u64) -> Result<Begun> {
        let put = self.out.mark()?;
        lock(&self.state).calls.under_way[place_of(turn)] = true;
        Ok(Begun { turn, put })
    }

    /// Fails unless the second half of a call is enqueued where the first was: in one graph, or in none.
    pub fn check_halves(&self, compute: &Stream, begun: &Begun, what: &'static str) -> Result<()> {
        self.check_captures(compute, what)?;
        match compute.0.capture().map(|capture| capture.number) == begun.put.0.capture {
            true => Ok(()),
            false => Err(Error::NotCapturable {
                what: "half of a call",
                mend: "begin and finish a call inside the same capture, or both outside; what was begun keeps its place",
            }),
        }
    }

    /// Whether the call was begun in the capture that is under way: nothing of it was enqueued yet.
    pub fn is_being_captured(&self, begun: &Begun) -> bool {
        self.out.0.capture().is_some_and(|capture| begun.put.0.capture == Some(capture.number))
    }

    /// The call is enqueued as a whole on a stream.
    pub fn finished(&self, compute: &Stream, begun: &Begun) {
        let calls = &mut lock(&self.state).calls;
        calls.under_way[begun.place()] = false;
        calls.ended[begun.place()] = Some(compute.clone());
    }

    /// A stream which later calls on a place come after, and nothing else: in a graph that of the call itself, on which a capture ends.
    pub fn aside<'s>(&'s self, compute: &'s Stream) -> &'s Stream {
        if compute.is_capturing() { compute } else { &self.back }
    }

    /// A place was released, by the work on [`aside`](Self::aside) so far.
    pub fn released(&self, place: usize) -> Result<()> {
        let event = self.back.mark()?;
        lock(&self.state).released[place] = Some(Released { event, seen: None });
        Ok(())
    }

    /// The call is given up with the capture that it was begun in.
    pub fn given_up(&self, begun: &Begun) {
        lock(&self.state).calls.under_way[begun.place()] = false;
    }

    /// Later work of a stream comes after the puts of the last kernel of all rows, where those are from another room: the flags of its panels are set again. From the same room it does anyway. Calls in other captures
    /// are not under way.
    pub fn after_staged(&self, compute: &Stream, room: u64) -> Result<()> {
        match &lock(&self.state).staged {
            Some((of, put)) if *of != room && put.0.capture == compute.0.capture().map(|capture| capture.number) => compute.wait(put),
            _ => Ok(()),
        }
    }

    /// The panels of a kernel of all rows are put from a room, by the work on `out` so far.
    pub fn staged(&self, room: u64) -> Result<()> {
        let put = self.out.mark()?;
        lock(&self.state).staged = Some((room, put));
        Ok(())
    }

    /// Call `turn` puts from [`room`](Self::room).
    pub fn sends(&self, turn: u64) {
        lock(&self.state).calls.sent = Some(turn);
    }

    /// Whether no later call puts from [`room`](Self::room).
    pub fn sent_last(&self, turn: u64) -> bool {
        lock(&self.state).calls.sent == Some(turn)
    }

    /// The places.
    pub fn places(&self) -> MutexGuard<'_, [SymmetricBuffer<u8>; PLACES]> {
        lock(&self.places)
    }

    /// The first elements of a place, which share its uses.
    pub fn place<T: Pod>(&self, place: usize, len: u64) -> Buffer<T> {
        debug_assert!(len * size_of::<T>() as u64 <= self.bytes, "a product's operand fits its memory: it was checked");
        let memory = Arc::clone(self.places()[place].local().memory());
        // SAFETY: so many elements of any bits lie there, as was checked; buffers of arenas are aligned to 256 bytes.
        unsafe { Buffer::of(memory, len) }
    }

    /// Elements of a place, from number `first` of them on, which share its uses.
    pub fn place_from<T: Pod>(&self, place: usize, first: u64, len: u64) -> Buffer<T> {
        let size = size_of::<T>() as u64;
        let whole = self.place::<u8>(place, (first + len) * size);
        // SAFETY: so many elements of any bits lie there; the place is aligned to 256 bytes, and `first` is a number of whole elements.
        unsafe { Buffer::of(whole.memory().window(whole.address() + first * size, len * size), len) }
    }

    /// The rank in the world of a member.
    pub fn world_rank(&self, member: u32) -> Rank {
        self.member.team().members()[member as usize]
    }

    /// The other members' ranks in the world.
    pub fn others(&self) -> impl Iterator<Item = Rank> + use<'_> {
        self.member.others_in_world()
    }

    /// What a kernel takes that waits for these flags, numbered from the place's first on.
    pub fn waits(&self, stream: &Stream, place: usize, flags: &[(u32, Rank)]) -> Result<WaitsArgument<'_>> {
        let waits = self.ready.waits(stream, flags)?;
        let first = waits.first + self.ready.index(Self::ready_flag(place, 0), Rank::ZERO);
        Ok(WaitsArgument { first, ..waits })
    }

    /// The flag of a chunk in a place.
    pub fn ready_flag(place: usize, chunk: u32) -> u32 {
        place as u32 * Cut::CHUNKS + chunk
    }
}

impl fmt::Debug for OverlapMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OverlapMemory").field("member", &self.0.member).field("bytes", &self.0.bytes).finish_non_exhaustive()
    }
}
