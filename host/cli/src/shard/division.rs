//! How the bytes of one tensor are divided among ranks.

use std::ops::Range;

use crate::safetensors::{Dtype, Runs};

/// Along which dimension a tensor is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// Along none: every file has all of it.
    None,
    /// Along the first.
    Rows,
    /// Along the second, as codes and scales of the transpose are.
    Columns,
}

impl By {
    /// Every one, by its name in a shard's metadata.
    pub const CHOICES: [(&'static str, Self); 3] = [("none", Self::None), ("rows", Self::Rows), ("columns", Self::Columns)];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Rows => "rows",
            Self::Columns => "columns",
        }
    }
}

/// The parts of a tensor that ranks have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Division {
    /// Along which dimension of `view`.
    pub by: By,
    /// The dimensions of the whole as it is divided: its own, or those of the matrix that it is.
    pub view: Vec<u64>,
    /// What each rank has along the dimension; empty where all of them have the whole.
    pub ranges: Vec<Range<u64>>,
}

impl Division {
    /// Of a tensor that every file has.
    pub fn none(view: &[u64]) -> Self {
        Self { by: By::None, view: view.into(), ranges: Vec::new() }
    }

    /// The dimensions of a rank's part.
    pub fn shape(&self, rank: usize) -> Vec<u64> {
        let mut shape = self.view.clone();
        let dimension = match self.by {
            By::None => return shape,
            By::Rows => 0,
            By::Columns => 1,
        };
        shape[dimension] = self.ranges[rank].end - self.ranges[rank].start;
        shape
    }

    /// The first row, or column, of a rank's part.
    pub fn first(&self, rank: usize) -> u64 {
        self.ranges.get(rank).map_or(0, |range| range.start)
    }

    /// Where its bytes go.
    pub fn cuts(&self, dtype: Dtype) -> Cuts {
        // A tensor without elements has no bytes, and what its other dimensions multiply to does not matter.
        let bytes = |shape: &[u64]| shape.iter().fold(dtype.bits(), |bits, &size| bits.wrapping_mul(size)) / 8;
        let elements = match self.by {
            By::None => return Cuts { line_bytes: bytes(&self.view), ends: Vec::new() },
            By::Rows => &self.view[1..],
            By::Columns => &[],
        };
        let until = |end: u64| bytes(&[elements, &[end]].concat());
        let line_bytes = if self.by == By::Rows { bytes(&self.view) } else { until(self.view[1]) };
        Cuts { line_bytes, ends: self.ranges.iter().map(|range| until(range.end)).collect() }
    }
}

/// A tensor's bytes as lines of equal length, each cut at the same places: the pieces of a rank follow one another in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cuts {
    line_bytes: u64,
    /// The byte of a line at which each rank's piece ends; empty where every file has all lines.
    ends: Vec<u64>,
}

impl Cuts {
    /// Whether every file has all of the tensor.
    pub fn is_whole(&self) -> bool {
        self.ends.is_empty()
    }

    /// Divides `length` bytes of the whole from `offset` on. For each piece `each` gets the rank, where the piece goes in the rank's part, and which of the bytes
    /// it is.
    ///
    /// # Errors
    /// That of `each`.
    pub fn divide<E>(&self, offset: u64, length: usize, mut each: impl FnMut(usize, u64, Range<usize>) -> Result<(), E>) -> Result<(), E> {
        let mut done = 0;
        while done < length {
            let at = offset + done as u64;
            let (line, place) = (at / self.line_bytes, at % self.line_bytes);
            let rank = self.ends.partition_point(|&end| end <= place);
            let piece = self.piece(rank);
            let count = (piece.end - place).min((length - done) as u64);
            each(rank, line * (piece.end - piece.start) + place - piece.start, done..done + count as usize)?;
            done += count as usize;
        }
        Ok(())
    }

    /// The bytes of a rank's part, `total` of them, by windows of at most `most`: each with where it goes in the whole.
    pub fn windows(&self, rank: usize, total: u64, most: u64) -> impl Iterator<Item = (Range<u64>, Runs)> {
        let (piece, stride) = (self.piece(rank), self.line_bytes);
        let bytes = (piece.end - piece.start).max(1);
        let mut at = 0;
        std::iter::from_fn(move || {
            let (start, line, place) = (at, at / bytes, at % bytes);
            let count = if place == 0 && bytes <= most { most / bytes * bytes } else { most.min(bytes - place) };
            at = total.min(at.saturating_add(count));
            let run = if count < bytes { count } else { bytes };
            (start < at).then(|| (start..at, Runs { offset: line * stride + piece.start + place, bytes: run, stride }))
        })
    }

