//! Loads, stores, atomics and fences of one thread.

use crate::atomic::Atomic;
use crate::block::Block;
use crate::cluster;
use crate::cost::Operation;
use crate::detector::Detector;
use crate::fault::FaultKind;
use crate::mbarrier;
use crate::memory::Allocation;
use crate::order::{AtomicOp, ReadOrder, Scope, Space, WriteOrder};
use crate::schedule::What;
use crate::shadow::Access;
use crate::shadow::Manner;
use crate::site::Site;
use crate::thread::{Thread, Waiting};
use crate::words;
use crate::worker::{READ, WRITE};
use std::sync::atomic::{self, Ordering};

#[inline(always)]
fn locate(thread: &Thread, slot: usize, address: u64, bytes: u64, site: Site) -> (&Allocation, usize) {
    if !address.is_multiple_of(bytes) {
        misaligned_global(thread, address, bytes, site);
    }
    match thread.worker().locate(slot, address, bytes) {
        Some(allocation) => (allocation, (address - allocation.start) as usize),
        None => missed(thread, slot, address, bytes, site),
    }
}

#[cold]
fn missed(thread: &Thread, slot: usize, address: u64, bytes: u64, site: Site) -> ! {
    let (kind, place) = thread.worker().describe_miss(address, bytes);
    let verb = if slot == READ { "a read of" } else { "a write of" };
    let mend = match kind {
        FaultKind::UseAfterFree => "free it after the last launch that uses it",
        _ => "keep the index inside the tensor, or allocate as much as the kernel covers",
    };
    thread.fail(kind, site, format!("{verb} {place}"), mend)
}

const MEND_ALIGNMENT: &str = "align the address to the size of the access, or use a narrower one";

#[cold]
fn misaligned_global(thread: &Thread, address: u64, bytes: u64, site: Site) -> ! {
    let worker = thread.worker();
    let place = worker.locate(READ, address, 1).map_or_else(|| worker.describe_miss(address, bytes).1, |a| worker.describe(a, address));
    thread.fail(FaultKind::Misaligned, site, format!("an access of {bytes} bytes at {place}"), MEND_ALIGNMENT)
}

#[cold]
fn misaligned_shared(thread: &Thread, offset: u32, bytes: u32, site: Site) -> ! {
    let message = format!("an access of {bytes} bytes at {}", thread.worker().shared.place(offset, 1));
    thread.fail(FaultKind::Misaligned, site, message, MEND_ALIGNMENT)
}

#[inline(always)]
fn check_shared(thread: &Thread, offset: u32, bytes: u32, site: Site) {
    if !offset.is_multiple_of(bytes) {
        misaligned_shared(thread, offset, bytes, site);
    }
    if u64::from(offset) + u64::from(bytes) > u64::from(thread.block().shared_bytes()) {
        beyond_shared(thread, offset, bytes, site);
    }
}

#[cold]
fn beyond_shared(thread: &Thread, offset: u32, bytes: u32, site: Site) -> ! {
    let message =
        format!("{bytes} bytes at offset {offset} of the block's shared memory, which has {} bytes", thread.block().shared_bytes());
    let mend = match thread.block().shared_bytes() {
        0 => "name the layout that the kernel claims: #[kernel(shared = ...)]",
        _ => "keep the offset inside the shared memory, or name a larger layout: #[kernel(shared = ...)]",
    };
    thread.fail(FaultKind::OutOfBounds, site, message, mend)
}

#[inline(always)]
pub(crate) fn global_read<const N: usize>(thread: &Thread, address: u64, order: ReadOrder, site: Site) -> [u8; N] {
    const { assert!(N.is_power_of_two() && N <= 32) }
    let (allocation, offset) = locate(thread, READ, address, N as u64, site);
    if let Some(detector) = thread.detector() {
        check_global_read(thread, detector, allocation, address, N as u64, order, site);
    } else if let ReadOrder::Relaxed(_) | ReadOrder::Acquire(_) = order {
        poll_again(thread, Some(address), site);
    }
    let value = words::load(allocation.words(), offset);
    if let ReadOrder::Acquire(_) = order {
        atomic::fence(Ordering::Acquire);
    }
    value
}

