//! The seam between the job and what computes: one call quantizes one piece of one tensor.

use std::borrow::Cow;

use half::{bf16, f16};

use super::Format;
use crate::safetensors::Dtype;

/// How rows are quantized: a format, with what it needs to know of the whole tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scheme {
    /// E4M3 elements, one E8M0 scale for each 32 of them along a row.
    Mxfp8,
    /// E2M1 elements in pairs, one E4M3 scale for each 16 of them along a row.
    Nvfp4 {
        /// The largest magnitude of the tensor that the rows are part of.
        amax: f32,
    },
}

impl Scheme {
    /// The format.
    pub const fn format(self) -> Format {
        match self {
            Self::Mxfp8 => Format::Mxfp8,
            Self::Nvfp4 { .. } => Format::Nvfp4,
        }
    }
}

/// Quantizes rows of matrices.
pub trait QuantizeDevice {
    /// What it is, for the report: `emulated`, `NVIDIA H200`.
    fn name(&self) -> String;

    /// The largest magnitude; NaN elements do not count.
    ///
    /// # Errors
    /// Whatever the device reports.
    fn amax(&mut self, input: Elements<'_>) -> Result<f32, DeviceError>;

    /// Quantizes a row-major matrix; `columns` is a multiple of the format's block.
    ///
    /// # Errors
    /// Whatever the device reports.
    fn quantize(&mut self, scheme: Scheme, rows: usize, columns: usize, input: Elements<'_>) -> Result<QuantizedRows, DeviceError>;
}

/// A quantized matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedRows {
    /// Element codes, `[rows, columns]`; of NVFP4 in pairs, the even element in the low nibble, `[rows, columns / 2]`.
    pub data: Vec<u8>,
    /// Scale codes, one a block.
    pub scales: Vec<u8>,
    /// MXFP8: largest magnitude of the input; NaN elements do not count. NVFP4: that of the scheme.
    pub amax: f32,
}

/// A device that failed.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct DeviceError(#[from] Box<dyn std::error::Error + Send + Sync>);

impl DeviceError {
    /// Wraps the device's own error, or a text.
    pub fn new(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(error.into())
    }
}

/// Elements of a tensor in one of the types that can be quantized.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// binary32.
    F32(&'a [f32]),
    /// binary16.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

/// The bytes of a tensor as aligned elements: borrowed where the file aligns them, copied where it does not.
#[derive(Debug)]
pub enum AlignedElements<'a> {
    /// binary32.
    F32(Cow<'a, [f32]>),
    /// binary16.
    F16(Cow<'a, [f16]>),
    /// bfloat16.
    Bf16(Cow<'a, [bf16]>),
}

impl<'a> AlignedElements<'a> {
    /// Views whole little-endian elements; `None` for a dtype that is not quantized.
    pub fn new(dtype: Dtype, bytes: &'a [u8]) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Self::F32(aligned(bytes))),
            Dtype::F16 => Some(Self::F16(aligned(bytes))),
            Dtype::Bf16 => Some(Self::Bf16(aligned(bytes))),
            _ => None,
        }
    }

    /// The elements.
    pub fn elements(&self) -> Elements<'_> {
        match self {
            Self::F32(elements) => Elements::F32(elements),
            Self::F16(elements) => Elements::F16(elements),
            Self::Bf16(elements) => Elements::Bf16(elements),
        }
    }
}

fn aligned<T: bytemuck::Pod>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => Cow::Borrowed(elements),
        // Nothing in the format makes a header's length a multiple of the element size.
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misaligned_elements_are_copied() {
        let numbers = [1.5f32, -2.0, 3.25];
        let mut bytes = vec![0];
        bytes.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
        for shift in 0..4 {
            let mut shifted = vec![0; shift];
            shifted.extend_from_slice(&bytes[1..]);
            let aligned = AlignedElements::new(Dtype::F32, &shifted[shift..]).expect("f32 is quantized");
            let Elements::F32(elements) = aligned.elements() else { panic!("f32 stays f32") };
            assert_eq!(elements, numbers);
        }
    }
}
