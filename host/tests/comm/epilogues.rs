//! What follows products of ranks: kept inputs of GELU, its gradient, gradients of biases, and results that are added to. All elements against float64.

use std::time::Duration;

use oxtile::comm::WorldSize;
use oxtile::gemm::{Activation, Epilogue};
use oxtile::num::{bf16, e4m3, f16};
use oxtile::overlap::{
    AllGatherConfig, AllGatherGemm, GatherOperands, Gathers, GemmReduceScatter, Global, Method, OverlapConfig, ReduceScatterConfig,
    ScatterMethod, ScatterOperands,
};
use oxtile::symmetric::ArenaOptions;
use oxtile::{Buffer, Graph, Result, Stream};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use crate::arenas::Arenas;
use crate::overlap_calls::Ranks;
use crate::scattered::beside;
use crate::support::seeds;
use crate::whole_product::{Number, Part, Whole, gelu, share, slope};

/// A product over all ranks, and what follows it.
#[derive(Clone, Copy, Debug)]
struct Case {
    ranks: u32,
    sizes: Global,
    gathers: Gathers,
    transpose_a: bool,
    transpose_b: bool,
    beta: f32,
    activation: Activation,
    /// Whether GELU's input is kept.
    keeps: bool,
    is_captured: bool,
    method: Method,
    seed: u64,
}

const ALPHA: f32 = 0.125;

/// What a rank's product writes and reads beside its operands.
struct Beside<T> {
    part: Part,
    bias: Buffer<T>,
    input: Buffer<T>,
    d: Buffer<T>,
    kept: Buffer<T>,
    sums: Buffer<f32>,
}

impl<T: Number> Beside<T> {
    fn new(stream: &Stream, case: &Case, whole: &Whole, part: Part) -> Result<Self> {
        let n = case.sizes.n;
        let of = |matrix: &[f64]| Buffer::<T>::from_slice(stream, &part.of::<T>(matrix, n));
        let bias = Part { rows: 0..1, columns: part.columns.clone() }.of::<T>(&whole.bias, n);
        let kept = if case.keeps { part.len() } else { 0 };
        Ok(Self {
            bias: Buffer::from_slice(stream, &bias)?,
            input: of(&whole.input)?,
            d: if case.beta == 0.0 { Buffer::named(stream, "d", part.len())? } else { of(&whole.old)? },
            kept: Buffer::named(stream, "kept", kept)?,
            sums: Buffer::named(stream, "sums", part.width())?,
            part,
        })
    }

    fn lend(&mut self, case: &Case) -> (Epilogue<'_, T>, DeviceViewMut<'_, T>) {
        let epilogue = Epilogue {
            bias: Some(self.bias.view()),
            kept: case.keeps.then(|| self.kept.view_mut()),
            input: (case.activation == Activation::GeluGradient).then(|| self.input.view()),
            bias_gradient: Some(self.sums.view_mut()),
        };
        (epilogue, self.d.view_mut())
    }

    /// Holds what was written against float64.
    fn check(&self, stream: &Stream, case: &Case, whole: &Whole, rounding: f64) -> Result<()> {
        let numbers = |buffer: &Buffer<T>| -> Result<Vec<f64>> {
            Ok(buffer.to_vec(stream)?.into_iter().map(|value: T| value.to_f32().into()).collect())
        };
        let (d, kept) = (numbers(&self.d)?, numbers(&self.kept)?);
        for (at, place) in self.part.places(case.sizes.n).enumerate() {
            let (found, (x, size)) = (d[at], whole.products[place]);
            let rough = 1.2 * rounding * size + 1e-3;
            let near = |what: &str, found: f64, exact: f64, bound: f64| {
                assert!((found - exact).abs() <= bound, "{case:?}, {:?}, element {at}: {what} is {found}, not {exact}", self.part);
            };
            match case.activation {
                Activation::Identity => near("the result", found, x, rough),
                Activation::Gelu if !case.keeps => near("GELU", found, gelu(x), 1.13 * rough + rounding * gelu(x).abs()),
                Activation::Gelu => {
                    near("what is kept", kept[at], x, rough);
                    let gelu = gelu(kept[at]);
                    near("GELU of what is kept", found, gelu, 2.0 * rounding * gelu.abs() + 1e-5);
                }
                Activation::GeluGradient => {
                    let slope = slope(whole.input[place]);
                    near("the gradient", found, x * slope, rough * slope.abs() + 2.0 * rounding * (x * slope).abs() + 1e-5);
                }
            }
        }
        let width = self.part.width() as usize;
        for (column, found) in self.sums.to_vec(stream)?.into_iter().enumerate() {
            let values = || d.iter().skip(column).step_by(width);
            let (exact, size): (f64, f64) = (values().sum(), values().map(|value| value.abs()).sum());
            let bound = 2f64.powi(-24) * values().count() as f64 * size;
            assert!((f64::from(found) - exact).abs() <= bound, "{case:?}, column {column}: the sum is {found}, not {exact}");
        }
        Ok(())
    }
}

