//! Bank conflicts and coalescing, from the addresses that the lanes of a warp really used.
//!
//! Lanes run one after another, so the accesses of one instruction are brought together by count: the n-th
//! access of each lane at a source line belongs to the n-th request of its warp there.

use crate::shadow::Access;
use crate::site::Site;
use rustc_hash::FxHashMap as HashMap;
use std::collections::BTreeMap;

/// What one source line cost in memory requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineCost {
    /// Source file.
    pub file: String,
    /// Line.
    pub line: u32,
    /// What is done there.
    pub operation: &'static str,
    /// Requests, one a warp and instruction.
    pub requests: u64,
    /// Shared memory: wavefronts, each serving every bank once. Global memory: sectors of 32 bytes.
    pub transactions: u64,
    /// The fewest transactions that could move the same bytes.
    pub ideal: u64,
}

/// Which memory, and which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Operation {
    SharedRead,
    SharedWrite,
    GlobalRead,
    GlobalWrite,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::SharedRead => "shared_read",
            Self::SharedWrite => "shared_write",
            Self::GlobalRead => "global_read",
            Self::GlobalWrite => "global_write",
        }
    }
}

type Line = (&'static str, u32, u32, Operation);

#[derive(Default, Clone, Copy)]
struct Total {
    requests: u64,
    transactions: u64,
    ideal: u64,
}

/// Sums of a launch, by line.
#[derive(Default)]
pub(crate) struct Totals(BTreeMap<Line, Total>);

impl Totals {
    pub fn lines(&self) -> Vec<LineCost> {
        let mut lines: Vec<LineCost> = Vec::new();
        for (&(file, line, _, operation), total) in &self.0 {
            let operation = operation.name();
            match lines.iter_mut().find(|known| known.file == file && known.line == line && known.operation == operation) {
                Some(known) => {
                    known.requests += total.requests;
                    known.transactions += total.transactions;
                    known.ideal += total.ideal;
                }
                None => lines.push(LineCost {
                    file: file.to_owned(),
                    line,
                    operation,
                    requests: total.requests,
                    transactions: total.transactions,
                    ideal: total.ideal,
                }),
            }
        }
        lines
    }
}

/// A source line's constant in memory and the operation there: cheaper to look up than the line.
type Place = (usize, Operation);

/// The lanes that joined a request, as (lane, address, bytes), in the order in which they came.
struct Request {
    site: Site,
    lanes: Vec<(u32, u64, u64)>,
}

/// Requests of a block that not all lanes have joined yet.
#[derive(Default)]
pub(crate) struct Costs {
    counts: HashMap<(u32, Place), u32>,
    open: HashMap<(u32, Place, u32), Request>,
}

impl Costs {
    /// Enters one lane's access; `lanes` of the warp are expected at the request.
    pub fn enter(&mut self, totals: &mut Totals, thread: u32, lanes: u32, operation: Operation, access: &Access) {
        let Access { address, bytes, site, .. } = *access;
        let place = (std::ptr::from_ref(site).addr(), operation);
        let count = self.counts.entry((thread, place)).or_default();
        *count += 1;
        let key = (thread / 32, place, *count);
        let request = self.open.entry(key).or_insert_with(|| Request { site, lanes: Vec::with_capacity(lanes as usize) });
        request.lanes.push((thread % 32, address, bytes));
        if request.lanes.len() as u32 == lanes {
            let request = self.open.remove(&key).expect("just entered");
            add(totals, operation, request);
        }
    }

    /// Enters the requests that some lanes never joined.
    pub fn close(&mut self, totals: &mut Totals) {
        for ((_, (_, operation), _), request) in self.open.drain() {
            add(totals, operation, request);
        }
    }
}

fn add(totals: &mut Totals, operation: Operation, request: Request) {
    let Request { site, mut lanes } = request;
    lanes.sort_unstable();
    let (transactions, ideal) = match operation {
        Operation::SharedRead | Operation::SharedWrite => wavefronts(&lanes),
        Operation::GlobalRead | Operation::GlobalWrite => sectors(&lanes),
    };
    let total = totals.0.entry((site.file(), site.line(), site.column(), operation)).or_default();
    total.requests += 1;
    total.transactions += transactions;
    total.ideal += ideal;
}

/// Shared memory has 32 banks of 4 bytes; lanes of 8 or 16 bytes are served by halves or quarters of a warp.
/// Lanes that use the same word share it.
fn wavefronts(request: &[(u32, u64, u64)]) -> (u64, u64) {
    let widest = request.iter().map(|lane| lane.2).max().unwrap_or(4).max(4);
    let together = (128 / widest).max(1) as u32;
    let mut total = 0;
    let mut phases = 0;
    for lanes in request.chunk_by(|a, b| a.0 / together == b.0 / together) {
        let mut words: Vec<u64> = lanes.iter().flat_map(|&(_, address, bytes)| address / 4..(address + bytes).div_ceil(4)).collect();
        words.sort_unstable();
        words.dedup();
        let mut banks = [0u64; 32];
        words.iter().for_each(|word| banks[(word % 32) as usize] += 1);
        total += banks.into_iter().max().unwrap_or(1).max(1);
        phases += 1;
    }
    (total, phases)
}

fn sectors(request: &[(u32, u64, u64)]) -> (u64, u64) {
    let mut touched: Vec<u64> = request.iter().flat_map(|&(_, address, bytes)| address / 32..(address + bytes).div_ceil(32)).collect();
    touched.sort_unstable();
    touched.dedup();
    let mut spans: Vec<_> = request.iter().map(|&(_, address, bytes)| (address, bytes)).collect();
    spans.sort_unstable();
    spans.dedup();
    let bytes: u64 = spans.iter().map(|span| span.1).sum();
    (touched.len() as u64, bytes.div_ceil(32))
}
