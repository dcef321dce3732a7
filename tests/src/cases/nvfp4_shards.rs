//! Rows of one NVFP4 matrix, quantized by their ranks with an amax that all agreed on, and gathered, are the whole. The casts that interleave scales too.

use oxtile::comm::Communicator;
use oxtile::quantize::nvfp4_columns::{Nearest, Stochastic8};
use oxtile::quantize::{
    Amax, Direction, HadamardAmax, InterleaveNvfp4, JoinShards, Nvfp4, Nvfp4Columns, Nvfp4FourOverSix, Nvfp4MappedTensor, Nvfp4Pair,
    Nvfp4Squares, Nvfp4StochasticRows, Nvfp4Tensor, RandomState,
};
use oxtile::{Buffer, HostElement, Runtime, Stream};
use oxtile_kernels::shards::Byte;
use oxtile_tests::inputs::{Dtype, Scenario};
use oxtile_tests::oracle::amax::amax;
use oxtile_tests::oracle::formats::E2M1;
use oxtile_tests::oracle::interleave::interleave;
use oxtile_tests::oracle::nvfp4::{Quantized, hadamard, quantize, quantize_by, quantize_shared, squares, transpose};
use oxtile_tests::oracle::nvfp4_stochastic::{Generator, round};
use oxtile_tests::oracle::nvfp4_variants::Rule;
use oxtile_tile::launch::{DeviceView, Kernel};
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
    let forms = FORMS.map(|(name, cast, expected)| {
        Case::new(format!("nvfp4::shards::{name}"), Size::Small, move |runtime| in_phases(runtime, 3, cast, expected))
    });
    shards.into_iter().chain(forms).chain([Case::new("nvfp4::interleaved::library", Size::Small, interleaved)]).collect()
}

/// Rows of a rank: whole blocks.
const ROWS: usize = 32;
const SEED: u64 = 0x1234_5678_9abc_def0;

