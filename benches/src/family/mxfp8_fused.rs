//! MXFP8 (E4M3) casts fused with activations, bias gradients and scale layouts.

use std::marker::PhantomData;

use anyhow::Result;
use oxtile::runtime::Buffer;
use oxtile_kernels::activation::*;
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::column_sums::{ColumnSums, ColumnSumsArgs};
use oxtile_kernels::interleave::interleaved_len;
use oxtile_kernels::mxfp8::*;
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, e4m3, ue8m0};

use super::copy::ceiling;
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "mxfp8_fused";

/// Rows and columns of the result, and buffer sets.
type Shape = (u64, u64, usize);

/// What is written.
#[derive(Clone, Copy)]
struct Wanted {
    rows: bool,
    columns: bool,
    bias_gradient: bool,
    options: u32,
}

const ROWS: Wanted = Wanted { rows: true, columns: false, bias_gradient: false, options: 0 };
const BOTH: Wanted = Wanted { columns: true, ..ROWS };
const COLUMNS: Wanted = Wanted { rows: false, ..BOTH };

/// All at a large and a small shape.
pub fn benches(size: Size) -> Vec<Bench> {
    let shapes: [Shape; 2] = size.pick([(16384, 8192, 4), (4096, 4096, 12)], [(128, 256, 2), (128, 128, 3)]);
    let of_shape = |shape| {
        let interleaved = Wanted { options: INTERLEAVED_SCALES, ..BOTH };
        let square = Wanted { options: SQUARE_BLOCKS, ..BOTH };
        let bias = Wanted { bias_gradient: true, ..BOTH };
        let columns_with_bias = Wanted { bias_gradient: true, ..COLUMNS };
        [
            bench::<Identity>(size, shape, "mxfp8_cast_fused both, interleaved", &["mxfp8_both_interleaved_compiled"], interleaved),
            bench::<Identity>(size, shape, "mxfp8_cast_fused both, square", &["mxfp8_squares_compiled"], square),
            bench::<Forward<Gelu>>(size, shape, "mxfp8_cast_fused_rows gelu", &["mxfp8_gelu_compiled"], ROWS),
            bench::<Backward<Gelu>>(size, shape, "mxfp8_cast_fused gelu backward, both", &["mxfp8_gelu_backward_compiled"], BOTH),
            bench::<Backward<Gelu>>(
                size,
                shape,
                "mxfp8_cast_fused gelu backward with bias, both",
                &["mxfp8_gelu_backward_bias_compiled"],
                bias,
            ),
            bench::<Backward<Gelu>>(
                size,
                shape,
                "mxfp8_cast_fused_columns gelu backward",
                &["mxfp8_gelu_backward_columns_compiled"],
                COLUMNS,
            ),
            bench::<Backward<Gelu>>(
                size,
                shape,
                "mxfp8_cast_fused_columns gelu backward with bias",
                &["mxfp8_gelu_backward_bias_columns_compiled"],
                columns_with_bias,
            ),
            bench::<GatedForward<Silu>>(size, shape, "mxfp8_cast_fused_rows swiglu", &["mxfp8_swiglu_compiled"], ROWS),
            bench::<GatedBackward<Silu>>(size, shape, "mxfp8_cast_fused swiglu backward, both", &["mxfp8_swiglu_backward_compiled"], BOTH),
        ]
    };
    shapes.into_iter().flat_map(of_shape).collect()
}

