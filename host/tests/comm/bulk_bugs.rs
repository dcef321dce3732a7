//! Planted bugs of calls in two halves: what a gather and a scatter that are under way together enqueue, written out by hand. With one thing wrong it is reported under every seed.

use std::ops::Range;

use oxtile::comm::Rank;
use oxtile::symmetric::{Arena, ArenaOptions, Flags, SymmetricBuffer};
use oxtile::{Buffer, Error, Event, Result, Stream};

use crate::arenas::Arenas;
use crate::support::{numbers, seeds};

/// What a program gets wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// What is gathered is read before its flag is awaited: it is not finished.
    ReadBeforeFinish,
    /// The others' parts are added before their flag is awaited.
    AddBeforeFinish,
    /// FREE is set when the gather is begun.
    FreeAtBegin,
    /// Both take one place.
    OnePlace,
    /// What is put is written again before it was put: the second half does not wait for the copies.
    SentAgain,
    /// The copies of the scatter do not wait for the product beside which the gather travels.
    PutBeforeProduct,
}

const BUGS: [Bug; 6] =
    [Bug::ReadBeforeFinish, Bug::AddBeforeFinish, Bug::FreeAtBegin, Bug::OnePlace, Bug::SentAgain, Bug::PutBeforeProduct];

/// Words of a shard, and of a part.
const LEN: u64 = 32;
const ROUNDS: u32 = 4;
/// The places of the two calls.
const GATHER: u32 = 0;
const SCATTER: u32 = 1;

/// The same memory, of whose uses the runtime is not told: no order of its own stands in for one that is missing.
fn alias(buffer: &Buffer<u32>, range: Range<u64>) -> Buffer<u32> {
    // SAFETY: the address is of emulated memory, which is looked up at each use: a wrong use is a report.
    unsafe { Buffer::borrow_raw(&buffer.device(), buffer.address() + 4 * range.start, range.end - range.start) }.unwrap()
}

/// A rank's part of the program.
struct Side<'a> {
    arena: &'a Arena,
    places: [SymmetricBuffer<u32>; 2],
    ready: Flags,
    free: Flags,
    /// What products write: the shard, and a part for the other rank.
    shards: Vec<Buffer<u32>>,
    sent: Buffer<u32>,
    kept: Vec<Buffer<u32>>,
    compute: Stream,
    out: Stream,
    bug: Bug,
}

impl Side<'_> {
    fn other(&self) -> Rank {
        Rank::new(1 - self.arena.rank().index(), self.arena.world()).unwrap()
    }

    /// This rank's words of a place.
    fn own(&self) -> Range<u64> {
        let start = u64::from(self.arena.rank().index()) * LEN;
        start..start + LEN
    }

    fn place(&self, call: u32) -> &SymmetricBuffer<u32> {
        &self.places[if self.bug == Bug::OnePlace { 0 } else { call as usize }]
    }

    /// Puts words to the other rank; the event is after it.
    fn put(&self, call: u32, from: &Buffer<u32>) -> Result<Event> {
        let (place, to) = (self.place(call), self.other());
        let batch = self.arena.batch(&self.out).take_back(&self.free, call, to)?;
        batch.put(&place.peer(to)?, from, 0..LEN, self.own().start)?.set(&self.ready, call, to)?.enqueue()?;
        self.out.record()
    }

    /// Reads a place, and lets the other rank write again.
    fn finish(&self, call: u32, kept: &mut Buffer<u32>, put: &Event) -> Result<()> {
        let (bug, from, whole) = (self.bug, self.other(), alias(self.place(call).local(), 0..2 * LEN));
        let waits = || self.arena.batch(&self.compute).wait_flag(&self.ready, call, from)?.enqueue();
        let is_early = matches!((bug, call), (Bug::ReadBeforeFinish, GATHER) | (Bug::AddBeforeFinish, SCATTER));
        if !is_early {
            waits()?;
        }
        kept.copy_from(&self.compute, &whole)?;
        if is_early {
            waits()?;
        }
        if bug != Bug::SentAgain {
            self.compute.wait(put)?;
        }
        let batch = self.arena.batch(&self.compute).clear(&self.ready, call, from)?;
        if bug == Bug::FreeAtBegin && call == GATHER { batch.enqueue() } else { batch.set(&self.free, call, from)?.enqueue() }
    }

    /// A gather beside a product, which writes what is scattered beside the next one.
    fn call(&mut self, round: u32) -> Result<()> {
        let (bug, own, mut kept) = (self.bug, self.own(), std::mem::take(&mut self.kept));
        let shard = &self.shards[round as usize];
        let own_words = |call| alias(self.place(call).local(), own.clone());
        own_words(GATHER).copy_from(&self.compute, shard)?;
        self.out.wait(&self.compute.record()?)?;
        let gathered = self.put(GATHER, &own_words(GATHER))?;
        if bug == Bug::FreeAtBegin {
            self.arena.batch(&self.compute).set(&self.free, GATHER, self.other())?.enqueue()?;
        }
        // The product beside which the shard travels.
        let mut sent = alias(&self.sent, 0..LEN);
        sent.copy_from(&self.compute, shard)?;
        if bug != Bug::PutBeforeProduct {
            self.out.wait(&self.compute.record()?)?;
        }
        let scattered = self.put(SCATTER, &alias(&self.sent, 0..LEN))?;
        let at = 2 * round as usize;
        self.finish(GATHER, &mut kept[at], &gathered)?;
        own_words(SCATTER).copy_from(&self.compute, shard)?;
        self.finish(SCATTER, &mut kept[at + 1], &scattered)?;
        self.kept = kept;
        Ok(())
    }
}

