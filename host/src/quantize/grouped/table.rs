//! The tables by which kernels of a group find their members, and where members start in shared buffers.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use oxtile_kernels::group::{Grouped, MemberTable};
use oxtile_tile::launch::Kernel;

use crate::runtime::{Buffer, Error, Result, Stream};
use crate::tensor::upload;

/// Where members start in a buffer that they share, and where it ends.
#[derive(Debug, Clone)]
pub(super) struct Starts {
    pub of: Vec<u64>,
    pub end: u64,
}

impl Starts {
    /// One member after the other, each at a multiple of `unit`.
    pub fn new(lengths: impl Iterator<Item = u64>, unit: u64) -> Result<Self> {
        let mut starts = Self { of: Vec::new(), end: 0 };
        for (member, length) in lengths.enumerate() {
            starts.of.push(starts.end);
            let end = starts.end.checked_add(length).and_then(|end| end.checked_next_multiple_of(unit));
            let too_large =
                || Error::Invalid { what: "a group", why: format!("member {member} ends beyond 2^64 elements: make two groups") };
            starts.end = end.ok_or_else(too_large)?;
        }
        Ok(starts)
    }
}

/// A kernel's record of a member.
pub(super) struct Record {
    pub index: u64,
    pub shape: [u64; 2],
    pub starts: [u64; 3],
}

/// A kernel's table on the device.
#[derive(Debug)]
pub(super) struct Table {
    words: Buffer<u64>,
    /// CUDA blocks of all members.
    blocks: u64,
}

impl Table {
    /// For kernel `G`; in stream order, the host does not wait.
    pub fn new<G: Grouped>(stream: &Stream, records: impl Iterator<Item = Record>) -> Result<Self> {
        let (mut words, mut first_blocks, mut blocks) = (Vec::new(), Vec::new(), 0);
        for Record { index, shape: [rows, columns], starts } in records {
            let of_member = if rows == 0 || columns == 0 { 0 } else { G::blocks(rows, columns) };
            if of_member != 0 {
                words.extend([index, rows, columns].into_iter().chain(starts));
                first_blocks.push(blocks);
                blocks += of_member;
            }
        }
        words.extend(first_blocks);
        Ok(Self { words: upload(stream, &words)?, blocks })
    }

    /// For a launch of that kernel.
    pub fn lend(&self) -> MemberTable<'_> {
        // SAFETY: `new` lays the table out by the `blocks` of its kernel. The types of groups, which alone see one, launch that kernel with it,
        // on inputs of the records' shapes and on buffers that were made as long as the `Starts` of which the records are, and check both first.
        unsafe { MemberTable::from_raw(self.words.view(), self.blocks) }
    }
}

/// Which members a table is of, if a kernel works on some of a group's.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Purpose {
    /// Those of a call for one direction, or all members.
    One,
    /// Those of a call for both directions.
    Both,
}

/// The tables that a group's kernels have needed so far. A later call, and one in a graph's capture, copies nothing.
#[derive(Default)]
pub(super) struct Tables(Mutex<HashMap<(&'static str, Purpose), Arc<Table>>>);

impl Tables {
    /// The table of a kernel, made of `records` the first time.
    pub fn of<K: Kernel + Grouped>(&self, stream: &Stream, purpose: Purpose, records: impl Iterator<Item = Record>) -> Result<Arc<Table>> {
        let (mut tables, key) = (self.0.lock().unwrap_or_else(PoisonError::into_inner), (K::INFO.name, purpose));
        if let Some(table) = tables.get(&key) {
            return Ok(Arc::clone(table));
        }
        let table = Arc::new(Table::new::<K>(stream, records)?);
        tables.insert(key, Arc::clone(&table));
        Ok(table)
    }
}

impl fmt::Debug for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tables").finish_non_exhaustive()
    }
}
