//! Groups of matrices by one launch, beside one matrix of as many elements by the single kernel.

use anyhow::Result;
use oxtile::comm::SingleRank;
use oxtile::quantize::grouped::*;
use oxtile::quantize::{
    Amax, CurrentScaling, Direction, MultiAmax, Mxfp8, Mxfp8Tensor, Nvfp4, Nvfp4Columns, Nvfp4Pair, Nvfp4Tensor, RandomState, ScaleOptions,
};
use oxtile::runtime::{Buffer, Graph};
use oxtile_tile::num::bf16;

use super::copy::ceiling;
use crate::bench::{Bench, Gpu, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "grouped";

/// Buffer sets.
const SETS: usize = 2;

/// Members, rows and columns.
type Shape = [u64; 3];

/// What is measured: its name, quarters of a byte and scales of an element that it moves, and what captures the group and the one matrix.
type Measured = (&'static str, [u64; 2], fn(&Gpu, Shape) -> Result<Graph>, fn(&Gpu, Shape) -> Result<Graph>);

/// Elements of a scale, per format; twice the bytes where both directions are written.
const MEASURED: [Measured; 10] = [
    ("mxfp8_cast_rows", [12, 32], |g, s| mxfp8_group(g, s, Some(Direction::Rows)), |g, s| mxfp8_one(g, s, Some(Direction::Rows))),
    ("mxfp8_cast_columns", [12, 32], |g, s| mxfp8_group(g, s, Some(Direction::Columns)), |g, s| mxfp8_one(g, s, Some(Direction::Columns))),
    ("mxfp8_cast_both", [16, 16], |g, s| mxfp8_group(g, s, None), |g, s| mxfp8_one(g, s, None)),
    ("mxfp8_dequantize_rows", [12, 32], mxfp8_group_back, mxfp8_one_back),
    ("fp8_cast", [12, 1 << 20], fp8_group, fp8_one),
    ("fp8_dequantize", [12, 1 << 20], fp8_group_back, fp8_one_back),
    ("nvfp4_cast_rows", [10, 16], |g, s| nvfp4_group(g, s, Some(Direction::Rows)), |g, s| nvfp4_one(g, s, Some(Direction::Rows))),
    ("nvfp4_cast_columns", [10, 16], |g, s| nvfp4_group(g, s, Some(Direction::Columns)), |g, s| nvfp4_one(g, s, Some(Direction::Columns))),
    ("nvfp4_cast_both", [12, 8], |g, s| nvfp4_group(g, s, None), |g, s| nvfp4_one(g, s, None)),
    ("nvfp4_dequantize_rows", [10, 16], nvfp4_group_back, nvfp4_one_back),
];

/// All of 64 matrices of 4096x1024, and of one of 262144x1024.
pub fn benches(size: Size) -> Vec<Bench> {
    let shape = size.pick([64, 4096, 1024], [5, 64, 128]);
    MEASURED.into_iter().flat_map(|measured| [true, false].map(|is_group| bench(size, shape, is_group, measured))).collect()
}

fn bench(size: Size, shape: Shape, is_group: bool, (kernel, [quarters, scale], group, one): Measured) -> Bench {
    let [members, rows, columns] = shape;
    let elements = members * rows * columns;
    let bytes = elements * quarters / 4 + elements / scale;
    let whole = if is_group { format!("{members} x {rows}x{columns} bf16") } else { format!("{}x{columns} bf16", members * rows) };
    Bench {
        family: FAMILY,
        kernel,
        shape: whole,
        dimensions: vec![members, rows, columns],
        bytes,
        flops: 0,
        sets: SETS,
        ceiling: ceiling(size, bytes),
        peers: &[],
        prepare: Box::new(move |gpu| Ok(Prepared::new(if is_group { group(gpu, shape) } else { one(gpu, shape) }?, |_| Ok(Vec::new())))),
    }
}

/// The members of each set, which are parts of one buffer.
fn wide(gpu: &Gpu, [members, rows, columns]: Shape) -> Result<Vec<Buffer<bf16>>> {
    (0..SETS).map(|set| Ok(Buffer::from_slice(&gpu.stream, &gpu.pattern.fill(set, members * rows * columns))?)).collect()
}

fn groups<'a>(gpu: &Gpu, wide: &'a [Buffer<bf16>], [members, rows, columns]: Shape) -> Result<Vec<TensorGroup<'a, bf16>>> {
    let part = |buffer: &'a Buffer<bf16>, i: u64| (buffer.view().slice(i * rows * columns, (i + 1) * rows * columns), [rows, columns]);
    let group = |buffer| Ok(TensorGroup::new(&gpu.stream, &(0..members).map(|i| part(buffer, i)).collect::<Vec<_>>())?);
    wide.iter().map(group).collect()
}

