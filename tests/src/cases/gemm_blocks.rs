//! Products of FP8 codes that have a scale for every block, against f64: blocks of 1x128 of `A`, squares of 128x128 of `B`.
//!
//! Padding of the scales' lines is NaN throughout: no result depends on it.

use std::marker::PhantomData;

use oxtile::gemm::{GemmElement, GemmTile};
use oxtile::quantize::gemm::{OperandFormat, Path, QuantizedGemm, QuantizedGemmConfig};
use oxtile::quantize::{Fp8BlockTensor, ScaleBlock};
use oxtile::runtime::{Kind, Loaded};
use oxtile::tensor::{TensorMap, TensorMapMut};
use oxtile::{Buffer, Error, Runtime, Stream};
use oxtile_kernels::gemm::{BlockOperandsArgument, FusionArgument, GemmBlocks, GemmBlocksArgs, ScaledTile, Shape, SplitArgument};
use oxtile_kernels::gemm::{Tile64x128, Tile128x128, TileShape};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::formats::E4M3;
use oxtile_tests::oracle::gemm::{Problem, gemm_wide};
use oxtile_tile::launch::{DeviceViewMut, Kernel};
use oxtile_tile::num::{Element, bf16, e4m3};
use oxtile_tile::register_tile::StoredElement;

use super::gemm::Output;
use crate::case::{Case, Outcome, Size, agrees, equal, stream, text};

const ROWS: OperandFormat = OperandFormat::Fp8Block(ScaleBlock::Row);
const SQUARES: OperandFormat = OperandFormat::Fp8Block(ScaleBlock::Square);
const SIDE: usize = 128;

/// One block and parts of it, edges in every direction, from one to three blocks, and more than the ring has stages.
const SMALL: [[usize; 3]; 5] = [[1, 8, 16], [128, 128, 128], [136, 264, 208], [72, 136, 384], [5, 16, 1424]];

/// Which codes there are.
#[derive(Clone, Copy, PartialEq)]
enum Codes {
    /// Integers from -2 to 2: the tensor cores' sums of a block are exact.
    Integers,
    /// All finite codes.
    Finite,
    /// Positive ones: sums in 14 bits would lose more the longer they are.
    Positive,
}

impl Codes {
    fn random(self, random: &mut Random) -> u8 {
        match self {
            Self::Integers => E4M3.encode(random.below(5) as f64 - 2.0) as u8,
            Self::Finite => (random.below(0x7f) | random.below(2) << 7) as u8,
            Self::Positive => E4M3.encode(1.0 + f64::from(random.unit())) as u8,
        }
    }
}

/// An operand: codes, and scales that are no powers of two.
struct Operand {
    block: ScaleBlock,
    shape: [usize; 2],
    codes: Vec<u8>,
    /// In their lines, padding included.
    scales: Vec<f32>,
}

impl Operand {
    fn random(block: ScaleBlock, shape: [usize; 2], codes: Codes, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let [outer, blocks] = [shape[0], shape[1].div_ceil(SIDE)];
        let [lines, length] = if block == ScaleBlock::Row { [blocks, outer] } else { [outer.div_ceil(SIDE), blocks] };
        let line = length.next_multiple_of(4);
        let scale =
            |i: usize, random: &mut Random| if i % line < length { (1.0 + random.unit()) * 2f32.powi(i as i32 % 7 - 3) } else { f32::NAN };
        let scales = (0..lines * line).map(|i| scale(i, &mut random)).collect();
        Self { block, shape, codes: (0..shape[0] * shape[1]).map(|_| codes.random(&mut random)).collect(), scales }
    }

    /// Where the scale of an element is.
    fn scale_index(&self, row: usize, k: usize) -> usize {
        let [outer, columns] = self.shape;
        match self.block {
            ScaleBlock::Row => k / SIDE * outer.next_multiple_of(4) + row,
            ScaleBlock::Square => row / SIDE * columns.div_ceil(SIDE).next_multiple_of(4) + k / SIDE,
        }
    }

