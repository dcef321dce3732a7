//! Calls of gradients: their order, hooks, teams, ranks that differ or do not come, and what is refused.

use std::cell::Cell;
use std::time::{Duration, Instant};

use oxtile::comm::{Team, WorldSize};
use oxtile::num::{Float, bf16};
use oxtile::sharded::{Bf16, GradientCarrier, GradientConfig, GradientScatter, Mxfp8, Weight, WeightId};
use oxtile::symmetric::{ArenaOptions, SymmetricError};
use oxtile::{Buffer, Error, Graph, PinnedBuffer, Result};

use crate::arenas::{Arenas, symmetric};
use crate::gradient_ranks::{Calls, Case, Side, expected, gradient, member, options, weights};

const MEAN: GradientConfig = GradientConfig { scale: 0.5, arena_bytes: None };

/// Ranks with gradients of these weights.
fn sides(all: &Arenas, weights: &[Weight]) -> Result<Vec<Side<bf16>>> {
    let ranks = 0..all.arenas.len();
    ranks.map(|rank| Side::new::<Bf16>(all, rank, &member(all, rank), weights, MEAN)).collect()
}

fn two_weights() -> Vec<Weight> {
    vec![Weight::new("fc1", [4, 8]), Weight::new("fc2", [3, 8])]
}

/// A hook's work on another stream finds the sum of its step, and `finish` completes a stream that has no other part.
#[test]
fn hooks_and_finish_come_after_the_sums() -> Result<()> {
    let case = Case { weights: two_weights(), steps: 2, ..Case::new(2, Calls::Eager) };
    let all = Arenas::with(2, 1, options());
    let mut sides = sides(&all, &case.weights)?;
    // Of each rank and weight what was found after each step.
    let mut found: [[Vec<Buffer<f32>>; 2]; 2] = Default::default();
    for step in 0..case.steps {
        for (rank, side) in sides.iter_mut().enumerate() {
            side.upload(&case.weights, rank as u32, step)?;
        }
        sides.iter().try_for_each(|side| side.gradients.open())?;
        for (rank, side) in sides.iter().enumerate() {
            let [reader, after] = [side.compute.device().stream()?, side.compute.device().stream()?];
            let mut hook = |id: WeightId| {
                let main = side.gradients.main_grad(id)?;
                let mut kept = Buffer::named(&reader, "kept", main.len())?;
                kept.copy_from(&reader, main)?;
                found[rank][id.index()].push(kept);
                Ok(())
            };
            for id in side.gradients.ids() {
                side.scatter(id, &mut hook)?;
            }
            side.gradients.finish(&after, &mut hook)?;
            if step == 1 {
                let id = side.gradients.ids().next().expect("two weights");
                let mut kept = Buffer::named(&after, "kept", side.gradients.main_grad(id)?.len())?;
                kept.copy_from(&after, side.gradients.main_grad(id)?)?;
                found[rank][0].push(kept);
            }
        }
    }
    for (rank, side) in sides.iter().enumerate() {
        all.arenas[rank].ticket(&side.compute)?.wait()?;
        for (number, kept) in found[rank].iter().enumerate() {
            for (at, kept) in kept.iter().enumerate() {
                let case = Case { steps: case.steps.min(at as u64 + 1), ..case.clone() };
                let bits: Vec<_> = kept.to_vec(&side.compute)?.into_iter().map(f32::to_bits).collect();
                assert!(bits == expected::<bf16, Bf16>(&case, number, rank as u32, 0.5), "rank {rank}, weight {number}, step {at}");
            }
        }
    }
    Ok(())
}

