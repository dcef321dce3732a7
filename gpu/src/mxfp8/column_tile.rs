//! The tile of the kernels whose blocks run along columns.
//!
//! A warp takes 32 rows, one block, of 8 vectors side by side. A lane holds the same vector of 8 rows, 4 rows
//! apart: `lane % 8` says which vector, `lane / 8` the first of its rows. So a warp loads 128 bytes of each of four rows
//! a step, a block of a column lies in 4 lanes, 8 apart, and a block of a row in neighbours, as in the
//! rowwise cast. The warps of a CUDA block lie side by side.

use core::marker::PhantomData;

use oxtile_tile::prelude::*;

use super::*;

/// Vectors of a row that a warp holds.
const VECTORS: u32 = 8;
/// Rows that it holds a step.
pub(super) const ROWS: u32 = warp::LANES / VECTORS;
/// Rows of a tile that a lane holds.
pub(super) const ROWS_A_LANE: usize = BLOCK as usize / ROWS as usize;

/// Elements of a row that a CUDA block holds.
pub(super) const fn columns_a_block<T>() -> u32 {
    WARPS * VECTORS * 16 / size_of::<T>() as u32
}

/// Where a lane works in a tensor of so many columns.
pub(super) struct ColumnTile<T> {
    /// Which of the CUDA blocks side by side this is.
    pub group: u64,
    /// The tile's 32 rows, in blocks from the first.
    pub row_block: u64,
    /// The lane's first row in the tile.
    pub row: u32,
    /// The lane's vector in a row of the CUDA block.
    pub vector: u32,
    /// The lane's first column.
    pub column: u64,
    columns: u64,
    element: PhantomData<T>,
}

impl<T> ColumnTile<T> {
    /// Grid x walks along the rows, y and z from row block to row block.
    #[inline(always)]
    pub fn of_lane(columns: u64) -> Self {
        let [group, y, z] = block::index();
        Self::at([u64::from(group), u64::from(z) * u64::from(block::count()[1]) + u64::from(y)], columns)
    }

    /// CUDA blocks side by side in a tensor of so many columns.
    #[inline(always)]
    pub const fn groups(columns: u64) -> u64 {
        columns.div_ceil(columns_a_block::<T>() as u64)
    }

    /// The lane's place in a group of columns of a row block.
    #[inline(always)]
    pub fn at([group, row_block]: [u64; 2], columns: u64) -> Self {
        let vector = thread::warp() * VECTORS + thread::lane() % VECTORS;
        Self {
            group,
            row_block,
            row: thread::lane() / VECTORS,
            vector,
            column: group * u64::from(columns_a_block::<T>()) + u64::from(vector * 16 / size_of::<T>() as u32),
            columns,
            element: PhantomData,
        }
    }

    /// Whether the warp's tile lies inside a tensor of `length` elements. A vote, so that the compiler knows that no warp is
    /// divided about it: shuffles in divided warps cost registers.
    #[inline(always)]
    pub fn is_whole(&self, length: u64) -> bool {
        warp::all(self.column < self.columns && self.start() + BLOCK * self.columns <= length)
    }

    /// The lane's first element in one of its rows of a whole tile.
    #[inline(always)]
    pub fn element(&self, step: usize) -> u64 {
        self.start() + u64::from(self.row) * self.columns + self.column + step as u64 * self.step()
    }

    /// The lane's part of a whole tile.
    #[inline(always)]
    pub fn load(&self, input: &Global<T>) -> [Vector<T>; ROWS_A_LANE]
    where
        T: Pod,
    {
        core::array::from_fn(|step| input.load_vector(self.element(step)))
    }

    /// Calls `step` for each four rows of a tile at an edge with the lane's first element and whether it is inside.
    /// All lanes take the same steps.
    #[inline(always)]
    pub fn for_each_step(&self, length: u64, mut step: impl FnMut(u64, bool)) {
        let end = length.min(self.start() + BLOCK * self.columns);
        let mut start = self.start();
        while start < end {
            let element = start + u64::from(self.row) * self.columns + self.column;
            step(element, self.column < self.columns && element < length);
            start += self.step();
        }
    }

