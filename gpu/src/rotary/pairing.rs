//! Which elements of a head are a pair.

/// Which elements of a head are a pair.
pub trait Pairing: 'static {
    /// Where the two vectors begin that hold the pairs from `pair` on, in a head of `size` elements.
    fn places(pair: u32, size: u32) -> [u32; 2];
    /// The first elements of the pairs and the second ones, of the two vectors; and back.
    fn swap(vectors: [[f32; 8]; 2]) -> [[f32; 8]; 2];
    /// The vectors of the pairs' first and second elements.
    fn swap_back(pairs: [[f32; 8]; 2]) -> [[f32; 8]; 2];
}

/// Element `i` with element `i + size / 2` (GPT-NeoX, Llama in Hugging Face's layout).
pub struct Halves;

/// Element `2 i` with element `2 i + 1` (the original, GPT-J).
pub struct Neighbours;

impl Pairing for Halves {
    #[inline(always)]
    fn places(pair: u32, size: u32) -> [u32; 2] {
        [pair, pair + size / 2]
    }

    #[inline(always)]
    fn swap(vectors: [[f32; 8]; 2]) -> [[f32; 8]; 2] {
        vectors
    }

    #[inline(always)]
    fn swap_back(pairs: [[f32; 8]; 2]) -> [[f32; 8]; 2] {
        pairs
    }
}

impl Pairing for Neighbours {
    #[inline(always)]
    fn places(pair: u32, _: u32) -> [u32; 2] {
        [2 * pair, 2 * pair + 8]
    }

    #[inline(always)]
    fn swap(vectors: [[f32; 8]; 2]) -> [[f32; 8]; 2] {
        [0, 1].map(|which| core::array::from_fn(|i| vectors[i / 4][2 * (i % 4) + which]))
    }

    #[inline(always)]
    fn swap_back(pairs: [[f32; 8]; 2]) -> [[f32; 8]; 2] {
        [0, 1].map(|vector| core::array::from_fn(|i| pairs[i % 2][4 * vector + i / 2]))
    }
}