fn options() -> ArenaOptions {
    ArenaOptions { bytes: 4 << 20, deadline: Duration::from_secs(600), ..ArenaOptions::default() }
}

/// Two calls, as each place is taken, by a graph or eagerly; one where a result is added to.
fn call(case: &Case, streams: [&Stream; 2], mut run: impl FnMut() -> Result<()>) -> Result<()> {
    let calls = if case.beta == 0.0 { 2 } else { 1 };
    match case.is_captured {
        true => {
            let graph = Graph::capture(&streams, || (0..calls).try_for_each(|_| run()))?;
            graph.replay(streams[0])
        }
        false => (0..calls).try_for_each(|_| run()),
    }
}

impl Case {
    fn gathered<T: Number + GatherOperands<O>, O: Number>(&self, rounding: f64) -> Result<()> {
        let (Global { m, n, k }, whole) = (self.sizes, Whole::new::<T, O>(self.sizes, 1, [ALPHA, self.beta], self.seed));
        let config = AllGatherConfig {
            gathers: self.gathers,
            transpose_a: self.transpose_a,
            transpose_b: self.transpose_b,
            alpha: ALPHA,
            beta: self.beta,
            activation: self.activation,
            overlap: OverlapConfig { method: Some(self.method), ..OverlapConfig::default() },
            ..AllGatherConfig::new(self.sizes)
        };
        let ranks = Ranks::over(Arenas::with(self.ranks, self.seed, options()), config.bytes::<T, O>()?)?;
        let (mut made, mut operands, mut beside) = (Vec::new(), Vec::new(), Vec::new());
        for (i, rank) in (0..self.ranks as usize).zip(0..) {
            let (stream, columns) = (ranks.all.stream(i), share(n, rank, self.ranks));
            made.push(AllGatherGemm::<T, O>::new(&ranks.memories[i], stream, config)?);
            let [rows, along_k] = match self.gathers {
                Gathers::Rows => [share(m, rank, self.ranks), 0..k],
                _ => [0..m, share(k, rank, self.ranks)],
            };
            let shard = whole.rows::<T>(self.transpose_a, rows, along_k);
            let weight = whole.weight::<T>(self.transpose_b, 0..k, columns.clone());
            operands.push((Buffer::<T>::from_slice(stream, &shard)?, Buffer::<T>::from_slice(stream, &weight)?));
            beside.push(Beside::<O>::new(stream, self, &whole, Part { rows: 0..m, columns })?);
        }
        let mut bound = Vec::new();
        for (i, ((gather, (_, weight)), beside)) in made.iter().zip(&operands).zip(&mut beside).enumerate() {
            let (epilogue, d) = beside.lend(self);
            bound.push(gather.bind_epilogue(ranks.all.stream(i), weight.view(), None, epilogue, d)?);
        }
        for (i, (product, (shard, _))) in bound.iter_mut().zip(&operands).enumerate() {
            let stream = ranks.all.stream(i);
            call(self, [stream, &ranks.out[i]], || product.copy_shard(stream, shard).and_then(|()| product.run(stream)))?;
        }
        drop(bound);
        for (i, beside) in beside.iter().enumerate() {
            ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait()?;
            beside.check(ranks.all.stream(i), self, &whole, rounding)?;
        }
        Ok(())
    }

