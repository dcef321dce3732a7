//! Four over six: the largest magnitude of a block is scaled to 6 or to 4, whichever has the smaller error.
//!
//! "Four over six" (TransformerEngine `common/cast/nvfp4/quantize_4over6_nvfp4.cuh`) casts a block twice. With `L` the largest
//! scale that the tensor's amax is mapped to, 448 or 256, every step rounded to `f32`:
//!
//! ```text
//! encode     = min(6 L / amax, MAX)                 1 where that is 0 or amax is
//! base       = block_amax / 6 * encode
//! scale6     = e4m3(min(base, 448))
//! scale4     = e4m3(min(1.5 base, 448))
//! multiplier = min(1 / (scale * (1 / encode)), MAX)
//! code       = e2m1(x * multiplier)
//! error      = sum of |v - x|, or of (v - x)^2, in order, with v = code * scale * amax / (6 L)
//! ```
//!
//! The block is that of `scale4` if its error is less, else that of `scale6`. A NaN makes both errors NaN.

use oxtile_tile::num::{Float, e2m1, e2m1x8, e4m3, e5m2x4, fma, min};

use super::cast_block::encode_saturating;
use super::rounding::{Nearest, ROWS};
use super::{BLOCK, block_scale, encode_scale_to, multiplier, scale_factor};

/// A tensor's, or a row's, amax and what follows from it.
#[derive(Clone, Copy)]
pub struct TensorScale {
    amax: f32,
    encode: f32,
    decode: f32,
}

/// Sixteen elements.
#[derive(Clone, Copy)]
pub struct BlockElements {
    /// Their magnitudes.
    pub magnitudes: [f32; BLOCK as usize],
    /// Their signs, in the places of their codes.
    pub signs: [u32; 2],
    /// The largest magnitude, NaN dropped.
    pub amax: f32,
}

/// How a block is cast.
pub trait Mapping: Copy + Send + Sync + 'static {
    /// The largest scale that a tensor's amax is mapped to.
    const LARGEST_SCALE: f32;

    /// What follows from an amax.
    #[inline(always)]
    fn tensor_scale(amax: f32) -> TensorScale {
        let encode = encode_scale_to(Self::LARGEST_SCALE, amax);
        TensorScale { amax, encode, decode: 1.0 / encode }
    }

    /// The scale and the codes of a block; `element` gives its elements once more, for blocks that are rare.
    fn cast(block: &BlockElements, tensor: TensorScale, element: impl Fn(u32) -> f32) -> (e4m3, [u32; 2]);
}

/// The plain rule: 6 alone.
#[derive(Clone, Copy)]
pub struct ToSix;

impl Mapping for ToSix {
    const LARGEST_SCALE: f32 = 448.0;

    #[inline(always)]
    fn cast(block: &BlockElements, tensor: TensorScale, element: impl Fn(u32) -> f32) -> (e4m3, [u32; 2]) {
        let scale = block_scale(block.amax, scale_factor(tensor.encode));
        let multiplier = multiplier(scale, tensor.encode);
        let scaled = min(multiplier * 256.0, f32::MAX);
        let codes =
            [0, 1].map(|half| e2m1x8::from_scaled(core::array::from_fn(|i| block.magnitudes[8 * half + i] * scaled), block.signs[half]));
        let codes = match codes {
            [Some(low), Some(high)] if scaled < f32::MAX || block.amax == 0.0 => [low, high].map(e2m1x8::to_bits),
            _ => encode_saturating(Nearest, ROWS, 0, |i| element(i) * multiplier),
        };
        (scale, codes)
    }
}

/// What the lost parts of a block's elements add up to.
trait Loss {
    fn of(difference: f32) -> f32;
}

struct Absolute;

impl Loss for Absolute {
    #[inline(always)]
    fn of(difference: f32) -> f32 {
        difference.abs()
    }
}

struct Squared;

impl Loss for Squared {
    #[inline(always)]
    fn of(difference: f32) -> f32 {
        difference * difference
    }
}

