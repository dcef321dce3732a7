//! Fences, flags between devices, the warp's barrier, mbarriers by hand, clocks.

use oxtile_tile::arrivals::{Arrivals, LINE, Signals, VERDICT, Waits};
use oxtile_tile::flag::{FlagStorage, Patience};
use oxtile_tile::pipeline::{self, Mbarrier};
use oxtile_tile::prelude::*;
use oxtile_tile::shared;

use crate::THREADS;

/// Rounds of [`fences`](fn@fences): one a scope.
pub const SCOPES: u32 = 3;

/// Fences around relaxed accesses, one scope a round: thread 0 sends a word, thread 64 waits for it (bounded).
#[kernel(threads = THREADS, grid = fences_grid)]
pub fn fences(input: Global<u32>, mailbox: GlobalMut<u32>, flags: GlobalMut<u32>, output: GlobalMut<u32>) {
    let mail = Mail { input, mailbox, flags, output };
    mail.send(0, || sync::fence_block());
    mail.send(1, || sync::fence_device());
    mail.send(2, || sync::fence_system());
}

/// What [`fences`](fn@fences) sends a word through.
struct Mail {
    input: Global<u32>,
    mailbox: GlobalMut<u32>,
    flags: GlobalMut<u32>,
    output: GlobalMut<u32>,
}

impl Mail {
    #[inline(always)]
    fn send(&self, round: u64, fence: impl Fn()) {
        if thread::index() == 0 {
            self.mailbox.store(round, self.input.load(round));
            fence();
            atomic::add_u32(&self.flags, round, 1);
        }
        if thread::index() == 64 {
            let mut spins = 0;
            while atomic::add_u32(&self.flags, round, 0) == 0 {
                thread::sleep(100);
                spins += 1;
                if spins > 100_000 {
                    thread::trap();
                }
            }
            fence();
            self.output.store(round, self.mailbox.load(round));
        }
    }
}

fn fences_grid(args: &FencesArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(SCOPES), args.input.len())?;
    LaunchError::check_length("mailbox", u64::from(SCOPES), args.mailbox.len())?;
    LaunchError::check_length("flags", u64::from(SCOPES), args.flags.len())?;
    LaunchError::check_length("output", u64::from(SCOPES), args.output.len())?;
    Ok(Grid::x(1))
}

/// Words that [`flags`](fn@flags) writes: the message, how three waits ended, and a flag.
pub const FLAGS_OUTPUT: u32 = THREADS + 4;

#[derive(SharedStorage)]
struct Waiting {
    flag: FlagStorage,
}

/// Flags at system scope. Block 0 writes a message and signals epoch 3; block 1 waits for it and copies. Then it waits for flag 1, which is
/// poisoned, and for a moment for flag 2, which does not come; flag 3 is the notice.
#[kernel(threads = THREADS, grid = flags_grid, shared = Waiting)]
pub fn flags(input: Global<u32>, mailbox: GlobalMut<u32>, epochs: GlobalMut<u64>, output: GlobalMut<u32>) {
    const LONG: u64 = 10_000_000_000;
    let t = thread::index();
    if block::index()[0] == 0 {
        mailbox.store(t.into(), input.load(t.into()));
        block::sync();
        if t == 0 {
            flag::signal(&epochs, 0, 3);
        }
        return;
    }
    let notice = epochs.slice(3, 1);
    let reached = Patience::new(notice, LONG).wait_block(&epochs, 0, 3, Waiting::claim().flag);
    output.store(t.into(), mailbox.load(t.into()));
    if t == 0 {
        let ended = Patience::new(notice, LONG).wait(&epochs, 1, 3);
        let late = Patience::new(notice, 1000).wait(&epochs, 2, 3);
        let words = [reached as u32, ended as u32, late as u32, flag::load(&epochs, 0) as u32];
        for (i, word) in (0..).zip(words) {
            output.store(u64::from(THREADS) + i, word);
        }
    }
}

fn flags_grid(args: &FlagsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(THREADS), args.input.len())?;
    LaunchError::check_length("mailbox", u64::from(THREADS), args.mailbox.len())?;
    LaunchError::check_length("epochs", 4, args.epochs.len())?;
    LaunchError::check_length("output", u64::from(FLAGS_OUTPUT), args.output.len())?;
    Ok(Grid::x(2))
}

/// Words that [`arriving_chunk`](fn@arriving_chunk) writes: the message, whether the waits were over after each of three, and the verdict.
pub const ARRIVING_OUTPUT: u32 = THREADS + 4;
/// Lines of its flags: the team's, and two of each of two ranks.
pub const ARRIVING_LINES: u64 = 5;

#[derive(SharedStorage)]
struct Arriving {
    chunk: SharedArray<u32, { THREADS as usize }>,
    full: Mbarrier,
}

