//! A step of a ring: merges a tile's result into the running one.
//!
//! Where the queries move to registers there is room for 16 old rows of each warp in shared memory. TMA copies them in beside the tile's first
//! product, once the rows of the tile before have left; the warp merges them in place, and TMA copies them out. Warps wait for
//! themselves alone. A warp of which a row saw no key, before or now, goes by device memory, and so do all where the rows are not aligned for TMA.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Linear;
use oxtile_tile::num::opaque;
use oxtile_tile::pipeline::{self, Mbarrier};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, Rows, StoredElement, THREAD_ROWS};
use oxtile_tile::shared::{Overlay, SharedTile, Tiles};
use oxtile_tile::tensor_map::TensorMapMut;

use super::problem::Staging;
use super::running::{Place, Running, Share};
use super::schedule::TILE_WORDS;
use super::shape::Checked;
use super::softmax::Finished;
use super::target::{Spot, Target};
use super::warpgroup_roles::WarpgroupRoles;

/// Rows of a warp.
pub const WARP_ROWS: usize = 16;

/// Columns of the two boxes that rows of up to 128 columns are copied in. Rows of so many bytes shift by 32 from one to the next, or by 96: so the
/// rows that half a warp reads together, 32 bytes each, lie in different banks.
pub const LEFT: usize = 72;
/// As [`LEFT`].
pub const RIGHT: usize = 56;

/// Words of a rounded row that waits, of which as many rows as meet in an instruction begin in different banks.
const ROUNDED_WORDS: u32 = 68;

/// A step of a ring, with a running result whose rows are copied by TMA if there are maps of them.
#[derive(Parameter)]
pub struct RingStep<T: RegisterElement, const RANK: usize> {
    /// The running result.
    pub running: Running<T, true>,
    /// The maps of its sums.
    pub rows: Option<RowMaps<RANK>>,
}

/// Rows of heads in `f32`, in two boxes.
#[derive(Clone, Copy, Parameter)]
#[parameter(optional)]
pub struct RowMaps<const RANK: usize> {
    /// From the first column on.
    pub left: TensorMapMut<f32, WARP_ROWS, LEFT, Linear, RANK>,
    /// From column [`LEFT`] on.
    pub right: TensorMapMut<f32, WARP_ROWS, RIGHT, Linear, RANK>,
}

type Box<const COLUMNS: usize, const ELEMENTS: usize> = Overlay<SharedTile<f32, WARP_ROWS, COLUMNS>, SharedArray<f32, ELEMENTS>>;

/// The old rows of a tile in shared memory, then the merged ones; each warp's apart.
#[derive(SharedStorage, Clone, Copy)]
pub struct HeldRows {
    left: Tiles<Box<LEFT, { WARP_ROWS * LEFT }>, 8>,
    right: Tiles<Box<RIGHT, { WARP_ROWS * RIGHT }>, 8>,
    full: Tiles<Mbarrier, 8>,
}

/// The rows of a warp.
#[derive(Clone, Copy)]
struct WarpRows {
    left: Box<LEFT, { WARP_ROWS * LEFT }>,
    right: Box<RIGHT, { WARP_ROWS * RIGHT }>,
    full: Mbarrier,
    /// The number of the warp.
    warp: u32,
}

impl HeldRows {
    /// Those of a warp.
    #[inline(always)]
    #[track_caller]
    fn of_warp(self, warp: u32) -> WarpRows {
        WarpRows { left: self.left.tile(warp), right: self.right.tile(warp), full: self.full.tile(warp), warp }
    }
}

/// The number of a warp of warpgroup `part` among those that multiply. The compiler sees that it is the same in all lanes, and cannot hold over the
/// walk along keys what follows from it.
#[inline(always)]
#[track_caller]
fn number(part: u32) -> u32 {
    warp::shuffle(4 * part + thread::warp() % 4, 0)
}

impl WarpRows {
    /// The two neighbours of a lane's row from [`column(pair)`](register_tile::column) on; `pair` is a constant.
    #[inline(always)]
    #[track_caller]
    fn pair(self, lane: u32, half: usize, pair: usize) -> [f32; 2] {
        let (row, column) = (lane / 4 + 8 * half as u32, 8 * pair as u32 + 2 * (lane % 4));
        if 8 * pair < LEFT {
            self.left.second().load_pair(row * LEFT as u32 + column)
        } else {
            self.right.second().load_pair(row * RIGHT as u32 + column - LEFT as u32)
        }
    }

