//! Overlapped products that are used in unusual ways: each has its result, or is refused before another rank hears of it.

use half::bf16 as Half;
use oxtile::comm::WorldSize;
use oxtile::num::bf16;
use oxtile::overlap::{
    AllGatherGemm, AllReduceConfig, AllReduceMemory, AllReduceMethod, GatheredFormat, GemmAllReduce, GemmReduceScatter, Global, Method,
    OverlapMemory, QuantizedAllGatherGemm, ScatterMethod, ScatteredProduct,
};
use oxtile::quantize::{Direction, Mxfp8Format, Mxfp8Tensor};
use oxtile::{Buffer, Error, Graph, PinnedBuffer, Result, Stream};

use crate::arenas::Arenas;
use crate::overlap::{Calls, by, member};
use crate::overlap_calls::Ranks;
use crate::scattered::{Case, config, options};
use crate::support::seeds;

/// A memory knows its device: what is made with a stream of another one would take room there.
#[test]
fn a_stream_of_another_device_is_refused() -> Result<()> {
    let (scattered, gathered) = (config(ScatterMethod::Fused, 1, [40, 16, 32]), by(Method::Fused, None, [40, 32, 32]));
    let ranks = Ranks::new(2, 40 * 32 * 2, options())?;
    let (memory, stream) = (&ranks.memories[0], ranks.all.stream(1));
    let summed = AllReduceMemory::take(memory, 40 * 16 * 2)?;
    let travels = gathered.travelling(GatheredFormat::Mxfp8);
    let errors = [
        GemmReduceScatter::<bf16, bf16>::new(memory, stream, scattered).map(drop),
        AllGatherGemm::<bf16, bf16>::new(memory, stream, gathered).map(drop),
        QuantizedAllGatherGemm::<Mxfp8Format, bf16>::new(memory, stream, travels).map(drop),
        GemmAllReduce::<bf16, bf16>::new(&summed, stream, AllReduceConfig::new(Global { m: 40, n: 16, k: 32 })).map(drop),
    ];
    for error in errors.map(|made| made.unwrap_err().to_string()) {
        assert!(error.contains("use a stream of device"), "{error}");
    }
    Ok(())
}

/// Other ranks know of the memory that was lent, and not of what is assigned in its place.
#[test]
fn what_is_lent_is_not_replaced() -> Result<()> {
    let gathered = by(Method::Sequential, None, [64, 32, 64]);
    let ranks = Ranks::new(2, 64 * 64 * 2, options())?;
    let stream = ranks.all.stream(0);
    let travels = gathered.travelling(GatheredFormat::Mxfp8);
    let made = [0, 1].map(|i| ranks.gather(i, gathered)).into_iter().collect::<Result<Vec<_>>>()?;
    let codes = [0, 1].map(|i| QuantizedAllGatherGemm::<Mxfp8Format, bf16>::new(&ranks.memories[i], ranks.all.stream(i), travels));
    let codes = codes.into_iter().collect::<Result<Vec<_>>>()?;
    let weight = Buffer::<bf16>::zeros(stream, 64 * 16)?;
    let (mut d, mut of_codes) = (Buffer::<bf16>::zeros(stream, 64 * 16)?, Buffer::<bf16>::zeros(stream, 64 * 16)?);
    let why = "another buffer was assigned to what";

    let mut product = made[0].bind(stream, weight.view(), None, d.view_mut())?;
    *product.shard(stream)? = Buffer::zeros(stream, 32 * 64)?;
    let error = product.run(stream).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
    for replace_all in [true, false] {
        let mut product = codes[0].bind(stream, weight.view(), None, of_codes.view_mut())?;
        let (lent, other) = (product.shard(stream)?, Mxfp8Tensor::uninitialised(stream, [32, 64], Direction::Rows)?);
        if replace_all {
            *lent = other;
        } else {
            lent.scales = other.scales;
        }
        let error = product.run(stream).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }

    let mut buffer = ranks.all.arenas[0].buffer::<u32>(2)?;
    let _other = ranks.all.arenas[1].buffer::<u32>(2)?;
    *buffer.local_mut() = Buffer::zeros(stream, 4096)?;
    assert_eq!(buffer.len(), 2);
    let errors = [
        buffer.peer(ranks.all.arenas[1].rank()).map(drop),
        buffer.discard(stream, 0..2),
        buffer.cast::<u8>().map(drop),
        ranks.all.arenas[0].buffer::<u32>(2).and_then(|mut buffer| {
            *buffer.local_mut() = Buffer::zeros(stream, 1)?;
            buffer.parts(&[0..1, 1..2]).map(drop)
        }),
    ];
    for error in errors.map(|result| result.unwrap_err().to_string()) {
        assert!(error.contains(why), "{error}");
    }
    Ok(())
}

