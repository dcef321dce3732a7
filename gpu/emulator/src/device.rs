//! What a kernel may do: free functions that act for the emulated thread now running.
//!
//! Each must be called from a kernel body under a [`GridRun`](crate::GridRun); elsewhere it panics. A misuse
//! ends the run with a [`Fault`](crate::Fault) that names the caller's source line.

use crate::order::*;

/// This thread's index in its block (`%tid`).
#[track_caller]
pub fn thread_index() -> [u32; 3] { unimplemented!() }
/// This block's index in the grid (`%ctaid`).
#[track_caller]
pub fn block_index() -> [u32; 3] { unimplemented!() }
/// Threads of a block in each dimension (`%ntid`).
#[track_caller]
pub fn block_dimensions() -> [u32; 3] { unimplemented!() }
/// Blocks of the grid in each dimension (`%nctaid`).
#[track_caller]
pub fn grid_dimensions() -> [u32; 3] { unimplemented!() }
/// This thread's lane in its warp (`%laneid`).
#[track_caller]
pub fn lane() -> u32 { unimplemented!() }
/// This thread's warp in its block.
#[track_caller]
pub fn warp() -> u32 { unimplemented!() }
/// The emulator's clock, in nanoseconds of emulated time (`%globaltimer`): it grows with every scheduling step.
#[track_caller]
pub fn step_clock() -> u64 { unimplemented!() }

/// Loads `N` (1, 2, 4, 8, 16 or 32) bytes at a global address that is a multiple of `N` (`ld.global`).
#[track_caller]
pub fn global_read<const N: usize>(_address: u64, _order: ReadOrder) -> [u8; N] { unimplemented!() }
/// Stores `N` (1, 2, 4, 8, 16 or 32) bytes at a global address that is a multiple of `N` (`st.global`).
#[track_caller]
pub fn global_write<const N: usize>(_address: u64, _value: [u8; N], _order: WriteOrder) { unimplemented!() }
/// Loads `N` (1, 2, 4, 8 or 16) bytes at an offset into the block's shared memory (`ld.shared`).
#[track_caller]
pub fn shared_read<const N: usize>(_offset: u32) -> [u8; N] { unimplemented!() }
/// Stores `N` (1, 2, 4, 8 or 16) bytes at an offset into the block's shared memory (`st.shared`).
#[track_caller]
pub fn shared_write<const N: usize>(_offset: u32, _value: [u8; N]) { unimplemented!() }
/// Reads, modifies and writes `width` (4 or 8) bytes in one step; returns what was there (`atom`).
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "the operands of `atom`")]
pub fn atomic(_space: Space, _address: u64, _op: AtomicOp, _width: u8, _operand: u64, _compare: u64, _order: AtomicOrder, _scope: Scope) -> u64 { unimplemented!() }

/// Waits until `threads` (a multiple of 32) threads arrived at named barrier `id` (0..16) (`barrier.sync`).
#[track_caller]
pub fn barrier_sync(_id: u32, _threads: u32) { unimplemented!() }
/// Arrives at named barrier `id` and goes on (`barrier.arrive`).
#[track_caller]
pub fn barrier_arrive(_id: u32, _threads: u32) { unimplemented!() }
/// Waits for the lanes of `mask` and orders their memory accesses (`bar.warp.sync`).
#[track_caller]
pub fn warp_sync(_mask: u32) { unimplemented!() }
/// `shfl.sync`: `clamp` is the PTX operand c, the clamp value in bits 0..5, the segment mask in bits 8..13.
#[track_caller]
pub fn shuffle(_mask: u32, _mode: ShuffleMode, _value: u32, _lane_argument: u32, _clamp: u32) -> u32 { unimplemented!() }
/// `vote.sync` over the lanes of `mask`.
#[track_caller]
pub fn vote(_mask: u32, _mode: VoteMode, _predicate: bool) -> u32 { unimplemented!() }
/// `redux.sync` over the lanes of `mask`.
#[track_caller]
pub fn reduce(_mask: u32, _op: ReduceOp, _value: u32) -> u32 { unimplemented!() }
/// `match.any.sync`: the lanes of `mask` whose value equals this lane's.
#[track_caller]
pub fn match_any(_mask: u32, _value: u32) -> u32 { unimplemented!() }
/// A rendezvous of `group` at one call site: the last thread to come runs `compute` over all fragments, in
/// thread order; then all go on. What `ldmatrix`, `mma` and `wgmma` are built on. Orders no memory.
#[track_caller]
pub fn collective<T: 'static>(_group: Group, _fragment: &mut T, _compute: impl FnOnce(&mut [&mut T])) { unimplemented!() }

