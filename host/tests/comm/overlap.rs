//! Products whose operand is gathered meanwhile: by every method, their bits are those of a product on the gathered operand.

use std::time::Duration;

use half::bf16 as Half;
use oxtile::comm::{Member, Team};
use oxtile::gemm::{Activation, Gemm, GemmConfig};
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::{Float, bf16, e4m3};
use oxtile::overlap::{AllGatherConfig, AllGatherGemm, Cut, GatherOperands, Gathers, Global, Method, OverlapConfig, OverlapMemory};
use oxtile::symmetric::{ArenaOptions, PutOrder};
use oxtile::{Buffer, Error, Graph, PinnedBuffer, Result, Runtime, Stream};

use crate::arenas::Arenas;
use crate::support::seeds;

/// A program of every rank.
#[derive(Clone, Copy, Debug)]
struct Case {
    ranks: u32,
    config: AllGatherConfig,
    calls: Calls,
    seed: u64,
}

/// How a round is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Calls {
    Eager,
    /// By the replay of a graph of one call.
    Captured,
    /// In turn by the replay of a graph of two calls, and eagerly. The host waits for none of them.
    Mixed,
}

const ROUNDS: u64 = 3;

/// Values that tell places apart, and whose products are not exact in bf16.
fn values(seed: u64, len: u64) -> Vec<Half> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Half::from_f32((state >> 40) as f32 / (1 << 22) as f32 - 2.0)
    };
    (0..len).map(next).collect()
}

impl Case {
    fn options(&self) -> ArenaOptions {
        ArenaOptions { bytes: 1 << 20, deadline: Duration::from_secs(60), ..ArenaOptions::default() }
    }

    /// The product of a rank on the gathered operand.
    fn product(&self) -> GemmConfig {
        self.config.product(oxtile::comm::WorldSize::new(self.ranks).unwrap()).unwrap()
    }

    /// Elements along the gathered dimension and along the other, and whether shards are rows of the operand as it is stored.
    fn gathered(&self) -> ([u64; 2], bool) {
        let AllGatherConfig { sizes: Global { m, n, k }, transpose_a, transpose_b, .. } = self.config;
        match self.config.gathers {
            Gathers::Rows => ([m, k], !transpose_a),
            Gathers::SumOfA => ([k, m], transpose_a),
            Gathers::SumOfB => ([k, n], !transpose_b),
        }
    }

    /// The shard of a rank of the operand in a round, without gaps.
    fn shard(&self, operand: &[Half], rank: u32) -> Vec<Half> {
        let ([gathered, other], are_rows) = self.gathered();
        let extent = gathered.div_ceil(self.ranks.into());
        let [start, end] = [rank, rank + 1].map(|of| (u64::from(of) * extent).min(gathered) as usize);
        if are_rows {
            return operand[start * other as usize..end * other as usize].to_vec();
        }
        operand.chunks(gathered as usize).flat_map(|row| row[start..end].to_vec()).collect()
    }

    fn operand(&self, round: u64) -> Vec<Half> {
        let ([gathered, other], _) = self.gathered();
        values(1000 + round, gathered * other)
    }

    fn weight(&self, rank: u32) -> Vec<Half> {
        let GemmConfig { m, n, k, .. } = self.product();
        values(rank.into(), k * if self.config.gathers == Gathers::SumOfB { m } else { n })
    }

