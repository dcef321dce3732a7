//! Shards of a matrix, cast rank by rank: together the cast of the whole, and nothing written outside a shard.

use oxtile::quantize::fp8::Fp8Number;
use oxtile::quantize::{Amax, CurrentScaling, Direction, Fp8Pair, Fp8Tensor, ScaleOptions, Shard, ShardCasts};
use oxtile::{Buffer, Runtime};
use oxtile_tests::inputs::Scenario;
use oxtile_tests::oracle::amax::amax;
use oxtile_tests::oracle::fp8::{BLOCK, Rule, encode, quantize, scale, transpose};
use oxtile_tile::num::{bf16, e4m3, e5m2, f16};

use super::super::element::TestElement;
use super::super::in_turn::InTurn;
use super::super::mxfp8::{TestFp8, large_of};
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Rows, columns and ranks: shards end in rows, in squares and beyond the matrix; more ranks than elements leave some with nothing.
const SIZES: [([usize; 2], usize); 7] =
    [([130, 136], 2), ([37, 201], 3), ([129, 260], 4), ([5, 1], 8), ([1, 300], 1), ([0, 64], 2), ([4, 0], 3)];
const LARGE: ([usize; 2], usize) = ([993, 512], 8);

/// What stands where nothing is written.
const GUARD: u8 = 0xa5;

pub fn cases() -> Vec<Case> {
    macro_rules! instances {
        ($($t:ty, $q:ty;)*) => { [$(of_types::<$t, $q>()),*] };
    }
    instances! { bf16, e4m3; bf16, e5m2; f16, e4m3; f16, e5m2; f32, e4m3; f32, e5m2; }.into_iter().flatten().collect()
}

fn of_types<T: TestElement + Fp8Number<Q>, Q: TestFp8>() -> Vec<Case> {
    let name = format!("{}::{}", T::DTYPE.name(), Q::NAME);
    let sizes = SIZES.map(|s| (s, Size::Small)).into_iter().chain([(LARGE, large_of::<T, Q>())]);
    let shapes = sizes.map(|((shape, ranks), size)| {
        let title = format!("fp8::shards::{name}::{}x{} of {ranks}", shape[0], shape[1]);
        Case::new(title, size, move |r: &Runtime| shards::<T, Q>(r, Scenario::Normal, shape, ranks))
    });
    let scenarios = [Scenario::Exponents, Scenario::Nans, Scenario::Infinities, Scenario::Subnormals].map(|scenario| {
        Case::new(format!("fp8::shards::{name}::{scenario:?}"), Size::Small, move |r: &Runtime| shards::<T, Q>(r, scenario, [17, 150], 3))
    });
    // Rows of whole vectors, others, and none.
    let of_rows = [[24, 16], [9, 13], [0, 8]].map(|shape| {
        let title = format!("fp8::shards::one scale::{name}::{}x{} of 3", shape[0], shape[1]);
        Case::new(title, Size::Small, move |r: &Runtime| with_one_scale::<T, Q>(r, shape, 3))
    });
    shapes.chain(scenarios).chain(of_rows).collect()
}

