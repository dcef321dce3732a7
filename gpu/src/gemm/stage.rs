//! What one stage of the ring holds.

use oxtile_tile::arch::MatrixElement;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::matrix::Operand;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::prelude::*;
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::tensor_map::TensorMap;

use super::PART;
use super::place::Place;

/// A part of an operand: 64 rows of 128 bytes, in either direction.
type Part<T, const DEPTH: usize> = SharedTile<T, PART, DEPTH, Swizzle128>;

/// The operands of `DEPTH` elements of the sum, which are 128 bytes: `ROW_PARTS` parts of `A`, and of `B` `COLUMN_PARTS` of `PANELS` each.
#[derive(SharedStorage, Clone, Copy)]
pub struct Stage<A: Pod, B: Pod, const DEPTH: usize, const ROW_PARTS: usize, const COLUMN_PARTS: usize, const PANELS: usize> {
    a: Tiles<Part<A, DEPTH>, ROW_PARTS>,
    b: Tiles<Tiles<Part<B, DEPTH>, PANELS>, COLUMN_PARTS>,
}

impl<A, B, const DEPTH: usize, const ROW_PARTS: usize, const COLUMN_PARTS: usize, const PANELS: usize>
    Stage<A, B, DEPTH, ROW_PARTS, COLUMN_PARTS, PANELS>
where
    A: MatrixElement,
    B: MatrixElement,
{
    /// Starts to load the block's rows of `A` from `m` on into its own stage, and its share of the columns of `B` from `n` on
    /// into that of every block of the cluster.
    #[inline(always)]
    pub fn load<const CLUSTER: u32, const RANK: usize, const M_MAJOR: bool, const N_MAJOR: bool>(
        self,
        (a, b): (&TensorMap<A, PART, DEPTH, Swizzle128, RANK>, &TensorMap<B, PART, DEPTH, Swizzle128, RANK>),
        place: impl Place<RANK>,
        [m, n, k]: [u32; 3],
        rank: u32,
        full: Mbarrier,
    ) {
        for part in 0..ROW_PARTS as u32 {
            let m = m + part * PART as u32;
            a.load(self.a.tile(part), place.a(if M_MAJOR { [k, m] } else { [m, k] }), full);
        }
        let share = const { PANELS as u32 / CLUSTER };
        for part in 0..COLUMN_PARTS as u32 {
            for panel in rank * share..(rank + 1) * share {
                let (target, n) = (self.b.tile(part).tile(panel), n + (part * PANELS as u32 + panel) * PART as u32);
                let at = place.b(if N_MAJOR { [k, n] } else { [n, k] });
                if CLUSTER == 1 {
                    b.load(target, at, full);
                } else {
                    b.load_multicast(target, at, full, const { (1 << CLUSTER) - 1 });
                }
            }
        }
    }

    /// Rows of `A` and `COLUMNS` columns of `B`: what the warpgroup of these parts multiplies.
    #[inline(always)]
    pub fn operands<const COLUMNS: usize, const M_MAJOR: bool, const N_MAJOR: bool>(
        self,
        [row_part, column_part]: [u32; 2],
    ) -> (Operand<A, PART, DEPTH, M_MAJOR>, Operand<B, COLUMNS, DEPTH, N_MAJOR>) {
        (Operand::of(self.a.tile(row_part)), Operand::stacked(self.b.tile(column_part)))
    }
}
