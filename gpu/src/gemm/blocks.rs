//! Matrix multiplication of FP8 codes that have a scale for every 128 elements of the sum: `D = alpha A B + beta D`, then a bias and GELU if asked for.
//!
//! A row of `A` has a scale for each block of 128 codes, `B` one for each square of 128x128:
//! `D[m, n] = sum over blocks b of K of a_scales[b, m] b_scales[n / 128, b] sum over k in b of A[m, k] B[n, k]`.
//! The tensor cores sum the 128 products of a block from zero, in about 14 bits. A thread multiplies that sum by both scales and adds it, in `f32`, to the sum of
//! the blocks before. So the tensor cores' loss does not grow with K.
//!
//! The product of two scales is rounded to `f32` first. So it has to be in the range of `f32`, from 2^-126 to 2^128, and 0 times a product of scales beyond it is
//! NaN. A scale is the largest magnitude of its block over 448, so that these magnitudes may multiply to anything from 2^-108 to 2^145, while a result ends
//! at 2^128.
//!
//! A tile has 128 columns, so that it has one square of `B` a block. A step of the ring is a block: 16 KiB of `B`, 128 bytes of each row of `A`, the scales of 128
//! rows of `A`, 512 bytes, and the scale of the square among its [neighbours](QUAD), all by TMA. A thread has three times the values of its warpgroup's part: the sum, and the results of two
//! blocks, of which one is being multiplied while the other is added to the sum. So the tensor cores always have a block in flight, and the `fma` of a
//! thread hide below them.
//!
//! | [tile](ScaledTile) | warpgroups | stages | values of a thread | for |
//! |---|---|---|---|---|
//! | 128x128 | one above the other | 5 of 33 KiB | 3 times 64 | more than 64 rows |
//! | 64x128 | side by side | 7 of 25 KiB | 3 times 32 | up to 64 rows, half of whose time in a tile of 128 rows is for rows beyond the edge |
//!
//! Floor of 128x128: a block takes a multiprocessor's tensor cores 512 cycles; the 64 `fma` of eight warps take 128 cycles of each scheduler. 32.5 KiB arrive from the L2
//! cache, 65 bytes a cycle. Of 64x128: half of the cycles and of the `fma`, for 24.5 KiB; 16 of them are weights, which few rows read from device memory once, 910 cycles of a multiprocessor's share.
//!
//! | role | threads | registers |
//! |---|---|---|
//! | fills the ring | one of warpgroup 0 | 40 |
//! | multiplies, adds and stores 64 rows, or 64 columns | warpgroups 1 and 2 | 232 |
//!
//! | barrier | between |
//! |---|---|
//! | ring | a stage is full; both warpgroups have multiplied its codes and read its scales |
//! | block | the ring is ready |
//! | warpgroup | its staging tile is written, and stored; it was stored, and may be written again; its part of a sum is written |
//!
//! Order of tiles, [split](Split) sums, [`Fusion`] and epilogue are those of [`gemm`](fn@super::gemm); so are the sizes that TMA takes. Every result is the
//! same on every run.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::epilogue;
use oxtile_tile::layout::{Linear, Swizzle128};
use oxtile_tile::matrix::{self, InFlight};
use oxtile_tile::num::{e4m3, fma};
use oxtile_tile::pipeline::{Pipeline, Producer, Stage as Full};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterTile, Rows, StoredElement};
use oxtile_tile::shared::{SharedStorage, SharedTile, Tiles};
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};
use oxtile_tile::warpgroup::{Role, Roles};

use super::division::Division;
use super::order::WorkOrder;
use super::place::Alone;
use super::stage::{self, Stage};
use super::tile_shape::{Tile64x128, Tile128x128, TileShape};
use super::{Fusion, PART, Shape, Split, check_product};

/// Codes that share a scale along K, which are 128 bytes: a step.
pub const BLOCK: usize = 128;
/// Columns of a tile: the side of a square of `B`. Rows whose scales are copied, too.
const SIDE: usize = 128;
/// Scales that are copied for one: TMA copies 16 bytes, from a multiple of 16 bytes on. So four neighbouring steps load the same ones.
const QUAD: usize = 4;

const _: () = assert!(Tile128x128::COLUMNS as usize == SIDE && Tile64x128::COLUMNS as usize == SIDE);
const _: () = assert!(Tile128x128::CLUSTER == 1 && Tile64x128::CLUSTER == 1);

