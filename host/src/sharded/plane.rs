//! How the codes and scales of a weight lie, and where a shard's lie in the whole's.
//!
//! An array is lines of bytes. The shards of most arrays follow one another: shard 1 begins with the line after the last one of shard 0. Those of codes and scales of the
//! transpose lie side by side: each has all lines, and some bytes of each. Either way a shard of an expert, and one of all experts, is rows at two pitches, which a copy
//! engine takes as one copy.

use crate::quantize::{Direction, Shapes};
use crate::symmetric::{Pitched, Rows};

/// How a format's codes and scales lie.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The shapes of codes and scales; none where elements are no codes.
    shapes: Option<Shapes>,
    /// Bytes of an element that is no code.
    wide_bytes: u64,
    scale_bytes: u64,
    /// Whether scales follow from the amax of the whole weight.
    pub(super) has_amax: bool,
    /// Whether the number of a tensor by rows is that amax.
    pub(super) number_is_amax: bool,
    /// Whether the cast writes both planes, also where one is used.
    pub(super) always_both: bool,
}

/// The lines of an array and their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub lines: u64,
    pub width: u64,
}

impl Extent {
    pub const NONE: Self = Self { lines: 0, width: 0 };

    pub fn bytes(self) -> u64 {
        self.lines * self.width
    }
}

/// The arrays of a matrix in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plane {
    pub codes: Extent,
    /// The scales that travel: none where all ranks have the one scale.
    pub scales: Extent,
}

impl Plane {
    pub fn arrays(self) -> [Extent; 2] {
        [self.codes, self.scales]
    }
}

impl Rule {
    /// The rule of elements that are no codes.
    pub(super) const fn wide(bytes: u64) -> Self {
        Self { shapes: None, wide_bytes: bytes, scale_bytes: 0, has_amax: false, number_is_amax: false, always_both: false }
    }

    /// The rule of a quantized format, whose scales have so many bytes.
    pub(super) const fn quantized(shapes: Shapes, scale_bytes: u64, has_amax: bool) -> Self {
        // A single scale is kept itself; an amax that blocks have scales beside is kept as it is.
        let number_is_amax = has_amax && shapes.block.is_some();
        Self { shapes: Some(shapes), wide_bytes: 0, scale_bytes, has_amax, number_is_amax, always_both: false }
    }

    pub(super) const fn always_both(self) -> Self {
        Self { always_both: true, ..self }
    }

    /// Whether both directions have a plane of their own.
    pub(super) const fn has_directions(self) -> bool {
        self.shapes.is_some()
    }

    /// The plane that serves a direction.
    pub(super) const fn plane_of(self, direction: Direction) -> Direction {
        if self.has_directions() { direction } else { Direction::Rows }
    }

    /// The arrays of a matrix.
    pub(super) fn plane(self, shape: [u64; 2], direction: Direction) -> Plane {
        let extent = |[lines, width]: [u64; 2], bytes| Extent { lines, width: width * bytes };
        let Some(shapes) = self.shapes else {
            return Plane { codes: extent(shape, self.wide_bytes), scales: Extent::NONE };
        };
        let scales = if shapes.block.is_some() { extent(shapes.scales(shape, direction), self.scale_bytes) } else { Extent::NONE };
        Plane { codes: extent(shapes.codes(shape, direction), 1), scales }
    }

    /// Whether the shards of a whole lie side by side.
    pub(super) fn is_side_by_side(self, direction: Direction) -> bool {
        self.shapes.is_some_and(|shapes| shapes.is_transposed(direction))
    }

    /// The rows by which an array of a shard, of so many experts, comes to its place in the whole: `shard` after `before`, which is the same array of all rows before
    /// the shard's, in `whole`. The shard begins with byte `start`.
    pub(super) fn rows(self, direction: Direction, experts: u64, start: u64, [before, shard, whole]: [Extent; 3]) -> Rows {
        if self.is_side_by_side(direction) {
            let from = Pitched { start, pitch: shard.width };
            Rows { count: experts * shard.lines, width: shard.width, from, to: Pitched { start: before.width, pitch: whole.width } }
        } else {
            let from = Pitched { start, pitch: shard.bytes() };
            Rows { count: experts, width: shard.bytes(), from, to: Pitched { start: before.bytes(), pitch: whole.bytes() } }
        }
    }
}
