//! Operands of the product by `mma.sync`: rows in device memory, panels in shared memory, fragments in registers.
//!
//! A panel is 64 rows or columns of the product by 64 elements of the sum, rows of 128 bytes, 8 KiB. It lies as its operand does: rows along
//! K, or across it, which `ldmatrix` transposes. Both are swizzled, so that eight threads that copy 16 bytes each, and the eight rows that `ldmatrix`
//! reads, meet each bank once.
//!
//! A thread finds the first chunk that it copies, and the first that it reads of each operand, once; the others are constants away.

use oxtile_tile::global::Cursor;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{Float, Pod, anew, opaque};
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{OperandTile, RegisterElement};
use oxtile_tile::shared::{Chunk, SharedTile};
use oxtile_tile::warp_matrix::RightTile;

/// Rows of `A`, or columns of `B`, of a panel.
pub const PART: usize = 64;
/// Elements of the sum of a panel.
pub const DEPTH: usize = 64;
/// Elements of the sum that an instruction takes.
pub const STEP: usize = 16;
/// Elements that are copied at a time, 16 bytes.
const CHUNK: u32 = 8;
/// Rows of a panel that 256 threads copy at a time.
const COPIED_ROWS: u32 = 32;

/// A stage's part of an operand, `ROWS` rows or columns of the product: panels one after the other, of 64 rows each.
pub type Panels<T, const ROWS: usize> = SharedTile<T, ROWS, DEPTH, Swizzle128>;
type Place<T, const ROWS: usize> = Chunk<T, ROWS, DEPTH, Swizzle128>;

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

/// What a thread copies of an operand in a tile's next step: chunks of 16 bytes, 32 rows of the panels apart.
#[derive(Clone, Copy)]
pub struct Source<T: Pod, const ROWS: usize> {
    values: Global<T>,
    /// Rows or columns of the product.
    outer: u32,
    /// Elements of the sum.
    depth: u32,
    /// The first chunk.
    first: Cursor<T>,
    /// Rows or columns of the product from there to the edge; none where the sum has ended.
    inside: u32,
    /// The same for chunks 32 elements deeper in the sum, if rows lie across K.
    inside_deeper: u32,
    /// Elements of a chunk before the end of the sum, if rows lie along K.
    width: u32,
}

impl<T: RegisterElement + Float, const ROWS: usize> Source<T, ROWS> {
    /// Chunks of a step.
    const CHUNKS: u32 = ROWS as u32 / COPIED_ROWS;

    /// An operand of `[outer, depth]`, of which nothing is copied before [`begin`](Self::begin).
    #[inline(always)]
    pub fn new(rows: &OperandRows<T>, [outer, depth]: [u32; 2]) -> Self {
        let values = rows.values;
        Self { values, outer, depth, first: Cursor::new(values, 0), inside: 0, inside_deeper: 0, width: CHUNK }
    }

    /// Row and column of a thread's first chunk. Eight neighbours copy 128 bytes of a row.
    #[inline(always)]
    fn place(thread: u32) -> [u32; 2] {
        [thread / 8, thread % 8 * CHUNK]
    }

    /// Begins a tile's first step, at row or column `first` of the product, which may be beyond the edge.
    #[inline(always)]
    pub fn begin<const ACROSS: bool>(&mut self, first: u32) {
        // The same index, but for the compiler another one for each tile: what follows from it takes no registers while a tile is multiplied.
        let thread = anew(thread::index(), first);
        let ([row, column], Self { values, outer, depth, .. }) = (Self::place(thread), *self);
        let [at, k] = if ACROSS { [first + column, row] } else { [first + row, column] };
        let index = if ACROSS { u64::from(k) * u64::from(outer) + u64::from(at) } else { u64::from(at) * u64::from(depth) + u64::from(k) };
        let inside = outer.saturating_sub(at);
        *self = Self { first: Cursor::new(values, index), inside, inside_deeper: inside, width: CHUNK, ..*self };
    }

    /// Goes on to the next step.
    #[inline(always)]
    pub fn advance<const ACROSS: bool>(&mut self) {
        self.first = self.first.further(DEPTH as u64 * if ACROSS { u64::from(self.outer) } else { 1 });
    }

    /// Leaves out what is after the end of the sum, `depth` elements from the beginning of the next step, which is the last.
    #[inline(always)]
    pub fn end<const ACROSS: bool>(&mut self, depth: u32) {
        let [row, column] = Self::place(anew(thread::index(), self.inside));
        let deep = depth.saturating_sub(if ACROSS { row } else { column });
        self.inside = if deep > 0 { self.inside } else { 0 };
        self.inside_deeper = if deep > COPIED_ROWS { self.inside_deeper } else { 0 };
        self.width = deep.min(CHUNK);
    }

