//! Weights in shards over many steps: chains of any sizes, what memory they take, and that no host waits.

use oxtile::comm::{Team, WorldSize};
use oxtile::num::bf16;
use oxtile::quantize::Direction;
use oxtile::runtime::{DeviceUsage, Exploration, Mode, explore};
use oxtile::sharded::{
    Bf16, Chain, ChainConfig, Fp8, GradientConfig, GradientScatter, Mxfp8, Nvfp4, Published, PullStreams, ShardSet, Weight,
};
use oxtile::sum_parts::SumParts;
use oxtile::symmetric::{Arena, ArenaOptions};
use oxtile::timeline::{Activity, Span, Timeline};
use oxtile::{Buffer, EmulatedOptions, PinnedBuffer, Result, Stream};

use crate::sharded::holders;
use crate::sharded_calls::{chain, weights};
use crate::sharded_ranks::{Oracle, expected, values};
use crate::support::{World, is_long, seeds};

/// Numbers below a bound, the same for a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Weights of any rows and columns that the format takes, some of experts, some of forward passes alone.
fn random_weights<F: Oracle>(random: &mut Random) -> Vec<Weight> {
    let columns = F::COLUMNS.max(8);
    let weight = |at: u64, random: &mut Random| {
        let shape = [1 + random.below(70), columns * (1 + random.below(4))];
        let weight = Weight::new(format!("w{at}"), shape).experts(1 + random.below(6).saturating_sub(3));
        if random.below(5) == 0 { weight.forward_only() } else { weight }
    };
    (0..1 + random.below(6)).map(|at| weight(at, random)).collect()
}

/// Two steps of a random chain under a seed.
fn random_chain<F: Oracle>(seed: u64) {
    let random = &mut Random(seed);
    let (ranks, distance, weights) = (1 + random.below(4) as u32, random.below(4) as u32, random_weights::<F>(random));
    let world = World::new(ranks, seed);
    let mut holders = holders::<F>(&world, &weights);
    let streams = if seed.is_multiple_of(2) { PullStreams::One } else { PullStreams::Two };
    let of = |config| ChainConfig { distance, streams, ..config };
    let mut chains: Vec<_> = holders.iter().zip(&world.streams).map(|(holder, stream)| chain(holder, stream, of).unwrap()).collect();
    for step in 0..2 {
        for (holder, stream) in holders.iter_mut().zip(&world.streams) {
            holder.publish(stream, step).unwrap();
        }
        for ((holder, chain), stream) in holders.iter().zip(&mut chains).zip(&world.streams) {
            let both = |at: &usize| weights[*at].uses == oxtile::sharded::Uses::Both;
            let orders: [Vec<usize>; 2] = [(0..weights.len()).collect(), (0..weights.len()).rev().filter(both).collect()];
            for (is_backward, order) in [false, true].into_iter().zip(orders) {
                let direction = if is_backward { Direction::Columns } else { Direction::Rows };
                let found = holder.pass(chain, stream, is_backward).unwrap();
                assert_eq!(found.len(), order.len(), "{}, seed {seed}", F::NAME);
                for (found, at) in found.iter().zip(order) {
                    let right = expected::<F>(stream, &weights, (step, at), direction);
                    assert!(
                        *found == right,
                        "{}, seed {seed}, {ranks} ranks, distance {distance}, step {step}, {direction:?}: {:?}",
                        F::NAME,
                        weights[at]
                    );
                }
            }
        }
    }
}

#[test]
fn chains_of_any_sizes_are_right_under_many_seeds() {
    for seed in 0..seeds() {
        match seed % 3 {
            0 => random_chain::<Bf16>(seed),
            1 => random_chain::<Mxfp8>(seed),
            _ => random_chain::<Nvfp4>(seed),
        }
    }
}