macro_rules! four_over_six {
    ($($(#[$doc:meta])* $name:ident: $loss:ident, $largest:literal;)*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name;

        impl Mapping for $name {
            const LARGEST_SCALE: f32 = $largest;

            #[inline(always)]
            fn cast(block: &BlockElements, tensor: TensorScale, element: impl Fn(u32) -> f32) -> (e4m3, [u32; 2]) {
                four_over_six::<$loss>(block, tensor, 6.0 * $largest, element)
            }
        }
    )* };
}

four_over_six! {
    /// Four over six by the sum of absolute errors, scales up to 448.
    FourOverSix: Absolute, 448.0;
    /// Four over six by the sum of squared errors, scales up to 448.
    FourOverSixSquared: Squared, 448.0;
    /// Four over six by the sum of absolute errors, scales up to 256 before a block's is expanded.
    FourOverSix256: Absolute, 256.0;
    /// Four over six by the sum of squared errors, scales up to 256 before a block's is expanded.
    FourOverSixSquared256: Squared, 256.0;
}

/// A block cast with one scale.
struct Candidate {
    scale: e4m3,
    multiplier: f32,
    /// Bytes of twice the codes, of the elements of even and of odd places of either half; larger where the fast way does not serve.
    bytes: [[u32; 2]; 2],
    error: f32,
}

/// `largest` is what the tensor's amax is mapped to, 6 L.
#[inline(always)]
fn four_over_six<L: Loss>(block: &BlockElements, tensor: TensorScale, largest: f32, element: impl Fn(u32) -> f32) -> (e4m3, [u32; 2]) {
    let base = block.amax / 6.0 * tensor.encode;
    let six = Candidate::new::<L>(base, block, tensor, largest);
    let four = Candidate::new::<L>(base * 1.5, block, tensor, largest);
    if six.is_exact(block, tensor) && four.is_exact(block, tensor) {
        let best = if four.error < six.error { four } else { six };
        let codes = [0, 1].map(|half| (best.bytes[half][1] << 4 | best.bytes[half][0]) >> 1 | block.signs[half]);
        return (best.scale, codes);
    }
    // One element after the other costs the others no registers.
    let (mut six_error, mut four_error) = (0.0, 0.0);
    let mut i = 0;
    while i < oxtile_tile::block::threads().min(BLOCK as u32) {
        let x = element(i);
        six_error += L::of(six.value(x, tensor.amax, largest) - x);
        four_error += L::of(four.value(x, tensor.amax, largest) - x);
        i += 1;
    }
    let best = if four_error < six_error { four } else { six };
    (best.scale, encode_saturating(Nearest, ROWS, 0, |i| element(i) * best.multiplier))
}

impl Candidate {
    #[inline(always)]
    fn new<L: Loss>(wanted: f32, block: &BlockElements, tensor: TensorScale, largest: f32) -> Self {
        let scale = e4m3::from_f32(min(wanted, 448.0));
        let multiplier = min(1.0 / (scale.to_f32() * tensor.decode), f32::MAX);
        let scaled = min(multiplier * 256.0, f32::MAX);
        // 2^-14 times the codes' values, which have the code times two as their E5M2 byte.
        let values: [f32; BLOCK as usize] = core::array::from_fn(|i| e2m1::round_scaled(block.magnitudes[i] * scaled));
        let scale_value = scale.to_f32() * 16_384.0;
        let lost = |i: usize| L::of(quotient(values[i] * scale_value * tensor.amax, largest) - block.magnitudes[i]);
        let error = (0..BLOCK as usize).fold(0.0, |error, i| error + lost(i));
        let bytes = |half: usize| [0, 1].map(|odd| e5m2x4::from_f32(core::array::from_fn(|i| values[8 * half + 2 * i + odd])).to_bits());
        Self { scale, multiplier, bytes: [bytes(0), bytes(1)], error }
    }

    /// Whether codes and error are those of the definition: no element is a NaN or too large, and nothing over- or underflows.
    #[inline(always)]
    fn is_exact(&self, block: &BlockElements, tensor: TensorScale) -> bool {
        const LEAST: f32 = f32::from_bits((127 - 90) << 23);
        const MOST: f32 = f32::from_bits((127 + 110) << 23);
        let [[a, b], [c, d]] = self.bytes;
        let fits = (a | b | c | d) & 0xf0f0_f0f0 == 0;
        // The product with 256 is not exact beyond.
        let is_scaled = self.multiplier < f32::MAX / 256.0 || block.amax == 0.0;
        fits && is_scaled && LEAST < tensor.amax && tensor.amax < MOST
    }

    /// What `x` becomes, whatever it is.
    #[inline(always)]
    fn value(&self, x: f32, amax: f32, largest: f32) -> f32 {
        e2m1::from_f32(x * self.multiplier).to_f32() * self.scale.to_f32() * amax / largest
    }
}

/// `a / b` rounded to nearest for `b` of 2688 and 1536 where nothing over- or underflows: with the reciprocal rounded, one step of
/// Newton's iteration is exact for every mantissa of `a`, as a test shows.
#[inline(always)]
fn quotient(a: f32, b: f32) -> f32 {
    let reciprocal = 1.0 / b;
    let estimate = a * reciprocal;
    fma(fma(-estimate, b, a), reciprocal, estimate)
}

#[cfg(test)]
mod tests {
    use super::quotient;

    #[test]
    fn quotients_are_rounded_to_nearest() {
        for b in [2688.0, 1536.0] {
            let differs = |a: &f32| quotient(*a, b).to_bits() != (a / b).to_bits();
            let mantissas = (0x3f80_0000..0x4000_0000).map(f32::from_bits);
            assert_eq!(mantissas.clone().find(differs), None);
            assert_eq!(mantissas.map(|a| a * f32::from_bits((127 - 100) << 23)).find(differs), None);
        }
    }
}
