//! The sum of equal parts, one of each rank, always in the order of the ranks: rounded once, or scaled and added to a target. And the largest of them.
//!
//! Floor: the bytes of all parts are read once, those of the sum are written once; a target that is added to is read too. A thread has eight elements.
//! The loads of four parts are in flight together.

#![allow(clippy::needless_range_loop, reason = "an iterator leaves an array in local memory")]

use oxtile_tile::num::max;
use oxtile_tile::prelude::*;

const THREADS: u32 = 256;
/// Elements of a thread: a vector of 16-bit elements, two of `f32`.
const ELEMENTS: usize = 8;
/// Elements of a block.
const TILE: u32 = THREADS * ELEMENTS as u32;
/// Parts whose loads a thread has in flight.
const PARTS: usize = 4;

/// An element of parts and sums.
pub trait Summed: Float + Pod {
    /// The eight elements that begin with the vector `load(0)`, where `load(i)` gives the vector of elements from number `i` on.
    fn unpack(load: impl Fn(u64) -> Vector<Self>) -> [f32; ELEMENTS];
    /// Writes eight elements from `at` on, at a multiple of 16 bytes, rounded to nearest even.
    fn store_eight(view: &GlobalMut<Self>, at: u64, values: [f32; ELEMENTS]);

    /// The eight elements from `at` on, which lie at a multiple of 16 bytes.
    #[inline(always)]
    fn load_eight(view: &Global<Self>, at: u64) -> [f32; ELEMENTS] {
        Self::unpack(|i| view.load_vector(at + i))
    }
}

impl Summed for f32 {
    #[inline(always)]
    fn unpack(load: impl Fn(u64) -> Vector<Self>) -> [f32; ELEMENTS] {
        let [[a, b, c, d], [e, f, g, h]] = [load(0).to_f32(), load(4).to_f32()];
        [a, b, c, d, e, f, g, h]
    }

    #[inline(always)]
    fn store_eight(view: &GlobalMut<Self>, at: u64, [a, b, c, d, e, f, g, h]: [f32; ELEMENTS]) {
        view.store_vector(at, Vector::<Self>::from_f32([a, b, c, d]));
        view.store_vector(at + 4, Vector::<Self>::from_f32([e, f, g, h]));
    }
}

macro_rules! summed_halves {
    ($($half:ident)*) => { $(
        impl Summed for $half {
            #[inline(always)]
            fn unpack(load: impl Fn(u64) -> Vector<Self>) -> [f32; ELEMENTS] {
                load(0).to_f32()
            }

            #[inline(always)]
            fn store_eight(view: &GlobalMut<Self>, at: u64, values: [f32; ELEMENTS]) {
                view.store_vector(at, Vector::<Self>::from_f32(values));
            }
        }
    )* };
}
summed_halves!(bf16 f16);

/// `sum[i]` is the sum of `parts[p * stride + i]` over the `count` parts, in `f32` and in the order of `p`, rounded to nearest even. One part is
/// rounded alone, -0 stays -0. The sum of no parts is 0.
///
/// Elements are read and written in vectors of 16 bytes where all of them lie at multiples of 16 bytes, and one at a time otherwise.
#[kernel(threads = THREADS, grid = grid)]
#[instances(In = [f32, bf16, f16], Out = [f32, bf16, f16])]
pub fn sum_parts<In: Summed, Out: Summed>(parts: Global<In>, sum: GlobalMut<Out>, count: u32, stride: u64) {
    let eight = |at, sums| Out::store_eight(&sum, at, sums);
    let one = |at, total| sum.store(at, Out::from_f32(total));
    sum_elements(&parts, count, stride, [sum.start(), sum.len()], eight, one);
}

/// `target[i] += scale * sum[i]`, where `sum[i]` is the sum of `parts[p * stride + i]` over the `count` parts, in `f32` and in the order of `p`. The product and the
/// addition are rounded to nearest even, each by itself. The sum of no parts is 0.
///
/// Elements are read and written as by [`sum_parts`].
#[kernel(threads = THREADS, grid = add_grid)]
#[instances(In = [f32, bf16])]
pub fn add_parts<In: Summed>(parts: Global<In>, target: GlobalMut<f32>, count: u32, stride: u64, scale: f32) {
    let eight = |at, sums: [f32; ELEMENTS]| {
        let old = <f32 as Summed>::unpack(|i| target.load_vector(at + i));
        f32::store_eight(&target, at, core::array::from_fn(|i| old[i] + scale * sums[i]));
    };
    let one = |at, total: f32| target.store(at, target.load(at) + scale * total);
    sum_elements(&parts, count, stride, [target.start(), target.len()], eight, one);
}

