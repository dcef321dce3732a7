//! Matrix multiplication whose sum ranks share, and of which each gets some rows: a product and a reduce-scatter in one launch a rank.
//!
//! Tiles are computed in the order of a list. Those of other ranks' rows leave as soon as they are there: TMA stores them at their owner, over the link, or where a copy engine puts them from, while the next tile is multiplied. To those of own rows what the others have
//! brought here is [added](Partial). The rest is [`gemm`](fn@super::gemm)'s: roles, barriers and what is fused.
//!
//! The list is such that no rank waits in a circle: every tile that leaves comes before those own tiles of other ranks that wait for it, by its number in the lists, which are alike; all blocks are resident. With own tiles alone in the list, and no place
//! for others, parts may come by copy engines.
//!
//! | barrier | between |
//! |---|---|
//! | those of [`gemm`](mod@super) | as there; a stage holds operands, or half of the parts that are added to a tile |
//! | flag of a panel and source | the last tile of the panel has landed; the owner loads parts of it |
//!
//! A wait that is not answered ends all later waits of its thread ([`Arrivals`](oxtile_tile::arrivals::Arrivals)): the kernel adds what is in memory, and the host finds the verdict. What leaves is right all the same.
//!
//! Floor: the product, or the bytes that leave at the rate of the link.

use oxtile_tile::arch::MatrixElement;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::StoredElement;
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};

use super::arrival::{Gathered, Present};
use super::division::Division;
use super::order::TileList;
use super::sharing::{Away, MEMBER, Partial};
use super::split::Split;
use super::tensors::{Exchanged, Tensors};
use super::tile_shape::{Tile128x128, Tile128x256, TileLoops, TileShape};
use super::{Fusion, PART, Shape, check_product};

/// Elements of 16 bits in 128 bytes.
const DEPTH: usize = 64;

/// The tiles of a list, and who owns them.
#[derive(Clone, Copy)]
struct ByOwner {
    gathered: Gathered,
    away: Option<Away>,
}

impl Division<2> for ByOwner {
    type Order = TileList;
    type Arrival = Present;
    type Sharing = Partial;

    #[inline(always)]
    #[track_caller]
    fn order<const CLUSTER: u32>(&self, shape: Shape, _: [u32; 2], depth: u32) -> TileList {
        TileList::new::<CLUSTER>(self.gathered.tiles, 0, shape.k.div_ceil(depth))
    }

    #[inline(always)]
    fn arrival(&self, _: Shape, _: u32) -> Present {
        Present
    }

    #[inline(always)]
    fn sharing(&self, shape: Shape, columns: u32) -> Partial {
        Partial::new(self.gathered, self.away, shape, columns)
    }

    #[inline(always)]
    fn split(&self) -> Split {
        Split::NONE
    }
}

/// Multiplies `a`, of all rows, by `b`. `d` are the own rows of the result, `parts` what arrives here, `[sources, own rows, columns]`, and `others` where tiles [go](Away) that leave, matrices of rows of as many columns, if any do.
#[kernel(threads = S::THREADS, grid = grid, shared = super::Shared<S, T, T, DEPTH, T, DEPTH>, cluster = S::CLUSTER, requires = sm_90a)]
#[instances(T = [bf16], S = [Tile128x256, Tile128x128], N_MAJOR = [false, true])]
#[instances(T = [f16], S = [Tile128x256], N_MAJOR = [false, true])]
#[expect(clippy::too_many_arguments, reason = "a launch names each matrix")]
pub fn gemm_scattered<T: MatrixElement + StoredElement, S: TileLoops, const N_MAJOR: bool>(
    a: TensorMap<T, PART, DEPTH, Swizzle128>,
    b: TensorMap<T, PART, DEPTH, Swizzle128>,
    d: TensorMapMut<T, PART, DEPTH, Swizzle128>,
    parts: Option<TensorMap<T, PART, DEPTH, Swizzle128, 3>>,
    others: Option<TensorMapMut<T, PART, DEPTH, Swizzle128, 3>>,
    shape: Shape,
    fusion: Fusion<T>,
    gathered: Gathered,
    away: Option<Away>,
) {
    const {
        assert!(
            S::WARPGROUPS * PART as u32 == S::ROWS && S::COLUMNS.is_multiple_of(S::ROWS),
            "warpgroups lie one above the other, and share the panels of a stage"
        )
    };
    let division = ByOwner { gathered, away };
    // SAFETY: no element is in it. What the result was is a part, if it is added.
    let old = unsafe { GlobalMut::from_raw_parts(0, 0) };
    let exchanged = Some(Exchanged { parts, others });
    let tensors = Tensors { a, few: None, b, d, exchanged, old, shape, fusion, division };
    S::multiply::<T, T, DEPTH, T, DEPTH, _, _, false, N_MAJOR>(tensors);
}

fn grid<T: MatrixElement + StoredElement, S: TileLoops, const N_MAJOR: bool>(
    args: &GemmScatteredArgs<'_, T, S, N_MAJOR>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError> {
    let GemmScatteredArgs { parts, others, shape, fusion, gathered, away, .. } = args;
    let [rows, columns] = check_product::<T, T, DEPTH, T, DEPTH, S>(*shape, fusion)?;
    LaunchError::check_limit("fusion.beta", u64::from(fusion.beta != 0.0), 0)?;
    LaunchError::check_limit("gathered.first", gathered.first.into(), 0)?;
    LaunchError::check_at_least("gathered.extent", 1, gathered.extent.into())?;
    LaunchError::check_at_least("parts", (gathered.sources > 0).into(), parts.is_some().into())?;
    // An entry of the list has 16 bits for each; coordinates of TMA are signed words.
    for (name, tiles, size) in [("shape.m", rows, shape.m), ("shape.n", columns, shape.n), ("shape.k", 0, shape.k)] {
        LaunchError::check_limit(name, size.into(), i32::MAX as u64)?;
        LaunchError::check_limit(name, tiles, 1 << 16)?;
    }
    LaunchError::check_limit("gathered.tiles", gathered.tiles.len(), rows * columns)?;
    LaunchError::check_at_least("away", others.is_some().into(), away.is_some().into())?;
    let own = match away {
        Some(away) => {
            let (members, unit) = (away.members.len() / MEMBER, u64::from(S::CLUSTER * S::ROWS));
            LaunchError::check_multiple("away.members", MEMBER, away.members.len())?;
            LaunchError::check_multiple("away.shard", unit, away.shard.into())?;
            LaunchError::check_length("away.members", u64::from(shape.m), members * u64::from(away.shard))?;
            LaunchError::check_at_least("away.members", u64::from(away.me) + 1, members)?;
            LaunchError::check_multiple("gathered.extent", unit, gathered.extent.into())?;
            LaunchError::check_length("away.landed", members * u64::from(away.shard.div_ceil(gathered.extent)), away.landed.len())?;
            away.shard
        }
        None => {
            LaunchError::check_length("gathered.tiles", rows * columns, gathered.tiles.len())?;
            shape.m
        }
    };
    if gathered.tiles.is_empty() {
        return Ok(Grid::x(0));
    }
    let flags = u64::from(own.div_ceil(gathered.extent)) * u64::from(gathered.sources);
    LaunchError::check_limit("gathered.sources", flags, u32::MAX.into())?;
    LaunchError::check_length("gathered.flags", flags, gathered.flags.len())?;
    let clusters = (device.multiprocessors.saturating_sub(gathered.margin) / S::CLUSTER).max(1);
    Ok(Grid::x(S::CLUSTER * gathered.tiles.len().min(clusters.into()) as u32))
}
