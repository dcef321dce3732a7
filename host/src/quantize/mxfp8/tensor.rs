//! Matrices in MXFP8.

use oxtile_kernels::interleave::interleaved_len;
use oxtile_kernels::mxfp8::BLOCK;
use oxtile_tile::num::{Fp8, e4m3, ue8m0};

use crate::quantize::layout::{Compact, Layout, Scales};
use crate::runtime::{Buffer, Result, Stream};
use crate::tensor::shape::numel;

/// Along which dimension 32 elements share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Neighbours in a row; scales `[rows, ceil(columns / 32)]`.
    Rows,
    /// Neighbours in a column; scales `[ceil(rows / 32), columns]`.
    Columns,
}

/// A quantized matrix in device memory, its scales [`Compact`] or [`Interleaved`](crate::quantize::Interleaved).
#[derive(Debug)]
pub struct Mxfp8Tensor<Q = e4m3, L: Layout = Compact> {
    /// The codes, `[rows, columns]`.
    pub data: Buffer<Q>,
    /// The scales; how many there are, [`scale_count`] and [`interleaved_scale_count`] say.
    pub scales: L::Scales<ue8m0>,
    /// Rows and columns.
    pub shape: [u64; 2],
    /// Which elements share a scale.
    pub direction: Direction,
}

/// One matrix quantized in both directions.
#[derive(Debug)]
pub struct Mxfp8Pair<Q = e4m3, L: Layout = Compact> {
    /// Rowwise.
    pub rows: Mxfp8Tensor<Q, L>,
    /// Columnwise.
    pub columns: Mxfp8Tensor<Q, L>,
}

impl<Q: Fp8, L: Layout> Mxfp8Tensor<Q, L> {
    /// A matrix to be quantized into, uninitialised.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`] and [`numel`].
    pub fn uninitialised(stream: &Stream, shape: [u64; 2], direction: Direction) -> Result<Self> {
        let data = Buffer::uninitialised(stream, numel(&shape)?)?;
        let scales = if L::IS_INTERLEAVED { interleaved_scale_count(shape, direction) } else { scale_count(shape, direction)? };
        Ok(Self { data, scales: Scales::uninitialised(stream, scales)?, shape, direction })
    }
}

/// How many scales a matrix has in a direction.
///
/// # Errors
/// As [`numel`].
pub fn scale_count([rows, columns]: [u64; 2], direction: Direction) -> Result<u64> {
    numel(&match direction {
        Direction::Rows => [rows, columns.div_ceil(BLOCK)],
        Direction::Columns => [rows.div_ceil(BLOCK), columns],
    })
}

/// How many interleaved scales, padding included, a matrix has in a direction.
pub const fn interleaved_scale_count([rows, columns]: [u64; 2], direction: Direction) -> u64 {
    match direction {
        Direction::Rows => interleaved_len(rows, columns.div_ceil(BLOCK)),
        Direction::Columns => interleaved_len(columns, rows.div_ceil(BLOCK)),
    }
}
