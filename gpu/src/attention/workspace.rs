//! What the blocks of a launch share, and leave as they found it.

use core::f32::consts::LN_2;

use oxtile_tile::prelude::*;

/// Word 0 counts tiles taken, word 1 warps that are done, then comes the largest score of each head. All are zero before and after a
/// launch.
#[derive(Clone, Copy)]
pub struct Workspace {
    /// As many as [`words`](Self::words) says.
    pub words: GlobalMut<u32>,
}

/// Words before those of the heads.
const HEADS: u64 = 2;

impl Workspace {
    /// Words for so many heads.
    pub const fn words(heads: u64) -> u64 {
        HEADS + heads
    }

    /// Takes the index of a tile after the first of each block; asked for early, as the answer takes its time.
    #[inline(always)]
    #[track_caller]
    pub fn take(&self) -> u32 {
        block::count()[0] + atomic::add_u32(&self.words, 0, 1)
    }

    /// Raises a head's largest score, in powers of 2, by one lane of the warp.
    #[inline(always)]
    #[track_caller]
    pub fn raise(&self, head: u32, score: f32) {
        if thread::lane() == 0 && score > f32::NEG_INFINITY {
            atomic::max_u32(&self.words, HEADS + u64::from(head), ordered(score));
        }
    }

    /// The warp, one of `warps` in each block, is done. The last one writes each head's largest score, natural, where there is room,
    /// and clears the words.
    #[inline(always)]
    #[track_caller]
    pub fn leave(&self, warps: u32, largest: Option<GlobalMut<f32>>) {
        if thread::lane() != 0 || atomic::take_ticket(&self.words, 1) != block::count()[0] * warps - 1 {
            return;
        }
        self.words.store(0, 0);
        self.words.store(1, 0);
        let Some(largest) = largest else { return };
        let mut head = 0;
        while head < largest.len() {
            largest.store(head, score_of(self.words.load(HEADS + head)) * LN_2);
            self.words.store(HEADS + head, 0);
            head += 1;
        }
    }
}

/// Bits in the order of the numbers, above 0.
#[inline(always)]
fn ordered(value: f32) -> u32 {
    let bits = value.to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

/// The number of [`ordered`] bits; -inf of 0.
#[inline(always)]
fn score_of(bits: u32) -> f32 {
    match bits {
        0 => f32::NEG_INFINITY,
        _ => f32::from_bits(if bits >> 31 == 1 { bits & !(1 << 31) } else { !bits }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordered_bits_are_in_order_and_come_back() {
        let numbers = [f32::MIN, -1.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, f32::MAX, f32::INFINITY];
        for pair in numbers.windows(2) {
            assert!(ordered(pair[0]) < ordered(pair[1]), "{pair:?}");
        }
        assert!(numbers.iter().all(|&number| ordered(number) > 0 && score_of(ordered(number)).to_bits() == number.to_bits()));
        assert_eq!(score_of(0), f32::NEG_INFINITY);
    }
}
