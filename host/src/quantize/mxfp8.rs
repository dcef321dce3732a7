//! MXFP8: 8-bit elements and one power-of-two scale for each 32 neighbours of a row or of a column.
//!
//! The format and its rounding are those of [`oxtile_kernels::mxfp8`] (OCP Microscaling Formats 1.0, as
//! TransformerEngine computes it). A tensor is a row-major matrix `[rows, columns]` (of more dimensions:
//! [`as_matrix`](crate::tensor::shape::as_matrix)); so are its codes, in either [`Direction`]. The scales are compact.
//!
//! ```
//! use oxtile::quantize::{Direction, Mxfp8};
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::emulated(1)?;
//! let stream = runtime.device(0)?.stream()?;
//! let weights = Buffer::from_slice(&stream, &[0.5_f32; 64 * 96])?;
//! let mxfp8 = Mxfp8::<f32>::new(&runtime)?;
//!
//! // Both directions, for a matrix that is multiplied from both sides, by one pass over it.
//! let both = mxfp8.quantize_both(&stream, weights.view(), [64, 96])?;
//! assert_eq!(both.rows.scales.len(), 64 * 3);
//! assert_eq!(both.columns.scales.len(), 2 * 96);
//!
//! let columns = mxfp8.quantize(&stream, weights.view(), [64, 96], Direction::Columns)?;
//! assert_eq!(columns.data.to_vec(&stream)?, both.columns.data.to_vec(&stream)?);
//! # Ok(()) }
//! ```

use std::fmt;

use oxtile_kernels::magnitude::Magnitude;
use oxtile_kernels::mxfp8::*;
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::{Fp8, bf16, e4m3, e5m2, f16, ue8m0};

use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::numel;

/// A number type that is cast to and from MXFP8 with elements `Q`: `bf16`, `f16` and `f32`, to `e4m3` and `e5m2`.
pub trait Mxfp8Number<Q: Fp8>: Magnitude + Wide {
    /// The rowwise cast of whole blocks.
    type CastRows: for<'a> Kernel<Args<'a> = Mxfp8CastRowsArgs<'a, Self, Q>>;
    /// The rowwise cast of any shape.
    type CastRaggedRows: for<'a> Kernel<Args<'a> = Mxfp8CastRaggedRowsArgs<'a, Self, Q>>;
    /// The columnwise cast of rows of whole vectors.
    type CastColumns: for<'a> Kernel<Args<'a> = Mxfp8CastColumnsArgs<'a, Self, Q>>;
    /// The columnwise cast of any shape.
    type CastRaggedColumns: for<'a> Kernel<Args<'a> = Mxfp8CastRaggedColumnsArgs<'a, Self, Q>>;
    /// The cast in both directions of rows of whole vectors.
    type CastBoth: for<'a> Kernel<Args<'a> = Mxfp8CastBothArgs<'a, Self, Q>>;
    /// The inverse of the rowwise cast for whole blocks.
    type DequantizeRows: for<'a> Kernel<Args<'a> = Mxfp8DequantizeRowsArgs<'a, Q, Self>>;
    /// The inverse of the rowwise cast for any shape.
    type DequantizeRaggedRows: for<'a> Kernel<Args<'a> = Mxfp8DequantizeRaggedRowsArgs<'a, Q, Self>>;
    /// The inverse of the columnwise cast for rows of whole vectors.
    type DequantizeColumns: for<'a> Kernel<Args<'a> = Mxfp8DequantizeColumnsArgs<'a, Q, Self>>;
    /// The inverse of the columnwise cast for any shape.
    type DequantizeRaggedColumns: for<'a> Kernel<Args<'a> = Mxfp8DequantizeRaggedColumnsArgs<'a, Q, Self>>;
}

macro_rules! numbers {
    ($($t:ty, $q:ty;)*) => { $(
        impl Mxfp8Number<$q> for $t {
            type CastRows = Mxfp8CastRows<$t, $q>;
            type CastRaggedRows = Mxfp8CastRaggedRows<$t, $q>;
            type CastColumns = Mxfp8CastColumns<$t, $q>;
            type CastRaggedColumns = Mxfp8CastRaggedColumns<$t, $q>;
            type CastBoth = Mxfp8CastBoth<$t, $q>;
            type DequantizeRows = Mxfp8DequantizeRows<$q, $t>;
            type DequantizeRaggedRows = Mxfp8DequantizeRaggedRows<$q, $t>;
            type DequantizeColumns = Mxfp8DequantizeColumns<$q, $t>;
            type DequantizeRaggedColumns = Mxfp8DequantizeRaggedColumns<$q, $t>;
        }
    )* };
}
numbers! { bf16, e4m3; f16, e4m3; f32, e4m3; bf16, e5m2; f16, e5m2; f32, e5m2; }

