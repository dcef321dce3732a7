//! Products whose sum all ranks get: the bits of an oracle that rounds parts alike and adds them in order, the same on all ranks, whichever part comes when.

use std::time::Duration;

use half::bf16 as Half;
use oxtile::gemm::{Activation, Gemm};
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::kernels::sum_parts::Summed;
use oxtile::num::{bf16, f16};
use oxtile::overlap::{
    AllReduceConfig, AllReduceMemory, AllReduceMethod, GemmAllReduce, Global, OverlapMemory, ReduceOperands, ReduceScatterConfig,
    ScatterMethod,
};
use oxtile::symmetric::{Arena, ArenaOptions};
use oxtile::{Buffer, Error, Result, Runtime, Stream};

use crate::arenas::Arenas;
use crate::overlap::{Calls, ROUNDS, member};
use crate::rounds::{Bound, rounds};
use crate::scattered;
use crate::support::{World, seeds};
use crate::values::values;
use crate::whole_product::{Number, Part, Whole, gelu, share};

/// A program of every rank.
#[derive(Clone, Copy, Debug)]
struct Case {
    ranks: u32,
    config: AllReduceConfig,
    calls: Calls,
    seed: u64,
}

/// What a rank has.
struct Side {
    out: Stream,
    compute: Stream,
    reduce: GemmAllReduce<bf16, bf16>,
    a: Buffer<bf16>,
    weight: Buffer<bf16>,
    bias: Buffer<bf16>,
}

pub fn options() -> ArenaOptions {
    ArenaOptions { bytes: 4 << 20, deadline: Duration::from_secs(600), ..ArenaOptions::default() }
}

pub fn config(method: AllReduceMethod, panels: u32, [m, n, k]: [u64; 3]) -> AllReduceConfig {
    AllReduceConfig { method: Some(method), panels: Some(panels), ..AllReduceConfig::new(Global { m, n, k }) }
}

/// The memories of a rank, for results of one configuration.
fn memory<T: ReduceOperands<T> + Summed>(all: &Arenas, i: usize, config: AllReduceConfig, out: &Stream) -> Result<AllReduceMemory> {
    let parts = OverlapMemory::take(&all.arenas[i], &member(all, i), config.bytes::<T, T>(all.arenas[i].world())?, out)?;
    AllReduceMemory::take(&parts, config.result_bytes::<T>()?)
}

impl Case {
    /// The same product, whose rows are scattered.
    fn scattered(&self) -> scattered::Case {
        let AllReduceConfig { sizes, transpose_b, alpha, activation, panels, margin, .. } = self.config;
        let config =
            ReduceScatterConfig { sizes, transpose_b, alpha, beta: 0.0, activation, method: Some(ScatterMethod::Fused), panels, margin };
        scattered::Case { ranks: self.ranks, config, calls: self.calls, seed: self.seed }
    }

    /// What every rank's result is to be: rows that their owners sum, or in one launch the sum of all ranks' rounded parts in order.
    fn expected(&self, round: u64) -> Result<Vec<u16>> {
        let scattered = self.scattered();
        if self.config.method != Some(AllReduceMethod::OneShot) {
            return Ok((0..self.ranks).map(|rank| scattered.expected(rank, round)).collect::<Result<Vec<_>>>()?.concat());
        }
        let (runtime, product) = (Runtime::emulated(1)?, scattered.product());
        let (stream, gemm) = (runtime.device(0)?.stream()?, Gemm::<bf16, bf16>::new(&runtime, product)?);
        let mut sums = vec![-0.0_f32; (product.m * product.n) as usize];
        for rank in 0..self.ranks {
            let (a, b) = (Buffer::from_slice(&stream, &scattered.a(rank, round))?, Buffer::from_slice(&stream, &scattered.weight(rank))?);
            let mut d = Buffer::<bf16>::zeros(&stream, product.m * product.n)?;
            gemm.run(&stream, a.view(), b.view(), None, d.view_mut())?;
            sums.iter_mut().zip(d.to_vec_as::<Half>(&stream)?).for_each(|(sum, part)| *sum += part.to_f32());
        }
        let bias = scattered.bias();
        let finish = |(at, sum): (usize, f32)| {
            let scaled = if self.config.alpha == 1.0 { sum } else { self.config.alpha * sum };
            Half::from_f32(scaled + bias[at % product.n as usize].to_f32()).to_bits()
        };
        Ok(sums.into_iter().enumerate().map(finish).collect())
    }

