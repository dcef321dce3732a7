//! The sum of equal parts, one of each rank, always in the order of the ranks: rounded once, or scaled and added to a target. And the largest of them.
//!
//! Floor: the bytes of all parts are read once, those of the sum are written once; a target that is added to is read too. A thread has eight elements.
//! The loads of four parts are in flight together, and those of two parts and a target.

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
/// The same where a target is loaded beside them: with four, a multiprocessor has registers for four blocks, and 0.93 of the speed.
const PARTS_BESIDE: usize = 2;
/// Blocks of a multiprocessor that add to a target.
const RESIDENT: u32 = 6;

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
    let eight = |at, sums: Sums<'_, In>| Out::store_eight(&sum, at, sums.eight::<PARTS>());
    let one = |at, total| sum.store(at, Out::from_f32(total));
    sum_elements(&Parts { all: parts, count, stride, from: 0, apart: None }, [sum.start(), sum.len()], eight, one);
}

/// Where parts lie that are added to a target `[rows, width]`.
#[derive(Clone, Copy, Debug, Parameter)]
pub struct Places {
    /// How many parts there are.
    pub count: u32,
    /// The number of the part that lies apart, where one does.
    pub rank: u32,
    /// Elements from one of the other parts, `[rows, width]`, to the next one.
    pub stride: u64,
    /// Elements of a row.
    pub width: u64,
    /// Elements from a row of the part that lies apart to its next row.
    pub pitch: u64,
}

/// What a sum is added to.
pub trait Before: 'static {
    /// The elements that the target holds, or others.
    fn of<const N: usize>(load: impl Fn() -> [f32; N]) -> [f32; N];
}

/// A sum is added to what the target holds.
#[derive(Debug)]
pub struct Kept;

/// A sum is added to zero, and the target is not read.
#[derive(Debug)]
pub struct Zero;

impl Before for Kept {
    #[inline(always)]
    fn of<const N: usize>(load: impl Fn() -> [f32; N]) -> [f32; N] {
        load()
    }
}

impl Before for Zero {
    #[inline(always)]
    fn of<const N: usize>(_: impl Fn() -> [f32; N]) -> [f32; N] {
        [0.0; N]
    }
}

/// `target[i] = before[i] + scale * sum[i]`, where `before` is what the target holds, or 0, and `sum[i]` is the sum of the elements `i` of all parts, in `f32` and in their
/// order. The product and the addition are rounded to nearest even, each by itself. The sum of no parts is 0.
///
/// One part may lie apart from the others, which follow one another without it: that of this rank, where a product wrote it.
///
/// Elements are read and written as by [`sum_parts`], where each row begins at a multiple of 16 bytes.
#[kernel(threads = THREADS, grid = add_grid, min_blocks = RESIDENT)]
#[instances(In = [f32, bf16], B = [Kept, Zero])]
pub fn add_parts<In: Summed, B: Before>(parts: Global<In>, apart: Option<Global<In>>, target: GlobalMut<f32>, places: Places, scale: f32) {
    let row = u64::from(block::index()[1]);
    let at = row * places.width;
    let apart = apart.map(|part| Apart { part, rank: places.rank, from: row * places.pitch });
    let parts = Parts { all: parts, count: places.count, stride: places.stride, from: at, apart };
    let eight = |i, sums: Sums<'_, In>| {
        // In flight with the loads of the parts.
        let before = B::of(|| <f32 as Summed>::unpack(|lane| target.load_vector(at + i + lane)));
        let sums = sums.eight::<PARTS_BESIDE>();
        f32::store_eight(&target, at + i, core::array::from_fn(|i| before[i] + scale * sums[i]));
    };
    let one = |i, total: f32| {
        let [before] = B::of(|| [target.load(at + i)]);
        target.store(at + i, before + scale * total);
    };
    sum_elements(&parts, [target.start() + at * 4, places.width], eight, one);
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

/// Parts of a row of elements.
struct Parts<In> {
    /// All parts that do not lie apart, one after another.
    all: Global<In>,
    count: u32,
    stride: u64,
    /// The first element of the row in the first part.
    from: u64,
    apart: Option<Apart<In>>,
}

