//! Running maxima of magnitudes, one 32-bit register of elements at a time. Not a kernel: amax and
//! the block formats share it.

use oxtile_tile::num::{Float, Half, HalfPair, Pod, bf16, e2m1x8, f16, max, permute_bytes};
use oxtile_tile::prelude::Vector;

/// An element whose largest magnitude can be found in the input type itself.
///
/// A running maximum is one word: two halves of the 16-bit types, the bits of one `f32`. It starts
/// at 0 and never holds a NaN: as with TransformerEngine's `fmaxf` and `__hmax`, a NaN is dropped.
pub trait Magnitude: Float + Pod {
    /// Elements a word.
    const PER_WORD: usize;

    /// The magnitudes of the elements of a word.
    fn magnitudes(word: u32) -> u32;

    /// The running maximum, raised by the elements of `word`.
    fn raise(running: u32, word: u32) -> u32;

    /// The larger of two running maxima.
    fn join(a: u32, b: u32) -> u32;

    /// The largest place of a running maximum, at every place.
    fn spread(running: u32) -> u32;

    /// The value of a running maximum, finite or +Inf, at least +0.
    fn finish(running: u32) -> f32;

    /// The maximum of the elements at one place of their words, below [`PER_WORD`](Self::PER_WORD).
    fn maximum_of(running: u32, place: usize) -> f32;

    /// The word that holds this element alone.
    fn to_word(self) -> u32;

    /// The signs of eight elements, each at the high bit of its E2M1 code's place, from the words that hold them.
    fn signs(word: impl Fn(usize) -> u32) -> u32;

    /// As [`signs`](Self::signs), of the elements at one place of eight words.
    fn signs_at(word: impl Fn(usize) -> u32, place: usize) -> u32;
}

impl Magnitude for f32 {
    const PER_WORD: usize = 1;

    #[inline(always)]
    fn magnitudes(word: u32) -> u32 {
        word & 0x7fff_ffff
    }

    #[inline(always)]
    fn raise(running: u32, word: u32) -> u32 {
        max(f32::from_bits(running), f32::from_bits(Self::magnitudes(word))).to_bits()
    }

    #[inline(always)]
    fn join(a: u32, b: u32) -> u32 {
        a.max(b)
    }

    #[inline(always)]
    fn spread(running: u32) -> u32 {
        running
    }

    #[inline(always)]
    fn finish(running: u32) -> f32 {
        f32::from_bits(running)
    }

    #[inline(always)]
    fn maximum_of(running: u32, _: usize) -> f32 {
        f32::from_bits(running)
    }

    #[inline(always)]
    fn to_word(self) -> u32 {
        self.to_bits()
    }

    #[inline(always)]
    fn signs(word: impl Fn(usize) -> u32) -> u32 {
        e2m1x8::signs_of_singles(core::array::from_fn(word))
    }

    #[inline(always)]
    fn signs_at(word: impl Fn(usize) -> u32, _: usize) -> u32 {
        Self::signs(word)
    }
}

macro_rules! half_magnitude {
    ($($half:ident)*) => { $(
        impl Magnitude for $half {
            const PER_WORD: usize = 2;

            #[inline(always)]
            fn magnitudes(word: u32) -> u32 {
                type Pair = <$half as Half>::X2;
                <Pair as HalfPair<$half>>::abs(Pair::from_bits(word)).to_bits()
            }

            #[inline(always)]
            fn raise(running: u32, word: u32) -> u32 {
                Self::join(running, Self::magnitudes(word))
            }

            #[inline(always)]
            fn join(a: u32, b: u32) -> u32 {
                type Pair = <$half as Half>::X2;
                Pair::from_bits(a).max(Pair::from_bits(b)).to_bits()
            }

            #[inline(always)]
            fn spread(running: u32) -> u32 {
                Self::join(running, running.rotate_right(16))
            }

            #[inline(always)]
            fn finish(running: u32) -> f32 {
                let larger = Self::join(running, running >> 16);
                $half::from_bits(larger as u16).to_f32()
            }

            #[inline(always)]
            fn maximum_of(running: u32, place: usize) -> f32 {
                $half::from_bits((running >> (16 * place)) as u16).to_f32()
            }

            #[inline(always)]
            fn to_word(self) -> u32 {
                u32::from(self.to_bits())
            }

            #[inline(always)]
            fn signs(word: impl Fn(usize) -> u32) -> u32 {
                e2m1x8::signs_of_halves(core::array::from_fn(word))
            }

            #[inline(always)]
            fn signs_at(word: impl Fn(usize) -> u32, place: usize) -> u32 {
                // The high bytes of two words, those of the low places first; then each replaced by eight times its sign.
                let pair = |i: usize| permute_bytes(word(i), word(i + 2), 0x7351);
                let selector = if place == 0 { 0xdc98 } else { 0xfeba };
                let [even, odd] = [0, 1].map(|i| permute_bytes(pair(i), pair(i + 4), selector));
                even & 0x0808_0808 | odd & 0x8080_8080
            }
        }
    )* };
}

half_magnitude!(bf16 f16);

/// The running maximum of the elements of one vector.
#[inline(always)]
pub fn of_vector<T: Magnitude>(vector: Vector<T>) -> u32 {
    vector.words().into_iter().fold(0, T::raise)
}
