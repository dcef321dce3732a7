//! Tensors whose tokens are traded for heads: a rank gives each other rank that one's heads of its own tokens, and gets its own heads of all tokens.

use oxtile_tile::launch::DeviceViewMut;
use oxtile_tile::num::Pod;

use super::element::Sum;
use super::memory::{Scratch, bytes, bytes_mut, copy};
use super::messages::Messages;
use crate::attention::{AttentionConfig, Layout};
use crate::comm::Rank;
use crate::runtime::{Result, Stream};
use crate::symmetric::{Pitched, Rows};
use crate::tensor::{Heads, HeadsMut, Strided};
use crate::thd::{Reorder, Share};
use oxtile_tile::launch::DeviceView;

/// What all tensors of a trade have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trade {
    /// The rank among those that trade.
    pub share: Share,
    pub layout: Layout,
    pub batches: u64,
}

/// Where the tokens of packed sequences lie.
pub(super) struct Order {
    pub reorder: Reorder,
    /// Sums of padded lengths.
    pub offsets: Scratch<u32>,
}

/// A tensor on its way, in blocks of a rank each.
pub(super) struct Lane<T> {
    trade: Trade,
    /// Tokens of all ranks.
    tokens: u64,
    /// Heads of each rank that are on their way, and elements of a head.
    heads: u64,
    size: u64,
    /// All heads of each rank, and the first of them that is on its way.
    of_rank: u64,
    first: u64,
    /// Ranks that have the same heads.
    sharing: u64,
    /// The sums of what those ranks give back.
    summed: Scratch<T>,
    /// To each rank, and from each: tokens of one rank, heads of one rank.
    sent: Scratch<T>,
    received: Scratch<T>,
    /// All tokens, heads of this rank.
    pub natural: Scratch<T>,
}

impl Trade {
    pub fn new(share: Share, config: &AttentionConfig) -> Self {
        let batches = if config.layout == Layout::Packed { 1 } else { config.batches };
        Self { share, layout: config.layout, batches }
    }

    fn ranks(&self) -> u64 {
        u64::from(self.share.world.get())
    }

    /// All messages of some lanes at once.
    pub fn exchange<'l, T: Pod>(
        &self,
        stream: &Stream,
        messages: &dyn Messages,
        lanes: impl Iterator<Item = &'l Lane<T>> + Clone,
    ) -> Result<()> {
        let me = self.share.rank;
        let others = || self.share.world.ranks().filter(|rank| *rank != me);
        let sends: Vec<_> = lanes.clone().flat_map(|lane| others().map(|to| (to, bytes(lane.sent.part(lane.block(to)))))).collect();
        let receives: Vec<_> =
            lanes.clone().flat_map(|lane| others().map(|from| (from, bytes_mut(lane.received.lend_part(lane.block(from)))))).collect();
        lanes.into_iter().try_for_each(|lane| copy(stream, lane.sent.part(lane.block(me)), lane.received.lend_part(lane.block(me))))?;
        messages.exchange(stream, &sends, &receives)
    }
}

impl<T: Pod> Lane<T> {
    /// Memory for a tensor of so many tokens of all ranks and heads of each, of which part `number` of `count` equal ones is on its way. So many ranks have the same
    /// heads.
    pub fn new(
        stream: &Stream,
        trade: Trade,
        name: &str,
        [tokens, of_rank, size]: [u64; 3],
        [number, count]: [u64; 2],
        sharing: u64,
    ) -> Result<Self> {
        let heads = of_rank / count;
        let len = trade.batches * tokens * heads * size;
        let of = || Scratch::new(stream, name, len);
        let summed = Scratch::new(stream, name, if sharing > 1 { len / sharing } else { 0 })?;
        let first = number * heads;
        Ok(Self { trade, tokens, heads, size, of_rank, first, sharing, summed, sent: of()?, received: of()?, natural: of()? })
    }

    /// Device memory.
    pub fn bytes(&self) -> u64 {
        [&self.sent, &self.received, &self.natural, &self.summed].into_iter().map(Scratch::bytes).sum()
    }

