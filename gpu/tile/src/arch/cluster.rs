//! Clusters of blocks. PTX ISA 5.1 (`.shared::cluster`), 9.7.9.22 (`mapa`), 9.7.13.4 (`barrier.cluster`), 9.7.9.25.5 (multicast); sm_90.

/// What blocks of a cluster do together.
pub trait Cluster {
    /// `%cluster_ctarank`
    fn rank() -> u32;
    /// `griddepcontrol.wait`: waits until the launches before this one in the stream have ended, and their stores can be read.
    fn wait_for_launches();
    /// `barrier.cluster.arrive.aligned`, `barrier.cluster.wait.aligned`: waits for all threads of all blocks.
    fn sync();
    /// `mapa`, `st.shared::cluster.v4.b32`: stores at this address of the block of this rank.
    ///
    /// # Safety
    /// `address` is 16-byte aligned and inside the arena of that block, which has not ended.
    unsafe fn store_vector_to(address: u32, rank: u32, value: [u32; 4]);
    /// `@predicate mapa`, `@predicate mbarrier.arrive.shared::cluster.b64`: arrives at the mbarrier at this address of the
    /// block of this rank.
    ///
    /// # Safety
    /// `address` holds an mbarrier in that block, which has not ended.
    unsafe fn arrive_remote_if(address: u32, rank: u32, predicate: bool);
    /// `cp.async.bulk.tensor.{2,3,4,5}d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster`: one box to
    /// the same address of every block that `blocks` has a bit for, each completing on its own mbarrier.
    ///
    /// # Safety
    /// As [`load_tensor`](super::BulkCopy::load_tensor), in each of those blocks.
    unsafe fn load_tensor_multicast<const RANK: usize>(shared: u32, map: u64, coordinates: [u32; RANK], mbarrier: u32, blocks: u16);
}
