//! Matrix multiplication: `D = alpha A B + beta D`, then a bias and GELU if asked for.
//!
//! A block, or a cluster of two, stays on its multiprocessor and computes one [tile](TileShape) of `D` after another, or a part of its sum
//! (`Order`). In each block, one thread fills a ring of stages of operands by TMA: its rows of `A`, and its share of the columns of `B` for
//! all blocks of the cluster. One or two warpgroups multiply, with one group of multiplications in flight while they wait for the next stage.
//! The finished tile leaves through shared memory, 128 bytes of each row at a time, while the first stages of the next tile arrive.
//! Where there are few tiles, their sums are [split](Split) along K, and added up in a fixed order: in device memory, or by the blocks of a cluster in shared memory.
//!
//! | barrier | between |
//! |---|---|
//! | ring | a stage is full; all warpgroups of the cluster have read it |
//! | cluster | the rings are ready; no warp arrives at them any more |
//! | warpgroup | its staging tile is written, and stored; it was stored, and may be written again; its part of a sum is written |
//!
//! | file | what it holds |
//! |---|---|
//! | `tile_shape` | the tile of a block, and how it is computed: a compile-time policy |
//! | `order` | which part of the product a cluster computes next |
//! | `arrival` | when the operands of a step are there: from the beginning, or after a wait |
//! | `place` | where the elements of matrices are: a compile-time policy |
//! | `division` | the order, the arrival and the parts of a product: a compile-time policy |
//! | `product` | the loops of a block |
//! | `stage` | what a stage of the ring holds |
//! | `tensors` | what is multiplied, and where the result goes |
//! | `split` | tiles whose sum is split along K |
//! | `cluster_sum` | the same among the blocks of a cluster, which add up in shared memory |
//! | `scattered`, `sharing` | the kernel of a product whose sum ranks share; what they do with its tiles: a compile-time policy |
//! | `gathered`, `gathering` | the kernel of what arrives while it runs; what arrives: a compile-time policy |
//! | `grouped`, `groups` | the kernel of groups, each of which has a product of its own; their order |
//! | `fusion` | what is fused after the product |
//! | `epilogue` | the kernel of what follows a product that is stored |
//! | `portable`, `panels` | 16-bit operands of any shape on any GPU; how they are copied and read |
//! | `any` | matrices of any strides, without tensor cores |
//! | `blocks` | the kernel of FP8 codes with a scale for every block |
//!
//! `A` is `[M, K]`, or `[K, M]` if `M_MAJOR`; `B` is `[N, K]`, or `[K, N]` if `N_MAJOR`; `D` is `[M, N]`. Rows are multiples of 16 bytes
//! (what TMA can address); `M`, `N` and `K` are otherwise any: elements beyond an edge are loaded as zero and not stored.
//! Accumulation is in `f32`. [`GemmGathered`] is for an operand that arrives while it runs, [`GemmScattered`] for a sum that ranks share, [`GemmGrouped`] for groups of rows, such as those of experts,
//! [`GemmBlocks`] for FP8 codes with scales of blocks. [`GemmPortable`] is for all other shapes of
//! 16-bit operands and for other GPUs, by `mma.sync`; [`GemmAny`] for 8-bit ones.

mod any;
mod arrival;
mod blocks;
mod cluster_sum;
mod division;
mod epilogue;
mod fusion;
mod gathered;
mod gathering;
mod grouped;
mod groups;
mod order;
mod panels;
mod place;
mod portable;
mod product;
mod scattered;
mod sharing;
mod split;
mod stage;
mod tensors;
mod tile_shape;

pub use any::{GEMM_ANY, GemmAny, GemmAnyArgs, Operand, OperandArgument};
pub use arrival::{Gathered, GatheredArgument, PRESENT};
pub use blocks::{BLOCK, BlockOperands, BlockOperandsArgument, GEMM_BLOCKS, GemmBlocks, GemmBlocksArgs, ScaledTile};
pub use epilogue::{EPILOGUE_ROWS, EPILOGUE_VECTOR, GEMM_EPILOGUE, GemmEpilogue, GemmEpilogueArgs};
pub(crate) use fusion::gelu_of;
pub use fusion::{Fusion, FusionArgument};
pub use gathered::{GEMM_GATHERED, GemmGathered, GemmGatheredArgs};
pub use gathering::{ByRows, BySum, Gathering};
pub use grouped::{GEMM_GROUPED, GemmGrouped, GemmGroupedArgs};
pub use panels::{OperandRows, OperandRowsArgument};
pub use portable::{GEMM_PORTABLE, GemmPortable, GemmPortableArgs, PORTABLE_COLUMNS, PORTABLE_ROWS, PairElement};
pub use scattered::{GEMM_SCATTERED, GemmScattered, GemmScatteredArgs};
pub use sharing::{Away, AwayArgument, MEMBER};
pub use split::{CLUSTER_PARTS, Split, SplitArgument};
pub use tile_shape::{
    Tile64x64, Tile64x96, Tile64x128, Tile64x144, Tile128x96, Tile128x112, Tile128x128, Tile128x176, Tile128x192, Tile128x256, TileLoops,
    TileShape,
};

