//! How a magnitude is rounded to E2M1's grid: to the nearest value, or up or down at random (stochastic rounding).
//!
//! Stochastic rounding, TransformerEngine `common/util/ptx.cuh`: with `a = |x * multiplier|`, `step(a)` the distance of
//! the grid's values at `a` (0.5 below 2, 1 below 4, else 2) and `u` a random number in [0, 1),
//! `t = fma(u, step(a), a)` goes down to the grid; beyond 6 it is 6, the sign is that of `x`, NaN gives +6.
//!
//! | | `u` of an element | calls of Philox a block |
//! |---|---|---|
//! | [`Stochastic8`] | `r / 2^8`, as TransformerEngine: biased low, by half a draw: 1/512 of a step at most | 1 |
//! | [`Stochastic16`] | `(r + 1/2) / 2^16`, without that bias | 2 |
//!
//! With `n = 128 / bits` draws a call of [Philox](super::philox), the draw of element `i` of a direction is number `i % n` of
//! the call for subsequence `i / n`, from the low bits of its first word on; the columnwise cast counts the elements of the
//! transpose and sets bit 63 of the subsequence. So it depends on the seed, the offset and the element alone, not on the launch.

use oxtile_tile::num::{e2m1, e2m1x8, f16x2, fma, max, min, permute_bytes};
use oxtile_tile::prelude::*;

use super::BLOCK;
use super::philox::philox;

/// The blocks of the rowwise cast draw from this stream.
pub const ROWS: u64 = 0;
/// Those of the columnwise cast, counted in the transposed tensor, from this one.
pub const COLUMNS: u64 = 1 << 63;

/// Where a rule of rounding draws from.
#[derive(Clone, Copy, Parameter)]
pub struct Random {
    /// Which sequence.
    pub seed: u64,
    /// Where in it, one element: in device memory, so that a captured graph may be replayed with others. A rule that does not draw has none.
    pub offset: Option<Global<u64>>,
}

impl RandomArgument<'_> {
    /// What a rule that does not draw takes.
    pub const NONE: Self = Self { seed: 0, offset: None };

    /// Refuses what `R` does not draw from.
    pub(super) fn check<R: Rounding>(&self) -> Result<(), LaunchError> {
        LaunchError::check_length("random.offset", R::DRAWS, self.offset.map_or(0, |offset| offset.len()))
    }
}

/// A rule of rounding.
pub trait Rounding: Copy {
    /// Whether it draws: the length of [`Random::offset`].
    const DRAWS: u64;

    /// A factor of the magnitudes beside their multiplier: a power of two.
    const SCALE: f32;

    /// The rule as it draws from there.
    fn new(random: Random) -> Self;

    /// The codes of eight magnitudes times [`SCALE`](Self::SCALE), the first or the second `half` of block number `block` of a stream. `None` if one
    /// is a NaN, or larger than a scale that did not all but vanish lets it be.
    fn encode(self, stream: u64, block: u64, half: usize, scaled: [f32; 8], signs: u32) -> Option<e2m1x8>;

    /// The code of one value, whatever it is.
    fn encode_one(self, stream: u64, block: u64, element: u32, x: f32) -> e2m1;
}

/// To the nearest value, ties to the even code.
#[derive(Clone, Copy)]
pub struct Nearest;

impl Rounding for Nearest {
    const DRAWS: u64 = 0;
    const SCALE: f32 = 256.0;

