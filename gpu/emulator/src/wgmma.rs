//! Matrix multiplication by a warpgroup (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions").
//!
//! The bytes are read where the descriptors say, swizzle and all, and the registers have the hardware's fragments. An
//! instruction's products are exact, summed in `f64`, added to the accumulator and rounded to `f32` once; hardware rounds
//! in another way, which is not documented.
//!
//! A warp's reads of shared memory are accesses of the asynchronous proxy that end at a wait of that warp for the
//! instruction's group. Accumulators are kept from the first instruction until a thread takes them back, which is an
//! error before such a wait.

use crate::clock::View;
use crate::collective;
use crate::detector::Detector;
use crate::fault::FaultKind;
use crate::format::Format;
use crate::operand::{CHUNK, Operand};
use crate::order::Group;
use crate::shadow::Access;
use crate::shadow::{Manner, Record};
use crate::site::Site;
use crate::thread::Thread;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// Rows of every instruction.
const ROWS: usize = 64;
const THREADS: u32 = 128;
const WARPS: u32 = THREADS / 32;

/// `wgmma.mma_async.m64nNkK.f32`, but for its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// N.
    pub columns: u32,
    /// The elements of the left and of the right operand.
    pub formats: [Format; 2],
    /// Whether the left operand's rows in shared memory lie along M.
    pub left_mn_major: bool,
    /// Whether the right operand's rows lie along N.
    pub right_mn_major: bool,
}

/// A left operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// A matrix descriptor.
    Shared(u64),
    /// A thread's fragment.
    Registers([u32; 4]),
}

/// What one thread has issued.
#[derive(Default)]
pub(crate) struct Stream {
    fenced: Cell<bool>,
    tickets: Cell<u32>,
    issued: Cell<u32>,
    /// Instructions issued before each commit.
    commits: RefCell<Vec<u32>>,
    /// Instructions that were waited for.
    waited: Cell<u32>,
    /// Where the last was issued.
    site: Cell<Option<Site>>,
}

/// The accumulators of a warpgroup under one ticket.
struct Accumulators {
    /// Rows of `columns`.
    values: Vec<f32>,
    columns: usize,
    /// The last instruction that writes them.
    last: u32,
    /// Threads that took theirs.
    taken: u32,
}

/// What a block has in flight: accumulators by warpgroup and ticket, and the first agent in the detector of each warpgroup, whose warps have one each.
#[derive(Default)]
pub(crate) struct InFlight {
    accumulators: BTreeMap<(u32, u32), Accumulators>,
    slots: BTreeMap<u32, u32>,
}

impl InFlight {
    /// A warp's agent, beside those of its warpgroup.
    fn slot(&mut self, detector: &Detector, warp: u32) -> u32 {
        self.slots.entry(warp / WARPS).or_insert_with(|| detector.slots(WARPS)).wrapping_add(warp % WARPS)
    }
}

fn fail(thread: &Thread, site: Site, message: impl Into<String>, mend: &'static str) -> ! {
    thread.fail(FaultKind::MatrixMisuse, site, message.into(), mend)
}

/// `wgmma.fence`
pub(crate) fn fence(thread: &Thread, site: Site) {
    if thread.worker().performs("wgmma_fence", site) {
        thread.wgmma.fenced.set(true);
    }
}

/// `wgmma.commit_group`
pub(crate) fn commit(thread: &Thread, site: Site) {
    if thread.worker().performs("wgmma_commit", site) {
        let stream = &thread.wgmma;
        stream.commits.borrow_mut().push(stream.issued.get());
        // Whatever follows may touch registers.
        stream.fenced.set(false);
    }
}

/// `wgmma.wait_group`
pub(crate) fn wait(thread: &Thread, pending: u32, site: Site) {
    let Some(pending) = thread.worker().synchronise("wgmma_wait", site, pending) else { return };
    let stream = &thread.wgmma;
    let commits = stream.commits.borrow();
    let done = commits.len().checked_sub(1 + pending as usize).map_or(0, |last| commits[last]);
    stream.waited.set(stream.waited.get().max(done));
    if let (Some(detector), true) = (thread.detector(), done != 0) {
        let slot = thread.block().wgmma.borrow_mut().slot(detector, thread.warp_number());
        detector.alike.learn_copy(&mut detector.thread(thread.number).borrow_mut().view.knowledge, detector.block, slot, done);
    }
}