    /// Replaces [`pair`](Self::pair).
    #[inline(always)]
    #[track_caller]
    fn set_pair(self, lane: u32, half: usize, pair: usize, values: [f32; 2]) {
        let (row, column) = (lane / 4 + 8 * half as u32, 8 * pair as u32 + 2 * (lane % 4));
        if 8 * pair < LEFT {
            self.left.first().store_pair(row, column, values);
        } else {
            self.right.first().store_pair(row, column - LEFT as u32, values);
        }
    }
}

impl<const RANK: usize> RowMaps<RANK> {
    /// The places of the boxes of a warp.
    #[inline(always)]
    #[track_caller]
    fn places(spot: &Spot<RANK>, warp: u32) -> [[u32; RANK]; 2] {
        let mut left = spot.at;
        left[RANK - 2] += WARP_ROWS as u32 * (warp % 4);
        let mut right = left;
        right[RANK - 1] += LEFT as u32;
        [left, right]
    }

    /// Starts to copy the old rows of a warp. One lane calls it.
    #[inline(always)]
    #[track_caller]
    fn load<const V: usize>(&self, rows: WarpRows, [left, right]: [[u32; RANK]; 2]) {
        let two = V > LEFT;
        let bytes = TensorMapMut::<f32, WARP_ROWS, LEFT, Linear, RANK>::BYTES;
        rows.full.arrive_expect(if two { bytes + TensorMapMut::<f32, WARP_ROWS, RIGHT, Linear, RANK>::BYTES } else { bytes });
        self.left.load(rows.left.first(), left, rows.full);
        if two {
            self.right.load(rows.right.first(), right, rows.full);
        }
    }

    /// Starts to store the merged ones. One lane calls it.
    #[inline(always)]
    #[track_caller]
    fn store<const V: usize>(&self, rows: WarpRows, [left, right]: [[u32; RANK]; 2]) {
        self.left.store(left, rows.left.first());
        if V > LEFT {
            self.right.store(right, rows.right.first());
        }
        pipeline::commit_stores();
    }
}

impl<T: RegisterElement + StoredElement, const RANK: usize> RingStep<T, RANK> {
    /// Merges the sum of a warp's rows, which have come.
    #[inline(always)]
    #[track_caller]
    fn merge_held<const V: usize>(
        &self,
        maps: &RowMaps<RANK>,
        rows: WarpRows,
        begins: bool,
        mut sum: RegisterTile<V>,
        shares: [Share; THREAD_ROWS],
        spot: &Spot<RANK>,
    ) where
        Columns<V>: MatrixColumns,
    {
        // Else the compiler holds what follows from it in registers, over the walk along keys.
        let lane = opaque(thread::lane());
        if begins {
            sum.scale_rows(shares.map(|share| share.add));
        } else {
            sum.map_pairs(|half, pair, new| {
                let (old, Share { keep, add, .. }) = (rows.pair(lane, half, pair), shares[half]);
                [0, 1].map(|j| old[j] * keep + new[j] * add)
            });
        }
        if self.running.rounded.is_some() {
            // All lanes have read before one writes.
            warp::sync();
            self.store_rounded(rows, lane, &sum, self.running.place(spot), spot.row + WARP_ROWS as u32 * (rows.warp % 4));
        } else {
            sum.map_pairs(|half, pair, merged| {
                rows.set_pair(lane, half, pair, merged);
                merged
            });
        }
        sync::fence_proxy_async();
        warp::sync();
        let places = RowMaps::places(spot, rows.warp);
        if self.running.rounded.is_none() && thread::lane() == 0 {
            maps.store::<V>(rows, places);
        }
    }

    /// Stores merged rows rounded, by way of shared memory, whole rows together.
    #[inline(always)]
    #[track_caller]
    fn store_rounded<const V: usize>(&self, rows: WarpRows, lane: u32, merged: &RegisterTile<V>, place: Place, first: u32)
    where
        Columns<V>: MatrixColumns,
    {
        let (Some(rounded), words) = (self.running.rounded, rows.left.second()) else { return };
        let mut half = 0;
        while half < THREAD_ROWS {
            let mut pair = 0;
            while pair < RegisterTile::<V>::PAIRS {
                let word = (lane / 4 + 8 * half as u32) * ROUNDED_WORDS + 4 * pair as u32 + lane % 4;
                words.store(word, f32::from_bits(T::pack(merged.pair(half, pair))));
                pair += 1;
            }
            half += 1;
        }
        warp::sync();
        let chunks = V as u32 / 8;
        let mut i = 0;
        while i < WARP_ROWS as u32 * chunks / warp::LANES {
            let chunk = i * warp::LANES + lane;
            let (row, column) = (chunk / chunks, chunk % chunks * 8);
            if first + row < place.rows && column < self.running.size {
                let at = place.start + u64::from(first + row) * self.running.row_stride + u64::from(column);
                rounded.store_vector(at, Vector::from_words(words.load_vector(row * ROUNDED_WORDS + column / 2).words()));
            }
            i += 1;
        }
    }
}

