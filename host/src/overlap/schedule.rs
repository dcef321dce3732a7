//! Which chunk travels when, and which tile is computed when: pure functions of sizes and ranks.
//!
//! Each member puts its shard to the next member, then to the one after it, and so on. So at each step no two put to the same one, and the shard of
//! the member before arrives first: it is at [position](Schedule::position) 1, the one before that at position 2; the own shard is at position 0.
//! Where the sum is gathered it is the other way round: a sum goes on upwards from the own part, so the shard of the next member is to arrive first.

use std::ops::Range;

use super::config::Cut;
use crate::symmetric::{Pitched, Rows};

/// Rows of tiles that are computed together, column by column, so that neighbours share operands in the L2 cache; as in the plain product.
const BAND: usize = 8;

/// The gathered operand as a matrix in memory, and how its shards are cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Schedule {
    pub members: u32,
    /// Elements along the dimension that is gathered.
    pub gathered: u64,
    /// Elements along the other one, which slabs cut.
    pub other: u64,
    /// Whether a shard is rows of the matrix as it is stored, and not columns.
    pub shards_are_rows: bool,
    /// Whether the shards of the members after this one arrive in their order, and not those before it backwards.
    pub ascending: bool,
    pub cut: Cut,
    /// Elements of a slab along the other dimension.
    pub slab: u64,
}

/// A part of a matrix as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub rows: Range<u64>,
    pub columns: Range<u64>,
}

impl Schedule {
    /// Cut into slabs of whole steps of a kernel: fewer slabs than asked for where there are fewer steps.
    pub fn new(members: u32, [gathered, other]: [u64; 2], [shards_are_rows, ascending]: [bool; 2], cut: Cut, step: u64) -> Self {
        let steps = other.div_ceil(step).max(1);
        let slab = steps.div_ceil(u64::from(cut.slabs()).clamp(1, steps));
        let slabs = steps.div_ceil(slab) as u32;
        let cut = match cut {
            Cut::Each(_) => Cut::Each(slabs),
            Cut::Last(_) => Cut::Last(slabs),
        };
        Self { members, gathered, other, shards_are_rows, ascending, cut, slab: slab * step }
    }

    /// Elements of a shard along the gathered dimension; the last ones may have fewer, or none.
    pub fn extent(&self) -> u64 {
        self.gathered.div_ceil(u64::from(self.members))
    }

    /// The shard of a member along the gathered dimension.
    pub fn shard(&self, source: u32) -> Range<u64> {
        let at = |member: u32| (u64::from(member) * self.extent()).min(self.gathered);
        at(source)..at(source + 1)
    }

    /// The place of `source`'s shard among the arrivals at `member`: 0 is the own one, 1 comes first.
    pub fn position(&self, member: u32, source: u32) -> u32 {
        if self.ascending { self.after(source, self.members - member) } else { self.after(member, self.members - source) }
    }

    /// The member so many places after one.
    fn after(&self, member: u32, places: u32) -> u32 {
        (member + places) % self.members
    }

    /// Rows and columns of the matrix as it is stored.
    pub fn stored(&self) -> [u64; 2] {
        if self.shards_are_rows { [self.gathered, self.other] } else { [self.other, self.gathered] }
    }

    /// Chunks of the shard that arrives at a position.
    pub fn pieces(&self, position: u32) -> u32 {
        match self.cut {
            Cut::Each(slabs) => slabs,
            Cut::Last(slabs) if position + 1 == self.members => slabs,
            Cut::Last(_) => 1,
        }
    }

    /// The chunk of a slab where the shard arrives at a position: of one that is not cut, always the whole.
    pub fn piece(&self, position: u32, slab: u32) -> u32 {
        if self.pieces(position) == 1 { 0 } else { slab }
    }

    /// A chunk of a shard that arrives at a position.
    pub fn chunk(&self, source: u32, position: u32, piece: u32) -> Chunk {
        let slab = match self.pieces(position) {
            1 => 0..self.other,
            _ => (u64::from(piece) * self.slab).min(self.other)..((u64::from(piece) + 1) * self.slab).min(self.other),
        };
        let (rows, columns) = if self.shards_are_rows { (self.shard(source), slab) } else { (slab, self.shard(source)) };
        Chunk { rows, columns }
    }

    /// The other members that have something to put, in the order in which their shards arrive at `member`.
    pub fn sources(&self, member: u32) -> impl Iterator<Item = u32> + use<'_> {
        let places = (1..self.members).map(|position| if self.ascending { position } else { self.members - position });
        places.map(move |places| self.after(member, places)).filter(|source| !self.shard(*source).is_empty())
    }

    /// The other members in the order in which `member` puts to them; none if it has nothing to put.
    pub fn targets(&self, member: u32) -> impl Iterator<Item = u32> + use<'_> {
        let is_empty = self.shard(member).is_empty();
        let places = (1..self.members).map(|step| if self.ascending { self.members - step } else { step });
        places.map(move |places| self.after(member, places)).filter(move |_| !is_empty)
    }

    /// Tiles of `height` gathered rows and their columns in the order of time: own ones first, then as what they need arrives. The row is in the upper 16
    /// bits.
    pub fn tiles(&self, member: u32, height: u64, columns: u32) -> Vec<u32> {
        let rows = self.gathered.div_ceil(height);
        let last_needed = |row: u64| {
            let (first, end) = (row * height, ((row + 1) * height).min(self.gathered));
            let sources = (first / self.extent().max(1)) as u32..=((end - 1) / self.extent().max(1)) as u32;
            sources.map(|source| self.position(member, source)).max()
        };
        let mut panels: Vec<Vec<u32>> = vec![Vec::new(); self.members as usize];
        (0..rows).for_each(|row| panels[last_needed(row).unwrap_or(0) as usize].push(row as u32));
        panels.iter().flat_map(|rows| banded(rows, columns)).collect()
    }
}

