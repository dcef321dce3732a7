//! Products of codes and scales whose rows are scattered: their bits are those of an oracle on the dequantized operands, which rounds parts alike. What is out of order in a room of dequantized rows is reported.

use std::time::Duration;

use half::bf16 as Half;
use oxtile::comm::{Rank, WorldSize};
use oxtile::gemm::{Activation, Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::overlap::{GemmReduceScatter, QuantizedGemmReduceScatter, ReduceScatterConfig, ScatterMethod, ScatteredProduct};
use oxtile::quantize::{Direction, Mxfp8, Mxfp8Format, Nvfp4Format, QuantizedTensor};
use oxtile::symmetric::ArenaOptions;
use oxtile::{Buffer, Error, Result, Runtime, Stream};
use oxtile_tile::launch::DeviceView;

use crate::arenas::Arenas;
use crate::overlap::{Calls, ROUNDS};
use crate::overlap_calls::Ranks;
use crate::overlap_quantized::Tested;
use crate::rounds::{Bound, Product, rounds};
use crate::scattered::{Case, config, options};
use crate::support::seeds;
use crate::values::values;

/// What a rank has.
struct Side<F: Tested, G: Tested> {
    scatter: QuantizedGemmReduceScatter<F, G, bf16>,
    cast: F::Cast,
    amax: Buffer<f32>,
    /// `A` before its cast.
    source: Buffer<bf16>,
    a: QuantizedTensor<F>,
    weight: QuantizedTensor<G>,
    bias: Buffer<bf16>,
    d: Buffer<bf16>,
}

/// A product that is bound, and the cast of its `A` before each call.
struct Coded<'a, F: Tested> {
    product: ScatteredProduct<'a, bf16, bf16>,
    in_halves: bool,
    cast: &'a F::Cast,
    amax: &'a Buffer<f32>,
    source: &'a Buffer<bf16>,
    a: QuantizedTensor<F>,
}

impl<F: Tested> Product for Coded<'_, F> {
    fn run(&mut self, stream: &Stream) -> Result<()> {
        F::shard(self.cast, stream, self.source, self.amax, &mut self.a)?;
        if self.in_halves { self.product.begin(stream)?.finish() } else { self.product.run(stream) }
    }

    fn result(&self) -> DeviceView<'_, bf16> {
        self.product.result()
    }
}

/// Another handle of a tensor, with which it is written between calls that read it.
fn alias<F: Tested>(tensor: &QuantizedTensor<F>) -> Result<QuantizedTensor<F>> {
    let QuantizedTensor { data, scales, amax, shape, direction } = tensor;
    // SAFETY: the codes and scales are written on the stream of the calls, between them.
    let (data, scales) = unsafe {
        (
            Buffer::borrow_raw(&data.device(), data.address(), data.len())?,
            Buffer::borrow_raw(&scales.device(), scales.address(), scales.len())?,
        )
    };
    Ok(QuantizedTensor { data, scales, amax: F::same(amax), shape: *shape, direction: *direction })
}

/// Each rank has an amax of its own, of its operands.
fn amax_of(rank: u32) -> f32 {
    2.0 + 0.75 * rank as f32
}

/// Values in a format.
fn quantized<F: Tested>(runtime: &Runtime, stream: &Stream, values: &[Half], shape: [u64; 2], amax: f32) -> Result<QuantizedTensor<F>> {
    let (source, amax) = (Buffer::from_slice(stream, values)?, Buffer::from_slice(stream, &[amax])?);
    let mut tensor = QuantizedTensor::uninitialised(stream, shape, Direction::Rows)?;
    F::shard(&F::cast(runtime)?, stream, &source, &amax, &mut tensor)?;
    Ok(tensor)
}

