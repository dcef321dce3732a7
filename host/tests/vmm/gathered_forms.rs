//! Gathered products whose input of GELU is kept, and those whose operand is gathered as codes and scales.

use half::bf16 as Half;
use oxtile::gemm::{Activation, Epilogue, Gemm, GemmConfig};
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::bf16;
use oxtile::overlap::{AllGatherConfig, AllGatherGemm, GatherFormat, GatheredFormat, Global, Method, QuantizedAllGatherGemm};
use oxtile::quantize::{Direction, Mxfp8, Mxfp8Format, Nvfp4, Nvfp4Format, QuantizedTensor};
use oxtile::{Buffer, Graph, Loaded, PinnedBuffer, Result, Stream};

use crate::gathered::{Side, plain, words};
use crate::overlap_case::{by, cut};
use crate::values::values;
use crate::watch::{doing, settle};

/// Rounds of two calls, in turn eager and by the replay of a graph.
const ROUNDS: u64 = 8;

/// All of them, on a rank's side.
pub fn compare(side: &Side) -> Result<()> {
    let world = u64::from(side.world.get());
    for method in [Method::Fused, Method::Chunked, Method::Sequential].into_iter().filter(|method| is_of(*method, world)) {
        let config = by(method, Some(cut(1, 2)), [384, 128 * world, 512]);
        keeping(side, AllGatherConfig { activation: Activation::Gelu, ..config })?;
    }
    let runtime = &side.runtime;
    let (mxfp8, nvfp4) = (Mxfp8::<bf16>::new(runtime)?, Nvfp4::<bf16>::new(runtime)?);
    for (method, panels) in
        [(Method::Chunked, 1), (Method::Sequential, 2), (Method::Chunked, 4)].into_iter().filter(|of| is_of(of.0, world))
    {
        let config = by(method, Some(cut(panels, 1)), [384, 128 * world, 528]);
        let whole = |stream: &Stream, operand: &Buffer<bf16>, shape, wide: &mut Buffer<bf16>| {
            let tensor = mxfp8.quantize(stream, operand.view(), shape, Direction::Rows)?;
            mxfp8.dequantize(stream, &tensor, wide.view_mut()).map(|()| 0.0)
        };
        codes::<Mxfp8Format>(side, config.travelling(GatheredFormat::Mxfp8), whole, |stream, rows, _, shard| {
            mxfp8.quantize_rows(stream, rows.view(), shard.shape, shard.data.view_mut(), shard.scales.view_mut())
        })?;
        let whole = |stream: &Stream, operand: &Buffer<bf16>, shape, wide: &mut Buffer<bf16>| {
            let tensor = nvfp4.quantize(stream, operand.view(), shape)?;
            nvfp4.dequantize(stream, &tensor, wide.view_mut())?;
            Ok(tensor.amax.to_vec(stream)?[0])
        };
        codes::<Nvfp4Format>(side, config.travelling(GatheredFormat::Nvfp4), whole, |stream, rows, amax, shard| {
            shard.amax.copy_from(stream, amax)?;
            let QuantizedTensor { data, scales, amax, shape, .. } = shard;
            nvfp4.quantize_rows(stream, rows.view(), *shape, amax.view(), data.view_mut(), scales.view_mut())
        })?;
    }
    Ok(())
}

/// One rank has no other method than the last.
fn is_of(method: Method, world: u64) -> bool {
    world > 1 || method == Method::Sequential
}

/// What is kept has the bits of the product without GELU, and the result is GELU of that.
fn keeping(side: &Side, config: AllGatherConfig) -> Result<()> {
    let (Side { compute, out, runtime, .. }, Global { m, k, .. }) = (side, config.sizes);
    let product = GemmConfig { activation: Activation::Identity, ..config.product(side.world)? };
    let len = m * product.n;
    let weight = Buffer::from_slice(compute, &values(side.rank.index().into(), k * product.n))?;
    let gather = AllGatherGemm::<bf16, bf16>::new(&side.memory, compute, config)?;
    let (mut input, mut d) = (Buffer::<bf16>::zeros(compute, len)?, Buffer::<bf16>::zeros(compute, len)?);
    let epilogue = Epilogue { kept: Some(input.view_mut()), ..Epilogue::default() };
    let mut bound = gather.bind_epilogue(compute, weight.view(), None, epilogue, d.view_mut())?;
    let copy: Loaded<CopyWords> = runtime.load()?;
    // Of both calls: the input, and the result.
    let mut found: Vec<Buffer<u32>> = (0..4).map(|_| Buffer::zeros(compute, len / 2)).collect::<Result<_>>()?;
    let mut own = [0, 1].map(|of| Buffer::from_slice(compute, side.shard(&values(of, m * k), k)).expect("a shard"));
    let mut step = |own: &Buffer<bf16>, found: &mut [Buffer<u32>]| {
        bound.copy_shard(compute, own)?;
        bound.run(compute)?;
        let views = [bound.input().expect("it is kept"), bound.result()];
        let mut copies = views.into_iter().zip(found);
        copies.try_for_each(|(view, found)| copy.launch(compute, CopyWordsArgs { source: view.cast(), target: found.view_mut() }))
    };
    doing(side.rank, format!("capturing {config:?}"));
    let graph = Graph::capture(&[compute, out], || (0..2).try_for_each(|call| step(&own[call], &mut found[2 * call..2 * call + 2])))?;
    for round in 0..ROUNDS {
        doing(side.rank, format!("round {round} of {config:?}"));
        let operands = [0, 1].map(|call| values(2000 + 2 * round + call, m * k));
        for (own, operand) in own.iter_mut().zip(&operands) {
            own.copy_from_pinned(compute, &PinnedBuffer::from_slice(compute, side.shard(operand, k))?)?;
        }
        if round % 2 == 1 {
            (0..2).try_for_each(|call| step(&own[call], &mut found[2 * call..2 * call + 2]))?;
        } else {
            graph.replay(compute)?;
        }
        settle(compute)?;
        for (found, operand) in found.chunks(2).zip(&operands) {
            let expected = multiply(side, product, gather.choice().method, operand, &weight)?;
            let [kept, results] = [found[0].to_vec(compute)?, found[1].to_vec(compute)?];
            assert!(kept == words(&expected), "{}, round {round} of {config:?}: what is kept", side.rank);
            let results = results.into_iter().flat_map(|word| [word as u16, (word >> 16) as u16]).map(Half::from_bits);
            for (x, found) in expected.into_iter().zip(results).map(|(x, found)| (f64::from(x.to_f32()), f64::from(found.to_f32()))) {
                let gelu = x / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh());
                assert!((found - gelu).abs() <= gelu.abs() / 128.0 + 1e-5, "{config:?}: GELU of {x} is {gelu}, found {found}");
            }
        }
    }
    side.arena.ticket(compute)?.wait()
}

