//! Gradients without an arena: the messages of a communicator carry the rows, and the sums have the bits of those by an arena.

use std::sync::Arc;

use oxtile::comm::{Communicator, EmulatedCommunicator, Team, WorldSize};
use oxtile::num::bf16;
use oxtile::sharded::{Bf16, GradientCarrier, GradientConfig, GradientScatter, Mxfp8, Weight, WeightFormat};
use oxtile::sum_parts::Summand;
use oxtile::{Error, Graph, Result, Stream};

use crate::gradient_ranks::{Calls, Case, Element, Side, expected};
use crate::support::{World, is_long, seeds};

const THIRD: GradientConfig = GradientConfig { scale: 1.0 / 3.0, arena_bytes: None };

/// A communicator of its own for the gradients of each rank.
fn communicators(world: &World) -> Vec<Arc<EmulatedCommunicator>> {
    let all = Team::all(world.size());
    world.ranks.iter().map(|rank| Arc::new(rank.team(&all).unwrap().expect("all are members"))).collect()
}

fn sides<E: Element, F: WeightFormat>(world: &World, weights: &[Weight]) -> Vec<Side<E>>
where
    f32: Summand<E>,
{
    let of = |(comm, stream): (&Arc<EmulatedCommunicator>, &Stream)| {
        Side::of(stream, weights, GradientScatter::<E>::by_messages::<F, _>(stream, comm, weights, THIRD)?)
    };
    communicators(world).iter().zip(&world.streams).map(of).collect::<Result<_>>().unwrap()
}

/// A program of every rank, whose main gradients are compared.
fn run<E: Element, F: WeightFormat>(case: &Case)
where
    f32: Summand<E>,
{
    let world = World::new(case.ranks, case.seed);
    let mut sides = sides::<E, F>(&world, &case.weights);
    let mut graphs = Vec::new();
    for side in sides.iter().filter(|_| case.calls != Calls::Eager) {
        let [send, sum] = side.gradients.streams();
        graphs.push(Graph::capture(&[&side.compute, send, sum], || side.step().map(drop)).unwrap());
    }
    for step in 0..case.steps {
        for (rank, side) in sides.iter_mut().enumerate() {
            side.upload(&case.weights, rank as u32, step).unwrap();
            if case.calls == Calls::Captured || (case.calls == Calls::Mixed && step % 2 == 0) {
                graphs[rank].replay(&side.compute).unwrap();
            } else {
                side.step().unwrap();
            }
        }
    }
    for (rank, side) in sides.iter().enumerate() {
        for (number, found) in side.main().unwrap().into_iter().enumerate() {
            let right = expected::<E, F>(case, number, rank as u32, THIRD.scale);
            assert!(found == right, "{case:?}, rank {rank}, `{}`", case.weights[number].name);
        }
    }
}

#[test]
fn sums_have_the_bits_of_the_order_of_ranks() {
    for ranks in 1..=if is_long() { 5 } else { 4 } {
        run::<f32, Bf16>(&Case::new(ranks, Calls::Eager));
        run::<bf16, Mxfp8>(&Case::new(ranks, Calls::Captured));
        run::<bf16, Bf16>(&Case::new(ranks, Calls::Mixed));
    }
}

#[test]
fn messages_are_silent_under_many_seeds() {
    // Of these the second is packed, and the others are sent from where they are computed.
    let weights = vec![Weight::new("first", [4, 8]), Weight::new("second", [2, 8]).experts(2), Weight::new("third", [5, 16])];
    for seed in 0..seeds() / 2 {
        let calls = [Calls::Eager, Calls::Captured, Calls::Mixed][seed as usize % 3];
        run::<bf16, Bf16>(&Case { weights: weights.clone(), seed, ..Case::new(3, calls) });
    }
}

/// Ranks that scatter in other orders meet in calls of other lengths, which the communicator names.
#[test]
fn another_order_is_an_error() {
    let weights = vec![Weight::new("long", [64, 16]), Weight::new("short", [2, 8])];
    let world = World::new(2, 1);
    let mut sides = sides::<bf16, Bf16>(&world, &weights);
    let mut outcome = Ok(());
    for (rank, (side, order)) in sides.iter_mut().zip([[0, 1], [1, 0]]).enumerate() {
        side.upload(&weights, rank as u32, 0).unwrap();
        let ids: Vec<_> = side.gradients.ids().collect();
        outcome = outcome
            .and_then(|()| order.into_iter().try_for_each(|number: usize| side.scatter(ids[number], |_| Ok(()))))
            .and_then(|()| side.gradients.finish(&side.compute, |_| Ok(())));
    }
    let outcome = outcome.and_then(|()| sides.iter().try_for_each(|side| side.compute.synchronize()));
    let error = outcome.unwrap_err();
    assert!(matches!(error, Error::Mismatch { .. }) && error.to_string().contains("all_to_all"), "{error}");
}

