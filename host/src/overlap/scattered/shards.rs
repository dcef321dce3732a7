//! The rows of each member, and the panels in which they travel: pure functions of sizes and ranks.

use std::ops::Range;

/// Rows of a result that members share, each of which has a shard of equal length; the last ones may have fewer rows, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shards {
    pub members: u32,
    /// Rows of all members.
    pub rows: u64,
    /// Rows of a panel.
    panel: u64,
}

/// Rows of panels are multiples of this, so that no tile of a kernel has rows of two.
const UNIT: u64 = 256;

impl Shards {
    /// In so many panels a shard, or fewer where there are no such.
    pub fn new(members: u32, rows: u64, panels: u32) -> Self {
        let extent = rows.div_ceil(members.into());
        let panel = extent.div_ceil(panels.max(1).into()).next_multiple_of(UNIT);
        Self { members, rows, panel: panel.max(UNIT) }
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

    /// The other members in the order in which `me` computes their rows: no two members put to the same one at a time.
    pub fn targets(&self, me: u32) -> impl Iterator<Item = u32> + use<> {
        let members = self.members;
        (1..members).map(move |step| (me + step) % members)
    }

    /// The other members in ascending order: that in which their parts are added.
    pub fn sources(&self, me: u32) -> impl Iterator<Item = u32> + use<> {
        (0..self.members).filter(move |source| *source != me)
    }

    /// The place of a source's part among those at a member.
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
                    assert!(rows.start == inside && (rows.start.is_multiple_of(UNIT) || rows.is_empty()), "{shards:?}");
                    inside = rows.end;
                }
                assert_eq!(inside, shard.end - shard.start);
                let places: Vec<_> = shards.sources(member).map(|source| shards.place_at(member, source)).collect();
                assert_eq!(places, (0..u64::from(members - 1)).collect::<Vec<_>>());
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