/// A place that was given out in a capture which failed is given to another product, and not to both.
#[test]
fn a_place_of_a_capture_that_failed_is_of_one_product() -> Result<()> {
    let gathered = by(Method::Sequential, None, [64, 32, 64]);
    let ranks = Ranks::new(2, 64 * 64 * 2, options())?;
    let stream = ranks.all.stream(0);
    let made = [0, 1, 0, 1].map(|i| ranks.gather(i, gathered)).into_iter().collect::<Result<Vec<_>>>()?;
    let (weight, own) = (Buffer::<bf16>::zeros(stream, 64 * 16)?, Buffer::<bf16>::zeros(stream, 32 * 64)?);
    let mut results = [Buffer::<bf16>::zeros(stream, 64 * 16)?, Buffer::<bf16>::zeros(stream, 64 * 16)?];
    let [of_first, of_second] = &mut results;
    let mut first = made[0].bind(stream, weight.view(), None, of_first.view_mut())?;
    let mut second = made[2].bind(stream, weight.view(), None, of_second.view_mut())?;
    let failed = Graph::capture(&[stream, &ranks.out[0]], || {
        first.copy_shard(stream, &own)?;
        Err(Error::Invalid { what: "test", why: "it fails".to_owned() })
    });
    assert!(failed.is_err());
    second.copy_shard(stream, &own)?;
    let error = first.copy_shard(stream, &own).unwrap_err().to_string();
    assert!(error.contains("call that product first"), "{error}");
    Ok(())
}

/// Kernels that store at other ranks see a place as elements, however many bytes were asked for.
#[test]
fn a_memory_of_an_odd_number_of_bytes_has_whole_elements() -> Result<()> {
    let case = of(ScatterMethod::Direct, 1, [512, 32, 144], 1);
    let ranks = Ranks::new(2, case.config.bytes::<bf16, bf16>(case.world())? + 1, options())?;
    run(&ranks, &[case], each)
}

/// The copies may be on the stream of the products: then they do not overlap, and no rank waits for copies that come after its own kernel.
#[test]
fn one_stream_may_carry_all() -> Result<()> {
    for method in [ScatterMethod::Whole, ScatterMethod::Direct, ScatterMethod::Fused, ScatterMethod::Sequential] {
        let case = of(method, 1, [512, 32, 144], 1);
        let all = Arenas::with(2, 1, options());
        let out: Vec<_> = (0..2).map(|i| all.stream(i).clone()).collect();
        let bytes = case.config.bytes::<bf16, bf16>(case.world())?;
        let memory = |(i, out)| OverlapMemory::take(&all.arenas[i], &member(&all, i), bytes, out);
        let memories = out.iter().enumerate().map(memory).collect::<Result<_>>()?;
        run(&Ranks { all, out, memories }, &[case], each)?;
    }
    Ok(())
}

/// Calls of two operations in one kernel each, which put from other memory: the flags of a panel are those of its place.
#[test]
fn kernels_of_all_rows_are_under_way_together() -> Result<()> {
    for seed in 0..seeds() / 4 {
        let cases = [16, 32].map(|n| of(ScatterMethod::Whole, 2, [1024, n, 32], seed));
        let bytes = cases[1].config.bytes::<bf16, bf16>(cases[1].world())?;
        let ranks = Ranks::over(Arenas::with(2, seed, options()), bytes)?;
        run(&ranks, &cases, |i, bound, stream| {
            let [first, second] = bound else { panic!("two products") };
            // The copies are late: the second kernel is done before the first one's panels are put.
            let (side, mut filled) = (ranks.all.world.ranks[i].device().stream()?, Buffer::<u32>::zeros(stream, 4)?);
            (0..200).try_for_each(|_| filled.fill_zero(&side))?;
            ranks.out[i].wait(&side.record()?)?;
            let one = first.begin(stream)?;
            second.run(stream)?;
            one.finish()?;
            let (one, two) = (first.begin(stream)?, second.begin(stream)?);
            one.finish()?;
            two.finish()
        })?;
    }
    Ok(())
}

