//! Tensors whose tokens are traded for heads: a rank gives each other rank that one's heads of its own tokens, and gets its own heads of all tokens.

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::detour::Within;
use super::element::Sum;
use super::memory::{Place, Scratch};
use crate::attention::{AttentionConfig, Layout};
use crate::comm::Rank;
use crate::runtime::{Result, Stream};
use crate::symmetric::{Arena, Pitched, Rows};
use crate::tensor::{Heads, HeadsMut, Strided};
use crate::thd::{Reorder, Share};

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

/// Which way a lane is used.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// From the ranks that have the tokens to the one that has the heads.
    Given,
    /// Back.
    Taken,
    /// One way in one pass, and back in the other.
    Both,
}

/// A tensor on its way, in blocks of a rank each.
pub(super) struct Lane<T> {
    pub(super) trade: Trade,
    /// Tokens of all ranks.
    pub(super) tokens: u64,
    /// Heads of each rank that are on their way, and elements of a head.
    pub(super) heads: u64,
    size: u64,
    /// All heads of each rank, and the first of them that is on its way.
    pub(super) of_rank: u64,
    pub(super) first: u64,
    /// Ranks that have the same heads.
    sharing: u64,
    /// The sums of what those ranks give back.
    summed: Scratch<T>,
    /// To each rank, and from each: tokens of one rank, heads of one rank.
    pub sent: Scratch<T>,
    pub received: Place<T>,
    /// What other ranks put of packed sequences, in blocks too: apart from what is received, which may not be unpacked when they give heads for the next pass.
    arrived: Place<T>,
    /// All tokens, heads of this rank.
    pub natural: Place<T>,
}

impl Trade {
    pub fn new(share: Share, config: &AttentionConfig) -> Self {
        let batches = if config.layout == Layout::Packed { 1 } else { config.batches };
        Self { share, layout: config.layout, batches }
    }

    pub(super) fn ranks(&self) -> u64 {
        u64::from(self.share.world.get())
    }

    /// Whether the lengths of sequences are known on the device alone.
    pub(super) fn is_packed(&self) -> bool {
        self.layout == Layout::Packed
    }
}

impl<T: Pod> Lane<T> {
    /// Memory for a tensor of so many tokens of all ranks and heads of each, of which `heads` from `first` on are on their way. So many ranks have the same
    /// heads. Other ranks put heads into memory of the arena, if there is one: into their places among all tokens, or of packed sequences, and on the way back, into blocks.
    pub fn new(
        stream: &Stream,
        (trade, arena): (Trade, Option<&Arena>),
        name: &str,
        [tokens, of_rank, size]: [u64; 3],
        [first, heads]: [u64; 2],
        (sharing, way): (u64, Way),
    ) -> Result<Self> {
        let len = trade.batches * tokens * heads * size;
        let (by_messages, is_packed) = (arena.is_none(), trade.is_packed());
        let of = |is_used| if is_used { len } else { 0 };
        Ok(Self {
            summed: Scratch::new(stream, name, if sharing > 1 { len / sharing } else { 0 })?,
            sent: Scratch::new(stream, name, of(by_messages || is_packed && way != Way::Given))?,
            received: Place::new(stream, arena, name, of(by_messages || way != Way::Given))?,
            arrived: Place::new(stream, arena, name, of(!by_messages && is_packed && way != Way::Taken))?,
            natural: Place::new(stream, arena.filter(|_| !is_packed && way != Way::Taken), name, len)?,
            first,
            trade,
            tokens,
            heads,
            size,
            of_rank,
            sharing,
        })
    }

    /// Bytes of all tokens: the most that a copy within the device has at once.
    pub fn kept(&self) -> u64 {
        self.natural.bytes()
    }

    /// Device memory.
    pub fn bytes(&self) -> u64 {
        self.memory().map(Scratch::bytes).sum()
    }