/// Steps of any of the weights, in any order that is the same on all ranks, and gradients that begin again at zero: filled with it, or replaced by the step.
#[test]
fn any_weights_in_any_order() -> Result<()> {
    let case = Case { weights: weights(), steps: 1, ..Case::new(3, Calls::Eager) };
    let all = Arenas::with(3, 1, options());
    let mut sides = sides(&all, &case.weights)?;
    sides.iter().try_for_each(|side| side.gradients.open())?;
    let orders: [&[usize]; 6] = [&[0, 2, 4], &[4, 1, 3, 2, 0], &[3], &[], &[1, 3, 0, 2], &[2, 4, 0, 1, 3]];
    for (step, order) in orders.into_iter().enumerate() {
        for (rank, side) in sides.iter_mut().enumerate() {
            if step % 2 == 0 {
                side.gradients.replace_grads(&side.compute)?;
            } else {
                side.gradients.zero_grads(&side.compute)?;
            }
            side.upload(&case.weights, rank as u32, 0)?;
            let ids: Vec<_> = side.gradients.ids().collect();
            let mut told = Vec::new();
            let mut hook = |id: WeightId| {
                told.push(id.index());
                Ok(())
            };
            order.iter().try_for_each(|number| side.scatter(ids[*number], &mut hook))?;
            side.gradients.finish(&side.compute, &mut hook)?;
            assert_eq!(told, order);
        }
        for (rank, side) in sides.iter().enumerate() {
            all.arenas[rank].ticket(&side.compute)?.wait()?;
            for (number, found) in side.main()?.into_iter().enumerate() {
                let is_in = order.contains(&number);
                let right = if is_in { expected::<bf16, Bf16>(&case, number, rank as u32, 0.5) } else { vec![0; found.len()] };
                assert!(found == right, "step {step}, rank {rank}, weight {number}");
            }
        }
    }
    Ok(())
}

/// A rank computes on while another has not come: after its second product nothing waits for the other rank but the sum of the first weight, whose buffer the third product takes.
#[test]
fn a_rank_may_be_ahead() -> Result<()> {
    let weights = ["fc1", "fc2", "fc3", "fc4"].map(|name| Weight::new(name, [4, 8])).to_vec();
    let case = Case { weights, steps: 1, ..Case::new(2, Calls::Eager) };
    let all = Arenas::with(2, 1, options());
    let mut sides = sides(&all, &case.weights)?;
    sides.iter().try_for_each(|side| side.gradients.open())?;
    for (rank, side) in sides.iter_mut().enumerate() {
        side.upload(&case.weights, rank as u32, 0)?;
        let ids: Vec<_> = side.gradients.ids().collect();
        ids[..2].iter().try_for_each(|id| side.scatter(*id, |_| Ok(())))?;
        // The second rank has not been called yet.
        side.compute.synchronize()?;
        ids[2..].iter().try_for_each(|id| side.scatter(*id, |_| Ok(())))?;
        side.gradients.finish(&side.compute, |_| Ok(()))?;
    }
    for (rank, side) in sides.iter().enumerate() {
        all.arenas[rank].ticket(&side.compute)?.wait()?;
        for (number, found) in side.main()?.into_iter().enumerate() {
            assert!(found == expected::<bf16, Bf16>(&case, number, rank as u32, 0.5), "rank {rank}, weight {number}");
        }
    }
    Ok(())
}

/// Work that the runtime knows nothing of, as another library's, writes a buffer after `buffer` and before `scatter` on the stream that both were given.
#[test]
fn another_library_computes() -> Result<()> {
    let weights = ["fc1", "fc2", "fc3"].map(|name| Weight::new(name, [4, 8])).to_vec();
    let case = Case { weights, steps: 3, ..Case::new(2, Calls::Eager) };
    for seed in 0..8 {
        let all = Arenas::with(2, seed, options());
        let sides = sides(&all, &case.weights)?;
        sides.iter().try_for_each(|side| side.gradients.open())?;
        let mut kept = Vec::new();
        for (step, (rank, side)) in (0..case.steps).flat_map(|step| sides.iter().enumerate().map(move |side| (step, side))) {
            for (number, id) in side.gradients.ids().enumerate() {
                let whole = side.gradients.buffer(id, &side.compute)?;
                // SAFETY: emulated memory of the buffer, which is looked up at each use.
                let mut raw = unsafe { Buffer::<bf16>::borrow_raw(&side.compute.device(), whole.access("whole").address, whole.len()) }?;
                let values: Vec<_> =
                    gradient::<bf16>(&case.weights[number], number, rank as u32, step).into_iter().map(bf16::from_f32).collect();
                raw.copy_from_pinned(&side.compute, &PinnedBuffer::from_slice(&side.compute, &values)?)?;
                side.gradients.scatter(id, &side.compute, |_| Ok(()))?;
                kept.push(raw);
            }
            side.gradients.finish(&side.compute, |_| Ok(()))?;
        }
        for (rank, side) in sides.iter().enumerate() {
            all.arenas[rank].ticket(&side.compute)?.wait()?;
            for (number, found) in side.main()?.into_iter().enumerate() {
                assert!(found == expected::<bf16, Bf16>(&case, number, rank as u32, 0.5), "seed {seed}, rank {rank}, weight {number}");
            }
        }
    }
    Ok(())
}

