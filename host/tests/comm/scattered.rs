//! Products whose sum ranks share, and whose rows are scattered: their bits are those of an oracle that rounds parts alike and adds them in order, whichever part comes when.

use std::time::Duration;

use half::bf16 as Half;
use oxtile::comm::{Team, WorldSize};
use oxtile::gemm::{Activation, Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::overlap::{GemmReduceScatter, Global, Method, OverlapMemory, ReduceScatterConfig, ScatterMethod};
use oxtile::symmetric::ArenaOptions;
use oxtile::{Buffer, Error, PinnedBuffer, Result, Runtime, Stream};

use crate::arenas::Arenas;
use crate::overlap::{self, Calls, ROUNDS, by, cut, member};
use crate::overlap_calls::Ranks;
use crate::rounds::{Bound, rounds};
use crate::support::seeds;
use crate::values::values;

/// A program of every rank.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub ranks: u32,
    pub config: ReduceScatterConfig,
    pub calls: Calls,
    pub seed: u64,
}

/// What a rank has.
struct Side {
    out: Stream,
    compute: Stream,
    scatter: GemmReduceScatter<bf16, bf16>,
    a: Buffer<bf16>,
    weight: Buffer<bf16>,
    bias: Buffer<bf16>,
    d: Buffer<bf16>,
}

pub fn options() -> ArenaOptions {
    ArenaOptions { bytes: 2 << 20, deadline: Duration::from_secs(600), ..ArenaOptions::default() }
}

/// Whether all rows are one kernel.
fn is_whole(method: ScatterMethod) -> bool {
    matches!(method, ScatterMethod::Direct | ScatterMethod::Whole)
}

/// The method of a scattered product beside a gathered one by this one.
pub fn beside(method: Method) -> ScatterMethod {
    if method == Method::Sequential { ScatterMethod::Sequential } else { ScatterMethod::Fused }
}

pub fn config(method: ScatterMethod, panels: u32, [m, n, k]: [u64; 3]) -> ReduceScatterConfig {
    ReduceScatterConfig { method: Some(method), panels: Some(panels), ..ReduceScatterConfig::new(Global { m, n, k }) }
}

impl Case {
    pub fn world(&self) -> WorldSize {
        WorldSize::new(self.ranks).unwrap()
    }

    pub fn product(&self) -> GemmConfig {
        self.config.product(self.world()).unwrap()
    }

    /// Rows of a rank.
    pub fn rows(&self, rank: u32) -> std::ops::Range<u64> {
        let (m, extent) = (self.config.sizes.m, self.config.sizes.m.div_ceil(self.ranks.into()));
        (u64::from(rank) * extent).min(m)..((u64::from(rank) + 1) * extent).min(m)
    }

    pub fn a(&self, rank: u32, round: u64) -> Vec<Half> {
        let GemmConfig { m, k, .. } = self.product();
        values(1000 + 10 * round + u64::from(rank), m * k)
    }

    pub fn weight(&self, rank: u32) -> Vec<Half> {
        let GemmConfig { n, k, .. } = self.product();
        values(rank.into(), n * k)
    }

    pub fn bias(&self) -> Vec<Half> {
        values(77, self.config.sizes.n)
    }

    /// What a rank's result is to be: its own product in `f32`, then the others' in ascending order, each rounded as it was computed, a panel at a time.
    pub fn expected(&self, rank: u32, round: u64) -> Result<Vec<u16>> {
        self.expected_of(rank, |of| self.a(of, round), |of| self.weight(of))
    }

