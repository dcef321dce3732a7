//! Which chunk travels when, and which tile is computed when: pure functions of sizes and ranks.
//!
//! Each member puts its shard to the next member, then to the one after it, and so on. So at each step no two put to the same one, and the shard of
//! the member before arrives first: it is at [position](Schedule::position) 1, the one before that at position 2; the own shard is at position 0.
//! Where the sum is gathered it is the other way round: a sum goes on upwards from the own part, so the shard of the next member is to arrive first.

use std::ops::Range;

use super::config::Cut;
use crate::gemm::GemmTile;
use crate::symmetric::{Pitched, Rows};

/// Rows of tiles that are computed together, column by column, so that neighbours share operands in the L2 cache; as in the plain product.
const BAND: usize = 8;

/// The gathered operand as a matrix in memory, and how its shards are cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Schedule {
    pub members: u32,
    /// Elements along the dimension that is gathered, which panels cut.
    pub gathered: u64,
    /// Elements along the other one, which slabs cut.
    pub other: u64,
    /// Whether a shard is rows of the matrix as it is stored, and not columns.
    pub shards_are_rows: bool,
    /// Whether the shards of the members after this one arrive in their order, and not those before it backwards.
    pub ascending: bool,
    pub cut: Cut,
    /// Elements of a unit along the other dimension: of a slab, or where slabs are halved of the shortest one.
    pub unit: u64,
}

/// A part of a matrix as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Its number in its shard: that of its flag.
    pub number: u32,
    pub rows: Range<u64>,
    pub columns: Range<u64>,
}

impl Schedule {
    /// Cut into panels of equal size and slabs of whole steps of a kernel, fewer than asked for where the shard has no such parts.
    pub fn new(members: u32, [gathered, other]: [u64; 2], [shards_are_rows, ascending]: [bool; 2], cut: Cut, step: u64) -> Self {
        let (extent, steps) = (gathered.div_ceil(u64::from(members)), other.div_ceil(step).max(1));
        let panels = (1..=cut.panels.max(1)).rev().find(|panels| extent.is_multiple_of(u64::from(*panels))).unwrap_or(1);
        let (unit, slabs) = if cut.halving {
            let unit = |slabs: u32| steps.div_ceil(halving(slabs, slabs));
            let slabs = (1..=cut.slabs).rev().find(|slabs| steps.div_ceil(unit(*slabs)) == halving(*slabs, *slabs)).unwrap_or(1);
            (unit(slabs), slabs)
        } else {
            let unit = steps.div_ceil(u64::from(cut.slabs).clamp(1, steps));
            (unit, steps.div_ceil(unit) as u32)
        };
        let cut = Cut { panels, slabs, ..cut };
        Self { members, gathered, other, shards_are_rows, ascending, cut, unit: unit * step }
    }

    /// Elements of a shard along the gathered dimension; the last ones may have fewer, or none.
    pub fn extent(&self) -> u64 {
        self.gathered.div_ceil(u64::from(self.members))
    }

    /// Elements of a panel along it.
    pub fn panel_extent(&self) -> u64 {
        self.extent() / u64::from(self.cut.panels)
    }

    /// The shard of a member along the gathered dimension.
    pub fn shard(&self, source: u32) -> Range<u64> {
        let at = |member: u32| (u64::from(member) * self.extent()).min(self.gathered);
        at(source)..at(source + 1)
    }

