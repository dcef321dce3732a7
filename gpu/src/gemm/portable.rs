//! Matrix multiplication of 16-bit operands on any GPU from sm_80 on, of any shape: products by `mma.sync`, copies by `cp.async`.
//!
//! A block of eight warps stays on its multiprocessor and computes one 256 by 128 tile of `D` after another. A warp has 16 rows of each of
//! the four parts of 64 rows, and one of the two parts of 64 columns: 64 by 64 elements, in 128 registers a thread. All threads
//! copy operands into a ring of four stages of 32 elements of the sum, 24 KiB each, and go on to the next tile's while the last of this one are multiplied
//! and stored.
//!
//! A stage is two panels, one for each instruction's depth. Fragments of a panel are loaded while those of the panel before are
//! multiplied. So the one barrier of a step is between its two products: after it the next stage is there for all warps, and all have
//! read the stage before this one, which is filled again.
//!
//! ```text
//! load panel 1 of this stage    multiply panel 0
//! wait, barrier, copy           load panel 0 of the next stage    multiply panel 1
//! ```
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
use super::panels::{self, OperandRows, PANELS, PART, Panels, STEP};

const THREADS: u32 = 256;
/// Parts of 64 rows of a block's tile.
const ROW_PARTS: usize = 4;
/// Parts of 64 columns; four warps have each.
const COLUMN_PARTS: usize = 2;
/// Rows of a block's tile of `D`.
pub const PORTABLE_ROWS: u32 = (ROW_PARTS * PART) as u32;
/// Columns of a block's tile of `D`.
pub const PORTABLE_COLUMNS: u32 = (COLUMN_PARTS * PART) as u32;
/// Elements of the sum of a stage.
const DEPTH: u32 = (PANELS * STEP) as u32;
/// 96 KiB: what a block may have on sm_89 and sm_120.
const STAGES: u32 = 4;
/// Rows of tiles that run together.
const BAND: u32 = 8;

const _: () = assert!(THREADS == 128 * COLUMN_PARTS as u32, "four warps have 64 columns");
const _: () = assert!(STAGES >= 3, "one stage is read, the next is there, another is filled");

/// The operands of a step.
#[derive(SharedStorage, Clone, Copy)]
struct Stage<T: Pod> {
    a: Panels<T, { ROW_PARTS * PANELS }>,
    b: Panels<T, { COLUMN_PARTS * PANELS }>,
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
    let mut copies = Copies::new(a, b, shape, tiles);
    let mut stage = match majors {
        (true, true) => fill::<T, ALIGNED, false, false>(ring, &mut copies),
        (true, false) => fill::<T, ALIGNED, false, true>(ring, &mut copies),
        (false, true) => fill::<T, ALIGNED, true, false>(ring, &mut copies),
        (false, false) => fill::<T, ALIGNED, true, true>(ring, &mut copies),
    };
    let factor = fusion.factor();
    while let Some([row, column]) = tiles.next_tile() {
        let mut sums = match majors {
            (true, true) => multiply::<T, ALIGNED, false, false>(ring, &mut copies, &mut stage),
            (true, false) => multiply::<T, ALIGNED, false, true>(ring, &mut copies, &mut stage),
            (false, true) => multiply::<T, ALIGNED, true, false>(ring, &mut copies, &mut stage),
            (false, false) => multiply::<T, ALIGNED, true, true>(ring, &mut copies, &mut stage),
        };
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
    a: OperandRows<T>,
    b: OperandRows<T>,
    shape: Shape,
    tiles: PersistentTiles<BAND>,
    /// Steps of a tile.
    steps: u32,
    /// The next one.
    step: u32,
    /// Its tile's first row and column; after the last tile, ones beyond the edge, so that zeros are copied.
    origin: [u32; 2],
}

impl<T: RegisterElement + Float> Copies<T> {
    #[inline(always)]
    fn new(a: OperandRows<T>, b: OperandRows<T>, shape: Shape, tiles: PersistentTiles<BAND>) -> Self {
        let mut copies = Self { a, b, shape, tiles, steps: shape.k.div_ceil(DEPTH).max(1), step: 0, origin: [0; 2] };
        copies.next_tile();
        copies
    }