    /// What a rank's result is to be in each round: by the plain product.
    fn expected(&self, method: Method, rank: u32) -> Result<Vec<Vec<u16>>> {
        let (runtime, config) = (Runtime::emulated(1)?, self.product());
        let stream = runtime.device(0)?.stream()?;
        let extent = config.m.div_ceil(self.ranks.into());
        let of_round = |round| {
            let (gathered, weight) = (self.operand(round), self.weight(rank));
            let (a, b) = if self.config.gathers == Gathers::SumOfB { (weight, gathered) } else { (gathered, weight) };
            let rows = |rows: std::ops::Range<u64>| a[(rows.start * config.k) as usize..(rows.end * config.k) as usize].to_vec();
            match method {
                Method::Sequential => multiply(&stream, &Gemm::new(&runtime, config)?, config, a, b),
                Method::Fused => {
                    let (config, a, b) = self.rotated(config, rank, a, b);
                    multiply(&stream, &whole(&runtime, config)?, config, a, b)
                }
                Method::Chunked => {
                    let shards = (0..u64::from(self.ranks)).map(|of| (of * extent).min(config.m)..((of + 1) * extent).min(config.m));
                    let product = |shard: std::ops::Range<u64>| {
                        let config = GemmConfig { m: shard.end - shard.start, ..config };
                        multiply(&stream, &Gemm::new(&runtime, config)?, config, rows(shard), b.clone())
                    };
                    shards.map(product).collect::<Result<Vec<_>>>().map(|parts| parts.concat())
                }
            }
        };
        (0..ROUNDS).map(of_round).collect()
    }

    /// Operands of which the sum begins with the rank's own part, in whole steps of 64: both lie along `k`.
    fn rotated(&self, config: GemmConfig, rank: u32, a: Vec<Half>, b: Vec<Half>) -> (GemmConfig, Vec<Half>, Vec<Half>) {
        if self.config.gathers == Gathers::Rows {
            return (config, a, b);
        }
        let k = config.k.next_multiple_of(64);
        let first = (u64::from(rank) * config.k.div_ceil(self.ranks.into())).next_multiple_of(64);
        let turn = |mut matrix: Vec<Half>, width: u64| {
            matrix.resize((k * width) as usize, Half::ZERO);
            matrix.rotate_left(if first < k { (first * width) as usize } else { 0 });
            matrix
        };
        (GemmConfig { k, ..config }, turn(a, config.m), turn(b, config.n))
    }

    /// Runs it, and compares every rank's result of every round.
    fn run(&self) -> Result<Vec<Method>> {
        let Self { ranks, config, calls, seed } = *self;
        let all = Arenas::with(ranks, seed, self.options());
        let (product, copy) = (self.product(), all.world.runtime.load::<CopyWords>()?);
        let mut sides = Vec::new();
        for (i, arena) in all.arenas.iter().enumerate() {
            let (out, compute) = (all.world.ranks[i].device().urgent_stream()?, all.stream(i).clone());
            let memory = OverlapMemory::take(arena, &member(&all, i), config.bytes::<bf16, bf16>()? + 64, &out)?;
            let gather = AllGatherGemm::<bf16, bf16>::new(&memory, &compute, config)?;
            let weight = Buffer::from_slice(&compute, &self.weight(i as u32))?;
            let own = Buffer::<bf16>::uninitialised(&compute, self.shard(&self.operand(0), i as u32).len() as u64)?;
            let d = Buffer::<bf16>::named(&compute, "d", product.m * product.n)?;
            sides.push(Side { out, compute, gather, weight, own, d });
        }
        let methods: Vec<_> = sides.iter().map(|side| side.gather.choice().method).collect();
        let mut bound = Vec::new();
        for Side { out, compute, gather, weight, own, d } in &mut sides {
            bound.push((out, &*compute, gather.bind(compute, weight.view(), None, d.view_mut())?, own));
        }
        let mut graphs = Vec::new();
        for (out, compute, product, own) in bound.iter_mut().filter(|_| calls != Calls::Eager) {
            let mut call = || product.copy_shard(compute, own).and_then(|()| product.run(compute));
            let count = if calls == Calls::Mixed { 2 } else { 1 };
            graphs.push(Graph::capture(&[compute, out], || (0..count).try_for_each(|_| call()))?);
        }
        let mut found: Vec<Vec<_>> = (0..ranks).map(|_| Vec::new()).collect();
        for round in 0..ROUNDS {
            let operand = self.operand(round);
            for (i, (_, compute, product, own)) in bound.iter_mut().enumerate() {
                own.copy_from_pinned(compute, &PinnedBuffer::from_slice(compute, &self.shard(&operand, i as u32))?)?;
                if calls == Calls::Captured || (calls == Calls::Mixed && round % 2 == 0) {
                    graphs[i].replay(compute)?;
                } else {
                    product.copy_shard(compute, own)?;
                    product.run(compute)?;
                }
                let mut kept = Buffer::<u32>::named(compute, "kept", product.result().len() / 2)?;
                copy.launch(compute, CopyWordsArgs { source: product.result().cast(), target: kept.view_mut() })?;
                found[i].push(kept);
            }
        }
        for (i, (_, compute, ..)) in bound.iter().enumerate() {
            all.arenas[i].ticket(compute)?.wait()?;
            for (kept, expected) in found[i].iter().zip(self.expected(methods[i], i as u32)?) {
                let words = kept.to_vec(compute)?;
                let found: Vec<u16> = words.into_iter().flat_map(|word| [word as u16, (word >> 16) as u16]).collect();
                assert!(found == expected, "{self:?}, rank {i}, {:?}", methods[i]);
            }
        }
        drop((bound, graphs));
        drop((found, sides));
        all.close();
        Ok(methods)
    }
}

