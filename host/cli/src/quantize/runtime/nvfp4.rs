//! The NVFP4 casts of a recipe, whatever their rounding and transform.

use std::fmt;

use oxtile::{
    Buffer, Error, Result, Stream,
    kernels::nvfp4::{Nvfp4CastBoth, Nvfp4CastColumns, Nvfp4CastSquares, Nvfp4DequantizeColumns},
    num::{bf16, e2m1x2, e4m3},
    quantize::{
        Nvfp4, Nvfp4Columns, Nvfp4Pair, Nvfp4Squares, Nvfp4StochasticRows, Nvfp4Tensor, RandomState,
        nvfp4::Nvfp4Number,
        nvfp4_columns::{Rounding, Stochastic16},
    },
};
use oxtile_tile::launch::Kernel;

use super::{bytes, from_bytes, restore::QuantizedPiece};
use crate::quantize::{Codes, Direction, Directions, Piece, Quantized, Recipe};

/// The casts of one number type for one recipe.
pub struct Nvfp4Casts<T> {
    /// By rows.
    pub rows: Box<dyn RowCast<T>>,
    /// By columns and by both.
    pub columns: Box<dyn ColumnCast<T>>,
    /// In their place where 16 by 16 elements share a scale.
    pub squares: Option<Box<dyn SquareCast<T>>>,
}

/// A cast in both directions with the scales of squares.
pub trait SquareCast<T> {
    /// Casts a matrix of the pair's shape with the tensor's amax.
    fn cast_both(&self, stream: &Stream, input: &Buffer<T>, pair: &mut Nvfp4Pair) -> Result<()>;
}

/// A cast by rows.
pub trait RowCast<T> {
    /// Casts a matrix of the tensor's shape with the tensor's amax.
    fn cast(&self, stream: &Stream, input: &Buffer<T>, random: &RandomState, tensor: &mut Nvfp4Tensor) -> Result<()>;
}

/// Casts by columns, and back.
pub trait ColumnCast<T> {
    /// Casts by columns with the tensor's amax.
    fn columns(&self, stream: &Stream, input: &Buffer<T>, random: &RandomState, tensor: &mut Nvfp4Tensor) -> Result<()>;
    /// Casts by rows and by columns, each with its amax.
    fn both(&self, stream: &Stream, input: &Buffer<T>, random: &RandomState, pair: &mut Nvfp4Pair) -> Result<()>;
    /// Restores a matrix from its codes by columns.
    fn dequantize(&self, stream: &Stream, tensor: &Nvfp4Tensor, output: &mut Buffer<T>) -> Result<()>;
}

impl<T: Nvfp4Number> RowCast<T> for Nvfp4<T> {
    fn cast(&self, stream: &Stream, input: &Buffer<T>, _: &RandomState, tensor: &mut Nvfp4Tensor) -> Result<()> {
        let (data, scales) = (tensor.data.view_mut(), tensor.scales.view_mut());
        self.quantize_rows(stream, input.view(), tensor.shape, tensor.amax.view(), data, scales)
    }
}

impl<T: Nvfp4Number> SquareCast<T> for Nvfp4Squares<T>
where
    Nvfp4CastSquares<T>: Kernel,
{
    fn cast_both(&self, stream: &Stream, input: &Buffer<T>, pair: &mut Nvfp4Pair) -> Result<()> {
        self.cast(stream, input.view(), pair)
    }
}

impl RowCast<bf16> for Nvfp4StochasticRows<bf16, Stochastic16> {
    fn cast(&self, stream: &Stream, input: &Buffer<bf16>, random: &RandomState, tensor: &mut Nvfp4Tensor) -> Result<()> {
        Nvfp4StochasticRows::cast(self, stream, input.view(), random, tensor)
    }
}