/// Steps of weights and gradients, 50 of them, and 1000 in long runs: after the first one nothing is allocated and no host waits, and all memory is that of the plans.
#[test]
fn steps_take_what_was_planned_and_no_host_waits() {
    let steps = if is_long() { 1000 } else { 50 };
    let options = EmulatedOptions { devices: 2, mode: Mode::Fast, seed: Some(3), ..EmulatedOptions::default() };
    let (world, weights) = (World::with(options), weights());
    let team = Team::all(world.size());
    let round = SumParts::<f32, bf16>::new(&world.runtime).unwrap();
    let copy = SumParts::<bf16, bf16>::new(&world.runtime).unwrap();
    let largest = weights.iter().map(|weight| weight.rows * weight.columns).max().unwrap();
    let mut sides = Vec::new();
    for (rank, stream) in world.ranks.iter().zip(&world.streams) {
        let arena = Arena::open(rank, ArenaOptions { bytes: 1 << 17, ..ArenaOptions::default() }).unwrap();
        let member = team.member(arena.rank()).unwrap();
        let usage = || stream.device().usage().bytes;
        let set = ShardSet::<Mxfp8>::new(stream, &arena, &member, weights.clone()).unwrap();
        let before = usage();
        let chain = Chain::new(stream, &set, &ChainConfig::new(&set, set.weights().map(|(id, _)| id)).unwrap()).unwrap();
        assert_eq!(usage() - before, chain.plan().bytes(), "a chain takes its slots, and nothing else");
        let before = usage();
        let gradients = GradientScatter::<bf16>::new::<Mxfp8>(stream, &arena, &member, &weights, GradientConfig::default()).unwrap();
        let bytes = gradients.bytes();
        assert_eq!(usage() - before, bytes.buffers + bytes.main, "and gradients what they say");
        let own = Buffer::<f32>::zeros(stream, largest).unwrap();
        let gradient = Buffer::<bf16>::zeros(stream, largest).unwrap();
        sides.push((arena, set, chain, gradients, own, gradient));
    }
    sides.iter().try_for_each(|(.., gradients, _, _)| gradients.open()).unwrap();
    let mut after_first: Vec<DeviceUsage> = Vec::new();
    let mut waits = 0;
    for step in 0..steps {
        for ((_, set, chain, gradients, own, gradient), stream) in sides.iter_mut().zip(&world.streams) {
            let ids: Vec<_> = gradients.ids().collect();
            let lens: Vec<_> = ids.iter().map(|id| set.own_rows(*id).map(|rows| rows.end - rows.start)).collect::<Result<_>>().unwrap();
            let mut updating = set.update(stream).unwrap();
            for ((id, rows), weight) in ids.iter().zip(lens).zip(&weights) {
                round.round(stream, own.view().slice(0, rows * weight.columns), updating.master(*id, 0).unwrap()).unwrap();
            }
            let published = updating.publish().unwrap();
            let mut pass = published.forward(chain).unwrap();
            ids.iter().for_each(|id| _ = pass.take(*id, stream).unwrap());
            pass.finish().unwrap();
            let mut pass = published.backward(chain).unwrap();
            for (id, weight) in ids.iter().zip(&weights).rev() {
                let whole = gradients.buffer(*id, stream).unwrap();
                copy.round(stream, gradient.view().slice(0, weight.rows * weight.columns), whole).unwrap();
                gradients.scatter(*id, stream, |_| Ok(())).unwrap();
                pass.take(*id, stream).unwrap();
            }
            pass.finish().unwrap();
            gradients.finish(stream, |_| Ok(())).unwrap();
        }
        let usage: Vec<_> = world.streams.iter().map(|stream| stream.device().usage()).collect();
        if step == 0 {
            after_first = usage;
        } else {
            let expected: Vec<_> = after_first.iter().map(|first| DeviceUsage { host_waits: first.host_waits + waits, ..*first }).collect();
            assert_eq!(usage, expected, "step {step}: nothing is allocated, and no host waits but for the test");
        }
        // So that what is enqueued has an end.
        if step % 10 == 9 {
            world.streams.iter().try_for_each(Stream::synchronize).unwrap();
            waits += 1;
        }
    }
    for ((arena, ..), stream) in sides.iter().zip(&world.streams) {
        arena.ticket(stream).unwrap().wait().unwrap();
    }
}

