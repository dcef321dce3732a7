//! NVFP4 with given amaxes: the cast along rows, along columns and along both in one pass, after the Hadamard transform, with
//! stochastic rounding, and back.

use std::marker::PhantomData;

use anyhow::Result;
use oxtile::runtime::Buffer;
use oxtile_kernels::amax::{Amax, AmaxArgs};
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::interleave::interleaved_len;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_kernels::nvfp4::*;
use oxtile_tile::num::{bf16, e2m1x2, e4m3};

use super::copy::ceiling;
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "nvfp4";

/// Rows, columns and buffer sets.
type Shape = (u64, u64, usize);

/// What is measured: its name, how many casts it writes or reads beside the wide tensor, the peer, and what captures it.
type Measured = (&'static str, u64, &'static [&'static str], fn(&Gpu, Shape) -> Result<Prepared>);

const MEASURED: [Measured; 14] = [
    ("nvfp4_cast_rows", 1, &["nvfp4_cast_compiled"], prepare_cast),
    ("nvfp4_cast_rows_stochastic stochastic8", 1, &[], prepare_stochastic),
    ("nvfp4_cast_rows_interleaved", 1, &["nvfp4_interleaved_compiled"], prepare_interleaved),
    ("nvfp4_cast_rows_4over6", 1, &["nvfp4_4over6_compiled"], prepare_4over6),
    ("nvfp4_cast_columns_4over6", 1, &["nvfp4_columns_4over6_compiled"], prepare_columns_4over6),
    ("nvfp4_cast_scaled_rows", 1, &["nvfp4_scaled_rows_compiled"], prepare_scaled_rows),
    ("nvfp4_cast_columns", 1, &["nvfp4_cast_columns_compiled"], prepare_columns::<false>),
    ("nvfp4_cast_columns hadamard", 1, &["nvfp4_cast_hadamard_compiled"], prepare_columns::<true>),
    ("nvfp4_hadamard_amax", 0, &["nvfp4_hadamard_amax_compiled"], prepare_hadamard_amax),
    ("nvfp4_cast_both", 2, &["nvfp4_cast_both_compiled"], prepare_both),
    ("nvfp4_cast_squares", 2, &["nvfp4_squares_compiled"], prepare_squares),
    ("nvfp4_dequantize_rows", 1, &["nvfp4_dequantize_compiled"], prepare_dequantize),
    ("nvfp4_dequantize_columns", 1, &["nvfp4_dequantize_columns_compiled"], prepare_dequantize_columns),
    ("nvfp4_dequantize_scaled_rows", 1, &["nvfp4_dequantize_scaled_rows_compiled"], prepare_dequantize_scaled_rows),
];

/// All at a large and a small shape.
pub fn benches(size: Size) -> Vec<Bench> {
    let shapes: [Shape; 2] = size.pick([(16384, 8192, 4), (4096, 4096, 12)], [(64, 256, 2), (16, 96, 3)]);
    shapes.into_iter().flat_map(|shape| MEASURED.map(|measured| bench(size, shape, measured))).collect()
}

fn bench(size: Size, shape: Shape, (kernel, casts, peers, prepare): Measured) -> Bench {
    let (rows, columns, sets) = shape;
    let elements = rows * columns;
    // A bf16 an element, and for each cast half a byte of code and its part of a scale.
    let bytes = 2 * elements + casts * (elements / 2 + elements / BLOCK);
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
        prepare: Box::new(move |gpu| prepare(gpu, shape)),
    }
}

/// A tensor, its amax and its cast.
struct Tensor {
    wide: Buffer<bf16>,
    amax: Buffer<f32>,
    data: Buffer<e2m1x2>,
    scales: Buffer<e4m3>,
}

/// Tensors of the pattern with their amaxes, casts not yet written.
fn tensors(gpu: &Gpu, (rows, columns, sets): Shape) -> Result<Vec<Tensor>> {
    let (stream, elements) = (&gpu.stream, rows * columns);
    let kernel = gpu.runtime.load::<Amax<bf16>>()?;
    let tensor = |set| {
        let wide = Buffer::from_slice(stream, &gpu.pattern.fill(set, elements))?;
        let mut amax = Buffer::zeros(stream, 1)?;
        kernel.launch(stream, AmaxArgs { input: wide.view(), output: amax.view_mut() })?;
        let (data, scales) = (Buffer::uninitialised(stream, elements / 2)?, Buffer::uninitialised(stream, elements / BLOCK)?);
        Ok(Tensor { wide, amax, data, scales })
    };
    (0..sets).map(tensor).collect()
}

fn cast_all(gpu: &Gpu, tensors: &mut [Tensor]) -> oxtile::runtime::Result<()> {
    let kernel = gpu.runtime.load::<Nvfp4CastRows<bf16>>()?;
    tensors.iter_mut().try_for_each(|Tensor { wide, amax, data, scales }| {
        let args = Nvfp4CastRowsArgs { input: wide.view(), amax: amax.view(), data: data.view_mut(), scales: scales.view_mut() };
        kernel.launch(&gpu.stream, args)
    })
}

/// The codes and scales of a cast.
fn outputs(
    names: [&'static str; 2],
    data: &Buffer<e2m1x2>,
    scales: &Buffer<e4m3>,
    stream: &oxtile::runtime::Stream,
) -> Result<[Output; 2]> {
    let (data, scales) = (data.to_vec(stream)?, scales.to_vec(stream)?);
    Ok([
        Output { name: names[0], bytes: data.iter().map(|pair| pair.to_bits()).collect() },
        Output { name: names[1], bytes: scales.iter().map(|code| code.to_bits()).collect() },
    ])
}

fn prepare_stochastic(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let kernel = gpu.runtime.load::<Nvfp4CastRowsStochastic<bf16, Stochastic8>>()?;
    let offset = Buffer::from_slice(&gpu.stream, &[7_u64])?;
    prepare_each(gpu, tensors(gpu, shape)?, |Tensor { wide, amax, data, scales }| {
        let (input, amax, data, scales) = (wide.view(), amax.view(), data.view_mut(), scales.view_mut());
        let random = RandomArgument { seed: 5, offset: Some(offset.view()) };
        kernel.launch(&gpu.stream, Nvfp4CastRowsStochasticArgs { input, amax, data, scales, random, marker: PhantomData })
    })
}

/// The cast of each tensor by `launch`, captured.
fn prepare_each(
    gpu: &Gpu,
    mut tensors: Vec<Tensor>,
    mut launch: impl FnMut(&mut Tensor) -> oxtile::runtime::Result<()>,
) -> Result<Prepared> {
    let graph = Prepared::capture(gpu, || tensors.iter_mut().try_for_each(&mut launch))?;
    Ok(Prepared::new(graph, move |stream| Ok(outputs(["data", "scales"], &tensors[0].data, &tensors[0].scales, stream)?.into())))
}

fn prepare_interleaved(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let (rows, columns, _) = shape;
    let mut tensors = tensors(gpu, shape)?;
    for tensor in &mut tensors {
        tensor.scales = Buffer::uninitialised(&gpu.stream, interleaved_len(rows, columns / BLOCK))?;
    }
    let kernel = gpu.runtime.load::<Nvfp4CastRowsInterleaved<bf16>>()?;
    prepare_each(gpu, tensors, |Tensor { wide, amax, data, scales }| {
        let input = MatrixArgument::new(wide.view(), [rows, columns]);
        let (amax, data, scales) = (amax.view(), data.view_mut(), scales.view_mut());
        kernel.launch(&gpu.stream, Nvfp4CastRowsInterleavedArgs { input, amax, data, scales })
    })
}

fn prepare_4over6(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let kernel = gpu.runtime.load::<Nvfp4CastRows4over6<bf16, FourOverSix>>()?;
    prepare_each(gpu, tensors(gpu, shape)?, |Tensor { wide, amax, data, scales }| {
        let (input, amax, data, scales) = (wide.view(), amax.view(), data.view_mut(), scales.view_mut());
        kernel.launch(&gpu.stream, Nvfp4CastRows4over6Args { input, amax, data, scales, marker: PhantomData })
    })
}

fn prepare_columns_4over6(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let (rows, columns, _) = shape;
    let kernel = gpu.runtime.load::<Nvfp4CastColumns4over6<bf16, FourOverSix>>()?;
    prepare_each(gpu, tensors(gpu, shape)?, |Tensor { wide, amax, data, scales }| {
        let input = MatrixArgument::new(wide.view(), [rows, columns]);
        let (amax, data, scales) = (amax.view(), data.view_mut(), scales.view_mut());
        kernel.launch(&gpu.stream, Nvfp4CastColumns4over6Args { input, amax, data, scales, marker: PhantomData })
    })
}

/// The amax of each tensor becomes one of its rows.
fn scale_rows(gpu: &Gpu, (rows, columns, _): Shape, tensor: &mut Tensor) -> oxtile::runtime::Result<()> {
    let kernel = gpu.runtime.load::<Nvfp4CastScaledRows<bf16, ToSix>>()?;
    tensor.amax = Buffer::uninitialised(&gpu.stream, rows)?;
    let Tensor { wide, amax, data, scales } = tensor;
    let (input, amaxes, data, scales) = (wide.view(), amax.view_mut(), data.view_mut(), scales.view_mut());
    kernel.launch(&gpu.stream, Nvfp4CastScaledRowsArgs { input, amaxes, data, scales, columns, marker: PhantomData })
}

fn prepare_scaled_rows(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let (rows, columns, _) = shape;
    let mut tensors = tensors(gpu, shape)?;
    for tensor in &mut tensors {
        tensor.amax = Buffer::uninitialised(&gpu.stream, rows)?;
    }
    let kernel = gpu.runtime.load::<Nvfp4CastScaledRows<bf16, ToSix>>()?;
    prepare_each(gpu, tensors, |Tensor { wide, amax, data, scales }| {
        let (input, amaxes, data, scales) = (wide.view(), amax.view_mut(), data.view_mut(), scales.view_mut());
        kernel.launch(&gpu.stream, Nvfp4CastScaledRowsArgs { input, amaxes, data, scales, columns, marker: PhantomData })
    })
}

fn prepare_dequantize_scaled_rows(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let (rows, columns, _) = shape;
    let mut tensors = tensors(gpu, shape)?;
    tensors.iter_mut().try_for_each(|tensor| scale_rows(gpu, shape, tensor))?;
    let kernel = gpu.runtime.load::<Nvfp4DequantizeScaledRows<bf16>>()?;
    let factor = 1.0 / (6.0 * ToSix::LARGEST_SCALE);
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|Tensor { wide, amax, data, scales }| {
            let (data, scales, amaxes, output) = (data.view(), scales.view(), amax.view(), wide.view_mut());
            kernel.launch(&gpu.stream, Nvfp4DequantizeScaledRowsArgs { data, scales, amaxes, output, factor, rows, columns })
        })
    })?;
    Ok(Prepared::new(graph, move |stream| wide_output(&tensors[0].wide, stream)))
}