    /// The same of these operands of each rank.
    pub fn expected_of(&self, rank: u32, a: impl Fn(u32) -> Vec<Half>, weight: impl Fn(u32) -> Vec<Half>) -> Result<Vec<u16>> {
        let (runtime, product, rows) = (Runtime::emulated(1)?, self.product(), self.rows(rank));
        let (stream, GemmConfig { n, k, .. }) = (runtime.device(0)?.stream()?, product);
        let count = rows.end - rows.start;
        if count == 0 {
            return Ok(Vec::new());
        }
        let part = |of: u32, rows: &std::ops::Range<u64>| a(of)[(rows.start * k) as usize..(rows.end * k) as usize].to_vec();
        let own = GemmConfig { m: count, ..product };
        let plans = own.plans::<bf16, f32>(&runtime.device(0)?);
        let whole = Gemm::<bf16, f32>::planned(&runtime, own, *plans.iter().find(|plan| plan.parts == 1).unwrap())?;
        let (a, b) = (Buffer::from_slice(&stream, &part(rank, &rows))?, Buffer::from_slice(&stream, &weight(rank))?);
        let mut d = Buffer::<f32>::zeros(&stream, count * n)?;
        whole.run(&stream, a.view(), b.view(), None, d.view_mut())?;
        let mut sums = d.to_vec(&stream)?;
        let extent = self.config.sizes.m.div_ceil(self.ranks.into());
        let panel = extent.div_ceil(self.config.panels.unwrap().into()).next_multiple_of(256);
        for other in (0..self.ranks).filter(|other| *other != rank) {
            let b = Buffer::from_slice(&stream, &weight(other))?;
            for first in (rows.start..rows.end).step_by(panel as usize) {
                let rows_of_panel = first..(first + panel).min(rows.end);
                let config = GemmConfig { m: rows_of_panel.end - first, ..product };
                let a = Buffer::from_slice(&stream, &part(other, &rows_of_panel))?;
                let mut d = Buffer::<bf16>::zeros(&stream, config.m * n)?;
                Gemm::<bf16, bf16>::new(&runtime, config)?.run(&stream, a.view(), b.view(), None, d.view_mut())?;
                let first = ((first - rows.start) * n) as usize;
                for (sum, part) in sums[first..].iter_mut().zip(d.to_vec_as::<Half>(&stream)?) {
                    *sum += part.to_f32();
                }
            }
        }
        let bias = self.bias();
        let finish = |(at, sum): (usize, f32)| {
            let scaled = if self.config.alpha == 1.0 { sum } else { self.config.alpha * sum };
            Half::from_f32(scaled + bias[at % n as usize].to_f32()).to_bits()
        };
        Ok(sums.into_iter().enumerate().map(finish).collect())
    }

    /// What every rank's result is to be in every round.
    fn all_expected(&self, count: u64) -> Result<Vec<Vec<Vec<u16>>>> {
        let of_rank = |rank| (0..count).map(|round| self.expected(rank, round)).collect();
        (0..self.ranks).map(of_rank).collect()
    }

    /// Runs it, and compares every rank's result of every round.
    fn run(&self) -> Result<()> {
        self.run_rounds(ROUNDS)
    }

    /// The same of so many rounds.
    pub fn run_rounds(&self, count: u64) -> Result<()> {
        self.compare(count, &self.all_expected(count)?)
    }

    fn compare(&self, count: u64, expected: &[Vec<Vec<u16>>]) -> Result<()> {
        let Self { ranks, config, calls, seed } = *self;
        let (all, n) = (Arenas::with(ranks, seed, options()), config.sizes.n);
        let mut sides = Vec::new();
        for (i, arena) in all.arenas.iter().enumerate() {
            let (out, compute) = (all.world.ranks[i].device().urgent_stream()?, all.stream(i).clone());
            let memory = OverlapMemory::take(arena, &member(&all, i), config.bytes::<bf16, bf16>(self.world())? + 64, &out)?;
            let scatter = GemmReduceScatter::<bf16, bf16>::new(&memory, &compute, config)?;
            assert_eq!(Some(scatter.choice().method), config.method, "{self:?}");
            let rows = self.rows(i as u32);
            let (a, weight) = (Buffer::from_slice(&compute, &self.a(i as u32, 0))?, Buffer::from_slice(&compute, &self.weight(i as u32))?);
            let (bias, d) =
                (Buffer::from_slice(&compute, &self.bias())?, Buffer::<bf16>::named(&compute, "d", (rows.end - rows.start) * n)?);
            sides.push(Side { out, compute, scatter, a, weight, bias, d });
        }
        let mut bound = Vec::new();
        for Side { out, compute, scatter, a, weight, bias, d } in &mut sides {
            let product = scatter.bind(compute, a.view(), weight.view(), Some(bias.view()), d.view_mut())?;
            bound.push(Bound::new([out, compute], product, a)?);
        }
        let found = rounds(&all, bound, (calls, count), |rank, round| self.a(rank, round))?;
        for (rank, (found, expected)) in found.iter().zip(expected).enumerate() {
            for (round, (found, expected)) in found.iter().zip(expected).enumerate() {
                assert!(found == expected, "{self:?}, rank {rank}, round {round}");
            }
        }
        drop(sides);
        all.close();
        Ok(())
    }
}

