//! The layer of the example with weights in shards: two ranks share its products, and two ranks share the weights of each part, in passes that pull them. It has the bits of the layer whose ranks have their parts
//! whole, which is held against float64 in `tensor_parallel_example`.

use std::time::Duration;

use half::bf16 as Half;
use oxtile::comm::{Member, Team, WorldSize};
use oxtile::overlap::{Method, OverlapMemory};
use oxtile::sharded::{Bf16, Captured, Chain, ChainConfig, Eager, Mode, Published, ShardSet, Weight, WeightId};
use oxtile::symmetric::{Arena, ArenaOptions};
use oxtile::{Graph, Result, Stream};

use crate::arenas::Arenas;
use crate::tensor_parallel_example::example::layer::{Layer, Products, Shape, Tensors, Way, Weights};
use crate::tensor_parallel_example::example::rank::given;

const SHAPE: Shape = Shape { tokens: 96, width: 32, hidden: 64 };
/// Ranks that share the products, and ranks that share the weights of each part.
const TWO: u32 = 2;
const STEPS: u32 = 2;

fn options() -> ArenaOptions {
    ArenaOptions { bytes: 1 << 20, deadline: Duration::from_secs(600), ..ArenaOptions::default() }
}

/// What a rank is given: a part of the weights, and tokens of its own.
fn tensors(part: u32, replica: u32) -> [Vec<Half>; 5] {
    let ([x, dy, ..], [.., up, bias, down]) = (given(SHAPE, part + TWO * replica, TWO), given(SHAPE, part, TWO));
    [x, dy, up, bias, down]
}

fn memory(arena: &Arena, member: &Member, out: &Stream) -> Result<OverlapMemory> {
    OverlapMemory::take(arena, member, SHAPE.bytes(WorldSize::new(TWO).unwrap())?, out)
}

/// The results of a replica's ranks, which have their parts whole.
fn whole(replica: u32, way: Way, seed: u64) -> Result<Vec<[Vec<f32>; 5]>> {
    let all = Arenas::with(TWO, seed, options());
    let (mut made, mut layers) = (Vec::new(), Vec::new());
    for (i, arena) in all.arenas.iter().enumerate() {
        let (compute, out) = (all.stream(i), all.world.ranks[i].device().urgent_stream()?);
        let member = Team::all(all.world.size()).member(arena.rank()).unwrap();
        let products = Products::new(&memory(arena, &member, &out)?, compute, SHAPE, way)?;
        made.push((products, Tensors::new(compute, SHAPE, TWO, tensors(i as u32, replica))?));
    }
    for (i, (products, tensors)) in made.iter().enumerate() {
        layers.push(products.bind(all.stream(i), tensors)?);
    }
    for (i, layer) in layers.iter_mut().enumerate() {
        layer.forward(all.stream(i)).and_then(|()| layer.backward(all.stream(i)))?;
    }
    drop(layers);
    made.iter().enumerate().map(|(i, (_, tensors))| tensors.results(all.stream(i))).collect()
}

/// How a chain is made, and the streams that a graph of its passes has beside those of the layer; none where passes are enqueued.
type Maker<M> = (fn(&Stream, &ShardSet<Bf16>, &ChainConfig) -> Result<Chain<Bf16, M>>, fn(&Chain<Bf16, M>) -> Vec<Stream>);

