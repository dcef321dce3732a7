//! The instruction families, one trait each. Implemented twice: `arch/nvptx`, `arch/emulated`.
//!
//! Addresses: `u64` is a generic address in global memory, `u32` an address in the block's shared
//! memory. `unsafe` marks what takes an address that is not checked.

use crate::num::Pod;
use crate::shared::SharedStorage;

/// Special registers: which thread this is. PTX ISA section 10.
pub trait Identity {
    /// `%tid.x`
    fn thread() -> u32;
    /// `%ntid.x`
    fn threads() -> u32;
    /// `%laneid`
    fn lane() -> u32;
    /// `%ctaid.{x,y,z}`
    fn block() -> [u32; 3];
    /// `%nctaid.{x,y,z}`
    fn blocks() -> [u32; 3];
    /// `%globaltimer`, in nanoseconds; on the emulator a count of scheduler steps.
    fn timer() -> u64;
}

/// Loads and stores of global memory. PTX ISA 9.7.9, `ld`, `ld.global.nc`, `st`.
pub trait GlobalMemory {
    /// `ld.global.nc`: the memory is not written while the kernel runs. `T` has 1, 2, 4 or 8 bytes.
    ///
    /// # Safety
    /// `address` is aligned and inside a live allocation.
    unsafe fn load_read_only<T: Pod>(address: u64) -> T;
    /// `ld.global.nc.v4.b32`: 16 bytes.
    ///
    /// # Safety
    /// As [`load_read_only`](Self::load_read_only), 16-byte aligned.
    unsafe fn load_read_only_vector(address: u64) -> [u32; 4];
    /// `ld.global.nc.L2::cache_hint` with a policy of `evict_last` (PTX ISA 9.7.9.8, `ld`; 9.7.9.17, `createpolicy`). `T` has 4 or 8 bytes.
    ///
    /// # Safety
    /// As [`load_read_only`](Self::load_read_only).
    unsafe fn load_read_only_lasting<T: Pod>(address: u64) -> T;
    /// The same of 16 bytes.
    ///
    /// # Safety
    /// As [`load_read_only_vector`](Self::load_read_only_vector).
    unsafe fn load_read_only_vector_lasting(address: u64) -> [u32; 4];
    /// `prefetch.global.L2`: brings the line of an address into the L2 cache. A hint. PTX ISA 9.7.9.15, `prefetch`.
    ///
    /// # Safety
    /// `address` is inside a live allocation.
    unsafe fn prefetch_line(address: u64);
    /// `ld.global`.
    ///
    /// # Safety
    /// As [`load_read_only`](Self::load_read_only).
    unsafe fn load<T: Pod>(address: u64) -> T;
    /// `ld.global.v4.b32`.
    ///
    /// # Safety
    /// As [`load_read_only_vector`](Self::load_read_only_vector).
    unsafe fn load_vector(address: u64) -> [u32; 4];
    /// `st.global`.
    ///
    /// # Safety
    /// As [`load_read_only`](Self::load_read_only).
    unsafe fn store<T: Pod>(address: u64, value: T);
    /// `st.global.v2.b32`: 8 bytes.
    ///
    /// # Safety
    /// 8-byte aligned, inside a live allocation.
    unsafe fn store_pair(address: u64, value: [u32; 2]);
    /// `st.global.v4.b32`.
    ///
    /// # Safety
    /// As [`load_read_only_vector`](Self::load_read_only_vector).
    unsafe fn store_vector(address: u64, value: [u32; 4]);
    /// `ld.acquire.gpu.global.b32`.
    ///
    /// # Safety
    /// As [`load_read_only`](Self::load_read_only).
    unsafe fn load_acquire(address: u64) -> u32;
    /// `st.release.gpu.global.b32`.
    ///
    /// # Safety
    /// As [`load_read_only`](Self::load_read_only).
    unsafe fn store_release(address: u64, value: u32);
    /// `ld.relaxed.sys.global.b64`.
    ///
    /// # Safety
    /// As [`load_read_only`](Self::load_read_only).
    unsafe fn load_relaxed_system(address: u64) -> u64;
    /// `ld.relaxed.sys.global.v4.b32`.
    ///
    /// # Safety
    /// As [`load_read_only_vector`](Self::load_read_only_vector).
    unsafe fn load_relaxed_system_vector(address: u64) -> [u32; 4];
    /// `st.relaxed.sys.global.v4.b32`.
    ///
    /// # Safety
    /// As [`load_read_only_vector`](Self::load_read_only_vector).
    unsafe fn store_relaxed_system_vector(address: u64, value: [u32; 4]);
    /// `ld.acquire.sys.global.b64`.
    ///
    /// # Safety
    /// As [`load_read_only`](Self::load_read_only).
    unsafe fn load_acquire_system(address: u64) -> u64;
    /// `st.release.sys.global.b64`.
    ///
    /// # Safety
    /// As [`load_read_only`](Self::load_read_only).
    unsafe fn store_release_system(address: u64, value: u64);
}

