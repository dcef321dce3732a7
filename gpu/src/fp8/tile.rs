//! The tile of 128x128 elements of the kernels that transpose, or whose scales are those of 128 neighbours.
//!
//! A CUDA block takes one tile. A lane holds vectors of 4 rows below each other, so that the codes of one column in them make
//! up one word of the transpose; the vectors of a row lie in neighbouring lanes.
//!
//! | type | vectors a row | groups of 4 rows a warp | steps |
//! |---|---|---|---|
//! | 8 bits | 8 | 4 | 1 |
//! | 16 bits | 16 | 2 | 2 |
//! | 32 bits | 32 | 1 | 4 |
//!
//! Rows are whole vectors at aligned addresses. What is outside the matrix is 0.

use core::marker::PhantomData;

use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;

use super::*;
use crate::matrix::MatrixArgument;

/// Rows and columns of a tile.
pub const SIDE: u64 = 128;
/// Rows that a lane holds below each other.
pub(super) const LINES: usize = 4;
/// Steps of the widest type.
const STEPS: usize = 4;
/// Groups of rows in a tile.
const GROUPS: u32 = SIDE as u32 / LINES as u32;
/// Warps of a CUDA block.
pub(super) const WARPS: u32 = THREADS / warp::LANES;

/// A lane's part of a tile: a group of rows a step. Narrower types leave the last steps 0.
pub(super) type Lines<T> = [[Vector<T>; LINES]; STEPS];

/// A tile of a matrix `[rows, columns]` of `T`.
pub(super) struct Tile<T> {
    pub rows: u64,
    pub columns: u64,
    pub first_row: u64,
    pub first_column: u64,
    /// Rows and columns of it that are in the matrix.
    inside: [u32; 2],
    element: PhantomData<T>,
}

impl<T: Element> Tile<T> {
    /// Elements of a lane in a row.
    pub const LANES: u32 = 128 / T::BITS;
    /// Groups of rows that a lane holds.
    pub const STEPS: usize = (GROUPS / Self::GROUPS_A_STEP) as usize;
    /// Lanes that hold a row.
    pub const VECTORS: u32 = SIDE as u32 / Self::LANES;
    const GROUPS_A_WARP: u32 = warp::LANES / Self::VECTORS;
    const GROUPS_A_STEP: u32 = WARPS * Self::GROUPS_A_WARP;

    /// The tile of this CUDA block: grid x walks along the rows.
    #[inline(always)]
    pub fn of_block(rows: u64, columns: u64) -> Self {
        let [x, y, z] = block::index();
        let first_row = (u64::from(z) * u64::from(block::count()[1]) + u64::from(y)) * SIDE;
        let first_column = u64::from(x) * SIDE;
        let inside = [rows.saturating_sub(first_row), columns.saturating_sub(first_column)].map(|left| left.min(SIDE) as u32);
        Self { rows, columns, first_row, first_column, inside, element: PhantomData }
    }

    /// Checks what the fast kernels need of the parameter `input`, its columns and where it and the other matrix lie: one is wide, one of codes.
    pub fn check_vectors(columns: u64, wide: (&'static str, u64), codes: (&'static str, u64)) -> Result<(), LaunchError> {
        LaunchError::check_multiple("input.columns", Self::LANES.into(), columns)?;
        LaunchError::check_alignment(wide.0, 16, wide.1)?;
        LaunchError::check_alignment(codes.0, Self::LANES.into(), codes.1)
    }

    /// One CUDA block a tile of the parameter `input`, at least one.
    pub fn grid<I: Pod>(input: &MatrixArgument<'_, I>) -> Result<Grid, LaunchError> {
        input.check()?;
        let across = Grid::cover("input.columns", input.columns.max(1), SIDE as u32)?;
        Grid::down(across.x, "input.rows", input.rows.max(1), SIDE)
    }

    /// Whether it has any: a grid in three dimensions may have more blocks than there are tiles.
    #[inline(always)]
    pub fn has_elements(&self) -> bool {
        self.first_row < self.rows && self.first_column < self.columns
    }

    /// Whether it is the matrix's first.
    #[inline(always)]
    pub fn is_first(&self) -> bool {
        self.first_row == 0 && self.first_column == 0
    }

    /// Calls `body` with each step. An iterator over [`Lines`] would leave them in local memory.
    #[inline(always)]
    pub fn for_each_step(mut body: impl FnMut(usize)) {
        let mut step = 0;
        while step < Self::STEPS {
            body(step);
            step += 1;
        }
    }

    /// The lane's group of rows in a step.
    #[inline(always)]
    pub fn group(&self, step: usize) -> u32 {
        step as u32 * Self::GROUPS_A_STEP + thread::warp() * Self::GROUPS_A_WARP + thread::lane() / Self::VECTORS
    }

    /// The first of the lane's columns, counted from the tile's.
    #[inline(always)]
    pub fn column(&self) -> u32 {
        thread::lane() % Self::VECTORS * Self::LANES
    }

    /// One of the lane's rows.
    #[inline(always)]
    pub fn row(&self, step: usize, line: usize) -> u64 {
        self.first_row + u64::from(self.group(step) * LINES as u32) + line as u64
    }

    /// The lane's first element in one of its rows: the first of all, and a distance that all lanes share.
    #[inline(always)]
    pub fn element(&self, step: usize, line: usize) -> u64 {
        let distance = step as u64 * u64::from(Self::GROUPS_A_STEP) * LINES as u64 + line as u64;
        self.row(0, 0) * self.columns + self.first_column + u64::from(self.column()) + distance * self.columns
    }

    /// Whether the lane's vector in one of its rows is in the matrix.
    #[inline(always)]
    pub fn is_inside(&self, step: usize, line: usize) -> bool {
        self.has(self.group(step) * LINES as u32 + line as u32, self.column())
    }

    /// Whether a row and a column of the tile are in the matrix.
    #[inline(always)]
    pub fn has(&self, row: u32, column: u32) -> bool {
        row < self.inside[0] && column < self.inside[1]
    }
}

impl<T: Element + Pod> Tile<T> {
    /// The lane's part of the tile.
    #[inline(always)]
    pub fn load(&self, input: &Global<T>) -> Lines<T> {
        self.gather(Vector::from_words([0; 4]), |step, line| input.load_vector(self.element(step, line)))
    }

    /// The result of `inside` for each of the lane's rows; `outside` for rows beyond the matrix.
    #[inline(always)]
    pub fn gather<R: Copy>(&self, outside: R, inside: impl Fn(usize, usize) -> R) -> [[R; LINES]; STEPS] {
        core::array::from_fn(|step| {
            core::array::from_fn(|line| if step < Self::STEPS && self.is_inside(step, line) { inside(step, line) } else { outside })
        })
    }

    /// Stores the codes of one of the lane's rows; of `f32` the first word alone.
    #[inline(always)]
    pub fn store_codes<Q: Fp8>(&self, data: &GlobalMut<Q>, step: usize, line: usize, codes: [u32; 2]) {
        if self.is_inside(step, line) {
            if Self::LANES == 8 {
                data.store_pair(self.element(step, line), codes);
            } else {
                data.store_word(self.element(step, line), codes[0]);
            }
        }
    }
}
