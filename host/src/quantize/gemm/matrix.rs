//! Operands, and what is enqueued before they are multiplied.

use oxtile_kernels::fp8::{Fp8Dequantize, Fp8DequantizeArgs};
use oxtile_kernels::interleave::{InterleaveColumns, InterleaveColumnsArgs, InterleaveRows, InterleaveRowsArgs};
use oxtile_kernels::nvfp4::{Nvfp4DequantizeRows, Nvfp4DequantizeRowsArgs, Nvfp4GemmFactors, Nvfp4GemmFactorsArgs};
use oxtile_tile::launch::{BufferAccess, DeviceView};
use oxtile_tile::num::{bf16, e4m3, ue8m0};

use super::choice::OperandFormat;
use super::invalid;
use super::scratch::{Pad, Pads};
use crate::quantize::format::Direction;
use crate::quantize::fp8::{BlockScaling, ScaleOptions};
use crate::quantize::mxfp8::Mxfp8;
use crate::quantize::tensor::{Fp8BlockTensor, Fp8Tensor, Mxfp8Tensor, Nvfp4Tensor};
use crate::runtime::{Bound, Error, Result, Runtime};
use crate::tensor::shape::numel;

/// A quantized operand: `A` of `[m, k]` or `B` of `[n, k]`, as [`OperandFormat`] has them.
#[derive(Clone, Copy)]
pub enum QuantizedMatrix<'a> {
    /// Codes and what they are multiplied by, one element; of an [`Fp8Pair`](crate::quantize::Fp8Pair), either of its codes.
    Fp8 {
        /// The codes.
        data: DeviceView<'a, e4m3>,
        /// The inverse of the scale.
        scale_inverse: DeviceView<'a, f32>,
    },
    /// FP8 with scales of blocks.
    Fp8Block(&'a Fp8BlockTensor),
    /// MXFP8; its scales are interleaved first where a path needs that.
    Mxfp8(&'a Mxfp8Tensor),
    /// NVFP4; likewise.
    Nvfp4(&'a Nvfp4Tensor),
}

impl<'a> From<&'a Fp8Tensor> for QuantizedMatrix<'a> {
    fn from(tensor: &'a Fp8Tensor) -> Self {
        Self::Fp8 { data: tensor.data.view(), scale_inverse: tensor.scales.view() }
    }
}

impl<'a> From<&'a Fp8BlockTensor> for QuantizedMatrix<'a> {
    fn from(tensor: &'a Fp8BlockTensor) -> Self {
        Self::Fp8Block(tensor)
    }
}

impl<'a> From<&'a Mxfp8Tensor> for QuantizedMatrix<'a> {
    fn from(tensor: &'a Mxfp8Tensor) -> Self {
        Self::Mxfp8(tensor)
    }
}

impl<'a> From<&'a Nvfp4Tensor> for QuantizedMatrix<'a> {
    fn from(tensor: &'a Nvfp4Tensor) -> Self {
        Self::Nvfp4(tensor)
    }
}

impl<'a> QuantizedMatrix<'a> {
    fn format(self) -> OperandFormat {
        match self {
            Self::Fp8 { .. } => OperandFormat::Fp8,
            Self::Fp8Block(tensor) => OperandFormat::Fp8Block(tensor.direction),
            Self::Mxfp8(tensor) => OperandFormat::Mxfp8(tensor.direction),
            Self::Nvfp4(tensor) => OperandFormat::Nvfp4(tensor.direction),
        }
    }

    /// Fails unless the matrix has this format and is `outer` by `k`.
    pub(super) fn check(self, what: &'static str, format: OperandFormat, [outer, k]: [u64; 2]) -> Result<()> {
        if self.format() != format {
            return Err(invalid(format!("{what} is {:?}, the configuration says {format:?}", self.format())));
        }
        let by = |direction, shape: [u64; 2]| if direction == Direction::Rows { shape } else { [shape[1], shape[0]] };
        let shape = match self {
            Self::Fp8 { .. } => [outer, k],
            Self::Fp8Block(tensor) => tensor.shape,
            Self::Mxfp8(tensor) => by(tensor.direction, tensor.shape),
            Self::Nvfp4(tensor) => by(tensor.direction, tensor.shape),
        };
        if shape != [outer, k] {
            return Err(invalid(format!("{what} is {shape:?} with k last, not {:?}", [outer, k])));
        }
        self.check_lengths(what, shape)
    }

    /// Fails unless codes, scales and amax are as long as a matrix of `shape`, with k last, needs: their fields are public, and cuBLASLt
    /// does not check.
    fn check_lengths(self, what: &'static str, shape: [u64; 2]) -> Result<()> {
        match self {
            Self::Fp8 { data, scale_inverse } => {
                Error::check_length(what, numel(&shape)?, data.len())?;
                Error::check_length(what, 1, scale_inverse.len())
            }
            Self::Fp8Block(tensor) => tensor.check_lengths(what),
            Self::Mxfp8(tensor) => tensor.check_lengths(what),
            Self::Nvfp4(tensor) => tensor.check_lengths(what).and_then(|()| Error::check_length(what, 1, tensor.amax.len())),
        }
    }