fn bench<O: Operation>(size: Size, shape: Shape, kernel: &'static str, peers: &'static [&'static str], wanted: Wanted) -> Bench
where
    Mxfp8CastFused<O, bf16, e4m3>: Kernel,
    Mxfp8CastFusedRows<O, bf16, e4m3>: Kernel,
    Mxfp8CastFusedColumns<O, bf16, e4m3>: Kernel,
{
    let (rows, columns, sets) = shape;
    let casts = u64::from(wanted.rows) + u64::from(wanted.columns);
    // Operands once, and for each cast a code and its part of a scale an element; partial sums are not counted.
    let operands = 2 * rows * (O::input_columns(columns) + O::gradient_columns(columns));
    let bytes = operands + casts * (rows * columns + rows * columns / BLOCK);
    Bench {
        family: FAMILY,
        kernel,
        shape: format!("{rows}x{columns} bf16"),
        dimensions: vec![rows, columns],
        bytes,
        flops: 0,
        sets,
        ceiling: ceiling(size, bytes),
        peers,
        prepare: Box::new(move |gpu| prepare::<O>(gpu, shape, wanted)),
    }
}

/// The operands and what is made of them; empty where it is not wanted.
struct Set {
    input: Buffer<bf16>,
    gradient: Buffer<bf16>,
    rows: (Buffer<e4m3>, Buffer<ue8m0>),
    columns: (Buffer<e4m3>, Buffer<ue8m0>),
    partial_sums: Buffer<f32>,
    bias_gradient: Buffer<bf16>,
}

fn set<O: Operation>(gpu: &Gpu, (rows, columns, sets): Shape, wanted: Wanted, number: usize) -> Result<Set> {
    let stream = &gpu.stream;
    let scales = |outer, blocks| if wanted.options & INTERLEAVED_SCALES != 0 { interleaved_len(outer, blocks) } else { outer * blocks };
    let cast = |is_wanted: bool, scales: u64| {
        let (data, scales) = if is_wanted { (rows * columns, scales) } else { (0, 0) };
        anyhow::Ok((Buffer::uninitialised(stream, data)?, Buffer::uninitialised(stream, scales)?))
    };
    let of_bias = |count: u64| if wanted.bias_gradient { count } else { 0 };
    Ok(Set {
        input: Buffer::from_slice(stream, &gpu.pattern.fill(number, rows * O::input_columns(columns)))?,
        gradient: Buffer::from_slice(stream, &gpu.pattern.fill(sets + number, rows * O::gradient_columns(columns)))?,
        rows: cast(wanted.rows, scales(rows, columns / BLOCK))?,
        columns: cast(wanted.columns, scales(columns, rows / BLOCK))?,
        partial_sums: Buffer::uninitialised(stream, of_bias(rows / BLOCK * columns))?,
        bias_gradient: Buffer::uninitialised(stream, of_bias(columns))?,
    })
}

fn prepare<O: Operation>(gpu: &Gpu, shape: Shape, wanted: Wanted) -> Result<Prepared>
where
    Mxfp8CastFused<O, bf16, e4m3>: Kernel,
    Mxfp8CastFusedRows<O, bf16, e4m3>: Kernel,
    Mxfp8CastFusedColumns<O, bf16, e4m3>: Kernel,
{
    let (rows, columns, sets) = shape;
    let mut sets = (0..sets).map(|number| set::<O>(gpu, shape, wanted, number)).collect::<Result<Vec<_>>>()?;
    let cast_rows = gpu.runtime.load::<Mxfp8CastFusedRows<O, bf16, e4m3>>()?;
    let cast_columns = gpu.runtime.load::<Mxfp8CastFusedColumns<O, bf16, e4m3>>()?;
    let (cast, sums) = (gpu.runtime.load::<Mxfp8CastFused<O, bf16, e4m3>>()?, gpu.runtime.load::<ColumnSums<bf16>>()?);
    let graph = Prepared::capture(gpu, || {
        sets.iter_mut().try_for_each(|set| {
            let gradient = Some(set.gradient.view()).filter(|gradient| !gradient.is_empty());
            let operands = FusedOperandsArgument { input: set.input.view(), gradient, rows, columns };
            let [by_rows, by_columns] =
                [&mut set.rows, &mut set.columns].map(|(data, scales)| CodesArgument { data: data.view_mut(), scales: scales.view_mut() });
            let (partial_sums, options, marker) = (set.partial_sums.view_mut(), wanted.options, PhantomData);
            if !wanted.columns {
                let CodesArgument { data, scales } = by_rows;
                let args = Mxfp8CastFusedRowsArgs { operands, data, scales, amax: None, skip: None, options, marker };
                return cast_rows.launch(&gpu.stream, args);
            }
            if wanted.rows {
                let options = options | copied_where_many::<O, bf16>(rows, columns);
                let (rows, columns) = (by_rows, by_columns);
                let args = Mxfp8CastFusedArgs { operands, rows, columns, partial_sums, amax: None, skip: None, options, marker };
                cast.launch(&gpu.stream, args)?;
            } else {
                let CodesArgument { data, scales } = by_columns;
                let args = Mxfp8CastFusedColumnsArgs { operands, data, scales, partial_sums, amax: None, skip: None, options, marker };
                cast_columns.launch(&gpu.stream, args)?;
            }
            if wanted.bias_gradient {
                let args = ColumnSumsArgs { matrix: set.partial_sums.view(), output: set.bias_gradient.view_mut() };
                sums.launch(&gpu.stream, args)?;
            }
            Ok(())
        })
    })?;
    Ok(Prepared::new(graph, move |stream| {
        let mut outputs = Vec::new();
        let casts = [(&sets[0].rows, "row_data", "row_scales"), (&sets[0].columns, "column_data", "column_scales")];
        for ((codes, of_blocks), data, scales) in casts.into_iter().filter(|(cast, ..)| !cast.0.is_empty()) {
            let codes = codes.to_vec(stream)?;
            outputs.push(Output { name: data, bytes: codes.iter().map(|code| code.to_bits()).collect() });
            let codes = of_blocks.to_vec(stream)?;
            outputs.push(Output { name: scales, bytes: codes.iter().map(|code| code.to_bits()).collect() });
        }
        Ok(outputs)
    }))
}