    /// Where the scale of the lane's first column is.
    #[inline(always)]
    pub fn scale(&self) -> u64 {
        self.row_block * self.columns + self.column
    }

    /// Whether the lane's columns and the tile's first row are inside a tensor of `length` elements.
    #[inline(always)]
    pub fn is_inside(&self, length: u64) -> bool {
        self.column < self.columns && self.start() < length
    }

    /// Elements before the tile's first row.
    #[inline(always)]
    fn start(&self) -> u64 {
        self.row_block * BLOCK * self.columns
    }

    /// Elements between a lane's rows.
    #[inline(always)]
    fn step(&self) -> u64 {
        u64::from(ROWS) * self.columns
    }
}

/// The scales of the lane's columns, of which `T` has four or eight, from their running maxima, agreed among the
/// four lanes that hold them.
#[inline(always)]
pub(super) fn scales_of_columns<T: Magnitude, Q: Fp8>(running: [u32; 4]) -> [BlockScale; 8] {
    let agreed = running.map(|word| {
        let word = T::join(word, warp::shuffle_xor(word, VECTORS));
        T::join(word, warp::shuffle_xor(word, 2 * VECTORS))
    });
    core::array::from_fn(|i| {
        let column = i % Vector::<T>::LANES;
        let code = scale_of::<Q>(T::maximum_of(agreed[column / T::PER_WORD], column % T::PER_WORD));
        BlockScale { code, multiplier: code.reciprocal() }
    })
}

/// Raises the running maxima of the lane's columns by one row of them.
#[inline(always)]
pub(super) fn raise<T: Magnitude>(running: [u32; 4], row: Vector<T>) -> [u32; 4] {
    let words = row.words();
    core::array::from_fn(|i| T::raise(running[i], words[i]))
}

/// `scales[first..]`: one a column of `T`'s four or eight.
#[inline(always)]
pub(super) fn store_scales<T>(scales: &GlobalMut<ue8m0>, first: u64, columns: &[BlockScale; 8]) {
    let four = |from: usize| u32::from_le_bytes(core::array::from_fn(|i| columns[from + i].code.to_bits()));
    if size_of::<T>() == 2 { scales.store_pair(first, [four(0), four(4)]) } else { scales.store_word(first, four(0)) }
}

/// The grid for a tensor of whole vectors a row, and its columnwise scales checked.
pub(super) fn grid<T>(tensor: &'static str, elements: u64, columns: u64, scales: (&'static str, u64)) -> Result<Grid, LaunchError> {
    let row_blocks = check::<T>(tensor, elements, columns, scales)?;
    if row_blocks == 0 { Ok(Grid::x(0)) } else { grid_of_blocks::<T>(("rows", row_blocks), ("columns", columns)) }
}

/// The blocks of 32 rows of a tensor of whole vectors a row, once its columnwise scales are checked.
pub(super) fn check<T>(tensor: &'static str, elements: u64, columns: u64, scales: (&'static str, u64)) -> Result<u64, LaunchError> {
    let row_blocks = row_blocks(tensor, elements, columns)?;
    LaunchError::check_multiple("columns", 16 / size_of::<T>() as u64, columns)?;
    LaunchError::check_length(scales.0, row_blocks * columns, scales.1)?;
    Ok(row_blocks)
}

/// The grid over so many blocks of 32 rows, at least one.
pub(super) fn grid_of_blocks<T>(
    (rows_name, row_blocks): (&'static str, u64),
    (columns_name, columns): (&'static str, u64),
) -> Result<Grid, LaunchError> {
    let groups = Grid::cover(columns_name, columns, columns_a_block::<T>())?;
    Grid::down(groups.x, rows_name, row_blocks.saturating_mul(BLOCK), BLOCK)
}

/// Blocks of 32 rows, the last perhaps shorter; none in an empty tensor.
pub(super) fn row_blocks(tensor: &'static str, elements: u64, columns: u64) -> Result<u64, LaunchError> {
    LaunchError::check_multiple(tensor, columns, elements)?;
    Ok(elements.checked_div(columns).map_or(0, |rows| rows.div_ceil(BLOCK)))
}