    /// Fills it with NaN, in stream order.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        self.memory().try_for_each(|memory| memory.spoil(stream))
    }

    fn memory(&self) -> impl Iterator<Item = &Scratch<T>> {
        [&self.sent, &*self.received, &*self.arrived, &*self.natural, &self.summed].into_iter()
    }

    /// A rank's block.
    pub fn block(&self, rank: Rank) -> std::ops::Range<u64> {
        let (at, len) = (u64::from(rank.index()), self.block_len());
        at * len..(at + 1) * len
    }

    fn block_len(&self) -> u64 {
        self.natural.len() / self.trade.ranks()
    }

    /// How often rows of heads are repeated, and the elements of each: heads that follow one another are one row.
    fn rows_of_heads(&self, head: u64) -> [u64; 2] {
        if head == self.size || self.heads <= 1 { [1, self.heads * self.size] } else { [self.heads, self.size] }
    }

    /// Where the block of a rank lies in the tensor of all heads: `from` is the block. Each is of the heads that so many ranks share.
    fn block_of(&self, tensor: Strided<4>, rank: u64, sharing: u64) -> Vec<Rows> {
        let Strided { shape: [batches, rows, ..], strides: [batch, row, head, _] } = tensor;
        let (heads, size) = (self.heads, self.size);
        let [batch_step, row_step] = match self.trade.layout {
            Layout::Sbhd => [heads * size, batches * heads * size],
            Layout::Bshd | Layout::Packed => [rows * heads * size, heads * size],
        };
        let [groups, width] = self.rows_of_heads(head);
        let of = |(sequence, group): (u64, u64)| {
            let from = rank * self.block_len() + sequence * batch_step + group * width;
            let to = sequence * batch + (rank / sharing * self.of_rank + self.first + group) * head;
            Rows { count: rows, width, from: Pitched { start: from, pitch: row_step }, to: Pitched { start: to, pitch: row } }
        };
        (0..batches).flat_map(|batch| (0..groups).map(move |group| (batch, group))).map(of).collect()
    }

    /// The same of all ranks.
    fn blocks(&self, tensor: Strided<4>, sharing: u64) -> Vec<Rows> {
        // Of heads that ranks share there is a block for each rank, or for all of them together.
        let blocks = 0..self.trade.ranks() * sharing / self.sharing;
        blocks.flat_map(|rank| self.block_of(tensor, rank, sharing)).collect()
    }

    /// Where heads of a tensor of this rank's tokens (`from`) are put at the rank that attends with them: to their places among all tokens, or of packed sequences
    /// into the block of this rank.
    pub fn given(&self, tensor: Strided<4>, to: Rank) -> Vec<Rows> {
        let (me, rank) = (self.trade.share.rank, u64::from(to.index()));
        if self.trade.is_packed() {
            let here = |rows: Rows| Rows { from: self.moved(rows.from, to, me), ..rows }.turned();
            return self.block_of(tensor, rank, self.sharing).into_iter().map(here).collect();
        }
        let Strided { shape: [batches, ..], strides: [batch, row, head, _] } = tensor;
        let [batch_step, token_step] = match self.trade.layout {
            Layout::Sbhd => [self.heads * self.size, batches * self.heads * self.size],
            Layout::Bshd | Layout::Packed => [self.tokens * self.heads * self.size, self.heads * self.size],
        };
        let [groups, width] = self.rows_of_heads(head);
        let chunks = self.trade.share.copies([1, self.tokens, 1]);
        let of = |(chunk, sequence, group): (Rows, u64, u64)| {
            let from = sequence * batch + chunk.to.start * row + (rank / self.sharing * self.of_rank + self.first + group) * head;
            let to = sequence * batch_step + chunk.from.start * token_step + group * width;
            Rows { count: chunk.width, width, from: Pitched { start: from, pitch: row }, to: Pitched { start: to, pitch: token_step } }
        };
        let all = chunks.into_iter().flat_map(|chunk| (0..batches).map(move |sequence| (chunk, sequence)));
        all.flat_map(|(chunk, sequence)| (0..groups).map(move |group| (chunk, sequence, group))).map(of).collect()
    }

    /// Where results of a rank's tokens ([`results`](Self::results), `from`) are put at that rank: into the block of this one.
    pub fn taken(&self, to: Rank) -> Vec<Rows> {
        self.taken_from(to, self.token_shape())
    }

    pub(super) fn taken_from(&self, to: Rank, shape: [u64; 3]) -> Vec<Rows> {
        let (me, len) = (self.trade.share.rank, self.block_len());
        if self.trade.is_packed() {
            let at = |rank: Rank| Pitched { start: self.block(rank).start, pitch: len };
            return vec![Rows { count: 1, width: len, from: at(to), to: at(me) }];
        }
        let rows = Share { rank: to, ..self.trade.share }.copies(shape).into_iter();
        rows.map(|rows| Rows { to: Pitched { start: rows.to.start + self.block(me).start, ..rows.to }, ..rows }).collect()
    }

    /// A place in the block of one rank, in that of another.
    pub(super) fn moved(&self, place: Pitched, from: Rank, to: Rank) -> Pitched {
        Pitched { start: place.start - self.block(from).start + self.block(to).start, ..place }
    }

    /// What is put back: all tokens, or of packed sequences their blocks.
    pub fn results(&self) -> &Scratch<T> {
        if self.trade.is_packed() { &self.sent } else { &self.natural }
    }

    /// Where heads arrive that are put.
    pub fn arrival(&self) -> &Place<T> {
        if self.trade.is_packed() { &self.arrived } else { &self.natural }
    }

    /// Copies a tensor of this rank's tokens into the blocks that are sent.
    pub fn pack(&self, stream: &Stream, tensor: &Heads<'_, T>) -> Result<()> {
        let copies: Vec<_> = self.blocks(tensor.layout(), self.sharing).into_iter().map(Rows::turned).collect();
        Rows::copy_all(stream, "all-to-all", tensor.view(), self.sent.lend(), &copies)
    }

    /// Whether results of this rank's tokens go through a block here too: those of shared heads are added up.
    pub fn is_summed(&self) -> bool {
        self.sharing > 1
    }

    /// Copies results of this rank's tokens from where they were computed into a tensor of them, unless they are to be [added up](Self::is_summed).
    pub fn keep(&self, within: Within<'_>, layout: Strided<4>, target: DeviceViewMut<'_, T>) -> Result<()> {
        let me = self.trade.share.rank;
        if self.is_summed() {
            return Ok(());
        }
        let rows: Vec<_> = match self.trade.is_packed() {
            true => self.block_of(layout, me.index().into(), 1),
            // The way that heads came.
            false => self.given(layout, me).into_iter().map(Rows::turned).collect(),
        };
        within.copy("all-to-all", self.results().view(), target, &rows)
    }

    /// Copies the blocks that were received of other ranks, or what blocks add up to, into a tensor of this rank's tokens.
    pub fn unpack(&self, within: Within<'_>, layout: Strided<4>, target: DeviceViewMut<'_, T>) -> Result<()> {
        if self.is_summed() {
            return within.copy("all-to-all", self.summed.view(), target, &self.blocks(layout, 1));
        }
        let rows: Vec<_> = self.others().flat_map(|rank| self.block_of(layout, rank, 1)).collect();
        within.copy("all-to-all", self.received.view(), target, &rows)
    }

    /// The numbers of the other ranks.
    pub(super) fn others(&self) -> impl Iterator<Item = u64> {
        let me = self.trade.share.rank;
        self.trade.share.world.ranks().filter(move |rank| *rank != me).map(|rank| rank.index().into())
    }

    /// Adds up the blocks of ranks that have the same heads, in their order.
    pub fn sum(&self, stream: &Stream, sum: &Sum<T, T>) -> Result<()> {
        if self.sharing == 1 {
            return Ok(());
        }
        let len = self.block_len();
        for head in 0..self.trade.ranks() / self.sharing {
            let (parts, first) = (len * self.sharing, head * self.sharing * len);
            let target = self.summed.lend_part(head * len..(head + 1) * len);
            sum(stream, self.received.part(first..first + parts), self.sharing as u32, len, target)?;
        }
        Ok(())
    }

    /// The blocks of all ranks, whichever way they came.
    pub(super) fn blocks_here(&self) -> DeviceView<'_, T> {
        if self.arrived.len() > 0 { self.arrived.view() } else { self.received.view() }
    }

    /// Brings blocks into the order of tokens.
    pub fn order(&self, stream: &Stream, packed: Option<&Order>) -> Result<()> {
        if let Some(Order { reorder, offsets }) = packed {
            return reorder.to_natural(stream, offsets.view(), self.blocks_here(), self.natural.lend(), self.heads * self.size);
        }
        let copies: Vec<_> = self.shares(self.token_shape()).into_iter().map(Rows::turned).collect();
        Rows::copy_all(stream, "all-to-all", self.received.view(), self.natural.lend(), &copies)
    }

    /// Cuts the order of tokens into blocks, but for this rank's where that is [kept](Self::keep).
    pub fn cut(&self, stream: &Stream, packed: Option<&Order>) -> Result<()> {
        if let Some(Order { reorder, offsets }) = packed {
            return reorder.to_rank_major(stream, offsets.view(), self.natural.view(), self.sent.lend(), self.heads * self.size);
        }
        Rows::copy_all(stream, "all-to-all", self.natural.view(), self.sent.lend(), &self.sent_shares(self.token_shape()))
    }

    /// Sequences, tokens of each, and elements of a token, as all tokens lie.
    fn token_shape(&self) -> [u64; 3] {
        match self.trade.layout {
            Layout::Bshd => [self.trade.batches, self.tokens, self.heads * self.size],
            Layout::Sbhd | Layout::Packed => [1, self.tokens, self.trade.batches * self.heads * self.size],
        }
    }

    /// [Those](Self::shares) of the ranks to which results go by blocks.
    pub(super) fn sent_shares(&self, shape: [u64; 3]) -> Vec<Rows> {
        let me = self.trade.share.rank;
        let ranks = self.trade.share.world.ranks().filter(|rank| *rank != me || self.is_summed());
        ranks.flat_map(|rank| self.shares_of(rank, shape)).collect()
    }

    /// Where the tokens of each rank lie in the order of tokens (`from`), and in blocks.
    pub(super) fn shares(&self, shape: [u64; 3]) -> Vec<Rows> {
        self.trade.share.world.ranks().flat_map(|rank| self.shares_of(rank, shape)).collect()
    }

    fn shares_of(&self, rank: Rank, shape: [u64; 3]) -> impl Iterator<Item = Rows> {
        let start = self.block(rank).start;
        (Share { rank, ..self.trade.share }).copies(shape).into_iter().map(move |mut rows| {
            rows.to.start += start;
            rows
        })
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