use oxtile_tile::arch::MatrixElement;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::StoredElement;
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};
use oxtile_tile::warpgroup;

use tensors::Tensors;

/// Rows of a warpgroup's part of a tile, and of every box that is copied but those of `B`, which may have as many as the tile has columns.
const PART: usize = 64;

/// Rows of the boxes of `A` where it has few rows.
pub const FEW: usize = 16;
/// The most rows that are few: with more, one box of a whole part is as fast.
pub const MOST_FEW: u32 = (PART - FEW) as u32;

type Shared<S, A, B, const DEPTH: usize, O, const WIDTH: usize> = <S as TileShape>::Shared<A, B, DEPTH, O, WIDTH>;

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

impl Shape {
    /// Rows and columns of `D`, in tiles of so many rows and columns.
    #[inline(always)]
    fn tiles(&self, [rows, columns]: [u32; 2]) -> [u32; 2] {
        [self.m.div_ceil(rows), self.n.div_ceil(columns)]
    }
}

/// Multiplies. `DEPTH` elements of `A` and of `B` and `WIDTH` of `O` are 128 bytes; `B` is loaded `BOX` columns at a time; `few` is `A` again, which tiles of 64 rows take if there are at most [`MOST_FEW`], which lie along K; `old` is `D` too, the same memory: it is read where `fusion.beta` is not 0, and written where a part of the result does not leave in boxes of 64 rows of 128 bytes (parts in clusters, and tiles whose columns are no multiple of such a box's).
#[kernel(threads = S::THREADS, grid = grid, shared = Shared<S, A, B, DEPTH, O, WIDTH>, cluster = S::CLUSTER, requires = sm_90a)]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile128x256, Tile128x128], BOX = [64], M_MAJOR = [false, true], N_MAJOR = [false, true])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile64x64], BOX = [64], M_MAJOR = [false], N_MAJOR = [false, true])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile64x64], BOX = [64], M_MAJOR = [true], N_MAJOR = [false])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile64x128], BOX = [64], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile128x192, Tile64x128], BOX = [64], M_MAJOR = [true], N_MAJOR = [true])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile128x176], BOX = [176], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile64x144], BOX = [144], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile128x112], BOX = [112], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile128x96, Tile64x96], BOX = [96], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [e4m3], B = [e4m3], DEPTH = [128], O = [bf16], WIDTH = [64], S = [Tile128x112], BOX = [112], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [e4m3], B = [e4m3], DEPTH = [128], O = [bf16], WIDTH = [64], S = [Tile64x96], BOX = [96], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [f32], WIDTH = [32], S = [Tile128x256], BOX = [64], M_MAJOR = [false, true], N_MAJOR = [false, true])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [f32], WIDTH = [32], S = [Tile64x128], BOX = [64], M_MAJOR = [false], N_MAJOR = [false, true])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [f32], WIDTH = [32], S = [Tile64x128], BOX = [64], M_MAJOR = [true], N_MAJOR = [true])]
#[instances(A = [e4m3], B = [e4m3], DEPTH = [128], O = [bf16], WIDTH = [64], S = [Tile128x256, Tile128x128, Tile64x128, Tile64x64], BOX = [64], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [e4m3], B = [e4m3], DEPTH = [128], O = [f32], WIDTH = [32], S = [Tile128x256, Tile64x128], BOX = [64], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [f16], B = [f16], DEPTH = [64], O = [f16], WIDTH = [64], S = [Tile128x256], BOX = [64], M_MAJOR = [false, true], N_MAJOR = [false, true])]
#[instances(A = [f16], B = [f16], DEPTH = [64], O = [f16], WIDTH = [64], S = [Tile64x128], BOX = [64], M_MAJOR = [false], N_MAJOR = [false, true])]
#[instances(A = [e4m3], B = [e5m2], DEPTH = [128], O = [bf16], WIDTH = [64], S = [Tile128x256, Tile64x128], BOX = [64], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [e5m2], B = [e4m3], DEPTH = [128], O = [bf16], WIDTH = [64], S = [Tile128x256, Tile64x128], BOX = [64], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [e4m3], B = [e5m2], DEPTH = [128], O = [f32], WIDTH = [32], S = [Tile128x256], BOX = [64], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [e5m2], B = [e4m3], DEPTH = [128], O = [f32], WIDTH = [32], S = [Tile128x256], BOX = [64], M_MAJOR = [false], N_MAJOR = [false])]
#[expect(clippy::too_many_arguments, reason = "a launch names each matrix")]
pub fn gemm<
    A: MatrixElement,
    B: MatrixElement,
    const DEPTH: usize,
    O: StoredElement,
    const WIDTH: usize,
    S: TileLoops<BOX>,
    const BOX: usize,
    const M_MAJOR: bool,
    const N_MAJOR: bool,