    /// Fills it with NaN, in stream order.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        [&self.sent, &self.received, &self.natural, &self.summed].into_iter().try_for_each(|memory| memory.spoil(stream))
    }

    fn block(&self, rank: Rank) -> std::ops::Range<u64> {
        let (at, len) = (u64::from(rank.index()), self.sent.len() / self.trade.ranks());
        at * len..(at + 1) * len
    }

    /// Where blocks lie in the tensor of all heads: `from` is the block. Each is of the heads that so many ranks share.
    fn blocks(&self, tensor: Strided<4>, sharing: u64) -> Vec<Rows> {
        let Strided { shape: [batches, rows, ..], strides: [batch, row, head, _] } = tensor;
        let (heads, size) = (self.heads, self.size);
        let [batch_step, row_step] = match self.trade.layout {
            Layout::Sbhd => [heads * size, batches * heads * size],
            Layout::Bshd | Layout::Packed => [rows * heads * size, heads * size],
        };
        // Heads that follow one another are one row.
        let (groups, width) = if head == size || heads <= 1 { (1, heads * size) } else { (heads, size) };
        let of = |(rank, sequence, group): (u64, u64, u64)| {
            let from = rank * self.sent.len() / self.trade.ranks() + sequence * batch_step + group * width;
            let to = sequence * batch + (rank / sharing * self.of_rank + self.first + group) * head;
            Rows { count: rows, width, from: Pitched { start: from, pitch: row_step }, to: Pitched { start: to, pitch: row } }
        };
        // Of heads that ranks share there is a block for each rank, or for all of them together.
        let blocks = 0..self.trade.ranks() * sharing / self.sharing;
        blocks.flat_map(|rank| (0..batches).flat_map(move |batch| (0..groups).map(move |group| (rank, batch, group)))).map(of).collect()
    }

    /// Copies a tensor of this rank's tokens into the blocks that are sent.
    pub fn pack(&self, stream: &Stream, tensor: &Heads<'_, T>) -> Result<()> {
        let copies: Vec<_> = self.blocks(tensor.layout(), self.sharing).into_iter().map(Rows::turned).collect();
        Rows::copy_all(stream, "all-to-all", tensor.view(), self.sent.lend(), &copies)
    }

    /// Copies the blocks that were received into a tensor of this rank's tokens.
    pub fn unpack(&self, stream: &Stream, layout: Strided<4>, target: DeviceViewMut<'_, T>) -> Result<()> {
        let blocks = if self.sharing > 1 { &self.summed } else { &self.received };
        Rows::copy_all(stream, "all-to-all", blocks.view(), target, &self.blocks(layout, 1))
    }

    /// Adds up the blocks of ranks that have the same heads, in their order.
    pub fn sum(&self, stream: &Stream, sum: &Sum<T, T>) -> Result<()> {
        if self.sharing == 1 {
            return Ok(());
        }
        let len = self.received.len() / self.trade.ranks();
        for head in 0..self.trade.ranks() / self.sharing {
            let (parts, first) = (len * self.sharing, head * self.sharing * len);
            let target = self.summed.lend_part(head * len..(head + 1) * len);
            sum(stream, self.received.part(first..first + parts), self.sharing as u32, len, target)?;
        }
        Ok(())
    }

    /// Brings blocks into the order of tokens.
    pub fn order(&self, stream: &Stream, packed: Option<&Order>) -> Result<()> {
        if let Some(Order { reorder, offsets }) = packed {
            return reorder.to_natural(stream, offsets.view(), self.received.view(), self.natural.lend(), self.heads * self.size);
        }
        let copies: Vec<_> = self.places().into_iter().map(Rows::turned).collect();
        Rows::copy_all(stream, "all-to-all", self.received.view(), self.natural.lend(), &copies)
    }

    /// Cuts the order of tokens into blocks.
    pub fn cut(&self, stream: &Stream, packed: Option<&Order>) -> Result<()> {
        if let Some(Order { reorder, offsets }) = packed {
            return reorder.to_rank_major(stream, offsets.view(), self.natural.view(), self.sent.lend(), self.heads * self.size);
        }
        Rows::copy_all(stream, "all-to-all", self.natural.view(), self.sent.lend(), &self.places())
    }

    /// Where the tokens of each rank lie in the order of tokens (`from`), and in blocks.
    fn places(&self) -> Vec<Rows> {
        let shape = match self.trade.layout {
            Layout::Bshd => [self.trade.batches, self.tokens, self.heads * self.size],
            Layout::Sbhd | Layout::Packed => [1, self.tokens, self.trade.batches * self.heads * self.size],
        };
        self.shares(shape)
    }

    fn shares(&self, shape: [u64; 3]) -> Vec<Rows> {
        let of_rank = |rank: Rank| {
            let start = self.block(rank).start;
            (Share { rank, ..self.trade.share }).copies(shape).into_iter().map(move |mut rows| {
                rows.to.start += start;
                rows
            })
        };
        self.trade.share.world.ranks().flat_map(of_rank).collect()
    }

    /// All tokens as a tensor of heads.
    pub fn heads(&self) -> Result<Heads<'_, T>> {
        let shape = [self.trade.batches, self.tokens, self.heads, self.size];
        match self.trade.layout {
            Layout::Bshd | Layout::Packed => Heads::bshd(self.natural.view(), shape),
            Layout::Sbhd => Heads::sbhd(self.natural.view(), shape),
        }
    }

    /// The same, to be written.
    pub fn heads_mut(&self) -> Result<HeadsMut<'_, T>> {
        let shape = [self.trade.batches, self.tokens, self.heads, self.size];
        match self.trade.layout {
            Layout::Bshd | Layout::Packed => HeadsMut::bshd(self.natural.lend(), shape),
            Layout::Sbhd => HeadsMut::sbhd(self.natural.lend(), shape),
        }
    }
}

