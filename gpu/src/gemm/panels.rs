//! Operands of the product by `mma.sync`: rows in device memory, panels in shared memory, fragments in registers.
//!
//! A panel is 64 rows or columns of the product by the 16 elements along K that one instruction takes, 2 KiB. It lies as its operand does:
//! `[64, 16]` where rows run along K, else `[16, 64]`, which `ldmatrix` transposes. Both are swizzled, so that eight threads that copy 16 bytes
//! each, and the eight rows that `ldmatrix` reads, meet each bank once.

use oxtile_tile::layout::{Swizzle32, Swizzle128};
use oxtile_tile::num::{Float, Pod, opaque};
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{OperandTile, RegisterElement};
use oxtile_tile::shared::{Overlay, SharedTile, Tiles};
use oxtile_tile::warp_matrix::{KMajor, NMajor, RightTile};

/// Rows of `A`, or columns of `B`, of a panel.
pub const PART: usize = 64;
/// Elements of the sum of a panel: what an instruction takes.
pub const STEP: usize = 16;
/// Panels of a stage along K.
pub const PANELS: usize = 2;
/// Elements that are copied at a time, 16 bytes.
const CHUNK: u32 = 8;

/// A panel of an operand along K, and of one across it.
type Along<T> = SharedTile<T, PART, STEP, Swizzle32>;
type Across<T> = SharedTile<T, STEP, PART, Swizzle128>;

type Panel<T> = Overlay<Along<T>, Across<T>>;

/// A stage's part of an operand: `COUNT` panels, those of the same rows one after the other.
pub type Panels<T, const COUNT: usize> = Tiles<Panel<T>, COUNT>;

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

/// Where the thread copies 16 bytes of every part of a stage: its panel there, and its first element in that.
#[derive(Clone, Copy)]
struct Place {
    panel: u32,
    row: u32,
    column: u32,
}

impl Place {
    /// Each of 256 threads has another place. Eight neighbours fill 128 bytes of shared memory, and read 32 or 128 bytes of a row.
    #[inline(always)]
    fn of_thread<const ACROSS: bool>() -> Self {
        let thread = thread::index();
        match ACROSS {
            true => Self { panel: thread / 128, row: thread / 8 % STEP as u32, column: thread % 8 * CHUNK },
            false => Self { panel: thread / 8 % 2, row: thread / 16 * 4 + thread / 2 % 4, column: thread % 2 * CHUNK },
        }
    }
}

/// Starts to copy the panels of `COUNT / PANELS` parts of an operand of `[outer, depth]`, from row `first` and element `start` of the sum on. What
/// is beyond an edge becomes zero.
#[inline(always)]
pub fn copy<T: RegisterElement + Float, const COUNT: usize, const ACROSS: bool, const ALIGNED: bool>(
    source: &OperandRows<T>,
    target: Panels<T, COUNT>,
    [first, start]: [u32; 2],
    [outer, depth]: [u32; 2],
) {
    let place @ Place { panel, row, column } = Place::of_thread::<ACROSS>();
    let step = start + panel * STEP as u32;
    // The chunk's first element, by its place in the product.
    let [first, k] = if ACROSS { [first + column, step + row] } else { [first + row, step + column] };
    let parts = (COUNT / PANELS) as u32;
    // Chunks of elements are a loop at run time: unrolled, they would cost registers.
    for part in 0..if ALIGNED { parts } else { opaque(parts) } {
        let (at, panel) = (first + part * PART as u32, target.tile(part * PANELS as u32 + panel));
        let index = if ACROSS { u64::from(k) * u64::from(outer) + u64::from(at) } else { u64::from(at) * u64::from(depth) + u64::from(k) };
        if ALIGNED {
            let valid = if at < outer && k < depth { 16 } else { 0 };
            match ACROSS {
                true => pipeline::copy_async_to_tile(panel.second(), [row, column], &source.values, index, valid),
                false => pipeline::copy_async_to_tile(panel.first(), [row, column], &source.values, index, valid),
            }
        } else {
            // How many elements of the chunk are inside.
            let count = if ACROSS && k < depth {
                outer.saturating_sub(at)
            } else if !ACROSS && at < outer {
                depth.saturating_sub(k)
            } else {
                0
            };
            copy_elements::<T, ACROSS>(source, panel, place, index, count);
        }
    }
}

/// Copies the elements of a chunk one by one: `count` of them from `index` on, then zeros.
#[inline(always)]
fn copy_elements<T: RegisterElement + Float, const ACROSS: bool>(
    source: &OperandRows<T>,
    panel: Panel<T>,
    Place { row, column, .. }: Place,
    index: u64,
    count: u32,
) {
    let values: [T; CHUNK as usize] =
        core::array::from_fn(|i| if (i as u32) < count { source.values.load(index + i as u64) } else { T::from_f32(0.0) });
    let mut i = 0;
    while i < CHUNK {
        match ACROSS {
            true => panel.second().store(row, column + i, values[i as usize]),
            false => panel.first().store(row, column + i, values[i as usize]),
        }
        i += 1;
    }
}

/// The rows that a warp has of four parts of `A`, from panel `step` of a stage.
#[inline(always)]
pub fn left<T: RegisterElement, const COUNT: usize, const ACROSS: bool, const PARTS: usize>(
    panels: Panels<T, COUNT>,
    step: u32,
) -> [OperandTile<T, STEP>; PARTS] {
    core::array::from_fn(|part| {
        let panel = panels.tile(part as u32 * PANELS as u32 + step);
        if ACROSS { OperandTile::load_transposed(panel.second()) } else { OperandTile::load(panel.first()) }
    })
}

/// The columns of part `part` of `B`, from panel `step` of a stage.
#[inline(always)]
pub fn right<T: RegisterElement, const COUNT: usize, const ACROSS: bool>(
    panels: Panels<T, COUNT>,
    part: u32,
    step: u32,
) -> RightTile<T, PART> {
    let panel = panels.tile(part * PANELS as u32 + step);
    if ACROSS { RightTile::load(NMajor(panel.second())) } else { RightTile::load(KMajor(panel.first())) }
}
