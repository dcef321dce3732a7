//! Products whose operand is gathered meanwhile: by every method, their bits are those of a product on the gathered operand.

use std::time::Duration;

use half::bf16 as Half;
use oxtile::comm::{Member, Team};
use oxtile::gemm::GemmConfig;
use oxtile::num::bf16;
use oxtile::overlap::{AllGatherConfig, AllGatherGemm, Cut, Gathers, Method, OverlapConfig, OverlapMemory};
use oxtile::symmetric::{ArenaOptions, PutOrder};
use oxtile::{Buffer, Result, Runtime, Stream};

use crate::arenas::Arenas;
use crate::overlap_case::Problem;
pub use crate::overlap_case::{by, cut, last};
use crate::rounds::{Bound, Copied, rounds};
use crate::support::seeds;

/// A program of every rank.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub ranks: u32,
    pub config: AllGatherConfig,
    pub calls: Calls,
    pub seed: u64,
}

/// How a round is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    Eager,
    /// By the replay of a graph of one call.
    Captured,
    /// In turn by the replay of a graph of two calls, and eagerly. The host waits for none of them.
    Mixed,
}

pub const ROUNDS: u64 = 3;

impl Case {
    pub fn options(&self) -> ArenaOptions {
        ArenaOptions { bytes: 1 << 20, deadline: Duration::from_secs(600), ..ArenaOptions::default() }
    }

    fn problem(&self) -> Problem {
        Problem { ranks: self.ranks, config: self.config }
    }

    /// The product of a rank on the gathered operand.
    pub fn product(&self) -> GemmConfig {
        self.problem().product()
    }

    pub fn shard(&self, operand: &[Half], rank: u32) -> Vec<Half> {
        self.problem().shard(operand, rank)
    }

    pub fn operand(&self, round: u64) -> Vec<Half> {
        self.problem().operand(round)
    }

    pub fn weight(&self, rank: u32) -> Vec<Half> {
        self.problem().weight(rank)
    }

    /// What a rank's result is to be in each round: by the plain product.
    pub fn expected(&self, method: Method, rank: u32) -> Result<Vec<Vec<u16>>> {
        self.expected_of(method, rank, &(0..ROUNDS).map(|round| self.operand(round)).collect::<Vec<_>>())
    }

    /// The same of gathered operands.
    pub fn expected_of(&self, method: Method, rank: u32, operands: &[Vec<Half>]) -> Result<Vec<Vec<u16>>> {
        let stream = Runtime::emulated(1)?.device(0)?.stream()?;
        let halves = |words: Vec<u32>| words.into_iter().flat_map(|word| [word as u16, (word >> 16) as u16]).collect();
        operands.iter().map(|operand| self.problem().multiplied::<bf16, bf16>(&stream, method, rank, operand).map(halves)).collect()
    }

    /// Runs it, and compares every rank's result of every round.
    fn run(&self) -> Result<Vec<Method>> {
        self.run_rounds(ROUNDS, false)
    }

    /// The same in so many rounds, with shards that are written on a stream beside that of the calls, or on it.
    pub fn run_rounds(&self, count: u64, is_beside: bool) -> Result<Vec<Method>> {
        let Self { ranks, config, calls, seed } = *self;
        let (all, product) = (Arenas::with(ranks, seed, self.options()), self.product());
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
            let beside = if is_beside { Some(compute.device().stream()?) } else { None };
            let product = Copied::new(gather.bind(compute, weight.view(), None, d.view_mut())?, own, beside)?;
            bound.push(Bound::new([out, compute], product, own)?);
        }
        let operands: Vec<_> = (0..count).map(|round| self.operand(round)).collect();
        let found = rounds(&all, bound, (calls, count), |rank, round| self.shard(&operands[round as usize], rank))?;
        for (rank, (found, method)) in found.into_iter().zip(&methods).enumerate() {
            for (round, (found, expected)) in found.into_iter().zip(self.expected_of(*method, rank as u32, &operands)?).enumerate() {
                assert!(found == expected, "{self:?}, rank {rank}, {method:?}, round {round}");
            }
        }
        drop(sides);
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

pub fn member(all: &Arenas, i: usize) -> Member {
    Team::all(all.world.size()).member(all.arenas[i].rank()).unwrap()
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
        // Slabs of 4, 2 and 1 steps, of all panels and of the last one.
        (2, by(Method::Fused, Some(Cut { halving: true, ..cut(2, 3) }), [264, 16, 440])),
        (3, by(Method::Fused, Some(Cut { halving: true, ..last(2, 3) }), [300, 24, 448])),
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
        // Shards are columns of A as it is stored, and of B.
        (3, new([40, 48, 200], [false, true], Gathers::SumOfA, Method::Fused, None)),
        (2, new([40, 32, 200], [false, false], Gathers::SumOfA, Method::Fused, Some(cut(2, 1)))),
        (2, new([32, 40, 136], [false, true], Gathers::SumOfB, Method::Fused, None)),
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
        let cut = Cut { panels: 1 + below(4) as u32, slabs: 1 + below(4) as u32, halving: below(2) == 0, last_only: below(2) == 0 };
        let method = [Method::Fused, Method::Fused, Method::Chunked, Method::Sequential][below(4) as usize];
        let order = [PutOrder::ByPeer, PutOrder::InStep, PutOrder::ByChunk][below(3) as usize];
        let config = by(method, Some(cut), sizes);
        let config = AllGatherConfig { overlap: OverlapConfig { order: Some(order), ..config.overlap }, ..config };
        let calls = [Calls::Eager, Calls::Captured, Calls::Mixed][below(3) as usize];
        let case = Case { ranks, config, calls, seed };
        case.run().unwrap_or_else(|error| panic!("{case:?}: {error}"));
    }
}
