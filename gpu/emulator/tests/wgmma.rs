//! Matrix multiplication by a warpgroup: results, and what is reported of wrong kernels.

mod common;
use common::*;
use oxtile_emulator::Format;
use oxtile_emulator::wgmma::{Instruction, Left};
use oxtile_emulator::{FaultKind, Options, Space, device};

/// What a kernel does wrong.
#[derive(Clone, Copy, PartialEq)]
enum Bug {
    None,
    NoProxyFence,
    NoBarrier,
    NoFence,
    NoCommit,
    NoWait,
    WaitForOneLess,
    WrittenBeforeWait,
    WrittenAfterOnesOwnWait,
    OneWarpAstray,
    OneThreadsDescriptor,
    Unswizzled,
    BeyondShared,
}

const COLUMNS: u32 = 16;
const INSTRUCTION: Instruction = Instruction { columns: COLUMNS, formats: [Format::Bf16; 2], left_mn_major: false, right_mn_major: false };
/// The left operand's 64 rows of 128 bytes, of which 32 are used; the right one's 16 rows come after it.
const A: u32 = 0;
const B: u32 = 64 * 128;
const SHARED: u32 = B + 16 * 128;

/// A K-major operand of rows of 128 bytes, swizzled.
fn descriptor(offset: u32) -> u64 {
    u64::from(offset >> 4) | 1 << 16 | 64 << 32 | 1 << 62
}

/// Where 4 bytes of a row lie.
fn place(start: u32, row: u32, byte: u32) -> u32 {
    let linear = start + row * 128 + byte;
    linear ^ (linear >> 3 & 0x70)
}

fn bf16_pair(low: f32, high: f32) -> u32 {
    low.to_bits() >> 16 | high.to_bits() & 0xffff_0000
}

fn a(row: u32, k: u32) -> f32 {
    (row % 5) as f32 - (k % 3) as f32
}

fn b(column: u32, k: u32) -> f32 {
    (column % 4) as f32 * ((k % 2) as f32 + 1.0)
}

/// Each thread writes half a row of `A`; the first sixteen write the rows of `B`.
fn fill() {
    let (row, first) = (thread() / 2, thread() % 2 * 8);
    for k in (first..first + 8).step_by(2) {
        shared_store(place(A, row, 2 * k), bf16_pair(a(row, k), a(row, k + 1)));
    }
    if thread() < 16 {
        for k in (0..16).step_by(2) {
            shared_store(place(B, thread(), 2 * k), bf16_pair(b(thread(), k), b(thread(), k + 1)));
        }
    }
}

/// `2 A B`, as two groups into the same accumulators; 64 by 16 words of output.
fn multiply(arguments: &[u64], bug: Bug) {
    fill();
    if bug != Bug::NoProxyFence {
        device::fence_proxy_async(Space::Shared);
    }
    if bug != Bug::NoBarrier {
        device::barrier_sync(0, 128);
    }
    let left = match bug {
        Bug::OneThreadsDescriptor if thread() == 77 => descriptor(A + 1024),
        Bug::Unswizzled => descriptor(A) & !(3 << 62),
        Bug::BeyondShared => descriptor(SHARED - 1024),
        _ => descriptor(A),
    };
    let ticket = device::wgmma_ticket();
    for group in 0..2 {
        if bug != Bug::NoFence || group == 0 {
            device::wgmma_fence();
        }
        if bug == Bug::OneWarpAstray && thread() / 32 == 2 {
            device::barrier_sync(1, 32);
            device::wgmma_multiply(&INSTRUCTION, ticket, Left::Shared(left), descriptor(B), None);
        } else {
            device::wgmma_multiply(&INSTRUCTION, ticket, Left::Shared(left), descriptor(B), None);
        }
        if bug != Bug::NoCommit {
            device::wgmma_commit();
        }
    }
    if bug == Bug::WrittenBeforeWait {
        shared_store(place(A, thread() / 32 * 16, 0), 0);
    }
    if bug != Bug::NoWait {
        device::wgmma_wait(u32::from(bug == Bug::WaitForOneLess));
    }
    if bug == Bug::WrittenAfterOnesOwnWait && thread() == 0 {
        // All warps read B; this one knows of its own reads alone.
        shared_store(place(B, 0, 0), 0);
    }
    let mut registers = [0.0; COLUMNS as usize / 2];
    device::wgmma_publish(ticket, &mut registers);
    for (i, value) in registers.into_iter().enumerate() {
        let i = i as u32;
        let row = thread() / 32 * 16 + thread() % 32 / 4 + 8 * (i / 2 % 2);
        let column = 8 * (i / 4) + 2 * (thread() % 4) + i % 2;
        store(arguments[1] + u64::from(row * COLUMNS + column) * 4, value.to_bits());
    }
}

macro_rules! job {
    ($bug:expr) => {
        || Job::new("multiply", 1, 128, 64 * COLUMNS, SHARED, |arguments| multiply(arguments, $bug))
    };
}

