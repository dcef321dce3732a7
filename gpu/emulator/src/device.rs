//! What a kernel may do: free functions that act for the emulated thread now running.
//!
//! Each must be called from a kernel body under a [`GridRun`](crate::GridRun); elsewhere it panics. A misuse
//! ends the run with a [`Fault`](crate::Fault) that names the caller's source line.
//!
//! A run that ends early unwinds its threads, and their destructors may call these functions: they do nothing then.
//! Reads and votes give zero, shuffles and reductions the caller's value, a test of an mbarrier succeeds.

use crate::access;
use crate::async_copy::{self, Direction};
use crate::atomic::Atomic;
use crate::fault::FaultKind;
use crate::order::{AtomicOp, AtomicOrder, Group, ReadOrder, ReduceOp, Scope, ShuffleMode, Space, VoteMode, WriteOrder};
use crate::thread::{acting, current};
use crate::warp::Kind;
use crate::wgmma::{self, Format, Instruction, Left};
use crate::{barrier, cluster, collective, copy_group, mbarrier, mma, tensor_map};
use std::panic::Location;

/// This thread's index in its block (`%tid`).
#[track_caller]
#[inline]
pub fn thread_index() -> [u32; 3] {
    current().index
}

/// This block's index in the grid (`%ctaid`).
#[track_caller]
#[inline]
pub fn block_index() -> [u32; 3] {
    current().block().index
}

/// Threads of a block in each dimension (`%ntid`).
#[track_caller]
#[inline]
pub fn block_dimensions() -> [u32; 3] {
    current().worker().grid().launch.block
}

/// Blocks of the grid in each dimension (`%nctaid`).
#[track_caller]
#[inline]
pub fn grid_dimensions() -> [u32; 3] {
    current().worker().grid().launch.grid
}

/// This block's number in its cluster (`%cluster_ctarank`).
#[track_caller]
#[inline]
pub fn cluster_rank() -> u32 {
    current().block().rank
}

/// Waits for all threads of the cluster and orders their accesses (`barrier.cluster.arrive.release`,
/// `barrier.cluster.wait.acquire`).
#[track_caller]
#[inline]
pub fn cluster_sync() {
    let Some(thread) = acting() else { return };
    cluster::sync(thread, Location::caller());
}

/// This thread's lane in its warp (`%laneid`).
#[track_caller]
#[inline]
pub fn lane() -> u32 {
    current().lane()
}

/// This thread's warp in its block.
#[track_caller]
#[inline]
pub fn warp() -> u32 {
    current().warp_number()
}

/// The emulator's clock, in nanoseconds of emulated time (`%globaltimer`): it grows with every scheduling step.
#[track_caller]
#[inline]
pub fn step_clock() -> u64 {
    current().worker().steps.get()
}

/// Loads `N` (1, 2, 4, 8, 16 or 32) bytes at a global address that is a multiple of `N` (`ld.global`).
#[track_caller]
#[inline]
pub fn global_read<const N: usize>(address: u64, order: ReadOrder) -> [u8; N] {
    let Some(thread) = acting() else { return [0; N] };
    access::global_read(thread, address, order, Location::caller())
}

/// Stores `N` (1, 2, 4, 8, 16 or 32) bytes at a global address that is a multiple of `N` (`st.global`).
#[track_caller]
#[inline]
pub fn global_write<const N: usize>(address: u64, value: [u8; N], order: WriteOrder) {
    let Some(thread) = acting() else { return };
    access::global_write(thread, address, value, order, Location::caller());
}

/// Loads `N` (1, 2, 4, 8 or 16) bytes at an offset into the block's shared memory (`ld.shared`).
#[track_caller]
#[inline]
pub fn shared_read<const N: usize>(offset: u32) -> [u8; N] {
    let Some(thread) = acting() else { return [0; N] };
    access::shared_read(thread, offset, Location::caller())
}