#[inline(always)]
pub(crate) fn global_write<const N: usize>(thread: &Thread, address: u64, value: [u8; N], order: WriteOrder, site: Site) {
    const { assert!(N.is_power_of_two() && N <= 32) }
    let (allocation, offset) = locate(thread, WRITE, address, N as u64, site);
    if let WriteOrder::Release(_) = order {
        atomic::fence(Ordering::Release);
    }
    if let Some(detector) = thread.detector() {
        check_global_write(thread, detector, allocation, address, N as u64, order, site);
    }
    words::store(allocation.words(), offset, value);
    thread.worker().written(allocation, offset as u64, N as u64);
}

#[inline(always)]
pub(crate) fn shared_read<const N: usize>(thread: &Thread, offset: u32, site: Site) -> [u8; N] {
    const { assert!(N.is_power_of_two() && N <= 16) }
    check_shared(thread, offset, N as u32, site);
    if let Some(detector) = thread.detector() {
        check_shared_access(thread, detector, offset, N as u32, false, site);
    }
    let mut value = [0; N];
    value.copy_from_slice(&thread.block().shared()[offset as usize..][..N]);
    value
}

#[inline(always)]
pub(crate) fn shared_write<const N: usize>(thread: &Thread, offset: u32, value: [u8; N], site: Site) {
    const { assert!(N.is_power_of_two() && N <= 16) }
    check_shared(thread, offset, N as u32, site);
    if let Some(detector) = thread.detector() {
        check_shared_access(thread, detector, offset, N as u32, true, site);
    }
    thread.block().shared()[offset as usize..][..N].copy_from_slice(&value);
}

/// A store to the shared memory of the block of `rank` in the thread's cluster, which has as much as its own.
pub(crate) fn cluster_write<const N: usize>(thread: &Thread, offset: u32, rank: u32, value: [u8; N], site: Site) {
    const { assert!(N.is_power_of_two() && N <= 16) }
    check_shared(thread, offset, N as u32, site);
    if thread.detector().is_some() {
        // Before the other block is looked up: it may end meanwhile.
        preempt(thread, false, None, site);
    }
    let peer = cluster::peer(thread, rank, site);
    if let (Some(detector), Some(theirs)) = (thread.detector(), &peer.detector) {
        let access = check_plain(thread, &peer, offset, N as u32, true, site);
        thread.judge(detector.cluster_access(thread.worker(), thread.number, theirs, &access), site);
        enter_cost(thread, detector, Operation::SharedWrite, &access);
    }
    peer.shared()[offset as usize..][..N].copy_from_slice(&value);
}

/// Four sums of `f32`, each of which is atomic, by one instruction on 16 bytes.
pub(crate) fn add_vector(thread: &Thread, address: u64, values: [f32; 4], site: Site) {
    if !address.is_multiple_of(16) {
        misaligned_global(thread, address, 16, site);
    }
    for (place, value) in (address..).step_by(4).zip(values) {
        global_atomic(thread, place, &Atomic::relaxed(AtomicOp::AddF32, 4, value.to_bits().into()), site);
    }
}

pub(crate) fn atomic(thread: &Thread, space: Space, address: u64, operation: &Atomic, site: Site) -> u64 {
    let bytes = u64::from(operation.width);
    if !matches!(bytes, 4 | 8) || (operation.op == AtomicOp::AddF32 && bytes != 4) {
        let message = format!("{:?} of {bytes} bytes", operation.op);
        thread.fail(FaultKind::Misaligned, site, message, "atomics are 4 or 8 bytes wide, f32 sums 4");
    }
    match space {
        Space::Global => global_atomic(thread, address, operation, site),
        Space::Shared => {
            let offset = u32::try_from(address).unwrap_or(u32::MAX);
            check_shared(thread, offset, u32::from(operation.width), site);
            if let Some(detector) = thread.detector() {
                check_not_mbarrier(thread, thread.block(), offset, u32::from(operation.width), site);
                check_atomic(thread, detector, None, address, operation, site);
            } else {
                poll_again(thread, None, site);
            }
            let slot = &mut thread.block().shared()[offset as usize..][..bytes as usize];
            let mut word = [0; 8];
            word[..slot.len()].copy_from_slice(slot);
            let old = u64::from_le_bytes(word);
            let new = operation.apply(space, old);
            slot.copy_from_slice(&new.to_le_bytes()[..slot.len()]);
            if new != old {
                thread.worker().productive();
            }
            old
        }
    }
}