    fn all_expected(&self) -> Result<Vec<Vec<u16>>> {
        (0..ROUNDS).map(|round| self.expected(round)).collect()
    }

    /// Runs it, and compares every rank's result of every round.
    fn run(&self) -> Result<()> {
        self.compare(&self.all_expected()?)
    }

    fn compare(&self, expected: &[Vec<u16>]) -> Result<()> {
        let Self { ranks, config, calls, seed } = *self;
        let (all, scattered) = (Arenas::with(ranks, seed, options()), self.scattered());
        let mut sides = Vec::new();
        for (i, rank) in (0..ranks as usize).zip(0..) {
            let (out, compute) = (all.world.ranks[i].device().urgent_stream()?, all.stream(i).clone());
            let reduce = GemmAllReduce::<bf16, bf16>::new(&memory::<bf16>(&all, i, config, &out)?, &compute, config)?;
            assert_eq!(Some(reduce.choice().method), config.method, "{self:?}");
            let (a, weight) =
                (Buffer::from_slice(&compute, &scattered.a(rank, 0))?, Buffer::from_slice(&compute, &scattered.weight(rank))?);
            let bias = Buffer::from_slice(&compute, &scattered.bias())?;
            sides.push(Side { out, compute, reduce, a, weight, bias });
        }
        let mut bound = Vec::new();
        for Side { out, compute, reduce, a, weight, bias } in &sides {
            bound.push(Bound::new([out, compute], reduce.bind(compute, a.view(), weight.view(), Some(bias.view()))?, a)?);
        }
        let found = rounds(&all, bound, (calls, ROUNDS), |rank, round| scattered.a(rank, round))?;
        for (rank, found) in found.iter().enumerate() {
            for (round, (found, expected)) in found.iter().zip(expected).enumerate() {
                assert!(found == expected, "{self:?}, rank {rank}, round {round}");
            }
        }
        drop(sides);
        all.close();
        Ok(())
    }
}

use AllReduceMethod::{Fused, OneShot, Sequential};

#[test]
fn all_ranks_have_the_bits_of_the_sum_in_order() {
    let cases = [
        (1, config(Sequential, 1, [40, 16, 72])),
        (1, config(OneShot, 1, [40, 16, 72])),
        (2, config(Fused, 1, [70, 32, 144])),
        (2, config(Sequential, 1, [70, 32, 144])),
        (2, AllReduceConfig { alpha: 0.75, ..config(OneShot, 1, [70, 32, 144]) }),
        // Two panels of a shard, the second shorter, each a product of its own.
        (2, AllReduceConfig { alpha: 0.75, ..config(Fused, 2, [600, 16, 32]) }),
        (3, AllReduceConfig { transpose_b: true, ..config(Fused, 2, [800, 24, 72]) }),
        (3, AllReduceConfig { transpose_b: true, ..config(OneShot, 1, [5, 600, 72]) }),
        // Shards of 3, 3, 3 and 0 rows.
        (4, config(Fused, 1, [9, 16, 64])),
        (4, config(OneShot, 1, [9, 16, 64])),
        (8, config(Fused, 1, [100, 8, 128])),
        (8, config(OneShot, 1, [3, 8, 128])),
    ];
    for (at, (ranks, config)) in cases.into_iter().enumerate() {
        let calls: &[_] = if ranks < 4 { &[Calls::Eager, Calls::Captured, Calls::Mixed] } else { &[Calls::Mixed] };
        let mut expected = None;
        for calls in calls {
            let case = Case { ranks, config, calls: *calls, seed: at as u64 };
            let expected = expected.get_or_insert_with(|| case.all_expected().expect("the oracle multiplies"));
            case.compare(expected).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        }
    }
}

/// Random shapes, each under a seed of its own: parts come in other orders.
#[test]
fn random_shapes_under_many_seeds() {
    for seed in 0..seeds() / 8 {
        let mut state = seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ 0x51_7CC1;
        let mut below = |limit: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % limit
        };
        let ranks = 2 + below(3) as u32;
        let sizes = [1 + below(700), 8 * (1 + below(3)), 8 * (1 + below(10)) * u64::from(ranks)];
        let method = [Fused, OneShot, Sequential][below(3) as usize];
        let transpose_b = below(2) == 0;
        let config = AllReduceConfig { transpose_b, ..config(method, 1 + below(3) as u32, sizes) };
        let calls = [Calls::Eager, Calls::Captured, Calls::Mixed][below(3) as usize];
        let case = Case { ranks, config, calls, seed };
        case.run().unwrap_or_else(|error| panic!("{case:?}: {error}"));
    }
}