/// Stores `N` (1, 2, 4, 8 or 16) bytes at an offset into the block's shared memory (`st.shared`).
#[track_caller]
#[inline]
pub fn shared_write<const N: usize>(offset: u32, value: [u8; N]) {
    let Some(thread) = acting() else { return };
    access::shared_write(thread, offset, value, Location::caller());
}

/// Reads, modifies and writes `width` (4 or 8) bytes in one step; returns what was there (`atom`). Sums of `f32` in global
/// memory take subnormal numbers for zeros of their sign, as the hardware does; those in shared memory keep them.
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "the operands of `atom`")]
#[inline]
pub fn atomic(space: Space, address: u64, op: AtomicOp, width: u8, operand: u64, compare: u64, order: AtomicOrder, scope: Scope) -> u64 {
    let Some(thread) = acting() else { return 0 };
    access::atomic(thread, space, address, &Atomic { op, width, operand, compare, order, scope }, Location::caller())
}

/// Waits until `threads` (a multiple of 32) threads arrived at named barrier `id` (0..16) (`barrier.sync`).
#[track_caller]
#[inline]
pub fn barrier_sync(id: u32, threads: u32) {
    let Some(thread) = acting() else { return };
    barrier::meet(thread, id, threads, true, Location::caller());
}

/// Arrives at named barrier `id` and goes on (`barrier.arrive`).
#[track_caller]
#[inline]
pub fn barrier_arrive(id: u32, threads: u32) {
    let Some(thread) = acting() else { return };
    barrier::meet(thread, id, threads, false, Location::caller());
}

/// Waits for the lanes of `mask` and orders their memory accesses (`bar.warp.sync`).
#[track_caller]
#[inline]
pub fn warp_sync(mask: u32) {
    let Some(thread) = acting() else { return };
    if thread.worker().performs("warp_sync", Location::caller()) {
        thread.block().warp(thread).meet(thread, mask, Kind::Sync, 0, 0, Location::caller());
    }
}

/// `shfl.sync`: `clamp` is the PTX operand c, the clamp value in bits 0..5, the segment mask in bits 8..13.
#[track_caller]
#[inline]
pub fn shuffle(mask: u32, mode: ShuffleMode, value: u32, lane_argument: u32, clamp: u32) -> u32 {
    let Some(thread) = acting() else { return value };
    let argument = lane_argument & 31 | clamp << 8;
    thread.block().warp(thread).meet(thread, mask, Kind::Shuffle(mode), value, argument, Location::caller())
}

/// `vote.sync` over the lanes of `mask`.
#[track_caller]
#[inline]
pub fn vote(mask: u32, mode: VoteMode, predicate: bool) -> u32 {
    let Some(thread) = acting() else { return 0 };
    thread.block().warp(thread).meet(thread, mask, Kind::Vote(mode), u32::from(predicate), 0, Location::caller())
}

/// `redux.sync` over the lanes of `mask`.
#[track_caller]
#[inline]
pub fn reduce(mask: u32, op: ReduceOp, value: u32) -> u32 {
    let Some(thread) = acting() else { return value };
    thread.block().warp(thread).meet(thread, mask, Kind::Reduce(op), value, 0, Location::caller())
}

/// `match.any.sync`: the lanes of `mask` whose value equals this lane's.
#[track_caller]
#[inline]
pub fn match_any(mask: u32, value: u32) -> u32 {
    let Some(thread) = acting() else { return 0 };
    thread.block().warp(thread).meet(thread, mask, Kind::MatchAny, value, 0, Location::caller())
}

/// A rendezvous of `group` at one call site: the last thread to come runs `compute` over all fragments, in
/// thread order; then all go on. What `ldmatrix`, `mma` and `wgmma` are built on. Orders no memory.
#[track_caller]
#[inline]
pub fn collective<T: 'static>(group: Group, fragment: &mut T, compute: impl FnOnce(&mut [&mut T])) {
    let Some(thread) = acting() else { return };
    collective::meet(thread, group, fragment, compute, Location::caller());
}

