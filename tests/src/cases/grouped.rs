//! Groups through the library: every member's cast, values and interleaved scales are those of the oracle, bit for bit.

use oxtile::quantize::grouped::*;
use oxtile::quantize::mxfp8::Mxfp8Number;
use oxtile::quantize::nvfp4::Nvfp4Number;
use oxtile::quantize::{Direction, MultiAmax};
use oxtile::{Buffer, Runtime, Stream};
use oxtile_kernels::interleave::ScaleCode;
use oxtile_tests::inputs::{Dtype, Random, Scenario};
use oxtile_tests::oracle::formats::E2M1;
use oxtile_tests::oracle::interleave::interleave;
use oxtile_tests::oracle::{amax::amax, mxfp8, nvfp4};
use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::{bf16, e2m1x2, e4m3, e5m2, f16, ue8m0};

use super::element::{TestElement, comparable_bits, rounded_bits};
use super::mxfp8::TestFp8;
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Whole blocks, ragged ones, whole vectors that are no blocks, more than a CUDA block, and members without elements, one of them the last.
const MIXED: [[usize; 2]; 9] = [[33, 64], [0, 32], [17, 40], [5, 33], [64, 520], [1, 1], [7, 0], [128, 32], [0, 0]];
/// The same of whole blocks of 16.
const SQUARES: [[usize; 2]; 7] = [[48, 80], [0, 32], [144, 32], [16, 16], [32, 400], [16, 0], [0, 0]];

/// Direction and what stands for it in names; nothing stands for both.
const DIRECTIONS: [(Option<Direction>, &str); 3] = [(Some(Direction::Rows), "rows"), (Some(Direction::Columns), "columns"), (None, "both")];

pub fn cases() -> Vec<Case> {
    macro_rules! mxfp8 {
        ($($t:ty, $q:ty;)*) => { [$(of_mxfp8::<$t, $q>()),*] };
    }
    let mxfp8 = mxfp8! { bf16, e4m3; bf16, e5m2; f16, e4m3; f16, e5m2; f32, e4m3; f32, e5m2; };
    let nvfp4 = [of_nvfp4::<bf16>(), of_nvfp4::<f16>(), of_nvfp4::<f32>()];
    mxfp8.into_iter().chain(nvfp4).flatten().collect()
}

