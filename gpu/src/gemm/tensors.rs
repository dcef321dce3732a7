//! What is multiplied, and where the result goes.

use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};

use super::{Fusion, PART, Shape};

/// The parameters of a kernel, and how the product is divided.
pub struct Tensors<A: Pod, B: Pod, const DEPTH: usize, O: Pod, const WIDTH: usize, const RANK: usize, W> {
    pub a: TensorMap<A, PART, DEPTH, Swizzle128, RANK>,
    pub b: TensorMap<B, PART, DEPTH, Swizzle128, RANK>,
    pub d: TensorMapMut<O, PART, WIDTH, Swizzle128, RANK>,
    /// Where the input of the activation is kept, by a division that keeps it.
    pub kept: Option<TensorMapMut<O, PART, WIDTH, Swizzle128, RANK>>,
    /// The matrix at which a division that takes it has the derivative of GELU.
    pub input: Option<Global<O>>,
    pub old: GlobalMut<O>,
    pub shape: Shape,
    pub fusion: Fusion<O>,
    pub division: W,
}
