//! Block scales into the tiles of block-scaled matrix multiplication, and back; gathered shards joined.

use anyhow::Result;
use oxtile::runtime::{Buffer, Graph};
use oxtile_kernels::interleave::*;
use oxtile_kernels::shards::{JoinShards, JoinShardsArgs};
use oxtile_tile::num::ue8m0;

use super::copy::ceiling;
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "interleave";

/// Outer indices, blocks and buffer sets.
type Shape = (u64, u64, usize);

/// What is measured: its name, the peer, and what captures it.
type Measured = (&'static str, &'static [&'static str], fn(&Gpu, Shape) -> Result<Prepared>);

const MEASURED: [Measured; 5] = [
    ("interleave_rows", &["interleave_rows_compiled"], prepare_rows),
    ("interleave_columns", &["interleave_columns_compiled"], prepare_columns),
    ("deinterleave_rows", &["deinterleave_rows_compiled"], prepare_rows_back),
    ("deinterleave_columns", &["deinterleave_columns_compiled"], prepare_columns_back),
    ("join_shards 8", &["join_shards_compiled"], prepare_shards),
];

/// Shards that are joined, of as many columns.
const SHARDS: u64 = 8;

/// All at two sizes: scales of as many bytes as the tensors of the other families, to be held against the same copies.
pub fn benches(size: Size) -> Vec<Bench> {
    let shapes: [Shape; 2] = size.pick([(131_072, 2048, 4), (16_384, 2048, 12)], [(256, 40, 2), (128, 8, 3)]);
    shapes.into_iter().flat_map(|shape| MEASURED.map(|measured| bench(size, shape, measured))).collect()
}

fn bench(size: Size, shape: Shape, (kernel, peers, prepare): Measured) -> Bench {
    let (outer, blocks, sets) = shape;
    let bytes = 2 * outer * blocks;
    Bench {
        family: FAMILY,
        kernel,
        shape: format!("{outer}x{blocks} scales"),
        dimensions: vec![outer, blocks],
        bytes,
        flops: 0,
        sets,
        ceiling: ceiling(size, bytes),
        peers,
        prepare: Box::new(move |gpu| prepare(gpu, shape)),
    }
}

/// Scales and room for the same in the other layout: whole tiles, so as many.
struct Scales {
    from: Buffer<ue8m0>,
    to: Buffer<ue8m0>,
}

fn scales(gpu: &Gpu, (outer, blocks, sets): Shape) -> Result<Vec<Scales>> {
    let count = outer * blocks;
    let make = |set| {
        let halves = gpu.pattern.fill(set, count / 2);
        let codes: Vec<ue8m0> = halves.iter().flat_map(|half| half.to_le_bytes()).map(ue8m0::from_bits).collect();
        Ok(Scales { from: Buffer::from_slice(&gpu.stream, &codes)?, to: Buffer::uninitialised(&gpu.stream, count)? })
    };
    (0..sets).map(make).collect()
}

macro_rules! prepare {
    ($($function:ident: $kernel:ty, $args:ident { $from:ident => $to:ident };)*) => { $(
        fn $function(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
            let (mut scales, (outer, blocks, _)) = (scales(gpu, shape)?, shape);
            let kernel = gpu.runtime.load::<$kernel>()?;
            let graph = Prepared::capture(gpu, || {
                scales.iter_mut().try_for_each(|Scales { from, to }| {
                    kernel.launch(&gpu.stream, $args { $from: from.view(), $to: to.view_mut(), outer, blocks })
                })
            })?;
            Ok(outputs(graph, scales))
        }
    )* };
}

prepare! {
    prepare_rows: InterleaveRows<ue8m0>, InterleaveRowsArgs { compact => interleaved };
    prepare_columns: InterleaveColumns<ue8m0>, InterleaveColumnsArgs { compact => interleaved };
    prepare_rows_back: DeinterleaveRows<ue8m0>, DeinterleaveRowsArgs { interleaved => compact };
    prepare_columns_back: DeinterleaveColumns<ue8m0>, DeinterleaveColumnsArgs { interleaved => compact };
}

fn prepare_shards(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let mut codes = scales(gpu, shape)?;
    let (shards, width, stride) = (SHARDS as u32, (shape.1 / SHARDS) as u32, shape.1 as u32);
    let kernel = gpu.runtime.load::<JoinShards<ue8m0>>()?;
    let graph = Prepared::capture(gpu, || {
        codes.iter_mut().try_for_each(|Scales { from, to }| {
            kernel.launch(&gpu.stream, JoinShardsArgs { gathered: from.view(), whole: to.view_mut(), shards, width, stride })
        })
    })?;
    Ok(outputs(graph, codes))
}

fn outputs(graph: Graph, scales: Vec<Scales>) -> Prepared {
    Prepared::new(graph, move |stream| {
        let codes = scales[0].to.to_vec(stream)?;
        Ok(vec![Output { name: "scales", bytes: codes.iter().map(|code| code.to_bits()).collect() }])
    })
}
