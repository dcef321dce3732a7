//! Interleaved scales and their inverse against the oracle.

use oxtile::quantize::{Direction, InterleaveMxfp8, Mxfp8};
use oxtile::{Buffer, HostElement, Runtime};
use oxtile_kernels::interleave::*;
use oxtile_tests::inputs::{Dtype, Random, Scenario};
use oxtile_tests::oracle::interleave::{interleave, length};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{e4m3, ue8m0};

use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Outer indices and blocks: one tile, parts of tiles, rows off the word boundary, more than a CUDA block, four tiles below each other and
/// parts of others, nothing.
const SHAPES: [(usize, usize); 10] = [(128, 4), (1, 1), (129, 5), (100, 8), (31, 35), (256, 33), (130, 2), (528, 9), (0, 4), (7, 0)];
const LARGE: [(usize, usize); 3] = [(993, 16), (8192, 224), (4001, 125)];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for ((outer, blocks), size) in SHAPES.map(|s| (s, Size::Small)).into_iter().chain(LARGE.map(|s| (s, Size::Large))) {
        let case = |kernel, run: fn(&Runtime, usize, usize) -> Outcome| {
            Case::new(format!("interleave::{kernel}::{outer}x{blocks}"), size, move |r| run(r, outer, blocks))
        };
        cases.push(case("rows::ue8m0", rows::<ue8m0>));
        cases.push(case("rows::e4m3", rows::<e4m3>));
        cases.push(case("columns::ue8m0", columns));
    }
    cases.push(Case::new("interleave::layouts::70x160", Size::Small, |r| layouts(r, 70, 160)));
    cases
}

/// Scales as the cases handle them.
trait Code: ScaleCode + HostElement<Device = Self> {}

impl<S: ScaleCode + HostElement<Device = S>> Code for S {}

fn rows<S: Code>(runtime: &Runtime, outer: usize, blocks: usize) -> Outcome
where
    InterleaveRows<S>: Kernel,
    DeinterleaveRows<S>: Kernel,
{
    let (stream, codes) = (stream(runtime)?, codes(outer * blocks));
    let expected = interleave(outer, blocks, |i, j| codes[i * blocks + j]);
    let compact = upload::<S>(runtime, &codes)?;
    let mut there = upload::<S>(runtime, &vec![0xa5; length(outer, blocks)])?;
    let mut back = upload::<S>(runtime, &vec![0xa5; codes.len()])?;
    let (outer, blocks) = (outer as u64, blocks as u64);
    let args = InterleaveRowsArgs { compact: compact.view(), interleaved: there.view_mut(), outer, blocks };
    text(text(runtime.load::<InterleaveRows<S>>())?.launch(&stream, args))?;
    equal("interleaved", &download(&there, &stream)?, &expected)?;
    let args = DeinterleaveRowsArgs { interleaved: there.view(), compact: back.view_mut(), outer, blocks };
    text(text(runtime.load::<DeinterleaveRows<S>>())?.launch(&stream, args))?;
    equal("compact", &download(&back, &stream)?, &codes)
}

fn columns(runtime: &Runtime, outer: usize, blocks: usize) -> Outcome {
    let (stream, codes) = (stream(runtime)?, codes(outer * blocks));
    let expected = interleave(outer, blocks, |i, j| codes[j * outer + i]);
    let compact = upload::<ue8m0>(runtime, &codes)?;
    let mut there = upload::<ue8m0>(runtime, &vec![0xa5; length(outer, blocks)])?;
    let mut back = upload::<ue8m0>(runtime, &vec![0xa5; codes.len()])?;
    let (outer, blocks) = (outer as u64, blocks as u64);
    let args = InterleaveColumnsArgs { compact: compact.view(), interleaved: there.view_mut(), outer, blocks };
    text(text(runtime.load::<InterleaveColumns<ue8m0>>())?.launch(&stream, args))?;
    equal("interleaved", &download(&there, &stream)?, &expected)?;
    let args = DeinterleaveColumnsArgs { interleaved: there.view(), compact: back.view_mut(), outer, blocks };
    text(text(runtime.load::<DeinterleaveColumns<ue8m0>>())?.launch(&stream, args))?;
    equal("compact", &download(&back, &stream)?, &codes)
}

/// The host types: there and back through both layouts and directions.
fn layouts(runtime: &Runtime, rows: usize, columns: usize) -> Outcome {
    let stream = stream(runtime)?;
    let values = Scenario::Normal.generate(Dtype::F32, rows * columns, 3);
    let input = text(Buffer::<f32>::from_slice(&stream, &values))?;
    let (mxfp8, interleave) = (text(Mxfp8::<f32>::new(runtime))?, text(InterleaveMxfp8::new(runtime))?);
    for direction in [Direction::Rows, Direction::Columns] {
        let compact = text(mxfp8.quantize(&stream, input.view(), [rows as u64, columns as u64], direction))?;
        let before = text(compact.scales.to_vec(&stream))?;
        let there = text(interleave.interleave(&stream, compact))?;
        let (outer, blocks) = if direction == Direction::Rows { (rows, columns.div_ceil(32)) } else { (columns, rows.div_ceil(32)) };
        equal("interleaved", &[there.scales.len()], &[length(outer, blocks) as u64])?;
        let back = text(interleave.compact(&stream, there))?;
        equal("scales", &text(back.scales.to_vec(&stream))?, &before)?;
    }
    Ok(())
}

/// No zero among them: that is the padding.
fn codes(count: usize) -> Vec<u8> {
    let mut random = Random::new(11);
    (0..count).map(|_| 1 + random.below(255) as u8).collect()
}

fn upload<S: Code>(runtime: &Runtime, codes: &[u8]) -> Result<Buffer<S>, String> {
    let values: Vec<S> = codes.iter().map(|&code| S::from_code(code)).collect();
    text(Buffer::from_slice(&stream(runtime)?, &values))
}

fn download<S: Code>(buffer: &Buffer<S>, stream: &oxtile::Stream) -> Result<Vec<u8>, String> {
    Ok(text(buffer.to_vec(stream))?.into_iter().map(S::code).collect())
}