#[test]
fn every_method_has_the_bits_of_the_sum_in_order() {
    let cases = [
        (1, config(ScatterMethod::Sequential, 1, [40, 16, 72])),
        (2, config(ScatterMethod::Fused, 1, [70, 32, 144])),
        (2, config(ScatterMethod::Sequential, 1, [70, 32, 144])),
        // Two panels of a shard, the second shorter; a tile has rows of one of them.
        (2, ReduceScatterConfig { alpha: 0.75, ..config(ScatterMethod::Fused, 2, [600, 16, 32]) }),
        (3, ReduceScatterConfig { transpose_b: true, ..config(ScatterMethod::Fused, 2, [800, 24, 72]) }),
        // Shards of 3, 3, 3 and 0 rows.
        (4, config(ScatterMethod::Fused, 1, [9, 16, 64])),
        (8, config(ScatterMethod::Fused, 1, [100, 8, 128])),
        (2, config(ScatterMethod::Direct, 1, [512, 32, 144])),
        (2, ReduceScatterConfig { alpha: 0.75, transpose_b: true, ..config(ScatterMethod::Direct, 2, [1024, 264, 32]) }),
        (3, config(ScatterMethod::Direct, 2, [1536, 16, 72])),
        // Own tiles between those of later panels, on one multiprocessor.
        (2, ReduceScatterConfig { margin: 3, ..config(ScatterMethod::Direct, 4, [2048, 264, 32]) }),
        (4, config(ScatterMethod::Direct, 1, [1024, 16, 64])),
        (8, config(ScatterMethod::Direct, 1, [2048, 8, 64])),
        (2, config(ScatterMethod::Whole, 1, [512, 32, 144])),
        (2, ReduceScatterConfig { margin: 3, alpha: 0.75, ..config(ScatterMethod::Whole, 4, [2048, 264, 32]) }),
        (3, ReduceScatterConfig { transpose_b: true, ..config(ScatterMethod::Whole, 2, [1536, 16, 72]) }),
        (4, config(ScatterMethod::Whole, 2, [2048, 16, 64])),
    ];
    for (at, (ranks, config)) in cases.into_iter().enumerate() {
        let calls: &[_] = if ranks < 4 { &[Calls::Eager, Calls::Captured, Calls::Mixed] } else { &[Calls::Mixed] };
        let mut expected = None;
        for calls in calls {
            let case = Case { ranks, config, calls: *calls, seed: at as u64 };
            let expected = expected.get_or_insert_with(|| case.all_expected(ROUNDS).expect("the oracle multiplies"));
            case.compare(ROUNDS, expected).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        }
    }
}