/// Makes an mbarrier of `count` arrivals a phase at a shared offset, a multiple of 8 (`mbarrier.init`).
#[track_caller]
pub fn mbarrier_init(_offset: u32, _count: u32) { unimplemented!() }
/// Ends an mbarrier; its bytes are plain memory again (`mbarrier.inval`).
#[track_caller]
pub fn mbarrier_invalidate(_offset: u32) { unimplemented!() }
/// Arrives once at the current phase (`mbarrier.arrive`, release at block scope).
#[track_caller]
pub fn mbarrier_arrive(_offset: u32) { unimplemented!() }
/// Announces `bytes` of asynchronous copies and arrives (`mbarrier.arrive.expect_tx`).
#[track_caller]
pub fn mbarrier_arrive_expect_transaction(_offset: u32, _bytes: u32) { unimplemented!() }
/// Announces `bytes` of asynchronous copies without arriving (`mbarrier.expect_tx`).
#[track_caller]
pub fn mbarrier_expect_transaction(_offset: u32, _bytes: u32) { unimplemented!() }
/// Whether the phase of `parity` is complete; acquires if so (`mbarrier.try_wait.parity`).
#[track_caller]
pub fn mbarrier_try_wait_parity(_offset: u32, _parity: u32) -> bool { unimplemented!() }
/// Waits until the phase of `parity` is complete and acquires.
#[track_caller]
pub fn mbarrier_wait_parity(_offset: u32, _parity: u32) { unimplemented!() }

/// Queues a copy of `bytes` (4, 8 or 16), of which `valid_bytes` are read and the rest zero (`cp.async`).
#[track_caller]
pub fn copy_async(_destination: u32, _source: u64, _bytes: u32, _valid_bytes: u32) { unimplemented!() }
/// Closes this thread's group of `cp.async` (`cp.async.commit_group`).
#[track_caller]
pub fn copy_async_commit() { unimplemented!() }
/// Waits until at most `pending` of this thread's groups are in flight (`cp.async.wait_group`).
#[track_caller]
pub fn copy_async_wait(_pending: u32) { unimplemented!() }
/// Arrives at an mbarrier once this thread's `cp.async` so far are done (`cp.async.mbarrier.arrive.noinc`).
#[track_caller]
pub fn copy_async_mbarrier_arrive(_offset: u32) { unimplemented!() }
/// Queues a bulk copy from global to shared memory; completes `bytes` on the mbarrier
/// (`cp.async.bulk.shared::cta.global.mbarrier`). Addresses and size are multiples of 16.
#[track_caller]
pub fn bulk_load(_destination: u32, _source: u64, _bytes: u32, _mbarrier: u32) { unimplemented!() }
/// Queues a bulk copy from shared to global memory in this thread's bulk group (`cp.async.bulk.global.shared::cta`).
#[track_caller]
pub fn bulk_store(_destination: u64, _source: u32, _bytes: u32) { unimplemented!() }
/// Queues a bulk sum of `f32` into global memory (`cp.reduce.async.bulk.add.f32`).
#[track_caller]
pub fn bulk_reduce_add_f32(_destination: u64, _source: u32, _bytes: u32) { unimplemented!() }
/// Queues a tiled copy of one box to shared memory; elements out of range are zero (`cp.async.bulk.tensor`).
/// `map` is the global address of an encoded tensor map, `coordinates` are innermost first.
#[track_caller]
pub fn tensor_load<const R: usize>(_destination: u32, _map: u64, _coordinates: [i32; R], _mbarrier: u32) { unimplemented!() }
/// Queues a tiled copy of one box to global memory; elements out of range are not written.
#[track_caller]
pub fn tensor_store<const R: usize>(_map: u64, _coordinates: [i32; R], _source: u32) { unimplemented!() }
/// Closes this thread's bulk group (`cp.async.bulk.commit_group`).
#[track_caller]
pub fn bulk_commit() { unimplemented!() }
/// Waits until at most `pending` bulk groups are in flight; with `read_only` until their sources were read
/// (`cp.async.bulk.wait_group[.read]`).
#[track_caller]
pub fn bulk_wait(_pending: u32, _read_only: bool) { unimplemented!() }

/// `fence.acq_rel.scope`.
#[track_caller]
pub fn fence(_scope: Scope) { unimplemented!() }
/// `fence.proxy.async.{shared::cta, global}`: orders generic accesses before later asynchronous ones.
#[track_caller]
pub fn fence_proxy_async(_space: Space) { unimplemented!() }
/// `fence.mbarrier_init.release.cluster`: makes initialised mbarriers visible to the asynchronous proxy.
#[track_caller]
pub fn fence_mbarrier_init() { unimplemented!() }
/// Sleeps for about `nanoseconds` of emulated time (`nanosleep`).
#[track_caller]
pub fn nanosleep(_nanoseconds: u32) { unimplemented!() }
/// Ends the run with a trap fault (`trap`).
#[track_caller]
pub fn trap() -> ! { unimplemented!() }
/// Ends the run: `index` is not below `length` of the tensor.
#[track_caller]
pub fn out_of_bounds(_tensor: &str, _index: u64, _length: u64) -> ! { unimplemented!() }
/// Ends the run with `message` unless `condition` holds.
#[track_caller]
pub fn assume(_condition: bool, _message: &str) { unimplemented!() }