/// A new accumulator. All threads of a warpgroup number theirs alike.
pub(crate) fn ticket(thread: &Thread) -> u32 {
    let tickets = &thread.wgmma.tickets;
    tickets.set(tickets.get() + 1);
    tickets.get()
}

/// What a thread brings to an instruction.
struct Part {
    thread: *const Thread,
    ticket: u32,
    instruction: Instruction,
    left: Left,
    right: u64,
    addends: Option<Vec<f32>>,
}

/// `wgmma.mma_async`
pub(crate) fn multiply(
    thread: &Thread,
    instruction: &Instruction,
    ticket: u32,
    left: Left,
    right: u64,
    addends: Option<&[f32]>,
    site: Site,
) {
    if thread.block().threads.len() as u32 - thread.number / THREADS * THREADS < THREADS {
        fail(thread, site, "a warpgroup of fewer than 128 threads multiplies", "launch blocks of whole warpgroups");
    }
    let stream = &thread.wgmma;
    if !stream.fenced.get() {
        let mend = "call wgmma.fence before the first multiplication of each group";
        fail(thread, site, "a multiplication whose registers were accessed since the last wgmma.fence", mend);
    }
    stream.issued.set(stream.issued.get() + 1);
    stream.site.set(Some(site));
    let continues = thread.block().wgmma.borrow().accumulators.contains_key(&(thread.number / THREADS, ticket));
    let addends = if continues { None } else { addends.map(<[f32]>::to_vec) };
    let mut part = Part { thread, ticket, instruction: *instruction, left, right, addends };
    collective::meet(thread, Group::Warpgroup, &mut part, |parts| execute(thread, parts, continues, site), site);
}

/// Not inlined: the other threads wait in [`multiply`], and their frames stay small.
#[inline(never)]
fn execute(last: &Thread, parts: &mut [&mut Part], continues: bool, site: Site) {
    let Part { ticket, instruction, left, right, .. } = *parts[0];
    let alike = |part: &&mut Part| {
        let same_left = match (part.left, left) {
            (Left::Shared(a), Left::Shared(b)) => a == b,
            (Left::Registers(_), Left::Registers(_)) => true,
            _ => false,
        };
        part.ticket == ticket && part.instruction == instruction && part.right == right && same_left
    };
    if !parts.iter().all(alike) {
        let message = "threads of a warpgroup multiply different operands";
        last.fail(FaultKind::Divergence, site, message.to_owned(), "give all 128 threads the same descriptors");
    }
    let [left_format, right_format] = instruction.formats;
    let (columns, depth) = (instruction.columns as usize, left_format.depth());
    let decode = |descriptor, mn_major, format| match Operand::decode(descriptor, mn_major, format) {
        Ok(operand) => operand,
        Err(problem) => fail(last, site, problem, "take the descriptor of a tile's layout"),
    };
    let a = match left {
        Left::Shared(descriptor) => {
            let operand = decode(descriptor, instruction.left_mn_major, left_format);
            for warp in 0..4 {
                let runs = operand.runs(&last.worker().runs, 16 * warp as u32..16 * warp as u32 + 16, depth as u32);
                read(parts[warp * 32].thread, &runs, site);
            }
            operand.gather(last.block().shared(), ROWS, depth, left_format)
        }
        Left::Registers(_) => fragments(parts, left_format),
    };
    let operand = decode(right, instruction.right_mn_major, right_format);
    let runs = operand.runs(&last.worker().runs, 0..instruction.columns, depth as u32);
    read_by_all(parts, &runs, site);
    let b = operand.gather(last.block().shared(), columns, depth, right_format);
    let mut in_flight = last.block().wgmma.borrow_mut();
    let key = (last.number / THREADS, ticket);
    if !continues {
        let values = join(parts, columns);
        in_flight.accumulators.insert(key, Accumulators { values, columns, last: 0, taken: 0 });
    }
    let accumulators = in_flight.accumulators.get_mut(&key).expect("it was there, or was just inserted");
    accumulators.last = last.wgmma.issued.get();
    accumulate(&mut accumulators.values, &a, &b, columns, depth);
}