/// What a rank has.
struct Side {
    out: Stream,
    compute: Stream,
    gather: AllGatherGemm<bf16, bf16>,
    weight: Buffer<bf16>,
    own: Buffer<bf16>,
    d: Buffer<bf16>,
}

fn member(all: &Arenas, i: usize) -> Member {
    Team::all(all.world.size()).member(all.arenas[i].rank()).unwrap()
}

fn multiply(stream: &Stream, gemm: &Gemm<bf16, bf16>, config: GemmConfig, a: Vec<Half>, b: Vec<Half>) -> Result<Vec<u16>> {
    let (a, b) = (Buffer::from_slice(stream, &a)?, Buffer::from_slice(stream, &b)?);
    let mut d = Buffer::<bf16>::zeros(stream, config.m * config.n)?;
    gemm.run(stream, a.view(), b.view(), None, d.view_mut())?;
    Ok(d.to_vec_as::<Half>(stream)?.into_iter().map(Half::to_bits).collect())
}

/// The product whose tiles are not split.
fn whole(runtime: &Runtime, config: GemmConfig) -> Result<Gemm<bf16, bf16>> {
    let plans = config.plans::<bf16, bf16>(&runtime.device(0)?);
    Gemm::planned(runtime, config, *plans.iter().find(|plan| plan.parts == 1).expect("a plan is not split"))
}

/// Shards in so many panels of so many slabs each.
const fn cut(panels: u32, slabs: u32) -> Cut {
    Cut { panels, slabs, last_only: false }
}

/// As [`cut`], with slabs of the last panel alone.
const fn last(panels: u32, slabs: u32) -> Cut {
    Cut { last_only: true, ..cut(panels, slabs) }
}

/// By rows of a row-major operand, with a method.
fn by(method: Method, cut: Option<Cut>, [m, n, k]: [u64; 3]) -> AllGatherConfig {
    let overlap = OverlapConfig { method: Some(method), cut, ..OverlapConfig::default() };
    AllGatherConfig { overlap, ..AllGatherConfig::new(Global { m, n, k }) }
}

