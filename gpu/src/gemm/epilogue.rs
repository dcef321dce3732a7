//! What follows a product that is stored, in a launch of its own: GELU, or the gradient of GELU's input, and the sums of columns.
//!
//! A lane has 8 neighbours of a row, 16 bytes of 16-bit elements, or one element where rows do not start at multiples of 16 bytes. A CUDA block takes the columns of a warp's lanes, of 128 rows: a warp has every eighth row. Sums of columns are left as one row of partial sums for each 128 rows, which
//! `column_sums` adds: always in one order.
//!
//! Floor: the bytes of the input and of the result, once each; twice those of the result where it is multiplied in place.
//!
//! | barrier | waits for |
//! |---|---|
//! | `block::sync` | the sums of all warps |

use oxtile_tile::num::opaque;
use oxtile_tile::prelude::*;

use super::fusion::gelu_of;
use crate::activation::{Activation, Gelu};
use crate::sum_parts::Summed;

const WARPS: u32 = 8;
const THREADS: u32 = WARPS * warp::LANES;
/// Rows of a thread.
const EACH: u32 = 16;
/// Those whose loads are in flight together.
const ROWS: usize = 2;
/// Blocks of a multiprocessor.
const BLOCKS: u32 = 4;
/// Rows that share a row of partial sums: those of a block.
pub const EPILOGUE_ROWS: u32 = WARPS * EACH;
/// Elements of a lane that are loaded together.
pub const EPILOGUE_VECTOR: u32 = 8;

const _: () = assert!(EACH.is_multiple_of(ROWS as u32), "rows are loaded in whole groups");

#[derive(SharedStorage)]
struct Shared {
    sums: SharedArray<f32, { (THREADS * EPILOGUE_VECTOR) as usize }>,
}

/// What a lane has of a row.
type Part = [f32; EPILOGUE_VECTOR as usize];

/// Writes GELU of `input` to `result`, a matrix of so many `columns`; or, if `derives`, multiplies `result` by the derivative of GELU at `input`, in place. Without an input the result stays as it is.
/// `sums[i]`, where there are any, are the sums of the columns of [`EPILOGUE_ROWS`] rows of the rounded result: `[rows / EPILOGUE_ROWS, columns]`, rounded up. `VECTORS`: matrices and rows begin at multiples of [`EPILOGUE_VECTOR`] elements, and of 16 bytes.
#[kernel(threads = THREADS, min_blocks = BLOCKS, grid = grid, shared = Shared)]
#[instances(O = [bf16, f16, f32], VECTORS = [false, true])]
pub fn gemm_epilogue<O: Summed, const VECTORS: bool>(
    result: GlobalMut<O>,
    input: Option<Global<O>>,
    sums: Option<GlobalMut<f32>>,
    columns: u32,
    derives: bool,
) {
    let ([rows, group, _], this_warp) = (block::index(), thread::warp());
    let width = if VECTORS { EPILOGUE_VECTOR } else { 1 };
    let of_block = warp::LANES * width;
    let column = (group * warp::LANES + thread::lane()) * width;
    let first = u64::from(rows * EPILOGUE_ROWS + this_warp) * u64::from(columns) + u64::from(column);
    // What is outside is 0, and so is what becomes of it: it adds nothing.
    let is_read = derives || input.is_none();
    let (mut total, mut row): (Part, u32) = (Part::default(), 0);
    // A loop at run time: unrolled, it would have more registers than blocks leave each other.
    while row < opaque(EACH) {
        let at: [u64; ROWS] = core::array::from_fn(|i| first + u64::from((row + i as u32) * WARPS) * u64::from(columns));
        let is_inside = |i: usize| column < columns && at[i] < result.len();
        let mut values: [Part; ROWS] =
            core::array::from_fn(|i| if is_read && is_inside(i) { load_result::<O, VECTORS>(&result, at[i]) } else { Part::default() });
        if let Some(input) = input {
            let inputs: [Part; ROWS] =
                core::array::from_fn(|i| if is_inside(i) { load::<O, VECTORS>(&input, at[i]) } else { Part::default() });
            values = core::array::from_fn(|i| {
                let of = |j: usize| if derives { values[i][j] * Gelu::slope(inputs[i][j]) } else { gelu_of(inputs[i][j]) };
                let rounded: Part = core::array::from_fn(|j| if j < width as usize { O::from_f32(of(j)).to_f32() } else { 0.0 });
                if is_inside(i) {
                    store::<O, VECTORS>(&result, at[i], rounded);
                }
                rounded
            });
        }
        let mut i = 0;
        while i < ROWS {
            total = core::array::from_fn(|j| total[j] + values[i][j]);
            i += 1;
        }
        row += ROWS as u32;
    }
    if let Some(sums) = sums {
        let (of_warps, lane) = (Shared::claim().sums, thread::lane() * width);
        for j in 0..width {
            of_warps.store(this_warp * of_block + lane + j, total[j as usize]);
        }
        block::sync();
        let mut place = thread::index();
        while place < of_block {
            let column = group * of_block + place;
            if column < columns {
                let mut total = 0.0;
                for other in 0..WARPS {
                    total += of_warps.load(other * of_block + place);
                }
                sums.store(u64::from(rows) * u64::from(columns) + u64::from(column), total);
            }
            place += THREADS;
        }
    }
}

