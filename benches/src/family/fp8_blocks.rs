//! FP8 (E4M3) beside current scaling: by a given scale, in blocks and squares, of shards, and the update of all scales.

use anyhow::Result;
use oxtile::quantize::*;
use oxtile::runtime::Buffer;
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::fp8::*;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_tile::num::{bf16, e4m3};

use super::copy::ceiling;
use super::fp8::FAMILY;
use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// Rows, columns and buffer sets.
type Shape = (u64, u64, usize);

/// What is measured: its name, bytes an element of the tensor, the peer, and what captures it.
type Measured = (&'static str, f64, &'static [&'static str], fn(&Gpu, Shape) -> Result<Prepared>);

const DELAYED: Measured = ("fp8_cast_delayed e4m3", 3.0, &[], prepare_delayed);
/// A scale of 4 bytes for 128 elements.
const ROWS: Measured = ("fp8_cast_row_blocks_alone e4m3", 3.0 + 1.0 / 32.0, &["fp8_cast_row_blocks_compiled"], |gpu, shape| {
    prepare_cast(gpu, shape, ScaleBlock::Row, false)
});
const ROWS_BOTH: Measured =
    ("fp8_cast_row_blocks e4m3, and of the transpose", 4.0 + 2.0 / 32.0, &[], |gpu, shape| prepare_cast(gpu, shape, ScaleBlock::Row, true));
const SQUARES: Measured =
    ("fp8_cast_squares e4m3", 3.0, &["fp8_cast_squares_compiled"], |gpu, shape| prepare_cast(gpu, shape, ScaleBlock::Square, false));
const SQUARES_BOTH: Measured =
    ("fp8_cast_squares e4m3, and of the transpose", 4.0, &[], |gpu, shape| prepare_cast(gpu, shape, ScaleBlock::Square, true));
const DEQUANTIZE: Measured = ("fp8_dequantize_blocks e4m3, rows", 3.0 + 1.0 / 32.0, &[], prepare_dequantize);
/// Half of the matrix.
const SHARD_AMAX: Measured = ("fp8_partial_amax, half", 1.0, &[], |gpu, shape| prepare_shard(gpu, shape, false));
const SHARD_CAST: Measured = ("fp8_partial_cast e4m3, half", 1.5, &[], |gpu, shape| prepare_shard(gpu, shape, true));

const ALL: [Measured; 8] = [DELAYED, ROWS, ROWS_BOTH, SQUARES, SQUARES_BOTH, DEQUANTIZE, SHARD_AMAX, SHARD_CAST];

/// All at a large and a small shape, and the update.
pub fn benches(size: Size) -> Vec<Bench> {
    let shapes: [Shape; 2] = size.pick([(16384, 8192, 4), (4096, 4096, 12)], [(64, 256, 2), (3, 96, 3)]);
    let casts = shapes.into_iter().flat_map(|shape| ALL.map(|measured| bench(size, shape, measured)));
    casts.chain([update(size.pick([1024, 1024], [3, 5]))]).collect()
}

fn bench(size: Size, shape: Shape, (kernel, bytes_an_element, peers, prepare): Measured) -> Bench {
    let (rows, columns, sets) = shape;
    let bytes = (bytes_an_element * (rows * columns) as f64) as u64;
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

fn inputs(gpu: &Gpu, (rows, columns, sets): Shape) -> Result<Vec<Buffer<bf16>>> {
    (0..sets).map(|set| Ok(Buffer::from_slice(&gpu.stream, &gpu.pattern.fill(set, rows * columns))?)).collect()
}

fn bytes_of(name: &'static str, codes: &Buffer<e4m3>, stream: &oxtile::Stream) -> Result<Output> {
    Ok(Output { name, bytes: codes.to_vec(stream)?.iter().map(|code| code.to_bits()).collect() })
}

fn prepare_delayed(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let stream = &gpu.stream;
    let inputs = inputs(gpu, shape)?;
    let (scale, mut amax) = (Buffer::from_slice(stream, &[50.0_f32])?, Buffer::<f32>::zeros(stream, 1)?);
    let empty = |length| Buffer::<f32>::uninitialised(stream, length);
    let sets = inputs.iter().map(|input| Ok((Buffer::<e4m3>::uninitialised(stream, input.len())?, empty(1)?)));
    let mut sets = sets.collect::<Result<Vec<_>>>()?;
    let kernel = gpu.runtime.load::<Fp8CastDelayed<bf16, e4m3>>()?;
    let graph = Prepared::capture(gpu, || {
        inputs.iter().zip(&mut sets).try_for_each(|(input, (data, inverse))| {
            let (data, scale_inverse, amax) = (data.view_mut(), inverse.view_mut(), amax.view_mut());
            kernel.launch(stream, Fp8CastDelayedArgs { input: input.view(), scale: scale.view(), data, scale_inverse, amax })
        })
    })?;
    Ok(Prepared::new(graph, move |stream| Ok(vec![bytes_of("data", &sets[0].0, stream)?])))
}

/// Codes and scales, and of the transpose, empty where it is not wanted.
struct Blocks {
    data: [Buffer<e4m3>; 2],
    inverses: [Buffer<f32>; 2],
}

fn blocks(gpu: &Gpu, (rows, columns, _): Shape, block: ScaleBlock, both: bool) -> Result<Blocks> {
    let (stream, second) = (&gpu.stream, |count: u64| if both { count } else { 0 });
    let scales = |shape| <Fp8BlockFormat>::scale_count::<Compact>(shape, block);
    let data = [Buffer::uninitialised(stream, rows * columns)?, Buffer::uninitialised(stream, second(rows * columns))?];
    let [first, transposed] = [scales([rows, columns])?, second(scales([columns, rows])?)];
    Ok(Blocks { data, inverses: [Buffer::zeros(stream, first)?, Buffer::zeros(stream, transposed)?] })
}

fn cast_blocks(gpu: &Gpu, inputs: &[Buffer<bf16>], sets: &mut [Blocks], shape: Shape, block: ScaleBlock) -> oxtile::Result<()> {
    let (stream, (rows, columns, _)) = (&gpu.stream, shape);
    let by_rows = gpu.runtime.load::<Fp8CastRowBlocks<bf16, e4m3>>()?;
    let rows_alone = gpu.runtime.load::<Fp8CastRowBlocksAlone<bf16, e4m3>>()?;
    let by_squares = gpu.runtime.load::<Fp8CastSquares<bf16, e4m3>>()?;
    inputs.iter().zip(sets).try_for_each(|(input, set)| {
        let Blocks { data: [data, transposed], inverses: [inverses, transposed_inverses] } = set;
        let codes = CodesArgument { data: data.view_mut(), scales: inverses.view_mut() };
        let transposed = CodesArgument { data: transposed.view_mut(), scales: transposed_inverses.view_mut() };
        let transposed = Some(transposed).filter(|transposed| !transposed.data.is_empty());
        let (input, options) = (MatrixArgument::new(input.view(), [rows, columns]), ScaleOptions::default());
        match block {
            ScaleBlock::Row if transposed.is_none() => {
                let CodesArgument { data, scales: scale_inverses } = codes;
                rows_alone.launch(stream, Fp8CastRowBlocksAloneArgs { input, data, scale_inverses, options })
            }
            ScaleBlock::Row => by_rows.launch(stream, Fp8CastRowBlocksArgs { input, codes: Some(codes), transposed, options }),
            ScaleBlock::Square => by_squares.launch(stream, Fp8CastSquaresArgs { input, codes, transposed, options }),
        }
    })
}

fn prepare_cast(gpu: &Gpu, shape: Shape, block: ScaleBlock, both: bool) -> Result<Prepared> {
    let inputs = inputs(gpu, shape)?;
    let mut sets = inputs.iter().map(|_| blocks(gpu, shape, block, both)).collect::<Result<Vec<_>>>()?;
    let graph = Prepared::capture(gpu, || cast_blocks(gpu, &inputs, &mut sets, shape, block))?;
    Ok(Prepared::new(graph, move |stream| Ok(vec![bytes_of("data", &sets[0].data[0], stream)?])))
}

fn prepare_dequantize(gpu: &Gpu, shape: Shape) -> Result<Prepared> {
    let (rows, columns, _) = shape;
    let mut wide = inputs(gpu, shape)?;
    let mut sets = wide.iter().map(|_| blocks(gpu, shape, ScaleBlock::Row, false)).collect::<Result<Vec<_>>>()?;
    cast_blocks(gpu, &wide, &mut sets, shape, ScaleBlock::Row)?;
    let kernel = gpu.runtime.load::<Fp8DequantizeBlocks<e4m3, bf16>>()?;
    let graph = Prepared::capture(gpu, || {
        sets.iter().zip(&mut wide).try_for_each(|(set, output)| {
            let input = MatrixArgument::new(set.data[0].view(), [rows, columns]);
            let inverses = set.inverses[0].view();
            let scales = BlockScalesArgument { inverses, row_shift: 0, row_stride: 1, block_stride: row_of_scales(rows) };
            kernel.launch(&gpu.stream, Fp8DequantizeBlocksArgs { input, scales, output: output.view_mut() })
        })
    })?;
    Ok(Prepared::new(graph, move |stream| {
        let values: Vec<half::bf16> = wide[0].to_vec_as(stream)?;
        Ok(vec![Output { name: "wide", bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect() }])
    }))
}

/// The middle half of the matrix.
fn prepare_shard(gpu: &Gpu, shape: Shape, is_cast: bool) -> Result<Prepared> {
    let ((rows, columns, _), stream) = (shape, &gpu.stream);
    let (start, length) = (rows * columns / 4, rows * columns / 2);
    let inputs = inputs(gpu, shape)?;
    let squares = rows.div_ceil(SIDE) * columns.div_ceil(SIDE);
    let mut amaxes = Buffer::<f32>::zeros(stream, squares)?;
    let set = |_| {
        Ok((
            Buffer::uninitialised(stream, length)?,
            Buffer::zeros(stream, <Fp8BlockFormat>::scale_count::<Compact>([rows, columns], ScaleBlock::Square)?)?,
        ))
    };
    let mut sets: Vec<(Buffer<e4m3>, Buffer<f32>)> = (0..inputs.len()).map(set).collect::<Result<_>>()?;
    let (amax, cast) = (gpu.runtime.load::<Fp8PartialAmax<bf16>>()?, gpu.runtime.load::<Fp8PartialCast<bf16, e4m3>>()?);
    let graph = Prepared::capture(gpu, || {
        inputs.iter().zip(&mut sets).try_for_each(|(input, (data, inverses))| {
            let shard = ShardArgument { values: input.view().slice(start, start + length), start, rows, columns };
            if !is_cast {
                return amax.launch(stream, Fp8PartialAmaxArgs { shard, amaxes: amaxes.view_mut() });
            }
            let (amaxes, data, scale_inverses) = (amaxes.view(), data.view_mut(), inverses.view_mut());
            cast.launch(stream, Fp8PartialCastArgs { shard, amaxes, data, scale_inverses, options: ScaleOptions::default() })
        })
    })?;
    Ok(Prepared::new(graph, move |stream| Ok(vec![bytes_of("data", &sets[0].0, stream)?])))
}

/// The histories of many tensors, rolled at the end of a step: every amax is read and written.
fn update([tensors, length]: [u64; 2]) -> Bench {
    Bench {
        family: FAMILY,
        kernel: "fp8_update_scales",
        shape: format!("{tensors} tensors, {length} steps"),
        dimensions: vec![tensors, length],
        bytes: 8 * tensors * length,
        flops: 0,
        sets: 1,
        ceiling: None,
        peers: &[],
        prepare: Box::new(move |gpu| {
            let stream = &gpu.stream;
            let kernel = gpu.runtime.load::<Fp8UpdateScales>()?;
            let mut history = Buffer::from_slice(stream, &vec![1.0_f32; (tensors * length) as usize])?;
            // Amaxes agreed on: the rows stay in use, however often they are rolled.
            let agreed = Buffer::from_slice(stream, &vec![2.0_f32; tensors as usize])?;
            let (mut scales, mut scale_inverses) = (Buffer::zeros(stream, tensors)?, Buffer::zeros(stream, tensors)?);
            let graph = Prepared::capture(gpu, || {
                let args = Fp8UpdateScalesArgs {
                    history: history.view_mut(),
                    agreed: Some(agreed.view()),
                    scales: scales.view_mut(),
                    scale_inverses: scale_inverses.view_mut(),
                    length,
                    scaled_largest: 448.0,
                    most_recent: false,
                };
                kernel.launch(stream, args)
            })?;
            Ok(Prepared::new(graph, move |stream| {
                let found = scales.to_vec(stream)?;
                Ok(vec![Output { name: "scales", bytes: found.iter().flat_map(|scale| scale.to_le_bytes()).collect() }])
            }))
        }),
    }
}
