//! Products at the shapes of models, beside cuBLASLt: `oxtile-benches gemm --sweep`; and each by every plan of ours: `--plans`.
//!
//! Weights are those of Llama 3 8B and 70B and of DeepSeek-V3, divided among 1, 2, 4 and 8 GPUs; tokens are 1 to 16384. Operands are slices of one run of random
//! values, so that a shape is ready in little time.

use std::cell::OnceCell;
use std::rc::Rc;

use anyhow::{Result, ensure};
use oxtile::gemm::{Gemm, GemmConfig, GemmPlan};
use oxtile::runtime::{Bound, Buffer};
use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::{bf16, e4m3};

use super::gemm::Operand;
use crate::bench::{Bench, Gpu, Output, Prepared, Size};
use crate::pattern;

/// The name in the results.
pub const FAMILY: &str = "gemm_shapes";

/// Rows and columns of the weights of a layer, `[n, k]`, and which of the two is divided among GPUs.
type Weights = ([u64; 2], Divided);

#[derive(Clone, Copy, PartialEq)]
enum Divided {
    Columns,
    Sum,
}
use Divided::{Columns, Sum};

#[rustfmt::skip]
const LAYERS: [Weights; 12] = [
    // Llama 3 8B: QKV, output, gate and up, down.
    ([6144, 4096], Columns), ([4096, 4096], Sum), ([28672, 4096], Columns), ([4096, 14336], Sum),
    // Llama 3 70B.
    ([10240, 8192], Columns), ([8192, 8192], Sum), ([57344, 8192], Columns), ([8192, 28672], Sum),
    // DeepSeek-V3: the second query projection, output, a dense layer's gate and up, down.
    ([24576, 1536], Columns), ([7168, 16384], Sum), ([36864, 7168], Columns), ([7168, 18432], Sum),
];
const GPUS: [u64; 4] = [1, 2, 4, 8];
const TOKENS: [u64; 10] = [1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 16384];

/// How often the run of values that operands are slices of repeats the pattern.
const PERIODS: usize = 256;
/// Bytes that the sets of a shape should have together: more than the L2 cache.
const SET_BYTES: u64 = 200 << 20;
const MOST_SETS: u64 = 32;
/// Elements of a result that are compared at most: larger ones take too long to bring to the peers.
const COMPARED: u64 = 1 << 22;
/// Buffer numbers of operands are multiples, so that their first values are at multiples of 16 bytes. The peers have the same.
const SPACING: u64 = 64;

/// Whether operands are stored as their transposes, and the peers of bf16 and of e4m3.
#[derive(Clone, Copy)]
struct Layout {
    transposed: [bool; 2],
    peer: &'static [&'static str],
    kernel: &'static str,
}

const NT: Layout = Layout { transposed: [false, true], peer: &["gemm_shape_nt"], kernel: "gemm bf16 nt" };
const NN: Layout = Layout { transposed: [false, false], peer: &["gemm_shape_nn"], kernel: "gemm bf16 nn" };
const TN: Layout = Layout { transposed: [true, false], peer: &["gemm_shape_tn"], kernel: "gemm bf16 tn" };
const TT: Layout = Layout { transposed: [true, true], peer: &["gemm_shape_tt"], kernel: "gemm bf16 tt" };
const E4M3: Layout = Layout { transposed: [false, true], peer: &["gemm_shape_e4m3"], kernel: "gemm e4m3 nt" };

