//! How a magnitude comes onto E2M1's grid: to the nearest value, or up or down by chance.
//!
//! Stochastic rounding, TransformerEngine `common/util/ptx.cuh`: with `a = |x * multiplier|`, `step(a)` the distance of
//! the grid's values at `a` (0.5 below 2, 1 below 4, else 2) and `u` a random number in [0, 1),
//! `t = fma(u, step(a), a)` goes down to the grid; beyond 6 it is 6, the sign is that of `x`, NaN gives +6.
//!
//! | | `u` of an element | calls of Philox a block |
//! |---|---|---|
//! | [`Stochastic8`] | `r / 2^8`, as TransformerEngine: low by half a draw, and by chance of 1/512 at most | 1 |
//! | [`Stochastic16`] | `(r + 1/2) / 2^16`, without that bias | 2 |
//!
//! With `n = 128 / bits` draws a call of [Philox](super::philox), the draw of element `i` of a direction is number `i % n` of
//! the call for subsequence `i / n`, from the low bits of its first word on; the columnwise cast counts the elements of the
//! transpose and sets bit 63 of the subsequence. So it depends on the seed, the offset and the element alone, not on the launch.

use oxtile_tile::num::{e2m1, e2m1x8, e5m2x4, fma, max, min};
use oxtile_tile::prelude::*;

use super::BLOCK;
use super::philox::philox;

/// The blocks of the rowwise cast draw from this stream.
pub const ROWS: u64 = 0;
/// Those of the columnwise cast, counted in the transposed tensor, from this one.
pub const COLUMNS: u64 = 1 << 63;

/// A rule of rounding. Its kernels take `seed` and, in device memory, so that a captured graph may be replayed with others,
/// `[offset]`; or nothing.
pub trait Rounding: Copy {
    /// Whether it draws: the length of the kernels' `offset`.
    const DRAWS: u64;

    /// The rule with a kernel's arguments.
    fn new(seed: u64, offset: &Global<u64>) -> Self;

    /// The codes of eight magnitudes times 256, the first or the second `half` of block number `block` of a stream. `None` if one
    /// is a NaN or may saturate.
    fn encode(self, stream: u64, block: u64, half: usize, scaled: [f32; 8], signs: u32) -> Option<e2m1x8>;

    /// The code of one value, whatever it is.
    fn encode_one(self, stream: u64, block: u64, element: u32, x: f32) -> e2m1;
}

/// To the nearest value, ties to the even code.
#[derive(Clone, Copy)]
pub struct Nearest;

impl Rounding for Nearest {
    const DRAWS: u64 = 0;

    #[inline(always)]
    fn new(_: u64, _: &Global<u64>) -> Self {
        Self
    }

    #[inline(always)]
    fn encode(self, _: u64, _: u64, _: usize, scaled: [f32; 8], signs: u32) -> Option<e2m1x8> {
        e2m1x8::from_scaled(scaled, signs)
    }

    #[inline(always)]
    fn encode_one(self, _: u64, _: u64, _: u32, x: f32) -> e2m1 {
        e2m1::from_f32(x)
    }
}

macro_rules! stochastic {
    ($(#[$doc:meta])* $name:ident: $bits:literal bits, |$draw:ident| $low:expr, above $anchor:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name {
            seed: u64,
            offset: u64,
        }

        impl $name {
            /// Draws of a word, and of a call.
            const A_WORD: u32 = 32 / $bits;
            const A_CALL: u32 = 128 / $bits;

            /// The call that this element of a block draws from.
            #[inline(always)]
            fn call(self, stream: u64, block: u64, element: u32) -> [u32; 4] {
                let calls = BLOCK / u64::from(Self::A_CALL);
                philox(self.seed, self.offset, stream | (block * calls + u64::from(element / Self::A_CALL)))
            }

            /// Half the random number of the draw that is lowest in `word`.
            #[inline(always)]
            fn half(word: u32) -> f32 {
                let $draw = word & ((1 << $bits) - 1);
                f32::from_bits(f32::to_bits($anchor) | $low) - $anchor
            }
        }

        impl Rounding for $name {
            const DRAWS: u64 = 1;

            #[inline(always)]
            fn new(seed: u64, offset: &Global<u64>) -> Self {
                Self { seed, offset: offset.load(0) }
            }

            #[inline(always)]
            fn encode(self, stream: u64, block: u64, half: usize, scaled: [f32; 8], signs: u32) -> Option<e2m1x8> {
                let words = self.call(stream, block, 8 * half as u32);
                let moved = |i: usize| {
                    let draw = (8 * half + i) as u32 % Self::A_CALL;
                    move_up(scaled[i], Self::half(words[(draw / Self::A_WORD) as usize] >> (draw % Self::A_WORD * $bits)))
                };
                pack_floor(core::array::from_fn(moved), signs)
            }

            #[inline(always)]
            fn encode_one(self, stream: u64, block: u64, element: u32, x: f32) -> e2m1 {
                let [a, b, c, d] = self.call(stream, block, element);
                let draw = element % Self::A_CALL;
                // An index that is not known would put the words into memory.
                let word = match draw / Self::A_WORD { 0 => a, 1 => b, 2 => c, _ => d };
                // NaN loses to 6.
                let t = move_up(min(x.abs(), 6.0) * 256.0, Self::half(word >> (draw % Self::A_WORD * $bits)));
                let sign = if x.is_nan() { 0 } else { x.to_bits() >> 28 & 8 };
                let code = pack_floor([t, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], sign).map_or(7, e2m1x8::to_bits);
                e2m1::from_bits(code as u8)
            }
        }
    };
}

stochastic! {
    /// Stochastic with 8 bits an element, TransformerEngine's rule to the bit.
    Stochastic8: 8 bits, |r| r, above 16384.0
}
stochastic! {
    /// Stochastic with 16 bits an element.
    Stochastic16: 16 bits, |r| r << 1 | 1, above 32.0
}

/// `256 * fma(u, step(a), a)` from `scaled = 256 a` and `u / 2`.
#[inline(always)]
fn move_up(scaled: f32, half: f32) -> f32 {
    // The power of two at or below the magnitude, 256 at least, is 512 steps of the grid.
    let power = f32::from_bits(max(scaled, 256.0).to_bits() & 0x7f80_0000);
    fma(half, power, scaled)
}

/// The codes of eight magnitudes times 256, rounded down.
///
/// A value with one bit of its mantissa left, times `2^-22`, is an E5M2 number whose byte is the code times two, or one more;
/// below 1 that byte's step is 1/4, and a quarter of the lowest step less keeps what is between two from going up. `None` if one is
/// a NaN or 8 and more.
#[inline(always)]
fn pack_floor(t: [f32; 8], signs: u32) -> Option<e2m1x8> {
    const SHIFT: f32 = 1.0 / 4_194_304.0;
    const LESS: f32 = -1.0 / 262_144.0;
    let floor = |i: usize| fma(f32::from_bits(t[i].to_bits() & 0xffc0_0000), SHIFT, LESS);
    let even = e5m2x4::from_f32([floor(0), floor(2), floor(4), floor(6)]).to_bits();
    let odd = e5m2x4::from_f32([floor(1), floor(3), floor(5), floor(7)]).to_bits();
    // Magnitudes alone: below the least step the difference is a negative zero or -1/4 of a step.
    let fits = (even | odd) & 0x7070_7070 == 0;
    fits.then_some(e2m1x8::from_bits(even >> 1 & 0x0707_0707 | odd << 3 & 0x7070_7070 | signs))
}
