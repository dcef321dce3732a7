//! Products of quantized matrices against the f64 product of what the oracles dequantize, on every path that the device has.

use oxtile::gemm::GemmElement;
use oxtile::quantize::gemm::{OperandFormat, Path, QuantizedGemm, QuantizedGemmConfig, QuantizedMatrix};
use oxtile::quantize::*;
use oxtile::{Buffer, Error, HostElement, Kind, Runtime, Stream};
use oxtile_kernels::nvfp4::{Nvfp4GemmFactors, Nvfp4GemmFactorsArgs};
use oxtile_tests::inputs::{Dtype, Random};
use oxtile_tests::oracle::amax::amax;
use oxtile_tests::oracle::formats::{BF16, E4M3};
use oxtile_tests::oracle::gemm::{Problem, gemm};
use oxtile_tests::oracle::{fp8, mxfp8, nvfp4};
use oxtile_tile::num::{Element, Pod, bf16, e4m3};

use super::element::TestElement;
use crate::case::{Case, Outcome, Size, equal, skipped, stream, text};

const FP8: OperandFormat = OperandFormat::Fp8;
const FP8_ROWS: OperandFormat = OperandFormat::Fp8Block(ScaleBlock::Row);
const FP8_SQUARES: OperandFormat = OperandFormat::Fp8Block(ScaleBlock::Square);
const MXFP8: OperandFormat = OperandFormat::Mxfp8(Direction::Rows);
const MXFP8_COLUMNS: OperandFormat = OperandFormat::Mxfp8(Direction::Columns);
const NVFP4: OperandFormat = OperandFormat::Nvfp4(Direction::Rows);
const NVFP4_COLUMNS: OperandFormat = OperandFormat::Nvfp4(Direction::Columns);

/// Formats of both operands.
const PAIRS: [(&str, OperandFormat, OperandFormat); 10] = [
    ("fp8", FP8, FP8),
    ("fp8_rows", FP8_ROWS, FP8_ROWS),
    ("fp8_rows_squares", FP8_ROWS, FP8_SQUARES),
    ("fp8_squares", FP8_SQUARES, FP8_SQUARES),
    ("mxfp8", MXFP8, MXFP8),
    ("mxfp8_columns", MXFP8_COLUMNS, MXFP8_COLUMNS),
    ("mxfp8_rows_columns", MXFP8, MXFP8_COLUMNS),
    ("nvfp4", NVFP4, NVFP4),
    ("nvfp4_columns", NVFP4_COLUMNS, NVFP4_COLUMNS),
    ("fp8_nvfp4", FP8, NVFP4),
];

/// Several blocks of every format, the last of 128 not whole.
const SMALL: [u64; 3] = [32, 48, 160];
/// Aligned, for the path without tensor cores.
const PORTABLE: [u64; 3] = [16, 16, 128];
const LARGE: [u64; 3] = [272, 528, 1088];

/// A result's type and its rounding.
trait Product: Pod + Element + HostElement<Device = Self> {
    const HALF_UNIT: f64;
    fn encode(value: f32) -> Self;
    fn value(self) -> f64;
}

impl Product for bf16 {
    const HALF_UNIT: f64 = 1.0 / 256.0;
    fn encode(value: f32) -> Self {
        Self::from_bits(BF16.encode(value.into()) as u16)
    }
    fn value(self) -> f64 {
        BF16.decode(self.to_bits().into())
    }
}

