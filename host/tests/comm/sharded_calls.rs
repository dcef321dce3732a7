//! Weights in shards: how passes are called and refused.

use std::time::Duration;

use oxtile::comm::{Team, WorldSize};
use oxtile::num::bf16;
use oxtile::quantize::{Direction, Mxfp8 as Casts, Nvfp4 as Nvfp4Casts};
use oxtile::sharded::{
    Bf16, Captured, Chain, ChainConfig, Fp8, Gathered, Mxfp8, Nvfp4, Pass, Published, PullStreams, ShardSet, Weight, WeightFormat, WeightId,
};
use oxtile::sum_parts::SumParts;
use oxtile::symmetric::{Arena, ArenaOptions, FlagName, SymmetricError};
use oxtile::{Buffer, Error, Result, Stream};

use crate::sharded::holders;
use crate::sharded_ranks::{Holder, Oracle, values};
use crate::support::{World, seeds};

/// Weights that ranks share unevenly.
pub fn weights() -> Vec<Weight> {
    vec![Weight::new("first", [48, 32]), Weight::new("second", [80, 16]), Weight::new("third", [33, 32])]
}

pub fn chain<F: WeightFormat>(holder: &Holder<F>, stream: &Stream, of: impl FnOnce(ChainConfig) -> ChainConfig) -> Result<Chain<F>> {
    let order = holder.set.weights().map(|(id, _)| id);
    Chain::new(stream, &holder.set, &of(ChainConfig::new(&holder.set, order)?))
}

/// One for graphs.
pub fn captured_chain<F: WeightFormat>(
    holder: &Holder<F>,
    stream: &Stream,
    of: impl FnOnce(ChainConfig) -> ChainConfig,
) -> Result<Chain<F, Captured>> {
    let order = holder.set.weights().map(|(id, _)| id);
    Chain::captured(stream, &holder.set, &of(ChainConfig::new(&holder.set, order)?))
}

/// What a product would read of a weight, in bf16.
pub trait Wide: Oracle {
    type Back;
    fn back(world: &World) -> Self::Back;
    fn read(back: &Self::Back, stream: &Stream, tensor: &Self::Tensor, output: &mut Buffer<bf16>) -> Result<()>;
}

impl Wide for Bf16 {
    type Back = SumParts<bf16, bf16>;

    fn back(world: &World) -> Self::Back {
        SumParts::new(&world.runtime).unwrap()
    }

    fn read(back: &Self::Back, stream: &Stream, tensor: &Self::Tensor, output: &mut Buffer<bf16>) -> Result<()> {
        back.round(stream, tensor.data.view(), output.view_mut())
    }
}

impl Wide for Mxfp8 {
    type Back = Casts<bf16>;

    fn back(world: &World) -> Self::Back {
        Casts::new(&world.runtime).unwrap()
    }

    fn read(back: &Self::Back, stream: &Stream, tensor: &Self::Tensor, output: &mut Buffer<bf16>) -> Result<()> {
        back.dequantize(stream, tensor, output.view_mut())
    }
}

impl Wide for Nvfp4 {
    type Back = Nvfp4Casts<bf16>;

    fn back(world: &World) -> Self::Back {
        Nvfp4Casts::new(&world.runtime).unwrap()
    }

    /// A forward pass alone.
    fn read(back: &Self::Back, stream: &Stream, tensor: &Self::Tensor, output: &mut Buffer<bf16>) -> Result<()> {
        if tensor.direction == Direction::Columns { Ok(()) } else { back.dequantize(stream, tensor, output.view_mut()) }
    }
}

