//! MXFP8 (E4M3): the cast along rows, along columns and along both in one pass, and back.

use anyhow::Result;
use oxtile::runtime::{Buffer, Graph};
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::interleave::interleaved_len;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_kernels::mxfp8::*;
use oxtile_tile::num::{bf16, e4m3, ue8m0};

use super::copy::ceiling;
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "mxfp8";

/// Rows, columns and buffer sets.
type Shape = (u64, u64, usize);

/// What is measured: its name, how many casts it writes or reads beside the wide tensor, the peer, and what captures it.
type Measured = (&'static str, u64, &'static [&'static str], fn(&Gpu, Shape) -> Result<Prepared>);

const MEASURED: [Measured; 6] = [
    ("mxfp8_cast_rows e4m3", 1, &["mxfp8_cast_compiled"], prepare_cast_rows),
    ("mxfp8_cast_rows_interleaved e4m3", 1, &["mxfp8_interleaved_compiled"], prepare_cast_rows_interleaved),
    ("mxfp8_cast_columns e4m3", 1, &["mxfp8_cast_columns_compiled"], prepare_cast_columns),
    ("mxfp8_cast_both e4m3", 2, &["mxfp8_cast_both_compiled"], prepare_cast_both),
    ("mxfp8_dequantize_rows e4m3", 1, &["mxfp8_dequantize_compiled"], prepare_dequantize_rows),
    ("mxfp8_dequantize_columns e4m3", 1, &["mxfp8_dequantize_columns_compiled"], prepare_dequantize_columns),
];

/// All at a large and a small shape.
pub fn benches(size: Size) -> Vec<Bench> {
    let shapes: [Shape; 2] = size.pick([(16384, 8192, 4), (4096, 4096, 12)], [(64, 256, 2), (32, 96, 3)]);
    shapes.into_iter().flat_map(|shape| MEASURED.map(|measured| bench(size, shape, measured))).collect()
}

fn bench(size: Size, shape: Shape, (kernel, casts, peers, prepare): Measured) -> Bench {
    let (rows, columns, sets) = shape;
    let elements = rows * columns;
    // A bf16 an element, and for each cast a code and its part of a scale.
    let bytes = 2 * elements + casts * (elements + elements / BLOCK);
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

/// A cast in one direction: as many scales in either, since both dimensions are whole blocks.
struct Cast {
    data: Buffer<e4m3>,
    scales: Buffer<ue8m0>,
}

/// A tensor and room for its casts.
struct Tensor {
    wide: Buffer<bf16>,
    casts: Vec<Cast>,
    columns: u64,
}

/// Tensors of the pattern, casts not yet written.
fn tensors(gpu: &Gpu, (rows, columns, sets): Shape, casts: usize) -> Result<Vec<Tensor>> {
    let (stream, elements) = (&gpu.stream, rows * columns);
    let cast = |_| {
        let (data, scales) = (Buffer::uninitialised(stream, elements)?, Buffer::uninitialised(stream, elements / BLOCK)?);
        Ok(Cast { data, scales })
    };
    let tensor = |set| {
        let wide = Buffer::from_slice(stream, &gpu.pattern.fill(set, elements))?;
        Ok(Tensor { wide, casts: (0..casts).map(cast).collect::<Result<_>>()?, columns })
    };
    (0..sets).map(tensor).collect()
}

fn cast_rows(gpu: &Gpu, tensors: &mut [Tensor]) -> oxtile::runtime::Result<()> {
    let kernel = gpu.runtime.load::<Mxfp8CastRows<bf16, e4m3>>()?;
    tensors.iter_mut().try_for_each(|Tensor { wide, casts, .. }| {
        let Cast { data, scales } = &mut casts[0];
        kernel.launch(&gpu.stream, Mxfp8CastRowsArgs { input: wide.view(), data: data.view_mut(), scales: scales.view_mut() })
    })
}

fn cast_columns(gpu: &Gpu, tensors: &mut [Tensor]) -> oxtile::runtime::Result<()> {
    let kernel = gpu.runtime.load::<Mxfp8CastColumns<bf16, e4m3>>()?;
    tensors.iter_mut().try_for_each(|Tensor { wide, casts, columns }| {
        let Cast { data, scales } = &mut casts[0];
        let (data, scales) = (data.view_mut(), scales.view_mut());
        kernel.launch(&gpu.stream, Mxfp8CastColumnsArgs { input: wide.view(), data, scales, columns: *columns })
    })
}

fn cast_both(gpu: &Gpu, tensors: &mut [Tensor]) -> oxtile::runtime::Result<()> {
    let kernel = gpu.runtime.load::<Mxfp8CastBoth<bf16, e4m3>>()?;
    tensors.iter_mut().try_for_each(|Tensor { wide, casts, columns }| {
        let [by_rows, by_columns] = casts.as_mut_slice() else { unreachable!("made with two casts") };
        let args = Mxfp8CastBothArgs {
            input: MatrixArgument::new(wide.view(), [wide.len() / *columns, *columns]),
            rows: CodesArgument { data: by_rows.data.view_mut(), scales: by_rows.scales.view_mut() },
            columns: CodesArgument { data: by_columns.data.view_mut(), scales: by_columns.scales.view_mut() },
        };
        kernel.launch(&gpu.stream, args)
    })
}

fn prepare_cast_rows(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape, 1)?;
    let graph = Prepared::capture(gpu, || cast_rows(gpu, &mut tensors))?;
    Ok(cast_outputs(graph, tensors, &[["data", "scales"]]))
}

fn prepare_cast_rows_interleaved(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let (mut tensors, (rows, columns, _)) = (tensors(gpu, shape, 1)?, shape);
    for Tensor { casts, .. } in &mut tensors {
        casts[0].scales = Buffer::uninitialised(&gpu.stream, interleaved_len(rows, columns / BLOCK))?;
    }
    let kernel = gpu.runtime.load::<Mxfp8CastRowsInterleaved<bf16, e4m3>>()?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|Tensor { wide, casts, .. }| {
            let Cast { data, scales } = &mut casts[0];
            let (input, data, scales) = (wide.view(), data.view_mut(), scales.view_mut());
            kernel.launch(&gpu.stream, Mxfp8CastRowsInterleavedArgs { input, data, scales, rows, columns })
        })
    })?;
    Ok(cast_outputs(graph, tensors, &[["data", "scales"]]))
}

