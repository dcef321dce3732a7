//! What is multiplied, and where the result goes.

use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};

use super::stage::Rows;
use super::{FEW, Fusion, PART, Shape};

/// What ranks send each other of a sum that they share.
#[derive(Clone, Copy)]
pub struct Exchanged<O: Pod, const WIDTH: usize> {
    /// What has arrived here, `[sources, own rows, columns]`.
    pub parts: Option<TensorMap<O, PART, WIDTH, Swizzle128, 3>>,
    /// Where the rows of others go, `[matrices, rows, columns]`.
    pub others: Option<TensorMapMut<O, PART, WIDTH, Swizzle128, 3>>,
}

/// The parameters of a kernel, and how the product is divided.
pub struct Tensors<A: Pod, B: Pod, const DEPTH: usize, O: Pod, const WIDTH: usize, const RANK: usize, W, const BOX: usize = PART> {
    pub a: TensorMap<A, PART, DEPTH, Swizzle128, RANK>,
    /// `A` in boxes of 16 rows, for tiles of one part, if there are at most [`MOST_FEW`](super::MOST_FEW) rows. None where rows of `A` lie along M.
    pub few: Option<TensorMap<A, FEW, DEPTH, Swizzle128, RANK>>,
    pub b: TensorMap<B, BOX, DEPTH, Swizzle128, RANK>,
    pub d: TensorMapMut<O, PART, WIDTH, Swizzle128, RANK>,
    /// By a division whose ranks share the sum.
    pub exchanged: Option<Exchanged<O, WIDTH>>,
    pub old: GlobalMut<O>,
    pub shape: Shape,
    pub fusion: Fusion<O>,
    pub division: W,
}

impl<A: Pod, B: Pod, const DEPTH: usize, O: Pod, const WIDTH: usize, const RANK: usize, W, const BOX: usize>
    Tensors<A, B, DEPTH, O, WIDTH, RANK, W, BOX>
{
    /// Brings the maps into the cache of maps, by one thread.
    #[inline(always)]
    pub fn prefetch(&self) {
        match &self.few {
            Some(few) => few.prefetch(),
            None => self.a.prefetch(),
        }
        self.b.prefetch();
        self.d.prefetch();
    }

    /// What a block whose tile has one part loads of `A`.
    #[inline(always)]
    pub fn few_rows(&self) -> Rows<A, DEPTH, RANK> {
        match self.few {
            Some(few) => Rows::Boxes(few, self.shape.m.div_ceil(FEW as u32)),
            None => Rows::Parts(self.a),
        }
    }
}
