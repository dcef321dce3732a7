//! The order of tiles where other members' rows leave as they are computed: pure functions of sizes and ranks.

use super::Shards;
use crate::overlap::schedule::banded;

/// The tiles of the other members' rows, of the own ones, and of both.
pub(super) struct TileLists {
    pub sent: Vec<u32>,
    pub own: Vec<u32>,
    pub together: Vec<u32>,
}

impl TileLists {
    /// Those of a member, in clusters' tiles of so many rows, which divide a panel's, and so many in a row, for a device that computes `at_once` of them.
    ///
    /// Panel by panel, the rows of the next member first: at each step each member is put to once. Own tiles of a panel come between those of later panels, so that the link is busy all the time, and so much later that
    /// what the others send meanwhile has come: every member has the same order, turned by its number.
    pub fn new(shards: &Shards, me: u32, unit: u64, columns: u32, at_once: usize) -> Self {
        let tiles = |member: u32, panel: u32| {
            let (first, rows) = (shards.shard(member).start, shards.panel(member, panel));
            let row = |at: u64| (first + at) / unit;
            banded(&(row(rows.start)..row(rows.end)).map(|row| row as u32).collect::<Vec<_>>(), columns)
        };
        let (mut sent, mut own, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        for panel in 0..shards.panels() {
            shards.targets(me).for_each(|target| sent.extend(tiles(target, panel)));
            let of_panel = tiles(me, panel);
            ends.extend(of_panel.iter().map(|_| sent.len()));
            own.extend(of_panel);
        }
        let together = merged(&sent, &own, &ends, 2 * at_once);
        Self { sent, own, together }
    }
}

/// Tiles of both lists: an own one comes at least `apart` later than the sent ones before its end, if there are so many, in their proportion, and at least the last `apart` ones after all that are sent.
fn merged(sent: &[u32], own: &[u32], ends: &[usize], apart: usize) -> Vec<u32> {
    let between = own.len().saturating_sub(apart);
    let (mut all, mut next) = (Vec::with_capacity(sent.len() + own.len()), 0);
    // Where the sent ones before each number end in the merged list.
    let mut places = Vec::with_capacity(sent.len());
    for (number, tile) in sent.iter().enumerate() {
        all.push(*tile);
        places.push(all.len());
        let is_due = |next: usize| next < between && ends[next] <= number + 1 && places[ends[next].max(1) - 1] + apart <= all.len();
        if is_due(next) && next * sent.len() < between * (number + 1) {
            all.push(own[next]);
            next += 1;
        }
    }
    all.extend(&own[next..]);
    all
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Every tile is in the list once, and each own tile comes after all tiles of its panel that the others send, at their places in lists that are alike.
    #[test]
    fn own_tiles_come_after_what_they_wait_for() {
        let cases = [
            (2, 4096, 4, 8, 4),
            (4, 8192, 8, 32, 66),
            (3, 3 * 768, 3, 5, 7),
            (8, 4096, 1, 3, 66),
            (2, 16384, 8, 32, 66),
            (2, 2048, 4, 3, 1),
        ];
        for (members, rows, panels, columns, at_once) in cases {
            let (shards, unit) = (Shards::new(members, rows, panels), 256);
            let lists: Vec<_> = (0..members).map(|me| TileLists::new(&shards, me, unit, columns, at_once)).collect();
            for (me, list) in (0..).zip(&lists) {
                let all: BTreeSet<u32> = list.together.iter().copied().collect();
                assert_eq!((all.len(), list.together.len() as u64), (list.together.len(), rows / unit * u64::from(columns)));
                assert!(list.sent.iter().chain(&list.own).copied().collect::<BTreeSet<_>>() == all);
                let member = |tile: u32| (u64::from(tile >> 16) * unit / shards.extent()) as u32;
                assert!(list.own.iter().all(|tile| member(*tile) == me) && list.sent.iter().all(|tile| member(*tile) != me));
                for (at, tile) in list.together.iter().enumerate().filter(|(_, tile)| member(**tile) == me) {
                    let panel = |tile: u32| (u64::from(tile >> 16) * unit % shards.extent()) / shards.panel_rows();
                    let awaited = |other: &TileLists| {
                        other.together.iter().rposition(|sent| member(*sent) == me && panel(*sent) == panel(*tile)).expect("others send it")
                    };
                    for (other, list) in (0..).zip(&lists) {
                        assert!(
                            other == me || awaited(list) < at,
                            "tile {tile:#x} of {me} at {at}, what {other} sends at {}",
                            awaited(list)
                        );
                    }
                }
            }
        }
    }

    /// Own tiles lie among the sent ones where there are many, and the last ones are own: those of two waves, and at most those of a panel more.
    #[test]
    fn the_link_is_busy_all_the_time() {
        let shards = Shards::new(2, 16384, 8);
        let TileLists { sent, together, .. } = TileLists::new(&shards, 0, 256, 32, 66);
        let last = together.iter().rposition(|tile| sent.contains(tile)).unwrap();
        let after = together.len() - 1 - last;
        assert!((2 * 66..=2 * 66 + 1024 / 8).contains(&after), "{after} own tiles of {} come last", together.len());
    }
}
