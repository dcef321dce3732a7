//! The layouts of the scales of groups.

use std::fmt;

use oxtile_kernels::interleave::*;

use super::format::GroupFormat;
use super::quantized::Quantized;
use super::table::{Purpose, Record, Starts};
use crate::quantize::Direction;
use crate::quantize::layout::{Compact, Interleaved};
use crate::runtime::{Loaded, Result, Runtime, Stream};

/// Changes the layout of the scales of groups, of all members by one launch.
pub struct InterleaveGroup<F: GroupFormat> {
    rows: Loaded<F::InterleaveRows>,
    inverse_rows: Loaded<F::DeinterleaveRows>,
    columns: Loaded<F::InterleaveColumns>,
    inverse_columns: Loaded<F::DeinterleaveColumns>,
}

impl<F: GroupFormat> InterleaveGroup<F> {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self { rows: runtime.load()?, inverse_rows: runtime.load()?, columns: runtime.load()?, inverse_columns: runtime.load()? })
    }

    /// The group with interleaved scales, the padding 0; its codes stay where they are.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`](crate::Buffer::uninitialised) and [`Loaded::launch`].
    pub fn interleave(&self, stream: &Stream, group: Quantized<F, Compact>) -> Result<Quantized<F, Interleaved>> {
        let (mut output, (compact, compact_starts)) = group.with_layout(stream)?;
        let records = records::<F>(&output.shapes, output.direction, &compact_starts, &output.scale_starts);
        let (compact, interleaved) = (compact.view(), output.scales.view_mut());
        if is_transposed::<F>(output.direction) {
            let table = output.tables.of::<F::InterleaveColumns>(stream, Purpose::One, records)?;
            self.columns.launch(stream, InterleaveColumnsGroupedArgs { compact, interleaved, table: table.lend() })?;
        } else {
            let table = output.tables.of::<F::InterleaveRows>(stream, Purpose::One, records)?;
            self.rows.launch(stream, InterleaveRowsGroupedArgs { compact, interleaved, table: table.lend() })?;
        }
        Ok(output)
    }

    /// The group with compact scales again.
    ///
    /// # Errors
    /// As [`interleave`](Self::interleave).
    pub fn compact(&self, stream: &Stream, group: Quantized<F, Interleaved>) -> Result<Quantized<F, Compact>> {
        let (mut output, (interleaved, interleaved_starts)) = group.with_layout(stream)?;
        let records = records::<F>(&output.shapes, output.direction, &output.scale_starts, &interleaved_starts);
        let (interleaved, compact) = (interleaved.view(), output.scales.view_mut());
        if is_transposed::<F>(output.direction) {
            let table = output.tables.of::<F::DeinterleaveColumns>(stream, Purpose::One, records)?;
            self.inverse_columns.launch(stream, DeinterleaveColumnsGroupedArgs { interleaved, compact, table: table.lend() })?;
        } else {
            let table = output.tables.of::<F::DeinterleaveRows>(stream, Purpose::One, records)?;
            self.inverse_rows.launch(stream, DeinterleaveRowsGroupedArgs { interleaved, compact, table: table.lend() })?;
        }
        Ok(output)
    }
}

/// Whether compact scales are `[blocks, outer]`.
fn is_transposed<F: GroupFormat>(direction: Direction) -> bool {
    direction == Direction::Columns && !F::SHAPES.transposes
}

/// The kernels' records: outer indices and blocks, and where the compact and the interleaved scales start.
fn records<'a, F: GroupFormat>(
    shapes: &'a [[u64; 2]],
    direction: Direction,
    compact: &'a Starts,
    interleaved: &'a Starts,
) -> impl Iterator<Item = Record> + 'a {
    let starts = move |i: usize| [compact.of[i], interleaved.of[i], 0];
    (0..shapes.len()).map(move |i| Record { index: i as u64, shape: F::SHAPES.extents(shapes[i], direction), starts: starts(i) })
}

impl<F: GroupFormat> fmt::Debug for InterleaveGroup<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InterleaveGroup").field("rows", &self.rows).finish_non_exhaustive()
    }
}