/// A number for each head and token: `[batches, heads, tokens]`.
impl Lane<f32> {
    /// Where a rank's block lies in the numbers of all heads: `from` is the block.
    fn number_blocks(&self) -> Vec<Rows> {
        let Self { trade: Trade { batches, .. }, heads, tokens, of_rank, first, .. } = *self;
        let (rows, ranks) = (tokens / self.trade.ranks(), self.trade.ranks());
        let of = |rank| {
            let from = Pitched { start: rank * batches * heads * rows, pitch: heads * rows };
            let to = Pitched { start: (rank * of_rank + first) * rows, pitch: ranks * of_rank * rows };
            Rows { count: batches, width: heads * rows, from, to }
        };
        (0..ranks).map(of).collect()
    }

    /// As [`pack`](Self::pack).
    pub fn pack_numbers(&self, stream: &Stream, numbers: DeviceView<'_, f32>) -> Result<()> {
        let copies: Vec<_> = self.number_blocks().into_iter().map(Rows::turned).collect();
        Rows::copy_all(stream, "all-to-all", numbers, self.sent.lend(), &copies)
    }

    /// As [`unpack`](Self::unpack).
    pub fn unpack_numbers(&self, stream: &Stream, target: DeviceViewMut<'_, f32>) -> Result<()> {
        Rows::copy_all(stream, "all-to-all", self.received.view(), target, &self.number_blocks())
    }

    fn number_places(&self) -> Vec<Rows> {
        self.shares([self.trade.batches * self.heads, self.tokens, 1])
    }

    /// As [`order`](Self::order).
    pub fn order_numbers(&self, stream: &Stream, packed: Option<&Order>) -> Result<()> {
        if let Some(Order { reorder, offsets }) = packed {
            return reorder.numbers_to_natural(stream, offsets.view(), self.received.view(), self.natural.lend(), self.heads);
        }
        let copies: Vec<_> = self.number_places().into_iter().map(Rows::turned).collect();
        Rows::copy_all(stream, "all-to-all", self.received.view(), self.natural.lend(), &copies)
    }

    /// As [`cut`](Self::cut).
    pub fn cut_numbers(&self, stream: &Stream, packed: Option<&Order>) -> Result<()> {
        if let Some(Order { reorder, offsets }) = packed {
            return reorder.numbers_to_rank_major(stream, offsets.view(), self.natural.view(), self.sent.lend(), self.heads);
        }
        Rows::copy_all(stream, "all-to-all", self.natural.view(), self.sent.lend(), &self.number_places())
    }
}
