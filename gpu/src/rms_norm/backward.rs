//! Backward: `dx = (g w - x mean(g w x) / rms^2) / rms`, and `dw`, the sum of `g x / rms` over the rows.
//!
//! Blocks stay and take rows in turn, so that each thread keeps the sums of its columns in registers; at the end a row of sums is written for each
//! row that the blocks work on at a time. Their number alone decides the order of all sums: the same number gives the same bits.

use oxtile_tile::prelude::*;

use crate::row::{ByBlock, ByElements, ByWarp, Part, Row, Split, Sums, zip};

/// Two storages take turns: the barrier of one row's sum ends the reads of the row before.
#[derive(SharedStorage)]
struct Shared {
    reduce: [ReduceStorage; 2],
}

/// The gradient of the input of [`rms_norm`](fn@super::rms_norm), given that of its output and the `1 / rms` of each row, and in each row of
/// `partial_sums` the part of the weight's gradient of the rows that went there. Those rows are a multiple of [`Split::ROWS`].
#[kernel(threads = S::THREADS, grid = grid, shared = Shared, min_blocks = resident::<S>())]
#[instances(T = [bf16, f16], S = [ByWarp<2>, ByBlock<128, 2>, ByBlock<256, 2>, ByBlock<256, 4>, ByBlock<512, 4>, ByElements])]
pub fn rms_norm_backward<T: Half, S: Split>(
    gradient: Global<T>,
    input: Global<T>,
    weight: Global<T>,
    inverse_rms: Global<f32>,
    input_gradient: GlobalMut<T>,
    partial_sums: GlobalMut<f32>,
    width: u32,
) {
    let mut row = Row::<S>::first(width);
    let [mut storage, mut next_storage] = Shared::claim().reduce;
    let w = row.load_common(weight);
    let mut sums = S::Sums::zero(partial_sums, row.index * u64::from(width), width);
    while row.is_in(input.len()) {
        let (x, g, inverse) = (row.load(input), row.load(gradient), inverse_rms.load(row.index));
        let w = w.again(inverse);
        let total = row.sum(storage, |i| zip([g.piece(i), w.piece(i), x.piece(i)], |[g, w, x]| g * w * x));
        let slope = total * num::reciprocal(width as f32) * inverse * inverse;
        let (x, g, w) = (x.again(slope), g.again(slope), w.again(slope));
        row.store(&input_gradient, |i| zip([g.piece(i), w.piece(i), x.piece(i)], |[g, w, x]| (g * w - x * slope) * inverse));
        row.add(&mut sums, |i| zip([g.piece(i), x.piece(i)], |[g, x]| g * (x * inverse)));
        (storage, next_storage) = (next_storage, storage);
        row = row.next();
    }
    sums.finish();
}

fn grid<T: Half, S: Split>(args: &RmsNormBackwardArgs<'_, T, S>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (elements, width) = (args.input.len(), u64::from(args.width));
    let rows = Grid::rows("input", elements, width)?;
    LaunchError::check_length("gradient", elements, args.gradient.len())?;
    LaunchError::check_length("weight", width, args.weight.len())?;
    LaunchError::check_length("inverse_rms", rows.blocks(), args.inverse_rms.len())?;
    LaunchError::check_length("input_gradient", elements, args.input_gradient.len())?;
    let starts = [
        ("gradient", args.gradient.address()),
        ("input", args.input.address()),
        ("weight", args.weight.address()),
        ("input_gradient", args.input_gradient.address()),
        ("partial_sums", args.partial_sums.address()),
    ];
    S::check(args.width, &starts)?;
    LaunchError::check_multiple("partial_sums", width * u64::from(S::ROWS), args.partial_sums.len())?;
    let sums = Grid::rows("partial_sums", args.partial_sums.len(), width)?;
    LaunchError::check_at_least("partial_sums", u64::from(rows.x != 0), sums.blocks())?;
    Ok(Grid::x(sums.x / S::ROWS))
}

/// Blocks of a multiprocessor: a thread has 128 registers.
const fn resident<S: Split>() -> u32 {
    512 / S::THREADS
}

/// The rows of `partial_sums` that fill a device, at most as those of `rows`, rounded up to [`Split::ROWS`].
pub const fn partial_rows<S: Split>(rows: u64, multiprocessors: u32) -> u64 {
    let (blocks, most) = (rows.div_ceil(S::ROWS as u64), (multiprocessors * resident::<S>()) as u64);
    (if blocks < most { blocks } else { most }) * S::ROWS as u64
}
