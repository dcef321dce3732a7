//! Matrix multiplication of 16-bit operands on any GPU from sm_80 on, of any shape: products by `mma.sync`, copies by `cp.async`.
//!
//! A block of eight warps stays on its multiprocessor and computes one 256 by 128 tile of `D` after another. A warp has 16 rows of each of
//! the four parts of 64 rows, and one of the two parts of 64 columns: 64 by 64 elements, in 128 registers a thread. All threads
//! copy operands into a ring of two stages of 64 elements of the sum, whole lines of 128 bytes, 48 KiB each, and go on to the next tile's while the last
//! of this one are multiplied and stored.
//!
//! A stage is four instructions deep. Fragments of an instruction are loaded while those of the one before are multiplied. So the one barrier of a
//! step is before its last product: after it the next stage is there for all warps, and all have read this one, which is filled again.
//!
//! ```text
//! load 1 of this stage     multiply 0
//! load 2                   multiply 1
//! load 3                   multiply 2
//! wait, barrier, copy      load 0 of the next stage     multiply 3
//! ```
//!
//! Two warps of a scheduler hide little, so that nothing may delay a product: sums and two instructions' fragments fill 192 registers, and
//! what is left must hold all addresses while fragments are on their way. All of a thread's are constants away from a few ([`panels`](super::panels)), and the
//! loop of a tile has no branch: steps that are copied in another way, the last of a tile, end a run of it.
//!
//! Each operand may be stored either way, by branches that all threads take together. If `ALIGNED`, the operands' rows start at multiples of
//! 16 bytes and the pairs of neighbours in `D` at multiples of their size; else elements are copied and stored one by one.

use oxtile_tile::num::{Float, Pod};
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, OperandTile, RegisterElement, RegisterTile};
use oxtile_tile::scheduler::PersistentTiles;
use oxtile_tile::shared::Tiles;
use oxtile_tile::warp_matrix::{self, RightTile};

use super::Shape;
use super::fusion::Fusion;
use super::panels::{DEPTH, OperandRows, PART, Panels, Places, STEP, Source};

const THREADS: u32 = 256;
/// Parts of 64 rows of a block's tile.
const ROW_PARTS: usize = 4;
/// Parts of 64 columns; four warps have each.
const COLUMN_PARTS: usize = 2;
const ROWS: usize = ROW_PARTS * PART;
const COLUMNS: usize = COLUMN_PARTS * PART;
/// Rows of a block's tile of `D`.
pub const PORTABLE_ROWS: u32 = ROWS as u32;
/// Columns of a block's tile of `D`.
pub const PORTABLE_COLUMNS: u32 = COLUMNS as u32;
/// 96 KiB: what a block may have on sm_89 and sm_120.
const STAGES: u32 = 2;
/// Rows of tiles that run together.
const BAND: u32 = 8;

const _: () = assert!(THREADS == 128 * COLUMN_PARTS as u32, "four warps have 64 columns");

/// The operands of a step.
#[derive(SharedStorage, Clone, Copy)]
struct Stage<T: Pod> {
    a: Panels<T, ROWS>,
    b: Panels<T, COLUMNS>,
}

#[derive(SharedStorage)]
struct Shared<T: Pod> {
    ring: Tiles<Stage<T>, { STAGES as usize }>,
}