/// `largest[i]` is the largest of `parts[p * stride + i]` over the `count` parts, NaN left out. The largest of no parts is -inf, and so is that of NaN alone.
///
/// A number a thread, whose loads are in flight together: for numbers of heads, which are few.
#[kernel(threads = THREADS, grid = largest_grid)]
pub fn largest_part(parts: Global<f32>, largest: GlobalMut<f32>, count: u32, stride: u64) {
    let at = u64::from(block::index()[0]) * u64::from(THREADS) + u64::from(thread::index());
    if at < largest.len() {
        let (mut found, mut first) = (f32::NEG_INFINITY, 0);
        while first < count {
            // A part beyond the last changes nothing.
            let load = |part: u32| if part < count { parts.load(u64::from(part) * stride + at) } else { f32::NEG_INFINITY };
            let some: [f32; PARTS] = core::array::from_fn(|i| load(first + i as u32));
            for part in 0..PARTS {
                found = max(found, some[part]);
            }
            first += PARTS as u32;
        }
        largest.store(at, found);
    }
}

/// Gives the sums of a thread's elements of a target at an address and of a length: eight that begin at a multiple of 16 bytes, or one at a time.
#[inline(always)]
fn sum_elements<In: Summed>(
    parts: &Global<In>,
    count: u32,
    stride: u64,
    [start, len]: [u64; 2],
    eight: impl Fn(u64, [f32; ELEMENTS]),
    one: impl Fn(u64, f32),
) {
    let tile = u64::from(block::index()[0]) * u64::from(TILE);
    let first = tile + u64::from(thread::index() * ELEMENTS as u32);
    // All parts begin at multiples of 16 bytes if the first one does and the distance of two is one.
    let is_aligned = (parts.start() | start | stride.wrapping_mul(size_of::<In>() as u64)).is_multiple_of(16);
    if is_aligned && first + ELEMENTS as u64 <= len {
        eight(first, add(count, |part| In::load_eight(parts, u64::from(part) * stride + first)));
    } else {
        // The elements of a thread follow one another at the end of aligned parts, and those of the block's threads otherwise.
        let (mut at, step) = if is_aligned { (first, 1) } else { (tile + u64::from(thread::index()), u64::from(THREADS)) };
        let end = len.min(at + ELEMENTS as u64 * step);
        while at < end {
            let [total] = add(count, |part| [parts.load(u64::from(part) * stride + at).to_f32()]);
            one(at, total);
            at += step;
        }
    }
}

/// The sums of what `load` gives for each part.
#[inline(always)]
fn add<const N: usize>(count: u32, load: impl Fn(u32) -> [f32; N]) -> [f32; N] {
    // A part beyond the last adds -0, which changes no sum; neither does it change the first part.
    let mut sums = [if count == 0 { 0.0 } else { -0.0 }; N];
    let mut first = 0;
    while first < count {
        let parts: [[f32; N]; PARTS] =
            core::array::from_fn(|i| if (i as u32) < count - first { load(first + i as u32) } else { [-0.0; N] });
        for part in 0..PARTS {
            sums = core::array::from_fn(|i| sums[i] + parts[part][i]);
        }
        first += PARTS as u32;
    }
    sums
}

fn grid<In: Summed, Out: Summed>(args: &SumPartsArgs<'_, In, Out>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    check(args.parts.len(), args.count, args.stride, args.sum.len())?;
    Grid::cover("sum", args.sum.len(), TILE)
}

fn add_grid<In: Summed>(args: &AddPartsArgs<'_, In>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    check(args.parts.len(), args.count, args.stride, args.target.len())?;
    Grid::cover("target", args.target.len(), TILE)
}

fn largest_grid(args: &LargestPartArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    check(args.parts.len(), args.count, args.stride, args.largest.len())?;
    Grid::cover("largest", args.largest.len(), THREADS)
}

/// `count` parts of so many elements do not overlap, and lie inside.
fn check(parts: u64, count: u32, stride: u64, elements: u64) -> Result<(), LaunchError> {
    LaunchError::check_limit("count", count.into(), i32::MAX as u64)?;
    if let Some(others) = count.checked_sub(1) {
        if others > 0 {
            LaunchError::check_at_least("stride", elements, stride)?;
        }
        LaunchError::check_at_least("parts", u64::from(others).saturating_mul(stride).saturating_add(elements), parts)?;
    }
    Ok(())
}
