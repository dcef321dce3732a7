//! The tile of `D` that a block computes at a time: a compile-time policy of the [kernel](fn@super::gemm).
//!
//! | shape | rows, columns | warpgroups | stages | cluster | for |
//! |---|---|---|---|---|---|
//! | [`Tile128x256`] | 128, 256 | one above the other | 4 of 48 KiB | 2 blocks, 256 rows | large products |
//! | [`Tile128x192`] | 128, 192 | one above the other | 4 of 40 KiB | none | short sums, whose tiles take as long to store as to compute |
//! | [`Tile128x176`] | 128, 176 | one above the other | 5 of 38 KiB | none | widths that fill the last wave of tiles |
//! | [`Tile128x128`] | 128, 128 | one above the other | 6 of 32 KiB | none | few rows or columns |
//! | [`Tile128x112`], [`Tile128x96`] | 128; 112, 96 | one above the other | 6 of 30 and 28 KiB | none | widths that fill the only wave |
//! | [`Tile64x144`], [`Tile64x96`] | 64; 144, 96 | one | 8 of 26 KiB, 10 of 20 KiB | none | the same, of fewer rows |
//! | [`Tile64x128`] | 64, 128 | side by side | 8 of 24 KiB | none | up to 64 rows, groups of few rows, and small products |
//! | [`Tile64x64`] | 64, 64 | one | 12 of 16 KiB | none | few rows: weights that are read once |
//!
//! Columns of `B` are loaded 64 at a time. Those of a tile whose width is no multiple of 64 are loaded at once: such tiles are for rows of `B` along `k` alone.
//!
//! If `A` has at most 48 rows, tiles of 64 load it in boxes of 16: a box is filled at one rate, whether its rows are in the matrix or not.

use oxtile_tile::arch::{Columns, MatrixColumns, MatrixElement};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline::Pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::StoredElement;
use oxtile_tile::shared::{SharedStorage, SharedTile, Tiles};
use oxtile_tile::warpgroup::{self, Role, Roles};
use oxtile_tile::{cluster, epilogue};

use super::PART;
use super::cluster_sum;
use super::division::Division;
use super::sharing::Sharing;
use super::stage::Stage;
use super::tensors::Tensors;

/// The tile of a block, and how it is computed.
pub trait TileShape: 'static {
    /// Rows of a block's tile.
    const ROWS: u32;
    /// Columns of a block's tile.
    const COLUMNS: u32;
    /// Blocks that share `B`, one above the other.
    const CLUSTER: u32;
    /// Warpgroups of a block that multiply.
    const WARPGROUPS: u32;
    /// Threads of a block.
    const THREADS: u32 = (1 + Self::WARPGROUPS) * warpgroup::THREADS;
    /// Columns of the boxes in which `B` is loaded: 64 where its rows may lie along `n`.
    const BOX: usize;
    /// Whether the parts of a tile can be the blocks of a cluster that is made at launch.
    const IN_CLUSTERS: bool;
    /// Elements of a warpgroup's tile.
    const PIECE: u32 = Self::ROWS * Self::COLUMNS / Self::WARPGROUPS;
    /// The shared memory of a block.
    type Shared<A: Pod, B: Pod, const DEPTH: usize, O: Pod, const WIDTH: usize>: SharedStorage;
}

/// How the tile of a block is computed, whose columns of `B` come in boxes of `BOX`.
pub trait TileLoops<const BOX: usize = PART>: TileShape {
    /// Multiplies: the whole work of a block.
    fn multiply<A, B, const DEPTH: usize, O, const WIDTH: usize, const RANK: usize, W, const M_MAJOR: bool, const N_MAJOR: bool>(
        tensors: Tensors<A, B, DEPTH, O, WIDTH, RANK, W, BOX>,
    ) where
        A: MatrixElement,
        B: MatrixElement,
        O: StoredElement,
        W: Division<RANK>;
}

