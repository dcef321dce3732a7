//! Whether the lanes of a warp have met since one of them waited at an mbarrier. A lane that arrives at another mbarrier for
//! its whole warp relies on it: a lane still waiting would be lapped by the phases that the arrival lets end.

use crate::fault::FaultKind;
use crate::site::Site;
use crate::thread::Thread;
use std::cell::{Cell, RefCell};

/// What a thread knows of the other lanes' progress.
#[derive(Default)]
pub(crate) struct Meetings {
    /// Rendezvous of the whole warp that the thread took part in.
    count: Cell<u32>,
    /// The mbarriers it waited at, by offset, and how many meetings there were then.
    waits: RefCell<Vec<(u32, u32)>>,
}

impl Meetings {
    /// The thread's warp met, every lane of it.
    pub fn met(&self) {
        self.count.set(self.count.get().wrapping_add(1));
    }

    /// The thread has seen a phase of the mbarrier at `offset` end.
    pub fn waited(&self, offset: u32) {
        let mut waits = self.waits.borrow_mut();
        let count = self.count.get();
        match waits.iter_mut().find(|wait| wait.0 == offset) {
            Some(wait) => wait.1 = count,
            None => waits.push((offset, count)),
        }
    }
}

/// Reports a thread whose warp has not met since the thread's wait at the mbarrier at `offset`.
pub(crate) fn check_since_wait(thread: &Thread, offset: u32, site: Site) {
    if thread.detector().is_none() {
        return;
    }
    let meetings = &thread.meetings;
    let waited = meetings.waits.borrow().iter().find(|wait| wait.0 == offset).map(|wait| wait.1);
    if waited.is_none_or(|count| count != meetings.count.get()) {
        return;
    }
    thread.fail(
        FaultKind::MbarrierMisuse,
        site,
        format!(
            "lane {} arrives for its warp, whose other lanes may still wait at {}",
            thread.lane(),
            thread.worker().shared.mbarrier(offset)
        ),
        "let a warp barrier (`release` has one) or matrix instructions stand between the wait and the arrival",
    );
}
