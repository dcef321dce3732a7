//! Matrix multiplication against f64: bit for bit where every sum is exact, within a bound elsewhere.

use oxtile::gemm::{Activation, Gemm, GemmConfig, GemmKernel, GemmOperands, GemmPlan, GemmTile};
use oxtile::{Buffer, Error, HostElement, Runtime, Stream};
use oxtile_kernels::gemm::{FusionArgument, GemmAny, GemmAnyArgs, OperandArgument, Shape};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::formats::{BF16, E4M3, E5M2, F16};
use oxtile_tests::oracle::gemm::{Problem, Product, gemm};
use oxtile_tile::num::{Pod, bf16, e4m3, e5m2, f16};

use super::attention_limits::refuses;
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// One tile and parts of it, edges in every direction, several tiles for each block.
const SMALL: [[usize; 3]; 5] = [[8, 8, 16], [128, 256, 64], [136, 264, 80], [1, 16, 208], [200, 304, 144]];
const LARGE: [[usize; 3]; 1] = [[264, 1032, 528]];
/// More tiles than a GPU has multiprocessors.
const WAVES: [usize; 3] = [2056, 2064, 72];

/// What an element of a result must equal or be near to.
pub(super) struct Job {
    pub problem: Problem,
    pub bias: bool,
    pub exact: bool,
    pub division: Division,
}

/// How it is divided among blocks.
#[derive(Clone, Copy)]
pub(super) enum Division {
    Chosen,
    /// By the kernel that any GPU has.
    Portable,
    /// With a tile: so many tiles whole, or all if there are fewer, and parts of the others.
    Of(GemmTile, [u64; 2]),
    /// With a tile: in so many parts, which are the blocks of clusters.
    InClusters(GemmTile, u64),
}
use Division::{Chosen, InClusters, Of};

/// All tiles whole.
const WHOLE: [u64; 2] = [u64::MAX, 1];

/// Values of a small format, and what its tensor core loses.
pub(super) trait Operand: Pod + HostElement<Device = Self> {
    /// The bound's factor of the magnitudes, for an instruction.
    const LOSS: f64;
    fn encode(value: f32) -> Self;
    fn round(value: f32) -> f32;
}

macro_rules! operands {
    ($($t:ident $bits:ident $format:ident $loss:expr;)*) => { $(
        impl Operand for $t {
            const LOSS: f64 = 1.0 / (1 << $loss) as f64;
            fn encode(value: f32) -> Self {
                Self::from_bits($format.encode(value.into()) as $bits)
            }
            fn round(value: f32) -> f32 {
                $format.round(value.into()) as f32
            }
        }
    )* };
}

operands! {
    bf16 u16 BF16 22;
    f16 u16 F16 22;
    e4m3 u8 E4M3 12;
    e5m2 u8 E5M2 12;
}

/// Both operands.
pub(super) trait Operands<O: 'static>: GemmOperands<O, A = Self::Left, B = Self::Right> {
    type Left: Operand;
    type Right: Operand;
    const LOSS: f64 = if Self::Left::LOSS > Self::Right::LOSS { Self::Left::LOSS } else { Self::Right::LOSS };
}

impl<T: GemmOperands<O, A: Operand, B: Operand>, O: 'static> Operands<O> for T {
    type Left = T::A;
    type Right = T::B;
}

pub(super) trait Output: Pod + HostElement<Device = Self> + std::fmt::Debug {
    /// Half a unit in the last place, relative.
    const HALF_UNIT: f64;
    fn encode(value: f32) -> Self;
    fn value(self) -> f64;
}

impl Output for bf16 {
    const HALF_UNIT: f64 = 1.0 / 256.0;
    fn encode(value: f32) -> Self {
        <Self as Operand>::encode(value)
    }
    fn value(self) -> f64 {
        BF16.decode(self.to_bits().into())
    }
}

impl Output for f16 {
    const HALF_UNIT: f64 = 1.0 / (1 << 11) as f64;
    fn encode(value: f32) -> Self {
        <Self as Operand>::encode(value)
    }
    fn value(self) -> f64 {
        F16.decode(self.to_bits().into())
    }
}

