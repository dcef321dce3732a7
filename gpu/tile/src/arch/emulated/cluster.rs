//! Clusters of blocks.

use oxtile_emulator::device;

use super::Emulated;
use super::memory::bytes;
use crate::arch::Cluster;

impl Cluster for Emulated {
    #[inline(always)]
    #[track_caller]
    fn rank() -> u32 {
        device::cluster_rank()
    }

    /// Launches of a stream run one after another.
    #[inline(always)]
    fn wait_for_launches() {}

    #[inline(always)]
    #[track_caller]
    fn sync() {
        device::cluster_sync();
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_vector_to(address: u32, rank: u32, value: [u32; 4]) {
        device::cluster_write(address, rank, bytes(value));
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn arrive_remote_if(address: u32, rank: u32, predicate: bool) {
        if predicate {
            device::mbarrier_arrive_remote(address, rank);
        }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_tensor_multicast<const RANK: usize>(shared: u32, map: u64, coordinates: [u32; RANK], mbarrier: u32, blocks: u16) {
        device::tensor_load_multicast(shared, map, coordinates.map(u32::cast_signed), mbarrier, blocks);
    }
}
