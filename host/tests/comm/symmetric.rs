//! Arenas, one-sided operations, gathers and their failures.

use std::time::{Duration, Instant};

use oxtile::comm::{Communicator, Rank, Team, WorldSize};
use oxtile::symmetric::{
    Arena, ArenaOptions, BackendName, Channel, Epoch, GatherMemory, PullGather, PushGather, PushMemory, SymmetricBuffer, SymmetricError,
};
use oxtile::{Buffer, Error, Result, Runtime, Stream};

use crate::support::{WORLDS, World, numbers};

/// A world with an arena a rank.
struct Arenas {
    world: World,
    arenas: Vec<Arena>,
}

const FIRST: Epoch = Epoch::ZERO.next();

fn options() -> ArenaOptions {
    ArenaOptions { bytes: 1 << 14, deadline: Duration::from_millis(200), ..ArenaOptions::default() }
}

impl Arenas {
    /// For programs that go well, however busy the machine is.
    fn new(size: u32, seed: u64) -> Self {
        Self::with(size, seed, ArenaOptions { deadline: Duration::from_secs(30), ..options() })
    }

    fn with(size: u32, seed: u64, options: ArenaOptions) -> Self {
        let world = World::new(size, seed);
        let arenas = world.ranks.iter().map(|rank| Arena::open(rank, options.clone()).unwrap()).collect();
        Self { world, arenas }
    }

    fn buffers(&self, len: u64) -> Vec<SymmetricBuffer<u32>> {
        self.arenas.iter().map(|arena| arena.buffer(len).unwrap()).collect()
    }

    fn channels(&self) -> Vec<Channel> {
        self.arenas.iter().map(|arena| arena.channel().unwrap()).collect()
    }

    fn stream(&self, rank: usize) -> &Stream {
        &self.world.streams[rank]
    }

    fn close(self) {
        let closing: Vec<_> = self.arenas.into_iter().map(|arena| arena.close().unwrap()).collect();
        closing.into_iter().for_each(|arena| arena.finish().unwrap());
    }
}

/// The symmetric error inside.
fn symmetric<R: std::fmt::Debug>(result: Result<R>) -> SymmetricError {
    match result.unwrap_err() {
        Error::Symmetric(error) => error,
        other => panic!("{other}"),
    }
}

#[test]
fn what_is_put_and_signalled_arrives() {
    for size in WORLDS {
        for seed in 0..16 {
            let all = Arenas::new(size, seed);
            let (buffers, arrived) = (all.buffers(4 * u64::from(size)), all.channels());
            let own = all.world.buffers(|rank| numbers(rank, 4));
            for (i, arena) in all.arenas.iter().enumerate() {
                for peer in all.world.size().ranks() {
                    buffers[i].peer(peer).unwrap().put(all.stream(i), &own[i], 0..4, 4 * i as u64).unwrap();
                    arena.signal(all.stream(i), arrived[i], peer, FIRST).unwrap();
                }
            }
            for (i, arena) in all.arenas.iter().enumerate() {
                all.world.size().ranks().for_each(|peer| arena.wait(all.stream(i), arrived[i], peer, FIRST).unwrap());
                let expected: Vec<_> = (0..size).flat_map(|rank| numbers(rank, 4)).collect();
                assert_eq!(buffers[i].local().to_vec(all.stream(i)).unwrap(), expected);
            }
            drop(buffers);
            all.close();
        }
    }
}