/// Warpgroups that multiply 64 rows and `COLUMNS` columns each, for which `PANELS` boxes of `BOX` columns of `B` are loaded. `PRODUCER` and `CONSUMER` are registers of
/// [`Roles`]; where they are 0, each warpgroup keeps those that it began with.
pub struct BlockTile<
    const ROW_PARTS: usize,
    const COLUMN_PARTS: usize,
    const COLUMNS: usize,
    const PANELS: usize,
    const BOX: usize,
    const STAGES: usize,
    const CLUSTER: u32,
    const WARPGROUPS: u32,
    const PRODUCER: u32,
    const CONSUMER: u32,
>;

/// 128 rows, 256 columns.
pub type Tile128x256 = BlockTile<2, 1, 256, 4, 64, 4, 2, 2, 40, 232>;
/// 128 rows, 192 columns.
pub type Tile128x192 = BlockTile<2, 1, 192, 3, 64, 4, 1, 2, 40, 232>;
/// 128 rows, 176 columns.
pub type Tile128x176 = BlockTile<2, 1, 176, 1, 176, 5, 1, 2, 40, 232>;
/// 128 rows, 128 columns.
pub type Tile128x128 = BlockTile<2, 1, 128, 2, 64, 6, 1, 2, 40, 232>;
/// 128 rows, 112 columns.
pub type Tile128x112 = BlockTile<2, 1, 112, 1, 112, 6, 1, 2, 40, 232>;
/// 128 rows, 96 columns.
pub type Tile128x96 = BlockTile<2, 1, 96, 1, 96, 6, 1, 2, 40, 232>;
/// 64 rows, 144 columns.
pub type Tile64x144 = BlockTile<1, 1, 144, 1, 144, 8, 1, 1, 0, 0>;
/// 64 rows, 128 columns.
pub type Tile64x128 = BlockTile<1, 2, 64, 1, 64, 8, 1, 2, 40, 232>;
/// 64 rows, 96 columns.
pub type Tile64x96 = BlockTile<1, 1, 96, 1, 96, 10, 1, 1, 0, 0>;
/// 64 rows, 64 columns.
pub type Tile64x64 = BlockTile<1, 1, 64, 1, 64, 12, 1, 1, 0, 0>;

/// The shared memory of a block.
#[derive(SharedStorage)]
pub struct Shared<
    A: Pod,
    B: Pod,
    const DEPTH: usize,
    O: Pod,
    const WIDTH: usize,
    const ROW_PARTS: usize,
    const COLUMN_PARTS: usize,
    const PANELS: usize,
    const BOX: usize,
    const STAGES: usize,
> {
    pub(super) ring: Pipeline<Stage<A, B, DEPTH, ROW_PARTS, COLUMN_PARTS, PANELS, BOX>, STAGES>,
    /// Whether each warpgroup is the last of those that share its tile. It lies in the gap before the staging tiles.
    pub(super) last: Tiles<Tiles<SharedArray<u32, 1>, COLUMN_PARTS>, ROW_PARTS>,
    /// Two for each warpgroup: one is written while the other is stored.
    pub(super) staging: Tiles<Tiles<Tiles<SharedTile<O, PART, WIDTH, Swizzle128>, 2>, COLUMN_PARTS>, ROW_PARTS>,
}

impl<
    const ROW_PARTS: usize,
    const COLUMN_PARTS: usize,
    const COLUMNS: usize,
    const PANELS: usize,
    const BOX: usize,
    const STAGES: usize,
    const CLUSTER: u32,
    const WARPGROUPS: u32,
    const PRODUCER: u32,
    const CONSUMER: u32,
> TileShape for BlockTile<ROW_PARTS, COLUMN_PARTS, COLUMNS, PANELS, BOX, STAGES, CLUSTER, WARPGROUPS, PRODUCER, CONSUMER>
where
    Columns<COLUMNS>: MatrixColumns,
{
    const ROWS: u32 = (ROW_PARTS * PART) as u32;
    const COLUMNS: u32 = (COLUMN_PARTS * COLUMNS) as u32;
    const CLUSTER: u32 = CLUSTER;
    const WARPGROUPS: u32 = WARPGROUPS;
    const BOX: usize = BOX;
    const IN_CLUSTERS: bool = CLUSTER == 1 && cluster_sum::has_room(STAGES * ROW_PARTS, WARPGROUPS, COLUMNS);
    type Shared<A: Pod, B: Pod, const DEPTH: usize, O: Pod, const WIDTH: usize> =
        Shared<A, B, DEPTH, O, WIDTH, ROW_PARTS, COLUMN_PARTS, PANELS, BOX, STAGES>;
}

