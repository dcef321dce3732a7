//! Weights in shards: steps and passes in graphs.

use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::sharded::{Bf16, Chain, ChainConfig, Mode, Mxfp8, Nvfp4, Published, Weight, WeightId};
use oxtile::sum_parts::SumParts;
use oxtile::{Buffer, Error, Graph, PinnedBuffer, Stream};

use crate::sharded::holders;
use crate::sharded_calls::{Wide, captured_chain, chain, weights};
use crate::sharded_ranks::values;
use crate::support::{World, seeds};

/// Whole steps in graphs: nothing is done before the capture but the allocation of buffers, and each replay has other values.
fn replayed<F: Wide>(ranks: u32, seed: u64) {
    let (world, weights) = (World::new(ranks, seed), weights());
    let mut holders = holders::<F>(&world, &weights);
    let (back, round) = (F::back(&world), SumParts::<f32, bf16>::new(&world.runtime).unwrap());
    let mut all = Vec::new();
    for (holder, stream) in holders.iter_mut().zip(&world.streams) {
        let mut chain = captured_chain(holder, stream, |config| config).unwrap();
        let rows: Vec<_> = holder.set.weights().map(|(id, _)| holder.set.own_rows(id).unwrap()).collect();
        let own: Vec<_> = weights
            .iter()
            .zip(&rows)
            .map(|(weight, rows)| Buffer::<f32>::zeros(stream, (rows.end - rows.start) * weight.columns).unwrap())
            .collect();
        let padded = |weight: &Weight| weight.shards::<F>(world.size()).padded_rows() * weight.columns;
        let mut read: Vec<_> = (0..2).flat_map(|_| &weights).map(|weight| Buffer::<bf16>::zeros(stream, padded(weight)).unwrap()).collect();
        let pulls = chain.pulls().clone();
        let graph = Graph::capture(&[stream, &pulls], || {
            let mut updating = holder.set.update(stream)?;
            let ids: Vec<_> = updating.set().weights().map(|(id, _)| id).collect();
            for (id, own) in ids.iter().zip(&own) {
                round.round(stream, own.view(), updating.master(*id, 0)?)?;
            }
            let published = updating.publish()?;
            let mut pass = published.forward(&mut chain)?;
            for id in &ids {
                F::read(&back, stream, pass.take(*id, stream)?.tensor(), &mut read[id.index()])?;
            }
            pass.finish()?;
            let mut pass = published.backward(&mut chain)?;
            for id in ids.iter().rev() {
                F::read(&back, stream, pass.take(*id, stream)?.tensor(), &mut read[weights.len() + id.index()])?;
            }
            pass.finish()
        })
        .unwrap_or_else(|error| panic!("{}, {ranks} ranks: {error}", F::NAME));
        all.push((chain, own, read, graph, rows));
    }
    let mut found = Vec::new();
    for step in 0..8 {
        for ((_, own, read, graph, rows), stream) in all.iter_mut().zip(&world.streams) {
            for (((own, rows), weight), at) in own.iter_mut().zip(&*rows).zip(&weights).zip(0..) {
                let all = values(step, at, 0, [weight.rows, weight.columns]);
                let part = &all[(rows.start * weight.columns) as usize..(rows.end * weight.columns) as usize];
                own.copy_from_pinned(stream, &PinnedBuffer::from_slice(stream, part).unwrap()).unwrap();
            }
            graph.replay(stream).unwrap();
            for (read, at) in read.iter().zip(0..) {
                let mut host = PinnedBuffer::<bf16>::zeros(stream, read.len() as usize).unwrap();
                read.copy_to_pinned(stream, &mut host).unwrap();
                found.push((step, at % weights.len(), at >= weights.len(), host));
            }
        }
    }
    world.streams.iter().try_for_each(Stream::synchronize).unwrap();
    // The same values, cast whole by one device.
    let stream = &world.streams[0];
    for (step, at, is_backward, host) in found {
        let Weight { rows, columns, .. } = weights[at];
        if is_backward && F::NAME == "NVFP4" {
            continue;
        }
        let whole = holders_of_one::<F>(step, at, [rows, columns], is_backward, host.as_slice().unwrap().len() as u64);
        assert_eq!(host.as_slice().unwrap(), whole, "{}, {ranks} ranks, step {step}, weight {at}, backward: {is_backward}", F::NAME);
    }
    stream.synchronize().unwrap();
}

