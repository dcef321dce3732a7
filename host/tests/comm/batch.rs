//! Operations that are enqueued together keep their order, and are checked before.

use std::time::Duration;

use oxtile::runtime::RaceKind;
use oxtile::symmetric::{Arena, ArenaOptions, Channel, Epoch, SymmetricBuffer, SymmetricError};
use oxtile::{Buffer, Error, Result};

use crate::support::{WORLDS, World, numbers};

const FIRST: Epoch = Epoch::ZERO.next();

struct Ranks {
    world: World,
    arenas: Vec<Arena>,
    buffers: Vec<SymmetricBuffer<u32>>,
    arrived: Vec<Channel>,
}

impl Ranks {
    fn new(size: u32, seed: u64) -> Self {
        Self::of(World::new(size, seed), ArenaOptions::default().deadline)
    }

    fn of(world: World, deadline: Duration) -> Self {
        let size = world.size().get();
        let options = ArenaOptions { deadline, ..ArenaOptions::default() };
        let arenas: Vec<_> = world.ranks.iter().map(|rank| Arena::open(rank, options.clone()).unwrap()).collect();
        let mut buffers: Vec<SymmetricBuffer<u32>> = arenas.iter().map(|arena| arena.buffer(4 * u64::from(size)).unwrap()).collect();
        // What comes too early is a race then, not a read of what was never written.
        for (buffer, stream) in buffers.iter_mut().zip(&world.streams) {
            buffer.local_mut().fill_zero(stream).unwrap();
            stream.synchronize().unwrap();
        }
        let arrived = arenas.iter().map(|arena| arena.channel().unwrap()).collect();
        Self { world, arenas, buffers, arrived }
    }

    /// Rank `i` puts to all and signals all, in one batch; `signals_first` is the wrong order.
    fn put_to_all(&self, i: usize, own: &Buffer<u32>, signals_first: bool) -> Result<()> {
        let peers = || self.world.size().ranks();
        let mut batch = self.arenas[i].batch(&self.world.streams[i]);
        if signals_first {
            batch = peers().try_fold(batch, |batch, peer| batch.signal(self.arrived[i], peer, FIRST))?;
        }
        for peer in peers() {
            batch = batch.put(&self.buffers[i].peer(peer)?, own, 0..4, 4 * i as u64)?;
        }
        if !signals_first {
            batch = peers().try_fold(batch, |batch, peer| batch.signal(self.arrived[i], peer, FIRST))?;
        }
        batch.enqueue()
    }

    /// Rank `i` waits for all in one batch.
    fn wait_for_all(&self, i: usize) -> Result<()> {
        let batch = self.arenas[i].batch(&self.world.streams[i]);
        self.world.size().ranks().try_fold(batch, |batch, peer| batch.wait(self.arrived[i], peer, FIRST))?.enqueue()
    }
}

fn exchange(size: u32, seed: u64, signals_first: bool) -> Result<()> {
    let all = Ranks::new(size, seed);
    let own = all.world.buffers(|rank| numbers(rank, 4));
    (0..size as usize).try_for_each(|i| all.put_to_all(i, &own[i], signals_first))?;
    let mut found = Vec::new();
    for i in 0..size as usize {
        all.wait_for_all(i)?;
        found.push(all.buffers[i].local().to_vec(&all.world.streams[i])?);
    }
    all.world.streams.iter().try_for_each(|stream| stream.synchronize())?;
    let expected: Vec<_> = (0..size).flat_map(|rank| numbers(rank, 4)).collect();
    assert_eq!(found, vec![expected; size as usize], "seed {seed}");
    Ok(())
}

/// Its puts come after the work on their source, and before later work on it, of whatever stream.
#[test]
fn what_a_batch_puts_is_ordered_with_other_uses_of_it() {
    for seed in 0..16 {
        let all = Ranks::new(3, seed);
        let side = all.world.ranks[0].device().stream().unwrap();
        let mut own = Buffer::<u32>::uninitialised(&side, 4).unwrap();
        own.fill_zero(&side).unwrap();
        all.put_to_all(0, &own, false).unwrap();
        own.copy_from_slice(&side, &numbers(1, 4)).unwrap();
        for i in 0..3 {
            all.arenas[i].wait(&all.world.streams[i], all.arrived[i], all.world.rank(0), FIRST).unwrap();
            assert_eq!(all.buffers[i].local().to_vec(&all.world.streams[i]).unwrap()[..4], [0; 4], "seed {seed}, rank {i}");
        }
    }
}

