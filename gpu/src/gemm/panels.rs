//! Operands of the product by `mma.sync`: rows in device memory, parts in shared memory, fragments in registers.
//!
//! A part is 64 rows or columns of the product by 64 elements along K, 8 KiB. It lies as its operand does: `[64, K]` where rows run along K, else
//! `[K, 64]`, which `ldmatrix` transposes. Either way its rows are 128 bytes, swizzled, so that eight threads that copy 16 bytes
//! each, and the eight rows that `ldmatrix` reads, meet each bank once.

use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{Float, Pod, opaque};
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{OperandTile, RegisterElement};
use oxtile_tile::shared::SharedTile;
use oxtile_tile::warp_matrix::{KMajor, NMajor, RightTile};

/// Rows of `A`, or columns of `B`, of a part.
pub const PART: usize = 64;
/// Elements of the sum of a part.
pub const DEPTH: usize = 64;
/// Those that one instruction takes.
pub const STEP: usize = 16;
/// Elements that are copied at a time, 16 bytes.
const CHUNK: u32 = 8;
/// Rows of a part that the threads of a block copy at a time.
const COPIED_ROWS: u32 = 32;

const _: () = assert!(PART == DEPTH, "a part is as wide as it is high, either way");

/// A part of an operand.
pub type Part<T> = SharedTile<T, PART, DEPTH, Swizzle128>;

/// A matrix of 16-bit elements that is multiplied, in rows without gaps.
#[derive(Clone, Copy, Parameter)]
pub struct OperandRows<T: Pod> {
    /// The elements.
    pub values: Global<T>,
    /// Whether rows run along K.
    pub along_k: bool,
}

impl<T: Pod> OperandRowsArgument<'_, T> {
    /// Refuses the operand `name` unless it has `outer` rows or columns of the product, `depth` elements of each, and if `ALIGNED` rows that start
    /// at multiples of 16 bytes.
    pub(super) fn check<const ALIGNED: bool>(&self, name: &'static str, [outer, depth]: [u64; 2]) -> Result<(), LaunchError> {
        LaunchError::check_length(name, outer * depth, self.values.len())?;
        if ALIGNED {
            LaunchError::check_multiple(name, CHUNK.into(), if self.along_k { depth } else { outer })?;
            LaunchError::check_alignment(name, 16, self.values.address())?;
        }
        Ok(())
    }
}

/// Starts to copy a part of an operand of `[outer, depth]`, from row `first` and element `start` of the sum on, by 256 threads: eight neighbours copy
/// 128 bytes of a row. What is beyond an edge becomes zero.
#[inline(always)]
pub fn copy<T: RegisterElement + Float, const ACROSS: bool, const ALIGNED: bool>(
    source: &OperandRows<T>,
    target: Part<T>,
    [first, start]: [u32; 2],
    [outer, depth]: [u32; 2],
) {
    let column = thread::index() % 8 * CHUNK;
    let passes = PART as u32 / COPIED_ROWS;
    // Chunks of elements are a loop at run time: unrolled, they would cost registers.
    for pass in 0..if ALIGNED { passes } else { opaque(passes) } {
        let row = pass * COPIED_ROWS + thread::index() / 8;
        // The chunk's first element, by its place in the product.
        let [at, k] = if ACROSS { [first + column, start + row] } else { [first + row, start + column] };
        let index = if ACROSS { u64::from(k) * u64::from(outer) + u64::from(at) } else { u64::from(at) * u64::from(depth) + u64::from(k) };
        if ALIGNED {
            let valid = if at < outer && k < depth { 16 } else { 0 };
            pipeline::copy_async_to_tile(target, [row, column], &source.values, index, valid);
        } else {
            // How many elements of the chunk are inside.
            let count = if ACROSS && k < depth { outer.saturating_sub(at) } else if !ACROSS && at < outer { depth.saturating_sub(k) } else { 0 };
            copy_elements(source, target, [row, column], index, count);
        }
    }
}

/// Copies the elements of a chunk one by one: `count` of them from `index` on, then zeros.
#[inline(always)]
fn copy_elements<T: RegisterElement + Float>(source: &OperandRows<T>, target: Part<T>, [row, column]: [u32; 2], index: u64, count: u32) {
    let values: [T; CHUNK as usize] =
        core::array::from_fn(|i| if (i as u32) < count { source.values.load(index + i as u64) } else { T::from_f32(0.0) });
    let mut i = 0;
    while i < CHUNK {
        target.store(row, column + i, values[i as usize]);
        i += 1;
    }
}

/// The rows that a warp has of a part of `A`, as instruction `step` takes them.
#[inline(always)]
pub fn left<T: RegisterElement, const ACROSS: bool>(part: Part<T>, step: u32) -> OperandTile<T, STEP> {
    let first = step * STEP as u32;
    if ACROSS { OperandTile::load_transposed_rows(part, first) } else { OperandTile::load_columns(part, first) }
}

/// The columns of a part of `B`, as instruction `step` takes them.
#[inline(always)]
pub fn right<T: RegisterElement, const ACROSS: bool>(part: Part<T>, step: u32) -> RightTile<T, PART> {
    if ACROSS { RightTile::load(NMajor(part), step) } else { RightTile::load(KMajor(part), step) }
}