fn prepare_squares(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let (rows, columns, _) = shape;
    let (mut by_rows, mut by_columns) = (tensors(gpu, shape)?, tensors(gpu, shape)?);
    let kernel = gpu.runtime.load::<Nvfp4CastSquares<bf16>>()?;
    let graph = Prepared::capture(gpu, || {
        by_rows.iter_mut().zip(&mut by_columns).try_for_each(|(row, column)| {
            let args = Nvfp4CastSquaresArgs {
                input: MatrixArgument::new(row.wide.view(), [rows, columns]),
                amax: row.amax.view(),
                rows: CodesArgument { data: row.data.view_mut(), scales: row.scales.view_mut() },
                columns: CodesArgument { data: column.data.view_mut(), scales: column.scales.view_mut() },
            };
            kernel.launch(&gpu.stream, args)
        })
    })?;
    Ok(Prepared::new(graph, move |stream| {
        let rows = outputs(["row_data", "row_scales"], &by_rows[0].data, &by_rows[0].scales, stream)?;
        let columns = outputs(["column_data", "column_scales"], &by_columns[0].data, &by_columns[0].scales, stream)?;
        Ok(rows.into_iter().chain(columns).collect())
    }))
}

/// The values that a dequantization wrote.
fn wide_output(wide: &Buffer<bf16>, stream: &oxtile::runtime::Stream) -> Result<Vec<Output>> {
    let wide: Vec<half::bf16> = wide.to_vec_as(stream)?;
    Ok(vec![Output { name: "wide", bytes: wide.iter().flat_map(|value| value.to_le_bytes()).collect() }])
}

