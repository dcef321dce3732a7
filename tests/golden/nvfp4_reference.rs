//! Reads `nvfp4_reference.json`, which `make_nvfp4_reference.py` wrote.

use serde::Deserialize;

use crate::golden_hex::{bytes, words};

/// One tensor and its casts by TransformerEngine's reference; numbers as little-endian hex.
#[derive(Deserialize)]
pub struct Tensor {
    /// What the tensor tries.
    pub name: String,
    /// Its columns.
    pub columns: usize,
    input: String,
    /// Its casts.
    pub casts: Vec<Cast>,
}

/// One cast.
#[derive(Deserialize)]
pub struct Cast {
    /// Which rule.
    pub name: String,
    /// `rows`, or `columns` for the cast of the transpose.
    pub direction: String,
    data: String,
    scales: String,
    amax: String,
}

impl Tensor {
    /// The values, row by row.
    pub fn input(&self) -> Vec<f32> {
        bytes(&self.input).as_chunks::<2>().0.iter().map(|&half| f32::from_bits(u32::from(u16::from_le_bytes(half)) << 16)).collect()
    }
}

impl Cast {
    /// Pairs of codes.
    pub fn data(&self) -> Vec<u8> {
        bytes(&self.data)
    }

    /// Scale codes.
    pub fn scales(&self) -> Vec<u8> {
        bytes(&self.scales)
    }

    /// The largest magnitude, or that of each row.
    pub fn amax(&self) -> Vec<f32> {
        words(&self.amax)
    }
}

/// The committed tensors.
pub fn tensors() -> Vec<Tensor> {
    serde_json::from_str(include_str!("nvfp4_reference.json")).expect("nvfp4_reference.json is as make_nvfp4_reference.py writes it")
}
