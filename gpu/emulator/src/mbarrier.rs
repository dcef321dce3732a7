//! Memory barrier objects in shared memory (PTX ISA, "mbarrier").

use crate::block::Block;
use crate::fault::{Fault, FaultKind, Involved};
use crate::thread::{Site, Thread, Waiting};

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
    pub initialised_at: Site,
}

impl Mbarrier {
    /// Whether the phase of this parity is complete: the one before the current one has it.
    fn is_complete(&self, parity: u32) -> bool {
        self.phase % 2 != u64::from(parity)
    }
}

impl Block {
    pub fn describe_mbarrier(&self, verb: &str, offset: u32, parity: u32) -> String {
        match self.mbarriers.borrow().iter().find(|m| m.offset == offset) {
            Some(m) => format!(
                "{verb} parity {parity} of the mbarrier at {offset}: phase {}, {} of {} arrivals and {} bytes pending",
                m.phase, m.pending, m.count, m.bytes
            ),
            None => format!("{verb} an mbarrier at {offset} that is no more"),
        }
    }
}

const MEND_INIT: &str = "call mbarrier_init once, then fence_mbarrier_init and a block barrier, before any other use";

pub(crate) fn init(thread: &Thread, offset: u32, count: u32, site: Site) {
    let block = thread.block();
    let fail = |message: String, mend: &str| -> ! { thread.fail(FaultKind::MbarrierMisuse, site, message, mend) };
    if offset % BYTES != 0 || u64::from(offset) + u64::from(BYTES) > u64::from(block.shared_bytes()) {
        fail(format!("an mbarrier at shared offset {offset} of {}", block.shared_bytes()), "place it at a multiple of 8 inside the shared memory");
    }
    if count == 0 || i64::from(count) > LIMIT {
        fail(format!("an mbarrier of {count} arrivals"), "count from 1 to 2^20 - 1 arrivals");
    }
    let mut mbarriers = block.mbarriers.borrow_mut();
    if let Some(known) = mbarriers.iter().find(|m| m.offset == offset) {
        fail(format!("the mbarrier at {offset} was initialised at {} already", known.initialised_at), "invalidate it first");
    }
    mbarriers.push(Mbarrier { offset, count, pending: count, bytes: 0, phase: 0, waiters: Vec::new(), initialised_at: site });
}

pub(crate) fn invalidate(thread: &Thread, offset: u32, site: Site) {
    let mut mbarriers = thread.block().mbarriers.borrow_mut();
    match mbarriers.iter().position(|m| m.offset == offset) {
        Some(at) if mbarriers[at].waiters.is_empty() => drop(mbarriers.swap_remove(at)),
        Some(_) => thread.fail(FaultKind::MbarrierMisuse, site, format!("threads wait on the mbarrier at {offset}"), "invalidate it when all are done"),
        None => thread.fail(FaultKind::MbarrierMisuse, site, format!("there is no mbarrier at {offset}"), MEND_INIT),
    }
}

/// Changes one mbarrier and wakes its waiters if that ended the phase.
pub(crate) fn update(block: &Block, offset: u32, change: impl FnOnce(&mut Mbarrier) -> Result<(), String>) -> Result<(), (String, &'static str)> {
    let mut mbarriers = block.mbarriers.borrow_mut();
    let Some(m) = mbarriers.iter_mut().find(|m| m.offset == offset) else {
        return Err((format!("there is no mbarrier at {offset}"), MEND_INIT));
    };
    change(m).map_err(|message| (message, "let arrivals and bytes equal what the phase was given"))?;
    if m.pending == 0 && m.bytes == 0 {
        m.phase += 1;
        m.pending = m.count;
        for waiter in m.waiters.drain(..) {
            block.make_ready(waiter);
        }
        block.worker().productive();
    }
    Ok(())
}

/// Takes arrivals off the current phase.
pub(crate) fn arrivals(m: &mut Mbarrier, count: u32) -> Result<(), String> {
    let left = m.pending.checked_sub(count);
    m.pending = left.ok_or_else(|| format!("more than {} arrivals in phase {} of the mbarrier at {}", m.count, m.phase, m.offset))?;
    Ok(())
}

/// Adds announced bytes, or takes copied ones off.
pub(crate) fn transaction(m: &mut Mbarrier, bytes: i64) -> Result<(), String> {
    m.bytes += bytes;
    if m.bytes.abs() > LIMIT {
        return Err(format!("{} bytes pending on the mbarrier at {}, beyond 2^20 - 1", m.bytes, m.offset));
    }
    Ok(())
}

/// Announces bytes, then arrives `count` times.
pub(crate) fn arrive(thread: &Thread, offset: u32, bytes: u32, count: u32, site: Site) {
    let result = update(thread.block(), offset, |m| {
        transaction(m, i64::from(bytes))?;
        arrivals(m, count)
    });
    if let Err((message, mend)) = result {
        thread.fail(FaultKind::MbarrierMisuse, site, message, mend);
    }
}

/// Completes bytes of a copy, outside any thread.
pub(crate) fn complete(block: &Block, offset: u32, bytes: u32, arrive: u32, fault: impl FnOnce(FaultKind, String, &str) -> Fault) -> Result<(), Fault> {
    update(block, offset, |m| {
        transaction(m, -i64::from(bytes))?;
        arrivals(m, arrive)
    })
    .map_err(|(message, mend)| fault(FaultKind::MbarrierMisuse, message, mend))
}

/// Whether the phase of `parity` is complete.
pub(crate) fn test(thread: &Thread, offset: u32, parity: u32, site: Site) -> bool {
    if parity > 1 {
        thread.fail(FaultKind::MbarrierMisuse, site, format!("parity {parity}"), "pass the phase's lowest bit");
    }
    let mbarriers = thread.block().mbarriers.borrow();
    match mbarriers.iter().find(|m| m.offset == offset) {
        Some(m) => m.is_complete(parity),
        None => thread.fail(FaultKind::MbarrierMisuse, site, format!("there is no mbarrier at {offset}"), MEND_INIT),
    }
}

/// Tests once, and lets others run if the phase is not complete.
pub(crate) fn poll(thread: &Thread, offset: u32, parity: u32, site: Site) -> bool {
    let complete = test(thread, offset, parity, site);
    if !complete {
        thread.give_way(Waiting::Poll { offset, parity }, site);
    }
    complete
}

pub(crate) fn wait(thread: &Thread, offset: u32, parity: u32, site: Site) {
    while !test(thread, offset, parity, site) {
        let mut mbarriers = thread.block().mbarriers.borrow_mut();
        let m = mbarriers.iter_mut().find(|m| m.offset == offset).expect("just tested");
        m.waiters.push(thread.number);
        drop(mbarriers);
        thread.suspend(Waiting::Mbarrier { offset, parity }, site);
    }
}

/// A block that ends must have copied what it announced.
pub(crate) fn check_finished(block: &Block) -> Result<(), Fault> {
    let mbarriers = block.mbarriers.borrow();
    let Some(m) = mbarriers.iter().find(|m| m.bytes != 0) else { return Ok(()) };
    Err(Fault {
        kind: FaultKind::InFlightAtExit,
        kernel: block.worker().grid().launch.kernel.clone(),
        thread: Some((block.index, block.threads[0].index)),
        message: format!("the block ended with {} bytes pending on the mbarrier at {}, phase {}", m.bytes, m.offset, m.phase),
        involved: vec![Involved { location: m.initialised_at, action: "initialised here".to_owned() }],
        mend: "announce exactly the bytes that are copied, and wait for them".to_owned(),
    })
}