    /// Whether ranks have whole tiles, which leave as they are computed.
    fn leaves(&self) -> bool {
        self.ranks > 1 && self.sizes.m.is_multiple_of(256 * u64::from(self.ranks))
    }

    fn scattered<T: Number + ScatterOperands<T>>(&self, rounding: f64) -> Result<()> {
        let (Global { m, n, k }, whole) = (self.sizes, Whole::new::<T, T>(self.sizes, self.ranks, [ALPHA, self.beta], self.seed));
        let config = ReduceScatterConfig {
            transpose_b: self.transpose_b,
            alpha: ALPHA,
            beta: self.beta,
            activation: self.activation,
            method: Some(if self.leaves() { ScatterMethod::Whole } else { beside(self.method) }),
            panels: Some(2),
            ..ReduceScatterConfig::new(self.sizes)
        };
        let ranks =
            Ranks::over(Arenas::with(self.ranks, self.seed, options()), config.bytes::<T, T>(WorldSize::new(self.ranks).unwrap())?)?;
        let (mut made, mut operands, mut beside) = (Vec::new(), Vec::new(), Vec::new());
        for (i, rank) in (0..self.ranks as usize).zip(0..) {
            let (stream, along_k) = (ranks.all.stream(i), share(k, rank, self.ranks));
            made.push(GemmReduceScatter::<T, T>::new(&ranks.memories[i], stream, config)?);
            let a = Part { rows: 0..m, columns: along_k.clone() }.of::<T>(&whole.a, k);
            let weight = whole.weight::<T>(self.transpose_b, along_k, 0..n);
            operands.push((Buffer::<T>::from_slice(stream, &a)?, Buffer::<T>::from_slice(stream, &weight)?));
            beside.push(Beside::<T>::new(stream, self, &whole, Part { rows: share(m, rank, self.ranks), columns: 0..n })?);
        }
        let mut bound = Vec::new();
        for (i, ((scatter, (a, weight)), beside)) in made.iter().zip(&operands).zip(&mut beside).enumerate() {
            let (epilogue, d) = beside.lend(self);
            bound.push(scatter.bind_epilogue(ranks.all.stream(i), a.view(), weight.view(), epilogue, d)?);
        }
        for (i, product) in bound.iter_mut().enumerate() {
            let stream = ranks.all.stream(i);
            call(self, [stream, &ranks.out[i]], || product.run(stream))?;
        }
        drop(bound);
        for (i, beside) in beside.iter().enumerate() {
            ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait()?;
            beside.check(ranks.all.stream(i), self, &whole, rounding)?;
        }
        Ok(())
    }
}

const ACTIVATIONS: [Activation; 3] = [Activation::Identity, Activation::Gelu, Activation::GeluGradient];

/// Random shapes, each under a seed of its own, of worlds of 1 to 4: of each activation in turn, and of a result that is added to where nothing is kept.
fn random(seed: u64, methods: &[Method], extent: u64) -> Case {
    let mut state = seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ 0x9E37_79B9;
    let mut below = |limit: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % limit
    };
    let ranks = 1 + (seed % 4) as u32;
    let activation = ACTIVATIONS[(seed / 4 % 3) as usize];
    let sizes = Global { m: 1 + below(extent), n: 8 * (1 + below(4)) * u64::from(ranks), k: 8 * (1 + below(10)) * u64::from(ranks) };
    let keeps = activation == Activation::Gelu && below(3) > 0;
    let beta = if keeps || below(2) == 0 { 0.0 } else { ALPHA };
    let method = if ranks == 1 { Method::Sequential } else { methods[below(methods.len() as u64) as usize] };
    let (gathers, transpose_a, transpose_b, is_captured) = (Gathers::Rows, false, below(2) == 0, below(2) == 0);
    Case { ranks, sizes, gathers, transpose_a, transpose_b, beta, activation, keeps, is_captured, method, seed }
}

