//! Gradients that are summed where their rows are owned: the bits of a sum in the order of the ranks, in every world, order and graph.

use oxtile::comm::Team;
use oxtile::num::bf16;
use oxtile::sharded::{Bf16, Chain, GradientConfig, GradientScatter, Mode, Mxfp8, Nvfp4, Published, Weight};
use oxtile::sum_parts::SumParts;
use oxtile::{Buffer, Graph, Result, Stream};

use crate::gradient_ranks::{Calls, Case};
use crate::sharded::holders;
use crate::sharded_calls::{Wide, captured_chain, chain, weights};
use crate::support::{World, is_long, seeds};

#[test]
fn every_world_and_element() {
    for ranks in 1..=5 {
        let case = |calls| Case::new(ranks, calls);
        case(Calls::Eager).run::<f32, Bf16>().unwrap();
        case(Calls::Captured).run::<bf16, Bf16>().unwrap();
        // Shards of whole blocks: ranks without rows.
        case(Calls::Mixed).run::<bf16, Mxfp8>().unwrap();
        if is_long() {
            for calls in [Calls::Eager, Calls::Captured, Calls::Mixed] {
                case(calls).run::<f32, Mxfp8>().unwrap();
                case(calls).run::<bf16, Bf16>().unwrap();
            }
        }
    }
}

/// Steps that replace the main gradients leave nothing of those before, eager and in graphs.
#[test]
fn a_step_may_replace_what_was_there() {
    for ranks in 1..=3 {
        for calls in [Calls::Eager, Calls::Captured, Calls::Mixed] {
            Case { replaces: true, ..Case::new(ranks, calls) }.run::<bf16, Bf16>().unwrap();
        }
    }
}

#[test]
fn one_weight_and_formats_that_pad() {
    for calls in [Calls::Eager, Calls::Captured, Calls::Mixed] {
        let weights = vec![Weight::new("only", [40, 16]).experts(2)];
        Case { weights, ..Case::new(3, calls) }.run::<bf16, Nvfp4>().unwrap();
    }
}

/// Several steps follow each other with no wait of the host, in graphs from the first call on.
#[test]
fn a_graph_of_the_first_step_is_replayed() {
    for ranks in [2, 3] {
        Case { steps: 8, ..Case::new(ranks, Calls::Captured) }.run::<bf16, Bf16>().unwrap();
    }
}

#[test]
fn the_right_program_is_silent_under_many_seeds() {
    let weights = vec![Weight::new("first", [3, 5]), Weight::new("second", [2, 8]).experts(2), Weight::new("third", [1, 4])];
    for seed in 0..seeds() {
        let calls = [Calls::Eager, Calls::Captured, Calls::Mixed][seed as usize % 3];
        for ranks in [2, 3] {
            let case = Case { weights: weights.clone(), ..Case::new(ranks, calls) }.seeded(seed);
            case.run::<bf16, Bf16>().unwrap_or_else(|error| panic!("{case:?}: {error}"));
        }
    }
}

/// The rank that comes first changes no bit: all are those of the sum on the host.
#[test]
fn the_order_of_arrival_changes_nothing() {
    for first in 0..4 {
        Case { first, ..Case::new(4, Calls::Eager) }.run::<f32, Bf16>().unwrap();
    }
}

/// What a rank has of a format.
struct Passes<F: Wide> {
    back: F::Back,
    round: SumParts<bf16, bf16>,
    gradients: GradientScatter<bf16>,
    read: Vec<Buffer<bf16>>,
}

impl<F: Wide> Passes<F> {
    /// A forward and a backward pass with all gradients.
    fn run<M: Mode>(&mut self, published: &Published<'_, F>, chain: &mut Chain<F, M>, stream: &Stream) -> Result<()> {
        let Self { back, round, gradients, read } = self;
        let mut pass = published.forward(chain)?;
        while let Some(id) = pass.next_weight() {
            F::read(back, stream, pass.take(id, stream)?.tensor(), &mut read[id.index()])?;
        }
        pass.finish()?;
        let mut pass = published.backward(chain)?;
        while let Some(id) = pass.next_weight() {
            round.round(stream, read[id.index()].view(), gradients.buffer(id, stream)?)?;
            gradients.scatter(id, stream, |_| Ok(()))?;
            F::read(back, stream, pass.take(id, stream)?.tensor(), &mut read[id.index()])?;
        }
        pass.finish()?;
        gradients.finish(stream, |_| Ok(()))
    }
}

