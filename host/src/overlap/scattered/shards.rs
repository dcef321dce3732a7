//! The rows of each member, and the panels in which they travel: pure functions of sizes and ranks.

use std::ops::Range;

/// Rows of a result that members share, each of which has a shard of equal length; the last ones may have fewer rows, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::overlap) struct Shards {
    pub members: u32,
    /// Rows of all members.
    pub rows: u64,
    /// Rows of a panel.
    panel: u64,
    /// Whether a member multiplies its own rows a panel at a time, and not all at once.
    pub apart: bool,
}

impl Shards {
    /// Rows of panels are multiples of this, so that no tile of a kernel has rows of two.
    pub const UNIT: u64 = 256;

    /// In so many panels a shard, or fewer where there are no such.
    pub fn new(members: u32, rows: u64, panels: u32) -> Self {
        let extent = rows.div_ceil(members.into());
        let panel = extent.div_ceil(panels.max(1).into()).next_multiple_of(Self::UNIT);
        Self { members, rows, panel: panel.max(Self::UNIT), apart: false }
    }

    /// Rows of a shard.
    pub fn extent(&self) -> u64 {
        self.rows.div_ceil(self.members.into())
    }

    /// The rows of a member.
    pub fn shard(&self, member: u32) -> Range<u64> {
        let at = |member: u32| (u64::from(member) * self.extent()).min(self.rows);
        at(member)..at(member + 1)
    }

    /// Rows of a panel; the last one of a shard may have fewer.
    pub fn panel_rows(&self) -> u64 {
        self.panel
    }

    /// Panels of a shard, some of which may be empty where the shard is short.
    pub fn panels(&self) -> u32 {
        self.extent().div_ceil(self.panel).max(1) as u32
    }

    /// A panel of a member's shard, in rows of that shard.
    pub fn panel(&self, member: u32, panel: u32) -> Range<u64> {
        let rows = self.shard(member);
        let at = |panel: u32| (u64::from(panel) * self.panel).min(rows.end - rows.start);
        at(panel)..at(panel + 1)
    }

    /// The panels of each product of a member's own rows; none of an empty shard.
    pub fn runs(&self, member: u32) -> Vec<Range<u32>> {
        let rows = self.shard(member);
        let panels = (rows.end - rows.start).div_ceil(self.panel) as u32;
        let together = if self.apart { 1 } else { panels.max(1) };
        (0..panels).step_by(together as usize).map(|first| first..first + together).collect()
    }

    /// Rows of some panels of a member, in rows of its shard.
    pub fn rows_of(&self, member: u32, panels: &Range<u32>) -> Range<u64> {
        self.panel(member, panels.start).start..self.panel(member, panels.end - 1).end
    }

    /// Where a source's part of a panel lies among those at a member, in rows: the parts of a product's rows lie together, one source's after another.
    pub fn part_at(&self, member: u32, source: u32, panel: u32) -> u64 {
        let all = self.shard(member);
        let run = if self.apart { self.panel(member, panel) } else { 0..all.end - all.start };
        let (others, before) = (u64::from(self.members - 1), self.panel(member, panel).start - run.start);
        run.start * others + self.place_at(member, source) * (run.end - run.start) + before
    }

    /// The other members in the order in which `me` computes their rows: no two members put to the same one at a time.
    pub fn targets(&self, me: u32) -> impl Iterator<Item = u32> + use<> {
        let members = self.members;
        (1..members).map(move |step| (me + step) % members)
    }

    /// The other members in ascending order: that in which their parts are added.
    pub fn sources(&self, me: u32) -> impl Iterator<Item = u32> + use<> {
        (0..self.members).filter(move |source| *source != me)
    }

    /// The place of a source among those at a member.
    pub fn place_at(&self, member: u32, source: u32) -> u64 {
        u64::from(if source < member { source } else { source - 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every row of every member is in one panel, parts have a place each, and at each step every member is put to once.
    #[test]
    fn rows_are_in_one_panel_and_parts_in_one_place() {
        for (members, rows, panels) in [(1, 700, 2), (2, 8192, 4), (3, 1000, 3), (4, 5, 1), (8, 4100, 8), (2, 0, 2)] {
            let shards = Shards::new(members, rows, panels);
            assert!(shards.panels() <= panels);
            let mut next = 0;
            for member in 0..members {
                let shard = shards.shard(member);
                assert_eq!(shard.start, next);
                next = shard.end;
                let mut inside = 0;
                for panel in 0..shards.panels() {
                    let rows = shards.panel(member, panel);
                    assert!(rows.start == inside && (rows.start.is_multiple_of(Shards::UNIT) || rows.is_empty()), "{shards:?}");
                    inside = rows.end;
                }
                assert_eq!(inside, shard.end - shard.start);
                for apart in [false, true] {
                    let shards = Shards { apart, ..shards };
                    let rows: Vec<_> = shards.runs(member).iter().flat_map(|run| shards.rows_of(member, run)).collect();
                    assert!(rows.iter().copied().eq(0..shard.end - shard.start), "{shards:?}");
                    let part = |(source, panel)| {
                        let (rows, at) = (shards.panel(member, panel), shards.part_at(member, source, panel));
                        at..at + rows.end - rows.start
                    };
                    let parts =
                        shards.sources(member).flat_map(|source| (0..shards.panels()).map(move |panel| (source, panel))).flat_map(part);
                    let mut parts: Vec<_> = parts.collect();
                    parts.sort_unstable();
                    assert!(parts.into_iter().eq(0..u64::from(members - 1) * (shard.end - shard.start)), "{shards:?}");
                }
            }
            assert_eq!(next, rows);
            let targets: Vec<Vec<_>> = (0..members).map(|me| shards.targets(me).collect()).collect();
            for step in 0..members as usize - 1 {
                let mut put_to: Vec<_> = targets.iter().map(|of| of[step]).collect();
                put_to.sort_unstable();
                assert_eq!(put_to, (0..members).collect::<Vec<_>>());
            }
        }
    }
}
