//! The transpose of a matrix of bytes, such as FP8 codes.
//!
//! Floor: 1 + 1 bytes an element, through the [tile](super::tile) and [shared memory](super::staging).
//!
//! | barrier | between |
//! |---|---|
//! | block | the transpose is written to shared memory, and read |

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::staging::Staging;
use super::tile::{LINES, Tile};
use super::*;
use crate::matrix::Matrix;

/// CUDA blocks a multiprocessor: 1792 threads of 32 registers.
const RESIDENT: u32 = 7;

/// The transpose of the tile.
#[derive(SharedStorage)]
struct Shared {
    staging: Staging,
}

/// `transposed[j, i] = input[i, j]`, of a matrix `[rows, columns]`. Rows and columns of whole 16-byte vectors at aligned addresses are
/// moved in vectors, others byte by byte.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = RESIDENT)]
#[instances(Q = [e4m3, e5m2])]
pub fn fp8_transpose<Q: Fp8>(input: Matrix<Q>, transposed: GlobalMut<Q>) {
    let Matrix { values: data, rows, columns } = input;
    let tile = Tile::<Q>::of_block(rows, columns);
    let lines = if columns.is_multiple_of(16) && data.start().is_multiple_of(16) { tile.load(&data)[0] } else { gather(&tile, &data) };
    let staging = Shared::claim().staging;
    staging.put(&tile, 0, lines.map(Vector::words));
    block::sync();
    staging.store(&tile, &transposed);
}

fn grid<Q: Fp8>(args: &Fp8TransposeArgs<'_, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("transposed", args.input.values.len(), args.transposed.len())?;
    Tile::<Q>::grid(&args.input)
}

/// The lane's rows byte by byte, each from the last, which moves those after it up by one.
#[inline(always)]
fn gather<Q: Fp8>(tile: &Tile<Q>, data: &Global<Q>) -> [Vector<Q>; LINES] {
    let left = tile.columns.saturating_sub(tile.first_column + u64::from(tile.column())).min(16);
    core::array::from_fn(|line| {
        let first = tile.element(0, line);
        let (mut words, mut left) = ([0; 4], if tile.row(0, line) < tile.rows { left } else { 0 });
        while left > 0 {
            left -= 1;
            let [a, b, c, d] = words;
            let low = u32::from(data.load(first + left).to_byte());
            words = [a << 8 | low, b << 8 | a >> 24, c << 8 | b >> 24, d << 8 | c >> 24];
        }
        Vector::from_words(words)
    })
}