impl Product for f32 {
    const HALF_UNIT: f64 = 1.0 / (1 << 24) as f64;
    fn encode(value: f32) -> Self {
        value
    }
    fn value(self) -> f64 {
        self.into()
    }
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, a, b) in PAIRS {
        let of = move |shape| QuantizedGemmConfig { a, b, ..QuantizedGemmConfig::new(a, shape) };
        cases.push(Case::new(format!("quantized_gemm::{name}::bf16"), Size::Small, move |r| every_path::<bf16>(r, of(SMALL))));
        let scaled = QuantizedGemmConfig { alpha: 0.5, beta: -2.0, ..of(SMALL) };
        cases.push(Case::new(format!("quantized_gemm::{name}::f32::scaled"), Size::Small, move |r| every_path::<f32>(r, scaled)));
        cases.push(Case::new(format!("quantized_gemm::{name}::large"), Size::Waves, move |r| every_path::<bf16>(r, of(LARGE))));
    }
    for (name, format) in [("fp8", FP8), ("mxfp8", MXFP8), ("mxfp8_columns", MXFP8_COLUMNS)] {
        let odd = QuantizedGemmConfig::new(format, [5, 7, 40]);
        cases.push(Case::new(format!("quantized_gemm::{name}::odd"), Size::Small, move |r| every_path::<f32>(r, odd)));
        let empty = QuantizedGemmConfig { beta: 0.5, ..QuantizedGemmConfig::new(format, [8, 16, 0]) };
        cases.push(Case::new(format!("quantized_gemm::{name}::empty sum"), Size::Small, move |r| every_path::<f32>(r, empty)));
    }
    let portable = QuantizedGemmConfig { alpha: 0.5, beta: -2.0, ..QuantizedGemmConfig::new(MXFP8, PORTABLE) };
    cases.push(Case::new("quantized_gemm::portable", Size::Small, move |r| every_path::<bf16>(r, portable)));
    cases.push(Case::new("quantized_gemm::refused", Size::Small, refused));
    cases.push(Case::new("nvfp4_gemm_factors", Size::Small, factors));
    cases
}

/// The path that is chosen, and each one pinned: it is right, or refused with a reason.
fn every_path<O: Product>(runtime: &Runtime, config: QuantizedGemmConfig) -> Outcome
where
    bf16: GemmElement<O>,
    e4m3: GemmElement<O>,
{
    let (device, stream) = (text(runtime.device(0))?, stream(runtime)?);
    let chosen = text(config.choose::<O>(&device))?;
    // Without tensor cores a product is long on the emulator: `portable` is of few elements.
    let is_short = runtime.kind() == Kind::Cuda || config.m * config.n * config.k <= PORTABLE.iter().product();
    for path in Path::ALL.into_iter().filter(|path| is_short || *path != Path::DequantizePortable) {
        let of_codes = matches!(path, Path::CublasLt | Path::Wgmma);
        for fast_accumulation in [false, true].into_iter().filter(|fast| of_codes || !fast) {
            let pinned = QuantizedGemmConfig { path: Some(path), fast_accumulation, ..config };
            match pinned.choose::<O>(&device) {
                Ok(_) => check::<O>(runtime, &stream, pinned).map_err(|error| format!("{path:?}: {error}"))?,
                Err(error) if path == chosen.decision && !fast_accumulation => return Err(format!("{chosen:?}, but {error}")),
                Err(error) => skipped(&format!("quantized_gemm {path:?} of {} and {}", config.a, config.b), &error),
            }
        }
    }
    Ok(())
}

/// An operand: values that are cast, as they are stored, and the values of the codes, `[outer, k]`.
struct Operand {
    stored: Vec<f32>,
    decoded: Vec<f32>,
}

impl Operand {
    fn random(format: OperandFormat, [outer, k]: [u64; 2], seed: u64) -> Self {
        let (rows, columns, mut random) = (outer as usize, k as usize, Random::new(seed));
        let x: Vec<f32> = (0..rows * columns).map(|_| Dtype::Bf16.round(random.normal())).collect();
        let rule = fp8::Rule { epsilon: 0.0, power_of_two: false, largest: f32::MAX };
        let of_blocks = |block| fp8::dequantize(&fp8::quantize(&x, [rows, columns], block, &E4M3, rule), [rows, columns], block, &E4M3);
        let decoded = match format {
            OperandFormat::Fp8 => of_blocks([rows.max(1), columns.max(1)]),
            OperandFormat::Fp8Block(ScaleBlock::Row) => of_blocks([1, 128]),
            OperandFormat::Fp8Block(ScaleBlock::Square) => of_blocks([128, 128]),
            OperandFormat::Mxfp8(_) => mxfp8::dequantize(&mxfp8::quantize(&x, rows, columns, &E4M3), rows, columns, &E4M3),
            OperandFormat::Nvfp4(_) => nvfp4::dequantize(&nvfp4::quantize(&x, amax(&x))),
        };
        let is_transposed = matches!(format, OperandFormat::Mxfp8(Direction::Columns) | OperandFormat::Nvfp4(Direction::Columns));
        Self { stored: if is_transposed { fp8::transpose(&x, [rows, columns]) } else { x }, decoded }
    }
}

