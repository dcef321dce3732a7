//! The warp: exchange and reductions among its 32 lanes.
//!
//! All 32 lanes must call each function at the same place, unless it takes a mask.

use crate::arch::{Barrier, Target, Warp};
use crate::num;

/// Lanes of a warp.
pub const LANES: u32 = 32;

/// All lanes.
pub const ALL: u32 = u32::MAX;

/// A value that lanes exchange: it fits a register.
pub trait Word: Copy {
    /// Its bits.
    fn to_word(self) -> u32;
    /// From its bits.
    fn from_word(word: u32) -> Self;
}

impl Word for u32 {
    #[inline(always)]
    fn to_word(self) -> u32 {
        self
    }

    #[inline(always)]
    fn from_word(word: u32) -> Self {
        word
    }
}

impl Word for f32 {
    #[inline(always)]
    fn to_word(self) -> u32 {
        self.to_bits()
    }

    #[inline(always)]
    fn from_word(word: u32) -> Self {
        Self::from_bits(word)
    }
}

/// Waits for all lanes and orders their memory accesses.
#[inline(always)]
#[track_caller]
pub fn sync() {
    Target::sync_warp(ALL);
}

/// The value of lane `lane ^ flip`.
#[inline(always)]
#[track_caller]
pub fn shuffle_xor<W: Word>(value: W, flip: u32) -> W {
    W::from_word(Target::shuffle_xor(ALL, value.to_word(), flip))
}

/// The value of lane `source` modulo 32: the instruction takes its five low bits (PTX ISA, "shfl.sync"), and so does the emulator.
#[inline(always)]
#[track_caller]
pub fn shuffle<W: Word>(value: W, source: u32) -> W {
    W::from_word(Target::shuffle_index(ALL, value.to_word(), source))
}

/// The value of lane `lane - delta`; lanes below `delta` keep their own.
#[inline(always)]
#[track_caller]
pub fn shuffle_up<W: Word>(value: W, delta: u32) -> W {
    W::from_word(Target::shuffle_up(ALL, value.to_word(), delta))
}

/// The value of lane `lane + delta`; the last `delta` lanes keep their own.
#[inline(always)]
#[track_caller]
pub fn shuffle_down<W: Word>(value: W, delta: u32) -> W {
    W::from_word(Target::shuffle_down(ALL, value.to_word(), delta))
}

/// Whether `predicate` holds in any lane.
#[inline(always)]
#[track_caller]
pub fn any(predicate: bool) -> bool {
    Target::any(ALL, predicate)
}

/// Whether `predicate` holds in every lane.
#[inline(always)]
#[track_caller]
pub fn all(predicate: bool) -> bool {
    Target::all(ALL, predicate)
}

/// One bit a lane: where `predicate` holds.
#[inline(always)]
#[track_caller]
pub fn ballot(predicate: bool) -> u32 {
    Target::ballot(ALL, predicate)
}

/// Whether this is the lane that the warp elects: one, the same at every call. The compiler then knows that one lane goes on, and that addresses are
/// the same in all that do.
#[inline(always)]
#[track_caller]
pub(crate) fn elect() -> bool {
    Target::elect(ALL)
}

/// The maximum over the lanes, in every lane.
#[inline(always)]
#[track_caller]
pub fn max_u32(value: u32) -> u32 {
    Target::max_u32(ALL, value)
}

/// The wrapping sum over the lanes, in every lane.
#[inline(always)]
#[track_caller]
pub fn sum_u32(value: u32) -> u32 {
    Target::add_u32(ALL, value)
}

/// The sum over the lanes, in every lane, added pairwise in butterfly order: the same bits every run, on every target.
/// A NaN in any lane gives NaN.
#[inline(always)]
#[track_caller]
pub fn sum_f32(mut value: f32) -> f32 {
    let mut flip = LANES / 2;
    while flip > 0 {
        value += shuffle_xor(value, flip);
        flip /= 2;
    }
    value
}

/// The maximum over the lanes, in every lane, by [`num::max`]: a NaN loses to a number, all NaN give 0x7FFFFFFF, and +0 is above -0.
#[inline(always)]
#[track_caller]
pub fn max_f32(mut value: f32) -> f32 {
    let mut flip = LANES / 2;
    while flip > 0 {
        value = num::max(value, shuffle_xor(value, flip));
        flip /= 2;
    }
    value
}
