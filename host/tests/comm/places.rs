//! Places of gathers that outlive epochs: what is bound to them once reads every epoch, and nothing reads them without it.

use oxtile::comm::{Communicator, EmulatedCommunicator, Rank, Team, WorldSize};
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::num::{Pod, bf16, e4m3, ue8m0};
use oxtile::quantize::{Direction, Mxfp8, Mxfp8Tensor};
use oxtile::runtime::{Exploration, Mode, explore};
use oxtile::symmetric::{
    Arena, ArenaOptions, ChunkedGather, CollectiveGather, GatherMemory, Places, PullGather, PushGather, PushMemory, Ready,
};
use oxtile::{Buffer, EmulatedOptions, Error, Graph, HostElement, PinnedBuffer, Result, Runtime, Stream};

use crate::support::{World, numbers};

/// The kinds of gathers.
const KINDS: [&str; 3] = ["pull", "push", "collective"];

/// A rank's gather and streams.
struct Member<'w, T: Pod> {
    gather: Box<dyn ChunkedGather<T> + 'w>,
    compute: Stream,
    side: Stream,
}

/// The arenas are kept, for they are closed in no order.
type Members<'w, T> = (Vec<Member<'w, T>>, Vec<Arena>);

fn members<'w, T: Pod>(ranks: &'w [EmulatedCommunicator], kind: &str, pieces: &[u64], chunks: u64) -> Result<Members<'w, T>> {
    let options = ArenaOptions { deadline: std::time::Duration::from_secs(30), ..ArenaOptions::default() };
    let arenas = ranks.iter().map(|rank| Arena::open(rank, options.clone())).collect::<Result<Vec<_>>>()?;
    let (mut pulls, mut pushes) = (Vec::new(), Vec::new());
    for (arena, rank) in arenas.iter().zip(ranks) {
        match kind {
            "pull" => pulls.push(GatherMemory::<T>::of_pieces(arena, pieces)?),
            "push" => pushes.push(PushMemory::<T>::of_pieces(arena, pieces, rank.world().get())?),
            _ => {}
        }
    }
    let (mut pulls, mut pushes) = (pulls.into_iter(), pushes.into_iter());
    let member = |(arena, rank): (&Arena, &'w EmulatedCommunicator)| {
        let stream = || rank.device().stream();
        let (copies, arrivals, member) = (stream()?, stream()?, Team::all(rank.world()).member(rank.rank()).expect("of the world"));
        let gather: Box<dyn ChunkedGather<T> + 'w> = match kind {
            "pull" => Box::new(PullGather::new(arena, &member, pulls.next().expect("one a rank"), &copies, chunks)?),
            "push" => Box::new(PushGather::new(arena, &member, pushes.next().expect("one a rank"), [&copies, &arrivals], chunks)?),
            _ => Box::new(CollectiveGather::new(rank, &copies, pieces, chunks)?),
        };
        Ok(Member { gather, compute: stream()?, side: stream()? })
    };
    let members = arenas.iter().zip(ranks).map(member).collect::<Result<_>>()?;
    Ok((members, arenas))
}

/// Without waiting for the stream, which may wait for ranks that this thread has not come to yet.
fn write<T: Pod + HostElement<Device = T>>(shard: &mut Buffer<T>, stream: &Stream, values: &[T]) -> Result<()> {
    shard.copy_from_pinned(stream, &PinnedBuffer::from_slice(stream, values)?)
}

fn not_ready<R>(result: Result<R>, text: &str) {
    let Err(error) = result else { panic!("not refused: {text}") };
    assert!(matches!(error, Error::NotReady { .. }) && error.to_string().contains(text), "{error}");
}

