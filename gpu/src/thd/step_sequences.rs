//! The sequences of the attention launches of a pass, made on the device from `cu_seqlens`: no host waits for it.
//!
//! A block makes a set, a thread a sequence of it at a time. Each packed sequence is there twice in a set: the queries of the rank's late chunks come
//! first, those of the early chunks after them. The sums of their lengths are scanned by warps, then over the warps' totals.
//!
//! | barrier | waits for |
//! |---|---|
//! | first `block::sync` | the totals of the piece before are read |
//! | second `block::sync` | the totals of all warps |

use oxtile_tile::prelude::*;

use super::share::{MOST_ROWS, MOST_WORLD, Packed, Share};
use super::steps::{Bounds, Half, Sequence, StepKeys, Steps};
use crate::attention::FAR;

const THREADS: u32 = 256;
const WARPS: u32 = THREADS / warp::LANES;
/// What is summed of each sequence: queries and keys.
const SUMS: u32 = 2;

#[derive(SharedStorage)]
struct Shared {
    /// The totals of each warp.
    totals: SharedArray<u32, { (SUMS * WARPS) as usize }>,
}

/// Writes the sets of [`StepKeys`] number `kind` for the rank of `share`, each of `2 B` sequences if `B` are packed: first those of the late chunks, then those of the early ones.
///
/// `arrays`, `[sets, 4, 2 B + 1]`, has `query_ends`, `key_ends`, `query_offsets` and `key_offsets` of each set, and `diagonals`, `[sets, 2 B]`, what is
/// called so, all as attention's `Sequences` takes them. The last elements of the offsets are the rows of all sequences in the rank's tensor, of keys in
/// the set's tensor.
///
/// Whatever `cu_seqlens` hold, nothing wraps: rows that are in no whole chunk are cut, sums stay at `u32::MAX`.
#[kernel(threads = THREADS, grid = grid, shared = Shared)]
pub fn step_sequences(
    queries: Packed,
    keys: Packed,
    arrays: GlobalMut<u32>,
    diagonals: GlobalMut<i32>,
    kind: u32,
    share: Share,
    bounds: Bounds,
) {
    let steps = Steps { keys: StepKeys::from_number(kind), share, bounds };
    let (set, this_thread) = (block::index()[0], thread::index());
    let batches = (queries.cu_seqlens.len() - 1) as u32;
    let sequences = 2 * batches;
    let row = u64::from(sequences) + 1;
    let [query_ends, key_ends, query_offsets, key_offsets] = [0, 1, 2, 3].map(|array| (4 * u64::from(set) + array) * row);
    let mut before = [0; SUMS as usize];
    let mut first = 0;
    while first < sequences {
        let number = first + this_thread;
        let is_there = number < sequences;
        let sequence = if is_there {
            let (half, batch) = if number < batches { (Half::Late, number) } else { (Half::Early, number - batches) };
            steps.sequence(set, half, queries.rows(batch), keys.rows(batch))
        } else {
            Sequence::default()
        };
        let [ends, totals] = scan([sequence.queries, sequence.keys], before);
        if is_there {
            let at = u64::from(number);
            arrays.store(query_ends + at + 1, ends[0]);
            arrays.store(key_ends + at + 1, ends[1]);
            arrays.store(query_offsets + at, sequence.query_offset);
            arrays.store(key_offsets + at, sequence.key_offset);
            diagonals.store(u64::from(set) * u64::from(sequences) + at, sequence.diagonal);
        }
        before = totals;
        first += THREADS;
    }
    if this_thread == 0 {
        let (world, is_whole) = (share.world.max(1), matches!(steps.keys, StepKeys::Whole));
        arrays.store(query_ends, 0);
        arrays.store(key_ends, 0);
        arrays.store(query_offsets + row - 1, queries.end() / world);
        arrays.store(key_offsets + row - 1, if is_whole { keys.end() } else { keys.end() / world });
    }
}

/// The running sums of the threads' values, from `before` on, and the sum of all.
#[inline(always)]
fn scan(values: [u32; SUMS as usize], before: [u32; SUMS as usize]) -> [[u32; SUMS as usize]; 2] {
    let (totals, lane, this_warp) = (Shared::claim().totals, thread::lane(), thread::warp());
    let of_warp = values.map(|mut sum| {
        for step in [1, 2, 4, 8, 16] {
            let other = warp::shuffle_up(sum, step);
            sum = sum.saturating_add(if lane >= step { other } else { 0 });
        }
        sum
    });
    block::sync();
    if lane == warp::LANES - 1 {
        totals.store(SUMS * this_warp, of_warp[0]);
        totals.store(SUMS * this_warp + 1, of_warp[1]);
    }
    block::sync();
    let (mut earlier, mut all) = (before, before);
    for other in 0..WARPS {
        let total = [totals.load(SUMS * other), totals.load(SUMS * other + 1)];
        let seen = if other < this_warp { total } else { [0; SUMS as usize] };
        earlier = [earlier[0].saturating_add(seen[0]), earlier[1].saturating_add(seen[1])];
        all = [all[0].saturating_add(total[0]), all[1].saturating_add(total[1])];
    }
    [[earlier[0].saturating_add(of_warp[0]), earlier[1].saturating_add(of_warp[1])], all]
}

fn grid(args: &StepSequencesArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (share, ends) = (args.share, args.queries.cu_seqlens.len());
    LaunchError::check_at_least("queries.cu_seqlens", 1, ends)?;
    LaunchError::check_limit("queries.cu_seqlens", ends, MOST_ROWS.into())?;
    for (name, array) in [
        ("queries.cu_seqlens_padded", &args.queries.cu_seqlens_padded),
        ("keys.cu_seqlens", &args.keys.cu_seqlens),
        ("keys.cu_seqlens_padded", &args.keys.cu_seqlens_padded),
    ] {
        LaunchError::check_length(name, ends, array.len())?;
    }
    LaunchError::check_limit("kind", args.kind.into(), StepKeys::Whole as u64)?;
    LaunchError::check_at_least("share.world", 1, share.world.into())?;
    LaunchError::check_limit("share.world", share.world.into(), MOST_WORLD.into())?;
    LaunchError::check_limit("share.rank", share.rank.into(), u64::from(share.world) - 1)?;
    for (name, bound) in [("bounds.left", args.bounds.left), ("bounds.right", args.bounds.right)] {
        // A negative bound is a large number here.
        LaunchError::check_limit(name, u64::from(bound.cast_unsigned()), FAR as u64)?;
    }
    let steps = Steps { keys: StepKeys::from_number(args.kind), share, bounds: args.bounds };
    let (sets, sequences) = (u64::from(steps.sets()), 2 * (ends - 1));
    LaunchError::check_length("arrays", 4 * sets * (sequences + 1), args.arrays.len())?;
    LaunchError::check_length("diagonals", sets * sequences, args.diagonals.len())?;
    Ok(Grid::x(steps.sets()))
}