/// The same bits under every seed, and so in every order in which parts come.
#[test]
fn the_order_of_arrival_changes_no_bit() {
    for method in [Fused, OneShot] {
        let case = Case { ranks: 3, config: config(method, 1, [30, 16, 48]), calls: Calls::Eager, seed: 0 };
        let expected = case.all_expected().unwrap();
        for seed in 0..seeds() / 2 {
            Case { seed, ..case }.compare(&expected).unwrap_or_else(|error| panic!("{case:?}, seed {seed}: {error}"));
        }
    }
}

/// Bias, factor and GELU of whole sums, once: all elements against float64.
#[test]
fn what_follows_comes_once_after_the_whole_sum() -> Result<()> {
    for method in [Fused, Sequential, OneShot] {
        follows::<bf16>(method, 2, 1.0 / 256.0)?;
        follows::<f16>(method, 3, 1.0 / 2048.0)?;
    }
    Ok(())
}

fn follows<T: Number + ReduceOperands<T> + Summed>(method: AllReduceMethod, ranks: u32, rounding: f64) -> Result<()> {
    let sizes @ Global { m, n, k } = Global { m: 50, n: 24, k: 64 * u64::from(ranks) };
    let config = AllReduceConfig { alpha: 0.125, activation: Activation::Gelu, ..config(method, 1, [m, n, k]) };
    let (all, whole) = (Arenas::with(ranks, 5, options()), Whole::new::<T, T>(sizes, ranks, [0.125, 0.0], 1));
    let (mut made, mut lent, mut bound) = (Vec::new(), Vec::new(), Vec::new());
    for (i, rank) in (0..ranks as usize).zip(0..) {
        let (stream, along_k) = (all.stream(i), share(k, rank, ranks));
        let out = all.world.ranks[i].device().urgent_stream()?;
        made.push(GemmAllReduce::<T, T>::new(&memory::<T>(&all, i, config, &out)?, stream, config)?);
        let a = Part { rows: 0..m, columns: along_k.clone() }.of::<T>(&whole.a, k);
        let bias = Part { rows: 0..1, columns: 0..n }.of::<T>(&whole.bias, n);
        let operands = [a, whole.weight::<T>(false, along_k, 0..n), bias].map(|values| Buffer::<T>::from_slice(stream, &values));
        lent.push(operands.into_iter().collect::<Result<Vec<_>>>()?);
    }
    for (i, (reduce, operands)) in made.iter().zip(&lent).enumerate() {
        let mut product = reduce.bind(all.stream(i), operands[0].view(), operands[1].view(), Some(operands[2].view()))?;
        product.run(all.stream(i))?;
        bound.push(product);
    }
    for (i, product) in bound.iter().enumerate() {
        all.arenas[i].ticket(all.stream(i))?.wait()?;
        for (at, found) in product.buffer().to_vec(all.stream(i))?.into_iter().enumerate() {
            let (x, size) = whole.products[at];
            // Parts are rounded, and so is the result; GELU stretches no distance by more than 1.13.
            let (found, gelu, bound) = (f64::from(found.to_f32()), gelu(x), 1.2 * rounding * size + rounding * gelu(x).abs() + 1e-3);
            assert!((found - gelu).abs() <= bound, "{method:?}, rank {i} of {ranks}, element {at}: {found} for {gelu}");
        }
    }
    Ok(())
}

/// A rank that does not call is named, with what does not come, by each method; and what is called after it ends, too.
#[test]
fn a_rank_that_does_not_call_is_named() -> Result<()> {
    for (method, what) in [(Fused, "chunk"), (Sequential, "chunk"), (OneShot, "part of a small sum")] {
        let config = config(method, 1, [70, 32, 144]);
        let all = Arenas::with(2, 1, ArenaOptions { deadline: Duration::from_millis(300), ..options() });
        let mut made = Vec::new();
        for i in 0..2 {
            let out = all.world.ranks[i].device().urgent_stream()?;
            made.push(GemmAllReduce::<bf16, bf16>::new(&memory::<bf16>(&all, i, config, &out)?, all.stream(i), config)?);
        }
        let stream = all.stream(0);
        let (a, b) = (Buffer::<bf16>::zeros(stream, 70 * 72)?, Buffer::<bf16>::zeros(stream, 72 * 32)?);
        let mut product = made[0].bind(stream, a.view(), b.view(), None)?;
        product.run(stream)?;
        let start = std::time::Instant::now();
        let error = all.arenas[0].ticket(stream)?.wait().unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains(what), "{method:?}: {error}");
        assert!(start.elapsed() < Duration::from_millis(1300) || cfg!(debug_assertions), "{:?}", start.elapsed());
        assert!(product.run(stream).is_err(), "{method:?}: the arena has ended");
    }
    Ok(())
}

