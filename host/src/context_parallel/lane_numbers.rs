//! Numbers on their way, as tensors are ([`lane`](super::lane)).

use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::detour::Within;
use super::lane::{Lane, Order, Trade};
use crate::comm::Rank;
use crate::runtime::{Result, Stream};
use crate::symmetric::{Pitched, Rows};

/// A number for each head and token: `[batches, heads, tokens]`.
impl Lane<f32> {
    /// Where a rank's block lies in the numbers of all heads: `from` is the block.
    fn block_of_numbers(&self, rank: u64) -> Rows {
        let Self { trade: Trade { batches, .. }, heads, tokens, of_rank, first, .. } = *self;
        let (rows, ranks) = (tokens / self.trade.ranks(), self.trade.ranks());
        let from = Pitched { start: rank * batches * heads * rows, pitch: heads * rows };
        let to = Pitched { start: (rank * of_rank + first) * rows, pitch: ranks * of_rank * rows };
        Rows { count: batches, width: heads * rows, from, to }
    }

    fn number_blocks(&self) -> Vec<Rows> {
        (0..self.trade.ranks()).map(|rank| self.block_of_numbers(rank)).collect()
    }

    /// As [`given`](Self::given), of the numbers of all heads.
    pub fn given_numbers(&self, to: Rank) -> Vec<Rows> {
        let (me, rank) = (self.trade.share.rank, u64::from(to.index()));
        let block = self.block_of_numbers(rank);
        if self.trade.is_packed() {
            return vec![Rows { from: self.moved(block.from, to, me), ..block }.turned()];
        }
        let (rows, tokens) = (self.tokens / self.trade.ranks(), self.tokens);
        let of = |(chunk, batch): (Rows, u64)| {
            let from = Pitched { start: block.to.start + batch * block.to.pitch + chunk.to.start, pitch: rows };
            let to = Pitched { start: batch * self.heads * tokens + chunk.from.start, pitch: tokens };
            Rows { count: self.heads, width: chunk.width, from, to }
        };
        let chunks = self.trade.share.copies([1, tokens, 1]).into_iter();
        chunks.flat_map(|chunk| (0..self.trade.batches).map(move |batch| (chunk, batch))).map(of).collect()
    }

    /// As [`taken`](Self::taken).
    pub fn taken_numbers(&self, to: Rank) -> Vec<Rows> {
        self.taken_from(to, self.number_shape())
    }

    /// As [`pack`](Self::pack).
    pub fn pack_numbers(&self, stream: &Stream, numbers: DeviceView<'_, f32>) -> Result<()> {
        let copies: Vec<_> = self.number_blocks().into_iter().map(Rows::turned).collect();
        Rows::copy_all(stream, "all-to-all", numbers, self.sent.lend(), &copies)
    }

    /// As [`keep`](Self::keep).
    pub fn keep_numbers(&self, within: Within<'_>, target: DeviceViewMut<'_, f32>) -> Result<()> {
        let me = self.trade.share.rank;
        let rows = match self.trade.is_packed() {
            true => vec![self.block_of_numbers(me.index().into())],
            false => self.given_numbers(me).into_iter().map(Rows::turned).collect(),
        };
        within.copy("all-to-all", self.results().view(), target, &rows)
    }

    /// As [`unpack`](Self::unpack).
    pub fn unpack_numbers(&self, within: Within<'_>, target: DeviceViewMut<'_, f32>) -> Result<()> {
        let rows: Vec<_> = self.others().map(|rank| self.block_of_numbers(rank)).collect();
        within.copy("all-to-all", self.received.view(), target, &rows)
    }

    fn number_shape(&self) -> [u64; 3] {
        [self.trade.batches * self.heads, self.tokens, 1]
    }

    /// As [`order`](Self::order).
    pub fn order_numbers(&self, stream: &Stream, packed: Option<&Order>) -> Result<()> {
        if let Some(Order { reorder, offsets }) = packed {
            return reorder.numbers_to_natural(stream, offsets.view(), self.blocks_here(), self.natural.lend(), self.heads);
        }
        let copies: Vec<_> = self.shares(self.number_shape()).into_iter().map(Rows::turned).collect();
        Rows::copy_all(stream, "all-to-all", self.received.view(), self.natural.lend(), &copies)
    }

    /// As [`cut`](Self::cut).
    pub fn cut_numbers(&self, stream: &Stream, packed: Option<&Order>) -> Result<()> {
        if let Some(Order { reorder, offsets }) = packed {
            return reorder.numbers_to_rank_major(stream, offsets.view(), self.natural.view(), self.sent.lend(), self.heads);
        }
        Rows::copy_all(stream, "all-to-all", self.natural.view(), self.sent.lend(), &self.sent_shares(self.number_shape()))
    }
}
