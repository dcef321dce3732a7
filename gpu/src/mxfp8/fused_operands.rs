//! What the fused casts read.

use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;

use super::BLOCK;
use crate::activation::{Operands, Operation, check_operands};

/// The operands of an operation, and the sizes of its results, which lie side by side.
#[derive(Clone, Copy, Parameter)]
pub struct FusedOperands<T: Pod> {
    /// What the activation is, or was, applied to.
    pub input: Global<T>,
    /// The gradient of its result, in backward operations.
    pub gradient: Option<Global<T>>,
    /// Rows of the results.
    pub rows: u64,
    /// Columns of all results together: whole vectors; of two results, whole blocks.
    pub columns: u64,
}

impl<T: Pod> FusedOperands<T> {
    /// The operands alone, of results of so many columns each.
    #[inline(always)]
    pub(super) fn of_results(&self, columns: u64) -> Operands<T> {
        Operands { input: self.input, gradient: self.gradient.unwrap_or_default(), columns }
    }
}

impl<T: Pod> FusedOperandsArgument<'_, T> {
    /// Elements of the results.
    pub(super) fn elements(&self) -> u64 {
        self.rows.saturating_mul(self.columns)
    }

    /// Refuses what are no operands of `O`.
    pub(super) fn check<O: Operation>(&self) -> Result<(), LaunchError> {
        const COLUMNS: &str = "operands.columns";
        let operands = [("operands.input", Some(&self.input)), ("operands.gradient", self.gradient.as_ref())];
        check_operands::<O, T>(operands, ("operands.input", self.elements()), (COLUMNS, self.columns))?;
        if O::RESULTS > 1 { LaunchError::check_multiple(COLUMNS, BLOCK * O::RESULTS as u64, self.columns) } else { Ok(()) }
    }
}

/// Refuses an amax or a skip flag of other than one element.
pub(super) fn check_elements(amax: Option<&DeviceViewMut<'_, f32>>, skip: Option<&DeviceView<'_, f32>>) -> Result<(), LaunchError> {
    for (name, length) in [("amax", amax.map(DeviceViewMut::len)), ("skip", skip.map(DeviceView::len))] {
        if let Some(length) = length {
            LaunchError::check_length(name, 1, length)?;
        }
    }
    Ok(())
}
