//! The copies of a pull, and the streams that carry them.

use std::sync::OnceLock;

use crate::comm::Rank;
use crate::runtime::backend::Copy;
use crate::runtime::{Buffer, Result, Stream};
use crate::symmetric::{Calls, Pitched, Rows, SymmetricBuffer};

/// Fewer copies than these within a device are a call of the driver each, and more are one call for all. In a few runs on two H200s two took the host no more time so,
/// mostly less (`benches/results/tuning/sharded_host_time_two_h200.json`); copies between devices took it more.
const FEW: usize = 3;

/// How many streams carry what a pull gets from other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullStreams {
    /// One: an engine makes its copies one after another.
    #[default]
    One,
    /// Two, each with a half of every weight, whose copies may overlap: for weights of which the ranks' shards are small, up to some 64 MiB. For eager chains alone.
    Two,
}

/// What one stream carries of a pull.
#[derive(Debug, Default)]
pub(super) struct Lane {
    /// The rows of ranks' planes, and where they go in the slot.
    pieces: Vec<(Rank, Rows)>,
    copies: OnceLock<Vec<Copy>>,
}

/// The lanes of a position: what comes from other ranks, the second halves where two streams carry them, and this rank's own rows.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    others: Lane,
    second: Lane,
    own: Lane,
}

impl Lanes {
    /// The lanes of these rows.
    pub fn new(others: Vec<(Rank, Rows)>, own: Vec<(Rank, Rows)>, streams: PullStreams) -> Self {
        let (first, second) = match streams {
            PullStreams::One => (others, Vec::new()),
            PullStreams::Two => {
                let split = |(rank, rows)| halves(rows).map(|half| (rank, half)).into();
                others.into_iter().map::<(_, _), _>(split).unzip()
            }
        };
        let [others, second, own] = [first, second, own].map(|pieces| Lane { pieces, copies: OnceLock::new() });
        Self { others, second, own }
    }

    /// Whether this rank has rows of the position.
    pub fn has_own(&self) -> bool {
        !self.own.pieces.is_empty()
    }

    /// Enqueues the copies from other ranks into a slot, after the work of the first stream so far; its later work comes after all of them.
    pub fn pull(&self, planes: &SymmetricBuffer<u8>, slot: &Buffer<u8>, [pulls, second]: [&Stream; 2]) -> Result<()> {
        if self.second.pieces.is_empty() {
            return self.others.enqueue(planes, slot, pulls, Calls::Batch);
        }
        second.follow(pulls)?;
        let copied =
            self.second.enqueue(planes, slot, second, Calls::Batch).and_then(|()| self.others.enqueue(planes, slot, pulls, Calls::Batch));
        // Also where a copy failed: what uses the slot next comes after those that were enqueued.
        pulls.follow(second)?;
        copied
    }

    /// Enqueues the copies of this rank's own rows.
    pub fn copy_own(&self, planes: &SymmetricBuffer<u8>, slot: &Buffer<u8>, compute: &Stream) -> Result<()> {
        let calls = if self.own.copies(planes, slot)?.len() < FEW { Calls::Each } else { Calls::Batch };
        self.own.enqueue(planes, slot, compute, calls)
    }
}

impl Lane {
    fn enqueue(&self, planes: &SymmetricBuffer<u8>, slot: &Buffer<u8>, stream: &Stream, calls: Calls) -> Result<()> {
        match self.copies(planes, slot)? {
            [] => Ok(()),
            copies => planes.enqueue_noted(stream, copies, calls),
        }
    }

    /// The copies. The first pull looks addresses of other ranks up, which stay where they are.
    fn copies(&self, planes: &SymmetricBuffer<u8>, slot: &Buffer<u8>) -> Result<&[Copy]> {
        if self.copies.get().is_none() {
            _ = self.copies.set(planes.copies_of_rows(&self.pieces, slot)?);
        }
        Ok(self.copies.get().map_or(&[], |copies| copies))
    }
}

/// The first and the second half of some rows.
fn halves(rows: Rows) -> [Rows; 2] {
    let Rows { count, width, from, to } = rows;
    if count > 1 {
        let first = count / 2;
        let after = |place: Pitched| Pitched { start: place.start + first * place.pitch, ..place };
        [Rows { count: first, ..rows }, Rows { count: count - first, width, from: after(from), to: after(to) }]
    } else {
        // At a multiple of what a copy engine moves at once.
        let first = (width / 2).next_multiple_of(256).min(width);
        let after = |place: Pitched| Pitched { start: place.start + first, ..place };
        [Rows { width: first, ..rows }, Rows { count, width: width - first, from: after(from), to: after(to) }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_the_whole() {
        let place = |start, pitch| Pitched { start, pitch };
        let many = Rows { count: 5, width: 8, from: place(3, 10), to: place(7, 20) };
        assert_eq!(halves(many), [Rows { count: 2, ..many }, Rows { count: 3, from: place(23, 10), to: place(47, 20), ..many }]);
        let one = Rows { count: 1, width: 1000, ..many };
        assert_eq!(halves(one), [Rows { width: 512, ..one }, Rows { width: 488, from: place(515, 10), to: place(519, 20), ..one }]);
        assert_eq!(halves(Rows { width: 100, ..one }).map(|rows| rows.width), [100, 0]);
    }
}