/// What a single rank reads of one weight, eagerly.
fn holders_of_one<F: Wide>(step: u32, at: usize, shape: [u64; 2], is_backward: bool, len: u64) -> Vec<bf16> {
    let world = World::new(1, 0);
    let stream = &world.streams[0];
    let mut names: Vec<_> = (0..at).map(|i| Weight::new(format!("{i}"), [1, F::COLUMNS])).collect();
    names.push(Weight::new("weight", shape));
    let mut holder = holders::<F>(&world, &names).remove(0);
    holder.publish(stream, step).unwrap();
    let id = holder.set.find("weight").unwrap();
    let mut chain = Chain::new(stream, &holder.set, &ChainConfig::new(&holder.set, [id]).unwrap()).unwrap();
    let published = Published::of(&holder.set).unwrap();
    let mut pass = if is_backward { published.backward(&mut chain) } else { published.forward(&mut chain) }.unwrap();
    let mut output = Buffer::<bf16>::zeros(stream, len).unwrap();
    F::read(&F::back(&world), stream, pass.take(id, stream).unwrap().tensor(), &mut output).unwrap();
    output.to_vec(stream).unwrap()
}

#[test]
fn a_step_is_captured_from_its_first_call() {
    for ranks in [1, 2, 3] {
        replayed::<Bf16>(ranks, 1);
        replayed::<Mxfp8>(ranks, 2);
        replayed::<Nvfp4>(ranks, 3);
    }
}

/// An eager chain has no pass in a graph, and one for graphs has none outside.
#[test]
fn a_chain_is_eager_or_captured() {
    let world = World::new(1, 0);
    let stream = &world.streams[0];
    let mut holder = holders::<Bf16>(&world, &weights()).remove(0);
    holder.publish(stream, 0).unwrap();
    let (mut eager, mut captured) =
        (chain(&holder, stream, |config| config).unwrap(), captured_chain(&holder, stream, |config| config).unwrap());
    let published = Published::of(&holder.set).unwrap();
    let whole = Graph::capture(&[stream], || {
        let mut pass = published.forward(&mut eager)?;
        let first = pass.next_weight().expect("three weights");
        pass.take(first, stream).map(drop)
    });
    assert!(matches!(whole, Err(Error::NotCapturable { .. })), "{whole:?}");
    for error in [published.forward(&mut captured).map(drop).unwrap_err(), published.backward(&mut captured).map(drop).unwrap_err()] {
        assert!(error.to_string().contains("begin its passes inside Graph::capture with Chain::pulls named to it"), "{error}");
    }
}

/// What is captured in part is refused before anything is enqueued, and says what to name.
#[test]
fn a_part_of_a_pass_is_refused() {
    let world = World::new(1, 0);
    let stream = &world.streams[0];
    let mut holder = holders::<Bf16>(&world, &weights()).remove(0);
    let distance = |config| ChainConfig { distance: 0, ..config };
    let (mut own, mut eager) = (captured_chain(&holder, stream, distance).unwrap(), chain(&holder, stream, distance).unwrap());
    let pulls = own.pulls().clone();
    let refused = |captured: Result<Graph, Error>, what: &str| match captured {
        Err(error @ Error::NotCapturable { .. }) => assert!(error.to_string().contains(what), "{error}"),
        other => panic!("{other:?}"),
    };
    // A step that is in a graph is not done, and its passes are in that graph.
    let mut left = None;
    Graph::capture(&[stream], || {
        left = Some(holder.set.update(stream)?.publish()?);
        Ok::<_, Error>(())
    })
    .unwrap();
    let error = left.take().unwrap().forward(&mut own).map(drop).unwrap_err();
    assert!(matches!(error, Error::NotCapturable { .. }) && error.to_string().contains("a step that is in another graph"), "{error}");

    // Half of a step in a graph, and the other half not.
    let mut half = None;
    let set = &mut holder.set;
    Graph::capture(&[stream], || {
        half = Some(set.update(stream)?);
        Ok::<_, Error>(())
    })
    .unwrap();
    let error = half.take().unwrap().publish().map(drop).unwrap_err();
    assert!(matches!(error, Error::NotCapturable { what: "half of a step", .. }), "{error}");

    holder.publish(stream, 0).unwrap();
    let published = Published::of(&holder.set).unwrap();
    let mut pass = published.forward(&mut eager).unwrap();
    let first = pass.next_weight().unwrap();
    refused(Graph::capture(&[stream], || pass.take(first, stream).map(drop)), "a part of a pass");
    pass.take(first, stream).unwrap();
    drop(pass);
    // Begun inside, and taken from after it.
    let mut left = None;
    Graph::capture(&[stream, &pulls], || {
        left = Some(published.forward(&mut own)?);
        Ok::<_, Error>(())
    })
    .unwrap();
    let error = left.take().unwrap().take(first, stream).map(drop).unwrap_err();
    assert!(matches!(error, Error::NotCapturable { .. }) && error.to_string().contains("a part of a pass"), "{error}");
    refused(
        Graph::capture(&[&pulls], || {
            let mut pass = published.forward(&mut own)?;
            pass.take(first, stream).map(drop)
        }),
        "a part of a pass",
    );
}