/// Values as a format has them.
fn dequantized<F: Tested>(values: &[Half], shape: [u64; 2], amax: f32) -> Result<Vec<Half>> {
    let runtime = Runtime::emulated(1)?;
    let stream = runtime.device(0)?.stream()?;
    let tensor = quantized::<F>(&runtime, &stream, values, shape, amax)?;
    let mut wide = Buffer::<bf16>::zeros(&stream, values.len() as u64)?;
    F::dequantize(&F::load(&runtime.device(0)?)?, &stream, &tensor, wide.view_mut())?;
    wide.to_vec_as(&stream)
}

fn shapes(case: &Case) -> [[u64; 2]; 2] {
    let GemmConfig { m, n, k, transpose_b, .. } = case.product();
    [[m, k], if transpose_b { [n, k] } else { [k, n] }]
}

impl<F: Tested, G: Tested> Side<F, G> {
    fn new(ranks: &Ranks, rank: u32, case: &Case) -> Result<Self> {
        let (i, [of_a, of_b], runtime) = (rank as usize, shapes(case), &ranks.all.world.runtime);
        let (stream, rows, amax) = (ranks.all.stream(i), case.rows(rank), amax_of(rank));
        Ok(Self {
            scatter: QuantizedGemmReduceScatter::new(&ranks.memories[i], stream, case.config)?,
            cast: F::cast(runtime)?,
            amax: Buffer::from_slice(stream, &[amax])?,
            source: Buffer::from_slice(stream, &case.a(rank, 0))?,
            // The kernels of the cast are there before a graph is captured.
            a: quantized(runtime, stream, &case.a(rank, 0), of_a, amax)?,
            weight: quantized(runtime, stream, &case.weight(rank), of_b, amax)?,
            bias: Buffer::from_slice(stream, &case.bias())?,
            d: Buffer::named(stream, "d", (rows.end - rows.start) * case.config.sizes.n)?,
        })
    }

    fn bind(&mut self, stream: &Stream, in_halves: bool) -> Result<Coded<'_, F>> {
        let Self { scatter, cast, amax, source, a, weight, bias, d } = self;
        let product = scatter.bind(stream, a, weight, Some(bias.view()), d.view_mut())?;
        Ok(Coded { product, in_halves, cast, amax, source, a: alias(a)? })
    }
}

/// What every rank's result is to be in every round.
fn expected<F: Tested, G: Tested>(case: &Case) -> Result<Vec<Vec<Vec<u16>>>> {
    let [of_a, of_b] = shapes(case);
    let a = |round| (0..case.ranks).map(move |rank| dequantized::<F>(&case.a(rank, round), of_a, amax_of(rank)));
    let a = (0..ROUNDS).map(|round| a(round).collect()).collect::<Result<Vec<Vec<_>>>>()?;
    let weights = (0..case.ranks).map(|rank| dequantized::<G>(&case.weight(rank), of_b, amax_of(rank))).collect::<Result<Vec<_>>>()?;
    let of_round = |rank, a: &Vec<Vec<Half>>| case.expected_of(rank, |of| a[of as usize].clone(), |of| weights[of as usize].clone());
    (0..case.ranks).map(|rank| a.iter().map(|a| of_round(rank, a)).collect()).collect()
}

/// Runs a case, in two halves where calls and replays mix, and compares every rank's result of every round.
fn compare<F: Tested, G: Tested>(case: &Case, expected: &[Vec<Vec<u16>>]) -> Result<()> {
    let bytes = case.config.bytes::<bf16, bf16>(case.world())? + 64;
    let ranks = Ranks::over(Arenas::with(case.ranks, case.seed, options()), bytes)?;
    let mut sides = (0..case.ranks).map(|rank| Side::<F, G>::new(&ranks, rank, case)).collect::<Result<Vec<_>>>()?;
    let mut bound = Vec::new();
    for (i, side) in sides.iter_mut().enumerate() {
        assert_eq!(Some(side.scatter.choice().method), case.config.method, "{case:?}");
        let product = side.bind(ranks.all.stream(i), case.calls == Calls::Mixed)?;
        let source = product.source;
        bound.push(Bound::new([&ranks.out[i], ranks.all.stream(i)], product, source)?);
    }
    let found = rounds(&ranks.all, bound, (case.calls, ROUNDS), |rank, round| case.a(rank, round))?;
    for (rank, (found, expected)) in found.iter().zip(expected).enumerate() {
        for (round, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!(found == expected, "{case:?}, rank {rank}, round {round}");
        }
    }
    Ok(())
}