/// Members that made different operations learn of it before the first call, in every build.
#[test]
fn other_operations_on_other_ranks_are_refused() -> Result<()> {
    let first = config(Fused, 1, [72, 32, 144]);
    // A field more is a member more of this list.
    let AllReduceConfig { sizes: _, transpose_b: _, alpha: _, activation: _, method: _, panels: _, margin: _ } = first;
    let others = [
        AllReduceConfig { sizes: Global { m: 80, ..first.sizes }, ..first },
        AllReduceConfig { transpose_b: true, ..first },
        AllReduceConfig { alpha: 2.0, ..first },
        AllReduceConfig { activation: Activation::Gelu, ..first },
        AllReduceConfig { method: Some(Sequential), ..first },
        AllReduceConfig { method: Some(OneShot), ..first },
        AllReduceConfig { panels: Some(2), ..first },
        AllReduceConfig { margin: 2, ..first },
    ];
    for other in others {
        let (all, largest) = (Arenas::with(2, 1, options()), AllReduceConfig { sizes: Global { m: 80, ..first.sizes }, ..first });
        let mut made = Vec::new();
        for (i, config) in [first, other].into_iter().enumerate() {
            let out = all.world.ranks[i].device().urgent_stream()?;
            made.push(GemmAllReduce::<bf16, bf16>::new(&memory::<bf16>(&all, i, largest, &out)?, all.stream(i), config)?);
        }
        let stream = all.stream(0);
        let (a, b) = (Buffer::<bf16>::zeros(stream, 72 * 72)?, Buffer::<bf16>::zeros(stream, 72 * 32)?);
        let bound = made[0].bind(stream, a.view(), b.view(), None);
        assert!(matches!(bound, Err(Error::Mismatch { .. })), "{other:?}: {bound:?}");
    }
    Ok(())
}

/// After the first call nothing is allocated, and no host waits: over 100 calls.
#[test]
fn a_hundred_calls_allocate_nothing() -> Result<()> {
    allocate_nothing(&[config(Fused, 1, [4, 8, 16])], 100)
}

/// The same of two operations that share slots.
#[test]
fn operations_in_one_launch_share_slots() -> Result<()> {
    allocate_nothing(&[config(OneShot, 1, [4, 8, 16]), config(OneShot, 1, [2, 16, 16])], 10)
}

fn allocate_nothing(configs: &[AllReduceConfig], calls: u32) -> Result<()> {
    let all = Arenas::with(2, 3, options());
    let mut made = Vec::new();
    for i in 0..2 {
        let (out, stream) = (all.world.ranks[i].device().urgent_stream()?, all.stream(i));
        let memory = memory::<bf16>(&all, i, configs[0], &out)?;
        let reduces: Vec<_> = configs.iter().map(|config| GemmAllReduce::<bf16, bf16>::new(&memory, stream, *config)).collect();
        let (a, b) = (Buffer::from_slice(stream, &values(1, 4 * 8))?, Buffer::from_slice(stream, &values(2, 16 * 8))?);
        made.push((reduces, a, b));
    }
    let mut bound = Vec::new();
    for (i, (reduces, a, b)) in made.iter().enumerate() {
        let mut products = Vec::new();
        for (reduce, AllReduceConfig { sizes: Global { m, n, .. }, .. }) in reduces.iter().zip(configs) {
            let reduce = reduce.as_ref().expect("it was made");
            products.push(reduce.bind(all.stream(i), a.view().slice(0, m * 8), b.view().slice(0, n * 8), None)?);
        }
        bound.push(products);
    }
    let mut call = |_| {
        bound.iter_mut().enumerate().try_for_each(|(i, products)| products.iter_mut().try_for_each(|product| product.run(all.stream(i))))
    };
    call(0)?;
    let before: Vec<_> = all.world.ranks.iter().map(|rank| rank.device().usage()).collect();
    (0..calls).try_for_each(&mut call)?;
    for (i, (rank, before)) in all.world.ranks.iter().zip(before).enumerate() {
        assert_eq!(rank.device().usage(), before, "rank {i}");
        all.arenas[i].ticket(all.stream(i))?.wait()?;
    }
    Ok(())
}

