//! The rowwise cast to NVFP4 with a given amax, and back.

use anyhow::Result;
use oxtile::runtime::Buffer;
use oxtile_kernels::amax::{Amax, AmaxArgs};
use oxtile_kernels::nvfp4::{BLOCK, Nvfp4CastRows, Nvfp4CastRowsArgs, Nvfp4DequantizeRows, Nvfp4DequantizeRowsArgs};
use oxtile_tile::num::{bf16, e2m1x2, e4m3};

use super::copy::ceiling;
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "nvfp4";

/// Rows, columns and buffer sets.
type Shape = (u64, u64, usize);

/// Both directions at a large and a small shape.
pub fn benches(size: Size) -> Vec<Bench> {
    let shapes: [Shape; 2] = size.pick([(16384, 8192, 4), (4096, 4096, 12)], [(64, 256, 2), (3, 96, 3)]);
    shapes.into_iter().flat_map(|shape| [cast(size, shape), dequantize(size, shape)]).collect()
}

fn cast(size: Size, shape: Shape) -> Bench {
    bench(size, shape, "nvfp4_cast_rows", &["nvfp4_cast_compiled"], prepare_cast)
}

fn dequantize(size: Size, shape: Shape) -> Bench {
    bench(size, shape, "nvfp4_dequantize_rows", &["nvfp4_dequantize_compiled"], prepare_dequantize)
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
    // A bf16, half a byte of code and its part of a scale an element, in either direction.
    let bytes = 2 * elements + elements / 2 + elements / BLOCK;
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

fn prepare_cast(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape)?;
    let graph = Prepared::capture(gpu, || cast_all(gpu, &mut tensors))?;
    Ok(Prepared::new(graph, move |stream| {
        let (data, scales) = (tensors[0].data.to_vec(stream)?, tensors[0].scales.to_vec(stream)?);
        Ok(vec![
            Output { name: "data", bytes: data.iter().map(|pair| pair.to_bits()).collect() },
            Output { name: "scales", bytes: scales.iter().map(|code| code.to_bits()).collect() },
        ])
    }))
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
    Ok(Prepared::new(graph, move |stream| {
        let wide: Vec<half::bf16> = tensors[0].wide.to_vec_as(stream)?;
        Ok(vec![Output { name: "wide", bytes: wide.iter().flat_map(|value| value.to_le_bytes()).collect() }])
    }))
}
