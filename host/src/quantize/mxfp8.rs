//! MXFP8: 8-bit elements and one power-of-two scale for each 32 neighbours of a row.
//!
//! The format and its rounding are those of [`oxtile_kernels::mxfp8`] (OCP Microscaling Formats 1.0, as
//! TransformerEngine computes it). A tensor is a row-major matrix `[rows, columns]` (of more dimensions:
//! [`as_matrix`](crate::tensor::shape::as_matrix)); its scales are compact, `[rows, ceil(columns / 32)]`.

use std::fmt;

use oxtile_kernels::magnitude::Magnitude;
use oxtile_kernels::mxfp8::{
    BLOCK, Mxfp8CastRaggedRows, Mxfp8CastRaggedRowsArgs, Mxfp8CastRows, Mxfp8CastRowsArgs, Mxfp8DequantizeRaggedRows,
    Mxfp8DequantizeRaggedRowsArgs, Mxfp8DequantizeRows, Mxfp8DequantizeRowsArgs, Wide,
};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::{Fp8, bf16, e4m3, e5m2, f16, ue8m0};

use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::numel;

/// A number type that is cast to and from MXFP8 with elements `Q`: `bf16`, `f16` and `f32`, to `e4m3` and `e5m2`.
pub trait Mxfp8Number<Q: Fp8>: Magnitude + Wide {
    /// The cast of whole blocks.
    type Cast: for<'a> Kernel<Args<'a> = Mxfp8CastRowsArgs<'a, Self, Q>>;
    /// The cast of any rows.
    type CastRagged: for<'a> Kernel<Args<'a> = Mxfp8CastRaggedRowsArgs<'a, Self, Q>>;
    /// The inverse for whole blocks.
    type Dequantize: for<'a> Kernel<Args<'a> = Mxfp8DequantizeRowsArgs<'a, Q, Self>>;
    /// The inverse for any rows.
    type DequantizeRagged: for<'a> Kernel<Args<'a> = Mxfp8DequantizeRaggedRowsArgs<'a, Q, Self>>;
}

macro_rules! numbers {
    ($($t:ty, $q:ty;)*) => { $(
        impl Mxfp8Number<$q> for $t {
            type Cast = Mxfp8CastRows<$t, $q>;
            type CastRagged = Mxfp8CastRaggedRows<$t, $q>;
            type Dequantize = Mxfp8DequantizeRows<$q, $t>;
            type DequantizeRagged = Mxfp8DequantizeRaggedRows<$q, $t>;
        }
    )* };
}
numbers! { bf16, e4m3; f16, e4m3; f32, e4m3; bf16, e5m2; f16, e5m2; f32, e5m2; }

/// The casts between `T` and MXFP8 with elements `Q`.
pub struct Mxfp8<T: Mxfp8Number<Q>, Q: Fp8 = e4m3> {
    cast: Loaded<T::Cast>,
    cast_ragged: Loaded<T::CastRagged>,
    dequantize: Loaded<T::Dequantize>,
    dequantize_ragged: Loaded<T::DequantizeRagged>,
}

/// A quantized matrix in device memory.
#[derive(Debug)]
pub struct Mxfp8Tensor<Q = e4m3> {
    /// The codes, `[rows, columns]`.
    pub data: Buffer<Q>,
    /// The scales, `[rows, ceil(columns / 32)]`.
    pub scales: Buffer<ue8m0>,
    /// Rows and columns.
    pub shape: [u64; 2],
}

impl<T: Mxfp8Number<Q>, Q: Fp8> Mxfp8<T, Q> {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        let (cast, cast_ragged) = (runtime.load()?, runtime.load()?);
        Ok(Self { cast, cast_ragged, dequantize: runtime.load()?, dequantize_ragged: runtime.load()? })
    }

    /// Quantizes a matrix into new buffers.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`] and [`quantize_rows`](Self::quantize_rows).
    pub fn quantize(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2]) -> Result<Mxfp8Tensor<Q>> {
        let mut tensor = Mxfp8Tensor {
            data: Buffer::uninitialised(stream, numel(&shape)?)?,
            scales: Buffer::uninitialised(stream, scale_count(shape)?)?,
            shape,
        };
        self.quantize_rows(stream, input, shape, tensor.data.view_mut(), tensor.scales.view_mut())?;
        Ok(tensor)
    }

    /// Quantizes a matrix. Rows of whole blocks at 16-byte aligned addresses take the fast kernel.
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
        if is_fast(shape, input.address(), data.address()) {
            self.cast.launch(stream, Mxfp8CastRowsArgs { input, data, scales })
        } else {
            self.cast_ragged.launch(stream, Mxfp8CastRaggedRowsArgs { input, data, scales, columns: shape[1] })
        }
    }

    /// The matrix back in `T`, each element its code times its scale, rounded to nearest even.
    ///
    /// # Errors
    /// [`Error::Length`] if a length does not match the shape; as [`Loaded::launch`].
    pub fn dequantize(&self, stream: &Stream, tensor: &Mxfp8Tensor<Q>, output: DeviceViewMut<'_, T>) -> Result<()> {
        let (data, scales) = (tensor.data.view(), tensor.scales.view());
        check("Mxfp8::dequantize, output", numel(&tensor.shape)?, output.len())?;
        if is_fast(tensor.shape, output.address(), data.address()) {
            self.dequantize.launch(stream, Mxfp8DequantizeRowsArgs { data, scales, output })
        } else {
            let columns = tensor.shape[1];
            self.dequantize_ragged.launch(stream, Mxfp8DequantizeRaggedRowsArgs { data, scales, output, columns })
        }
    }
}

/// How many scales a matrix has.
///
/// # Errors
/// As [`numel`].
pub fn scale_count([rows, columns]: [u64; 2]) -> Result<u64> {
    numel(&[rows, columns.div_ceil(BLOCK)])
}

fn is_fast([_, columns]: [u64; 2], wide: u64, codes: u64) -> bool {
    columns.is_multiple_of(BLOCK) && wide.is_multiple_of(16) && codes.is_multiple_of(8)
}

fn check(what: &'static str, expected: u64, found: u64) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}

impl<T: Mxfp8Number<Q>, Q: Fp8> fmt::Debug for Mxfp8<T, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mxfp8").field("cast", &self.cast).finish_non_exhaustive()
    }
}