/// Operations of one memory on two streams, which nothing but the calls orders: no call takes the flags, slots or rows of the call before for its own.
#[test]
fn calls_on_streams_of_their_own() -> Result<()> {
    // The third has several lanes of slots, of which the first has one.
    let cases = [config(OneShot, 1, [30, 16, 48]), config(Fused, 1, [40, 16, 32]), config(OneShot, 1, [40, 64, 32])];
    let cases = cases.map(|config| Case { ranks: 2, config, calls: Calls::Eager, seed: 0 });
    let expected = cases.map(|case| case.expected(0)).into_iter().collect::<Result<Vec<_>>>()?;
    for seed in 0..seeds() / 4 {
        let all = Arenas::with(2, seed, options());
        let copy = all.world.runtime.load::<CopyWords>()?;
        let (mut made, mut streams) = (Vec::new(), Vec::new());
        for i in 0..2 {
            let (rank, device) = (i as u32, all.world.ranks[i].device());
            let memory = memory::<bf16>(&all, i, config(Fused, 1, [40, 64, 32]), &device.urgent_stream()?)?;
            streams.push([all.stream(i).clone(), device.stream()?]);
            let stream = all.stream(i);
            for case in cases {
                let reduce = GemmAllReduce::<bf16, bf16>::new(&memory, stream, case.config)?;
                let of = case.scattered();
                let operands = [of.a(rank, 0), of.weight(rank), of.bias()].map(|values| Buffer::<bf16>::from_slice(stream, &values));
                made.push((i, reduce, operands.into_iter().collect::<Result<Vec<_>>>()?));
            }
        }
        let mut bound = Vec::new();
        for (i, reduce, operands) in &made {
            bound.push((*i, reduce.bind(all.stream(*i), operands[0].view(), operands[1].view(), Some(operands[2].view()))?));
        }
        let mut found = Vec::new();
        // Each operation after itself and after the other, on the stream of the call before and on the other one.
        for (call, (operation, stream)) in
            [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (2, 1), (1, 0), (0, 1), (2, 0), (2, 1), (0, 0)].into_iter().enumerate()
        {
            for (number, (i, product)) in bound.iter_mut().enumerate().filter(|(number, _)| number % 3 == operation) {
                let stream = &streams[*i][stream];
                product.run(stream)?;
                let mut kept = Buffer::<u32>::named(stream, "kept", product.result().len() / 2)?;
                copy.launch(stream, CopyWordsArgs { source: product.result().cast(), target: kept.view_mut() })?;
                found.push((call, number, stream.clone(), kept));
            }
        }
        for (call, number, stream, kept) in found {
            all.arenas[number / 3].ticket(&stream)?.wait()?;
            let bits: Vec<u16> = kept.to_vec(&stream)?.into_iter().flat_map(|word| [word as u16, (word >> 16) as u16]).collect();
            assert!(bits == expected[number % 3], "seed {seed}, call {call}, rank {}", number / 3);
        }
    }
    Ok(())
}

/// What a call is made of on ranks, of which the last is ready and does not call.
struct Lonely {
    all: Arenas,
    outs: Vec<Stream>,
    made: Vec<GemmAllReduce<bf16, bf16>>,
    operands: Vec<[Buffer<bf16>; 2]>,
}

fn lonely(ranks: u32, config: AllReduceConfig) -> Result<Lonely> {
    // The kernel of rank 0 waits for some thousand steps, and the others for much longer.
    let deadlines = (0..ranks).map(|rank| if rank == 0 { Duration::from_micros(5) } else { Duration::from_millis(400) });
    let world = World::new(ranks, 1);
    let open = |(rank, deadline)| Arena::open(rank, ArenaOptions { deadline, rendezvous: Some(Duration::from_secs(60)), ..options() });
    let arenas = world.ranks.iter().zip(deadlines).map(open).collect::<Result<_>>()?;
    let all = Arenas { world, arenas };
    let (mut made, mut outs, mut operands) = (Vec::new(), Vec::new(), Vec::new());
    let (Global { m, n, k }, parts) = (config.sizes, u64::from(ranks));
    for i in 0..ranks as usize {
        let stream = all.stream(i);
        outs.push(all.world.ranks[i].device().urgent_stream()?);
        made.push(GemmAllReduce::<bf16, bf16>::new(&memory::<bf16>(&all, i, config, &outs[i])?, stream, config)?);
        operands.push([Buffer::zeros(stream, m * k / parts)?, Buffer::zeros(stream, k / parts * n)?]);
    }
    Ok(Lonely { all, outs, made, operands })
}