type WarpgroupRoles = Roles<2, 40, 232>;
/// Warpgroups of a block that multiply.
const WARPGROUPS: u32 = Tile128x128::WARPGROUPS;

/// The tile of a block, and how it is computed: a compile-time policy of [`GemmBlocks`].
pub trait ScaledTile: TileShape {
    /// The shared memory of a block.
    type Scaled<O: StoredElement, const WIDTH: usize>: SharedStorage;

    /// Multiplies: the whole work of a block.
    fn multiply_scaled<O: StoredElement, const WIDTH: usize>(tensors: ScaledTensors<O, WIDTH>);
}

impl ScaledTile for Tile128x128 {
    type Scaled<O: StoredElement, const WIDTH: usize> = Shared<O, WIDTH, 2, 1, 2, 5>;

    #[inline(always)]
    fn multiply_scaled<O: StoredElement, const WIDTH: usize>(tensors: ScaledTensors<O, WIDTH>) {
        Loops::<2, 1, 128, 2, 5>::multiply(&tensors);
    }
}

impl ScaledTile for Tile64x128 {
    type Scaled<O: StoredElement, const WIDTH: usize> = Shared<O, WIDTH, 1, 2, 1, 7>;

    #[inline(always)]
    fn multiply_scaled<O: StoredElement, const WIDTH: usize>(tensors: ScaledTensors<O, WIDTH>) {
        Loops::<1, 2, 64, 1, 7>::multiply(&tensors);
    }
}

/// A block of both operands, with its scales.
#[derive(SharedStorage, Clone, Copy)]
pub struct ScaledStage<const ROW_PARTS: usize, const COLUMN_PARTS: usize, const PANELS: usize> {
    codes: Stage<e4m3, e4m3, BLOCK, ROW_PARTS, COLUMN_PARTS, PANELS>,
    a_scales: SharedTile<f32, 1, SIDE, Linear>,
    /// Those of four neighbouring squares: that of step `i` is at `i % 4`.
    b_scales: SharedTile<f32, 1, QUAD, Linear>,
}

impl<const ROW_PARTS: usize, const COLUMN_PARTS: usize, const PANELS: usize> ScaledStage<ROW_PARTS, COLUMN_PARTS, PANELS> {
    const BYTES: u32 = Stage::<e4m3, e4m3, BLOCK, ROW_PARTS, COLUMN_PARTS, PANELS>::SIZE
        + TensorMap::<f32, 1, SIDE, Linear>::BYTES
        + TensorMap::<f32, 1, QUAD, Linear>::BYTES;
}

/// The shared memory of a block.
#[derive(SharedStorage)]
pub struct Shared<
    O: StoredElement,
    const WIDTH: usize,
    const ROW_PARTS: usize,
    const COLUMN_PARTS: usize,
    const PANELS: usize,
    const STAGES: usize,
> {
    ring: Pipeline<ScaledStage<ROW_PARTS, COLUMN_PARTS, PANELS>, STAGES>,
    /// Two for each warpgroup: one is written while the other is stored.
    staging: Tiles<Tiles<SharedTile<O, PART, WIDTH, Swizzle128>, 2>, 2>,
    /// Whether each warpgroup is the last of those that share its tile.
    last: Tiles<SharedArray<u32, 1>, 2>,
}

/// Codes, and the scales that they are multiplied by.
#[derive(Clone, Copy, Parameter)]
pub struct BlockOperands {
    /// `A`, `[M, K]`.
    pub a: TensorMap<e4m3, PART, BLOCK, Swizzle128>,
    /// `B`, `[N, K]`.
    pub b: TensorMap<e4m3, PART, BLOCK, Swizzle128>,
    /// The scales of `A`, `[ceil(K / 128), M]`.
    pub a_scales: TensorMap<f32, 1, SIDE, Linear>,
    /// The scales of `B`, `[ceil(N / 128), ceil(K / 128)]`.
    pub b_scales: TensorMap<f32, 1, QUAD, Linear>,
}

/// What is multiplied, and where the result goes.
pub struct ScaledTensors<O: StoredElement, const WIDTH: usize> {
    operands: BlockOperands,
    d: TensorMapMut<O, PART, WIDTH, Swizzle128>,
    old: GlobalMut<O>,
    shape: Shape,
    fusion: Fusion<O>,
    split: Split,
}

