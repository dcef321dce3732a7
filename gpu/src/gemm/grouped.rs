//! Products of groups by one launch: those of experts, each of which has weights of its own and as many tokens as the device says.
//!
//! By rows, `D_g = A_g B_g`: a group's rows of `A` and of `D` follow those of the group before, and `B` has a matrix for each group. By the sum, `D_g = A_g B_g` where a
//! group has elements of the sum, which follow those of the group before in both operands; `D` has a matrix for each group: the gradients of weights.
//! Then each is `alpha D + beta old`, and GELU if asked for.
//!
//! Sizes are an array in device memory. Clusters walk through it: [`GroupOrder`](super::groups::GroupOrder). The edge of the tensor maps of tokens, and of what has a
//! matrix for each group, is moved to the end of the group ([`Range`](super::place::Range)), so that no tile loads or stores what belongs to another group.
//! Nothing else differs from [`gemm`](fn@super::gemm), nor do the barriers: a group's result has the bits of a product of its own whose tiles are not split.
//!
//! Sums of sizes that are less than all tokens leave rows of `D` as they were; what they are more is not multiplied.

use oxtile_tile::arch::MatrixElement;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::e4m3;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::StoredElement;
use oxtile_tile::tensor_map::{MAP_ROWS, TensorMap, TensorMapMut};

use super::groups::Groups;
use super::tensors::Tensors;
use super::tile_shape::{Tile64x128, Tile128x128, Tile128x256, TileLoops, TileShape};
use super::{Fusion, PART, Shape, Shared, check_product};

/// Multiplies each group. `shape` is that of all tokens together, `D` of one group if `BY_SUM`. Maps are those of [`Range`](super::place::Range).
#[kernel(threads = S::THREADS, grid = grid, shared = Shared<S, A, B, DEPTH, O, WIDTH>, cluster = S::CLUSTER, requires = sm_90a)]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile128x128, Tile64x128], BY_SUM = [false], M_MAJOR = [false], N_MAJOR = [false, true])]
#[instances(A = [e4m3], B = [e4m3], DEPTH = [128], O = [bf16], WIDTH = [64], S = [Tile128x128, Tile64x128], BY_SUM = [false], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [f32], WIDTH = [32], S = [Tile128x256, Tile128x128], BY_SUM = [true], M_MAJOR = [true], N_MAJOR = [true])]
pub fn gemm_grouped<
    A: MatrixElement,
    B: MatrixElement,
    const DEPTH: usize,
    O: StoredElement,
    const WIDTH: usize,
    S: TileLoops,
    const BY_SUM: bool,
    const M_MAJOR: bool,
    const N_MAJOR: bool,
>(
    a: TensorMap<A, PART, DEPTH, Swizzle128, 4>,
    b: TensorMap<B, PART, DEPTH, Swizzle128, 4>,
    d: TensorMapMut<O, PART, WIDTH, Swizzle128, 4>,
    old: GlobalMut<O>,
    shape: Shape,
    fusion: Fusion<O>,
    sizes: Global<u32>,
) {
    let division = Groups::<BY_SUM> { sizes, weights: weights::<BY_SUM, N_MAJOR>(shape) };
    S::multiply::<A, B, DEPTH, O, WIDTH, _, _, M_MAJOR, N_MAJOR>(Tensors {
        a,
        few: None,
        b,
        d,
        exchanged: None,
        old,
        shape,
        fusion,
        division,
    });
}

/// Rows of a group's weights as they are stored: of `D` by the sum, else of `B`.
#[inline(always)]
fn weights<const BY_SUM: bool, const N_MAJOR: bool>(shape: Shape) -> u32 {
    match (BY_SUM, N_MAJOR) {
        (true, _) => shape.m,
        (false, true) => shape.k,
        (false, false) => shape.n,
    }
}

fn grid<
    A: MatrixElement,
    B: MatrixElement,
    const DEPTH: usize,
    O: StoredElement,
    const WIDTH: usize,
    S: TileLoops,
    const BY_SUM: bool,
    const M_MAJOR: bool,
    const N_MAJOR: bool,
>(
    args: &GemmGroupedArgs<'_, A, B, DEPTH, O, WIDTH, S, BY_SUM, M_MAJOR, N_MAJOR>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError> {
    const { assert!(M_MAJOR == BY_SUM && (N_MAJOR || !BY_SUM), "tokens are rows of the matrices that have them") };
    let (shape, groups) = (args.shape, args.sizes.len());
    let [rows, columns] = check_product::<A, B, DEPTH, O, WIDTH, S>(shape, &args.fusion)?;
    let result = u64::from(shape.m) * u64::from(shape.n);
    LaunchError::check_length("old", result.saturating_mul(if BY_SUM { groups } else { 1 }), args.old.len())?;
    // The map's edge is moved from its last row; coordinates of TMA are signed words.
    for (name, size) in [("shape.m", shape.m), ("shape.n", shape.n), ("shape.k", shape.k)] {
        LaunchError::check_limit(name, size.into(), MAP_ROWS.into())?;
    }
    LaunchError::check_limit("sizes", groups.saturating_mul(weights::<BY_SUM, N_MAJOR>(shape).into()), i32::MAX as u64)?;
    // By rows, the last tile of each group may have fewer rows.
    let tiles = (if BY_SUM {
        rows.saturating_mul(groups)
    } else if groups == 0 {
        0
    } else {
        rows + groups
    })
    .saturating_mul(columns);
    LaunchError::check_limit("sizes", tiles, i32::MAX as u64)?;
    let clusters = (device.multiprocessors / S::CLUSTER).max(1);
    Ok(Grid::x(S::CLUSTER * tiles.min(clusters.into()) as u32))
}
