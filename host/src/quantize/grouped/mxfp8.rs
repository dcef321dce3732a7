//! MXFP8 of groups.

use std::fmt;

use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::magnitude::Magnitude;
use oxtile_kernels::mxfp8::*;
use oxtile_tile::num::{Fp8, e4m3};

use super::quantized::{Quantized, records};
use super::table::{Purpose, Record};
use super::tensors::{Matrices, TensorGroup};
use crate::quantize::Direction;
use crate::quantize::format::Mxfp8Format;
use crate::quantize::layout::Compact;
use crate::quantize::mxfp8::Mxfp8Number;
use crate::runtime::{Error, Loaded, Result, Runtime, Stream};

/// The casts of groups between `T` and MXFP8: one launch for all members, and one more where some need the kernel for ragged shapes.
pub struct GroupedMxfp8<T: Mxfp8Number<Q>, Q: Fp8 = e4m3> {
    cast_rows: Loaded<T::GroupCastRows>,
    cast_ragged_rows: Loaded<T::GroupCastRaggedRows>,
    cast_columns: Loaded<T::GroupCastColumns>,
    cast_ragged_columns: Loaded<T::GroupCastRaggedColumns>,
    cast_both: Loaded<T::GroupCastBoth>,
    dequantize_rows: Loaded<T::GroupDequantizeRows>,
    dequantize_ragged_rows: Loaded<T::GroupDequantizeRaggedRows>,
    dequantize_columns: Loaded<T::GroupDequantizeColumns>,
    dequantize_ragged_columns: Loaded<T::GroupDequantizeRaggedColumns>,
}

/// A group in both directions.
type Pair<Q> = [Quantized<Mxfp8Format<Q>, Compact>; 2];

impl<T: Mxfp8Number<Q>, Q: Fp8> GroupedMxfp8<T, Q> {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self {
            cast_rows: runtime.load()?,
            cast_ragged_rows: runtime.load()?,
            cast_columns: runtime.load()?,
            cast_ragged_columns: runtime.load()?,
            cast_both: runtime.load()?,
            dequantize_rows: runtime.load()?,
            dequantize_ragged_rows: runtime.load()?,
            dequantize_columns: runtime.load()?,
            dequantize_ragged_columns: runtime.load()?,
        })
    }

    /// Quantizes a group into new buffers.
    ///
    /// # Errors
    /// As [`Quantized::uninitialised`] and [`quantize_into`](Self::quantize_into).
    pub fn quantize(&self, stream: &Stream, group: &TensorGroup<'_, T>, direction: Direction) -> Result<Quantized<Mxfp8Format<Q>>> {
        let mut output = Quantized::uninitialised(stream, &group.shapes, direction, ())?;
        self.quantize_into(stream, group, &mut output)?;
        Ok(output)
    }

    /// Quantizes a group in the direction of the output. Captured in a graph after it ran once.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the output has the group's shapes; as [`Loaded::launch`].
    pub fn quantize_into(&self, stream: &Stream, group: &TensorGroup<'_, T>, output: &mut Quantized<Mxfp8Format<Q>>) -> Result<()> {
        check_shapes("GroupedMxfp8::quantize_into", &group.shapes, &output.shapes)?;
        let Quantized { data, scales, element_starts, scale_starts, direction, .. } = output;
        let (inputs, records) = (group.table.view(), || records(&group.shapes, element_starts, [scale_starts, scale_starts]));
        macro_rules! launch {
            ($kernel:ident: $ty:ident, $args:ident, $which:expr) => {{
                let table = group.tables.of::<T::$ty>(stream, Purpose::One, records().filter($which))?;
                self.$kernel.launch(stream, $args { inputs, table: table.lend(), data: data.view_mut(), scales: scales.view_mut() })
            }};
        }
        match direction {
            Direction::Rows => {
                launch!(cast_rows: GroupCastRows, Mxfp8CastRowsGroupedArgs, |member| has_whole_blocks(group, member))?;
                launch!(cast_ragged_rows: GroupCastRaggedRows, Mxfp8CastRaggedRowsGroupedArgs, |member| !has_whole_blocks(group, member))
            }
            Direction::Columns => {
                launch!(cast_columns: GroupCastColumns, Mxfp8CastColumnsGroupedArgs, |member| has_whole_vectors(group, member))?;
                launch!(cast_ragged_columns: GroupCastRaggedColumns, Mxfp8CastRaggedColumnsGroupedArgs, |member| !has_whole_vectors(group, member))
            }
        }
    }

    /// Quantizes a group in both directions into new buffers, by rows and by columns.
    ///
    /// # Errors
    /// As [`Quantized::uninitialised`] and [`quantize_both_into`](Self::quantize_both_into).
    pub fn quantize_both(&self, stream: &Stream, group: &TensorGroup<'_, T>) -> Result<Pair<Q>> {
        let by_rows = Quantized::uninitialised(stream, &group.shapes, Direction::Rows, ())?;
        let mut outputs = [by_rows, Quantized::uninitialised(stream, &group.shapes, Direction::Columns, ())?];
        self.quantize_both_into(stream, group, &mut outputs)?;
        Ok(outputs)
    }

    /// Quantizes a group in both directions, by rows and by columns. Members of whole vectors a row are read once. Captured in a graph after it
    /// ran once.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the outputs have the group's shapes and are of rows and of columns; as [`Loaded::launch`].
    pub fn quantize_both_into(&self, stream: &Stream, group: &TensorGroup<'_, T>, [by_rows, by_columns]: &mut Pair<Q>) -> Result<()> {
        const WHAT: &str = "GroupedMxfp8::quantize_both_into";
        check_shapes(WHAT, &group.shapes, &by_rows.shapes)?;
        check_shapes(WHAT, &group.shapes, &by_columns.shapes)?;
        if (by_rows.direction, by_columns.direction) != (Direction::Rows, Direction::Columns) {
            return Err(Error::Invalid { what: WHAT, why: "the first output is of rows and the second of columns: swap them".to_owned() });
        }
        let records = || records(&group.shapes, &by_rows.element_starts, [&by_rows.scale_starts, &by_columns.scale_starts]);
        let fast =
            group.tables.of::<T::GroupCastBoth>(stream, Purpose::Both, records().filter(|member| has_whole_vectors(group, member)))?;
        let ragged = || records().filter(|member| !has_whole_vectors(group, member));
        let ragged_rows = group.tables.of::<T::GroupCastRaggedRows>(stream, Purpose::Both, ragged())?;
        let ragged_columns = group.tables.of::<T::GroupCastRaggedColumns>(stream, Purpose::Both, ragged())?;
        let inputs = group.table.view();
        let args = Mxfp8CastBothGroupedArgs {
            inputs,
            table: fast.lend(),
            rows: CodesArgument { data: by_rows.data.view_mut(), scales: by_rows.scales.view_mut() },
            columns: CodesArgument { data: by_columns.data.view_mut(), scales: by_columns.scales.view_mut() },
        };
        self.cast_both.launch(stream, args)?;
        let (data, scales) = (by_rows.data.view_mut(), by_rows.scales.view_mut());
        self.cast_ragged_rows.launch(stream, Mxfp8CastRaggedRowsGroupedArgs { inputs, table: ragged_rows.lend(), data, scales })?;
        let (data, scales) = (by_columns.data.view_mut(), by_columns.scales.view_mut());
        self.cast_ragged_columns.launch(stream, Mxfp8CastRaggedColumnsGroupedArgs { inputs, table: ragged_columns.lend(), data, scales })
    }

    /// A group back in `T`, rounded to nearest even, in one new buffer.
    ///
    /// # Errors
    /// As [`Matrices::uninitialised`] and [`dequantize_into`](Self::dequantize_into).
    pub fn dequantize(&self, stream: &Stream, group: &Quantized<Mxfp8Format<Q>>) -> Result<Matrices<T>> {
        let mut output = Matrices::uninitialised(stream, &group.shapes)?;
        self.dequantize_into(stream, group, &mut output)?;
        Ok(output)
    }

    /// A group back in `T`, rounded to nearest even. Captured in a graph after it ran once.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the output has the group's shapes; as [`Loaded::launch`].
    pub fn dequantize_into(&self, stream: &Stream, group: &Quantized<Mxfp8Format<Q>>, output: &mut Matrices<T>) -> Result<()> {
        check_shapes("GroupedMxfp8::dequantize_into", &group.shapes, output.shapes())?;
        let (data, scales) = (group.data.view(), group.scales.view());
        let (blocks, vector) =
            (|member: &Record| member.shape[1].is_multiple_of(BLOCK), |member: &Record| is_vectors::<T>(member.shape[1]));
        macro_rules! launch {
            ($kernel:ident: $ty:ident, $args:ident, $which:expr) => {{
                let table = group.tables.of::<T::$ty>(stream, Purpose::One, group.records().filter($which))?;
                self.$kernel.launch(stream, $args { data, scales, table: table.lend(), output: output.values.view_mut() })
            }};
        }
        match group.direction {
            Direction::Rows => {
                launch!(dequantize_rows: GroupDequantizeRows, Mxfp8DequantizeRowsGroupedArgs, |member| blocks(member))?;
                launch!(dequantize_ragged_rows: GroupDequantizeRaggedRows, Mxfp8DequantizeRaggedRowsGroupedArgs, |member| !blocks(member))
            }
            Direction::Columns => {
                launch!(dequantize_columns: GroupDequantizeColumns, Mxfp8DequantizeColumnsGroupedArgs, |member| vector(member))?;
                launch!(dequantize_ragged_columns: GroupDequantizeRaggedColumns, Mxfp8DequantizeRaggedColumnsGroupedArgs, |member| !vector(member))
            }
        }
    }
}

