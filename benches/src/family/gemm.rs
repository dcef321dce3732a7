//! Matrix multiplication.

use anyhow::Result;
use oxtile::gemm::{Gemm, GemmConfig, GemmElement, GemmOperands};
use oxtile::runtime::{Bound, Buffer, HostElement};
use oxtile_tile::num::{Float, Pod, bf16, e4m3, e5m2};

use crate::bench::{Bench, Gpu, Output, Prepared, Size};

/// The family's name.
pub const FAMILY: &str = "gemm";

/// M, N, K and buffer sets.
pub(super) type Shape = ([u64; 3], usize);

/// The bf16 layouts, and e4m3, at large and small shapes.
pub fn benches(size: Size) -> Vec<Bench> {
    let [small, tall]: [Shape; 2] = size.pick([([4096; 3], 4), ([16384, 2048, 4096], 2)], [([8, 16, 32], 1), ([64, 128, 32], 1)]);
    let large = large(size);
    let mut benches = vec![
        yardstick(size),
        bench::<bf16>("gemm bf16 nn", &["gemm_nn"], large),
        bench::<bf16>("gemm bf16 tn", &["gemm_tn"], large),
        bench::<bf16>("gemm bf16 nt", &["gemm_nt"], small),
        bench::<bf16>("gemm bf16 nt", &["gemm_nt"], tall),
        bench::<e4m3>("gemm e4m3 nt", &["gemm_e4m3"], large),
        portable("gemm_portable bf16 nt", small),
        portable("gemm_portable bf16 nn", small),
        portable("gemm_portable bf16 tn", small),
        portable("gemm_portable bf16 nt", large),
    ];
    benches.extend(of_layer(size));
    benches
}

/// The products of a feed-forward layer of 8192 tokens, forward and backward, of which a GPU has half of 28672 hidden columns: what `layer bf16` of the ranks consists of, but for gradients of weights, which are f32 there.
fn of_layer(size: Size) -> [Bench; 6] {
    let [tokens, width, hidden] = size.pick([8192, 8192, 14336], [48, 32, 128]);
    [
        bench::<bf16>("gemm bf16 nt", &["gemm_nt"], ([tokens, hidden, width], 1)),
        bench::<bf16>("gemm bf16 nt", &["gemm_nt"], ([tokens, width, hidden], 1)),
        bench::<bf16>("gemm bf16 nn", &["gemm_nn"], ([tokens, hidden, width], 1)),
        bench::<bf16>("gemm bf16 nn", &["gemm_nn"], ([tokens, width, hidden], 1)),
        bench::<bf16>("gemm bf16 tn", &["gemm_tn"], ([width, hidden, tokens], 1)),
        bench::<bf16>("gemm bf16 tn", &["gemm_tn"], ([hidden, width, tokens], 1)),
    ]
}

fn large(size: Size) -> Shape {
    size.pick(([8192; 3], 2), ([136, 264, 64], 2))
}

/// The bf16 product beside cuBLASLt's whose rate other families are held to.
pub(super) fn yardstick(size: Size) -> Bench {
    bench::<bf16>("gemm bf16 nt", &["gemm_nt"], large(size))
}

/// An element made of the pattern's.
pub(super) trait Value: Pod + HostElement<Device = Self> {
    fn of(value: half::bf16) -> Self;
}

/// An element of both operands.
pub(super) trait Operand: Value + GemmElement<bf16> {}

impl<T: Value + GemmElement<bf16>> Operand for T {}

impl Value for bf16 {
    fn of(value: half::bf16) -> Self {
        Self::from_bits(value.to_bits())
    }
}

impl Value for e4m3 {
    fn of(value: half::bf16) -> Self {
        Self::from_f32(value.to_f32())
    }
}

impl Value for e5m2 {
    fn of(value: half::bf16) -> Self {
        Self::from_f32(value.to_f32())
    }
}

