//! Matrix multiplication of an operand that arrives while the kernel runs: the second half of an all-gather and a product.
//!
//! Copy engines of other ranks put the operand into its place in chunks, and set a flag for each. The producer waits for the flag of a chunk before it
//! first loads from the chunk by TMA. Tiles are computed in the order of a list, such as that in which their rows arrive. Nothing else differs from
//! [`gemm`](fn@super::gemm), nor do the barriers: the result has the bits of a product whose tiles are not split. Where the summed dimension arrives, it has
//! those of a product of rotated operands.
//!
//! A wait that is not answered ends all later waits of its thread ([`Arrivals`](oxtile_tile::arrivals::Arrivals)). The kernel then multiplies what is in
//! memory, so that no block of a cluster waits for another in vain, and the host finds the verdict.

use core::marker::PhantomData;

use oxtile_tile::arch::MatrixElement;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::e4m3;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::StoredElement;
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};

use super::arrival::Gathered;
use super::division::Division;
use super::gathering::{ByRows, BySum, Gathering};
use super::order::TileList;
use super::sharing::Complete;
use super::split::Split;
use super::tensors::Tensors;
use super::tile_shape::{Tile128x128, Tile128x256, TileLoops, TileShape};
use super::{Fusion, PART, Shape, Shared, check_product};

/// The tiles of a list, none of them split, and what they wait for.
#[derive(Clone, Copy)]
struct InTurn<G> {
    gathered: Gathered,
    gathering: PhantomData<G>,
}

impl<G: Gathering> Division<2> for InTurn<G> {
    type Order = TileList;
    type Arrival = G::Arrival;
    type Sharing = Complete;

    #[inline(always)]
    #[track_caller]
    fn order<const CLUSTER: u32>(&self, shape: Shape, _: [u32; 2], depth: u32) -> TileList {
        TileList::new::<CLUSTER>(self.gathered.tiles, self.gathered.first, shape.k.div_ceil(depth))
    }

    #[inline(always)]
    fn arrival(&self, shape: Shape, depth: u32) -> G::Arrival {
        G::arrival(self.gathered, shape, depth)
    }

    #[inline(always)]
    fn sharing(&self, _: Shape, _: u32) -> Complete {
        Complete
    }

    #[inline(always)]
    fn split(&self) -> Split {
        Split::NONE
    }
}

/// Multiplies as [`gemm`](fn@super::gemm) does, with an operand that arrives meanwhile.
#[kernel(threads = S::THREADS, grid = grid, shared = Shared<S, A, B, DEPTH, O, WIDTH>, cluster = S::CLUSTER, requires = sm_90a)]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile128x256], G = [ByRows], M_MAJOR = [false, true], N_MAJOR = [false, true])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile128x128], G = [ByRows], M_MAJOR = [false], N_MAJOR = [false, true])]
#[instances(A = [f16], B = [f16], DEPTH = [64], O = [f16], WIDTH = [64], S = [Tile128x256], G = [ByRows], M_MAJOR = [false, true], N_MAJOR = [false, true])]
#[instances(A = [e4m3], B = [e4m3], DEPTH = [128], O = [bf16], WIDTH = [64], S = [Tile128x256], G = [ByRows], M_MAJOR = [false], N_MAJOR = [false])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [f32], WIDTH = [32], S = [Tile128x256], G = [BySum], M_MAJOR = [true], N_MAJOR = [true])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile128x256], G = [BySum], M_MAJOR = [true], N_MAJOR = [true])]
#[instances(A = [bf16], B = [bf16], DEPTH = [64], O = [bf16], WIDTH = [64], S = [Tile128x256], G = [BySum], M_MAJOR = [false], N_MAJOR = [false, true])]
#[instances(A = [f16], B = [f16], DEPTH = [64], O = [f16], WIDTH = [64], S = [Tile128x256], G = [BySum], M_MAJOR = [true], N_MAJOR = [true])]
pub fn gemm_gathered<
    A: MatrixElement,
    B: MatrixElement,
    const DEPTH: usize,
    O: StoredElement,
    const WIDTH: usize,
    S: TileLoops,
    G: Gathering,
    const M_MAJOR: bool,
    const N_MAJOR: bool,
>(
    a: TensorMap<A, PART, DEPTH, Swizzle128>,
    b: TensorMap<B, PART, DEPTH, Swizzle128>,
    d: TensorMapMut<O, PART, WIDTH, Swizzle128>,
    old: GlobalMut<O>,
    shape: Shape,
    fusion: Fusion<O>,
    gathered: Gathered,
) {
    let division = InTurn::<G> { gathered, gathering: PhantomData };
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

fn grid<
    A: MatrixElement,
    B: MatrixElement,
    const DEPTH: usize,
    O: StoredElement,
    const WIDTH: usize,
    S: TileLoops,
    G: Gathering,
    const M_MAJOR: bool,
    const N_MAJOR: bool,
>(
    args: &GemmGatheredArgs<'_, A, B, DEPTH, O, WIDTH, S, G, M_MAJOR, N_MAJOR>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError> {
    let (Shape { m, n, k }, gathered) = (args.shape, &args.gathered);
    let [rows, columns] = check_product::<A, B, DEPTH, O, WIDTH, S>(args.shape, &args.fusion)?;
    LaunchError::check_length("old", u64::from(m) * u64::from(n), args.old.len())?;
    // An entry of the list has 16 bits for each; coordinates of TMA are signed words.
    for (name, tiles, size) in [("shape.m", rows, m), ("shape.n", columns, n), ("shape.k", 0, k)] {
        LaunchError::check_limit(name, size.into(), i32::MAX as u64)?;
        LaunchError::check_limit(name, tiles, 1 << 16)?;
    }
    LaunchError::check_length("gathered.tiles", rows * columns, gathered.tiles.len())?;
    if rows * columns == 0 {
        return Ok(Grid::x(0));
    }
    let flags = G::check(gathered, args.shape, k.div_ceil(DEPTH as u32))?;
    LaunchError::check_limit("gathered.sources", flags, u32::MAX.into())?;
    LaunchError::check_length("gathered.flags", flags, gathered.flags.len())?;
    let clusters = (device.multiprocessors.saturating_sub(gathered.margin) / S::CLUSTER).max(1);
    Ok(Grid::x(S::CLUSTER * (rows * columns).min(clusters.into()) as u32))
}
