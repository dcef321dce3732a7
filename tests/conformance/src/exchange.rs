//! Shuffles, votes, reductions, barriers.

use oxtile_tile::block::ReduceStorage;
use oxtile_tile::prelude::*;
use oxtile_tile::sync::NamedBarrier;

use crate::THREADS;

/// Words a thread that [`shuffles`](fn@shuffles) writes.
pub const SHUFFLE_WORDS: u32 = 9;

/// Every kind of shuffle, with near and far lanes.
#[kernel(threads = THREADS, grid = shuffles_grid)]
pub fn shuffles(input: Global<u32>, output: GlobalMut<u32>) {
    let word = input.load(u64::from(thread::index()));
    let results = [
        warp::shuffle_xor(word, 1),
        warp::shuffle_xor(word, 16),
        warp::shuffle(word, 0),
        warp::shuffle(word, (thread::lane() * 7) % 32),
        warp::shuffle_up(word, 1),
        warp::shuffle_up(word, 31),
        warp::shuffle_down(word, 1),
        warp::shuffle_down(word, 31),
        warp::shuffle_xor(f32::from_bits(word), 3).to_bits(),
    ];
    for (i, result) in results.into_iter().enumerate() {
        output.store(u64::from(thread::index() * SHUFFLE_WORDS) + i as u64, result);
    }
}

fn shuffles_grid(args: &ShufflesArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(THREADS), args.input.len())?;
    LaunchError::check_length("output", u64::from(THREADS * SHUFFLE_WORDS), args.output.len())?;
    Ok(Grid::x(1))
}

/// Votes on a bit of the input, on nothing and on everything: four words a thread.
#[kernel(threads = THREADS, grid = votes_grid)]
pub fn votes(input: Global<u32>, output: GlobalMut<u32>) {
    let word = input.load(u64::from(thread::index()));
    let results = [
        u32::from(warp::any(word & 0xff == 0)),
        u32::from(warp::all(word & 0xff != 0)),
        warp::ballot(word & 1 == 1),
        warp::ballot(false) | u32::from(warp::all(true)),
    ];
    for (i, result) in results.into_iter().enumerate() {
        output.store(u64::from(thread::index() * 4) + i as u64, result);
    }
}

fn votes_grid(args: &VotesArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(THREADS), args.input.len())?;
    LaunchError::check_length("output", u64::from(4 * THREADS), args.output.len())?;
    Ok(Grid::x(1))
}

/// Maximum, integer sum and float sum over each warp: three words a thread.
#[kernel(threads = THREADS, grid = reductions_grid)]
pub fn warp_reductions(input: Global<u32>, output: GlobalMut<u32>) {
    let word = input.load(u64::from(thread::index()));
    let first = u64::from(thread::index() * 3);
    output.store(first, warp::max_u32(word));
    output.store(first + 1, warp::sum_u32(word));
    output.store(first + 2, warp::sum_f32((word >> 8) as f32 * 0.001).to_bits());
}

fn reductions_grid(args: &WarpReductionsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(THREADS), args.input.len())?;
    LaunchError::check_length("output", u64::from(3 * THREADS), args.output.len())?;
    Ok(Grid::x(1))
}

#[derive(SharedStorage)]
struct Reduce {
    reduce: ReduceStorage,
}

/// The block's maximum, twice through the same storage.
#[kernel(threads = THREADS, grid = maximum_grid, shared = Reduce)]
pub fn block_maximum(input: Global<u32>, output: GlobalMut<u32>) {
    let word = input.load(u64::from(thread::index()));
    let storage = Reduce::claim().reduce;
    let largest = block::max_u32(word, storage);
    block::sync();
    let smallest = !block::max_u32(!word, storage);
    if thread::index() == 0 {
        output.store_pair(0, [largest, smallest]);
    }
}

fn maximum_grid(args: &BlockMaximumArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(THREADS), args.input.len())?;
    LaunchError::check_length("output", 2, args.output.len())?;
    Ok(Grid::x(1))
}

#[derive(SharedStorage)]
struct Ring {
    cell: SharedArray<u32, 64>,
}

const FILLED: NamedBarrier = NamedBarrier::new(1, THREADS);
const DRAINED: NamedBarrier = NamedBarrier::new(2, THREADS);
const ROUNDS: u32 = 4;

/// Two warps hand words to the other two through one cell each, by a pair of named barriers.
#[kernel(threads = THREADS, grid = barriers_grid, shared = Ring)]
pub fn named_barriers(input: Global<u32>, output: GlobalMut<u32>) {
    let (cell, t) = (Ring::claim().cell, thread::index());
    if t < 64 {
        for round in 0..ROUNDS {
            if round > 0 {
                DRAINED.sync();
            }
            cell.store(t, input.load(u64::from(t)).wrapping_mul(round + 1));
            FILLED.arrive();
        }
    } else {
        for round in 0..ROUNDS {
            FILLED.sync();
            output.store(u64::from(round * 64 + t - 64), cell.load(127 - t));
            if round + 1 < ROUNDS {
                DRAINED.arrive();
            }
        }
    }
}

fn barriers_grid(args: &NamedBarriersArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(THREADS), args.input.len())?;
    LaunchError::check_length("output", u64::from(64 * ROUNDS), args.output.len())?;
    Ok(Grid::x(1))
}