/// Two teams of one world, with weights of their own: ranks 0 and 2, and 3 and 1 in this order. Rank 4 is alone.
#[test]
fn teams_side_by_side() -> Result<()> {
    let all = Arenas::with(5, 1, options());
    let members: [&[u32]; 3] = [&[0, 2], &[3, 1], &[4]];
    let team = |of: &[u32]| Team::new(all.world.size(), &of.iter().map(|index| all.world.rank(*index)).collect::<Vec<_>>());
    let teams = members.into_iter().map(team).collect::<Result<Vec<_>>>()?;
    let cases: Vec<_> = [(2, weights()), (2, two_weights()), (1, two_weights())]
        .into_iter()
        .map(|(ranks, weights)| Case { weights, steps: 2, ..Case::new(ranks, Calls::Eager) })
        .collect();
    let bytes = teams.iter().zip(&cases).map(|(team, case)| GradientScatter::<bf16>::arena_bytes::<Mxfp8>(team, &case.weights).unwrap());
    let config = GradientConfig { scale: 0.5, arena_bytes: bytes.max() };
    let mut sides = Vec::new();
    for (rank, arena) in all.arenas.iter().enumerate() {
        let (number, member) = teams.iter().enumerate().find_map(|(i, team)| Some((i, team.member(arena.rank())?))).expect("all are");
        sides.push((
            number,
            member.rank().index(),
            Side::<bf16>::new::<Mxfp8>(&all, rank, &member, &cases[number].weights, config.clone())?,
        ));
    }
    for step in 0..2 {
        for (number, rank, side) in &mut sides {
            side.upload(&cases[*number].weights, *rank, step)?;
            side.step()?;
        }
    }
    for (at, (number, rank, side)) in sides.iter().enumerate() {
        all.arenas[at].ticket(&side.compute)?.wait()?;
        for (weight, found) in side.main()?.into_iter().enumerate() {
            assert!(found == expected::<bf16, Mxfp8>(&cases[*number], weight, *rank, 0.5), "rank {at}, weight {weight}");
        }
    }
    drop(sides);
    all.close();
    Ok(())
}

/// A rank that does not scatter is named within the deadline, with what does not come; the others learn of it. Of several ranks, those whose flags say nothing any more are named too.
#[test]
fn a_rank_that_does_not_come_is_named() -> Result<()> {
    const DEADLINE: Duration = Duration::from_millis(300);
    for ranks in [2, 3] {
        let all = Arenas::with(ranks, 1, ArenaOptions { deadline: DEADLINE, ..options() });
        let mut sides = sides(&all, &two_weights())?;
        sides.iter().try_for_each(|side| side.gradients.open())?;
        for rank in (0..ranks).filter(|rank| *rank != 1) {
            sides[rank as usize].upload(&two_weights(), rank, 0)?;
            sides[rank as usize].step()?;
        }
        let (ticket, start) = (all.arenas[0].ticket(&sides[0].compute)?, Instant::now());
        let error = symmetric(ticket.wait());
        // The deadline, and as long again for a flag that a kernel might wait for.
        assert!(start.elapsed() < 2 * DEADLINE + Duration::from_secs(1), "{:?}", start.elapsed());
        let SymmetricError::Deadline { missing, flag, is_guess, .. } = &error else { panic!("{error}") };
        assert!(missing.contains(&all.world.rank(1)), "{error}");
        if ranks == 2 {
            assert!(missing.len() == 1 && !is_guess, "{error}");
            assert!(flag.as_ref().is_some_and(|flag| flag.operation == "rows of a gradient"), "{error}");
        }
        let last = ranks as usize - 1;
        assert!(all.arenas[last].check().is_err());
        assert!(sides[0].step().is_err(), "an arena that has ended takes no step");
    }
    Ok(())
}

