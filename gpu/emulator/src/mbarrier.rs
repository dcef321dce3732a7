//! Memory barrier objects in shared memory (PTX ISA, "mbarrier").

use crate::block::Block;
use crate::clock::{Gathered, Knowledge};
use crate::cluster;
use crate::detector::Detector;
use crate::fault::{Fault, FaultKind, Involved};
use crate::order::Space;
use crate::phases::Phases;
use crate::site::Site;
use crate::thread::{Thread, Waiting};

/// Bytes of an mbarrier object.
pub(crate) const BYTES: u32 = 8;
/// Largest arrival count and transaction count.
const LIMIT: i64 = (1 << 20) - 1;

pub(crate) struct Mbarrier {
    pub offset: u32,
    count: u32,
    /// Arrivals that this phase still waits for.
    pending: u32,
    /// Bytes announced and not copied yet.
    bytes: i64,
    /// Phases completed.
    phase: u64,
    waiters: Vec<u32>,
    initialised_at: Site,
    /// The block whose shared memory it lies in, as the detector numbers it.
    home: u32,
    /// Its agent in the detector, for the copies that complete on it: their time is the phase, counted from one.
    slot: u32,
    /// The initialising thread and its time.
    initialised_by: (u32, u32),
    /// A `fence_mbarrier_init` or proxy fence of that thread followed.
    fenced: bool,
    /// What the arrivals of this phase know, and what those of all earlier ones did.
    gathering: Gathered,
    completed: Knowledge,
    /// Last phase that copies were issued for, and that a thread has seen complete, counted from one.
    copied: u64,
    observed: u64,
}

impl Mbarrier {
    /// Whether the phase of this parity is complete: the one before the current one has it.
    fn is_complete(&self, parity: u32) -> bool {
        self.phase % 2 != u64::from(parity)
    }
}

impl Mbarrier {
    /// Its initialisation must be ordered before this use.
    fn check_visible(&self, thread: &Thread, detector: &Detector, site: Site) {
        let (by, time) = self.initialised_by;
        if !detector.thread(thread.number).borrow().view.knows(self.home, by, time) {
            let mut fault = thread.fault(
                FaultKind::Race,
                site,
                format!("{} is used with no barrier after its initialisation", thread.worker().shared.mbarrier(self.offset)),
                "let a block barrier stand between mbarrier_init and the first use by other threads",
            );
            fault.involved.push(Involved { location: self.initialised_at, action: format!("initialised by thread {by}") });
            thread.stop(fault);
        }
    }

    /// A test by a thread: acquires if the phase is complete, and reports a thread that was lapped.
    fn observe(&mut self, thread: &Thread, detector: &Detector, parity: u32, site: Site) {
        let mut state = detector.thread(thread.number).borrow_mut();
        let known = u64::from(state.view.knowledge.generic.time(detector.block, self.slot));
        if known % 2 == u64::from(parity) && self.phase >= known + 2 {
            let message = format!(
                "a wait for phase {known} of {}, which is in phase {}: the parity means another phase",
                thread.worker().shared.mbarrier(self.offset),
                self.phase
            );
            let mend = "let the phase end only after every waiting thread has seen the one before (count their arrivals)";
            drop(state);
            thread.fail(FaultKind::MbarrierMisuse, site, message, mend);
        }
        if self.is_complete(parity) {
            self.observed = self.phase;
            detector.alike.join(&mut state.view.knowledge, &self.completed);
        }
    }
}

/// The mbarrier that a range of shared memory overlaps.
pub(crate) fn overlapping(block: &Block, offset: u32, bytes: u32) -> Option<u32> {
    block.mbarriers.borrow().iter().map(|m| m.offset).find(|&at| offset < at + BYTES && at < offset + bytes)
}

/// `fence.mbarrier_init`: the thread's mbarriers so far are visible to the asynchronous proxy.
pub(crate) fn fence_init(thread: &Thread, site: Site) {
    if thread.worker().performs("fence_mbarrier_init", site) {
        let mut mbarriers = thread.block().mbarriers.borrow_mut();
        mbarriers.iter_mut().filter(|m| m.initialised_by.0 == thread.number).for_each(|m| m.fenced = true);
    }
}

