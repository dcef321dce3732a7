//! Formats as types, and the one place where the shapes of their codes and scales are computed.
//!
//! | format | elements that share a scale | codes by columns |
//! |---|---|---|
//! | [`Mxfp8Format`] | 32 neighbours | as by rows; scales `[ceil(rows / 32), columns]` |
//! | [`Nvfp4Format`], [`Nvfp4MappedFormat`] | 16 neighbours | of the transpose |
//! | [`Fp8Format`] | all | of the transpose |
//! | [`Fp8BlockFormat`] | a [`ScaleBlock`] | none: a transpose is a matrix of its own |

use std::fmt;
use std::marker::PhantomData;

use oxtile_kernels::fp8::{SIDE, row_of_scales};
use oxtile_kernels::interleave::{TILE_BLOCKS, TILE_OUTER};
use oxtile_kernels::nvfp4::Mapping;
use oxtile_kernels::{mxfp8, nvfp4};
use oxtile_tile::num::{Fp8, Pod, e2m1x2, e4m3, ue8m0};

use super::layout::Layout;
use super::split_phase::GlobalAmax;
use crate::runtime::{Buffer, Error, Result, Stream};
use crate::tensor::shape::numel;

/// Along which dimension neighbours share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Neighbours in a row.
    Rows,
    /// Neighbours in a column.
    Columns,
}

impl Direction {
    /// Fails unless this direction is the `expected` one.
    pub(super) fn check(self, what: &'static str, expected: Self) -> Result<()> {
        if self == expected {
            return Ok(());
        }
        let is = if self == Self::Rows { "rowwise" } else { "columnwise" };
        Err(Error::Invalid { what, why: format!("it is {is}: make one of `Direction::{expected:?}`") })
    }
}

/// Which elements of a matrix in FP8 share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleBlock {
    /// 128 neighbours of a row. The scales are `[ceil(columns / 128), rows]`, each line filled up to a multiple of 4.
    Row,
    /// A square of 128x128. The scales are `[ceil(rows / 128), ceil(columns / 128)]`, each line filled up to a multiple of 4.
    Square,
}

/// A format: its codes and scales, and how they lie.
pub trait Format: sealed::Sealed + fmt::Debug + Send + Sync + 'static {
    /// A byte of codes.
    type Code: Pod;
    /// A scale.
    type Scale: Pod;
    /// Which elements share a scale: a [`Direction`], or a [`ScaleBlock`].
    type Direction: ScaleDirection;
    /// The largest magnitude that the scales follow from, one element or one for each row, in a [`Buffer`]; or nothing.
    type Amax: TensorAmax;

    /// The name in error texts.
    const NAME: &'static str;
    /// From which the shapes of its codes and scales follow.
    const SHAPES: Shapes;

    /// How many bytes of codes a matrix has.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a matrix that the format cannot hold; as [`numel`].
    fn code_count(shape: [u64; 2], direction: Self::Direction) -> Result<u64> {
        Self::check(Self::NAME, shape, direction)?;
        numel(&direction.codes(Self::SHAPES, shape))
    }

    /// How many scales a matrix has in a layout, padding included.
    ///
    /// # Errors
    /// As [`code_count`](Self::code_count).
    fn scale_count<L: Layout>(shape: [u64; 2], direction: Self::Direction) -> Result<u64> {
        Self::check(Self::NAME, shape, direction)?;
        numel(&direction.scales::<L>(Self::SHAPES, shape))
    }

    /// Fails if the format cannot hold a matrix of this shape; `what` begins the error's text.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    fn check(what: &'static str, shape: [u64; 2], direction: Self::Direction) -> Result<()> {
        direction.refuses(Self::SHAPES, shape).map_or(Ok(()), |why| Err(Error::Invalid { what, why }))
    }
}

/// From which the shapes of a format's codes and scales follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shapes {
    /// Neighbours that share a scale; none where the matrix has one scale.
    pub block: Option<u64>,
    /// Elements in a byte of codes. If there are several, a row of codes is whole blocks.
    pub elements: u64,
    /// Whether the codes and scales of [`Direction::Columns`] are those of the transpose.
    pub transposes: bool,
}