#[test]
fn products_are_right_and_silent() {
    silent(job!(Bug::None), |output| {
        for (i, &word) in output.iter().enumerate() {
            let (row, column) = (i as u32 / COLUMNS, i as u32 % COLUMNS);
            let expected: f32 = (0..16).map(|k| 2.0 * a(row, k) * b(column, k)).sum();
            assert_eq!(f32::from_bits(word), expected, "row {row}, column {column}");
        }
    });
}

#[test]
fn operands_are_ordered_and_fenced() {
    reported(job!(Bug::NoBarrier), FaultKind::Race);
    let fault = reported(job!(Bug::NoProxyFence), FaultKind::MissingProxyFence);
    assert!(fault.mend.contains("fence_proxy_async"), "{fault}");
}

#[test]
fn operands_rest_until_every_warp_has_waited() {
    let fault = reported(job!(Bug::WrittenBeforeWait), FaultKind::Race);
    assert!(fault.to_string().contains("asynchronous read"), "{fault}");
    reported(job!(Bug::WrittenAfterOnesOwnWait), FaultKind::Race);
}

#[test]
fn accumulators_are_fenced_committed_and_waited_for() {
    let fault = reported(job!(Bug::NoFence), FaultKind::MatrixMisuse);
    assert!(fault.message.contains("wgmma.fence"), "{fault}");
    for bug in [job!(Bug::NoCommit), job!(Bug::NoWait), job!(Bug::WaitForOneLess)] {
        let fault = reported(bug, FaultKind::MatrixMisuse);
        assert!(fault.message.contains("in flight"), "{fault}");
    }
}

#[test]
fn a_warpgroup_comes_together_with_one_operand() {
    reported(job!(Bug::OneWarpAstray), FaultKind::Divergence);
    reported(job!(Bug::OneThreadsDescriptor), FaultKind::Divergence);
}

#[test]
fn descriptors_are_checked() {
    let fault = reported(job!(Bug::Unswizzled), FaultKind::MatrixMisuse);
    assert!(fault.message.contains("without swizzle"), "{fault}");
    reported(job!(Bug::BeyondShared), FaultKind::OutOfBounds);
}

#[test]
fn a_thread_does_not_end_with_a_multiplication_in_flight() {
    let job = || {
        Job::new("leave", 1, 128, 32, SHARED, |_| {
            fill();
            device::fence_proxy_async(Space::Shared);
            device::barrier_sync(0, 128);
            device::wgmma_fence();
            device::wgmma_multiply(&INSTRUCTION, device::wgmma_ticket(), Left::Shared(descriptor(A)), descriptor(B), None);
            device::wgmma_commit();
        })
    };
    reported(job, FaultKind::InFlightAtExit);
}

#[test]
fn half_a_warpgroup_cannot_multiply() {
    let job = || {
        Job::new("half", 1, 64, 32, SHARED, |_| {
            device::wgmma_fence();
            device::wgmma_multiply(&INSTRUCTION, device::wgmma_ticket(), Left::Shared(descriptor(A)), descriptor(B), None);
        })
    };
    reported(job, FaultKind::MatrixMisuse);
}

/// The last write of an operand, which one thread does not wait for: the warp's reads are those of any of its lanes, so that some seeds report it.
fn one_does_not_wait(_: &[u64]) {
    const WRITTEN: u32 = SHARED;
    if thread() == 0 {
        device::mbarrier_init(WRITTEN, 1);
    }
    fill();
    device::fence_proxy_async(Space::Shared);
    device::barrier_sync(0, 128);
    if thread() == 127 {
        shared_store(place(B, 0, 0), 0);
        device::fence_proxy_async(Space::Shared);
        device::mbarrier_arrive(WRITTEN);
    }
    if thread() != 37 {
        device::mbarrier_wait_parity(WRITTEN, 0);
    }
    let ticket = device::wgmma_ticket();
    for _ in 0..16 {
        device::wgmma_fence();
        device::wgmma_multiply(&INSTRUCTION, ticket, Left::Shared(descriptor(A)), descriptor(B), None);
        device::wgmma_commit();
        device::wgmma_wait(0);
    }
    device::wgmma_publish(ticket, &mut [0.0; COLUMNS as usize / 2]);
}

#[test]
fn a_lane_that_has_not_waited_is_found_by_many_seeds() {
    let runs = (0..64).map(|seed| Job::new("one", 1, 128, 64, SHARED + 16, one_does_not_wait).run(Options::check(seed)));
    let faults: Vec<_> = runs.filter_map(Result::err).collect();
    assert!(faults.iter().all(|fault| fault.kind == FaultKind::Race && fault.to_string().contains("thread (37, 0, 0)")), "{faults:?}");
    assert!(faults.len() > 10, "{} of 64 seeds report it", faults.len());
}
