//! The ranks of a virtual cluster.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::communicator::{Communicator, Reducible, check_team};
use super::group;
use super::meeting::{ArenaRank, Meeting};
use super::operand::Operand;
use super::sequence::Sequence;
use super::team::Team;
use super::virtual_rank::VirtualRank;
use crate::bootstrap::board::LocalBoard;
use crate::rank::{Rank, ReduceOp, WorldSize};
use crate::runtime::backend::Caller;
use crate::runtime::emulated::{Call, Group, Part, Reduction, Region, Transfer};
use crate::runtime::memory;
use crate::runtime::runtime::lock;
use crate::runtime::stream::StreamInner;
use crate::runtime::{Device, Error, Result, Runtime, Stream};

/// A rank of a virtual cluster: one process holds them all. Drive them from one thread, so that a seed gives one order, or
/// each from its own, as a program of many processes would.
///
/// A collective that some rank does not call, or calls with other arguments, ends all work of the cluster with an error that names ranks, call
/// and its number.
pub struct EmulatedCommunicator {
    rank: Rank,
    world: WorldSize,
    ranks: Arc<Ranks>,
    driver: Arc<Driver>,
    /// The stream of the last call: the next call comes after it.
    last: Mutex<Option<Arc<StreamInner>>>,
}

/// A call on its way to a stream.
struct Enqueued {
    stream: Arc<StreamInner>,
    part: Part,
    uses: Vec<Operand>,
    caller: Caller,
}

/// Ranks that call together, and the teams split off from them.
struct Ranks {
    group: Arc<Group>,
    /// By name and size.
    parts: Mutex<BTreeMap<(String, WorldSize), Arc<Ranks>>>,
    board: Arc<LocalBoard>,
    /// How many arenas each rank has opened.
    arenas: Mutex<BTreeMap<Rank, u64>>,
    /// Where each rank tells the others how it is split.
    splits: Vec<Sequence>,
}

impl Ranks {
    fn new(name: String, size: WorldSize, patience: Duration) -> Arc<Self> {
        let (board, all): (Arc<LocalBoard>, Vec<_>) = (Arc::default(), size.ranks().collect());
        let splits = all.iter().map(|me| Sequence::new(board.clone(), &name, *me, all.clone(), patience)).collect();
        Arc::new(Self { group: Group::new(name, size.get()), parts: Mutex::default(), board, arenas: Mutex::default(), splits })
    }

    /// The ranks of a part, the same for all of its members.
    fn part(&self, name: String, size: WorldSize, patience: Duration) -> Arc<Self> {
        let new = || Self::new(name.clone(), size, patience);
        Arc::clone(lock(&self.parts).entry((name.clone(), size)).or_insert_with(new))
    }
}

/// What a rank's communicators have in common.
struct Driver {
    rank: VirtualRank,
    /// The world and the parts that it is a rank of.
    places: Mutex<Vec<(Weak<Ranks>, Rank)>>,
}

impl Driver {
    fn new(device: &Device) -> Result<Self> {
        Ok(Self { rank: VirtualRank::new(device)?, places: Mutex::default() })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        for (ranks, rank) in lock(&self.places).drain(..) {
            // No rank waits in vain for this one's split.
            ranks.upgrade().iter().for_each(|ranks| ranks.splits[rank.index() as usize].give_up("it is gone"));
        }
    }
}

impl EmulatedCommunicator {
    /// The ranks of a world, each on the device of its number; with fewer devices they share them in turn.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a runtime that is not emulated.
    pub fn world_of(runtime: &Runtime, size: WorldSize) -> Result<Vec<Self>> {
        let driver = |rank: Rank| Driver::new(&runtime.device(rank.index() % runtime.device_count())?);
        let drivers = size.ranks().map(driver).collect::<Result<Vec<_>>>()?;
        let ranks = Ranks::new("the world".to_owned(), size, drivers[0].rank.cluster().patience());
        Ok(size.ranks().zip(drivers).map(|(rank, driver)| Self::of(rank, size, &ranks, &Arc::new(driver))).collect())
    }

