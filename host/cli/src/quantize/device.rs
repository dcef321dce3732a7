//! The seam between the job and what computes: one call quantizes one piece of one tensor.

use std::borrow::Cow;

use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::{Recipe, Side};
use crate::safetensors::Dtype;

/// A piece of a matrix: whole rows, in whole blocks where columns are quantized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Piece {
    /// Rows and columns of the piece.
    pub shape: [u64; 2],
    /// The largest magnitudes that each [`Direction`](super::Direction) is cast with, where the format takes those of the whole tensor.
    pub amax: [f32; 2],
    /// Which of a seed's sequences of random numbers the piece draws from.
    pub sequence: u64,
}

/// Quantizes matrices.
pub trait QuantizeDevice {
    /// What it is, for the report: `emulated`, `NVIDIA H200`.
    fn name(&self) -> String;

    /// The largest magnitudes that each [`Direction`](super::Direction) of a piece is cast with: its own, and that of its columns, transformed if
    /// the recipe transforms them. NaN elements do not count.
    ///
    /// # Errors
    /// Whatever the device reports.
    fn amax(&mut self, recipe: &Recipe, shape: [u64; 2], input: Elements<'_>) -> Result<[f32; 2], DeviceError>;

    /// Quantizes a piece, row-major, in the recipe's directions; the scales are compact.
    ///
    /// # Errors
    /// Whatever the device reports.
    fn quantize(&mut self, recipe: &Recipe, piece: &Piece, input: Elements<'_>) -> Result<Quantized, DeviceError>;

    /// Compact scales of a direction of a matrix, interleaved, the padding 0.
    ///
    /// # Errors
    /// Whatever the device reports.
    fn interleave(&mut self, side: &Side, compact: &[u8]) -> Result<Vec<u8>, DeviceError>;
}

/// A quantized piece.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Quantized {
    /// Each [`Direction`](super::Direction) that the recipe asks for.
    pub sides: [Option<Codes>; 2],
    /// Largest magnitude of the input; NaN elements do not count. Meaningless for formats that take that of the whole tensor.
    pub amax: f32,
}

/// Codes and compact scales of one direction, little-endian, as [`Side`] lays them out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Codes {
    /// The codes.
    pub data: Vec<u8>,
    /// The scales.
    pub scales: Vec<u8>,
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

impl Elements<'_> {
    /// Their values.
    pub fn to_f32(self) -> Vec<f32> {
        match self {
            Self::F32(elements) => elements.to_vec(),
            Self::F16(elements) => elements.to_f32_vec(),
            Self::Bf16(elements) => elements.to_f32_vec(),
        }
    }
}

fn aligned<T: bytemuck::Pod>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => Cow::Borrowed(elements),
        // Nothing in the format makes a header's length a multiple of the element size.
        Err(_) => Cow::Owned(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()),
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
