//! The fused cast along rows alone: the cast of activations in a forward pass.
//!
//! Floor: the operands once, and 1 + 1/32 bytes an element. A warp takes 4 vectors a lane of one row; what is left of registers and
//! latency by the [tile of both directions](super::cast_fused) makes half of its time. Each lane stores one scale, or one word of
//! four where they are interleaved.

use oxtile_tile::block::ReduceStorage;
use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::fused_operands::{FusedOperands, FusedOperandsArgument, check_elements};
use super::*;
use crate::activation::*;
use crate::interleave::{TILE_BLOCKS, TILE_OUTER, interleaved_len, offset};

/// Vectors of a result that a lane holds.
const STEPS: usize = 4;

/// CUDA blocks a multiprocessor: two results take more registers.
const fn resident<O: Operation>() -> u32 {
    if O::RESULTS == 1 { 4 } else { 3 }
}

#[derive(SharedStorage)]
struct Shared {
    reduce: ReduceStorage,
}

/// Casts the results of `O`, side by side `[rows, columns]`. Arguments are as in
/// [`mxfp8_cast_fused`](super::cast_fused::mxfp8_cast_fused); of the options there is
/// [`INTERLEAVED_SCALES`](super::INTERLEAVED_SCALES).
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = resident::<O>())]
#[instances(O = [Identity], T = [bf16, f16, f32], Q = [e4m3, e5m2])]
#[instances(O = [
    Forward<Gelu>, Forward<Silu>, Forward<QuickGelu>, Forward<Relu>, Forward<SquaredRelu>,
    Backward<Gelu>, Backward<Silu>, Backward<QuickGelu>, Backward<Relu>, Backward<SquaredRelu>,
    GatedForward<Gelu>, GatedForward<Silu>, GatedForward<QuickGelu>, GatedForward<Relu>, GatedForward<SquaredRelu>,
    GatedBackward<Gelu>, GatedBackward<Silu>, GatedBackward<QuickGelu>, GatedBackward<Relu>, GatedBackward<SquaredRelu>
], T = [bf16], Q = [e4m3])]
pub fn mxfp8_cast_fused_rows<O: Operation, T: Magnitude + Wide, Q: Fp8>(
    operands: FusedOperands<T>,
    data: GlobalMut<Q>,
    scales: GlobalMut<ue8m0>,
    amax: Option<GlobalMut<f32>>,
    skip: Option<Global<f32>>,
    options: u32,
) {
    if skip.is_some_and(|skip| skip.load(0) == 1.0) {
        return;
    }
    let [group, y, z] = block::index();
    let row = (u64::from(z) * u64::from(block::count()[1]) + u64::from(y)) * u64::from(WARPS) + u64::from(thread::warp());
    let FusedOperands { rows, columns, .. } = operands;
    let of_result = columns / O::RESULTS as u64;
    let operands = operands.of_results(of_result);
    let output = Output { data, scales, row, rows, columns, interleaved: options & super::INTERLEAVED_SCALES != 0 };
    let first = u64::from(group) * warp_tile::<T>(STEPS);
    let running = if warp::all(row < rows && first + warp_tile::<T>(STEPS) <= of_result) {
        cast_tile::<O, T, Q>(&operands, &output, first)
    } else {
        cast_edge::<O, T, Q>(&operands, &output, first)
    };
    if let Some(amax) = &amax {
        let largest = block::max_u32(T::finish(running).to_bits(), Shared::claim().reduce);
        if thread::index() == 0 {
            atomic::max_non_negative(amax, 0, f32::from_bits(largest));
        }
    }
}

/// What is written, and the warp's row of it.
struct Output<Q> {
    data: GlobalMut<Q>,
    scales: GlobalMut<ue8m0>,
    row: u64,
    rows: u64,
    columns: u64,
    interleaved: bool,
}

/// A tile inside a result, and its running maximum: all loads first, the scales last.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "the indices are constants once loops are unrolled")]
fn cast_tile<O: Operation, T: Magnitude + Wide, Q: Fp8>(operands: &Operands<T>, output: &Output<Q>, first: u64) -> u32 {
    let column = lane_element::<T>(first, 0);
    let origin = operands.at::<O>(output.row, column);
    let vectors: [_; STEPS] = core::array::from_fn(|step| {
        let offset = warp_tile::<T>(1) * step as u64;
        O::values(operands, origin.map(|at| at + offset)).map(vector_of::<T>)
    });
    let mut running = 0;
    for result in 0..O::RESULTS {
        let maxima: [_; STEPS] = core::array::from_fn(|step| of_vector(vectors[step][result]));
        running = maxima.into_iter().fold(running, T::join);
        let codes = maxima.map(block_scale::<T, Q>);
        let result_column = result as u64 * operands.columns;
        let element = output.row * output.columns + result_column + column;
        for step in 0..STEPS {
            store_codes(&output.data, element + warp_tile::<T>(1) * step as u64, vectors[step][result], [codes[step].reciprocal(); 8]);
        }
        store_scales::<O, T, Q>(output, codes, (result_column + first) / BLOCK);
    }
    running
}