    /// The bytes of a rank in a line.
    pub fn piece(&self, rank: usize) -> Range<u64> {
        let start = if rank == 0 { 0 } else { self.ends[rank - 1] };
        start..self.ends[rank]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each rank's part of a tensor of so many lines, by nothing but the rule.
    fn parts(whole: &[u8], cuts: &Cuts) -> Vec<Vec<u8>> {
        let of_rank = |rank: usize| {
            let piece = cuts.piece(rank);
            whole.chunks(cuts.line_bytes as usize).flat_map(|line| line[piece.start as usize..piece.end as usize].to_vec()).collect()
        };
        (0..cuts.ends.len()).map(of_rank).collect()
    }

    #[test]
    fn bytes_are_divided_and_put_together() {
        for (lines, ends) in [(1, vec![5, 9, 9, 12]), (4, vec![2, 7, 10]), (3, vec![0, 6]), (5, vec![1])] {
            let line_bytes = *ends.last().expect("a rank");
            let cuts = Cuts { line_bytes, ends };
            let whole: Vec<u8> = (0..lines * line_bytes as u8).collect();
            let parts = parts(&whole, &cuts);
            for step in 1..=whole.len() {
                let mut found: Vec<Vec<u8>> = parts.iter().map(|part| vec![255; part.len()]).collect();
                for (number, data) in whole.chunks(step).enumerate() {
                    let divided = cuts.divide((number * step) as u64, data.len(), |rank, offset, range| {
                        found[rank][offset as usize..][..range.len()].copy_from_slice(&data[range]);
                        Ok::<_, ()>(())
                    });
                    divided.expect("no error");
                }
                assert_eq!(found, parts, "{cuts:?} by {step} bytes");
                let mut joined = vec![255; whole.len()];
                for (rank, part) in parts.iter().enumerate() {
                    let mut end = 0;
                    for (range, Runs { offset, bytes, stride }) in cuts.windows(rank, part.len() as u64, step as u64) {
                        assert!(range.start == end && range.end - range.start <= step as u64, "{cuts:?} by {step} bytes");
                        end = range.end;
                        for (number, run) in part[range.start as usize..range.end as usize].chunks(bytes as usize).enumerate() {
                            joined[offset as usize + number * stride as usize..][..run.len()].copy_from_slice(run);
                        }
                    }
                    assert_eq!(end, part.len() as u64);
                }
                assert_eq!(joined, whole, "{cuts:?} by {step} bytes");
            }
        }
    }

    #[test]
    fn parts_of_dimensions_and_of_bytes() {
        let rows = Division { by: By::Rows, view: vec![5, 3], ranges: vec![0..2, 2..4, 4..5] };
        assert_eq!([0, 1, 2].map(|rank| (rows.shape(rank), rows.first(rank))), [(vec![2, 3], 0), (vec![2, 3], 2), (vec![1, 3], 4)]);
        assert_eq!(rows.cuts(Dtype::F32), Cuts { line_bytes: 60, ends: vec![24, 48, 60] });
        let columns = Division { by: By::Columns, view: vec![4, 6], ranges: vec![0..4, 4..6] };
        assert_eq!((columns.shape(1), columns.cuts(Dtype::U8)), (vec![4, 2], Cuts { line_bytes: 6, ends: vec![4, 6] }));
        let whole = Division::none(&[2]);
        assert!(whole.cuts(Dtype::F32).is_whole() && whole.shape(3) == [2]);
        let nibbles = Division { by: By::Rows, view: vec![4, 3], ranges: vec![0..2, 2..4] };
        assert_eq!(nibbles.cuts(Dtype::F4), Cuts { line_bytes: 6, ends: vec![3, 6] });
        let empty = Division { by: By::Rows, view: vec![0, u64::MAX, 2], ranges: vec![0..0, 0..0] };
        assert_eq!(empty.shape(1), [0, u64::MAX, 2]);
        assert_eq!(empty.cuts(Dtype::F64).ends, [0, 0]);
    }
}