fn run<F: Tested, G: Tested>(ranks: u32, config: ReduceScatterConfig, calls: &[Calls]) {
    let case = Case { ranks, config, calls: Calls::Eager, seed: ranks.into() };
    let expected = expected::<F, G>(&case).expect("the oracle multiplies");
    for calls in calls {
        let case = Case { calls: *calls, ..case };
        compare::<F, G>(&case, &expected).unwrap_or_else(|error| panic!("{case:?}: {error}"));
    }
}

#[test]
fn every_format_and_method_has_the_bits_of_the_dequantized_operands() {
    let transposed = |config| ReduceScatterConfig { transpose_b: true, ..config };
    let all = [Calls::Eager, Calls::Captured, Calls::Mixed];
    run::<Mxfp8Format, Mxfp8Format>(1, transposed(config(ScatterMethod::Sequential, 1, [40, 16, 72])), &all[..1]);
    run::<Nvfp4Format, Nvfp4Format>(1, config(ScatterMethod::Sequential, 1, [40, 16, 80]), &all[1..]);
    run::<Mxfp8Format, Mxfp8Format>(2, config(ScatterMethod::Sequential, 1, [70, 32, 144]), &all);
    // Two panels of a shard, the second shorter.
    run::<Nvfp4Format, Mxfp8Format>(
        2,
        ReduceScatterConfig { alpha: 0.75, ..config(ScatterMethod::Sequential, 2, [600, 16, 32]) },
        &all[1..2],
    );
    run::<Nvfp4Format, Nvfp4Format>(2, transposed(config(ScatterMethod::Fused, 1, [69, 24, 160])), &all[1..]);
    run::<Mxfp8Format, Nvfp4Format>(3, transposed(config(ScatterMethod::Sequential, 1, [50, 24, 144])), &all[..1]);
    run::<Mxfp8Format, Mxfp8Format>(3, config(ScatterMethod::Fused, 1, [50, 16, 120]), &all[2..]);
    // Shards of 3, 3, 3 and 0 rows.
    run::<Nvfp4Format, Nvfp4Format>(4, config(ScatterMethod::Fused, 1, [9, 16, 64]), &all[2..]);
}

/// The same bits under every seed, by each method.
#[test]
fn the_order_of_arrival_changes_no_bit() {
    for method in [ScatterMethod::Fused, ScatterMethod::Sequential] {
        let case = Case { ranks: 3, config: config(method, 1, [10, 16, 48]), calls: Calls::Mixed, seed: 0 };
        let expected = expected::<Mxfp8Format, Nvfp4Format>(&case).unwrap();
        for seed in 0..seeds() / 8 {
            let case = Case { seed, ..case };
            compare::<Mxfp8Format, Nvfp4Format>(&case, &expected).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        }
    }
}