    #[inline(always)]
    fn new(_: Random) -> Self {
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
    ($(#[$doc:meta])* $name:ident: $bits:literal bits, |$word:ident, $place:ident| $number:expr, less $anchor:expr) => {
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

            /// Half the random number of a draw of a word.
            #[inline(always)]
            fn half($word: u32, $place: u32) -> f32 {
                f32::from_bits($number) - ($anchor)
            }
        }

        impl Rounding for $name {
            const DRAWS: u64 = 1;
            const SCALE: f32 = STOCHASTIC_SCALE;

            #[inline(always)]
            fn new(Random { seed, offset }: Random) -> Self {
                Self { seed, offset: offset.unwrap_or_default().load(0) }
            }

            #[inline(always)]
            fn encode(self, stream: u64, block: u64, half: usize, scaled: [f32; 8], signs: u32) -> Option<e2m1x8> {
                let words = self.call(stream, block, 8 * half as u32);
                let moved = |i: usize| {
                    let draw = (8 * half + i) as u32 % Self::A_CALL;
                    move_up(scaled[i], Self::half(words[(draw / Self::A_WORD) as usize], draw % Self::A_WORD))
                };
                pack_floor(core::array::from_fn(moved), signs)
            }

            #[inline(always)]
            fn encode_one(self, stream: u64, block: u64, element: u32, x: f32) -> e2m1 {
                let [a, b, c, d] = self.call(stream, block, element);
                let draw = element % Self::A_CALL;
                // An index that is not constant would put the words into local memory.
                let word = match draw / Self::A_WORD { 0 => a, 1 => b, 2 => c, _ => d };
                // NaN loses to 6, and 6 is never moved to 8.
                let t = move_up(min(x.abs(), 6.0) * Self::SCALE, Self::half(word, draw % Self::A_WORD));
                let sign = if x.is_nan() { 0 } else { x.to_bits() >> 28 & 8 };
                e2m1::from_bits((sign | truncate(t, 0.0) >> 9 & 7) as u8)
            }
        }
    };
}

// The draw becomes the low bits of a power of two, by one permutation: with the constant as its second operand it would take two.
stochastic! {
    /// Stochastic with 8 bits an element, TransformerEngine's rule to the bit.
    Stochastic8: 8 bits, |word, place| permute_bytes(f32::to_bits(16_384.0), word, 0x3204 + place), less 16_384.0
}
stochastic! {
    /// Stochastic with 16 bits an element.
    Stochastic16: 16 bits, |word, place| permute_bytes(f32::to_bits(64.0), word, 0x3254 + 0x22 * place), less 64.0 - 1.0 / 262_144.0
}

/// Takes E2M1's values to the lowest of f16, which have the same spacing: 0.5 is half of the least normal number.
const STOCHASTIC_SCALE: f32 = 1.0 / 16_384.0;

/// `fma(u, step(a), a)` from `a` and `u / 2`, in units of [`STOCHASTIC_SCALE`].
#[inline(always)]
fn move_up(scaled: f32, half: f32) -> f32 {
    // The power of two at or below the magnitude, 1 at least, is twice the grid's step.
    let power = f32::from_bits(max(scaled, STOCHASTIC_SCALE).to_bits() & 0x7f80_0000);
    fma(half, power, scaled)
}

/// Two magnitudes of [`STOCHASTIC_SCALE`] as f16, whose bits from the ninth on are the codes, rounded down.
#[inline(always)]
fn truncate(low: f32, high: f32) -> u32 {
    f16x2::from_f32_toward_zero([low, high]).to_bits()
}

/// The codes of eight magnitudes of [`STOCHASTIC_SCALE`], rounded down; 8 and more saturates. `None` if one is a NaN, or 128
/// and more.
#[inline(always)]
fn pack_floor(t: [f32; 8], signs: u32) -> Option<e2m1x8> {
    const SATURATED: u32 = 0x8888_8888;
    // The high bytes of four halves: twice the codes.
    let bytes = |i: usize| permute_bytes(truncate(t[i], t[i + 2]), truncate(t[i + 4], t[i + 6]), 0x7531);
    let (even, odd) = (bytes(0), bytes(1));
    let fits = (even | odd) & 0x6060_6060 == 0;
    let codes = even >> 1 & 0x0f0f_0f0f | odd << 3 & 0xf0f0_f0f0;
    let saturated = codes & SATURATED;
    let codes = (codes | (saturated - (saturated >> 3))) & !SATURATED;
    fits.then_some(e2m1x8::from_bits(codes | signs))
}
