//! Threads that must meet and cannot: the rest of their group is at another collective or barrier, or has ended.

use crate::block::Block;
use crate::thread::{Thread, Waiting};

/// Whether threads of a block that can no longer go on have parted on the way to a collective or a barrier. Those that are at different barriers have not: one of
/// them has a wrong number.
pub(crate) fn is_cause(block: &Block) -> bool {
    let may_come = may_come(block);
    let is_at_barrier = |thread: &&Thread| matches!(thread.waiting.get(), Waiting::Barrier { .. });
    block.threads.iter().any(|thread| {
        let missing = missing(block, thread);
        let parted = |missing: &[&Thread]| missing.iter().all(|other| !may_come[other.number as usize]);
        missing.is_some_and(|missing| {
            !missing.is_empty() && parted(&missing) && !(is_at_barrier(&thread) && missing.iter().all(is_at_barrier))
        })
    })
}

/// The threads that a waiting one is to meet and that are not there, where all of its group is known.
fn missing<'a>(block: &'a Block, thread: &Thread) -> Option<Vec<&'a Thread>> {
    let all = || block.threads.iter();
    let waiting = thread.waiting.get();
    let elsewhere = |other: &&Thread| other.waiting.get() != waiting;
    match waiting {
        Waiting::Rendezvous { mask } => {
            let of_warp = all().filter(|other| other.warp_number() == thread.warp_number());
            Some(of_warp.filter(|other| mask >> other.lane() & 1 != 0).filter(elsewhere).collect())
        }
        Waiting::Warpgroup => Some(all().filter(|other| other.number / 128 == thread.number / 128).filter(elsewhere).collect()),
        Waiting::Cluster => Some(all().filter(elsewhere).collect()),
        Waiting::Barrier { id } if block.barriers.borrow()[id as usize].is_of_all(block.threads.len()) => {
            Some(all().filter(elsewhere).collect())
        }
        _ => None,
    }
}

/// By thread: whether it may come yet, once the copies, signals and mbarriers that others wait for have come. One that waits for threads may come if all of them may.
fn may_come(block: &Block) -> Vec<bool> {
    use Waiting::{Barrier, Cluster, Exited, Rendezvous, Warpgroup};
    let waits_for_threads =
        |thread: &Thread| matches!(thread.waiting.get(), Rendezvous { .. } | Warpgroup | Barrier { .. } | Cluster | Exited);
    let mut may_come: Vec<bool> = block.threads.iter().map(|thread| !waits_for_threads(thread)).collect();
    loop {
        let count = may_come.iter().filter(|may| **may).count();
        let learns = |thread: &&Thread| {
            let all_may = |missing: Vec<&Thread>| missing.iter().all(|other| may_come[other.number as usize]);
            !may_come[thread.number as usize]
                && match (missing(block, thread), thread.waiting.get()) {
                    (Some(missing), _) => all_may(missing),
                    // Which threads belong to it is not known: any may.
                    (None, Barrier { id }) => block.barriers.borrow()[id as usize].missing() as usize <= count,
                    _ => false,
                }
        };
        let learnt: Vec<u32> = block.threads.iter().filter(learns).map(|thread| thread.number).collect();
        if learnt.is_empty() {
            return may_come;
        }
        learnt.into_iter().for_each(|number| may_come[number as usize] = true);
    }
}