impl Shapes {
    /// The number of which a shard's rows are a multiple: then the casts of shards are the cast of the whole, in either direction.
    pub const fn alignment(self) -> u64 {
        match self.block {
            Some(block) => block,
            None => 1,
        }
    }

    /// Whether codes and scales in a direction are those of the transpose.
    pub const fn is_transposed(self, direction: Direction) -> bool {
        self.transposes && matches!(direction, Direction::Columns)
    }

    /// Rows and columns of the matrix that the codes are of: the transpose, where the codes are of the transpose.
    pub const fn lines(self, [rows, columns]: [u64; 2], direction: Direction) -> [u64; 2] {
        if self.is_transposed(direction) { [columns, rows] } else { [rows, columns] }
    }

    /// The number of rows, or columns, that have scales of their own, and the blocks of each; 1 and 1 where the matrix has one scale.
    pub const fn extents(self, [rows, columns]: [u64; 2], direction: Direction) -> [u64; 2] {
        let [outer, inner] = match direction {
            Direction::Rows => [rows, columns],
            Direction::Columns => [columns, rows],
        };
        match self.block {
            Some(block) => [outer, inner.div_ceil(block)],
            None => [1, 1],
        }
    }

    /// Rows and columns of the bytes of codes.
    pub const fn codes(self, shape: [u64; 2], direction: Direction) -> [u64; 2] {
        let [lines, length] = self.lines(shape, direction);
        [lines, length.div_ceil(self.elements)]
    }

    /// Rows and columns of the compact scales.
    pub const fn scales(self, shape: [u64; 2], direction: Direction) -> [u64; 2] {
        let [outer, blocks] = self.extents(shape, direction);
        // Codes that are not transposed have scales that are not.
        if matches!(direction, Direction::Columns) && !self.transposes { [blocks, outer] } else { [outer, blocks] }
    }

    /// Rows and columns of the interleaved scales, padding included.
    pub const fn interleaved_scales(self, shape: [u64; 2], direction: Direction) -> [u64; 2] {
        let [outer, blocks] = self.extents(shape, direction);
        [outer.next_multiple_of(TILE_OUTER), blocks.next_multiple_of(TILE_BLOCKS)]
    }
}

/// Which elements of a matrix share a scale: a [`Direction`], or a [`ScaleBlock`]. The shapes follow from a format's [`Shapes`].
pub trait ScaleDirection: sealed::Sealed + fmt::Debug + Copy + PartialEq + Send + Sync + 'static {
    /// Whether scales have padding that no cast writes: it is set to 0 at first.
    const PADS: bool;

    /// Rows and columns of the bytes of codes.
    fn codes(self, shapes: Shapes, shape: [u64; 2]) -> [u64; 2];

    /// Rows and columns of the scales in a layout, padding included.
    fn scales<L: Layout>(self, shapes: Shapes, shape: [u64; 2]) -> [u64; 2];

    /// Why the format cannot hold a matrix of this shape; none if it can.
    fn refuses(self, _: Shapes, _: [u64; 2]) -> Option<String> {
        None
    }
}

impl ScaleDirection for Direction {
    const PADS: bool = false;

    fn codes(self, shapes: Shapes, shape: [u64; 2]) -> [u64; 2] {
        shapes.codes(shape, self)
    }

    fn scales<L: Layout>(self, shapes: Shapes, shape: [u64; 2]) -> [u64; 2] {
        if L::IS_INTERLEAVED { shapes.interleaved_scales(shape, self) } else { shapes.scales(shape, self) }
    }

    fn refuses(self, shapes: Shapes, [rows, columns]: [u64; 2]) -> Option<String> {
        let block = shapes.block.filter(|_| shapes.elements > 1)?;
        let wrong =
            |count: u64, what| (!count.is_multiple_of(block)).then(|| format!("{count} {what} are not a multiple of {block}: pad them"));
        let by_rows = wrong(columns, "columns");
        if self == Self::Rows { by_rows } else { by_rows.or_else(|| wrong(rows, "rows")) }
    }
}

impl ScaleDirection for ScaleBlock {
    const PADS: bool = true;