    /// The codes.
    pub(super) fn data(self) -> BufferAccess<'a> {
        match self {
            Self::Fp8 { data, .. } => data.access("codes"),
            Self::Fp8Block(tensor) => tensor.data.view().access("codes"),
            Self::Mxfp8(tensor) => tensor.data.view().access("codes"),
            Self::Nvfp4(tensor) => tensor.data.view().access("codes"),
        }
    }

    /// The scales as they are.
    pub(super) fn scale(self) -> BufferAccess<'a> {
        match self {
            Self::Fp8 { scale_inverse, .. } => scale_inverse.access("scales"),
            Self::Fp8Block(tensor) => tensor.scales.view().access("scales"),
            Self::Mxfp8(tensor) => tensor.scales.view().access("scales"),
            Self::Nvfp4(tensor) => tensor.scales.view().access("scales"),
        }
    }
}

/// The operand in `bf16`, as it is stored; of NVFP4 always `[outer, k]`.
pub(super) fn dequantize<'a>(runtime: &Runtime, matrix: QuantizedMatrix<'a>, output: Pad<'a, bf16>) -> Result<Bound<'a>> {
    Ok(match matrix {
        QuantizedMatrix::Fp8 { data, scale_inverse } => {
            let kernel = runtime.load::<Fp8Dequantize<e4m3, bf16>>()?;
            Bound::new(move |stream| kernel.launch(stream, Fp8DequantizeArgs { data, scale_inverse, output: output.view_mut() }))
        }
        QuantizedMatrix::Fp8Block(tensor) => {
            let casts = BlockScaling::<bf16>::new(runtime, ScaleOptions::default())?;
            Bound::new(move |stream| casts.dequantize(stream, tensor, output.view_mut()))
        }
        QuantizedMatrix::Mxfp8(tensor) => {
            let casts = Mxfp8::<bf16>::new(runtime)?;
            Bound::new(move |stream| casts.dequantize(stream, tensor, output.view_mut()))
        }
        QuantizedMatrix::Nvfp4(tensor) => {
            let kernel = runtime.load::<Nvfp4DequantizeRows<bf16>>()?;
            Bound::new(move |stream| {
                let (data, scales, amax) = (tensor.data.view(), tensor.scales.view(), tensor.amax.view());
                kernel.launch(stream, Nvfp4DequantizeRowsArgs { data, scales, amax, output: output.view_mut() })
            })
        }
    })
}

/// The scales of operand number `at` in the layout of block-scaled multiplication, and where they are; none for other formats.
pub(super) fn interleave<'a>(
    runtime: &Runtime,
    matrix: QuantizedMatrix<'a>,
    pads: &Pads<'a>,
    at: usize,
) -> Result<Option<(Bound<'a>, BufferAccess<'a>)>> {
    let (mxfp8_scales, nvfp4_scales) = (pads.mxfp8_scales[at], pads.nvfp4_scales[at]);
    Ok(match matrix {
        QuantizedMatrix::Fp8 { .. } | QuantizedMatrix::Fp8Block(_) => None,
        QuantizedMatrix::Mxfp8(tensor) => {
            let ([outer, blocks], interleaved) = (tensor.extents(), mxfp8_scales);
            let step: Bound<'a> = match tensor.direction {
                Direction::Rows => {
                    let kernel = runtime.load::<InterleaveRows<ue8m0>>()?;
                    Bound::new(move |stream| {
                        let (compact, interleaved) = (tensor.scales.view(), interleaved.view_mut());
                        kernel.launch(stream, InterleaveRowsArgs { compact, interleaved, outer, blocks })
                    })
                }
                Direction::Columns => {
                    let kernel = runtime.load::<InterleaveColumns<ue8m0>>()?;
                    Bound::new(move |stream| {
                        let (compact, interleaved) = (tensor.scales.view(), interleaved.view_mut());
                        kernel.launch(stream, InterleaveColumnsArgs { compact, interleaved, outer, blocks })
                    })
                }
            };
            Some((step, interleaved.view().access("scales")))
        }
        QuantizedMatrix::Nvfp4(tensor) => {
            let ([outer, blocks], interleaved) = (tensor.extents(), nvfp4_scales);
            let kernel = runtime.load::<InterleaveRows<e4m3>>()?;
            let step: Bound<'a> = Bound::new(move |stream| {
                let (compact, interleaved) = (tensor.scales.view(), interleaved.view_mut());
                kernel.launch(stream, InterleaveRowsArgs { compact, interleaved, outer, blocks })
            });
            Some((step, interleaved.view().access("scales")))
        }
    })
}

/// The factors of a product of NVFP4 codes: `alpha` with both amaxes in it, and `beta`.
pub(super) fn product_factors<'a>(
    runtime: &Runtime,
    [a, b]: [&'a Nvfp4Tensor; 2],
    [alpha, beta]: [f32; 2],
    factors: Pad<'a, f32>,
) -> Result<Bound<'a>> {
    let kernel = runtime.load::<Nvfp4GemmFactors>()?;
    Ok(Bound::new(move |stream| {
        let (a_amax, b_amax, factors) = (a.amax.view(), b.amax.view(), factors.view_mut());
        kernel.launch(stream, Nvfp4GemmFactorsArgs { a_amax, b_amax, factors, alpha, beta })
    }))
}
