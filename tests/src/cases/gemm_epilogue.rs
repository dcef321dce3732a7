//! What a product keeps and reads beside its result: the input of GELU, its gradient, and the gradient of a bias; all elements against f64.

use oxtile::gemm::{Activation, Epilogue, Gemm, GemmConfig, GemmOperands};
use oxtile::{Buffer, Runtime, Stream};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::activation::Activation as Formula;
use oxtile_tile::num::{bf16, e4m3, f16};

use super::gemm::{Operand, Output};
use crate::case::{Case, Outcome, Size, agrees, equal, stream, text};

/// One block and parts of it, three blocks of rows, no whole vectors, of more columns than a warp has lanes too, more columns than a block has, and no rows.
const SMALL: [[u64; 3]; 6] = [[8, 8, 16], [300, 40, 32], [33, 17, 8], [33, 77, 8], [33, 264, 8], [0, 24, 16]];
const LARGE: [u64; 3] = [1000, 1032, 64];

pub fn cases() -> Vec<Case> {
    let mut cases = vec![Case::new("gemm_epilogue::refused", Size::Small, refused)];
    of_elements::<bf16, bf16>(&mut cases, "bf16", false);
    of_elements::<bf16, f32>(&mut cases, "bf16_f32", false);
    of_elements::<f16, f16>(&mut cases, "f16", false);
    of_elements::<e4m3, bf16>(&mut cases, "e4m3", true);
    cases
}

fn of_elements<T: Operand + GemmOperands<O, A = T, B = T>, O: Output>(cases: &mut Vec<Case>, name: &str, transpose_b: bool) {
    for shape in SMALL.into_iter().chain([LARGE]) {
        let [m, n, k] = shape;
        let size = if shape == LARGE { Size::Large } else { Size::Small };
        cases.push(Case::new(format!("gemm_epilogue::{name}::{m}x{n}x{k}"), size, move |runtime| {
            run::<T, O>(runtime, GemmConfig { m, n, k, transpose_b, alpha: 0.5, ..GemmConfig::default() })
        }));
    }
}

/// What is multiplied, and what is read beside it.
struct Values<T, O> {
    a: Buffer<T>,
    b: Buffer<T>,
    bias: Buffer<O>,
    input: Buffer<O>,
    old: Vec<O>,
}

impl<T: Operand, O: Output> Values<T, O> {
    fn new(stream: &Stream, GemmConfig { m, n, k, .. }: GemmConfig) -> oxtile::Result<Self> {
        let mut random = Random::new(m + n + k);
        let operand = |random: &mut Random, len: u64| {
            let values: Vec<T> = (0..len).map(|_| T::encode(random.normal() * 0.5)).collect();
            Buffer::from_slice(stream, &values)
        };
        let (a, b) = (operand(&mut random, m * k)?, operand(&mut random, n * k)?);
        let mut results = |len: u64| -> Vec<O> { (0..len).map(|_| O::encode(random.normal())).collect() };
        let (bias, input, old) = (results(n), results(m * n), results(m * n));
        Ok(Self { a, b, bias: Buffer::from_slice(stream, &bias)?, input: Buffer::from_slice(stream, &input)?, old })
    }
}

/// What a product leaves: the result, what it keeps, and the sums of columns.
struct Left<O> {
    d: Vec<O>,
    kept: Vec<O>,
    sums: Vec<f32>,
}

/// Multiplies, with everything that the activation takes beside the product.
fn multiply<T: Operand + GemmOperands<O, A = T, B = T>, O: Output>(
    runtime: &Runtime,
    stream: &Stream,
    config: GemmConfig,
    values: &Values<T, O>,
) -> oxtile::Result<Left<O>> {
    let GemmConfig { m, n, activation, beta, .. } = config;
    let mut d = if beta == 0.0 { Buffer::named(stream, "d", m * n)? } else { Buffer::from_slice(stream, &values.old)? };
    let keeps = activation == Activation::Gelu;
    let mut kept = Buffer::named(stream, "kept", if keeps { m * n } else { 0 })?;
    let mut sums = Buffer::named(stream, "sums", n)?;
    let epilogue = Epilogue {
        bias: Some(values.bias.view()),
        kept: keeps.then(|| kept.view_mut()),
        input: (activation == Activation::GeluGradient).then(|| values.input.view()),
        bias_gradient: Some(sums.view_mut()),
    };
    let gemm = Gemm::<T, O>::new(runtime, config)?;
    let mut bound = gemm.bind_epilogue(stream, (values.a.view(), values.b.view()), None, epilogue, d.view_mut())?;
    bound.run(stream)?;
    drop(bound);
    Ok(Left { d: d.to_vec(stream)?, kept: kept.to_vec(stream)?, sums: sums.to_vec(stream)? })
}