/// Enters reads of runs of bytes by all warps of a warpgroup into the detector: one access of four agents.
fn read_by_all(parts: &[&mut Part], runs: &[(u32, u32)], site: Site) {
    let warps = || parts.iter().map(|part| part.thread).step_by(32);
    // SAFETY: the pointer is that of a thread of this block, which lives as long as its coroutine is suspended or runs.
    let first = unsafe { &*parts[0].thread };
    let block = first.block();
    let (Some(detector), true) = (&block.detector, runs.last().is_none_or(|(at, bytes)| at + bytes <= block.shared_bytes())) else {
        return warps().for_each(|warp| read(warp, runs, site));
    };
    let slot = block.wgmma.borrow_mut().slot(detector, first.warp_number());
    // As any lane of each warp sees them.
    let lanes: [u32; WARPS as usize] = std::array::from_fn(|warp| first.number + 32 * warp as u32 + block.worker().random.below(32) as u32);
    let views = lanes.map(|thread| view(detector, thread));
    let of_all = record(detector, first, slot, Manner::Operand, lanes[0], site);
    let accesses = || runs.iter().map(|&(address, bytes)| access(address, bytes, site));
    if accesses().all(|access| detector.enter_shared_by(block.worker(), &access, &of_all, &views).is_ok()) {
        return;
    }
    // Again for each warp, to name the one that conflicts.
    for ((thread, view), slot) in lanes.into_iter().zip(&views).zip(slot..) {
        let record = record(detector, first, slot, Manner::Async, thread, site);
        for access in accesses() {
            block.threads[thread as usize].judge(detector.enter_shared(block.worker(), &access, &record, view), site);
        }
    }
}

/// What a thread knows when its instruction reads; what it does later is no part of that.
fn view(detector: &Detector, thread: u32) -> View {
    let mut state = detector.thread(thread).borrow_mut();
    let view = state.view.clone();
    state.view.advance();
    view
}

fn record(detector: &Detector, first: &Thread, slot: u32, manner: Manner, thread: u32, site: Site) -> Record {
    let time = first.wgmma.issued.get();
    Record { block: detector.block, slot, time, thread: thread as u16, manner, writes: false, site }
}

fn access(address: u32, bytes: u32, site: Site) -> Access {
    Access { address: address.into(), bytes: bytes.into(), writes: false, reads: true, manner: Manner::Async, site }
}

/// Enters one warp's reads of runs of bytes into the detector, as any of its lanes sees them.
fn read(warp: *const Thread, runs: &[(u32, u32)], site: Site) {
    // SAFETY: the pointer is that of a thread of this block, which lives as long as its coroutine is suspended or runs.
    let first = unsafe { &*warp };
    let block = first.block();
    if let Some(&(at, bytes)) = runs.last().filter(|&&(at, bytes)| at + bytes > block.shared_bytes()) {
        let (beyond, bytes) = (at + bytes - CHUNK, block.shared_bytes());
        let message = format!("a matrix operand reaches byte {beyond} of the block's shared memory, which has {bytes}");
        first.fail(FaultKind::OutOfBounds, site, message, "take the descriptor of a tile inside the shared memory");
    }
    let Some(detector) = &block.detector else { return };
    let slot = block.wgmma.borrow_mut().slot(detector, first.warp_number());
    let lane = block.worker().random.below(32) as u32;
    let thread = &block.threads[(first.number + lane) as usize];
    let view = view(detector, thread.number);
    let record = record(detector, first, slot, Manner::Async, thread.number, site);
    for &(address, bytes) in runs {
        thread.judge(detector.enter_shared(block.worker(), &access(address, bytes, site), &record, &view), site);
    }
}

