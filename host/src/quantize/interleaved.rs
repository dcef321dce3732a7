//! Casts that write interleaved scales, and their inverses, without a pass over the scales in between.

use std::fmt;

use oxtile_kernels::magnitude::Magnitude;
use oxtile_kernels::mxfp8::*;
use oxtile_kernels::nvfp4::{
    Nvfp4DequantizeColumnsInterleaved, Nvfp4DequantizeColumnsInterleavedArgs, Nvfp4DequantizeRowsInterleaved,
    Nvfp4DequantizeRowsInterleavedArgs,
};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::{Fp8, e4m3};

use super::format::Direction;
use super::layout::Interleaved;
use super::tensor::{Mxfp8Tensor, Nvfp4Tensor};
use crate::runtime::{Loaded, Result, Runtime, Stream};

/// MXFP8 with interleaved scales: the rowwise cast and the inverse of either direction, for rows of whole blocks.
pub struct InterleavedMxfp8<T: Magnitude + Wide, Q: Fp8 = e4m3> {
    cast_rows: Loaded<Mxfp8CastRowsInterleaved<T, Q>>,
    dequantize_rows: Loaded<Mxfp8DequantizeRowsInterleaved<Q, T>>,
    dequantize_columns: Loaded<Mxfp8DequantizeColumnsInterleaved<Q, T>>,
}

impl<T: Magnitude + Wide, Q: Fp8> InterleavedMxfp8<T, Q>
where
    Mxfp8CastRowsInterleaved<T, Q>: Kernel,
    Mxfp8DequantizeRowsInterleaved<Q, T>: Kernel,
    Mxfp8DequantizeColumnsInterleaved<Q, T>: Kernel,
{
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self { cast_rows: runtime.load()?, dequantize_rows: runtime.load()?, dequantize_columns: runtime.load()? })
    }

    /// Quantizes a matrix rowwise into new buffers.
    ///
    /// # Errors
    /// As [`Mxfp8Tensor::uninitialised`] and [`quantize_rows_into`](Self::quantize_rows_into).
    pub fn quantize_rows(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2]) -> Result<Mxfp8Tensor<Q, Interleaved>> {
        let mut tensor = Mxfp8Tensor::uninitialised(stream, shape, Direction::Rows)?;
        self.quantize_rows_into(stream, input, &mut tensor)?;
        Ok(tensor)
    }

    /// Quantizes a matrix rowwise into a tensor that is there. A graph can hold it.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the tensor is a columnwise one; as [`Loaded::launch`], also where a length does not match
    /// the tensor's shape, a row is not whole blocks of 32 or `input` does not start at a multiple of 16 bytes: cast it by
    /// [`Mxfp8`](super::Mxfp8) and use [`InterleaveMxfp8`](super::InterleaveMxfp8).
    pub fn quantize_rows_into(&self, stream: &Stream, input: DeviceView<'_, T>, tensor: &mut Mxfp8Tensor<Q, Interleaved>) -> Result<()> {
        tensor.direction.check("InterleavedMxfp8::quantize_rows_into, tensor", Direction::Rows)?;
        let (data, scales, [rows, columns]) = (tensor.data.view_mut(), tensor.scales.view_mut(), tensor.shape);
        self.cast_rows.launch(stream, Mxfp8CastRowsInterleavedArgs { input, data, scales, rows, columns })
    }

    /// The matrix back in `T`, rounded to nearest even.
    ///
    /// # Errors
    /// As [`Loaded::launch`], also where a rowwise tensor's rows are not whole blocks, a columnwise one's not whole vectors of `T`, or
    /// `output` does not start at a multiple of 16 bytes.
    pub fn dequantize(&self, stream: &Stream, tensor: &Mxfp8Tensor<Q, Interleaved>, output: DeviceViewMut<'_, T>) -> Result<()> {
        let (data, scales, [rows, columns]) = (tensor.data.view(), tensor.scales.view(), tensor.shape);
        match tensor.direction {
            Direction::Rows => self.dequantize_rows.launch(stream, Mxfp8DequantizeRowsInterleavedArgs { data, scales, output, columns }),
            Direction::Columns => {
                self.dequantize_columns.launch(stream, Mxfp8DequantizeColumnsInterleavedArgs { data, scales, output, rows, columns })
            }
        }
    }
}

/// NVFP4 with interleaved scales back to wide numbers. [`Nvfp4::quantize_interleaved`](super::Nvfp4::quantize_interleaved) makes such tensors, and
/// [`InterleaveNvfp4`](super::InterleaveNvfp4) makes them of compact ones.
pub struct InterleavedNvfp4<T: Wide> {
    rows: Loaded<Nvfp4DequantizeRowsInterleaved<T>>,
    columns: Loaded<Nvfp4DequantizeColumnsInterleaved<T>>,
}

impl<T: Wide> InterleavedNvfp4<T>
where
    Nvfp4DequantizeRowsInterleaved<T>: Kernel,
    Nvfp4DequantizeColumnsInterleaved<T>: Kernel,
{
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self { rows: runtime.load()?, columns: runtime.load()? })
    }

    /// The matrix back in `T`, rounded to nearest even.
    ///
    /// # Errors
    /// As [`Loaded::launch`], where a length does not match the shape or `output` does not start at a multiple of 16 bytes.
    pub fn dequantize(&self, stream: &Stream, tensor: &Nvfp4Tensor<Interleaved>, output: DeviceViewMut<'_, T>) -> Result<()> {
        let (data, scales, amax) = (tensor.data.view(), tensor.scales.view(), tensor.amax.view());
        let [rows, columns] = tensor.shape;
        match tensor.direction {
            Direction::Rows => self.rows.launch(stream, Nvfp4DequantizeRowsInterleavedArgs { data, scales, amax, output, columns }),
            Direction::Columns => {
                self.columns.launch(stream, Nvfp4DequantizeColumnsInterleavedArgs { data, scales, amax, output, rows, columns })
            }
        }
    }
}

impl<T: Magnitude + Wide, Q: Fp8> fmt::Debug for InterleavedMxfp8<T, Q>
where
    Mxfp8CastRowsInterleaved<T, Q>: Kernel,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InterleavedMxfp8").field("cast_rows", &self.cast_rows).finish_non_exhaustive()
    }
}

impl<T: Wide> fmt::Debug for InterleavedNvfp4<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InterleavedNvfp4").field("rows", &self.rows).finish_non_exhaustive()
    }
}