/// What was in `D`, and GELU, are of whole sums, once: the bits of the product of the dequantized operands.
#[test]
fn what_follows_is_that_of_the_dequantized_operands() -> Result<()> {
    let config = ReduceScatterConfig { beta: 1.0, activation: Activation::Gelu, ..config(ScatterMethod::Fused, 1, [70, 16, 96]) };
    let case = Case { ranks: 2, config, calls: Calls::Eager, seed: 1 };
    let ([of_a, of_b], n) = (shapes(&case), config.sizes.n);
    let ranks = Ranks::new(2, config.bytes::<bf16, bf16>(case.world())?, options())?;
    let mut made = Vec::new();
    for rank in 0..2 {
        let (i, stream) = (rank as usize, ranks.all.stream(rank as usize));
        let side = Side::<Mxfp8Format, Mxfp8Format>::new(&ranks, rank, &case)?;
        let wide = GemmReduceScatter::<bf16, bf16>::new(&ranks.memories[i], stream, config)?;
        let a = Buffer::from_slice(stream, &dequantized::<Mxfp8Format>(&case.a(rank, 0), of_a, amax_of(rank))?)?;
        let weight = Buffer::from_slice(stream, &dequantized::<Mxfp8Format>(&case.weight(rank), of_b, amax_of(rank))?)?;
        let old = || Buffer::from_slice(stream, &values(9 + u64::from(rank), 35 * n));
        made.push((stream, side, wide, (a, weight), [old()?, old()?]));
    }
    for (stream, side, wide, (a, weight), [of_codes, of_wide]) in &mut made {
        let bias = Some(side.bias.view());
        side.scatter.bind(stream, &side.a, &side.weight, bias, of_codes.view_mut())?.run(stream)?;
        wide.bind(stream, a.view(), weight.view(), bias, of_wide.view_mut())?.run(stream)?;
    }
    for (i, (stream, .., [of_codes, of_wide])) in made.iter().enumerate() {
        ranks.all.arenas[i].ticket(stream)?.wait()?;
        assert!(of_codes.to_vec_as::<Half>(stream)? == of_wide.to_vec_as::<Half>(stream)?, "rank {i}");
    }
    Ok(())
}

/// Two calls under way on one memory dequantize into one room: the second half of each has its own weight there again.
#[test]
fn calls_in_halves_share_the_room() -> Result<()> {
    let layers = [[70, 32, 144], [70, 16, 96]].map(|sizes| config(ScatterMethod::Sequential, 1, sizes));
    let cases = layers.map(|config| Case { ranks: 2, config, calls: Calls::Eager, seed: 1 });
    let ranks = Ranks::new(2, layers[0].bytes::<bf16, bf16>(cases[0].world())?, options())?;
    let of_rank = |rank| cases.iter().map(|case| Side::<Mxfp8Format, Mxfp8Format>::new(&ranks, rank, case)).collect::<Result<Vec<_>>>();
    let mut sides = (0..2).map(of_rank).collect::<Result<Vec<_>>>()?;
    for (i, sides) in sides.iter_mut().enumerate() {
        let stream = ranks.all.stream(i);
        let [first, second] = sides.get_disjoint_mut([0, 1]).expect("two layers");
        let (mut first, mut second) = (first.bind(stream, true)?, second.bind(stream, true)?);
        for _ in 0..2 {
            let halves = [first.product.begin(stream)?, second.product.begin(stream)?];
            halves.into_iter().try_for_each(|half| half.finish())?;
        }
    }
    for (layer, case) in cases.iter().enumerate() {
        for (rank, expected) in expected::<Mxfp8Format, Mxfp8Format>(case)?.iter().enumerate() {
            let stream = ranks.all.stream(rank);
            ranks.all.arenas[rank].ticket(stream)?.wait()?;
            let found: Vec<u16> = sides[rank][layer].d.to_vec_as::<Half>(stream)?.into_iter().map(Half::to_bits).collect();
            assert!(found == expected[0], "rank {rank}, layer {layer}");
        }
    }
    Ok(())
}

#[test]
fn after_the_first_call_nothing_is_allocated() -> Result<()> {
    let case = Case { ranks: 2, config: config(ScatterMethod::Fused, 1, [4, 16, 32]), calls: Calls::Eager, seed: 1 };
    let ranks = Ranks::new(2, case.config.bytes::<bf16, bf16>(case.world())?, options())?;
    let mut sides = (0..2).map(|rank| Side::<Nvfp4Format, Mxfp8Format>::new(&ranks, rank, &case)).collect::<Result<Vec<_>>>()?;
    let bind = |(i, side)| Side::bind(side, ranks.all.stream(i), false);
    let mut bound = sides.iter_mut().enumerate().map(bind).collect::<Result<Vec<_>>>()?;
    let mut call = || bound.iter_mut().enumerate().try_for_each(|(i, product)| product.run(ranks.all.stream(i)));
    call()?;
    let usage = || [0, 1].map(|i| ranks.all.stream(i).device().usage());
    let before = usage();
    (0..20).try_for_each(|_| call())?;
    assert_eq!(usage(), before);
    (0..2).try_for_each(|i| ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait())
}

