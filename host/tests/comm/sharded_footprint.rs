//! What weights in shards take and what travels is known before any memory is taken; the events of a step.

use std::fmt;
use std::sync::{Arc, Mutex};

use oxtile::comm::Team;
use oxtile::num::bf16;
use oxtile::sharded::{
    Bf16, Chain, ChainConfig, Footprint, Fp8, GradientConfig, GradientScatter, Mxfp8, Nvfp4, Nvfp4Squares, ShardSet, Weight, WeightFormat,
};
use oxtile::sum_parts::SumParts;
use oxtile::symmetric::{Arena, ArenaOptions};
use oxtile::{Buffer, Stream};
use tracing::field::{Field, Visit};
use tracing::span;

use crate::support::World;

/// Every way in which rows are divided, and one of forward passes alone.
fn weights() -> Vec<Weight> {
    let weight = Weight::new;
    vec![weight("embedding", [70, 32]).forward_only(), weight("a", [64, 64]), weight("experts", [33, 32]).experts(3), weight("b", [1, 32])]
}

fn is_what_is_taken<F: WeightFormat>() {
    for ranks in 1..=3 {
        let (world, weights) = (World::new(ranks, 1), weights());
        let team = Team::all(world.size());
        for ((rank, stream), distance) in world.ranks.iter().zip(&world.streams).zip(0..) {
            let arena = Arena::open(rank, ArenaOptions { bytes: 1 << 20, ..ArenaOptions::default() }).unwrap();
            let member = team.member(arena.rank()).unwrap();
            let planned = Footprint::of::<F, bf16>(&member, &weights, &[0, 1, 2, 3, 1], distance).unwrap();
            let usage = || stream.device().usage().bytes;
            let before = usage();
            let set = ShardSet::<F>::new(stream, &arena, &member, weights.clone()).unwrap();
            let small = 2 * 4 * weights.iter().map(|weight| weight.experts).sum::<u64>();
            let taken = usage() - before;
            assert!(taken >= planned.masters && taken <= planned.masters + 2 * small + 4096, "{}: {taken} of {}", F::NAME, planned.masters);
            assert_eq!(planned.shards, ShardSet::<F>::arena_bytes(&team, &weights).unwrap(), "{}", F::NAME);
            let ids: Vec<_> = set.weights().map(|(id, _)| id).collect();
            let config = ChainConfig { distance, ..ChainConfig::new(&set, [0, 1, 2, 3, 1].map(|number: usize| ids[number])).unwrap() };
            let chain = Chain::new(stream, &set, &config).unwrap();
            assert_eq!((&planned.slots, planned.pulled), (chain.plan(), chain.pulled_bytes()), "{}", F::NAME);
            let config = GradientConfig::default();
            let gradients = GradientScatter::<bf16>::new::<F>(stream, &arena, &member, &weights, config).unwrap();
            let bytes = gradients.bytes();
            assert_eq!((planned.gradients.buffers, planned.gradients.main), (bytes.buffers, bytes.main), "{}", F::NAME);
            assert_eq!(planned.gradients.slots, GradientScatter::<bf16>::arena_bytes::<F>(&team, &weights).unwrap(), "{}", F::NAME);
            let own: u64 = ids.iter().map(|id| gradients.main_grad(*id).unwrap().len()).sum();
            let whole: u64 = weights.iter().map(|weight| weight.experts * weight.rows * weight.columns).sum();
            assert_eq!(planned.scattered, 2 * (whole - own), "{}", F::NAME);
            assert_eq!(planned.memory(), planned.shards + planned.masters + planned.slots.bytes() + planned.gradients.total());
            assert_eq!(planned.traffic(), planned.pulled[0] + planned.pulled[1] + planned.scattered);
        }
    }
}

#[test]
fn the_footprint_is_what_is_taken() {
    is_what_is_taken::<Bf16>();
    is_what_is_taken::<Fp8>();
    is_what_is_taken::<Mxfp8>();
    is_what_is_taken::<Nvfp4>();
    is_what_is_taken::<Nvfp4Squares>();
    let member = Team::all(oxtile::comm::WorldSize::ONE).member(oxtile::comm::Rank::ZERO).unwrap();
    let error = Footprint::of::<Bf16, f32>(&member, &weights(), &[4], 1).unwrap_err().to_string();
    assert!(error.contains("there is no weight 4 among 4"), "{error}");
}

/// Keeps the messages of events of the library's module, and the weight that they name.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Told {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("oxtile::sharded")
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut words = Words::default();
        event.record(&mut words);
        self.0.lock().unwrap().push(format!("{} {}", words.message, words.weight).trim_end().to_owned());
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[derive(Default)]
struct Words {
    message: String,
    weight: String,
}

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            "weight" => self.weight = format!("{value:?}").replace('"', ""),
            _ => {}
        }
    }
}

#[test]
fn a_step_is_told_of_by_events_with_names() {
    let (world, weights) = (World::new(2, 1), [Weight::new("up", [8, 8]), Weight::new("down", [8, 8])]);
    let product = SumParts::<f32, f32>::new(&world.runtime).unwrap();
    let mut sides = Vec::new();
    for (rank, stream) in world.ranks.iter().zip(&world.streams) {
        let arena = Arena::open(rank, ArenaOptions { bytes: 1 << 16, ..ArenaOptions::default() }).unwrap();
        let member = Team::all(world.size()).member(arena.rank()).unwrap();
        let set = ShardSet::<Bf16>::new(stream, &arena, &member, weights.to_vec()).unwrap();
        let chain = Chain::new(stream, &set, &ChainConfig::new(&set, set.weights().map(|(id, _)| id)).unwrap()).unwrap();
        let gradients = GradientScatter::<f32>::new::<Bf16>(stream, &arena, &member, &weights, GradientConfig::default()).unwrap();
        sides.push((set, chain, gradients, Buffer::<f32>::zeros(stream, 64).unwrap()));
    }
    let mut told = Vec::new();
    for ((set, chain, gradients, computed), stream) in sides.iter_mut().zip(&world.streams) {
        let events = Told::default();
        tracing::subscriber::with_default(events.clone(), || {
            let ids: Vec<_> = gradients.ids().collect();
            let published = set.update(stream).unwrap().publish().unwrap();
            let mut pass = published.forward(chain).unwrap();
            ids.iter().for_each(|id| _ = pass.take(*id, stream).unwrap());
            pass.finish().unwrap();
            for id in ids.into_iter().rev() {
                product.round(stream, computed.view(), gradients.buffer(id, stream).unwrap()).unwrap();
                gradients.scatter(id, stream, |_| Ok(())).unwrap();
            }
            gradients.finish(stream, |_| Ok(())).unwrap();
        });
        told.push(events.0.lock().unwrap().clone());
    }
    world.streams.iter().try_for_each(Stream::synchronize).unwrap();
    let expected =
        ["published", "pulled up", "pulled down", "scattered down", "scattered up", "summed down", "summed up", "gradients finished"];
    assert_eq!(told, [expected; 2]);
}