/// In each of three epochs a graph that was captured before the first, and a copy of each chunk on another stream, find what was gathered.
fn epochs(ranks: &[EmulatedCommunicator], kind: &str, chunks: u64) -> Result<()> {
    const LEN: u32 = 5;
    let (mut members, _arenas) = members::<u32>(ranks, kind, &[LEN.into()], chunks)?;
    let (size, mut captured) = (ranks[0].world(), Vec::new());
    for Member { gather, compute, .. } in &members {
        let (places, mut found) = (gather.places().clone(), Buffer::zeros(compute, u64::from(LEN * size.get()))?);
        captured.push((Graph::capture(&[compute], || found.copy_from(compute, places.whole()))?, found));
    }
    let mut results = Vec::new();
    for epoch in 0..3 {
        let value = |rank: Rank| numbers(10 * epoch + rank.index(), LEN);
        let mut running: Vec<Ready<u32>> = Vec::new();
        for (Member { gather, compute, .. }, rank) in members.iter_mut().zip(ranks) {
            write(gather.shard(compute)?, compute, &value(rank.rank()))?;
            running.push(gather.start()?);
        }
        for ((Member { gather, compute, side }, (graph, found)), ready) in members.iter_mut().zip(&captured).zip(running) {
            for member in size.ranks() {
                for chunk in 0..chunks {
                    let place = ready.chunk(side, member, chunk)?;
                    let mut part = Buffer::uninitialised(side, place.len())?;
                    part.copy_from(side, place)?;
                    let length = u64::from(LEN).div_ceil(chunks) as usize;
                    let expected = value(member).chunks(length).nth(chunk as usize).expect("it is there").to_vec();
                    results.push((side.clone(), part, expected));
                }
            }
            ready.whole(compute)?;
            graph.replay(compute)?;
            let mut copy = Buffer::uninitialised(compute, found.len())?;
            copy.copy_from(compute, found)?;
            results.push((compute.clone(), copy, size.ranks().flat_map(value).collect()));
            gather.release(ready)?;
        }
    }
    results.into_iter().try_for_each(|(stream, found, expected)| {
        assert_eq!(found.to_vec(&stream)?, expected, "{kind}, {chunks} chunks");
        Ok(())
    })
}

#[test]
fn what_is_bound_once_finds_every_epoch() {
    for kind in KINDS {
        for size in [1, 2, 3] {
            for seed in 0..16 {
                let world = World::new(size, seed);
                epochs(&world.ranks, kind, 1 + seed % 2).unwrap_or_else(|error| panic!("{kind}, {size} ranks, seed {seed}: {error}"));
            }
        }
    }
}

/// The same under every order of signals, waits and collectives.
#[test]
fn every_order_of_two_and_three_ranks_gives_every_epoch() {
    for (kind, size) in [("push", 2), ("pull", 2), ("collective", 3)] {
        let program = |exploration: &Exploration| {
            let (exploration, mode) = (Some(exploration.clone()), Mode::Check);
            let runtime = Runtime::emulated_with(EmulatedOptions { devices: size, mode, exploration, ..EmulatedOptions::default() })?;
            epochs(&EmulatedCommunicator::world_of(&runtime, WorldSize::new(size).unwrap())?, kind, 1)
        };
        let explored = explore(program).unwrap_or_else(|error| panic!("{kind}: {error}"));
        assert!(explored.schedules >= 1, "{kind}: {explored:?}");
    }
}

