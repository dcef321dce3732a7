//! The ranks that a process drives: all of a virtual cluster, or the one that a launcher made it.

use std::time::Duration;

use oxtile::{
    Device, Error, Result, Runtime, Stream,
    comm::{
        ArenaRank, Communicator, EmulatedCommunicator, HostRank, Member, NcclCommunicator, NcclOptions, Rank, Team, UniqueId, WorldSize,
        bootstrap::{Environment, Store},
    },
    context_parallel::{ContextParallelConfig, ContextParallelFp8, Schedule, Transport},
    symmetric::{Arena, ArenaOptions, BackendName},
};

use super::JobError;

/// How long ranks wait for one another.
const PATIENCE: Duration = Duration::from_secs(300);

/// Bytes of an element of `bf16` and `f16`.
const ELEMENT_BYTES: u64 = 2;

/// A rank that this process drives.
pub struct Seat<C> {
    /// Its work.
    pub stream: Stream,
    communicator: C,
    /// Among neighbours, and between groups of them.
    grid: Option<[C; 2]>,
    /// Memory that the other ranks reach.
    memory: Option<(Arena, Member)>,
    /// Where the processes of a launcher meet.
    host: Option<HostRank>,
}

/// What a schedule takes.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    config: ContextParallelConfig,
    world: WorldSize,
    /// Whether the forward pass is of 8 bits.
    fp8: bool,
}

impl Needs {
    /// What a schedule takes of `world` ranks.
    ///
    /// # Errors
    /// [`JobError::Neighbours`].
    pub fn new(config: ContextParallelConfig, world: WorldSize, fp8: bool) -> std::result::Result<Self, JobError> {
        match config.forward {
            schedule @ Schedule::Hierarchical { inner } if !world.get().is_multiple_of(inner.get()) => {
                Err(JobError::Neighbours { schedule, world })
            }
            _ => Ok(Self { config, world, fp8 }),
        }
    }

    /// Memory of a rank that the others reach, where the schedule takes it: pull and fused take nothing else; others have messages beyond a host, and where ranks cannot map
    /// each other's memory, of which all ranks are told.
    fn arena(&self, rank: Rank, of: &impl ArenaRank, backend: BackendName, is_one_host: bool) -> Result<Option<(Arena, Member)>> {
        let takes = match self.config.forward {
            Schedule::Pull | Schedule::Fused => true,
            Schedule::AllToAll | Schedule::Auto => is_one_host && self.world > WorldSize::ONE,
            _ => false,
        };
        let bytes = match self.fp8 {
            true => ContextParallelFp8::arena_bytes(&self.config, self.world),
            false => self.config.arena_bytes(self.world, ELEMENT_BYTES),
        };
        let options = ArenaOptions { backend, bytes, deadline: PATIENCE, ..ArenaOptions::default() };
        let member = Team::all(self.world).member(rank).filter(|_| takes);
        let Some(member) = member else { return Ok(None) };
        match Arena::open(of, options) {
            Ok(arena) => Ok(Some((arena, member))),
            Err(error) if matches!(self.config.forward, Schedule::Pull | Schedule::Fused) => Err(error),
            // The plan says that there is none.
            Err(_) => Ok(None),
        }
    }
}

/// A communicator between the ranks of a job.
pub trait Link: Communicator + Send + Sync + Sized {
    /// The part of the ranks that name this colour, which are the members of `team`.
    fn part(&self, team: &Team, colour: u32) -> Result<Option<Self>>;

    /// Neighbours, and ranks of one place in all such groups.
    fn grid(&self, schedule: Schedule) -> Result<Option<[Self; 2]>> {
        let Schedule::Hierarchical { inner } = schedule else { return Ok(None) };
        let (rank, world, size) = (self.rank().index(), self.world(), inner.get());
        let (group, place) = (rank / size, rank % size);
        let strided = |first, stride, count: u32| {
            let (first, count) = (Rank::new(first, world).unwrap_or(Rank::ZERO), WorldSize::new(count).unwrap_or(WorldSize::ONE));
            Team::strided(world, first, stride, count)
        };
        let near = self.part(&strided(group * size, 1, size)?, group)?;
        let far = self.part(&strided(place, size, world.get() / size)?, place)?;
        Ok(near.zip(far).map(<[Self; 2]>::from))
    }
}

