//! The wide numbers that codes decode to.

use oxtile_tile::num::{Float, Half, HalfPair, Pod, bf16, f16};
use oxtile_tile::prelude::Vector;

/// A wide number that 8-bit codes decode to.
pub trait Wide: Float + Pod {
    /// One vector of these values, rounded to nearest even: eight of a 16-bit type, else the first four.
    fn vector(low: [f32; 4], high: [f32; 4]) -> Vector<Self>;
}

impl Wide for f32 {
    #[inline(always)]
    fn vector(low: [f32; 4], _: [f32; 4]) -> Vector<Self> {
        Vector::from_words(low.map(f32::to_bits))
    }
}

macro_rules! wide_half {
    ($($half:ident)*) => { $(
        impl Wide for $half {
            #[inline(always)]
            fn vector([a, b, c, d]: [f32; 4], [e, f, g, h]: [f32; 4]) -> Vector<Self> {
                let pair = |x: [f32; 2]| <<$half as Half>::X2 as HalfPair<$half>>::from_f32(x).to_bits();
                Vector::from_words([pair([a, b]), pair([c, d]), pair([e, f]), pair([g, h])])
            }
        }
    )* };
}

wide_half!(bf16 f16);