/// Makes an mbarrier of `count` arrivals a phase at a shared offset, a multiple of 8 (`mbarrier.init`).
#[track_caller]
#[inline]
pub fn mbarrier_init(offset: u32, count: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::init(thread, offset, count, Location::caller());
}

/// Ends an mbarrier; its bytes are plain memory again (`mbarrier.inval`).
#[track_caller]
#[inline]
pub fn mbarrier_invalidate(offset: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::invalidate(thread, offset, Location::caller());
}

/// Arrives once at the current phase (`mbarrier.arrive`, release at block scope).
#[track_caller]
#[inline]
pub fn mbarrier_arrive(offset: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::arrive(thread, offset, Location::caller());
}

/// Arrives once at the mbarrier at the same offset of the block of `rank` in this cluster
/// (`mapa`, `mbarrier.arrive.shared::cluster`).
#[track_caller]
#[inline]
pub fn mbarrier_arrive_remote(offset: u32, rank: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::arrive_remote(thread, offset, rank, Location::caller());
}

/// Announces `bytes` of asynchronous copies and arrives (`mbarrier.arrive.expect_tx`).
#[track_caller]
#[inline]
pub fn mbarrier_arrive_expect_transaction(offset: u32, bytes: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::expect(thread, offset, bytes, true, Location::caller());
}

/// Announces `bytes` of asynchronous copies without arriving (`mbarrier.expect_tx`).
#[track_caller]
#[inline]
pub fn mbarrier_expect_transaction(offset: u32, bytes: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::expect(thread, offset, bytes, false, Location::caller());
}

/// Whether the phase of `parity` is complete; acquires if so (`mbarrier.try_wait.parity`).
#[track_caller]
#[inline]
pub fn mbarrier_try_wait_parity(offset: u32, parity: u32) -> bool {
    let Some(thread) = acting() else { return true };
    mbarrier::poll(thread, offset, parity, Location::caller())
}

/// Waits until the phase of `parity` is complete and acquires.
#[track_caller]
#[inline]
pub fn mbarrier_wait_parity(offset: u32, parity: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::wait(thread, offset, parity, Location::caller());
}

/// Queues a copy of `bytes` (4, 8 or 16), of which `valid_bytes` are read and the rest zero (`cp.async`).
#[track_caller]
#[inline]
pub fn copy_async(destination: u32, source: u64, bytes: u32, valid_bytes: u32) {
    let Some(thread) = acting() else { return };
    async_copy::copy_async(thread, destination, source, bytes, valid_bytes, Location::caller());
}

/// Closes this thread's group of `cp.async` (`cp.async.commit_group`).
#[track_caller]
#[inline]
pub fn copy_async_commit() {
    let Some(thread) = acting() else { return };
    copy_group::commit(thread, copy_group::Kind::Copy, Location::caller());
}

/// Waits until at most `pending` of this thread's groups are in flight (`cp.async.wait_group`).
#[track_caller]
#[inline]
pub fn copy_async_wait(pending: u32) {
    let Some(thread) = acting() else { return };
    copy_group::wait(thread, copy_group::Kind::Copy, pending, false, Location::caller());
}

/// Arrives at an mbarrier once this thread's `cp.async` so far are done (`cp.async.mbarrier.arrive.noinc`).
#[track_caller]
#[inline]
pub fn copy_async_mbarrier_arrive(offset: u32) {
    let Some(thread) = acting() else { return };
    async_copy::arrive(thread, offset, Location::caller());
}

/// Queues a bulk copy from global to shared memory; completes `bytes` on the mbarrier
/// (`cp.async.bulk.shared::cta.global.mbarrier`). Addresses and size are multiples of 16.
#[track_caller]
#[inline]
pub fn bulk_load(destination: u32, source: u64, bytes: u32, mbarrier: u32) {
    let Some(thread) = acting() else { return };
    async_copy::bulk(thread, Direction::Load, destination, source, bytes, Some(mbarrier), Location::caller());
}

