//! Bugs on purpose, each with the schedule that its report comes to.

use oxtile_tile::pipeline::{Mbarrier, publish_barriers};
use oxtile_tile::prelude::*;

use super::{first_failure, shortest_schedule};
use crate::runtime::{Buffer, EmulatedOptions, Result, Runtime};

#[derive(SharedStorage)]
struct Shared {
    sums: SharedArray<u32, 64>,
    full: Mbarrier,
}

fn one_block<A>(_: &A, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

/// Turns 64 values around, without a barrier.
#[kernel(threads = 64, grid = one_block, shared = Shared)]
pub fn turn_around(values: GlobalMut<u32>) {
    let (shared, i) = (Shared::claim(), thread::index());
    shared.sums.store(i, values.load(u64::from(i)));
    values.store(u64::from(i), shared.sums.load(63 - i));
}

/// Warp 1 sets a flag after a value, without a release; warp 0 takes the value if the flag is there.
#[kernel(threads = 64, grid = one_block)]
pub fn take_by_flag(values: GlobalMut<u32>) {
    if thread::index() == 32 {
        values.store(0, 7);
        atomic::max_u32(&values, 1, 1);
    }
    if thread::index() == 0 && atomic::load_acquire(&values, 1) == 1 {
        values.store(2, values.load(0));
    }
}

/// Counts two threads by a load and a store, between which another thread may count.
#[kernel(threads = 32, grid = one_block)]
pub fn count(values: GlobalMut<u32>) {
    if thread::index() < 2 {
        let before = atomic::load_acquire(&values, 0);
        atomic::store_release(&values, 0, before + 1);
    }
}

/// All threads wait for 64 arrivals, of which one is forgotten.
#[kernel(threads = 64, grid = one_block, shared = Shared)]
pub fn forget_to_arrive(values: GlobalMut<u32>) {
    let shared = Shared::claim();
    if thread::index() == 0 {
        shared.full.init(64);
        publish_barriers();
    }
    block::sync();
    shared.full.arrive_if(thread::index() != 40);
    shared.full.wait(0);
    values.store(u64::from(thread::index()), 1);
}

/// Warp 0 waits for an arrival that warp 1 leaves out if it was first.
#[kernel(threads = 64, grid = one_block, shared = Shared)]
pub fn arrive_if_second(values: GlobalMut<u32>) {
    let shared = Shared::claim();
    if thread::index() == 0 {
        shared.full.init(1);
        publish_barriers();
    }
    block::sync();
    match thread::index() {
        0 => {
            atomic::store_release(&values, 0, 1);
            shared.full.wait(0);
        }
        32 => shared.full.arrive_if(atomic::load_acquire(&values, 0) == 1),
        _ => {}
    }
}

/// Panics in every order: which of two lines does depends on the order of two warps.
#[kernel(threads = 64, grid = one_block)]
pub fn panic_by_order(values: GlobalMut<u32>) {
    if thread::index() == 0 {
        assert!(atomic::load_acquire(&values, 1) == 0, "warp 1 was first");
        atomic::store_release(&values, 0, 1);
    }
    if thread::index() == 32 {
        atomic::store_release(&values, 1, 1);
        assert!(atomic::load_acquire(&values, 0) == 0, "warp 0 was first");
    }
}

/// Moves values up by one, the last one too far, after the warp met several times at one line.
#[kernel(threads = 32, grid = one_block)]
pub fn move_up(values: GlobalMut<u32>) {
    let i = u64::from(thread::index());
    let value = values.load(i);
    for _ in 0..6 {
        warp::sync();
    }
    values.store(i + 1, value);
}

/// A kernel's values after it, from `numbers`. Kernels before it do nothing wrong.
macro_rules! after {
    ($kernel:ident, $args:ident, $numbers:expr, $runtime:expr) => {{
        let stream = $runtime.device(0)?.stream()?;
        let mut values = Buffer::<u32>::from_slice(&stream, &$numbers)?;
        $runtime.load::<$kernel>()?.launch(&stream, $args { values: values.view_mut() })?;
        values.to_vec(&stream)
    }};
}

/// The report of the first of many seeds that fails, from the line on that tells of the schedule.
fn reported(test: impl FnMut(&Runtime) -> Result<()>) -> String {
    let report = first_failure(&(0..64).collect::<Vec<_>>(), test).expect("a seed that fails");
    let (_, schedule) = report.split_once("\n  the shortest schedule that fails ").unwrap_or_else(|| panic!("{report}"));
    assert!(schedule.lines().count() <= 12, "{report}");
    assert!(schedule.contains(" runs, ") && schedule.contains("OXTILE_SHRINK=0 turns this off"), "{report}");
    schedule.to_owned()
}

fn contains(report: &str, parts: &[&str]) {
    for part in parts {
        assert!(report.contains(part), "{part} is not in:\n{report}");
    }
}

#[test]
fn a_missing_barrier_shows_in_the_default_order() {
    let report = reported(|runtime| after!(TurnAround, TurnAroundArgs, [1_u32; 64], runtime).map(drop));
    let steps = [
        "\n  1. thread (0, 0, 0) of block (0, 0, 0) runs until host/src/testing/planted.rs:",
        " (read of `sums[63]` of `Shared`): uninitialised read\n  found",
    ];
    contains(&report, &[&["needs none of "] as &[_], &steps].concat());
}

#[test]
fn a_flag_without_a_release_needs_one_decision() {
    let report = reported(|runtime| after!(TakeByFlag, TakeByFlagArgs, [0_u32; 4], runtime).map(drop));
    contains(
        &report,
        &[
            "needs 1 of ",
            "\n  1. thread (32, 0, 0) of block (0, 0, 0) runs past host/src/testing/planted.rs:",
            " (write of offset 0 of `values` (16 bytes)) ",
            "\n  2. thread (0, 0, 0) of block (0, 0, 0) runs until host/src/testing/planted.rs:",
            " (read of offset 0 of `values` (16 bytes)): race\n  found",
        ],
    );
}

#[test]
fn a_lost_update_needs_two_decisions() {
    let report = reported(|runtime| {
        assert_eq!(after!(Count, CountArgs, [0_u32], runtime)?, [2]);
        Ok(())
    });
    // One thread runs until it has loaded, the other until its end; or the second until it has loaded, and then the first by default.
    assert!(report.starts_with("needs 1 of ") || report.starts_with("needs 2 of "), "{report}");
    contains(
        &report,
        &[
            "\n  1. thread (",
            " (read of offset 0 of `values` (4 bytes))\n  2. thread",
            "then the test fails: assertion `left == right` failed",
        ],
    );
}

#[test]
fn a_forgotten_arrival_shows_in_the_default_order() {
    let report = reported(|runtime| after!(ForgetToArrive, ForgetToArriveArgs, [0_u32; 64], runtime).map(drop));
    let steps = ["(mbarrier_wait_parity), where they wait", "then every thread waits: deadlock"];
    contains(&report, &[&["needs none of "] as &[_], &steps].concat());
}

#[test]
fn a_deadlock_of_one_order_needs_one_decision() {
    let report = reported(|runtime| after!(ArriveIfSecond, ArriveIfSecondArgs, [0_u32], runtime).map(drop));
    contains(
        &report,
        &[
            "needs 1 of ",
            "thread (32, 0, 0) of block (0, 0, 0) runs ",
            "(mbarrier_wait_parity), where it waits",
            "then every thread waits: deadlock",
        ],
    );
}

#[test]
fn an_access_that_faults_is_the_last_step() {
    let report = reported(|runtime| after!(MoveUp, MoveUpArgs, [0_u32; 32], runtime).map(drop));
    contains(
        &report,
        &["needs none of ", "thread (31, 0, 0) of block (0, 0, 0) goes on, then: out of bounds at host/src/testing/planted.rs:"],
    );
    assert!(!report.contains(" 1, 1"), "a thread is named twice:\n{report}");
}

#[test]
fn a_panic_is_not_taken_for_another_of_its_kernel() {
    let panics = |runtime: &Runtime| after!(PanicByOrder, PanicByOrderArgs, [0_u32; 2], runtime).map(drop);
    let report = (0..64).filter_map(|seed| first_failure(&[seed], panics)).find(|report| report.contains("warp 1 was first"));
    let report = report.expect("a seed under which warp 1 is first");
    // In the default order it is warp 0 that is first.
    contains(&report, &["needs 1 of ", "\n  1. thread (32, 0, 0) of block (0, 0, 0) runs until host/src/testing/planted.rs:"]);
}

/// Two streams write one buffer. The sanitizer reports it in every order; without it the result depends on the order.
fn two_streams(runtime: &Runtime) -> Result<()> {
    let device = runtime.device(0)?;
    let (first, second) = (device.stream()?, device.stream()?);
    let mut shared = Buffer::<u32>::zeros(&first, 64)?;
    first.synchronize()?;
    // SAFETY: `shared` outlives the alias, and that the two are not ordered is what the test is about.
    let mut alias = unsafe { Buffer::<u32>::borrow_raw(&device, shared.address(), 64) }?;
    shared.fill_zero(&first)?;
    alias.copy_from(&second, &Buffer::from_slice(&second, &[1_u32; 64])?)?;
    second.synchronize()?;
    assert_eq!(shared.to_vec(&first)?, [1; 64], "the last write is lost");
    Ok(())
}

#[test]
fn streams_that_write_one_buffer_need_no_decision() {
    let report = reported(two_streams);
    contains(
        &report,
        &[
            "needs none of ",
            ": fill, enqueued at host/src/testing/planted.rs:",
            ": copy, enqueued at host/src/testing/planted.rs:",
            ": stream race",
        ],
    );
}

#[test]
fn an_order_of_streams_that_loses_a_write_needs_one_decision() {
    let options = |seed| EmulatedOptions { seed: Some(seed), sanitize_streams: false, ..EmulatedOptions::default() };
    let report = (0..64).find_map(|seed| shortest_schedule(&options(seed), two_streams).err()).expect("an order that loses it");
    contains(&report, &["needs 1 of ", "(the lowest thread", ": copy, enqueued at", "then the test fails: "]);
}

#[test]
fn a_test_that_differs_from_run_to_run_is_not_shrunk() {
    let mut runs = 0;
    let error = shortest_schedule(&EmulatedOptions::default(), |_| {
        runs += 1;
        if runs == 1 { Err("only once") } else { Ok(()) }
    });
    contains(&error.unwrap_err(), &["only once\n  its schedule is not shrunk: another run under the seed does not fail so"]);
}

/// A host that enqueues to the lowest stream until an event of another one comes ends in the default order too: no stream goes on for ever.
#[test]
fn a_host_that_waits_for_a_higher_stream_is_shrunk() {
    let error = shortest_schedule(&EmulatedOptions::default(), |runtime| {
        let device = runtime.device(0)?;
        let (low, high) = (device.stream()?, device.stream()?);
        let mut buffer = Buffer::<u32>::zeros(&low, 64)?;
        let mut other = Buffer::<u32>::zeros(&high, 64)?;
        other.fill_zero(&high)?;
        let event = high.record()?;
        while !event.is_done()? {
            buffer.fill_zero(&low)?;
        }
        Err(crate::Error::Invalid { what: "the test", why: "it fails".to_owned() })
    });
    contains(&error.unwrap_err(), &["the default order fails too"]);
}
