//! Copies within a device by its copy engines: over the memory of the next rank, and back.
//!
//! The driver copies within a device by multiprocessors, however it is asked: none of 47 forms of copies ran beside a kernel that held all of them
//! (benches/results/tuning/engines_h100.txt). Attention kernels hold them all, and what comes after such a copy on its stream waits for their end. Between devices engines copy. So the bytes
//! go to a room that this rank has in the memory of the next one, and come back: twice over the link, which has time for it while attention is computed.
//!
//! A rank alone uses its room at its neighbour, and the runtime orders its uses, so no flag is needed.

use std::ops::Range;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::memory::{Scratch, bytes, bytes_mut, note};
use crate::comm::{Member, Rank};
use crate::runtime::{Result, Stream};
use crate::symmetric::{Arena, Pitched, Rows, SymmetricBuffer};

/// The largest room: what is longer goes in parts.
const ROOM: u64 = 8 << 20;

/// A room at the next rank.
pub(super) struct Detour {
    room: SymmetricBuffer<u8>,
    /// The next rank, in the numbers of the arena; none for a rank alone.
    neighbour: Option<Rank>,
    /// Stands for the room, whose uses by this rank come one after another, whichever stream or graph makes them.
    turn: Scratch<u8>,
}

/// Where copies within a device are enqueued, and which way they take.
#[derive(Clone, Copy)]
pub(super) struct Within<'w> {
    pub stream: &'w Stream,
    /// If kernels hold the multiprocessors.
    pub detour: Option<&'w Detour>,
}

impl Detour {
    /// Bytes of the room for copies of so many bytes at once.
    pub const fn room(bytes: u64) -> u64 {
        if bytes < ROOM { bytes } else { ROOM }
    }

    /// Takes a room for copies of so many bytes at once. All ranks of the arena take as much.
    pub fn take(stream: &Stream, arena: &Arena, member: &Member, bytes: u64) -> Result<Self> {
        let (team, me) = (member.team(), member.rank().index());
        let next = Rank::new((me + 1) % team.size().get(), team.size()).and_then(|next| team.world_rank(next));
        let (room, turn) = (arena.buffer(Self::room(bytes))?, Scratch::new(stream, "turn of a room", 1)?);
        Ok(Self { room, neighbour: next.filter(|next| Some(*next) != team.world_rank(member.rank())), turn })
    }

    /// Copies rows of bytes between views of this device, in stream order.
    fn copy(
        &self,
        (stream, what): (&Stream, &'static str),
        source: DeviceView<'_, u8>,
        mut target: DeviceViewMut<'_, u8>,
        copies: &[Rows],
    ) -> Result<()> {
        let Some(neighbour) = self.neighbour else { return Rows::copy_all(stream, what, source, target, copies) };
        note(stream, &[self.turn.access(true)])?;
        for part in parts_of(copies, self.room.len()) {
            let there: Vec<_> = part.iter().map(|(rows, at)| Rows { to: Pitched { start: *at, pitch: rows.width }, ..*rows }).collect();
            let back = |(rows, at): &(Rows, u64)| (neighbour, Rows { from: Pitched { start: *at, pitch: rows.width }, ..*rows });
            self.room.put_rows_each(stream, source, neighbour, &there)?;
            self.room.get_rows_each(stream, &part.iter().map(back).collect::<Vec<_>>(), target.reborrow())?;
        }
        Ok(())
    }
}

impl Within<'_> {
    /// Copies rows between views of this device, in stream order.
    pub fn copy<T: Pod>(self, what: &'static str, source: DeviceView<'_, T>, target: DeviceViewMut<'_, T>, copies: &[Rows]) -> Result<()> {
        let size = size_of::<T>() as u64;
        match self.detour {
            None => Rows::copy_all(self.stream, what, source, target, copies),
            Some(detour) => {
                let in_bytes: Vec<_> = copies.iter().map(|rows| rows.of_bytes(size)).collect();
                detour.copy((self.stream, what), bytes(source), bytes_mut(target), &in_bytes)
            }
        }
    }
}

/// Copies in parts of at most so many bytes, each copy with the place of its bytes in the room.
fn parts_of(copies: &[Rows], room: u64) -> Vec<Vec<(Rows, u64)>> {
    let (mut parts, mut used) = (vec![Vec::new()], 0);
    for piece in copies.iter().flat_map(|rows| pieces_of(*rows, room)) {
        let len = piece.count * piece.width;
        if used + len > room {
            parts.push(Vec::new());
            used = 0;
        }
        if let Some(part) = parts.last_mut() {
            part.push((piece, used));
        }
        used += len;
    }
    parts.retain(|part| !part.is_empty());
    parts
}

/// The same rows in pieces that fit: of whole rows, or of parts of one row where a row does not fit.
fn pieces_of(rows: Rows, room: u64) -> Vec<Rows> {
    let Rows { count, width, from, to } = rows;
    let moved = |at: Pitched, row: u64, start: u64| Pitched { start: at.start + row * at.pitch + start, ..at };
    let some =
        |whole: Range<u64>, step: u64| (whole.start..whole.end).step_by(step.max(1) as usize).map(move |at| (at, step.min(whole.end - at)));
    if count == 0 || width == 0 {
        return Vec::new();
    }
    if width <= room {
        let piece = |(row, count)| Rows { count, width, from: moved(from, row, 0), to: moved(to, row, 0) };
        return some(0..count, room / width).map(piece).collect();
    }
    let of_row =
        |row| some(0..width, room).map(move |(at, width)| Rows { count: 1, width, from: moved(from, row, at), to: moved(to, row, at) });
    (0..count).flat_map(of_row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte that the copies have goes once, to the place that it has in them, and no part is larger than the room.
    #[test]
    fn parts_have_the_bytes_of_the_copies() {
        let at = |start, pitch| Pitched { start, pitch };
        let of = |count, width, from, to| Rows { count, width, from, to };
        let copies = [
            of(5, 3, at(0, 10), at(100, 3)),
            of(1, 23, at(60, 23), at(200, 23)),
            of(0, 9, at(0, 9), at(0, 9)),
            of(2, 11, at(7, 20), at(300, 40)),
        ];
        let bytes = |rows: &Rows| -> Vec<(u64, u64)> {
            let Rows { count, width, from, to } = *rows;
            (0..count)
                .flat_map(|row| (0..width).map(move |at| (from.start + row * from.pitch + at, to.start + row * to.pitch + at)))
                .collect()
        };
        let mut whole: Vec<_> = copies.iter().flat_map(bytes).collect();
        whole.sort_unstable();
        for room in [1, 2, 7, 8, 11, 64, 1000] {
            let parts = parts_of(&copies, room);
            let mut found: Vec<_> = parts.iter().flatten().flat_map(|(rows, _)| bytes(rows)).collect();
            found.sort_unstable();
            assert_eq!(found, whole, "a room of {room}");
            for part in &parts {
                let mut places: Vec<_> = part.iter().flat_map(|(rows, at)| *at..at + rows.count * rows.width).collect();
                let len = places.len();
                places.sort_unstable();
                places.dedup();
                assert!(places.len() == len && places.iter().all(|place| *place < room), "a room of {room}: {part:?}");
            }
        }
    }
}