#[test]
fn gathered_products_keep_and_take_derivatives() {
    let methods = [Method::Fused, Method::Chunked, Method::Sequential];
    for seed in 0..seeds() {
        let case = random(seed, &methods, 300);
        case.gathered::<bf16, bf16>(1.0 / 256.0).unwrap_or_else(|error| panic!("{case:?}: {error}"));
    }
    for (activation, keeps) in [(Activation::Identity, false), (Activation::Gelu, true), (Activation::GeluGradient, false)] {
        let of = |ranks: u32, method| Case {
            ranks,
            sizes: Global { m: 40, n: 16 * u64::from(ranks), k: 48 },
            activation,
            keeps,
            beta: 0.0,
            method,
            transpose_b: true,
            ..random(1, &methods, 300)
        };
        let of_three = methods.map(|method| of(3, method));
        for case in of_three.into_iter().chain([of(8, Method::Sequential)]) {
            let failed = |error: oxtile::Error| -> () { panic!("{case:?}: {error}") };
            case.gathered::<f16, f16>(1.0 / 2048.0).unwrap_or_else(failed);
            case.gathered::<e4m3, bf16>(1.0 / 256.0).unwrap_or_else(failed);
            // No kernel that waits has results of f32 where rows are gathered.
            if case.method == Method::Sequential {
                case.gathered::<bf16, f32>(1e-6).unwrap_or_else(failed);
            }
        }
        // Of every way in which an operand is gathered and stored, in graphs too.
        for (gathers, transpose_a, is_captured) in
            [(Gathers::Rows, false, true), (Gathers::Rows, true, false), (Gathers::SumOfA, true, true), (Gathers::SumOfA, false, false)]
        {
            let case = Case { gathers, transpose_a, transpose_b: false, is_captured, ..of_three[0] };
            case.gathered::<bf16, bf16>(1.0 / 256.0).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        }
    }
}

#[test]
fn scattered_products_keep_and_take_derivatives_of_whole_sums() {
    let methods = [Method::Fused, Method::Sequential];
    for seed in 0..seeds() {
        let case = random(seed, &methods, 700);
        case.scattered::<bf16>(1.0 / 256.0).unwrap_or_else(|error| panic!("{case:?}: {error}"));
    }
    for (activation, keeps) in [(Activation::Identity, false), (Activation::Gelu, true), (Activation::GeluGradient, false)] {
        for (ranks, m) in [(3, 40), (8, 40), (2, 512)] {
            let sizes = Global { m, n: 24, k: 16 * u64::from(ranks) };
            let case = Case {
                ranks,
                sizes,
                activation,
                keeps,
                beta: if keeps { 0.0 } else { ALPHA },
                method: Method::Fused,
                ..random(1, &methods, 300)
            };
            case.scattered::<f16>(1.0 / 2048.0).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        }
    }
}

/// What follows a product takes its memory when it is bound: no call allocates.
#[test]
fn no_call_allocates() -> Result<()> {
    let sizes = Global { m: 20, n: 16, k: 32 };
    let config = ReduceScatterConfig {
        beta: 1.0,
        activation: Activation::GeluGradient,
        method: Some(ScatterMethod::Fused),
        ..ReduceScatterConfig::new(sizes)
    };
    let ranks = Ranks::new(2, config.bytes::<bf16, bf16>(WorldSize::new(2).unwrap())?, options())?;
    let (mut made, mut lent, mut bound) = (Vec::new(), Vec::new(), Vec::new());
    for i in 0..2 {
        let stream = ranks.all.stream(i);
        made.push(GemmReduceScatter::<bf16, bf16>::new(&ranks.memories[i], stream, config)?);
        let [operand, d] = [20 * 16, 10 * 16].map(|len| Buffer::<bf16>::zeros(stream, len));
        lent.push((operand?, d?, Buffer::<f32>::zeros(stream, 16)?));
    }
    for (i, (scatter, (operand, d, sums))) in made.iter().zip(&mut lent).enumerate() {
        let (a, weight) = (operand.view(), operand.view().slice(0, 16 * 16));
        let epilogue =
            Epilogue { input: Some(operand.view().slice(0, d.len())), bias_gradient: Some(sums.view_mut()), ..Epilogue::default() };
        bound.push(scatter.bind_epilogue(ranks.all.stream(i), a, weight, epilogue, d.view_mut())?);
    }
    let mut call = || bound.iter_mut().enumerate().try_for_each(|(i, product)| product.run(ranks.all.stream(i)));
    call()?;
    let usage = || ranks.all.world.ranks.iter().map(|rank| rank.device().usage()).collect::<Vec<_>>();
    let before = usage();
    (0..20).try_for_each(|_| call())?;
    assert_eq!(usage(), before);
    (0..2).try_for_each(|i| ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait())
}