#[test]
fn a_product_is_bound_once() {
    const SIDE: u64 = 16;
    let config = GemmConfig { m: 2 * SIDE, n: SIDE, k: SIDE, ..GemmConfig::default() };
    for kind in KINDS {
        let world = World::new(2, 3);
        let gemm = Gemm::<bf16, f32>::new(&world.runtime, config).unwrap();
        let (mut members, _arenas) = members::<bf16>(&world.ranks, kind, &[SIDE * SIDE], 1).unwrap();
        let places: Vec<Places<bf16>> = members.iter().map(|member| member.gather.places().clone()).collect();
        let ones = vec![bf16::from_bits(0x3f80); (SIDE * SIDE) as usize];
        let operands: Vec<_> = members.iter().map(|member| Buffer::from_slice(&member.compute, &ones).unwrap()).collect();
        let mut results: Vec<_> = members.iter().map(|member| Buffer::zeros(&member.compute, 2 * SIDE * SIDE).unwrap()).collect();
        // SAFETY: the elements of the results, which outlive these; they are read after the products, on the same streams.
        let alias = |result: &Buffer<f32>| unsafe { Buffer::<f32>::borrow_raw(&result.device(), result.address(), result.len()) };
        let found: Vec<_> = results.iter().map(|result| alias(result).unwrap()).collect();
        let mut bound = Vec::new();
        for (((member, places), operand), result) in members.iter().zip(&places).zip(&operands).zip(&mut results) {
            let (a, b) = (places.whole().view(), operand.view());
            bound.push(gemm.bind(&member.compute, a, b, None, result.view_mut()).unwrap());
        }
        for epoch in [1_u32, 2, 3] {
            let mut running = Vec::new();
            for (rank, Member { gather, compute, .. }) in (1..).zip(&mut members) {
                let value = bf16::from_bits((((epoch * rank) as f32).to_bits() >> 16) as u16);
                write(gather.shard(compute).unwrap(), compute, &vec![value; (SIDE * SIDE) as usize]).unwrap();
                running.push(gather.start().unwrap());
            }
            for ((Member { compute, .. }, bound), ready) in members.iter().zip(&mut bound).zip(&running) {
                not_ready(bound.run(compute), &format!("the stream was not given the whole of epoch {epoch} of a"));
                ready.whole(compute).unwrap();
                bound.run(compute).unwrap();
            }
            for (Member { gather, .. }, ready) in members.iter_mut().zip(running) {
                gather.release(ready).unwrap();
            }
            for (Member { compute, .. }, found) in members.iter().zip(&found) {
                let row = |rank: u32| vec![(SIDE as u32 * epoch * rank) as f32; (SIDE * SIDE) as usize];
                assert_eq!(found.to_vec(compute).unwrap(), [row(1), row(2)].concat(), "{kind}, epoch {epoch}");
            }
        }
    }
}

#[test]
fn nothing_is_read_without_its_epoch() {
    for kind in KINDS {
        let world = World::new(1, 0);
        let (mut members, _arenas) = members::<u32>(&world.ranks, kind, &[4], 2).unwrap();
        let Member { gather, compute, side } = &mut members[0];
        let places = gather.places().clone();
        let mut found = Buffer::<u32>::zeros(compute, 4).unwrap();
        let graph = Graph::capture(&[compute], || found.copy_from(compute, places.whole())).unwrap();
        write(gather.shard(compute).unwrap(), compute, &numbers(0, 4)).unwrap();
        let nothing = "nothing is gathered in this place of a";
        not_ready(places.whole().to_vec(compute), nothing);
        not_ready(places.chunk(Rank::ZERO, 1).unwrap().to_vec(compute), nothing);
        not_ready(graph.replay(compute), &format!("Graph::replay: {nothing}"));
        let ready = gather.start().unwrap();
        assert_eq!(ready.epoch().get(), 1);
        ready.chunk(compute, Rank::ZERO, 1).unwrap();
        assert_eq!(places.chunk(Rank::ZERO, 1).unwrap().to_vec(compute).unwrap(), numbers(0, 4)[2..]);
        not_ready(places.chunk(Rank::ZERO, 0).unwrap().to_vec(compute), "the stream was not given this chunk of epoch 1 of a");
        not_ready(places.whole().to_vec(compute), "Buffer::copy_to_slice: the stream was not given the whole of epoch 1 of a");
        not_ready(graph.replay(compute), "call Ready::whole with it first");
        ready.whole(compute).unwrap();
        graph.replay(compute).unwrap();
        assert_eq!(places.chunk(Rank::ZERO, 0).unwrap().to_vec(compute).unwrap(), numbers(0, 4)[..2]);
        not_ready(places.whole().to_vec(side), "the stream was not given the whole of epoch 1");
        let captured = Graph::capture(&[side], || ready.whole(side).map(drop));
        assert!(matches!(captured, Err(Error::NotCapturable { .. })), "{captured:?}");
        gather.release(ready).unwrap();
        not_ready(places.whole().to_vec(compute), nothing);
        not_ready(graph.replay(compute), nothing);
        assert!(places.chunk(Rank::ZERO, 2).is_err(), "there are two chunks");
        assert_eq!(found.to_vec(compute).unwrap(), numbers(0, 4));
        // The next epoch is another.
        let ready = gather.start().unwrap();
        not_ready(places.whole().to_vec(compute), "the stream was not given the whole of epoch 2");
        let error = gather.start().unwrap_err().to_string();
        assert!(error.contains("epoch 2 is still in use: give its Ready back"), "{error}");
        gather.release(ready).unwrap();
    }
}

