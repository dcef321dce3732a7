//! All ranks' instances of a buffer in one range of addresses, as kernels and copies see them.

use std::time::Duration;

use oxtile::comm::{ArenaRank, HostRank, Rank, Team, WorldSize, bootstrap};
use oxtile::runtime::{FaultKind, RaceKind};
use oxtile::symmetric::{Arena, ArenaOptions, BackendName, SymmetricError};
use oxtile::{Buffer, Error, Graph, Result, Runtime};
use oxtile_tile::prelude::*;

use crate::arenas::{Arenas, FIRST, symmetric};
use crate::support::{WORLDS, numbers};

/// `target[i]` is the sum over the ranks of their element `i`.
#[kernel(threads = 32, grid = sum_grid)]
pub fn sum_ranks(all: Global<u32>, target: GlobalMut<u32>, stride: u64, ranks: u32) {
    let i = u64::from(block::index()[0] * 32 + thread::index());
    if i < target.len() {
        let mut sum = 0_u32;
        for rank in 0..ranks {
            sum = sum.wrapping_add(all.load(u64::from(rank) * stride + i));
        }
        target.store(i, sum);
    }
}

fn sum_grid(args: &SumRanksArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Grid::cover("target", args.target.len(), 32)
}

/// Element 0 of every rank becomes `value`.
#[kernel(threads = 32, grid = tell_grid)]
pub fn tell_ranks(all: GlobalMut<u32>, stride: u64, ranks: u32, value: u32) {
    if thread::index() < ranks {
        all.store(u64::from(thread::index()) * stride, value);
    }
}

