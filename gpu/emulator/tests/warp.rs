//! Warp operations and atomics against their definitions.

mod common;
use common::*;
use oxtile_emulator::{Atomic, AtomicOp, Group, ReduceOp, ShuffleMode, Space, VoteMode, device};

/// Runs a function of the lane over one warp and returns its results.
fn lanes(body: fn(&[u64])) -> Vec<u32> {
    let job = Job::new("lanes", 1, 32, 32, 0, body);
    job.run(oxtile_emulator::Options::check(11)).unwrap();
    job.output()
}

fn result(arguments: &[u64], value: u32) {
    store(arguments[1] + u64::from(device::lane()) * 4, value);
}

fn shuffled(mode: ShuffleMode, argument: u32, clamp: u32) -> u32 {
    device::shuffle(u32::MAX, mode, device::lane() * 10, argument, clamp)
}

#[test]
fn shuffles_clamp_and_segment() {
    let expect = |body: fn(&[u64]), lane: fn(u32) -> u32| {
        let results = lanes(body);
        assert!((0..32).all(|i| results[i as usize] == lane(i) * 10), "{results:?}");
    };
    expect(|a| result(a, shuffled(ShuffleMode::Index, 5, 0x1f)), |_| 5);
    expect(|a| result(a, shuffled(ShuffleMode::Up, 3, 0)), |i| if i >= 3 { i - 3 } else { i });
    expect(|a| result(a, shuffled(ShuffleMode::Down, 3, 0x1f)), |i| if i + 3 < 32 { i + 3 } else { i });
    expect(|a| result(a, shuffled(ShuffleMode::Butterfly, 16, 0x1f)), |i| i ^ 16);
    // Segments of eight lanes: c = (32 - 8) << 8 | clamp.
    expect(|a| result(a, shuffled(ShuffleMode::Index, 2, 0x181f)), |i| i / 8 * 8 + 2);
    expect(|a| result(a, shuffled(ShuffleMode::Up, 1, 0x1800)), |i| if i % 8 >= 1 { i - 1 } else { i });
    expect(|a| result(a, shuffled(ShuffleMode::Down, 1, 0x181f)), |i| if i % 8 < 7 { i + 1 } else { i });
    // A butterfly past the segment's end reads the own lane.
    expect(|a| result(a, shuffled(ShuffleMode::Butterfly, 8, 0x1807)), |i| if i ^ 8 <= i { i ^ 8 } else { i });
}

#[test]
fn votes_reductions_and_matches() {
    assert!(
        lanes(|a| result(a, device::vote(u32::MAX, VoteMode::Ballot, device::lane().is_multiple_of(2)))).iter().all(|&v| v == 0x5555_5555)
    );
    assert!(lanes(|a| result(a, device::vote(u32::MAX, VoteMode::Any, device::lane() == 9))).iter().all(|&v| v == 1));
    assert!(lanes(|a| result(a, device::vote(u32::MAX, VoteMode::All, device::lane() != 9))).iter().all(|&v| v == 0));
    assert!(lanes(|a| result(a, device::vote(u32::MAX, VoteMode::Uniform, false))).iter().all(|&v| v == 1));
    assert!(lanes(|a| result(a, device::reduce(u32::MAX, ReduceOp::Add, device::lane()))).iter().all(|&v| v == 496));
    let smallest = lanes(|a| result(a, device::reduce(u32::MAX, ReduceOp::MinSigned, device::lane().wrapping_sub(7))));
    assert!(smallest.iter().all(|&v| v as i32 == -7));
    let equals = lanes(|a| result(a, device::match_any(u32::MAX, device::lane() % 3)));
    assert!((0..32).all(|i| equals[i] == (i % 3..32).step_by(3).fold(0, |bits, lane| bits | 1 << lane)));
}

#[test]
fn a_collective_computes_over_all_fragments() {
    fn body(arguments: &[u64]) {
        let mut lane = device::lane();
        device::collective(Group::Warp(u32::MAX), &mut lane, |all| {
            for (i, fragment) in all.iter_mut().enumerate() {
                assert_eq!(**fragment, i as u32);
                **fragment = 31 - i as u32;
            }
        });
        store(arguments[1] + u64::from(thread()) * 4, lane);
        let mut sum = thread();
        device::collective(Group::Warpgroup, &mut sum, |all| {
            let total = all.iter().map(|fragment| **fragment).sum();
            all.iter_mut().for_each(|fragment| **fragment = total);
        });
        assert_eq!(sum, if thread() < 128 { (0..128).sum() } else { (128..256).sum::<u32>() });
    }
    let right = |out: &[u32]| assert!(out.iter().enumerate().all(|(i, &v)| v as usize == 31 - i % 32));
    silent(|| Job::new("collective", 1, 256, 256, 0, body), right);
}

