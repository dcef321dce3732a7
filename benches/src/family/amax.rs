//! The largest magnitude of one tensor and of many.

use anyhow::Result;
use oxtile::{DeviceTable, runtime::Buffer};
use oxtile_kernels::amax::{Amax, AmaxArgs, MultiAmax, MultiAmaxArgs, NO_SLOT, tiles};
use oxtile_tile::num::bf16;

use super::copy::ceiling;
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "amax";

/// One tensor of 2^30 elements, and 64 tensors of 4096x1024.
pub fn benches(size: Size) -> Vec<Bench> {
    vec![one(size), many(size)]
}

fn one(size: Size) -> Bench {
    let elements: u64 = size.pick(1 << 30, 1 << 15);
    let sets = 2;
    Bench {
        family: FAMILY,
        kernel: "amax",
        shape: format!("2^{} bf16", elements.ilog2()),
        dimensions: vec![elements],
        bytes: 2 * elements,
        flops: 0,
        sets,
        ceiling: ceiling(size, 2 * elements),
        peers: &["amax_compiled"],
        prepare: Box::new(move |gpu| prepare_one(gpu, elements, sets)),
    }
}

fn prepare_one(gpu: &Gpu, elements: u64, sets: usize) -> Result<Prepared> {
    let mut buffers = Vec::new();
    for set in 0..sets {
        let input = Buffer::<bf16>::from_slice(&gpu.stream, &gpu.pattern.fill(set, elements))?;
        buffers.push((input, Buffer::<f32>::uninitialised(&gpu.stream, 1)?));
    }
    let kernel = gpu.runtime.load::<Amax<bf16>>()?;
    let graph = Prepared::capture(gpu, || {
        buffers.iter_mut().try_for_each(|(input, output)| {
            output.fill_zero(&gpu.stream)?;
            kernel.launch(&gpu.stream, AmaxArgs { input: input.view(), output: output.view_mut() })
        })
    })?;
    Ok(Prepared::new(graph, move |stream| Ok(vec![amax_output(&buffers[0].1.to_vec(stream)?)])))
}

fn many(size: Size) -> Bench {
    let [tensors, rows, columns] = size.pick([64, 4096, 1024], [5, 24, 64]);
    let bytes = 2 * tensors * rows * columns;
    let sets = 2;
    Bench {
        family: FAMILY,
        kernel: "multi_amax",
        shape: format!("{tensors} x {rows}x{columns} bf16"),
        dimensions: vec![tensors, rows, columns],
        bytes,
        flops: 0,
        sets,
        ceiling: ceiling(size, bytes),
        peers: &["multi_amax_compiled", "multi_amax_foreach"],
        prepare: Box::new(move |gpu| prepare_many(gpu, tensors as usize, rows * columns, sets)),
    }
}

fn prepare_many(gpu: &Gpu, count: usize, elements: u64, sets: usize) -> Result<Prepared> {
    let stream = &gpu.stream;
    let fill = |buffer| Buffer::from_slice(stream, &gpu.pattern.fill(buffer, elements));
    let tensors: Vec<Buffer<bf16>> = (0..sets * count).map(fill).collect::<Result<_, _>>()?;
    let views: Vec<_> = tensors.iter().map(Buffer::view).collect();
    let tables: Vec<_> = views.chunks(count).map(|set| DeviceTable::new(stream, set)).collect::<Result<_, _>>()?;
    let mut outputs: Vec<Buffer<f32>> = (0..sets).map(|_| Buffer::uninitialised(stream, count as u64)).collect::<Result<_, _>>()?;

    let first_tiles: Vec<u64> = (0..=count as u64).map(|tensor| tensor * tiles::<bf16>(elements)).collect();
    let first_tiles = Buffer::<u64>::from_slice(stream, &first_tiles)?;
    let slots: Vec<u32> = (0..count as u32).flat_map(|tensor| [tensor, NO_SLOT]).collect();
    let slots = Buffer::<u32>::from_slice(stream, &slots)?;
    let kernel = gpu.runtime.load::<MultiAmax<bf16>>()?;
    let graph = Prepared::capture(gpu, || {
        tables.iter().zip(&mut outputs).try_for_each(|(table, outputs)| {
            outputs.fill_zero(stream)?;
            let (tensors, first_tiles, slots) = (table.view(), first_tiles.view(), slots.view());
            kernel.launch(stream, MultiAmaxArgs { tensors, first_tiles, slots, outputs: outputs.view_mut() })
        })
    })?;
    Ok(Prepared::new(graph, move |stream| Ok(vec![amax_output(&outputs[0].to_vec(stream)?)])))
}

fn amax_output(values: &[f32]) -> Output {
    Output { name: "amax", bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect() }
}