/// A graph that has a pass alone is replayed while shards are published, and not while they are written.
#[test]
fn a_pass_is_not_replayed_while_values_are_written() {
    let world = World::new(1, 0);
    let stream = &world.streams[0];
    let mut holder = holders::<Bf16>(&world, &weights()).remove(0);
    let mut own = captured_chain(&holder, stream, |config| config).unwrap();
    let pulls = own.pulls().clone();
    holder.publish(stream, 0).unwrap();
    let graph = Graph::capture(&[stream, &pulls], || {
        let published = Published::of(&holder.set)?;
        let mut pass = published.forward(&mut own)?;
        while let Some(id) = pass.next_weight() {
            pass.take(id, stream)?;
        }
        pass.finish()
    })
    .unwrap();
    graph.replay(stream).unwrap();
    let updating = holder.set.update(stream).unwrap();
    let error = graph.replay(stream).unwrap_err();
    assert!(matches!(error, Error::NotReady { .. }) && error.to_string().contains("replay it after Updating::publish"), "{error}");
    updating.publish().unwrap();
    graph.replay(stream).unwrap();
    stream.synchronize().unwrap();
}

/// Reads the weights of a pass of a chain of either kind.
fn pass_of<M: Mode>(
    published: &Published<'_, Bf16>,
    chain: &mut Chain<Bf16, M>,
    (stream, copy): (&Stream, &SumParts<bf16, bf16>),
    read: &mut [Buffer<bf16>],
) -> Result<(), Error> {
    let mut pass = published.forward(chain)?;
    while let Some(id) = pass.next_weight() {
        copy.round(stream, pass.take(id, stream)?.data.view(), read[id.index()].view_mut())?;
    }
    pass.finish()
}

