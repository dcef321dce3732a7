//! How the key heads of a fused pass are cut into sections, each of which arrives by itself; blocks of keys.

use std::ops::Range;

use crate::attention::{AttentionConfig, Layout};
use crate::comm::WorldSize;

/// Flags that a thread of the kernel remembers.
const REMEMBERED: u32 = u64::BITS;
/// The most sections of dense tensors: each takes a channel of the arena.
const MOST: u64 = 8;
/// Bytes of a row of a section of packed sequences, at least, whose tiles are taken section by section: shorter rounds of tiles leave multiprocessors idle.
const ROW_BYTES: u64 = 1 << 10;
/// Bytes that a rank receives of a section from all others together, at least: of less the calls of copies take longer than the copies.
const SECTION_BYTES: u64 = 16 << 20;

/// Keys of a block of packed sequences.
pub(super) const KEYS: u64 = 128;

/// How key heads of all batches are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sections {
    /// Key heads of a section; the last one may have fewer.
    pub each: u32,
    /// Key heads of all batches.
    pub heads: u32,
}

impl Sections {
    /// Those of so many key heads, of all batches, of elements of so many bytes: as few heads as copies carry at the rate of the link, but [`MOST`] sections of dense tensors at most, two at least, and as many as a thread of the kernel remembers flags of.
    pub fn new(config: &AttentionConfig, heads: u64, world: WorldSize, size: u64) -> Self {
        let AttentionConfig { head_size, keys, layout, .. } = *config;
        let (ranks, widths) = (u64::from(world.get()), [head_size, config.value_size()]);
        let enough = match layout {
            Layout::Packed => ROW_BYTES.div_ceil((widths.into_iter().min().unwrap_or(0) * size).max(1)),
            Layout::Bshd | Layout::Sbhd => {
                let of_head = (ranks - 1) * (keys / ranks) * widths.into_iter().sum::<u64>() * size;
                SECTION_BYTES.div_ceil(of_head.max(1)).min(heads.div_ceil(2)).max(heads.div_ceil(MOST))
            }
        };
        let heads = u32::try_from(heads).unwrap_or(u32::MAX);
        let mut each = u32::try_from(enough).unwrap_or(u32::MAX).clamp(1, heads.max(1));
        while each < heads && heads.div_ceil(each) * world.get() > REMEMBERED {
            each = each.saturating_mul(2);
        }
        Self { each, heads }
    }

    /// How many there are.
    pub fn count(self) -> u32 {
        self.heads.div_ceil(self.each)
    }

    /// The key heads of a section.
    pub fn heads(self, section: u32) -> Range<u64> {
        let [each, heads] = [self.each, self.heads].map(u64::from);
        let begin = each * u64::from(section);
        begin..(begin + each).min(heads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each key head is in one section, in order, and a thread remembers the flags of all of them.
    #[test]
    fn every_head_is_in_one_section() {
        for (batches, key_heads, ranks, head_size) in [(1, 16, 2, 128), (1, 8, 8, 128), (3, 5, 4, 64), (2, 32, 64, 128), (1, 1, 2, 64)] {
            for layout in [Layout::Bshd, Layout::Packed] {
                let attention =
                    AttentionConfig { layout, batches, key_heads, heads: key_heads, head_size, keys: 4096, ..AttentionConfig::default() };
                let sections = Sections::new(&attention, batches * key_heads, WorldSize::new(ranks).unwrap(), 2);
                let heads: Vec<u64> = (0..sections.count()).flat_map(|section| sections.heads(section)).collect();
                assert_eq!(heads, (0..batches * key_heads).collect::<Vec<_>>(), "{sections:?}");
                assert!((0..sections.count()).all(|section| !sections.heads(section).is_empty()), "{sections:?}");
                assert!(sections.count() * ranks <= REMEMBERED || sections.count() == 1, "{sections:?}");
            }
        }
    }

    /// Long sequences have sections of few heads, short ones two.
    #[test]
    fn a_section_is_long_enough_for_the_link() {
        let count = |keys, key_heads, ranks| {
            let attention = AttentionConfig { keys, key_heads, heads: 16, head_size: 128, ..AttentionConfig::default() };
            Sections::new(&attention, key_heads, WorldSize::new(ranks).unwrap(), 2).count()
        };
        assert_eq!([count(8 << 10, 8, 2), count(8 << 10, 8, 4), count(32 << 10, 16, 2), count(32 << 10, 16, 4)], [2, 2, 8, 8]);
        assert_eq!([count(128 << 10, 16, 4), count(128 << 10, 8, 2), count(128 << 10, 12, 8), count(1 << 20, 1, 2)], [8, 8, 6, 1]);
    }
}