/// Two chains on streams of their own, whose passes are under way together, beside one another for some steps: every rank finds the values under every seed.
#[test]
fn two_chains_at_once_are_silent() {
    let weights = vec![
        Weight::new("a", [32, 32]),
        Weight::new("b", [33, 16]),
        Weight::new("experts", [32, 16]).experts(2),
        Weight::new("c", [64, 32]),
    ];
    for (ranks, seed) in [2, 3].into_iter().flat_map(|ranks| (0..seeds() / 4).map(move |seed| (ranks, seed))) {
        let world = World::new(ranks, seed);
        let mut holders = holders::<Mxfp8>(&world, &weights);
        let mut sides = Vec::new();
        for (holder, stream) in holders.iter().zip(&world.streams) {
            let ids: Vec<_> = holder.set.weights().map(|(id, _)| id).collect();
            let make = |of: [WeightId; 2]| Chain::new(stream, &holder.set, &ChainConfig::new(&holder.set, of).unwrap()).unwrap();
            sides.push(([make([ids[0], ids[1]]), make([ids[2], ids[3]])], stream.device().stream().unwrap()));
        }
        let back = Mxfp8::back(&world);
        for step in 0..2 {
            for (holder, stream) in holders.iter_mut().zip(&world.streams) {
                holder.publish(stream, step).unwrap();
            }
            let mut found = Vec::new();
            for ((holder, ([dense, experts], other)), stream) in holders.iter().zip(&mut sides).zip(&world.streams) {
                let published = Published::of(&holder.set).unwrap();
                let [mut one, mut two] = [published.forward(dense).unwrap(), published.forward(experts).unwrap()];
                for _ in 0..2 {
                    for (pass, stream) in [(&mut one, stream), (&mut two, &*other)] {
                        let id = pass.next_weight().unwrap();
                        let gathered = pass.take(id, stream).unwrap();
                        for (tensor, expert) in gathered.tensors().iter().zip(0..) {
                            let mut output = Buffer::zeros(stream, tensor.shape[0] * tensor.shape[1]).unwrap();
                            Mxfp8::read(&back, stream, tensor, &mut output).unwrap();
                            found.push((id, expert, output, stream.clone()));
                        }
                    }
                }
                one.finish().unwrap();
                two.finish().unwrap();
            }
            for (id, expert, output, stream) in found {
                let Weight { rows, columns, .. } = weights[id.index()];
                let exact = values(step, id.index(), expert, [rows, columns]);
                let found = output.to_vec_as::<half::bf16>(&stream).unwrap();
                // E4M3 has 3 bits behind the point, and a block's largest element may saturate nothing.
                let near = |(found, exact): (&half::bf16, &f32)| (found.to_f32() - exact).abs() <= 0.07 * exact.abs() + 0.02;
                assert!(found.iter().zip(&exact).all(near), "{ranks} ranks, seed {seed}, step {step}, {id:?}, {expert}");
            }
        }
    }
}

/// What reads a weight, on the stream of its `take` or on another one, comes after its pull and after the copy of the own rows, and before the pull that overwrites it: in passes one after
/// another, for which no host waits.
#[test]
fn another_stream_may_read_a_weight() {
    let weights = weights();
    for seed in 0..seeds() {
        let world = World::new(2, seed);
        let (mut holders, back) = (holders::<Bf16>(&world, &weights), Bf16::back(&world));
        for (holder, stream) in holders.iter_mut().zip(&world.streams) {
            holder.publish(stream, 0).unwrap();
        }
        let mut found = Vec::new();
        for (holder, stream) in holders.iter().zip(&world.streams) {
            let mut made = chain(holder, stream, |config| ChainConfig { distance: 1 + seed as u32 % 2, ..config }).unwrap();
            let readers = [stream.clone(), stream.device().stream().unwrap()];
            let published = Published::of(&holder.set).unwrap();
            for is_backward in [false, false, true, true, false] {
                let mut pass = if is_backward { published.backward(&mut made) } else { published.forward(&mut made) }.unwrap();
                while let Some(id) = pass.next_weight() {
                    let gathered = pass.take(id, stream).unwrap();
                    let reader = &readers[found.len() % 2];
                    let mut output = Buffer::uninitialised(reader, weights[id.index()].rows * weights[id.index()].columns).unwrap();
                    Bf16::read(&back, reader, gathered.tensor(), &mut output).unwrap();
                    found.push((id, output, reader.clone()));
                }
                pass.finish().unwrap();
            }
        }
        for (id, output, stream) in found {
            let exact = values(0, id.index(), 0, [weights[id.index()].rows, weights[id.index()].columns]);
            let found = output.to_vec_as::<half::bf16>(&stream).unwrap();
            assert!(found.iter().zip(&exact).all(|(found, exact)| *found == half::bf16::from_f32(*exact)), "seed {seed}, {id:?}");
        }
    }
}

