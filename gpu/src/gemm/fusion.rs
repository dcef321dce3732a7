//! What is fused after a product, before it is stored.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::num::{Pod, exp2, fma, reciprocal};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterTile};

/// `alpha a_scale b_scale x + beta old + bias`, then GELU.
#[derive(Clone, Copy, Parameter)]
pub struct Fusion<O: Pod> {
    /// One value a column.
    pub bias: Option<Global<O>>,
    /// A factor of the product that only the device knows: one element.
    pub a_scale: Option<Global<f32>>,
    /// Another.
    pub b_scale: Option<Global<f32>>,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of the matrix as it was, which is read if this is not zero.
    pub beta: f32,
    /// Whether GELU comes last.
    pub gelu: bool,
}

impl<O: Float + Pod> Fusion<O> {
    /// The factors of the product together.
    #[inline(always)]
    pub fn factor(&self) -> f32 {
        let [a, b] = [self.a_scale, self.b_scale].map(|scale| scale.map_or(1.0, |scale| scale.load(0)));
        self.alpha * a * b
    }

    /// Applies it to a tile of the product, times [`factor`](Self::factor). `old` is the matrix `[rows, columns]` as it was; the tile's first element
    /// is that at `[row, column]`. Columns are even if `PAIRS`: a pair of neighbours is then inside or outside as one.
    #[inline(always)]
    pub fn apply<const COLUMNS: usize, const PAIRS: bool>(
        &self,
        tile: &mut RegisterTile<COLUMNS>,
        factor: f32,
        old: &GlobalMut<O>,
        [rows, columns]: [u32; 2],
        [row, column]: [u32; 2],
    ) where
        Columns<COLUMNS>: MatrixColumns,
    {
        let Self { bias, beta, gelu, .. } = *self;
        if factor != 1.0 {
            tile.map(|x| factor * x);
        }
        if beta != 0.0 {
            tile.map_pairs(|half, pair, values| {
                let (row, column) = (row + register_tile::row(half as u32), column + register_tile::column(pair as u32));
                if row >= rows || column >= columns {
                    return values;
                }
                let first = u64::from(row) * u64::from(columns) + u64::from(column);
                let add = |i: usize| fma(beta, old.load(first + i as u64).to_f32(), values[i]);
                if PAIRS { [0, 1].map(add) } else { [add(0), if column + 1 < columns { add(1) } else { values[1] }] }
            });
        }
        if let Some(bias) = bias {
            tile.map_pairs(|_, pair, values| {
                let column = column + register_tile::column(pair as u32);
                if column >= columns {
                    return values;
                }
                let add = |i: usize| values[i] + bias.load(u64::from(column) + i as u64).to_f32();
                if PAIRS { [0, 1].map(add) } else { [add(0), if column + 1 < columns { add(1) } else { values[1] }] }
            });
        }
        if gelu {
            tile.map(gelu_of);
        }
    }
}

impl<O: Pod> FusionArgument<'_, O> {
    /// Refuses what does not fit a product of `columns` columns.
    pub fn check(&self, columns: u64) -> Result<(), LaunchError> {
        if let Some(bias) = self.bias {
            LaunchError::check_length("fusion.bias", columns, bias.len())?;
        }
        for (name, scale) in [("fusion.a_scale", self.a_scale), ("fusion.b_scale", self.b_scale)] {
            if let Some(scale) = scale {
                LaunchError::check_length(name, 1, scale.len())?;
            }
        }
        Ok(())
    }
}

/// `x / 2 (1 + tanh(u))` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`, which is `x / (1 + exp(-2 u))`.
#[inline(always)]
pub fn gelu_of(x: f32) -> f32 {
    /// `-2 sqrt(2 / pi) log2(e)`
    const SCALE: f32 = -2.302_208_2;
    let u = x * fma(0.044_715 * x, x, 1.0);
    x * reciprocal(1.0 + exp2(SCALE * u))
}