/// `D = alpha A B + beta D`, bias and GELU as [`gemm`](fn@super::gemm) has them.
#[kernel(threads = THREADS, grid = grid, shared = Shared<T>)]
#[instances(T = [bf16], O = [bf16, f32], ALIGNED = [false, true])]
#[instances(T = [f16], O = [f16, f32], ALIGNED = [false, true])]
pub fn gemm_portable<T: RegisterElement + Float, O: PairElement, const ALIGNED: bool>(
    a: OperandRows<T>,
    b: OperandRows<T>,
    d: GlobalMut<O>,
    shape: Shape,
    fusion: Fusion<O>,
) {
    let Shared { ring } = Shared::<T>::claim();
    let (Shape { m, n, .. }, majors) = (shape, (a.along_k, b.along_k));
    let mut tiles = PersistentTiles::<BAND>::new(m.div_ceil(PORTABLE_ROWS), n.div_ceil(PORTABLE_COLUMNS));
    let mut copies = Copies::new(&a, &b, shape, tiles);
    let mut full = match majors {
        (true, true) => fill::<T, ALIGNED, false, false>(ring, &mut copies),
        (true, false) => fill::<T, ALIGNED, false, true>(ring, &mut copies),
        (false, true) => fill::<T, ALIGNED, true, false>(ring, &mut copies),
        (false, false) => fill::<T, ALIGNED, true, true>(ring, &mut copies),
    };
    let factor = fusion.factor();
    while !tiles.is_done() {
        let mut sums = match majors {
            (true, true) => multiply::<T, ALIGNED, false, false>(ring, &mut copies, &mut full),
            (true, false) => multiply::<T, ALIGNED, false, true>(ring, &mut copies, &mut full),
            (false, true) => multiply::<T, ALIGNED, true, false>(ring, &mut copies, &mut full),
            (false, false) => multiply::<T, ALIGNED, true, true>(ring, &mut copies, &mut full),
        };
        // Found after the product, so that its place takes no registers before.
        let Some([row, column]) = tiles.next_tile() else { return };
        let column = column * PORTABLE_COLUMNS + column_part() * PART as u32;
        let mut part = 0;
        while part < ROW_PARTS {
            let origin = [row * PORTABLE_ROWS + (part * PART) as u32, column];
            fusion.apply::<PART, ALIGNED>(&mut sums[part], factor, &d, [m, n], origin);
            store::<O, ALIGNED>(&sums[part], &d, [m, n], origin);
            part += 1;
        }
    }
    // None is under way when the block ends.
    pipeline::wait_copies::<0>();
}

fn grid<T: RegisterElement + Float, O: PairElement, const ALIGNED: bool>(
    args: &GemmPortableArgs<'_, T, O, ALIGNED>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError> {
    let [m, n, k] = [args.shape.m, args.shape.n, args.shape.k].map(u64::from);
    args.a.check::<ALIGNED>("a.values", [m, k])?;
    args.b.check::<ALIGNED>("b.values", [n, k])?;
    LaunchError::check_length("d", m * n, args.d.len())?;
    if ALIGNED {
        LaunchError::check_multiple("shape.n", 2, n)?;
        LaunchError::check_alignment("d", 2 * size_of::<O>() as u64, args.d.address())?;
    }
    args.fusion.check(n)?;
    let tiles = m.div_ceil(PORTABLE_ROWS.into()) * n.div_ceil(PORTABLE_COLUMNS.into());
    Ok(Grid::x(tiles.min(device.multiprocessors.max(1).into()) as u32))
}

/// The part of the columns that the warp has.
#[inline(always)]
fn column_part() -> u32 {
    thread::warp() / 4
}

/// What is copied next: the steps of one tile of the block after those of another.
struct Copies<T: Pod> {
    a: Source<T, ROWS>,
    b: Source<T, COLUMNS>,
    shape: Shape,
    tiles: PersistentTiles<BAND>,
    /// Steps of a tile.
    steps: u32,
    /// Those that are not copied yet.
    left: u32,
}

impl<T: RegisterElement + Float> Copies<T> {
    #[inline(always)]
    fn new(a: &OperandRows<T>, b: &OperandRows<T>, shape: Shape, tiles: PersistentTiles<BAND>) -> Self {
        let (Shape { m, n, k }, steps) = (shape, shape.k.div_ceil(DEPTH as u32).max(1));
        Self { a: Source::new(a, [m, k]), b: Source::new(b, [n, k]), shape, tiles, steps, left: 0 }
    }

