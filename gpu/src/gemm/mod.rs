//! Matrix multiplication: `D = alpha A B + beta D`, then a bias and GELU if asked for.
//!
//! A cluster of two blocks stays on its multiprocessors and computes one 256 by 256 tile of `D` after another, each block 128 rows. In
//! each, one thread fills a ring of four stages of operands by TMA: its rows of `A`, and half of the columns of `B` for
//! both blocks. Two warpgroups multiply, 64 rows each, with one group of multiplications in flight while they wait for the next stage.
//! The finished tile leaves through shared memory, 128 bytes of each row at a time, while the first stages of the next tile arrive.
//!
//! | barrier | between |
//! |---|---|
//! | ring | a stage is full; all four warpgroups of the cluster have read it |
//! | cluster | the rings are ready; no warp arrives at them any more |
//! | warpgroup | its staging tile is written, and stored; it was stored, and may be written again |
//!
//! `A` is `[M, K]`, or `[K, M]` if `M_MAJOR`; `B` is `[N, K]`, or `[K, N]` if `N_MAJOR`; `D` is `[M, N]`. Rows are multiples of 16 bytes
//! (what TMA can address); `M`, `N` and `K` are otherwise any: elements beyond an edge are loaded as zero and not stored.
//! Accumulation is in `f32`. [`GemmAny`] is for all other shapes.

mod any;
mod factors;
mod fusion;
mod stage;

pub use any::{GEMM_ANY, GemmAny, GemmAnyArgs, Operand, OperandArgument};
pub use factors::{NVFP4_GEMM_FACTORS, Nvfp4GemmFactors, Nvfp4GemmFactorsArgs};
pub use fusion::{Fusion, FusionArgument};
use stage::Stage;

use oxtile_tile::arch::MatrixElement;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{Pod, e4m3};
use oxtile_tile::pipeline::Pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterTile, StoredElement};
use oxtile_tile::scheduler::PersistentTiles;
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};
use oxtile_tile::warpgroup::{Role, Roles};
use oxtile_tile::{cluster, epilogue};

/// Rows of a warpgroup's part of a tile, and of every box that is copied.
const PART: usize = 64;
/// Rows of a block's tile of `D`.
pub const ROWS: u32 = 128;
/// Columns of a tile of `D`.
pub const COLUMNS: usize = 256;
/// Stages of operands: 48 KiB each.
const STAGES: usize = 4;
/// Blocks that share `B`, one above the other.
const CLUSTER: u32 = 2;
/// Rows of clusters' tiles that run together.
const BAND: u32 = 8;

type WarpgroupRoles = Roles<2, 40, 232>;

#[derive(SharedStorage)]
struct Shared<T: Pod, O: Pod, const DEPTH: usize, const WIDTH: usize> {
    ring: Pipeline<Stage<T, DEPTH>, STAGES>,
    /// Two for each warpgroup: one is written while the other is stored.
    staging: Tiles<Tiles<SharedTile<O, PART, WIDTH, Swizzle128>, 2>, 2>,
}

/// The sizes of a product.
#[derive(Clone, Copy, Parameter)]
pub struct Shape {
    /// Rows of `A` and of `D`.
    pub m: u32,
    /// Columns of `B` and of `D`.
    pub n: u32,
    /// Columns of `A`, rows of `B`.
    pub k: u32,
}