/// A captured chain and an eager one in turn, in both orders, step after step: a weight of the eager one is pulled between two replays of the other.
#[test]
fn a_captured_chain_and_an_eager_one_in_both_orders() {
    for seed in 0..seeds() / 4 {
        let (world, weights) = (World::new(2, seed), weights());
        let mut holders = holders::<Bf16>(&world, &weights);
        let copy = SumParts::<bf16, bf16>::new(&world.runtime).unwrap();
        let mut sides = Vec::new();
        for (holder, stream) in holders.iter().zip(&world.streams) {
            let ids: Vec<_> = holder.set.weights().map(|(id, _)| id).collect();
            let of = |ids: &[WeightId]| ChainConfig::new(&holder.set, ids.to_vec()).unwrap();
            let read: Vec<_> = weights.iter().map(|weight| Buffer::<bf16>::zeros(stream, weight.rows * weight.columns).unwrap()).collect();
            let captured = Chain::captured(stream, &holder.set, &of(&[ids[0], ids[2]])).unwrap();
            sides.push((captured, Chain::new(stream, &holder.set, &of(&[ids[1]])).unwrap(), read));
        }
        let mut graphs: Vec<Option<Graph>> = vec![None, None];
        let mut found = Vec::new();
        for step in 0..4 {
            for (holder, stream) in holders.iter_mut().zip(&world.streams) {
                holder.publish(stream, step).unwrap();
            }
            for (((holder, stream), (captured, eager, read)), graph) in holders.iter().zip(&world.streams).zip(&mut sides).zip(&mut graphs)
            {
                let published = Published::of(&holder.set).unwrap();
                if graph.is_none() {
                    let pulls = captured.pulls().clone();
                    *graph = Some(Graph::capture(&[stream, &pulls], || pass_of(&published, captured, (stream, &copy), read)).unwrap());
                }
                for is_captured in if (seed + u64::from(step)) % 2 == 0 { [true, false] } else { [false, true] } {
                    match is_captured {
                        true => graph.as_ref().unwrap().replay(stream).unwrap(),
                        false => pass_of(&published, eager, (stream, &copy), read).unwrap(),
                    }
                }
                for (at, read) in read.iter().enumerate() {
                    let mut host = PinnedBuffer::<bf16>::zeros(stream, read.len() as usize).unwrap();
                    read.copy_to_pinned(stream, &mut host).unwrap();
                    found.push((step, at, host));
                }
            }
        }
        world.streams.iter().try_for_each(Stream::synchronize).unwrap();
        for (step, at, host) in found {
            let Weight { rows, columns, .. } = weights[at];
            let exact: Vec<_> =
                values(step, at, 0, [rows, columns]).into_iter().map(|value| half::bf16::from_f32(value).to_bits()).collect();
            let found: Vec<_> = host.as_slice().unwrap().iter().map(|value| value.to_bits()).collect();
            assert!(found == exact, "seed {seed}, step {step}, weight {at}");
        }
    }
}

/// Products on `wgmma`, which need maps of their operands, are bound to where whole weights are, once; a graph holds the pass alone, and steps between its replays are eager.
#[test]
fn a_captured_pass_multiplies_what_eager_steps_publish() {
    const TOKENS: u64 = 64;
    let weights = [Weight::new("first", [128, 64]), Weight::new("second", [64, 128]), Weight::new("third", [192, 64])];
    for seed in 0..seeds() / 8 {
        let world = World::new(2, seed);
        let mut holders = holders::<Bf16>(&world, &weights);
        let gemm = |weight: &Weight| {
            let config = GemmConfig { m: TOKENS, n: weight.rows, k: weight.columns, transpose_b: true, ..GemmConfig::default() };
            Gemm::<bf16, f32>::new(&world.runtime, config).unwrap()
        };
        let gemms: Vec<_> = weights.iter().map(gemm).collect();
        let tokens: Vec<half::bf16> = (0..TOKENS * 128).map(|at| half::bf16::from_f32((at % 7) as f32 - 3.0)).collect();
        let mut sides = Vec::new();
        for (holder, stream) in holders.iter().zip(&world.streams) {
            let made = captured_chain(holder, stream, |config| config).unwrap();
            let eager = chain(holder, stream, |config| config).unwrap();
            let input = Buffer::<bf16>::from_slice(stream, &tokens).unwrap();
            let outputs: Vec<_> = weights.iter().map(|weight| Buffer::<f32>::zeros(stream, TOKENS * weight.rows).unwrap()).collect();
            sides.push((made, eager, input, outputs));
        }
        let places: Vec<_> = sides.iter().map(|(chain, ..)| chain.places()).collect();
        let mut graphs: Vec<Option<Graph>> = vec![None, None];
        let mut bound = Vec::new();
        let mut chains = Vec::new();
        for (((made, eager, input, outputs), places), stream) in sides.iter_mut().zip(&places).zip(&world.streams) {
            let mut products = Vec::new();
            for (at, (gemm, output)) in gemms.iter().zip(outputs).enumerate() {
                let (weight, k) = (&places.forward(at).unwrap()[0], weights[at].columns);
                products.push(gemm.bind(stream, input.view().slice(0, TOKENS * k), weight.data.view(), None, output.view_mut()).unwrap());
            }
            bound.push(products);
            chains.push((made, eager));
        }
        for step in 0..4 {
            for (holder, stream) in holders.iter_mut().zip(&world.streams) {
                holder.publish(stream, step).unwrap();
            }
            let all = holders.iter().zip(&world.streams).zip(&mut graphs).zip(&mut bound).zip(&mut chains);
            for ((((holder, stream), graph), products), (chain, eager)) in all {
                if graph.is_none() {
                    let pulls = chain.pulls().clone();
                    let captured = Graph::capture(&[stream, &pulls], || {
                        let published = Published::of(&holder.set)?;
                        let mut pass = published.forward(chain)?;
                        for product in &mut *products {
                            let weight = pass.next_weight().expect("a product for each weight");
                            pass.take(weight, stream)?;
                            product.run(stream)?;
                        }
                        pass.finish()
                    });
                    *graph = Some(captured.unwrap());
                }
                graph.as_ref().unwrap().replay(stream).unwrap();
                // An eager pass between two replays.
                if step % 2 == 1 {
                    holder.pass(eager, stream, true).unwrap();
                }
            }
        }
        drop((graphs, bound));
        for ((.., outputs), stream) in sides.iter().zip(&world.streams) {
            for ((output, weight), at) in outputs.iter().zip(&weights).zip(0..) {
                let whole: Vec<f64> =
                    values(3, at, 0, [weight.rows, weight.columns]).iter().map(|value| half::bf16::from_f32(*value).to_f64()).collect();
                let found = output.to_vec(stream).unwrap();
                for (row, column) in [(0, 0), (7, weight.rows - 1), (TOKENS - 1, 33)] {
                    let k = weight.columns;
                    let exact: f64 = (0..k).map(|i| tokens[(row * k + i) as usize].to_f64() * whole[(column * k + i) as usize]).sum();
                    let found = f64::from(found[(row * weight.rows + column) as usize]);
                    assert!((found - exact).abs() <= 1e-3 * (1.0 + exact.abs()), "seed {seed}, weight {at}: {found}, not {exact}");
                }
            }
        }
    }
}