    /// Begins the next tile. After the last comes one beyond the edge, of which zeros are copied.
    #[inline(always)]
    fn next_tile<const M_MAJOR: bool, const N_MAJOR: bool>(&mut self) {
        let Shape { m, n, .. } = self.shape;
        let [row, column] = self.tiles.next_tile().map_or([m, n], |[row, column]| [row * PORTABLE_ROWS, column * PORTABLE_COLUMNS]);
        self.a.begin::<M_MAJOR>(row);
        self.b.begin::<N_MAJOR>(column);
        self.left = self.steps;
        self.end::<M_MAJOR, N_MAJOR>();
    }

    /// Prepares the last step.
    #[inline(always)]
    fn end<const M_MAJOR: bool, const N_MAJOR: bool>(&mut self) {
        if self.left == 1 {
            let depth = self.shape.k - (self.steps - 1) * DEPTH as u32;
            self.a.end::<M_MAJOR>(depth);
            self.b.end::<N_MAJOR>(depth);
        }
    }

    /// Steps that are copied alike.
    #[inline(always)]
    fn alike(&self) -> u32 {
        (self.left - 1).max(1)
    }

    /// Starts to copy the next step, as one group of copies.
    #[inline(always)]
    fn start<const ALIGNED: bool, const M_MAJOR: bool, const N_MAJOR: bool>(&mut self, stage: Stage<T>) {
        self.a.copy::<M_MAJOR, ALIGNED>(stage.a);
        self.b.copy::<N_MAJOR, ALIGNED>(stage.b);
        pipeline::commit_copies();
        self.a.advance::<M_MAJOR>();
        self.b.advance::<N_MAJOR>();
    }

    /// Counts steps that are finished, at most those alike.
    #[inline(always)]
    fn count<const M_MAJOR: bool, const N_MAJOR: bool>(&mut self, steps: u32) {
        self.left -= steps;
        match self.left {
            0 => self.next_tile::<M_MAJOR, N_MAJOR>(),
            _ => self.end::<M_MAJOR, N_MAJOR>(),
        }
    }
}

/// What a warp multiplies by one instruction's depth.
#[derive(Clone, Copy)]
struct Fragments<T: RegisterElement> {
    left: [OperandTile<T, STEP>; ROW_PARTS],
    right: RightTile<T, PART>,
}

impl<T: RegisterElement> Fragments<T> {
    /// Loads what instruction `step` of a stage takes.
    #[inline(always)]
    fn load<const M_MAJOR: bool, const N_MAJOR: bool>(places: Places<T, ROWS, COLUMNS>, stage: Stage<T>, step: u32) -> Self {
        Self {
            left: core::array::from_fn(|part| places.left::<M_MAJOR>(stage.a, part, step)),
            right: places.right::<N_MAJOR>(stage.b, step),
        }
    }

    #[inline(always)]
    fn multiply(self, sums: &mut Sums) {
        warp_matrix::multiply_add::<T, PART, STEP, ROW_PARTS>(sums, &self.left, self.right);
    }
}

type Ring<T> = Tiles<Stage<T>, { STAGES as usize }>;
type Sums = [RegisterTile<PART>; ROW_PARTS];

/// Where the block is in the ring.
struct Full<T: RegisterElement> {
    number: u32,
    places: Places<T, ROWS, COLUMNS>,
    /// Of the stage's first instruction.
    first: Fragments<T>,
}

/// Starts to fill all stages, and waits for the first.
#[inline(always)]
fn fill<T: RegisterElement + Float, const ALIGNED: bool, const M_MAJOR: bool, const N_MAJOR: bool>(
    ring: Ring<T>,
    copies: &mut Copies<T>,
) -> Full<T> {
    copies.next_tile::<M_MAJOR, N_MAJOR>();
    for number in 0..STAGES {
        copies.start::<ALIGNED, M_MAJOR, N_MAJOR>(ring.tile(number));
        copies.count::<M_MAJOR, N_MAJOR>(1);
    }
    pipeline::wait_copies::<{ STAGES - 1 }>();
    block::sync();
    let places = Places::new::<M_MAJOR, N_MAJOR>(column_part());
    Full { number: 0, places, first: Fragments::load::<M_MAJOR, N_MAJOR>(places, ring.tile(0), 0) }
}

