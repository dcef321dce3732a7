//! The fused cast along columns alone.
//!
//! Floor: the operands once, and 1 + 1/32 bytes an element. The tile of [both directions](super::cast_fused) without what rows take: no
//! scales of rows, no shuffles beside the results, no barrier but the amax's. Operands are [streamed](super::computed::stream) row by row
//! through shared memory, where results stay: room for 32 warps a multiprocessor, 16 of two results. A whole tile is cast by a loop
//! without a branch, one at an edge row by row.
//!
//! | barrier | waits for |
//! |---|---|
//! | in `block::max_u32` | the warps' amaxes, in memory of their own |

use oxtile_tile::block::ReduceStorage;
use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::cast_fused::{INTERLEAVED_SCALES, SQUARE_BLOCKS, resident};
use super::column_tile::{ROWS_A_LANE, scales_of_columns};
use super::computed::{Ring, Vectors};
use super::fused_operands::{FusedOperands, check_elements};
use super::fused_tile::{Shape, Source, Tile, add, square_maximum};
use super::*;
use crate::activation::*;

#[derive(SharedStorage)]
struct Shared<O: Operation> {
    vectors: O::Each<Vectors>,
    ring: Ring,
    reduce: ReduceStorage,
}

/// Casts the results of `O`, side by side `[rows, columns]`. Arguments are as in
/// [`mxfp8_cast_fused`](super::cast_fused::mxfp8_cast_fused); of the options there are [`SQUARE_BLOCKS`](super::SQUARE_BLOCKS) and
/// [`INTERLEAVED_SCALES`](super::INTERLEAVED_SCALES).
#[kernel(threads = THREADS, grid = grid, shared = Shared<O>, min_blocks = resident::<O>())]
#[instances(O = [Identity], T = [bf16, f16, f32], Q = [e4m3, e5m2])]
#[instances(O = [
    Forward<Gelu>, Forward<Silu>, Forward<QuickGelu>, Forward<Relu>, Forward<SquaredRelu>,
    Backward<Gelu>, Backward<Silu>, Backward<QuickGelu>, Backward<Relu>, Backward<SquaredRelu>,
    GatedForward<Gelu>, GatedForward<Silu>, GatedForward<QuickGelu>, GatedForward<Relu>, GatedForward<SquaredRelu>,
    GatedBackward<Gelu>, GatedBackward<Silu>, GatedBackward<QuickGelu>, GatedBackward<Relu>, GatedBackward<SquaredRelu>
], T = [bf16], Q = [e4m3])]
pub fn mxfp8_cast_fused_columns<O: Operation, T: Magnitude + Wide, Q: Fp8>(
    operands: FusedOperands<T>,
    data: GlobalMut<Q>,
    scales: GlobalMut<ue8m0>,
    partial_sums: GlobalMut<f32>,
    amax: Option<GlobalMut<f32>>,
    skip: Option<Global<f32>>,
    options: u32,
) {
    if skip.is_some_and(|skip| skip.load(0) == 1.0) {
        return;
    }
    let shared = Shared::<O>::claim();
    let vectors = shared.vectors.as_ref();
    let tile = Tile::of_lane::<O>(operands.rows, operands.columns);
    let source = Source::of::<O>(operands, &tile);
    let running = computed::stream::<O, T>(vectors, shared.ring, &source);

    let is_whole = warp::all(tile.is_whole());
    for result in 0..O::RESULTS {
        let (vectors, running) = (vectors[result], running[result]);
        let tile = tile.of_result(result);
        // Nothing is larger than the maximum of its square, and everything at least 0.
        let of_square = if options & SQUARE_BLOCKS != 0 { square_maximum::<T>(running) } else { 0 };
        let of_columns = scales_of_columns::<T, Q>(running.map(|word| T::join(word, of_square)));
        if tile.place.row == 0 {
            tile.store_column_scales(&scales, &of_columns, options & INTERLEAVED_SCALES != 0);
        }
        let multipliers = of_columns.map(|scale| scale.multiplier);
        let cast = |step: usize| {
            let vector = vectors.load::<T>(step);
            store_codes(&data, tile.element(step), vector, multipliers);
            vector
        };
        let mut sums = [0.0; 8];
        if is_whole && partial_sums.is_empty() {
            (0..ROWS_A_LANE).for_each(|step| _ = cast(step));
        } else if is_whole {
            (0..ROWS_A_LANE).for_each(|step| add(&mut sums, cast(step)));
        } else {
            let mut step = 0;
            while step < ROWS_A_LANE && tile.is_inside(step) {
                add(&mut sums, cast(step));
                step += 1;
            }
        }
        if !partial_sums.is_empty() {
            tile.store_sums(&partial_sums, sums);
        }
    }
    if let Some(amax) = &amax {
        let largest = running.into_iter().flatten().fold(0, T::join);
        let largest = block::max_u32(T::finish(largest).to_bits(), shared.reduce);
        if thread::index() == 0 {
            atomic::max_non_negative(amax, 0, f32::from_bits(largest));
        }
    }
}

fn grid<O: Operation, T: Magnitude + Wide, Q: Fp8>(
    args: &Mxfp8CastFusedColumnsArgs<'_, O, T, Q>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError> {
    let shape = Shape::of::<O, T>(&args.operands, args.options)?;
    shape.check_sums(&args.partial_sums)?;
    check_elements(args.amax.as_ref(), args.skip.as_ref())?;
    shape.check_codes(("data", &args.data), ("scales", &args.scales), [shape.columns, shape.rows.div_ceil(BLOCK)])?;
    shape.grid::<O, T>()
}