/// 120 products in bf16: two numbers of tokens for each layer and number of GPUs, forward; then gradients of inputs and of weights, and a few with both
/// operands stored as transposes. After them, forward products in e4m3. Two layers share one product: 16384x7168x8192.
fn shapes() -> Vec<(Layout, [u64; 3])> {
    let divided =
        LAYERS.iter().flat_map(|&([n, k], divided)| GPUS.map(|gpus| if divided == Columns { [n / gpus, k] } else { [n, k / gpus] }));
    let divided: Vec<[u64; 2]> = divided.collect();
    // A walk over all numbers of tokens; results of more than 2^28 elements are left to the next smaller number.
    let tokens = |number: usize, n: u64| {
        let chosen = TOKENS[number * 7 % TOKENS.len()];
        if chosen * n > 1 << 28 { 2048 } else { chosen }
    };
    let forward =
        divided.iter().enumerate().flat_map(|(i, &[n, k])| [2 * i, 2 * i + 1].map(|number| (NT, [tokens(number + i / 10, n), n, k])));
    let gradient = |layout, step: usize, count: usize| {
        let chosen = divided.iter().skip(step).step_by(4).take(count).enumerate();
        chosen.map(|(i, &[n, k])| (layout, [512 << (i % 4), n, k])).collect::<Vec<_>>()
    };
    let inputs = gradient(NN, 1, 10).into_iter().map(|(layout, [tokens, n, k])| (layout, [tokens, k, n]));
    let weights = gradient(TN, 2, 10).into_iter().map(|(layout, [tokens, n, k])| (layout, [n, k, tokens]));
    let both = gradient(TT, 3, 4);
    let narrow = divided.iter().enumerate().filter(|(i, _)| i % 2 == 0).map(|(i, &[n, k])| (E4M3, [tokens(i * 3, n), n, k]));
    forward.chain(inputs).chain(weights).chain(both).chain(narrow).collect()
}

/// Every shape beside cuBLASLt.
pub fn benches(size: Size) -> Vec<Bench> {
    of(size.pick(shapes(), tiny()), false)
}

/// The same by several plans of every kernel, too: what the constants of the choice are fitted to.
pub fn plans(size: Size) -> Vec<Bench> {
    of(size.pick(shapes(), tiny()), true)
}

fn tiny() -> Vec<(Layout, [u64; 3])> {
    vec![(NT, [8, 16, 32]), (TN, [64, 128, 32]), (E4M3, [16, 32, 64])]
}

fn of(shapes: Vec<(Layout, [u64; 3])>, plans: bool) -> Vec<Bench> {
    let (wide, narrow) = (Pool::default(), Pool::default());
    let one = |(layout, shape): (Layout, [u64; 3])| match layout.kernel {
        kernel if kernel == E4M3.kernel => bench::<e4m3>(layout, shape, narrow.clone(), plans),
        _ => bench::<bf16>(layout, shape, wide.clone(), plans),
    };
    shapes.into_iter().map(one).collect()
}

fn bench<T: Operand>(layout: Layout, [m, n, k]: [u64; 3], pool: Pool<T>, plans: bool) -> Bench {
    let [transpose_a, transpose_b] = layout.transposed;
    let config = GemmConfig { m, n, k, transpose_a, transpose_b, ..GemmConfig::default() };
    let bytes = (m * k + k * n) * T::BYTES + m * n * size_of::<bf16>() as u64;
    let sets = SET_BYTES.div_ceil(bytes).min(MOST_SETS);
    Bench {
        family: FAMILY,
        kernel: layout.kernel,
        shape: format!("{m}x{n}x{k}"),
        dimensions: vec![m, n, k],
        bytes,
        flops: 2 * m * n * k,
        sets: sets as usize,
        ceiling: None,
        peers: layout.peer,
        prepare: Box::new(move |gpu| prepare(gpu, config, sets, &pool, plans)),
    }
}

/// A run of values on the device, made when it is first needed.
struct Pool<T>(Rc<OnceCell<Buffer<T>>>);

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self(Rc::default())
    }
}

impl<T> Clone for Pool<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Operand> Pool<T> {
    /// The operands of so many sets, each in its own part of the run.
    fn operands(&self, gpu: &Gpu, [a, b]: [u64; 2], sets: u64) -> Result<Vec<[DeviceView<'_, T>; 2]>> {
        let period = gpu.pattern.count() as u64;
        let need = sets * (a.next_multiple_of(period) + b.next_multiple_of(period) + 2 * period);
        if self.0.get().is_none() {
            let once: Vec<T> = gpu.pattern.fill(0, period).into_iter().map(T::of).collect();
            let values = once.repeat(PERIODS);
            _ = self.0.set(Buffer::from_slice(&gpu.stream, &values)?);
        }
        let pool = self.0.get().expect("it was made above");
        ensure!(need <= pool.len(), "operands of {need} elements: the run has {}", pool.len());
        let mut next = 0;
        let mut operand = |number: u64, count: u64| {
            let start = next + pattern::start((SPACING * number) as usize, period as usize) as u64;
            next += count.next_multiple_of(period) + period;
            pool.view().slice(start, start + count)
        };
        Ok((0..sets).map(|set| [operand(2 * set, a), operand(2 * set + 1, b)]).collect())
    }
}

