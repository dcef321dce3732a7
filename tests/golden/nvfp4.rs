//! Reads `nvfp4.json`, which `make_nvfp4.py` wrote.

use serde::Deserialize;

use crate::golden_hex::{bytes, words};

/// One tensor and its cast; numbers as little-endian hex.
#[derive(Deserialize)]
pub struct Tensor {
    /// What the tensor tries.
    pub name: String,
    input: String,
    amax: String,
    encode_scale: String,
    data: String,
    scales: String,
    dequantized: String,
}

impl Tensor {
    /// The values, whole blocks.
    pub fn input(&self) -> Vec<f32> {
        words(&self.input)
    }

    /// The largest magnitude, NaN dropped.
    pub fn amax(&self) -> f32 {
        words(&self.amax)[0]
    }

    /// The tensor's encode scale.
    pub fn encode_scale(&self) -> f32 {
        words(&self.encode_scale)[0]
    }

    /// Pairs of codes.
    pub fn data(&self) -> Vec<u8> {
        bytes(&self.data)
    }

    /// Scale codes.
    pub fn scales(&self) -> Vec<u8> {
        bytes(&self.scales)
    }

    /// Values.
    pub fn dequantized(&self) -> Vec<f32> {
        words(&self.dequantized)
    }
}

/// The committed tensors.
pub fn tensors() -> Vec<Tensor> {
    serde_json::from_str(include_str!("nvfp4.json")).expect("nvfp4.json is as make_nvfp4.py writes it")
}
