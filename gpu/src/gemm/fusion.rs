//! What is fused after a product, before it is stored.

use oxtile_tile::num::{Pod, exp2, fma, reciprocal};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterTile};

use super::COLUMNS;

/// `alpha x + beta old + bias`, then GELU.
#[derive(Clone, Copy)]
pub struct Fusion<O> {
    /// The matrix as it was, read if `beta` is not zero.
    pub old: GlobalMut<O>,
    /// One value a column, or none.
    pub bias: Global<O>,
    /// Rows and columns.
    pub shape: [u32; 2],
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of the matrix as it was.
    pub beta: f32,
    /// Whether GELU comes last.
    pub gelu: bool,
}

impl<O: Float + Pod> Fusion<O> {
    /// Applies it to a tile whose first element is at `origin`.
    #[inline(always)]
    pub fn apply(&self, tile: &mut RegisterTile<COLUMNS>, [row, column]: [u32; 2]) {
        let Self { old, bias, shape: [rows, columns], alpha, beta, gelu } = *self;
        if alpha != 1.0 {
            tile.map(|x| alpha * x);
        }
        if beta != 0.0 {
            tile.map_pairs(|half, pair, values| {
                let (row, column) = (row + register_tile::row(half as u32), column + register_tile::column(pair as u32));
                // Columns are even, so a pair is inside or outside as one.
                if row >= rows || column >= columns {
                    return values;
                }
                let first = u64::from(row) * u64::from(columns) + u64::from(column);
                [0, 1].map(|i| fma(beta, old.load(first + i as u64).to_f32(), values[i]))
            });
        }
        if !bias.is_empty() {
            tile.map_pairs(|_, pair, values| {
                let column = column + register_tile::column(pair as u32);
                if column >= columns {
                    return values;
                }
                [0, 1].map(|i| values[i] + bias.load(u64::from(column) + i as u64).to_f32())
            });
        }
        if gelu {
            tile.map(gelu_of);
        }
    }
}

/// A factor of the product that the device knows, or 1.
#[inline(always)]
pub fn factor(scale: &Global<f32>) -> f32 {
    if scale.is_empty() { 1.0 } else { scale.load(0) }
}

/// Such factors are one element each or none.
pub fn check_scales(a_scale: u64, b_scale: u64) -> Result<(), LaunchError> {
    for (name, length) in [("a_scale", a_scale), ("b_scale", b_scale)] {
        if length != 0 {
            LaunchError::check_length(name, 1, length)?;
        }
    }
    Ok(())
}

/// `x / 2 (1 + tanh(u))` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`, which is `x / (1 + exp(-2 u))`.
#[inline(always)]
pub fn gelu_of(x: f32) -> f32 {
    /// `-2 sqrt(2 / pi) log2(e)`
    const SCALE: f32 = -2.302_208_2;
    let u = x * fma(0.044_715 * x, x, 1.0);
    x * reciprocal(1.0 + exp2(SCALE * u))
}
