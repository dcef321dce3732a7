//! Keys and values of all ranks, and their gradients, in the order of tokens.

use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::Pod;

use super::config::ContextParallelConfig;
use super::core::{Core, elements};
use super::element::ContextElement;
use super::launches::owner_of;
use super::local::Local;
use super::memory::{Scratch, bytes_mut, copy};
use super::mover::{Both, Reads};
use crate::comm::Rank;
use crate::runtime::{Result, Stream};
use crate::symmetric::Rows;
use crate::thd::{Reorder, Share};

/// Memory for them.
pub(super) struct Gathered<T> {
    /// Keys, and values, of one rank after another.
    pub by_rank: [Scratch<T>; 2],
    /// In the order of tokens.
    pub natural: [Scratch<T>; 2],
    /// Gradients in the order of tokens, and of one rank after another.
    pub gradients: [Scratch<f32>; 2],
    pub parts: [Scratch<f32>; 2],
    /// Where the keys of packed sequences lie.
    pub offsets: Option<Scratch<u32>>,
    reorder: Option<Reorder>,
}

impl<T: Pod> Gathered<T> {
    /// Takes it: for gradients if a backward pass has all keys at once.
    pub fn new(stream: &Stream, config: &ContextParallelConfig, local: &Local, has_gradients: bool) -> Result<Self> {
        let [_, k, v] = local.packed.whole_inputs().map(elements);
        let ranks = u64::from(local.share.world.get());
        let added = if has_gradients { ranks } else { 0 };
        let both =
            |name| -> Result<[Scratch<T>; 2]> { Ok([Scratch::new(stream, name, ranks * k)?, Scratch::new(stream, name, ranks * v)?]) };
        let sums =
            |name| -> Result<[Scratch<f32>; 2]> { Ok([Scratch::new(stream, name, added * k)?, Scratch::new(stream, name, added * v)?]) };
        let packed = config.is_packed();
        Ok(Self {
            by_rank: both("keys of one rank after another")?,
            natural: both("keys in the order of tokens")?,
            gradients: sums("gradients in the order of tokens")?,
            parts: sums("gradients of one rank after another")?,
            offsets: if packed { Some(Scratch::new(stream, "offsets of sequences", local.sequences() + 1)?) } else { None },
            reorder: if packed { Some(Reorder::new(&stream.device().runtime(), local.share.world, local.share.partition)?) } else { None },
        })
    }

    /// Device memory of keys and values.
    pub fn key_bytes(&self) -> u64 {
        let tensors = self.by_rank.iter().chain(&self.natural).map(Scratch::bytes).sum::<u64>();
        tensors + self.offsets.as_ref().map_or(0, Scratch::bytes)
    }

    /// The same of their gradients.
    pub fn gradient_bytes(&self) -> u64 {
        self.gradients.iter().chain(&self.parts).map(Scratch::bytes).sum()
    }

    /// Fills it with NaN, in stream order.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        self.by_rank.iter().chain(&self.natural).try_for_each(|memory| memory.spoil(stream))?;
        self.gradients.iter().chain(&self.parts).try_for_each(|memory| memory.spoil(stream))
    }

    /// Gradients of the keys and values of a rank.
    pub fn of_rank(&self, rank: Rank, local: &Local) -> [DeviceView<'_, f32>; 2] {
        let (at, ranks) = (u64::from(rank.index()), u64::from(local.share.world.get()));
        self.parts.each_ref().map(|parts| {
            let len = parts.len() / ranks;
            parts.part(at * len..(at + 1) * len)
        })
    }

    /// Brings tensors of one rank after another into the order of tokens.
    fn order<E: Pod>(&self, stream: &Stream, local: &Local, from: &Scratch<E>, to: &Scratch<E>) -> Result<()> {
        self.turn(stream, local, from, to, true)
    }

    /// Brings gradients in the order of tokens to those of one rank after another.
    pub fn part(&self, stream: &Stream, local: &Local) -> Result<()> {
        let pairs = self.gradients.iter().zip(&self.parts);
        pairs.into_iter().try_for_each(|(from, to)| self.turn(stream, local, from, to, false))
    }

    fn turn<E: Pod>(&self, stream: &Stream, local: &Local, from: &Scratch<E>, to: &Scratch<E>, to_natural: bool) -> Result<()> {
        let width = from.len() / local.tokens[1].max(1);
        if let (Some(reorder), Some(offsets)) = (&self.reorder, &self.offsets) {
            let (offsets, from, to) = (offsets.view(), from.view(), to.lend());
            return match to_natural {
                true => reorder.to_natural(stream, offsets, from, to, width),
                false => reorder.to_rank_major(stream, offsets, from, to, width),
            };
        }
        let copies = order_of_tokens(local, from.len(), to_natural);
        Rows::copy_all(stream, "ContextParallel, the order of tokens", from.view(), to.lend(), &copies)
    }
}

/// The copies of a dense tensor of keys of all ranks, `len` elements, between one rank after another and the order of tokens.
pub(super) fn order_of_tokens(local: &Local, len: u64, to_natural: bool) -> Vec<Rows> {
    let (Share { world, .. }, width, sequences) = (local.share, len / local.tokens[1].max(1), local.sequences().max(1));
    let shape = [sequences, local.tokens[1] / sequences, width];
    let of_rank = |rank: Rank| {
        let start = u64::from(rank.index()) * len / u64::from(world.get());
        Share { rank, ..local.share }.copies(shape).into_iter().map(move |mut rows| {
            rows.to.start += start;
            if to_natural { rows.turned() } else { rows }
        })
    };
    world.ranks().flat_map(of_rank).collect()
}

impl<T: ContextElement> Core<'_, T> {
    /// Brings the keys and values of all ranks here, in the order of tokens; what `meanwhile` enqueues is done while they travel.
    pub fn gather_keys(&self, stream: &Stream, own: Both<'_>, reads: &Reads, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
        let (share, Some(gathered)) = (self.local.share, &self.gathered) else { unreachable!("a pass at once has memory for all keys") };
        let block = |all: &Scratch<T>, rank: Rank| {
            let len = all.len() / u64::from(share.world.get());
            u64::from(rank.index()) * len..(u64::from(rank.index()) + 1) * len
        };
        self.mover.publish(&self.comm, share, own, reads)?;
        for (all, own) in gathered.by_rank.iter().zip(own) {
            copy(&self.comm, own, bytes_mut(all.lend_part(block(all, share.rank))))?;
        }
        for step in 1..share.world.get() {
            let owner = owner_of(share, step);
            let into = gathered.by_rank.each_ref().map(|all| bytes_mut(all.lend_part(block(all, owner))));
            self.mover.fetch(&self.comm, share, step, own, into, reads)?;
        }
        meanwhile()?;
        let pairs = gathered.by_rank.iter().zip(&gathered.natural);
        pairs.into_iter().try_for_each(|(from, to)| gathered.order(stream, &self.local, from, to))?;
        self.join(stream)
    }
}
