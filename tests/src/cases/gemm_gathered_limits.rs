//! Gathered products whose flags do not come, and what their kernel refuses.

use std::time::Duration;

use oxtile::runtime::Kind;
use oxtile::symmetric::{FlagName, SymmetricError};
use oxtile::{Error, Result, Runtime};
use oxtile_kernels::gemm::*;
use oxtile_tile::launch::{DeviceLimits, Grid, Kernel, LaunchError};
use oxtile_tile::num::bf16;

use super::gathered_product::{Job, NAME, Product, Rank, Values};
use super::gemm_gathered::{ROWS, SUM};
use crate::case::{Outcome, equal, skipped, text};

/// One flag is never set. The kernel ends all the same, a cluster of which the other block waits for nothing too, and the rank and the flag are named.
pub(super) fn late(runtime: &Runtime) -> Outcome {
    if runtime.kind() == Kind::Cuda {
        skipped("gemm_gathered::a flag that does not come", &"the deadline is in steps of the emulator");
        return Ok(());
    }
    late_of::<Tile128x128>(runtime)?;
    late_of::<Tile128x256>(runtime)
}

fn late_of<S: TileLoops>(runtime: &Runtime) -> Outcome
where
    GemmGathered<bf16, bf16, 64, bf16, 64, S, ByRows, false, false>: Kernel,
{
    let job = Job { shape: [8, 8, 80], sources: 2, extent: 4, slab: 1, ..ROWS };
    let values = Values::<bf16, bf16>::new(&job);
    let kernel = text(runtime.load::<GemmGathered<bf16, bf16, 64, bf16, 64, S, ByRows, false, false>>())?;
    let rank = text(Rank::new(runtime, Duration::from_secs(30)))?;
    let waited = || -> Result<()> {
        let mut product = Product::new::<64, S, ByRows>(&rank, &job, &values, [false; 2])?;
        let me = rank.arena.rank();
        [0, 2, 3].iter().try_for_each(|flag| product.incoming.flags.set(&rank.out[0], *flag, me))?;
        rank.out[0].synchronize()?;
        product.multiply::<64, 64, S, ByRows, false, false, _>(&rank, &job, Some(64), |_, args| kernel.launch(&rank.compute, args))??;
        rank.arena.ticket(&rank.compute)?.wait()
    };
    match waited() {
        Err(Error::Symmetric(SymmetricError::Deadline { missing, flag, is_guess: false, .. }))
            if missing == [rank.arena.rank()] && flag == Some(FlagName { operation: NAME, flag: 1 }) =>
        {
            text(rank.compute.synchronize())
        }
        other => Err(format!("{other:?}")),
    }
}

/// Arguments that do not fit one another; blocks that a margin leaves.
pub(super) fn refused(runtime: &Runtime) -> Outcome {
    let limits = DeviceLimits { multiprocessors: 8, shared_bytes_per_block: 227 << 10 };
    let rank = text(Rank::new(runtime, Duration::from_secs(30)))?;
    let rows = Job { shape: [520, 520, 80], sources: 2, extent: 264, slab: 1, ..ROWS };
    let sum = Job { shape: [72, 72, 80], sources: 2, extent: 40, first: 1, ..SUM };
    type Change<'c> = &'c dyn Fn(&mut GatheredArgument<'_>);
    let by_rows = |change: Change<'_>| -> Result<Result<Grid, LaunchError>> {
        type K = GemmGathered<bf16, bf16, 64, bf16, 64, Tile128x256, ByRows, false, false>;
        let mut product = Product::new::<64, Tile128x256, ByRows>(&rank, &rows, &Values::<bf16, bf16>::new(&rows), [false; 2])?;
        product.multiply::<64, 64, Tile128x256, ByRows, false, false, _>(&rank, &rows, None, |_, mut args| {
            change(&mut args.gathered);
            K::grid(&args, &limits)
        })
    };
    let by_sum = |change: Change<'_>| -> Result<Result<Grid, LaunchError>> {
        type K = GemmGathered<bf16, bf16, 64, bf16, 64, Tile128x256, BySum, true, true>;
        let mut product = Product::new::<64, Tile128x256, BySum>(&rank, &sum, &Values::<bf16, bf16>::new(&sum), [true; 2])?;
        product.multiply::<64, 64, Tile128x256, BySum, true, true, _>(&rank, &sum, None, |_, mut args| {
            change(&mut args.gathered);
            K::grid(&args, &limits)
        })
    };
    // Nine tiles for four clusters; a margin leaves fewer of them, and at least one.
    for (margin, blocks) in [(0, 8), (1, 6), (4, 4), (8, 2), (100, 2)] {
        let grid = text(text(by_rows(&|gathered| gathered.margin = margin))?)?;
        equal("blocks", &[grid.blocks()], &[blocks])?;
    }
    let refusals: [(&str, Change<'_>); 8] = [
        ("gathered.slab", &|gathered| gathered.slab = 0),
        ("gathered.first", &|gathered| gathered.first = 1),
        ("gathered.sources", &|gathered| gathered.sources = 0),
        ("gathered.extent", &|gathered| gathered.extent = 259),
        ("gathered.extent", &|gathered| gathered.extent = u32::MAX / 2 + 1),
        ("gathered.flags", &|gathered| gathered.slab = 2),
        ("gathered.flags", &|gathered| gathered.flags = gathered.flags.slice(0, 3)),
        ("gathered.tiles", &|gathered| gathered.tiles = gathered.tiles.slice(0, 8)),
    ];
    for (argument, change) in refusals {
        refused_by(argument, text(by_rows(change))?)?;
    }
    let refusals: [(&str, Change<'_>); 3] = [
        ("gathered.first", &|gathered| gathered.first = 2),
        ("gathered.extent", &|gathered| gathered.extent = 39),
        ("gathered.flags", &|gathered| gathered.flags = gathered.flags.slice(0, 1)),
    ];
    for (argument, change) in refusals {
        refused_by(argument, text(by_sum(change))?)?;
    }
    text(text(by_sum(&|_| ()))?)?;
    text(rank.close())
}

fn refused_by(argument: &str, grid: std::result::Result<Grid, LaunchError>) -> Outcome {
    match grid {
        Err(error) if error.argument == argument => Ok(()),
        other => Err(format!("{other:?}, where `{argument}` is to be refused")),
    }
}
