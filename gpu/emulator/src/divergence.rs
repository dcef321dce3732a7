//! Threads that must meet and cannot: the rest of their group is at another collective or barrier, or has ended.

use crate::block::Block;
use crate::thread::{Thread, Waiting};

/// Whether threads of a block that can no longer go on have parted on the way to a collective or a barrier.
pub(crate) fn is_cause(block: &Block) -> bool {
    block.threads.iter().any(|thread| awaited(block, thread).is_some_and(|group| group.iter().all(is_elsewhere)))
}

/// The group that a waiting thread is to meet with, itself among them, where all of it is known.
fn awaited<'a>(block: &'a Block, thread: &Thread) -> Option<Vec<&'a Thread>> {
    let threads = &block.threads;
    match thread.waiting.get() {
        Waiting::Rendezvous { mask } => {
            let of_warp = threads.iter().filter(|other| other.warp_number() == thread.warp_number());
            Some(of_warp.filter(|other| mask >> other.lane() & 1 != 0).collect())
        }
        Waiting::Warpgroup => Some(threads.iter().filter(|other| other.number / 128 == thread.number / 128).collect()),
        Waiting::Barrier { id } if block.barriers.borrow()[id as usize].is_of_all(threads.len()) => Some(threads.iter().collect()),
        _ => None,
    }
}

/// It will not come: it waits at a collective or a barrier, or has ended. One that waits for a copy or a signal may yet.
fn is_elsewhere(thread: &&Thread) -> bool {
    use Waiting::{Barrier, Cluster, Exited, Rendezvous, Warpgroup};
    matches!(thread.waiting.get(), Rendezvous { .. } | Warpgroup | Barrier { .. } | Cluster | Exited)
}