fn mxfp8_group(gpu: &Gpu, shape: Shape, direction: Option<Direction>) -> Result<Graph> {
    let (wide, casts) = (wide(gpu, shape)?, GroupedMxfp8::<bf16>::new(&gpu.runtime)?);
    let groups = groups(gpu, &wide, shape)?;
    let mut pairs = groups.iter().map(|group| Ok(casts.quantize_both(&gpu.stream, group)?)).collect::<Result<Vec<_>>>()?;
    Prepared::capture(gpu, || {
        groups.iter().zip(&mut pairs).try_for_each(|(group, pair)| match direction {
            Some(direction) => casts.quantize_into(&gpu.stream, group, &mut pair[usize::from(direction == Direction::Columns)]),
            None => casts.quantize_both_into(&gpu.stream, group, pair),
        })
    })
}

fn mxfp8_one(gpu: &Gpu, shape: Shape, direction: Option<Direction>) -> Result<Graph> {
    let (stream, wide, casts) = (&gpu.stream, wide(gpu, shape)?, Mxfp8::<bf16>::new(&gpu.runtime)?);
    let shape = [shape[0] * shape[1], shape[2]];
    let mut pairs = wide.iter().map(|wide| Ok(casts.quantize_both(stream, wide.view(), shape)?)).collect::<Result<Vec<_>>>()?;
    Prepared::capture(gpu, || {
        wide.iter().zip(&mut pairs).try_for_each(|(wide, pair)| {
            let Mxfp8Tensor { data: row_data, scales: row_scales, .. } = &mut pair.rows;
            let Mxfp8Tensor { data, scales, .. } = &mut pair.columns;
            match direction {
                Some(Direction::Rows) => casts.quantize_rows(stream, wide.view(), shape, row_data.view_mut(), row_scales.view_mut()),
                Some(Direction::Columns) => casts.quantize_columns(stream, wide.view(), shape, data.view_mut(), scales.view_mut()),
                None => casts.quantize_both_into(stream, wide.view(), pair),
            }
        })
    })
}

fn mxfp8_group_back(gpu: &Gpu, shape: Shape) -> Result<Graph> {
    let (wide, casts) = (wide(gpu, shape)?, GroupedMxfp8::<bf16>::new(&gpu.runtime)?);
    let shapes = vec![[shape[1], shape[2]]; shape[0] as usize];
    let mut sets = Vec::new();
    for group in groups(gpu, &wide, shape)? {
        sets.push((casts.quantize(&gpu.stream, &group, Direction::Rows)?, Matrices::uninitialised(&gpu.stream, &shapes)?));
    }
    Prepared::capture(gpu, || sets.iter_mut().try_for_each(|(group, output)| casts.dequantize_into(&gpu.stream, group, output)))
}