impl<
    const ROW_PARTS: usize,
    const COLUMN_PARTS: usize,
    const COLUMNS: usize,
    const PANELS: usize,
    const BOX: usize,
    const STAGES: usize,
    const CLUSTER: u32,
    const WARPGROUPS: u32,
    const PRODUCER: u32,
    const CONSUMER: u32,
> TileLoops<BOX> for BlockTile<ROW_PARTS, COLUMN_PARTS, COLUMNS, PANELS, BOX, STAGES, CLUSTER, WARPGROUPS, PRODUCER, CONSUMER>
where
    Columns<COLUMNS>: MatrixColumns,
{
    #[inline(always)]
    fn multiply<A, B, const DEPTH: usize, O, const WIDTH: usize, const RANK: usize, W, const M_MAJOR: bool, const N_MAJOR: bool>(
        tensors: Tensors<A, B, DEPTH, O, WIDTH, RANK, W, BOX>,
    ) where
        A: MatrixElement,
        B: MatrixElement,
        O: StoredElement,
        W: Division<RANK>,
    {
        const {
            assert!(ROW_PARTS * COLUMN_PARTS == WARPGROUPS as usize, "the warpgroups share the tile");
            assert!(COLUMNS == PANELS * BOX, "boxes have the columns");
            assert!(BOX == PART || !N_MAJOR, "rows of B along n are loaded 64 elements at a time");
            // Those beyond whole boxes are stored to the one matrix of the result.
            assert!(
                COLUMNS.is_multiple_of(WIDTH) || (RANK == 2 && !<W::Sharing as Sharing>::SHARES),
                "tiles of several matrices are whole boxes"
            );
            assert!((PANELS as u32).is_multiple_of(CLUSTER), "blocks of a cluster load equal shares of B");
            assert!(
                !<W::Sharing as Sharing>::SHARES || (COLUMN_PARTS == 1 && PANELS.is_multiple_of(ROW_PARTS)),
                "parts of others come in as many boxes for each warpgroup"
            );
        }
        let shared = Shared::<A, B, DEPTH, O, WIDTH, ROW_PARTS, COLUMN_PARTS, PANELS, BOX, STAGES>::claim();
        if thread::index() == 0 {
            shared.ring.init(CLUSTER * Roles::<WARPGROUPS, PRODUCER, CONSUMER>::CONSUMER_WARPS);
        }
        meet::<CLUSTER>();
        let rank = if CLUSTER == 1 { 0 } else { cluster::rank() };
        let order = || {
            tensors.division.order::<CLUSTER>(tensors.shape, const { [CLUSTER * Self::ROWS, <Self as TileShape>::COLUMNS] }, DEPTH as u32)
        };
        // Of a cluster that was made at launch, of blocks that each have a part of a tile.
        let in_clusters = Self::IN_CLUSTERS && W::IN_CLUSTERS && tensors.division.split().is_in_clusters();
        match Roles::<WARPGROUPS, PRODUCER, CONSUMER>::role() {
            Role::Producer(role) => {
                if role.begin() {
                    Self::produce::<A, B, DEPTH, O, WIDTH, RANK, W, M_MAJOR, N_MAJOR>(&tensors, order(), shared.ring.producer(), rank);
                }
                if in_clusters {
                    cluster::sync();
                    cluster::sync();
                }
            }
            Role::Consumer(role) => {
                let number = role.begin();
                Self::consume::<A, B, DEPTH, O, WIDTH, RANK, W, M_MAJOR, N_MAJOR>(&tensors, order(), shared, rank, number);
                epilogue::finish();
            }
        }
        if CLUSTER > 1 {
            cluster::sync();
        }
    }
}

/// Waits for all threads of the cluster.
#[inline(always)]
fn meet<const CLUSTER: u32>() {
    if CLUSTER == 1 {
        block::sync();
    } else {
        cluster::sync();
    }
}