fn hadamard_amaxes(gpu: &Gpu, (rows, columns, _): Shape, tensors: &mut [Tensor], before: &mut Buffer<f32>) -> oxtile::runtime::Result<()> {
    let kernel = gpu.runtime.load::<Nvfp4HadamardAmax>()?;
    tensors.iter_mut().try_for_each(|Tensor { wide, amax, .. }| {
        let input = MatrixArgument::new(wide.view(), [rows, columns]);
        kernel.launch(&gpu.stream, Nvfp4HadamardAmaxArgs { input, amax: before.view_mut(), transformed_amax: amax.view_mut() })
    })
}

fn prepare_hadamard_amax(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let (mut tensors, mut before) = (tensors(gpu, shape)?, Buffer::zeros(&gpu.stream, 1)?);
    // The kernel raises it.
    tensors.iter_mut().try_for_each(|tensor| tensor.amax.fill_zero(&gpu.stream))?;
    let graph = Prepared::capture(gpu, || hadamard_amaxes(gpu, shape, &mut tensors, &mut before))?;
    Ok(Prepared::new(graph, move |stream| {
        let amax = tensors[0].amax.to_vec(stream)?;
        Ok(vec![Output { name: "amax", bytes: amax.iter().flat_map(|value| value.to_le_bytes()).collect() }])
    }))
}

