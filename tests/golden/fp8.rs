//! Reads `fp8.json`, which `make_fp8.py` wrote.

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
    /// One a format and rule.
    pub casts: Vec<Casts>,
}

/// The casts to one format by one rule.
#[derive(Deserialize)]
pub struct Casts {
    /// `e4m3` or `e5m2`.
    pub format: String,
    /// What a smaller amax counts as.
    pub epsilon: f32,
    /// Whether scales are powers of two.
    pub power_of_two: bool,
    /// One scale.
    pub tensor: Cast,
    /// One scale for each 128 neighbours of a row.
    pub row_blocks: Cast,
    /// One scale for each 128x128 elements.
    pub squares: Cast,
}

/// A cast, bytes as hex.
#[derive(Deserialize)]
pub struct Cast {
    data: String,
    inverses: String,
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

    /// Inverses of the scales, row by row of blocks.
    pub fn inverses(&self) -> Vec<f32> {
        words(&self.inverses)
    }
}

/// The committed tensors.
pub fn tensors() -> Vec<Tensor> {
    serde_json::from_str(include_str!("fp8.json")).expect("fp8.json is as make_fp8.py writes it")
}
