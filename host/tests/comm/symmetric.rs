//! Arenas and their failures.

use std::time::{Duration, Instant};

use oxtile::comm::{Communicator, Rank, Team, WorldSize};
use oxtile::symmetric::{Arena, ArenaOptions, BackendName, ChunkedGather, GatherMemory, PullGather, SymmetricError};
use oxtile::{Buffer, Error, Result, Runtime};

use crate::arenas::{Arenas, FIRST, options, symmetric};
use crate::support::{WORLDS, World, numbers};

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
            let ready = gather.start()?;
            ready.wait()?;
            found = ready.whole(&stream)?.to_vec(&stream)?;
            gather.release(ready)?;
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
    // What comes after it is of one size, but lies elsewhere.
    let later = all.buffers(1);
    assert!(matches!(symmetric(later[0].peer(all.world.rank(1))), SymmetricError::Layout { number: 2, .. }));
    assert!(same[0].peer(Rank::new(2, WorldSize::new(3).unwrap()).unwrap()).is_err());
}

#[test]
fn arenas_are_finite() {
    let all = Arenas::new(1, 0);
    assert!(matches!(symmetric(all.arenas[0].buffer::<u32>(1 << 20)), SymmetricError::Full { needed: 0x40_0000, left: 0x4000 }));
    assert!(matches!(all.arenas[0].buffer::<u32>(u64::MAX), Err(Error::TooLarge { .. })));
    (0..64).for_each(|_| _ = all.arenas[0].channel().unwrap());
    assert!(matches!(symmetric(all.arenas[0].channel()), SymmetricError::NoChannel { channels: 64 }));
    assert!(all.arenas[0].buffer::<u32>(0).unwrap().is_empty());
    assert!(matches!(symmetric(all.arenas[0].clone().close().map_err(Error::from)), SymmetricError::InUse { handles: 1 }));
}

/// What could not be closed comes back, as open as before: after what the error says it is closed, by all.
#[test]
fn an_arena_that_is_in_use_is_not_closed_and_can_be_later() {
    let mut all = Arenas::new(2, 0);
    let mut buffers = all.buffers(4);
    assert!(buffers[0].peer(all.world.rank(1)).is_ok() && buffers[1].peer(all.world.rank(0)).is_ok());
    let refused = all.arenas.remove(0).close().unwrap_err();
    let said = "the arena cannot be closed: 1 of its buffers, tickets and graphs are still there: drop them, then close it again (CloseError::arena)";
    assert_eq!(refused.to_string(), said);
    let (arena, buffer) = (refused.arena, buffers.remove(0));
    all.arenas[0].check().unwrap();
    arena.check().and_then(|()| arena.ticket(all.stream(0))?.wait()).unwrap();
    assert!(buffer.peer(all.world.rank(1)).is_ok());
    drop((buffer, buffers));
    all.arenas.insert(0, arena);
    all.close();
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
    assert!(start.elapsed() < Duration::from_secs(5), "nothing waited for the deadline");
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

/// The deadline is that of work under way: ranks that start later than that come together all the same.
#[test]
fn a_rank_that_starts_late_is_waited_for_in_the_rendezvous() {
    let world = World::new(2, 0);
    let patient = ArenaOptions { deadline: Duration::from_millis(50), rendezvous: Some(Duration::from_secs(30)), ..options() };
    let open = |rank: usize, options: &ArenaOptions| {
        let arena = Arena::open(&world.ranks[rank], options.clone())?;
        let buffer = arena.buffer::<u32>(1)?;
        buffer.peer(world.rank(0)).and(buffer.peer(world.rank(1))).map(drop)?;
        Ok::<_, oxtile::Error>(arena) // The other may still read its notes.
    };
    for (options, comes) in [(patient.clone(), true), (ArenaOptions { rendezvous: None, ..patient }, false)] {
        std::thread::scope(|scope| {
            let first = scope.spawn(|| open(0, &options));
            std::thread::sleep(Duration::from_millis(200));
            let second = open(1, &options);
            let first = first.join().expect("no panic");
            assert!(first.is_ok() == comes && (second.is_ok() || !comes), "{first:?}, {second:?}");
        });
    }
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
        assert!(matches!(error, SymmetricError::Deadline { sequence: 1, .. }), "{error}");
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

/// Which of many is late: a rank's tickets of gets and of streams have numbers.
#[test]
fn a_deadline_says_which_ticket_of_the_arena_it_was() {
    let all = Arenas::with(2, 0, options());
    let (buffers, channels) = (all.buffers(4), all.channels());
    let (arena, stream, one) = (&all.arenas[0], all.stream(0), all.world.rank(1));
    let target = || Buffer::<u32>::uninitialised(stream, 4).unwrap();
    let peer = buffers[0].peer(one).unwrap();
    let in_time = peer.get(stream, 0..4, target(), 0).unwrap();
    let _of_the_other = all.arenas[1].ticket(all.stream(1)).unwrap();
    arena.ticket(stream).unwrap().wait().unwrap();
    in_time.wait().unwrap();
    arena.wait(stream, channels[0], one, FIRST).unwrap();
    let _third = buffers[0].get_each(stream, &[(one, 0..4)], target()).unwrap();
    let fourth = peer.get(stream, 0..4, target(), 0).unwrap();
    let error = symmetric(fourth.wait());
    assert_eq!(error.to_string(), "rank 0: Peer::get, number 4: no signal from rank 1 within 200ms");
}

/// A peer that drops its arena instead of closing it is an error of the rank that waits for it, and its memory stays.
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