/// A rank that gives up ends the step of the others, with its reason.
#[test]
fn a_rank_that_gives_up_is_named() -> Result<()> {
    let all = Arenas::with(2, 1, options());
    let mut sides = sides(&all, &two_weights())?;
    sides.iter().try_for_each(|side| side.gradients.open())?;
    sides[0].upload(&two_weights(), 0, 0)?;
    sides[0].step()?;
    all.arenas[1].abort("its loss is NaN")?;
    let error = symmetric(all.arenas[0].ticket(&sides[0].compute).and_then(oxtile::symmetric::Ticket::wait));
    assert!(matches!(&error, SymmetricError::Aborted { rank, why } if rank.index() == 1 && why.contains("its loss is NaN")), "{error}");
    Ok(())
}

#[test]
fn what_ranks_make_is_compared() -> Result<()> {
    let others: [(Vec<Weight>, GradientConfig); 5] = [
        (two_weights().into_iter().rev().collect(), MEAN),
        (vec![Weight::new("fc1", [4, 8]), Weight::new("fc2", [2, 12])], MEAN),
        (vec![Weight::new("fc1", [4, 8]), Weight::new("fc3", [3, 8])], MEAN),
        (vec![Weight::new("fc1", [4, 8])], MEAN),
        (two_weights(), GradientConfig { scale: 1.0, ..MEAN }),
    ];
    for (weights, config) in others {
        let all = Arenas::with(2, 1, options());
        let first = Side::<bf16>::new::<Bf16>(&all, 0, &member(&all, 0), &two_weights(), MEAN)?;
        let _second = Side::<bf16>::new::<Bf16>(&all, 1, &member(&all, 1), &weights, config)?;
        let error = first.gradients.open().unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }) && error.to_string().contains("fc1 [1, 4, 8]"), "{error}");
    }
    Ok(())
}

/// Ranks that scatter in other orders learn of it from their tickets.
#[test]
fn orders_of_steps_are_compared() -> Result<()> {
    let all = Arenas::with(2, 1, ArenaOptions { compare_calls: true, deadline: Duration::from_secs(2), ..options() });
    let weights = vec![Weight::new("fc1", [4, 8]), Weight::new("fc2", [3, 8]), Weight::new("fc3", [4, 8])];
    let mut sides = sides(&all, &weights)?;
    sides.iter().try_for_each(|side| side.gradients.open())?;
    for (rank, (side, order)) in sides.iter_mut().zip([[0, 1, 2], [2, 1, 0]]).enumerate() {
        side.upload(&weights, rank as u32, 0)?;
        let ids: Vec<_> = side.gradients.ids().collect();
        order.into_iter().try_for_each(|number: usize| side.scatter(ids[number], |_| Ok(())))?;
        side.gradients.finish(&side.compute, |_| Ok(()))?;
    }
    let error = all.arenas[0].ticket(&sides[0].compute)?.wait().unwrap_err();
    assert!(matches!(error, Error::Mismatch { .. }) && error.to_string().contains("in the order fc3, fc2, fc1"), "{error}");
    Ok(())
}

/// A main gradient that was replaced by one of another length: the other ranks would wait for its parts to be added, or lose some.
#[test]
fn a_main_gradient_of_another_length_is_refused() -> Result<()> {
    let all = Arenas::with(2, 1, options());
    let mut sides = sides(&all, &two_weights())?;
    sides.iter().try_for_each(|side| side.gradients.open())?;
    let (stream, side) = (all.stream(0), &mut sides[0]);
    let id = side.gradients.ids().next().expect("two weights");
    let len = side.gradients.main_grad(id)?.len();
    for wrong in [0, len / 2] {
        *side.gradients.main_grad_mut(id)? = Buffer::zeros(stream, wrong)?;
        let error = side.gradients.buffer(id, stream).map(drop).unwrap_err().to_string();
        assert!(error.contains("another buffer was assigned to what main_grad_mut lends"), "{error}");
    }
    *side.gradients.main_grad_mut(id)? = Buffer::zeros(stream, len)?;
    side.gradients.buffer(id, stream).map(drop)
}