/// A quantized operand on the device.
enum Quantized {
    Fp8(Fp8Tensor),
    Fp8Block(Fp8BlockTensor),
    Mxfp8(Mxfp8Tensor),
    Nvfp4(Nvfp4Tensor),
}

impl Quantized {
    fn cast(runtime: &Runtime, stream: &Stream, format: OperandFormat, [outer, k]: [u64; 2], x: &[f32]) -> Result<Self, String> {
        let input = bf16::upload(stream, x)?;
        let shape = |direction| if direction == Direction::Rows { [outer, k] } else { [k, outer] };
        Ok(match format {
            OperandFormat::Fp8 => {
                let casts = text(CurrentScaling::<bf16>::new(runtime, ScaleOptions::default()))?;
                Self::Fp8(text(casts.quantize(stream, input.view()))?)
            }
            OperandFormat::Fp8Block(block) => {
                let casts = text(BlockScaling::<bf16>::new(runtime, ScaleOptions::default()))?;
                Self::Fp8Block(text(casts.quantize(stream, input.view(), [outer, k], block))?)
            }
            OperandFormat::Mxfp8(direction) => {
                let casts = text(Mxfp8::<bf16>::new(runtime))?;
                Self::Mxfp8(text(casts.quantize(stream, input.view(), shape(direction), direction))?)
            }
            OperandFormat::Nvfp4(Direction::Rows) => {
                Self::Nvfp4(text(text(Nvfp4::<bf16>::new(runtime))?.quantize(stream, input.view(), [outer, k]))?)
            }
            OperandFormat::Nvfp4(direction) => {
                let mut tensor = text(Nvfp4Tensor::uninitialised(stream, shape(direction), direction))?;
                text(text(Amax::new(runtime))?.run(stream, input.view(), &mut tensor.amax))?;
                let casts = text(Nvfp4Columns::<bf16>::new(runtime))?;
                text(casts.cast_columns(stream, input.view(), &text(RandomState::none(stream))?, &mut tensor))?;
                Self::Nvfp4(tensor)
            }
        })
    }

    fn matrix(&self) -> QuantizedMatrix<'_> {
        match self {
            Self::Fp8(tensor) => tensor.into(),
            Self::Fp8Block(tensor) => tensor.into(),
            Self::Mxfp8(tensor) => tensor.into(),
            Self::Nvfp4(tensor) => tensor.into(),
        }
    }
}

fn check<O: Product>(runtime: &Runtime, stream: &Stream, config: QuantizedGemmConfig) -> Outcome
where
    bf16: GemmElement<O>,
    e4m3: GemmElement<O>,
{
    let QuantizedGemmConfig { m, n, k, a, b, alpha, beta, .. } = config;
    let (left, right) = (Operand::random(a, [m, k], 5), Operand::random(b, [n, k], 6));
    let mut random = Random::new(7);
    let old: Vec<O> = (0..m * n).map(|_| O::encode(random.normal())).collect();
    let shape = [m, n, k].map(|size| size as usize);
    let problem = Problem { shape, transposed: [false, true], alpha: alpha.into(), beta: beta.into(), gelu: false };
    let old_values: Vec<f32> = old.iter().map(|x| x.value() as f32).collect();
    let expected = gemm(&problem, &left.decoded, &right.decoded, &old_values, &[]);

    let left = Quantized::cast(runtime, stream, a, [m, k], &left.stored)?;
    let right = Quantized::cast(runtime, stream, b, [n, k], &right.stored)?;
    let mut d = text(Buffer::from_slice(stream, &old))?;
    let product = text(QuantizedGemm::<O>::new(&text(runtime.device(0))?, config))?;
    let mut scratch = text(product.scratch(stream))?;
    let mut bound = text(product.bind(stream, left.matrix(), right.matrix(), d.view_mut(), &mut scratch))?;
    text(bound.run(stream))?;
    drop(bound);
    // Of codes: what the tensor cores lose, at most 2^-12 of the magnitudes an instruction. Else two operands rounded to bf16.
    let by_codes = matches!(config.path, Some(Path::CublasLt | Path::Wgmma));
    let loss = if by_codes { (k / 32 + 1) as f64 / (1 << 12) as f64 } else { 1.0 / 256.0 + (k / 16 + 1) as f64 / (1 << 22) as f64 };
    for (i, found) in text(d.to_vec(stream))?.into_iter().map(O::value).enumerate() {
        let (value, magnitude) = (expected.values[i], expected.magnitudes[i]);
        let bound = magnitude * (loss + 2f64.powi(-20)) + value.abs() * O::HALF_UNIT;
        let error = (found - value).abs();
        if error.is_nan() || error > bound {
            return Err(format!("d[{}, {}] is {found}, expected {value} within {bound}", i as u64 / n, i as u64 % n));
        }
    }
    Ok(())
}

