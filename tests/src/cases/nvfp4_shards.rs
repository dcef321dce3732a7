//! Rows of one NVFP4 matrix, quantized by their ranks with an amax that all agreed on and gathered: the whole. And what interleaves scales.

use oxtile::comm::Communicator;
use oxtile::quantize::{InterleaveNvfp4, Nvfp4, Nvfp4Tensor};
use oxtile::{Buffer, Runtime, Stream};
use oxtile_tests::inputs::{Dtype, Scenario};
use oxtile_tests::oracle::amax::amax;
use oxtile_tests::oracle::interleave::interleave;
use oxtile_tests::oracle::nvfp4::quantize;
use oxtile_tile::num::{bf16, e2m1x2, e4m3};

use super::element::TestElement;
use super::in_turn::InTurn;
use crate::case::{Case, Outcome, Size, equal, stream, text};

const COLUMNS: usize = 80;

pub fn cases() -> Vec<Case> {
    // Of no rows a rank has an empty shard, and takes part.
    let worlds = [(1, 3), (2, 4), (3, 9), (4, 0)];
    let shards =
        worlds.map(|(ranks, rows)| Case::new(format!("nvfp4::shards::{ranks} of {rows}"), Size::Small, move |r| shards(r, ranks, rows)));
    shards.into_iter().chain([Case::new("nvfp4::interleaved::library", Size::Small, interleaved)]).collect()
}

fn shards(runtime: &Runtime, ranks: usize, rows: usize) -> Outcome {
    let (stream, casts) = (stream(runtime)?, text(Nvfp4::<bf16>::new(runtime))?);
    // Exponents differ from row to row: a rank's own amax would not do.
    let values = Scenario::Exponents.generate(Dtype::Bf16, rows * COLUMNS, 5);
    let (input, expected) = (bf16::upload(&stream, &values)?, quantize(&values, amax(&values)));
    let communicators = InTurn::world(ranks as u32);
    let a_shard = rows / ranks;
    let shape = [a_shard as u64, COLUMNS as u64];
    let mut wholes = Vec::new();
    // Amaxes, then codes, then wholes.
    for (rank, communicator) in (0..3).flat_map(|_| communicators.iter().enumerate()) {
        let part = |r: usize| (r * a_shard * COLUMNS) as u64;
        let shard = input.view().slice(part(rank), part(rank + 1));
        let agreed = text(text(casts.local_amax(&stream, shard))?.reduce(communicator.begin(), &stream))?;
        let tensor = text(casts.quantize_shard(&stream, shard, shape, &agreed))?;
        let mut data = text(Buffer::<e2m1x2>::uninitialised(&stream, tensor.data.len() * ranks as u64))?;
        let mut scales = text(Buffer::<e4m3>::uninitialised(&stream, tensor.scales.len() * ranks as u64))?;
        text(communicator.all_gather(&stream, &tensor.data, &mut data))?;
        text(communicator.all_gather(&stream, &tensor.scales, &mut scales))?;
        wholes.push((tensor.amax, data, scales));
    }
    for (amax, data, scales) in &wholes[2 * ranks..] {
        equal("amax", &text(amax.to_vec(&stream))?, &[expected.amax])?;
        equal("scales", &codes(&stream, scales)?, &expected.scales)?;
        equal("data", &text(data.to_vec(&stream))?.into_iter().map(e2m1x2::to_bits).collect::<Vec<_>>(), &expected.data)?;
    }
    Ok(())
}

/// The cast that interleaves writes what the compact one and the change of layout do, and the way back gives the compact scales.
fn interleaved(runtime: &Runtime) -> Outcome {
    let (stream, casts, layouts) = (stream(runtime)?, text(Nvfp4::<bf16>::new(runtime))?, text(InterleaveNvfp4::new(runtime))?);
    let (rows, shape) = (33, [33, COLUMNS as u64]);
    let values = Scenario::Outlier.generate(Dtype::Bf16, rows * COLUMNS, 5);
    let (input, expected) = (bf16::upload(&stream, &values)?, quantize(&values, amax(&values)));
    let blocks = COLUMNS / 16;
    let expected_scales = interleave(rows, blocks, |row, block| expected.scales[row * blocks + block]);
    let cast = text(casts.quantize_interleaved(&stream, input.view(), shape))?;
    let laid_out = text(layouts.interleave(&stream, text(casts.quantize(&stream, input.view(), shape))?))?;
    for tensor in [&cast, &laid_out] {
        let scales: Vec<u8> = text(tensor.scales.to_vec(&stream))?.into_iter().map(e4m3::to_bits).collect();
        equal("interleaved scales", &scales, &expected_scales)?;
        let data: Vec<u8> = text(tensor.data.to_vec(&stream))?.into_iter().map(e2m1x2::to_bits).collect();
        equal("data", &data, &expected.data)?;
    }
    let compact: Nvfp4Tensor = text(layouts.compact(&stream, cast))?;
    equal("scales", &codes(&stream, &compact.scales)?, &expected.scales)
}

fn codes(stream: &Stream, scales: &Buffer<e4m3>) -> Result<Vec<u8>, String> {
    Ok(text(scales.to_vec(stream))?.into_iter().map(e4m3::to_bits).collect())
}