/// Enters a copy that will complete on an mbarrier; returns its agent and time.
pub(crate) fn expect_copy(thread: &Thread, detector: &Detector, target: &Block, offset: u32, site: Site) -> (u32, u32) {
    let mut mbarriers = target.mbarriers.borrow_mut();
    let Some(m) = mbarriers.iter_mut().find(|m| m.offset == offset) else {
        thread.fail(FaultKind::MbarrierMisuse, site, absent(target, offset), MEND_INIT);
    };
    m.check_visible(thread, detector, site);
    let (by, time) = m.initialised_by;
    let fenced = m.fenced || detector.thread(thread.number).borrow().view.knows_fenced(Space::Shared, m.home, by, time);
    if !fenced {
        let mut fault = thread.fault(
            FaultKind::MissingProxyFence,
            site,
            format!(
                "a copy completes on {}, whose initialisation the asynchronous proxy may not see",
                thread.worker().shared.mbarrier(offset)
            ),
            "let the initialising thread call fence_mbarrier_init before the block barrier",
        );
        fault.involved.push(Involved { location: m.initialised_at, action: "initialised here".to_owned() });
        thread.stop(fault);
    }
    m.copied = m.phase + 1;
    (m.slot, m.copied as u32)
}

impl Block {
    pub fn describe_mbarrier(&self, verb: &str, offset: u32, parity: u8) -> String {
        match self.mbarriers.borrow().iter().find(|m| m.offset == offset) {
            Some(m) => format!(
                "{verb} parity {parity} of {}: phase {}, {} of {} arrivals and {} bytes pending",
                self.worker().shared.mbarrier(offset),
                m.phase,
                m.pending,
                m.count,
                m.bytes
            ),
            None => format!("{verb} {}, which is no more", self.worker().shared.mbarrier(offset)),
        }
    }
}

fn absent(block: &Block, offset: u32) -> String {
    format!("there is no mbarrier at {}", block.worker().shared.place(offset, 1))
}

const MEND_INIT: &str = "call mbarrier_init once, then fence_mbarrier_init and a block barrier, before any other use";

pub(crate) fn init(thread: &Thread, offset: u32, count: u32, site: Site) {
    let Some(count) = thread.worker().synchronise("mbarrier_init", site, count) else { return };
    let block = thread.block();
    let fail = |message: String, mend: &'static str| -> ! { thread.fail(FaultKind::MbarrierMisuse, site, message, mend) };
    if !offset.is_multiple_of(BYTES) || u64::from(offset) + u64::from(BYTES) > u64::from(block.shared_bytes()) {
        fail(
            format!("an mbarrier at {}, which has {} bytes", thread.worker().shared.place(offset, 1), block.shared_bytes()),
            "place it at a multiple of 8 inside the shared memory",
        );
    }
    if count == 0 || i64::from(count) > LIMIT {
        fail(format!("an mbarrier of {count} arrivals"), "count from 1 to 2^20 - 1 arrivals");
    }
    let mut mbarriers = block.mbarriers.borrow_mut();
    if let Some(known) = mbarriers.iter().find(|m| m.offset == offset) {
        let mbarrier = thread.worker().shared.mbarrier(offset);
        fail(format!("{mbarrier} was initialised at {} already", known.initialised_at), "invalidate it first");
    }
    let detector = thread.detector();
    mbarriers.push(Mbarrier {
        offset,
        count,
        pending: count,
        bytes: 0,
        phase: 0,
        waiters: Vec::new(),
        initialised_at: site,
        home: detector.map_or(0, |detector| detector.block),
        slot: detector.map_or(0, Detector::slot),
        initialised_by: (thread.number, detector.map_or(0, |d| d.thread(thread.number).borrow_mut().view.advance())),
        fenced: false,
        gathering: Gathered::default(),
        completed: Knowledge::default(),
        copied: 0,
        observed: 0,
    });
}

pub(crate) fn invalidate(thread: &Thread, offset: u32, site: Site) {
    let mut mbarriers = thread.block().mbarriers.borrow_mut();
    match mbarriers.iter().position(|m| m.offset == offset) {
        Some(at) if mbarriers[at].waiters.is_empty() => drop(mbarriers.swap_remove(at)),
        Some(_) => thread.fail(
            FaultKind::MbarrierMisuse,
            site,
            format!("threads wait on {}", thread.worker().shared.mbarrier(offset)),
            "invalidate it when all are done",
        ),
        None => thread.fail(FaultKind::MbarrierMisuse, site, absent(thread.block(), offset), MEND_INIT),
    }
}