#[test]
fn every_method_has_the_bits_of_a_plain_product() {
    let cases = [
        (1, by(Method::Sequential, None, [40, 16, 72])),
        (2, by(Method::Fused, Some(cut(1, 2)), [70, 32, 136])),
        (2, by(Method::Chunked, None, [70, 32, 136])),
        (2, by(Method::Sequential, None, [70, 32, 136])),
        (3, by(Method::Fused, Some(last(2, 3)), [300, 24, 200])),
        (4, AllGatherConfig { transpose_b: true, ..by(Method::Fused, Some(cut(1, 1)), [264, 64, 72]) }),
        (4, by(Method::Chunked, None, [9, 32, 64])),
        // Shards of 2, 2, 1 and 0 rows.
        (4, by(Method::Chunked, None, [5, 32, 64])),
        (8, by(Method::Fused, Some(cut(1, 4)), [100, 64, 264])),
    ];
    for (at, (ranks, config)) in cases.into_iter().enumerate() {
        for calls in [Calls::Eager, Calls::Captured, Calls::Mixed] {
            let case = Case { ranks, config, calls, seed: at as u64 };
            let methods = case.run().unwrap_or_else(|error| panic!("{case:?}: {error}"));
            assert!(methods.iter().all(|method| Some(*method) == config.overlap.method), "{case:?}: {methods:?}");
        }
    }
}

/// Operands as they may be stored, and what may be gathered.
#[test]
fn every_layout_and_every_gather() {
    let new = |sizes: [u64; 3], transposes: [bool; 2], gathers, method, cut| {
        let [transpose_a, transpose_b] = transposes;
        AllGatherConfig { transpose_a, transpose_b, gathers, ..by(method, cut, sizes) }
    };
    let cases = [
        // Shards of a transposed A are columns.
        (2, new([80, 32, 136], [true, false], Gathers::Rows, Method::Fused, Some(cut(1, 2)))),
        (3, new([72, 48, 64], [true, true], Gathers::Rows, Method::Sequential, None)),
        (3, new([40, 48, 200], [true, false], Gathers::SumOfA, Method::Fused, None)),
        (4, new([64, 16, 520], [true, false], Gathers::SumOfB, Method::Fused, None)),
        (2, new([16, 16, 40], [false, false], Gathers::SumOfA, Method::Sequential, None)),
        (2, new([16, 16, 40], [false, true], Gathers::SumOfB, Method::Sequential, None)),
    ];
    for (at, (ranks, config)) in cases.into_iter().enumerate() {
        let calls = [Calls::Mixed, Calls::Captured, Calls::Eager][at % 3];
        let case = Case { ranks, config, calls, seed: at as u64 };
        case.run().unwrap_or_else(|error| panic!("{case:?}: {error}"));
    }
}

/// Random shapes, each under a seed of its own.
#[test]
fn random_shapes_under_many_seeds() {
    for seed in 0..seeds() / 4 {
        let mut state = seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ 0x9E37_79B9;
        let mut below = |limit: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % limit
        };
        let ranks = 2 + below(3) as u32;
        let sizes = [1 + below(300), 8 * (1 + below(4)) * u64::from(ranks), 8 * (1 + below(30))];
        let cut = Cut { panels: 1 + below(4) as u32, slabs: 1 + below(4) as u32, last_only: below(2) == 0 };
        let method = [Method::Fused, Method::Fused, Method::Chunked, Method::Sequential][below(4) as usize];
        let order = [PutOrder::ByPeer, PutOrder::InStep, PutOrder::ByChunk][below(3) as usize];
        let config = by(method, Some(cut), sizes);
        let config = AllGatherConfig { overlap: OverlapConfig { order: Some(order), ..config.overlap }, ..config };
        let calls = [Calls::Eager, Calls::Captured, Calls::Mixed][below(3) as usize];
        let case = Case { ranks, config, calls, seed };
        case.run().unwrap_or_else(|error| panic!("{case:?}: {error}"));
    }
}

/// Ranks with an operation each, on one memory.
struct Ranks {
    all: Arenas,
    memories: Vec<OverlapMemory>,
}

impl Ranks {
    fn new(ranks: u32, bytes: u64, options: ArenaOptions) -> Result<Self> {
        let all = Arenas::with(ranks, 1, options);
        let memory = |i: usize| OverlapMemory::take(&all.arenas[i], &member(&all, i), bytes, &all.world.ranks[i].device().urgent_stream()?);
        let memories = (0..ranks as usize).map(memory).collect::<Result<_>>()?;
        Ok(Self { all, memories })
    }