/// Ranks tell one another amaxes in the formats whose scales follow from them, and in no other.
#[test]
fn an_amax_is_agreed_on_where_scales_follow_from_it() {
    fn puts<F: Oracle>() -> usize {
        let world = World::with(EmulatedOptions { devices: 2, mode: Mode::Fast, ..EmulatedOptions::default() });
        let mut holders = holders::<F>(&world, &[Weight::new("w", [64, 32])]);
        world.streams.iter().try_for_each(Stream::synchronize).unwrap();
        let timeline = Timeline::start(&world.runtime).unwrap();
        for (holder, stream) in holders.iter_mut().zip(&world.streams) {
            holder.set.update(stream).unwrap().publish().unwrap();
        }
        world.streams.iter().try_for_each(Stream::synchronize).unwrap();
        let spans = timeline.finish().unwrap().spans;
        spans.iter().filter(|span| span.activity == Activity::Copy && span.name.starts_with("put to")).count()
    }
    assert_eq!([puts::<Bf16>(), puts::<Mxfp8>()], [0, 0]);
    assert_eq!([puts::<Nvfp4>(), puts::<Fp8>()], [2, 2], "each rank puts its amax to the other");
}

/// The gets of a pass, by the stream that carries them.
fn gets(spans: &[Span], rank: u32, name: &str) -> Vec<Span> {
    let is_one = |span: &&Span| {
        span.rank == rank && span.activity == Activity::Copy && span.name.starts_with("get from") && span.bytes == Some(bytes_of(name))
    };
    spans.iter().filter(is_one).cloned().collect()
}

/// Bytes that a rank pulls of a weight of the two chains below: no two are alike.
fn bytes_of(name: &str) -> u64 {
    match name {
        "dense" => 2 * 16 * 32,
        _ => 2 * 32 * 48,
    }
}

/// Two chains, one of all ranks and one of pairs, whose pulls are under way at once: neither waits for the other, nor do the ranks of one pair for the other pair.
#[test]
fn chains_of_two_teams_do_not_wait_for_one_another() {
    let mut overlapping = [0; 2];
    for seed in 0..32 {
        let options = EmulatedOptions { devices: 4, mode: Mode::Fast, seed: Some(seed), ..EmulatedOptions::default() };
        let world = World::with(options);
        let pairs = [0, 2].map(|first| Team::strided(world.size(), world.rank(first), 1, WorldSize::new(2).unwrap()).unwrap());
        let (dense, experts) = (vec![Weight::new("dense", [64, 32])], vec![Weight::new("experts", [64, 48])]);
        let mut sides = Vec::new();
        for (rank, stream) in world.ranks.iter().zip(&world.streams) {
            let arena = Arena::open(rank, ArenaOptions::default()).unwrap();
            let all = Team::all(world.size()).member(arena.rank()).unwrap();
            let of_all = ShardSet::<Bf16>::new(stream, &arena, &all, dense.clone()).unwrap();
            let mut of_pair = None;
            for pair in &pairs {
                match pair.member(arena.rank()) {
                    Some(member) => of_pair = Some(ShardSet::<Bf16>::new(stream, &arena, &member, experts.clone()).unwrap()),
                    None => ShardSet::<Bf16>::take_part(&arena, pair, &experts).unwrap(),
                }
            }
            let sets = [of_all, of_pair.unwrap()];
            let chains = sets.each_ref().map(|set| {
                let id = set.weights().next().unwrap().0;
                Chain::new(stream, set, &ChainConfig::new(set, [id; 3]).unwrap()).unwrap()
            });
            sides.push((sets, chains, stream.device().stream().unwrap()));
        }
        for number in 0..2 {
            for ((sets, ..), stream) in sides.iter_mut().zip(&world.streams) {
                sets[number].update(stream).unwrap().publish().unwrap();
            }
        }
        world.streams.iter().try_for_each(Stream::synchronize).unwrap();
        let timeline = Timeline::start(&world.runtime).unwrap();
        for ((sets, chains, other), stream) in sides.iter_mut().zip(&world.streams) {
            let [of_all, of_pair] = sets.each_ref().map(|set| Published::of(set).unwrap());
            let [first, second] = chains;
            let (mut one, mut two) = (of_all.forward(first).unwrap(), of_pair.forward(second).unwrap());
            for _ in 0..3 {
                for (pass, stream) in [(&mut one, stream), (&mut two, &*other)] {
                    let id = pass.next_weight().unwrap();
                    pass.take(id, stream).unwrap();
                }
            }
            one.finish().unwrap();
            two.finish().unwrap();
        }
        for ((.., other), stream) in sides.iter().zip(&world.streams) {
            stream.synchronize().unwrap();
            other.synchronize().unwrap();
        }
        let recording = timeline.finish().unwrap();
        for rank in 0..4 {
            let [one, two] = ["dense", "experts"].map(|name| gets(&recording.spans, rank, name));
            assert_eq!([one.len(), two.len()], [9, 3], "seed {seed}, rank {rank}: three gets of each weight from each other member");
            overlapping[0] += u32::from(one.iter().any(|one| two.iter().any(|two| one.overlaps(two))));
            // Either may be done before the other begins its last one.
            overlapping[1] += u32::from(two[2].start < one[8].start && one[0].start < two[2].start);
        }
    }
    assert!(overlapping.iter().all(|count| *count > 32), "pulls of the two chains overlap on {overlapping:?} of 128 ranks");
}