/// Changes one mbarrier and wakes its waiters if that ended the phase.
pub(crate) fn update(
    block: &Block,
    offset: u32,
    change: impl FnOnce(&mut Mbarrier) -> Result<(), String>,
) -> Result<(), (String, &'static str)> {
    let mut mbarriers = block.mbarriers.borrow_mut();
    let Some(m) = mbarriers.iter_mut().find(|m| m.offset == offset) else {
        return Err((absent(block, offset), MEND_INIT));
    };
    change(m).map_err(|message| (message, "let arrivals and bytes equal what the phase was given"))?;
    if m.pending == 0 && m.bytes == 0 {
        explain(block, |phases, step| phases.end(offset, m.phase, step));
        m.phase += 1;
        m.pending = m.count;
        if let Some(detector) = &block.detector {
            m.gathering.all.learn_copy(detector.block, m.slot, m.phase as u32);
            m.completed.join(&std::mem::take(&mut m.gathering).all);
        }
        for waiter in m.waiters.drain(..) {
            block.make_ready(waiter);
        }
        block.worker().productive();
    }
    Ok(())
}

/// Notes what happens at a phase of the first block, where that is wanted.
fn explain(block: &Block, note: impl FnOnce(&mut Phases, u64)) {
    if let Some(explained) = block.worker().explained.as_ref().filter(|_| block.number == 0) {
        note(&mut explained.phases.borrow_mut(), block.worker().steps.get());
    }
}

/// Takes arrivals off the current phase.
fn arrivals(block: &Block, m: &mut Mbarrier, count: u32) -> Result<(), String> {
    let name = || block.worker().shared.mbarrier(m.offset);
    let too_many = || format!("one arrival too many in phase {} of {}, which counts {}", m.phase, name(), m.count);
    m.pending = m.pending.checked_sub(count).ok_or_else(too_many)?;
    Ok(())
}

/// Adds announced bytes, or takes copied ones off.
fn transaction(block: &Block, m: &mut Mbarrier, bytes: i64) -> Result<(), String> {
    m.bytes += bytes;
    if m.bytes.abs() > LIMIT {
        return Err(format!("{} bytes pending on {}, beyond 2^20 - 1", m.bytes, block.worker().shared.mbarrier(m.offset)));
    }
    Ok(())
}

/// Arrives once.
pub(crate) fn arrive(thread: &Thread, offset: u32, site: Site) {
    if let Some(count) = thread.worker().synchronise("mbarrier_arrive", site, 1) {
        update_by(thread, thread.block(), offset, 0, count, site);
    }
}

/// Arrives once at the mbarrier at the same place of another block of the cluster.
pub(crate) fn arrive_remote(thread: &Thread, offset: u32, rank: u32, site: Site) {
    if let Some(count) = thread.worker().synchronise("mbarrier_arrive_remote", site, 1) {
        update_by(thread, &cluster::peer(thread, rank, site), offset, 0, count, site);
    }
}

/// Announces bytes, then arrives once if `arrives`.
pub(crate) fn expect(thread: &Thread, offset: u32, bytes: u32, arrives: bool, site: Site) {
    let operation = if arrives { "mbarrier_arrive_expect_transaction" } else { "mbarrier_expect_transaction" };
    if let Some(bytes) = thread.worker().synchronise(operation, site, bytes) {
        update_by(thread, thread.block(), offset, bytes, u32::from(arrives), site);
    }
}

fn update_by(thread: &Thread, target: &Block, offset: u32, bytes: u32, count: u32, site: Site) {
    let result = update(target, offset, |m| {
        if count != 0 {
            explain(target, |phases, step| phases.arrive(offset, m.phase, Some(thread.warp_number()), step));
        }
        if let (Some(detector), true) = (thread.detector(), count != 0) {
            m.check_visible(thread, detector, site);
            detector.release(thread.number, &mut m.gathering);
        }
        transaction(target, m, i64::from(bytes))?;
        arrivals(target, m, count)
    });
    if let Err((message, mend)) = result {
        thread.fail(FaultKind::MbarrierMisuse, site, message, mend);
    }
}