/// What the fast rowwise kernel needs of a member.
fn has_whole_blocks<T: Magnitude>(group: &TensorGroup<'_, T>, member: &Record) -> bool {
    member.shape[1].is_multiple_of(BLOCK) && is_aligned(group, member)
}

/// What the fast columnwise kernels need of a member.
fn has_whole_vectors<T: Magnitude>(group: &TensorGroup<'_, T>, member: &Record) -> bool {
    is_vectors::<T>(member.shape[1]) && is_aligned(group, member)
}

fn is_vectors<T>(columns: u64) -> bool {
    columns.is_multiple_of(16 / size_of::<T>() as u64)
}

fn is_aligned<T: Magnitude>(group: &TensorGroup<'_, T>, member: &Record) -> bool {
    group.views[member.index as usize].address().is_multiple_of(16)
}

/// Fails unless the outputs of a call have the shapes of its inputs.
pub(super) fn check_shapes(what: &'static str, inputs: &[[u64; 2]], outputs: &[[u64; 2]]) -> Result<()> {
    if inputs.len() != outputs.len() {
        return Err(Error::Length { what, expected: inputs.len() as u64, found: outputs.len() as u64 });
    }
    match inputs.iter().zip(outputs).position(|(input, output)| input != output) {
        None => Ok(()),
        Some(i) => {
            let why =
                format!("member {i}: the output is {:?}, the input {:?}: make the output of the group's shapes", outputs[i], inputs[i]);
            Err(Error::Invalid { what, why })
        }
    }
}

impl<T: Mxfp8Number<Q>, Q: Fp8> fmt::Debug for GroupedMxfp8<T, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupedMxfp8").field("cast_rows", &self.cast_rows).finish_non_exhaustive()
    }
}
