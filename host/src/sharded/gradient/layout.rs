//! How a gradient lies: whole on each rank, and in parts of all ranks where the owner of its rows adds them up.

use std::ops::Range;

use oxtile_tile::launch::DeviceView;

use super::super::format::WeightFormat;
use super::super::weight::Weight;
use crate::comm::WorldSize;
use crate::sum_parts::PartApart;
use crate::symmetric::{Pitched, Rows};

/// The gradient of a weight, `[experts, rows, columns]`, and the rows of each member.
#[derive(Debug)]
pub(super) struct Layout {
    experts: u64,
    rows: u64,
    columns: u64,
    element_bytes: u64,
    /// The rows of each member, of every expert.
    owned: Vec<Range<u64>>,
    stride: u64,
}

impl Layout {
    pub fn new<F: WeightFormat>(weight: &Weight, members: WorldSize, element_bytes: u64) -> Self {
        let shards = weight.shards::<F>(members);
        let owned: Vec<_> = members.ranks().map(|rank| shards.range(rank)).collect();
        let most = owned.iter().map(|range| range.end - range.start).max().unwrap_or(0);
        let Weight { experts, rows, columns, .. } = *weight;
        // Parts begin at multiples of 16 bytes, so that vectors are read.
        let stride = (experts * most * columns).next_multiple_of(16 / element_bytes);
        Self { experts, rows, columns, element_bytes, owned, stride }
    }

    /// Elements of the whole gradient.
    pub fn whole(&self) -> u64 {
        self.experts * self.rows * self.columns
    }

    /// Elements of the rows of a member.
    pub fn part(&self, owner: usize) -> u64 {
        self.experts * self.width(owner)
    }

    /// Elements of a member's rows of one expert.
    fn width(&self, owner: usize) -> u64 {
        let Range { start, end } = self.owned[owner];
        (end - start) * self.columns
    }

    /// Elements from the part of a member to that of the next one.
    pub fn stride(&self) -> u64 {
        self.stride
    }

    /// Elements of the parts of all members.
    pub fn parts(&self) -> u64 {
        self.stride * self.owned.len() as u64
    }

    /// Elements of the parts of all members but the owner.
    pub fn parts_of_others(&self) -> u64 {
        self.stride * (self.owned.len() as u64 - 1)
    }

    /// Elements in parts up to the last one's end, of the rows of a member.
    pub fn end_of(&self, parts: u64, owner: usize) -> u64 {
        parts.checked_sub(self.stride).map_or(0, |last| last + self.part(owner))
    }

    /// The members, by number.
    pub fn owners(&self) -> std::ops::Range<usize> {
        0..self.owned.len()
    }

    /// Whether the rows of each member lie where its part lies among the parts of all.
    pub fn is_in_parts(&self) -> bool {
        let in_place = |(owner, rows): (u64, &Range<u64>)| rows.is_empty() || rows.start * self.columns == owner * self.stride;
        self.experts == 1 && (0..).zip(&self.owned).all(in_place)
    }

    /// The copies of an owner's rows from a whole gradient to the part of a number: one of all experts, or one of each where they are further apart than a
    /// copy engine takes.
    pub fn copies(&self, owner: usize, part: usize) -> Vec<Rows> {
        let (width, pitch) = (self.width(owner), self.rows * self.columns);
        let from = Pitched { start: self.owned[owner].start * self.columns, pitch };
        let to = Pitched { start: part as u64 * self.stride, pitch: width };
        Rows { count: self.experts, width, from, to }.pieces(self.element_bytes)
    }

    /// The part of a member that has its rows in its whole gradient.
    pub fn apart<'a, E>(&self, owner: usize, whole: DeviceView<'a, E>) -> PartApart<'a, E> {
        let (width, pitch) = (self.width(owner), self.rows * self.columns);
        let start = self.owned[owner].start * self.columns;
        let end = start + (self.experts - 1) * pitch + width;
        PartApart { rank: owner as u32, part: whole.slice(start, end), width, pitch }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sharded::{Bf16, Mxfp8};

    fn layout<F: WeightFormat>(experts: u64, shape: [u64; 2], members: u32) -> Layout {
        Layout::new::<F>(&Weight::new("w", shape).experts(experts), WorldSize::new(members).unwrap(), 2)
    }

    #[test]
    fn rows_go_to_their_owner() {
        let gradient = layout::<Bf16>(2, [5, 3], 2);
        // Experts of 15 elements; the second member has the last 2 rows, of 6 elements. Parts of 18 elements lie 24 apart.
        assert_eq!((gradient.whole(), gradient.part(0), gradient.part(1), gradient.stride(), gradient.parts()), (30, 18, 12, 24, 48));
        let expected = Rows { count: 2, width: 6, from: Pitched { start: 9, pitch: 15 }, to: Pitched { start: 24, pitch: 6 } };
        assert_eq!(gradient.copies(1, 1), [expected]);
    }

    #[test]
    fn shards_of_a_format_are_whole_blocks() {
        let gradient = layout::<Mxfp8>(1, [40, 8], 3);
        assert_eq!([0, 1, 2].map(|owner| gradient.part(owner)), [32 * 8, 8 * 8, 0]);
    }

    #[test]
    fn rows_that_lie_as_parts_do() {
        // Parts of 16 elements of 2 bytes begin at whole vectors; those of 15 do not, nor do those of experts.
        let is = |experts, shape, members| layout::<Bf16>(experts, shape, members).is_in_parts();
        assert!(is(1, [5, 8], 2) && is(1, [1, 8], 3) && is(1, [7, 3], 1));
        assert!(!is(1, [6, 5], 2) && !is(2, [4, 8], 2));
    }

    /// Experts of 2 GiB are copied one by one.
    #[test]
    fn experts_far_apart() {
        let gradient = layout::<Bf16>(3, [1 << 15, 1 << 15], 2);
        let [first, second, third] = gradient.copies(1, 1).try_into().unwrap();
        assert_eq!([first, second, third].map(|rows: Rows| rows.count), [1; 3]);
        assert_eq!((second.from.start - first.from.start, third.to.start - second.to.start), (1 << 30, 1 << 29));
    }
}
