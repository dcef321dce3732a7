//! MXFP8: 8-bit elements and one power-of-two scale for each 32 neighbours of a row or of a column.
//!
//! The format and its rounding are those of [`oxtile_kernels::mxfp8`] (OCP Microscaling Formats 1.0, as
//! TransformerEngine computes it). A tensor is a row-major matrix `[rows, columns]` (of more dimensions:
//! [`as_matrix`](crate::tensor::shape::as_matrix)); so are its codes, in either [`Direction`]. The scales are compact;
//! [`InterleaveMxfp8`](super::InterleaveMxfp8) changes that.
//!
//! ```
//! use oxtile::quantize::{Direction, Mxfp8};
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?;
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

mod fused;
mod number;

use std::fmt;

use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_kernels::mxfp8::*;
use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::{Fp8, e4m3, ue8m0};

pub use fused::{BiasGradient, FusedInput, FusedMxfp8, FusedOutput};
pub use number::Mxfp8Number;

use crate::quantize::format::Direction;
use crate::quantize::layout::Compact;
use crate::quantize::tensor::{Mxfp8Pair, Mxfp8Tensor};
use crate::runtime::{Device, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::numel;

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

    /// Loads the kernels that dequantize rows on a device, so that a graph can hold their first launch.
    pub(crate) fn prepare_dequantize(&self, device: &Device) -> Result<()> {
        self.dequantize_rows.prepare(device)?;
        self.dequantize_ragged_rows.prepare(device)
    }

    /// Quantizes a matrix into new buffers.
    ///
    /// # Errors
    /// As [`Mxfp8Tensor::uninitialised`] and [`quantize_rows`](Self::quantize_rows).
    pub fn quantize(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2], direction: Direction) -> Result<Mxfp8Tensor<Q>> {
        let mut tensor = Mxfp8Tensor::<Q, Compact>::uninitialised(stream, shape, direction)?;
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
        Error::check_length("Mxfp8::quantize_rows, input", numel(&shape)?, input.len())?;
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
        Error::check_length("Mxfp8::quantize_columns, input", numel(&shape)?, input.len())?;
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
    /// As [`Mxfp8Pair::uninitialised`] and [`quantize_both_into`](Self::quantize_both_into).
    pub fn quantize_both(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2]) -> Result<Mxfp8Pair<Q>> {
        let mut pair = Mxfp8Pair::uninitialised(stream, shape)?;
        self.quantize_both_into(stream, input, &mut pair)?;
        Ok(pair)
    }

    /// Quantizes a matrix of the pair's shape in both directions, by one pass over rows of whole 16-byte vectors at
    /// 16-byte aligned addresses and by two over others.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the pair's tensors are one of each direction and of one shape; [`Error::Length`] if a length does not match it; as [`Loaded::launch`].
    pub fn quantize_both_into(&self, stream: &Stream, input: DeviceView<'_, T>, pair: &mut Mxfp8Pair<Q>) -> Result<()> {
        let shape = pair.check("Mxfp8::quantize_both", input.len())?;
        let Mxfp8Pair { rows, columns } = pair;
        let rows = CodesArgument { data: rows.data.view_mut(), scales: rows.scales.view_mut() };
        let columns = CodesArgument { data: columns.data.view_mut(), scales: columns.scales.view_mut() };
        let outputs = [rows.data.address(), columns.data.address(), columns.scales.address()];
        if has_whole_vectors::<T>(shape, input.address(), &outputs) {
            self.cast_both.launch(stream, Mxfp8CastBothArgs { input: MatrixArgument::new(input, shape), rows, columns })
        } else {
            self.quantize_rows(stream, input, shape, rows.data, rows.scales)?;
            self.quantize_columns(stream, input, shape, columns.data, columns.scales)
        }
    }

    /// The matrix back in `T`, each element its code times its scale, rounded to nearest even.
    ///
    /// # Errors
    /// [`Error::Length`] if a length does not match the shape; as [`Loaded::launch`].
    pub fn dequantize(&self, stream: &Stream, tensor: &Mxfp8Tensor<Q>, output: DeviceViewMut<'_, T>) -> Result<()> {
        let (data, scales) = (tensor.data.view(), tensor.scales.view());
        let (shape, columns) = (tensor.shape, tensor.shape[1]);
        Error::check_length("Mxfp8::dequantize, output", numel(&shape)?, output.len())?;
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

/// What the fast rowwise kernels need.
fn has_whole_blocks([_, columns]: [u64; 2], wide: u64, codes: u64) -> bool {
    columns.is_multiple_of(BLOCK) && wide.is_multiple_of(16) && codes.is_multiple_of(8)
}

/// What the fast columnwise kernels need.
fn has_whole_vectors<T>([_, columns]: [u64; 2], wide: u64, narrow: &[u64]) -> bool {
    let vector = 16 / size_of::<T>() as u64;
    columns.is_multiple_of(vector) && wide.is_multiple_of(16) && narrow.iter().all(|address| address.is_multiple_of(8))
}

impl<T: Mxfp8Number<Q>, Q: Fp8> fmt::Debug for Mxfp8<T, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mxfp8").field("cast_rows", &self.cast_rows).finish_non_exhaustive()
    }
}