    fn values(&self) -> Vec<f64> {
        let columns = self.shape[1];
        let value =
            |(i, code): (usize, &u8)| E4M3.decode((*code).into()) * f64::from(self.scales[self.scale_index(i / columns, i % columns)]);
        self.codes.iter().enumerate().map(value).collect()
    }

    fn upload(&self, stream: &Stream) -> Result<Fp8BlockTensor, String> {
        let codes: Vec<e4m3> = self.codes.iter().map(|&code| e4m3::from_bits(code)).collect();
        let mut tensor = text(Fp8BlockTensor::uninitialised(stream, self.shape.map(|size| size as u64), self.block))?;
        tensor.data = text(Buffer::from_slice(stream, &codes))?;
        tensor.scales = text(Buffer::from_slice(stream, &self.scales))?;
        Ok(tensor)
    }
}

/// The tile, whole tiles, or all if there are fewer, and parts of the others.
#[derive(Clone, Copy)]
struct Division(GemmTile, [u32; 2]);

const TILES: [GemmTile; 2] = [GemmTile::Tile128x128, GemmTile::Tile64x128];
/// All tiles whole.
const WHOLE: [u32; 2] = [u32::MAX, 1];

/// What is multiplied.
struct Job {
    shape: [usize; 3],
    factors: [f64; 2],
    codes: Codes,
    /// None for the plan that is chosen.
    division: Option<Division>,
    /// Whether a bias and GELU follow, with a given division alone.
    fused: bool,
    change: fn(&mut Operand, &mut Operand),
}

impl Job {
    fn new(shape: [usize; 3], codes: Codes) -> Self {
        Self { shape, factors: [1.0, 0.0], codes, division: None, fused: false, change: |_, _| {} }
    }
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for [m, n, k] in SMALL {
        let name = |element: &str| format!("gemm_blocks::{element}::{m}x{n}x{k}");
        cases.push(Case::new(name("bf16"), Size::Small, move |r| check::<bf16>(r, &Job::new([m, n, k], Codes::Integers))));
        cases.push(Case::new(name("f32"), Size::Small, move |r| check::<f32>(r, &Job::new([m, n, k], Codes::Integers))));
    }
    let mut job = |name: &str, size, job: fn() -> Job| {
        cases.push(Case::new(format!("gemm_blocks::{name}"), size, move |r| check::<f32>(r, &job())));
    };
    job("all codes", Size::Small, || Job { factors: [0.5, -2.0], ..Job::new([72, 136, 400], Codes::Finite) });
    job("no code", Size::Small, || Job { change: zero, ..Job::new([72, 136, 400], Codes::Finite) });
    job("NaN", Size::Small, || Job { change: nan, ..Job::new([72, 136, 400], Codes::Finite) });
    job("ends of the range", Size::Small, || Job { change: ends, ..Job::new([72, 136, 272], Codes::Integers) });
    // Of the GPU alone: the emulator's tensor cores lose nothing. Were the sum of all blocks left to them, it would be wrong by percents.
    job("long sums", Size::Waves, || Job::new([136, 264, 16400], Codes::Positive));
    job("waves", Size::Waves, || Job::new([2056, 2064, 528], Codes::Integers));
    for tile in TILES {
        let mut job = |what: &str, job: fn() -> Job, division: [u32; 2]| {
            cases.push(Case::new(format!("gemm_blocks::{tile:?}::{what}"), Size::Small, move |r| {
                check::<bf16>(r, &Job { division: Some(Division(tile, division)), ..job() })
            }));
        };
        job("edges", || Job::new([136, 264, 208], Codes::Integers), WHOLE);
        // More blocks than the ring has stages.
        job("a row", || Job::new([1, 16, 1424], Codes::Integers), WHOLE);
        job("parts", || Job { factors: [0.5, -2.0], ..Job::new([72, 136, 1040], Codes::Integers) }, [1, 3]);
        job("parts, bias and gelu", || Job { factors: [0.1, 0.3], fused: true, ..Job::new([72, 136, 1040], Codes::Integers) }, [1, 3]);
        cases.push(Case::new(format!("gemm_blocks::{tile:?}::all codes"), Size::Small, move |r| {
            let codes = Job::new([72, 136, 400], Codes::Finite);
            check::<f32>(r, &Job { factors: [0.5, -2.0], division: Some(Division(tile, WHOLE)), ..codes })
        }));
    }
    cases.push(Case::new("gemm_blocks::refused", Size::Small, refused));
    cases
}

