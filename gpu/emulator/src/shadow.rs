//! Shadow memory: for every byte, the last write and the reads since, and whether a new access races with them.

use crate::clock::View;
use crate::order::{Scope, Space};
use crate::site::Site;
use rustc_hash::FxHashMap as HashMap;

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
    /// By an asynchronous reduction: atomic among its like.
    Reduce,
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

#[derive(Clone, Default)]
struct Cell {
    write: Option<Record>,
    /// Reads since; most bytes have one at most, which needs no allocation.
    read: Option<Record>,
    more_reads: Vec<Record>,
}

/// Four bytes; one cell as long as they are accessed alike.
#[derive(Clone)]
enum Granule {
    Whole(Cell),
    Split(Box<[Cell; 4]>),
}

impl Default for Granule {
    fn default() -> Self {
        Self::Whole(Cell::default())
    }
}

impl Granule {
    /// Its bytes, each with a cell of its own from here on.
    fn split(&mut self) -> &mut [Cell; 4] {
        if let Self::Whole(cell) = self {
            *self = Self::Split(Box::new(std::array::from_fn(|_| cell.clone())));
        }
        match self {
            Self::Split(cells) => cells,
            Self::Whole(_) => unreachable!("it was split"),
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
    /// Forgets a range, which is freed or new.
    pub fn forget(&mut self, start: u64, bytes: u64) {
        let end = start + bytes;
        self.pages.retain(|page, _| (page + 1) * PAGE_BYTES <= start || page * PAGE_BYTES >= end);
    }

    /// Enters a write that no thread makes, in place of what was there.
    pub fn replace(&mut self, address: u64, bytes: u64, record: &Record) {
        let (write, end) = (Cell { write: Some(*record), ..Cell::default() }, address + bytes);
        let mut at = address;
        while at < end {
            let length = (4 - at % 4).min(end - at);
            let granule = &mut self.page(at / PAGE_BYTES)[(at % PAGE_BYTES / 4) as usize];
            if length == 4 {
                *granule = Granule::Whole(write.clone());
            } else {
                granule.split()[(at % 4) as usize..][..length as usize].fill(write.clone());
            }
            at += length;
        }
    }

    fn page(&mut self, number: u64) -> &mut [Granule] {
        self.pages.entry(number).or_insert_with(|| vec![Granule::default(); (PAGE_BYTES / 4) as usize].into())
    }

    /// Enters an access; returns the earlier one that it conflicts with, if any, and the byte.
    pub fn access(
        &mut self,
        space: Space,
        address: u64,
        bytes: u64,
        record: &Record,
        view: &View,
        scopes: &impl Scopes,
    ) -> Result<(), (Conflict, Record, u64)> {
        let judge = Judge { space, record, view, scopes };
        let (mut at, end) = (address, address + bytes);
        while at < end {
            let number = at / PAGE_BYTES;
            let page = self.page(number);
            let page_end = end.min((number + 1) * PAGE_BYTES);
            while at < page_end {
                let length = (4 - at % 4).min(page_end - at);
                let granule = &mut page[(at % PAGE_BYTES / 4) as usize];
                judge.granule(granule, at % 4, length).map_err(|(conflict, other)| (conflict, other, at))?;
                at += length;
            }
        }
        Ok(())
    }
}

struct Judge<'a, S> {
    space: Space,
    record: &'a Record,
    view: &'a View,
    scopes: &'a S,
}

impl<S: Scopes> Judge<'_, S> {
    fn granule(&self, granule: &mut Granule, first: u64, length: u64) -> Result<(), (Conflict, Record)> {
        if length < 4 {
            granule.split();
        }
        match granule {
            Granule::Whole(cell) => self.cell(cell),
            Granule::Split(cells) => {
                for cell in &mut cells[first as usize..][..length as usize] {
                    self.cell(cell)?;
                }
                if length == 4 && self.record.writes {
                    *granule = Granule::Whole(cells[0].clone());
                }
                Ok(())
            }
        }
    }

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
            // Pruning at each doubling keeps the list within twice what it must hold, at constant cost a read.
            if cell.more_reads.len().is_power_of_two() {
                cell.more_reads.retain(|old| !self.replaces(old));
            }
            match &cell.read {
                Some(old) if !self.replaces(old) => cell.more_reads.push(*self.record),
                _ => cell.read = Some(*self.record),
            }
        }
        Ok(())
    }

    /// A read like this one that happened before it need not be kept: what is ordered after this one is ordered
    /// after that.
    fn replaces(&self, old: &Record) -> bool {
        old.manner == self.record.manner && self.view.knows(old.block, old.slot, old.time)
    }

    fn judge(&self, old: &Record) -> Result<(), (Conflict, Record)> {
        let new = self.record;
        let read_only = |a: &Record, b: &Record| a.manner == Manner::ReadOnly && b.writes;
        if (read_only(old, new) || read_only(new, old)) && self.scopes.same_grid(old.block, new.block) {
            return Err((Conflict::ReadOnlyWritten, *old));
        }
        if !self.view.knows(old.block, old.slot, old.time) {
            return if self.both_strong(old) { Ok(()) } else { Err((Conflict::Unordered, *old)) };
        }
        if read_only(new, old) && !self.scopes.knew(new.block, old) {
            return Err((Conflict::ReadOnlyWritten, *old));
        }
        let is_async = |record: &Record| matches!(record.manner, Manner::Async | Manner::Reduce);
        let crosses = is_async(new) && !is_async(old) && old.writes;
        if crosses && !self.view.knows_fenced(self.space, old.block, old.slot, old.time) {
            return Err((Conflict::Unfenced, *old));
        }
        Ok(())
    }

    /// Morally strong accesses do not race (PTX ISA, "Morally-Strong Operations").
    fn both_strong(&self, old: &Record) -> bool {
        match (old.manner, self.record.manner) {
            (Manner::Reduce, Manner::Reduce) => true,
            (Manner::Strong(a), Manner::Strong(b)) => {
                self.scopes.includes(a, old.block, self.record.block) && self.scopes.includes(b, self.record.block, old.block)
            }
            _ => false,
        }
    }
}