>(
    a: TensorMap<A, PART, DEPTH, Swizzle128>,
    few: Option<TensorMap<A, FEW, DEPTH, Swizzle128>>,
    b: TensorMap<B, BOX, DEPTH, Swizzle128>,
    d: TensorMapMut<O, PART, WIDTH, Swizzle128>,
    old: GlobalMut<O>,
    shape: Shape,
    fusion: Fusion<O>,
    split: Split,
) {
    let tensors = Tensors { a, few, b, d, exchanged: None, old, shape, fusion, division: split };
    // A warp does so that does not ready the ring meanwhile.
    if thread::index() == warpgroup::THREADS {
        tensors.prefetch();
    }
    S::multiply::<A, B, DEPTH, O, WIDTH, _, _, M_MAJOR, N_MAJOR>(tensors);
}

fn grid<
    A: MatrixElement,
    B: MatrixElement,
    const DEPTH: usize,
    O: StoredElement,
    const WIDTH: usize,
    S: TileLoops<BOX>,
    const BOX: usize,
    const M_MAJOR: bool,
    const N_MAJOR: bool,
>(
    args: &GemmArgs<'_, A, B, DEPTH, O, WIDTH, S, BOX, M_MAJOR, N_MAJOR>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError> {
    let [rows, columns] = check_product::<A, B, DEPTH, O, WIDTH, S>(args.shape, &args.fusion)?;
    LaunchError::check_length("old", u64::from(args.shape.m) * u64::from(args.shape.n), args.old.len())?;
    if args.few.is_some() {
        LaunchError::check_limit("few", args.shape.m.into(), if M_MAJOR { 0 } else { MOST_FEW.into() })?;
    }
    if args.split.is_in_clusters() || S::COLUMNS % WIDTH as u32 != 0 {
        LaunchError::check_alignment("old", 2 * size_of::<O>() as u64, args.old.address())?;
        LaunchError::check_multiple("shape.n", 2, args.shape.n.into())?;
    }
    let steps = args.shape.k.div_ceil(DEPTH as u32);
    if S::IN_CLUSTERS && args.split.is_in_clusters() {
        return args.split.clusters(rows * columns, steps);
    }
    let work = args.split.check(rows * columns, steps, [S::CLUSTER * S::WARPGROUPS, S::PIECE])?;
    let clusters = (device.multiprocessors / S::CLUSTER).max(1);
    Ok(Grid::x(S::CLUSTER * work.min(u64::from(clusters)) as u32))
}

/// Checks what every product on `wgmma` asks for. Returns the rows and columns of clusters' tiles of one.
fn check_product<A: MatrixElement, B: MatrixElement, const DEPTH: usize, O: StoredElement, const WIDTH: usize, S: TileShape>(
    shape: Shape,
    fusion: &FusionArgument<'_, O>,
) -> Result<[u64; 2], LaunchError> {
    const {
        assert!(
            DEPTH * size_of::<A>() == 128 && DEPTH * size_of::<B>() == 128 && WIDTH * size_of::<O>() == 128,
            "boxes are 128 bytes wide"
        );
    }
    let [m, n] = [shape.m, shape.n].map(u64::from);
    fusion.check(n)?;
    let tiles = [m.div_ceil(u64::from(S::CLUSTER * S::ROWS)), n.div_ceil(u64::from(S::COLUMNS))];
    if !tiles.contains(&0) {
        LaunchError::check_at_least("shape.k", 1, shape.k.into())?;
    }
    Ok(tiles)
}
