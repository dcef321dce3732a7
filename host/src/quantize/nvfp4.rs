//! NVFP4: 4-bit elements, one E4M3 scale for each 16 neighbours of a row and one f32 for the tensor.
//!
//! The format and its rounding are those of [`oxtile_kernels::nvfp4`] (as TransformerEngine computes it). A tensor is a
//! row-major matrix `[rows, columns]` of whole blocks (of more dimensions: [`as_matrix`](crate::tensor::shape::as_matrix));
//! its codes lie in pairs, `[rows, columns / 2]`, its scales are compact, `[rows, columns / 16]`.
//!
//! ```
//! use oxtile::quantize::Nvfp4;
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! let casts = Nvfp4::<f32>::new(&runtime)?;
//!
//! let weights = Buffer::from_slice(&stream, &[[3.0_f32, -1.5, 0.7, 0.0]; 16].concat())?;
//! let quantized = casts.quantize(&stream, weights.view(), [4, 16])?;
//! let mut restored = Buffer::<f32>::uninitialised(&stream, 64)?;
//! casts.dequantize(&stream, &quantized, restored.view_mut())?;
//!
//! assert_eq!(quantized.amax.to_vec(&stream)?, [3.0]);
//! // 3 is 6 times the scale; -1.5 is -3 times it, and 0.7 is nearest to 1.5 times it.
//! assert_eq!(quantized.data.to_vec(&stream)?[..2].iter().map(|pair| pair.to_bits()).collect::<Vec<_>>(), [0xd7, 0x03]);
//! assert_eq!(restored.to_vec(&stream)?[..4], [3.0, -1.5, 0.75, 0.0]);
//! # Ok(()) }
//! ```

use std::fmt;

use oxtile_kernels::group::Grouped;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_kernels::mxfp8::Wide;
use oxtile_kernels::nvfp4::*;
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel, Signature};
use oxtile_tile::num::{bf16, e2m1x2, e4m3, f16};

