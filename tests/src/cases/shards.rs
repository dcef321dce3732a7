//! Gathered shards: of transposed tensors, joined; of MXFP8 tensors, one after the other.

use oxtile::quantize::{Direction, Mxfp8};
use oxtile::{Buffer, Runtime};
use oxtile_kernels::shards::{JoinShards, JoinShardsArgs};
use oxtile_tests::inputs::{Dtype, Random, Scenario};
use oxtile_tile::num::{bf16, e4m3, ue8m0};

use super::element::TestElement;
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Shards, rows, width and stride: vectors, single bytes, no padding, more than a CUDA block, one shard, nothing.
const SHAPES: [([usize; 4], Size); 7] = [
    ([2, 3, 32, 80], Size::Small),
    ([3, 5, 7, 24], Size::Small),
    ([4, 2, 16, 64], Size::Small),
    ([8, 2, 33, 265], Size::Small),
    ([1, 4, 20, 32], Size::Small),
    ([3, 0, 16, 48], Size::Small),
    ([8, 129, 640, 5136], Size::Large),
];

pub fn cases() -> Vec<Case> {
    let join = |([shards, rows, width, stride], size): ([usize; 4], Size)| {
        let name = format!("shards::join::{shards}x{rows}x{width}_to_{stride}");
        Case::new(name, size, move |runtime| join(runtime, [shards, rows, width, stride]))
    };
    let gather = |shards: usize| Case::new(format!("shards::mxfp8::{shards}"), Size::Small, move |runtime| gather(runtime, shards));
    SHAPES.map(join).into_iter().chain([2, 3, 4, 8].map(gather)).collect()
}

fn join(runtime: &Runtime, [shards, rows, width, stride]: [usize; 4]) -> Outcome {
    let stream = stream(runtime)?;
    let mut random = Random::new(6);
    let codes: Vec<u8> = (0..shards * rows * width).map(|_| 1 + random.below(255) as u8).collect();
    let expected: Vec<u8> = (0..rows * stride)
        .map(|at| (at / stride, at % stride))
        .map(|(row, column)| if column < shards * width { codes[(column / width * rows + row) * width + column % width] } else { 0 })
        .collect();
    let gathered: Vec<_> = codes.iter().map(|&code| ue8m0::from_bits(code)).collect();
    let gathered = text(Buffer::<ue8m0>::from_slice(&stream, &gathered))?;
    let mut whole = text(Buffer::<ue8m0>::from_slice(&stream, &vec![ue8m0::from_bits(0xa5); expected.len()]))?;
    let (shards, width, stride) = (shards as u32, width as u32, stride as u32);
    let args = JoinShardsArgs { gathered: gathered.view(), whole: whole.view_mut(), shards, width, stride };
    text(text(runtime.load::<JoinShards<ue8m0>>())?.launch(&stream, args))?;
    let found: Vec<u8> = text(whole.to_vec(&stream))?.into_iter().map(ue8m0::to_bits).collect();
    equal("whole", &found, &expected)
}

/// The compact casts of shards of whole blocks of rows, one after the other, are the cast of the whole.
fn gather(runtime: &Runtime, shards: usize) -> Outcome {
    let (stream, rows, columns) = (stream(runtime)?, 32 * shards, 72);
    let values = Scenario::Exponents.generate(Dtype::Bf16, rows * columns, 3);
    let mxfp8 = text(Mxfp8::<bf16, e4m3>::new(runtime))?;
    for direction in [Direction::Rows, Direction::Columns] {
        let cast = |values: &[f32]| {
            let shape = [(values.len() / columns) as u64, columns as u64];
            let cast = text(mxfp8.quantize(&stream, bf16::upload(&stream, values)?.view(), shape, direction))?;
            Ok::<_, String>((text(cast.data.to_vec(&stream))?, text(cast.scales.to_vec(&stream))?))
        };
        let (mut data, mut scales) = (Vec::new(), Vec::new());
        for shard in values.chunks(32 * columns) {
            let (of_data, of_scales) = cast(shard)?;
            data.extend(of_data);
            scales.extend(of_scales);
        }
        let (whole_data, whole_scales) = cast(&values)?;
        equal(&format!("{direction:?} data"), &data, &whole_data)?;
        equal(&format!("{direction:?} scales"), &scales, &whole_scales)?;
    }
    Ok(())
}