fn columns_all<const HADAMARD: bool>(gpu: &Gpu, (rows, columns, _): Shape, tensors: &mut [Tensor]) -> oxtile::runtime::Result<()>
where
    Nvfp4CastColumns<bf16, Nearest, HADAMARD>: oxtile_tile::launch::Kernel,
{
    let kernel = gpu.runtime.load::<Nvfp4CastColumns<bf16, Nearest, HADAMARD>>()?;
    tensors.iter_mut().try_for_each(|Tensor { wide, amax, data, scales }| {
        let input = MatrixArgument::new(wide.view(), [rows, columns]);
        let (amax, data, scales) = (amax.view(), data.view_mut(), scales.view_mut());
        kernel.launch(&gpu.stream, Nvfp4CastColumnsArgs { input, amax, data, scales, random: RandomArgument::NONE, marker: PhantomData })
    })
}

fn prepare_columns<const HADAMARD: bool>(gpu: &Gpu, shape: Shape) -> Result<Prepared>
where
    Nvfp4CastColumns<bf16, Nearest, HADAMARD>: oxtile_tile::launch::Kernel,
{
    let mut tensors = tensors(gpu, shape)?;
    if HADAMARD {
        let mut before = Buffer::zeros(&gpu.stream, 1)?;
        tensors.iter_mut().try_for_each(|tensor| tensor.amax.fill_zero(&gpu.stream))?;
        hadamard_amaxes(gpu, shape, &mut tensors, &mut before)?;
    }
    let graph = Prepared::capture(gpu, || columns_all::<HADAMARD>(gpu, shape, &mut tensors))?;
    Ok(Prepared::new(graph, move |stream| Ok(outputs(["data", "scales"], &tensors[0].data, &tensors[0].scales, stream)?.into())))
}

fn prepare_both(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let (rows, columns, _) = shape;
    let (mut by_rows, mut by_columns) = (tensors(gpu, shape)?, tensors(gpu, (rows, columns, shape.2))?);
    let kernel = gpu.runtime.load::<Nvfp4CastBoth<bf16, Nearest, false>>()?;
    let graph = Prepared::capture(gpu, || {
        by_rows.iter_mut().zip(&mut by_columns).try_for_each(|(row, column)| {
            let args = Nvfp4CastBothArgs {
                input: MatrixArgument::new(row.wide.view(), [rows, columns]),
                row_amax: row.amax.view(),
                column_amax: row.amax.view(),
                rows: CodesArgument { data: row.data.view_mut(), scales: row.scales.view_mut() },
                columns: CodesArgument { data: column.data.view_mut(), scales: column.scales.view_mut() },
                random: RandomArgument::NONE,
                marker: PhantomData,
            };
            kernel.launch(&gpu.stream, args)
        })
    })?;
    Ok(Prepared::new(graph, move |stream| {
        let rows = outputs(["row_data", "row_scales"], &by_rows[0].data, &by_rows[0].scales, stream)?;
        let columns = outputs(["column_data", "column_scales"], &by_columns[0].data, &by_columns[0].scales, stream)?;
        Ok(rows.into_iter().chain(columns).collect())
    }))
}

fn prepare_dequantize_columns(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape)?;
    columns_all::<false>(gpu, shape, &mut tensors)?;
    let kernel = gpu.runtime.load::<Nvfp4DequantizeColumns<bf16>>()?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|Tensor { wide, amax, data, scales }| {
            let (data, scales, amax, output) = (data.view(), scales.view(), amax.view(), wide.view_mut());
            let (rows, columns, _) = shape;
            kernel.launch(&gpu.stream, Nvfp4DequantizeColumnsArgs { data, scales, amax, output, rows, columns })
        })
    })?;
    Ok(Prepared::new(graph, move |stream| wide_output(&tensors[0].wide, stream)))
}

fn prepare_cast(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape)?;
    let graph = Prepared::capture(gpu, || cast_all(gpu, &mut tensors))?;
    Ok(Prepared::new(graph, move |stream| Ok(outputs(["data", "scales"], &tensors[0].data, &tensors[0].scales, stream)?.into())))
}

fn prepare_dequantize(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape)?;
    cast_all(gpu, &mut tensors)?;
    let kernel = gpu.runtime.load::<Nvfp4DequantizeRows<bf16>>()?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|Tensor { wide, amax, data, scales }| {
            let args = Nvfp4DequantizeRowsArgs { data: data.view(), scales: scales.view(), amax: amax.view(), output: wide.view_mut() };
            kernel.launch(&gpu.stream, args)
        })
    })?;
    Ok(Prepared::new(graph, move |stream| wide_output(&tensors[0].wide, stream)))
}