/// A block, a square and a whole row have no code, and some of them a scale that would drown the others.
fn zero(a: &mut Operand, b: &mut Operand) {
    for (operand, row, k) in [(&mut *a, 3, 128), (b, 0, 256)] {
        let (index, columns) = (operand.scale_index(row, k), operand.shape[1]);
        let zeros: Vec<usize> = (0..operand.codes.len()).filter(|i| operand.scale_index(i / columns, i % columns) == index).collect();
        zeros.into_iter().for_each(|i| operand.codes[i] = 0);
        operand.scales[index] = 1e30;
    }
    let columns = a.shape[1];
    a.codes[70 * columns..71 * columns].fill(0x80);
}

/// A NaN of either sign makes its row, or column, NaN.
fn nan(a: &mut Operand, b: &mut Operand) {
    (a.codes[3 * a.shape[1] + 130], b.codes[133 * b.shape[1] + 7]) = (0x7f, 0xff);
}

/// Products of scales from 2^-126 to 2^114, so that sums end below 2^128.
fn ends(a: &mut Operand, b: &mut Operand) {
    for (operand, side) in [(a, 1), (b, SIDE)] {
        let [outer, columns] = operand.shape;
        for (row, block) in (0..outer).flat_map(|row| (0..columns.div_ceil(SIDE)).map(move |block| (row, block))) {
            let exponent = if (row / side).is_multiple_of(2) { 56 } else { -63 };
            let index = operand.scale_index(row, block * SIDE);
            operand.scales[index] = (1.0 + block as f32 / 8.0) * 2f32.powi(exponent);
        }
    }
}

fn config(job: &Job) -> QuantizedGemmConfig {
    let [alpha, beta] = job.factors.map(|factor| factor as f32);
    QuantizedGemmConfig {
        b: SQUARES,
        alpha,
        beta,
        path: Some(Path::Wgmma),
        ..QuantizedGemmConfig::new(ROWS, job.shape.map(|size| size as u64))
    }
}

fn multiply<O: Launched>(runtime: &Runtime, job: &Job, [a, b]: [&Operand; 2], [old, bias]: [&[O]; 2]) -> Result<Vec<f64>, String>
where
    bf16: GemmElement<O>,
    e4m3: GemmElement<O>,
{
    let stream = stream(runtime)?;
    let (a, b, mut d) = (a.upload(&stream)?, b.upload(&stream)?, text(Buffer::from_slice(&stream, old))?);
    match job.division {
        None => {
            let product = text(QuantizedGemm::<O>::new(&text(runtime.device(0))?, config(job)))?;
            text(product.run(&stream, (&a).into(), (&b).into(), d.view_mut()))?;
        }
        Some(division) => {
            let bias = text(Buffer::from_slice(&stream, bias))?;
            let launch = Launch { job, division, operands: [&a, &b], bias: job.fused.then_some(&bias) };
            O::launch(runtime, &stream, launch, &mut d)?;
        }
    }
    Ok(text(d.to_vec(&stream))?.into_iter().map(O::value).collect())
}