/// The result of a memory that has room for a larger one is as long as itself.
#[test]
fn a_result_in_a_larger_memory_is_copied_alone() -> Result<()> {
    let config = AllReduceConfig { method: Some(AllReduceMethod::Sequential), ..AllReduceConfig::new(Global { m: 40, n: 16, k: 32 }) };
    let ranks = Ranks::new(2, config.bytes::<bf16, bf16>(ranks_of_two())?, options())?;
    let memories = ranks.memories.iter().map(|parts| AllReduceMemory::take(parts, 3 * 40 * 16 * 2)).collect::<Result<Vec<_>>>()?;
    let make = |(i, memory): (usize, &AllReduceMemory)| GemmAllReduce::<bf16, bf16>::new(memory, ranks.all.stream(i), config);
    let made = memories.iter().enumerate().map(make).collect::<Result<Vec<_>>>()?;
    let operand = |i| Buffer::<bf16>::from_slice(ranks.all.stream(i), &vec![Half::ONE; 40 * 16]);
    let operands = [operand(0)?, operand(1)?];
    let mut bound = Vec::new();
    for (i, (reduce, operand)) in made.iter().zip(&operands).enumerate() {
        let (stream, weight) = (ranks.all.stream(i), operand.view().slice(0, 16 * 16));
        bound.push(reduce.bind(stream, operand.view(), weight, None)?);
    }
    bound.iter_mut().enumerate().try_for_each(|(i, product)| product.run(ranks.all.stream(i)))?;
    for (i, product) in bound.iter().enumerate() {
        let stream = ranks.all.stream(i);
        let mut host = PinnedBuffer::<Half>::zeros(stream, 40 * 16)?;
        product.buffer().copy_to_pinned(stream, &mut host)?;
        ranks.all.arenas[i].ticket(stream)?.wait()?;
        assert!(host.as_slice()?.iter().all(|value| value.to_f32() == 32.0));
    }
    Ok(())
}

fn ranks_of_two() -> WorldSize {
    WorldSize::new(2).unwrap()
}

fn of(method: ScatterMethod, panels: u32, sizes: [u64; 3], seed: u64) -> Case {
    Case { ranks: 2, config: config(method, panels, sizes), calls: Calls::Eager, seed }
}

/// Every product once.
fn each(_: usize, bound: &mut [ScatteredProduct<'_, bf16, bf16>], stream: &Stream) -> Result<()> {
    bound.iter_mut().try_for_each(|product| product.run(stream))
}

/// What two ranks have of these products, made and called in one order, has the bits of sums in order.
fn run(ranks: &Ranks, cases: &[Case], call: impl Fn(usize, &mut [ScatteredProduct<'_, bf16, bf16>], &Stream) -> Result<()>) -> Result<()> {
    let make = |i: usize| {
        let of = |case: &Case| GemmReduceScatter::<bf16, bf16>::new(&ranks.memories[i], ranks.all.stream(i), case.config);
        cases.iter().map(of).collect::<Result<Vec<_>>>()
    };
    let made = [make(0)?, make(1)?];
    let mut memory = Vec::new();
    for i in 0..2 {
        let stream = ranks.all.stream(i);
        let of = |case: &Case| -> Result<_> {
            let [a, weight, bias] =
                [case.a(i as u32, 0), case.weight(i as u32), case.bias()].map(|values| Buffer::from_slice(stream, &values));
            let rows = case.rows(i as u32);
            Ok((a?, weight?, bias?, Buffer::<bf16>::named(stream, "d", (rows.end - rows.start) * case.config.sizes.n)?))
        };
        memory.push(cases.iter().map(of).collect::<Result<Vec<_>>>()?);
    }
    for (i, (made, memory)) in made.iter().zip(&mut memory).enumerate() {
        let (stream, mut bound) = (ranks.all.stream(i), Vec::new());
        for (scatter, (a, weight, bias, d)) in made.iter().zip(memory) {
            bound.push(scatter.bind(stream, a.view(), weight.view(), Some(bias.view()), d.view_mut())?);
        }
        call(i, &mut bound, stream)?;
    }
    for (i, memory) in memory.iter().enumerate() {
        ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait()?;
        for (case, (.., d)) in cases.iter().zip(memory) {
            let found: Vec<u16> = d.to_vec_as::<Half>(ranks.all.stream(i))?.into_iter().map(Half::to_bits).collect();
            assert!(found == case.expected(i as u32, 0)?, "{case:?}, rank {i}");
        }
    }
    Ok(())
}
