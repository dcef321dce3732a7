//! Reads `mxfp8.json`, which `make_ml_dtypes.py` wrote.

use serde::Deserialize;

use crate::golden_hex::{bytes, words};

/// One tensor and its casts.
#[derive(Deserialize)]
pub struct Tensor {
    /// What the tensor tries.
    pub name: String,
    /// The type that holds its values exactly: `f32`, `bf16`, `f16`.
    pub dtype: String,
    /// M.
    pub rows: usize,
    /// K.
    pub columns: usize,
    input: String,
    /// Its E4M3 cast.
    pub e4m3: Cast,
    /// Its E5M2 cast.
    pub e5m2: Cast,
}

/// A rowwise MXFP8 cast, bytes as hex.
#[derive(Deserialize)]
pub struct Cast {
    data: String,
    scales: String,
    dequantized: String,
}

impl Tensor {
    /// The values, row-major.
    pub fn input(&self) -> Vec<f32> {
        words(&self.input)
    }
}

impl Cast {
    /// Element codes [M, K].
    pub fn data(&self) -> Vec<u8> {
        bytes(&self.data)
    }

    /// Scale codes [M, ceil(K / 32)].
    pub fn scales(&self) -> Vec<u8> {
        bytes(&self.scales)
    }

    /// Values [M, K].
    pub fn dequantized(&self) -> Vec<f32> {
        words(&self.dequantized)
    }
}

/// The committed tensors.
pub fn tensors() -> Vec<Tensor> {
    serde_json::from_str(include_str!("mxfp8.json")).expect("mxfp8.json is as make_ml_dtypes.py writes it")
}
