//! A cluster: blocks that run at the same time and reach each other's shared memory (PTX ISA, "Cluster of Cooperative
//! Thread Arrays"). Its blocks are neighbours in x.

use crate::block::Block;
use crate::clock::Gathered;
use crate::fault::FaultKind;
use crate::site::Site;
use crate::thread::{Thread, Waiting};
use std::cell::RefCell;
use std::rc::{Rc, Weak};

#[derive(Default)]
pub(crate) struct Cluster {
    /// By rank.
    blocks: RefCell<Vec<Weak<Block>>>,
    meeting: RefCell<Meeting>,
}

/// Threads that have come to the cluster's barrier.
#[derive(Default)]
struct Meeting {
    arrived: u32,
    waiting: Vec<(u32, u32)>,
    gathered: Gathered,
}

impl Cluster {
    /// Takes the next block in.
    pub fn join(&self, block: &Rc<Block>) {
        self.blocks.borrow_mut().push(Rc::downgrade(block));
    }

    /// The block of a rank, unless it has ended.
    fn block(&self, rank: u32) -> Option<Rc<Block>> {
        self.blocks.borrow().get(rank as usize)?.upgrade()
    }
}

/// The block of a rank in the thread's cluster.
pub(crate) fn peer(thread: &Thread, rank: u32, site: Site) -> Rc<Block> {
    let cluster = &thread.block().cluster;
    cluster.block(rank).unwrap_or_else(|| {
        let blocks = cluster.blocks.borrow().len();
        let message = format!("block {rank} of a cluster of {blocks} is not there, or has ended");
        thread.fail(
            FaultKind::ClusterMisuse,
            site,
            message,
            "name a rank below the cluster's size, and let no block end before the last access to it",
        )
    })
}

/// `barrier.cluster.arrive.release` and `barrier.cluster.wait.acquire`: waits for all threads of all blocks.
pub(crate) fn sync(thread: &Thread, site: Site) {
    if !thread.worker().performs("cluster_sync", site) {
        return;
    }
    let block = thread.block();
    let cluster = Rc::clone(&block.cluster);
    let mut meeting = cluster.meeting.borrow_mut();
    meeting.arrived += 1;
    if let Some(detector) = thread.detector() {
        detector.release(thread.number, &mut meeting.gathered);
    }
    let everyone = cluster.blocks.borrow().len() as u32 * block.threads.len() as u32;
    if meeting.arrived < everyone {
        meeting.waiting.push((block.rank, thread.number));
        drop(meeting);
        thread.suspend(Waiting::Cluster, site);
        thread.meetings.met();
        return;
    }
    let Meeting { waiting, gathered, .. } = std::mem::take(&mut *meeting);
    drop(meeting);
    for (rank, number) in waiting.into_iter().chain([(block.rank, thread.number)]) {
        let block = peer(thread, rank, site);
        if let Some(detector) = &block.detector {
            detector.adopt(number, &gathered.all);
        }
        if !std::ptr::eq(&raw const block.threads[number as usize], thread) {
            block.make_ready(number);
        }
    }
    block.worker().productive();
    thread.meetings.met();
}
