//! The cast to FP8 with one scale for each 128x128 square of a matrix of which a rank holds a shard: any run of its
//! elements. First the amax of its elements in each square; then, when the ranks have agreed on the maxima, the cast of the shard.
//!
//! Rules: TransformerEngine `common/recipe/fp8_block_scaling.cu`, except that only the codes of the shard are written.
//!
//! Floor: 2 (bf16) bytes an element of the shard for the amaxes, 2 + 1 for the cast. A CUDA block takes one square; a warp takes rows of
//! it, and a lane every 32nd column, since a shard may start and rows may lie at any address.
//!
//! | barrier | between |
//! |---|---|
//! | of `block::max_u32` (amaxes) | the warps' maxima are written, and read |

use oxtile_tile::block::ReduceStorage;
use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::tile::{SIDE, WARPS};
use super::*;
use crate::magnitude::Magnitude;

/// Elements of a lane in a row of a square.
const COLUMNS: usize = SIDE as usize / warp::LANES as usize;
/// CUDA blocks a multiprocessor.
const RESIDENT: u32 = 4;

/// Where the warps' maxima meet.
#[derive(SharedStorage)]
struct Shared {
    reduce: ReduceStorage,
}

/// A shard of a matrix: a run of its elements.
#[derive(Clone, Copy, Parameter)]
pub struct Shard<T: Pod> {
    /// The elements.
    pub values: Global<T>,
    /// The matrix's element, row by row, that is the first.
    pub start: u64,
    /// Rows of the matrix.
    pub rows: u64,
    /// Columns of the matrix.
    pub columns: u64,
}

/// `amaxes[i, j]`, `[ceil(rows / 128), ceil(columns / 128)]`, is the largest magnitude of square `i, j` of a matrix among the elements of its
/// shard; 0 where it has none.
#[kernel(threads = THREADS, grid = amax_grid, shared = Shared, min_blocks = RESIDENT)]
#[instances(T = [bf16, f16, f32])]
pub fn fp8_partial_amax<T: Magnitude>(shard: Shard<T>, amaxes: GlobalMut<f32>) {
    let square = Square::of_block(&shard);
    let mut running = 0;
    square.for_each_row(|row| {
        let words: [u32; COLUMNS] = core::array::from_fn(|i| if row.has(i) { shard.values.load(row.element(i)).to_word() } else { 0 });
        running = words.into_iter().fold(running, T::raise);
    });
    let largest = block::max_u32(T::finish(running).to_bits(), Shared::claim().reduce);
    if thread::index() == 0 && square.is_inside() {
        amaxes.store(square.index(), f32::from_bits(largest));
    }
}

fn amax_grid<T: Magnitude>(args: &Fp8PartialAmaxArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    grid(&args.shard, args.amaxes.len())
}

/// Casts `shard` to `data`, element by element, by the scales that follow from `amaxes`, those of the whole matrix; stores the inverses of all
/// scales as [`fp8_cast_squares`](fn@super::fp8_cast_squares) does.
#[kernel(threads = THREADS, grid = cast_grid, min_blocks = RESIDENT)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn fp8_partial_cast<T: Magnitude, Q: Fp8>(
    shard: Shard<T>,
    amaxes: Global<f32>,
    data: GlobalMut<Q>,
    scale_inverses: GlobalMut<f32>,
    options: ScaleOptions,
) {
    let square = Square::of_block(&shard);
    if !square.is_inside() {
        return;
    }
    let rule = ScaleRule::new(options, T::MAX.to_f32());
    let scale = rule.scale::<Q>(amaxes.load(square.index()));
    square.for_each_row(|row| {
        let values: [f32; COLUMNS] = core::array::from_fn(|i| if row.has(i) { shard.values.load(row.element(i)).to_f32() } else { 0.0 });
        for (i, value) in values.iter().enumerate() {
            if row.has(i) {
                data.store(row.element(i), Q::from_f32(value * scale));
            }
        }
    });
    if thread::index() == 0 {
        let [row, column] = square.place;
        scale_inverses.store(row * row_of_scales(shard.columns.div_ceil(SIDE)) + column, 1.0 / scale);
    }
}

