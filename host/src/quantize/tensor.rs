//! A quantized matrix in device memory, whatever its format.

use std::fmt;

use oxtile_kernels::nvfp4::{Mapping, ToSix};
use oxtile_tile::num::e4m3;

use super::format::{
    Direction, Format, Fp8BlockFormat, Fp8Format, Mxfp8Format, Nvfp4Format, Nvfp4MappedFormat, ScaleDirection, TensorAmax,
};
use super::layout::{Compact, Layout, Scales};
use crate::runtime::{Buffer, Error, Result, Stream};
use crate::tensor::shape::numel;

/// A quantized matrix in device memory, its scales [`Compact`] or [`Interleaved`](super::Interleaved).
pub struct QuantizedTensor<F: Format, L: Layout = Compact> {
    /// The codes; their shape is [`Shapes::codes`](super::Shapes::codes).
    pub data: Buffer<F::Code>,
    /// The scales by which codes are multiplied, beside the amax if there is one. Their number is [`Format::scale_count`].
    pub scales: L::Scales<F::Scale>,
    /// The largest magnitude that the scales follow from, or nothing.
    pub amax: F::Amax,
    /// Rows and columns.
    pub shape: [u64; 2],
    /// Which elements share a scale.
    pub direction: F::Direction,
}

/// One matrix quantized in both directions.
#[derive(Debug)]
pub struct Pair<F: Format, L: Layout = Compact> {
    /// Rowwise.
    pub rows: QuantizedTensor<F, L>,
    /// Columnwise.
    pub columns: QuantizedTensor<F, L>,
}

/// A matrix in MXFP8.
pub type Mxfp8Tensor<Q = e4m3, L = Compact> = QuantizedTensor<Mxfp8Format<Q>, L>;
/// A matrix in MXFP8, in both directions.
pub type Mxfp8Pair<Q = e4m3, L = Compact> = Pair<Mxfp8Format<Q>, L>;
/// A matrix in NVFP4: pairs of codes, the even element in the low nibble; those of the transpose where it is columnwise.
pub type Nvfp4Tensor<L = Compact> = QuantizedTensor<Nvfp4Format, L>;
/// A matrix in NVFP4, in both directions.
pub type Nvfp4Pair = Pair<Nvfp4Format>;
/// A matrix in NVFP4 by the mapping `M`, or with an amax for each row.
pub type Nvfp4MappedTensor<M> = QuantizedTensor<Nvfp4MappedFormat<M>>;
/// A tensor in FP8, its scale kept as the inverse. A tensor without rows is a matrix of one row.
pub type Fp8Tensor<Q = e4m3> = QuantizedTensor<Fp8Format<Q>>;
/// A matrix in FP8 with scales of blocks, kept as their inverses. A transpose is a matrix of its own.
pub type Fp8BlockTensor<Q = e4m3> = QuantizedTensor<Fp8BlockFormat<Q>>;

impl<F: Format, L: Layout> QuantizedTensor<F, L> {
    /// A matrix to be quantized into: codes and scales uninitialised, padding that no cast writes 0, and so the amax.
    ///
    /// # Errors
    /// As [`Format::scale_count`], [`Buffer::uninitialised`] and [`Buffer::zeros`].
    pub fn uninitialised(stream: &Stream, shape: [u64; 2], direction: F::Direction) -> Result<Self> {
        let (data, scales) = (F::code_count(shape, direction)?, F::scale_count::<L>(shape, direction)?);
        let data = Buffer::uninitialised(stream, data)?;
        let scales = Scales::new(stream, scales, F::Direction::PADS)?;
        Ok(Self { data, scales, amax: F::Amax::zero(stream)?, shape, direction })
    }

    /// Fails unless there are the codes and scales that the shape needs: the fields are public.
    pub(crate) fn check_lengths(&self, what: &'static str) -> Result<()> {
        Error::check_length(what, F::code_count(self.shape, self.direction)?, self.data.len())?;
        Error::check_length(what, F::scale_count::<L>(self.shape, self.direction)?, self.scales.view().len())
    }