fn check<O: Launched>(runtime: &Runtime, job: &Job) -> Outcome
where
    bf16: GemmElement<O>,
    e4m3: GemmElement<O>,
{
    let ([m, n, k], [alpha, beta]) = (job.shape, job.factors);
    let mut a = Operand::random(ScaleBlock::Row, [m, k], job.codes, 11);
    let mut b = Operand::random(ScaleBlock::Square, [n, k], job.codes, 12);
    (job.change)(&mut a, &mut b);
    let mut random = Random::new(13);
    let [old, bias] =
        [m * n, if job.fused { n } else { 0 }].map(|count| (0..count).map(|_| O::encode(random.normal())).collect::<Vec<O>>());
    let found = multiply::<O>(runtime, job, [&a, &b], [&old, &bias])?;
    let problem = Problem { shape: job.shape, transposed: [false, true], alpha, beta, gelu: job.fused };
    let [old_values, bias_values] = [&old, &bias].map(|values| values.iter().map(|x| x.value() as f32).collect::<Vec<_>>());
    let expected = gemm_wide(&problem, &a.values(), &b.values(), &old_values, &bias_values);
    // In units of f32's half of a last place, of the sum of all magnitudes: each block rounds the product of its scales and a sum, a part one more sum, and
    // the factors two.
    let blocks = k.div_ceil(SIDE) as f64;
    let sums = (3.0 * blocks + 4.0) * f32::HALF_UNIT;
    // The tensor cores lose at most 2^-12 of the magnitudes an instruction, as of other products of FP8, but of a block alone, which has four.
    // Those of the emulator round to f32.
    let block = match (job.codes, runtime.kind()) {
        (Codes::Integers, _) => 0.0,
        (_, Kind::Emulated) => 4.0 * f32::HALF_UNIT,
        _ => 4.0 / f64::from(1 << 12),
    };
    // GELU is nowhere steeper than 1.13, and is approximated within a few units of f32.
    let (steepness, approximation) = if job.fused { (1.2, 2f64.powi(-21)) } else { (1.0, 0.0) };
    for (i, found) in found.iter().enumerate() {
        let (value, magnitude) = (expected.values[i], expected.magnitudes[i]);
        let bound = steepness * magnitude * (sums + block + approximation) + value.abs() * O::HALF_UNIT;
        if !agrees(*found, value, bound) {
            return Err(format!("d[{}, {}] is {found}, expected {value} within {bound}", i / n, i % n));
        }
    }
    let again = multiply::<O>(runtime, job, [&a, &b], [&old, &bias])?;
    let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    equal("d, again", &bits(&again), &bits(&found))
}