/// An epilogue that does not fit is refused before anything is enqueued, with what to do; and so is an activation where nothing can be read.
#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let sizes = Global { m: 16, n: 16, k: 16 };
    let gradient = ReduceScatterConfig { activation: Activation::GeluGradient, ..ReduceScatterConfig::new(sizes) };
    let ranks = Ranks::new(1, gradient.bytes::<bf16, bf16>(WorldSize::ONE)?, options())?;
    let stream = ranks.all.stream(0);
    let scatter = GemmReduceScatter::<bf16, bf16>::new(&ranks.memories[0], stream, gradient)?;
    let (operand, mut d) = (Buffer::<bf16>::zeros(stream, 256)?, Buffer::<bf16>::zeros(stream, 256)?);
    let view: DeviceView<'_, bf16> = operand.view();
    let error = scatter.bind(stream, view, view, None, d.view_mut()).unwrap_err().to_string();
    assert!(error.contains("Activation::GeluGradient reads a matrix: bind with an Epilogue that has `input`"), "{error}");
    let short = Epilogue { input: Some(operand.view().slice(0, 255)), ..Epilogue::default() };
    let error = scatter.bind_epilogue(stream, view, view, short, d.view_mut()).unwrap_err().to_string();
    assert!(error.contains("Epilogue::input"), "{error}");
    let reduced = oxtile::overlap::AllReduceConfig { activation: Activation::GeluGradient, ..oxtile::overlap::AllReduceConfig::new(sizes) };
    let error = reduced.choose::<bf16, bf16>(WorldSize::ONE, &oxtile::overlap::Rates::H200).unwrap_err().to_string();
    assert!(error.contains("take Identity, and"), "{error}");
    Ok(())
}

/// A kernel after a product has a grid of so many columns: more are refused by the operation's name, with what to do.
#[test]
fn too_many_columns_are_refused() -> Result<()> {
    let sizes = Global { m: 1, n: 65535 * 32 + 8, k: 8 };
    let scatters = ReduceScatterConfig::new(sizes);
    let gathers = AllGatherConfig::new(sizes);
    let ranks = Ranks::new(1, gathers.bytes::<bf16, bf16>()?.max(scatters.bytes::<bf16, bf16>(WorldSize::ONE)?), options())?;
    let stream = ranks.all.stream(0);
    let mut d = Buffer::<bf16>::uninitialised(stream, sizes.n)?;
    let (mut sums, operand) = (Buffer::<f32>::uninitialised(stream, sizes.n)?, Buffer::<bf16>::uninitialised(stream, 8 * sizes.n)?);
    let refused = |error: oxtile::Error, what: &str| {
        let expected = "n is 2097128, and a kernel after the product takes at most 2097120 columns: cut the product by columns";
        assert_eq!(error.to_string(), format!("{what}: {expected}"));
    };
    let scatter = GemmReduceScatter::<bf16, bf16>::new(&ranks.memories[0], stream, scatters)?;
    let epilogue = Epilogue { bias_gradient: Some(sums.view_mut()), ..Epilogue::default() };
    let (row, weight) = (operand.view().slice(0, 8), operand.view());
    refused(scatter.bind_epilogue(stream, row, weight, epilogue, d.view_mut()).unwrap_err(), "GemmReduceScatter::bind");
    let gather = AllGatherGemm::<bf16, bf16>::new(&ranks.memories[0], stream, gathers)?;
    let epilogue = Epilogue { bias_gradient: Some(sums.view_mut()), ..Epilogue::default() };
    refused(gather.bind_epilogue(stream, weight, None, epilogue, d.view_mut()).unwrap_err(), "AllGatherGemm::bind_epilogue");
    Ok(())
}