    /// A panel of it.
    fn panel(&self, source: u32, panel: u32) -> Range<u64> {
        let first = u64::from(source) * self.extent() + u64::from(panel) * self.panel_extent();
        first.min(self.gathered)..(first + self.panel_extent()).min(self.gathered)
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

    /// Slabs of a panel of the shard that arrives at a position.
    pub fn slabs(&self, position: u32, panel: u32) -> u32 {
        let is_last = position + 1 == self.members && panel + 1 == self.cut.panels;
        if is_last || !self.cut.last_only { self.cut.slabs } else { 1 }
    }

    /// The units of a panel along the other dimension, of which its slabs are made; the last one may be shorter.
    pub fn units(&self) -> u32 {
        self.first_unit(self.cut.slabs) as u32
    }

    /// The units before a slab.
    fn first_unit(&self, slab: u32) -> u64 {
        if self.cut.halving { halving(self.cut.slabs, slab) } else { slab.into() }
    }

    /// The units of a slab of the panel of the shard that arrives at a position.
    pub fn units_of(&self, position: u32, panel: u32, slab: u32) -> Range<u64> {
        if self.slabs(position, panel) == 1 { 0..self.units().into() } else { self.first_unit(slab)..self.first_unit(slab + 1) }
    }

    /// The number of the chunk that a unit of a panel is in, of the shard that arrives at a position; none if the panel is empty.
    pub fn number(&self, source: u32, position: u32, panel: u32, unit: u32) -> Option<u32> {
        let slab = (0..self.slabs(position, panel)).rfind(|slab| self.units_of(position, panel, *slab).start <= unit.into())?;
        (!self.panel(source, panel).is_empty()).then_some(panel * self.cut.slabs + slab)
    }

    /// The chunks of a shard that arrives at a position, in the order in which they are put. An empty shard is a chunk too, so that FREE is taken and set by all in
    /// every call.
    pub fn chunks(&self, source: u32, position: u32) -> Vec<Chunk> {
        if self.shard(source).is_empty() {
            return vec![self.whole(source)];
        }
        let of_panel = |panel: u32| (0..self.slabs(position, panel)).map(move |slab| (panel, slab));
        let chunk = |(panel, slab): (u32, u32)| {
            let units = self.units_of(position, panel, slab);
            let number = self.number(source, position, panel, units.start as u32)?;
            let slab = (units.start * self.unit).min(self.other)..(units.end * self.unit).min(self.other);
            let panel = self.panel(source, panel);
            let (rows, columns) = if self.shards_are_rows { (panel, slab) } else { (slab, panel) };
            Some(Chunk { number, rows, columns })
        };
        (0..self.cut.panels).flat_map(of_panel).filter_map(chunk).collect()
    }

    /// A whole shard.
    pub fn whole(&self, source: u32) -> Chunk {
        let (shard, other) = (self.shard(source), 0..self.other);
        let (rows, columns) = if self.shards_are_rows { (shard, other) } else { (other, shard) };
        Chunk { number: 0, rows, columns }
    }

    /// The other members in the order in which their shards arrive at `member`.
    pub fn sources(&self, member: u32) -> impl Iterator<Item = u32> + use<'_> {
        let places = (1..self.members).map(|position| if self.ascending { position } else { self.members - position });
        places.map(move |places| self.after(member, places))
    }

    /// The other members in the order in which `member` puts to them.
    pub fn targets(&self, member: u32) -> impl Iterator<Item = u32> + use<'_> {
        let places = (1..self.members).map(|step| if self.ascending { self.members - step } else { step });
        places.map(move |places| self.after(member, places))
    }

    /// The panels, each by position and number, of what a tile needs that begins at `row` and is so high, at `member`.
    pub fn needs(&self, member: u32, row: u64, height: u64) -> impl Iterator<Item = (u32, u32)> + use<'_> {
        let (panels, extent) = (u64::from(self.cut.panels), self.panel_extent().max(1));
        let parts = row / extent..=((row + height).min(self.gathered) - 1) / extent;
        parts.map(move |part| (self.position(member, (part / panels) as u32), (part % panels) as u32))
    }

    /// Tiles of `height` gathered rows and their columns in the order of time: own ones first, then as what they need arrives. The row is in the upper 16
    /// bits.
    pub fn tiles(&self, member: u32, height: u64, columns: u32) -> Vec<u32> {
        let rows = self.gathered.div_ceil(height);
        // Panels of the own shard are there together.
        let arrival = |(position, panel): (u32, u32)| if position == 0 { 0 } else { 1 + (position - 1) * self.cut.panels + panel };
        let last_needed = |row: u64| self.needs(member, row * height, height).map(arrival).max().unwrap_or(0);
        let mut arrivals: Vec<Vec<u32>> = vec![Vec::new(); (self.members * self.cut.panels) as usize];
        (0..rows).for_each(|row| arrivals[last_needed(row) as usize].push(row as u32));
        arrivals.iter().flat_map(|rows| banded(rows, columns)).collect()
    }
}

/// The units before a slab, of so many slabs of which each is half of the one before it and the last one is a unit.
fn halving(slabs: u32, slab: u32) -> u64 {
    (1 << slabs) - (1 << (slabs - slab))
}

