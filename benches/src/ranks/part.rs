//! A rank's part of a product whose sum ranks share: its operands, what the sum has to be, its memory, and how calls are timed.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use half::bf16 as Half;
use oxtile::comm::{HostRank, Team};
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::overlap::OverlapMemory;
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};
use oxtile::{Buffer, Runtime, Stream};

use super::Times;
use super::gate::Gate;
use super::gathered::{STEP, Sizes, pattern, values};
use super::member::DEADLINE;

/// The operands of a rank, and the product of them alone.
pub struct Part {
    runtime: Runtime,
    pub compute: Stream,
    pub out: Stream,
    pattern: Vec<Half>,
    pub sizes: Sizes,
    pub local: GemmConfig,
    pub gemm: Gemm<bf16, bf16>,
    pub a: Buffer<bf16>,
    pub weight: Buffer<bf16>,
    ranks: u64,
}

impl Part {
    /// Of a product of so many elements, of which this rank multiplies `local`.
    pub fn new(rank: &HostRank, runtime: &Runtime, sizes: Sizes, local: GemmConfig) -> Result<Self> {
        let (compute, out) = (rank.device().stream()?, rank.device().urgent_stream()?);
        let (pattern, me, ranks) = (pattern(), rank.rank().index() as usize, u64::from(rank.world().get()));
        ensure!(local.m.is_multiple_of(ranks), "{sizes:?}: ranks have equal rows here");
        let of = |number: usize, count: u64| Buffer::from_slice(&compute, &values(&pattern, number * STEP, count));
        let (a, weight) = (of(2 * me, local.m * local.k)?, of(2 * me + 1, local.n * local.k)?);
        let gemm = Gemm::new(runtime, local)?;
        Ok(Self { runtime: runtime.clone(), compute, out, pattern, sizes, local, gemm, a, weight, ranks })
    }

    /// Rows of a shard.
    pub fn rows(&self) -> u64 {
        self.local.m / self.ranks
    }

    /// The rows of a shard of the sum, each element with a bound: the products of all ranks in `f32`. Parts are rounded, and so is the result. Sums of numbers of about 1 in another order
    /// differ by some 2^-24 of each, more than what is rounded where parts are much larger than their sum: of 28672 of them 0.0021 was found between tiles of two sizes.
    pub fn expected(&self, shard: u64) -> Result<Vec<[f32; 2]>> {
        let Self { runtime, compute, local, pattern, .. } = self;
        let rows = self.rows();
        let gemm = Gemm::<bf16, f32>::new(runtime, GemmConfig { m: rows, ..*local })?;
        let mut sums = vec![[0.0_f32; 2]; (rows * local.n) as usize];
        for of in 0..self.ranks as usize {
            let a = values(pattern, 2 * of * STEP + (shard * rows * local.k) as usize, rows * local.k);
            let weight = values(pattern, (2 * of + 1) * STEP, local.n * local.k);
            let (a, weight) = (Buffer::from_slice(compute, &a)?, Buffer::from_slice(compute, &weight)?);
            let mut part = Buffer::<f32>::uninitialised(compute, rows * local.n)?;
            gemm.run(compute, a.view(), weight.view(), None, part.view_mut())?;
            for ([sum, size], part) in sums.iter_mut().zip(part.to_vec(compute)?) {
                (*sum, *size) = (*sum + part, *size + part.abs());
            }
        }
        let order = (self.ranks * local.k) as f32 * f32::EPSILON;
        Ok(sums.into_iter().map(|[sum, size]| [sum, (size + sum.abs()) / 256.0 + order + 1e-3]).collect())
    }
}

/// Fails at the first element that is not within its bound.
pub fn check(what: impl Fn() -> String, found: &[Half], expected: &[[f32; 2]]) -> Result<()> {
    // NaN is wrong too.
    let is_right = |(found, [sum, bound]): (&Half, &[f32; 2])| (found.to_f32() - sum).abs() <= *bound;
    let wrong = found.iter().zip(expected).position(|both| !is_right(both));
    let at = wrong.map(|at| (at, found[at], expected[at]));
    at.map_or(Ok(()), |(at, found, [sum, bound])| Err(anyhow::anyhow!("{}: element {at} is {found}, not {sum} within {bound}", what())))
}

/// Memory of an arena, which is closed after it is dropped.
pub struct Room<M> {
    memory: Option<M>,
    arena: Option<Arena>,
}

impl<M> Room<M> {
    pub fn new(arena: Arena, memory: M) -> Self {
        Self { memory: Some(memory), arena: Some(arena) }
    }

    pub fn open(&self) -> Result<(&M, &Arena)> {
        self.memory.as_ref().zip(self.arena.as_ref()).context("it was opened")
    }
}

impl Room<OverlapMemory> {
    /// Room for so many bytes of operands or parts in an arena of its own. Their copies are enqueued on `out`.
    pub fn of(rank: &HostRank, backend: BackendName, needed: u64, out: &Stream) -> Result<Self> {
        let options = ArenaOptions { backend, bytes: 2 * needed + 4096, deadline: DEADLINE, ..ArenaOptions::default() };
        let arena = Arena::open(rank, options)?;
        let member = Team::all(rank.world()).member(rank.rank()).context("every rank is of the world")?;
        let memory = OverlapMemory::take(&arena, &member, needed, out)?;
        Ok(Self::new(arena, memory))
    }
}

impl<M> Drop for Room<M> {
    fn drop(&mut self) {
        drop(self.memory.take());
        // An arena that cannot be closed keeps its memory, until the process ends.
        let _ = self.arena.take().map(|arena| arena.close().map(|closing| closing.finish()));
    }
}

/// Times calls, after two that are not timed: the ranks begin together, where the first ends. Where a rank fails, the others wait for it until the deadline.
pub fn times(stream: &Stream, arena: &Arena, calls: u64, gate: &Gate, mut call: impl FnMut(&Stream) -> Result<()>) -> Result<Times> {
    let settle = || -> Result<()> { Ok(arena.ticket(stream)?.wait()?) };
    gate.after(DEADLINE, || call(stream).and_then(|()| settle()))?;
    call(stream)?;
    let (begin, start) = (Instant::now(), stream.record()?);
    (0..calls).try_for_each(|_| call(stream))?;
    let end = stream.record()?;
    settle()?;
    Ok(Times { wall: begin.elapsed().as_secs_f64() * 1e3, device: end.elapsed_since(&start)?.as_secs_f64() * 1e3, ..Times::default() })
}
