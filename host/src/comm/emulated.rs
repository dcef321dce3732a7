//! The ranks of a virtual cluster.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Mutex};

use oxtile_tile::num::Pod;

use super::board::LocalBoard;
use super::communicator::{Communicator, ReduceOp, Reducible};
use super::meeting::{ArenaRank, Meeting};
use super::rank::{Rank, WorldSize};
use super::team::Team;
use crate::runtime::emulated::{Call, Cluster, Group, Part, Reduction, Region, Transfer};
use crate::runtime::memory::{self, Memory};
use crate::runtime::runtime::lock;
use crate::runtime::stream::StreamInner;
use crate::runtime::{Buffer, Device, Error, Result, Runtime, Stream};

/// A rank of a virtual cluster: one process holds them all. Drive them from one thread, so that a seed gives one order, or
/// each from its own, as a program of many processes would.
///
/// A collective that some rank does not call, or calls otherwise, ends all work of the cluster with an error that names ranks, call
/// and its number.
pub struct EmulatedCommunicator {
    rank: Rank,
    world: WorldSize,
    ranks: Arc<Ranks>,
    driver: Arc<Driver>,
    /// The stream of the last call, which the next comes after.
    last: Mutex<Option<Arc<StreamInner>>>,
}

/// Ranks that call together, and the teams split off from them.
struct Ranks {
    group: Arc<Group>,
    teams: Mutex<Vec<(Team, Arc<Ranks>)>>,
    board: Arc<LocalBoard>,
    /// How many arenas each rank has opened.
    arenas: Mutex<BTreeMap<Rank, u64>>,
}

impl Ranks {
    fn new(name: String, size: WorldSize) -> Arc<Self> {
        Arc::new(Self { group: Group::new(name, size.get()), teams: Mutex::default(), board: Arc::default(), arenas: Mutex::default() })
    }

    fn team(&self, team: &Team) -> Arc<Self> {
        let mut teams = lock(&self.teams);
        if let Some((_, ranks)) = teams.iter().find(|(known, _)| known == team) {
            return Arc::clone(ranks);
        }
        let ranks = Self::new(format!("{team:?}"), team.size());
        teams.push((team.clone(), Arc::clone(&ranks)));
        ranks
    }
}

/// A rank's device, and the rank's handle in the cluster, which is told what thread drives it.
struct Driver {
    device: Device,
    handle: u64,
}

impl Driver {
    fn new(device: Device) -> Result<Self> {
        let handle = cluster(&device)?.add_rank();
        Ok(Self { device, handle })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if let Ok(cluster) = cluster(&self.device) {
            cluster.remove_rank(self.handle);
        }
    }
}

fn cluster(device: &Device) -> Result<&Cluster> {
    let why = || "the runtime has GPUs, not a virtual cluster: use Runtime::emulated".to_owned();
    device.runtime.backend.cluster().ok_or_else(|| Error::Invalid { what: "EmulatedCommunicator", why: why() })
}

impl EmulatedCommunicator {
    /// The ranks of a world, each on the device of its number; with fewer devices they share them in turn.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a runtime that is not emulated.
    pub fn world_of(runtime: &Runtime, size: WorldSize) -> Result<Vec<Self>> {
        let ranks = Ranks::new("the world".to_owned(), size);
        let rank = |rank: Rank| {
            let driver = Driver::new(runtime.device(rank.index() % runtime.device_count())?)?;
            Ok(Self { rank, world: size, ranks: Arc::clone(&ranks), driver: Arc::new(driver), last: Mutex::new(None) })
        };
        size.ranks().map(rank).collect()
    }

    /// The communicator of a team, for its members; `None` for other ranks. Teams of the same members are one team, whoever made
    /// them: all that a member calls in it comes in one order.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a team of a world of another size.
    pub fn team(&self, team: &Team) -> Result<Option<Self>> {
        if team.world() != self.world {
            let why = format!("the team is of a world of {}, this one has {}", team.world(), self.world);
            return Err(Error::Invalid { what: "EmulatedCommunicator::team", why });
        }
        let Some(rank) = team.rank_of(self.rank) else { return Ok(None) };
        let (ranks, driver) = (self.ranks.team(team), Arc::clone(&self.driver));
        Ok(Some(Self { rank, world: team.size(), ranks, driver, last: Mutex::new(None) }))
    }

    /// The rank's device.
    pub fn device(&self) -> &Device {
        &self.driver.device
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

    /// Enqueues this rank's part, after earlier work on its memory and after this rank's last call.
    #[track_caller]
    fn enqueue(&self, stream: &Stream, part: Part, uses: &[(&Arc<Memory>, bool)]) -> Result<()> {
        let cluster = cluster(self.device())?;
        cluster.drive(self.driver.handle);
        let stream = &stream.0;
        let _enqueue = stream.runtime.enqueue();
        self.order_calls(stream)?;
        memory::order(stream, |wait_for| uses.iter().for_each(|(memory, writes)| memory.add_use(stream, *writes, wait_for)))?;
        cluster.collective(stream.id, part, Location::caller())
    }

    /// A captured call comes after those of its own capture; the replay is ordered by what it is enqueued behind.
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
        &self.driver.device
    }

    fn next_meeting(&self) -> Meeting {
        let mut arenas = lock(&self.ranks.arenas);
        let number = arenas.entry(self.rank).or_default();
        *number += 1;
        Meeting::new(self.ranks.board.clone(), self.rank, self.world, format!("arena {}", *number - 1))
    }
}

fn region<T: Pod>(buffer: &Buffer<T>) -> Region {
    Region { address: buffer.address(), bytes: buffer.memory().bytes }
}

