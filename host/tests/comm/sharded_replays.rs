//! Steps of weights in shards, replayed: codes, scales and amaxes of the formats that a product reads otherwise than by rows, against those of ranks that call each step.

use oxtile::num::bf16;
use oxtile::quantize::{Fp8Format, Nvfp4Format, QuantizedTensor};
use oxtile::sharded::{Fp8, Nvfp4, Nvfp4Squares};
use oxtile::sum_parts::SumParts;
use oxtile::{Buffer, Graph, PinnedBuffer, Result, Stream};

use crate::sharded::holders;
use crate::sharded_calls::{captured_chain, chain, weights};
use crate::sharded_ranks::{Oracle, values};
use crate::support::World;

/// Copies of tensors, which a graph may hold.
trait Kept: Oracle {
    /// Memory for a copy.
    fn like(stream: &Stream, tensor: &Self::Tensor) -> Result<Self::Tensor>;
    /// Copies codes, scales and amax.
    fn keep(stream: &Stream, tensor: &Self::Tensor, kept: &mut Self::Tensor) -> Result<()>;
}

impl Kept for Fp8 {
    fn like(stream: &Stream, tensor: &Self::Tensor) -> Result<Self::Tensor> {
        QuantizedTensor::<Fp8Format>::uninitialised(stream, tensor.shape, tensor.direction)
    }

    fn keep(stream: &Stream, tensor: &Self::Tensor, kept: &mut Self::Tensor) -> Result<()> {
        kept.data.copy_from(stream, &tensor.data)?;
        kept.scales.copy_from(stream, &tensor.scales)
    }
}

fn keep_nvfp4(stream: &Stream, tensor: &QuantizedTensor<Nvfp4Format>, kept: &mut QuantizedTensor<Nvfp4Format>) -> Result<()> {
    kept.data.copy_from(stream, &tensor.data)?;
    kept.scales.copy_from(stream, &tensor.scales)?;
    kept.amax.copy_from(stream, &tensor.amax)
}

impl Kept for Nvfp4 {
    fn like(stream: &Stream, tensor: &Self::Tensor) -> Result<Self::Tensor> {
        QuantizedTensor::uninitialised(stream, tensor.shape, tensor.direction)
    }

    fn keep(stream: &Stream, tensor: &Self::Tensor, kept: &mut Self::Tensor) -> Result<()> {
        keep_nvfp4(stream, tensor, kept)
    }
}

impl Kept for Nvfp4Squares {
    fn like(stream: &Stream, tensor: &Self::Tensor) -> Result<Self::Tensor> {
        QuantizedTensor::uninitialised(stream, tensor.shape, tensor.direction)
    }

    fn keep(stream: &Stream, tensor: &Self::Tensor, kept: &mut Self::Tensor) -> Result<()> {
        keep_nvfp4(stream, tensor, kept)
    }
}

/// Eight replays of whole steps, each of other values, and the same steps by calls of as many ranks.
fn replays_are_calls<F: Kept>(ranks: u32, seed: u64) {
    let ([world, other], weights) = ([seed, seed + 100].map(|seed| World::new(ranks, seed)), weights());
    let (mut captured, mut eager) = (holders::<F>(&world, &weights), holders::<F>(&other, &weights));
    let round = SumParts::<f32, bf16>::new(&world.runtime).unwrap();
    let mut sides = Vec::new();
    for (holder, stream) in captured.iter_mut().zip(&world.streams) {
        let mut chain = captured_chain(holder, stream, |config| config).unwrap();
        let rows: Vec<_> = holder.set.weights().map(|(id, _)| holder.set.own_rows(id).unwrap()).collect();
        let len = |(weight, rows): (&oxtile::sharded::Weight, &std::ops::Range<u64>)| (rows.end - rows.start) * weight.columns;
        let own: Vec<_> = weights.iter().zip(&rows).map(len).map(|len| Buffer::<f32>::zeros(stream, len).unwrap()).collect();
        let places = chain.places();
        let positions = 0..weights.len();
        let forward = positions.clone().map(|at| F::like(stream, &places.forward(at).unwrap()[0]).unwrap());
        let mut kept: Vec<_> = forward.chain(positions.map(|at| F::like(stream, &places.backward(at).unwrap()[0]).unwrap())).collect();
        let pulls = chain.pulls().clone();
        let graph = Graph::capture(&[stream, &pulls], || {
            let ids: Vec<_> = holder.set.weights().map(|(id, _)| id).collect();
            let mut updating = holder.set.update(stream)?;
            for (id, own) in ids.iter().zip(&own) {
                round.round(stream, own.view(), updating.master(*id, 0)?)?;
            }
            let published = updating.publish()?;
            let mut kept = kept.iter_mut();
            for is_backward in [false, true] {
                let mut pass = if is_backward { published.backward(&mut chain)? } else { published.forward(&mut chain)? };
                while let Some(id) = pass.next_weight() {
                    F::keep(stream, pass.take(id, stream)?.tensor(), kept.next().expect("a copy for each position"))?;
                }
                pass.finish()?;
            }
            Ok::<_, oxtile::Error>(())
        })
        .unwrap_or_else(|error| panic!("{}, {ranks} ranks: {error}", F::NAME));
        sides.push((chain, rows, own, kept, graph));
    }
    let mut chains: Vec<_> =
        eager.iter().zip(&other.streams).map(|(holder, stream)| chain(holder, stream, |config| config).unwrap()).collect();
    for step in 0..8 {
        for ((_, rows, own, _, graph), stream) in sides.iter_mut().zip(&world.streams) {
            for (((own, rows), weight), at) in own.iter_mut().zip(&*rows).zip(&weights).zip(0..) {
                let all = values(step, at, 0, [weight.rows, weight.columns]);
                let part = &all[(rows.start * weight.columns) as usize..(rows.end * weight.columns) as usize];
                own.copy_from_pinned(stream, &PinnedBuffer::from_slice(stream, part).unwrap()).unwrap();
            }
            graph.replay(stream).unwrap();
        }
        world.streams.iter().try_for_each(Stream::synchronize).unwrap();
        for (holder, stream) in eager.iter_mut().zip(&other.streams) {
            holder.publish(stream, step).unwrap();
        }
        for (rank, ((.., kept, _), stream)) in sides.iter().zip(&world.streams).enumerate() {
            let mut called = eager[rank].pass(&mut chains[rank], &other.streams[rank], false).unwrap();
            called.extend(eager[rank].pass(&mut chains[rank], &other.streams[rank], true).unwrap());
            for (at, (kept, called)) in kept.iter().zip(called).enumerate() {
                assert!([F::bytes(kept, stream)] == *called, "{}, rank {rank} of {ranks}, step {step}, position {at}", F::NAME);
            }
        }
    }
}

#[test]
fn replays_have_the_codes_and_scales_of_calls() {
    for ranks in [1, 2, 3] {
        replays_are_calls::<Fp8>(ranks, 1);
        replays_are_calls::<Nvfp4>(ranks, 2);
        replays_are_calls::<Nvfp4Squares>(ranks, 3);
    }
}
