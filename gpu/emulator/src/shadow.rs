//! Shadow memory: for every byte, the last write and the reads since, and whether a new access races with them.

use crate::clock::View;
use crate::order::{Scope, Space};
use crate::site::Site;
use rustc_hash::FxHashMap as HashMap;
use std::cell::Cell as Kept;
use std::ops::Range;

/// Allocations begin at multiples of so many bytes: what `cudaMalloc` guarantees.
pub(crate) const ALLOCATED: u64 = 256;

/// How an access was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// By a plain load or store.
    Weak,
    /// By `ld.global.nc`.
    ReadOnly,
    /// By a relaxed, acquire, release or atomic operation.
    Strong(Scope),
    /// By the asynchronous proxy.
    Async,
    /// By an asynchronous reduction: atomic among its like of one device.
    Reduce,
    /// By the asynchronous proxy: a read of all four warps of a warpgroup, each of which is an agent.
    Operand,
}

/// An access about to be made.
#[derive(Clone, Copy)]
pub(crate) struct Access {
    pub address: u64,
    pub bytes: u64,
    pub writes: bool,
    pub reads: bool,
    pub manner: Manner,
    pub site: Site,
}

/// One access, as the shadow keeps it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub block: u32,
    pub slot: u32,
    pub time: u32,
    /// Linear number of the thread in its block.
    pub thread: u16,
    pub manner: Manner,
    pub writes: bool,
    pub site: Site,
}

/// Block, slot, agents and time of an access.
type Moment = (u32, u32, u32, u32);

impl Record {
    fn moment(&self) -> Moment {
        (self.block, self.slot, self.agents(), self.time)
    }

    /// How many agents it is of. Their slots follow one another.
    fn agents(&self) -> u32 {
        if self.manner == Manner::Operand { 4 } else { 1 }
    }

    fn slots(&self) -> Range<u32> {
        self.slot..self.slot + self.agents()
    }
}

#[derive(Clone, Default)]
struct Cell {
    write: Option<Record>,
    /// Reads since; most bytes have one at most, which needs no allocation.
    read: Option<Record>,
    more_reads: Vec<Record>,
}

impl Cell {
    fn written(record: &Record) -> Self {
        Self { write: Some(*record), ..Self::default() }
    }
}

/// Some bytes: one cell as long as they are accessed alike, then four parts.
#[derive(Clone)]
enum Split<P> {
    Whole(Cell),
    Parts(Box<[P; 4]>),
}

type Word = Split<Cell>;
/// What a vector access, or a copy, has at least.
type Granule = Split<Word>;

impl<P> Default for Split<P> {
    fn default() -> Self {
        Self::Whole(Cell::default())
    }
}

/// Neighbouring bytes of the shadow.
trait Bytes: Sized {
    /// How many there are.
    const BYTES: u64;

    /// Bytes that all have this cell.
    fn of(cell: Cell) -> Self;

    /// Judges an access to some of them, and enters it. Returns what it conflicts with, and at which byte.
    fn enter<S: Scopes>(&mut self, first: u64, length: u64, judge: &Judge<'_, S>) -> Result<(), (Conflict, Record, u64)>;

    /// Enters a write of some of them in place of what was there.
    fn replace(&mut self, first: u64, length: u64, record: &Record);
}

impl Bytes for Cell {
    const BYTES: u64 = 1;

    fn of(cell: Cell) -> Self {
        cell
    }

    fn enter<S: Scopes>(&mut self, first: u64, _: u64, judge: &Judge<'_, S>) -> Result<(), (Conflict, Record, u64)> {
        judge.cell(self).map_err(|(conflict, other)| (conflict, other, first))
    }

    fn replace(&mut self, _: u64, _: u64, record: &Record) {
        *self = Self::written(record);
    }
}

impl<P: Bytes> Split<P> {
    /// The parts that a range has bytes in, each with its first byte and what of it is in the range.
    fn parts(&mut self, first: u64, length: u64) -> impl Iterator<Item = (&mut P, u64, [u64; 2])> {
        if let Self::Whole(cell) = self {
            *self = Self::Parts(Box::new(std::array::from_fn(|_| P::of(cell.clone()))));
        }
        let parts = match self {
            Self::Parts(parts) => parts,
            Self::Whole(_) => unreachable!("it was split"),
        };
        let starts = (0..4).map(|part| part * P::BYTES);
        parts.iter_mut().zip(starts).filter_map(move |(part, start)| {
            let [begin, end] = [first.max(start), (first + length).min(start + P::BYTES)];
            (begin < end).then(|| (part, start, [begin - start, end - begin]))
        })
    }
}

impl<P: Bytes> Bytes for Split<P> {
    const BYTES: u64 = 4 * P::BYTES;