#[test]
fn what_cannot_be_is_refused_with_its_mend() -> Result<()> {
    let all = Arenas::with(2, 1, options());
    let refused =
        |weights: &[Weight], config| Side::<bf16>::new::<Bf16>(&all, 0, &member(&all, 0), weights, config).err().unwrap().to_string();
    let scale = refused(&two_weights(), GradientConfig { scale: f32::NAN, ..MEAN });
    assert_eq!(scale, "GradientScatter::new: the scale is NaN: take 1 for the sum, GradientConfig::mean for the mean");
    let small = refused(&two_weights(), GradientConfig { arena_bytes: Some(60), ..MEAN });
    assert_eq!(small, "GradientConfig: slots of 30 bytes for parts of 32: take the most of all teams (GradientScatter::arena_bytes)");
    assert!(refused(&[Weight::new("none", [8, 0])], MEAN).contains("`none` has no elements"));
    let other = Team::all(WorldSize::new(3).unwrap()).member(all.arenas[0].rank()).unwrap();
    let error = GradientScatter::<bf16>::new::<Bf16>(all.stream(0), &all.arenas[0], &other, &two_weights(), MEAN).unwrap_err();
    assert!(error.to_string().contains("in an arena of"), "{error}");

    let all = Arenas::with(2, 1, options());
    let mut sides = sides(&all, &two_weights())?;
    sides.iter().try_for_each(|side| side.gradients.open())?;
    for (rank, side) in sides.iter_mut().enumerate() {
        side.upload(&two_weights(), rank as u32, 0)?;
    }
    let three = [Weight::new("a", [1, 1]), Weight::new("b", [1, 1]), Weight::new("c", [1, 1])];
    let alone = Arenas::with(1, 1, options());
    let foreign = Side::<bf16>::new::<Bf16>(&alone, 0, &member(&alone, 0), &three, MEAN)?.gradients.ids().next_back().expect("three");
    // What is refused leaves the ranks in step: they go on.
    for (rank, side) in sides.iter().enumerate() {
        let (gradients, compute) = (&side.gradients, &side.compute);
        let [fc1, fc2] = [0, 1].map(|number| gradients.ids().nth(number).expect("two weights"));
        let refused = |result: Result<()>, why: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        let none = |_| Ok(());
        refused(gradients.main_grad(foreign).map(drop), "there is no weight 2 among 2: it is of another list of weights");
        refused(gradients.scatter(fc1, compute, none), "GradientScatter::scatter: no buffer of `fc1` was asked for");
        let whole = gradients.buffer(fc1, compute)?;
        refused(gradients.buffer(fc1, compute).map(drop), "the buffer of `fc1` was asked for twice");
        refused(gradients.buffer(fc2, compute).map(drop), "the buffer of `fc1` is still out");
        refused(gradients.scatter(fc2, compute, none), "is that of `fc1`, and not that of `fc2`");
        refused(gradients.finish(compute, none), "the buffer of `fc1` is still out");
        refused(gradients.zero_grads(compute), "a step is under way");
        refused(gradients.replace_grads(compute), "a step is under way, which has sums already: finish it before");
        refused(gradients.scatter(fc1, all.stream(1 - rank), none), "device");
        refused(Graph::capture(&[compute], || gradients.scatter(fc1, compute, none)).map(drop), "name GradientScatter::streams");
        let [send, sum] = gradients.streams();
        let capture = Graph::capture(&[compute, send, sum], || gradients.scatter(fc1, compute, none));
        refused(capture.map(drop), "a step was begun outside of the graph");
        side.product.round(compute, side.computed[0].view(), whole)?;
        gradients.scatter(fc1, compute, none)?;
        refused(gradients.buffer(fc1, compute).map(drop), "`fc1` was scattered in this step already");
        side.scatter(fc2, none)?;
        gradients.finish(compute, none)?;
    }
    let case = Case { weights: two_weights(), steps: 1, ..Case::new(2, Calls::Eager) };
    for (rank, side) in sides.iter().enumerate() {
        all.arenas[rank].ticket(&side.compute)?.wait()?;
        for (number, found) in side.main()?.into_iter().enumerate() {
            assert!(found == expected::<bf16, Bf16>(&case, number, rank as u32, 0.5), "rank {rank}, weight {number}");
        }
    }
    Ok(())
}