/// The bits of all main gradients, and of what the last backward pass read, after eight steps. Values are published eagerly, and another chain is eager too, before or after the passes by
/// turns; the passes with their gradients are enqueued anew in each step, or are one graph.
fn bits_after_steps<F: Wide>(ranks: u32, seed: u64, is_captured: bool) -> Vec<Vec<u32>> {
    let (world, weights) = (World::new(ranks, seed), weights());
    let mut holders = holders::<F>(&world, &weights);
    let mut sides = Vec::new();
    for (holder, stream) in holders.iter().zip(&world.streams) {
        let member = Team::all(world.size()).member(holder.arena.rank()).unwrap();
        let gradients = GradientScatter::<bf16>::new::<F>(stream, &holder.arena, &member, &weights, GradientConfig::default()).unwrap();
        let padded = |weight: &Weight| weight.shards::<F>(world.size()).padded_rows() * weight.columns;
        let read = weights.iter().map(|weight| Buffer::<bf16>::zeros(stream, padded(weight)).unwrap()).collect();
        let passes = Passes::<F> { back: F::back(&world), round: SumParts::new(&world.runtime).unwrap(), gradients, read };
        let eager = || chain(holder, stream, |config| config).unwrap();
        sides.push((captured_chain(holder, stream, |config| config).unwrap(), [eager(), eager()], passes, None::<Graph>));
    }
    sides.iter().for_each(|(_, _, passes, _)| passes.gradients.open().unwrap());
    for step in 0..8 {
        for (holder, stream) in holders.iter_mut().zip(&world.streams) {
            holder.publish(stream, step).unwrap();
        }
        for ((holder, stream), (captured, [eager, other], passes, graph)) in holders.iter().zip(&world.streams).zip(&mut sides) {
            let published = Published::of(&holder.set).unwrap();
            let pull = |chain: &mut Chain<F>| {
                let mut pass = published.forward(chain)?;
                while let Some(id) = pass.next_weight() {
                    pass.take(id, stream)?;
                }
                pass.finish()
            };
            if step % 2 == 0 {
                pull(other).unwrap();
            }
            if is_captured {
                let (pulls, [send, sum]) = (captured.pulls().clone(), passes.gradients.streams().map(Clone::clone));
                let mut capture = || Graph::capture(&[stream, &pulls, &send, &sum], || passes.run(&published, captured, stream));
                graph.get_or_insert_with(|| capture().unwrap()).replay(stream).unwrap();
            } else {
                passes.run(&published, eager, stream).unwrap();
            }
            if step % 2 == 1 {
                pull(other).unwrap();
            }
        }
    }
    world.streams.iter().try_for_each(Stream::synchronize).unwrap();
    let mut found = Vec::new();
    for (stream, (_, _, Passes { gradients, read, .. }, _)) in world.streams.iter().zip(&sides) {
        for id in gradients.ids() {
            let sums = gradients.main_grad(id).unwrap().to_vec(stream).unwrap();
            found.push(sums.iter().map(|sum| sum.to_bits()).collect());
        }
        for read in read {
            let values = read.to_vec_as::<half::bf16>(stream).unwrap();
            found.push(values.iter().map(|value| value.to_bits().into()).collect());
        }
    }
    found
}

/// Forward and backward pass with all gradients as one graph, which ends when all sums are done: eight replays, between which weights are published and pulled eagerly.
#[test]
fn captured_passes_and_gradients_have_the_bits_of_eager_ones() {
    for ranks in 1..=3 {
        let eager = bits_after_steps::<Bf16>(ranks, 1, false);
        assert_eq!(bits_after_steps::<Bf16>(ranks, 2, true), eager, "{ranks} ranks");
        assert!(eager.iter().filter(|bits| !bits.is_empty()).all(|bits| bits.iter().any(|bits| *bits != 0)), "{ranks} ranks");
    }
    assert_eq!(bits_after_steps::<Mxfp8>(2, 3, true), bits_after_steps::<Mxfp8>(2, 4, false));
}
