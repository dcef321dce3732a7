//! The set of a format, and its chains.

use std::collections::VecDeque;

use anyhow::{Result, ensure};
use half::bf16 as Half;
use oxtile::comm::Member;
use oxtile::num::bf16;
use oxtile::quantize::{Direction, Mxfp8 as Mxfp8Casts, Nvfp4Squares as Nvfp4Casts};
use oxtile::sharded::{Bf16, Chain, ChainConfig, Mxfp8, Nvfp4Squares, Places, Published, PullStreams, ShardSet, WeightFormat, WeightId};
use oxtile::sum_parts::SumParts;
use oxtile::symmetric::Arena;
use oxtile::{Buffer, Event, Runtime, Stream};

use super::layers::{Format, Layers, repeated};
use super::{Ahead, Waited};

/// A set whose shards are published, with chains that pull 1 and 2 weights ahead, and 1 by two streams.
pub trait Shards: Send {
    /// A forward pass; `product` comes after the weight of its place was taken.
    fn pass(&mut self, ahead: Ahead, stream: &Stream, product: &mut dyn FnMut(usize) -> Result<()>) -> Result<()>;

    /// The same. Returns events where the stream comes to each weight, and at the end of the weight's pull.
    fn waits(
        &mut self,
        ahead: Ahead,
        waited: Waited,
        stream: &Stream,
        product: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Vec<[Event; 2]>>;

    /// Where whole weights are, if they are bf16.
    fn places(&self, ahead: Ahead) -> Option<Places<Bf16>>;

    /// Compares the first and the last weight of a pass with the cast of the whole.
    fn check(&mut self, runtime: &Runtime, stream: &Stream, pattern: &[Half]) -> Result<()>;

    /// Bytes of device memory that the slots took, and those that the plans have.
    fn slots(&self) -> [u64; 2];
}

/// Makes set and chains, then publishes this rank's rows. All memory is taken before the first wait for another rank.
pub fn published(stream: &Stream, arena: &Arena, member: &Member, layers: Layers, pattern: &[Half]) -> Result<Box<dyn Shards>> {
    Ok(match layers.format {
        Format::Bf16 => Box::new(Held::<Bf16>::new(stream, arena, member, layers, pattern)?),
        Format::Mxfp8 => Box::new(Held::<Mxfp8>::new(stream, arena, member, layers, pattern)?),
        Format::Nvfp4 => Box::new(Held::<Nvfp4Squares>::new(stream, arena, member, layers, pattern)?),
    })
}

/// Bytes of an arena for the shards.
pub fn arena_bytes(member: &Member, layers: Layers) -> oxtile::Result<u64> {
    let (team, weights) = (member.team(), layers.weights());
    match layers.format {
        Format::Bf16 => ShardSet::<Bf16>::arena_bytes(team, &weights),
        Format::Mxfp8 => ShardSet::<Mxfp8>::arena_bytes(team, &weights),
        Format::Nvfp4 => ShardSet::<Nvfp4Squares>::arena_bytes(team, &weights),
    }
}

/// A format whose whole weights can be compared.
trait Whole: WeightFormat {
    fn places(_: &Chain<Self>) -> Option<Places<Bf16>> {
        None
    }

    /// Whether a weight is the cast of these values, of `[rows, columns]`.
    fn is_cast_of(tensor: &Self::Tensor, values: &[Half], shape: [u64; 2], runtime: &Runtime, stream: &Stream) -> Result<bool>;
}

impl Whole for Bf16 {
    fn places(chain: &Chain<Self>) -> Option<Places<Bf16>> {
        Some(chain.places())
    }