fn cast_grid<T: Magnitude, Q: Fp8>(args: &Fp8PartialCastArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let scales = args.shard.rows.div_ceil(SIDE) * row_of_scales(args.shard.columns.div_ceil(SIDE));
    LaunchError::check_length("data", args.shard.values.len(), args.data.len())?;
    LaunchError::check_length("scale_inverses", scales, args.scale_inverses.len())?;
    grid(&args.shard, args.amaxes.len())
}

/// One CUDA block a square, whatever the shard has of it.
fn grid<T: Pod>(shard: &ShardArgument<'_, T>, amaxes: u64) -> Result<Grid, LaunchError> {
    let ShardArgument { values, start, rows, columns } = *shard;
    let elements = rows.saturating_mul(columns);
    LaunchError::check_length("amaxes", rows.div_ceil(SIDE) * columns.div_ceil(SIDE), amaxes)?;
    LaunchError::check_limit("shard.start", start, elements)?;
    LaunchError::check_limit("shard.values", values.len(), elements - start)?;
    if elements == 0 {
        return Ok(Grid::x(0));
    }
    let across = Grid::cover("shard.columns", columns, SIDE as u32)?;
    Grid::down(across.x, "shard.rows", rows, SIDE)
}

/// A square of a matrix, and the run of the matrix's elements that the shard holds.
struct Square {
    /// Which one, in squares.
    place: [u64; 2],
    rows: u64,
    columns: u64,
    start: u64,
    end: u64,
}

impl Square {
    #[inline(always)]
    fn of_block<T: Pod>(&Shard { values, start, rows, columns }: &Shard<T>) -> Self {
        let [x, y, z] = block::index();
        let row = u64::from(z) * u64::from(block::count()[1]) + u64::from(y);
        Self { place: [row, u64::from(x)], rows, columns, start, end: start + values.len() }
    }

    /// Whether the matrix has it: a grid in three dimensions may have more blocks than there are squares.
    #[inline(always)]
    fn is_inside(&self) -> bool {
        self.place[0] * SIDE < self.rows && self.place[1] * SIDE < self.columns
    }

    /// Where its amax is.
    #[inline(always)]
    fn index(&self) -> u64 {
        self.place[0] * self.columns.div_ceil(SIDE) + self.place[1]
    }

    /// Calls `body` for each of the warp's rows.
    #[inline(always)]
    fn for_each_row(&self, mut body: impl FnMut(Row)) {
        let columns = [self.place[1] * SIDE, self.columns.min((self.place[1] + 1) * SIDE)];
        let rows_end = self.rows.min((self.place[0] + 1) * SIDE);
        let mut row = self.place[0] * SIDE + u64::from(thread::warp());
        while row < rows_end {
            let [first, end] = columns.map(|column| row * self.columns + column);
            body(Row { first: first + u64::from(thread::lane()), from: first.max(self.start), to: end.min(self.end), start: self.start });
            row += u64::from(WARPS);
        }
    }
}

/// A row of a square: elements `from..to` of the matrix are in the shard, of which the lane has every 32nd.
#[derive(Clone, Copy)]
struct Row {
    first: u64,
    from: u64,
    to: u64,
    start: u64,
}

impl Row {
    /// Whether the shard has the lane's element number `i`.
    #[inline(always)]
    fn has(self, i: usize) -> bool {
        let element = self.first + i as u64 * u64::from(warp::LANES);
        element >= self.from && element < self.to
    }

    /// The lane's element number `i`, counted from the shard's first.
    #[inline(always)]
    fn element(self, i: usize) -> u64 {
        self.first + i as u64 * u64::from(warp::LANES) - self.start
    }
}