/// A weight that could not be lent is lent at the next try, and no other.
#[test]
fn a_take_that_failed_is_tried_again() {
    let world = World::new(1, 0);
    let stream = &world.streams[0];
    let mut holder = holders::<Bf16>(&world, &weights()).remove(0);
    holder.publish(stream, 0).unwrap();
    let mut made = chain(&holder, stream, |config| ChainConfig { distance: 0, ..config }).unwrap();
    let ids: Vec<_> = holder.set.weights().map(|(id, _)| id).collect();
    let published = Published::of(&holder.set).unwrap();
    let mut pass = published.forward(&mut made).unwrap();
    let other = stream.device().stream().unwrap();
    let failed = Graph::capture(&[&other], || pass.take(ids[0], &other).map(|_| ()));
    assert!(matches!(failed, Err(Error::NotCapturable { .. })), "{failed:?}");
    for (id, weight) in ids.iter().zip(&weights()) {
        let found = pass.take(*id, stream).unwrap().tensor().data.to_vec_as::<half::bf16>(stream).unwrap();
        let exact = values(0, id.index(), 0, [weight.rows, weight.columns]);
        assert!(found.iter().zip(&exact).all(|(found, exact)| *found == half::bf16::from_f32(*exact)), "{}", weight.name);
    }
    pass.finish().unwrap();
}

/// A take on a stream of another device fails after the next weight is pulled, when the own rows are to be copied.
#[test]
fn a_take_that_failed_half_way_is_tried_again() {
    let world = World::new(2, 0);
    let mut holders = holders::<Bf16>(&world, &weights());
    for (holder, stream) in holders.iter_mut().zip(&world.streams) {
        holder.publish(stream, 0).unwrap();
    }
    let (holder, stream) = (&holders[0], &world.streams[0]);
    let mut made = chain(holder, stream, |config| config).unwrap();
    let published = Published::of(&holder.set).unwrap();
    let mut pass = published.forward(&mut made).unwrap();
    let error = pass.take(pass.next_weight().unwrap(), &world.streams[1]).map(drop).unwrap_err();
    assert!(error.to_string().contains("device"), "{error}");
    while let Some(id) = pass.next_weight() {
        let found = pass.take(id, stream).unwrap().tensor().data.to_vec_as::<half::bf16>(stream).unwrap();
        let weight = &weights()[id.index()];
        let exact = values(0, id.index(), 0, [weight.rows, weight.columns]);
        assert!(found.iter().zip(&exact).all(|(found, exact)| *found == half::bf16::from_f32(*exact)), "{}", weight.name);
    }
    pass.finish().unwrap();
}
