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
//! Tiles are 128x128, so that a tile has one square of `B` a block. A step of the ring is a block: 16 KiB of either operand, the 128 scales of the rows of
//! `A`, 512 bytes, and the scale of the square among its [neighbours](QUAD), all by TMA. Two warpgroups take 64 rows each. A thread has three times 64 values: the sum, and the results of two
//! blocks, of which one is being multiplied while the other is added to the sum. So the tensor cores always have a block in flight, and the 64 `fma` of a
//! thread hide below them.
//!
//! Floor: a block takes a multiprocessor's tensor cores 512 cycles; the 64 `fma` of eight warps take 128 cycles of each scheduler. 32.5 KiB arrive from the L2
//! cache, 65 bytes a cycle.
//!
//! | role | threads | registers |
//! |---|---|---|
//! | fills the ring | one of warpgroup 0 | 40 |
//! | multiplies, adds and stores 64 rows | warpgroups 1 and 2 | 232 |
//!
//! | barrier | between |
//! |---|---|
//! | ring | a stage is full; both warpgroups have multiplied its codes and read its scales |
//! | block | the ring is ready |
//! | warpgroup | its staging tile is written, and stored; it was stored, and may be written again; its part of a sum is written |
//!
//! Order of tiles, [split](Split) sums, [`Fusion`] and epilogue are those of [`gemm`](fn@super::gemm); so are the sizes that TMA takes. Every result is the
//! same on every run.

use oxtile_tile::epilogue;
use oxtile_tile::layout::{Linear, Swizzle128};
use oxtile_tile::matrix::{self, InFlight};
use oxtile_tile::num::{e4m3, fma};
use oxtile_tile::pipeline::{Pipeline, Producer, Stage as Full};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterTile, Rows, StoredElement};
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};
use oxtile_tile::warpgroup::{Role, Roles};

use super::division::Division;
use super::order::WorkOrder;
use super::place::Alone;
use super::stage::{self, Stage};
use super::tile_shape::{Tile128x128, TileShape};
use super::{Fusion, PART, Shape, Split, check_product};

/// Codes that share a scale along K, which are 128 bytes: a step.
pub const BLOCK: usize = 128;
/// Rows and columns of a tile: the side of a square of `B`.
const SIDE: usize = 128;
/// Scales that are copied for one: TMA copies 16 bytes, from a multiple of 16 bytes on. So four neighbouring steps load the same ones.
const QUAD: usize = 4;
/// As many as the shared memory holds: 33 KiB each.
const STAGES: usize = 5;

const _: () = assert!(Tile128x128::ROWS as usize == SIDE && Tile128x128::COLUMNS as usize == SIDE && Tile128x128::CLUSTER == 1);

type WarpgroupRoles = Roles<2, 40, 232>;
type Tile = RegisterTile<SIDE>;
type Codes = Stage<e4m3, e4m3, BLOCK, 2, 1, 2>;

/// A block of both operands, with its scales.
#[derive(SharedStorage, Clone, Copy)]
struct ScaledStage {
    codes: Codes,
    a_scales: SharedTile<f32, 1, SIDE, Linear>,
    /// Those of four neighbouring squares: that of step `i` is at `i % 4`.
    b_scales: SharedTile<f32, 1, QUAD, Linear>,
}

impl ScaledStage {
    const BYTES: u32 = Codes::SIZE + TensorMap::<f32, 1, SIDE, Linear>::BYTES + TensorMap::<f32, 1, QUAD, Linear>::BYTES;
}

