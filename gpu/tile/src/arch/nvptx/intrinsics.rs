//! LLVM's convergent intrinsics: what several threads execute together.

#[allow(improper_ctypes)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    pub fn barrier_sync(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.barrier.cta.arrive.aligned.count"]
    pub fn barrier_arrive(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    pub fn warp_sync(mask: u32);
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    pub fn shuffle_xor(mask: u32, value: u32, flip: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    pub fn shuffle_index(mask: u32, value: u32, source: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
    pub fn shuffle_up(mask: u32, value: u32, delta: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
    pub fn shuffle_down(mask: u32, value: u32, delta: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.vote.any.sync"]
    pub fn vote_any(mask: u32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.all.sync"]
    pub fn vote_all(mask: u32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    pub fn vote_ballot(mask: u32, predicate: bool) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.umax"]
    pub fn reduce_max_u32(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.add"]
    pub fn reduce_add_u32(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.barrier.cluster.arrive.aligned"]
    pub fn cluster_arrive();
    #[link_name = "llvm.nvvm.barrier.cluster.wait.aligned"]
    pub fn cluster_wait();
    #[link_name = "llvm.nvvm.wgmma.fence.sync.aligned"]
    pub fn wgmma_fence();
    #[link_name = "llvm.nvvm.wgmma.commit_group.sync.aligned"]
    pub fn wgmma_commit();
    #[link_name = "llvm.nvvm.wgmma.wait_group.sync.aligned"]
    pub fn wgmma_wait(pending: u64);
    #[link_name = "llvm.nvvm.setmaxnreg.dec.sync.aligned.u32"]
    pub fn registers_release(registers: u32);
    #[link_name = "llvm.nvvm.setmaxnreg.inc.sync.aligned.u32"]
    pub fn registers_claim(registers: u32);
}

// A pair of results is LLVM's `{ i32, i1 }` in Rust's calling convention, and not in C's.
unsafe extern "Rust" {
    /// The lane that was elected, and whether it is the caller.
    #[link_name = "llvm.nvvm.elect.sync"]
    pub fn elect(mask: u32) -> (u32, bool);
}