/// The bits of a product on the whole, cast and dequantized. `whole` gives the amax, with which `shard` casts.
fn codes<F: GatherFormat>(
    side: &Side,
    config: AllGatherConfig,
    whole: impl Fn(&Stream, &Buffer<bf16>, [u64; 2], &mut Buffer<bf16>) -> Result<f32>,
    shard: impl Fn(&Stream, &Buffer<bf16>, &Buffer<f32>, &mut QuantizedTensor<F>) -> Result<()>,
) -> Result<()> {
    let (Side { compute, out, runtime, .. }, Global { m, k, .. }) = (side, config.sizes);
    let product = config.product(side.world)?;
    let len = m * product.n;
    let weight = Buffer::from_slice(compute, &values(side.rank.index().into(), k * product.n))?;
    let gather = QuantizedAllGatherGemm::<F, bf16>::new(&side.memory, compute, config)?;
    let mut d = Buffer::<bf16>::zeros(compute, len)?;
    let mut bound = gather.bind(compute, weight.view(), None, d.view_mut())?;
    let copy: Loaded<CopyWords> = runtime.load()?;
    let mut found = [Buffer::<u32>::zeros(compute, len / 2)?, Buffer::<u32>::zeros(compute, len / 2)?];
    let mut own = [0, 1].map(|of| Buffer::from_slice(compute, side.shard(&values(of, m * k), k)).expect("a shard"));
    let mut amax = [Buffer::<f32>::zeros(compute, 1)?, Buffer::<f32>::zeros(compute, 1)?];
    // The cast's kernels are there before a graph is captured.
    let mut before = QuantizedTensor::<F>::uninitialised(compute, [own[0].len() / k, k], Direction::Rows)?;
    shard(compute, &own[0], &amax[0], &mut before)?;
    settle(compute)?;
    let mut step = |own: &Buffer<bf16>, amax: &Buffer<f32>, found: &mut Buffer<u32>| {
        shard(compute, own, amax, bound.shard(compute)?)?;
        bound.run(compute)?;
        copy.launch(compute, CopyWordsArgs { source: bound.result().cast(), target: found.view_mut() })
    };
    doing(side.rank, format!("capturing {config:?}"));
    let graph = Graph::capture(&[compute, out], || (0..2).try_for_each(|call| step(&own[call], &amax[call], &mut found[call])))?;
    let mut wide = Buffer::<bf16>::zeros(compute, m * k)?;
    for round in 0..ROUNDS {
        doing(side.rank, format!("round {round} of {config:?}"));
        let operands = [0, 1].map(|call| values(3000 + 2 * round + call, m * k));
        let mut expected = Vec::new();
        for (call, operand) in operands.iter().enumerate() {
            let largest = whole(compute, &Buffer::from_slice(compute, operand)?, [m, k], &mut wide)?;
            let dequantized = wide.to_vec_as::<Half>(compute)?;
            expected.push(words(&multiply(side, product, gather.choice().method, &dequantized, &weight)?));
            own[call].copy_from_pinned(compute, &PinnedBuffer::from_slice(compute, side.shard(operand, k))?)?;
            amax[call].copy_from_pinned(compute, &PinnedBuffer::from_slice(compute, &[largest])?)?;
        }
        if round % 2 == 1 {
            (0..2).try_for_each(|call| step(&own[call], &amax[call], &mut found[call]))?;
        } else {
            graph.replay(compute)?;
        }
        settle(compute)?;
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.to_vec(compute)? == expected, "{}, round {round} of {config:?}", side.rank);
        }
    }
    side.arena.ticket(compute)?.wait()
}

/// The plain product that has the same bits: of all rows, or of each shard.
fn multiply(side: &Side, product: GemmConfig, method: Method, operand: &[Half], weight: &Buffer<bf16>) -> Result<Vec<Half>> {
    let rows = if method == Method::Chunked { product.m.div_ceil(side.world.get().into()) } else { product.m };
    assert!(product.m.is_multiple_of(rows));
    let gemm: Gemm<bf16, bf16> = plain(&side.runtime, GemmConfig { m: rows, ..product }, method)?;
    let mut all = Vec::new();
    for rows in operand.chunks((rows * product.k) as usize) {
        let gathered = Buffer::from_slice(&side.compute, rows)?;
        let mut d = Buffer::<bf16>::zeros(&side.compute, rows.len() as u64 / product.k * product.n)?;
        gemm.run(&side.compute, gathered.view(), weight.view(), None, d.view_mut())?;
        all.extend(d.to_vec_as::<Half>(&side.compute)?);
    }
    Ok(all)
}
