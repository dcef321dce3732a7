//! Matrices in low-precision formats.

use candle_core::{DType, Result, Tensor, bail};
use oxtile::num::{bf16, f16};
use oxtile::quantize::{Direction, Format, Fp8Format, Mxfp8Format, Nvfp4Format};

use crate::cast::{Dequantize, Quantize};
use crate::check;
use crate::place::{self, failed};

/// A low-precision format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quantization {
    /// Codes of E4M3, and a scale of E8M0 for 32 elements.
    Mxfp8,
    /// Codes of E2M1, two a byte, a scale of E4M3 for 16 elements, and one for the matrix.
    Nvfp4,
    /// Codes of E4M3, and one scale for the matrix.
    Fp8,
}

/// A quantized matrix: codes and scales as candle tensors, which can be saved and moved as any other.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// The codes, U8: a byte each, or two codes a byte in NVFP4, the even element in the low bits. Those of the transpose where NVFP4 and FP8 go by columns.
    pub codes: Tensor,
    /// The scales by which codes are multiplied: U8, the bits of their type, or F32 in FP8.
    pub scales: Tensor,
    /// The largest magnitude of the matrix, F32 of one element, in NVFP4.
    pub amax: Option<Tensor>,
    /// The format.
    pub format: Quantization,
    /// Which elements share a scale: neighbours in a row or in a column.
    pub direction: Direction,
    /// Rows and columns of the matrix.
    pub shape: (usize, usize),
}

/// Codes and scales of a matrix: their shapes, and whether there is an amax.
pub struct Parts {
    /// Of codes.
    pub codes: [usize; 2],
    /// Of scales.
    pub scales: Vec<usize>,
    /// Whether there is an amax.
    pub has_amax: bool,
}

/// Quantizes a matrix of BF16, F16 or F32. There is no gradient of it.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use oxtile_candle::{Direction, Quantization, quantize};
///
/// # fn main() -> candle_core::Result<()> {
/// let weight = Tensor::randn(0f32, 1.0, (256, 512), &Device::Cpu)?;
/// let quantized = quantize(&weight, Quantization::Mxfp8, Direction::Rows)?;
/// assert_eq!(quantized.codes.dims(), [256, 512]);
/// let restored = quantized.dequantize(DType::F32)?;
/// assert!((weight - restored)?.abs()?.max_all()?.to_scalar::<f32>()? < 0.5);
/// # Ok(()) }
/// ```
///
/// # Errors
/// A matrix of another type, that is not contiguous, or of a shape that the format does not take.
pub fn quantize(matrix: &Tensor, format: Quantization, direction: Direction) -> Result<Quantized> {
    check::element(("the matrix", matrix), &[DType::BF16, DType::F16, DType::F32], "quantization takes")?;
    check::places(&[("the matrix", matrix)])?;
    let &[rows, columns] = matrix.dims() else { bail!("oxtile: the matrix has shape {:?}, not [rows, columns]", matrix.dims()) };
    let parts = format.parts([rows, columns], direction)?;
    place::run(matrix.device(), Quantize { matrix, format, direction, parts })
}

impl Quantized {
    /// The matrix back, each element its code times its scale, rounded to `dtype`: BF16, F16 or F32.
    ///
    /// # Errors
    /// Another type; codes, scales or an amax that are not those of the format, the direction and the shape.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        let (rows, columns) = self.shape;
        let parts = self.format.parts([rows, columns], self.direction)?;
        let (codes, scales) = (("codes", &self.codes), ("scales", &self.scales));
        check::element(codes, &[DType::U8], "codes are")?;
        check::element(scales, &[if self.format == Quantization::Fp8 { DType::F32 } else { DType::U8 }], "scales are")?;
        let because = format!("those of a matrix [{rows}, {columns}] in {:?} by {:?}", self.format, self.direction);
        check::shape(codes, &parts.codes, &because)?;
        check::shape(scales, &parts.scales, &because)?;
        let mut all = vec![codes, scales];
        match &self.amax {
            Some(amax) if parts.has_amax => {
                check::element(("amax", amax), &[DType::F32], "an amax is")?;
                check::shape(("amax", amax), &[1], "one number")?;
                all.push(("amax", amax));
            }
            None if !parts.has_amax => {}
            _ => bail!("oxtile: {:?} {} an amax", self.format, if parts.has_amax { "needs" } else { "has not" }),
        }
        check::places(&all)?;
        let matrix = Dequantize { quantized: self };
        match dtype {
            DType::BF16 => place::run(self.codes.device(), matrix.to::<bf16>()),
            DType::F16 => place::run(self.codes.device(), matrix.to::<f16>()),
            DType::F32 => place::run(self.codes.device(), matrix.to::<f32>()),
            other => bail!("oxtile: a matrix is restored as BF16, F16 or F32, not as {other:?}"),
        }
    }
}

impl Quantization {
    /// The shapes of codes and scales of a matrix, and whether it has an amax.
    fn parts(self, shape: [usize; 2], direction: Direction) -> Result<Parts> {
        let shape = shape.map(|size| size as u64);
        let (codes, scales) = match self {
            Self::Mxfp8 => of::<Mxfp8Format>("MXFP8", shape, direction)?,
            Self::Nvfp4 => of::<Nvfp4Format>("NVFP4", shape, direction)?,
            Self::Fp8 => of::<Fp8Format>("FP8", shape, direction)?,
        };
        let scales = scales.map(|size| size as usize);
        // One scale for all.
        let scales = if self == Self::Fp8 { vec![1] } else { scales.to_vec() };
        Ok(Parts { codes: codes.map(|size| size as usize), scales, has_amax: self == Self::Nvfp4 })
    }
}

fn of<F: Format<Direction = Direction>>(what: &'static str, shape: [u64; 2], direction: Direction) -> Result<([u64; 2], [u64; 2])> {
    F::check(what, shape, direction).map_err(failed)?;
    Ok((F::SHAPES.codes(shape, direction), F::SHAPES.scales(shape, direction)))
}
