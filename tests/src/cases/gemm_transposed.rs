//! Products of 8-bit operands that do not lie along the sum, which are transposed before they are multiplied, against f64.

use oxtile::gemm::{Gemm, GemmConfig, GemmKernel, GemmTile};
use oxtile::runtime::Graph;
use oxtile::{Buffer, Error, Runtime};
use oxtile_tests::inputs::Random;
use oxtile_tests::oracle::gemm::{Problem, gemm};
use oxtile_tile::num::{bf16, e4m3, e5m2};

use super::gemm::{Division, Job, Operand, Operands, Output, check, layout, upload};
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Of which at least one operand is transposed.
const LAYOUTS: [[bool; 2]; 3] = [[false, false], [true, false], [true, true]];
/// Parts of a tile, tiles with edges in every direction, and rows of operands that are no whole vectors.
const SMALL: [[usize; 3]; 4] = [[8, 8, 16], [136, 264, 80], [200, 304, 144], [77, 136, 48]];
const LARGE: [usize; 3] = [264, 1032, 528];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for transposed in LAYOUTS {
        of_layout::<e4m3, bf16>(&mut cases, "e4m3", transposed);
        of_layout::<(e4m3, e5m2), bf16>(&mut cases, "e4m3_e5m2", transposed);
        let small = |cases: &mut Vec<Case>, name: &str, run: fn(&Runtime, &Job) -> Outcome| {
            let name = format!("gemm_transposed::{name}::{}", layout(transposed));
            cases.push(Case::new(name, Size::Small, move |r| run(r, &exact([77, 136, 48], transposed))));
        };
        small(&mut cases, "e5m2_e4m3", check::<(e5m2, e4m3), bf16>);
        small(&mut cases, "e4m3_f32", check::<e4m3, f32>);
        small(&mut cases, "e4m3_e5m2_f32", check::<(e4m3, e5m2), f32>);
        small(&mut cases, "e5m2_e4m3_f32", check::<(e5m2, e4m3), f32>);
        for (name, run) in [("replayed", replayed as fn(&Runtime, [bool; 2]) -> Outcome), ("views", views)] {
            cases.push(Case::new(format!("gemm_transposed::{name}::{}", layout(transposed)), Size::Small, move |r| run(r, transposed)));
        }
    }
    cases.push(Case::new("gemm_transposed::refused", Size::Small, refused));
    cases
}

fn exact(shape: [usize; 3], transposed: [bool; 2]) -> Job {
    let problem = Problem { shape, transposed, alpha: 1.0, beta: 0.0, gelu: false };
    Job { problem, bias: false, exact: true, division: Division::Chosen }
}

fn of_layout<T: Operands<O>, O: Output>(cases: &mut Vec<Case>, name: &str, transposed: [bool; 2]) {
    let mut add = |what: String, size, job: Job| {
        let name = format!("gemm_transposed::{name}::{}::{what}", layout(transposed));
        cases.push(Case::new(name, size, move |r| check::<T, O>(r, &job)));
    };
    for (shape @ [m, n, k], size) in SMALL.map(|shape| (shape, Size::Small)).into_iter().chain([(LARGE, Size::Large)]) {
        add(format!("{m}x{n}x{k}"), size, exact(shape, transposed));
    }
    let edges = exact([136, 264, 80], transposed);
    let problem = Problem { alpha: 0.5, beta: -2.0, ..edges.problem };
    add("beta and bias".to_owned(), Size::Small, Job { problem, bias: true, ..edges });
    let problem = Problem { alpha: 0.1, gelu: true, ..edges.problem };
    add("gelu".to_owned(), Size::Small, Job { problem, bias: true, exact: false, ..edges });
    let problem = Problem { shape: [256, 512, 512], beta: 0.3, ..edges.problem };
    add("normal".to_owned(), Size::Large, Job { problem, exact: false, ..edges });
    for tile in [GemmTile::Tile128x256, GemmTile::Tile64x128] {
        let of = |shape, division| Job { division: Division::Of(tile, division), ..exact(shape, transposed) };
        add(format!("{tile:?}::whole"), Size::Small, of([136, 264, 80], [u64::MAX, 1]));
        add(format!("{tile:?}::whole and parts"), Size::Small, of([72, 304, 272], [1, 2]));
    }
}

/// Sizes of what follows: two tiles, with edges.
const SHAPE: [usize; 3] = [72, 136, 208];

fn config(transposed: [bool; 2]) -> GemmConfig {
    let [m, n, k] = SHAPE.map(|size| size as u64);
    GemmConfig { m, n, k, transpose_a: transposed[0], transpose_b: transposed[1], ..GemmConfig::default() }
}

/// Operands of small integers, and their product, which is exact.
fn values(transposed: [bool; 2], seed: u64) -> ([Vec<f32>; 2], Vec<f64>) {
    let ([m, n, k], mut random) = (SHAPE, Random::new(seed));
    let [a, b] = [m * k, k * n].map(|count| (0..count).map(|_| random.below(5) as f32 - 2.0).collect::<Vec<_>>());
    let product = gemm(&exact(SHAPE, transposed).problem, &a, &b, &vec![0.0; m * n], &[]).values;
    ([a, b], product)
}

