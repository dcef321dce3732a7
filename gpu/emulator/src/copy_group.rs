//! Groups of asynchronous copies: what a thread commits and waits for, and what it knows afterwards.

use crate::async_copy::{Completion, is_held};
use crate::block::Block;
use crate::clock::View;
use crate::detector::{Detector, Stream, ThreadState};
use crate::fault::FaultKind;
use crate::mbarrier;
use crate::site::Site;
use crate::thread::{Thread, Waiting};

/// The accesses that a copy is ordered after, and the agents (slot, time) that make its own.
pub(crate) struct Order {
    pub view: View,
    pub read: (u32, u32),
    pub write: (u32, u32),
}

/// The two kinds of groups that a thread commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Copy,
    Bulk,
}

/// The copies of a thread that are not done, by group: the number of the group, how many of its sources are not read, and how many are not done.
#[derive(Default)]
pub(crate) struct InFlight(Vec<(u32, u32, u32)>);

impl InFlight {
    /// A copy was issued. Groups come in order.
    pub fn issue(&mut self, group: u32) {
        match self.0.last_mut() {
            Some((last, unread, left)) if *last == group => (*unread, *left) = (*unread + 1, *left + 1),
            _ => self.0.push((group, 1, 1)),
        }
    }

    /// The source of one was read.
    pub fn capture(&mut self, group: u32) {
        self.0.iter_mut().filter(|of| of.0 == group).for_each(|(_, unread, _)| *unread -= 1);
    }

    /// One is done.
    pub fn end(&mut self, group: u32) {
        self.0.iter_mut().filter(|of| of.0 == group).for_each(|(.., left)| *left -= 1);
        self.0.retain(|(.., left)| *left > 0);
    }

    /// The first group with a copy that is not done, or whose source is not read.
    pub fn first(&self, read_only: bool) -> Option<u32> {
        self.0.iter().find(|(_, unread, _)| !read_only || *unread > 0).map(|(group, ..)| *group)
    }
}

impl Order {
    /// Orders a copy after all that its thread knows now; what the thread does later is not part of that.
    pub fn new(thread: &Thread, detector: &Detector, target: &Block, completion: Completion, site: Site) -> Self {
        let agents = match completion {
            Completion::Bytes { mbarrier, .. } => [mbarrier::expect_copy(thread, detector, target, mbarrier, site); 2],
            Completion::CopyGroup(_) => issued(thread, detector, Kind::Copy, 1, site),
            Completion::BulkGroup(_) => issued(thread, detector, Kind::Bulk, 1, site),
            Completion::Arrival { .. } => issued(thread, detector, Kind::Copy, 0, site),
        };
        let mut state = detector.thread(thread.number).borrow_mut();
        if let Completion::Arrival { .. } = completion {
            state.copies.handed = state.copies.issued;
        }
        let view = state.view.clone();
        state.view.advance();
        Self { view, read: agents[0], write: agents[1] }
    }
}

/// Counts further copies of a thread; returns the agents of the last.
fn issued(thread: &Thread, detector: &Detector, kind: Kind, copies: u32, site: Site) -> [(u32, u32); 2] {
    let mut state = detector.thread(thread.number).borrow_mut();
    let stream = state.stream(kind);
    let slots = *stream.slots.get_or_insert_with(|| [detector.slot(), detector.slot()]);
    stream.issued += copies;
    stream.site = Some(site);
    slots.map(|slot| (slot, stream.issued))
}

impl ThreadState {
    fn stream(&mut self, kind: Kind) -> &mut Stream {
        match kind {
            Kind::Copy => &mut self.copies,
            Kind::Bulk => &mut self.bulk,
        }
    }
}

/// Closes the thread's group.
pub(crate) fn commit(thread: &Thread, kind: Kind, site: Site) {
    let (operation, groups) = match kind {
        Kind::Copy => ("copy_async_commit", &thread.copy_groups),
        Kind::Bulk => ("bulk_commit", &thread.bulk_groups),
    };
    if !thread.worker().performs(operation, site) {
        return;
    }
    groups.set(groups.get() + 1);
    if let Some(detector) = thread.detector() {
        let mut state = detector.thread(thread.number).borrow_mut();
        let stream = state.stream(kind);
        stream.commits.push(stream.issued);
    }
}

/// Waits until at most `pending` groups are in flight, or with `read_only` have sources to read.
pub(crate) fn wait(thread: &Thread, kind: Kind, pending: u32, read_only: bool, site: Site) {
    let operation = match kind {
        Kind::Copy => "copy_async_wait",
        Kind::Bulk => "bulk_wait",
    };
    let Some(pending) = thread.worker().synchronise(operation, site, pending) else { return };
    let waiting = match kind {
        Kind::Copy => Waiting::CopyGroups { pending },
        Kind::Bulk => Waiting::BulkGroups { pending, read_only },
    };
    if is_held(thread, waiting) {
        thread.suspend(waiting, site);
    }
    if let Some(detector) = thread.detector() {
        learn(detector, thread, kind, pending, read_only);
    }
}

/// The copies of the groups that a wait covered are ordered before what follows.
fn learn(detector: &Detector, thread: &Thread, kind: Kind, pending: u32, read_only: bool) {
    let mut state = detector.thread(thread.number).borrow_mut();
    let stream = state.stream(kind);
    let Some(slots) = stream.slots else { return };
    let groups = stream.commits.len().saturating_sub(pending as usize);
    let copies = groups.checked_sub(1).map_or(0, |last| stream.commits[last]);
    stream.waited[0] = stream.waited[0].max(copies);
    if !read_only {
        stream.waited[1] = stream.waited[1].max(copies);
    }
    let [read, write] = stream.waited;
    let knowledge = &mut state.view.knowledge;
    match kind {
        Kind::Copy => {
            knowledge.generic.learn(detector.block, slots[0], read);
            knowledge.generic.learn(detector.block, slots[1], write);
        }
        Kind::Bulk => {
            knowledge.learn_copy(detector.block, slots[0], read);
            knowledge.learn_copy(detector.block, slots[1], write);
        }
    }
}

/// A thread that ends must have waited for its copies, or for the reads of their sources at least.
pub(crate) fn check_waited(thread: &Thread) {
    let Some(detector) = thread.detector() else { return };
    let state = detector.thread(thread.number).borrow();
    let (what, stream) = if state.copies.waited[0].max(state.copies.handed) < state.copies.issued {
        ("cp.async copies", &state.copies)
    } else if state.bulk.waited[0] < state.bulk.issued {
        ("bulk stores, whose sources in shared memory may not be read yet", &state.bulk)
    } else {
        return;
    };
    let site = stream.site.expect("set with each copy");
    let mend = "commit the copies and wait for the group (bulk_wait(0, true) at least) before the thread ends";
    let message = format!("a thread ended without waiting for its {what}");
    let mut fault = thread.fault(FaultKind::InFlightAtExit, site, message, mend);
    "last copy issued here".clone_into(&mut fault.involved[0].action);
    thread.worker().set_fault(fault);
}
