//! 16 bytes of elements, of global memory and of shared memory alike.

use core::marker::PhantomData;

use crate::num::{Half, HalfPair, Pod};

/// 16 bytes of elements, loaded or stored in one instruction.
#[derive(Clone, Copy)]
pub struct Vector<T> {
    words: [u32; 4],
    element: PhantomData<fn() -> T>,
}

impl<T: Pod> Vector<T> {
    /// Elements a vector.
    pub const LANES: usize = 16 / size_of::<T>();

    /// From four words, the first element in the low bits of the first.
    #[inline(always)]
    pub const fn from_words(words: [u32; 4]) -> Self {
        Self { words, element: PhantomData }
    }

    /// The four words.
    #[inline(always)]
    pub const fn words(self) -> [u32; 4] {
        self.words
    }

    /// Element `lane`; a constant after unrolling, so that it stays in registers.
    #[inline(always)]
    pub fn lane(self, lane: usize) -> T {
        let bits = size_of::<T>() * 8;
        // SAFETY: each arm reinterprets exactly the bytes of `T`, any pattern of which is valid (`Pod`).
        unsafe {
            match size_of::<T>() {
                1 => core::mem::transmute_copy(&((self.words[lane / 4] >> (lane % 4 * bits)) as u8)),
                2 => core::mem::transmute_copy(&((self.words[lane / 2] >> (lane % 2 * bits)) as u16)),
                4 => core::mem::transmute_copy(&self.words[lane]),
                _ => core::mem::transmute_copy(&(u64::from(self.words[2 * lane]) | u64::from(self.words[2 * lane + 1]) << 32)),
            }
        }
    }
}

impl<T: Half> Vector<T> {
    /// The eight values, exactly.
    #[inline(always)]
    pub fn to_f32(self) -> [f32; 8] {
        let [[a, b], [c, d], [e, f], [g, h]] = self.words.map(|word| T::X2::from_bits(word).to_f32());
        [a, b, c, d, e, f, g, h]
    }

    /// The values, rounded to nearest even.
    #[inline(always)]
    pub fn from_f32([a, b, c, d, e, f, g, h]: [f32; 8]) -> Self {
        Self::from_words([[a, b], [c, d], [e, f], [g, h]].map(|pair| T::X2::from_f32(pair).to_bits()))
    }
}

impl Vector<f32> {
    /// The four values.
    #[inline(always)]
    pub fn to_f32(self) -> [f32; 4] {
        self.words.map(f32::from_bits)
    }

    /// The vector of these values.
    #[inline(always)]
    pub fn from_f32(values: [f32; 4]) -> Self {
        Self::from_words(values.map(f32::to_bits))
    }
}