/// Runs steps of two ranks, each with forward passes over weights of [2, 8], in every order of their signals and waits. Returns how many there are.
fn every_order(weights: usize, steps: u32, passes: u32) -> u64 {
    let program = |exploration: &Exploration| -> Result<()> {
        let exploration = Some(exploration.clone());
        let options = EmulatedOptions { devices: 2, mode: Mode::Check, exploration, ..EmulatedOptions::default() };
        let world = World::with(options);
        let weights: Vec<_> = (0..weights).map(|at| Weight::new(format!("w{at}"), [2, 8])).collect();
        let mut holders = holders::<Bf16>(&world, &weights);
        let mut chains = Vec::new();
        for (holder, stream) in holders.iter().zip(&world.streams) {
            chains.push(chain(holder, stream, |config| ChainConfig { backward: Vec::new(), ..config })?);
        }
        let mut found = Vec::new();
        for step in 0..steps {
            for ((holder, chain), stream) in holders.iter_mut().zip(&mut chains).zip(&world.streams) {
                holder.publish(stream, step)?;
                let published = Published::of(&holder.set)?;
                for _ in 0..passes {
                    let mut pass = published.forward(chain)?;
                    while let Some(id) = pass.next_weight() {
                        let mut host = PinnedBuffer::<bf16>::zeros(stream, 16)?;
                        pass.take(id, stream)?.tensor().data.copy_to_pinned(stream, &mut host)?;
                        found.push((step, id.index(), host));
                    }
                    pass.finish()?;
                }
            }
        }
        world.streams.iter().try_for_each(Stream::synchronize)?;
        for (step, at, host) in &found {
            let exact: Vec<_> = values(*step, *at, 0, [2, 8]).into_iter().map(|value| half::bf16::from_f32(value).to_bits()).collect();
            assert_eq!(host.as_slice()?.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), exact, "step {step}, weight {at}");
        }
        Ok(())
    };
    explore(program).unwrap().schedules
}

/// Every order of the library's own steps: the values of each step, and no report. One weight in two steps; two weights in two passes, the second of which begins in a slot that the first freed.
#[test]
fn every_order_of_a_sets_own_steps_is_right() {
    assert!(every_order(1, 2, 1) > 1);
    assert!(every_order(2, 1, 2) > 1);
}
