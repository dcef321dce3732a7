//! The asynchronous engine: copies between global and shared memory that finish later than they are issued.
//!
//! A copy goes through three stages, each at a moment of the scheduler's choosing: its source is captured, its
//! destination is written, its completion is signalled. Fast mode takes all three at once. Matrix operations
//! of a warpgroup that read shared memory asynchronously are in the same queue.

use crate::atomic::add_in_global_memory;
use crate::block::Block;
use crate::copy_group::{Kind, Order};
use crate::fault::{Fault, FaultKind, Involved};
use crate::mbarrier;
use crate::memory::Allocation;
use crate::schedule::{Actor, Turn};
use crate::shadow::Access;
use crate::shadow::{Manner, Record};
use crate::site::Site;
use crate::thread::{Thread, Waiting};
use crate::words;
use crate::worker::{READ, WRITE};

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Load,
    Store,
    ReduceAddF32,
}

/// A contiguous part of a copy. Without a global address it is zero fill.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub global: Option<u64>,
    pub shared: u32,
    pub bytes: u32,
}

/// How a copy's completion is observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    /// By the thread's `cp.async` group of this number.
    CopyGroup(u32),
    /// By the thread's bulk group of this number.
    BulkGroup(u32),
    /// By bytes on an mbarrier.
    Bytes { mbarrier: u32, bytes: u32 },
    /// By one arrival, once all earlier `cp.async` of the thread are done; such an entry copies nothing.
    Arrival { mbarrier: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Stage {
    Issued,
    Captured,
    Written,
}

pub(crate) struct Transfer {
    thread: u32,
    /// How many copies the thread had issued before.
    number: u32,
    site: Site,
    direction: Direction,
    pieces: Vec<Piece>,
    completion: Completion,
    stage: Stage,
    data: Vec<u8>,
    /// In check mode.
    order: Option<Order>,
}

impl Completion {
    /// The group of its thread that it is part of.
    fn group(self) -> Option<(Kind, u32)> {
        match self {
            Self::CopyGroup(group) => Some((Kind::Copy, group)),
            Self::BulkGroup(group) => Some((Kind::Bulk, group)),
            Self::Bytes { .. } | Self::Arrival { .. } => None,
        }
    }
}

impl Transfer {
    fn fault(&self, block: &Block, kind: FaultKind, message: String, mend: &'static str) -> Fault {
        Fault {
            kind,
            kernel: block.worker().grid().launch.kernel.clone(),
            thread: Some((block.index, block.threads[self.thread as usize].index)),
            message,
            involved: vec![Involved { location: self.site, action: "asynchronous copy issued here".to_owned() }],
            mend,
        }
    }

    fn capture(&mut self, block: &Block) -> Result<(), Fault> {
        let mut data = Vec::with_capacity(self.pieces.iter().map(|p| p.bytes as usize).sum());
        for piece in &self.pieces {
            let start = data.len();
            data.resize(start + piece.bytes as usize, 0);
            match (self.direction, piece.global) {
                (Direction::Load, None) => {}
                (Direction::Load, Some(address)) => {
                    let allocation = block.worker().locate(READ, address, u64::from(piece.bytes));
                    let allocation = allocation.ok_or_else(|| self.miss(block, address, piece.bytes))?;
                    self.enter(block, Some(allocation), address, piece.bytes, false)?;
                    words::read_bytes(allocation.words(), (address - allocation.start) as usize, &mut data[start..]);
                }
                _ => {
                    self.enter(block, None, u64::from(piece.shared), piece.bytes, false)?;
                    data[start..].copy_from_slice(&block.shared()[piece.shared as usize..][..piece.bytes as usize]);
                }
            }
        }
        self.data = data;
        self.stage = Stage::Captured;
        Ok(())
    }

    fn write(&mut self, block: &Block) -> Result<(), Fault> {
        let mut at = 0;
        for piece in &self.pieces {
            let bytes = &self.data[at..][..piece.bytes as usize];
            at += bytes.len();
            match (self.direction, piece.global) {
                (Direction::Load, _) => {
                    self.enter(block, None, u64::from(piece.shared), piece.bytes, true)?;
                    block.shared()[piece.shared as usize..][..bytes.len()].copy_from_slice(bytes);
                }
                (_, None) => {}
                (direction, Some(address)) => {
                    let allocation = block.worker().locate(WRITE, address, u64::from(piece.bytes));
                    let allocation = allocation.ok_or_else(|| self.miss(block, address, piece.bytes))?;
                    self.enter(block, Some(allocation), address, piece.bytes, true)?;
                    let offset = (address - allocation.start) as usize;
                    if direction == Direction::ReduceAddF32 {
                        add_f32(allocation.words(), offset, bytes);
                    } else {
                        words::write_bytes(allocation.words(), offset, bytes);
                    }
                    block.worker().written(allocation, offset as u64, u64::from(piece.bytes));
                }
            }
        }
        self.stage = Stage::Written;
        block.worker().productive();
        Ok(())
    }

    /// Enters one of its accesses into the shadow.
    fn enter(&self, block: &Block, allocation: Option<&Allocation>, address: u64, bytes: u32, writes: bool) -> Result<(), Fault> {
        let (Some(order), Some(detector)) = (&self.order, &block.detector) else { return Ok(()) };
        let reduces = writes && self.direction == Direction::ReduceAddF32;
        let manner = match self.completion {
            Completion::CopyGroup(_) => Manner::Weak,
            _ if reduces => Manner::Reduce,
            _ => Manner::Async,
        };
        let (slot, time) = if writes { order.write } else { order.read };
        let record = Record { block: detector.block, slot, time, thread: self.thread as u16, manner, writes, site: self.site };
        let access = Access { address, bytes: u64::from(bytes), writes, reads: !writes || reduces, manner, site: self.site };
        let entered = match allocation {
            Some(allocation) => detector.enter_global(block.worker(), allocation, &access, &record, &order.view),
            None => detector.enter_shared(block.worker(), &access, &record, &order.view),
        };
        match entered {
            Err(bad) if !block.worker().grid().options.is_pardoned() => {
                let mut fault = self.fault(block, bad.0, bad.1, bad.3);
                fault.involved = bad.2;
                Err(fault)
            }
            _ => Ok(()),
        }
    }

    fn miss(&self, block: &Block, address: u64, bytes: u32) -> Fault {
        let (kind, message) = block.worker().describe_miss(address, u64::from(bytes));
        self.fault(block, kind, format!("an asynchronous copy of {message}"), "keep the copy inside the tensor")
    }

    fn signal(&self, block: &Block) -> Result<(), Fault> {
        let fault = |kind, message, mend: &'static str| self.fault(block, kind, message, mend);
        match self.completion {
            Completion::Bytes { mbarrier, bytes } => mbarrier::complete(block, mbarrier, bytes, 0, None, fault),
            Completion::Arrival { mbarrier } => {
                mbarrier::complete(block, mbarrier, 0, 1, self.order.as_ref().map(|order| [order.read, order.write]), fault)
            }
            Completion::CopyGroup(_) | Completion::BulkGroup(_) => Ok(()),
        }
    }
}

fn add_f32(words: &[std::sync::atomic::AtomicU64], offset: usize, bytes: &[u8]) {
    for (i, chunk) in bytes.chunks_exact(4).enumerate() {
        let addend = f32::from_le_bytes(chunk.try_into().expect("chunks of 4"));
        let at = offset + i * 4;
        let shift = at % 8 * 8;
        words::modify(&words[at / 8], 0xffff_ffff << shift, |old| {
            u64::from(add_in_global_memory(f32::from_bits((old >> shift) as u32), addend).to_bits()) << shift
        });
    }
}

/// Queues a copy; in fast mode it is done when this returns.
pub(crate) fn issue(thread: &Thread, direction: Direction, pieces: Vec<Piece>, completion: Completion, site: Site) {
    issue_to(thread, thread.block(), direction, pieces, completion, site);
}

/// Queues a copy whose shared memory and mbarrier are those of a block of the thread's cluster.
pub(crate) fn issue_to(thread: &Thread, block: &Block, direction: Direction, pieces: Vec<Piece>, completion: Completion, site: Site) {
    for piece in &pieces {
        check_piece(thread, block, direction, piece, site);
    }
    let order = thread.detector().map(|detector| Order::new(thread, detector, block, completion, site));
    let number = thread.copies.replace(thread.copies.get().wrapping_add(1));
    let mut transfer =
        Transfer { thread: thread.number, number, site, direction, pieces, completion, stage: Stage::Issued, data: Vec::new(), order };
    if block.worker().is_checked() {
        if let Some((kind, group)) = transfer.completion.group() {
            thread.in_flight(kind).borrow_mut().issue(group);
        }
        block.transfers.borrow_mut().push(Box::new(transfer));
        return;
    }
    let done = transfer.capture(block).and_then(|()| transfer.write(block)).and_then(|()| transfer.signal(block));
    if let Err(fault) = done {
        thread.stop(fault);
    }
}

/// `cp.async`: `valid` bytes are copied, the rest of `bytes` is zero.
pub(crate) fn copy_async(thread: &Thread, destination: u32, source: u64, bytes: u32, valid: u32, site: Site) {
    if !matches!(bytes, 4 | 8 | 16) || valid > bytes {
        let message = format!("cp.async of {bytes} bytes, {valid} of them valid");
        thread.fail(FaultKind::AsyncMisuse, site, message, "copy 4, 8 or 16 bytes, with at most as many valid");
    }
    check_alignment(thread, destination, source, bytes, site);
    let copied = Piece { global: Some(source), shared: destination, bytes: valid };
    let zero = Piece { global: None, shared: destination + valid, bytes: bytes - valid };
    let pieces = [copied, zero].into_iter().filter(|piece| piece.bytes != 0).collect();
    issue(thread, Direction::Load, pieces, Completion::CopyGroup(thread.copy_groups.get()), site);
}

/// A bulk copy of one contiguous range, observed by an mbarrier or by the thread's bulk group.
pub(crate) fn bulk(thread: &Thread, direction: Direction, shared: u32, global: u64, bytes: u32, mbarrier: Option<u32>, site: Site) {
    if !bytes.is_multiple_of(16) || bytes == 0 {
        let message = format!("a bulk copy of {bytes} bytes");
        thread.fail(FaultKind::AsyncMisuse, site, message, "copy a positive multiple of 16 bytes");
    }
    check_alignment(thread, shared, global, 16, site);
    let completion = match mbarrier {
        Some(mbarrier) => Completion::Bytes { mbarrier, bytes },
        None => Completion::BulkGroup(thread.bulk_groups.get()),
    };
    issue(thread, direction, vec![Piece { global: Some(global), shared, bytes }], completion, site);
}

fn check_alignment(thread: &Thread, shared: u32, global: u64, bytes: u32, site: Site) {
    if !shared.is_multiple_of(bytes) || !global.is_multiple_of(u64::from(bytes)) {
        let message = format!(
            "a copy in units of {bytes} bytes between {} and an address that is {} past a unit",
            thread.worker().shared.place(shared, 1),
            global % u64::from(bytes)
        );
        thread.fail(FaultKind::Misaligned, site, message, "align both sides to the unit");
    }
}

/// A part of a copy whose shared memory is that of a block.
fn check_piece(thread: &Thread, block: &Block, direction: Direction, piece: &Piece, site: Site) {
    let shared_end = u64::from(piece.shared) + u64::from(piece.bytes);
    if shared_end > u64::from(block.shared_bytes()) {
        let place = block.worker().shared.place(piece.shared, 1);
        let message = format!("an asynchronous copy of {} bytes at {place}, which has {}", piece.bytes, block.shared_bytes());
        thread.fail(FaultKind::OutOfBounds, site, message, "keep the copy inside the shared memory");
    }
    if direction == Direction::Load
        && let Some(at) = mbarrier::overlapping(block, piece.shared, piece.bytes)
    {
        let names = &block.worker().shared;
        let (place, mbarrier) = (names.place(piece.shared, 1), names.mbarrier(at));
        let message = format!("an asynchronous copy of {} bytes to {place}, where {mbarrier} lies", piece.bytes);
        thread.fail(FaultKind::MbarrierMisuse, site, message, "place it elsewhere, or invalidate the mbarrier first");
    }
    let Some(address) = piece.global else { return };
    let slot = if direction == Direction::Load { READ } else { WRITE };
    if block.worker().locate(slot, address, u64::from(piece.bytes)).is_none() {
        let (kind, message) = block.worker().describe_miss(address, u64::from(piece.bytes));
        thread.fail(kind, site, format!("an asynchronous copy of {message}"), "keep the copy inside the tensor");
    }
}

/// Which transfer goes on where this one is chosen, the stage that it comes to, and where it was issued: an arrival comes after its thread's copies.
pub(crate) fn chosen(block: &Block, choice: usize) -> (usize, Turn, Site) {
    let transfers = block.transfers.borrow();
    let at = choice % transfers.len();
    let blocked = matches!(transfers[at].completion, Completion::Arrival { .. })
        && transfers[..at].iter().any(|t| t.thread == transfers[at].thread && matches!(t.completion, Completion::CopyGroup(_)));
    let at = if blocked { 0 } else { at };
    let Transfer { thread, number, site, stage, .. } = *transfers[at];
    (at, Turn { block: block.number, actor: Actor::Copy { thread, number }, until: stage as u32 + 1 }, site)
}

/// The place in the queue of a copy, and the stages after it.
pub(crate) fn find(block: &Block, thread: u32, number: u32) -> Option<(usize, u32)> {
    let transfers = block.transfers.borrow();
    let at = transfers.iter().position(|transfer| (transfer.thread, transfer.number) == (thread, number))?;
    Some((at, transfers[at].stage as u32))
}

/// Takes one transfer of the block one stage on.
pub(crate) fn advance(block: &Block, at: usize) -> Result<(), Fault> {
    let mut transfers = block.transfers.borrow_mut();
    let thread = &block.threads[transfers[at].thread as usize];
    // Only copies of the thread's own block are in groups.
    let in_flight = transfers[at].completion.group().map(|(kind, group)| (thread.in_flight(kind), group));
    match transfers[at].stage {
        Stage::Issued => {
            transfers[at].capture(block)?;
            in_flight.iter().for_each(|(copies, group)| copies.borrow_mut().capture(*group));
        }
        Stage::Captured => transfers[at].write(block)?,
        Stage::Written => {
            let done = transfers.remove(at);
            in_flight.iter().for_each(|(copies, group)| copies.borrow_mut().end(*group));
            done.signal(block)?;
        }
    }
    drop(transfers);
    wake(thread);
    Ok(())
}

/// Whether a group wait of the thread still waits for a copy in flight.
pub(crate) fn is_held(thread: &Thread, waiting: Waiting) -> bool {
    let (kind, groups, pending, read_only) = match waiting {
        Waiting::CopyGroups { pending } => (Kind::Copy, &thread.copy_groups, pending, false),
        Waiting::BulkGroups { pending, read_only } => (Kind::Bulk, &thread.bulk_groups, pending, read_only),
        _ => return false,
    };
    thread.in_flight(kind).borrow().first(read_only).is_some_and(|group| group + pending < groups.get())
}

/// After a copy has advanced by one stage, makes its thread ready if its group wait is over. Other threads do not change.
fn wake(thread: &Thread) {
    let waiting = thread.waiting.get();
    if matches!(waiting, Waiting::CopyGroups { .. } | Waiting::BulkGroups { .. }) && !is_held(thread, waiting) {
        thread.block().make_ready(thread.number);
    }
}

/// Queues an arrival at an mbarrier after the thread's `cp.async` so far.
pub(crate) fn arrive(thread: &Thread, mbarrier: u32, site: Site) {
    if thread.worker().performs("copy_async_mbarrier_arrive", site) {
        issue(thread, Direction::Load, Vec::new(), Completion::Arrival { mbarrier }, site);
    }
}

/// A block must not end before its copies have read its shared memory or written it. Stores whose sources are
/// read land before the grid ends.
pub(crate) fn finish(block: &Block) -> Result<(), Fault> {
    for mut left in block.transfers.take() {
        match (left.stage, left.completion) {
            (Stage::Captured, Completion::BulkGroup(_)) => left.write(block)?,
            (Stage::Written, Completion::BulkGroup(_)) => {}
            _ => {
                let message = "the block ended with an asynchronous copy in flight".to_owned();
                let mend = "wait for its group or mbarrier before the block ends";
                return Err(left.fault(block, FaultKind::InFlightAtExit, message, mend));
            }
        }
    }
    Ok(())
}