    fn gather(&self, i: usize, config: AllGatherConfig) -> Result<AllGatherGemm<bf16, bf16>> {
        AllGatherGemm::new(&self.memories[i], self.all.stream(i), config)
    }
}

/// Two layers of other sizes and methods take one memory by turns.
#[test]
fn layers_share_a_memory() -> Result<()> {
    let layers = [by(Method::Fused, Some(cut(1, 2)), [70, 32, 136]), by(Method::Fused, Some(last(2, 4)), [264, 16, 72])];
    let case = Case { ranks: 2, config: layers[0], calls: Calls::Eager, seed: 1 };
    let ranks = Ranks::new(2, 264 * 136 * 2, case.options())?;
    let mut results: Vec<Vec<Buffer<bf16>>> = Vec::new();
    let gathers: Vec<Vec<_>> =
        (0..2).map(|i| layers.iter().map(|layer| ranks.gather(i, *layer)).collect::<Result<_>>()).collect::<Result<_>>()?;
    let cases = layers.map(|config| Case { config, ..case });
    for i in 0..2 {
        let d = cases.map(|case| Buffer::uninitialised(ranks.all.stream(i), case.product().m * case.product().n));
        results.push(d.into_iter().collect::<Result<_>>()?);
    }
    // Each layer takes both places, after itself and after the other.
    for (round, layer) in [0, 1, 1, 0, 0, 1].into_iter().enumerate() {
        let (case, operand) = (&cases[layer], round as u64 % ROUNDS);
        for i in 0..2 {
            let stream = ranks.all.stream(i);
            let weight = Buffer::from_slice(stream, &case.weight(i as u32))?;
            let shard = PinnedBuffer::from_slice(stream, &case.shard(&case.operand(operand), i as u32))?;
            let mut product = gathers[i][layer].bind(stream, weight.view(), None, results[i][layer].view_mut())?;
            product.shard(stream)?.copy_from_pinned(stream, &shard)?;
            product.run(stream)?;
        }
        for (i, results) in results.iter().enumerate() {
            ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait()?;
            let found: Vec<u16> = results[layer].to_vec_as::<Half>(ranks.all.stream(i))?.into_iter().map(Half::to_bits).collect();
            assert!(found == case.expected(Method::Fused, i as u32)?[operand as usize], "{case:?}, rank {i}, round {round}");
        }
    }
    Ok(())
}

/// A rank that does not call is named, with the chunk that does not come.
#[test]
fn a_rank_that_does_not_call_is_named() -> Result<()> {
    for method in [Method::Fused, Method::Sequential] {
        let config = by(method, Some(cut(1, 1)), [70, 32, 136]);
        let case = Case { ranks: 2, config, calls: Calls::Eager, seed: 1 };
        let options = ArenaOptions { deadline: Duration::from_millis(300), ..case.options() };
        let ranks = Ranks::new(2, 70 * 136 * 2, options)?;
        let gathers = [ranks.gather(0, config)?, ranks.gather(1, config)?];
        let stream = ranks.all.stream(0);
        let (weight, mut d) = (Buffer::from_slice(stream, &case.weight(0))?, Buffer::uninitialised(stream, 70 * 16)?);
        let mut product = gathers[0].bind(stream, weight.view(), None, d.view_mut())?;
        product.shard(stream)?.fill_zero(stream)?;
        product.run(stream)?;
        let error = ranks.all.arenas[0].ticket(stream)?.wait().unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("gathered chunk"), "{method:?}: {error}");
    }
    Ok(())
}

