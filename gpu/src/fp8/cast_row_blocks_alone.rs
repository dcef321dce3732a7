//! Cast to FP8 with one scale for each 128 neighbours of a row, of the matrix alone.
//!
//! Floor: 2 (bf16) + 1 bytes an element, and 4 for 128. Nothing leaves the registers. A warp takes the blocks of some rows below each
//! other, whose scales are neighbours in memory: of 16-bit types 8 rows, a sector. In each of `STEPS` steps a lane holds one vector, and the
//! lanes that share a block agree on its amax by shuffles; then one of them divides, lane `step` of the block's, and hands the scale to
//! the others.

use core::marker::PhantomData;

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::tile::{SIDE, Tile};
use super::*;
use crate::magnitude::Magnitude;
use crate::matrix::{Matrix, MatrixArgument};

/// Vectors that a lane keeps in flight.
const STEPS: usize = 4;
const WARPS: u32 = THREADS / warp::LANES;
/// CUDA blocks a multiprocessor: 1024 threads of 64 registers.
const RESIDENT: u32 = 4;

/// Casts a matrix `[rows, columns]` of whole vectors a row to `data`. The inverse of the scale of block `j` of row `i` is
/// `scale_inverses[j, i]`, in rows of a multiple of 4. What fills up the rows is not written.
#[kernel(threads = THREADS, grid = grid, min_blocks = RESIDENT)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn fp8_cast_row_blocks_alone<T: Magnitude, Q: Fp8>(
    input: Matrix<T>,
    data: GlobalMut<Q>,
    scale_inverses: GlobalMut<f32>,
    options: ScaleOptions,
) {
    let Matrix { values: input, rows, columns } = input;
    let blocks = Blocks::<T>::of_lane(rows, columns);
    let rule = ScaleRule::new(options, T::MAX.to_f32());
    // A vote, so that the compiler knows that no warp diverges at it.
    if warp::all(blocks.is_inside(STEPS as u32 - 1)) {
        cast(&blocks, rule, |_| true, &input, &data, &scale_inverses);
    } else {
        cast(&blocks, rule, |step| blocks.is_inside(step), &input, &data, &scale_inverses);
    }
}

fn grid<T: Magnitude, Q: Fp8>(args: &Fp8CastRowBlocksAloneArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let MatrixArgument { values, rows, columns } = args.input;
    args.input.check()?;
    LaunchError::check_length("data", values.len(), args.data.len())?;
    LaunchError::check_length("scale_inverses", columns.div_ceil(SIDE) * row_of_scales(rows), args.scale_inverses.len())?;
    Tile::<T>::check_vectors(columns, ("input.values", values.address()), ("data", args.data.address()))?;
    let warps = rows.div_ceil(Blocks::<T>::ROWS.into()) * columns.div_ceil(SIDE);
    LaunchError::check_limit("input.values", warps, (u32::MAX - WARPS).into())?;
    Grid::cover("input.values", warps, WARPS)
}

/// Casts a warp's blocks; `inside` tells whether the lane's row of a step is in the matrix.
#[inline(always)]
fn cast<T: Magnitude, Q: Fp8>(
    blocks: &Blocks<T>,
    rule: ScaleRule,
    inside: impl Fn(u32) -> bool,
    input: &Global<T>,
    data: &GlobalMut<Q>,
    scale_inverses: &GlobalMut<f32>,
) {
    let vectors: [_; STEPS] = core::array::from_fn(|step| {
        let zero = Vector::from_words([0; 4]);
        if inside(step as u32) { input.load_vector(blocks.element(step as u32)) } else { zero }
    });
    let maxima: [_; STEPS] = core::array::from_fn(|step| maximum_of_block::<T>(vectors[step], Blocks::<T>::LANES));
    let own = thread::lane() % Blocks::<T>::LANES;
    let maximum = (1..STEPS).fold(maxima[0], |maximum, step| if own == step as u32 { maxima[step] } else { maximum });
    let scale = rule.scale::<Q>(T::finish(maximum));
    for (step, vector) in vectors.iter().enumerate() {
        let scale = warp::shuffle(scale, thread::lane() - own + step as u32);
        if inside(step as u32) {
            let codes = encode::<T, Q>(*vector, scale);
            let element = blocks.element(step as u32);
            if Vector::<T>::LANES == 8 { data.store_pair(element, codes) } else { data.store_word(element, codes[0]) }
        }
    }
    // Its block, not its vector: a row may end before the lane's.
    if own < STEPS as u32 && blocks.row(own) < blocks.rows {
        scale_inverses.store(blocks.scale(own), 1.0 / scale);
    }
}

/// The blocks of a warp, and the lane's place in them.
struct Blocks<T> {
    /// The lane's row in the first step.
    row: u64,
    column: u64,
    /// The block of a row.
    block: u32,
    rows: u64,
    columns: u64,
    element: PhantomData<T>,
}

impl<T: Element> Blocks<T> {
    /// Lanes that hold a block.
    const LANES: u32 = Tile::<T>::VECTORS;
    /// Rows that a warp holds a step.
    const ROWS_A_STEP: u32 = warp::LANES / Self::LANES;
    /// Rows that it holds.
    const ROWS: u32 = STEPS as u32 * Self::ROWS_A_STEP;

    /// Warps walk along the rows.
    #[inline(always)]
    fn of_lane(rows: u64, columns: u64) -> Self {
        let (number, across) = (block::index()[0] * WARPS + thread::warp(), columns.div_ceil(SIDE) as u32);
        let down = number.checked_div(across).unwrap_or(0);
        let block = number - down * across;
        Self {
            row: u64::from(down) * u64::from(Self::ROWS) + u64::from(thread::lane() / Self::LANES),
            column: u64::from(block) * SIDE + u64::from(thread::lane() % Self::LANES * Tile::<T>::LANES),
            block,
            rows,
            columns,
            element: PhantomData,
        }
    }

    /// The lane's row in a step.
    #[inline(always)]
    fn row(&self, step: u32) -> u64 {
        self.row + u64::from(step * Self::ROWS_A_STEP)
    }

    /// The lane's first element in a step: the first of all, and a distance that all lanes share.
    #[inline(always)]
    fn element(&self, step: u32) -> u64 {
        self.row * self.columns + self.column + u64::from(step * Self::ROWS_A_STEP) * self.columns
    }

    /// Whether the lane's vector in a step is in the matrix.
    #[inline(always)]
    fn is_inside(&self, step: u32) -> bool {
        self.row(step) < self.rows && self.column < self.columns
    }

    /// Where the scale of the lane's block in a step is.
    #[inline(always)]
    fn scale(&self, step: u32) -> u64 {
        u64::from(self.block) * row_of_scales(self.rows) + self.row(step)
    }
}