fn prepare_cast_columns(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape, 1)?;
    let graph = Prepared::capture(gpu, || cast_columns(gpu, &mut tensors))?;
    Ok(cast_outputs(graph, tensors, &[["data", "scales"]]))
}

fn prepare_cast_both(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape, 2)?;
    let graph = Prepared::capture(gpu, || cast_both(gpu, &mut tensors))?;
    Ok(cast_outputs(graph, tensors, &[["row_data", "row_scales"], ["column_data", "column_scales"]]))
}

/// The casts of the first tensor, under these names.
fn cast_outputs(graph: Graph, tensors: Vec<Tensor>, names: &'static [[&'static str; 2]]) -> Prepared {
    Prepared::new(graph, move |stream| {
        let mut outputs = Vec::new();
        for (cast, [data, scales]) in tensors[0].casts.iter().zip(names) {
            let codes = cast.data.to_vec(stream)?;
            outputs.push(Output { name: data, bytes: codes.iter().map(|code| code.to_bits()).collect() });
            let codes = cast.scales.to_vec(stream)?;
            outputs.push(Output { name: scales, bytes: codes.iter().map(|code| code.to_bits()).collect() });
        }
        Ok(outputs)
    })
}

fn prepare_dequantize_rows(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape, 1)?;
    cast_rows(gpu, &mut tensors)?;
    let kernel = gpu.runtime.load::<Mxfp8DequantizeRows<e4m3, bf16>>()?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|Tensor { wide, casts, .. }| {
            let (data, scales) = (casts[0].data.view(), casts[0].scales.view());
            kernel.launch(&gpu.stream, Mxfp8DequantizeRowsArgs { data, scales, output: wide.view_mut() })
        })
    })?;
    Ok(wide_output(graph, tensors))
}

fn prepare_dequantize_columns(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape, 1)?;
    cast_columns(gpu, &mut tensors)?;
    let kernel = gpu.runtime.load::<Mxfp8DequantizeColumns<e4m3, bf16>>()?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|Tensor { wide, casts, columns }| {
            let (data, scales) = (casts[0].data.view(), casts[0].scales.view());
            kernel.launch(&gpu.stream, Mxfp8DequantizeColumnsArgs { data, scales, output: wide.view_mut(), columns: *columns })
        })
    })?;
    Ok(wide_output(graph, tensors))
}

fn wide_output(graph: Graph, tensors: Vec<Tensor>) -> Prepared {
    Prepared::new(graph, move |stream| {
        let wide: Vec<half::bf16> = tensors[0].wide.to_vec_as(stream)?;
        Ok(vec![Output { name: "wide", bytes: wide.iter().flat_map(|value| value.to_le_bytes()).collect() }])
    })
}