/// Queues a bulk copy from shared to global memory in this thread's bulk group (`cp.async.bulk.global.shared::cta`).
#[track_caller]
#[inline]
pub fn bulk_store(destination: u64, source: u32, bytes: u32) {
    let Some(thread) = acting() else { return };
    async_copy::bulk(thread, Direction::Store, source, destination, bytes, None, Location::caller());
}

/// Queues a bulk sum of `f32` into global memory, subnormal numbers taken for zeros (`cp.reduce.async.bulk.add.f32`).
#[track_caller]
#[inline]
pub fn bulk_reduce_add_f32(destination: u64, source: u32, bytes: u32) {
    let Some(thread) = acting() else { return };
    async_copy::bulk(thread, Direction::ReduceAddF32, source, destination, bytes, None, Location::caller());
}

/// Queues a tiled copy of one box to shared memory; elements out of range are zero (`cp.async.bulk.tensor`).
/// `map` is the global address of an encoded tensor map, `coordinates` are innermost first.
#[track_caller]
#[inline]
pub fn tensor_load<const R: usize>(destination: u32, map: u64, coordinates: [i32; R], mbarrier: u32) {
    let Some(thread) = acting() else { return };
    tensor_map::copy(thread, Direction::Load, destination, map, &coordinates, Some(mbarrier), Location::caller());
}

/// Queues a tiled copy of one box to the same shared memory of every block of the cluster that `blocks` has a bit for; each
/// copy completes on the mbarrier of its own block (`cp.async.bulk.tensor...multicast::cluster`).
#[track_caller]
#[inline]
pub fn tensor_load_multicast<const R: usize>(destination: u32, map: u64, coordinates: [i32; R], mbarrier: u32, blocks: u16) {
    let Some(thread) = acting() else { return };
    tensor_map::multicast(thread, destination, map, &coordinates, mbarrier, blocks, Location::caller());
}

/// Queues a tiled copy of one box to global memory; elements out of range are not written.
#[track_caller]
#[inline]
pub fn tensor_store<const R: usize>(map: u64, coordinates: [i32; R], source: u32) {
    let Some(thread) = acting() else { return };
    tensor_map::copy(thread, Direction::Store, source, map, &coordinates, None, Location::caller());
}

/// Closes this thread's bulk group (`cp.async.bulk.commit_group`).
#[track_caller]
#[inline]
pub fn bulk_commit() {
    let Some(thread) = acting() else { return };
    copy_group::commit(thread, copy_group::Kind::Bulk, Location::caller());
}

/// Waits until at most `pending` bulk groups are in flight; with `read_only` until their sources were read
/// (`cp.async.bulk.wait_group[.read]`).
#[track_caller]
#[inline]
pub fn bulk_wait(pending: u32, read_only: bool) {
    let Some(thread) = acting() else { return };
    copy_group::wait(thread, copy_group::Kind::Bulk, pending, read_only, Location::caller());
}

/// This lane's part of `A B` plus `sums` (`mma.m16n8k16` or `k32`, with fragments as PTX has them). The 32 lanes of a warp
/// call it together.
#[track_caller]
#[inline]
pub fn mma(format: Format, sums: [f32; 4], left: [u32; 4], right: [u32; 2]) -> [f32; 4] {
    let Some(thread) = acting() else { return sums };
    mma::multiply(thread, format, sums, left, right, Location::caller())
}

/// Names accumulators of this thread's warpgroup, before the first multiplication into them.
#[track_caller]
#[inline]
pub fn wgmma_ticket() -> u32 {
    let Some(thread) = acting() else { return 0 };
    wgmma::ticket(thread)
}