impl Output for f32 {
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
    for transposed in [[false, false], [false, true], [true, false], [true, true]] {
        of_layout::<bf16, bf16>(&mut cases, "bf16", transposed);
        of_layout::<bf16, f32>(&mut cases, "bf16_f32", transposed);
    }
    for transposed in [[false, false], [false, true], [true, false], [true, true]] {
        of_layout::<f16, f16>(&mut cases, "f16", transposed);
    }
    of_layout::<e4m3, bf16>(&mut cases, "e4m3", [false, true]);
    of_layout::<e4m3, f32>(&mut cases, "e4m3_f32", [false, true]);
    of_layout::<(e4m3, e5m2), bf16>(&mut cases, "e4m3_e5m2", [false, true]);
    of_layout::<(e5m2, e4m3), bf16>(&mut cases, "e5m2_e4m3", [false, true]);
    of_layout::<(e4m3, e5m2), f32>(&mut cases, "e4m3_e5m2_f32", [false, true]);
    of_layout::<(e5m2, e4m3), f32>(&mut cases, "e5m2_e4m3_f32", [false, true]);
    let problem = Problem { shape: WAVES, transposed: [false, true], alpha: 1.0, beta: 0.0, gelu: false };
    cases.push(Case::new("gemm::bf16::nt::waves", Size::Waves, move |r| {
        check::<bf16, bf16>(r, &Job { problem, bias: false, exact: true, division: Chosen })
    }));
    for transposed in [[false, false], [false, true], [true, false], [true, true]] {
        any_shape::<e4m3, f32>(&mut cases, "e4m3_f32", transposed);
    }
    any_shape::<e4m3, bf16>(&mut cases, "e4m3", [true, false]);
    cases.push(Case::new("gemm::refused", Size::Small, refused));
    // More rows, and more columns, than blocks in a dimension of a grid have.
    for [m, n] in [[65535 * 8 + 1, 1], [1, 65535 * 32 + 1]] {
        let problem = Problem { shape: [m, n, 1], transposed: [false, true], alpha: 0.5, beta: -2.0, gelu: false };
        cases.push(Case::new(format!("gemm_any::{m}x{n}"), Size::Large, move |r| {
            check::<e4m3, f32>(r, &Job { problem, bias: true, exact: true, division: Chosen })
        }));
    }
    cases.push(Case::new("gemm_any::refused", Size::Small, strides_refused));
    cases.push(Case::new("gemm::empty", Size::Small, empty));
    cases
}

/// How `A` and `B` are stored: as they are (`n`) or transposed (`t`).
pub(super) fn layout(transposed: [bool; 2]) -> &'static str {
    match transposed {
        [false, false] => "nn",
        [false, true] => "nt",
        [true, false] => "tn",
        [true, true] => "tt",
    }
}

fn of_layout<T: Operands<O>, O: Output>(cases: &mut Vec<Case>, name: &str, transposed: [bool; 2]) {
    let layout = layout(transposed);
    let sizes = SMALL.map(|shape| (shape, Size::Small)).into_iter().chain(LARGE.map(|shape| (shape, Size::Large)));
    for (mut shape, size) in sizes {
        if transposed[0] {
            shape[0] = shape[0].next_multiple_of(8);
        }
        let [m, n, k] = shape;
        let problem = Problem { shape, transposed, alpha: 1.0, beta: 0.0, gelu: false };
        cases.push(Case::new(format!("gemm::{name}::{layout}::{m}x{n}x{k}"), size, move |r| {
            check::<T, O>(r, &Job { problem, bias: false, exact: true, division: Chosen })
        }));
    }
    let problem = Problem { shape: [136, 264, 80], transposed, alpha: 0.5, beta: -2.0, gelu: false };
    cases.push(Case::new(format!("gemm::{name}::{layout}::beta and bias"), Size::Small, move |r| {
        check::<T, O>(r, &Job { problem, bias: true, exact: true, division: Chosen })
    }));
    cases.push(Case::new(format!("gemm::{name}::{layout}::gelu"), Size::Small, move |r| {
        check::<T, O>(
            r,
            &Job { problem: Problem { alpha: 0.1, beta: 0.0, gelu: true, ..problem }, bias: true, exact: false, division: Chosen },
        )
    }));
    let problem = Problem { shape: [256, 512, 512], transposed, alpha: 1.0, beta: 0.3, gelu: false };
    cases.push(Case::new(format!("gemm::{name}::{layout}::normal"), Size::Large, move |r| {
        check::<T, O>(r, &Job { problem, bias: false, exact: false, division: Chosen })
    }));
    of_tiles::<T, O>(cases, name, layout, transposed);
}