/// Members that made different operations learn of it before the first call, in every build.
#[test]
fn other_operations_on_other_ranks_are_refused() -> Result<()> {
    let config = by(Method::Fused, Some(cut(1, 2)), [70, 32, 136]);
    let others = [
        AllGatherConfig { overlap: OverlapConfig { method: Some(Method::Sequential), ..config.overlap }, ..config },
        AllGatherConfig { overlap: OverlapConfig { cut: Some(cut(1, 1)), ..config.overlap }, ..config },
        AllGatherConfig { overlap: OverlapConfig { margin: 2, ..config.overlap }, ..config },
        AllGatherConfig { sizes: Global { m: 71, ..config.sizes }, ..config },
        AllGatherConfig { transpose_b: true, ..config },
        AllGatherConfig { alpha: 2.0, ..config },
    ];
    for other in others {
        let ranks = Ranks::new(2, 71 * 136 * 2, Case { ranks: 2, config, calls: Calls::Eager, seed: 1 }.options())?;
        let (gather, _other) = (ranks.gather(0, config)?, ranks.gather(1, other)?);
        let stream = ranks.all.stream(0);
        let (weight, mut d) = (Buffer::<bf16>::zeros(stream, 136 * 16)?, Buffer::<bf16>::zeros(stream, 70 * 16)?);
        let error = gather.bind(stream, weight.view(), None, d.view_mut()).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{other:?}: {error}");
    }
    Ok(())
}

#[test]
fn what_cannot_be_is_refused_with_its_mend() -> Result<()> {
    let config = by(Method::Fused, None, [70, 32, 136]);
    let ranks = Ranks::new(2, 70 * 136 * 2, Case { ranks: 2, config, calls: Calls::Eager, seed: 1 }.options())?;
    let refused = |config| ranks.gather(0, config).unwrap_err().to_string();
    let larger = refused(by(Method::Fused, None, [71, 32, 136]));
    assert_eq!(larger, "AllGatherGemm::new: a gathered operand of 19312 bytes for a memory of 19040: take the most of all layers");
    let odd = refused(by(Method::Sequential, None, [70, 33, 136]));
    assert_eq!(odd, "Global::local: n is 33, which 2 ranks do not divide: pad it to 34");
    let unaligned = refused(by(Method::Fused, None, [70, 32, 132]));
    assert!(unaligned.contains("Fused cannot do it: k is 132, no multiple of 8"), "{unaligned}");
    let sums = refused(AllGatherConfig { gathers: Gathers::SumOfA, transpose_a: true, ..by(Method::Chunked, None, [64, 32, 64]) });
    assert!(sums.contains("the parts of a sum would be added up in the result's type"), "{sums}");
    let slabs = refused(by(Method::Fused, Some(cut(1, 9)), [70, 32, 136]));
    assert_eq!(slabs, "AllGatherConfig: 9 slabs: take 1 to 4");
    let margin = refused(AllGatherConfig { overlap: OverlapConfig { margin: 132, ..config.overlap }, ..config });
    assert_eq!(margin, "AllGatherConfig: a margin of 132 leaves none of 4 multiprocessors");

    let (gather, _other) = (ranks.gather(0, config)?, ranks.gather(1, config)?);
    let stream = ranks.all.stream(0);
    let (weight, mut d) = (Buffer::<bf16>::zeros(stream, 136 * 16)?, Buffer::<bf16>::zeros(stream, 70 * 16)?);
    let mut product = gather.bind(stream, weight.view(), None, d.view_mut())?;
    let unwritten = product.run(stream).unwrap_err().to_string();
    assert!(unwritten.starts_with("GatheredProduct::run: the shard of this call was not written"), "{unwritten}");
    Ok(())
}