/// Random shapes, each under a seed of its own: parts come in other orders.
#[test]
fn random_shapes_under_many_seeds() {
    for seed in 0..seeds() / 8 {
        let mut state = seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ 0x9E37_79B9;
        let mut below = |limit: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % limit
        };
        let ranks = 2 + below(3) as u32;
        let sizes = [1 + below(700), 8 * (1 + below(3)), 8 * (1 + below(10)) * u64::from(ranks)];
        let method = [ScatterMethod::Fused, ScatterMethod::Whole, ScatterMethod::Direct, ScatterMethod::Sequential][below(4) as usize];
        let transpose_b = below(2) == 0;
        // Whole tiles leave.
        let m = if is_whole(method) { sizes[0].next_multiple_of(256 * u64::from(ranks)) } else { sizes[0] };
        let sizes = [m, sizes[1], sizes[2]];
        let config = ReduceScatterConfig { transpose_b, ..config(method, 1 + below(3) as u32, sizes) };
        let calls = [Calls::Eager, Calls::Captured, Calls::Mixed][below(3) as usize];
        let case = Case { ranks, config, calls, seed };
        case.run().unwrap_or_else(|error| panic!("{case:?}: {error}"));
    }
}

/// The same bits under every seed, and so in every order in which parts come.
#[test]
fn the_order_of_arrival_changes_no_bit() {
    let whole = |method| (config(method, 1, [768, 8, 48]), seeds() / 2);
    for (config, count) in
        [(config(ScatterMethod::Fused, 1, [30, 16, 48]), seeds()), whole(ScatterMethod::Direct), whole(ScatterMethod::Whole)]
    {
        let case = Case { ranks: 3, config, calls: Calls::Eager, seed: 0 };
        let expected = case.all_expected(ROUNDS).unwrap();
        for seed in 0..count {
            Case { seed, ..case }.compare(ROUNDS, &expected).unwrap_or_else(|error| panic!("{case:?}, seed {seed}: {error}"));
        }
    }
}

/// What `D` was is added in place, call after call, where one rank has the whole sum too.
#[test]
fn one_rank_adds_to_what_was_there() -> Result<()> {
    let config = ReduceScatterConfig { beta: 1.0, ..config(ScatterMethod::Sequential, 1, [40, 16, 72]) };
    let case = Case { ranks: 1, config, calls: Calls::Eager, seed: 1 };
    let (ranks, product) = (Ranks::new(1, config.bytes::<bf16, bf16>(case.world())?, options())?, case.product());
    let (stream, device) = (ranks.all.stream(0), ranks.all.stream(0).device());
    let (a, b) = (Buffer::<bf16>::from_slice(stream, &case.a(0, 0))?, Buffer::<bf16>::from_slice(stream, &case.weight(0))?);
    let plans = product.plans::<bf16, f32>(&device);
    let whole = Gemm::<bf16, f32>::planned(&device.runtime(), product, *plans.iter().find(|plan| plan.parts == 1).unwrap())?;
    let mut exact = Buffer::<f32>::named(stream, "exact", 40 * 16)?;
    whole.run(stream, a.view(), b.view(), None, exact.view_mut())?;
    let (exact, mut old) = (exact.to_vec(stream)?, values(5, 40 * 16));
    let mut d = Buffer::<bf16>::from_slice(stream, &old)?;
    let scatter = GemmReduceScatter::<bf16, bf16>::new(&ranks.memories[0], stream, config)?;
    let mut bound = scatter.bind(stream, a.view(), b.view(), None, d.view_mut())?;
    for _ in 0..3 {
        bound.run(stream)?;
        old = exact.iter().zip(old).map(|(exact, old)| Half::from_f32(exact + old.to_f32())).collect();
    }
    drop(bound);
    assert!(d.to_vec_as::<Half>(stream)? == old);
    Ok(())
}

