//! Planted bugs of gradients that travel: the protocol of `GradientScatter` by hand, with one step of it left out, is reported under every seed.

use oxtile::runtime::RaceKind;
use oxtile::sum_parts::{AddParts, Before, PartApart, RankParts};
use oxtile::symmetric::{Arena, ArenaOptions, Flags, Pitched, Rows, SymmetricBuffer};
use oxtile::{Buffer, Error, PinnedBuffer, Result, Stream};

use crate::arenas::Arenas;
use crate::gradient_ranks::options;
use crate::support::World;

/// What is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    Nothing,
    /// The gradient is computed again before it was put (R-ETP-17 of TransformerEngine #2960).
    InputReused,
    /// The gradient is computed again before the sum has read the own rows.
    OwnReused,
    /// Rows are put before the owner has added up those before them.
    SlotOverwritten,
    /// Parts are added up before they are there.
    SumBeforeReady,
    /// The gradient is used, as by a hook, before the sum.
    UsedBeforeSum,
}

const ROWS: u64 = 4;
const COLUMNS: u64 = 4;
const ROUNDS: u64 = 3;

/// One rank, whose memory is used by addresses where the runtime would order its uses by itself.
struct Rank {
    arena: Arena,
    streams: [Stream; 4],
    slots: SymmetricBuffer<f32>,
    flags: Flags,
    whole: Buffer<f32>,
    main: Buffer<f32>,
    used: Buffer<f32>,
}

const READY: u32 = 0;
const FREE: u32 = 1;

/// The same memory again, whose uses the runtime does not connect with the first buffer's.
fn alias<T: oxtile::num::Pod>(buffer: &Buffer<T>) -> Buffer<T> {
    // SAFETY: the address is of emulated memory, which is looked up at each use: a wrong use is a report.
    unsafe { Buffer::borrow_raw(&buffer.device(), buffer.address(), buffer.len()) }.unwrap()
}

impl Rank {
    fn new(world: &World, arena: &Arena, rank: usize) -> Result<Self> {
        let device = world.ranks[rank].device();
        let streams = [device.stream()?, device.urgent_stream()?, device.urgent_stream()?, device.stream()?];
        let compute = &streams[0];
        let [whole, main, used] = [ROWS * COLUMNS, ROWS * COLUMNS / 2, ROWS * COLUMNS / 2].map(|len| Buffer::<f32>::zeros(compute, len));
        let (slots, flags) = (arena.buffer(ROWS * COLUMNS / 2)?, arena.flags("planted gradients", 2)?);
        Ok(Self { arena: arena.clone(), whole: whole?, main: main?, used: used?, slots, flags, streams })
    }

    /// A round of a gradient: computed, sent, summed, used.
    fn round(&mut self, world: &World, add: &AddParts<f32>, rank: usize, bug: Bug) -> Result<()> {
        let [compute, send, sum, hook] = &self.streams;
        let other = world.rank(1 - rank as u32);
        let mut whole = alias(&self.whole);
        whole.copy_from_pinned(compute, &PinnedBuffer::from_slice(compute, &[rank as f32 + 1.0; 16])?)?;
        let written = compute.record()?;
        send.wait(&written)?;
        sum.wait(&written)?;
        if bug != Bug::SlotOverwritten {
            self.flags.take_back(send, FREE, other)?;
        }
        let half = ROWS * COLUMNS / 2;
        let [from, to] = [(1 - rank as u64) * half, 0].map(|start| Pitched { start, pitch: half });
        self.slots.peer(other)?.put_rows(send, &alias(&self.whole), Rows { count: 1, width: half, from, to })?;
        self.flags.set(send, READY, other)?;
        if bug != Bug::InputReused {
            compute.wait(&send.record()?)?;
        }
        // What was there in the round before would hide it: the flag is taken after the sum.
        if bug != Bug::SumBeforeReady {
            self.flags.take_back(sum, READY, other)?;
        }
        let (parts, whole, mut main) = (alias(self.slots.local()), alias(&self.whole), alias(&self.main));
        let own = whole.view().slice(rank as u64 * half, (rank as u64 + 1) * half);
        let apart = Some(PartApart { rank: rank as u32, part: own, width: half, pitch: half });
        add.add(sum, RankParts { parts: parts.view(), count: 2, stride: half, apart }, 0.5, Before::Kept, main.view_mut())?;
        if bug != Bug::OwnReused {
            compute.wait(&sum.record()?)?;
        }
        if bug == Bug::SumBeforeReady {
            self.flags.take_back(sum, READY, other)?;
        }
        self.flags.set(sum, FREE, other)?;
        if bug != Bug::UsedBeforeSum {
            hook.wait(&sum.record()?)?;
        }
        alias(&self.used).copy_from(hook, &alias(&self.main))?;
        // The next sum comes after it.
        sum.wait(&hook.record()?)?;
        Ok(())
    }
}