/// Each tile that there is for these operands: whole tiles with edges, one row in parts of unequal length, whole tiles and parts in one launch, and
/// parts whose bits are the same in the next run; parts that are the blocks of clusters alike.
fn of_tiles<T: Operands<O>, O: Output>(cases: &mut Vec<Case>, name: &str, layout: &str, transposed: [bool; 2]) {
    let [m_major, n_major] = [transposed[0], !transposed[1]];
    let sizes = GemmConfig { m: 16, n: 16, k: 16, transpose_a: m_major, transpose_b: !n_major, ..GemmConfig::default() };
    for tile in sizes.kernels::<T, O>().into_iter().filter_map(GemmKernel::tile) {
        let job = |shape, [alpha, beta]: [f64; 2], gelu, division| Job {
            problem: Problem { shape, transposed, alpha, beta, gelu },
            bias: gelu,
            exact: !gelu,
            division,
        };
        let whole = job([136, 264, 80], [1.0, 0.0], false, Of(tile, WHOLE));
        let row = |division| job([if m_major { 8 } else { 1 }, 16, 528], [0.5, -2.0], false, division);
        let both = job([72, 304, 272], [1.0, 0.0], false, Of(tile, [1, 2]));
        // Of operands as they are stored most, all; of the others, all of bf16.
        let size = if name == "bf16" || layout == "nt" { Size::Small } else { Size::Twin };
        // Parts of no tile.
        let none = job([136, 264, 272], [1.0, 0.0], false, Of(tile, [u64::MAX, 2]));
        let mut jobs = vec![
            ("whole", whole, Size::Small),
            ("parts of none", none, Size::Small),
            ("a row", row(Of(tile, [0, 4])), size),
            ("whole and parts", both, size),
        ];
        let parts = |division| job([80, 136, 400], [0.1, 0.3], true, division);
        let mut divided = vec![("parts", parts(Of(tile, [0, 3])))];
        if !matches!(tile, GemmTile::Tile128x256 | GemmTile::Tile128x192 | GemmTile::Tile128x176) {
            jobs.push(("a row in clusters", row(InClusters(tile, 5)), size));
            jobs.push(("clusters", job([72, 304, 272], [1.0, 0.0], false, InClusters(tile, 2)), size));
            divided.push(("parts in clusters", parts(InClusters(tile, 3))));
        }
        for (what, job, size) in jobs {
            cases.push(Case::new(format!("gemm::{name}::{layout}::{tile:?}::{what}"), size, move |r| check::<T, O>(r, &job)));
        }
        for (what, parts) in divided {
            cases.push(Case::new(format!("gemm::{name}::{layout}::{tile:?}::{what}"), size, move |r| {
                let first = checked::<T, O>(r, &parts)?;
                equal("d, again", &multiply::<T, O>(r, &parts)?.found, &first)
            }));
        }
    }
}

/// Shapes that no tensor core takes of 8-bit operands: odd ones, and an empty sum.
fn any_shape<T: Operands<O>, O: Output>(cases: &mut Vec<Case>, name: &str, transposed: [bool; 2]) {
    for shape in [[9, 35, 13], [17, 3, 0], [1, 1, 1]] {
        let ([m, n, k], problem) = (shape, Problem { shape, transposed, alpha: 0.5, beta: -2.0, gelu: false });
        cases.push(Case::new(format!("gemm_any::{name}::{transposed:?}::{m}x{n}x{k}"), Size::Small, move |r| {
            check::<T, O>(r, &Job { problem, bias: true, exact: true, division: Chosen })
        }));
    }
}

/// What was multiplied, and what came of it.
struct Multiplied {
    expected: Product,
    found: Vec<f64>,
}

