//! Shards of groups, quantized by their ranks with amaxes that all agreed on and gathered: the cast of the whole by the oracle, bit for bit.
//!
//! On the emulator the ranks are those of a virtual cluster; on one GPU they take turns.

use oxtile::comm::{EmulatedCommunicator, ReduceMax, SingleRank, WorldSize};
use oxtile::quantize::grouped::*;
use oxtile::quantize::{Direction, MultiAmax};
use oxtile::{Buffer, HostElement, Kind, Runtime, Stream};
use oxtile_kernels::interleave::ScaleCode;
use oxtile_tests::inputs::{Dtype, Scenario};
use oxtile_tests::oracle::formats::{E2M1, E4M3};
use oxtile_tests::oracle::{amax::amax, mxfp8, nvfp4};
use oxtile_tile::num::{bf16, e2m1x2, e4m3};

use super::element::TestElement;
use super::in_turn::InTurn;
use crate::case::{Case, Outcome, Size, equal, text};

/// Rows and columns of wholes: shards of several blocks, the last shorter, some empty; rows that are no whole blocks; nothing.
const MXFP8: [[usize; 2]; 5] = [[200, 40], [33, 33], [20, 64], [0, 32], [256, 8]];
/// Shapes of whole blocks.
const NVFP4: [[usize; 2]; 5] = [[144, 48], [16, 32], [80, 16], [0, 32], [256, 16]];

pub fn cases() -> Vec<Case> {
    let case = |format: &str, ranks: u32, direction: Direction, run: fn(&Runtime, u32, Direction) -> Outcome| {
        // More ranks launch the same kernels more often.
        let size = if ranks > 2 { Size::Large } else { Size::Small };
        Case::new(format!("grouped::shards::{format}::{ranks}::{direction:?}"), size, move |r| run(r, ranks, direction))
    };
    let both = |(ranks, direction)| [case("mxfp8", ranks, direction, of_mxfp8), case("nvfp4", ranks, direction, of_nvfp4)];
    let worlds = [1, 2, 3, 4, 8].into_iter().flat_map(|ranks| [(ranks, Direction::Rows), (ranks, Direction::Columns)]);
    worlds.flat_map(both).chain([Case::new("grouped::shards::in_place", Size::Small, in_place)]).collect()
}

/// A gather into buffers of the caller's: they stay where they are, and must be of the shards' kind.
fn in_place(runtime: &Runtime) -> Outcome {
    let device = text(runtime.device(0))?;
    let (alone, stream, shape) = (SingleRank::new(&device), text(device.stream())?, [64, 40]);
    let input = bf16::upload(&stream, &Scenario::Normal.generate(Dtype::Bf16, 64 * 40, 5))?;
    let group = text(TensorGroup::new(&stream, &[(input.view(), shape)]))?;
    let shards = text(text(GroupedMxfp8::<bf16, e4m3>::new(runtime))?.quantize(&stream, &group, Direction::Columns))?;
    let gather = text(GatherShards::<Mxfp8Format>::new(runtime))?;
    let output = |direction| text(Quantized::<Mxfp8Format>::uninitialised(&stream, &[shape], direction, ()));

    let mut whole = output(Direction::Columns)?;
    let places = |whole: &Quantized<Mxfp8Format>| [whole.codes(0).address(), whole.scales(0).address()];
    let before = places(&whole);
    let mut scratch = text(gather.scratch(&alone, &stream, &shards, &[64]))?;
    text(gather.run_into(&alone, &stream, &shards, &mut scratch, &mut whole))?;
    equal("addresses", &places(&whole), &before)?;
    let [found, expected] = [&whole, &shards].map(|group| group.to_vecs(&stream, 0));
    let ((found_codes, found_scales), (codes, scales)) = (text(found)?, text(expected)?);
    equal("codes", &found_codes, &codes)?;
    equal("scales", &found_scales, &scales)?;
    let refused = |result: oxtile::Result<()>, words: &str| match result {
        Err(error) if error.to_string().contains(words) => Ok(()),
        other => Err(format!("expected an error with {words:?}, got {other:?}")),
    };
    let into_rows = gather.run_into(&alone, &stream, &shards, &mut scratch, &mut output(Direction::Rows)?);
    refused(into_rows, "along Rows where shards of [[64, 40]] along Columns are gathered")?;
    let by_rows = text(text(GroupedMxfp8::<bf16, e4m3>::new(runtime))?.quantize(&stream, &group, Direction::Rows))?;
    let of_rows = gather.run_into(&alone, &stream, &by_rows, &mut scratch, &mut whole);
    refused(of_rows, "they are [[64, 40]] along Rows where the scratch is of [[64, 40]] along Columns")?;
    // A shard whose last block of rows is another rank's too.
    refused(gather.run(&alone, &stream, &shards, &[65]).map(drop), "member 0: 64 rows where rank 0 has rows 0..65 of 65: cast those")
}

/// Codes and scales of each member.
type Bytes = Vec<[Vec<u8>; 2]>;

fn wholes(shapes: &[[usize; 2]]) -> Vec<Vec<f32>> {
    // Exponents differ from shard to shard: a rank's own amax would not do.
    let scenarios = [Scenario::Exponents, Scenario::Outlier, Scenario::Normal, Scenario::Zeros, Scenario::Ties];
    shapes.iter().zip(scenarios).map(|([rows, columns], scenario)| scenario.generate(Dtype::Bf16, rows * columns, 5)).collect()
}