fn run(seed: u64, bug: Bug) -> Result<()> {
    let all =
        Arenas::with(2, seed, ArenaOptions { bytes: 1 << 14, deadline: std::time::Duration::from_secs(600), ..ArenaOptions::default() });
    let words = |rank: u32, round: u32| numbers(2 * round + rank, LEN as u32);
    let mut sides = Vec::new();
    for (i, arena) in all.arenas.iter().enumerate() {
        let (compute, rank) = (all.stream(i).clone(), i as u32);
        sides.push(Side {
            arena,
            places: [arena.buffer(2 * LEN)?, arena.buffer(2 * LEN)?],
            ready: arena.flags("chunk", 2)?,
            free: arena.flags("place was read", 2)?,
            shards: (0..ROUNDS).map(|round| Buffer::from_slice(&compute, &words(rank, round))).collect::<Result<_>>()?,
            sent: Buffer::named(&compute, "sent", LEN)?,
            kept: (0..2 * ROUNDS).map(|_| Buffer::named(&compute, "kept", 2 * LEN)).collect::<Result<_>>()?,
            out: all.world.ranks[i].device().urgent_stream()?,
            compute,
            bug,
        });
    }
    for side in &sides {
        [GATHER, SCATTER].into_iter().try_for_each(|call| side.free.open(&side.compute, call, side.other()))?;
    }
    for round in 0..ROUNDS {
        sides.iter_mut().try_for_each(|side| side.call(round))?;
    }
    for side in &sides {
        side.out.synchronize()?;
        for (round, kept) in (0..ROUNDS).flat_map(|round| [round, round]).zip(&side.kept) {
            assert_eq!(kept.to_vec(&side.compute)?, [words(0, round), words(1, round)].concat(), "seed {seed}, round {round}");
        }
    }
    Ok(())
}

#[test]
fn the_right_program_is_silent() {
    for seed in 0..seeds() {
        run(seed, Bug::None).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

/// Each under every one of 32 seeds; a seed replays its report.
#[test]
fn what_is_wrong_is_reported_under_every_seed() {
    for bug in BUGS {
        let reported = |seed| match run(seed, bug) {
            Err(Error::Race(report)) => report.to_string(),
            Err(other) => panic!("{bug:?}, seed {seed}: {other}"),
            Ok(()) => panic!("{bug:?}, seed {seed}: nothing is reported"),
        };
        let reports: Vec<_> = (0..32).map(reported).collect();
        assert_eq!(reported(5), reports[5], "{bug:?}");
        assert!(reports.iter().all(|report| report.contains("stream race")), "{bug:?}: {}", reports[0]);
    }
}