/// Rows of a matrix, cast rank by rank with the scale that all agreed on, as they are and transposed.
fn with_one_scale<T: TestElement + Fp8Number<Q>, Q: TestFp8>(r: &Runtime, shape: [usize; 2], ranks: usize) -> Outcome {
    let (stream, casts) = (stream(r)?, text(CurrentScaling::<T, Q>::new(r, ScaleOptions::default()))?);
    let mut values = Scenario::Normal.generate(T::DTYPE, shape[0] * shape[1], 3);
    // A rank's own amax would not do.
    values.iter_mut().enumerate().for_each(|(i, x)| *x *= 2_f32.powi((i / (shape[0] / ranks * shape[1])) as i32));
    let factor = scale(amax(&values), Q::FORMAT, Rule { epsilon: 0.0, power_of_two: false, largest: f32::MAX });
    let (input, rows, columns) = (T::upload(&stream, &values)?, shape[0] / ranks, shape[1]);
    let communicators = InTurn::world(ranks as u32);
    // What the ranks agree on, each knows in the second turn.
    for (turn, (rank, communicator)) in (0..2).flat_map(|turn| communicators.iter().enumerate().map(move |of| (turn, of))) {
        let (start, end) = (rank * rows * columns, (rank + 1) * rows * columns);
        let part = input.view().slice(start as u64, end as u64);
        let agreed = text(text(text(Amax::<T>::new(r))?.local_amax(&stream, part))?.reduce(communicator.begin(), &stream))?;
        let mut flat = text(Fp8Tensor::<Q>::uninitialised(&stream, [1, part.len()], Direction::Rows))?;
        let mut pair = text(Fp8Pair::<Q>::uninitialised(&stream, [rows as u64, columns as u64]))?;
        text(casts.cast_shard(&stream, part, &agreed, &mut flat))?;
        text(casts.cast_both_shard(&stream, part, [rows as u64, columns as u64], &agreed, &mut pair))?;
        if turn == 1 {
            let expected = encode(&values[start..end], factor, Q::FORMAT);
            let found = |codes: &Buffer<Q>| Ok::<Vec<u8>, String>(text(codes.to_vec(&stream))?.into_iter().map(Q::code).collect());
            for tensor in [&flat, &pair.tensor] {
                equal("inverse of the scale", &text(tensor.scales.to_vec(&stream))?, &[1.0 / factor])?;
                equal("codes", &found(&tensor.data)?, &expected)?;
            }
            equal("transposed", &found(&pair.transposed)?, &transpose(&expected, [rows, columns]))?;
        }
    }
    Ok(())
}

fn shards<T: TestElement + Fp8Number<Q>, Q: TestFp8>(r: &Runtime, scenario: Scenario, shape: [usize; 2], ranks: usize) -> Outcome {
    let stream = stream(r)?;
    let values = scenario.generate(T::DTYPE, shape[0] * shape[1], 3);
    let rule = Rule { epsilon: 0.0, power_of_two: false, largest: T::DTYPE.largest() };
    let expected = quantize(&values, shape, [BLOCK, BLOCK], Q::FORMAT, rule);
    let input = T::upload(&stream, &values)?;
    let casts = text(ShardCasts::<T, Q>::new(r, ScaleOptions::default()))?;
    let bounds: Vec<u64> = (0..=ranks).map(|rank| (values.len() * rank / ranks) as u64).collect();
    let shard = |rank: usize| Shard { shape: shape.map(|side| side as u64), start: bounds[rank] };
    let communicators = InTurn::world(ranks as u32);
    let amax = |rank: usize| {
        let amax = text(casts.local_amax(&stream, input.view().slice(bounds[rank], bounds[rank + 1]), shard(rank)))?;
        text(amax.reduce(communicators[rank].begin(), &stream))
    };
    // What the ranks agree on, each knows in the second turn.
    for rank in 0..ranks {
        amax(rank)?;
    }
    for rank in 0..ranks {
        let agreed = amax(rank)?;
        // The whole matrix, of which the kernel is lent the shard.
        let mut codes = text(Buffer::from_slice(&stream, &vec![Q::of_code(GUARD); values.len()]))?;
        let (start, end) = (bounds[rank], bounds[rank + 1]);
        let mut whole = codes.view_mut();
        let data = whole.slice_mut(start, end);
        let inverses = text(casts.cast(&stream, input.view().slice(start, end), shard(rank), &agreed, data))?;
        let mut guarded = vec![GUARD; values.len()];
        guarded[start as usize..end as usize].copy_from_slice(&expected.data[start as usize..end as usize]);
        let found: Vec<u8> = text(codes.to_vec(&stream))?.into_iter().map(Q::code).collect();
        equal(&format!("codes of rank {rank}"), &found, &guarded)?;
        let across = shape[1].div_ceil(BLOCK);
        let rows: Vec<f32> = text(inverses.to_vec(&stream))?
            .chunks(across.next_multiple_of(4).max(1))
            .flat_map(|row| row[..across.min(row.len())].to_vec())
            .collect();
        equal("inverses", &rows, &expected.inverses)?;
    }
    Ok(())
}
