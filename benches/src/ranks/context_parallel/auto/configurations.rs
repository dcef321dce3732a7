//! What is attended to: shapes of every kind that `Auto` chooses for, none of which takes long.

use oxtile::attention::{AttentionConfig, Sink, Window};
use oxtile::comm::{Rank, WorldSize};
use serde::{Deserialize, Serialize};

use super::super::rows::{Row, rows};
use super::super::{Direction, Passes};
use crate::bench::Size;

/// Attention whose schedule is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration {
    pub row: Row,
    /// Sequences of a dense tensor, each of all of the row's tokens.
    pub batches: u64,
    pub feature: Feature,
}

/// What attention has beside heads and a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Feature {
    Nothing,
    /// A query sees so many keys before its own.
    Window(u64),
    /// One that has no value to be learnt.
    Sink,
    SoftCap,
}

/// Thousands of tokens, heads and key heads, the size of a head, whether the mask is causal.
type Sizes = (u64, [u64; 2], u64, bool);

const THOUSAND: u64 = 1 << 10;
/// Chunks are of whole blocks of keys.
const BLOCK: u64 = 128;
const CAP: f32 = 30.0;

const TOKENS: [u64; 6] = [2, 4, 8, 16, 32, 64];
/// From so many on full masks take too long.
const LONG: u64 = 64;
const EQUAL: [u64; 2] = [16, 16];
const GROUPED: [u64; 2] = [32, 8];
const SHARED: [u64; 2] = [8, 1];
const HEADS: [[u64; 2]; 3] = [EQUAL, GROUPED, SHARED];

/// With heads of 64.
const NARROW: [(u64, &[[u64; 2]], bool); 5] =
    [(2, &HEADS, true), (8, &HEADS, true), (32, &HEADS, true), (8, &[EQUAL], false), (32, &[EQUAL], false)];
/// Several sequences in a dense tensor.
const BATCHES: [(u64, Sizes); 4] =
    [(4, (4, EQUAL, 128, true)), (2, (8, GROUPED, 128, true)), (3, (2, EQUAL, 64, false)), (2, (16, SHARED, 128, true))];
/// Packed sequences.
const PACKED: [(u64, Sizes); 9] = [
    (12, (32, EQUAL, 128, true)),
    (12, (32, EQUAL, 128, false)),
    (12, (32, GROUPED, 128, true)),
    (12, (32, GROUPED, 128, false)),
    (12, (16, EQUAL, 128, true)),
    (12, (16, SHARED, 128, false)),
    (64, (32, EQUAL, 128, true)),
    (64, (32, GROUPED, 128, false)),
    (64, (16, GROUPED, 64, true)),
];
const FEATURES: [(Feature, Sizes); 9] = [
    (Feature::Window(1024), (8, SHARED, 64, true)),
    (Feature::Window(1024), (16, GROUPED, 128, true)),
    (Feature::Window(1024), (32, EQUAL, 128, true)),
    (Feature::Window(4096), (32, GROUPED, 128, true)),
    (Feature::Window(4096), (64, GROUPED, 128, true)),
    (Feature::Sink, (8, EQUAL, 128, true)),
    (Feature::Sink, (32, GROUPED, 128, true)),
    (Feature::SoftCap, (8, EQUAL, 128, false)),
    (Feature::SoftCap, (16, GROUPED, 128, true)),
];

/// Dense ones, then those with batches, packed ones, and those with features.
pub fn configurations(size: Size, world: u32) -> Vec<Configuration> {
    if size == Size::Smoke {
        return rows(size, world).into_iter().map(Configuration::of).collect();
    }
    let chunks = BLOCK * 2 * u64::from(world);
    let row = |(tokens, [heads, key_heads], head_size, is_causal): Sizes| {
        let tokens = (tokens * THOUSAND).next_multiple_of(chunks);
        Row { tokens, heads, key_heads, head_size, is_causal, sequences: None }
    };
    let mut sizes: Vec<Sizes> = Vec::new();
    for tokens in TOKENS {
        for heads in HEADS {
            sizes.push((tokens, heads, 128, true));
            if tokens < LONG {
                sizes.push((tokens, heads, 128, false));
            }
        }
    }
    for (tokens, heads, is_causal) in NARROW {
        sizes.extend(heads.iter().map(|heads| (tokens, *heads, 64, is_causal)));
    }
    let mut all: Vec<Configuration> = sizes.into_iter().map(|sizes| Configuration::of(row(sizes))).collect();
    all.extend(BATCHES.map(|(batches, sizes)| Configuration { batches, ..Configuration::of(row(sizes)) }));
    all.extend(PACKED.map(|(sequences, sizes)| Configuration::of(Row { sequences: Some(sequences), ..row(sizes) })));
    all.extend(FEATURES.map(|(feature, sizes)| Configuration { feature, ..Configuration::of(row(sizes)) }));
    all
}

impl Configuration {
    /// That of a row, without anything else.
    pub fn of(row: Row) -> Self {
        Self { row, batches: 1, feature: Feature::Nothing }
    }

