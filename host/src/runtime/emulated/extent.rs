//! The bytes that a use touches: rows of one width, at one distance.

use std::ops::Range;

/// Rows of bytes: a range of bytes is one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    start: u64,
    width: u64,
    count: u64,
    /// From the start of a row to that of the next; at least the width.
    pitch: u64,
}

impl Extent {
    pub fn range(start: u64, bytes: u64) -> Self {
        Self { start, width: bytes, count: 1, pitch: bytes }
    }

    pub fn rows(start: u64, width: u64, count: u64, pitch: u64) -> Self {
        if count <= 1 || pitch == width { Self::range(start, width * count) } else { Self { start, width, count, pitch } }
    }

    pub fn start(&self) -> u64 {
        self.start
    }

    pub fn is_empty(&self) -> bool {
        self.width == 0
    }

    fn end(&self) -> u64 {
        self.start + (self.count - 1) * self.pitch + self.width
    }

    fn row(&self, index: u64) -> Range<u64> {
        let start = self.start + index * self.pitch;
        start..start + self.width
    }

    /// Its rows.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let extent = *self;
        (0..self.count).map(move |index| extent.row(index))
    }

    /// The first row that ends after a byte, if there is one.
    fn row_after(&self, byte: u64) -> Option<Range<u64>> {
        let index = match byte.checked_sub(self.start + self.width) {
            Some(beyond) if self.pitch > 0 => beyond / self.pitch + 1,
            Some(_) => self.count,
            None => 0,
        };
        (index < self.count).then(|| self.row(index))
    }

    /// The first bytes in a row that both have.
    pub fn overlap(&self, other: &Self) -> Option<Range<u64>> {
        if self.is_empty() || other.is_empty() || self.end() <= other.start || other.end() <= self.start {
            return None;
        }
        let (few, many) = if self.count <= other.count { (self, other) } else { (other, self) };
        (0..few.count).map(|index| few.row(index)).find_map(|row| {
            let found = many.row_after(row.start).filter(|found| found.start < row.end)?;
            Some(row.start.max(found.start)..row.end.min(found.end))
        })
    }

    /// Whether it has all bytes of the other.
    pub fn covers(&self, other: &Self) -> bool {
        if self == other {
            return true;
        }
        let has = |row: Range<u64>| self.row_after(row.start).is_some_and(|own| own.start <= row.start && row.end <= own.end);
        match self.count {
            1 => self.start <= other.start && other.end() <= self.end(),
            _ => (0..other.count).all(|index| has(other.row(index))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Held to the sets of bytes.
    #[test]
    fn rows_meet_where_their_bytes_do() {
        let bytes = |extent: &Extent| (0..extent.count).flat_map(|index| extent.row(index)).collect::<Vec<_>>();
        let mut all = vec![Extent::range(5, 0)];
        for (start, width, count) in
            [0, 1, 4, 7].iter().flat_map(|&a| [1, 2, 3].map(move |b| (a, b))).flat_map(|(a, b)| [1, 2, 3].map(|c| (a, b, c)))
        {
            all.extend([0, 1, 4].map(|gap| Extent::rows(start, width, count, width + gap)));
        }
        for (one, other) in all.iter().flat_map(|one| all.iter().map(move |other| (one, other))) {
            let (mine, theirs) = (bytes(one), bytes(other));
            let common: Vec<_> = mine.iter().filter(|byte| theirs.contains(byte)).copied().collect();
            let found = one.overlap(other);
            assert_eq!(found.is_some(), !common.is_empty(), "{one:?} {other:?}");
            assert!(found.iter().cloned().flatten().all(|byte| common.contains(&byte)), "{one:?} {other:?}: {found:?}");
            assert_eq!(found.map(|found| found.start), common.first().copied(), "{one:?} {other:?}");
            let holds = theirs.iter().all(|byte| mine.contains(byte));
            assert!(one.covers(other) == holds || other.is_empty() || one.is_empty(), "{one:?} {other:?}");
        }
    }
}