fn multiply<T: Operands<O>, O: Output>(runtime: &Runtime, job: &Job) -> Result<Multiplied, String> {
    let (stream, problem) = (stream(runtime)?, &job.problem);
    let [m, n, k] = problem.shape;
    let mut random = Random::new((m * n * k) as u64);
    // Small integers: no sum of their products is rounded, in whatever order.
    let mut values = |count: usize, round: fn(f32) -> f32| -> Vec<f32> {
        (0..count).map(|_| if job.exact { random.below(5) as f32 - 2.0 } else { round(random.normal()) }).collect()
    };
    let (a, b) = (values(m * k, T::Left::round), values(k * n, T::Right::round));
    let round = |value| O::encode(value).value() as f32;
    let (old, bias) = (values(m * n, round), values(if job.bias { n } else { 0 }, round));
    let expected = gemm(problem, &a, &b, &old, &bias);

    let (a, b) = (upload::<T::Left>(&stream, &a)?, upload::<T::Right>(&stream, &b)?);
    let encode = |values: Vec<f32>| values.into_iter().map(O::encode).collect::<Vec<O>>();
    let (bias, mut d) = (text(Buffer::from_slice(&stream, &encode(bias)))?, text(Buffer::from_slice(&stream, &encode(old)))?);
    let config = GemmConfig {
        m: m as u64,
        n: n as u64,
        k: k as u64,
        transpose_a: problem.transposed[0],
        transpose_b: problem.transposed[1],
        alpha: problem.alpha as f32,
        beta: problem.beta as f32,
        activation: if problem.gelu { Activation::Gelu } else { Activation::Identity },
    };
    let gemm = text(match job.division {
        Chosen => Gemm::<T, O>::new(runtime, config),
        Division::Portable => Gemm::portable(runtime, config),
        Of(tile, [whole, parts]) => {
            let (kernel, whole) = (kernel_of::<T, O>(&config, tile)?, whole.min(tile.count([config.m, config.n])));
            Gemm::<T, O>::planned(runtime, config, GemmPlan { kernel, whole, parts, in_clusters: false, microseconds: 0.0 })
        }
        InClusters(tile, parts) => {
            let kernel = kernel_of::<T, O>(&config, tile)?;
            Gemm::<T, O>::planned(runtime, config, GemmPlan { kernel, whole: 0, parts, in_clusters: true, microseconds: 0.0 })
        }
    })?;
    text(gemm.run(&stream, a.view(), b.view(), job.bias.then(|| bias.view()), d.view_mut()))?;
    let found = text(d.to_vec(&stream))?.into_iter().map(O::value).collect();
    Ok(Multiplied { expected, found })
}

fn kernel_of<T: Operands<O>, O: Output>(config: &GemmConfig, tile: GemmTile) -> Result<GemmKernel, String> {
    config.kernels::<T, O>().into_iter().find(|kernel| kernel.tile() == Some(tile)).ok_or_else(|| format!("no kernel of {tile:?}"))
}

pub(super) fn upload<T: Operand>(stream: &Stream, values: &[f32]) -> Result<Buffer<T>, String> {
    text(Buffer::from_slice(stream, &values.iter().map(|&x| T::encode(x)).collect::<Vec<T>>()))
}

pub(super) fn check<T: Operands<O>, O: Output>(runtime: &Runtime, job: &Job) -> Outcome {
    checked::<T, O>(runtime, job).map(drop)
}

/// The result, which is right.
fn checked<T: Operands<O>, O: Output>(runtime: &Runtime, job: &Job) -> Result<Vec<f64>, String> {
    let Multiplied { expected, found } = multiply::<T, O>(runtime, job)?;
    if job.exact {
        let expected: Vec<f64> = expected.values.iter().map(|&x| O::encode(x as f32).value()).collect();
        equal("d", &found, &expected)?;
        return Ok(found);
    }
    let [_, n, k] = job.problem.shape;
    let instructions = k.div_ceil(32 / size_of::<T::Left>()) as f64 + 1.0;
    for (i, found) in found.iter().enumerate() {
        let (value, magnitude) = (expected.values[i], expected.magnitudes[i]);
        // GELU is nowhere steeper than 1.13, and is approximated within a few units of f32.
        let bound = 1.2 * magnitude * (instructions * T::LOSS + 2f64.powi(-21)) + value.abs() * O::HALF_UNIT;
        let error = (found - value).abs();
        if error.is_nan() || error > bound {
            return Err(format!("d[{}, {}] is {found}, expected {value} within {bound}", i / n, i % n));
        }
    }
    Ok(found)
}