fn mxfp8_one_back(gpu: &Gpu, shape: Shape) -> Result<Graph> {
    let (stream, wide, casts) = (&gpu.stream, wide(gpu, shape)?, Mxfp8::<bf16>::new(&gpu.runtime)?);
    let mut sets = Vec::new();
    for wide in wide {
        sets.push((casts.quantize(stream, wide.view(), [shape[0] * shape[1], shape[2]], Direction::Rows)?, wide));
    }
    Prepared::capture(gpu, || sets.iter_mut().try_for_each(|(tensor, output)| casts.dequantize(stream, tensor, output.view_mut())))
}

fn fp8_group(gpu: &Gpu, shape: Shape) -> Result<Graph> {
    let (wide, casts) = (wide(gpu, shape)?, GroupedFp8::<bf16>::new(&gpu.runtime, ScaleOptions::default())?);
    let groups = groups(gpu, &wide, shape)?;
    let mut sets = Vec::new();
    for group in &groups {
        let amax =
            MultiAmax::new(&gpu.runtime)?.local_amax(&gpu.stream, group)?.reduce(&SingleRank::new(&gpu.stream.device()), &gpu.stream)?;
        sets.push((casts.quantize(&gpu.stream, group, &amax)?, amax));
    }
    Prepared::capture(gpu, || {
        let mut sets = groups.iter().zip(&mut sets);
        sets.try_for_each(|(group, (output, amax))| casts.quantize_into(&gpu.stream, group, amax, output))
    })
}

fn fp8_one(gpu: &Gpu, shape: Shape) -> Result<Graph> {
    let (stream, wide, casts) = (&gpu.stream, wide(gpu, shape)?, CurrentScaling::<bf16>::new(&gpu.runtime, ScaleOptions::default())?);
    let mut sets = Vec::new();
    for wide in &wide {
        let mut amax = Buffer::<f32>::uninitialised(stream, 1)?;
        Amax::new(&gpu.runtime)?.run(stream, wide.view(), &mut amax)?;
        sets.push((casts.quantize(stream, wide.view())?, amax));
    }
    Prepared::capture(gpu, || {
        wide.iter().zip(&mut sets).try_for_each(|(wide, (output, amax))| {
            casts.cast(stream, wide.view(), amax.view(), output.data.view_mut(), output.scales.view_mut())
        })
    })
}

fn fp8_group_back(gpu: &Gpu, shape: Shape) -> Result<Graph> {
    let (wide, casts) = (wide(gpu, shape)?, GroupedFp8::<bf16>::new(&gpu.runtime, ScaleOptions::default())?);
    let shapes = vec![[shape[1], shape[2]]; shape[0] as usize];
    let mut sets = Vec::new();
    for group in groups(gpu, &wide, shape)? {
        let amax =
            MultiAmax::new(&gpu.runtime)?.local_amax(&gpu.stream, &group)?.reduce(&SingleRank::new(&gpu.stream.device()), &gpu.stream)?;
        sets.push((casts.quantize(&gpu.stream, &group, &amax)?, Matrices::uninitialised(&gpu.stream, &shapes)?));
    }
    Prepared::capture(gpu, || sets.iter_mut().try_for_each(|(group, output)| casts.dequantize_into(&gpu.stream, group, output)))
}

fn fp8_one_back(gpu: &Gpu, shape: Shape) -> Result<Graph> {
    let (stream, wide, casts) = (&gpu.stream, wide(gpu, shape)?, CurrentScaling::<bf16>::new(&gpu.runtime, ScaleOptions::default())?);
    let mut sets = Vec::new();
    for wide in wide {
        sets.push((casts.quantize(stream, wide.view())?, wide));
    }
    Prepared::capture(gpu, || sets.iter_mut().try_for_each(|(tensor, output)| casts.dequantize(stream, tensor, output.view_mut())))
}

/// The amaxes of each group, and its casts.
type Nvfp4Casts = Vec<[Quantized<Nvfp4Format>; 2]>;

