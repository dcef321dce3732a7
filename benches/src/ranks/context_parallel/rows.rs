//! What is attended to.

use oxtile::attention::{AttentionConfig, Layout, Mask};
use oxtile::comm::{Rank, WorldSize};
use oxtile::context_parallel::Partition;
use serde::{Deserialize, Serialize};

use super::Passes;
use crate::bench::Size;
use crate::random::Random;

/// The seed of the places at which random lengths are cut: the same in every run.
const SEED: u64 = 5;
/// Tokens and sequences of packed rows.
const PACKED: [(u64, u64); 2] = [(32 << 10, 12), (LONG, 64)];
/// From so many tokens on a row has a fraction of the rounds.
const LONG: u64 = 128 << 10;
const LONG_FEWER: usize = 4;
/// From so many tokens on the fused schedule alone is held against one GPU, which attends once, and memory for keys of all ranks is capped.
const LONGEST: u64 = 512 << 10;
const LONGEST_FEWER: usize = 14;
const CAP: u64 = 8 << 30;

/// Tokens of all ranks, and heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    pub tokens: u64,
    pub heads: u64,
    pub key_heads: u64,
    pub head_size: u64,
    pub is_causal: bool,
    /// How many sequences of random lengths the tokens are; none: one, in a dense tensor.
    pub sequences: Option<u64>,
}

/// One long sequence, packed ones, and one that takes seconds.
pub fn rows(size: Size, world: u32) -> Vec<Row> {
    let ranks = u64::from(world);
    let dense =
        |tokens, [heads, key_heads]: [u64; 2], head_size| Row { tokens, heads, key_heads, head_size, is_causal: true, sequences: None };
    if size == Size::Smoke {
        let row = dense(8 * ranks, [ranks, ranks], 64);
        return vec![row, Row { heads: ranks + 1, key_heads: 1, sequences: Some(2), is_causal: false, ..row }];
    }
    let heads = [[16, 16], [32, 8]];
    let short = 32 << 10;
    let longest = LONGEST * if world == 2 { 1 } else { 2 };
    let long = [(short, heads[0]), (LONG, heads[0]), (short, heads[1]), (LONG, heads[1]), (8 << 10, heads[1])]
        .map(|(tokens, heads)| dense(tokens, heads, 128));
    let packed = |(tokens, sequences)| {
        let masks = move |heads| [true, false].map(|is_causal| Row { is_causal, sequences: Some(sequences), ..dense(tokens, heads, 128) });
        heads.into_iter().flat_map(masks)
    };
    long.into_iter().chain(PACKED.into_iter().flat_map(packed)).chain([dense(longest, heads[1], 128)]).collect()
}

impl Row {
    /// Rows and padded rows of each sequence. Padded ones are multiples of the chunks of all ranks, and are all tokens together.
    pub fn lengths(&self, world: u32) -> Vec<[u64; 2]> {
        let Some(sequences) = self.sequences else { return vec![[self.tokens; 2]] };
        let chunks = 2 * u64::from(world);
        let (units, mut random) = (self.tokens / chunks, Random::new(SEED));
        let cuts = random.order(units as usize - 1).into_iter().take(sequences as usize - 1);
        let mut ends: Vec<u64> = cuts.map(|cut| (cut as u64 + 1) * chunks).chain([self.tokens]).collect();
        ends.sort_unstable();
        let starts = [0].into_iter().chain(ends.clone());
        ends.iter().zip(starts).map(|(end, start)| [end - start - random.bits() % chunks, end - start]).collect()
    }

    /// Sums of lengths, and of padded lengths, from 0.
    pub fn ends(&self, world: u32) -> [Vec<u32>; 2] {
        let lengths = self.lengths(world);
        [0, 1].map(|of| {
            let sum = |sum: &mut u32, length: &[u64; 2]| {
                *sum += length[of] as u32;
                Some(*sum)
            };
            [0].into_iter().chain(lengths.iter().scan(0, sum)).collect()
        })
    }