#[inline(always)]
#[track_caller]
fn load<O: Summed, const VECTORS: bool>(view: &Global<O>, at: u64) -> Part {
    if VECTORS { O::load_eight(view, at) } else { core::array::from_fn(|j| if j == 0 { view.load(at).to_f32() } else { 0.0 }) }
}

#[inline(always)]
#[track_caller]
fn load_result<O: Summed, const VECTORS: bool>(view: &GlobalMut<O>, at: u64) -> Part {
    if VECTORS {
        O::unpack(|i| view.load_vector(at + i))
    } else {
        core::array::from_fn(|j| if j == 0 { view.load(at).to_f32() } else { 0.0 })
    }
}

#[inline(always)]
#[track_caller]
fn store<O: Summed, const VECTORS: bool>(view: &GlobalMut<O>, at: u64, values: Part) {
    if VECTORS { O::store_eight(view, at, values) } else { view.store(at, O::from_f32(values[0])) }
}

fn grid<O: Summed, const VECTORS: bool>(args: &GemmEpilogueArgs<'_, O, VECTORS>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (columns, elements, width) = (u64::from(args.columns), args.result.len(), if VECTORS { u64::from(EPILOGUE_VECTOR) } else { 1 });
    LaunchError::check_multiple("result", columns, elements)?;
    LaunchError::check_multiple("columns", width, columns)?;
    let input = args.input.map_or(0, |input| input.address());
    for (name, address) in [("result", args.result.address()), ("input", input)].into_iter().filter(|_| VECTORS) {
        LaunchError::check_alignment(name, 16, address)?;
    }
    if let Some(input) = args.input {
        LaunchError::check_length("input", elements, input.len())?;
    }
    LaunchError::check_limit("derives", u64::from(args.derives && args.input.is_none()), 0)?;
    let rows = elements.checked_div(columns).unwrap_or(0);
    LaunchError::check_limit("result", rows, u64::from(u32::MAX - EPILOGUE_ROWS))?;
    let blocks = rows.div_ceil(EPILOGUE_ROWS.into());
    if let Some(sums) = &args.sums {
        LaunchError::check_length("sums", blocks * columns, sums.len())?;
    }
    let groups = columns.div_ceil(u64::from(warp::LANES) * width);
    LaunchError::check_limit("columns", groups, u16::MAX.into())?;
    Ok(if elements == 0 { Grid::x(0) } else { Grid::xy(blocks as u32, groups as u32) })
}