/// A part that lies apart from the others.
struct Apart<In> {
    part: Global<In>,
    rank: u32,
    /// The first element of the row.
    from: u64,
}

impl<In: Summed> Parts<In> {
    /// The array with the row of a part, and where the row begins.
    #[inline(always)]
    fn row(&self, part: u32) -> (Global<In>, u64) {
        let among = |number: u32| (self.all, u64::from(number) * self.stride + self.from);
        match &self.apart {
            Some(apart) if part == apart.rank => (apart.part, apart.from),
            Some(apart) => among(part - u32::from(part > apart.rank)),
            None => among(part),
        }
    }

    /// Bits of the addresses at which the rows of all parts begin: zero where all addresses have a zero.
    #[inline(always)]
    fn starts(&self) -> u64 {
        let bytes = |elements: u64| elements.wrapping_mul(size_of::<In>() as u64);
        let apart = self.apart.as_ref().map_or(0, |apart| apart.part.start() + bytes(apart.from));
        (self.all.start() + bytes(self.from)) | bytes(self.stride) | apart
    }
}

/// The sums of eight elements, which are not loaded yet.
struct Sums<'p, In> {
    parts: &'p Parts<In>,
    /// The first element of the row.
    first: u64,
}

impl<In: Summed> Sums<'_, In> {
    #[inline(always)]
    fn eight<const PARTS: usize>(self) -> [f32; ELEMENTS] {
        let load = |part| {
            let (array, row) = self.parts.row(part);
            In::load_eight(&array, row + self.first)
        };
        add::<_, PARTS>(self.parts.count, load)
    }
}

/// Gives the sums of a thread's elements of a row of a target, at an address and of a length: eight that begin at a multiple of 16 bytes, or one at a time.
#[inline(always)]
fn sum_elements<In: Summed>(parts: &Parts<In>, [start, len]: [u64; 2], eight: impl Fn(u64, Sums<'_, In>), one: impl Fn(u64, f32)) {
    let tile = u64::from(block::index()[0]) * u64::from(TILE);
    let first = tile + u64::from(thread::index() * ELEMENTS as u32);
    let is_aligned = (parts.starts() | start).is_multiple_of(16);
    if is_aligned && first + ELEMENTS as u64 <= len {
        eight(first, Sums { parts, first });
    } else {
        // The elements of a thread follow one another at the end of aligned parts, and those of the block's threads otherwise.
        let (mut at, step) = if is_aligned { (first, 1) } else { (tile + u64::from(thread::index()), u64::from(THREADS)) };
        let end = len.min(at + ELEMENTS as u64 * step);
        while at < end {
            let load = |part| {
                let (array, row) = parts.row(part);
                [array.load(row + at).to_f32()]
            };
            let [total] = add::<_, PARTS>(parts.count, load);
            one(at, total);
            at += step;
        }
    }
}

/// The sums of what `load` gives for each part.
#[inline(always)]
fn add<const N: usize, const PARTS: usize>(count: u32, load: impl Fn(u32) -> [f32; N]) -> [f32; N] {
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

fn add_grid<In: Summed, B: Before>(args: &AddPartsArgs<'_, In, B>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (elements, Places { count, rank, stride, width, pitch }) = (args.target.len(), args.places);
    let rows = Grid::rows("target", elements, width)?.x;
    let mut others = count;
    if let Some(apart) = &args.apart {
        LaunchError::check_limit("rank", u64::from(rank) + 1, count.into())?;
        others -= 1;
        if let Some(before) = rows.checked_sub(1) {
            LaunchError::check_at_least("apart", u64::from(before).saturating_mul(pitch).saturating_add(width), apart.len())?;
        }
    }
    check(args.parts.len(), others, stride, elements)?;
    LaunchError::check_limit("target", rows.into(), u16::MAX.into())?;
    Ok(Grid::xy(Grid::cover("target", width, TILE)?.x, rows))
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