/// A graph needs open slots, and its step ends inside of it; the next step is as any other.
#[test]
fn a_step_begins_and_ends_in_one_graph() -> Result<()> {
    let all = Arenas::with(1, 1, options());
    let both = Arenas::with(2, 1, options());
    let closed = &sides(&both, &two_weights())?[0];
    let [send, sum] = closed.gradients.streams();
    let error = Graph::capture(&[&closed.compute, send, sum], || closed.step().map(drop)).unwrap_err();
    assert!(matches!(error, Error::NotCapturable { .. }) && error.to_string().contains("GradientScatter::open"), "{error}");

    let mut sides = sides(&all, &two_weights())?;
    let side = &mut sides[0];
    side.upload(&two_weights(), 0, 0)?;
    let side = &sides[0];
    let [send, sum] = side.gradients.streams();
    let fc1 = side.gradients.ids().next().expect("two weights");
    let unfinished = Graph::capture(&[&side.compute, send, sum], || side.scatter(fc1, |_| Ok(())));
    assert!(unfinished.is_ok());
    let error = side.step().unwrap_err().to_string();
    assert!(error.contains("has ended without GradientScatter::finish"), "{error}");
    side.step()?;
    let case = Case { weights: two_weights(), steps: 1, ..Case::new(1, Calls::Eager) };
    assert!(side.main()?[1] == expected::<bf16, Bf16>(&case, 1, 0, 0.5));
    Ok(())
}

/// An error of the hook is that of the call, and the step goes on.
#[test]
fn a_hook_may_fail() -> Result<()> {
    let all = Arenas::with(1, 1, options());
    let mut sides = sides(&all, &two_weights())?;
    sides[0].upload(&two_weights(), 0, 0)?;
    let (side, calls) = (&sides[0], Cell::new(0));
    let fails = |_| {
        calls.set(calls.get() + 1);
        Err(Error::Invalid { what: "the hook", why: "it may".to_owned() })
    };
    let [fc1, fc2] = [0, 1].map(|number| side.gradients.ids().nth(number).expect("two weights"));
    assert!(side.scatter(fc1, fails).unwrap_err().to_string().contains("the hook"));
    side.scatter(fc2, |_| Ok(()))?;
    side.gradients.finish(&side.compute, |_| Ok(()))?;
    assert_eq!(calls.get(), 1);
    Ok(())
}

/// The memory is what is said: two slots of the other ranks' parts, two buffers of the largest gradient, the own rows.
#[test]
fn bytes_are_counted() -> Result<()> {
    let all = Arenas::with(3, 1, options());
    let weights = [Weight::new("large", [7, 8]), Weight::new("small", [1, 8])];
    let gradients = GradientScatter::<bf16>::new::<Bf16>(all.stream(2), &all.arenas[2], &member(&all, 2), &weights, MEAN)?;
    assert_eq!(gradients.carrier(), GradientCarrier::CopyEngines);
    let alone = Arenas::with(1, 1, options());
    let of_one = GradientScatter::<bf16>::new::<Bf16>(alone.stream(0), &alone.arenas[0], &member(&alone, 0), &weights, MEAN)?;
    assert_eq!((of_one.carrier(), of_one.bytes().slots), (GradientCarrier::Nothing, 0));
    let bytes = gradients.bytes();
    // 3 rows of 8 a part; the last rank has one row of the first weight.
    assert_eq!((bytes.slots, bytes.buffers, bytes.main), (2 * 2 * 3 * 8 * 2, 2 * 7 * 8 * 2, 8 * 4));
    assert_eq!(bytes.total(), bytes.slots + bytes.buffers + bytes.main);
    Ok(())
}
