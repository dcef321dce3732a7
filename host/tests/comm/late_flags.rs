//! Flags that do not come, and what is refused of flags.

use std::time::{Duration, Instant};

use oxtile::runtime::{Exploration, FaultKind, explore};
use oxtile::symmetric::{ArenaOptions, FlagName, SymmetricError};
use oxtile::{Buffer, EmulatedOptions, Error, Graph, PinnedBuffer};
use oxtile_tile::arrivals::{Arrivals, Signals, Waits, WaitsArgument};
use oxtile_tile::prelude::*;

use crate::arenas::{Arenas, options, symmetric};
use crate::support::World;

/// `output[0]` is whether a wait for the flags `first..last` was not answered. With `reads` it reads `data` before.
#[kernel(threads = 32, grid = wait_grid)]
pub fn wait_only(waits: Waits, data: Global<u32>, output: GlobalMut<u32>, first: u32, last: u32, reads: bool) {
    if thread::index() == 0 {
        let mut arrivals = Arrivals::new(waits);
        let read = if reads { data.load(0) } else { 0 };
        let mut flag = first;
        while flag < last {
            arrivals.wait(flag);
            flag += 1;
        }
        output.store(0, u32::from(arrivals.is_over()) + read);
    }
}

fn wait_grid(_: &WaitOnlyArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

/// What a kernel without flags does.
#[kernel(threads = 32, grid = double_grid)]
pub fn double(input: Global<u32>, output: GlobalMut<u32>) {
    let i = u64::from(thread::index());
    output.store(i, 2 * input.load(i));
}

fn double_grid(_: &DoubleArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

/// `output[0]` is the first element of `data`, once flag 0 is set.
#[kernel(threads = 32, grid = read_grid)]
pub fn read_when_set(waits: Waits, data: GlobalMut<u32>, output: GlobalMut<u32>) {
    if thread::index() == 0 {
        Arrivals::new(waits).wait(0);
        output.store(0, data.load(0));
    }
}

fn read_grid(_: &ReadWhenSetArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

/// A stream copies beside a kernel that waits, and launches a kernel without flags, which reads what was copied; then it sets the flag, unless `early`, before that.
fn beside_a_kernel_that_waits(seed: u64, early: bool) -> oxtile::Result<u32> {
    let all = Arenas::new(1, seed);
    let (flags, stream, zero) = (all.arenas[0].flags("test sum", 1)?, all.stream(0), all.world.rank(0));
    let side = all.world.ranks[0].device().stream()?;
    let numbers = PinnedBuffer::from_slice(&side, &(7..39).collect::<Vec<u32>>())?;
    let (mut input, mut doubled) = (Buffer::uninitialised(&side, 32)?, Buffer::<u32>::uninitialised(&side, 32)?);
    let mut output = Buffer::<u32>::zeros(stream, 1)?;
    // The flag alone orders the two streams: the views of the buffer are of memory of another library.
    // SAFETY: the elements of `doubled`, which outlives the work.
    let mut seen = unsafe { Buffer::<u32>::borrow_raw(&doubled.device(), doubled.address(), 32) }?;
    let args = ReadWhenSetArgs { waits: flags.waits(stream, &[(0, zero)])?, data: seen.view_mut(), output: output.view_mut() };
    all.world.runtime.load::<ReadWhenSet>()?.launch(stream, args)?;
    input.copy_from_pinned(&side, &numbers)?;
    if early {
        flags.set(&side, 0, zero)?;
    }
    let double = all.world.runtime.load::<Double>()?;
    double.launch(&side, DoubleArgs { input: input.view(), output: doubled.view_mut() })?;
    if !early {
        flags.set(&side, 0, zero)?;
    }
    let found = output.to_vec(stream)?[0];
    side.synchronize().map(|()| found)
}

#[test]
fn other_streams_go_on_beside_a_kernel_that_waits() {
    for seed in 0..32 {
        assert_eq!(beside_a_kernel_that_waits(seed, false).unwrap(), 14, "seed {seed}");
        assert!(beside_a_kernel_that_waits(seed, true).is_err(), "seed {seed}: the flag is set before the data");
    }
}

const DEADLINE: Duration = Duration::from_millis(200);

/// Rank 0 waits for flag 1 of all three ranks, of which rank 2 does not set it. With a patience of its own, in steps, the kernel ends by itself.
fn late(seed: u64, patience: Option<u64>) -> (SymmetricError, Duration) {
    let all = Arenas::with(3, seed, ArenaOptions { deadline: DEADLINE, ..options() });
    let flags: Vec<_> = all.arenas.iter().map(|arena| arena.flags("test sum", 2).unwrap()).collect();
    let (stream, data) = (all.stream(0), Buffer::<u32>::zeros(all.stream(0), 1).unwrap());
    let mut output = Buffer::<u32>::zeros(stream, 1).unwrap();
    let ranks: Vec<_> = all.world.size().ranks().collect();
    [0, 1].iter().for_each(|i| flags[*i].set(all.stream(*i), 1, ranks[0]).unwrap());
    let awaited: Vec<_> = ranks.iter().map(|rank| (1, *rank)).collect();
    let waits = flags[0].waits(stream, &awaited).unwrap();
    let (first, last) = (flags[0].index(1, ranks[0]), flags[0].index(1, ranks[2]) + 1);
    let waits = WaitsArgument { patience: patience.unwrap_or(waits.patience), ..waits };
    let args = WaitOnlyArgs { waits, data: data.view(), output: output.view_mut(), first, last, reads: false };
    all.world.runtime.load::<WaitOnly>().unwrap().launch(stream, args).unwrap();
    let start = Instant::now();
    let error = symmetric(all.arenas[0].ticket(stream).unwrap().wait());
    let took = start.elapsed();
    // Poison has ended its waits, and other ranks are told.
    stream.synchronize().unwrap();
    assert!(all.arenas[1].check().is_err());
    (error, took)
}

#[test]
fn a_flag_that_does_not_come_is_named_within_the_deadline() {
    for (seed, patience) in (0..3).flat_map(|seed| [None, Some(64)].map(|patience| (seed, patience))) {
        let (error, took) = late(seed, patience);
        let SymmetricError::Deadline { missing, flag, is_guess: false, .. } = &error else { panic!("seed {seed}: {error}") };
        assert_eq!(missing.iter().map(|rank| rank.index()).collect::<Vec<_>>(), [2], "{error}");
        assert_eq!(*flag, Some(FlagName { operation: "test sum", flag: 1 }), "{error}");
        assert!(error.to_string().contains("no signal from rank 2 (flag 1 of `test sum`) within 200ms"), "{error}");
        // A kernel that ends by itself is seen at once.
        let limit = if patience.is_some() { DEADLINE } else { DEADLINE + Duration::from_secs(1) };
        assert!(took < limit, "seed {seed}: {took:?}");
    }
}

/// Waits for flag `flag`, then sets flag 1 at rank 1: if it `asks`, only where the wait was answered.
#[kernel(threads = 32, grid = tell_grid)]
pub fn tell_when_set(waits: Waits, signals: Signals, flag: u32, asks: bool) {
    if thread::index() == 0 {
        let mut arrivals = Arrivals::new(waits);
        arrivals.wait(flag);
        if !asks || !arrivals.is_over() {
            signals.set(1, 1);
        }
    }
}

fn tell_grid(_: &TellWhenSetArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

/// What tells rank 1 of a result of rank 0, whose kernel has waited in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Teller {
    /// The stream: after it has cleared the flag, or without, so that it ignores the verdict.
    Stream { clears: bool },
    /// The kernel: where its wait was answered, or always.
    Kernel { asks: bool },
}

/// Whether rank 1 took the result for good; rank 0's error afterwards.
fn told_of_garbage(seed: u64, teller: Teller) -> (bool, SymmetricError) {
    let all = Arenas::with(2, seed, ArenaOptions { deadline: DEADLINE, ..options() });
    let flags: Vec<_> = all.arenas.iter().map(|arena| arena.flags("test sum", 2).unwrap()).collect();
    let ([stream, late], [zero, one]) = ([0, 1].map(|rank| all.stream(rank)), [0, 1].map(|rank| all.world.rank(rank)));
    let (data, mut output) = (Buffer::<u32>::zeros(stream, 1).unwrap(), Buffer::<u32>::zeros(stream, 1).unwrap());
    let (signals, flag) = (flags[0].signals(stream).unwrap(), flags[0].index(0, one));
    let waits = WaitsArgument { patience: 64, ..flags[0].waits(stream, &[(0, one)]).unwrap() };
    match teller {
        Teller::Stream { clears } => {
            let args = WaitOnlyArgs { waits, data: data.view(), output: output.view_mut(), first: flag, last: flag + 1, reads: false };
            all.world.runtime.load::<WaitOnly>().unwrap().launch(stream, args).unwrap();
            if clears {
                flags[0].clear(stream, 0, one).unwrap();
            }
            flags[0].set(stream, 1, one).unwrap();
        }
        Teller::Kernel { asks } => {
            let args = TellWhenSetArgs { waits, signals: signals.argument(), flag, asks };
            all.world.runtime.load::<TellWhenSet>().unwrap().launch(stream, args).unwrap();
        }
    }
    flags[1].take_back(late, 1, zero).unwrap();
    let is_taken = all.arenas[1].ticket(late).unwrap().wait().is_ok();
    // Rank 0 hears of it too, and its stream is let go; from then on rank 1 does.
    let error = symmetric(all.arenas[0].ticket(stream).unwrap().wait());
    stream.synchronize().unwrap();
    assert!(all.arenas[1].check().is_err(), "seed {seed}, {teller:?}");
    (is_taken, error)
}

/// What a rank does after a kernel whose wait was not answered does not leave the rank: the rank that is late hears of no result.
#[test]
fn what_follows_a_late_wait_does_not_leave_the_rank() {
    for (seed, teller) in
        (0..8).flat_map(|seed| [Teller::Stream { clears: true }, Teller::Kernel { asks: true }].map(|teller| (seed, teller)))
    {
        assert!(!told_of_garbage(seed, teller).0, "seed {seed}, {teller:?}");
    }
}

/// A program that ignores the verdict tells rank 1 of garbage. Its next ticket names the flag all the same, and ends the arena for both.
#[test]
fn a_verdict_that_is_ignored_is_reported_under_every_seed() {
    for (seed, teller) in
        (0..32).flat_map(|seed| [Teller::Stream { clears: false }, Teller::Kernel { asks: false }].map(|teller| (seed, teller)))
    {
        let (is_taken, error) = told_of_garbage(seed, teller);
        assert!(is_taken, "seed {seed}, {teller:?}");
        let SymmetricError::Deadline { flag, is_guess: false, .. } = &error else { panic!("seed {seed}, {teller:?}: {error}") };
        assert_eq!(*flag, Some(FlagName { operation: "test sum", flag: 0 }), "seed {seed}, {teller:?}: {error}");
    }
}

/// A search of every order takes launches whole, and refuses those that run in pieces.
#[test]
fn a_search_of_every_order_refuses_launches_with_flags() {
    let program = |exploration: &Exploration| {
        let options = EmulatedOptions { exploration: Some(exploration.clone()), ..EmulatedOptions::default() };
        let all = Arenas::over(World::with(options), ArenaOptions::default());
        let (flags, stream, zero) = (all.arenas[0].flags("test sum", 1)?, all.stream(0), all.world.rank(0));
        let (data, mut output) = (Buffer::<u32>::zeros(stream, 1)?, Buffer::<u32>::zeros(stream, 1)?);
        flags.set(stream, 0, zero)?;
        let waits = flags.waits(stream, &[(0, zero)])?;
        let args = WaitOnlyArgs { waits, data: data.view(), output: output.view_mut(), first: 0, last: 1, reads: false };
        all.world.runtime.load::<WaitOnly>()?.launch(stream, args)?;
        stream.synchronize()
    };
    let error = explore(program).unwrap_err().to_string();
    assert!(error.contains("a search of every order does not go through: run it under seeds"), "{error}");
}

/// What was discarded is read before it was written again: whatever the order, the report names the buffer.
#[test]
fn an_early_read_of_what_was_discarded_has_a_name() {
    for seed in 0..32 {
        let all = Arenas::new(1, seed);
        let (mut buffers, flags, stream) = (all.buffers(4), all.arenas[0].flags("test sum", 1).unwrap(), all.stream(0));
        buffers[0].local_mut().fill_zero(stream).unwrap();
        buffers[0].discard(stream, 0..1).unwrap();
        let mut output = Buffer::<u32>::zeros(stream, 1).unwrap();
        let (waits, data) = (flags.waits(stream, &[]).unwrap(), buffers[0].local().view());
        let args = WaitOnlyArgs { waits, data, output: output.view_mut(), first: 0, last: 0, reads: true };
        all.world.runtime.load::<WaitOnly>().unwrap().launch(stream, args).unwrap();
        let Err(Error::Fault(fault)) = stream.synchronize() else { panic!("seed {seed}: nothing is reported") };
        assert!(fault.kind == FaultKind::Uninitialised && fault.message.contains("`data"), "{fault}");
    }
}

/// A rule of kernels that wait (docs/communication.md): the puts come before the launch that waits for those of others.
#[test]
fn a_launch_before_what_it_waits_for_is_stuck_and_named() {
    let all = Arenas::new(1, 0);
    let (flags, stream, zero) = (all.arenas[0].flags("test sum", 1).unwrap(), all.stream(0), all.world.rank(0));
    let (data, mut output) = (Buffer::<u32>::zeros(stream, 1).unwrap(), Buffer::<u32>::zeros(stream, 1).unwrap());
    let waits = flags.waits(stream, &[(0, zero)]).unwrap();
    let args = WaitOnlyArgs { waits, data: data.view(), output: output.view_mut(), first: 0, last: 1, reads: false };
    all.world.runtime.load::<WaitOnly>().unwrap().launch(stream, args).unwrap();
    flags.set(stream, 0, zero).unwrap();
    let error = stream.synchronize().unwrap_err();
    assert!(matches!(error, Error::Stuck { .. }), "{error}");
    assert!(error.to_string().contains("flags that kernel `wait_only` polls") && error.to_string().contains("late_flags.rs"), "{error}");
}

/// A rule of kernels that wait: what allocates or uploads is done before a capture, and so before a launch that peers wait for.
#[test]
fn what_must_be_prepared_is_refused_in_a_graph() {
    let all = Arenas::new(1, 0);
    let (flags, stream, zero) = (all.arenas[0].flags("test sum", 2).unwrap(), all.stream(0), all.world.rank(0));
    all.world.runtime.load::<WaitOnly>().unwrap().prepare(&stream.device()).unwrap();
    let refused = |body: &dyn Fn() -> oxtile::Result<()>| Graph::capture(&[stream], body).map(drop).unwrap_err().to_string();
    let table = refused(&|| flags.signals(stream).map(drop));
    assert!(table.contains("call Flags::signals once before the graph is captured"), "{table}");
    let open = refused(&|| flags.open(stream, 0, zero));
    assert!(open.contains("open it once, before the graph is captured"), "{open}");
    flags.signals(stream).unwrap();
    Graph::capture(&[stream], || flags.signals(stream).map(drop)).unwrap();
}

#[test]
fn flags_that_are_not_there_are_refused() {
    let all = Arenas::new(2, 0);
    let [flags, _theirs] = [0, 1].map(|i| all.arenas[i].flags("test sum", 2).unwrap());
    let (stream, one) = (all.stream(0), all.world.rank(1));
    assert_eq!((flags.len(), flags.index(1, one)), (2, 3));
    for error in [
        flags.set(stream, 2, one),
        flags.take_back(stream, 2, one),
        flags.clear(stream, 2, one),
        flags.waits(stream, &[(2, one)]).map(drop),
    ] {
        assert_eq!(error.unwrap_err().to_string(), "Flags: there is no flag 2 of `test sum`, which has 2");
    }
    assert!(matches!(flags.set(all.stream(1), 0, one), Err(Error::Invalid { .. })), "a stream of another device");
    let most = all.arenas[0].flags("more", 1 << 20);
    assert!(matches!(most, Err(Error::Symmetric(SymmetricError::NoChannel { .. }))), "{most:?}");
    // Every rank takes the same.
    let last = all.arenas[0].flags("last", 2).unwrap();
    all.arenas[1].channel().unwrap();
    let error = symmetric(last.set(stream, 0, one));
    assert!(matches!(&error, SymmetricError::Layout { .. }) && error.to_string().contains("2 flags"), "{error}");
}