fn tell_grid(_: &TellRanksArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

const LEN: u32 = 40;

/// The kernels of a world's runtime.
fn load<K: oxtile_tile::launch::Kernel + oxtile_tile::launch::Signature>(all: &Arenas) -> oxtile::Loaded<K> {
    all.world.runtime.load().unwrap()
}

/// Every rank writes its numbers and signals all; every rank waits for all others' word but that of `but`.
fn published(all: &Arenas, buffers: &mut [oxtile::symmetric::SymmetricBuffer<u32>], but: Option<u32>) {
    let ready = all.channels();
    for (i, buffer) in buffers.iter_mut().enumerate() {
        let values = Buffer::from_slice(all.stream(i), &numbers(i as u32, LEN)).unwrap();
        buffer.local_mut().copy_from(all.stream(i), &values).unwrap();
        all.world.size().ranks().for_each(|to| all.arenas[i].signal(all.stream(i), ready[i], to, FIRST).unwrap());
    }
    for (i, arena) in all.arenas.iter().enumerate() {
        for from in all.world.size().ranks().filter(|from| Some(from.index()) != but) {
            arena.wait(all.stream(i), ready[i], from, FIRST).unwrap();
        }
    }
}

#[test]
fn a_kernel_and_a_copy_read_all_ranks() {
    for size in WORLDS {
        for seed in 0..8 {
            let all = Arenas::new(size, seed);
            assert!(all.arenas[0].capabilities().contiguous);
            // Another buffer in front, so that the places differ from the arena's beginning.
            let (front, mut buffers) = (all.buffers(3), all.buffers(LEN.into()));
            published(&all, &mut buffers, None);
            let sum = load::<SumRanks>(&all);
            for (i, buffer) in buffers.iter().enumerate() {
                let (stream, view) = (all.stream(i), buffer.contiguous().unwrap());
                let mut target = Buffer::<u32>::uninitialised(stream, LEN.into()).unwrap();
                let args = SumRanksArgs { all: view.view(stream).unwrap(), target: target.view_mut(), stride: view.stride(), ranks: size };
                sum.launch(stream, args).unwrap();
                let expected: Vec<u32> = (0..LEN as usize).map(|at| (0..size).map(|rank| numbers(rank, LEN)[at]).sum()).collect();
                assert_eq!(target.to_vec(stream).unwrap(), expected, "{size} ranks, seed {seed}, rank {i}");

                let piece = buffer.contiguous().unwrap().slice(5..12).unwrap();
                assert_eq!((piece.len(), piece.stride()), (7, view.stride()));
                for rank in all.world.size().ranks() {
                    let bytes = u64::from(rank.index()) * view.stride() * 4;
                    assert_eq!(view.address(rank).unwrap(), view.address(Rank::ZERO).unwrap() + bytes);
                    assert_eq!(piece.address(rank).unwrap(), view.address(rank).unwrap() + 5 * 4);
                }
                assert_eq!(view.address(all.world.rank(i as u32)).unwrap(), buffer.local().address());
                let target = Buffer::uninitialised(stream, 7 * u64::from(size)).unwrap();
                let found = piece.get(stream, target).unwrap().wait().unwrap().to_vec(stream).unwrap();
                let expected: Vec<u32> = (0..size).flat_map(|rank| numbers(rank, LEN)[5..12].to_vec()).collect();
                assert_eq!(found, expected);
            }
            drop((front, buffers));
            all.close();
        }
    }
}

/// Every rank writes an element of its own on all ranks, at the same time: where it takes a view of that element alone. With a view of all of them two
/// ranks' kernels may write the same, as far as is known.
#[test]
fn ranks_that_write_elements_of_their_own_do_not_race() {
    let program = |size: u32, seed: u64, alone: bool| -> Result<()> {
        let all = Arenas::new(size, seed);
        let (mut buffers, tell) = (all.buffers(size.into()), load::<TellRanks>(&all));
        let done = all.channels();
        for (i, buffer) in (0_u32..).zip(&mut buffers) {
            let stream = all.stream(i as usize);
            let mut view = buffer.contiguous_mut()?;
            if alone {
                view = view.slice(u64::from(i)..u64::from(i) + 1)?;
            }
            let stride = view.as_view().stride();
            // SAFETY: the kernel writes an element of each rank, by the stride.
            let all_ranks = unsafe { view.view_mut(stream)? };
            tell.launch(stream, TellRanksArgs { all: all_ranks, stride, ranks: size, value: 100 + i })?;
            all.world.size().ranks().try_for_each(|to| all.arenas[i as usize].signal(stream, done[i as usize], to, FIRST))?;
        }
        for (i, buffer) in buffers.iter().enumerate() {
            all.world.size().ranks().try_for_each(|from| all.arenas[i].wait(all.stream(i), done[i], from, FIRST))?;
            assert_eq!(buffer.local().to_vec(all.stream(i))?, (100..100 + size).collect::<Vec<_>>());
        }
        Ok(())
    };
    for size in WORLDS {
        (0..16).for_each(|seed| program(size, seed, true).unwrap());
    }
    for seed in 0..16 {
        let error = program(2, seed, false).unwrap_err();
        assert!(matches!(&error, Error::Race(race) if race.kind == RaceKind::Unordered && race.memory == "arena"), "{error}");
    }
}

/// A rank that does not wait for another's word is told whose memory it used; what lies between the ranks' instances is not checked.
#[test]
fn the_sanitizer_sees_each_ranks_instance_and_nothing_between() {
    for seed in 0..32 {
        let all = Arenas::new(3, seed);
        let mut buffers = all.buffers(LEN.into());
        let mut others = all.buffers(LEN.into());
        buffers.iter_mut().enumerate().for_each(|(i, buffer)| buffer.local_mut().fill_zero(all.stream(i)).unwrap());
        all.world.streams.iter().for_each(|stream| stream.synchronize().unwrap());
        // Written by its rank meanwhile, between the instances that the kernel reads.
        others.iter_mut().enumerate().for_each(|(i, other)| other.local_mut().fill_zero(all.stream(i)).unwrap());
        let missing = 2;
        published(&all, &mut buffers, Some(missing));
        let (stream, view) = (all.stream(0), buffers[0].contiguous().unwrap());
        let mut target = Buffer::<u32>::uninitialised(stream, LEN.into()).unwrap();
        let args = SumRanksArgs { all: view.view(stream).unwrap(), target: target.view_mut(), stride: view.stride(), ranks: 3 };
        load::<SumRanks>(&all).launch(stream, args).unwrap();
        // Whichever comes first.
        let error = all.world.streams.iter().try_for_each(|stream| stream.synchronize()).unwrap_err();
        let Error::Race(race) = &error else { panic!("seed {seed}: {error}") };
        assert_eq!((race.device, race.bytes, race.kind), (missing, u64::from(LEN) * 4, RaceKind::Unordered), "seed {seed}: {race}");
        assert!(race.to_string().contains("kernel `sum_ranks` reads `all`"), "{race}");
    }
}

/// A part of a view of all that begins in rank 0's memory has the others' from their first element on.
#[test]
fn the_sanitizer_takes_a_part_for_what_it_is() {
    for (seed, is_part) in (0..16).flat_map(|seed| [(seed, true), (seed, false)]) {
        let all = Arenas::new(2, seed);
        let mut buffers = all.buffers(LEN.into());
        published(&all, &mut buffers, None);
        all.world.streams.iter().for_each(|stream| stream.synchronize().unwrap());
        let (stream, theirs) = (all.stream(0), all.stream(1));
        // Written by its rank meanwhile.
        let values = Buffer::from_slice(theirs, &[0_u32; 3]).unwrap();
        buffers[1].peer(all.world.rank(1)).unwrap().put(theirs, &values, 0..3, 0).unwrap();
        let view = buffers[0].contiguous().unwrap();
        let (stride, whole) = (view.stride(), view.view(stream).unwrap());
        let later = buffers[0].contiguous().unwrap().slice(3..LEN.into()).unwrap();
        let view = if is_part { whole.slice(3, whole.len()) } else { later.view(stream).unwrap() };
        assert_eq!((view.address(), view.len()), (later.address(Rank::ZERO).unwrap(), stride + u64::from(LEN) - 3));
        let mut target = Buffer::<u32>::uninitialised(stream, 1).unwrap();
        load::<SumRanks>(&all).launch(stream, SumRanksArgs { all: view, target: target.view_mut(), stride, ranks: 2 }).unwrap();
        let ended = all.world.streams.iter().try_for_each(|stream| stream.synchronize());
        match ended {
            Err(Error::Race(race)) if is_part => assert_eq!((race.device, race.bytes, race.kind), (1, 12, RaceKind::Unordered), "{race}"),
            ended => assert!(ended.is_ok() && !is_part, "seed {seed}, a part: {is_part}: {ended:?}"),
        }
    }
}

/// The runtime orders the view with other uses of this rank's own instance, on whatever streams.
#[test]
fn this_ranks_instance_is_ordered_by_the_runtime() {
    for seed in 0..32 {
        let all = Arenas::new(1, seed);
        let mut buffers = all.buffers(LEN.into());
        let (one, other) = (all.stream(0), all.world.ranks[0].device().stream().unwrap());
        buffers[0].local_mut().fill_zero(one).unwrap();
        let sum = load::<SumRanks>(&all);
        let mut target = Buffer::<u32>::uninitialised(&other, LEN.into()).unwrap();
        let view = buffers[0].contiguous().unwrap();
        sum.launch(&other, SumRanksArgs { all: view.view(&other).unwrap(), target: target.view_mut(), stride: view.stride(), ranks: 1 })
            .unwrap();
        buffers[0].local_mut().fill_zero(one).unwrap();
        assert_eq!(target.to_vec(&other).unwrap(), vec![0; LEN as usize]);
        one.synchronize().unwrap();
        drop(buffers);
        all.close();
    }
}

/// One element beyond a rank's arena lies nothing.
#[test]
fn an_overrun_from_one_ranks_memory_to_the_next_is_found() {
    let all = Arenas::new(2, 0);
    let words = (1 << 14) / 4;
    let mut buffers = all.buffers(words);
    buffers.iter_mut().enumerate().for_each(|(i, buffer)| buffer.local_mut().fill_zero(all.stream(i)).unwrap());
    all.world.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    let (stream, view) = (all.stream(0), buffers[0].contiguous().unwrap());
    let mut target = Buffer::<u32>::uninitialised(stream, words + 1).unwrap();
    let args = SumRanksArgs { all: view.view(stream).unwrap(), target: target.view_mut(), stride: view.stride(), ranks: 1 };
    load::<SumRanks>(&all).launch(stream, args).unwrap();
    let error = stream.synchronize().unwrap_err();
    assert!(matches!(&error, Error::Fault(fault) if fault.kind == FaultKind::OutOfBounds), "{error}");
}

/// A graph that reads all ranks keeps the arena, and its replays read what is there then.
#[test]
fn a_graph_reads_all_ranks() {
    let all = Arenas::new(3, 5);
    let mut buffers = all.buffers(LEN.into());
    published(&all, &mut buffers, None);
    all.world.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    let (stream, sum) = (all.stream(0), load::<SumRanks>(&all));
    let mut target = Buffer::<u32>::zeros(stream, 1).unwrap();
    let graph = Graph::capture(&[stream], || {
        let view = buffers[0].contiguous()?.slice(0..1)?;
        sum.launch(stream, SumRanksArgs { all: view.view(stream)?, target: target.view_mut(), stride: view.stride(), ranks: 3 })
    })
    .unwrap();
    graph.replay(stream).unwrap();
    assert_eq!(target.to_vec(stream).unwrap(), [6000]);
    buffers[2].local_mut().fill_zero(all.stream(2)).unwrap();
    all.stream(2).synchronize().unwrap();
    graph.replay(stream).unwrap();
    assert_eq!(target.to_vec(stream).unwrap(), [3000]);
    drop(buffers);
    let mut arenas = all.arenas.into_iter();
    let first = arenas.next().unwrap();
    assert!(matches!(symmetric(first.clone().close().map_err(Error::from)), SymmetricError::InUse { .. }));
    drop(graph);
    drop(first.close().unwrap());
}

#[test]
fn what_is_not_of_the_view_is_refused() {
    let all = Arenas::new(2, 0);
    let buffers = all.buffers(4);
    let view = buffers[0].contiguous().unwrap();
    let far = Rank::new(2, WorldSize::new(3).unwrap()).unwrap();
    assert!(matches!(view.address(far), Err(Error::Invalid { .. })));
    assert!(matches!(view.view(all.stream(1)), Err(Error::WrongDevice { .. })));
    assert!(matches!(buffers[0].contiguous().unwrap().slice(3..5), Err(Error::Length { expected: 5, found: 4, .. })));
    assert!(buffers[0].contiguous().unwrap().slice(4..4).unwrap().view(all.stream(0)).unwrap().is_empty());
    let short = Buffer::<u32>::zeros(all.stream(0), 7).unwrap();
    assert!(matches!(view.get(all.stream(0), short), Err(Error::Length { expected: 8, found: 7, .. })));
    // Ranks that took something else are told so, as by a peer.
    let long = all.arenas[0].buffer::<u32>(8).unwrap();
    all.arenas[1].buffer::<u32>(9).unwrap();
    assert!(matches!(symmetric(long.contiguous()), SymmetricError::Layout { number: 1, .. }));
}

/// Teams' arenas are ranges of their own; an arena that was dropped, whose memory is kept, is in no other's way.
#[test]
fn teams_and_later_arenas_have_ranges_of_their_own() {
    let all = Arenas::new(4, 1);
    let odd = Team::strided(all.world.size(), all.world.rank(1), 2, WorldSize::new(2).unwrap()).unwrap();
    let mut addresses = Vec::new();
    for _ in 0..3 {
        let members: Vec<_> = [1, 3].map(|rank: usize| all.world.ranks[rank].team(&odd).unwrap().unwrap()).into();
        let arenas: Vec<_> = members.iter().map(|member| Arena::open(member, ArenaOptions::default()).unwrap()).collect();
        let buffers: Vec<_> = arenas.iter().map(|arena| arena.buffer::<u64>(4).unwrap()).collect();
        let view = buffers[1].contiguous().unwrap();
        assert_eq!(view.address(arenas[1].rank()).unwrap(), buffers[1].local().address());
        assert_eq!(view.address(Rank::ZERO).unwrap(), buffers[0].local().address());
        addresses.push(view.address(Rank::ZERO).unwrap());
    }
    addresses.sort_unstable();
    addresses.dedup();
    assert_eq!(addresses.len(), 3);
}

/// Ranks that meet over sockets cannot know that they are of one process: their memory lies apart, which the query returns.
#[test]
fn memory_that_lies_apart_has_no_such_view() {
    let (runtime, world) = (Runtime::emulated(2).unwrap(), WorldSize::new(2).unwrap());
    let program = |store: bootstrap::Store| -> Result<()> {
        let rank = HostRank::from_store(store, &runtime.device(0)?)?;
        assert_eq!(ArenaRank::device(&rank).index(), 0);
        let arena = Arena::open(&rank, ArenaOptions::default())?;
        assert!(!arena.capabilities().contiguous);
        let buffer = arena.buffer::<u32>(1)?;
        let error = symmetric(buffer.contiguous());
        assert!(matches!(&error, SymmetricError::Unavailable { backend: BackendName::Emulated, why } if why.contains("vmm")), "{error}");
        assert!(buffer.peer(Rank::ZERO).is_ok());
        drop(buffer);
        arena.close()?.finish()?;
        rank.close()
    };
    let stores = bootstrap::threads(world, Duration::from_secs(10)).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = stores.into_iter().map(|store| scope.spawn(|| program(store))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    });
}
