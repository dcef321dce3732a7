//! How the key heads of a fused pass are cut into sections, each of which arrives by itself; blocks of keys.

use std::ops::Range;

use crate::attention::{AttentionConfig, Layout};
use crate::comm::WorldSize;
use oxtile_kernels::attention::sections_of;

/// Flags that a thread of the kernel remembers.
const REMEMBERED: u32 = u64::BITS;
/// Bytes of a row of the first section, at least: from there on a copy engine has its full rate (docs/performance/communication.md).
const ROW_BYTES: u64 = 1 << 10;

/// Keys of a block of packed sequences.
pub(super) const KEYS: u64 = 128;

/// How key heads of all batches are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sections {
    /// Key heads of the first section.
    pub first: u32,
    /// Whether all sections have as many; else the next has, and each one after it twice as many as the one before.
    pub equal: bool,
    /// Key heads of all batches.
    pub heads: u32,
}

impl Sections {
    /// Those of so many key heads, of all batches, of elements of so many bytes; of packed sequences equal ones: a row of the first section is long enough for copy engines, and a thread of the kernel remembers
    /// all flags.
    pub fn new(config: &AttentionConfig, heads: u64, world: WorldSize, size: u64) -> Self {
        let heads = u32::try_from(heads).unwrap_or(u32::MAX);
        let of_row = ROW_BYTES.div_ceil((config.head_size.min(config.value_size()) * size).max(1));
        let mut first = u32::try_from(of_row).unwrap_or(u32::MAX).clamp(1, heads.max(1));
        let equal = config.layout == Layout::Packed;
        let of = |first| Self { first, equal, heads };
        while first < heads && of(first).count() * world.get() > REMEMBERED {
            first *= 2;
        }
        of(first)
    }

    /// How many there are.
    pub fn count(self) -> u32 {
        if self.equal { self.heads.div_ceil(self.first) } else { sections_of(self.heads, self.first) }
    }

    /// The key heads of a section.
    pub fn heads(self, section: u32) -> Range<u64> {
        let [first, heads] = [self.first, self.heads].map(u64::from);
        let end = |section: u32| if self.equal { first * u64::from(section + 1) } else { first << section };
        let begin = if section == 0 { 0 } else { end(section - 1) };
        begin..end(section).min(heads)
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
                let attention = AttentionConfig { layout, batches, key_heads, heads: key_heads, head_size, ..AttentionConfig::default() };
                let sections = Sections::new(&attention, batches * key_heads, WorldSize::new(ranks).unwrap(), 2);
                let heads: Vec<u64> = (0..sections.count()).flat_map(|section| sections.heads(section)).collect();
                assert_eq!(heads, (0..batches * key_heads).collect::<Vec<_>>(), "{sections:?}");
                assert!((0..sections.count()).all(|section| !sections.heads(section).is_empty()), "{sections:?}");
                assert!(sections.count() * ranks <= REMEMBERED || sections.count() == 1, "{sections:?}");
            }
        }
    }
}