/// What is bound once transposes at each run what the operands are then; a graph keeps the memory of the transposes.
fn replayed(runtime: &Runtime, transposed: [bool; 2]) -> Outcome {
    let (stream, [m, n, _]) = (stream(runtime)?, SHAPE);
    let ([a, b], first) = values(transposed, 1);
    let (mut a, mut b) = (text(upload::<e4m3>(&stream, &a))?, text(upload::<e5m2>(&stream, &b))?);
    let mut d = text(Buffer::<f32>::named(&stream, "d", (m * n) as u64))?;
    let gemm = text(Gemm::<(e4m3, e5m2), f32>::new(runtime, config(transposed)))?;
    let graph = {
        let mut bound = text(gemm.bind(&stream, a.view(), b.view(), None, d.view_mut()))?;
        text(bound.run(&stream))?;
        text(Graph::capture(&[&stream], || bound.run(&stream)))?
    };
    let result = |d: &Buffer<f32>| text(d.to_vec(&stream)).map(|d| d.into_iter().map(f64::from).collect::<Vec<_>>());
    equal("d, eager", &result(&d)?, &first)?;
    for seed in 2..4 {
        let (operands, product) = values(transposed, seed);
        text(a.copy_from_slice(&stream, &operands[0].iter().map(|&x| <e4m3 as Operand>::encode(x)).collect::<Vec<_>>()))?;
        text(b.copy_from_slice(&stream, &operands[1].iter().map(|&x| <e5m2 as Operand>::encode(x)).collect::<Vec<_>>()))?;
        text(graph.replay(&stream))?;
        equal("d, replayed", &result(&d)?, &product)?;
    }
    Ok(())
}

/// An operand that is transposed may begin anywhere; factors in device memory are those of the product.
fn views(runtime: &Runtime, transposed: [bool; 2]) -> Outcome {
    let (stream, [m, n, _]) = (stream(runtime)?, SHAPE);
    let (operands, product) = values(transposed, 5);
    // Those that TMA reads begin at a whole vector.
    let starts = [if transposed[0] { 3 } else { 16 }, if transposed[1] { 16 } else { 5 }];
    let views = starts.into_iter().zip(&operands).map(|(start, values)| {
        let padded: Vec<f32> = vec![2.0; start].into_iter().chain(values.iter().copied()).collect();
        upload::<e4m3>(&stream, &padded)
    });
    let buffers = views.collect::<Result<Vec<_>, _>>()?;
    let [a, b] = [0, 1].map(|at| buffers[at].view().slice(starts[at] as u64, buffers[at].len()));
    let factors = text(Buffer::from_slice(&stream, &[0.5_f32, 4.0]))?;
    let scales = [factors.view().slice(0, 1), factors.view().slice(1, 2)];
    let mut d = text(Buffer::<f32>::named(&stream, "d", (m * n) as u64))?;
    let gemm = text(Gemm::<e4m3, f32>::new(runtime, config(transposed)))?;
    text(gemm.bind_scaled(&stream, (a, b), scales, None, d.view_mut()).and_then(|mut bound| bound.run(&stream)))?;
    let expected: Vec<f64> = product.iter().map(|x| 2.0 * x).collect();
    equal("d", &text(d.to_vec(&stream))?.into_iter().map(f64::from).collect::<Vec<_>>(), &expected)
}

/// Sums that TMA does not take: without tensor cores, or refused; and what a binding allocates.
fn refused(runtime: &Runtime) -> Outcome {
    let config = GemmConfig { k: 200, ..config([false, false]) };
    let why = "k is 200, no multiple of 16 with 8-bit operands, transposed or not: TMA takes rows of a multiple of 16 bytes";
    let gemm = text(Gemm::<e4m3, bf16>::new(runtime, config))?;
    equal("decision", &[(gemm.choice().decision, gemm.choice().why.as_str())], &[(GemmKernel::Any, why)])?;
    equal("bytes", &[gemm.transposed_bytes()], &[0])?;
    match Gemm::<(e4m3, e5m2), bf16>::new(runtime, config) {
        Err(error @ Error::Invalid { .. }) if error.to_string().contains(why) => {}
        other => return Err(format!("{other:?}")),
    }
    let sizes = [[false, false], [true, false], [true, true], [false, true]].map(|[transpose_a, transpose_b]| {
        let config = GemmConfig { transpose_a, transpose_b, k: 208, ..config };
        text(Gemm::<e4m3, bf16>::new(runtime, config)).map(|gemm| gemm.transposed_bytes())
    });
    let expected = [136 * 208, (72 + 136) * 208, 72 * 208, 0];
    equal("bytes", &sizes.into_iter().collect::<Result<Vec<_>, _>>()?, &expected)
}