    fn of(rank: Rank, world: WorldSize, ranks: &Arc<Ranks>, driver: &Arc<Driver>) -> Self {
        lock(&driver.places).push((Arc::downgrade(ranks), rank));
        let (ranks, driver) = (Arc::clone(ranks), Arc::clone(driver));
        Self { rank, world, ranks, driver, last: Mutex::default() }
    }

    /// The communicator of a team, for its members; `None` for other ranks. Teams of the same members are one team, whichever rank made
    /// them: all that a member calls in it comes in one order.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a team of a world of another size, and inside a [group](Communicator::group).
    pub fn team(&self, team: &Team) -> Result<Option<Self>> {
        const WHAT: &str = "EmulatedCommunicator::team";
        group::refuse(WHAT, "a group is under way on this thread: make the team before it or after it")?;
        check_team(team, self.world, WHAT)?;
        let Some(rank) = team.rank_of(self.rank) else { return Ok(None) };
        let ranks = self.ranks.part(format!("{team:?}"), team.size(), self.driver.rank.cluster().patience());
        Ok(Some(Self::of(rank, team.size(), &ranks, &self.driver)))
    }

    /// The rank's device.
    pub fn device(&self) -> &Device {
        self.driver.rank.device()
    }

    fn check_stream(&self, stream: &Stream, what: &'static str) -> Result<()> {
        let (found, expected) = (stream.device(), self.device());
        if found == *expected {
            return Ok(());
        }
        let why = format!("the stream is on {found:?}, {} on {expected:?}: use a stream of that device", self.rank);
        Err(Error::Invalid { what, why })
    }

    fn check_rank(&self, rank: Rank, what: &'static str) -> Result<()> {
        if rank.index() < self.world.get() {
            return Ok(());
        }
        Err(Error::Invalid { what, why: format!("{rank} is not of this world of {}", self.world) })
    }

    /// `buffer` has `parts` times `shard` elements.
    fn check_parts(&self, what: &'static str, shard: u64, buffer: u64) -> Result<()> {
        let expected = shard.checked_mul(self.world.get().into());
        if expected == Some(buffer) { Ok(()) } else { Err(Error::Length { what, expected: expected.unwrap_or(u64::MAX), found: buffer }) }
    }

    /// A number by which the calls of this communicator are known.
    fn id(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Enqueues this rank's part, or keeps it for the end of the group that it belongs to.
    #[track_caller]
    fn enqueue(&self, stream: &Stream, what: &'static str, part: Part, uses: Vec<Operand>) -> Result<()> {
        let is_grouped = group::join(self.id(), what, &uses)?;
        stream.0.note(what, Some(Location::caller()));
        let call = Enqueued { stream: Arc::clone(&stream.0), part, uses, caller: Location::caller() };
        if is_grouped {
            group::keep(call);
            return Ok(());
        }
        self.enqueue_together(vec![call])
    }

    /// Enqueues calls on the stream of the first, after earlier work on their memory, on all of their streams, and after this rank's last call; the other
    /// streams go on after them.
    fn enqueue_together(&self, calls: Vec<Enqueued>) -> Result<()> {
        let Some(stream) = calls.first().map(|call| Arc::clone(&call.stream)) else { return Ok(()) };
        self.driver.rank.drive();
        let cluster = self.driver.rank.cluster();
        let mut others: Vec<Arc<StreamInner>> = Vec::new();
        for call in &calls {
            if call.stream.id != stream.id && others.iter().all(|other| other.id != call.stream.id) {
                others.push(Arc::clone(&call.stream));
            }
        }
        let _enqueue = stream.runtime.enqueue();
        self.order_calls(&stream)?;
        stream.order_after(&others)?;
        memory::order(&stream, |wait_for| {
            calls.iter().flat_map(|call| &call.uses).for_each(|operand| operand.add_use(&stream, wait_for));
        })?;
        cluster.collectives(stream.id, calls.into_iter().map(|call| (call.part, call.caller)).collect())?;
        others.iter().try_for_each(|other| other.order_after(std::slice::from_ref(&stream)))
    }

    /// A captured call comes after those of its own capture; the replay is ordered after the work that is enqueued before it.
    fn order_calls(&self, stream: &Arc<StreamInner>) -> Result<()> {
        let before = lock(&self.last).replace(Arc::clone(stream));
        let capture = |stream: &StreamInner| stream.capture().map(|capture| capture.number);
        match before.filter(|before| before.id != stream.id && capture(before) == capture(stream)) {
            Some(before) => stream.order_after(&[before]),
            None => Ok(()),
        }
    }
}

impl ArenaRank for EmulatedCommunicator {
    fn device(&self) -> &Device {
        self.driver.rank.device()
    }