fn nvfp4_casts(gpu: &Gpu, casts: &GroupedNvfp4<bf16>, groups: &[TensorGroup<'_, bf16>]) -> Result<Nvfp4Casts> {
    let alone = SingleRank::new(&gpu.stream.device());
    let both = |group| {
        let amax = MultiAmax::new(&gpu.runtime)?.local_amax(&gpu.stream, group)?.reduce(&alone, &gpu.stream)?;
        Ok(casts.quantize_both(&gpu.stream, group, &amax)?)
    };
    groups.iter().map(both).collect()
}

fn nvfp4_group(gpu: &Gpu, shape: Shape, direction: Option<Direction>) -> Result<Graph> {
    let (wide, casts) = (wide(gpu, shape)?, GroupedNvfp4::<bf16>::new(&gpu.runtime)?);
    let groups = groups(gpu, &wide, shape)?;
    let mut pairs = nvfp4_casts(gpu, &casts, &groups)?;
    Prepared::capture(gpu, || {
        groups.iter().zip(&mut pairs).try_for_each(|(group, pair)| match direction {
            Some(direction) => casts.quantize_into(&gpu.stream, group, &mut pair[usize::from(direction == Direction::Columns)]),
            None => casts.quantize_both_into(&gpu.stream, group, pair),
        })
    })
}

fn nvfp4_one(gpu: &Gpu, shape: Shape, direction: Option<Direction>) -> Result<Graph> {
    let (stream, wide, random) = (&gpu.stream, wide(gpu, shape)?, RandomState::none(&gpu.stream)?);
    let (rows, columns) = (Nvfp4::<bf16>::new(&gpu.runtime)?, Nvfp4Columns::<bf16>::new(&gpu.runtime)?);
    let shape = [shape[0] * shape[1], shape[2]];
    let mut pairs = Vec::new();
    for wide in &wide {
        let mut pair = Nvfp4Pair::uninitialised(stream, shape)?;
        Amax::new(&gpu.runtime)?.run(stream, wide.view(), &mut pair.rows.amax)?;
        Amax::new(&gpu.runtime)?.run(stream, wide.view(), &mut pair.columns.amax)?;
        pairs.push(pair);
    }
    Prepared::capture(gpu, || {
        wide.iter().zip(&mut pairs).try_for_each(|(wide, pair)| match direction {
            Some(Direction::Rows) => {
                let Nvfp4Tensor { data, scales, amax, .. } = &mut pair.rows;
                rows.quantize_rows(stream, wide.view(), shape, amax.view(), data.view_mut(), scales.view_mut())
            }
            Some(Direction::Columns) => columns.cast_columns(stream, wide.view(), &random, &mut pair.columns),
            None => columns.cast_both(stream, wide.view(), &random, pair),
        })
    })
}

fn nvfp4_group_back(gpu: &Gpu, shape: Shape) -> Result<Graph> {
    let (wide, casts) = (wide(gpu, shape)?, GroupedNvfp4::<bf16>::new(&gpu.runtime)?);
    let shapes = vec![[shape[1], shape[2]]; shape[0] as usize];
    let groups = groups(gpu, &wide, shape)?;
    let mut sets = Vec::new();
    for [by_rows, _] in nvfp4_casts(gpu, &casts, &groups)? {
        sets.push((by_rows, Matrices::uninitialised(&gpu.stream, &shapes)?));
    }
    Prepared::capture(gpu, || sets.iter_mut().try_for_each(|(group, output)| casts.dequantize_into(&gpu.stream, group, output)))
}

fn nvfp4_one_back(gpu: &Gpu, shape: Shape) -> Result<Graph> {
    let (stream, wide, casts) = (&gpu.stream, wide(gpu, shape)?, Nvfp4::<bf16>::new(&gpu.runtime)?);
    let mut sets = Vec::new();
    for wide in wide {
        sets.push((casts.quantize(stream, wide.view(), [shape[0] * shape[1], shape[2]])?, wide));
    }
    Prepared::capture(gpu, || sets.iter_mut().try_for_each(|(tensor, output)| casts.dequantize(stream, tensor, output.view_mut())))
}
