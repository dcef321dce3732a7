//! The 16 named barriers of a block (PTX ISA, "barrier", in its aligned form: all lanes of a warp execute the same instruction).

use crate::clock::Gathered;
use crate::fault::{FaultKind, Involved};
use crate::site::Site;
use crate::thread::{Thread, Waiting};
use crate::warp::{lanes, same};

/// Named barriers of a block.
const BARRIERS: u32 = 16;

#[derive(Default)]
pub(crate) struct Barrier {
    /// Threads that this phase waits for; zero between phases.
    expected: u32,
    arrivals: u32,
    /// Threads that arrived, a mask a warp.
    arrived: [u32; 32],
    /// The ones among them that wait.
    waiting: [u32; 32],
    /// What those that arrived know.
    gathered: Gathered,
}

impl Barrier {
    /// Lets all that wait go on, but for the thread that came last, which never stopped. Not inlined: the other threads wait in [`meet`], and their frames stay small.
    #[inline(never)]
    fn open(&mut self, last: &Thread) {
        let block = last.block();
        for (number, &mask) in self.waiting.iter().enumerate().take(block.warps.len()) {
            let first = number as u32 * 32;
            if let Some(detector) = last.detector() {
                lanes(mask).for_each(|lane| detector.adopt(first + lane as u32, &self.gathered.all));
            }
            let others = if number as u32 == last.warp_number() { mask & !(1 << last.lane()) } else { mask };
            let ready = &block.warps[number].ready;
            ready.set(ready.get() | others);
        }
        *self = Self::default();
    }

    /// Whether this phase waits for every thread of a block of so many.
    pub fn is_of_all(&self, threads: usize) -> bool {
        self.expected as usize == threads
    }

    /// Threads that have not arrived yet.
    pub fn missing(&self) -> u32 {
        self.expected.saturating_sub(self.arrivals)
    }

    pub fn describe(&self, id: u32) -> String {
        format!("barrier {id}, {} of {} threads arrived", self.arrivals, self.expected)
    }
}

/// Arrives at barrier `id`, and with `wait` waits until `count` threads have.
pub(crate) fn meet(thread: &Thread, id: u32, count: u32, wait: bool, site: Site) {
    let operation = if wait { "barrier_sync" } else { "barrier_arrive" };
    let Some(count) = thread.worker().synchronise(operation, site, count) else { return };
    let block = thread.block();
    let threads = block.threads.len() as u32;
    if id >= BARRIERS || count == 0 || count > threads.next_multiple_of(32) || (count % 32 != 0 && count != threads) {
        misused(thread, id, count, site);
    }
    let mut barriers = block.barriers.borrow_mut();
    if barriers.is_empty() {
        barriers.resize_with(BARRIERS as usize, Barrier::default);
    }
    let barrier = &mut barriers[id as usize];
    let (warp, bit) = (thread.warp_number() as usize, 1 << thread.lane());
    if (barrier.expected != 0 && barrier.expected != count) || barrier.arrived[warp] & bit != 0 {
        mismatched(thread, barrier, id, count, site);
    }
    let beside = barrier.waiting[warp].checked_ilog2().map(|lane| &block.threads[warp * 32 + lane as usize]);
    if let Some(other) = beside.filter(|other| !same(other.site.get(), site)) {
        diverged(thread, other, id, site);
    }
    barrier.expected = count;
    barrier.arrived[warp] |= bit;
    barrier.arrivals += 1;
    if wait {
        barrier.waiting[warp] |= bit;
    }
    if let Some(detector) = thread.detector() {
        detector.release(thread.number, &mut barrier.gathered);
    }
    if barrier.arrivals == count {
        barrier.open(thread);
        block.worker().productive();
    } else if wait {
        drop(barriers);
        thread.suspend(Waiting::Barrier { id }, site);
    }
    if wait {
        thread.meetings.met();
    }
}

#[cold]
fn misused(thread: &Thread, id: u32, count: u32, site: Site) -> ! {
    let threads = thread.block().threads.len();
    let (message, mend) = match id >= BARRIERS {
        true => (format!("barrier {id} does not exist"), "use barriers 0 to 15"),
        false => (
            format!("barrier {id} for {count} threads in a block of {threads}"),
            "count whole warps of this block, arriving ones and waiting ones together",
        ),
    };
    thread.fail(FaultKind::BarrierMisuse, site, message, mend)
}

#[cold]
fn mismatched(thread: &Thread, barrier: &Barrier, id: u32, count: u32, site: Site) -> ! {
    let (message, mend) = match barrier.expected == count {
        false => (
            format!("barrier {id} for {count} threads, where others came for {}", barrier.expected),
            "give every arrival of one barrier the same count",
        ),
        true => (
            format!("a second arrival at barrier {id} in one phase"),
            "wait for the barrier's phase (another barrier or barrier_sync) before arriving again",
        ),
    };
    thread.fail(FaultKind::BarrierMisuse, site, message, mend)
}

#[cold]
fn diverged(thread: &Thread, other: &Thread, id: u32, site: Site) -> ! {
    let warp = thread.warp_number();
    let message =
        format!("lanes {} and {} of warp {warp} meet at different lines in one phase of barrier {id}", other.lane(), thread.lane());
    let mend = "take the barrier out of the branch: the lanes of a warp come to one together";
    let mut fault = thread.fault(FaultKind::Divergence, site, message, mend);
    fault.involved.extend(other.site.get().map(|location| Involved { location, action: format!("lane {} waits here", other.lane()) }));
    thread.stop(fault)
}
