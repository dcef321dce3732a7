//! The rowwise cast to MXFP8 (E4M3) and back.

use anyhow::Result;
use oxtile::runtime::Buffer;
use oxtile_kernels::mxfp8::{BLOCK, Mxfp8CastRows, Mxfp8CastRowsArgs, Mxfp8DequantizeRows, Mxfp8DequantizeRowsArgs};
use oxtile_tile::num::{bf16, e4m3, ue8m0};

use super::copy::ceiling;
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "mxfp8";

/// Rows, columns and buffer sets.
type Shape = (u64, u64, usize);

/// Both directions at a large and a small shape.
pub fn benches(size: Size) -> Vec<Bench> {
    let shapes: [Shape; 2] = size.pick([(16384, 8192, 4), (4096, 4096, 12)], [(64, 256, 2), (3, 96, 3)]);
    shapes.into_iter().flat_map(|shape| [cast(size, shape), dequantize(size, shape)]).collect()
}

fn cast(size: Size, shape: Shape) -> Bench {
    bench(size, shape, "mxfp8_cast_rows e4m3", &["mxfp8_cast_compiled"], prepare_cast)
}

fn dequantize(size: Size, shape: Shape) -> Bench {
    bench(size, shape, "mxfp8_dequantize_rows e4m3", &["mxfp8_dequantize_compiled"], prepare_dequantize)
}

fn bench(
    size: Size,
    shape: Shape,
    kernel: &'static str,
    peers: &'static [&'static str],
    prepare: fn(&Gpu, Shape) -> Result<Prepared>,
) -> Bench {
    let (rows, columns, sets) = shape;
    let elements = rows * columns;
    // A bf16, a code and its part of a scale an element, in either direction.
    let bytes = 3 * elements + elements / BLOCK;
    Bench {
        family: FAMILY,
        kernel,
        shape: format!("{rows}x{columns} bf16"),
        dimensions: vec![rows, columns],
        bytes,
        sets,
        ceiling: ceiling(size, bytes),
        peers,
        prepare: Box::new(move |gpu| prepare(gpu, shape)),
    }
}

/// A tensor and its cast.
struct Tensor {
    wide: Buffer<bf16>,
    data: Buffer<e4m3>,
    scales: Buffer<ue8m0>,
}

/// Tensors of the pattern, casts not yet written.
fn tensors(gpu: &Gpu, (rows, columns, sets): Shape) -> Result<Vec<Tensor>> {
    let (stream, elements) = (&gpu.stream, rows * columns);
    let tensor = |set| {
        Ok(Tensor {
            wide: Buffer::from_slice(stream, &gpu.pattern.fill(set, elements))?,
            data: Buffer::uninitialised(stream, elements)?,
            scales: Buffer::uninitialised(stream, elements / BLOCK)?,
        })
    };
    (0..sets).map(tensor).collect()
}

fn cast_all(gpu: &Gpu, tensors: &mut [Tensor]) -> oxtile::runtime::Result<()> {
    let kernel = gpu.runtime.load::<Mxfp8CastRows<bf16, e4m3>>()?;
    tensors.iter_mut().try_for_each(|Tensor { wide, data, scales }| {
        kernel.launch(&gpu.stream, Mxfp8CastRowsArgs { input: wide.view(), data: data.view_mut(), scales: scales.view_mut() })
    })
}

fn prepare_cast(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape)?;
    let graph = Prepared::capture(gpu, || cast_all(gpu, &mut tensors))?;
    Ok(Prepared::new(graph, move |stream| {
        let (data, scales) = (tensors[0].data.to_vec(stream)?, tensors[0].scales.to_vec(stream)?);
        Ok(vec![
            Output { name: "data", bytes: data.iter().map(|code| code.to_bits()).collect() },
            Output { name: "scales", bytes: scales.iter().map(|code| code.to_bits()).collect() },
        ])
    }))
}

fn prepare_dequantize(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape)?;
    cast_all(gpu, &mut tensors)?;
    let kernel = gpu.runtime.load::<Mxfp8DequantizeRows<e4m3, bf16>>()?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|Tensor { wide, data, scales }| {
            kernel.launch(&gpu.stream, Mxfp8DequantizeRowsArgs { data: data.view(), scales: scales.view(), output: wide.view_mut() })
        })
    })?;
    Ok(Prepared::new(graph, move |stream| {
        let wide: Vec<half::bf16> = tensors[0].wide.to_vec_as(stream)?;
        Ok(vec![Output { name: "wide", bytes: wide.iter().flat_map(|value| value.to_le_bytes()).collect() }])
    }))
}