/// The bf16 product on `mma.sync` beside that on `wgmma`.
fn portable(kernel: &'static str, shape: Shape) -> Bench {
    let (config, sets) = (config(kernel, shape), shape.1);
    let prepare = move |gpu: &Gpu| {
        let [portable, wgmma] = [Gemm::portable(&gpu.runtime, config)?, Gemm::new(&gpu.runtime, config)?];
        Ok(prepare::<bf16>(gpu, &portable, config, sets)?.against("gemm, on wgmma", prepare::<bf16>(gpu, &wgmma, config, sets)?))
    };
    Bench { prepare: Box::new(prepare), ..bench::<bf16>(kernel, &[], shape) }
}

/// The name ends in how `A` and `B` are stored: as they are (`n`) or transposed (`t`).
pub(super) fn config(kernel: &str, ([m, n, k], _): Shape) -> GemmConfig {
    let is_transposed = |place: usize| kernel.as_bytes()[kernel.len() - 2 + place] == b't';
    GemmConfig { m, n, k, transpose_a: is_transposed(0), transpose_b: is_transposed(1), ..GemmConfig::default() }
}

pub(super) fn bench<T: GemmOperands<bf16, A: Value, B: Value>>(
    kernel: &'static str,
    peers: &'static [&'static str],
    shape @ ([m, n, k], sets): Shape,
) -> Bench {
    let config = config(kernel, shape);
    Bench {
        family: FAMILY,
        kernel,
        shape: format!("{m}x{n}x{k}"),
        dimensions: vec![m, n, k],
        bytes: (m * k + k * n) * T::BYTES + m * n * size_of::<bf16>() as u64,
        flops: 2 * m * n * k,
        sets,
        ceiling: None,
        peers,
        prepare: Box::new(move |gpu| prepare::<T>(gpu, &Gemm::new(&gpu.runtime, config)?, config, sets)),
    }
}

/// The bf16 product of a shape, `B` along k, by the plan that is chosen.
pub(super) fn prepare_nt(gpu: &Gpu, shape: [u64; 3]) -> Result<Prepared> {
    let config = config("gemm bf16 nt", (shape, 1));
    prepare::<bf16>(gpu, &Gemm::new(&gpu.runtime, config)?, config, 1)
}

pub(super) fn operand<T: Value>(gpu: &Gpu, buffer: usize, count: u64) -> Result<Buffer<T>> {
    let values: Vec<T> = gpu.pattern.fill(buffer, count).into_iter().map(T::of).collect();
    Ok(Buffer::from_slice(&gpu.stream, &values)?)
}

pub(super) fn prepare<T: GemmOperands<bf16, A: Value, B: Value>>(
    gpu: &Gpu,
    gemm: &Gemm<T, bf16>,
    config: GemmConfig,
    sets: usize,
) -> Result<Prepared> {
    let GemmConfig { m, n, k, .. } = config;
    let operands = |set: usize| Ok((operand::<T::A>(gpu, 2 * set, m * k)?, operand::<T::B>(gpu, 2 * set + 1, k * n)?));
    let inputs = (0..sets).map(operands).collect::<Result<Vec<_>>>()?;
    let results = (0..sets).map(|_| Buffer::<bf16>::uninitialised(&gpu.stream, m * n));
    let mut results: Vec<Buffer<bf16>> = results.collect::<oxtile::runtime::Result<_>>()?;
    let graph = {
        let mut bound: Vec<Bound<'_>> = Vec::with_capacity(sets);
        for ((a, b), d) in inputs.iter().zip(&mut results) {
            bound.push(gemm.bind(&gpu.stream, a.view(), b.view(), None, d.view_mut())?);
        }
        Prepared::capture(gpu, || bound.iter_mut().try_for_each(|bound| bound.run(&gpu.stream)))?
    };
    Ok(Prepared::new(graph, move |stream| {
        let d: Vec<half::bf16> = results[0].to_vec_as(stream)?;
        Ok(vec![Output { name: "d", bytes: d.iter().flat_map(|value| value.to_le_bytes()).collect() }])
    }))
}