    /// The attention of all tokens.
    pub fn config(&self) -> AttentionConfig {
        let plain = AttentionConfig { batches: self.row.sequences.unwrap_or(self.batches), ..self.row.config() };
        match self.feature {
            Feature::Nothing => plain,
            Feature::Window(left) => AttentionConfig { window: Window { left: Some(left), right: None }, ..plain },
            Feature::Sink => AttentionConfig { sink: Sink::OffByOne, ..plain },
            Feature::SoftCap => AttentionConfig { soft_cap: Some(CAP), ..plain },
        }
    }

    /// The tokens that a rank has, in the order of its rows: those of one sequence after another are counted on.
    pub fn tokens_of(&self, rank: Rank, world: WorldSize) -> Vec<u64> {
        let (of_one, all) = (self.row.tokens_of(rank, world), self.row.tokens);
        (0..self.batches).flat_map(|batch| of_one.iter().map(move |token| batch * all + token)).collect()
    }

    /// Floating-point operations of all ranks in a pass, as the field counts them.
    pub fn flops(&self, pass: Direction, world: u32) -> u64 {
        let [forward, both] = [Passes::Forward, Passes::Both].map(|passes| self.batches * self.row.flops(passes, world));
        let all = if pass == Direction::Forward { forward } else { both - forward };
        match self.feature {
            // Of the triangle that a causal mask leaves, a band.
            Feature::Window(left) => {
                let hidden = (1.0 - left as f64 / self.row.tokens as f64).max(0.0).powi(2);
                (all as f64 * (1.0 - hidden)) as u64
            }
            _ => all,
        }
    }

    /// As tables print it.
    pub fn label(&self, world: u32) -> String {
        let batches = if self.batches == 1 { String::new() } else { format!("{} batches of ", self.batches) };
        let feature = match self.feature {
            Feature::Nothing => String::new(),
            Feature::Window(left) => format!(", window {left}"),
            Feature::Sink => ", sink".to_owned(),
            Feature::SoftCap => ", soft cap".to_owned(),
        };
        format!("{batches}{}{feature}", self.row.label(world))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use oxtile::num::bf16;

    use super::*;

    #[test]
    fn at_least_60_differ_and_each_is_valid() {
        let (all, world) = (configurations(Size::Full, 2), WorldSize::new(2).unwrap());
        let labels: BTreeSet<String> = all.iter().map(|of| of.label(2)).collect();
        assert!(labels.len() == all.len() && all.len() >= 60, "{} of {}", labels.len(), all.len());
        for of in &all {
            let (config, name) = (of.config(), of.label(2));
            config.validate().unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(config.choose::<bf16>().is_ok() && config.choose_backward::<bf16>().is_ok(), "{name}");
            // Two chunks a rank.
            assert!(config.queries.is_multiple_of(4) && config.queries == config.keys, "{name}");
            let mut tokens: Vec<u64> = world.ranks().flat_map(|rank| of.tokens_of(rank, world)).collect();
            tokens.sort_unstable();
            assert!(tokens.into_iter().eq(0..of.batches * of.row.tokens), "{name}");
        }
    }

    #[test]
    fn every_kind_is_there() {
        for world in [2, 3, 4, 8] {
            let all = configurations(Size::Full, world);
            let any = |is: &dyn Fn(&Configuration) -> bool| all.iter().any(is);
            assert!(all.iter().all(|of| of.row.tokens.is_multiple_of(2 * BLOCK * u64::from(world))));
            for head_size in [64, 128] {
                for is_causal in [true, false] {
                    assert!(any(&|of| of.row.head_size == head_size && of.row.is_causal == is_causal));
                }
            }
            assert!([2, 3, 4].iter().all(|batches| any(&|of| of.batches == *batches)));
            assert!([12, 64].iter().all(|sequences| any(&|of| of.row.sequences == Some(*sequences))));
            let features = [Feature::Window(1024), Feature::Window(4096), Feature::Sink, Feature::SoftCap];
            assert!(features.iter().all(|feature| any(&|of| of.feature == *feature)));
        }
    }

    #[test]
    fn operations_of_a_window_are_those_of_a_band() {
        let of = |feature| Configuration { feature, ..configurations(Size::Full, 2)[0] };
        let [all, half, whole] =
            [Feature::Nothing, Feature::Window(1024), Feature::Window(2048)].map(|feature| of(feature).flops(Direction::Forward, 2));
        // 2 S^2 H D with a causal mask; a window of half the tokens hides a quarter.
        assert_eq!([all, half, whole], [2 * 2048 * 2048 * 16 * 128, 3 * 2048 * 2048 * 16 * 128 / 2, all]);
        assert_eq!(of(Feature::Nothing).flops(Direction::Backward, 2) * 2, all * 5);
        assert_eq!(of(Feature::Window(1024)).label(2), "2048x16:16x128 causal, 2 ranks, window 1024");
        let batches = Configuration { batches: 2, ..of(Feature::Sink) };
        assert_eq!(batches.label(2), "2 batches of 2048x16:16x128 causal, 2 ranks, sink");
        assert_eq!(batches.flops(Direction::Forward, 2), 2 * all);
    }
}
