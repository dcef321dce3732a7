//! A run that ends early unwinds its threads: device operations of their destructors do nothing, and harm nothing.

mod common;
use common::*;
use oxtile_emulator::{
    Atomic, AtomicOp, AtomicOrder, FaultKind, Group, Options, ReadOrder, ReduceOp, Scope, ShuffleMode, Space, VoteMode, WriteOrder, device,
};
use std::time::Duration;

/// Runs its function when the thread ends, and when it is unwound.
struct AtEnd<F: Fn()>(F);

impl<F: Fn()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Each way out of a kernel before its end: a fault, a panic, a deadlock, polling without end.
const ENDINGS: [(FaultKind, fn()); 4] = [
    (FaultKind::Trap, || {
        if thread() == 40 {
            device::trap();
        }
        device::barrier_sync(1, 64);
    }),
    (FaultKind::Panic, || {
        assert_ne!(thread(), 40);
        device::barrier_sync(1, 64);
    }),
    (FaultKind::Deadlock, || device::barrier_sync(1 + thread() / 32, 64)),
    (FaultKind::NoProgress, || {
        loop {
            device::nanosleep(10);
        }
    }),
];

/// What the destructors do.
const CLEANUPS: [fn(&[u64]); 4] = [access_memory, misuse, wait, copy];

/// Runs `cleanup` in the destructors of a job that ends in each way; the output must stay as it was.
fn harmless(cleanup: fn(&[u64])) {
    let cleanup = CLEANUPS.iter().position(|&other| std::ptr::fn_addr_eq(other, cleanup)).unwrap() as u64;
    for ending in 0..ENDINGS.len() as u64 {
        let job = || {
            let mut job = Job::new("unwound", 2, 64, 64, 256, |arguments| {
                let _at_end = AtEnd(|| CLEANUPS[arguments[2] as usize](arguments));
                ENDINGS[arguments[3] as usize].1();
            });
            job.launch = job.launch.clone().arguments(&[job.input, job.output, cleanup, ending]);
            job
        };
        let (kind, _) = ENDINGS[ending as usize];
        let runs = SEEDS.map(Options::check).chain([Options::fast()]);
        for options in runs {
            let job = job();
            let fault = job.run(Options { patience: Duration::ZERO, ..options }).unwrap_err();
            assert_eq!(fault.kind, kind, "{fault}");
            assert_eq!(job.output(), [0; 64]);
        }
    }
}

fn access_memory(arguments: &[u64]) {
    let at = u64::from(thread()) * 4;
    assert_eq!(device::global_read::<4>(arguments[0] + at, ReadOrder::Acquire(Scope::Device)), [0; 4]);
    store(arguments[1] + at, load(arguments[0] + at) + 1);
    device::global_write(arguments[1] + at, [1; 4], WriteOrder::Release(Scope::System));
    shared_store(thread() * 4, 1);
    assert_eq!(shared_load(thread() * 4), 0);
    let one = Atomic { order: AtomicOrder::AcquireRelease, ..Atomic::relaxed(AtomicOp::Add, 4, 1) };
    let add = |space, address| device::atomic(space, address, one);
    assert_eq!((add(Space::Global, arguments[1]), add(Space::Shared, 0)), (0, 0));
    device::fence(Scope::Device);
}

#[test]
fn memory_is_left_alone() {
    harmless(access_memory);
}

/// Accesses that would end a run that goes on.
fn misuse(arguments: &[u64]) {
    store(arguments[1] + (1 << 20), 1);
    store(arguments[1] + 1, 1);
    shared_store(4096, 1);
    device::barrier_sync(99, 1);
    device::mbarrier_init(4, 0);
    device::copy_async(3, 5, 7, 9);
    device::wgmma_multiply(&INSTRUCTION, 1, oxtile_emulator::wgmma::Left::Shared(0), 0, None);
    device::assume(false, "never");
}

#[test]
fn misuse_is_not_judged() {
    harmless(misuse);
}

const INSTRUCTION: oxtile_emulator::wgmma::Instruction = oxtile_emulator::wgmma::Instruction {
    columns: 16,
    formats: [oxtile_emulator::Format::Bf16; 2],
    left_mn_major: false,
    right_mn_major: false,
};

fn wait(_: &[u64]) {
    device::barrier_sync(0, 64);
    device::barrier_arrive(0, 64);
    device::warp_sync(u32::MAX);
    device::nanosleep(100);
    device::mbarrier_init(0, 1);
    device::fence_mbarrier_init();
    device::mbarrier_arrive(0);
    device::mbarrier_arrive_remote(0, 7);
    device::cluster_write(0, 7, [0; 16]);
    device::cluster_sync();
    device::mbarrier_arrive_expect_transaction(0, 16);
    device::mbarrier_expect_transaction(0, 16);
    device::mbarrier_wait_parity(0, 0);
    assert!(device::mbarrier_try_wait_parity(0, 0));
    device::mbarrier_invalidate(0);
    let mut fragment = 5;
    device::collective(Group::Warp(u32::MAX), &mut fragment, |_| unreachable!());
    let all = u32::MAX;
    assert_eq!(device::shuffle(all, ShuffleMode::Index, 7, 0, 0x1f), 7);
    assert_eq!(device::vote(all, VoteMode::Ballot, true), 0);
    assert_eq!(device::reduce(all, ReduceOp::Add, 7), 7);
    assert_eq!(device::match_any(all, 7), 0);
}

#[test]
fn nobody_waits() {
    harmless(wait);
}

fn copy(arguments: &[u64]) {
    device::copy_async(0, arguments[0], 16, 16);
    device::copy_async_commit();
    device::copy_async_wait(0);
    device::copy_async_mbarrier_arrive(0);
    device::bulk_load(0, arguments[0], 16, 64);
    device::bulk_store(arguments[1], 0, 16);
    device::bulk_reduce_add_f32(arguments[1], 0, 16);
    device::tensor_load(0, arguments[0], [0, 0], 64);
    device::tensor_load_multicast(0, arguments[0], [0, 0], 64, 3);
    device::tensor_store(arguments[0], [0, 0], 0);
    device::bulk_commit();
    device::bulk_wait(0, true);
    device::fence_proxy_async(Space::Global);
    device::wgmma_fence();
    device::wgmma_commit();
    device::wgmma_wait(device::wgmma_ticket());
    device::wgmma_publish(0, &mut [0.0; 8]);
}

#[test]
fn no_copy_begins() {
    harmless(copy);
}