fn of_mxfp8(runtime: &Runtime, ranks: u32, direction: Direction) -> Outcome {
    let cast = if direction == Direction::Rows { mxfp8::quantize } else { mxfp8::quantize_columns };
    let whole = |x: &[f32], [rows, columns]: [usize; 2]| {
        let whole = cast(x, rows, columns, &E4M3);
        [whole.data, whole.scales]
    };
    let casts = text(GroupedMxfp8::<bf16, e4m3>::new(runtime))?;
    in_worlds::<Mxfp8Format>(runtime, ranks, &MXFP8, whole, e4m3::to_bits, |stream, shards, _| {
        text(casts.quantize(stream, shards, direction))
    })
}

fn of_nvfp4(runtime: &Runtime, ranks: u32, direction: Direction) -> Outcome {
    let whole = |x: &[f32], [_, columns]: [usize; 2]| {
        let x = if direction == Direction::Rows { x.to_vec() } else { nvfp4::transpose(x, columns) };
        let whole = nvfp4::quantize_by(&x, amax(&x), |_, x| E2M1.encode(f64::from(x)) as u8);
        [whole.data, whole.scales]
    };
    let casts = text(GroupedNvfp4::<bf16>::new(runtime))?;
    in_worlds::<Nvfp4Format>(runtime, ranks, &NVFP4, whole, e2m1x2::to_bits, |stream, shards, ranks| {
        let of_all = text(text(text(MultiAmax::new(runtime))?.local_amax(stream, shards))?.reduce(ranks, stream))?;
        text(casts.quantize(stream, shards, direction, &of_all))
    })
}

/// What ranks agree by.
enum Ranks {
    InTurn(InTurn),
    Many(EmulatedCommunicator),
}

impl ReduceMax for Ranks {
    fn reduce_max(&self, stream: &Stream, slots: &mut Buffer<f32>) -> oxtile::Result<()> {
        match self {
            Self::InTurn(ranks) => ranks.reduce_max(stream, slots),
            Self::Many(ranks) => ranks.reduce_max(stream, slots),
        }
    }
}

/// Every rank quantizes its shards, one after the other in this thread, gathers, and has the whole.
fn in_worlds<F: GroupFormat>(
    runtime: &Runtime,
    ranks: u32,
    shapes: &[[usize; 2]],
    expected: impl Fn(&[f32], [usize; 2]) -> [Vec<u8>; 2],
    code: fn(F::Code) -> u8,
    quantize: impl Fn(&Stream, &TensorGroup<'_, bf16>, &Ranks) -> Result<Quantized<F>, String>,
) -> Outcome
where
    F::Code: HostElement<Device = F::Code>,
    F::Scale: HostElement<Device = F::Scale>,
{
    let on_gpu = runtime.kind() == Kind::Cuda;
    let world = WorldSize::new(ranks).expect("at least one rank");
    let (values, gather) = (wholes(shapes), text(GatherShards::<F>::new(runtime))?);
    let rows: Vec<u64> = shapes.iter().map(|shape| shape[0] as u64).collect();
    let communicators: Vec<_> = if on_gpu {
        InTurn::world(ranks).into_iter().map(Ranks::InTurn).collect()
    } else {
        text(EmulatedCommunicator::world_of(runtime, world))?.into_iter().map(Ranks::Many).collect()
    };
    // Amaxes, then codes, then wholes: ranks that take turns see in one what the others made in the one before.
    let turns = (0..if on_gpu { 3 } else { 1 }).flat_map(|_| communicators.iter().zip(world.ranks()));
    let mut gathered = Vec::new();
    for (communicator, rank) in turns {
        if rank.index() == 0 {
            gathered.clear();
        }
        if let Ranks::InTurn(communicator) = communicator {
            communicator.begin();
        }
        let stream = text(text(runtime.device(rank.index() % runtime.device_count()))?.stream())?;
        let (mut buffers, mut parts) = (Vec::new(), Vec::new());
        for (whole, [rows, columns]) in values.iter().zip(shapes) {
            let range = RowShards::new::<F>(*rows as u64, world).range(rank);
            buffers.push(bf16::upload(&stream, &whole[range.start as usize * columns..range.end as usize * columns])?);
            parts.push([range.end - range.start, *columns as u64]);
        }
        let members: Vec<_> = buffers.iter().map(Buffer::view).zip(parts).collect();
        let shards = quantize(&stream, &text(TensorGroup::new(&stream, &members))?, communicator)?;
        let whole = match communicator {
            Ranks::InTurn(communicator) => gather.run(communicator, &stream, &shards, &rows),
            Ranks::Many(communicator) => gather.run(communicator, &stream, &shards, &rows),
        };
        gathered.push((stream, text(whole)?));
    }
    let expected: Bytes = values.iter().zip(shapes).map(|(whole, shape)| expected(whole, *shape)).collect();
    for (rank, (stream, whole)) in gathered.iter().enumerate() {
        for (i, [data, scales]) in expected.iter().enumerate() {
            let (found_codes, found_scales) = text(whole.to_vecs(stream, i))?;
            let found_scales: Vec<u8> = found_scales.into_iter().map(ScaleCode::code).collect();
            equal(&format!("rank {rank}, member {i}: scales"), &found_scales, scales)?;
            equal(&format!("rank {rank}, member {i}: codes"), &found_codes.into_iter().map(code).collect::<Vec<_>>(), data)?;
        }
    }
    Ok(())
}
