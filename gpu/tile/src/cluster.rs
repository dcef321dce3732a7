//! The cluster: blocks that run at the same time, neighbours in x, and reach each other's shared memory. `#[kernel(cluster =
//! N)]`, or at launch [`Grid::in_clusters`](crate::launch::Grid::in_clusters); the grid is a multiple of `N`. Needs sm_90.
//!
//! | what | threads that call it |
//! |---|---|
//! | [`sync`] | all threads of all blocks, at one place |
//! | [`TensorMap::load_multicast`](crate::tensor_map::TensorMap::load_multicast) | one thread |
//! | [`SharedArray::store_vector_to`](crate::shared::SharedArray::store_vector_to) | any |
//! | [`Stage::release_to_cluster`](crate::pipeline::Stage::release_to_cluster) | all lanes of a warp |
//!
//! A block that others write, copy to or arrive at must neither begin late nor end early: a [`sync`] follows the initialisation of
//! mbarriers, and another is the last thing that a kernel does.

use crate::arch::{Cluster, Target};

/// The block's number in its cluster.
#[inline(always)]
#[track_caller]
pub fn rank() -> u32 {
    <Target as Cluster>::rank()
}

/// Waits for all threads of the cluster and orders their accesses.
#[inline(always)]
#[track_caller]
pub fn sync() {
    <Target as Cluster>::sync();
}