/// Wrong operands, and what a device without the library says.
fn refused(runtime: &Runtime) -> Outcome {
    let (device, stream) = (text(runtime.device(0))?, stream(runtime)?);
    let config = QuantizedGemmConfig::new(FP8, [16, 16, 32]);
    if runtime.kind() == Kind::Emulated {
        let choice = text(config.choose::<f32>(&device))?;
        if choice.decision != Path::Dequantize || !choice.refused[0].1.contains("emulated devices have none") {
            return Err(format!("{choice:?}"));
        }
    } else {
        // A GPU takes the library's path, or the library is what it lacks.
        let choice = text(config.choose::<f32>(&device))?;
        let lacks = choice.refused.iter().any(|(path, why)| *path == Path::CublasLt && why.contains("libcublasLt"));
        eprintln!("quantized_gemm: FP8 by {:?}; refused: {:?}", choice.decision, choice.refused);
        if choice.decision != Path::CublasLt && !lacks {
            return Err(format!("{choice:?}"));
        }
    }
    let product = text(QuantizedGemm::<f32>::new(&device, QuantizedGemmConfig { path: Some(Path::Dequantize), ..config }))?;
    let right = Quantized::cast(runtime, &stream, FP8, [16, 32], &[1.0; 512])?;
    let other = Quantized::cast(runtime, &stream, MXFP8, [16, 32], &[1.0; 512])?;
    let short = Quantized::cast(runtime, &stream, FP8, [15, 32], &[1.0; 480])?;
    let mut d = text(Buffer::<f32>::zeros(&stream, 256))?;
    let rows = QuantizedGemmConfig::new(OperandFormat::Fp8Block(ScaleBlock::Row), [16, 16, 32]);
    let of_blocks = text(QuantizedGemm::<f32>::new(&device, QuantizedGemmConfig { path: Some(Path::Dequantize), ..rows }))?;
    let whole = Quantized::cast(runtime, &stream, rows.a, [16, 32], &[1.0; 512])?;
    let Quantized::Fp8Block(mut cut) = Quantized::cast(runtime, &stream, rows.a, [16, 32], &[1.0; 512])? else {
        return Err("another format".to_owned());
    };
    cut.scales = text(Buffer::zeros(&stream, 1))?;
    match of_blocks.run(&stream, whole.matrix(), (&cut).into(), d.view_mut()) {
        Err(Error::Length { what: "QuantizedGemm, b", found: 1, .. }) => {}
        found => return Err(format!("{found:?}")),
    }
    match product.run(&stream, other.matrix(), right.matrix(), d.view_mut()) {
        Err(error @ Error::Invalid { .. }) if error.to_string().contains("the configuration says Fp8") => {}
        found => return Err(format!("{found:?}")),
    }
    match product.run(&stream, right.matrix(), short.matrix(), d.view_mut()) {
        Err(Error::Length { what: "QuantizedGemm, b", expected: 512, found: 480 }) => Ok(()),
        found => Err(format!("{found:?}")),
    }
}

/// `alpha a b / 2688^2` and `beta`.
fn factors(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let upload = |x: f32| text(Buffer::from_slice(&stream, &[x]));
    let (a, b, mut factors) = (upload(2688.0)?, upload(5376.0)?, text(Buffer::<f32>::zeros(&stream, 2))?);
    let args = Nvfp4GemmFactorsArgs { a_amax: a.view(), b_amax: b.view(), factors: factors.view_mut(), alpha: 0.25, beta: -3.0 };
    text(text(runtime.load::<Nvfp4GemmFactors>())?.launch(&stream, args))?;
    let found = text(factors.to_vec(&stream))?;
    if (found[0] - 0.5).abs() > 1e-6 { Err(format!("{found:?}")) } else { equal("beta", &found[1..], &[-3.0]) }
}