impl<T: Nvfp4Number, R: Rounding, const HADAMARD: bool> ColumnCast<T> for Nvfp4Columns<T, R, HADAMARD>
where
    Nvfp4CastColumns<T, R, HADAMARD>: Kernel,
    Nvfp4CastBoth<T, R, HADAMARD>: Kernel,
    Nvfp4DequantizeColumns<T>: Kernel,
{
    fn columns(&self, stream: &Stream, input: &Buffer<T>, random: &RandomState, tensor: &mut Nvfp4Tensor) -> Result<()> {
        self.cast_columns(stream, input.view(), random, tensor)
    }

    fn both(&self, stream: &Stream, input: &Buffer<T>, random: &RandomState, pair: &mut Nvfp4Pair) -> Result<()> {
        self.cast_both(stream, input.view(), random, pair)
    }

    fn dequantize(&self, stream: &Stream, tensor: &Nvfp4Tensor, output: &mut Buffer<T>) -> Result<()> {
        self.dequantize_columns(stream, tensor, output.view_mut())
    }
}

impl<T: Nvfp4Number> Nvfp4Casts<T> {
    /// Casts a piece in the recipe's directions.
    pub fn quantize(&self, stream: &Stream, recipe: &Recipe, piece: &Piece, input: &Buffer<T>) -> Result<Quantized> {
        let random = match recipe.seed {
            Some(seed) => RandomState::new(stream, seed, piece.sequence)?,
            None => RandomState::none(stream)?,
        };
        let tensor = |direction: Direction| {
            let mut tensor = Nvfp4Tensor::uninitialised(stream, piece.shape, direction)?;
            tensor.amax.copy_from_slice(stream, &[piece.amax[direction as usize]])?;
            Ok::<_, Error>(tensor)
        };
        let mut output = Quantized::default();
        if let Some(squares) = &self.squares {
            let mut pair = Nvfp4Pair { rows: tensor(Direction::Rows)?, columns: tensor(Direction::Columns)? };
            squares.cast_both(stream, input, &mut pair)?;
            for &direction in recipe.directions.each() {
                let tensor = if direction == Direction::Rows { &pair.rows } else { &pair.columns };
                output.sides[direction as usize] = Some(codes(stream, tensor)?);
            }
            return Ok(output);
        }
        match recipe.directions {
            Directions::Rows => {
                let mut rows = tensor(Direction::Rows)?;
                self.rows.cast(stream, input, &random, &mut rows)?;
                output.sides[0] = Some(codes(stream, &rows)?);
            }
            Directions::Columns => {
                let mut columns = tensor(Direction::Columns)?;
                self.columns.columns(stream, input, &random, &mut columns)?;
                output.sides[1] = Some(codes(stream, &columns)?);
            }
            Directions::Both => {
                let mut pair = Nvfp4Pair { rows: tensor(Direction::Rows)?, columns: tensor(Direction::Columns)? };
                self.columns.both(stream, input, &random, &mut pair)?;
                output.sides = [Some(codes(stream, &pair.rows)?), Some(codes(stream, &pair.columns)?)];
            }
        }
        Ok(output)
    }
}

/// The piece of a file on the device.
pub fn upload(stream: &Stream, piece: &QuantizedPiece<'_>) -> Result<Nvfp4Tensor> {
    Ok(Nvfp4Tensor {
        data: from_bytes(stream, piece.codes, e2m1x2::from_bits)?,
        scales: from_bytes(stream, piece.scales, e4m3::from_bits)?,
        amax: Buffer::from_slice(stream, &[piece.amax])?,
        shape: piece.side.shape,
        direction: piece.side.direction,
    })
}

fn codes(stream: &Stream, tensor: &Nvfp4Tensor) -> Result<Codes> {
    Ok(Codes { data: bytes(stream, &tensor.data, e2m1x2::to_bits)?, scales: bytes(stream, &tensor.scales, e4m3::to_bits)? })
}

impl<T> fmt::Debug for Nvfp4Casts<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvfp4Casts").finish_non_exhaustive()
    }
}