/// A product of two ranks with all that may follow it, by the fused kernel and by the plain one; `T` is built from small numbers.
fn fused_and_plain<T: GatherOperands<bf16>>(values: impl Fn(&Stream, u64, u64) -> Result<Buffer<T>>, scaled: bool) -> Result<()> {
    let sizes = Global { m: 72, n: 64, k: 272 };
    let overlap = OverlapConfig { method: Some(Method::Fused), cut: Some(cut(2, 2)), ..OverlapConfig::default() };
    let (beta, activation) = if scaled { (0.0, Activation::Identity) } else { (0.5, Activation::Gelu) };
    let config = AllGatherConfig { transpose_b: true, alpha: 0.75, beta, activation, overlap, ..AllGatherConfig::new(sizes) };
    let options = Case { ranks: 2, config, calls: Calls::Eager, seed: 1 }.options();
    let ranks = Ranks::new(2, config.bytes::<T, bf16>()?, options)?;
    let product = config.product(ranks.all.world.size())?;
    let gathers = [0, 1].map(|i| AllGatherGemm::<T, bf16>::new(&ranks.memories[i], ranks.all.stream(i), config));
    let gathers = gathers.into_iter().collect::<Result<Vec<_>>>()?;
    let shard = sizes.m / 2 * sizes.k;
    let operands = |i: usize| {
        let (stream, seed) = (ranks.all.stream(i), 8 + i as u64);
        let (a, b) = (Buffer::from_slice(stream, &[1.5_f32])?, Buffer::from_slice(stream, &[0.25_f32])?);
        Ok((values(stream, 7, sizes.m * sizes.k)?, values(stream, seed, product.n * product.k)?, a, b))
    };
    let all = [0, 1].into_iter().map(operands).collect::<Result<Vec<_>>>()?;
    let mut found: Vec<Buffer<bf16>> = Vec::new();
    for (i, gather) in gathers.iter().enumerate() {
        let (stream, (whole, weight, a, b)) = (ranks.all.stream(i), &all[i]);
        let bias = Buffer::from_slice(stream, &self::values(3, product.n))?;
        let (mut d, mut own) = (Buffer::zeros(stream, sizes.m * product.n)?, Buffer::<T>::zeros(stream, shard)?);
        let mine = whole.view().slice(i as u64 * shard, (i as u64 + 1) * shard).cast();
        let copy = ranks.all.world.runtime.load::<CopyWords>()?;
        copy.launch(stream, CopyWordsArgs { source: mine, target: own.view_mut().cast() })?;
        let mut bound = match scaled {
            true => gather.bind_scaled(stream, weight.view(), [a.view(), b.view()], Some(bias.view()), d.view_mut())?,
            false => gather.bind(stream, weight.view(), Some(bias.view()), d.view_mut())?,
        };
        bound.copy_shard(stream, &own)?;
        bound.run(stream)?;
        drop(bound);
        found.push(d);
    }
    let plans = product.plans::<T, bf16>(&ranks.all.world.runtime.device(0)?);
    let plan = *plans.iter().find(|plan| plan.parts == 1).expect("a plan is not split");
    let plain = Gemm::<T, bf16>::planned(&ranks.all.world.runtime, product, plan)?;
    for (i, found) in found.iter().enumerate() {
        let (stream, (whole, weight, a, b)) = (ranks.all.stream(i), &all[i]);
        let (bias, mut d) = (Buffer::from_slice(stream, &self::values(3, product.n))?, Buffer::zeros(stream, sizes.m * product.n)?);
        let mut bound = match scaled {
            true => plain.bind_scaled(stream, (whole.view(), weight.view()), [a.view(), b.view()], Some(bias.view()), d.view_mut())?,
            false => plain.bind(stream, whole.view(), weight.view(), Some(bias.view()), d.view_mut())?,
        };
        bound.run(stream)?;
        drop(bound);
        ranks.all.arenas[i].ticket(stream)?.wait()?;
        let (found, expected) = (found.to_vec_as::<Half>(stream)?, d.to_vec_as::<Half>(stream)?);
        assert!(found == expected && found.iter().any(|value| *value != Half::ZERO), "rank {i}");
    }
    Ok(())
}