/// Block 0 writes a message and sets flag 0 of rank 1 at rank 0, whose block 1 waits for it and reads the message by a bulk copy. If `hurried`, it then
/// copies once more, waits for a moment for flag 1, which does not come, and for flag 0 again.
#[kernel(threads = THREADS, grid = arriving_grid, shared = Arriving, requires = sm_90)]
pub fn arriving_chunk(input: Global<u32>, mailbox: GlobalMut<u32>, waits: Waits, signals: Signals, output: GlobalMut<u32>, hurried: bool) {
    let (Arriving { chunk, full }, t) = (Arriving::claim(), thread::index());
    if block::index()[0] == 0 {
        mailbox.store(t.into(), input.load(t.into()));
        block::sync();
        if t == 0 {
            signals.set(0, 0);
        }
        return;
    }
    // SAFETY: the same memory, which no thread of this block writes.
    let message = unsafe { Global::from_raw_parts(mailbox.start(), mailbox.len()) };
    let mut arrivals = Arrivals::new(waits);
    if t == 0 {
        full.init(1);
        pipeline::publish_barriers();
        full.arrive_expect(THREADS * 4);
        arrivals.wait(0);
        full.load(chunk, &message, 0);
    }
    block::sync();
    full.wait(0);
    output.store(t.into(), chunk.load(t));
    if t == 0 {
        output.store(u64::from(THREADS), arrivals.is_over().into());
    }
    if !hurried {
        return;
    }
    block::sync();
    if t == 0 {
        sync::fence_proxy_async_global();
        full.arrive_expect(THREADS * 4);
        full.load(chunk, &message, 0);
        full.wait(1);
        output.store(0, chunk.load(0));
        let mut hurried = Arrivals::new(Waits { patience: 1000, ..waits });
        hurried.wait(1);
        output.store(u64::from(THREADS) + 1, hurried.is_over().into());
        hurried.wait(0);
        output.store(u64::from(THREADS) + 2, hurried.is_over().into());
        output.store(u64::from(THREADS) + 3, flag::load(&waits.lines.words(), VERDICT) as u32);
    }
}

fn arriving_grid(args: &ArrivingChunkArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(THREADS), args.input.len())?;
    LaunchError::check_length("mailbox", u64::from(THREADS), args.mailbox.len())?;
    LaunchError::check_length("lines", ARRIVING_LINES * LINE, args.waits.lines.len())?;
    LaunchError::check_length("output", u64::from(ARRIVING_OUTPUT), args.output.len())?;
    Ok(Grid::x(2))
}

#[derive(SharedStorage)]
struct Cells {
    cells: SharedArray<u32, 128>,
}

/// Lanes pass words round through shared memory, ordered by the warp's barrier alone.
#[kernel(threads = THREADS, grid = round_grid, shared = Cells)]
pub fn warp_round(input: Global<u32>, output: GlobalMut<u32>) {
    let (cells, t) = (Cells::claim().cells, thread::index());
    let mut word = input.load(u64::from(t));
    for _ in 0..3 {
        cells.store(t, word);
        warp::sync();
        word = cells.load(t / 32 * 32 + (t + 5) % 32).rotate_left(3);
        warp::sync();
    }
    output.store(u64::from(t), word);
}

fn round_grid(args: &WarpRoundArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(THREADS), args.input.len())?;
    LaunchError::check_length("output", u64::from(THREADS), args.output.len())?;
    Ok(Grid::x(1))
}

/// Whether the clock goes on while each thread sleeps (bounded), and not back: one word a thread.
#[kernel(threads = THREADS, grid = clock_grid)]
pub fn clock(output: GlobalMut<u32>) {
    let start = thread::timer();
    let (mut now, mut spins) = (start, 0);
    while now == start {
        thread::sleep(100);
        now = thread::timer();
        spins += 1;
        if spins > 100_000 {
            thread::trap();
        }
    }
    output.store(u64::from(thread::index()), u32::from(now > start));
}

fn clock_grid(args: &ClockArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", u64::from(THREADS), args.output.len())?;
    Ok(Grid::x(1))
}

/// Words that [`mbarrier_phases`](fn@mbarrier_phases) copies, of an input twice as long.
pub const PART: u32 = 96;

#[derive(SharedStorage)]
struct Parts {
    cells: SharedArray<u32, 128>,
    full: Mbarrier,
}

/// One mbarrier orders the exchange of a word a thread, is given back, and made anew for a part of an array: its place
/// and a word and an element a thread.
#[kernel(threads = THREADS, grid = phases_grid, shared = Parts, requires = sm_90)]
pub fn mbarrier_phases(input: Global<u32>, output: GlobalMut<u32>) {
    let (Parts { cells, full }, t) = (Parts::claim(), thread::index());
    if t == 0 {
        full.init(THREADS);
        output.store(0, full.address() - shared::arena());
    }
    block::sync();
    cells.store(t, input.load(u64::from(t)));
    full.arrive();
    full.wait(0);
    output.store(u64::from(1 + t), cells.load((t + 37) % THREADS));
    sync::fence_proxy_async();
    block::sync();
    if t == 0 {
        full.invalidate();
        full.init(1);
        pipeline::publish_barriers();
        full.arrive_expect(PART * 4);
        full.load_part(cells, &input, 8, PART);
    }
    block::sync();
    while !full.try_wait(0) {}
    output.store(u64::from(1 + THREADS + t), cells.load(t));
}

fn phases_grid(args: &MbarrierPhasesArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(2 * PART), args.input.len())?;
    LaunchError::check_alignment("input", 16, args.input.address())?;
    LaunchError::check_length("output", u64::from(1 + 2 * THREADS), args.output.len())?;
    Ok(Grid::x(1))
}