/// The results of all ranks, which pull their parts of the weights in every pass.
fn sharded<M: Mode>(way: Way, seed: u64, (make, streams): Maker<M>) -> Result<Vec<[Vec<f32>; 5]>> {
    let all = Arenas::with(TWO * TWO, seed, options());
    let (size, two) = (all.world.size(), WorldSize::new(TWO).unwrap());
    let teams = |stride: u32, first: [u32; 2]| first.map(|first| Team::strided(size, all.world.rank(first), stride, two).unwrap());
    let (of_products, of_weights) = (teams(1, [0, TWO]), teams(TWO, [0, 1]));
    let weights = [Weight::new("W1", [SHAPE.hidden / 2, SHAPE.width]), Weight::new("W2", [SHAPE.width, SHAPE.hidden / 2])];
    let (mut sets, mut made, mut outs) = (Vec::new(), Vec::new(), Vec::new());
    for (i, arena) in all.arenas.iter().enumerate() {
        let (compute, out) = (all.stream(i), all.world.ranks[i].device().urgent_stream()?);
        let member = of_products.iter().find_map(|team| team.member(arena.rank())).expect("every rank is in a team");
        let products = Products::new(&memory(arena, &member, &out)?, compute, SHAPE, way)?;
        for team in &of_weights {
            match team.member(arena.rank()) {
                Some(member) => sets.push(ShardSet::<Bf16>::new(compute, arena, &member, weights.to_vec())?),
                None => ShardSet::<Bf16>::take_part(arena, team, &weights)?,
            }
        }
        outs.push(out);
        let [x, dy, _, bias, _] = tensors(i as u32 % TWO, i as u32 / TWO);
        made.push((products, Tensors::new(compute, SHAPE, TWO, [x, dy, Vec::new(), bias, Vec::new()])?));
    }
    let ids = |set: &ShardSet<Bf16>| ["W1", "W2"].map(|name| set.find(name).expect("it is of the set"));
    for (i, set) in sets.iter_mut().enumerate() {
        let ([_, _, up, _, down], ids) = (tensors(i as u32 % TWO, 0), ids(set));
        let rows = ids.map(|id| set.own_rows(id).expect("it is of the set"));
        let mut updating = set.update(all.stream(i))?;
        for (((id, rows), values), weight) in ids.into_iter().zip(rows).zip([up, down]).zip(&weights) {
            let [start, end] = [rows.start, rows.end].map(|row| (row * weight.columns) as usize);
            updating.write(id, 0, &values[start..end])?;
        }
        updating.publish()?;
    }
    let chain = |(i, set)| make(all.stream(i), set, &ChainConfig::new(set, ids(set))?);
    let mut chains = sets.iter().enumerate().map(chain).collect::<Result<Vec<_>>>()?;
    let places: Vec<_> = chains.iter().map(Chain::places).collect();
    let mut layers = Vec::new();
    for (i, ((products, tensors), places)) in made.iter().zip(&places).enumerate() {
        // A backward pass takes the weights in reverse order.
        let forward = [places.forward(0)?[0].data.view(), places.forward(1)?[0].data.view()];
        let backward = [places.backward(1)?[0].data.view(), places.backward(0)?[0].data.view()];
        layers.push(products.bind_weights(all.stream(i), tensors, Weights { forward, backward })?);
    }
    let mut graphs = Vec::new();
    for step in 0..STEPS {
        for (i, ((layer, chain), set)) in layers.iter_mut().zip(&mut chains).zip(&sets).enumerate() {
            let (stream, pulls) = (all.stream(i), streams(chain));
            let mut both = || passes(layer, chain, set, stream, ids(set));
            if pulls.is_empty() {
                both()?;
                continue;
            }
            if step == 0 {
                let named: Vec<_> = [stream, &outs[i]].into_iter().chain(&pulls).collect();
                graphs.push(Graph::capture(&named, both)?);
            }
            graphs[i].replay(stream)?;
        }
    }
    for (i, arena) in all.arenas.iter().enumerate() {
        arena.ticket(all.stream(i))?.wait()?;
    }
    drop(graphs);
    drop(layers);
    made.iter().enumerate().map(|(i, (_, tensors))| tensors.results(all.stream(i))).collect()
}

/// Both passes, which pull `W1` and `W2` as the layer needs them.
fn passes<M: Mode>(
    layer: &mut Layer<'_>,
    chain: &mut Chain<Bf16, M>,
    set: &ShardSet<Bf16>,
    stream: &Stream,
    [up, down]: [WeightId; 2],
) -> Result<()> {
    let published = Published::of(set)?;
    let mut pass = published.forward(chain)?;
    pass.take(up, stream).and_then(|_weight| layer.forward_of_up(stream))?;
    pass.take(down, stream).and_then(|_weight| layer.forward_of_down(stream))?;
    pass.finish()?;
    let mut pass = published.backward(chain)?;
    pass.take(down, stream).and_then(|_weight| layer.backward_of_down(stream))?;
    pass.take(up, stream).and_then(|_weight| layer.backward_of_up(stream))?;
    pass.finish()
}

#[test]
fn weights_in_shards_change_no_bit() {
    let bits = |results: &[Vec<f32>; 5]| results.iter().flatten().map(|value| value.to_bits()).collect::<Vec<_>>();
    for (way, seed) in [Way::By(Method::Fused), Way::By(Method::Sequential), Way::Bulk].into_iter().zip(1..) {
        let expected = (0..TWO).map(|replica| whole(replica, way, seed)).collect::<Result<Vec<_>>>().unwrap().concat();
        assert!(bits(&expected[0]) != bits(&expected[TWO as usize]), "replicas have tokens of their own");
        let eager: Maker<Eager> = (Chain::new, |_| Vec::new());
        let captured: Maker<Captured> = (Chain::captured, |chain| vec![chain.pulls().clone()]);
        for (found, how) in [(sharded(way, seed, eager), "eager"), (sharded(way, seed, captured), "captured")] {
            let found = found.unwrap_or_else(|error| panic!("{way:?}, {how}: {error}"));
            for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!(bits(found) == bits(expected), "{way:?}, {how}, rank {rank}");
            }
        }
    }
}
