//! The elements that gradients may have.

use oxtile_tile::prelude::*;

use super::WEIGHTS;

/// An element of gradients.
pub trait Gradient: Float + Pod {
    /// The four gradients from `at` on, which is a multiple of 4.
    fn load_four(view: &Global<Self>, at: u64) -> [f32; WEIGHTS];
}

impl Gradient for f32 {
    #[inline(always)]
    fn load_four(view: &Global<Self>, at: u64) -> [f32; WEIGHTS] {
        view.load_vector(at).to_f32()
    }
}

macro_rules! gradient_halves {
    ($($half:ident)*) => { $(
        impl Gradient for $half {
            #[inline(always)]
            fn load_four(view: &Global<Self>, at: u64) -> [f32; WEIGHTS] {
                let [[a, b], [c, d]] = view.load_pair(at).map(|word| <Self as Half>::X2::from_bits(word).to_f32());
                [a, b, c, d]
            }
        }
    )* };
}
gradient_halves!(bf16 f16);