/// The shared memory of a block.
#[derive(SharedStorage)]
struct Shared<O: StoredElement, const WIDTH: usize> {
    ring: Pipeline<ScaledStage, STAGES>,
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

/// Multiplies. `WIDTH` elements of `O` are 128 bytes; `old` is `D`, read where `fusion.beta` is not 0.
#[kernel(threads = WarpgroupRoles::THREADS, grid = grid, shared = Shared<O, WIDTH>, requires = sm_90a)]
#[instances(O = [bf16], WIDTH = [64])]
#[instances(O = [f32], WIDTH = [32])]
pub fn gemm_blocks<O: StoredElement, const WIDTH: usize>(
    operands: BlockOperands,
    d: TensorMapMut<O, PART, WIDTH, Swizzle128>,
    old: GlobalMut<O>,
    shape: Shape,
    fusion: Fusion<O>,
    split: Split,
) {
    let shared = Shared::<O, WIDTH>::claim();
    if thread::index() == 0 {
        shared.ring.init(WarpgroupRoles::CONSUMER_WARPS);
    }
    block::sync();
    let order = || split.order::<1>(shape, [SIDE as u32; 2], BLOCK as u32);
    match WarpgroupRoles::role() {
        Role::Producer(role) => {
            if role.begin() {
                produce(&operands, order(), shared.ring.producer());
            }
        }
        Role::Consumer(role) => {
            let (number, mut order, mut ring) = (role.begin(), order(), shared.ring.consumer());
            let factor = fusion.factor();
            while let Some(work) = order.next_work() {
                let mut tile = sum(number, [work.first, work.steps], || ring.wait());
                let [row, column] = work.tile;
                let origin = [row * SIDE as u32 + number * PART as u32, column * SIDE as u32];
                if let Some(part) = work.part {
                    let (rows, word) = (shape.m.saturating_sub(origin[0]), shared.last.tile(number));
                    if !split.add(&mut tile, part, [number, Tile128x128::WARPGROUPS], rows, (word, number)) {
                        continue;
                    }
                }
                fusion.apply::<_, true>(&mut tile, factor, &old, [shape.m, shape.n], origin);
                epilogue::store(&d, origin, &tile, shared.staging.tile(number), number);
            }
            epilogue::finish();
        }
    }
}

/// Fills the ring, by one thread.
#[inline(always)]
fn produce(operands: &BlockOperands, mut order: impl WorkOrder<Place = Alone>, mut ring: Producer<ScaledStage, STAGES>) {
    while let Some(work) = order.next_work() {
        let [row, column] = work.tile;
        for step in work.first..work.first + work.steps {
            let (stage, full) = ring.acquire(ScaledStage::BYTES);
            operands.a_scales.load(stage.a_scales, [step, row * SIDE as u32], full);
            operands.b_scales.load(stage.b_scales, [column, step - step % QUAD as u32], full);
            stage.codes.load::<1, 2, false, false>(
                (stage::Rows::Parts(operands.a), &operands.b),
                work.place,
                [row * SIDE as u32, column * SIDE as u32, step * BLOCK as u32],
                0,
                full,
            );
        }
    }
}

/// The sum of so many blocks, at least one, from step `first` on, of warpgroup `number`. While the products of one block are added, those of the next are in flight: they take turns
/// in two sets of registers, so the loop has two blocks.
#[inline(always)]
fn sum(number: u32, [first, steps]: [u32; 2], mut wait: impl FnMut() -> Full<ScaledStage>) -> Tile {
    let mut sum = Tile::zero();
    let mut stage = wait();
    let mut product = multiply(number, &stage);
    // The step of `product`, and the last.
    let (mut step, last) = (first, first + steps - 1);
    while last - step >= 2 {
        let scales = Scales::of(number, &stage, step);
        let next = wait();
        let other = multiply(number, &next);
        add::<1>(&mut sum, product, scales, stage);
        let scales = Scales::of(number, &next, step + 1);
        stage = wait();
        product = multiply(number, &stage);
        add::<1>(&mut sum, other, scales, next);
        step += 2;
    }
    let scales = Scales::of(number, &stage, step);
    if step == last {
        add::<0>(&mut sum, product, scales, stage);
    } else {
        let next = wait();
        let other = multiply(number, &next);
        add::<1>(&mut sum, product, scales, stage);
        add::<0>(&mut sum, other, Scales::of(number, &next, last), next);
    }
    sum
}

/// Starts to multiply a block.
#[inline(always)]
#[track_caller]
fn multiply(number: u32, stage: &Full<ScaledStage>) -> InFlight<SIDE> {
    let (left, right) = stage.memory().codes.operands::<SIDE, false, false>([number, 0]);
    matrix::multiply(left, right)
}

/// The scales of a thread's part of a block. They are read before the warpgroup waits for the next stage, so that no multiplication is issued late for them.
struct Scales {
    rows: Rows,
    square: f32,
}

impl Scales {
    /// Those of the rows of warpgroup `number`.
    #[inline(always)]
    #[track_caller]
    fn of(number: u32, stage: &Full<ScaledStage>, step: u32) -> Self {
        let ScaledStage { a_scales, b_scales, .. } = stage.memory();
        let rows = [0, 1].map(|half| a_scales.load(0, number * PART as u32 + register_tile::row(half)));
        Self { rows, square: b_scales.load(0, step % QUAD as u32) }
    }
}

/// Waits for a block's products, while the next `PENDING` blocks are in flight, gives the stage back, and adds them times their scales to the sum.
#[inline(always)]
#[track_caller]
fn add<const PENDING: u32>(sum: &mut Tile, product: InFlight<SIDE>, scales: Scales, stage: Full<ScaledStage>) {
    let product = product.wait_leaving::<PENDING>();
    stage.release();
    let scales: Rows = scales.rows.map(|row| scales.square * row);
    sum.map_pairs(|half, pair, [a, b]| {
        let [x, y] = product.pair(half, pair);
        [fma(scales[half], x, a), fma(scales[half], y, b)]
    });
}

fn grid<O: StoredElement, const WIDTH: usize>(args: &GemmBlocksArgs<'_, O, WIDTH>, device: &DeviceLimits) -> Result<Grid, LaunchError> {
    let [rows, columns] = check_product::<e4m3, e4m3, BLOCK, O, WIDTH, Tile128x128>(args.shape, 1, &args.old, &args.fusion)?;
    let steps = args.shape.k.div_ceil(BLOCK as u32);
    let work = args.split.check(rows * columns, steps, [Tile128x128::WARPGROUPS, Tile128x128::PIECE])?;
    Ok(Grid::x(work.min(device.multiprocessors.max(1).into()) as u32))
}