/// The scales of a whole tile.
#[inline(always)]
fn store_scales<O: Operation, T: Magnitude, Q: Fp8>(output: &Output<Q>, codes: [ue8m0; STEPS], first_block: u64) {
    let (lanes, lane, blocks) = (lanes_a_block::<T>(), thread::lane(), output.columns.div_ceil(BLOCK));
    // A second result may begin within four blocks.
    if output.interleaved && (O::RESULTS == 1 || first_block.is_multiple_of(TILE_BLOCKS)) {
        let words = codes.map(|code| {
            let mut word = u32::from(code.to_bits()) << (lane / lanes % 4 * 8);
            word |= warp::shuffle_xor(word, lanes);
            word | warp::shuffle_xor(word, 2 * lanes)
        });
        // Of the lanes of four blocks, lane `step` stores their word of that step.
        let step = lane % (4 * lanes);
        let block = first_block + u64::from(block_in_tile::<T>(step)) / TILE_BLOCKS * TILE_BLOCKS;
        if step < STEPS as u32 {
            output.scales.store_word(offset(output.row, block, blocks), pick(words, step));
        }
    } else {
        // Of the lanes of a block, lane `step` stores the scale of their block in that step.
        let step = lane % lanes;
        let block = first_block + u64::from(block_in_tile::<T>(step));
        if step < STEPS as u32 {
            let place = if output.interleaved { offset(output.row, block, blocks) } else { output.row * blocks + block };
            output.scales.store(place, pick(codes, step));
        }
    }
}

/// What of a tile is inside a result, and where scales are interleaved the padding beyond the last one and below.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "as in a whole tile")]
fn cast_edge<O: Operation, T: Magnitude + Wide, Q: Fp8>(operands: &Operands<T>, output: &Output<Q>, first: u64) -> u32 {
    let (of_result, blocks) = (operands.columns, output.columns.div_ceil(BLOCK));
    let mut running = 0;
    let mut start = first;
    while start < first + warp_tile::<T>(STEPS) {
        let column = lane_element::<T>(start, 0);
        let is_inside = output.row < output.rows && column < of_result;
        let values = if is_inside { O::values(operands, operands.at::<O>(output.row, column)) } else { [[0.0; 8]; 2] };
        for result in 0..O::RESULTS {
            let vector = vector_of::<T>(values[result]);
            running = T::join(running, of_vector(vector));
            let code = block_scale::<T, Q>(of_vector(vector));
            let result_column = result as u64 * of_result;
            if is_inside {
                store_codes(&output.data, output.row * output.columns + result_column + column, vector, [code.reciprocal(); 8]);
            }
            let block = (result_column + column) / BLOCK;
            // Padding beyond the last result's columns is its own.
            let is_last = result + 1 == O::RESULTS;
            let end = if is_last { blocks.next_multiple_of(TILE_BLOCKS) } else { (result_column + of_result) / BLOCK };
            if thread::lane().is_multiple_of(lanes_a_block::<T>()) {
                if output.interleaved && block < end && output.row < output.rows.next_multiple_of(TILE_OUTER) {
                    output.scales.store(offset(output.row, block, blocks), code);
                } else if is_inside {
                    output.scales.store(output.row * blocks + block, code);
                }
            }
        }
        start += warp_tile::<T>(1);
    }
    running
}

/// The value of a step that is known at run time.
#[inline(always)]
fn pick<C: Copy>(values: [C; STEPS], step: u32) -> C {
    (1..STEPS).fold(values[0], |value, i| if step == i as u32 { values[i] } else { value })
}

fn grid<O: Operation, T: Magnitude + Wide, Q: Fp8>(
    args: &Mxfp8CastFusedRowsArgs<'_, O, T, Q>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError> {
    let FusedOperandsArgument { rows, columns, .. } = args.operands;
    let elements = args.operands.elements();
    args.operands.check::<O>()?;
    let interleaved = args.options & super::INTERLEAVED_SCALES != 0;
    let blocks = columns.div_ceil(BLOCK);
    LaunchError::check_length("data", elements, args.data.len())?;
    LaunchError::check_alignment("data", 8, args.data.address())?;
    LaunchError::check_length("scales", if interleaved { interleaved_len(rows, blocks) } else { rows * blocks }, args.scales.len())?;
    LaunchError::check_alignment("scales", 4, args.scales.address())?;
    check_elements(args.amax.as_ref(), args.skip.as_ref())?;
    if elements == 0 {
        return Ok(Grid::x(0));
    }
    // Interleaved scales have padding, which the grid covers too.
    let (rows, padding) = match interleaved {
        true => (rows.next_multiple_of(TILE_OUTER), columns.next_multiple_of(TILE_OUTER) - columns),
        false => (rows, 0),
    };
    let groups = Grid::cover("operands.columns", columns / O::RESULTS as u64 + padding, warp_tile::<T>(STEPS) as u32)?;
    Grid::down(groups.x, "operands.rows", rows, WARPS.into())
}
