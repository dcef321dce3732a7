//! The copies of a pull, and the streams that carry them.

use std::sync::OnceLock;

use crate::comm::Rank;
use crate::runtime::backend::Copy;
use crate::runtime::{Buffer, Result, Stream};
use crate::symmetric::{Pitched, Rows, SymmetricBuffer};

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

/// The lanes of a position: what comes from other ranks, this rank's own rows beside it, and the second halves where two streams carry the pull.
#[derive(Debug, Default)]
pub(super) struct Lanes([Lane; 3]);

impl Lanes {
    /// The lanes of these rows. Without other ranks the own rows are the pull.
    pub fn new(others: Vec<(Rank, Rows)>, own: Vec<(Rank, Rows)>, streams: PullStreams) -> Self {
        let lanes = match streams {
            _ if others.is_empty() => [own, Vec::new(), Vec::new()],
            PullStreams::One => [others, own, Vec::new()],
            PullStreams::Two => {
                let (first, second) = others.into_iter().map(|(rank, rows)| halves(rows).map(|half| (rank, half)).into()).unzip();
                [first, own, second]
            }
        };
        Self(lanes.map(|pieces| Lane { pieces, copies: OnceLock::new() }))
    }

    /// Enqueues the copies of each lane into a slot, after the work of the first stream so far; its later work comes after all of them.
    pub fn enqueue(&self, planes: &SymmetricBuffer<u8>, slot: &Buffer<u8>, [pulls, own, second]: [&Stream; 3]) -> Result<()> {
        let lanes = [(own, &self.0[1]), (second, &self.0[2])];
        let beside = || lanes.iter().filter(|(_, lane)| !lane.pieces.is_empty());
        beside().try_for_each(|(stream, _)| stream.follow(pulls))?;
        let copied = beside()
            .try_for_each(|(stream, lane)| lane.enqueue(planes, slot, stream))
            .and_then(|()| self.0[0].enqueue(planes, slot, pulls));
        // Also where a copy failed: what uses the slot next comes after those that were enqueued.
        beside().try_for_each(|(stream, _)| pulls.follow(stream))?;
        copied
    }
}

impl Lane {
    fn enqueue(&self, planes: &SymmetricBuffer<u8>, slot: &Buffer<u8>, stream: &Stream) -> Result<()> {
        if self.copies.get().is_none() {
            // The first pull looks addresses of other ranks up, which stay where they are.
            _ = self.copies.set(planes.copies_of_rows(&self.pieces, slot)?);
        }
        planes.enqueue_noted(stream, self.copies.get().map_or(&[], |copies| copies))
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