fn global_atomic(thread: &Thread, address: u64, operation: &Atomic, site: Site) -> u64 {
    let bytes = u64::from(operation.width);
    let (allocation, offset) = locate(thread, WRITE, address, bytes, site);
    if let Some(detector) = thread.detector() {
        check_atomic(thread, detector, Some(allocation), address, operation, site);
    } else {
        poll_again(thread, (operation.op == AtomicOp::CompareAndSwap).then_some(address), site);
    }
    let (releases, acquires) = operation.edges();
    if releases {
        atomic::fence(Ordering::Release);
    }
    let shift = offset % 8 * 8;
    let mask = if bytes == 8 { u64::MAX } else { 0xffff_ffff << shift };
    let old = words::modify(&allocation.words()[offset / 8], mask, |old| operation.apply(Space::Global, (old & mask) >> shift) << shift);
    if acquires {
        atomic::fence(Ordering::Acquire);
    }
    let old = (old & mask) >> shift;
    // One that leaves the word as it was is how a thread polls; extremes and sums of `f32` are work all the same.
    let is_work = matches!(operation.op, AtomicOp::AddF32 | AtomicOp::Min | AtomicOp::Max | AtomicOp::MinSigned | AtomicOp::MaxSigned);
    if is_work || operation.apply(Space::Global, old) != old {
        thread.worker().written(allocation, offset as u64, bytes);
    }
    old
}

pub(crate) fn fence(thread: &Thread, scope: Scope, site: Site) {
    if !thread.worker().performs("fence", site) {
        return;
    }
    atomic::fence(Ordering::AcqRel);
    if let Some(detector) = thread.detector() {
        detector.fence(thread.number, scope);
    }
}

pub(crate) fn fence_proxy_async(thread: &Thread, space: Space, site: Site) {
    if let Some(detector) = thread.detector()
        && thread.worker().performs("fence_proxy_async", site)
    {
        detector.thread(thread.number).borrow_mut().view.fence_proxy(space);
    }
}

pub(crate) fn nanosleep(thread: &Thread, _nanoseconds: u32, site: Site) {
    thread.give_way(Waiting::Sleep, site);
}

/// Strong loads and atomics after which a thread lets others run: it may poll several words in turn, or by an operation that may be work.
const LONGEST_POLL: u32 = 64;

/// Fast mode: lets others run before a thread reads again what it read last with a strong operation, which is how it polls, and after many such operations.
fn poll_again(thread: &Thread, address: Option<u64>, site: Site) {
    let again = address.is_some_and(|address| thread.polled.replace(address) == address);
    let count = thread.strong.get() + 1;
    thread.strong.set(count);
    if again || count == LONGEST_POLL {
        thread.give_way(Waiting::Turn, site);
    }
}

/// Check mode: lets other threads run now and then, before an access that they might conflict with. A strong load may poll its address.
fn preempt(thread: &Thread, strong: bool, load: Option<u64>, site: Site) {
    let polls = load.is_some_and(|address| thread.polled.replace(address) == address);
    if thread.turn_ends(if strong { 2 } else { 16 }, polls) {
        // Where turns are given and none ends here, a thread that runs long counts as one that polls.
        let idle = thread.worker().turn_end.get().map_or(strong, |end| end == u32::MAX);
        thread.give_way(if idle { Waiting::Turn } else { Waiting::Nothing }, site);
    }
}

/// What a story tells of an access.
fn deed(verb: &'static str, space: Space, access: &Access) -> What {
    What::Access { verb, space, address: access.address, bytes: access.bytes as u32 }
}

/// Whether an access keeps its order: a mutant makes one between devices relaxed.
fn is_kept(thread: &Thread, order: &'static str, scope: Scope, site: Site) -> bool {
    scope != Scope::System || thread.worker().performs(order, site)
}

fn enter_cost(thread: &Thread, detector: &Detector, operation: Operation, access: &Access) {
    if thread.worker().explained.is_none() {
        return;
    }
    let lanes = (thread.block().threads.len() as u32 - (thread.number & !31)).min(32);
    let mut totals = thread.worker().totals.borrow_mut();
    detector.costs.borrow_mut().enter(&mut totals, thread.number, lanes, operation, access);
}