    fn of(cell: Cell) -> Self {
        Self::Whole(cell)
    }

    fn enter<S: Scopes>(&mut self, first: u64, length: u64, judge: &Judge<'_, S>) -> Result<(), (Conflict, Record, u64)> {
        if let (Self::Whole(cell), true) = (&mut *self, length == Self::BYTES) {
            return cell.enter(first, length, judge);
        }
        for (part, start, [first, length]) in self.parts(first, length) {
            part.enter(first, length, judge).map_err(|(conflict, other, at)| (conflict, other, start + at))?;
        }
        if length == Self::BYTES && judge.record.writes {
            *self = Self::Whole(Cell::written(judge.record));
        }
        Ok(())
    }

    fn replace(&mut self, first: u64, length: u64, record: &Record) {
        if length == Self::BYTES {
            *self = Self::Whole(Cell::written(record));
        } else {
            self.parts(first, length).for_each(|(part, _, [first, length])| part.replace(first, length, record));
        }
    }
}

/// Why two accesses may not stand together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Conflict {
    /// Nothing orders them.
    Unordered,
    /// They are ordered, but no proxy fence lies between them.
    Unfenced,
    /// A read-only load of memory that the same grid writes, or that was written since the grid started.
    ReadOnlyWritten,
}

/// What the shadow asks of blocks to judge strong accesses.
pub(crate) trait Scopes {
    /// Whether a scope around one block takes in another.
    fn includes(&self, scope: Scope, a: u32, b: u32) -> bool;
    /// Whether two blocks are of one grid.
    fn same_grid(&self, a: u32, b: u32) -> bool;
    /// Whether the grid of a block knew an access when it started.
    fn knew(&self, block: u32, access: &Record) -> bool;
}

const PAGE_BYTES: u64 = 1024;

/// The shadow of one space.
#[derive(Default)]
pub(crate) struct Shadow {
    pages: HashMap<u64, Box<[Granule]>>,
}

impl Shadow {
    /// Forgets an allocation, which is freed or new. The pages at its ends may be shared with others.
    pub fn forget(&mut self, start: u64, bytes: u64) {
        let end = (start + bytes).next_multiple_of(ALLOCATED);
        self.pages.retain(|page, granules| {
            let [page_start, page_end] = [page * PAGE_BYTES, (page + 1) * PAGE_BYTES];
            let [first, last] = [start.max(page_start), end.min(page_end)];
            if first < last && last - first < PAGE_BYTES {
                let [first, last] = [first, last].map(|at| ((at - page_start) / Granule::BYTES) as usize);
                granules[first..last].fill(Granule::default());
                return true;
            }
            first >= last
        });
    }

    /// Enters a write that no thread makes, in place of what was there.
    pub fn replace(&mut self, address: u64, bytes: u64, record: &Record) {
        let done = self.each(address, bytes, |granule, first, length| {
            granule.replace(first, length, record);
            Ok(())
        });
        debug_assert!(done.is_ok(), "nothing is judged");
    }

    /// Enters an access; returns the earlier one that it conflicts with, if any, and the byte.
    pub fn access(
        &mut self,
        space: Space,
        address: u64,
        bytes: u64,
        record: &Record,
        views: &[View],
        scopes: &impl Scopes,
    ) -> Result<(), (Conflict, Record, u64)> {
        let judge = Judge { space, record, views, scopes, known: Kept::default(), allowed: Kept::default() };
        self.each(address, bytes, |granule, first, length| granule.enter(first, length, &judge))
    }

