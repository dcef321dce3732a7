//! Weights in shards: which pulls run beside which copies of own rows, by timelines of the virtual cluster.

use oxtile::EmulatedOptions;
use oxtile::runtime::Mode;
use oxtile::sharded::{Bf16, Published, Weight};
use oxtile::timeline::{Activity, Span, Timeline};

use crate::sharded::holders;
use crate::sharded_calls::chain;
use crate::support::World;

const WEIGHTS: usize = 4;

/// The gets from the other rank and the copies of own rows, of one rank, in two passes over [`WEIGHTS`] weights.
struct Copies {
    gets: Vec<Span>,
    own: Vec<Span>,
}

/// What both ranks copy in two passes, one after another, under a seed; one weight is pulled ahead.
fn copies(seed: u64) -> [Copies; 2] {
    let world = World::with(EmulatedOptions { devices: 2, mode: Mode::Fast, seed: Some(seed), ..EmulatedOptions::default() });
    let weights: Vec<_> = (0..WEIGHTS).map(|at| Weight::new(format!("w{at}"), [16, 8])).collect();
    let mut holders = holders::<Bf16>(&world, &weights);
    let mut chains: Vec<_> =
        holders.iter().zip(&world.streams).map(|(holder, stream)| chain(holder, stream, |config| config).unwrap()).collect();
    for (holder, stream) in holders.iter_mut().zip(&world.streams) {
        holder.publish(stream, 0).unwrap();
    }
    let settle = || world.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    settle();
    let timeline = Timeline::start(&world.runtime).unwrap();
    for ((holder, chain), stream) in holders.iter().zip(&mut chains).zip(&world.streams) {
        let published = Published::of(&holder.set).unwrap();
        for _ in 0..2 {
            let mut pass = published.forward(chain).unwrap();
            while let Some(weight) = pass.next_weight() {
                pass.take(weight, stream).unwrap();
            }
            pass.finish().unwrap();
        }
    }
    settle();
    let spans = timeline.finish().unwrap().spans;
    [0, 1].map(|rank| {
        let is_copy = |span: &&Span| span.rank == rank && span.activity == Activity::Copy;
        let (gets, own): (Vec<_>, Vec<_>) = spans.iter().filter(is_copy).cloned().partition(|span| span.name.starts_with("get from"));
        assert_eq!([gets.len(), own.len()], [2 * WEIGHTS; 2], "seed {seed}, rank {rank}: a get and a copy of own rows for each weight");
        // Two slots in turn, and the copy is the last that writes to a slot before the next get.
        let is_kept = |(get, own): (&Span, &Span)| get.start >= own.end;
        assert!(gets[2..].iter().zip(&own).all(is_kept), "seed {seed}, rank {rank}: a get into a slot comes after the copy into it");
        Copies { gets, own }
    })
}

/// In how many of 64 schedules of a rank the get of each weight could run beside the copy of the own rows of the one before.
fn beside() -> [u32; 2 * WEIGHTS - 1] {
    let mut beside = [0; 2 * WEIGHTS - 1];
    for Copies { gets, own } in (0..32).flat_map(copies) {
        for (count, (get, own)) in beside.iter_mut().zip(gets[1..].iter().zip(&own)) {
            *count += u32::from(get.overlaps(own));
        }
    }
    beside
}

/// The pull of the next weight does not wait for the copy of the own rows of the weight that is lent; nor does the first pull of a pass wait for the last weight of the pass before.
#[test]
fn the_next_pull_is_beside_the_own_copy() {
    let found = beside();
    assert!(found.iter().all(|count| *count > 8), "pulls overlap with the own copy before in {found:?} of 64 schedules");
}
