//! The pieces of a rank's keys that a fused pass puts at others: chunks of dense tensors; of packed sequences, whose chunks the device alone knows, all of a rank's keys.

use std::ops::Range;

use super::config::ContextParallelConfig;
use crate::attention::{AttentionConfig, Layout};
use crate::comm::Rank;
use crate::symmetric::{Pitched, Rows};
use crate::tensor::Heads;
use crate::thd::Share;

/// Chunks of a rank.
const CHUNKS: usize = 2;

/// Which rank reads which piece, and where it lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    config: ContextParallelConfig,
    share: Share,
    /// Whether own keys are read where the caller has them: no block of keys has some of another chunk.
    pub own_apart: bool,
}

impl Pieces {
    /// Those of a kernel with blocks of so many keys.
    pub fn new(config: ContextParallelConfig, share: Share, block: u64) -> Self {
        let pieces = Self { config, share, own_apart: true };
        Self { own_apart: config.is_packed() || pieces.rows().is_multiple_of(block), ..pieces }
    }

    /// Rows of a piece.
    pub fn rows(&self) -> u64 {
        let world = self.share.world;
        self.config.attention.keys / if self.config.is_packed() { world.get().into() } else { self.config.partition.chunks(world) }
    }

    /// The chunks of a rank: which of its own, and the number in the sequence.
    pub fn chunks_of(&self, rank: Rank) -> [(u64, u64); CHUNKS] {
        let (last, rank) = (self.config.partition.chunks(self.share.world) - 1, u64::from(rank.index()));
        [(0, rank), (1, last - rank)]
    }

    /// The pieces of a rank's keys: where each is among its own, and among those of all ranks.
    pub fn of(&self, rank: Rank) -> Vec<(u64, u64)> {
        if self.config.is_packed() { vec![(0, rank.index().into())] } else { self.chunks_of(rank).into() }
    }

    /// Whether a rank's queries see any key of a chunk of the sequence.
    fn sees(&self, reader: Rank, keys: u64) -> bool {
        let (rows, window) = (self.rows(), self.config.window());
        let right = if self.config.is_causal() { Some(0) } else { window.right };
        let [first, last] = [keys * rows, (keys + 1) * rows - 1];
        self.chunks_of(reader).into_iter().any(|(_, chunk)| {
            let [begin, end] = [chunk * rows, (chunk + 1) * rows - 1];
            window.left.is_none_or(|left| last + left >= begin) && right.is_none_or(|right| first <= end + right)
        })
    }

    /// The pieces of an owner that a reader loads: of dense tensors those of which it sees any, or all, where a block of keys has some of several chunks. What is masked is
    /// multiplied by zero there.
    pub fn seen(&self, owner: Rank, reader: Rank) -> impl Iterator<Item = (u64, u64)> + use<> {
        let (pieces, all) = (*self, self.config.is_packed() || !self.own_apart);
        self.of(owner).into_iter().filter(move |(_, chunk)| all || pieces.sees(reader, *chunk))
    }

    /// Whether a reader loads anything of an owner's.
    pub fn reads(&self, reader: Rank, owner: Rank) -> bool {
        self.seen(owner, reader).next().is_some()
    }

    /// Whether a kernel may be done without having waited for each piece: the lengths of packed sequences decide what it loads, and a window hides what comes for the sake of others.
    pub fn may_skip(&self) -> bool {
        self.config.is_packed() || (!self.own_apart && self.config.window().left.or(self.config.window().right).is_some())
    }

    /// The ranks that see either chunk of this one are among these.
    pub fn readers(&self) -> [Range<u64>; CHUNKS] {
        self.chunks_of(self.share.rank).map(|(_, chunk)| {
            let readers = || self.share.world.ranks().filter(move |reader| self.sees(*reader, chunk)).map(|rank| u64::from(rank.index()));
            readers().min().unwrap_or(0)..readers().max().map_or(0, |last| last + 1)
        })
    }

    /// Rows of a tensor of this rank's keys or values, and their places among those of all ranks.
    pub fn copies<T>(&self, tensor: &Heads<'_, T>, (half, number): (u64, u64), heads: Range<u64>) -> Vec<Rows> {
        let ([_, _, of_row, size], [_, row, head]) = (tensor.shape(), tensor.strides());
        let AttentionConfig { layout, batches, keys, .. } = self.config.attention;
        let batches = if layout == Layout::Bshd { batches } else { 1 };
        let (chunk, pitch) = (self.rows(), of_row * size);
        let of_batch = |batch: u64| {
            // Heads of the section that are of this batch.
            let [begin, end] = [heads.start, heads.end].map(|at| at.saturating_sub(batch * of_row).min(of_row));
            let together = if head == size { (end - begin).max(1) } else { 1 };
            (begin..end).step_by(together as usize).map(move |first| Rows {
                count: chunk,
                width: together * size,
                from: Pitched { start: (2 * batch + half) * chunk * row + first * head, pitch: row },
                to: Pitched { start: (batch * keys + number * chunk) * pitch + first * size, pitch },
            })
        };
        (0..batches).flat_map(of_batch).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{Mask, Window};
    use crate::comm::WorldSize;

    /// Each pair of ranks, token by token: what a reader sees is what it is sent, and what an owner adds up.
    #[test]
    fn what_is_seen_is_sent() {
        let bounds = [None, Some(0), Some(1), Some(3), Some(4), Some(9), Some(30)];
        let windows = bounds.into_iter().flat_map(|left| bounds.map(|right| Window { left, right }));
        for (ranks, window, mask) in windows
            .flat_map(|window| [1, 2, 3, 5].map(|ranks| (ranks, window)))
            .flat_map(|(ranks, window)| [Mask::Full, Mask::CausalBottomRight].map(|mask| (ranks, window, mask)))
        {
            let (rows, tokens) = (4, 8 * ranks);
            let attention = AttentionConfig { queries: tokens, keys: tokens, head_size: 64, mask, window, ..AttentionConfig::default() };
            let world = WorldSize::new(ranks as u32).unwrap();
            let config = ContextParallelConfig::new(attention);
            let of = |rank| Pieces::new(config, Share { world, rank, partition: config.partition }, rows);
            let right = |query: u64| match mask {
                Mask::Full => window.right.map_or(tokens, |right| query + right),
                _ => query,
            };
            let sees = |query: u64, key: u64| window.left.is_none_or(|left| key + left >= query) && key <= right(query);
            let tokens_of = |(_, chunk): (u64, u64)| chunk * rows..(chunk + 1) * rows;
            for reader in world.ranks() {
                for owner in world.ranks() {
                    let pieces = of(owner);
                    let sees_any = |piece: &(u64, u64)| {
                        let mut queries = pieces.chunks_of(reader).into_iter().flat_map(tokens_of);
                        queries.any(|query| tokens_of(*piece).any(|key| sees(query, key)))
                    };
                    let expected: Vec<_> = pieces.of(owner).into_iter().filter(sees_any).collect();
                    assert_eq!(pieces.seen(owner, reader).collect::<Vec<_>>(), expected, "{config:?}: {reader} of {owner}");
                    for ((half, _), readers) in pieces.of(owner).into_iter().zip(pieces.readers()) {
                        let is_seen = expected.iter().any(|(of, _)| *of == half);
                        assert!(!is_seen || readers.contains(&u64::from(reader.index())), "{config:?}: {reader} of {owner}");
                    }
                }
            }
        }
    }
}