/// Multiplies. `DEPTH` elements of `T` and `WIDTH` of `O` are 128 bytes; `old` is `D`, read where `fusion.beta` is not 0.
#[kernel(threads = WarpgroupRoles::THREADS, grid = grid, shared = Shared<T, O, DEPTH, WIDTH>, cluster = CLUSTER, requires = sm_90a)]
#[instances(T = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], M_MAJOR = [false, true], N_MAJOR = [false, true])]
#[instances(T = [bf16], DEPTH = [64], O = [f32], WIDTH = [32], M_MAJOR = [false, true], N_MAJOR = [false, true])]
#[instances(T = [e4m3], DEPTH = [128], O = [bf16], WIDTH = [64], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(T = [e4m3], DEPTH = [128], O = [f32], WIDTH = [32], M_MAJOR = [false], N_MAJOR = [false])]
pub fn gemm<T: MatrixElement, const DEPTH: usize, O: StoredElement, const WIDTH: usize, const M_MAJOR: bool, const N_MAJOR: bool>(
    a: TensorMap<T, PART, DEPTH, Swizzle128>,
    b: TensorMap<T, PART, DEPTH, Swizzle128>,
    d: TensorMapMut<O, PART, WIDTH, Swizzle128>,
    old: GlobalMut<O>,
    shape: Shape,
    fusion: Fusion<O>,
) {
    let Shape { m, n, k } = shape;
    let shared = Shared::<T, O, DEPTH, WIDTH>::claim();
    if thread::index() == 0 {
        shared.ring.init(CLUSTER * WarpgroupRoles::CONSUMER_WARPS);
    }
    cluster::sync();
    let rank = cluster::rank();
    let mut tiles = PersistentTiles::<BAND>::of_clusters::<CLUSTER>(m.div_ceil(CLUSTER * ROWS), n.div_ceil(COLUMNS as u32));
    let steps = k.div_ceil(DEPTH as u32);
    match WarpgroupRoles::role() {
        Role::Producer(role) => {
            if role.begin() {
                let mut ring = shared.ring.producer();
                while let Some([row, column]) = tiles.next_tile() {
                    for step in 0..steps {
                        let (stage, full) = ring.acquire(Stage::<T, DEPTH>::SIZE);
                        let origin = [(row * CLUSTER + rank) * ROWS, column * COLUMNS as u32, step * DEPTH as u32];
                        stage.load::<M_MAJOR, N_MAJOR>([&a, &b], origin, rank, full);
                    }
                }
            }
        }
        Role::Consumer(role) => {
            let part = role.begin();
            let mut ring = shared.ring.consumer();
            let factor = fusion.factor();
            while let Some([row, column]) = tiles.next_tile() {
                let mut stage = ring.wait();
                let (left, right) = stage.memory().operands::<M_MAJOR, N_MAJOR>(part);
                let mut product = RegisterTile::zero().multiply_add(left, right);
                for _ in 1..steps {
                    let next = ring.wait();
                    let (left, right) = next.memory().operands::<M_MAJOR, N_MAJOR>(part);
                    product = product.multiply_add(left, right);
                    product.wait_earlier();
                    stage.release_to_cluster::<CLUSTER>();
                    stage = next;
                }
                let mut tile = product.wait();
                stage.release_to_cluster::<CLUSTER>();
                let origin = [(row * CLUSTER + rank) * ROWS + part * PART as u32, column * COLUMNS as u32];
                fusion.apply(&mut tile, factor, &old, [m, n], origin);
                epilogue::store(&d, origin, &tile, shared.staging.tile(part), part);
            }
            epilogue::finish();
        }
    }
    cluster::sync();
}

fn grid<T: MatrixElement, const DEPTH: usize, O: StoredElement, const WIDTH: usize, const M_MAJOR: bool, const N_MAJOR: bool>(
    args: &GemmArgs<'_, T, DEPTH, O, WIDTH, M_MAJOR, N_MAJOR>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError> {
    const { assert!(DEPTH * size_of::<T>() == 128 && WIDTH * size_of::<O>() == 128, "boxes are 128 bytes wide") };
    let [m, n] = [args.shape.m, args.shape.n].map(u64::from);
    LaunchError::check_length("old", m * n, args.old.len())?;
    args.fusion.check(n)?;
    let tiles = m.div_ceil(u64::from(CLUSTER * ROWS)) * n.div_ceil(COLUMNS as u64);
    let clusters = (device.multiprocessors / CLUSTER).max(1);
    Ok(Grid::x(CLUSTER * tiles.min(u64::from(clusters)) as u32))
}
