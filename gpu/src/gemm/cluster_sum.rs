//! Tiles whose sum is split along K among the blocks of a cluster, which is made at launch.
//!
//! The columns of a warpgroup's tile are divided among the blocks in slices. When all blocks of the cluster have read their operands, each warpgroup writes each slice of its
//! part to the block that has it, into the ring of operands. Each block then adds up the parts of its slices, in the order of K, and stores them. Device memory
//! has the result alone, and the bits depend on the number of parts alone.
//!
//! | barrier | between |
//! |---|---|
//! | cluster | all blocks have read their rings; they are written |
//! | cluster | all slices are written; they are read |

use oxtile_tile::arch::{Columns, MatrixColumns, MatrixElement};
use oxtile_tile::cluster;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterTile, StoredElement};
use oxtile_tile::shared::Tiles;
use oxtile_tile::vector::Vector;
use oxtile_tile::warpgroup;

use super::division::Division;
use super::split::CLUSTER_PARTS;
use super::stage::{PART_WORDS, Stage};
use super::tensors::Tensors;

/// Words from one pair of a thread's columns to its next: those of all threads of a warpgroup.
const PAIR: usize = 4 * warpgroup::THREADS as usize;
/// Columns of a slice.
const SLICE: usize = 16;
/// Pairs of a slice.
const SLICE_PAIRS: usize = RegisterTile::<SLICE>::PAIRS;
/// Slices that a part of `A` in the ring has room for.
const SLICES: usize = PART_WORDS / (SLICE_PAIRS * PAIR);

/// Whether so many parts of `A` have room for the slices of so many warpgroups' tiles of these columns, into however many parts a sum is divided.
pub const fn has_room(parts: usize, warpgroups: u32, columns: usize) -> bool {
    let (mut i, mut most) = (0, 0);
    while i < CLUSTER_PARTS.len() {
        let slices = (columns / SLICE).next_multiple_of(CLUSTER_PARTS[i] as usize);
        most = if slices > most { slices } else { most };
        i += 1;
    }
    warpgroups as usize * most <= parts * SLICES
}

/// Where a block gets its slices: in parts of `A`, one after another, by warpgroup, slice and source.
#[derive(Clone, Copy)]
pub struct Room<
    A: Pod,
    B: Pod,
    const DEPTH: usize,
    const ROW_PARTS: usize,
    const COLUMN_PARTS: usize,
    const PANELS: usize,
    const BOX: usize,
    const STAGES: usize,
>(pub Tiles<Stage<A, B, DEPTH, ROW_PARTS, COLUMN_PARTS, PANELS, BOX>, STAGES>);

impl<
    A: MatrixElement,
    B: MatrixElement,
    const DEPTH: usize,
    const ROW_PARTS: usize,
    const COLUMN_PARTS: usize,
    const PANELS: usize,
    const BOX: usize,
    const STAGES: usize,
> Room<A, B, DEPTH, ROW_PARTS, COLUMN_PARTS, PANELS, BOX, STAGES>
{
    /// The memory that slice `number` of all that a block gets lies in, and the calling thread's first word of it. Its pairs are [`PAIR`] words apart.
    #[inline(always)]
    fn slice(self, number: u32) -> (SharedArray<u32, PART_WORDS>, u32) {
        let part = number / const { SLICES as u32 };
        let words = self.0.tile(part / ROW_PARTS as u32).words(part % ROW_PARTS as u32);
        (words, number % const { SLICES as u32 } * const { (SLICE_PAIRS * PAIR) as u32 } + 4 * (thread::index() % warpgroup::THREADS))
    }

    /// Adds up the tiles of warpgroup `number` of all blocks of the cluster, `parts` of them, and stores the block's share of the sum, finished. The tile's first element belongs at `origin`
    /// of the result. All threads of all warpgroups that multiply call it, once, after they have read all operands, of tiles that [have room](has_room); the other threads of the block call
    /// [`cluster::sync`] twice meanwhile.
    #[inline(always)]
    #[track_caller]
    pub fn add_and_store<O, const COLUMNS: usize, const OUT: usize, const RANK: usize, W>(
        self,
        tile: &RegisterTile<COLUMNS>,
        tensors: &Tensors<A, B, DEPTH, O, OUT, RANK, W, BOX>,
        origin: [u32; 2],
        (number, parts): (u32, u32),
    ) where
        O: StoredElement,
        W: Division<RANK>,
        Columns<COLUMNS>: MatrixColumns,
    {
        let Tensors { old, shape, fusion, .. } = tensors;
        let (rank, each) = (cluster::rank(), const { (COLUMNS / SLICE) as u32 }.div_ceil(parts.max(1)));
        // Warps whose rows are all beyond the edge have nothing to add.
        let inside = warp::shuffle(thread::warp(), 0) % 4 * 16 + origin[0] < shape.m;
        cluster::sync();
        if inside {
            let (mut slice, mut target, mut turn) = (0, 0, 0);
            while slice < COLUMNS / SLICE {
                let (words, at) = self.slice((number * each + turn) * parts + rank);
                let mut i = 0;
                while i < SLICE_PAIRS {
                    let pair = slice * SLICE_PAIRS + i;
                    let ([a, b], [c, d]) = (tile.pair(0, pair), tile.pair(1, pair));
                    words.store_vector_to(target, at + (i * PAIR) as u32, Vector::from_words([a, b, c, d].map(f32::to_bits)));
                    i += 1;
                }
                target += 1;
                if target == parts {
                    (target, turn) = (0, turn + 1);
                }
                slice += 1;
            }
        }
        cluster::sync();
        if !inside {
            return;
        }
        let factor = fusion.factor();
        let (mut slice, mut turn) = (rank, 0);
        while slice < const { (COLUMNS / SLICE) as u32 } {
            let mut sum = RegisterTile::<SLICE>::zero();
            for part in 0..parts {
                let (words, at) = self.slice((number * each + turn) * parts + part);
                let mut i = 0;
                while i < SLICE_PAIRS {
                    let [a, b, c, d] = words.load_vector(at + (i * PAIR) as u32).words().map(f32::from_bits);
                    let ([e, f], [g, h]) = (sum.pair(0, i), sum.pair(1, i));
                    sum.set_pair(0, i, [e + a, f + b]);
                    sum.set_pair(1, i, [g + c, h + d]);
                    i += 1;
                }
            }
            let origin = [origin[0], origin[1] + slice * SLICE as u32];
            fusion.apply::<SLICE, true>(&mut sum, factor, old, [shape.m, shape.n], origin);
            sum.store(old, origin, [shape.m, shape.n], 0);
            (slice, turn) = (slice + parts, turn + 1);
        }
    }
}