    fn is_cast_of(tensor: &Self::Tensor, values: &[Half], _: [u64; 2], _: &Runtime, stream: &Stream) -> Result<bool> {
        Ok(tensor.data.to_vec_as::<Half>(stream)? == values)
    }
}

impl Whole for Mxfp8 {
    fn is_cast_of(tensor: &Self::Tensor, values: &[Half], shape: [u64; 2], runtime: &Runtime, stream: &Stream) -> Result<bool> {
        let values = Buffer::<bf16>::from_slice(stream, values)?;
        let whole = Mxfp8Casts::<bf16>::new(runtime)?.quantize(stream, values.view(), shape, Direction::Rows)?;
        Ok(tensor.data.to_vec(stream)? == whole.data.to_vec(stream)? && tensor.scales.to_vec(stream)? == whole.scales.to_vec(stream)?)
    }
}

impl Whole for Nvfp4Squares {
    fn is_cast_of(tensor: &Self::Tensor, values: &[Half], shape: [u64; 2], runtime: &Runtime, stream: &Stream) -> Result<bool> {
        let values = Buffer::<bf16>::from_slice(stream, values)?;
        let whole = Nvfp4Casts::<bf16>::new(runtime)?.quantize(stream, values.view(), shape)?.rows;
        Ok(tensor.data.to_vec(stream)? == whole.data.to_vec(stream)? && tensor.scales.to_vec(stream)? == whole.scales.to_vec(stream)?)
    }
}

struct Held<F: WeightFormat> {
    set: ShardSet<F>,
    chains: [Chain<F>; 3],
    layers: Layers,
    slots: [u64; 2],
}

impl<F: Whole> Held<F> {
    fn new(stream: &Stream, arena: &Arena, member: &Member, layers: Layers, pattern: &[Half]) -> Result<Self> {
        let mut set = ShardSet::<F>::new(stream, arena, member, layers.weights())?;
        let ids: Vec<WeightId> = set.weights().map(|(id, _)| id).collect();
        let before = stream.device().usage().bytes;
        let chain = |distance, streams| {
            Chain::new(stream, &set, &ChainConfig { distance, streams, ..ChainConfig::new(&set, ids.iter().copied())? })
        };
        let chains = [chain(1, PullStreams::One)?, chain(2, PullStreams::One)?, chain(1, PullStreams::Two)?];
        let slots = [stream.device().usage().bytes - before, chains.iter().map(|chain| chain.plan().bytes()).sum()];
        let round = SumParts::<bf16, bf16>::new(&stream.device().runtime())?;
        let own = |id: &WeightId| {
            let ([_, columns], rows) = (layers.shape(id.index()), set.own_rows(*id)?);
            Buffer::<bf16>::from_slice(stream, &repeated(pattern, id.index(), rows.start * columns, (rows.end - rows.start) * columns))
        };
        let own = ids.iter().map(own).collect::<oxtile::Result<Vec<_>>>()?;
        let mut updating = set.update(stream)?;
        for (id, own) in ids.iter().zip(&own) {
            round.round(stream, own.view(), updating.master(*id, 0)?)?;
        }
        updating.publish()?;
        Ok(Self { set, chains, layers, slots })
    }
}

impl<F: Whole> Shards for Held<F> {
    fn pass(&mut self, ahead: Ahead, stream: &Stream, product: &mut dyn FnMut(usize) -> Result<()>) -> Result<()> {
        let published = Published::of(&self.set)?;
        let (mut pass, mut at) = (published.forward(&mut self.chains[ahead as usize])?, 0);
        while let Some(weight) = pass.next_weight() {
            pass.take(weight, stream)?;
            product(at)?;
            at += 1;
        }
        Ok(pass.finish()?)
    }

    fn waits(
        &mut self,
        ahead: Ahead,
        waited: Waited,
        stream: &Stream,
        product: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Vec<[Event; 2]>> {
        let published = Published::of(&self.set)?;
        let chain = &mut self.chains[ahead as usize];
        let distance = chain.plan().distance();
        let (mut pass, mut at, mut waits) = (published.forward(chain)?, 0, Vec::new());
        let mut ends = (0..distance).map(|_| pass.record_pulls()).collect::<oxtile::Result<VecDeque<_>>>()?;
        while let Some(weight) = pass.next_weight() {
            let came = stream.record()?;
            pass.take(weight, stream)?;
            // It has enqueued the pull that is so far ahead.
            ends.push_back(pass.record_pulls()?);
            let end = ends.pop_front().expect("one was recorded");
            if (at == 0) == (waited == Waited::First) {
                waits.push([came, end]);
            }
            product(at)?;
            at += 1;
        }
        pass.finish()?;
        Ok(waits)
    }

    fn places(&self, ahead: Ahead) -> Option<Places<Bf16>> {
        F::places(&self.chains[ahead as usize])
    }

    fn check(&mut self, runtime: &Runtime, stream: &Stream, pattern: &[Half]) -> Result<()> {
        let (layers, places) = (self.layers, self.chains[0].places());
        self.pass(Ahead::One, stream, &mut |at| {
            if at > 0 && at + 1 < layers.places() {
                return Ok(());
            }
            let [rows, columns] = layers.shape(at);
            let values = repeated(pattern, at, 0, rows * columns);
            let is_cast = F::is_cast_of(&places.forward(at)?[0], &values, [rows, columns], runtime, stream)?;
            ensure!(is_cast, "weight {at} in {}: what was pulled is not the cast of the whole weight", F::NAME);
            Ok(())
        })
    }

    fn slots(&self) -> [u64; 2] {
        self.slots
    }
}