/// Fails where a product has more tiles a side than an entry of a list of tiles, 16 bits for each, has numbers for.
pub(super) fn check_numbered(tile: GemmTile, [m, n]: [u64; 2]) -> Result<(), String> {
    let ([height, width], cluster) = tile.size();
    if m.div_ceil(height * cluster).max(n.div_ceil(width)) <= 1 << 16 {
        return Ok(());
    }
    Err("its tiles are too many to be numbered in 16 bits a side: multiply in parts of fewer rows or columns".to_owned())
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
        let ways = [[false, false], [false, true], [true, false], [true, true]];
        let of = |panels| [1, 2, 4].map(|slabs| ways.map(|[halving, last_only]| Cut { panels, slabs, halving, last_only }));
        [1, 2, 3, 4].into_iter().flat_map(of).flatten().collect()
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

    /// Chunks of all shards cover the matrix once, at every member and whatever the cut, and no two of a shard have one number.
    #[test]
    fn chunks_cover_the_matrix_once() {
        for schedule in schedules() {
            let [rows, columns] = schedule.stored();
            for member in 0..schedule.members {
                let mut area = 0;
                for source in 0..schedule.members {
                    let chunks = schedule.chunks(source, schedule.position(member, source));
                    let numbers: BTreeSet<_> = chunks.iter().map(|chunk| chunk.number).collect();
                    assert!(numbers.len() == chunks.len() && numbers.iter().all(|number| *number < Cut::CHUNKS), "{schedule:?}");
                    for Chunk { rows: r, columns: c, .. } in chunks {
                        let is_empty = r.is_empty() || c.is_empty();
                        assert!(is_empty == schedule.shard(source).is_empty() && r.end <= rows && c.end <= columns, "{schedule:?}");
                        area += (r.end - r.start) * (c.end - c.start);
                    }
                }
                assert_eq!(area, rows * columns, "{schedule:?}");
            }
        }
    }

    /// What a member puts is what the other waits for: at the same place in the order, under the same numbers.
    #[test]
    fn both_ends_agree() {
        for schedule in schedules() {
            for source in 0..schedule.members {
                let targets: Vec<_> = schedule.targets(source).collect();
                let is_source = |target: &u32| schedule.sources(*target).any(|found| found == source);
                assert!(targets.iter().all(is_source), "{schedule:?}");
                assert!(targets.iter().map(|target| schedule.position(*target, source)).eq(1..schedule.members), "{schedule:?}");
            }
            for member in 0..schedule.members {
                let arrivals: Vec<_> = schedule.sources(member).map(|source| schedule.position(member, source)).collect();
                assert!(arrivals.is_sorted(), "{schedule:?}");
                for source in schedule.sources(member).filter(|source| !schedule.shard(*source).is_empty()) {
                    let at = schedule.position(member, source);
                    let put: BTreeSet<_> = schedule.chunks(source, at).iter().map(|chunk| chunk.number).collect();
                    let panels = (0..schedule.cut.panels).flat_map(|panel| (0..schedule.units()).map(move |unit| (panel, unit)));
                    let awaited: BTreeSet<_> = panels.filter_map(|(panel, unit)| schedule.number(source, at, panel, unit)).collect();
                    assert_eq!(put, awaited, "{schedule:?}");
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
                    let overlaps = |(source, panel): &(u32, u32)| {
                        let panel = schedule.panel(*source, *panel);
                        panel.start < inside.end && inside.start < panel.end
                    };
                    let panels = (0..schedule.members).flat_map(|source| (0..schedule.cut.panels).map(move |panel| (source, panel)));
                    let arrival = |(source, panel): (u32, u32)| match schedule.position(member, source) {
                        0 => (0, 0),
                        position => (position, panel),
                    };
                    panels.filter(overlaps).map(arrival).max().unwrap()
                };
                assert!(tiles.iter().map(needs).is_sorted(), "{schedule:?}, member {member}");
            }
        }
    }

    #[test]
    fn slabs_are_whole_steps_and_panels_are_equal() {
        let cut = Cut { panels: 2, slabs: 4, halving: false, last_only: false };
        let schedule = Schedule::new(4, [4096, 1000], [true, false], cut, 64);
        // 16 steps in slabs of 4.
        assert_eq!((schedule.unit, schedule.cut, schedule.panel_extent()), (256, cut, 512));
        let last = schedule.chunks(1, 1).pop().unwrap();
        assert_eq!(last, Chunk { number: 7, rows: 1536..2048, columns: 768..1000 });
        assert_eq!(last.copy(1000, 2).from, Pitched { start: (1536 * 1000 + 768) * 2, pitch: 2000 });
        let few = Schedule::new(4, [4092, 100], [true, false], Cut { panels: 4, ..cut }, 64);
        assert_eq!((few.unit, few.cut), (64, Cut { panels: 3, slabs: 2, ..cut }));
    }

    /// A unit of a slab is awaited by the flag of the chunk that has all its elements.
    #[test]
    fn each_slab_is_half_of_the_one_before() {
        let cut = Cut { panels: 1, slabs: 3, halving: true, last_only: false };
        let widths = |other, slabs| {
            let schedule = Schedule::new(2, [256, other], [true, false], Cut { slabs, ..cut }, 64);
            let chunks = schedule.chunks(1, 1);
            for unit in 0..schedule.units() {
                let chunk = &chunks[schedule.number(1, 1, 0, unit).unwrap() as usize];
                let [start, end] = [unit, unit + 1].map(|unit| (u64::from(unit) * schedule.unit).min(other));
                assert!(chunk.columns.start <= start && end <= chunk.columns.end, "{schedule:?}, unit {unit}: {chunk:?}");
            }
            chunks.into_iter().map(|chunk| chunk.columns.end - chunk.columns.start).collect::<Vec<_>>()
        };
        // 128 steps of 64 in units of 19.
        assert_eq!(widths(8192, 3), [76 * 64, 38 * 64, 14 * 64]);
        assert_eq!(widths(448, 3), [256, 128, 64]);
        // Units of 2 of 5 steps are 3, of 4 steps only 2: nothing would be left for the second slab.
        assert_eq!((widths(320, 3), widths(256, 3)), (vec![256, 64], vec![256]));
        assert_eq!(widths(40, 4), [40]);
    }
}