/// Orders register accesses before multiplications (`wgmma.fence`).
#[track_caller]
#[inline]
pub fn wgmma_fence() {
    let Some(thread) = acting() else { return };
    wgmma::fence(thread, Location::caller());
}

/// Closes this warpgroup's group of multiplications (`wgmma.commit_group`).
#[track_caller]
#[inline]
pub fn wgmma_commit() {
    let Some(thread) = acting() else { return };
    wgmma::commit(thread, Location::caller());
}

/// Waits until at most `pending` groups of multiplications are in flight (`wgmma.wait_group`).
#[track_caller]
#[inline]
pub fn wgmma_wait(pending: u32) {
    let Some(thread) = acting() else { return };
    wgmma::wait(thread, pending, Location::caller());
}

/// Multiplies into the accumulators of a ticket, from `addends` on if they are new to it, from zero if there are none
/// (`wgmma.mma_async`). The 128 threads of a warpgroup call it together. `right` is a matrix descriptor.
#[track_caller]
#[inline]
pub fn wgmma_multiply(instruction: &Instruction, ticket: u32, left: Left, right: u64, addends: Option<&[f32]>) {
    let Some(thread) = acting() else { return };
    wgmma::multiply(thread, instruction, ticket, left, right, addends, Location::caller());
}

/// This thread's accumulators of a ticket, whose multiplications were waited for.
#[track_caller]
#[inline]
pub fn wgmma_publish(ticket: u32, registers: &mut [f32]) {
    let Some(thread) = acting() else { return };
    wgmma::publish(thread, ticket, registers, Location::caller());
}

/// `fence.acq_rel.scope`.
#[track_caller]
#[inline]
pub fn fence(scope: Scope) {
    let Some(thread) = acting() else { return };
    access::fence(thread, scope, Location::caller());
}

/// `fence.proxy.async.{shared::cta, global}`: orders generic accesses before later asynchronous ones.
#[track_caller]
#[inline]
pub fn fence_proxy_async(space: Space) {
    let Some(thread) = acting() else { return };
    access::fence_proxy_async(thread, space, Location::caller());
}

/// `fence.mbarrier_init.release.cluster`: makes initialised mbarriers visible to the asynchronous proxy.
#[track_caller]
#[inline]
pub fn fence_mbarrier_init() {
    let Some(thread) = acting() else { return };
    mbarrier::fence_init(thread, Location::caller());
}

/// Sleeps for about `nanoseconds` of emulated time (`nanosleep`).
#[track_caller]
#[inline]
pub fn nanosleep(nanoseconds: u32) {
    let Some(thread) = acting() else { return };
    access::nanosleep(thread, nanoseconds, Location::caller());
}

/// Ends the run with a trap fault (`trap`).
#[track_caller]
#[inline]
pub fn trap() -> ! {
    current().fail(FaultKind::Trap, Location::caller(), "the kernel trapped".to_owned(), "")
}

/// Ends the run: `index` is not below `length` of the tensor.
#[track_caller]
#[inline]
pub fn out_of_bounds(tensor: &str, index: u64, length: u64) -> ! {
    let message = format!("index {index} of {tensor}, which has length {length}");
    current().fail(FaultKind::OutOfBounds, Location::caller(), message, "keep the index below the length")
}

/// Ends the run: `index` is not below `length` of the view that starts at a global address. The report names the
/// kernel's parameter, or the allocation, that holds the address.
#[cold]
#[track_caller]
pub fn view_out_of_bounds(address: u64, index: u64, length: u64) -> ! {
    let name = current().worker().name_at(address).map_or_else(|| "a view of no live memory".to_owned(), |name| format!("`{name}`"));
    out_of_bounds(&name, index, length)
}

/// Ends the run with `message` unless `condition` holds.
#[track_caller]
#[inline]
pub fn assume(condition: bool, message: &str) {
    if !condition && let Some(thread) = acting() {
        thread.fail(FaultKind::Assumption, Location::caller(), message.to_owned(), "");
    }
}