/// A rank that does not call is named, with the chunk that does not come, by each method.
#[test]
fn a_rank_that_does_not_call_is_named() -> Result<()> {
    for method in [ScatterMethod::Direct, ScatterMethod::Whole, ScatterMethod::Fused, ScatterMethod::Sequential] {
        let m = if is_whole(method) { 512 } else { 70 };
        let (config, two) = (config(method, 1, [m, 32, 144]), WorldSize::new(2).unwrap());
        let deadline = Duration::from_millis(300);
        let all = Arenas::with(2, 1, ArenaOptions { deadline, ..options() });
        let mut made = Vec::new();
        for (i, arena) in all.arenas.iter().enumerate() {
            let out = all.world.ranks[i].device().urgent_stream()?;
            let memory = OverlapMemory::take(arena, &member(&all, i), config.bytes::<bf16, bf16>(two)?, &out)?;
            made.push(GemmReduceScatter::<bf16, bf16>::new(&memory, all.stream(i), config)?);
        }
        let stream = all.stream(0);
        let (a, b) = (Buffer::<bf16>::zeros(stream, m * 72)?, Buffer::<bf16>::zeros(stream, 72 * 32)?);
        let mut d = Buffer::<bf16>::zeros(stream, m / 2 * 32)?;
        made[0].bind(stream, a.view(), b.view(), None, d.view_mut())?.run(stream)?;
        let start = std::time::Instant::now();
        let error = all.arenas[0].ticket(stream)?.wait().unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("chunk"), "{method:?}: {error}");
        assert!(start.elapsed() < deadline + Duration::from_secs(1) || cfg!(debug_assertions), "{:?}", start.elapsed());
    }
    Ok(())
}

/// Members that made different operations learn of it before the first call, in every build.
#[test]
fn other_operations_on_other_ranks_are_refused() -> Result<()> {
    let first = config(ScatterMethod::Fused, 1, [72, 32, 144]);
    // A field more is a member more of this list.
    let ReduceScatterConfig { sizes: _, transpose_b: _, alpha: _, beta: _, activation: _, method: _, panels: _, margin: _ } = first;
    let others = [
        ReduceScatterConfig { sizes: Global { m: 80, ..first.sizes }, ..first },
        ReduceScatterConfig { transpose_b: true, ..first },
        ReduceScatterConfig { alpha: 2.0, ..first },
        ReduceScatterConfig { beta: 1.0, ..first },
        ReduceScatterConfig { activation: Activation::Gelu, ..first },
        ReduceScatterConfig { method: Some(ScatterMethod::Sequential), ..first },
        ReduceScatterConfig { panels: Some(2), ..first },
        ReduceScatterConfig { margin: 2, ..first },
    ];
    for other in others {
        let (all, two) = (Arenas::with(2, 1, options()), WorldSize::new(2).unwrap());
        let mut made = Vec::new();
        for (i, config) in [first, other].into_iter().enumerate() {
            let out = all.world.ranks[i].device().urgent_stream()?;
            let bytes = others_bytes(&[first, other], two)?;
            let memory = OverlapMemory::take(&all.arenas[i], &member(&all, i), bytes, &out)?;
            made.push(GemmReduceScatter::<bf16, bf16>::new(&memory, all.stream(i), config)?);
        }
        let stream = all.stream(0);
        let (a, b) = (Buffer::<bf16>::zeros(stream, 72 * 72)?, Buffer::<bf16>::zeros(stream, 72 * 32)?);
        let mut d = Buffer::<bf16>::zeros(stream, 36 * 32)?;
        let error = made[0].bind(stream, a.view(), b.view(), None, d.view_mut()).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{other:?}: {error}");
    }
    Ok(())
}

fn others_bytes(configs: &[ReduceScatterConfig], ranks: WorldSize) -> Result<u64> {
    configs.iter().try_fold(0, |most, config| Ok(config.bytes::<bf16, bf16>(ranks)?.max(most)))
}

/// After the first call nothing is allocated, and no host waits: over 100 calls.
#[test]
fn a_hundred_calls_allocate_nothing() -> Result<()> {
    [(ScatterMethod::Fused, 4), (ScatterMethod::Direct, 512), (ScatterMethod::Whole, 512)]
        .map(|(method, m)| config(method, 1, [m, 8, 16]))
        .into_iter()
        .try_for_each(allocates_nothing)
}