#[test]
fn what_cannot_be_is_refused_with_its_mend() -> Result<()> {
    let case = Case { ranks: 1, config: config(ScatterMethod::Sequential, 1, [40, 16, 72]), calls: Calls::Eager, seed: 1 };
    let ranks = Ranks::new(1, 64, options())?;
    let stream = ranks.all.stream(0);
    let made = |config| QuantizedGemmReduceScatter::<Nvfp4Format, Mxfp8Format, bf16>::new(&ranks.memories[0], stream, config);
    let refused = |config| made(config).unwrap_err().to_string();
    let ragged = refused(case.config);
    assert!(ragged.contains("72 columns are not a multiple of 16: pad them"), "{ragged}");
    let direct = refused(config(ScatterMethod::Direct, 1, [512, 16, 80]));
    assert!(direct.contains("Direct is not to be had: codes are dequantized a panel at a time: take Fused or Sequential"), "{direct}");
    let mut side = Side::<Mxfp8Format, Mxfp8Format>::new(&ranks, 0, &case)?;
    side.weight.direction = Direction::Columns;
    let columns = side.bind(stream, false).err().expect("it is refused").to_string();
    assert!(columns.contains("b: a tensor of [72, 16] by Columns for one of [72, 16] by Rows"), "{columns}");
    side.a.shape = [72, 40];
    let turned = side.bind(stream, false).err().expect("it is refused").to_string();
    assert!(turned.contains("a: a tensor of [72, 40] by Rows for one of [40, 72] by Rows"), "{turned}");
    Ok(())
}

/// Members that made different operations learn of it before the first call; a member that does not call is named, with its chunk.
#[test]
fn another_format_and_a_member_that_does_not_call_are_errors() -> Result<()> {
    let case = Case { ranks: 2, config: config(ScatterMethod::Sequential, 1, [32, 16, 64]), calls: Calls::Eager, seed: 1 };
    let ranks = |deadline| Ranks::new(2, case.config.bytes::<bf16, bf16>(case.world())?, ArenaOptions { deadline, ..options() });
    let others = ranks(Duration::from_secs(60))?;
    let (mut one, _other) =
        (Side::<Mxfp8Format, Mxfp8Format>::new(&others, 0, &case)?, Side::<Mxfp8Format, Nvfp4Format>::new(&others, 1, &case)?);
    let error = one.bind(others.all.stream(0), false).err().expect("it is refused");
    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    let late = ranks(Duration::from_millis(200))?;
    let (mut one, _other) =
        (Side::<Mxfp8Format, Mxfp8Format>::new(&late, 0, &case)?, Side::<Mxfp8Format, Mxfp8Format>::new(&late, 1, &case)?);
    one.bind(late.all.stream(0), false)?.run(late.all.stream(0))?;
    let error = late.all.arenas[0].ticket(late.all.stream(0))?.wait().unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("chunk"), "{error}");
    Ok(())
}

/// What a program by hand gets wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// The room is written for the next panel by a stream that does not wait for the product of the panel before.
    RoomAgain,
    /// A panel is put by a stream that does not wait for its product.
    PutFirst,
}