/// Along which dimension 32 elements share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Neighbours in a row; scales `[rows, ceil(columns / 32)]`.
    Rows,
    /// Neighbours in a column; scales `[ceil(rows / 32), columns]`.
    Columns,
}

/// The casts between `T` and MXFP8 with elements `Q`.
pub struct Mxfp8<T: Mxfp8Number<Q>, Q: Fp8 = e4m3> {
    cast_rows: Loaded<T::CastRows>,
    cast_ragged_rows: Loaded<T::CastRaggedRows>,
    cast_columns: Loaded<T::CastColumns>,
    cast_ragged_columns: Loaded<T::CastRaggedColumns>,
    cast_both: Loaded<T::CastBoth>,
    dequantize_rows: Loaded<T::DequantizeRows>,
    dequantize_ragged_rows: Loaded<T::DequantizeRaggedRows>,
    dequantize_columns: Loaded<T::DequantizeColumns>,
    dequantize_ragged_columns: Loaded<T::DequantizeRaggedColumns>,
}

/// A quantized matrix in device memory.
#[derive(Debug)]
pub struct Mxfp8Tensor<Q = e4m3> {
    /// The codes, `[rows, columns]`.
    pub data: Buffer<Q>,
    /// The scales; their shape is that of the direction.
    pub scales: Buffer<ue8m0>,
    /// Rows and columns.
    pub shape: [u64; 2],
    /// Which elements share a scale.
    pub direction: Direction,
}

/// One matrix quantized in both directions.
#[derive(Debug)]
pub struct Mxfp8Pair<Q = e4m3> {
    /// Rowwise.
    pub rows: Mxfp8Tensor<Q>,
    /// Columnwise.
    pub columns: Mxfp8Tensor<Q>,
}

impl<Q: Fp8> Mxfp8Tensor<Q> {
    /// A matrix to be quantized into, uninitialised.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`] and [`scale_count`].
    pub fn uninitialised(stream: &Stream, shape: [u64; 2], direction: Direction) -> Result<Self> {
        let data = Buffer::uninitialised(stream, numel(&shape)?)?;
        Ok(Self { data, scales: Buffer::uninitialised(stream, scale_count(shape, direction)?)?, shape, direction })
    }
}