fn refused(runtime: &Runtime) -> Outcome {
    let good = GemmConfig { m: 8, n: 8, k: 8, ..GemmConfig::default() };
    match Gemm::<bf16, bf16>::new(runtime, GemmConfig { m: 1 << 31, ..good }) {
        Err(error @ Error::Invalid { .. }) if error.to_string().contains("m is 2147483648: at most") => {}
        other => return Err(format!("{other:?}")),
    }
    let choose = |config: GemmConfig, kernel: &str, why: &str| {
        let choice = text(config.choose::<bf16, bf16>())?;
        if choice.kernel.is_some_and(|name| name.starts_with(kernel)) && choice.why.contains(why) {
            Ok(())
        } else {
            Err(format!("{choice:?}, not {kernel} as {why}"))
        }
    };
    choose(good, "gemm__bf16", "B along n")?;
    choose(
        GemmConfig { transpose_a: true, transpose_b: true, ..good },
        "gemm__bf16__bf16__depth64__bf16__width64__tile64x64__box64__m_major",
        "A along m",
    )?;
    choose(GemmConfig { k: 12, ..good }, "gemm_portable__bf16__bf16", "k is 12, no multiple of 8")?;
    choose(GemmConfig { n: 9, ..good }, "gemm_portable__bf16__bf16", "n is 9, no multiple of 8")?;
    choose(GemmConfig { m: 9, transpose_a: true, ..good }, "gemm_portable__bf16__bf16", "m is 9, no multiple of 8 with transpose_a")?;
    choose(GemmConfig { k: 0, ..good }, "gemm_portable__bf16__bf16", "k is 0")?;
    let stream = stream(runtime)?;
    let gemm = text(Gemm::<bf16, f32>::new(runtime, good))?;
    let (a, mut d) = (text(Buffer::<bf16>::zeros(&stream, 64))?, text(Buffer::<f32>::zeros(&stream, 63))?);
    match gemm.run(&stream, a.view(), a.view(), None, d.view_mut()) {
        Err(Error::Length { what: "Gemm, d", expected: 64, found: 63 }) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

/// Strides of the kernel of any shape that lead past an operand; those of whole matrices, either way, are accepted.
fn strides_refused(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<GemmAny<e4m3, f32>>())?;
    let (values, mut d) = (text(Buffer::<e4m3>::zeros(&stream, 64))?, text(Buffer::<f32>::zeros(&stream, 64))?);
    let mut launch = |a: [u32; 2], b: [u32; 2]| {
        let operand = |[stride, step]: [u32; 2]| OperandArgument { values: values.view(), stride, step };
        let fusion = FusionArgument { bias: None, a_scale: None, b_scale: None, alpha: 1.0, beta: 0.0, gelu: false };
        let shape = Shape { m: 8, n: 8, k: 8 };
        kernel.launch(&stream, GemmAnyArgs { a: operand(a), b: operand(b), d: d.view_mut(), shape, fusion })
    };
    let whole = [[8, 1], [1, 8]];
    text(launch(whole[0], whole[1]))?;
    text(launch(whole[1], whole[0]))?;
    for past in [[9, 1], [8, 2], [2, 8], [u32::MAX, 1], [1, u32::MAX]] {
        refuses("a.stride", launch(past, whole[1]))?;
        refuses("b.stride", launch(whole[0], past))?;
    }
    Ok(())
}

fn empty(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let config = GemmConfig { m: 0, n: 16, k: 8, ..GemmConfig::default() };
    let gemm = text(Gemm::<bf16, f32>::new(runtime, config))?;
    let (a, b) = (text(Buffer::<bf16>::zeros(&stream, 0))?, text(Buffer::<bf16>::zeros(&stream, 128))?);
    let mut d = text(Buffer::<f32>::zeros(&stream, 0))?;
    text(gemm.run(&stream, a.view(), b.view(), None, d.view_mut()))
}