    /// The tokens that a rank has, in the order of its rows.
    pub fn tokens_of(&self, rank: Rank, world: WorldSize) -> Vec<u64> {
        let [_, starts] = self.ends(world.get());
        let sequence = |(start, [_, padded]): (u32, [u64; 2])| {
            let rows = 0..padded / u64::from(world.get());
            rows.map(move |row| u64::from(start) + Partition::Zigzag.token(rank, world, padded, row))
        };
        starts.into_iter().zip(self.lengths(world.get())).flat_map(sequence).collect()
    }

    /// The attention of all tokens.
    pub fn config(&self) -> AttentionConfig {
        let Self { tokens, heads, key_heads, head_size, is_causal, sequences } = *self;
        AttentionConfig {
            layout: if sequences.is_some() { Layout::Packed } else { Layout::Bshd },
            batches: sequences.unwrap_or(1),
            queries: tokens,
            keys: tokens,
            heads,
            key_heads,
            head_size,
            mask: if is_causal { Mask::CausalBottomRight } else { Mask::Full },
            ..AttentionConfig::default()
        }
    }

    /// Floating-point operations of all ranks, as the field counts them: four or, with the backward pass, fourteen for each pair and element of a head,
    /// half of them with a causal mask.
    pub fn flops(&self, passes: Passes, world: u32) -> u64 {
        let pairs: u64 = self.lengths(world).iter().map(|[length, _]| length * length).sum();
        let times = if passes == Passes::Both { 14 } else { 4 };
        times * pairs * self.heads * self.head_size / if self.is_causal { 2 } else { 1 }
    }

    /// Why torch does not attend.
    pub fn why_no_peers(&self) -> Option<&'static str> {
        match () {
            () if self.is_longest() => Some("a call takes many seconds"),
            () if self.sequences.is_some() || !self.is_causal => Some("it has no context parallelism of packed sequences"),
            () => None,
        }
    }

    /// Whether a pass takes seconds.
    pub fn is_longest(&self) -> bool {
        self.tokens >= LONGEST
    }

    /// The cap on memory for keys of all ranks.
    pub fn gathered_bytes(&self) -> Option<u64> {
        self.is_longest().then_some(CAP)
    }

    /// Rounds are divided by this.
    pub fn fewer(&self) -> usize {
        match self.tokens {
            LONGEST.. => LONGEST_FEWER,
            LONG.. => LONG_FEWER,
            _ => 1,
        }
    }

    /// As tables print it: sequences, tokens, query and key heads, size of a head.
    pub fn label(&self, world: u32) -> String {
        let Self { tokens, heads, key_heads, head_size, is_causal, sequences } = *self;
        let (mask, of) = (if is_causal { "causal" } else { "full" }, sequences.map_or(String::new(), |count| format!("{count} of ")));
        format!("{of}{tokens}x{heads}:{key_heads}x{head_size} {mask}, {world} ranks")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_rows_are_all_tokens() {
        for (world, row) in [2, 4, 8].into_iter().flat_map(|world| rows(Size::Full, world).into_iter().map(move |row| (world, row))) {
            let lengths = row.lengths(world);
            assert_eq!(lengths.len() as u64, row.sequences.unwrap_or(1));
            assert_eq!(lengths.iter().map(|[_, padded]| padded).sum::<u64>(), row.tokens);
            let chunks = 2 * u64::from(world);
            assert!(
                lengths.iter().all(|[length, padded]| length <= padded && padded - length < chunks && padded % chunks == 0),
                "{lengths:?}"
            );
            assert_eq!(row.flops(Passes::Both, world) * 2, row.flops(Passes::Forward, world) * 7);
            let ranks = WorldSize::new(world).unwrap();
            let mut all: Vec<_> = ranks.ranks().flat_map(|rank| row.tokens_of(rank, ranks)).collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..row.tokens), "{}", row.label(world));
        }
    }

    #[test]
    fn operations_are_those_of_the_field() {
        let row = rows(Size::Full, 2)[1];
        assert_eq!(row.label(2), "131072x16:16x128 causal, 2 ranks");
        // 2 S^2 H D forward, 2.5 times that backward.
        assert_eq!(row.flops(Passes::Forward, 2), 2 * (128 << 10) * (128 << 10) * 16 * 128);
        assert_eq!(row.flops(Passes::Both, 2), 7 * (128 << 10) * (128 << 10) * 16 * 128);
    }
}
