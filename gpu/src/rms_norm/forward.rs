//! Forward: one read of each row, which stays in registers, and one write.

use oxtile_tile::prelude::*;

use crate::row::{ByBlock, ByElements, ByWarp, Part, Row, Split, zip};

#[derive(SharedStorage)]
struct Shared {
    reduce: ReduceStorage,
}

/// `output = input / rms(input) * weight`, row by row of `width` elements, and `1 / rms(input)` of each row, if it is wanted.
///
/// A NaN in a row makes the whole row NaN, an Inf makes itself NaN and the rest 0; an `epsilon` of 0 makes a row of zeros NaN.
/// With an `epsilon` of 0 a row whose root mean square is below about 1.1e-19 has a mean square below the normal numbers, which `rsqrt` takes
/// for 0: its `1 / rms` is Inf, its elements become Inf of their sign, and zeros among them NaN.
#[kernel(threads = S::THREADS, grid = grid, shared = Shared)]
#[instances(T = [bf16, f16], S = [ByWarp<2>, ByBlock<128, 2>, ByBlock<256, 2>, ByBlock<256, 4>, ByBlock<512, 4>, ByElements])]
pub fn rms_norm<T: Half, S: Split>(
    input: Global<T>,
    weight: Global<T>,
    output: GlobalMut<T>,
    inverse_rms: Option<GlobalMut<f32>>,
    width: u32,
    epsilon: f32,
) {
    let row = Row::<S>::first(width);
    if row.is_in(input.len()) {
        let (x, w) = (row.load(input), row.load_common(weight));
        let squares = row.sum(Shared::claim().reduce, |i| zip([x.piece(i)], |[x]| x * x));
        let inverse = num::rsqrt(squares * num::reciprocal(width as f32) + epsilon);
        row.store(&output, |i| zip([x.piece(i), w.piece(i)], |[x, w]| x * inverse * w));
        if let Some(inverse_rms) = inverse_rms.filter(|_| row.is_leader()) {
            inverse_rms.store(row.index, inverse);
        }
    }
}

fn grid<T: Half, S: Split>(args: &RmsNormArgs<'_, T, S>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (elements, width) = (args.input.len(), u64::from(args.width));
    let rows = Grid::rows("input", elements, width)?;
    LaunchError::check_length("weight", width, args.weight.len())?;
    LaunchError::check_length("output", elements, args.output.len())?;
    if let Some(inverse_rms) = &args.inverse_rms {
        LaunchError::check_length("inverse_rms", rows.blocks(), inverse_rms.len())?;
    }
    S::check(args.width, &[("input", args.input.address()), ("weight", args.weight.address()), ("output", args.output.address())])?;
    Ok(Grid::x(rows.x.div_ceil(S::ROWS)))
}