/// A result whose kernels are launched with a given tile and division.
trait Launched: Output + Element {
    fn launch(runtime: &Runtime, stream: &Stream, launch: Launch<'_, Self>, d: &mut Buffer<Self>) -> Outcome;
}

/// What is launched.
struct Launch<'a, O> {
    job: &'a Job,
    division: Division,
    operands: [&'a Fp8BlockTensor; 2],
    bias: Option<&'a Buffer<O>>,
}

macro_rules! launched {
    ($($o:ident $width:literal)*) => { $(
        impl Launched for $o {
            fn launch(runtime: &Runtime, stream: &Stream, launch: Launch<'_, Self>, d: &mut Buffer<Self>) -> Outcome {
                match launch.division.0 {
                    GemmTile::Tile64x128 => launch_tile::<Self, $width, Tile64x128>(runtime, stream, launch, d),
                    _ => launch_tile::<Self, $width, Tile128x128>(runtime, stream, launch, d),
                }
            }
        }
    )* };
}
launched!(bf16 64 f32 32);

fn launch_tile<O: Output + StoredElement, const WIDTH: usize, S: ScaledTile>(
    runtime: &Runtime,
    stream: &Stream,
    Launch { job, division: Division(_, [whole, parts]), operands: [a, b], bias }: Launch<'_, O>,
    d: &mut Buffer<O>,
) -> Outcome
where
    GemmBlocks<O, WIDTH, S>: Kernel,
{
    let ([m, n, k], [alpha, beta]) = (job.shape, job.factors.map(|factor| factor as f32));
    let [columns, blocks] = [n, k].map(|size| size.div_ceil(SIDE) as u64);
    let tiles = m.div_ceil(S::ROWS as usize) as u64 * columns;
    let whole = u64::from(whole).min(tiles);
    let counters = (tiles - whole) * u64::from(Tile128x128::WARPGROUPS);
    let mut sums = text(Buffer::<f32>::uninitialised(stream, counters * u64::from(parts * S::PIECE)))?;
    let mut tickets = text(Buffer::<u32>::zeros(stream, counters))?;
    let result = d.view_mut();
    let access = result.access("old");
    let a_scales = text(TensorMap::new(stream, a.scales.view(), [blocks, m.next_multiple_of(4) as u64]))?;
    let b_scales = text(TensorMap::new(stream, b.scales.view(), [columns, blocks.next_multiple_of(4)]))?;
    let [m, n, k] = [m, n, k].map(|size| size as u64);
    let (a, b) = (text(TensorMap::new(stream, a.data.view(), [m, k]))?, text(TensorMap::new(stream, b.data.view(), [n, k]))?);
    let mut map = text(TensorMapMut::new(stream, result, [m, n]))?;
    let kernel: Loaded<GemmBlocks<O, WIDTH, S>> = text(runtime.load())?;
    let split = counters > 0;
    let args = GemmBlocksArgs {
        operands: BlockOperandsArgument { a: a.view(), b: b.view(), a_scales: a_scales.view(), b_scales: b_scales.view() },
        d: map.view_mut(),
        // SAFETY: the map holds the view of the same memory; the kernel reads an element before it stores it.
        old: unsafe { DeviceViewMut::from_raw(access.address, m * n, access.owner) },
        shape: Shape { m: m as u32, n: n as u32, k: k as u32 },
        fusion: FusionArgument { bias: bias.map(Buffer::view), a_scale: None, b_scale: None, alpha, beta, gelu: job.fused },
        split: SplitArgument {
            whole: whole as u32,
            parts,
            sums: split.then(|| sums.view_mut()),
            tickets: split.then(|| tickets.view_mut()),
        },
        marker: PhantomData,
    };
    text(kernel.launch(stream, args))
}

/// Formats and sizes that the kernel does not take, and scales of another size.
fn refused(runtime: &Runtime) -> Outcome {
    let (device, stream) = (text(runtime.device(0))?, stream(runtime)?);
    let good = config(&Job::new([16, 16, 32], Codes::Integers));
    for (config, why) in [
        (
            QuantizedGemmConfig { a: SQUARES, ..good },
            "FP8 in blocks of 1x128 times FP8 in squares of 128x128, not FP8 in squares of 128x128 and FP8 in squares",
        ),
        (QuantizedGemmConfig { b: ROWS, ..good }, "not FP8 in blocks of 1x128 and FP8 in blocks of 1x128"),
        (QuantizedGemmConfig { k: 40, ..good }, "k is 40, no multiple of 16"),
        (QuantizedGemmConfig { n: 18, ..good }, "n is 18, no multiple of 4"),
        (QuantizedGemmConfig { k: 0, ..good }, "k is 0"),
    ] {
        match config.choose::<f32>(&device) {
            Err(error @ Error::Invalid { .. }) if error.to_string().contains(why) => {}
            other => return Err(format!("{other:?}, not {why}")),
        }
    }
    let product = text(QuantizedGemm::<f32>::new(&device, good))?;
    let [a, b] =
        [(ScaleBlock::Row, 1), (ScaleBlock::Square, 2)].map(|(block, seed)| Operand::random(block, [16, 32], Codes::Integers, seed));
    let (a, mut b, mut d) = (a.upload(&stream)?, b.upload(&stream)?, text(Buffer::<f32>::zeros(&stream, 256))?);
    b.scales = text(Buffer::zeros(&stream, 3))?;
    match product.run(&stream, (&a).into(), (&b).into(), d.view_mut()) {
        Err(Error::Length { what: "QuantizedGemm, b", expected: 4, found: 3 }) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}