/// A weight that is used twice has two positions, and a forward pass that is computed again takes weights by rows.
#[test]
fn weights_are_used_twice_and_recomputed() {
    let (world, weights) = (World::new(2, 5), weights());
    let mut holders = holders::<Mxfp8>(&world, &weights);
    for (holder, stream) in holders.iter_mut().zip(&world.streams) {
        holder.publish(stream, 3).unwrap();
    }
    let ids: Vec<_> = holders[0].set.weights().map(|(id, _)| id).collect();
    let forward = vec![ids[0], ids[1], ids[0], ids[2]];
    let backward = vec![(ids[2], Direction::Columns), (ids[1], Direction::Rows), (ids[1], Direction::Columns), (ids[1], Direction::Rows)];
    for (holder, stream) in holders.iter().zip(&world.streams) {
        let mut twice =
            chain(holder, stream, |config| ChainConfig { forward: forward.clone(), backward: backward.clone(), ..config }).unwrap();
        let mut once = chain(holder, stream, |config| config).unwrap();
        let (by_rows, by_columns) = (holder.pass(&mut once, stream, false).unwrap(), holder.pass(&mut once, stream, true).unwrap());
        let found = [holder.pass(&mut twice, stream, false).unwrap(), holder.pass(&mut twice, stream, true).unwrap()];
        assert_eq!(found[0], [0, 1, 0, 2].map(|at| by_rows[at].clone()));
        assert_eq!(found[1], [by_columns[0].clone(), by_rows[1].clone(), by_columns[1].clone(), by_rows[1].clone()]);
    }
}

/// Experts of other rows, one of them of none, are one position: what it lends is what positions of their own lend.
fn ragged<F: Oracle>(ranks: u32) {
    let columns = F::COLUMNS.max(8);
    let rows = [("first", 48), ("e0", 40), ("e1", 0), ("e2", 17), ("e3", 1), ("last", 33)];
    let weights = rows.map(|(name, rows)| Weight::new(name, [rows, 2 * columns])).to_vec();
    let world = World::new(ranks, 8);
    let mut holders = holders::<F>(&world, &weights);
    for step in 0..2 {
        for (holder, stream) in holders.iter_mut().zip(&world.streams) {
            holder.publish(stream, step).unwrap();
        }
        for (holder, stream) in holders.iter().zip(&world.streams) {
            let ids: Vec<_> = holder.set.weights().map(|(id, _)| id).collect();
            let experts = ids[1..5].to_vec();
            let mut alone = chain(holder, stream, |config| config).unwrap();
            let mut together = chain(holder, stream, |config| ChainConfig { groups: vec![experts.clone()], ..config }).unwrap();
            for is_backward in [false, true] {
                let [alone, together] = [&mut alone, &mut together].map(|chain| holder.pass(chain, stream, is_backward).unwrap());
                assert_eq!(together.iter().map(Vec::len).collect::<Vec<_>>(), [1, 4, 1], "{}", F::NAME);
                assert_eq!(together.concat(), alone.concat(), "{}, {ranks} ranks, backward: {is_backward}", F::NAME);
            }
            let apart = |config: ChainConfig| ChainConfig { groups: vec![vec![ids[1], ids[3]]], ..config };
            let text = invalid(chain(holder, stream, apart));
            assert!(text.contains("`e0` is of a group of 2, and 1 of it follow one another in a pass"), "{text}");
        }
    }
}

#[test]
fn ragged_experts_are_one_position() {
    for ranks in [1, 2, 3] {
        ragged::<Bf16>(ranks);
        ragged::<Fp8>(ranks);
        ragged::<Mxfp8>(ranks);
        ragged::<Nvfp4>(ranks);
    }
}

/// Values that no rank writes in a step stay, and so do those that are written in one half of the ranks alone.
#[test]
fn what_is_not_written_stays() {
    let (world, weights) = (World::new(2, 6), weights());
    let mut holders = holders::<Bf16>(&world, &weights);
    let mut found = Vec::new();
    for step in [Some(0), None] {
        for (holder, stream) in holders.iter_mut().zip(&world.streams) {
            match step {
                Some(step) => holder.publish(stream, step).unwrap(),
                None => _ = holder.set.update(stream).unwrap().publish().unwrap(),
            }
        }
        let holder = &holders[1];
        found.push(holder.pass(&mut chain(holder, &world.streams[1], |config| config).unwrap(), &world.streams[1], false).unwrap());
    }
    assert_eq!(found[0], found[1]);
}