fn allocates_nothing(config: ReduceScatterConfig) -> Result<()> {
    let (m, two) = (config.sizes.m, WorldSize::new(2).unwrap());
    let all = Arenas::with(2, 3, options());
    let mut made = Vec::new();
    for (i, arena) in all.arenas.iter().enumerate() {
        let out = all.world.ranks[i].device().urgent_stream()?;
        let memory = OverlapMemory::take(arena, &member(&all, i), config.bytes::<bf16, bf16>(two)?, &out)?;
        let stream = all.stream(i);
        let (a, b) = (Buffer::from_slice(stream, &values(1, m * 8))?, Buffer::from_slice(stream, &values(2, 8 * 8))?);
        made.push((GemmReduceScatter::<bf16, bf16>::new(&memory, stream, config)?, a, b, Buffer::<bf16>::zeros(stream, m / 2 * 8)?));
    }
    let mut bound = Vec::new();
    for (i, (scatter, a, b, d)) in made.iter_mut().enumerate() {
        bound.push(scatter.bind(all.stream(i), a.view(), b.view(), None, d.view_mut())?);
    }
    for (i, product) in bound.iter_mut().enumerate() {
        product.run(all.stream(i))?;
    }
    let before: Vec<_> = all.world.ranks.iter().map(|rank| rank.device().usage()).collect();
    for _ in 0..100 {
        for (i, product) in bound.iter_mut().enumerate() {
            product.run(all.stream(i))?;
        }
    }
    for (i, (rank, before)) in all.world.ranks.iter().zip(before).enumerate() {
        assert_eq!(rank.device().usage(), before, "rank {i}");
        all.arenas[i].ticket(all.stream(i))?.wait()?;
    }
    Ok(())
}

/// A team in another order than the world's, which leaves a rank out.
#[test]
fn a_team_in_another_order_scatters() -> Result<()> {
    [ScatterMethod::Direct, ScatterMethod::Whole].into_iter().try_for_each(scatters_in_another_order)
}

fn scatters_in_another_order(method: ScatterMethod) -> Result<()> {
    let case = Case { ranks: 2, config: config(method, 2, [1024, 16, 64]), calls: Calls::Eager, seed: 1 };
    let all = Arenas::with(3, 1, options());
    let team = Team::new(all.world.size(), &[all.world.rank(2), all.world.rank(0)])?;
    // All ranks take memory; one is in a team of its own.
    let alone = Team::new(all.world.size(), &[all.world.rank(1)])?;
    let mut sides = Vec::new();
    for (i, arena) in all.arenas.iter().enumerate() {
        let (stream, out) = (all.stream(i), all.world.ranks[i].device().urgent_stream()?);
        let member = team.member(arena.rank()).or_else(|| alone.member(arena.rank())).expect("every rank is in a team");
        let memory = OverlapMemory::take(arena, &member, case.config.bytes::<bf16, bf16>(case.world())?, &out)?;
        if i == 1 {
            continue;
        }
        let rank = member.rank().index();
        let (a, b) = (Buffer::from_slice(stream, &case.a(rank, 0))?, Buffer::from_slice(stream, &case.weight(rank))?);
        let scatter = GemmReduceScatter::<bf16, bf16>::new(&memory, stream, case.config)?;
        sides.push((i, rank, scatter, a, b, Buffer::from_slice(stream, &case.bias())?, Buffer::<bf16>::named(stream, "d", 512 * 16)?));
    }
    let mut bound = Vec::new();
    for (i, _, scatter, a, b, bias, d) in &mut sides {
        bound.push((*i, scatter.bind(all.stream(*i), a.view(), b.view(), Some(bias.view()), d.view_mut())?));
    }
    for _ in 0..3 {
        bound.iter_mut().try_for_each(|(i, product)| product.run(all.stream(*i)))?;
    }
    drop(bound);
    for (i, rank, .., d) in &sides {
        all.arenas[*i].ticket(all.stream(*i))?.wait()?;
        let found: Vec<u16> = d.to_vec_as::<Half>(all.stream(*i))?.into_iter().map(Half::to_bits).collect();
        assert!(found == case.expected(*rank, 0)?, "rank {i}");
    }
    drop(sides);
    all.close();
    Ok(())
}