#[test]
fn the_epoch_of_another_gather_is_refused() {
    for kind in KINDS {
        let world = World::new(1, 0);
        let [mut one, mut other] = [(); 2].map(|()| members::<u32>(&world.ranks, kind, &[4], 1).unwrap());
        let [one, other] = [&mut one.0[0], &mut other.0[0]];
        one.gather.shard(&one.compute).unwrap().fill_zero(&one.compute).unwrap();
        let ready = one.gather.start().unwrap();
        let refused = other.gather.release(ready).unwrap_err();
        assert!(refused.error.to_string().contains("the epoch is of another gather"), "{refused}");
        one.gather.release(refused.ready).unwrap();
    }
}

/// Codes, scales and an amax travel together: what comes is the cast of the whole, and a tensor of the places is dequantized in every epoch.
#[test]
fn a_quantized_tensor_is_gathered_as_pieces() {
    const COLUMNS: u64 = 72;
    for (kind, size) in KINDS.into_iter().flat_map(|kind| [(kind, 2), (kind, 3)]) {
        for direction in [Direction::Rows, Direction::Columns] {
            for chunks in [1, 2] {
                let world = World::new(size, 1);
                let mxfp8 = Mxfp8::<f32, e4m3>::new(&world.runtime).unwrap();
                let (shape, whole_shape) = ([32, COLUMNS], [32 * u64::from(size), COLUMNS]);
                let scales = if direction == Direction::Rows { 32 * COLUMNS.div_ceil(32) } else { COLUMNS };
                let pieces = [32 * COLUMNS, scales, 4];
                let (mut members, _arenas) = members::<u8>(&world.ranks, kind, &pieces, chunks).unwrap();
                let tensors: Vec<Mxfp8Tensor<e4m3>> = members
                    .iter()
                    .map(|Member { gather, .. }| {
                        let (data, scales) = (gather.places().buffer(0).unwrap(), gather.places().buffer::<ue8m0>(1).unwrap());
                        Mxfp8Tensor { data, scales, shape: whole_shape, direction, amax: () }
                    })
                    .collect();
                for epoch in 0..2 {
                    let value = |rank: u32, at: u64| ((rank + 1) << epoch) as f32 * (at as f32 - 700.0) / 64.0;
                    let shard = |rank: u32| (0..32 * COLUMNS).map(|at| value(rank, at)).collect::<Vec<_>>();
                    let mut running = Vec::new();
                    for (rank, Member { gather, compute, .. }) in (0..).zip(&mut members) {
                        let input = Buffer::from_slice(compute, &shard(rank)).unwrap();
                        let [codes, scales, amax] = gather.shards(compute).unwrap() else { panic!("three pieces") };
                        let (codes, scales) = (codes.view_mut().cast(), scales.view_mut().cast());
                        match direction {
                            Direction::Rows => mxfp8.quantize_rows(compute, input.view(), shape, codes, scales),
                            Direction::Columns => mxfp8.quantize_columns(compute, input.view(), shape, codes, scales),
                        }
                        .unwrap();
                        write(amax, compute, &value(rank, 0).to_le_bytes()).unwrap();
                        running.push(gather.start().unwrap());
                    }
                    for ((Member { gather, compute, .. }, tensor), ready) in members.iter_mut().zip(&tensors).zip(running) {
                        let whole: Vec<f32> = (0..size).flat_map(shard).collect();
                        let input = Buffer::from_slice(compute, &whole).unwrap();
                        let expected = mxfp8.quantize(compute, input.view(), whole_shape, direction).unwrap();
                        not_ready(tensor.data.to_vec(compute), "the stream was not given the whole");
                        let amaxes = ready.pieces(compute).unwrap()[2].to_vec(compute).unwrap();
                        assert_eq!(amaxes, (0..size).flat_map(|rank| value(rank, 0).to_le_bytes()).collect::<Vec<_>>());
                        assert_eq!(tensor.data.to_vec(compute).unwrap(), expected.data.to_vec(compute).unwrap(), "{kind}: codes");
                        assert_eq!(tensor.scales.to_vec(compute).unwrap(), expected.scales.to_vec(compute).unwrap(), "{kind}: scales");
                        let mut found = [(); 2].map(|()| Buffer::<f32>::zeros(compute, whole.len() as u64).unwrap());
                        mxfp8.dequantize(compute, tensor, found[0].view_mut()).unwrap();
                        mxfp8.dequantize(compute, &expected, found[1].view_mut()).unwrap();
                        let [found, expected] = found.map(|found| found.to_vec(compute).unwrap());
                        assert_eq!(found, expected, "{kind}");
                        gather.release(ready).unwrap();
                    }
                }
                assert!(members[0].gather.places().buffer::<u32>(3).is_err(), "there are three pieces");
            }
        }
    }
}

