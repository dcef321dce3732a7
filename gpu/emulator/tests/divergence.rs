//! Lanes that meet: at one line, or in masks of their own.

mod common;
use common::*;
use oxtile_emulator::{FaultKind, Options, ShuffleMode, device};

#[test]
fn divergence_names_both_lines() {
    #[expect(clippy::if_same_then_else, reason = "two lines is the bug")]
    fn split(_: &[u64]) {
        if device::lane() < 16 {
            device::warp_sync(u32::MAX);
        } else {
            device::warp_sync(u32::MAX);
        }
    }
    let fault = reported(job(split), FaultKind::Divergence);
    assert_eq!(fault.involved.len(), 2, "{fault}");
    assert_ne!(fault.involved[0].location.line(), fault.involved[1].location.line());
    let fault = reported(
        job(|_| {
            if device::lane() != 3 {
                device::warp_sync(u32::MAX);
            }
        }),
        FaultKind::Divergence,
    );
    assert!(fault.to_string().contains("0x00000008"), "{fault}");
    let read_outside = |_: &[u64]| {
        if device::lane() < 4 {
            device::shuffle(0xf, ShuffleMode::Index, 0, 7, 0x1f);
        }
    };
    reported(job(read_outside), FaultKind::Divergence);
}

/// A lane that goes around a collective is at the next barrier, or at none: the others wait, which is no deadlock by a wrong count.
#[test]
fn a_lane_around_a_collective_diverges() {
    fn around(_: &[u64]) {
        if thread() != 5 {
            device::shuffle(u32::MAX, ShuffleMode::Butterfly, 1, 16, 0x1f);
        }
        device::barrier_sync(0, 64);
    }
    let text = reported(job(around), FaultKind::Divergence).to_string();
    for part in [
        "divergence: threads wait at a collective or barrier for others",
        "lanes 0x00000020 missing",
        "threads 5, 32..64: barrier 0",
        "no branch around it",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert_eq!(job(around)().run(Options::fast()).unwrap_err().kind, FaultKind::Divergence);
}

#[test]
fn a_thread_that_ends_before_a_barrier_diverges() {
    fn early(_: &[u64]) {
        if thread() < 40 {
            device::barrier_sync(0, 64);
        }
    }
    let text = reported(job(early), FaultKind::Divergence).to_string();
    for part in ["threads 0..40: barrier 0, 40 of 64 threads arrived", "threads 40..64: have ended"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

/// The lane that is missing waits for an mbarrier: the deadlock is there.
#[test]
fn lanes_of_a_warp_at_two_block_barriers_diverge() {
    #[expect(clippy::if_same_then_else, reason = "two lines is the bug")]
    fn split(_: &[u64]) {
        if thread().is_multiple_of(2) {
            device::barrier_sync(0, 64);
        } else {
            device::barrier_sync(0, 64);
        }
    }
    let text = reported(job(split), FaultKind::Divergence).to_string();
    for part in ["meet at different lines in one phase of barrier 0", "waits here", "mend: take the barrier out of the branch"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(text.matches("divergence.rs:").count(), 2, "{text}");
}

#[test]
fn a_race_names_the_barrier_that_a_thread_goes_around() {
    fn around(_: &[u64]) {
        shared_store(4 * thread(), 1);
        if thread() < 32 {
            device::barrier_sync(0, 64);
        }
        shared_load(4 * (63 - thread()));
    }
    // The policy under which warp 0 waits before warp 1 reads.
    let texts = (0..32).filter_map(|seed| job(around)().run(Options::check(seed)).err()).map(|fault| fault.to_string());
    let part = "; threads 0..32 wait at the barrier at gpu/emulator/tests/divergence.rs:";
    assert!(texts.clone().any(|text| text.contains(part)), "{:?}", texts.collect::<Vec<_>>());
}

#[test]
fn warps_may_come_to_a_barrier_from_different_lines() {
    #[expect(clippy::if_same_then_else, reason = "each warp has its own")]
    fn by_warp(_: &[u64]) {
        if thread() < 32 {
            device::barrier_sync(0, 64);
        } else {
            device::barrier_sync(0, 64);
        }
    }
    silent(job(by_warp), |_| ());
}

#[test]
fn a_lane_that_waits_for_an_mbarrier_does_not_diverge() {
    fn held(_: &[u64]) {
        if thread() == 0 {
            device::mbarrier_init(0, 1);
            device::mbarrier_wait_parity(0, 0);
        }
        device::barrier_sync(0, 64);
    }
    reported(job(held), FaultKind::Deadlock);
}

/// The lanes that are missing at the shuffle wait at a barrier, for threads that wait for an mbarrier: all of them may come yet, and the mbarrier is the cause.
#[test]
fn lanes_that_wait_for_those_that_wait_do_not_diverge() {
    fn held(_: &[u64], arrives: bool) {
        if thread() == 0 {
            device::mbarrier_init(0, 1);
        }
        device::barrier_sync(0, 96);
        match thread() {
            0..16 => {}
            16..64 => device::barrier_sync(1, 64),
            thread @ 64..80 => {
                match thread {
                    64 if arrives => device::mbarrier_arrive(0),
                    _ => device::mbarrier_wait_parity(0, 0),
                }
                device::barrier_sync(1, 64);
            }
            _ => {}
        }
        if thread() < 32 {
            device::shuffle(u32::MAX, ShuffleMode::Butterfly, 1, 16, 0x1f);
        }
    }
    silent(|| Job::new("held", 1, 96, 4, 256, |a| held(a, true)), |_| ());
    reported(|| Job::new("held", 1, 96, 4, 256, |a| held(a, false)), FaultKind::Deadlock);
}

/// No thread has left the others' way: one of the numbers is wrong.
#[test]
fn barriers_of_different_numbers_are_a_deadlock() {
    let text = reported(job(|_| device::barrier_sync(thread() / 32, 64)), FaultKind::Deadlock).to_string();
    assert!(text.contains("a barrier of the same number"), "{text}");
    // A warp that goes around a shuffle to the barrier has parted, and so has one that ends.
    let around = |_: &[u64]| match thread() {
        0..16 => _ = device::shuffle(u32::MAX, ShuffleMode::Butterfly, 1, 16, 0x1f),
        16..32 => device::barrier_sync(1, 64),
        _ => device::barrier_sync(0, 64),
    };
    reported(job(around), FaultKind::Divergence);
}

#[test]
fn lanes_of_disjoint_masks_may_diverge() {
    fn halves(arguments: &[u64]) {
        let lane = device::lane();
        let sum = if lane < 16 {
            device::reduce(0xffff, oxtile_emulator::ReduceOp::Add, lane)
        } else {
            device::reduce(0xffff_0000, oxtile_emulator::ReduceOp::Add, lane)
        };
        store(arguments[1] + u64::from(lane) * 4, sum);
    }
    silent(|| Job::new("halves", 1, 32, 32, 0, halves), |out| assert_eq!((out[0], out[31]), (120, 376)));
}

/// As many masks at once as lanes can wait in: sixteen pairs, all of which wait before the first is complete.
#[test]
fn every_lane_may_wait_in_a_mask_of_its_own() {
    fn pairs(arguments: &[u64]) {
        let lane = device::lane();
        let mask = 1 << lane | 1 << (lane ^ 16);
        let other = device::shuffle(mask, ShuffleMode::Butterfly, lane, 16, 0x1f);
        device::warp_sync(1 << lane);
        let all_named = device::vote(mask, oxtile_emulator::VoteMode::Ballot, true) == mask;
        store(arguments[1] + u64::from(lane) * 4, other + 100 * u32::from(all_named));
    }
    silent(|| Job::new("pairs", 1, 32, 32, 0, pairs), |out| assert!((0..32).all(|lane| out[lane] == (lane as u32 ^ 16) + 100)));
}

/// Lane 0 waits for lane 1, which waits for both others.
#[test]
fn lanes_that_wait_for_each_other_in_two_masks_diverge() {
    let crossed = |_: &[u64]| device::warp_sync(if device::lane() == 0 { 0b11 } else { 0b111 });
    let text = reported(|| Job::new("crossed", 1, 3, 4, 0, crossed), FaultKind::Divergence).to_string();
    assert!(text.contains("of mask 0x00000003") && text.contains("of mask 0x00000007"), "{text}");
}

/// Lane 1 meets lane 2, then lane 0, which may wait for it already.
#[test]
fn a_lane_may_meet_others_on_its_way() {
    fn chain(arguments: &[u64]) {
        let lane = device::lane();
        let sum = |mask| device::reduce(mask, oxtile_emulator::ReduceOp::Add, lane);
        let late = if lane > 0 { sum(0b110) } else { 0 };
        let early = if lane < 2 { sum(0b11) } else { 0 };
        store(arguments[1] + u64::from(lane) * 4, 10 * late + early);
    }
    silent(|| Job::new("chain", 1, 3, 3, 0, chain), |out| assert_eq!(out, [1, 31, 30]));
}