    /// Calls it with each granule of a range, the first byte of the range there, and how many there are. Of an error it counts the byte from address 0.
    fn each(
        &mut self,
        address: u64,
        bytes: u64,
        mut enter: impl FnMut(&mut Granule, u64, u64) -> Result<(), (Conflict, Record, u64)>,
    ) -> Result<(), (Conflict, Record, u64)> {
        let (mut at, end) = (address, address + bytes);
        while at < end {
            let number = at / PAGE_BYTES;
            let page = self.page(number);
            let page_end = end.min((number + 1) * PAGE_BYTES);
            while at < page_end {
                let first = at % Granule::BYTES;
                let length = (Granule::BYTES - first).min(page_end - at);
                let granule = &mut page[(at % PAGE_BYTES / Granule::BYTES) as usize];
                enter(granule, first, length).map_err(|(conflict, other, byte)| (conflict, other, at - first + byte))?;
                at += length;
            }
        }
        Ok(())
    }

    fn page(&mut self, number: u64) -> &mut [Granule] {
        self.pages.entry(number).or_insert_with(|| vec![Granule::default(); (PAGE_BYTES / Granule::BYTES) as usize].into())
    }
}

/// Neighbouring bytes mostly have the same records: what was found of the last one is kept.
struct Judge<'a, S> {
    space: Space,
    record: &'a Record,
    /// The views of the record's agents.
    views: &'a [View],
    scopes: &'a S,
    /// The last access that was asked for, and whether it happened before this one.
    known: Kept<Option<(Moment, bool)>>,
    /// The last access that this one may stand beside.
    allowed: Kept<Option<(Moment, Manner, bool)>>,
}