/// Buffers of one arena allocation, each with the operations of the whole.
#[test]
fn parts_of_a_symmetric_buffer_are_buffers() {
    let world = World::new(2, 5);
    let arenas: Vec<_> = world.ranks.iter().map(|rank| Arena::open(rank, ArenaOptions::default()).unwrap()).collect();
    let mut parts = Vec::new();
    for (arena, stream) in arenas.iter().zip(&world.streams) {
        let mut bytes = arena.buffer::<u8>(1024).unwrap();
        bytes.local_mut().fill_zero(stream).unwrap();
        let [codes, scales] = <[_; 2]>::try_from(bytes.parts(&[0..100, 256..276]).unwrap()).unwrap();
        parts.push((codes, scales.cast::<u32>().unwrap()));
    }
    world.streams.iter().try_for_each(|stream| stream.synchronize()).unwrap();
    let side = world.ranks[0].device().stream().unwrap();
    let source = Buffer::from_slice(&side, &[7_u32, 8]).unwrap();
    parts[0].1.peer(world.rank(1)).unwrap().put(&side, &source, 0..2, 3).unwrap();
    arenas[0].ticket(&side).unwrap().wait().unwrap();
    assert_eq!(parts[0].1.len(), 5);
    let got = Buffer::uninitialised(&side, 2).unwrap();
    let got = parts[0].1.peer(world.rank(1)).unwrap().get(&side, 3..5, got, 0).unwrap().wait().unwrap();
    assert_eq!(got.to_vec(&side).unwrap(), [7, 8]);
    assert_eq!(parts[1].1.contiguous().unwrap().len(), 5);
    // What was enqueued on the whole comes before what is done with a part on another stream.
    let mut whole = arenas[0].buffer::<u8>(64).unwrap();
    whole.local_mut().fill_zero(&world.streams[0]).unwrap();
    let part = whole.parts(&[0..16, 16..64]).unwrap().remove(1);
    assert_eq!(part.local().to_vec(&side).unwrap(), [0; 48]);
    let refused = |ranges: &[std::ops::Range<u64>]| arenas[0].buffer::<u8>(8).unwrap().parts(ranges).unwrap_err().to_string();
    assert!(refused(&[0..4, 3..5]).contains("range 3..5 begins before 4"), "{}", refused(&[0..4, 3..5]));
    assert!(refused(&[0..4, 4..9]).contains("SymmetricBuffer::parts"));
    assert!(arenas[0].buffer::<u8>(7).unwrap().cast::<u32>().is_err());
}
