//! Halves of the sequences that a rank has, and their valid rows.
//!
//! A zigzag partition gives a rank two chunks of each sequence: its early half, and after it its late one. A tensor of halves has one of them of each
//! sequence. Floor: each row that is copied is read once and written once. A warp copies a row.

use oxtile_tile::prelude::*;

use super::rows::{Extent, THREADS, copy_row, this_row};
use super::share::{MOST_WORLD, Starts, last_not_after};

/// Row `t` of `half`, `[groups, extent.rows, extent.words]`, is the row of the same half of the same sequence in `whole`, `[groups, 2 extent.rows,
/// extent.words]`, the tensor of a rank of `world`. Rows after the last sequence stay as they are.
#[kernel(threads = THREADS, grid = read_half_grid)]
pub fn read_half(whole: Global<u32>, half: GlobalMut<u32>, cu_seqlens_padded: Global<u32>, world: u32, extent: Extent, is_late: bool) {
    let (row, group) = (this_row(), block::index()[1]);
    if row < extent.rows
        && let Some(sequence) = (Starts { cu_seqlens_padded, divisor: 2 * world }).find(row)
    {
        // The early half comes after the early and late halves of the sequences before, the late one after the sequence's early half too.
        let from = row + if is_late { sequence.end } else { sequence.start };
        if from < 2 * extent.rows {
            let (of_whole, of_half) = (2 * u64::from(group) * extent.start(extent.rows), u64::from(group) * extent.start(extent.rows));
            copy_row(&whole, of_whole + extent.start(from), &half, of_half + extent.start(row), extent.words);
        }
    }
}

/// Copies the valid rows of each sequence to the same rows of `target`; its other rows stay as they are.
///
/// Sequence `b` has the rows from `offsets[b]` on, as many as `ends[b + 1] - ends[b]`. Offsets rise.
#[kernel(threads = THREADS, grid = copy_valid_grid)]
pub fn copy_valid(source: Global<u32>, target: GlobalMut<u32>, ends: Global<u32>, offsets: Global<u32>, extent: Extent) {
    let (row, sequences) = (this_row(), (ends.len() - 1) as u32);
    if row < extent.rows && sequences > 0 {
        let number = u64::from(last_not_after(row, sequences, |number| offsets.load(number.into())));
        let (offset, length) = (offsets.load(number), ends.load(number + 1).saturating_sub(ends.load(number)));
        // A row before the first sequence is none of its rows.
        if row >= offset && row - offset < length {
            copy_row(&source, extent.start(row), &target, extent.start(row), extent.words);
        }
    }
}

fn read_half_grid(args: &ReadHalfArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let Extent { rows, words } = args.extent;
    LaunchError::check_limit("extent.rows", rows.into(), super::MOST_ROWS.into())?;
    LaunchError::check_at_least("cu_seqlens_padded", 1, args.cu_seqlens_padded.len())?;
    LaunchError::check_limit("cu_seqlens_padded", args.cu_seqlens_padded.len(), super::MOST_ROWS.into())?;
    LaunchError::check_at_least("world", 1, args.world.into())?;
    LaunchError::check_limit("world", args.world.into(), MOST_WORLD.into())?;
    let group = u64::from(rows) * u64::from(words);
    let groups = args.half.len().checked_div(group).unwrap_or(0);
    args.extent.check("half", groups, args.half.len(), args.half.address())?;
    args.extent.check("whole", 2 * groups, args.whole.len(), args.whole.address())?;
    LaunchError::check_limit("groups", groups, u16::MAX.into())?;
    Ok(Grid { y: groups as u32, ..args.extent.grid()? })
}

fn copy_valid_grid(args: &CopyValidArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_at_least("ends", 1, args.ends.len())?;
    LaunchError::check_limit("ends", args.ends.len(), super::MOST_ROWS.into())?;
    LaunchError::check_at_least("offsets", args.ends.len() - 1, args.offsets.len())?;
    args.extent.check("source", 1, args.source.len(), args.source.address())?;
    args.extent.check("target", 1, args.target.len(), args.target.address())?;
    args.extent.grid()
}