fn run<T: Operand + GemmOperands<O, A = T, B = T>, O: Output>(runtime: &Runtime, config: GemmConfig) -> Outcome {
    let stream = stream(runtime)?;
    let values = text(Values::<T, O>::new(&stream, config))?;
    let product = |config| text(multiply::<T, O>(runtime, &stream, config, &values));
    let number = |value: &O| value.value();

    let linear = product(config)?;
    check_sums("linear", config, &linear)?;

    let kept = product(GemmConfig { activation: Activation::Gelu, ..config })?;
    equal("kept", &bits(&kept.kept), &bits(&linear.d))?;
    let gelu = |at: usize| Formula::Gelu.value(kept.kept[at].value());
    check::<O>("GELU", &kept.d, gelu, |_| 1.0)?;
    check_sums("GELU", config, &kept)?;

    let input = text(values.input.to_vec(&stream))?;
    // Onto what the result was, too.
    for beta in [0.0, -2.0] {
        let config = GemmConfig { beta, ..config };
        let product_alone = if beta == 0.0 { &linear } else { &product(config)? };
        let gradient = product(GemmConfig { activation: Activation::GeluGradient, ..config })?;
        let exact = |at: usize| number(&product_alone.d[at]) * Formula::Gelu.slope(input[at].value());
        check::<O>("gradient", &gradient.d, exact, |at| product_alone.d[at].value().abs())?;
        check_sums("gradient", config, &gradient)?;
    }
    Ok(())
}

fn bits<O: Output>(values: &[O]) -> Vec<u64> {
    values.iter().map(|value| value.value().to_bits()).collect()
}

/// Rounded once, of functions by approximate instructions: `size` is what their error grows with.
fn check<O: Output>(what: &str, found: &[O], exact: impl Fn(usize) -> f64, size: impl Fn(usize) -> f64) -> Outcome {
    for (at, found) in found.iter().enumerate() {
        let (found, exact) = (found.value(), exact(at));
        let bound = 2.0 * O::HALF_UNIT * exact.abs() + 2e-6 * size(at).max(1.0);
        if !agrees(found, exact, bound) {
            return Err(format!("{what}[{at}] is {found}, expected {exact} within {bound}"));
        }
    }
    Ok(())
}

/// The sums of the columns of what was stored, each of at most as many roundings as rows.
fn check_sums<O: Output>(what: &str, GemmConfig { m, n, .. }: GemmConfig, Left { d, sums, .. }: &Left<O>) -> Outcome {
    for (column, found) in sums.iter().enumerate() {
        let values = || d.iter().skip(column).step_by(n as usize).map(|value| value.value());
        let (exact, size): (f64, f64) = (values().sum(), values().map(f64::abs).sum());
        let bound = m as f64 * 2f64.powi(-24) * size;
        if !agrees(f64::from(*found), exact, bound) {
            return Err(format!("{what}: the sum of column {column} is {found}, expected {exact} within {bound}"));
        }
    }
    Ok(())
}

/// What does not fit the configuration is refused, with what to do.
fn refused(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let config = GemmConfig { m: 8, n: 8, k: 8, ..GemmConfig::default() };
    let values = text(Values::<bf16, bf16>::new(&stream, config))?;
    let refusal = |config: GemmConfig, keeps: bool, reads: bool, sums: u64| -> Result<String, String> {
        let gemm = text(Gemm::<bf16, bf16>::new(runtime, config))?;
        let [mut kept, mut d] = [text(Buffer::zeros(&stream, 64))?, text(Buffer::zeros(&stream, 64))?];
        let mut sums = text(Buffer::zeros(&stream, sums))?;
        let epilogue = Epilogue {
            bias: None,
            kept: keeps.then(|| kept.view_mut()),
            input: reads.then(|| values.input.view()),
            bias_gradient: Some(sums.view_mut()),
        };
        match gemm.bind_epilogue(&stream, (values.a.view(), values.b.view()), None, epilogue, d.view_mut()) {
            Err(error) => Ok(error.to_string()),
            Ok(_) => Err(format!("{config:?} is not refused")),
        }
    };
    let gelu = GemmConfig { activation: Activation::Gelu, ..config };
    let gradient = GemmConfig { activation: Activation::GeluGradient, ..config };
    let expected = [
        (refusal(config, true, false, 8)?, "the input of Identity is not kept: take Activation::Gelu, or no Epilogue::kept"),
        (refusal(GemmConfig { beta: 1.0, ..gelu }, true, false, 8)?, "beta is 1: it is 0 where the input of GELU is kept"),
        (refusal(gradient, false, false, 8)?, "Activation::GeluGradient reads a matrix: bind with an Epilogue that has `input`"),
        (refusal(gelu, false, true, 8)?, "Gelu reads no matrix: take Activation::GeluGradient, or no Epilogue::input"),
        (refusal(config, false, false, 9)?, "Epilogue::bias_gradient"),
    ];
    match expected.iter().find(|(found, part)| !found.contains(part)) {
        Some((found, part)) => Err(format!("{found:?} does not have {part:?}")),
        None => Ok(()),
    }
}