/// Shapes by a name: mixed ones, none, and many.
pub(super) fn groups(mixed: &[[usize; 2]], unit: u64) -> [(&'static str, Size, Vec<[usize; 2]>); 3] {
    let mut random = Random::new(8);
    let many = (0..40).map(|_| [random.below(9), random.below(12)].map(|n| (n * unit) as usize));
    [("mixed", Size::Small, mixed.to_vec()), ("none", Size::Small, Vec::new()), ("40", Size::Large, many.collect())]
}

/// A large case on the GPU alone, unless it is of the types whose large cases run on the emulator too.
pub(super) fn on_gpu_unless(on_both: bool, size: Size) -> Size {
    if on_both || size != Size::Large { size } else { Size::Twin }
}

/// A group's values and where they are on the device: every third member off the boundary, if that is asked for.
pub(super) struct Input<T> {
    pub values: Vec<Vec<f32>>,
    buffers: Vec<(Buffer<T>, u64)>,
    shapes: Vec<[usize; 2]>,
}

impl<T: TestElement> Input<T> {
    pub fn new(stream: &Stream, shapes: &[[usize; 2]], shifts: bool) -> Result<Self, String> {
        let (mut values, mut buffers) = (Vec::new(), Vec::new());
        for (i, [rows, columns]) in shapes.iter().enumerate() {
            let of_member = Scenario::ALL[i % Scenario::ALL.len()].generate(T::DTYPE, rows * columns, i as u64);
            let start = if shifts && i % 3 == 2 { 1 } else { 0 };
            buffers.push((T::upload(stream, &[&vec![0.0; start], &of_member[..]].concat())?, start as u64));
            values.push(of_member);
        }
        Ok(Self { values, buffers, shapes: shapes.to_vec() })
    }

    pub fn group(&self, stream: &Stream) -> Result<TensorGroup<'_, T>, String> {
        let members: Vec<(DeviceView<'_, T>, [u64; 2])> = self
            .buffers
            .iter()
            .zip(&self.shapes)
            .map(|((buffer, start), shape)| (buffer.view().slice(*start, buffer.len()), shape.map(|n| n as u64)))
            .collect();
        text(TensorGroup::new(stream, &members))
    }
}

fn of_mxfp8<T: TestElement + Mxfp8Number<Q>, Q: TestFp8>() -> Vec<Case>
where
    Mxfp8Format<Q>: GroupFormat<Code = Q, Scale = ue8m0, Amax = ()>,
{
    let case = |(name, size, shapes): (&str, Size, Vec<[usize; 2]>), (direction, kind): (Option<Direction>, &str)| {
        let on_both = !matches!((T::DTYPE, Q::NAME), (Dtype::F16, "e5m2") | (Dtype::F32, "e4m3"));
        let size = on_gpu_unless(on_both, size);
        let name = format!("grouped::mxfp8::{}::{}::{kind}::{name}", T::DTYPE.name(), Q::NAME);
        Case::new(name, size, move |r| mxfp8::<T, Q>(r, &shapes, direction))
    };
    groups(&MIXED, 8).into_iter().flat_map(|group| DIRECTIONS.map(|direction| case(group.clone(), direction))).collect()
}

fn mxfp8<T: TestElement + Mxfp8Number<Q>, Q: TestFp8>(r: &Runtime, shapes: &[[usize; 2]], direction: Option<Direction>) -> Outcome
where
    Mxfp8Format<Q>: GroupFormat<Code = Q, Scale = ue8m0, Amax = ()>,
{
    let (stream, casts) = (stream(r)?, text(GroupedMxfp8::<T, Q>::new(r))?);
    let input = Input::<T>::new(&stream, shapes, true)?;
    let group = input.group(&stream)?;
    let quantized = match direction {
        Some(direction) => vec![text(casts.quantize(&stream, &group, direction))?],
        None => Vec::from(text(casts.quantize_both(&stream, &group))?),
    };
    for quantized in quantized {
        let restored = text(casts.dequantize(&stream, &quantized))?;
        for (i, [rows, columns]) in shapes.iter().copied().enumerate() {
            let by_rows = quantized.direction() == Direction::Rows;
            let cast = if by_rows { mxfp8::quantize } else { mxfp8::quantize_columns };
            let expected = cast(&input.values[i], rows, columns, Q::FORMAT);
            let (codes, scales) = text(quantized.to_vecs(&stream, i))?;
            equal(&format!("member {i}: scales"), &scales.into_iter().map(ue8m0::to_bits).collect::<Vec<_>>(), &expected.scales)?;
            equal(&format!("member {i}: data"), &codes.into_iter().map(Q::code).collect::<Vec<_>>(), &expected.data)?;
            let back = if by_rows { mxfp8::dequantize } else { mxfp8::dequantize_columns };
            values(&stream, &restored, i, &back(&expected, rows, columns, Q::FORMAT))?;
        }
        let extents =
            |[rows, columns]: [usize; 2], by_rows| if by_rows { [rows, columns.div_ceil(32)] } else { [columns, rows.div_ceil(32)] };
        layouts(r, &stream, quantized, shapes, extents, false)?;
    }
    Ok(())
}

fn of_nvfp4<T: TestElement + Nvfp4Number>() -> Vec<Case> {
    let case = |(name, size, shapes): (&str, Size, Vec<[usize; 2]>), (direction, kind): (Option<Direction>, &str)| {
        let name = format!("grouped::nvfp4::{}::{kind}::{name}", T::DTYPE.name());
        Case::new(name, size, move |r| nvfp4::<T>(r, &shapes, direction))
    };
    groups(&SQUARES, 16).into_iter().flat_map(|group| DIRECTIONS.map(|direction| case(group.clone(), direction))).collect()
}

fn nvfp4<T: TestElement + Nvfp4Number>(r: &Runtime, shapes: &[[usize; 2]], direction: Option<Direction>) -> Outcome {
    let (stream, casts) = (stream(r)?, text(GroupedNvfp4::<T>::new(r))?);
    let alone = oxtile::comm::SingleRank::new(&text(r.device(0))?);
    let input = Input::<T>::new(&stream, shapes, false)?;
    let group = input.group(&stream)?;
    let of_all = text(text(text(MultiAmax::new(r))?.local_amax(&stream, &group))?.reduce(&alone, &stream))?;
    let quantized = match direction {
        Some(direction) => vec![text(casts.quantize(&stream, &group, direction, &of_all))?],
        None => Vec::from(text(casts.quantize_both(&stream, &group, &of_all))?),
    };
    for quantized in quantized {
        let restored = text(casts.dequantize(&stream, &quantized))?;
        for (i, [rows, columns]) in shapes.iter().copied().enumerate() {
            let by_rows = quantized.direction() == Direction::Rows;
            let turned = if by_rows { input.values[i].clone() } else { nvfp4::transpose(&input.values[i], columns) };
            let expected = nvfp4::quantize_by(&turned, amax(&turned), |_, x| E2M1.encode(f64::from(x)) as u8);
            let (codes, scales) = text(quantized.to_vecs(&stream, i))?;
            equal(&format!("member {i}: scales"), &scales.into_iter().map(e4m3::to_bits).collect::<Vec<_>>(), &expected.scales)?;
            equal(&format!("member {i}: data"), &codes.into_iter().map(e2m1x2::to_bits).collect::<Vec<_>>(), &expected.data)?;
            let decoded = nvfp4::dequantize(&expected);
            values(&stream, &restored, i, &if by_rows { decoded } else { nvfp4::transpose(&decoded, rows) })?;
        }
        let extents = |[rows, columns]: [usize; 2], by_rows| if by_rows { [rows, columns / 16] } else { [columns, rows / 16] };
        layouts(r, &stream, quantized, shapes, extents, true)?;
    }
    Ok(())
}

/// The values of a member.
pub(super) fn values<T: TestElement>(stream: &Stream, restored: &Matrices<T>, member: usize, expected: &[f32]) -> Outcome {
    let found: Vec<u32> = text(restored.to_vec(stream, member))?.into_iter().map(comparable_bits::<T>).collect();
    equal(&format!("member {member}: values"), &found, &expected.iter().map(|x| rounded_bits::<T>(*x)).collect::<Vec<_>>())
}

/// The scales there and back. Compact ones are `[outer, blocks]`, or the other way round by columns of what is not transposed.
fn layouts<F: GroupFormat>(
    r: &Runtime,
    stream: &Stream,
    group: Quantized<F>,
    shapes: &[[usize; 2]],
    extents: impl Fn([usize; 2], bool) -> [usize; 2],
    transposed: bool,
) -> Outcome
where
    F::Code: oxtile::HostElement<Device = F::Code>,
    F::Scale: oxtile::HostElement<Device = F::Scale>,
{
    let codes = |scales: Vec<F::Scale>| scales.into_iter().map(ScaleCode::code).collect::<Vec<u8>>();
    let (layouts, by_rows) = (text(InterleaveGroup::<F>::new(r))?, group.direction() == Direction::Rows);
    let before =
        (0..shapes.len()).map(|i| text(group.to_vecs(stream, i)).map(|(_, scales)| codes(scales))).collect::<Result<Vec<_>, _>>()?;
    let there = text(layouts.interleave(stream, group))?;
    for (i, compact) in before.iter().enumerate() {
        let [outer, blocks] = extents(shapes[i], by_rows);
        let expected = interleave(outer, blocks, |o, b| compact[if by_rows || transposed { o * blocks + b } else { b * outer + o }]);
        equal(&format!("member {i}: interleaved"), &codes(text(there.to_vecs(stream, i))?.1), &expected)?;
    }
    let back = text(layouts.compact(stream, there))?;
    for (i, compact) in before.iter().enumerate() {
        equal(&format!("member {i}: compact again"), &codes(text(back.to_vecs(stream, i))?.1), compact)?;
    }
    Ok(())
}