#[test]
fn atomics_compute_what_they_say() {
    fn body(arguments: &[u64]) {
        let at = arguments[1];
        let apply = |op, width, operand: i64, compare| {
            device::atomic(Space::Global, at, Atomic { compare, ..Atomic::relaxed(op, width, operand as u64) })
        };
        assert_eq!(apply(AtomicOp::Add, 8, 5, 0), 0);
        assert_eq!(apply(AtomicOp::MinSigned, 8, -3, 0), 5);
        assert_eq!(apply(AtomicOp::MaxSigned, 8, 2, 0) as i64, -3);
        assert_eq!(apply(AtomicOp::Exchange, 8, -1, 0), 2);
        assert_eq!(apply(AtomicOp::And, 4, 0xf0, 0), 0xffff_ffff);
        assert_eq!(apply(AtomicOp::Or, 4, 0x0f, 0), 0xf0);
        assert_eq!(apply(AtomicOp::Xor, 4, 0xf0, 0), 0xff);
        assert_eq!(apply(AtomicOp::CompareAndSwap, 4, 9, 8), 0x0f);
        assert_eq!(apply(AtomicOp::CompareAndSwap, 4, 9, 0x0f), 0x0f);
        assert_eq!(apply(AtomicOp::Max, 4, 3, 0), 9);
        assert_eq!(apply(AtomicOp::Min, 4, 3, 0), 9);
    }
    silent(|| Job::new("atomics", 1, 1, 2, 0, body), |out| assert_eq!(out, [3, u32::MAX]));
}

/// Bits of a sum's addends, its value in global memory and its value in shared memory.
const SUMS: [[u32; 4]; 8] = [
    [0x0000_0001, 0x0000_0001, 0x0000_0000, 0x0000_0002],
    // A subnormal addend of a normal sum.
    [0x0080_0000, 0x0000_0001, 0x0080_0000, 0x0080_0001],
    [0x0000_0001, 0x0080_0000, 0x0080_0000, 0x0080_0001],
    // A subnormal sum of normal addends, of either sign.
    [0x0080_0001, 0x8080_0000, 0x0000_0000, 0x0000_0001],
    [0x0080_0000, 0x8080_0001, 0x8000_0000, 0x8000_0001],
    [0x8000_0001, 0x8000_0001, 0x8000_0000, 0x8000_0002],
    [0x8000_0001, 0x0000_0000, 0x0000_0000, 0x8000_0001],
    // To nearest even.
    [0x3f80_0001, 0x3380_0000, 0x3f80_0002, 0x3f80_0002],
];

#[test]
fn sums_are_flushed_in_global_memory_only() {
    fn body(arguments: &[u64]) {
        for (i, [a, b, ..]) in (0u32..).zip(SUMS) {
            let global = arguments[1] + u64::from(i) * 4;
            let add = |space, at| device::atomic(space, at, Atomic::relaxed(AtomicOp::AddF32, 4, b.into()));
            store(global, a);
            shared_store(i * 4, a);
            assert_eq!([add(Space::Global, global), add(Space::Shared, u64::from(i) * 4)], [u64::from(a); 2]);
            store(global + 32, shared_load(i * 4));
        }
    }
    let check = |out: &[u32]| {
        let [global, shared] = [2, 3].map(|column| SUMS.map(|sum| sum[column]));
        assert_eq!(out, [global, shared].concat());
    };
    silent(|| Job::new("sums", 1, 1, 16, 32, body), check);
}

#[test]
fn bulk_sums_are_flushed() {
    fn body(arguments: &[u64]) {
        for (i, [a, b, ..]) in (0u32..).zip(SUMS) {
            store(arguments[1] + u64::from(i) * 4, a);
            shared_store(i * 4, b);
        }
        device::fence_proxy_async(Space::Global);
        device::fence_proxy_async(Space::Shared);
        device::bulk_reduce_add_f32(arguments[1], 0, 32);
        device::bulk_commit();
        device::bulk_wait(0, false);
    }
    silent(|| Job::new("bulk_sums", 1, 1, 8, 32, body), |out| assert_eq!(out, SUMS.map(|sum| sum[2])));
}
