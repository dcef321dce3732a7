//! Gathered shards: of transposed tensors, joined; of MXFP8 tensors, one after the other.

use oxtile::quantize::{Direction, JoinShards, Mxfp8};
use oxtile::{Buffer, HostElement, Runtime};
use oxtile_kernels::shards::{Byte, JoinShards as Joining};
use oxtile_tests::inputs::{Dtype, Random, Scenario};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, e2m1x2, e4m3, e5m2, ue8m0};

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
    let gather = |shards: usize| Case::new(format!("shards::mxfp8::{shards}"), Size::Small, move |runtime| gather(runtime, shards));
    let scales = SHAPES.into_iter().map(|shape| of_code("", shape, ue8m0::from_bits, ue8m0::to_bits));
    // Vectors and single bytes of the other codes.
    let others = SHAPES.into_iter().take(2).flat_map(|shape| {
        [
            of_code("e2m1x2::", shape, e2m1x2::from_bits, e2m1x2::to_bits),
            of_code("e4m3::", shape, e4m3::from_bits, e4m3::to_bits),
            of_code("e5m2::", shape, e5m2::from_bits, e5m2::to_bits),
        ]
    });
    scales.chain(others).chain([2, 3, 4, 8].map(gather)).collect()
}

fn of_code<T: Byte + HostElement<Device = T>>(
    prefix: &str,
    ([shards, rows, width, stride], size): ([usize; 4], Size),
    from_bits: fn(u8) -> T,
    to_bits: fn(T) -> u8,
) -> Case
where
    Joining<T>: Kernel,
{
    let name = format!("shards::join::{prefix}{shards}x{rows}x{width}_to_{stride}");
    Case::new(name, size, move |runtime| join(runtime, [shards, rows, width, stride], from_bits, to_bits))
}

fn join<T: Byte + HostElement<Device = T>>(
    runtime: &Runtime,
    [shards, rows, width, stride]: [usize; 4],
    from_bits: fn(u8) -> T,
    to_bits: fn(T) -> u8,
) -> Outcome
where
    Joining<T>: Kernel,
{
    let stream = stream(runtime)?;
    let mut random = Random::new(6);
    let codes: Vec<u8> = (0..shards * rows * width).map(|_| 1 + random.below(255) as u8).collect();
    let expected: Vec<u8> = (0..rows * stride)
        .map(|at| (at / stride, at % stride))
        .map(|(row, column)| if column < shards * width { codes[(column / width * rows + row) * width + column % width] } else { 0 })
        .collect();
    let gathered: Vec<T> = codes.iter().map(|&code| from_bits(code)).collect();
    let gathered = text(Buffer::<T>::from_slice(&stream, &gathered))?;
    let mut whole = text(Buffer::<T>::from_slice(&stream, &vec![from_bits(0xa5); expected.len()]))?;
    let lengths = [shards, width, stride].map(|length| length as u32);
    text(text(JoinShards::<T>::new(runtime))?.run(&stream, gathered.view(), lengths, whole.view_mut()))?;
    let found: Vec<u8> = text(whole.to_vec(&stream))?.into_iter().map(to_bits).collect();
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