/// Rank 0 dequantizes two panels of rank 1's rows in one room, multiplies each, and puts it.
fn put_two_panels(seed: u64, bug: Bug) -> Result<Vec<Half>> {
    const CONFIG: GemmConfig =
        GemmConfig { m: 8, n: 16, k: 64, transpose_a: false, transpose_b: false, alpha: 1.0, beta: 0.0, activation: Activation::Identity };
    const LEN: u64 = CONFIG.m * CONFIG.n;
    let all = Arenas::with(2, seed, ArenaOptions { bytes: 1 << 14, ..ArenaOptions::default() });
    let (runtime, compute, receiver) = (&all.world.runtime, all.stream(0), all.stream(1));
    let device = compute.device();
    let (ahead, out) = (device.stream()?, device.urgent_stream()?);
    let (casts, gemm) = (Mxfp8::<bf16>::new(runtime)?, Gemm::<bf16, bf16>::new(runtime, CONFIG)?);
    let parts = all.arenas.iter().map(|arena| arena.buffer::<bf16>(2 * LEN)).collect::<Result<Vec<_>>>()?;
    let ready = all.arenas.iter().map(|arena| arena.flags("panel", 2)).collect::<Result<Vec<_>>>()?;
    let [first, second] = [0, 1].map(|rank| Rank::new(rank, WorldSize::new(2).unwrap()).unwrap());
    let codes = |seed| quantized::<Mxfp8Format>(runtime, compute, &values(seed, CONFIG.m * CONFIG.k), [CONFIG.m, CONFIG.k], 0.0);
    let panels = [codes(1)?, codes(2)?];
    let weight = Buffer::from_slice(compute, &values(3, CONFIG.k * CONFIG.n))?;
    let (room, sent) = (Buffer::<bf16>::named(compute, "room", CONFIG.m * CONFIG.k)?, Buffer::<bf16>::zeros(compute, 2 * LEN)?);
    ahead.wait(&compute.record()?)?;
    out.wait(&compute.record()?)?;
    // The same memory, of whose uses the runtime is not told: no order of its own stands in for one that is missing.
    let unordered = |buffer: &Buffer<bf16>, start: u64, len: u64| {
        // SAFETY: the address is of emulated memory, which is looked up at each use: a wrong use is a report.
        unsafe { Buffer::<bf16>::borrow_raw(&device, buffer.address() + 2 * start, len) }
    };
    for (number, panel) in (0..).zip(&panels) {
        let (mut written, read) = (unordered(&room, 0, room.len())?, unordered(&room, 0, room.len())?);
        let (mut product, put) = (unordered(&sent, number * LEN, LEN)?, unordered(&sent, number * LEN, LEN)?);
        let dequantizes = if bug == Bug::RoomAgain { &ahead } else { compute };
        casts.dequantize(dequantizes, &alias(panel)?, written.view_mut())?;
        compute.wait(&dequantizes.record()?)?;
        gemm.run(compute, read.view(), weight.view(), None, product.view_mut())?;
        if bug != Bug::PutFirst {
            out.wait(&compute.record()?)?;
        }
        let batch = all.arenas[0].batch(&out).put(&parts[0].peer(second)?, &put, 0..LEN, number * LEN)?;
        batch.set(&ready[0], number as u32, second)?.enqueue()?;
    }
    let mut batch = all.arenas[1].batch(receiver);
    for number in 0..2 {
        batch = batch.wait_flag(&ready[1], number, first)?;
    }
    batch.enqueue()?;
    let found = parts[1].local().to_vec_as::<Half>(receiver)?;
    [compute, &ahead, &out].into_iter().try_for_each(Stream::synchronize)?;
    Ok(found)
}

#[test]
fn a_room_or_a_panel_out_of_order_is_reported_under_every_seed() {
    let expected = put_two_panels(0, Bug::None).unwrap();
    assert!(expected.iter().any(|value| *value != Half::ZERO));
    for seed in 0..32 {
        assert!(put_two_panels(seed, Bug::None).unwrap_or_else(|error| panic!("seed {seed}: {error}")) == expected);
    }
    for bug in [Bug::PutFirst, Bug::RoomAgain] {
        let reported = |seed| match put_two_panels(seed, bug) {
            Err(error @ (Error::Race(_) | Error::Fault(_))) => error.to_string(),
            Err(other) => panic!("{bug:?}, seed {seed}: {other}"),
            Ok(_) => panic!("{bug:?}, seed {seed}: nothing is reported"),
        };
        let reports: Vec<_> = (0..32).map(reported).collect();
        assert_eq!(reported(5), reports[5], "{bug:?}");
    }
}
