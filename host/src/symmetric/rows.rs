//! Rows of a matrix in a buffer, and their copies.

use std::panic::Location;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::buffer::fits;
use crate::runtime::backend::{Caller, Copy, CopyRows, Direction};
use crate::runtime::module::enqueue;
use crate::runtime::{Error, Result, Stream};

/// Rows of one width, which lie at a pitch of their own on either side of a [put](super::Peer::put_rows) or a [get](super::Peer::get_rows): a band
/// of columns of a matrix, some heads of a tensor, or a piece of each expert's weights. Copy engines take them at the rate of a single
/// range from rows of 1 KiB on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// How many rows.
    pub count: u64,
    /// Elements of a row.
    pub width: u64,
    /// Where they lie in what is read.
    pub from: Pitched,
    /// Where they lie in what is written.
    pub to: Pitched,
}

/// Where rows lie in a buffer, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pitched {
    /// The first element of the first row.
    pub start: u64,
    /// From the start of a row to that of the next.
    pub pitch: u64,
}

/// The largest pitch in bytes that the driver takes (CUDA driver API, `CU_DEVICE_ATTRIBUTE_MAX_PITCH`: 2^31 - 1 on all GPUs).
const MOST_PITCH: u64 = i32::MAX as u64;

impl Rows {
    /// The same rows the other way.
    #[must_use]
    pub fn turned(self) -> Self {
        Self { from: self.to, to: self.from, ..self }
    }

    /// The same rows of bytes, where elements have so many.
    pub(crate) fn of_bytes(self, size: u64) -> Self {
        let at = |place: Pitched| Pitched { start: place.start * size, pitch: place.pitch * size };
        Self { width: self.width * size, from: at(self.from), to: at(self.to), ..self }
    }

    /// The rows themselves, or each alone where they are further apart than a copy engine takes.
    pub(crate) fn pieces(&self, size: u64) -> Vec<Self> {
        let Self { count, from, to, .. } = *self;
        if count <= 1 || from.pitch.max(to.pitch).saturating_mul(size) <= MOST_PITCH {
            return vec![*self];
        }
        let alone = |row: u64| {
            let at = |place: Pitched| Pitched { start: place.start + row * place.pitch, ..place };
            Self { count: 1, from: at(from), to: at(to), ..*self }
        };
        (0..count).map(alone).collect()
    }

    /// Copies rows between views of one device, in stream order.
    #[track_caller]
    pub(crate) fn copy_all<T: Pod>(
        stream: &Stream,
        what: &'static str,
        source: DeviceView<'_, T>,
        target: DeviceViewMut<'_, T>,
        copies: &[Self],
    ) -> Result<()> {
        let (lens, caller) = ([source.len(), target.len()], Location::caller());
        let (source, target) = (source.access("source"), target.access("target"));
        let copy = |rows: &Self| rows.copy(what, size_of::<T>() as u64, [source.address, target.address], lens, caller);
        // Of nothing the places may be anywhere.
        let some = copies.iter().filter(|rows| rows.count > 0 && rows.width > 0);
        let copies = some.flat_map(|rows| rows.pieces(size_of::<T>() as u64)).map(|rows| copy(&rows)).collect::<Result<Vec<_>>>()?;
        // One by one: a stream that is captured takes no batch of copies.
        enqueue(stream, what, &[source, target], |id| copies.iter().try_for_each(|copy| stream.0.runtime.backend.copy(id, *copy)))
    }

    /// The copy of these rows of elements of `size` bytes between buffers at these addresses, of `[from, to]` elements.
    ///
    /// # Errors
    /// [`Error::Length`] for rows that do not fit; [`Error::Invalid`] for a pitch that is smaller than a row, or larger than the driver takes.
    pub(super) fn copy(self, what: &'static str, size: u64, bases: [u64; 2], lens: [u64; 2], caller: Caller) -> Result<Copy> {
        let Self { count, width, from, to } = self;
        for (place, len) in [from, to].into_iter().zip(lens) {
            place.check(what, size, (count, width), len)?;
        }
        let [source, target] = bases;
        // Of no rows the width is not checked, of one row the pitch is not: they are not used then.
        let bytes = |elements: u64| elements.wrapping_mul(size);
        let copy = Copy {
            direction: Direction::DeviceToDevice,
            target: target + to.start * size,
            source: source + from.start * size,
            bytes: bytes(width),
            rows: CopyRows { count, target_pitch: bytes(to.pitch), source_pitch: bytes(from.pitch) },
            caller,
        };
        Ok(copy.joined())
    }
}

impl Pitched {
    fn check(self, what: &'static str, size: u64, (count, width): (u64, u64), len: u64) -> Result<()> {
        let invalid = |why| Err(Error::Invalid { what, why });
        if count > 1 && self.pitch < width {
            return invalid(format!("rows of {width} elements at a pitch of {} overlap: take a pitch of at least {width}", self.pitch));
        }
        if count > 1 && self.pitch.checked_mul(size).is_none_or(|bytes| bytes > MOST_PITCH) {
            let most = MOST_PITCH / size.max(1);
            return invalid(format!("a pitch of {} elements of {size} bytes is more than a copy engine takes: at most {most}", self.pitch));
        }
        let last = count.saturating_sub(1).checked_mul(self.pitch).and_then(|last| last.checked_add(self.start)).unwrap_or(u64::MAX);
        fits(what, last, if count == 0 { 0 } else { width }, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pitch that is not used is not looked at, however large.
    #[test]
    fn one_row_and_no_row_have_any_pitch() {
        let place = Pitched { start: 2, pitch: u64::MAX };
        for (count, width, expected) in [(1, 4, 32), (0, u64::MAX, 0)] {
            let rows = Rows { count, width, from: place, to: place };
            let copy = rows.copy("rows", 8, [0, 4096], [6, 6], Location::caller()).unwrap();
            assert_eq!((copy.source, copy.target, copy.bytes, copy.rows), (16, 4112, expected, CopyRows::ONE));
        }
    }
}