fn prepare<T: Operand>(gpu: &Gpu, config: GemmConfig, sets: u64, pool: &Pool<T>, plans: bool) -> Result<Prepared> {
    let mut prepared = launches(gpu, config, sets, pool, None)?;
    if plans {
        for plan in rivals(&config.plans::<T, bf16>(&gpu.device)) {
            let rival = launches(gpu, config, sets, pool, Some(plan))?;
            prepared = prepared.against(format!("{plan}; {} whole", plan.whole), rival);
        }
    }
    Ok(prepared)
}

/// Of each kernel the plan of whole tiles, and of those that split sums in device memory, and in clusters, the one that is predicted to be the fastest, unless another plan is
/// predicted to take less than three quarters of the time.
fn rivals(plans: &[GemmPlan]) -> Vec<GemmPlan> {
    let fastest = plans.iter().map(|plan| plan.microseconds).fold(f64::INFINITY, f64::min);
    let mut chosen: Vec<GemmPlan> = Vec::new();
    for plan in plans.iter().filter(|plan| plan.microseconds < 1.35 * fastest) {
        let alike = |other: &GemmPlan| other.kernel == plan.kernel && other.parts > 1 && other.in_clusters == plan.in_clusters;
        if plan.parts == 1 || !chosen.iter().any(alike) {
            chosen.push(*plan);
        }
    }
    chosen
}

fn launches<T: Operand>(gpu: &Gpu, config: GemmConfig, sets: u64, pool: &Pool<T>, plan: Option<GemmPlan>) -> Result<Prepared> {
    let GemmConfig { m, n, k, .. } = config;
    let gemm = match plan {
        Some(plan) => Gemm::<T, bf16>::planned(&gpu.runtime, config, plan)?,
        None => Gemm::<T, bf16>::new(&gpu.runtime, config)?,
    };
    let operands = pool.operands(gpu, [m * k, k * n], sets)?;
    let results = (0..sets).map(|_| Buffer::<bf16>::uninitialised(&gpu.stream, m * n));
    let mut results: Vec<Buffer<bf16>> = results.collect::<oxtile::runtime::Result<_>>()?;
    let graph = {
        let mut bound: Vec<Bound<'_>> = Vec::with_capacity(sets as usize);
        for ([a, b], d) in operands.into_iter().zip(&mut results) {
            bound.push(gemm.bind(&gpu.stream, a, b, None, d.view_mut())?);
        }
        Prepared::capture(gpu, || bound.iter_mut().try_for_each(|bound| bound.run(&gpu.stream)))?
    };
    Ok(Prepared::new(graph, move |stream| {
        if m * n > COMPARED {
            return Ok(Vec::new());
        }
        let d: Vec<half::bf16> = results[0].to_vec_as(stream)?;
        Ok(vec![Output { name: "d", bytes: d.iter().flat_map(|value| value.to_le_bytes()).collect() }])
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn there_are_120_products_in_bf16_of_every_layout_and_number_of_tokens() {
        let shapes = shapes();
        let wide: Vec<_> = shapes.iter().filter(|(layout, _)| layout.kernel != E4M3.kernel).collect();
        assert_eq!(wide.len(), 120);
        let kernels: BTreeSet<_> = wide.iter().map(|(layout, _)| layout.kernel).collect();
        assert_eq!(kernels.len(), 4);
        for tokens in TOKENS {
            assert!(wide.iter().any(|(_, [m, ..])| *m == tokens), "{tokens}");
        }
        let names: BTreeSet<String> = benches(Size::Full).iter().map(Bench::name).collect();
        // Two layers share one.
        assert_eq!(names.len(), shapes.len() - 1);
    }

    #[test]
    fn every_shape_has_a_kernel_on_the_tensor_cores_and_fits_the_run() {
        for (layout, [m, n, k]) in shapes() {
            let [transpose_a, transpose_b] = layout.transposed;
            let config = GemmConfig { m, n, k, transpose_a, transpose_b, ..GemmConfig::default() };
            assert!(!config.kernels::<bf16, bf16>().is_empty(), "{m}x{n}x{k}");
            assert!(m * k + k * n < (PERIODS as u64 - 4) << 22, "{m}x{n}x{k}");
        }
    }
}
