//! Page-locked host memory, kept for reuse: freeing it would wait for the device.

use std::ptr;
use std::sync::Mutex;

use cudarc::driver::sys::{self, CUevent, CUresult};

use super::driver::check;
use crate::runtime::backend::EventId;
use crate::runtime::error::Result;
use crate::runtime::runtime::lock;

/// Every context of the process may use it (`CU_MEMHOSTALLOC_PORTABLE`).
const PORTABLE: u32 = 1;

/// Blocks of page-locked memory that are not in use.
#[derive(Default)]
pub(super) struct PinnedPool(Mutex<Vec<Block>>);

struct Block {
    address: u64,
    bytes: u64,
    /// Done when the last copy that used the block is.
    free: EventId,
}

impl PinnedPool {
    /// Rounded so that blocks fit again: to a power of two, large ones to 2 MiB.
    fn capacity(bytes: u64) -> u64 {
        const LARGE: u64 = 2 << 20;
        if bytes >= LARGE { bytes.next_multiple_of(LARGE) } else { bytes.max(4096).next_power_of_two() }
    }

    /// A block for so many bytes; some context is current.
    pub fn allocate(&self, bytes: u64) -> Result<u64> {
        let bytes = Self::capacity(bytes);
        if let Some(address) = self.reuse(bytes) {
            return Ok(address);
        }
        let mut address = ptr::null_mut();
        // SAFETY: a valid place for the address.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut address, bytes as usize, PORTABLE) })?;
        Ok(address.expose_provenance() as u64)
    }

    fn reuse(&self, bytes: u64) -> Option<u64> {
        let mut blocks = lock(&self.0);
        let is_free = |block: &Block| {
            // SAFETY: the event was recorded when the block was given back and is destroyed with it.
            block.bytes == bytes && unsafe { sys::cuEventQuery(block.free.handle as CUevent) } == CUresult::CUDA_SUCCESS
        };
        let at = blocks.iter().position(is_free)?;
        let block = blocks.swap_remove(at);
        drop(blocks);
        // SAFETY: the event is this block's alone. That it cannot be destroyed would lose an event, not the block.
        let _ = unsafe { sys::cuEventDestroy_v2(block.free.handle as CUevent) };
        Some(block.address)
    }

    /// Takes a block back; `free` was recorded after the block's last use.
    pub fn give(&self, address: u64, bytes: u64, free: EventId) {
        lock(&self.0).push(Block { address, bytes: Self::capacity(bytes), free });
    }
}