/// Rows of a sum to which a part did not come are garbage, and do not leave the rank: the copies of the call are not made.
#[test]
fn rows_without_a_part_do_not_leave_the_rank() -> Result<()> {
    let Lonely { all, outs, made, operands } = lonely(2, config(Fused, 1, [70, 32, 144]))?;
    let told = all.arenas.iter().map(|arena| arena.flags("told of rows", 1)).collect::<Result<Vec<_>>>()?;
    let [[a, b], [other_a, other_b]] = [0, 1].map(|i| operands[i].each_ref().map(Buffer::view));
    let _ready = made[1].bind(all.stream(1), other_a, other_b, None)?;
    made[0].bind(all.stream(0), a, b, None)?.run(all.stream(0))?;
    told[0].set(&outs[0], 0, all.world.rank(1))?;
    told[1].take_back(all.stream(1), 0, all.world.rank(0))?;
    assert!(all.arenas[1].ticket(all.stream(1))?.wait().is_err(), "rank 1 was told of rows that lack its part");
    Ok(())
}

/// A small sum to which a part did not come is NaN, every element of it, and so is one after it, without another wait. The work ends by itself, and then a wait of the host for the stream is the error that names the rank.
#[test]
fn a_small_sum_without_a_part_is_nan() -> Result<()> {
    for ranks in [2, 6] {
        let Lonely { all, made, operands, .. } = lonely(ranks, config(OneShot, 1, [70, 32, 144]))?;
        let mut bound = Vec::new();
        for (i, [a, b]) in operands.iter().enumerate() {
            bound.push(made[i].bind(all.stream(i), a.view(), b.view(), None)?);
        }
        let (stream, copy) = (all.stream(0), all.world.runtime.load::<CopyWords>()?);
        let mut found = Vec::new();
        for call in 0..2 {
            for i in (0..ranks as usize - 1).filter(|i| call == 0 || *i == 0) {
                bound[i].run(all.stream(i))?;
            }
            let mut kept = Buffer::<u32>::named(stream, "kept", bound[0].result().len() / 2)?;
            copy.launch(stream, CopyWordsArgs { source: bound[0].result().cast(), target: kept.view_mut() })?;
            found.push(kept);
        }
        let end = stream.record()?;
        while !end.is_done()? {}
        let error = stream.synchronize().unwrap_err().to_string();
        // Of several ranks others may be as late within so few steps.
        let named = if ranks == 2 { "signal from rank 1" } else { "signal from rank" };
        assert!(error.contains(named) && error.contains("part of a small sum"), "{ranks} ranks: {error}");
        // The arena has ended, and watches the stream no longer.
        for (call, kept) in found.iter().enumerate() {
            let words = kept.to_vec(stream)?.into_iter().flat_map(|word| [word as u16, (word >> 16) as u16]);
            let values: Vec<_> = words.map(|bits| Half::from_bits(bits).to_f32()).collect();
            assert!(values.iter().all(|value| value.is_nan()), "{ranks} ranks, call {call}: {values:?}");
        }
    }
    Ok(())
}

/// A bias that no kernel can read in whole vectors is refused before the other ranks hear of the call.
#[test]
fn a_bias_in_the_middle_of_a_vector_is_refused() -> Result<()> {
    let config = config(OneShot, 1, [30, 16, 48]);
    let all = Arenas::with(1, 1, options());
    let (stream, out) = (all.stream(0), all.world.ranks[0].device().urgent_stream()?);
    let reduce = GemmAllReduce::<bf16, bf16>::new(&memory::<bf16>(&all, 0, config, &out)?, stream, config)?;
    let (a, b, bias) = (Buffer::<bf16>::zeros(stream, 30 * 48)?, Buffer::zeros(stream, 48 * 16)?, Buffer::zeros(stream, 17)?);
    let error = reduce.bind(stream, a.view(), b.view(), Some(bias.view().slice(1, 17))).unwrap_err().to_string();
    assert!(error.contains("no multiple of 16 bytes"), "{error}");
    reduce.bind(stream, a.view(), b.view(), Some(bias.view().slice(0, 16)))?.run(stream)?;
    all.arenas[0].ticket(stream)?.wait()
}