/// A column-parallel layer gathers, and a row-parallel one scatters, by turns on one memory: as tensor parallelism with sequence parallelism has them.
#[test]
fn gathered_and_scattered_products_share_a_memory() -> Result<()> {
    share_a_memory(config(ScatterMethod::Fused, 1, [70, 136, 32]), 1)?;
    // A gather takes FREE on another stream, of a place that a kernel two calls before has filled.
    share_a_memory(config(ScatterMethod::Direct, 1, [512, 136, 32]), 2)?;
    share_a_memory(config(ScatterMethod::Whole, 1, [512, 136, 32]), 2)
}

/// A gathered product and so many scattered ones by turns.
fn share_a_memory(scatters: ReduceScatterConfig, count: u64) -> Result<()> {
    let (gathers, rounds) = (by(Method::Fused, Some(cut(1, 2)), [70, 32, 136]), 4);
    let gathered = overlap::Case { ranks: 2, config: gathers, calls: Calls::Eager, seed: 1 };
    let scattered = Case { ranks: 2, config: scatters, calls: Calls::Eager, seed: 1 };
    let of_rank = scatters.rows(scattered.world()) * scatters.sizes.n;
    let bytes = gathers.bytes::<bf16, bf16>()?.max(scattered.config.bytes::<bf16, bf16>(scattered.world())?);
    let sums = [scattered.expected(0, 0)?, scattered.expected(1, 0)?];
    for seed in 0..seeds() / 8 {
        let ranks = Ranks::over(Arenas::with(2, seed, options()), bytes)?;
        let (mut made, mut found) = (Vec::new(), Vec::new());
        for i in 0..2 {
            let stream = ranks.all.stream(i);
            let scatter = GemmReduceScatter::<bf16, bf16>::new(&ranks.memories[i], stream, scattered.config)?;
            made.push((ranks.gather(i, gathers)?, scatter));
        }
        let upload = |i: usize, values: &[Half]| Buffer::from_slice(ranks.all.stream(i), values);
        let mut operands = Vec::new();
        for (i, rank) in [0, 1].into_iter().zip(0..) {
            let (a, weight) = (upload(i, &scattered.a(rank, 0))?, upload(i, &scattered.weight(rank))?);
            operands.push((upload(i, &gathered.weight(rank))?, a, weight, upload(i, &scattered.bias())?));
        }
        for round in 0..rounds {
            for (i, rank) in [0, 1].into_iter().zip(0..) {
                let (stream, (gather, scatter), (first, a, second, bias)) = (ranks.all.stream(i), &made[i], &operands[i]);
                let (mut wide, mut d) = (Buffer::<bf16>::named(stream, "wide", 70 * 16)?, Buffer::<bf16>::named(stream, "d", of_rank)?);
                let mut product = gather.bind(stream, first.view(), None, wide.view_mut())?;
                let shard = PinnedBuffer::from_slice(stream, &gathered.shard(&gathered.operand(round % ROUNDS), rank))?;
                product.shard(stream)?.copy_from_pinned(stream, &shard)?;
                product.run(stream)?;
                drop(product);
                let mut product = scatter.bind(stream, a.view(), second.view(), Some(bias.view()), d.view_mut())?;
                (0..count).try_for_each(|_| product.run(stream))?;
                drop(product);
                found.push((i, rank, round, wide, d));
            }
        }
        for (i, rank, round, wide, d) in found {
            let stream = ranks.all.stream(i);
            ranks.all.arenas[i].ticket(stream)?.wait()?;
            let bits = |values: Vec<Half>| values.into_iter().map(Half::to_bits).collect::<Vec<_>>();
            let expected = &gathered.expected(Method::Fused, rank)?[(round % ROUNDS) as usize];
            assert!(bits(wide.to_vec_as(stream)?) == *expected, "gathered, rank {rank}, round {round}");
            assert!(bits(d.to_vec_as(stream)?) == sums[rank as usize], "scattered, rank {rank}, round {round}");
        }
    }
    Ok(())
}