fn run(bug: Bug, seed: u64) -> Result<()> {
    let all = Arenas::with(2, seed, ArenaOptions { bytes: 1 << 12, ..options() });
    let mut ranks = all.arenas.iter().enumerate().map(|(i, arena)| Rank::new(&all.world, arena, i)).collect::<Result<Vec<_>>>()?;
    for (rank, side) in ranks.iter().enumerate() {
        // Memory is zeroed on the first stream.
        let [compute, others @ ..] = &side.streams;
        others.iter().try_for_each(|stream| stream.wait(&compute.record()?))?;
        side.flags.open(&side.streams[2], FREE, all.world.rank(1 - rank as u32))?;
    }
    let add = AddParts::new(&all.world.runtime)?;
    for _ in 0..ROUNDS {
        for (rank, side) in ranks.iter_mut().enumerate() {
            side.round(&all.world, &add, rank, bug)?;
        }
    }
    for rank in &ranks {
        rank.streams.iter().try_for_each(|stream| stream.synchronize())?;
        rank.arena.ticket(&rank.streams[2])?.wait()?;
        let found = rank.main.to_vec(&rank.streams[2])?;
        if found != vec![1.5 * ROUNDS as f32; found.len()] {
            return Err(Error::Invalid { what: "gradients", why: format!("{found:?}") });
        }
    }
    Ok(())
}

/// Reported under each of 32 seeds, by the sanitizer or by its bits; a seed replays its report. `kinds` are those of races.
fn planted(bug: Bug, kinds: &[RaceKind]) {
    for seed in 0..32 {
        let reports = [0, 1].map(|_| run(bug, seed).expect_err("planted"));
        let [first, again] = reports.each_ref().map(ToString::to_string);
        assert_eq!(first, again, "seed {seed} replays its report");
        match &reports[0] {
            Error::Race(race) => assert!(kinds.contains(&race.kind), "{race}"),
            // Memory that was never written.
            Error::Fault(fault) => assert!(bug == Bug::SumBeforeReady && fault.to_string().contains("was never written"), "{fault}"),
            Error::Invalid { what: "gradients", .. } => (),
            other => panic!("{bug:?}, seed {seed}: {other}"),
        }
    }
}

#[test]
fn the_right_order_is_silent() {
    for seed in 0..32 {
        run(Bug::Nothing, seed).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

#[test]
fn an_input_that_is_reused_before_it_was_put() {
    planted(Bug::InputReused, &[RaceKind::Unordered]);
}

#[test]
fn an_input_that_is_reused_before_its_own_rows_were_summed() {
    planted(Bug::OwnReused, &[RaceKind::Unordered]);
}

#[test]
fn a_slot_that_is_overwritten_before_it_was_summed() {
    // The flag of the next round may come before that of this one was reset.
    planted(Bug::SlotOverwritten, &[RaceKind::Unordered, RaceKind::Signal]);
}

#[test]
fn a_sum_before_its_parts_are_there() {
    planted(Bug::SumBeforeReady, &[RaceKind::Unordered]);
}

#[test]
fn a_gradient_that_is_used_before_its_sum() {
    planted(Bug::UsedBeforeSum, &[RaceKind::Unordered]);
}
