//! FP8 (E4M3) with one scale for a tensor: current scaling, its cast alone and with the transpose, back, and the transpose alone.

use anyhow::Result;
use oxtile::runtime::Buffer;
use oxtile_kernels::amax::{Amax, AmaxArgs};
use oxtile_kernels::fp8::{
    Fp8Cast, Fp8CastArgs, Fp8CastTranspose, Fp8CastTransposeArgs, Fp8Dequantize, Fp8DequantizeArgs, Fp8Transpose, Fp8TransposeArgs,
    ScaleOptions,
};
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_tile::num::{bf16, e4m3};

use super::copy::ceiling;
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "fp8";

/// Rows, columns and buffer sets.
type Shape = (u64, u64, usize);

/// What is measured: its name, bytes an element, the peer, and what captures it.
type Measured = (&'static str, u64, &'static [&'static str], fn(&Gpu, Shape) -> Result<Prepared>);

/// The tensor is read for its amax, then read and written.
const CURRENT: Measured = ("fp8_current_scaling e4m3", 5, &["fp8_current_scaling_compiled"], prepare_current);
const CAST: Measured = ("fp8_cast e4m3", 3, &["fp8_cast_compiled"], prepare_cast);
const CAST_TRANSPOSE: Measured = ("fp8_cast_transpose e4m3", 4, &["fp8_cast_transpose_compiled"], prepare_cast_transpose);
const TRANSPOSE: Measured = ("fp8_transpose e4m3", 2, &["fp8_transpose_compiled", "fp8_transpose_contiguous"], prepare_transpose);
const DEQUANTIZE: Measured = ("fp8_dequantize e4m3", 3, &["fp8_dequantize_compiled"], prepare_dequantize);

const ALL: [Measured; 5] = [CURRENT, CAST, CAST_TRANSPOSE, TRANSPOSE, DEQUANTIZE];

/// All at a large and a small shape.
pub fn benches(size: Size) -> Vec<Bench> {
    let shapes: [Shape; 2] = size.pick([(16384, 8192, 4), (4096, 4096, 12)], [(64, 256, 2), (3, 96, 3)]);
    shapes.into_iter().flat_map(|shape| ALL.map(|measured| bench(size, shape, measured))).collect()
}

fn bench(size: Size, shape: Shape, (kernel, bytes_an_element, peers, prepare): Measured) -> Bench {
    let (rows, columns, sets) = shape;
    let bytes = bytes_an_element * rows * columns;
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

/// A tensor and its cast.
struct Tensor {
    wide: Buffer<bf16>,
    amax: Buffer<f32>,
    data: Buffer<e4m3>,
    transposed: Buffer<e4m3>,
    scale_inverse: Buffer<f32>,
}

/// Tensors of the pattern, casts not yet written.
fn tensors(gpu: &Gpu, (rows, columns, sets): Shape) -> Result<Vec<Tensor>> {
    let (stream, elements) = (&gpu.stream, rows * columns);
    let tensor = |set| {
        Ok(Tensor {
            wide: Buffer::from_slice(stream, &gpu.pattern.fill(set, elements))?,
            amax: Buffer::zeros(stream, 1)?,
            data: Buffer::uninitialised(stream, elements)?,
            transposed: Buffer::uninitialised(stream, elements)?,
            scale_inverse: Buffer::uninitialised(stream, 1)?,
        })
    };
    (0..sets).map(tensor).collect()
}

fn amax_all(gpu: &Gpu, tensors: &mut [Tensor]) -> oxtile::runtime::Result<()> {
    let kernel = gpu.runtime.load::<Amax<bf16>>()?;
    tensors.iter_mut().try_for_each(|Tensor { wide, amax, .. }| {
        amax.fill_zero(&gpu.stream)?;
        kernel.launch(&gpu.stream, AmaxArgs { input: wide.view(), output: amax.view_mut() })
    })
}

fn cast_all(gpu: &Gpu, tensors: &mut [Tensor]) -> oxtile::runtime::Result<()> {
    let kernel = gpu.runtime.load::<Fp8Cast<bf16, e4m3>>()?;
    tensors.iter_mut().try_for_each(|Tensor { wide, amax, data, scale_inverse, .. }| {
        let (input, amax, data, scale_inverse) = (wide.view(), amax.view(), data.view_mut(), scale_inverse.view_mut());
        kernel.launch(&gpu.stream, Fp8CastArgs { input, amax, data, scale_inverse, options: ScaleOptions::default() })
    })
}

fn prepare_current(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape)?;
    let graph = Prepared::capture(gpu, || {
        tensors.chunks_mut(1).try_for_each(|tensor| {
            amax_all(gpu, tensor)?;
            cast_all(gpu, tensor)
        })
    })?;
    Ok(cast_outputs(graph, tensors))
}

fn prepare_cast(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape)?;
    amax_all(gpu, &mut tensors)?;
    let graph = Prepared::capture(gpu, || cast_all(gpu, &mut tensors))?;
    Ok(cast_outputs(graph, tensors))
}

fn cast_outputs(graph: oxtile::runtime::Graph, tensors: Vec<Tensor>) -> Prepared {
    Prepared::new(graph, move |stream| {
        let (data, inverse) = (tensors[0].data.to_vec(stream)?, tensors[0].scale_inverse.to_vec(stream)?);
        Ok(vec![
            Output { name: "data", bytes: data.iter().map(|code| code.to_bits()).collect() },
            Output { name: "scale_inverse", bytes: inverse.iter().flat_map(|value| value.to_le_bytes()).collect() },
        ])
    })
}

fn prepare_cast_transpose(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape)?;
    amax_all(gpu, &mut tensors)?;
    let kernel = gpu.runtime.load::<Fp8CastTranspose<bf16, e4m3>>()?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|Tensor { wide, amax, data, transposed, scale_inverse }| {
            let args = Fp8CastTransposeArgs {
                input: MatrixArgument::new(wide.view(), [shape.0, shape.1]),
                amax: amax.view(),
                data: data.view_mut(),
                transposed: transposed.view_mut(),
                scale_inverse: scale_inverse.view_mut(),
                options: ScaleOptions::default(),
            };
            kernel.launch(&gpu.stream, args)
        })
    })?;
    Ok(Prepared::new(graph, move |stream| {
        let codes = |name, codes: &Buffer<e4m3>| -> Result<Output> {
            Ok(Output { name, bytes: codes.to_vec(stream)?.iter().map(|code| code.to_bits()).collect() })
        };
        Ok(vec![codes("data", &tensors[0].data)?, codes("transposed", &tensors[0].transposed)?])
    }))
}