    /// Starts to copy the step's chunks; what is beyond an edge becomes zero. Unless `ALIGNED`, elements are copied one by one.
    #[inline(always)]
    pub fn copy<const ACROSS: bool, const ALIGNED: bool>(&self, target: Panels<T, ROWS>) {
        let [row, column] = Self::place(thread::index());
        // From row to row of the panels; rows across K are those of the next panel after two.
        let stride = u64::from(COPIED_ROWS) * u64::from(if ACROSS { self.outer } else { self.depth });
        let mut rows = self.first;
        // Element by element, a loop at run time: unrolled, it would cost registers.
        for number in 0..if ALIGNED { Self::CHUNKS } else { opaque(Self::CHUNKS) } {
            let below = number * COPIED_ROWS;
            let is_deeper = ACROSS && number % 2 == 1;
            let further = if ACROSS { below / PART as u32 * PART as u32 } else { below };
            let inside = if is_deeper { self.inside_deeper } else { self.inside };
            let source = match ACROSS {
                true => self.first.further(if is_deeper { stride } else { 0 }).further(further.into()),
                false => rows,
            };
            if ALIGNED {
                pipeline::copy_async_to_chunk(target, Place::new(row, column).below(below), source, further < inside);
            } else {
                let inside = inside.saturating_sub(further);
                copy_elements(target, [row + below, column], source, if ACROSS || inside == 0 { inside } else { self.width });
            }
            rows = rows.further(stride);
        }
    }
}

/// Copies `count` elements to a chunk, and zeros to its end.
#[inline(always)]
fn copy_elements<T: RegisterElement + Float, const ROWS: usize>(
    target: Panels<T, ROWS>,
    [row, column]: [u32; 2],
    source: Cursor<T>,
    count: u32,
) {
    let values: [T; CHUNK as usize] = core::array::from_fn(|i| if (i as u32) < count { source.load(i as u64) } else { T::from_f32(0.0) });
    let mut i = 0;
    while i < CHUNK {
        target.store(row, column + i, values[i as usize]);
        i += 1;
    }
}

/// Where a lane reads what its warp multiplies: of each panel of `A` 16 rows, and a panel of `B`.
#[derive(Clone, Copy)]
pub struct Places<T: RegisterElement, const ROWS: usize, const COLUMNS: usize> {
    left: Place<T, ROWS>,
    right: Place<T, COLUMNS>,
}

impl<T: RegisterElement, const ROWS: usize, const COLUMNS: usize> Places<T, ROWS, COLUMNS> {
    /// Those of the first instruction, of panel `panel` of `B`; whether rows lie across K is `M_MAJOR` and `N_MAJOR` of `A` and of `B`, here and below.
    #[inline(always)]
    pub fn new<const M_MAJOR: bool, const N_MAJOR: bool>(panel: u32) -> Self {
        let right = if N_MAJOR { RightTile::<T, PART>::chunk_transposed() } else { RightTile::<T, PART>::chunk() };
        Self {
            left: if M_MAJOR { OperandTile::<T, STEP>::chunk_transposed() } else { OperandTile::<T, STEP>::chunk() },
            right: right.below(panel * PART as u32),
        }
    }

    /// The same, [anew](oxtile_tile::num::anew()).
    #[inline(always)]
    pub fn anew(self, changing: u32) -> Self {
        Self { left: self.left.anew(changing), right: self.right.anew(changing) }
    }

    /// The rows of a panel of `A`, as deep as instruction `step`.
    #[inline(always)]
    pub fn left<const M_MAJOR: bool>(self, panels: Panels<T, ROWS>, panel: usize, step: u32) -> OperandTile<T, STEP> {
        let (further, deeper) = ((panel * PART) as u32, step * STEP as u32);
        match M_MAJOR {
            true => OperandTile::load_chunk_transposed(panels, self.left.below(further + deeper)),
            false => OperandTile::load_chunk(panels, self.left.beside(deeper).below(further)),
        }
    }

    /// The panel of `B`, as deep as instruction `step`.
    #[inline(always)]
    pub fn right<const N_MAJOR: bool>(self, panels: Panels<T, COLUMNS>, step: u32) -> RightTile<T, PART> {
        let deeper = step * STEP as u32;
        match N_MAJOR {
            true => RightTile::load_chunk_transposed(panels, self.right.below(deeper)),
            false => RightTile::load_chunk(panels, self.right.beside(deeper)),
        }
    }
}