/// The sums of a tile, from the stage that is full on.
#[inline(always)]
fn multiply<T: RegisterElement + Float, const ALIGNED: bool, const M_MAJOR: bool, const N_MAJOR: bool>(
    ring: Ring<T>,
    copies: &mut Copies<T>,
    full: &mut Full<T>,
) -> Sums {
    let mut sums = [RegisterTile::zero(); ROW_PARTS];
    let load = |places, stage, step| Fragments::<T>::load::<M_MAJOR, N_MAJOR>(places, stage, step);
    // The places of other layouts, which are chosen at run time, would take registers here.
    let places = full.places.anew(full.number);
    let mut left = copies.steps;
    while left > 0 {
        let steps = left.min(copies.alike());
        for _ in 0..steps {
            let stage = ring.tile(full.number);
            let second = load(places, stage, 1);
            full.first.multiply(&mut sums);
            let third = load(places, stage, 2);
            second.multiply(&mut sums);
            let fourth = load(places, stage, 3);
            third.multiply(&mut sums);
            pipeline::wait_copies::<{ STAGES - 2 }>();
            block::sync();
            // All have read this stage. Copies of elements take the registers of fragments, others wait for no product.
            if !ALIGNED {
                fourth.multiply(&mut sums);
            }
            copies.start::<ALIGNED, M_MAJOR, N_MAJOR>(stage);
            full.number = (full.number + 1) % STAGES;
            full.first = load(places, ring.tile(full.number), 0);
            if ALIGNED {
                fourth.multiply(&mut sums);
            }
        }
        left -= steps;
        copies.count::<M_MAJOR, N_MAJOR>(steps);
    }
    sums
}

/// An element of a result, of which a thread has pairs.
pub trait PairElement: Float + Pod {
    /// Stores two neighbours, rounded to nearest even, from element `at` on; they lie at a multiple of their size.
    fn store_pair(target: &GlobalMut<Self>, at: u64, values: [f32; 2]);
}

impl PairElement for f32 {
    #[inline(always)]
    fn store_pair(target: &GlobalMut<Self>, at: u64, values: [f32; 2]) {
        target.store_pair(at, values.map(f32::to_bits));
    }
}

impl PairElement for bf16 {
    #[inline(always)]
    fn store_pair(target: &GlobalMut<Self>, at: u64, values: [f32; 2]) {
        target.store_word(at, Self::pack(values));
    }
}

impl PairElement for f16 {
    #[inline(always)]
    fn store_pair(target: &GlobalMut<Self>, at: u64, values: [f32; 2]) {
        target.store_word(at, Self::pack(values));
    }
}

/// Stores a warp's part of a tile of `D`, which starts at `[row, column]`: if `ALIGNED` in pairs.
#[inline(always)]
fn store<O: PairElement, const ALIGNED: bool>(
    tile: &RegisterTile<PART>,
    d: &GlobalMut<O>,
    [rows, columns]: [u32; 2],
    [row, column]: [u32; 2],
) {
    let mut half = 0;
    while half < register_tile::THREAD_ROWS {
        let row = row + register_tile::row(half as u32);
        let mut pair = 0;
        while pair < RegisterTile::<PART>::PAIRS && row < rows {
            let (column, values) = (column + register_tile::column(pair as u32), tile.pair(half, pair));
            let at = u64::from(row) * u64::from(columns) + u64::from(column);
            if ALIGNED && column < columns {
                O::store_pair(d, at, values);
            }
            if !ALIGNED && column < columns {
                d.store(at, O::from_f32(values[0]));
            }
            if !ALIGNED && column + 1 < columns {
                d.store(at + 1, O::from_f32(values[1]));
            }
            pair += 1;
        }
        half += 1;
    }
}