impl<T: RegisterElement + StoredElement, const V: usize, const RANK: usize> Target<T, V, RANK> for RingStep<T, RANK>
where
    Columns<V>: MatrixColumns,
{
    const BY_TMA: bool = false;

    type Told = SharedArray<u32, { 2 * TILE_WORDS }>;
    type Staging<G: WarpgroupRoles> = G::Held<HeldRows>;

    #[inline(always)]
    #[track_caller]
    fn begin<G: WarpgroupRoles>(staging: G::Held<HeldRows>, part: u32) {
        if let Some(held) = G::held(staging) {
            let full = held.of_warp(number(part)).full;
            if thread::lane() == 0 {
                full.init(1);
                pipeline::publish_barriers();
            }
        }
    }

    #[inline(always)]
    #[track_caller]
    fn fetch<G: WarpgroupRoles>(&self, spot: &Spot<RANK>, staging: G::Held<HeldRows>, part: u32) {
        let Some(held) = G::held(staging) else { return self.running.fetch_rows(self.running.place(spot), spot.row) };
        let warp = number(part);
        let (rows, places) = (held.of_warp(warp), RowMaps::places(spot, warp));
        if thread::lane() == 0 {
            pipeline::wait_stores_read::<0>();
            if let Some(maps) = self.rows
                && !self.running.begins
            {
                maps.load::<V>(rows, places);
            }
        }
    }

    #[inline(always)]
    #[track_caller]
    fn logs(&self, spot: &Spot<RANK>) -> Rows {
        self.running.logs(self.running.place(spot), spot.row)
    }

    #[inline(always)]
    #[track_caller]
    fn store<G: WarpgroupRoles, const D: usize>(
        &self,
        sum: RegisterTile<V>,
        finished: Finished,
        spot: Spot<RANK>,
        staging: Staging<T, D, G::Held<HeldRows>>,
    ) {
        let place = self.running.place(&spot);
        let Some(held) = G::held(staging.memory) else { return self.running.merge(&sum, &finished, place, spot.row) };
        let shares = self.running.merge_loaded_logs(&finished, place, spot.row, staging.logs);
        let warp = number(staging.part);
        let (rows, begins) = (held.of_warp(warp), opaque(self.running.begins.into()) != 0);
        if self.rows.is_some() && !begins {
            rows.full.wait(staging.parity);
        }
        let mut plain = self.rows.is_some();
        let mut half = 0;
        while half < THREAD_ROWS {
            let outside = spot.row + register_tile::row(half as u32) >= place.rows;
            plain &= outside || shares[half].is_plain(begins);
            half += 1;
        }
        if let Some(maps) = &self.rows
            && warp::all(plain)
        {
            self.merge_held(maps, rows, begins, sum, shares, &spot);
        } else {
            self.running.merge_columns(&sum, shares, place, spot.row, 0);
        }
    }

    #[inline(always)]
    #[track_caller]
    fn end<G: WarpgroupRoles>(staging: G::Held<HeldRows>) {
        if G::held(staging).is_some() && thread::lane() == 0 {
            pipeline::wait_stores_read::<0>();
        }
    }

    fn check(argument: &Self::Argument<'_>, statistics: u64, extent: [u64; 3]) -> Checked {
        let RingStepArgument { running, rows } = argument;
        running.check(V, statistics)?;
        running.check_room(extent)?;
        if let (Some(_), Some(rounded)) = (rows, &running.rounded) {
            LaunchError::check_alignment("target.rounded", 16, rounded.address())?;
            for (name, elements) in [
                ("target.size", running.size.into()),
                ("target.batch_stride", running.batch_stride),
                ("target.head_stride", running.head_stride),
                ("target.row_stride", running.row_stride),
            ] {
                LaunchError::check_multiple(name, 8, elements)?;
            }
        }
        Ok(())
    }
}
