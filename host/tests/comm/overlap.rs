//! Products whose operand is gathered meanwhile: by every method, their bits are those of a product on the gathered operand.

use std::time::Duration;

use half::bf16 as Half;
use oxtile::comm::{Member, Team};
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::bf16;
use oxtile::overlap::{AllGatherConfig, AllGatherGemm, Cut, Gathers, Global, Method, OverlapConfig, OverlapMemory};
use oxtile::symmetric::ArenaOptions;
use oxtile::{Buffer, Graph, PinnedBuffer, Result, Runtime, Stream};

use crate::arenas::Arenas;

/// A program of every rank.
#[derive(Clone, Copy, Debug)]
struct Case {
    ranks: u32,
    config: AllGatherConfig,
    captured: bool,
    seed: u64,
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
        let Self { ranks, config, captured, seed } = *self;
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
        for (out, compute, product, own) in bound.iter_mut().filter(|_| captured) {
            graphs.push(Graph::capture(&[compute, out], || product.copy_shard(compute, own).and_then(|()| product.run(compute)))?);
        }
        let mut found: Vec<Vec<_>> = (0..ranks).map(|_| Vec::new()).collect();
        for round in 0..ROUNDS {
            let operand = self.operand(round);
            for (i, (_, compute, product, own)) in bound.iter_mut().enumerate() {
                own.copy_from_pinned(compute, &PinnedBuffer::from_slice(compute, &self.shard(&operand, i as u32))?)?;
                if captured {
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

/// By rows of a row-major operand, with a method.
fn by(method: Method, cut: Option<Cut>, [m, n, k]: [u64; 3]) -> AllGatherConfig {
    let overlap = OverlapConfig { method: Some(method), cut, ..OverlapConfig::default() };
    AllGatherConfig { overlap, ..AllGatherConfig::new(Global { m, n, k }) }
}

#[test]
fn every_method_has_the_bits_of_a_plain_product() {
    let cases = [
        (1, by(Method::Sequential, None, [40, 16, 72])),
        (2, by(Method::Fused, Some(Cut::Each(2)), [70, 32, 136])),
        (2, by(Method::Chunked, None, [70, 32, 136])),
        (2, by(Method::Sequential, None, [70, 32, 136])),
        (3, by(Method::Fused, Some(Cut::Last(3)), [300, 24, 200])),
        (4, AllGatherConfig { transpose_b: true, ..by(Method::Fused, Some(Cut::Each(1)), [264, 64, 72]) }),
        (4, by(Method::Chunked, None, [9, 32, 64])),
        (8, by(Method::Fused, Some(Cut::Each(4)), [100, 64, 264])),
    ];
    for (at, (ranks, config)) in cases.into_iter().enumerate() {
        for captured in [false, true] {
            let case = Case { ranks, config, captured, seed: at as u64 };
            let methods = case.run().unwrap_or_else(|error| panic!("{case:?}: {error}"));
            assert!(methods.iter().all(|method| Some(*method) == config.overlap.method), "{case:?}: {methods:?}");
        }
    }
}