#[cold]
fn check_global_read(
    thread: &Thread,
    detector: &Detector,
    allocation: &Allocation,
    address: u64,
    bytes: u64,
    order: ReadOrder,
    site: Site,
) {
    let (manner, strong) = match order {
        ReadOrder::ReadOnly => (Manner::ReadOnly, None),
        ReadOrder::Weak => (Manner::Weak, None),
        ReadOrder::Relaxed(scope) => (Manner::Strong(scope), Some((scope, false))),
        ReadOrder::Acquire(scope) => (Manner::Strong(scope), Some((scope, is_kept(thread, "acquire", scope, site)))),
    };
    preempt(thread, strong.is_some(), strong.map(|_| address), site);
    let access = Access { address, bytes, writes: false, reads: true, manner, site };
    thread.worker().note(site, || deed("read", Space::Global, &access));
    thread.judge(detector.global_access(thread.worker(), thread.number, allocation, &access), site);
    match strong {
        Some((scope, acquire)) => detector.observe(thread.worker().memory(), thread.number, (Space::Global, address), scope, acquire),
        None => enter_cost(thread, detector, Operation::GlobalRead, &access),
    }
}

#[cold]
fn check_global_write(
    thread: &Thread,
    detector: &Detector,
    allocation: &Allocation,
    address: u64,
    bytes: u64,
    order: WriteOrder,
    site: Site,
) {
    let (manner, scope, release) = match order {
        WriteOrder::Weak => (Manner::Weak, None, false),
        WriteOrder::Relaxed(scope) => (Manner::Strong(scope), Some(scope), false),
        WriteOrder::Release(scope) => (Manner::Strong(scope), Some(scope), is_kept(thread, "release", scope, site)),
    };
    preempt(thread, scope.is_some(), None, site);
    let access = Access { address, bytes, writes: true, reads: false, manner, site };
    thread.worker().note(site, || deed("write", Space::Global, &access));
    thread.judge(detector.global_access(thread.worker(), thread.number, allocation, &access), site);
    detector.publish(thread.worker().memory(), thread.number, (Space::Global, address), scope, release, false);
    if scope.is_none() {
        enter_cost(thread, detector, Operation::GlobalWrite, &access);
    }
}

#[cold]
fn check_shared_access(thread: &Thread, detector: &Detector, offset: u32, bytes: u32, writes: bool, site: Site) {
    preempt(thread, false, None, site);
    let access = check_plain(thread, thread.block(), offset, bytes, writes, site);
    thread.judge(detector.shared_access(thread.worker(), thread.number, &access), site);
    if writes {
        detector.publish(thread.worker().memory(), thread.number, (Space::Shared, access.address), None, false, false);
    }
    let operation = if writes { Operation::SharedWrite } else { Operation::SharedRead };
    enter_cost(thread, detector, operation, &access);
}

/// A plain access to the shared memory of a block, in which no mbarrier lies there.
#[inline(always)]
fn check_plain(thread: &Thread, target: &Block, offset: u32, bytes: u32, writes: bool, site: Site) -> Access {
    check_not_mbarrier(thread, target, offset, bytes, site);
    let access = Access { address: offset.into(), bytes: bytes.into(), writes, reads: !writes, manner: Manner::Weak, site };
    thread.worker().note(site, || deed(if writes { "write" } else { "read" }, Space::Shared, &access));
    access
}

fn check_not_mbarrier(thread: &Thread, target: &Block, offset: u32, bytes: u32, site: Site) {
    if let Some(at) = mbarrier::overlapping(target, offset, bytes) {
        let names = &thread.worker().shared;
        let message = format!("a plain access of {bytes} bytes at {}, where {} lies", names.place(offset, 1), names.mbarrier(at));
        thread.fail(FaultKind::MbarrierMisuse, site, message, "place it elsewhere, or invalidate the mbarrier first");
    }
}

#[cold]
fn check_atomic(thread: &Thread, detector: &Detector, allocation: Option<&Allocation>, address: u64, operation: &Atomic, site: Site) {
    preempt(thread, true, (operation.op == AtomicOp::CompareAndSwap).then_some(address), site);
    let manner = Manner::Strong(operation.scope);
    let access = Access { address, bytes: u64::from(operation.width), writes: true, reads: true, manner, site };
    thread.worker().note(site, || deed("atomic", if allocation.is_some() { Space::Global } else { Space::Shared }, &access));
    let (space, result) = match allocation {
        Some(allocation) => (Space::Global, detector.global_access(thread.worker(), thread.number, allocation, &access)),
        None => (Space::Shared, detector.shared_access(thread.worker(), thread.number, &access)),
    };
    thread.judge(result, site);
    let (releases, acquires) = operation.edges();
    detector.observe(thread.worker().memory(), thread.number, (space, address), operation.scope, acquires);
    detector.publish(thread.worker().memory(), thread.number, (space, address), Some(operation.scope), releases, true);
}