/// Loads and stores of the block's shared memory. PTX ISA 9.7.9, `ld.shared`, `st.shared`.
pub trait SharedMemory {
    /// The address of the first byte of the dynamic arena.
    fn arena() -> u32;
    /// The same, for a kernel that takes the arena for the layout `S` of this name; the emulator's reports name its pieces.
    fn claim<S: SharedStorage>(name: &'static str) -> u32;
    /// `ld.shared`; `T` has 1, 2, 4 or 8 bytes.
    ///
    /// # Safety
    /// `address` is aligned and inside the arena.
    unsafe fn load<T: Pod>(address: u32) -> T;
    /// `st.shared`.
    ///
    /// # Safety
    /// As [`load`](Self::load).
    unsafe fn store<T: Pod>(address: u32, value: T);
    /// `ld.shared.v4.b32`.
    ///
    /// # Safety
    /// As [`load`](Self::load), 16-byte aligned.
    unsafe fn load_vector(address: u32) -> [u32; 4];
    /// `st.shared.v4.b32`.
    ///
    /// # Safety
    /// As [`load`](Self::load), 16-byte aligned.
    unsafe fn store_vector(address: u32, value: [u32; 4]);
}

/// Atomic read-modify-write on global memory, device scope. PTX ISA 9.7.13, `atom`.
pub trait Atomic {
    /// `atom.relaxed.gpu.global.max.u32`; returns the old value.
    ///
    /// # Safety
    /// `address` is 4-byte aligned and inside a live allocation.
    unsafe fn max_u32(address: u64, value: u32) -> u32;
    /// `atom.relaxed.gpu.global.add.u32`.
    ///
    /// # Safety
    /// As [`max_u32`](Self::max_u32).
    unsafe fn add_u32(address: u64, value: u32) -> u32;
    /// `atom.acq_rel.gpu.global.add.u32`: the ticket of a last-block pattern.
    ///
    /// # Safety
    /// As [`max_u32`](Self::max_u32).
    unsafe fn add_u32_acquire_release(address: u64, value: u32) -> u32;
    /// `atom.relaxed.gpu.global.add.u64`.
    ///
    /// # Safety
    /// As [`max_u32`](Self::max_u32), 8-byte aligned.
    unsafe fn add_u64(address: u64, value: u64) -> u64;
    /// `atom.relaxed.gpu.global.add.f32`: order of additions, and so the last bits, vary from run to run.
    ///
    /// # Safety
    /// As [`max_u32`](Self::max_u32).
    unsafe fn add_f32(address: u64, value: f32) -> f32;
    /// Whether [`add_vector_f32`](Self::add_vector_f32) is one instruction.
    const ADDS_VECTORS: bool;
    /// `red.relaxed.gpu.global.add.v4.f32` (PTX ISA 9.7.13.15; sm_90), elsewhere four `add.f32`: each sum is atomic, not the four together.
    ///
    /// # Safety
    /// As [`max_u32`](Self::max_u32), 16-byte aligned, of 16 bytes.
    unsafe fn add_vector_f32(address: u64, values: [f32; 4]);
}

/// Barriers of the block and the warp. PTX ISA 9.7.13, `bar`, `barrier`, `bar.warp.sync`.
pub trait Barrier {
    /// `barrier.cta.sync.aligned id, threads`: waits until `threads` threads have arrived.
    fn sync(id: u32, threads: u32);
    /// `barrier.cta.arrive.aligned id, threads`: arrives and goes on.
    fn arrive(id: u32, threads: u32);
    /// `bar.warp.sync mask`.
    fn sync_warp(mask: u32);
}

/// Exchange between the lanes of a warp. PTX ISA 9.7.9.6 `shfl.sync`, 9.7.13 `vote.sync`, `redux.sync`.
pub trait Warp {
    /// `shfl.sync.bfly.b32`: the value of lane `lane ^ flip`.
    fn shuffle_xor(mask: u32, value: u32, flip: u32) -> u32;
    /// `shfl.sync.idx.b32`: the value of lane `source`.
    fn shuffle_index(mask: u32, value: u32, source: u32) -> u32;
    /// `shfl.sync.up.b32`: the value of lane `lane - delta`, the lane's own below 0.
    fn shuffle_up(mask: u32, value: u32, delta: u32) -> u32;
    /// `shfl.sync.down.b32`: the value of lane `lane + delta`, the lane's own above 31.
    fn shuffle_down(mask: u32, value: u32, delta: u32) -> u32;
    /// `vote.sync.any.pred`
    fn any(mask: u32, predicate: bool) -> bool;
    /// `vote.sync.all.pred`
    fn all(mask: u32, predicate: bool) -> bool;
    /// `vote.sync.ballot.b32`
    fn ballot(mask: u32, predicate: bool) -> u32;
    /// `elect.sync`: whether the caller is the one lane of the mask that is picked, always the same. PTX ISA 9.7.13.14; sm_90.
    fn elect(mask: u32) -> bool;
    /// `redux.sync.max.u32` (sm_80 and later)
    fn max_u32(mask: u32, value: u32) -> u32;
    /// `redux.sync.add.u32`
    fn add_u32(mask: u32, value: u32) -> u32;
}

/// Mbarriers in shared memory. PTX ISA 9.7.13.15; sm_90 (init and arrive sm_80).
pub trait Mbarrier {
    /// `mbarrier.init.shared::cta.b64`
    ///
    /// # Safety
    /// `address` is 8-byte aligned, inside the arena, and holds no live mbarrier.
    unsafe fn init(address: u32, arrivals: u32);
    /// `mbarrier.inval.shared::cta.b64`
    ///
    /// # Safety
    /// `address` holds an mbarrier that no thread waits on.
    unsafe fn invalidate(address: u32);
    /// `mbarrier.arrive.shared::cta.b64`
    ///
    /// # Safety
    /// `address` holds an mbarrier.
    unsafe fn arrive(address: u32);
    /// `@predicate mbarrier.arrive.shared::cta.b64`: no branch around it, so that LLVM splits no block.
    ///
    /// # Safety
    /// As [`arrive`](Self::arrive).
    unsafe fn arrive_if(address: u32, predicate: bool);
    /// `mbarrier.arrive.expect_tx.shared::cta.b64`: arrives and announces `bytes`.
    ///
    /// # Safety
    /// As [`arrive`](Self::arrive).
    unsafe fn arrive_expect(address: u32, bytes: u32);
    /// Spins on `mbarrier.try_wait.parity.shared::cta.b64` until the phase of `parity` is complete.
    ///
    /// # Safety
    /// As [`arrive`](Self::arrive).
    unsafe fn wait(address: u32, parity: u32);
    /// `mbarrier.try_wait.parity.shared::cta.b64` once.
    ///
    /// # Safety
    /// As [`arrive`](Self::arrive).
    unsafe fn try_wait(address: u32, parity: u32) -> bool;
    /// States that the lanes of this warp have met since each of them waited at this mbarrier. No instruction: the emulator
    /// reports where it is not so.
    ///
    /// # Safety
    /// As [`arrive`](Self::arrive).
    unsafe fn met_since_wait(address: u32);
}

/// Copies that run beside the thread. PTX ISA 9.7.9.25.
pub trait AsyncCopy {
    /// `cp.async.cg.shared.global 16`: 16 bytes, of which `valid` are read and the rest zeroed.
    ///
    /// # Safety
    /// Both addresses are 16-byte aligned; `valid` bytes of the source and 16 of the arena are there.
    unsafe fn copy_16(shared: u32, global: u64, valid: u32);
    /// `cp.async.cg.shared.global.L2::cache_hint 16` with a policy of `evict_last` (PTX ISA 9.7.9.17, `createpolicy`).
    ///
    /// # Safety
    /// As [`copy_16`](Self::copy_16), all 16 bytes valid.
    unsafe fn copy_16_lasting(shared: u32, global: u64);
    /// `cp.async.ca.shared.global 4`
    ///
    /// # Safety
    /// Both addresses are 4-byte aligned and there.
    unsafe fn copy_4(shared: u32, global: u64);
    /// `cp.async.ca.shared.global 8`
    ///
    /// # Safety
    /// Both addresses are 8-byte aligned and there.
    unsafe fn copy_8(shared: u32, global: u64);
    /// `cp.async.commit_group`
    fn commit();
    /// `cp.async.wait_group PENDING`: at most `PENDING` groups of this thread are still under way.
    fn wait<const PENDING: u32>();
}

/// Bulk copies of the async proxy. PTX ISA 9.7.9.25.4, `cp.async.bulk`; sm_90.
pub trait BulkCopy {
    /// `cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes`: one thread copies
    /// `bytes` in, and the mbarrier counts them.
    ///
    /// # Safety
    /// Addresses and `bytes` are multiples of 16, both ranges are there, `mbarrier` expects the bytes.
    unsafe fn load(shared: u32, global: u64, bytes: u32, mbarrier: u32);
    /// `cp.async.bulk.global.shared::cta.bulk_group`
    ///
    /// # Safety
    /// As [`load`](Self::load); the source is not written until the group is waited for.
    unsafe fn store(global: u64, shared: u32, bytes: u32);
    /// `cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32`: adds each number by itself, in no order. Subnormal addends
    /// and sums are taken for zeros of their sign.
    ///
    /// # Safety
    /// As [`store`](Self::store).
    unsafe fn add_f32(global: u64, shared: u32, bytes: u32);
    /// `cp.async.bulk.prefetch.L2.global`: brings the bytes into the L2 cache. A hint. PTX ISA 9.7.9.25, `cp.async.bulk.prefetch`.
    ///
    /// # Safety
    /// Address and `bytes` are multiples of 16, the range is there.
    unsafe fn prefetch(global: u64, bytes: u32);
    /// `prefetch.global.L2::evict_last` and `prefetch.tensormap`: brings a tensor map into the cache of maps, and keeps it in the L2 cache for the next launch.
    /// A hint. PTX ISA 9.7.9.15, `prefetch`.
    ///
    /// # Safety
    /// `map` is the address of an encoded tensor map.
    unsafe fn prefetch_map(map: u64);
    /// `cp.async.bulk.tensor.{2,3,4,5}d.shared::cluster.global.mbarrier::complete_tx::bytes`: one box of the
    /// tensor that the map at `map` describes, from `coordinates` (innermost first).
    ///
    /// # Safety
    /// `map` is the address of an encoded tensor map of this rank, the box fits at `shared`, aligned as its swizzle asks.
    unsafe fn load_tensor<const RANK: usize>(shared: u32, map: u64, coordinates: [u32; RANK], mbarrier: u32);
    /// `cp.async.bulk.tensor.{2,3,4,5}d.global.shared::cta.bulk_group`
    ///
    /// # Safety
    /// As [`load_tensor`](Self::load_tensor).
    unsafe fn store_tensor<const RANK: usize>(map: u64, coordinates: [u32; RANK], shared: u32);
    /// `cp.async.bulk.commit_group`
    fn commit();
    /// `cp.async.bulk.wait_group PENDING`
    fn wait<const PENDING: u32>();
    /// `cp.async.bulk.wait_group.read PENDING`: the sources may be overwritten.
    fn wait_read<const PENDING: u32>();
}

/// Ordering. PTX ISA 9.7.13, `fence`, `fence.proxy`.
pub trait Fence {
    /// `fence.acq_rel.cta`
    fn block();
    /// `fence.acq_rel.gpu`
    fn device();
    /// `fence.acq_rel.sys`
    fn system();
    /// `fence.proxy.async.shared::cta`: ordinary shared-memory accesses before it are seen by the async proxy after it.
    fn proxy_async_shared();
    /// `fence.proxy.async.global`: ordinary accesses to global memory that this thread made, or has acquired, are seen by the async proxy after it.
    fn proxy_async_global();
    /// `fence.mbarrier_init.release.cluster`
    fn mbarrier_init();
}

/// Control and plain arithmetic.
pub trait Control {
    /// Ends the kernel with an error. `trap`
    fn trap() -> !;
    /// `nanosleep.u32`, at most about a millisecond.
    fn sleep(nanoseconds: u32);
    /// Whether this build checks bounds on the device; always on the emulator.
    const CHECKED: bool;
    /// Ends the kernel because element `index` of a view of `length` at `address` was asked for.
    fn out_of_bounds(address: u64, index: u64, length: u64) -> !;
    /// Ends the kernel because element `index` of a shared array of `length`, which takes so many bytes at `address`, was asked for.
    fn out_of_bounds_shared(address: u32, bytes: u32, index: u64, length: u64) -> !;
}
