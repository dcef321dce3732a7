//! Gathers of quantized shards in graphs.

use oxtile::Graph;
use oxtile::num::{e4m3, ue8m0};
use oxtile::quantize::Direction;
use oxtile::quantize::grouped::{GatherShards, GroupedMxfp8, Mxfp8Format, Quantized, RowShards, TensorGroup};
use oxtile::{Buffer, PinnedBuffer, Stream};

use crate::support::World;

/// Rows and columns of the wholes: the last rank's shards are padded, of the second member they are empty.
const SHAPES: [[u64; 2]; 2] = [[80, 40], [32, 16]];

fn values(round: u32, shape: [u64; 2]) -> Vec<f32> {
    (0..shape[0] * shape[1]).map(|at| (round + 1) as f32 * (at as f32 - 500.0) / 37.0).collect()
}

/// The codes and the scales of each member.
fn bytes(group: &Quantized<Mxfp8Format>, stream: &Stream) -> Vec<(Vec<e4m3>, Vec<ue8m0>)> {
    (0..group.len()).map(|member| group.to_vecs(stream, member).unwrap()).collect()
}

/// Captured from its first call on, for nothing is allocated or copied from the host in it; each replay gathers what the shards are then.
#[test]
fn a_gather_of_shards_is_captured_from_its_first_call() {
    for direction in [Direction::Rows, Direction::Columns] {
        let world = World::new(2, 1);
        let (gather, casts) =
            (GatherShards::<Mxfp8Format>::new(&world.runtime).unwrap(), GroupedMxfp8::<f32>::new(&world.runtime).unwrap());
        let rows = SHAPES.map(|shape| shape[0]);
        let mut ranks = Vec::new();
        for (rank, stream) in world.ranks.iter().zip(&world.streams) {
            let parts: Vec<_> = SHAPES
                .iter()
                .map(|[rows, columns]| {
                    let range = RowShards::new::<Mxfp8Format>(*rows, world.size()).range(oxtile::comm::Communicator::rank(rank));
                    ([range.end - range.start, *columns], range.start * columns)
                })
                .collect();
            let inputs: Vec<_> = parts.iter().map(|([rows, columns], _)| Buffer::<f32>::zeros(stream, rows * columns).unwrap()).collect();
            let shapes: Vec<_> = parts.iter().map(|(shape, _)| *shape).collect();
            let shards = Quantized::<Mxfp8Format>::uninitialised(stream, &shapes, direction, ()).unwrap();
            let whole = Quantized::<Mxfp8Format>::uninitialised(stream, &SHAPES, direction, ()).unwrap();
            let scratch = gather.scratch(rank, stream, &shards, &rows).unwrap();
            ranks.push((parts, inputs, shards, whole, scratch));
        }
        let mut graphs = Vec::new();
        for ((rank, stream), (.., shards, whole, scratch)) in world.ranks.iter().zip(&world.streams).zip(&mut ranks) {
            graphs.push(Graph::capture(&[stream], || gather.run_into(rank, stream, shards, scratch, whole)).unwrap());
        }
        for round in 0..3 {
            for ((stream, graph), (parts, inputs, shards, ..)) in world.streams.iter().zip(&graphs).zip(&mut ranks) {
                for ((([rows, columns], start), input), shape) in parts.iter().zip(&mut *inputs).zip(SHAPES) {
                    let part = &values(round, shape)[*start as usize..][..(rows * columns) as usize];
                    input.copy_from_pinned(stream, &PinnedBuffer::from_slice(stream, part).unwrap()).unwrap();
                }
                let members: Vec<_> = inputs.iter().map(Buffer::view).zip(parts.iter().map(|(shape, _)| *shape)).collect();
                let group = TensorGroup::new(stream, &members).unwrap();
                casts.quantize_into(stream, &group, shards).unwrap();
                graph.replay(stream).unwrap();
            }
            for (stream, (.., whole, _)) in world.streams.iter().zip(&ranks) {
                let inputs = SHAPES.map(|shape| (Buffer::from_slice(stream, &values(round, shape)).unwrap(), shape));
                let members: Vec<_> = inputs.iter().map(|(input, shape)| (input.view(), *shape)).collect();
                let expected = casts.quantize(stream, &TensorGroup::new(stream, &members).unwrap(), direction).unwrap();
                assert_eq!(bytes(whole, stream), bytes(&expected, stream), "{direction:?}, round {round}");
            }
        }
    }
}
