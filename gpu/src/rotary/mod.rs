//! Rotary position embedding: each pair of elements of a head turns by an angle of its own, which grows with the row.
//!
//! Floor: 4 bytes an element; the tables, 4 bytes an element of a row, stay in caches. A thread turns eight pairs, of two vectors. Its angles are read
//! in 16-byte vectors too, so that all its loads are in flight together.
//!
//! `pairing` has the policies of which elements are a pair.

use oxtile_tile::prelude::*;

mod pairing;

pub use pairing::*;

const THREADS: u32 = 256;
/// Pairs that a thread turns.
const PAIRS: u32 = 8;

/// The angles: a row of cosines and one of sines for each row of the tensor, `[rows, size / 2]`.
#[derive(Clone, Copy, Parameter)]
pub struct Angles {
    /// Cosines.
    pub cosines: Global<f32>,
    /// Sines.
    pub sines: Global<f32>,
}

/// Elements from one batch, row and head to the next, multiples of 8.
#[derive(Clone, Copy, Parameter)]
pub struct Strides {
    /// Batches.
    pub batch: u64,
    /// Rows.
    pub row: u64,
    /// Heads.
    pub head: u64,
}

/// Sizes of the tensors, `[batches, rows, heads, size]`.
#[derive(Clone, Copy, Parameter)]
pub struct Sizes {
    /// Batches.
    pub batches: u32,
    /// Rows.
    pub rows: u32,
    /// Heads.
    pub heads: u32,
    /// Elements of a head: a multiple of 16.
    pub size: u32,
}

/// Turns the pairs `(x, y)` of each head to `(x cos - y sin, y cos + x sin)`, in `f32`, rounded to nearest even. `turn` is 1, or -1 for the way back,
/// which is also the gradient. Without an input the output is turned in place.
#[kernel(threads = THREADS, grid = grid)]
#[instances(T = [bf16, f16], P = [Halves, Neighbours])]
pub fn rotary<T: Half, P: Pairing>(
    input: Option<Global<T>>,
    input_strides: Strides,
    output: GlobalMut<T>,
    strides: Strides,
    angles: Angles,
    sizes: Sizes,
    turn: f32,
) {
    let [index, batch, _] = block::index();
    let (index, groups, heads) = (index * THREADS + thread::index(), (sizes.size / (2 * PAIRS)).max(1), sizes.heads.max(1));
    let (pair, head, row) = (index % groups * PAIRS, index / groups % heads, index / groups / heads);
    if row < sizes.rows {
        let start = |s: Strides| u64::from(batch) * s.batch + u64::from(row) * s.row + u64::from(head) * s.head;
        let places = P::places(pair, sizes.size).map(u64::from);
        let vectors = match input {
            Some(input) => places.map(|place| input.load_vector(start(input_strides) + place)),
            None => places.map(|place| output.load_vector(start(strides) + place)),
        };
        let angle = u64::from(row) * u64::from(sizes.size / 2) + u64::from(pair);
        let (cosines, sines) = (eight(angles.cosines, angle), eight(angles.sines, angle).map(|sine| sine * turn));
        let [x, y] = P::swap(vectors.map(|vector| vector.to_f32()));
        let turned =
            [core::array::from_fn(|i| x[i] * cosines[i] - y[i] * sines[i]), core::array::from_fn(|i| y[i] * cosines[i] + x[i] * sines[i])];
        for (place, values) in places.into_iter().zip(P::swap_back(turned)) {
            output.store_vector(start(strides) + place, Vector::<T>::from_f32(values));
        }
    }
}

#[inline(always)]
fn eight(table: Global<f32>, at: u64) -> [f32; 8] {
    let [[a, b, c, d], [e, f, g, h]] = [0, 4].map(|part| table.load_vector(at + part).to_f32());
    [a, b, c, d, e, f, g, h]
}

fn grid<T: Half, P: Pairing>(args: &RotaryArgs<'_, T, P>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let Sizes { batches, rows, heads, size } = args.sizes;
    LaunchError::check_multiple("sizes.size", u64::from(2 * PAIRS), size.into())?;
    LaunchError::check_limit("sizes.batches", batches.into(), u16::MAX.into())?;
    let input = args.input.as_ref().map(|input| ("input", input.len(), input.address(), "input_strides", args.input_strides));
    for (name, length, address, strides, Strides { batch, row, head }) in
        input.into_iter().chain([("output", args.output.len(), args.output.address(), "strides", args.strides)])
    {
        LaunchError::check_alignment(name, 16, address)?;
        [batch, row, head].into_iter().try_for_each(|stride| LaunchError::check_multiple(strides, 8, stride))?;
        let extents = [(batches, batch), (rows, row), (heads, head), (size, 1)].map(|(count, stride)| (u64::from(count), stride));
        let is_empty = extents.iter().any(|&(count, _)| count == 0);
        // An end beyond all addresses is more than any tensor has.
        let end = extents.iter().fold(1_u64, |end, &(count, stride)| end.saturating_add(count.saturating_sub(1).saturating_mul(stride)));
        LaunchError::check_at_least(name, if is_empty { 0 } else { end }, length)?;
    }
    for (name, table) in [("angles.cosines", args.angles.cosines), ("angles.sines", args.angles.sines)] {
        LaunchError::check_length(name, u64::from(rows) * u64::from(size / 2), table.len())?;
        LaunchError::check_alignment(name, 16, table.address())?;
    }
    let work = u64::from(rows) * u64::from(heads) * u64::from(size / (2 * PAIRS));
    LaunchError::check_limit("sizes.rows", work, i32::MAX as u64)?;
    Ok(Grid { y: batches, ..Grid::cover("sizes.rows", work, THREADS)? })
}
