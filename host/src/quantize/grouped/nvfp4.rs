//! NVFP4 of groups.

use std::fmt;

use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::magnitude::Magnitude;
use oxtile_kernels::nvfp4::*;

use super::mxfp8::check_shapes;
use super::quantized::Quantized;
use super::table::Purpose;
use super::tensors::{Matrices, TensorGroup};
use crate::quantize::format::Nvfp4Format;
use crate::quantize::nvfp4::Nvfp4Number;
use crate::quantize::{Direction, GlobalAmax};
use crate::runtime::{Error, Loaded, Result, Runtime, Stream};

/// The casts of groups between `T` and NVFP4, each one launch for all members.
pub struct GroupedNvfp4<T: Nvfp4Number> {
    cast_rows: Loaded<T::GroupCastRows>,
    cast_columns: Loaded<T::GroupCastColumns>,
    cast_both: Loaded<T::GroupCastBoth>,
    dequantize_rows: Loaded<T::GroupDequantizeRows>,
    dequantize_columns: Loaded<T::GroupDequantizeColumns>,
}

impl<T: Nvfp4Number> GroupedNvfp4<T> {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self {
            cast_rows: runtime.load()?,
            cast_columns: runtime.load()?,
            cast_both: runtime.load()?,
            dequantize_rows: runtime.load()?,
            dequantize_columns: runtime.load()?,
        })
    }

    /// Quantizes a group, or this rank's parts of one, into new buffers: the second phase.
    ///
    /// # Errors
    /// As [`Quantized::uninitialised`] and [`quantize_into`](Self::quantize_into).
    pub fn quantize(
        &self,
        stream: &Stream,
        group: &TensorGroup<'_, T>,
        direction: Direction,
        amax: &GlobalAmax,
    ) -> Result<Quantized<Nvfp4Format>> {
        let mut output = Quantized::uninitialised(stream, &group.shapes, direction, amax.clone())?;
        self.quantize_into(stream, group, &mut output)?;
        Ok(output)
    }

    /// Quantizes a group in the direction of the output, with the amaxes that are in it. Captured in a graph after it ran once.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the output has the group's shapes and each member starts at a multiple of 16 bytes;
    /// [`Error::Length`] unless there is an amax for each; as [`Loaded::launch`].
    pub fn quantize_into(&self, stream: &Stream, group: &TensorGroup<'_, T>, output: &mut Quantized<Nvfp4Format>) -> Result<()> {
        check("GroupedNvfp4::quantize_into", group, output)?;
        let records = output.records();
        let inputs = group.table.view();
        macro_rules! launch {
            ($kernel:ident: $ty:ident, $args:ident) => {{
                let table = group.tables.of::<T::$ty>(stream, Purpose::One, records)?;
                let Quantized { data, scales, amax, .. } = output;
                let (amaxes, data, scales) = (amax.slots().view(), data.view_mut(), scales.view_mut());
                self.$kernel.launch(stream, $args { inputs, table: table.lend(), amaxes, data, scales })
            }};
        }
        match output.direction {
            Direction::Rows => launch!(cast_rows: GroupCastRows, Nvfp4CastRowsGroupedArgs),
            Direction::Columns => launch!(cast_columns: GroupCastColumns, Nvfp4CastColumnsGroupedArgs),
        }
    }

    /// Quantizes a group in both directions into new buffers, by rows and by columns, by one pass over it.
    ///
    /// # Errors
    /// As [`Quantized::uninitialised`] and [`quantize_both_into`](Self::quantize_both_into).
    pub fn quantize_both(&self, stream: &Stream, group: &TensorGroup<'_, T>, amax: &GlobalAmax) -> Result<[Quantized<Nvfp4Format>; 2]> {
        let by_rows = Quantized::uninitialised(stream, &group.shapes, Direction::Rows, amax.clone())?;
        let mut outputs = [by_rows, Quantized::uninitialised(stream, &group.shapes, Direction::Columns, amax.clone())?];
        self.quantize_both_into(stream, group, &mut outputs)?;
        Ok(outputs)
    }

    /// Quantizes a group in both directions, by rows and by columns, with the amaxes of the first. Captured in a graph after it ran once.
    ///
    /// # Errors
    /// As [`quantize_into`](Self::quantize_into); [`Error::Invalid`] unless the outputs are of rows and of columns.
    pub fn quantize_both_into(
        &self,
        stream: &Stream,
        group: &TensorGroup<'_, T>,
        [by_rows, by_columns]: &mut [Quantized<Nvfp4Format>; 2],
    ) -> Result<()> {
        const WHAT: &str = "GroupedNvfp4::quantize_both_into";
        check(WHAT, group, by_rows)?;
        check(WHAT, group, by_columns)?;
        if (by_rows.direction, by_columns.direction) != (Direction::Rows, Direction::Columns) {
            return Err(Error::Invalid { what: WHAT, why: "the first output is of rows and the second of columns: swap them".to_owned() });
        }
        by_columns.amax = by_rows.amax.clone();
        let table = group.tables.of::<T::GroupCastBoth>(stream, Purpose::One, by_rows.records())?;
        let args = Nvfp4CastBothGroupedArgs {
            inputs: group.table.view(),
            table: table.lend(),
            amaxes: by_rows.amax.slots().view(),
            rows: CodesArgument { data: by_rows.data.view_mut(), scales: by_rows.scales.view_mut() },
            columns: CodesArgument { data: by_columns.data.view_mut(), scales: by_columns.scales.view_mut() },
        };
        self.cast_both.launch(stream, args)
    }

    /// A group back in `T`, rounded to nearest even, in one new buffer.
    ///
    /// # Errors
    /// As [`Matrices::uninitialised`] and [`dequantize_into`](Self::dequantize_into).
    pub fn dequantize(&self, stream: &Stream, group: &Quantized<Nvfp4Format>) -> Result<Matrices<T>> {
        let mut output = Matrices::uninitialised(stream, &group.shapes)?;
        self.dequantize_into(stream, group, &mut output)?;
        Ok(output)
    }

    /// A group back in `T`, rounded to nearest even. Captured in a graph after it ran once.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the output has the group's shapes; [`Error::Length`] unless there is an amax for each member; as
    /// [`Loaded::launch`].
    pub fn dequantize_into(&self, stream: &Stream, group: &Quantized<Nvfp4Format>, output: &mut Matrices<T>) -> Result<()> {
        const WHAT: &str = "GroupedNvfp4::dequantize_into";
        check_shapes(WHAT, &group.shapes, output.shapes())?;
        group.amax.check(WHAT, group.len() as u64)?;
        let (data, scales, amaxes) = (group.data.view(), group.scales.view(), group.amax.slots().view());
        macro_rules! launch {
            ($kernel:ident: $ty:ident, $args:ident) => {{
                let table = group.tables.of::<T::$ty>(stream, Purpose::One, group.records())?;
                self.$kernel.launch(stream, $args { data, scales, amaxes, table: table.lend(), output: output.values.view_mut() })
            }};
        }
        match group.direction {
            Direction::Rows => launch!(dequantize_rows: GroupDequantizeRows, Nvfp4DequantizeRowsGroupedArgs),
            Direction::Columns => launch!(dequantize_columns: GroupDequantizeColumns, Nvfp4DequantizeColumnsGroupedArgs),
        }
    }
}

fn check<T: Magnitude>(what: &'static str, group: &TensorGroup<'_, T>, output: &Quantized<Nvfp4Format>) -> Result<()> {
    check_shapes(what, &group.shapes, &output.shapes)?;
    output.amax.check(what, group.len() as u64)?;
    match group.views.iter().position(|view| !view.is_empty() && !view.address().is_multiple_of(16)) {
        None => Ok(()),
        Some(i) => Err(Error::Invalid { what, why: format!("member {i} does not start at a multiple of 16 bytes: copy it") }),
    }
}

impl<T: Nvfp4Number> fmt::Debug for GroupedNvfp4<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupedNvfp4").field("cast_rows", &self.cast_rows).finish_non_exhaustive()
    }
}