/// Tiles of these rows, in bands.
pub(super) fn banded(rows: &[u32], columns: u32) -> Vec<u32> {
    let band = |band: &[u32]| (0..columns).flat_map(|column| band.iter().map(move |row| row << 16 | column)).collect::<Vec<_>>();
    rows.chunks(BAND).flat_map(band).collect()
}

impl Chunk {
    /// Its copy to the same place of another matrix of so many columns, in bytes, for elements of `size` bytes.
    pub fn copy(&self, columns: u64, size: u64) -> Rows {
        let place = Pitched { start: (self.rows.start * columns + self.columns.start) * size, pitch: columns * size };
        let [count, width] = [&self.rows, &self.columns].map(|range| range.end - range.start);
        Rows { count, width: width * size, from: place, to: place }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn cuts() -> Vec<Cut> {
        (1..=Cut::MOST).flat_map(|slabs| [Cut::Each(slabs), Cut::Last(slabs)]).collect()
    }

    fn schedules() -> Vec<Schedule> {
        let mut all = Vec::new();
        for members in [1, 2, 3, 4, 8] {
            for [gathered, other] in [[1, 1], [7, 64], [256, 65], [1000, 200], [4096, 8192]] {
                let of = |cut, ways| Schedule::new(members, [gathered, other], ways, cut, 64);
                let ways = [[true, false], [true, true], [false, false], [false, true]];
                all.extend(cuts().into_iter().flat_map(|cut| ways.map(|ways| of(cut, ways))));
            }
        }
        all
    }

    /// Chunks of all shards cover the matrix once, at every member and whatever the cut.
    #[test]
    fn chunks_cover_the_matrix_once() {
        for schedule in schedules() {
            let [rows, columns] = schedule.stored();
            for member in 0..schedule.members {
                let mut area = 0;
                for source in 0..schedule.members {
                    let at = schedule.position(member, source);
                    for piece in 0..schedule.pieces(at) {
                        let Chunk { rows: r, columns: c } = schedule.chunk(source, at, piece);
                        assert!(r.end <= rows && c.end <= columns, "{schedule:?}");
                        area += (r.end - r.start) * (c.end - c.start);
                    }
                }
                assert_eq!(area, rows * columns, "{schedule:?}");
            }
        }
    }

    /// What a member puts is what the other waits for: the same chunks under the same numbers.
    #[test]
    fn both_ends_agree() {
        for schedule in schedules() {
            for source in 0..schedule.members {
                for target in schedule.targets(source) {
                    assert!(schedule.sources(target).any(|found| found == source), "{schedule:?}");
                }
                // What is put at a step is at the same place among the arrivals.
                let steps = schedule.targets(source).map(|target| schedule.position(target, source));
                assert!(steps.eq(1..if schedule.shard(source).is_empty() { 1 } else { schedule.members }), "{schedule:?}");
            }
            for member in 0..schedule.members {
                let arrivals: Vec<_> = schedule.sources(member).map(|source| schedule.position(member, source)).collect();
                assert!(arrivals.is_sorted(), "{schedule:?}");
                let slabs = schedule.cut.slabs();
                for (at, slab) in arrivals.iter().flat_map(|at| (0..slabs).map(move |slab| (*at, slab))) {
                    assert!(schedule.piece(at, slab) < schedule.pieces(at), "{schedule:?}");
                }
            }
        }
    }

    #[test]
    fn every_tile_comes_once_and_own_ones_first() {
        for schedule in schedules() {
            for (member, height) in (0..schedule.members).flat_map(|member| [128, 256].map(|height| (member, height))) {
                let (tiles, rows) = (schedule.tiles(member, height, 3), schedule.gathered.div_ceil(height));
                assert_eq!(tiles.iter().collect::<BTreeSet<_>>().len() as u64, 3 * rows, "{schedule:?}");
                assert_eq!(tiles.len() as u64, 3 * rows, "{schedule:?}");
                let needs = |tile: &u32| {
                    let row = u64::from(tile >> 16);
                    let inside = row * height..((row + 1) * height).min(schedule.gathered);
                    let overlaps = |source: &u32| {
                        let shard = schedule.shard(*source);
                        shard.start < inside.end && inside.start < shard.end
                    };
                    (0..schedule.members).filter(overlaps).map(|source| schedule.position(member, source)).max().unwrap()
                };
                assert!(tiles.iter().map(needs).is_sorted(), "{schedule:?}, member {member}");
            }
        }
    }

    #[test]
    fn slabs_are_whole_steps() {
        let schedule = Schedule::new(4, [4096, 1000], [true, false], Cut::Each(4), 64);
        // 16 steps in slabs of 4.
        assert_eq!((schedule.slab, schedule.cut), (256, Cut::Each(4)));
        assert_eq!(schedule.chunk(1, 1, 3), Chunk { rows: 1024..2048, columns: 768..1000 });
        assert_eq!(schedule.chunk(1, 1, 3).copy(1000, 2).from, Pitched { start: (1024 * 1000 + 768) * 2, pitch: 2000 });
        let few = Schedule::new(4, [4096, 100], [true, false], Cut::Each(4), 64);
        assert_eq!((few.slab, few.cut), (64, Cut::Each(2)));
    }
}