use super::amax::{Amax, AmaxNumber};
use super::format::{Direction, Format, Nvfp4Format};
use super::layout::{Compact, Interleaved};
use super::split_phase::GlobalAmax;
use super::tensor::Nvfp4Tensor;
use crate::runtime::{Device, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::numel;

pub use oxtile_kernels::nvfp4::encode_scale;

/// A number type that is cast to and from NVFP4: `bf16`, `f16` and `f32`.
pub trait Nvfp4Number: AmaxNumber + Wide {
    /// The cast.
    type Cast: Kernel + for<'a> Signature<Args<'a> = Nvfp4CastRowsArgs<'a, Self>>;
    /// The cast with interleaved scales.
    type CastInterleaved: Kernel + for<'a> Signature<Args<'a> = Nvfp4CastRowsInterleavedArgs<'a, Self>>;
    /// Its inverse.
    type Dequantize: Kernel + for<'a> Signature<Args<'a> = Nvfp4DequantizeRowsArgs<'a, Self>>;
    /// The rowwise cast, for groups.
    type GroupCastRows: Grouped + Kernel + for<'a> Signature<Args<'a> = Nvfp4CastRowsGroupedArgs<'a, Self>>;
    /// The columnwise cast, for groups.
    type GroupCastColumns: Grouped + Kernel + for<'a> Signature<Args<'a> = Nvfp4CastColumnsGroupedArgs<'a, Self>>;
    /// The cast in both directions, for groups.
    type GroupCastBoth: Grouped + Kernel + for<'a> Signature<Args<'a> = Nvfp4CastBothGroupedArgs<'a, Self>>;
    /// The inverse of the rowwise cast, for groups.
    type GroupDequantizeRows: Grouped + Kernel + for<'a> Signature<Args<'a> = Nvfp4DequantizeRowsGroupedArgs<'a, Self>>;
    /// The inverse of the columnwise cast, for groups.
    type GroupDequantizeColumns: Grouped + Kernel + for<'a> Signature<Args<'a> = Nvfp4DequantizeColumnsGroupedArgs<'a, Self>>;
}

macro_rules! numbers {
    ($($t:ty)*) => { $(
        impl Nvfp4Number for $t {
            type Cast = Nvfp4CastRows<$t>;
            type CastInterleaved = Nvfp4CastRowsInterleaved<$t>;
            type Dequantize = Nvfp4DequantizeRows<$t>;
            type GroupCastRows = Nvfp4CastRowsGrouped<$t>;
            type GroupCastColumns = Nvfp4CastColumnsGrouped<$t>;
            type GroupCastBoth = Nvfp4CastBothGrouped<$t>;
            type GroupDequantizeRows = Nvfp4DequantizeRowsGrouped<$t>;
            type GroupDequantizeColumns = Nvfp4DequantizeColumnsGrouped<$t>;
        }
    )* };
}
numbers! { bf16 f16 f32 }

/// The casts between `T` and NVFP4.
pub struct Nvfp4<T: Nvfp4Number> {
    amax: Amax<T>,
    cast: Loaded<T::Cast>,
    cast_interleaved: Loaded<T::CastInterleaved>,
    dequantize: Loaded<T::Dequantize>,
}

impl<T: Nvfp4Number> Nvfp4<T> {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self { amax: Amax::new(runtime)?, cast: runtime.load()?, cast_interleaved: runtime.load()?, dequantize: runtime.load()? })
    }

    /// Loads the kernel that dequantizes on a device, so that a graph can hold its first launch.
    pub(crate) fn prepare_dequantize(&self, device: &Device) -> Result<()> {
        self.dequantize.prepare(device)
    }

    /// Quantizes a matrix into new buffers: finds its amax, then casts. The amax stays on the device.
    ///
    /// # Errors
    /// As [`Nvfp4Tensor::uninitialised`] and [`quantize_rows`](Self::quantize_rows).
    pub fn quantize(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2]) -> Result<Nvfp4Tensor> {
        let mut tensor = Nvfp4Tensor::<Compact>::uninitialised(stream, shape, Direction::Rows)?;
        self.amax.raise(stream, input, &mut tensor.amax)?;
        self.quantize_rows(stream, input, shape, tensor.amax.view(), tensor.data.view_mut(), tensor.scales.view_mut())?;
        Ok(tensor)
    }

    /// Quantizes this rank's rows of a matrix into new buffers: the second phase. Those of all ranks, one after the other, are what
    /// [`quantize`](Self::quantize) makes of the whole.
    ///
    /// # Errors
    /// As [`Nvfp4Tensor::uninitialised`] and [`cast_shard`](Self::cast_shard).
    pub fn quantize_shard(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2], amax: &GlobalAmax) -> Result<Nvfp4Tensor> {
        let mut tensor = Nvfp4Tensor::uninitialised(stream, shape, Direction::Rows)?;
        self.cast_shard(stream, input, amax, &mut tensor)?;
        Ok(tensor)
    }

    /// As [`quantize_shard`](Self::quantize_shard), into a tensor that is there, whose amax becomes what all ranks agreed on. A graph can
    /// hold it.
    ///
    /// # Errors
    /// [`Error::Length`] unless there is one amax; [`Error::Invalid`] if the tensor is a columnwise one; as
    /// [`quantize_rows`](Self::quantize_rows).
    pub fn cast_shard(&self, stream: &Stream, input: DeviceView<'_, T>, amax: &GlobalAmax, tensor: &mut Nvfp4Tensor) -> Result<()> {
        tensor.direction.check("Nvfp4::cast_shard, tensor", Direction::Rows)?;
        amax.give("Nvfp4::cast_shard, amax", stream, [0, 1], &mut tensor.amax)?;
        self.quantize_rows(stream, input, tensor.shape, tensor.amax.view(), tensor.data.view_mut(), tensor.scales.view_mut())
    }

    /// As [`quantize`](Self::quantize), the scales [interleaved](oxtile_kernels::interleave) for block-scaled matrix multiplication.
    ///
    /// # Errors
    /// As [`Nvfp4Tensor::uninitialised`] and [`quantize_rows_interleaved`](Self::quantize_rows_interleaved).
    pub fn quantize_interleaved(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2]) -> Result<Nvfp4Tensor<Interleaved>> {
        let mut tensor = Nvfp4Tensor::<Interleaved>::uninitialised(stream, shape, Direction::Rows)?;
        self.amax.raise(stream, input, &mut tensor.amax)?;
        self.quantize_rows_interleaved(stream, input, &mut tensor)?;
        Ok(tensor)
    }

    /// Quantizes a matrix, or rows of one, whose amax, of one element, is on the device: its own, or that of a larger
    /// tensor that it is a part of.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless `columns` is a multiple of 16; [`Error::Length`] if a length does not match the shape; as
    /// [`Loaded::launch`], also where `input` does not start at a multiple of 16 bytes or `data` of 8.
    pub fn quantize_rows(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        shape: [u64; 2],
        amax: DeviceView<'_, f32>,
        data: DeviceViewMut<'_, e2m1x2>,
        scales: DeviceViewMut<'_, e4m3>,
    ) -> Result<()> {
        Nvfp4Format::check("Nvfp4::quantize_rows, shape", shape, Direction::Rows)?;
        Error::check_length("Nvfp4::quantize_rows, input", numel(&shape)?, input.len())?;
        self.cast.launch(stream, Nvfp4CastRowsArgs { input, amax, data, scales })
    }

    /// Casts a matrix of the tensor's shape with the tensor's amax. Scales lie in tiles of 128 rows by 4 blocks, 0 where they are padding.
    /// Compact scales are what ranks exchange.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the tensor is a columnwise one; as [`quantize_rows`](Self::quantize_rows).
    pub fn quantize_rows_interleaved(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        tensor: &mut Nvfp4Tensor<Interleaved>,
    ) -> Result<()> {
        const WHAT: &str = "Nvfp4::quantize_rows_interleaved, tensor";
        tensor.direction.check(WHAT, Direction::Rows)?;
        Nvfp4Format::check(WHAT, tensor.shape, Direction::Rows)?;
        let (input, amax) = (MatrixArgument::new(input, tensor.shape), tensor.amax.view());
        let (data, scales) = (tensor.data.view_mut(), tensor.scales.view_mut());
        self.cast_interleaved.launch(stream, Nvfp4CastRowsInterleavedArgs { input, amax, data, scales })
    }

    /// The matrix back in `T`, rounded to nearest even.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the tensor is a columnwise one; [`Error::Length`] if a length does not match the shape; as
    /// [`Loaded::launch`], also where `output` does not start at a multiple of 16 bytes.
    pub fn dequantize(&self, stream: &Stream, tensor: &Nvfp4Tensor, output: DeviceViewMut<'_, T>) -> Result<()> {
        if tensor.direction != Direction::Rows {
            let why = "it is columnwise: use `Nvfp4Columns::dequantize_columns`".to_owned();
            return Err(Error::Invalid { what: "Nvfp4::dequantize, tensor", why });
        }
        Error::check_length("Nvfp4::dequantize, output", numel(&tensor.shape)?, output.len())?;
        let (data, scales, amax) = (tensor.data.view(), tensor.scales.view(), tensor.amax.view());
        self.dequantize.launch(stream, Nvfp4DequantizeRowsArgs { data, scales, amax, output })
    }
}

impl<T: Nvfp4Number> fmt::Debug for Nvfp4<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvfp4").field("cast", &self.cast).finish_non_exhaustive()
    }
}