/// Completes bytes of a copy, outside any thread.
pub(crate) fn complete(
    block: &Block,
    offset: u32,
    bytes: u32,
    arrive: u32,
    learnt: Option<[(u32, u32); 2]>,
    fault: impl FnOnce(FaultKind, String, &'static str) -> Fault,
) -> Result<(), Fault> {
    update(block, offset, |m| {
        explain(block, |phases, step| phases.arrive(offset, m.phase, None, step));
        if let (Some(detector), Some(agents)) = (&block.detector, learnt) {
            agents.iter().for_each(|&(slot, time)| m.gathering.all.generic.learn(detector.block, slot, time));
        }
        transaction(block, m, -i64::from(bytes))?;
        arrivals(block, m, arrive)
    })
    .map_err(|(message, mend)| fault(FaultKind::MbarrierMisuse, message, mend))
}

/// Whether the phase of `parity` is complete.
pub(crate) fn test(thread: &Thread, offset: u32, parity: u32, site: Site) -> bool {
    if parity > 1 {
        thread.fail(FaultKind::MbarrierMisuse, site, format!("parity {parity}"), "pass the phase's lowest bit");
    }
    let mut mbarriers = thread.block().mbarriers.borrow_mut();
    match mbarriers.iter_mut().find(|m| m.offset == offset) {
        Some(m) => {
            if let Some(detector) = thread.detector() {
                m.check_visible(thread, detector, site);
                m.observe(thread, detector, parity, site);
            }
            let complete = m.is_complete(parity);
            let phase = m.phase.wrapping_sub(u64::from(complete));
            // The phase before the first is complete from the start.
            if phase != u64::MAX {
                explain(thread.block(), |phases, step| phases.wait(offset, phase, thread.warp_number(), step));
            }
            if complete {
                thread.meetings.waited(offset);
            }
            complete
        }
        None => thread.fail(FaultKind::MbarrierMisuse, site, absent(thread.block(), offset), MEND_INIT),
    }
}

/// Tests once, and lets others run if the phase is not complete.
pub(crate) fn poll(thread: &Thread, offset: u32, parity: u32, site: Site) -> bool {
    if !thread.worker().performs("mbarrier_try_wait_parity", site) {
        return true;
    }
    if thread.worker().is_checked() && thread.turn_ends(4, false) {
        // The hardware may give up early, whatever the phase.
        thread.give_way(Waiting::Poll { offset, parity: parity as u8 }, site);
        return false;
    }
    let complete = test(thread, offset, parity, site);
    if !complete {
        thread.give_way(Waiting::Poll { offset, parity: parity as u8 }, site);
    }
    complete
}

pub(crate) fn wait(thread: &Thread, offset: u32, parity: u32, site: Site) {
    if !thread.worker().performs("mbarrier_wait_parity", site) {
        return;
    }
    while !test(thread, offset, parity, site) {
        let mut mbarriers = thread.block().mbarriers.borrow_mut();
        let m = mbarriers.iter_mut().find(|m| m.offset == offset).expect("just tested");
        m.waiters.push(thread.number);
        drop(mbarriers);
        thread.suspend(Waiting::Mbarrier { offset, parity: parity as u8 }, site);
    }
}

/// A block that ends must have copied what it announced.
pub(crate) fn check_finished(block: &Block) -> Result<(), Fault> {
    let mbarriers = block.mbarriers.borrow();
    let Some(m) = mbarriers.iter().find(|m| m.bytes != 0 || m.copied > m.observed) else { return Ok(()) };
    let what = if m.bytes != 0 { format!("{} bytes pending", m.bytes) } else { "copies that no thread waited for".to_owned() };
    Err(Fault {
        kind: FaultKind::InFlightAtExit,
        kernel: block.worker().grid().launch.kernel.clone(),
        thread: Some((block.index, block.threads[0].index)),
        message: format!("the block ended with {what} on {}, phase {}", block.worker().shared.mbarrier(m.offset), m.phase),
        involved: vec![Involved { location: m.initialised_at, action: "initialised here".to_owned() }],
        mend: "announce exactly the bytes that are copied, and wait for them",
    })
}