/// Multiplies. `WIDTH` elements of `O` are 128 bytes; `old` is `D`, read where `fusion.beta` is not 0.
#[kernel(threads = WarpgroupRoles::THREADS, grid = grid, shared = <S as ScaledTile>::Scaled<O, WIDTH>, requires = sm_90a)]
#[instances(O = [bf16], WIDTH = [64], S = [Tile128x128, Tile64x128])]
#[instances(O = [f32], WIDTH = [32], S = [Tile128x128, Tile64x128])]
pub fn gemm_blocks<O: StoredElement, const WIDTH: usize, S: ScaledTile>(
    operands: BlockOperands,
    d: TensorMapMut<O, PART, WIDTH, Swizzle128>,
    old: GlobalMut<O>,
    shape: Shape,
    fusion: Fusion<O>,
    split: Split,
) {
    S::multiply_scaled(ScaledTensors { operands, d, old, shape, fusion, split });
}

/// The loops of a block whose warpgroups multiply 64 rows and `COLUMNS` columns each, which are `PANELS` parts of 64 columns of `B`.
struct Loops<const ROW_PARTS: usize, const COLUMN_PARTS: usize, const COLUMNS: usize, const PANELS: usize, const STAGES: usize>;

impl<const ROW_PARTS: usize, const COLUMN_PARTS: usize, const COLUMNS: usize, const PANELS: usize, const STAGES: usize>
    Loops<ROW_PARTS, COLUMN_PARTS, COLUMNS, PANELS, STAGES>
where
    Columns<COLUMNS>: MatrixColumns,
{
    const ROWS: u32 = (ROW_PARTS * PART) as u32;

    #[inline(always)]
    fn multiply<O: StoredElement, const WIDTH: usize>(tensors: &ScaledTensors<O, WIDTH>) {
        const { assert!(ROW_PARTS * COLUMN_PARTS == WARPGROUPS as usize && COLUMN_PARTS * PANELS * PART == SIDE && PANELS * PART == COLUMNS) };
        let ScaledTensors { operands, d, old, shape, fusion, split } = tensors;
        let shared = Shared::<O, WIDTH, ROW_PARTS, COLUMN_PARTS, PANELS, STAGES>::claim();
        if thread::index() == 0 {
            shared.ring.init(WarpgroupRoles::CONSUMER_WARPS);
        }
        block::sync();
        let order = || split.order::<1>(*shape, [Self::ROWS, SIDE as u32], BLOCK as u32);
        match WarpgroupRoles::role() {
            Role::Producer(role) => {
                if role.begin() {
                    Self::produce(operands, order(), shared.ring.producer());
                }
            }
            Role::Consumer(role) => {
                let (number, mut order, mut ring) = (role.begin(), order(), shared.ring.consumer());
                let (factor, part) = (fusion.factor(), [number / COLUMN_PARTS as u32, number % COLUMN_PARTS as u32]);
                while let Some(work) = order.next_work() {
                    let mut tile = Self::sum(part, [work.first, work.steps], || ring.wait());
                    let [row, column] = work.tile;
                    let origin = [row * Self::ROWS + part[0] * PART as u32, column * SIDE as u32 + part[1] * COLUMNS as u32];
                    if let Some(of_tile) = work.part {
                        let (rows, word) = (shape.m.saturating_sub(origin[0]), shared.last.tile(number));
                        if !split.add(&mut tile, of_tile, [number, WARPGROUPS], rows, (word, number)) {
                            continue;
                        }
                    }
                    fusion.apply::<_, true>(&mut tile, factor, old, [shape.m, shape.n], origin);
                    epilogue::store(d, origin, &tile, shared.staging.tile(number), number);
                }
                epilogue::finish();
            }
        }
    }

    /// Fills the ring, by one thread.
    #[inline(always)]
    fn produce(
        operands: &BlockOperands,
        mut order: impl WorkOrder<Place = Alone>,
        mut ring: Producer<ScaledStage<ROW_PARTS, COLUMN_PARTS, PANELS>, STAGES>,
    ) {
        while let Some(work) = order.next_work() {
            let [row, column] = work.tile;
            for step in work.first..work.first + work.steps {
                let (stage, full) = ring.acquire(ScaledStage::<ROW_PARTS, COLUMN_PARTS, PANELS>::BYTES);
                operands.a_scales.load(stage.a_scales, [step, row * Self::ROWS], full);
                operands.b_scales.load(stage.b_scales, [column, step - step % QUAD as u32], full);
                stage.codes.load::<1, 2, false, false>(
                    (stage::Rows::Parts(operands.a), &operands.b),
                    work.place,
                    [row * Self::ROWS, column * SIDE as u32, step * BLOCK as u32],
                    0,
                    full,
                );
            }
        }
    }

    /// The sum of so many blocks, at least one, from step `first` on, of the warpgroup of these parts. While the products of one block are added, those of the next are in flight: they take turns
    /// in two sets of registers, so the loop has two blocks.
    #[inline(always)]
    fn sum(
        part: [u32; 2],
        [first, steps]: [u32; 2],
        mut wait: impl FnMut() -> Full<ScaledStage<ROW_PARTS, COLUMN_PARTS, PANELS>>,
    ) -> RegisterTile<COLUMNS> {
        let mut sum = RegisterTile::zero();
        let mut stage = wait();
        let mut product = Self::start(part, &stage);
        // The step of `product`, and the last.
        let (mut step, last) = (first, first + steps - 1);
        while last - step >= 2 {
            let scales = Scales::of(part[0], stage.memory(), step);
            let next = wait();
            let other = Self::start(part, &next);
            add::<1, _, COLUMNS>(&mut sum, product, scales, stage);
            let scales = Scales::of(part[0], next.memory(), step + 1);
            stage = wait();
            product = Self::start(part, &stage);
            add::<1, _, COLUMNS>(&mut sum, other, scales, next);
            step += 2;
        }
        let scales = Scales::of(part[0], stage.memory(), step);
        if step == last {
            add::<0, _, COLUMNS>(&mut sum, product, scales, stage);
        } else {
            let next = wait();
            let other = Self::start(part, &next);
            add::<1, _, COLUMNS>(&mut sum, product, scales, stage);
            add::<0, _, COLUMNS>(&mut sum, other, Scales::of(part[0], next.memory(), last), next);
        }
        sum
    }

    /// Starts to multiply a block.
    #[inline(always)]
    #[track_caller]
    fn start(part: [u32; 2], stage: &Full<ScaledStage<ROW_PARTS, COLUMN_PARTS, PANELS>>) -> InFlight<COLUMNS> {
        let (left, right) = stage.memory().codes.operands::<COLUMNS, false, false>(part);
        matrix::multiply(left, right)
    }
}