impl Communicator for EmulatedCommunicator {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> WorldSize {
        self.world
    }

    #[track_caller]
    fn all_reduce<T: Reducible>(&self, stream: &Stream, buffer: &mut Buffer<T>, op: ReduceOp) -> Result<()> {
        const WHAT: &str = "Communicator::all_reduce";
        self.check_stream(stream, WHAT)?;
        buffer.check_stream(stream, WHAT)?;
        let call = Call::AllReduce { reduction: Reduction { op, dtype: T::DTYPE }, bytes: region(buffer).bytes };
        let part = Part::collective(&self.ranks.group, self.rank, call, region(buffer), region(buffer));
        self.enqueue(stream, part, &[(buffer.memory(), true)])
    }

    #[track_caller]
    fn all_gather<T: Pod>(&self, stream: &Stream, shard: &Buffer<T>, output: &mut Buffer<T>) -> Result<()> {
        const WHAT: &str = "Communicator::all_gather";
        self.check_stream(stream, WHAT)?;
        shard.check_stream(stream, WHAT)?;
        output.check_stream(stream, WHAT)?;
        self.check_parts("Communicator::all_gather, output", shard.len(), output.len())?;
        let call = Call::AllGather { shard_bytes: region(shard).bytes };
        let part = Part::collective(&self.ranks.group, self.rank, call, region(shard), region(output));
        self.enqueue(stream, part, &[(shard.memory(), false), (output.memory(), true)])
    }

    #[track_caller]
    fn reduce_scatter<T: Reducible>(&self, stream: &Stream, input: &Buffer<T>, shard: &mut Buffer<T>, op: ReduceOp) -> Result<()> {
        const WHAT: &str = "Communicator::reduce_scatter";
        self.check_stream(stream, WHAT)?;
        input.check_stream(stream, WHAT)?;
        shard.check_stream(stream, WHAT)?;
        self.check_parts("Communicator::reduce_scatter, input", shard.len(), input.len())?;
        let call = Call::ReduceScatter { reduction: Reduction { op, dtype: T::DTYPE }, shard_bytes: region(shard).bytes };
        let part = Part::collective(&self.ranks.group, self.rank, call, region(input), region(shard));
        self.enqueue(stream, part, &[(input.memory(), false), (shard.memory(), true)])
    }

    #[track_caller]
    fn broadcast<T: Pod>(&self, stream: &Stream, buffer: &mut Buffer<T>, root: Rank) -> Result<()> {
        const WHAT: &str = "Communicator::broadcast";
        self.check_stream(stream, WHAT)?;
        self.check_rank(root, WHAT)?;
        buffer.check_stream(stream, WHAT)?;
        let call = Call::Broadcast { root, bytes: region(buffer).bytes };
        // The root's buffer is only read.
        let (none, is_root) = (Region::default(), root == self.rank);
        let (input, output) = if is_root { (region(buffer), none) } else { (none, region(buffer)) };
        let part = Part::collective(&self.ranks.group, self.rank, call, input, output);
        self.enqueue(stream, part, &[(buffer.memory(), !is_root)])
    }

    #[track_caller]
    fn all_to_all<T: Pod>(&self, stream: &Stream, input: &Buffer<T>, output: &mut Buffer<T>) -> Result<()> {
        const WHAT: &str = "Communicator::all_to_all";
        self.check_stream(stream, WHAT)?;
        input.check_stream(stream, WHAT)?;
        output.check_stream(stream, WHAT)?;
        self.check_parts("Communicator::all_to_all, input", input.len() / u64::from(self.world.get()), input.len())?;
        if output.len() != input.len() {
            return Err(Error::Length { what: "Communicator::all_to_all, output", expected: input.len(), found: output.len() });
        }
        let call = Call::AllToAll { bytes: region(input).bytes };
        let part = Part::collective(&self.ranks.group, self.rank, call, region(input), region(output));
        self.enqueue(stream, part, &[(input.memory(), false), (output.memory(), true)])
    }

    #[track_caller]
    fn exchange<T: Pod>(&self, stream: &Stream, sends: &[(Rank, &Buffer<T>)], receives: &mut [(Rank, &mut Buffer<T>)]) -> Result<()> {
        const WHAT: &str = "Communicator::exchange";
        self.check_stream(stream, WHAT)?;
        let mut uses = Vec::new();
        let mut transfer = |peer: Rank, buffer, writes| -> Result<Transfer> {
            let buffer: &Buffer<T> = buffer;
            self.check_rank(peer, WHAT)?;
            buffer.check_stream(stream, WHAT)?;
            uses.push((Arc::clone(buffer.memory()), writes));
            Ok(Transfer { peer, region: region(buffer) })
        };
        let sends = sends.iter().map(|(peer, buffer)| transfer(*peer, buffer, false)).collect::<Result<_>>()?;
        let receives = receives.iter().map(|(peer, buffer)| transfer(*peer, buffer, true)).collect::<Result<_>>()?;
        let part = Part::exchange(&self.ranks.group, self.rank, sends, receives);
        let uses: Vec<_> = uses.iter().map(|(memory, writes)| (memory, *writes)).collect();
        self.enqueue(stream, part, &uses)
    }

    #[track_caller]
    fn barrier(&self, stream: &Stream) -> Result<()> {
        self.check_stream(stream, "Communicator::barrier")?;
        let none = Region::default();
        self.enqueue(stream, Part::collective(&self.ranks.group, self.rank, Call::Barrier, none, none), &[])
    }
}

impl fmt::Debug for EmulatedCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmulatedCommunicator").field("rank", &self.rank.index()).field("world", &self.world.get()).finish_non_exhaustive()
    }
}