    fn next_meeting(&self) -> Meeting {
        let mut arenas = lock(&self.ranks.arenas);
        let number = arenas.entry(self.rank).or_default();
        *number += 1;
        Meeting::new(self.ranks.board.clone(), self.rank, self.world, format!("arena {}", *number - 1))
    }
}

impl Communicator for EmulatedCommunicator {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> WorldSize {
        self.world
    }

    #[track_caller]
    fn all_reduce<'a, T: Reducible>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, op: ReduceOp) -> Result<()> {
        const WHAT: &str = "Communicator::all_reduce";
        self.check_stream(stream, WHAT)?;
        let buffer = Operand::written(stream, WHAT, &buffer.into())?;
        let call = Call::AllReduce { reduction: Reduction { op, dtype: T::DTYPE }, bytes: buffer.bytes };
        let part = Part::collective(&self.ranks.group, self.rank, call, buffer.region(), buffer.region());
        self.enqueue(stream, WHAT, part, vec![buffer])
    }

    #[track_caller]
    fn all_gather<'a, T: Pod>(
        &self,
        stream: &Stream,
        shard: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()> {
        const WHAT: &str = "Communicator::all_gather";
        let (shard, output) = (shard.into(), output.into());
        self.check_stream(stream, WHAT)?;
        let [from, to] = [Operand::read(stream, WHAT, shard)?, Operand::written(stream, WHAT, &output)?];
        self.check_parts("Communicator::all_gather, output", shard.len(), output.len())?;
        let call = Call::AllGather { shard_bytes: from.bytes };
        let part = Part::collective(&self.ranks.group, self.rank, call, from.region(), to.region());
        self.enqueue(stream, WHAT, part, vec![from, to])
    }