    /// The same with other scales.
    pub(super) fn with_scales<M: Layout>(self, scales: M::Scales<F::Scale>) -> QuantizedTensor<F, M> {
        let Self { data, amax, shape, direction, .. } = self;
        QuantizedTensor { data, scales, amax, shape, direction }
    }
}

/// Fails unless what is written has the shape.
pub(super) fn check_shape(what: &'static str, found: [u64; 2], shape: [u64; 2]) -> Result<()> {
    if found == shape {
        return Ok(());
    }
    Err(Error::Invalid { what, why: format!("a tensor of {found:?} where one of {shape:?} goes: make it of this shape") })
}

impl<F: Format<Direction = Direction>, L: Layout> QuantizedTensor<F, L> {
    /// Rows, or columns, that have scales of their own, and the blocks of each.
    pub(super) fn extents(&self) -> [u64; 2] {
        F::SHAPES.extents(self.shape, self.direction)
    }

    /// Fails unless it is of this direction and of so many elements.
    pub(super) fn check(&self, what: &'static str, direction: Direction, elements: u64) -> Result<()> {
        self.direction.check(what, direction)?;
        Error::check_length(what, numel(&self.shape)?, elements)
    }
}

impl<F: Format<Direction = Direction>, L: Layout> Pair<F, L> {
    /// The shape of both tensors. Fails unless they have one, each its direction, and so many elements.
    pub(super) fn check(&self, what: &'static str, elements: u64) -> Result<[u64; 2]> {
        let Self { rows, columns } = self;
        rows.check(what, Direction::Rows, elements)?;
        columns.check(what, Direction::Columns, elements)?;
        check_shape(what, columns.shape, rows.shape)?;
        Ok(rows.shape)
    }

    /// A matrix to be quantized into.
    ///
    /// # Errors
    /// As [`QuantizedTensor::uninitialised`].
    pub fn uninitialised(stream: &Stream, shape: [u64; 2]) -> Result<Self> {
        let rows = QuantizedTensor::uninitialised(stream, shape, Direction::Rows)?;
        Ok(Self { rows, columns: QuantizedTensor::uninitialised(stream, shape, Direction::Columns)? })
    }
}

impl<M: Mapping> Nvfp4MappedTensor<M> {
    /// A rowwise matrix to be quantized into with an amax for each row, uninitialised.
    ///
    /// # Errors
    /// As [`uninitialised`](Self::uninitialised).
    pub fn of_scaled_rows(stream: &Stream, shape: [u64; 2]) -> Result<Self> {
        let amax = Buffer::uninitialised(stream, shape[0])?;
        Ok(Self { amax, ..Self::uninitialised(stream, shape, Direction::Rows)? })
    }

    /// The same as a tensor of the plain rule, which decodes it too.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the plain rule gives other values: with an amax for each row, or a largest scale other than 448.
    pub fn into_plain(self) -> Result<Nvfp4Tensor> {
        let Self { data, scales, amax, shape, direction } = self;
        let why = if M::LARGEST_SCALE != ToSix::LARGEST_SCALE {
            format!("its largest scale is {}, not 448: use `dequantize`", M::LARGEST_SCALE)
        } else if amax.len() != 1 {
            "each row has its own amax: use `Nvfp4ScaledRows::dequantize`".to_owned()
        } else {
            return Ok(Nvfp4Tensor { data, scales, amax, shape, direction });
        };
        Err(Error::Invalid { what: "Nvfp4MappedTensor::into_plain", why })
    }
}

impl<F: Format, L: Layout> fmt::Debug for QuantizedTensor<F, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { data, scales, amax, shape, direction } = self;
        let mut tensor = f.debug_struct(F::NAME);
        tensor.field("data", data).field("scales", scales).field("amax", amax).field("shape", shape).field("direction", direction).finish()
    }
}