fn prepare_transpose(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape)?;
    amax_all(gpu, &mut tensors)?;
    cast_all(gpu, &mut tensors)?;
    let kernel = gpu.runtime.load::<Fp8Transpose<e4m3>>()?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|Tensor { data, transposed, .. }| {
            let input = MatrixArgument::new(data.view(), [shape.0, shape.1]);
            kernel.launch(&gpu.stream, Fp8TransposeArgs { input, transposed: transposed.view_mut() })
        })
    })?;
    Ok(Prepared::new(graph, move |stream| {
        let transposed = tensors[0].transposed.to_vec(stream)?;
        Ok(vec![Output { name: "transposed", bytes: transposed.iter().map(|code| code.to_bits()).collect() }])
    }))
}

fn prepare_dequantize(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut tensors = tensors(gpu, shape)?;
    amax_all(gpu, &mut tensors)?;
    cast_all(gpu, &mut tensors)?;
    let kernel = gpu.runtime.load::<Fp8Dequantize<e4m3, bf16>>()?;
    let graph = Prepared::capture(gpu, || {
        tensors.iter_mut().try_for_each(|Tensor { wide, data, scale_inverse, .. }| {
            let (data, scale_inverse, output) = (data.view(), scale_inverse.view(), wide.view_mut());
            kernel.launch(&gpu.stream, Fp8DequantizeArgs { data, scale_inverse, output })
        })
    })?;
    Ok(Prepared::new(graph, move |stream| {
        let wide: Vec<half::bf16> = tensors[0].wide.to_vec_as(stream)?;
        Ok(vec![Output { name: "wide", bytes: wide.iter().flat_map(|value| value.to_le_bytes()).collect() }])
    }))
}