impl<S: Scopes> Judge<'_, S> {
    fn cell(&self, cell: &mut Cell) -> Result<(), (Conflict, Record)> {
        if let Some(write) = &cell.write {
            self.judge(write)?;
        }
        if self.record.writes {
            for read in cell.read.iter().chain(&cell.more_reads) {
                self.judge(read)?;
            }
            cell.read = None;
            cell.more_reads.clear();
            cell.write = Some(*self.record);
        } else {
            match &cell.read {
                Some(old) if !self.replaces(old) => {
                    // A full list is pruned, then has room for as many again as are left: it stays within twice what it ever had to hold, at constant cost a read.
                    let room = cell.more_reads.capacity();
                    if room >= 4 && cell.more_reads.len() == room {
                        cell.more_reads.retain(|old| !self.replaces(old));
                        cell.more_reads.reserve_exact(cell.more_reads.len());
                    }
                    cell.more_reads.push(*self.record);
                }
                _ => cell.read = Some(*self.record),
            }
        }
        Ok(())
    }

    /// A read like this one that happened before it need not be kept: what is ordered after this one is ordered
    /// after that.
    fn replaces(&self, old: &Record) -> bool {
        let new = self.record;
        // What knows the later of two accesses of the same agents knows the earlier one.
        let of_same = (old.block, old.slot) == (new.block, new.slot) && old.time <= new.time;
        old.manner == new.manner && (of_same || self.knows(old))
    }

    /// Whether an access happened before this one.
    fn knows(&self, old: &Record) -> bool {
        let key = old.moment();
        match self.known.get() {
            Some((known, is_known)) if known == key => is_known,
            _ => {
                let is_known = self.all(old, |view, slot| view.knows(old.block, slot, old.time));
                self.known.set(Some((key, is_known)));
                is_known
            }
        }
    }

    /// Whether it holds for each view and each agent of an access.
    fn all(&self, old: &Record, holds: impl Fn(&View, u32) -> bool) -> bool {
        old.slots().all(|slot| self.views.iter().all(|view| holds(view, slot)))
    }

    /// An access of several agents as that of the first of them for which it does not hold.
    #[cold]
    fn exception(&self, old: &Record, holds: impl Fn(&View, u32) -> bool) -> Record {
        let at = old.slots().position(|slot| !self.views.iter().all(|view| holds(view, slot))).unwrap_or(0);
        if old.agents() == 1 {
            return *old;
        }
        Record { slot: old.slot + at as u32, manner: Manner::Async, thread: old.thread + 32 * at as u16, ..*old }
    }

    fn judge(&self, old: &Record) -> Result<(), (Conflict, Record)> {
        let key = (old.moment(), old.manner, old.writes);
        if self.allowed.get() != Some(key) {
            self.decide(old)?;
            self.allowed.set(Some(key));
        }
        Ok(())
    }

    fn decide(&self, old: &Record) -> Result<(), (Conflict, Record)> {
        let new = self.record;
        let read_only = |a: &Record, b: &Record| a.manner == Manner::ReadOnly && b.writes;
        if (read_only(old, new) || read_only(new, old)) && self.scopes.same_grid(old.block, new.block) {
            return Err((Conflict::ReadOnlyWritten, *old));
        }
        if !self.knows(old) {
            let knows = |view: &View, slot| view.knows(old.block, slot, old.time);
            return if self.both_strong(old) { Ok(()) } else { Err((Conflict::Unordered, self.exception(old, knows))) };
        }
        if read_only(new, old) && !self.scopes.knew(new.block, old) {
            return Err((Conflict::ReadOnlyWritten, *old));
        }
        let is_async = |record: &Record| matches!(record.manner, Manner::Async | Manner::Reduce | Manner::Operand);
        let crosses = is_async(new) && !is_async(old) && old.writes;
        let knows_fenced = |view: &View, slot| view.knows_fenced(self.space, old.block, slot, old.time);
        if crosses && !self.all(old, knows_fenced) {
            return Err((Conflict::Unfenced, self.exception(old, knows_fenced)));
        }
        Ok(())
    }

    /// Morally strong accesses do not race (PTX ISA, "Morally-Strong Operations").
    fn both_strong(&self, old: &Record) -> bool {
        match (old.manner, self.record.manner) {
            // `cp.reduce.async.bulk` is of `.relaxed.gpu`.
            (Manner::Reduce, Manner::Reduce) => self.scopes.includes(Scope::Device, old.block, self.record.block),
            (Manner::Strong(a), Manner::Strong(b)) => {
                self.scopes.includes(a, old.block, self.record.block) && self.scopes.includes(b, self.record.block, old.block)
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Knowledge;
    use std::panic::Location;

    /// One block, in which every scope takes in every thread.
    struct OneBlock;

    impl Scopes for OneBlock {
        fn includes(&self, _: Scope, _: u32, _: u32) -> bool {
            true
        }

        fn same_grid(&self, _: u32, _: u32) -> bool {
            true
        }

        fn knew(&self, _: u32, _: &Record) -> bool {
            true
        }
    }

    /// Enters a weak access of a thread that knows of its own accesses alone. Returns whether it conflicts with none.
    fn enter(shadow: &mut Shadow, thread: u16, time: u32, range: Range<u64>, writes: bool) -> bool {
        let (slot, manner, site) = (thread.into(), Manner::Weak, Location::caller());
        let record = Record { block: 0, slot, time, thread, manner, writes, site };
        let view = View { knowledge: Knowledge::default(), block: 0, slot, now: time };
        shadow.access(Space::Global, range.start, range.end - range.start, &record, &[view], &OneBlock).is_ok()
    }

    #[test]
    fn an_allocation_leaves_the_history_of_its_neighbours() {
        for (bytes, end, pages) in [(8, 512, 4), (256, 512, 4), (800, 1280, 4), (2048, 2304, 3), (2900, 3328, 2)] {
            let mut shadow = Shadow::default();
            assert!(enter(&mut shadow, 1, 1, 0..4096, true));
            shadow.forget(256, bytes);
            assert_eq!(shadow.pages.len(), pages, "{bytes} bytes");
            for at in (0..4096).step_by(16) {
                let is_forgotten = (256..end).contains(&at);
                assert_eq!(enter(&mut shadow, 2, 1, at..at + 16, true), is_forgotten, "byte {at} after an allocation of {bytes}");
            }
        }
    }

    #[test]
    fn reads_that_cannot_be_dropped_are_not_looked_at_by_each_read() {
        let mut shadow = Shadow::default();
        (1..=8).for_each(|thread| assert!(enter(&mut shadow, thread, 1, 0..16, false)));
        let (mut prunes, mut last) = (0, 7);
        for time in 1..=200 {
            assert!(enter(&mut shadow, 9, time, 0..16, false));
            let Split::Whole(cell) = &shadow.pages[&0][0] else { panic!("all its bytes are read alike") };
            let kept = cell.more_reads.len();
            assert!(kept <= 16, "{kept} reads are kept, of which 8 are needed");
            prunes += u32::from(kept <= last);
            last = kept;
        }
        assert!(prunes < 200 / 5, "{prunes} of 200 reads looked at all the others");
    }
}