/// Both phases of a rank with its rows, by a type of the library.
type Cast = fn(&Runtime, &Stream, &InTurn, DeviceView<'_, bf16>) -> oxtile::Result<Vec<Nvfp4Tensor>>;
/// What the tensors of all ranks are together, of the whole by the oracle.
type Expected = fn(&[f32]) -> Vec<Quantized>;

const SHAPE: [u64; 2] = [ROWS as u64, COLUMNS as u64];

const FORMS: [(&str, Cast, Expected); 8] = [
    (
        "columns",
        |runtime, stream, ranks, rows| {
            let agreed = Amax::new(runtime)?.local_amax(stream, rows)?.reduce(ranks, stream)?;
            let mut tensor = Nvfp4Tensor::uninitialised(stream, SHAPE, Direction::Columns)?;
            let casts = Nvfp4Columns::<bf16>::new(runtime)?;
            casts.cast_columns_shard(stream, rows, &RandomState::none(stream)?, &agreed, &mut tensor)?;
            Ok(vec![tensor])
        },
        |x| vec![quantize(&transpose(x, COLUMNS), amax(x))],
    ),
    (
        "both",
        |runtime, stream, ranks, rows| {
            // One amax for both directions.
            let agreed = Amax::new(runtime)?.local_amax(stream, rows)?.reduce(ranks, stream)?;
            let mut pair = Nvfp4Pair::uninitialised(stream, SHAPE)?;
            let casts = Nvfp4Columns::<bf16>::new(runtime)?;
            casts.cast_both_shard(stream, rows, &RandomState::none(stream)?, &agreed, &mut pair)?;
            Ok(vec![pair.rows, pair.columns])
        },
        |x| vec![quantize(x, amax(x)), quantize(&transpose(x, COLUMNS), amax(x))],
    ),
    (
        "both, hadamard",
        |runtime, stream, ranks, rows| {
            let agreed = HadamardAmax::new(runtime)?.local_amax(stream, rows, SHAPE)?.reduce(ranks, stream)?;
            let (mut pair, mut tensor) =
                (Nvfp4Pair::uninitialised(stream, SHAPE)?, Nvfp4Tensor::uninitialised(stream, SHAPE, Direction::Columns)?);
            let (casts, none) = (Nvfp4Columns::<bf16, Nearest, true>::new(runtime)?, RandomState::none(stream)?);
            casts.cast_both_shard(stream, rows, &none, &agreed, &mut pair)?;
            casts.cast_columns_shard(stream, rows, &none, &agreed, &mut tensor)?;
            Ok(vec![pair.rows, pair.columns, tensor])
        },
        |x| {
            let turned = hadamard(&transpose(x, COLUMNS));
            let columns = || quantize(&turned, amax(&turned));
            vec![quantize(x, amax(x)), columns(), columns()]
        },
    ),
    (
        "squares",
        |runtime, stream, ranks, rows| {
            let (casts, mut pair) = (Nvfp4Squares::<bf16>::new(runtime)?, Nvfp4Pair::uninitialised(stream, SHAPE)?);
            let agreed = Amax::new(runtime)?.local_amax(stream, rows)?.reduce(ranks, stream)?;
            casts.cast_shard(stream, rows, &agreed, &mut pair)?;
            Ok(vec![pair.rows, pair.columns])
        },
        |x| {
            let (of_squares, nearest) = (squares(x, COLUMNS), |_, x| E2M1.encode(f64::from(x)) as u8);
            let by_rows = quantize_shared(x, &of_squares, amax(x), nearest);
            vec![by_rows, quantize_shared(&transpose(x, COLUMNS), &transpose(&of_squares, COLUMNS), amax(x), nearest)]
        },
    ),
    (
        "four over six, rows",
        |runtime, stream, ranks, rows| four_over_six(runtime, stream, ranks, rows, Direction::Rows),
        |x| vec![FOUR_OVER_SIX.quantize(x, amax(x))],
    ),
    (
        "four over six, columns",
        |runtime, stream, ranks, rows| four_over_six(runtime, stream, ranks, rows, Direction::Columns),
        |x| vec![FOUR_OVER_SIX.quantize(&transpose(x, COLUMNS), amax(x))],
    ),
    (
        "stochastic rows",
        |runtime, stream, ranks, rows| {
            let casts = Nvfp4StochasticRows::<bf16, Stochastic8>::new(runtime)?;
            let agreed = Amax::new(runtime)?.local_amax(stream, rows)?.reduce(ranks, stream)?;
            let mut tensor = Nvfp4Tensor::uninitialised(stream, SHAPE, Direction::Rows)?;
            casts.cast_shard(stream, rows, &RandomState::new(stream, SEED, 0)?, &agreed, &mut tensor)?;
            Ok(vec![tensor])
        },
        // An element draws by its number in the rank's rows.
        |x| {
            let generator = Generator { seed: SEED, offset: 0, bits: 8, columns: false };
            vec![quantize_by(x, amax(x), |i, x| round(x, generator.number(i % (ROWS * COLUMNS))))]
        },
    ),
    (
        "stochastic columns",
        |runtime, stream, ranks, rows| {
            let agreed = Amax::new(runtime)?.local_amax(stream, rows)?.reduce(ranks, stream)?;
            let mut tensor = Nvfp4Tensor::uninitialised(stream, SHAPE, Direction::Columns)?;
            let casts = Nvfp4Columns::<bf16, Stochastic8>::new(runtime)?;
            casts.cast_columns_shard(stream, rows, &RandomState::new(stream, SEED, 0)?, &agreed, &mut tensor)?;
            Ok(vec![tensor])
        },
        // An element draws by its number in the transpose of the rank's rows.
        |x| {
            let (generator, all_rows) = (Generator { seed: SEED, offset: 0, bits: 8, columns: true }, x.len() / COLUMNS);
            let number = |i: usize| i / all_rows * ROWS + i % all_rows % ROWS;
            vec![quantize_by(&transpose(x, COLUMNS), amax(x), |i, x| round(x, generator.number(number(i))))]
        },
    ),
];

const FOUR_OVER_SIX: Rule = Rule::FourOverSix { squared: false, largest_scale: 448.0 };

fn four_over_six(
    runtime: &Runtime,
    stream: &Stream,
    ranks: &InTurn,
    rows: DeviceView<'_, bf16>,
    direction: Direction,
) -> oxtile::Result<Vec<Nvfp4Tensor>> {
    let (casts, mut tensor) = (Nvfp4FourOverSix::<bf16>::new(runtime)?, Nvfp4MappedTensor::uninitialised(stream, SHAPE, direction)?);
    let agreed = Amax::new(runtime)?.local_amax(stream, rows)?.reduce(ranks, stream)?;
    casts.cast_shard(stream, rows, &agreed, &mut tensor)?;
    Ok(vec![tensor.into_plain()?])
}

/// Every rank finds its amaxes, agrees, casts and gathers; what is transposed is joined. The last turn's wholes are the oracle's.
fn in_phases(runtime: &Runtime, ranks: usize, cast: Cast, expected: Expected) -> Outcome {
    let stream = stream(runtime)?;
    let mut values = Scenario::Normal.generate(Dtype::Bf16, ranks * ROWS * COLUMNS, 5);
    // A rank's own amax would not do.
    values.chunks_mut(ROWS * COLUMNS).zip(0..).for_each(|(rows, rank)| rows.iter_mut().for_each(|x| *x *= 2_f32.powi(rank)));
    let (input, expected) = (bf16::upload(&stream, &values)?, expected(&values));
    let (communicators, part) = (InTurn::world(ranks as u32), input.len() / ranks as u64);
    for turn in 0..3 {
        for (rank, communicator) in communicators.iter().enumerate() {
            let rows = input.view().slice(rank as u64 * part, (rank as u64 + 1) * part);
            let tensors = text(cast(runtime, &stream, communicator.begin(), rows))?;
            equal("tensors", &[tensors.len()], &[expected.len()])?;
            for (tensor, expected) in tensors.iter().zip(&expected) {
                let (data, scales) = (whole(runtime, &stream, communicator, &tensor.data, tensor)?, &tensor.scales);
                let scales = codes(&stream, &whole(runtime, &stream, communicator, scales, tensor)?)?;
                if turn == 2 {
                    equal("amax", &text(tensor.amax.to_vec(&stream))?, &[expected.amax])?;
                    equal("scales", &scales, &expected.scales)?;
                    equal("data", &text(data.to_vec(&stream))?.into_iter().map(e2m1x2::to_bits).collect::<Vec<_>>(), &expected.data)?;
                }
            }
        }
    }
    Ok(())
}

/// One of a tensor's two buffers, of all ranks: one after the other, or, transposed, rows side by side.
fn whole<T: Byte + HostElement<Device = T>>(
    runtime: &Runtime,
    stream: &Stream,
    ranks: &InTurn,
    shard: &Buffer<T>,
    tensor: &Nvfp4Tensor,
) -> Result<Buffer<T>, String>
where
    oxtile_kernels::shards::JoinShards<T>: Kernel,
{
    let world = ranks.world().get();
    let mut gathered = text(Buffer::<T>::uninitialised(stream, shard.len() * u64::from(world)))?;
    text(ranks.all_gather(stream, shard, &mut gathered))?;
    if tensor.direction == Direction::Rows {
        return Ok(gathered);
    }
    let mut whole = text(Buffer::<T>::uninitialised(stream, gathered.len()))?;
    let width = (shard.len() / tensor.shape[1]) as u32;
    text(text(JoinShards::<T>::new(runtime))?.run(stream, gathered.view(), [world, width, world * width], whole.view_mut()))?;
    Ok(whole)
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
        let agreed = text(text(text(Amax::new(runtime))?.local_amax(&stream, shard))?.reduce(communicator.begin(), &stream))?;
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