/// A left operand out of registers: word `i` holds row `lane / 4 + 8 (i % 2)`, bytes from `4 (lane % 4) + 16 (i / 2)` on.
fn fragments(parts: &[&mut Part], format: Format) -> Vec<f64> {
    let depth = format.depth();
    let mut a = vec![0.0; ROWS * depth];
    for (number, part) in parts.iter().enumerate() {
        let Left::Registers(words) = part.left else { unreachable!("all parts are of one kind") };
        for (i, word) in words.iter().enumerate() {
            let row = number / 32 * 16 + number % 32 / 4 + 8 * (i % 2);
            format.unpack(*word, 4 * (number % 4) + 16 * (i / 2), &mut a[row * depth..][..depth]);
        }
    }
    a
}

/// Row and column of a thread's register.
fn place(thread: usize, register: usize) -> (usize, usize) {
    let row = thread / 32 * 16 + thread % 32 / 4 + 8 * (register / 2 % 2);
    (row, 8 * (register / 4) + 2 * (thread % 4) + register % 2)
}

/// The matrix of all threads' accumulators, zero where there are none yet.
fn join(parts: &[&mut Part], columns: usize) -> Vec<f32> {
    let mut values = vec![0.0; ROWS * columns];
    for (number, part) in parts.iter().enumerate() {
        for (register, &value) in part.addends.iter().flatten().enumerate() {
            let (row, column) = place(number, register);
            values[row * columns + column] = value;
        }
    }
    values
}

/// Columns whose sums stay in registers: N is a multiple of them.
const PANEL: usize = 8;

/// With the widest vectors that the machine has: the operations and their order are the same, and so are the bits.
#[multiversion::multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn accumulate(values: &mut [f32], a: &[f64], b: &[f64], columns: usize, depth: usize) {
    debug_assert!(columns.is_multiple_of(PANEL), "N is a multiple of 8");
    // Columns innermost, so that the loop over them is a vector's.
    let turned: Vec<[f64; PANEL]> =
        b.chunks_exact(PANEL * depth).flat_map(|b| (0..depth).map(move |k| std::array::from_fn(|n| b[n * depth + k]))).collect();
    for (a, values) in a.chunks_exact(depth).zip(values.chunks_exact_mut(columns)) {
        for (panel, values) in turned.chunks_exact(depth).zip(values.chunks_exact_mut(PANEL)) {
            let mut sums = [0.0_f64; PANEL];
            for (a, b) in a.iter().zip(panel) {
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum += a * b;
                }
            }
            for (value, sum) in values.iter_mut().zip(sums) {
                *value = (f64::from(*value) + sum) as f32;
            }
        }
    }
}

/// Hands a thread its accumulators back.
pub(crate) fn publish(thread: &Thread, ticket: u32, registers: &mut [f32], site: Site) {
    let mut in_flight = thread.block().wgmma.borrow_mut();
    let key = (thread.number / THREADS, ticket);
    let Some(found) = in_flight.accumulators.get_mut(&key) else {
        drop(in_flight);
        fail(thread, site, "accumulators that no multiplication wrote", "multiply before waiting");
    };
    if thread.wgmma.waited.get() < found.last {
        drop(in_flight);
        let mend = "commit the multiplications, and wait until their group is done";
        fail(thread, site, "accumulators are read while multiplications into them are in flight", mend);
    }
    let number = (thread.number % THREADS) as usize;
    for (register, value) in registers.iter_mut().enumerate() {
        let (row, column) = place(number, register);
        *value = found.values[row * found.columns + column];
    }
    found.taken += 1;
    if found.taken == THREADS {
        in_flight.accumulators.remove(&key);
    }
}

/// A thread that ends must have waited for its multiplications.
pub(crate) fn check_waited(thread: &Thread) {
    let stream = &thread.wgmma;
    if stream.waited.get() < stream.issued.get() {
        let site = stream.site.get().expect("set with each instruction");
        let message = "a thread ended without waiting for its multiplications".to_owned();
        let mend = "commit them and wait for the group before the thread ends";
        thread.worker().set_fault(thread.fault(FaultKind::InFlightAtExit, site, message, mend));
    }
}
