//! Groups of quantized matrices.

use std::fmt;
use std::marker::PhantomData;

use oxtile_tile::launch::DeviceView;

use super::table::{Record, Starts, Tables};
use super::tensors::starts_of;
use crate::quantize::format::{Agreed, Direction, Format, ScaleDirection};
use crate::quantize::layout::{Compact, Layout};
use crate::runtime::{Buffer, Error, HostElement, Result, Stream};

/// The alignment of a member's first scale, in scales, where a member has many.
pub(super) const SCALE_UNIT: u64 = 16;

/// The scales that a group had before its layout changed, and where each member's start.
pub(super) type OldScales<F> = (Buffer<<F as Format>::Scale>, Starts);

/// The codes and the scales of one member, on the host.
pub type CodesAndScales<F> = (Vec<<F as Format>::Code>, Vec<<F as Format>::Scale>);

/// Quantized matrices, their scales [`Compact`] or [`Interleaved`](crate::quantize::Interleaved): all codes in one buffer, all scales in another.
pub struct Quantized<F: Format<Direction = Direction>, L: Layout = Compact> {
    pub(super) data: Buffer<F::Code>,
    pub(super) scales: Buffer<F::Scale>,
    pub(super) amax: Agreed<F>,
    pub(super) direction: Direction,
    pub(super) shapes: Vec<[u64; 2]>,
    /// In elements.
    pub(super) element_starts: Starts,
    pub(super) scale_starts: Starts,
    pub(super) tables: Tables,
    layout: PhantomData<L>,
}

impl<F: Format<Direction = Direction>, L: Layout> Quantized<F, L> {
    /// Matrices to be quantized into, uninitialised.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the first member whose shape the format does not take; as [`Buffer::uninitialised`].
    pub fn uninitialised(stream: &Stream, shapes: &[[u64; 2]], direction: Direction, amax: Agreed<F>) -> Result<Self> {
        let (element_starts, scale_starts) = (Self::check(shapes, direction)?, scale_starts::<F, L>(shapes, direction)?);
        let data = Buffer::uninitialised(stream, element_starts.end / F::SHAPES.elements)?;
        Self::of(stream, data, amax, shapes, direction, element_starts, scale_starts)
    }

    fn check(shapes: &[[u64; 2]], direction: Direction) -> Result<Starts> {
        if let Some((i, why)) = shapes.iter().enumerate().find_map(|(i, shape)| Some((i, direction.refuses(F::SHAPES, *shape)?))) {
            return Err(Error::Invalid { what: F::NAME, why: format!("member {i}: {why}") });
        }
        starts_of(shapes)
    }

    fn of(
        stream: &Stream,
        data: Buffer<F::Code>,
        amax: Agreed<F>,
        shapes: &[[u64; 2]],
        direction: Direction,
        element_starts: Starts,
        scale_starts: Starts,
    ) -> Result<Self> {
        let scales = Buffer::uninitialised(stream, scale_starts.end)?;
        let (shapes, tables, layout) = (shapes.to_vec(), Tables::default(), PhantomData);
        Ok(Self { data, scales, amax, direction, shapes, element_starts, scale_starts, tables, layout })
    }

    /// The same codes with room for scales of another layout, and the scales as they are.
    pub(super) fn with_layout<M: Layout>(self, stream: &Stream) -> Result<(Quantized<F, M>, OldScales<F>)> {
        let scale_starts = scale_starts::<F, M>(&self.shapes, self.direction)?;
        let other = Quantized::of(stream, self.data, self.amax, &self.shapes, self.direction, self.element_starts, scale_starts)?;
        Ok((other, (self.scales, self.scale_starts)))
    }

    /// How many members.
    pub fn len(&self) -> usize {
        self.shapes.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.shapes.is_empty()
    }

    /// Which elements share a scale.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The amaxes with which all members were cast.
    pub fn amax(&self) -> &Agreed<F> {
        &self.amax
    }

    /// The shape of a member.
    ///
    /// # Panics
    /// If there is no such member; so do the other functions that take one.
    pub fn shape(&self, member: usize) -> [u64; 2] {
        self.shapes[member]
    }

    /// The codes of a member, those of the transpose where an NVFP4 group is columnwise.
    pub fn codes(&self, member: usize) -> DeviceView<'_, F::Code> {
        let (start, length) = self.codes_of(member);
        self.data.view().slice(start, start + length)
    }

    /// The scales of a member.
    pub fn scales(&self, member: usize) -> DeviceView<'_, F::Scale> {
        let (start, length) = self.scales_of(member);
        self.scales.view().slice(start, start + length)
    }

    /// The scales of all members, each at the place where it starts: in FP8 one a member.
    pub fn all_scales(&self) -> &Buffer<F::Scale> {
        &self.scales
    }

    /// The codes and the scales of a member on the host; waits for the stream.
    ///
    /// # Errors
    /// As [`Buffer::copy_to_slice`].
    #[track_caller]
    pub fn to_vecs(&self, stream: &Stream, member: usize) -> Result<CodesAndScales<F>>
    where
        F::Code: HostElement<Device = F::Code>,
        F::Scale: HostElement<Device = F::Scale>,
    {
        let (codes, scales) = (self.codes_of(member), self.scales_of(member));
        let part = |(start, length): (u64, u64)| start..start + length;
        Ok((self.data.part_to_vec(stream, part(codes))?, self.scales.part_to_vec(stream, part(scales))?))
    }

    fn codes_of(&self, member: usize) -> (u64, u64) {
        (self.element_starts.of[member] / F::SHAPES.elements, F::SHAPES.codes(self.shapes[member], self.direction).iter().product())
    }

    fn scales_of(&self, member: usize) -> (u64, u64) {
        (self.scale_starts.of[member], self.direction.scales::<L>(F::SHAPES, self.shapes[member]).iter().product())
    }

    /// The members' records for the casts and their inverses.
    pub(super) fn records(&self) -> impl Iterator<Item = Record> {
        records(&self.shapes, &self.element_starts, [&self.scale_starts, &self.scale_starts])
    }
}

/// The records of members of these shapes: where the codes start, the row scales and the column scales.
pub(super) fn records(shapes: &[[u64; 2]], elements: &Starts, [rows, columns]: [&Starts; 2]) -> impl Iterator<Item = Record> {
    (0..shapes.len()).map(|i| Record { index: i as u64, shape: shapes[i], starts: [elements.of[i], rows.of[i], columns.of[i]] })
}

/// Where the scales of members of these shapes start.
pub(super) fn scale_starts<F: Format<Direction = Direction>, L: Layout>(shapes: &[[u64; 2]], direction: Direction) -> Result<Starts> {
    let counts = shapes.iter().map(|shape| F::scale_count::<L>(*shape, direction)).collect::<Result<Vec<_>>>()?;
    Starts::new(counts.into_iter(), if F::SHAPES.block.is_some() { SCALE_UNIT } else { 1 })
}

impl<F: Format<Direction = Direction>, L: Layout> fmt::Debug for Quantized<F, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(F::NAME).field("direction", &self.direction).field("shapes", &self.shapes).finish_non_exhaustive()
    }
}