    fn codes(self, _: Shapes, shape: [u64; 2]) -> [u64; 2] {
        shape
    }

    fn scales<L: Layout>(self, shapes: Shapes, shape: [u64; 2]) -> [u64; 2] {
        let [rows, blocks] = shapes.extents(shape, Direction::Rows);
        match self {
            Self::Row => [blocks, row_of_scales(rows)],
            Self::Square => [rows.div_ceil(SIDE), row_of_scales(blocks)],
        }
    }
}

/// The amax of a tensor: one in a [`Buffer`], or nothing where scales follow from their blocks alone.
pub trait TensorAmax: fmt::Debug + Sized + Send {
    /// What ranks, or the members of a group, agree on before they cast: a [`GlobalAmax`], or nothing.
    type Agreed: fmt::Debug + Clone;

    /// One of 0.
    ///
    /// # Errors
    /// As [`Buffer::zeros`].
    fn zero(stream: &Stream) -> Result<Self>;
}

impl TensorAmax for Buffer<f32> {
    type Agreed = GlobalAmax;

    fn zero(stream: &Stream) -> Result<Self> {
        Self::zeros(stream, 1)
    }
}

impl TensorAmax for () {
    type Agreed = ();

    fn zero(_: &Stream) -> Result<Self> {
        Ok(())
    }
}

/// The amaxes with which the members of a group in a format were cast.
pub type Agreed<F> = <<F as Format>::Amax as TensorAmax>::Agreed;

/// MXFP8 with elements `Q`.
#[derive(Clone, Copy)]
pub struct Mxfp8Format<Q = e4m3>(PhantomData<Q>);

/// NVFP4.
#[derive(Clone, Copy)]
pub struct Nvfp4Format;

/// NVFP4 cast by the mapping `M`, or with an amax for each row.
#[derive(Clone, Copy)]
pub struct Nvfp4MappedFormat<M>(PhantomData<M>);

/// FP8 with elements `Q` and one scale, which is kept as its inverse.
#[derive(Clone, Copy)]
pub struct Fp8Format<Q = e4m3>(PhantomData<Q>);

/// FP8 with elements `Q` and a scale for each [`ScaleBlock`], which is kept as its inverse.
#[derive(Clone, Copy)]
pub struct Fp8BlockFormat<Q = e4m3>(PhantomData<Q>);

macro_rules! formats {
    ($($format:ident $(<$p:ident: $bound:ident>)?, $name:literal: [$($code:tt)+] $scale:ty, $direction:ty, $amax:ty, $shapes:expr;)*) => { $(
        impl $(<$p: $bound>)? Format for $format $(<$p>)? {
            type Code = $($code)+;
            type Scale = $scale;
            type Direction = $direction;
            type Amax = $amax;
            const NAME: &'static str = $name;
            const SHAPES: Shapes = $shapes;
        }

        impl $(<$p>)? fmt::Debug for $format $(<$p>)? {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str($name)
            }
        }

        impl $(<$p>)? sealed::Sealed for $format $(<$p>)? {}
    )* };
}

const fn shapes(block: Option<u64>, elements: u64, transposes: bool) -> Shapes {
    Shapes { block, elements, transposes }
}

formats! {
    Mxfp8Format<Q: Fp8>, "MXFP8": [Q] ue8m0, Direction, (), shapes(Some(mxfp8::BLOCK), 1, false);
    Nvfp4Format, "NVFP4": [e2m1x2] e4m3, Direction, Buffer<f32>, shapes(Some(nvfp4::BLOCK), 2, true);
    Nvfp4MappedFormat<M: Mapping>, "NVFP4": [e2m1x2] e4m3, Direction, Buffer<f32>, shapes(Some(nvfp4::BLOCK), 2, true);
    Fp8Format<Q: Fp8>, "FP8": [Q] f32, Direction, (), shapes(None, 1, true);
    Fp8BlockFormat<Q: Fp8>, "FP8 in blocks": [Q] f32, ScaleBlock, (), shapes(Some(SIDE), 1, true);
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Direction {}
    impl Sealed for super::ScaleBlock {}
}
