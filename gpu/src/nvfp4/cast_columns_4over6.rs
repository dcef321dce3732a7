//! Columnwise cast to NVFP4 by a [mapping](super::mapping) to 4 or 6: the codes are those of the transpose.
//!
//! Floor: 2 (bf16) + 1/2 + 1/16 bytes an element. A CUDA block casts one [tile](super::cast_tile), each block twice in registers.
//!
//! | barrier | between |
//! |---|---|
//! | block | the tile is written, and read |

use oxtile_tile::num::{e2m1x2, e4m3};
use oxtile_tile::prelude::*;

use super::cast_block::column_half;
use super::cast_tile::{CastTile, THREADS, TileWords, check_output};
use super::mapping::{BlockElements, FourOverSix, FourOverSix256, FourOverSixSquared, FourOverSixSquared256, Mapping};
use super::*;
use crate::magnitude::Magnitude;
use crate::matrix::Matrix;

#[derive(SharedStorage)]
struct Shared {
    tile: TileWords,
}

/// Casts the columns of a matrix `[rows, columns]`, both multiples of 16, whose largest magnitude is `amax[0]`: `data` is
/// `[columns, rows / 2]`, `scales` `[columns, rows / 16]`.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = 2)]
#[instances(T = [bf16, f16, f32], M = [FourOverSix])]
#[instances(T = [bf16], M = [FourOverSixSquared, FourOverSix256, FourOverSixSquared256])]
pub fn nvfp4_cast_columns_4over6<T: Magnitude, M: Mapping>(
    input: Matrix<T>,
    amax: Global<f32>,
    data: GlobalMut<e2m1x2>,
    scales: GlobalMut<e4m3>,
) {
    let tile = CastTile::<T>::of_block(Shared::claim().tile, input.rows, input.columns);
    tile.store(tile.load(&input.values));
    let tensor = M::tensor_scale(amax.load(0));
    block::sync();
    for block in tile.column_blocks() {
        let words = tile.column_words(&block);
        let running = words.into_iter().fold(0, T::raise);
        for place in 0..T::PER_WORD {
            let [(low, low_signs), (high, high_signs)] = [0, 1].map(|half| column_half::<T>(&words, half, place, 1.0));
            let magnitudes = core::array::from_fn(|i| if i < 8 { low[i] } else { high[i - 8] });
            let elements = BlockElements { magnitudes, signs: [low_signs, high_signs], amax: T::maximum_of(running, place) };
            let (scale, codes) = M::cast(&elements, tensor, |i| tile.column_element(&block, place as u32, i));
            let index = block.index + place as u64 * (input.rows / BLOCK);
            data.store_pair(index * BLOCK_BYTES, codes);
            scales.store(index, scale);
        }
    }
}

fn grid<T: Magnitude, M: Mapping>(args: &Nvfp4CastColumns4over6Args<'_, T, M>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    check_output(args.input.values.len(), ("amax", &args.amax), ("data", &args.data), ("scales", &args.scales))?;
    cast_tile::grid(&args.input)
}