/// Three rounds of a gather on a team, the result read a chunk at a time on another stream.
fn pull(all: &Arenas, team: &Team, members: &[usize], chunks: u64) -> Result<()> {
    let mut memories: Vec<_> = all.arenas.iter().map(|arena| Some(GatherMemory::<u32>::take(arena, 5).unwrap())).collect();
    let mut gathers = Vec::new();
    for &i in members {
        let member = team.member(all.arenas[i].rank()).unwrap();
        let stream = all.world.ranks[i].device().stream()?;
        gathers.push(PullGather::new(&all.arenas[i], &member, memories[i].take().unwrap(), &stream, chunks)?);
    }
    for round in 0..3 {
        let mut running = Vec::new();
        for (gather, &i) in gathers.iter_mut().zip(members) {
            let value = numbers(10 * round + i as u32, 5);
            gather.shard(all.stream(i))?.copy_from_slice_later(all.stream(i), &value)?;
            running.push(gather.run(Buffer::uninitialised(all.stream(i), 5 * members.len() as u64)?)?);
        }
        for (gathered, &i) in running.into_iter().zip(members) {
            let side = all.world.ranks[i].device().stream()?;
            for (member, &from) in (0..).zip(members) {
                let member = Rank::new(member, team.size()).unwrap();
                for chunk in 0..chunks {
                    let view = gathered.chunk(&side, member, chunk)?;
                    assert_eq!(view.len(), length(chunks, chunk), "of rank {from}");
                }
            }
            let output = gathered.then(all.stream(i))?;
            let expected: Vec<_> = members.iter().flat_map(|from| numbers(10 * round + *from as u32, 5)).collect();
            assert_eq!(output.to_vec(all.stream(i))?, expected);
        }
    }
    Ok(())
}

/// Of a chunk of five elements.
fn length(chunks: u64, chunk: u64) -> u64 {
    if chunks == 1 { 5 } else { [3, 2][chunk as usize] }
}

trait Later {
    fn copy_from_slice_later(&mut self, stream: &Stream, values: &[u32]) -> Result<()>;
}

/// Without waiting for the stream, which may wait for ranks that this thread has not come to yet.
impl Later for Buffer<u32> {
    fn copy_from_slice_later(&mut self, stream: &Stream, values: &[u32]) -> Result<()> {
        self.copy_from_pinned(stream, &oxtile::PinnedBuffer::from_slice(stream, values)?)
    }
}

#[test]
fn shards_are_pulled_by_the_world_and_by_teams() {
    for size in WORLDS {
        for seed in 0..8 {
            let all = Arenas::new(size, seed);
            pull(&all, &Team::all(all.world.size()), &(0..size as usize).collect::<Vec<_>>(), 1 + seed % 2).unwrap();
            all.close();
        }
    }
    for seed in 0..8 {
        let all = Arenas::new(4, seed);
        let team = Team::new(all.world.size(), &[all.world.rank(3), all.world.rank(0), all.world.rank(2)]).unwrap();
        pull(&all, &team, &[3, 0, 2], 1 + seed % 2).unwrap();
        assert!(team.member(all.world.rank(1)).is_none(), "rank 1 cannot hold a place in the team");
        all.close();
    }
}

fn push(all: &Arenas, rounds: u32, chunks: u64) -> Result<()> {
    let size = all.world.size();
    let team = Team::all(size);
    let mut gathers = Vec::new();
    for (i, arena) in all.arenas.iter().enumerate() {
        let member = team.member(arena.rank()).unwrap();
        let streams = [all.world.ranks[i].device().stream()?, all.world.ranks[i].device().stream()?];
        let memory = PushMemory::<u32>::take(arena, 5, size.get())?;
        gathers.push(PushGather::new(arena, &member, memory, [&streams[0], &streams[1]], chunks)?);
    }
    for round in 0..rounds {
        let mut shards = all.world.buffers(|rank| numbers(10 * round + rank, 5));
        // As memory of another library, whose uses nobody notes: tickets alone say when it may be written again.
        // SAFETY: the elements of `shards`, which outlive this round's work.
        let raw = |shard: &Buffer<u32>| unsafe { Buffer::<u32>::borrow_raw(&shard.device(), shard.address(), 5) };
        let raw: Vec<_> = shards.iter().map(raw).collect::<Result<_>>()?;
        let tickets: Vec<_> = gathers.iter_mut().zip(&raw).map(|(gather, shard)| gather.run(shard)).collect::<Result<_>>()?;
        for (i, (gather, ticket)) in gathers.iter_mut().zip(tickets).enumerate() {
            let side = all.world.ranks[i].device().stream()?;
            let last = gather.chunk(&side, Rank::new(size.get() - 1, size).unwrap(), chunks - 1)?;
            assert_eq!(last.len(), length(chunks, chunks - 1));
            assert_eq!(gather.whole(all.stream(i))?.len(), 5 * u64::from(size.get()));
            ticket.wait()?;
            shards[i].fill_zero(&side)?;
            gather.release()?;
        }
        shards.iter().zip(&all.world.streams).try_for_each(|(shard, stream)| shard.to_vec(stream).map(|_| ()))?;
    }
    Ok(())
}