impl Link for EmulatedCommunicator {
    fn part(&self, team: &Team, _: u32) -> Result<Option<Self>> {
        // One thread makes the parts of all ranks, which no part may wait for.
        self.team(team)
    }
}

impl Link for NcclCommunicator {
    fn part(&self, _: &Team, colour: u32) -> Result<Option<Self>> {
        self.split(Some(colour), self.rank().index())
    }
}

impl<C: Link> Seat<C> {
    /// Which rank it is.
    pub fn rank(&self) -> Rank {
        self.communicator.rank()
    }

    /// How many ranks there are.
    pub fn world(&self) -> WorldSize {
        self.communicator.world()
    }

    /// To and from the other ranks.
    pub fn communicator(&self) -> &C {
        &self.communicator
    }

    /// Waits until its work is done.
    ///
    /// # Errors
    /// What went wrong in it.
    pub fn wait(&self) -> Result<()> {
        self.communicator.wait(&self.stream)
    }

    /// Over what its keys travel.
    pub fn transport(&self) -> Transport<'_> {
        let transport = match &self.memory {
            Some((arena, member)) => Transport::both(&self.communicator, arena, member),
            None => Transport::collective(&self.communicator),
        };
        match &self.grid {
            Some([near, far]) => transport.with_grid(near, far),
            None => transport,
        }
    }

    /// Gives up what other ranks reach, once all have done their work.
    ///
    /// # Errors
    /// What went wrong in a stream; ranks that do not come.
    pub fn close_all(seats: Vec<Self>) -> Result<()> {
        let (memory, hosts): (Vec<_>, Vec<_>) = seats.into_iter().map(|seat| (seat.memory, seat.host)).unzip();
        let closing = memory.into_iter().flatten().map(|(arena, _)| Ok(arena.close()?)).collect::<Result<Vec<_>>>()?;
        closing.into_iter().try_for_each(|arena| arena.finish())?;
        hosts.into_iter().flatten().try_for_each(HostRank::close)
    }
}

/// All ranks, on the emulator.
///
/// # Errors
/// As [`Arena::open`].
pub fn emulated(runtime: &Runtime, needs: Needs) -> Result<Vec<Seat<EmulatedCommunicator>>> {
    let seat = |communicator: EmulatedCommunicator| {
        let (stream, grid) = (communicator.device().stream()?, communicator.grid(needs.config.forward)?);
        let memory = needs.arena(communicator.rank(), &communicator, BackendName::Emulated, true)?;
        Ok(Seat { stream, communicator, grid, memory, host: None })
    };
    EmulatedCommunicator::world_of(runtime, needs.world)?.into_iter().map(seat).collect()
}

/// The rank that a launcher made this process, on its GPU. Meets the other ranks.
///
/// # Errors
/// Ranks that do not come; no NCCL.
pub fn launched(device: &Device, environment: &Environment, needs: Needs) -> Result<Seat<NcclCommunicator>> {
    let mut store = Store::connect(environment, PATIENCE)?;
    let own = if environment.rank == Rank::ZERO { NcclCommunicator::unique_id()?.as_bytes().to_vec() } else { Vec::new() };
    let broken = |found: Vec<u8>| Error::Invalid {
        what: "NCCL's id",
        why: format!("rank 0 brings {} bytes: run one version of oxtile", found.len()),
    };
    let id = store.broadcast(Rank::ZERO, &own)?.try_into().map_err(broken)?;
    let hosts = store.all_gather(&host_id())?;
    let is_one_host = hosts.iter().all(|host| *host == hosts[0]);
    let options = NcclOptions { deadline: PATIENCE, ..NcclOptions::default() };
    let communicator = NcclCommunicator::join(device, UniqueId::from_bytes(id), environment.rank, environment.world, &options)?;
    let (grid, host) = (communicator.grid(needs.config.forward)?, HostRank::from_store(store, device)?);
    let memory = needs.arena(environment.rank, &host, BackendName::Vmm, is_one_host)?;
    Ok(Seat { stream: device.stream()?, communicator, grid, memory, host: Some(host) })
}

/// The same on all processes of a running host, and on no other.
fn host_id() -> Vec<u8> {
    std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}
