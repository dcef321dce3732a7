//! Heads of any size as panels of 64 elements, in the portable kernels: where their rows lie, their way in, their products, and the way out of
//! what is made of them.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, OperandTile, RegisterElement, RegisterTile, THREAD_ROWS};
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::warp_matrix::{self, KMajor, NMajor};

/// Threads that copy together.
pub(super) const THREADS: u32 = 128;
/// Rows of a tile, which stay in shared memory while those of the other side pass.
pub const PORTABLE_ROWS: usize = 64;
/// Columns of a panel.
pub const PORTABLE_PANEL: usize = 64;
pub(super) const PANEL: usize = PORTABLE_PANEL;

/// Keys of a step of the forward kernel, whose heads have so many panels.
pub const fn portable_general_keys(panels: usize) -> usize {
    if panels > 2 { 32 } else { 64 }
}

/// Rows of heads, a tile for each panel.
pub(super) type Panels<T, const ROWS: usize, const PANELS: usize> = Tiles<SharedTile<T, ROWS, PANEL, Swizzle128>, PANELS>;

/// Rows of one side.
#[derive(SharedStorage, Clone, Copy)]
pub(super) struct Side<T: Pod, const ROWS: usize, const PANELS: usize> {
    /// Queries or keys: scores are products of the two sides'.
    pub scored: Panels<T, ROWS, PANELS>,
    /// Gradients of the result, or values: gradients of weights are products of the two sides'.
    pub valued: Panels<T, ROWS, PANELS>,
}

/// The rows of a sequence in a tensor of heads.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub first: u32,
    pub count: u32,
    /// Heads of a row, of all sequences that share rows.
    pub heads: u32,
    /// The first of them that is the sequence's.
    pub head: u32,
}

impl Rows {
    /// The first element of a row of a head.
    #[inline(always)]
    pub fn start(self, row: u32, head: u32, size: u32) -> u64 {
        (u64::from(self.first + row) * u64::from(self.heads) + u64::from(self.head + head)) * u64::from(size)
    }
}

/// Starts to copy rows of a head of both tensors of a side, as [`copy_panels`].
#[inline(always)]
#[track_caller]
pub(super) fn copy_side<T: Pod, const N: usize, const PANELS: usize>(
    side: Side<T, N, PANELS>,
    [scored, valued]: &[Global<T>; 2],
    rows: Rows,
    head: u32,
    first: u32,
    [size, value_size]: [u32; 2],
) {
    copy_panels(side.scored, scored, rows, head, first, size);
    copy_panels(side.valued, valued, rows, head, first, value_size);
}

/// Starts to copy rows of a head from row `first` on; what is after the last row, or hangs over the head, is zero.
#[inline(always)]
#[track_caller]
pub(super) fn copy_panels<T: Pod, const N: usize, const PANELS: usize>(
    target: Panels<T, N, PANELS>,
    source: &Global<T>,
    rows: Rows,
    head: u32,
    first: u32,
    size: u32,
) {
    const CHUNK: u32 = 8;
    const CHUNKS: u32 = PANEL as u32 / CHUNK;
    let column = thread::index() % CHUNKS * CHUNK;
    for panel in 0..size.div_ceil(PANEL as u32) {
        let element = panel * PANEL as u32 + column;
        let mut at = thread::index() / CHUNKS;
        while at < N as u32 {
            let inside = first + at < rows.count && element < size;
            let start = rows.start(first + at, head, size) + u64::from(element);
            pipeline::copy_async_to_tile(target.tile(panel), [at, column], source, start, if inside { 16 } else { 0 });
            at += THREADS / CHUNKS;
        }
    }
}

/// The products of 64 rows with `N` others, over the `size` elements of a head. All lanes of a warp call it.
#[inline(always)]
#[track_caller]
pub(super) fn product<T: RegisterElement, const N: usize, const PANELS: usize>(
    left: Panels<T, PORTABLE_ROWS, PANELS>,
    right: Panels<T, N, PANELS>,
    size: u32,
) -> RegisterTile<N>
where
    Columns<N>: MatrixColumns,
{
    let mut sum = RegisterTile::zero();
    for panel in 0..size.div_ceil(PANEL as u32) {
        let left = [OperandTile::<T, PANEL>::load(left.tile(panel))];
        warp_matrix::multiply_add::<T, N, PANEL, 1>(core::array::from_mut(&mut sum), &left, KMajor(right.tile(panel)));
    }
    sum
}

/// Adds the products of `K` columns with a panel. All lanes of a warp call it.
#[inline(always)]
#[track_caller]
pub(super) fn accumulate<T: RegisterElement, const K: usize>(
    sum: &mut RegisterTile<PANEL>,
    left: OperandTile<T, K>,
    right: SharedTile<T, K, PANEL, Swizzle128>,
) where
    Columns<K>: MatrixColumns,
{
    warp_matrix::multiply_add::<T, PANEL, K, 1>(core::array::from_mut(sum), &[left], NMajor(right));
}

/// Where a panel of a result goes.
pub(super) struct Place {
    pub rows: Rows,
    pub head: u32,
    /// The block's first row.
    pub row: u32,
    /// Rows there are, with padding.
    pub written: u32,
    pub panel: u32,
}

impl Place {
    /// Stores it rounded.
    #[inline(always)]
    #[track_caller]
    pub fn store_rounded<T: RegisterElement>(&self, tile: &RegisterTile<PANEL>, size: u32, target: &GlobalMut<T>) {
        self.each_pair(tile, 1.0, size, |at, values| target.store_word(at, T::pack(values)));
    }

    /// Stores it times `scale`, or adds it to sums if there are any: as an `Option` they would cost 2 to 5 % more instructions.
    #[inline(always)]
    #[track_caller]
    pub fn store<T: RegisterElement>(
        &self,
        tile: &RegisterTile<PANEL>,
        scale: f32,
        size: u32,
        target: &GlobalMut<T>,
        sums: &GlobalMut<f32>,
    ) {
        self.each_pair(tile, scale, size, |at, values| {
            if sums.is_empty() {
                target.store_word(at, T::pack(values));
            } else {
                let [a, b] = sums.load_pair(at).map(f32::from_bits);
                sums.store_pair(at, [a + values[0], b + values[1]].map(f32::to_bits));
            }
        });
    }

    /// Gives `write` each pair of the thread's elements that are written, times `scale`, with its place.
    #[inline(always)]
    #[track_caller]
    fn each_pair(&self, tile: &RegisterTile<PANEL>, scale: f32, size: u32, write: impl Fn(u64, [f32; 2])) {
        let mut half = 0;
        while half < THREAD_ROWS {
            let row = self.row + register_tile::row(half as u32);
            let start = self.rows.start(row, self.head, size);
            let mut pair = 0;
            while pair < RegisterTile::<PANEL>::PAIRS {
                let column = self.panel * PANEL as u32 + register_tile::column(pair as u32);
                let values = tile.pair(half, pair).map(|x| if row < self.rows.count { x * scale } else { 0.0 });
                if row < self.written && column < size {
                    write(start + u64::from(column), values);
                }
                pair += 1;
            }
            half += 1;
        }
    }
}
