//! What one stage of the ring holds.

use oxtile_tile::arch::MatrixElement;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::matrix::Operand;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::prelude::*;
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::tensor_map::TensorMap;

use super::{CLUSTER, COLUMNS, PART, ROWS};

/// Boxes of `B` that a block loads for the cluster.
const SHARE: u32 = COLUMNS as u32 / PART as u32 / CLUSTER;
const EVERY_BLOCK: u16 = (1 << CLUSTER) - 1;

/// A part of an operand: 64 rows of 128 bytes, in either direction.
type Part<T, const DEPTH: usize> = SharedTile<T, PART, DEPTH, Swizzle128>;

/// The operands of `DEPTH` elements of the sum, which are 128 bytes.
#[derive(SharedStorage, Clone, Copy)]
pub struct Stage<T: Pod, const DEPTH: usize> {
    a: Tiles<Part<T, DEPTH>, { ROWS as usize / PART }>,
    b: Tiles<Part<T, DEPTH>, { COLUMNS / PART }>,
}

impl<T: MatrixElement, const DEPTH: usize> Stage<T, DEPTH> {
    /// Starts to load the block's rows of `A` from `m` on into its own stage, and its share of the columns of `B` from `n` on
    /// into that of every block of the cluster.
    #[inline(always)]
    pub fn load<const M_MAJOR: bool, const N_MAJOR: bool>(
        self,
        [a, b]: [&TensorMap<T, PART, DEPTH, Swizzle128>; 2],
        [m, n, k]: [u32; 3],
        rank: u32,
        full: Mbarrier,
    ) {
        for part in 0..ROWS / PART as u32 {
            let m = m + part * PART as u32;
            a.load(self.a.tile(part), if M_MAJOR { [k, m] } else { [m, k] }, full);
        }
        for part in rank * SHARE..(rank + 1) * SHARE {
            let n = n + part * PART as u32;
            b.load_multicast(self.b.tile(part), if N_MAJOR { [k, n] } else { [n, k] }, full, EVERY_BLOCK);
        }
    }

    /// A warpgroup's rows of `A`, and the columns of `B`.
    #[inline(always)]
    pub fn operands<const M_MAJOR: bool, const N_MAJOR: bool>(
        self,
        part: u32,
    ) -> (Operand<T, PART, DEPTH, M_MAJOR>, Operand<T, COLUMNS, DEPTH, N_MAJOR>) {
        (Operand::of(self.a.tile(part)), Operand::stacked(self.b))
    }
}