fn invalid(result: Result<impl std::fmt::Debug>) -> String {
    match result {
        Err(error @ Error::Invalid { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn wrong_orders_are_named() {
    let world = World::new(1, 0);
    let stream = &world.streams[0];
    let mut holder = holders::<Bf16>(&world, &weights()).remove(0);
    assert!(invalid(Published::of(&holder.set)).contains("nothing is published: call `update` and `publish`"));
    holder.publish(stream, 0).unwrap();
    let ids: Vec<_> = holder.set.weights().map(|(id, _)| id).collect();
    let mut own = chain(&holder, stream, |config| config).unwrap();
    let published = Published::of(&holder.set).unwrap();
    let mut pass = published.forward(&mut own).unwrap();
    let taken = pass.take(ids[1], stream).map(|_| ());
    assert!(invalid(taken).contains("`first` is next in the chain: `second` was asked for"));
    pass.take(ids[0], stream).unwrap();
    let text = invalid(pass.finish());
    assert!(text.contains("did not take `second`, `third`"), "{text}");
    let mut pass = published.forward(&mut own).unwrap();
    for id in &ids {
        pass.take(*id, stream).unwrap();
    }
    let text = invalid(pass.take(ids[0], stream).map(|_| ()));
    assert!(text.contains("no weight after `third`: `first` was asked for"), "{text}");
    pass.finish().unwrap();

    // The weights of another list, of the same number.
    let others = holders::<Bf16>(&world, &[Weight::new("first", [48, 16]), Weight::new("other", [80, 16])]).remove(0);
    for (id, weight) in others.set.weights().map(|(id, _)| id).zip(["`first` of 48 times 32", "`second` of 80 times 16"]) {
        let text = invalid(holder.set.own_rows(id));
        assert!(text.contains(weight) && text.contains("it is of another list of weights"), "{text}");
        assert!(invalid(ChainConfig::new(&holder.set, [id])).contains(weight));
    }

    let other = holders::<Bf16>(&world, &weights()).remove(0);
    let mut foreign = chain(&other, stream, |config| config).unwrap();
    assert!(invalid(published.forward(&mut foreign)).contains("of another set"));
    let text = invalid(captured_chain(&holder, stream, |config| ChainConfig { streams: PullStreams::Two, ..config }));
    assert!(text.contains("`PullStreams::Two` is for eager chains: take `One`"), "{text}");
    let text = invalid(chain(&holder, stream, |config| ChainConfig { memory: Some(1000), ..config }));
    assert!(text.contains("1000"), "{text}");
    assert!(invalid(chain(&holder, stream, |config| ChainConfig { forward: vec![], backward: vec![], ..config })).contains("no weights"));
}

/// A stream of another device is refused before memory is taken or a rank is told: the right one serves after it.
#[test]
fn streams_of_another_device_are_refused() {
    let world = World::new(2, 0);
    let mut holders = holders::<Bf16>(&world, &[Weight::new("w", [32, 16])]);
    let error = invalid(holders[0].set.update(&world.streams[1]));
    assert!(error.contains("use a stream of device"), "{error}");
    for (holder, stream) in holders.iter_mut().zip(&world.streams) {
        holder.publish(stream, 0).unwrap();
    }
}

#[test]
fn weights_that_cannot_be_shared_are_named() {
    let world = World::new(1, 0);
    let stream = &world.streams[0];
    let arena = Arena::open(&world.ranks[0], ArenaOptions::default()).unwrap();
    let member = Team::all(world.size()).member(arena.rank()).unwrap();
    let made = |weights| invalid(ShardSet::<Nvfp4>::new(stream, &arena, &member, weights));
    assert!(made(vec![Weight::new("narrow", [16, 24])]).contains("`narrow` has 24 columns, and NVFP4 takes multiples of 16"));
    assert!(made(vec![Weight::new("none", [16, 0])]).contains("`none` has no elements"));
    assert!(made(vec![Weight::new("wide", [0, 1 << 60])]).contains("that is no weight of this world"));
    assert!(made(vec![]).contains("no weights"));
    assert!(made(vec![Weight::new("w", [16, 16]), Weight::new("w", [32, 16])]).contains("two weights are named `w`"));
    let embedding = ShardSet::<Fp8>::new(stream, &arena, &member, vec![Weight::new("embedding", [16, 16]).forward_only()]).unwrap();
    let id = embedding.find("embedding").unwrap();
    let config = ChainConfig { backward: vec![(id, Direction::Columns)], ..ChainConfig::new(&embedding, [id]).unwrap() };
    assert!(invalid(Chain::new(stream, &embedding, &config)).contains("`embedding` is of forward passes alone"));
}

#[test]
fn other_weights_on_another_rank_are_named() {
    let world = World::new(2, 0);
    let arenas: Vec<_> = world.ranks.iter().map(|rank| Arena::open(rank, ArenaOptions::default()).unwrap()).collect();
    let team = Team::all(world.size());
    let mut sets: Vec<_> = arenas
        .iter()
        .zip(&world.streams)
        .zip([48, 49])
        .map(|((arena, stream), rows)| {
            let member = team.member(arena.rank()).unwrap();
            ShardSet::<Bf16>::new(stream, arena, &member, vec![Weight::new("w", [rows, 8]), Weight::new("x", [rows + 1, 8])]).unwrap()
        })
        .collect();
    let text = sets[0].update(&world.streams[0]).unwrap_err().to_string();
    assert!(text.contains("`w` 1 x 48 x 8") && text.contains("`w` 1 x 49 x 8"), "{text}");
}

/// The other team of an arena takes part in what is taken, and in nothing else.
#[test]
fn two_teams_have_weights_of_their_own() {
    let world = World::new(4, 9);
    let teams = [0, 1].map(|first| Team::strided(world.size(), world.rank(first), 2, WorldSize::new(2).unwrap()).unwrap());
    let weights = [vec![Weight::new("even", [64, 32])], vec![Weight::new("odd", [96, 32])]];
    let mut sets = Vec::new();
    for (rank, stream) in world.ranks.iter().zip(&world.streams) {
        let arena = Arena::open(rank, ArenaOptions::default()).unwrap();
        let mut own = None;
        for ((team, weights), number) in teams.iter().zip(&weights).zip(0..) {
            match team.member(arena.rank()) {
                Some(member) => own = Some((number, ShardSet::<Mxfp8>::new(stream, &arena, &member, weights.clone()).unwrap())),
                None => ShardSet::<Mxfp8>::take_part(&arena, team, weights).unwrap(),
            }
        }
        sets.push((own.unwrap(), arena));
    }
    let round = SumParts::<f32, bf16>::new(&world.runtime).unwrap();
    let back = Mxfp8::back(&world);
    for step in 0..2 {
        for (((number, set), _), stream) in sets.iter_mut().zip(&world.streams) {
            let (id, weight) = set.weights().next().map(|(id, weight)| (id, weight.clone())).unwrap();
            let rows = set.own_rows(id).unwrap();
            let all = values(step, *number as usize, 0, [weight.rows, weight.columns]);
            let own = Buffer::from_slice(stream, &all[(rows.start * 32) as usize..(rows.end * 32) as usize]).unwrap();
            let mut updating = set.update(stream).unwrap();
            round.round(stream, own.view(), updating.master(id, 0).unwrap()).unwrap();
            updating.publish().unwrap();
        }
        for (((number, set), _), stream) in sets.iter().zip(&world.streams) {
            let (id, weight) = set.weights().next().unwrap();
            let mut chain = Chain::new(stream, set, &ChainConfig::new(set, [id]).unwrap()).unwrap();
            let published = Published::of(set).unwrap();
            let mut pass: Pass<'_, Mxfp8> = published.forward(&mut chain).unwrap();
            let gathered: Gathered<'_, Mxfp8> = pass.take(id, stream).unwrap();
            let mut output = Buffer::zeros(stream, weight.rows * weight.columns).unwrap();
            Mxfp8::read(&back, stream, gathered.tensor(), &mut output).unwrap();
            let exact = values(step, *number as usize, 0, [weight.rows, weight.columns]);
            let near = |(found, exact): (&half::bf16, &f32)| (found.to_f32() - exact).abs() <= 0.07 * exact.abs() + 0.02;
            assert!(output.to_vec_as::<half::bf16>(stream).unwrap().iter().zip(&exact).all(near), "team {number}, step {step}");
        }
    }
}

/// A rank that does not publish is named, with the flag that does not come.
#[test]
fn a_rank_that_does_not_publish_is_named() {
    const DEADLINE: Duration = Duration::from_millis(200);
    let world = World::new(2, 4);
    let team = Team::all(world.size());
    let options = ArenaOptions { deadline: DEADLINE, ..ArenaOptions::default() };
    let arenas: Vec<_> = world.ranks.iter().map(|rank| Arena::open(rank, options.clone()).unwrap()).collect();
    let make =
        |(arena, stream): (&Arena, &Stream)| ShardSet::<Bf16>::new(stream, arena, &team.member(arena.rank()).unwrap(), weights()).unwrap();
    let mut sets: Vec<_> = arenas.iter().zip(&world.streams).map(make).collect();
    for (set, stream) in sets.iter_mut().zip(&world.streams).take(1) {
        set.update(stream).unwrap().publish().unwrap();
    }
    let error = arenas[0].ticket(&world.streams[0]).unwrap().wait().unwrap_err();
    let Error::Symmetric(SymmetricError::Deadline { missing, flag, .. }) = &error else { panic!("{error}") };
    assert_eq!(missing.iter().map(|rank| rank.index()).collect::<Vec<_>>(), [1], "{error}");
    assert!(matches!(flag, Some(FlagName { operation: "shards of weights", .. })), "{error}");
}

/// The next step waits for passes on other streams, for the pulls of a pass that was given up, and for chains that are gone; and a chain that was made after the casts waits for those.
#[test]
fn an_update_waits_for_all_pulls() {
    for (seed, is_kept) in (0..seeds()).map(|seed| (seed, seed % 2 == 0)) {
        let (world, weights) = (World::new(2, seed), weights());
        let mut holders = holders::<Bf16>(&world, &weights);
        let others: Vec<_> = world.streams.iter().map(|stream| stream.device().stream().unwrap()).collect();
        let narrow = SumParts::<f32, bf16>::new(&world.runtime).unwrap();
        let mut read: Vec<_> = others.iter().map(|stream| Buffer::<bf16>::zeros(stream, 48 * 32).unwrap()).collect();
        let own = |(holder, stream): (&Holder<Bf16>, &Stream)| {
            let rows = |id| holder.set.own_rows(id).unwrap();
            let len = |(id, weight): (WeightId, &Weight)| (rows(id).end - rows(id).start) * weight.columns;
            holder.set.weights().map(|weight| (weight.0, Buffer::<f32>::zeros(stream, len(weight)).unwrap())).collect::<Vec<_>>()
        };
        let own: Vec<_> = holders.iter().zip(&world.streams).map(own).collect();
        let mut chains: Vec<Option<Chain<Bf16>>> = vec![None, None];
        for _ in 0..3 {
            for ((holder, stream), own) in holders.iter_mut().zip(&world.streams).zip(&own) {
                let mut updating = holder.set.update(stream).unwrap();
                for (id, own) in own {
                    narrow.round(stream, own.view(), updating.master(*id, 0).unwrap()).unwrap();
                }
                updating.publish().unwrap();
            }
            for (((holder, kept), stream), read) in holders.iter().zip(&mut chains).zip(&others).zip(&mut read) {
                let published = Published::of(&holder.set).unwrap();
                let mut chain = kept.take().unwrap_or_else(|| chain(holder, stream, |config| config).unwrap());
                let mut pass = published.forward(&mut chain).unwrap();
                let first = pass.next_weight().unwrap();
                Bf16::read(&Bf16::back(&world), stream, pass.take(first, stream).unwrap().tensor(), read).unwrap();
                drop(pass);
                *kept = Some(chain).filter(|_| is_kept);
            }
        }
        for stream in world.streams.iter().chain(&others) {
            stream.synchronize().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        }
    }
}

/// A rank that is gone in the midst of a step ends the passes of the others, which are told which rank and why.
#[test]
fn a_rank_that_is_gone_ends_the_passes_of_others() {
    let world = World::new(2, 7);
    let mut holders = holders::<Mxfp8>(&world, &weights());
    for (holder, stream) in holders.iter_mut().zip(&world.streams) {
        holder.publish(stream, 0).unwrap();
    }
    let (holder, stream) = (&holders[0], &world.streams[0]);
    let mut made = chain(holder, stream, |config| config).unwrap();
    let published = Published::of(&holder.set).unwrap();
    let mut pass = published.forward(&mut made).unwrap();
    let first = pass.next_weight().unwrap();
    pass.take(first, stream).unwrap();
    holders[1].arena.abort("its host is on fire").unwrap();
    let error = holder.arena.ticket(stream).and_then(|ticket| ticket.wait()).unwrap_err();
    let Error::Symmetric(SymmetricError::Aborted { rank, why }) = &error else { panic!("{error}") };
    assert!(rank.index() == 1 && why.contains("on fire"), "{error}");
    let second = pass.next_weight().unwrap();
    assert!(pass.take(second, stream).is_err() || pass.finish().is_err(), "nothing is pulled from a rank that is gone");
    assert!(published.backward(&mut made).is_err());
}
