//! A matrix and its sizes, which a kernel takes as one parameter.

use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;

/// A matrix, row by row without gaps.
#[derive(Clone, Copy, Parameter)]
pub struct Matrix<T: Pod> {
    /// The elements, `[rows, columns]`.
    pub values: Global<T>,
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub columns: u64,
}

impl<'a, T: Pod> MatrixArgument<'a, T> {
    /// The matrix `[rows, columns]` of these elements.
    pub const fn new(values: DeviceView<'a, T>, [rows, columns]: [u64; 2]) -> Self {
        Self { values, rows, columns }
    }

    /// Refuses the parameter `input` unless it has as many elements as its sizes say.
    pub(crate) fn check(&self) -> Result<(), LaunchError> {
        LaunchError::check_length("input.values", self.rows.saturating_mul(self.columns), self.values.len())
    }
}