    #[inline(always)]
    fn next_tile(&mut self) {
        let Shape { m, n, .. } = self.shape;
        self.origin = self.tiles.next_tile().map_or([m, n], |[row, column]| [row * PORTABLE_ROWS, column * PORTABLE_COLUMNS]);
    }

    /// Starts to copy the next step, as one group.
    #[inline(always)]
    fn start<const ALIGNED: bool, const M_MAJOR: bool, const N_MAJOR: bool>(&mut self, stage: Stage<T>) {
        let (Shape { m, n, k }, [row, column], start) = (self.shape, self.origin, self.step * DEPTH);
        panels::copy::<T, _, M_MAJOR, ALIGNED>(&self.a, stage.a, [row, start], [m, k]);
        panels::copy::<T, _, N_MAJOR, ALIGNED>(&self.b, stage.b, [column, start], [n, k]);
        pipeline::commit_copies();
        self.step += 1;
        if self.step == self.steps {
            self.step = 0;
            self.next_tile();
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
    #[inline(always)]
    fn load<const M_MAJOR: bool, const N_MAJOR: bool>(stage: Stage<T>, panel: u32) -> Self {
        Self {
            left: panels::left::<T, _, M_MAJOR, ROW_PARTS>(stage.a, panel),
            right: panels::right::<T, _, N_MAJOR>(stage.b, column_part(), panel),
        }
    }

    #[inline(always)]
    fn multiply(&self, sums: &mut Sums) {
        warp_matrix::multiply_add::<T, PART, STEP, ROW_PARTS>(sums, &self.left, self.right);
    }
}

type Ring<T> = Tiles<Stage<T>, { STAGES as usize }>;
type Sums = [RegisterTile<PART>; ROW_PARTS];

/// Where the block is in the ring, and the fragments of that stage's first panel.
struct Full<T: RegisterElement> {
    number: u32,
    first: Fragments<T>,
}

/// Starts to fill all stages but one, and waits for the first.
#[inline(always)]
fn fill<T: RegisterElement + Float, const ALIGNED: bool, const M_MAJOR: bool, const N_MAJOR: bool>(
    ring: Ring<T>,
    copies: &mut Copies<T>,
) -> Full<T> {
    for number in 0..STAGES - 1 {
        copies.start::<ALIGNED, M_MAJOR, N_MAJOR>(ring.tile(number));
    }
    pipeline::wait_copies::<{ STAGES - 2 }>();
    block::sync();
    Full { number: 0, first: Fragments::load::<M_MAJOR, N_MAJOR>(ring.tile(0), 0) }
}

/// The sums of a tile, from the stage that is full on.
#[inline(always)]
fn multiply<T: RegisterElement + Float, const ALIGNED: bool, const M_MAJOR: bool, const N_MAJOR: bool>(
    ring: Ring<T>,
    copies: &mut Copies<T>,
    stage: &mut Full<T>,
) -> Sums {
    let mut sums = [RegisterTile::zero(); ROW_PARTS];
    for _ in 0..copies.steps {
        let second = Fragments::load::<M_MAJOR, N_MAJOR>(ring.tile(stage.number), 1);
        stage.first.multiply(&mut sums);
        pipeline::wait_copies::<{ STAGES - 3 }>();
        block::sync();
        // The stage before this one.
        copies.start::<ALIGNED, M_MAJOR, N_MAJOR>(ring.tile((stage.number + STAGES - 1) % STAGES));
        stage.number = (stage.number + 1) % STAGES;
        stage.first = Fragments::load::<M_MAJOR, N_MAJOR>(ring.tile(stage.number), 0);
        second.multiply(&mut sums);
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