#[test]
fn shards_are_pushed() {
    for size in WORLDS {
        for seed in 0..8 {
            let all = Arenas::new(size, seed);
            push(&all, 3, 1 + seed % 2).unwrap();
            all.close();
        }
    }
}

/// The right programs say nothing under 1000 seeds.
#[test]
fn gathers_are_silent_under_a_thousand_seeds() {
    for seed in 0..1000 {
        let all = Arenas::new(2, seed);
        pull(&all, &Team::all(all.world.size()), &[0, 1], 1 + seed % 2).unwrap_or_else(|error| panic!("pull, seed {seed}: {error}"));
        push(&all, 2, 1 + seed % 2).unwrap_or_else(|error| panic!("push, seed {seed}: {error}"));
    }
}

#[test]
fn ranks_may_be_threads() {
    let world = World::new(4, 7);
    let rank = |rank: &oxtile::comm::EmulatedCommunicator| -> Result<Vec<u32>> {
        let (stream, side) = (rank.device().stream()?, rank.device().stream()?);
        let arena = Arena::open(rank, ArenaOptions::default())?;
        let memory = GatherMemory::<u32>::take(&arena, 3)?;
        let mut gather = PullGather::new(&arena, &Team::all(rank.world()).member(rank.rank()).unwrap(), memory, &side, 1)?;
        let mut found = Vec::new();
        for round in 0..5 {
            gather.shard(&stream)?.copy_from_slice(&stream, &numbers(rank.rank().index() + round, 3))?;
            found = gather.run(Buffer::uninitialised(&stream, 12)?)?.wait()?.to_vec(&stream)?;
        }
        drop(gather);
        arena.close()?.finish()?;
        Ok(found)
    };
    let found: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = world.ranks.iter().map(|comm| scope.spawn(|| rank(comm).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let expected: Vec<_> = (0..4).flat_map(|rank| numbers(rank + 4, 3)).collect();
    assert_eq!(found, vec![expected; 4]);
}

#[test]
fn back_ends_have_names_and_nothing_falls_back() {
    for name in ["vmm", "nccl", "emulated", "nvshmem"] {
        assert_eq!(name.parse::<BackendName>().unwrap().to_string(), name);
    }
    let error = "nvshmen".parse::<BackendName>().unwrap_err();
    assert_eq!(error.to_string(), "there is no symmetric memory called `nvshmen`: use vmm, nccl, emulated or nvshmem");
    let world = World::new(2, 0);
    let first = Arena::open(&world.ranks[0], options()).unwrap();
    let error = symmetric(Arena::open(&world.ranks[1], ArenaOptions { backend: BackendName::Vmm, ..options() }));
    assert!(matches!(error, SymmetricError::Unavailable { backend: BackendName::Vmm, .. }), "{error}");
    // Rank 0 learns that rank 1 opened something else.
    let buffer = first.buffer::<u32>(1).unwrap();
    let error = symmetric(buffer.peer(world.rank(1)));
    assert!(error.to_string().starts_with("rank 0 opens an arena with emulated memory"), "{error}");
}

#[test]
fn arenas_of_other_sizes_are_refused_on_every_rank() {
    let world = World::new(2, 0);
    let arenas = [1 << 12, 1 << 13].map(|bytes| ArenaOptions { bytes, ..options() });
    let arenas: Vec<_> = world.ranks.iter().zip(arenas).map(|(rank, options)| Arena::open(rank, options).unwrap()).collect();
    for (arena, other) in arenas.iter().zip([1, 0]) {
        let error = symmetric(arena.buffer::<u8>(1).unwrap().peer(world.rank(other)));
        assert!(matches!(error, SymmetricError::Rendezvous { .. }), "{error}");
    }
}

#[test]
fn layouts_that_differ_are_found_at_the_first_use_of_a_peer() {
    let all = Arenas::new(2, 0);
    let same = all.buffers(8);
    assert!(same[0].peer(all.world.rank(1)).is_ok());
    let long = all.arenas[0].buffer::<u32>(8).unwrap();
    all.arenas[1].buffer::<u32>(9).unwrap();
    let error = symmetric(long.peer(all.world.rank(1)));
    assert_eq!(
        error.to_string(),
        "allocation 1 is a buffer of 32 bytes on rank 0 and a buffer of 36 bytes on rank 1: every rank takes the same from its arena, in one order"
    );
    // What comes behind is of one size, but lies elsewhere.
    let behind = all.buffers(1);
    assert!(matches!(symmetric(behind[0].peer(all.world.rank(1))), SymmetricError::Layout { number: 2, .. }));
    assert!(same[0].peer(Rank::new(2, WorldSize::new(3).unwrap()).unwrap()).is_err());
}

#[test]
fn arenas_are_finite() {
    let all = Arenas::new(1, 0);
    assert!(matches!(symmetric(all.arenas[0].buffer::<u32>(1 << 20)), SymmetricError::Full { needed: 0x40_0000, left: 0x4000 }));
    assert!(matches!(all.arenas[0].buffer::<u32>(u64::MAX), Err(Error::TooLarge { .. })));
    (0..16).for_each(|_| _ = all.arenas[0].channel().unwrap());
    assert!(matches!(symmetric(all.arenas[0].channel()), SymmetricError::NoChannel { channels: 16 }));
    assert!(all.arenas[0].buffer::<u32>(0).unwrap().is_empty());
    assert!(matches!(symmetric(all.arenas[0].clone().close()), SymmetricError::InUse { handles: 1 }));
}

/// Fuser #6023: a rank that fails before the rendezvous left the others hanging.
#[test]
fn an_aborted_rendezvous_is_an_error_of_the_others_at_once() {
    let world = World::new(3, 0);
    let arenas: Vec<_> = world.ranks[..2].iter().map(|rank| Arena::open(rank, ArenaOptions::default()).unwrap()).collect();
    let huge = ArenaOptions { bytes: u64::MAX, ..ArenaOptions::default() };
    assert!(matches!(Arena::open(&world.ranks[2], huge), Err(Error::TooLarge { .. })));
    let start = Instant::now();
    for arena in &arenas {
        let error = symmetric(arena.buffer::<u8>(1).unwrap().peer(world.rank(0)));
        assert!(error.to_string().contains("18446744073709551615 bytes"), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(5), "nobody waited for the deadline");
}

#[test]
fn a_rank_that_does_not_come_is_named_within_the_deadline() {
    let world = World::new(3, 0);
    let arena = Arena::open(&world.ranks[1], options()).unwrap();
    let start = Instant::now();
    let error = symmetric(arena.buffer::<u8>(1).unwrap().peer(world.rank(0)));
    assert!(start.elapsed() < Duration::from_millis(1200));
    let SymmetricError::Missing { ranks, .. } = &error else { panic!("{error}") };
    assert_eq!(ranks, &[world.rank(0), world.rank(2)]);
}

#[test]
fn a_signal_that_does_not_come_ends_the_arena_for_all_and_a_new_one_can_be_opened() {
    for seed in 0..16 {
        let all = Arenas::with(3, seed, options());
        let (buffers, channels) = (all.buffers(4), all.channels());
        let get = |rank: usize| {
            let arena = &all.arenas[rank];
            for from in all.world.size().ranks().filter(|from| *from != arena.rank()) {
                arena.wait(all.stream(rank), channels[rank], from, FIRST).unwrap();
            }
            let target = Buffer::uninitialised(all.stream(rank), 4).unwrap();
            buffers[rank].peer(all.world.rank(2)).unwrap().get(all.stream(rank), 0..4, target, 0).unwrap()
        };
        // Ranks 0 and 1 signal each other; rank 2 never does.
        for (rank, to) in [(0, 1), (1, 0)] {
            all.arenas[rank].signal(all.stream(rank), channels[rank], all.world.rank(to), FIRST).unwrap();
        }
        let (first, second) = (get(0), get(1));
        let start = Instant::now();
        let error = symmetric(first.wait());
        assert!(start.elapsed() < Duration::from_millis(1200), "{:?}", start.elapsed());
        assert!(matches!(error, SymmetricError::Deadline { sequence: 0, .. }), "{error}");
        // The others learn of it at once, and no stream hangs.
        let start = Instant::now();
        let error = symmetric(second.wait());
        assert!(matches!(&error, SymmetricError::Aborted { rank, .. } if rank.index() == 0), "{error}");
        assert!(start.elapsed() < Duration::from_millis(200), "rank 1 was told");
        assert!(all.arenas[0].signal(all.stream(0), channels[0], all.world.rank(1), FIRST).is_err());
        all.world.streams.iter().for_each(|stream| stream.synchronize().unwrap());
        let again: Vec<_> = all.world.ranks.iter().map(|rank| Arena::open(rank, options()).unwrap()).collect();
        let buffers: Vec<_> = again.iter().map(|arena| arena.buffer::<u32>(1).unwrap()).collect();
        assert!(buffers.iter().all(|buffer| buffer.peer(all.world.rank(2)).is_ok()));
    }
}

#[test]
fn a_gather_names_who_did_not_publish() {
    let all = Arenas::with(3, 1, options());
    let team = Team::all(all.world.size());
    let mut gathers: Vec<_> = (0..3)
        .map(|i| {
            let memory = GatherMemory::<u32>::take(&all.arenas[i], 2).unwrap();
            let member = team.member(all.arenas[i].rank()).unwrap();
            PullGather::new(&all.arenas[i], &member, memory, all.stream(i), 1).unwrap()
        })
        .collect();
    let mut gathered = Vec::new();
    for i in [0, 2] {
        gathers[i].shard(all.stream(i)).unwrap().fill_zero(all.stream(i)).unwrap();
        gathered.push(gathers[i].run(Buffer::uninitialised(all.stream(i), 6).unwrap()).unwrap());
    }
    let error = symmetric(gathered.remove(0).wait());
    assert_eq!(error.to_string(), "rank 0: PullGather::run, number 1: no signal from rank 1 within 200ms");
}

/// A peer that drops its arena instead of closing it is an error of who waits for it, and its memory stays.
#[test]
fn an_arena_that_is_dropped_keeps_its_memory() {
    let mut all = Arenas::new(2, 3);
    let (buffers, channels) = (all.buffers(4), all.channels());
    assert!(buffers[0].peer(all.world.rank(1)).is_ok() && buffers[1].peer(all.world.rank(0)).is_ok());
    let mut buffers = buffers.into_iter();
    let (mine, theirs) = (buffers.next().unwrap(), buffers.next().unwrap());
    drop((theirs, all.arenas.pop()));
    all.arenas[0].wait(all.stream(0), channels[0], all.world.rank(1), FIRST).unwrap();
    let target = Buffer::uninitialised(all.stream(0), 4).unwrap();
    let error = symmetric(mine.peer(all.world.rank(1)).unwrap().get(all.stream(0), 0..4, target, 0).unwrap().wait());
    assert!(matches!(&error, SymmetricError::Aborted { rank, .. } if rank.index() == 1), "{error}");
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_enqueued() {
    let all = Arenas::new(2, 0);
    let buffers = all.buffers(4);
    let peer = buffers[0].peer(all.world.rank(1)).unwrap();
    let short = || Buffer::<u32>::zeros(all.stream(0), 2).unwrap();
    assert!(matches!(peer.get(all.stream(0), 3..5, short(), 0), Err(Error::Length { expected: 5, found: 4, .. })));
    assert!(matches!(peer.get(all.stream(0), 0..3, short(), 0), Err(Error::Length { expected: 3, found: 2, .. })));
    assert!(matches!(peer.put(all.stream(0), &short(), 0..2, 3), Err(Error::Length { expected: 5, found: 4, .. })));
    assert!(matches!(peer.put(all.stream(0), &short(), 1..u64::MAX, 3), Err(Error::Length { .. })));
    assert!(matches!(peer.put(all.stream(1), &short(), 0..2, 0), Err(Error::WrongDevice { .. })));
    let memory = GatherMemory::<u32>::take(&all.arenas[0], 4).unwrap();
    let member = Team::all(all.world.size()).member(all.world.rank(1)).unwrap();
    assert!(PullGather::new(&all.arenas[0], &member, memory, all.stream(0), 1).is_err(), "rank 0 has no place as rank 1");
}

#[test]
fn a_runtime_of_gpus_has_no_emulated_ranks() {
    if let Ok(gpus) = Runtime::cuda() {
        assert!(oxtile::comm::EmulatedCommunicator::world_of(&gpus, WorldSize::ONE).is_err());
    }
}
