//! Gathered shards of a transposed tensor to the whole: the first two dimensions change places, rows are padded again.
//!
//! A rank's shard of a transposed tensor is `[rows, width]`, and ranks gather along the first dimension, to `[shards, rows, width]`.
//! The whole is `[rows, shards * width]`, each row followed by zeros up to a stride (TransformerEngine
//! `pytorch/distributed.py`, the fix-up after the gather of NVFP4's columnwise data and scales). It goes into the caller's buffer, so
//! that addresses stay as they are. One shard: rows are padded, and nothing else.
//!
//! Memory-bound: each byte is read once and written once.

use oxtile_tile::num::{Pod, e2m1x2, e4m3, e5m2, ue8m0};
use oxtile_tile::prelude::*;

use crate::group::{Grouped, Member, Members};

pub(super) const THREADS: u32 = 256;
/// Bytes that a thread writes.
const VECTOR: u32 = 16;

/// A code of one byte.
pub trait Byte: Pod {
    /// The code 0.
    const ZERO: Self;
}

macro_rules! bytes {
    ($($code:ident)*) => { $(
        impl Byte for $code {
            const ZERO: Self = Self::from_bits(0);
        }
    )* };
}
bytes!(e2m1x2 e4m3 e5m2 ue8m0);

/// Writes row `r` of `whole`, `[rows, stride]`: row `r` of each of the shards in `gathered`, `[shards, rows, width]`, one after the
/// other, and zeros. Vectors of 16 bytes if `width`, `stride` and both addresses are multiples of 16, else single bytes.
#[kernel(threads = THREADS, grid = grid)]
#[instances(T = [e2m1x2, e4m3, e5m2, ue8m0])]
pub fn join_shards<T: Byte>(gathered: Global<T>, whole: GlobalMut<T>, shards: u32, width: u32, stride: u32) {
    let [row, group, _] = block::index();
    let join = Join { shards, width, stride, shard_stride: u64::from(block::count()[0]) * u64::from(width) };
    join.run(&gathered, &whole, u64::from(row), u64::from(group));
}

/// How the rows of a whole are made of those of its shards.
pub(super) struct Join {
    pub shards: u32,
    /// Codes of a shard's row.
    pub width: u32,
    /// Codes of a row of the whole. Codes of the shards beyond it are left out; missing ones are 0.
    pub stride: u32,
    /// Codes from a shard to the next; a multiple of 16 where `width` and `stride` are.
    pub shard_stride: u64,
}

impl Join {
    /// CUDA blocks side by side.
    pub const fn groups(stride: u64) -> u64 {
        stride.div_ceil(THREADS as u64 * VECTOR as u64)
    }

    /// A CUDA block's work: group `group` of the columns of a row.
    #[inline(always)]
    pub fn run<T: Byte>(&self, gathered: &Global<T>, whole: &GlobalMut<T>, row: u64, group: u64) {
        let Self { shards, width, stride, shard_stride } = *self;
        let column = (group as u32 * THREADS + thread::index()) * VECTOR;
        if column >= stride {
            return;
        }
        let target = row * u64::from(stride);
        // A width of 0 has no columns to find.
        let shard = column.checked_div(width).unwrap_or(shards);
        let source = |shard: u32, within: u32| u64::from(shard) * shard_stride + row * u64::from(width) + u64::from(within);
        if are_vectors(width, stride, gathered.start(), whole.start()) {
            let vector =
                if shard < shards { gathered.load_vector(source(shard, column - shard * width)) } else { Vector::from_words([0; 4]) };
            whole.store_vector(target + u64::from(column), vector);
        } else {
            let (mut shard, mut column) = (shard, column);
            let end = stride.min(column + VECTOR);
            while column < end {
                // At most one step: the columns of a thread follow each other. An empty shard was passed above.
                if shard < shards && column - shard * width == width {
                    shard += 1;
                }
                let code = if shard < shards { gathered.load(source(shard, column - shard * width)) } else { T::ZERO };
                whole.store(target + u64::from(column), code);
                column += 1;
            }
        }
    }
}

/// Joins the shards of every member of a [group](crate::group): a member's rows have `columns` codes in the whole, word 3 of its record is
/// where it starts in each of the shards, which are `shard_stride` codes apart, word 4 where in the whole, and word 5 the codes of a shard's row.
#[kernel(threads = THREADS, grid = grouped_grid)]
#[instances(T = [e2m1x2, e4m3, e5m2, ue8m0])]
pub fn join_shards_grouped<T: Byte>(gathered: Global<T>, whole: GlobalMut<T>, table: Members, shards: u32, shard_stride: u64) {
    let member = Member::of_block(&table);
    let [from, to, width] = member.starts;
    let [group, row] = member.place(Join::groups(member.columns));
    let (gathered, whole) = (gathered.slice(from, gathered.len() - from), whole.slice(to, member.elements()));
    Join { shards, width: width as u32, stride: member.columns as u32, shard_stride }.run(&gathered, &whole, row, group);
}

fn grouped_grid<T: Byte>(args: &JoinShardsGroupedArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("gathered", u64::from(args.shards) * args.shard_stride, args.gathered.len())?;
    args.table.grid()
}

impl<T: Byte> Grouped for JoinShardsGrouped<T> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        rows * Join::groups(columns)
    }
}

const fn are_vectors(width: u32, stride: u32, from: u64, to: u64) -> bool {
    ((width | stride) as u64 | from | to).is_multiple_of(VECTOR as u64)
}

fn grid<T: Byte>(args: &JoinShardsArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (shards, width, stride) = (u64::from(args.shards), u64::from(args.width), u64::from(args.stride));
    // The index past a column must not overflow its type.
    LaunchError::check_limit("stride", stride, 65_535 * u64::from(THREADS * VECTOR))?;
    LaunchError::check_limit("shards * width", shards * width, stride)?;
    LaunchError::check_multiple("whole", stride, args.whole.len())?;
    let rows = args.whole.len().checked_div(stride).unwrap_or(0);
    LaunchError::check_length("gathered", shards * rows * width, args.gathered.len())?;
    LaunchError::check_limit("rows", rows, i32::MAX as u64)?;
    Ok(if rows == 0 { Grid::x(0) } else { Grid::xy(rows as u32, Join::groups(stride) as u32) })
}