impl<T: Mxfp8Number<Q>, Q: Fp8> Mxfp8<T, Q> {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self {
            cast_rows: runtime.load()?,
            cast_ragged_rows: runtime.load()?,
            cast_columns: runtime.load()?,
            cast_ragged_columns: runtime.load()?,
            cast_both: runtime.load()?,
            dequantize_rows: runtime.load()?,
            dequantize_ragged_rows: runtime.load()?,
            dequantize_columns: runtime.load()?,
            dequantize_ragged_columns: runtime.load()?,
        })
    }

    /// Quantizes a matrix into new buffers.
    ///
    /// # Errors
    /// As [`Mxfp8Tensor::uninitialised`] and [`quantize_rows`](Self::quantize_rows).
    pub fn quantize(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2], direction: Direction) -> Result<Mxfp8Tensor<Q>> {
        let mut tensor = Mxfp8Tensor::uninitialised(stream, shape, direction)?;
        let (data, scales) = (tensor.data.view_mut(), tensor.scales.view_mut());
        match direction {
            Direction::Rows => self.quantize_rows(stream, input, shape, data, scales)?,
            Direction::Columns => self.quantize_columns(stream, input, shape, data, scales)?,
        }
        Ok(tensor)
    }

    /// Quantizes a matrix rowwise. Rows of whole blocks at 16-byte aligned addresses take the fast kernel.
    ///
    /// # Errors
    /// [`Error::Length`] if a length does not match the shape; as [`Loaded::launch`].
    pub fn quantize_rows(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        shape: [u64; 2],
        data: DeviceViewMut<'_, Q>,
        scales: DeviceViewMut<'_, ue8m0>,
    ) -> Result<()> {
        check("Mxfp8::quantize_rows, input", numel(&shape)?, input.len())?;
        if has_whole_blocks(shape, input.address(), data.address()) {
            self.cast_rows.launch(stream, Mxfp8CastRowsArgs { input, data, scales })
        } else {
            self.cast_ragged_rows.launch(stream, Mxfp8CastRaggedRowsArgs { input, data, scales, columns: shape[1] })
        }
    }

    /// Quantizes a matrix columnwise. Rows of whole 16-byte vectors at 16-byte aligned addresses take the fast kernel.
    ///
    /// # Errors
    /// [`Error::Length`] if a length does not match the shape; as [`Loaded::launch`].
    pub fn quantize_columns(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        shape: [u64; 2],
        data: DeviceViewMut<'_, Q>,
        scales: DeviceViewMut<'_, ue8m0>,
    ) -> Result<()> {
        check("Mxfp8::quantize_columns, input", numel(&shape)?, input.len())?;
        let columns = shape[1];
        if has_whole_vectors::<T>(shape, input.address(), &[data.address(), scales.address()]) {
            self.cast_columns.launch(stream, Mxfp8CastColumnsArgs { input, data, scales, columns })
        } else {
            self.cast_ragged_columns.launch(stream, Mxfp8CastRaggedColumnsArgs { input, data, scales, columns })
        }
    }

    /// Quantizes a matrix in both directions into new buffers.
    ///
    /// # Errors
    /// As [`Mxfp8Tensor::uninitialised`] and [`quantize_both_into`](Self::quantize_both_into).
    pub fn quantize_both(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2]) -> Result<Mxfp8Pair<Q>> {
        let rows = Mxfp8Tensor::uninitialised(stream, shape, Direction::Rows)?;
        let mut pair = Mxfp8Pair { rows, columns: Mxfp8Tensor::uninitialised(stream, shape, Direction::Columns)? };
        self.quantize_both_into(stream, input, &mut pair)?;
        Ok(pair)
    }

    /// Quantizes a matrix of the pair's shape in both directions, by one pass over rows of whole 16-byte vectors at
    /// 16-byte aligned addresses and by two over others.
    ///
    /// # Errors
    /// [`Error::Length`] if a length does not match the shape; as [`Loaded::launch`].
    pub fn quantize_both_into(&self, stream: &Stream, input: DeviceView<'_, T>, pair: &mut Mxfp8Pair<Q>) -> Result<()> {
        let (shape, Mxfp8Pair { rows, columns }) = (pair.rows.shape, pair);
        check("Mxfp8::quantize_both, input", numel(&shape)?, input.len())?;
        let (row_data, row_scales) = (rows.data.view_mut(), rows.scales.view_mut());
        let (column_data, column_scales) = (columns.data.view_mut(), columns.scales.view_mut());
        let outputs = [row_data.address(), column_data.address(), column_scales.address()];
        if has_whole_vectors::<T>(shape, input.address(), &outputs) {
            let args = Mxfp8CastBothArgs { input, row_data, row_scales, column_data, column_scales, columns: shape[1] };
            self.cast_both.launch(stream, args)
        } else {
            self.quantize_rows(stream, input, shape, row_data, row_scales)?;
            self.quantize_columns(stream, input, shape, column_data, column_scales)
        }
    }

    /// The matrix back in `T`, each element its code times its scale, rounded to nearest even.
    ///
    /// # Errors
    /// [`Error::Length`] if a length does not match the shape; as [`Loaded::launch`].
    pub fn dequantize(&self, stream: &Stream, tensor: &Mxfp8Tensor<Q>, output: DeviceViewMut<'_, T>) -> Result<()> {
        let (data, scales) = (tensor.data.view(), tensor.scales.view());
        let (shape, columns) = (tensor.shape, tensor.shape[1]);
        check("Mxfp8::dequantize, output", numel(&shape)?, output.len())?;
        match tensor.direction {
            Direction::Rows if has_whole_blocks(shape, output.address(), data.address()) => {
                self.dequantize_rows.launch(stream, Mxfp8DequantizeRowsArgs { data, scales, output })
            }
            Direction::Rows => self.dequantize_ragged_rows.launch(stream, Mxfp8DequantizeRaggedRowsArgs { data, scales, output, columns }),
            Direction::Columns if has_whole_vectors::<T>(shape, output.address(), &[data.address(), scales.address()]) => {
                self.dequantize_columns.launch(stream, Mxfp8DequantizeColumnsArgs { data, scales, output, columns })
            }
            Direction::Columns => {
                self.dequantize_ragged_columns.launch(stream, Mxfp8DequantizeRaggedColumnsArgs { data, scales, output, columns })
            }
        }
    }
}

/// How many scales a matrix has in a direction.
///
/// # Errors
/// As [`numel`].
pub fn scale_count([rows, columns]: [u64; 2], direction: Direction) -> Result<u64> {
    numel(&match direction {
        Direction::Rows => [rows, columns.div_ceil(BLOCK)],
        Direction::Columns => [rows.div_ceil(BLOCK), columns],
    })
}

/// What the fast rowwise kernels need.
fn has_whole_blocks([_, columns]: [u64; 2], wide: u64, codes: u64) -> bool {
    columns.is_multiple_of(BLOCK) && wide.is_multiple_of(16) && codes.is_multiple_of(8)
}

/// What the fast columnwise kernels need.
fn has_whole_vectors<T>([_, columns]: [u64; 2], wide: u64, narrow: &[u64]) -> bool {
    let vector = 16 / size_of::<T>() as u64;
    columns.is_multiple_of(vector) && wide.is_multiple_of(16) && narrow.iter().all(|address| address.is_multiple_of(8))
}

fn check(what: &'static str, expected: u64, found: u64) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}

impl<T: Mxfp8Number<Q>, Q: Fp8> fmt::Debug for Mxfp8<T, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mxfp8").field("cast_rows", &self.cast_rows).finish_non_exhaustive()
    }
}