/// Bias, factors of the operands, `D` as it was and GELU come once, after the whole sum.
#[test]
fn what_follows_the_product_comes_once() -> Result<()> {
    fused_and_plain::<bf16>(|stream, seed, len| Buffer::from_slice(stream, &values(seed, len)), false)?;
    let codes = |seed, len| values(seed, len).into_iter().map(|value| e4m3::from_f32(value.to_f32())).collect::<Vec<_>>();
    fused_and_plain::<e4m3>(|stream, seed, len| Buffer::from_slice(stream, &codes(seed, len)), true)
}

/// Two memories of one arena: what is made on one is not compared with what is made on the other.
#[test]
fn two_memories_of_one_arena() -> Result<()> {
    let configs = [by(Method::Fused, None, [70, 32, 136]), by(Method::Sequential, None, [40, 16, 64])];
    let options = Case { ranks: 2, config: configs[0], calls: Calls::Eager, seed: 1 }.options();
    let all = Arenas::with(2, 1, ArenaOptions { channels: 128, ..options });
    let mut made = Vec::new();
    for (i, arena) in all.arenas.iter().enumerate() {
        for config in configs {
            let out = all.world.ranks[i].device().urgent_stream()?;
            let memory = OverlapMemory::take(arena, &member(&all, i), config.bytes::<bf16, bf16>()?, &out)?;
            made.push((i, config, AllGatherGemm::<bf16, bf16>::new(&memory, all.stream(i), config)?));
        }
    }
    for (i, config, gather) in &made {
        let (stream, GemmConfig { m, n, k, .. }) = (all.stream(*i), config.product(all.world.size())?);
        let (weight, mut d) = (Buffer::<bf16>::zeros(stream, k * n)?, Buffer::<bf16>::zeros(stream, m * n)?);
        gather.bind(stream, weight.view(), None, d.view_mut())?;
    }
    Ok(())
}

/// A call that is refused leaves the ranks in step: nothing of it was put.
#[test]
fn a_call_that_is_refused_is_made_again() -> Result<()> {
    let config = by(Method::Fused, None, [70, 32, 136]);
    let case = Case { ranks: 2, config, calls: Calls::Eager, seed: 1 };
    let ranks = Ranks::new(2, 70 * 136 * 2, case.options())?;
    let gathers = [ranks.gather(0, config)?, ranks.gather(1, config)?];
    let weights = [0, 1].map(|i| Buffer::from_slice(ranks.all.stream(i), &case.weight(i as u32)));
    let mut results = [0, 1].map(|i| Buffer::<bf16>::named(ranks.all.stream(i), "d", 70 * 16).expect("memory"));
    for (i, (weight, d)) in weights.into_iter().zip(&mut results).enumerate() {
        let (stream, other, weight) = (ranks.all.stream(i), ranks.all.stream(1 - i), weight?);
        let mut product = gathers[i].bind(stream, weight.view(), None, d.view_mut())?;
        let shard = Buffer::from_slice(stream, &case.shard(&case.operand(0), i as u32))?;
        assert!(matches!(product.copy_shard(stream, &Buffer::zeros(stream, 3)?), Err(Error::Length { .. })));
        assert!(product.run(stream).unwrap_err().to_string().contains("was not written"));
        product.copy_shard(stream, &shard)?;
        assert!(matches!(product.run(other), Err(Error::WrongDevice { .. })));
        product.copy_shard(stream, &shard)?;
        let captured = Graph::capture(&[stream], || product.copy_shard(stream, &shard).and_then(|()| product.run(stream)));
        assert!(captured.unwrap_err().to_string().contains("name both in Graph::capture"));
        product.copy_shard(stream, &shard)?;
        product.run(stream)?;
    }
    for (i, d) in results.iter().enumerate() {
        ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait()?;
        let found: Vec<u16> = d.to_vec_as::<Half>(ranks.all.stream(i))?.into_iter().map(Half::to_bits).collect();
        assert!(found == case.expected(Method::Fused, i as u32)?[0], "rank {i}");
    }
    Ok(())
}