#[test]
fn what_a_batch_puts_and_signals_arrives() {
    for size in WORLDS {
        // The right program says nothing under 1000 seeds.
        let seeds = if size == 2 { 1000 } else { 16 };
        (0..seeds).for_each(|seed| exchange(size, seed, false).unwrap_or_else(|error| panic!("{size} ranks, seed {seed}: {error}")));
    }
}

#[test]
fn a_signal_named_before_the_puts_of_its_batch_is_a_race() {
    for seed in 0..16 {
        let Err(Error::Race(race)) = exchange(2, seed, true) else { panic!("seed {seed}: nothing is reported") };
        assert_eq!(race.kind, RaceKind::Unordered, "{race}");
        assert!(race.to_string().contains("batch.rs"), "{race}");
        assert_eq!(exchange(2, seed, true).unwrap_err().to_string(), race.to_string(), "seed {seed} replays its report");
    }
}

/// Pieces of several ranks lie one after another in what one ticket gives.
#[test]
fn pieces_are_got_from_many_ranks_at_once() {
    for seed in 0..16 {
        let mut all = Ranks::new(3, seed);
        for i in 0..3 {
            let stream = all.world.streams[i].clone();
            all.buffers[i].local_mut().copy_from_slice(&stream, &numbers(i as u32, 12)).unwrap();
            let batch = all.arenas[i].batch(&stream);
            let ready = all.world.size().ranks().try_fold(batch, |batch, peer| batch.signal(all.arrived[i], peer, FIRST));
            ready.unwrap().enqueue().unwrap();
        }
        for i in 0..3 {
            all.wait_for_all(i).unwrap();
            let pieces = [(all.world.rank(2), 1..3), (all.world.rank(0), 5..5), (all.world.rank(1), 0..1)];
            let target = Buffer::uninitialised(&all.world.streams[i], 3).unwrap();
            let got = all.buffers[i].get_each(&all.world.streams[i], &pieces, target).unwrap().wait().unwrap();
            let expected = [&numbers(2, 12)[1..3], &numbers(1, 12)[..1]].concat();
            assert_eq!(got.to_vec(&all.world.streams[i]).unwrap(), expected);
        }
    }
}

#[test]
fn what_does_not_fit_a_batch_is_refused_before_anything_is_enqueued() {
    let all = Ranks::new(2, 0);
    let (stream, one) = (&all.world.streams[0], all.world.rank(1));
    let short = Buffer::<u32>::zeros(stream, 2).unwrap();
    let peer = all.buffers[0].peer(one).unwrap();
    let batch = || all.arenas[0].batch(stream);
    assert!(matches!(batch().put(&peer, &short, 0..3, 0), Err(Error::Length { expected: 3, found: 2, .. })));
    assert!(matches!(batch().put(&peer, &short, 0..2, 7), Err(Error::Length { expected: 9, found: 8, .. })));
    let theirs = all.arenas[1].batch(&all.world.streams[1]);
    assert!(matches!(theirs.put(&all.buffers[1].peer(one).unwrap(), &short, 0..2, 0), Err(Error::WrongDevice { .. })));
    let get = |pieces: &[_]| all.buffers[0].get_each(stream, pieces, Buffer::uninitialised(stream, 2).unwrap());
    assert!(matches!(get(&[(one, 0..2), (one, 0..1)]), Err(Error::Length { expected: 3, found: 2, .. })));
    assert!(matches!(get(&[(one, 7..9)]), Err(Error::Length { expected: 9, found: 8, .. })));
    all.arenas[0].abort("the test").unwrap();
    assert!(batch().signal(all.arrived[0], one, FIRST).is_err() && batch().enqueue().is_err(), "the arena has ended");
}

/// What was named and never enqueued is nothing that a rank could be missing for.
#[test]
fn a_batch_that_is_dropped_waits_for_nobody() {
    let all = Ranks::of(World::new(3, 0), Duration::from_millis(200));
    let (arena, stream, [one, two]) = (&all.arenas[0], &all.world.streams[0], [1, 2].map(|i| all.world.rank(i)));
    let short = Buffer::<u32>::zeros(stream, 2).unwrap();
    let batch = arena.batch(stream).wait(all.arrived[0], one, FIRST).unwrap();
    assert!(matches!(batch.put(&all.buffers[0].peer(one).unwrap(), &short, 0..3, 0), Err(Error::Length { .. })));
    arena.batch(stream).wait(all.arrived[0], two, FIRST).unwrap().enqueue().unwrap();
    let error = arena.ticket(stream).unwrap().wait().unwrap_err();
    let Error::Symmetric(SymmetricError::Deadline { missing, .. }) = &error else { panic!("{error}") };
    assert_eq!(missing, &[two], "{error}");
}