/// The scales of a thread's part of a block. They are read before the warpgroup waits for the next stage, so that no multiplication is issued late for them.
struct Scales {
    rows: Rows,
    square: f32,
}

impl Scales {
    /// Those of the rows of a part.
    #[inline(always)]
    #[track_caller]
    fn of<const ROW_PARTS: usize, const COLUMN_PARTS: usize, const PANELS: usize>(
        row_part: u32,
        stage: ScaledStage<ROW_PARTS, COLUMN_PARTS, PANELS>,
        step: u32,
    ) -> Self {
        let ScaledStage { a_scales, b_scales, .. } = stage;
        let rows = [0, 1].map(|half| a_scales.load(0, row_part * PART as u32 + register_tile::row(half)));
        Self { rows, square: b_scales.load(0, step % QUAD as u32) }
    }
}

/// Waits for a block's products, while the next `PENDING` blocks are in flight, gives the stage back, and adds them times their scales to the sum.
#[inline(always)]
#[track_caller]
fn add<const PENDING: u32, M: Copy, const COLUMNS: usize>(
    sum: &mut RegisterTile<COLUMNS>,
    product: InFlight<COLUMNS>,
    scales: Scales,
    stage: Full<M>,
) where
    Columns<COLUMNS>: MatrixColumns,
{
    let product = product.wait_leaving::<PENDING>();
    stage.release();
    let scales: Rows = scales.rows.map(|row| scales.square * row);
    sum.map_pairs(|half, pair, [a, b]| {
        let [x, y] = product.pair(half, pair);
        [fma(scales[half], x, a), fma(scales[half], y, b)]
    });
}

fn grid<O: StoredElement, const WIDTH: usize, S: ScaledTile>(
    args: &GemmBlocksArgs<'_, O, WIDTH, S>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError> {
    let [rows, columns] = check_product::<e4m3, e4m3, BLOCK, O, WIDTH, S>(args.shape, &args.fusion)?;
    LaunchError::check_length("old", u64::from(args.shape.m) * u64::from(args.shape.n), args.old.len())?;
    let steps = args.shape.k.div_ceil(BLOCK as u32);
    let work = args.split.check(rows * columns, steps, [WARPGROUPS, S::PIECE])?;
    Ok(Grid::x(work.min(device.multiprocessors.max(1).into()) as u32))
}
