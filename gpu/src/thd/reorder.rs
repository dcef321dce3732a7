//! Rows from the order of the ranks to that of the tokens, and back.
//!
//! Floor: each row is read once and written once. A warp moves a row, whose place it finds by a binary search in `cu_seqlens_padded`.

use oxtile_tile::prelude::*;

use super::rows::{Extent, THREADS, copy_row, this_row};
use super::share::{MOST_WORLD, Share, Team};

/// Moves each row of `source` to its place in `target`, of a tensor that has the team's part of each sequence. In rank-major order the tensors of all ranks are there one after the other, in natural order the
/// tokens. Both have `extent.rows` rows, a multiple of the ranks.
///
/// Rows after the last sequence are cut into one chunk a rank. Where `cu_seqlens_padded` are no multiples of the chunks, rows without a place in the
/// tensors are left out.
#[kernel(threads = THREADS, grid = reorder_grid)]
pub fn reorder(source: Global<u32>, target: GlobalMut<u32>, cu_seqlens_padded: Global<u32>, team: Team, extent: Extent, to_natural: bool) {
    let (row, of_rank) = (this_row(), (extent.rows / team.world.max(1)).max(1));
    if row < extent.rows {
        let natural = team.natural_row(row / of_rank, row % of_rank, cu_seqlens_padded, extent.rows);
        if natural < extent.rows {
            let (from, to) = if to_natural { (row, natural) } else { (natural, row) };
            copy_row(&source, extent.start(from), &target, extent.start(to), extent.words);
        }
    }
}

/// The same for a number of each row and of each of `heads` heads: `[heads, rows]` in natural order, and `[ranks, heads, rows / ranks]` in rank-major order.
#[kernel(threads = THREADS, grid = numbers_grid)]
pub fn reorder_numbers(
    source: Global<f32>,
    target: GlobalMut<f32>,
    cu_seqlens_padded: Global<u32>,
    team: Team,
    rows: u32,
    heads: u32,
    to_natural: bool,
) {
    let number = u64::from(block::index()[0]) * u64::from(THREADS) + u64::from(thread::index());
    if number < source.len() {
        let of_rank = (rows / team.world.max(1)).max(1);
        let (line, local) = (number / u64::from(of_rank), (number % u64::from(of_rank)) as u32);
        let (rank, head) = ((line / u64::from(heads)) as u32, line % u64::from(heads));
        let natural = team.natural_row(rank, local, cu_seqlens_padded, rows);
        if natural < rows {
            let place = head * u64::from(rows) + u64::from(natural);
            let (from, to) = if to_natural { (number, place) } else { (place, number) };
            target.store(to, source.load(from));
        }
    }
}

/// `indices[i]` is the row of the whole tensor, of `rows` rows, that is row `i` in the tensor of the rank.
#[kernel(threads = THREADS, grid = indices_grid)]
pub fn partition_indices(indices: GlobalMut<u32>, cu_seqlens_padded: Global<u32>, share: Share, rows: u32) {
    let local = block::index()[0] * THREADS + thread::index();
    if u64::from(local) < indices.len() {
        indices.store(local.into(), share.natural_row(local, cu_seqlens_padded, rows).min(rows - 1));
    }
}

fn check(cu_seqlens_padded: u64, share: Share, rows: u32) -> Result<(), LaunchError> {
    LaunchError::check_at_least("cu_seqlens_padded", 1, cu_seqlens_padded)?;
    LaunchError::check_limit("cu_seqlens_padded", cu_seqlens_padded, super::MOST_ROWS.into())?;
    LaunchError::check_at_least("share.world", 1, share.world.into())?;
    LaunchError::check_limit("share.world", share.world.into(), MOST_WORLD.into())?;
    LaunchError::check_limit("share.rank", share.rank.into(), u64::from(share.world) - 1)?;
    LaunchError::check_limit("rows", rows.into(), super::MOST_ROWS.into())?;
    LaunchError::check_multiple("rows", share.world.into(), rows.into())
}

/// All ranks of all teams are a world.
fn check_team(cu_seqlens_padded: u64, team: Team, rows: u32) -> Result<(), LaunchError> {
    check(cu_seqlens_padded, team.share(0), rows)?;
    LaunchError::check_at_least("team.count", 1, team.count.into())?;
    LaunchError::check_limit("team.count", team.count.into(), (MOST_WORLD / team.world).into())
}

fn reorder_grid(args: &ReorderArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    check_team(args.cu_seqlens_padded.len(), args.team, args.extent.rows)?;
    args.extent.check("source", 1, args.source.len(), args.source.address())?;
    args.extent.check("target", 1, args.target.len(), args.target.address())?;
    args.extent.grid()
}

fn numbers_grid(args: &ReorderNumbersArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    check_team(args.cu_seqlens_padded.len(), args.team, args.rows)?;
    let numbers = u64::from(args.heads) * u64::from(args.rows);
    LaunchError::check_length("source", numbers, args.source.len())?;
    LaunchError::check_length("target", numbers, args.target.len())?;
    Grid::cover("source", numbers, THREADS)
}

fn indices_grid(args: &PartitionIndicesArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    check(args.cu_seqlens_padded.len(), args.share, args.rows)?;
    LaunchError::check_length("indices", u64::from(args.rows / args.share.world), args.indices.len())?;
    Grid::cover("indices", args.indices.len(), THREADS)
}