    #[track_caller]
    fn reduce_scatter<'a, T: Reducible>(
        &self,
        stream: &Stream,
        input: impl Into<DeviceView<'a, T>>,
        shard: impl Into<DeviceViewMut<'a, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        const WHAT: &str = "Communicator::reduce_scatter";
        let (input, shard) = (input.into(), shard.into());
        self.check_stream(stream, WHAT)?;
        let [from, to] = [Operand::read(stream, WHAT, input)?, Operand::written(stream, WHAT, &shard)?];
        self.check_parts("Communicator::reduce_scatter, input", shard.len(), input.len())?;
        let call = Call::ReduceScatter { reduction: Reduction { op, dtype: T::DTYPE }, shard_bytes: to.bytes };
        let part = Part::collective(&self.ranks.group, self.rank, call, from.region(), to.region());
        self.enqueue(stream, WHAT, part, vec![from, to])
    }

    #[track_caller]
    fn broadcast<'a, T: Pod>(&self, stream: &Stream, buffer: impl Into<DeviceViewMut<'a, T>>, root: Rank) -> Result<()> {
        const WHAT: &str = "Communicator::broadcast";
        self.check_stream(stream, WHAT)?;
        self.check_rank(root, WHAT)?;
        // The root's buffer is only read.
        let is_root = root == self.rank;
        let buffer = Operand { writes: !is_root, ..Operand::written(stream, WHAT, &buffer.into())? };
        let call = Call::Broadcast { root, bytes: buffer.bytes };
        let none = Region::default();
        let (input, output) = if is_root { (buffer.region(), none) } else { (none, buffer.region()) };
        let part = Part::collective(&self.ranks.group, self.rank, call, input, output);
        self.enqueue(stream, WHAT, part, vec![buffer])
    }

    #[track_caller]
    fn all_to_all<'a, T: Pod>(
        &self,
        stream: &Stream,
        input: impl Into<DeviceView<'a, T>>,
        output: impl Into<DeviceViewMut<'a, T>>,
    ) -> Result<()> {
        const WHAT: &str = "Communicator::all_to_all";
        let (input, output) = (input.into(), output.into());
        self.check_stream(stream, WHAT)?;
        let [from, to] = [Operand::read(stream, WHAT, input)?, Operand::written(stream, WHAT, &output)?];
        self.check_parts("Communicator::all_to_all, input", input.len() / u64::from(self.world.get()), input.len())?;
        if output.len() != input.len() {
            return Err(Error::Length { what: "Communicator::all_to_all, output", expected: input.len(), found: output.len() });
        }
        let call = Call::AllToAll { bytes: from.bytes };
        let part = Part::collective(&self.ranks.group, self.rank, call, from.region(), to.region());
        self.enqueue(stream, WHAT, part, vec![from, to])
    }

    #[track_caller]
    fn exchange<T: Pod>(
        &self,
        stream: &Stream,
        sends: &[(Rank, DeviceView<'_, T>)],
        receives: &[(Rank, DeviceViewMut<'_, T>)],
    ) -> Result<()> {
        const WHAT: &str = "Communicator::exchange";
        self.check_stream(stream, WHAT)?;
        let mut uses = Vec::new();
        let mut transfer = |peer: Rank, operand: Result<Operand>| -> Result<Transfer> {
            self.check_rank(peer, WHAT)?;
            let operand = operand?;
            let region = operand.region();
            uses.push(operand);
            Ok(Transfer { peer, region })
        };
        let sent = sends.iter().map(|(peer, view)| transfer(*peer, Operand::read(stream, WHAT, *view))).collect::<Result<_>>()?;
        let received = receives.iter().map(|(peer, view)| transfer(*peer, Operand::written(stream, WHAT, view))).collect::<Result<_>>()?;
        self.enqueue(stream, WHAT, Part::exchange(&self.ranks.group, self.rank, sent, received), uses)
    }

    #[track_caller]
    fn barrier(&self, stream: &Stream) -> Result<()> {
        const WHAT: &str = "Communicator::barrier";
        self.check_stream(stream, WHAT)?;
        let none = Region::default();
        self.enqueue(stream, WHAT, Part::collective(&self.ranks.group, self.rank, Call::Barrier, none, none), Vec::new())
    }

    fn group<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        let end = GroupEnd { communicator: self, open: group::begin(self.id())? };
        let done = body();
        let ended = end.enqueue();
        drop(end);
        done.and_then(|done| ended.map(|()| done))
    }

    /// The ranks meet on their host, not on streams.
    fn split(&self, colour: Option<u32>, key: u32) -> Result<Option<Self>> {
        group::refuse("Communicator::split", "a group is under way on this thread: split before it or after it")?;
        self.driver.rank.drive();
        let cluster = self.driver.rank.cluster();
        let splits = &self.ranks.splits[self.rank.index() as usize];
        let Some(part) = splits.split_within(colour, key, cluster.patience_for_others())? else { return Ok(None) };
        let team = Team::new(self.world, part.members())?;
        let Some(rank) = team.rank_of(self.rank) else { return Ok(None) };
        let ranks = self.ranks.part(part.name().to_owned(), team.size(), cluster.patience());
        Ok(Some(Self::of(rank, team.size(), &ranks, &self.driver)))
    }

    /// As [`EmulatedCommunicator::team`], which does not wait.
    fn team(&self, team: &Team) -> Result<Option<Self>> {
        Self::team(self, team)
    }
}

/// The end of a group, also when its body panics: the calls that it made are enqueued.
struct GroupEnd<'a> {
    communicator: &'a EmulatedCommunicator,
    open: group::Open,
}

impl GroupEnd<'_> {
    fn enqueue(&self) -> Result<()> {
        self.communicator.enqueue_together(self.open.take_kept())
    }
}

impl Drop for GroupEnd<'_> {
    fn drop(&mut self) {
        // Nothing is left of a body that ended.
        let _ = self.enqueue();
    }
}

impl fmt::Debug for EmulatedCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmulatedCommunicator").field("rank", &self.rank.index()).field("world", &self.world.get()).finish_non_exhaustive()
    }
}
