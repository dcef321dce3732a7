//! A gathered and a scattered product that are begun together, eager and by the replay of a graph of two calls: their bits are those of calls one after the other.

use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::bf16;
use oxtile::overlap::{
    AllGatherConfig, AllGatherGemm, GatheredProduct, GemmReduceScatter, Global, Method, ReduceScatterConfig, ScatterMethod,
    ScatteredProduct,
};
use oxtile::{Buffer, Graph, Loaded, PinnedBuffer, Result, Stream};

use crate::gathered::Side;
use crate::overlap_case::{by, cut};
use crate::values::values;
use crate::watch::{doing, settle};

/// Rounds, in turn eager and by the graph.
const ROUNDS: u64 = 40;

/// By the methods of both, on a rank's side.
pub fn compare(side: &Side) -> Result<()> {
    let world = u64::from(side.world.get());
    for method in [Method::Fused, Method::Sequential].into_iter().filter(|method| world > 1 || *method == Method::Sequential) {
        let scatters = ReduceScatterConfig::new(Global { m: 600, n: 128, k: 64 * world });
        let scattered = Some(if method == Method::Sequential { ScatterMethod::Sequential } else { ScatterMethod::Fused });
        pair(side, by(method, Some(cut(1, 1)), [700, 64 * world, 512]), ReduceScatterConfig { method: scattered, ..scatters })?;
    }
    if world > 1 {
        let scatters = ReduceScatterConfig::new(Global { m: 512 * world, n: 128, k: 64 * world });
        for method in [ScatterMethod::Direct, ScatterMethod::Whole] {
            let scatters = ReduceScatterConfig { method: Some(method), panels: Some(2), ..scatters };
            pair(side, by(Method::Fused, Some(cut(1, 1)), [700, 64 * world, 512]), scatters)?;
        }
    }
    Ok(())
}

/// The products, and where each call's results are kept.
struct Pair<'a> {
    gathered: GatheredProduct<'a, bf16, bf16>,
    scattered: ScatteredProduct<'a, bf16, bf16>,
    copy: Loaded<CopyWords>,
}

impl Pair<'_> {
    fn call(&mut self, stream: &Stream, own: &Buffer<bf16>, kept: &mut [Buffer<u32>; 2], is_bulk: bool) -> Result<()> {
        let Self { gathered, scattered, copy } = self;
        gathered.copy_shard(stream, own)?;
        if is_bulk {
            let gathering = gathered.begin(stream)?;
            let scattering = scattered.begin(stream)?;
            gathering.finish()?;
            scattering.finish()?;
        } else {
            gathered.run(stream)?;
            scattered.run(stream)?;
        }
        for (result, kept) in [gathered.result(), scattered.result()].into_iter().zip(kept) {
            copy.launch(stream, CopyWordsArgs { source: result.cast(), target: kept.view_mut() })?;
        }
        Ok(())
    }
}

fn pair(side: &Side, gathers: AllGatherConfig, scatters: ReduceScatterConfig) -> Result<()> {
    let Side { compute, out, runtime, .. } = side;
    let (rank, product, part) = (u64::from(side.rank.index()), gathers.product(side.world)?, scatters.product(side.world)?);
    let extent = scatters.rows(side.world);
    let rows = scatters.sizes.m.saturating_sub(rank * extent).min(extent);
    let lens = [product.m * product.n, rows * part.n];
    let upload = |number: u64, len: u64| Buffer::<bf16>::from_slice(compute, &values(number, len));
    let (weight, a, of_sum) =
        (upload(rank, product.k * product.n)?, upload(10 + rank, part.m * part.k)?, upload(20 + rank, part.k * part.n)?);
    let shard = |round: u64| side.shard(&values(1000 + round, product.m * product.k), product.k).to_vec();
    let mut own = Buffer::<bf16>::from_slice(compute, &shard(0))?;
    // SAFETY: the operand is written by copies on the stream of the calls, between them.
    let mut written = unsafe { Buffer::<bf16>::borrow_raw(&compute.device(), a.address(), a.len()) }?;
    let kept = || Ok::<_, oxtile::Error>([Buffer::<u32>::zeros(compute, lens[0] / 2)?, Buffer::<u32>::zeros(compute, lens[1] / 2)?]);
    let (mut apart, mut bulk) = (kept()?, kept()?);
    let [mut wide, mut d] = lens.map(|len| Buffer::<bf16>::zeros(compute, len).expect("device memory"));
    let gather = AllGatherGemm::<bf16, bf16>::new(&side.memory, compute, gathers)?;
    let scatter = GemmReduceScatter::<bf16, bf16>::new(&side.memory, compute, scatters)?;
    let mut pair = Pair {
        gathered: gather.bind(compute, weight.view(), None, wide.view_mut())?,
        scattered: scatter.bind(compute, a.view(), of_sum.view(), None, d.view_mut())?,
        copy: runtime.load()?,
    };
    doing(side.rank, format!("capturing a pair of {gathers:?}"));
    let graph = Graph::capture(&[compute, out], || (0..2).try_for_each(|_| pair.call(compute, &own, &mut bulk, true)))?;
    for round in 0..if side.shares_device() { 4 } else { ROUNDS } {
        doing(side.rank, format!("round {round} of a pair of {gathers:?}"));
        own.copy_from_pinned(compute, &PinnedBuffer::from_slice(compute, &shard(round))?)?;
        written.copy_from_pinned(compute, &PinnedBuffer::from_slice(compute, &values(3000 + 10 * round + rank, part.m * part.k))?)?;
        pair.call(compute, &own, &mut apart, false)?;
        if round % 2 == 0 {
            graph.replay(compute)?;
        } else {
            pair.call(compute, &own, &mut bulk, true)?;
        }
        settle(compute)?;
        for (of, (apart, bulk)) in ["gathered", "scattered"].into_iter().zip(apart.iter().zip(&bulk)) {
            let apart = apart.to_vec(compute)?;
            assert!(apart.iter().any(|word| *word != 0) || apart.is_empty(), "{of}: the product was not computed");
            assert!(apart == bulk.to_vec(compute)?, "{}, round {round}, {of} of {gathers:?}", side.rank);
        }
    }
    side.arena.ticket(compute)?.wait()?;
    drop(graph);
    Ok(())
}