/// Weights of one shape meet in calls that are alike: the order of the first step is told to all ranks, and compared in a later call. No call waits for it.
#[test]
fn another_order_of_weights_of_one_shape_is_an_error() {
    for (orders, is_wrong) in [([[0, 1], [1, 0]], true), ([[1, 0], [1, 0]], false)] {
        let weights = vec![Weight::new("up", [4, 8]), Weight::new("down", [4, 8])];
        let world = World::new(2, 1);
        let mut sides = sides::<bf16, Bf16>(&world, &weights);
        let mut outcome = Ok(());
        for step in 0..2 {
            for (rank, (side, order)) in sides.iter_mut().zip(orders).enumerate() {
                side.upload(&weights, rank as u32, step).unwrap();
                let ids: Vec<_> = side.gradients.ids().collect();
                let before = side.compute.device().usage();
                let scattered = order.into_iter().try_for_each(|number: usize| side.scatter(ids[number], |_| Ok(())));
                outcome = outcome.and(scattered).and_then(|()| side.gradients.finish(&side.compute, |_| Ok(())));
                assert_eq!(side.compute.device().usage(), before, "step {step} allocates, or the host waits");
            }
            if step == 0 {
                outcome = outcome.and_then(|()| world.streams.iter().try_for_each(Stream::synchronize));
                assert!(outcome.is_ok(), "the calls of the first step are alike: {outcome:?}");
                sides.iter().try_for_each(|side| side.gradients.streams()[0].synchronize()).unwrap();
            }
        }
        let said = outcome.map_or_else(|error| error.to_string(), |()| String::new());
        assert_eq!(
            said.contains("scattered in the order up, down") && said.contains("scattered in the order down, up"),
            is_wrong,
            "{said}"
        );
    }
}

/// Gradients of two communicators, of all ranks and of pairs, on each rank: neither waits for the other, in whichever order ranks call them.
#[test]
fn two_communicators_at_once() {
    for seed in 0..seeds() / 4 {
        let world = World::new(4, seed);
        let (dense, experts) = (vec![Weight::new("dense", [7, 8])], vec![Weight::new("experts", [6, 4]).experts(2)]);
        let all = communicators(&world);
        let pair = |rank: u32| Team::strided(world.size(), world.rank(rank / 2 * 2), 1, WorldSize::new(2).unwrap()).unwrap();
        let mut both = Vec::new();
        for ((rank, stream), all) in (0..4).zip(&world.streams).zip(&all) {
            let of_pair = Arc::new(world.ranks[rank as usize].team(&pair(rank)).unwrap().expect("a member"));
            let one =
                Side::<f32>::of(stream, &dense, GradientScatter::by_messages::<Bf16, _>(stream, all, &dense, THIRD).unwrap()).unwrap();
            let other = &stream.device().stream().unwrap();
            let gradients = GradientScatter::by_messages::<Bf16, _>(other, &of_pair, &experts, THIRD).unwrap();
            both.push((one, Side::<f32>::of(other, &experts, gradients).unwrap(), of_pair.rank().index()));
        }
        for (rank, (one, two, in_pair)) in (0..).zip(&mut both) {
            one.upload(&dense, rank, 0).unwrap();
            two.upload(&experts, *in_pair, 0).unwrap();
            // Each rank in an order of its own.
            let steps: [&dyn Fn(); 2] = [&|| _ = one.step().unwrap(), &|| _ = two.step().unwrap()];
            let first = (rank as usize + seed as usize) % 2;
            [first, 1 - first].into_iter().for_each(|side| steps[side]());
        }
        let case = |ranks, weights: &Vec<Weight>| Case { weights: weights.clone(), steps: 1, ..Case::new(ranks, Calls::Eager) };
        for (rank, (one, two, in_pair)) in (0..).zip(&both) {
            assert!(one.main().unwrap()[0] == expected::<f32, Bf16>(&case(4, &dense), 0, rank, THIRD.scale), "seed {seed}, rank {rank}");
            assert!(
                two.main().unwrap()[0] == expected::<f32, Bf16>(&case(2, &experts), 0, *in_pair, THIRD.scale),
                "seed {seed}, rank {rank}"
            );
        }
    }
}

#[test]
fn what_is_for_an_arena_is_refused() {
    let world = World::new(2, 0);
    let comm = &communicators(&world)[0];
    let made = |config| {
        let weights = [Weight::new("w", [4, 8])];
        GradientScatter::<f32>::by_messages::<Bf16, _>(&world.streams[0], comm, &weights, config).unwrap_err().to_string()
    };
    assert!(made(GradientConfig { arena_bytes: Some(64), ..THIRD }).contains("leave it out, messages take what their weights need"));
    assert!(made(GradientConfig { scale: f32::INFINITY, ..THIRD }).contains("GradientScatter::by_messages: the scale is inf"));
    // Two slots of two parts of 32 elements, as the first rank has all rows; nothing is packed. And the orders of both, and the own one.
    let weights = [Weight::new("w", [4, 8])];
    let gradients = GradientScatter::<f32>::by_messages::<Mxfp8, _>(&world.streams[0], comm, &weights, THIRD).unwrap();
    assert_eq!((gradients.bytes().slots, gradients.carrier()), (2 * 2 * 32 * 4 + 3 * 4, GradientCarrier::Messages));
}
