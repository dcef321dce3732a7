//! Identity, loads and stores, shared memory, atomics, acquire and release.

use oxtile_tile::launch::Problem;
use oxtile_tile::prelude::*;

use crate::THREADS;

/// Blocks of the kernels with more than one.
pub const BLOCKS: u32 = 5;

/// Six words a thread: thread, lane, warp, block, blocks, threads.
#[kernel(threads = THREADS, grid = identity_grid)]
pub fn identity(output: GlobalMut<u32>) {
    let [block, ..] = block::index();
    let first = u64::from(block * THREADS + thread::index()) * 6;
    let words = [thread::index(), thread::lane(), thread::warp(), block, block::count()[0], block::threads()];
    for (i, word) in words.into_iter().enumerate() {
        output.store(first + i as u64, word);
    }
}

fn identity_grid(args: &IdentityArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", u64::from(BLOCKS * THREADS * 6), args.output.len())?;
    Ok(Grid::x(BLOCKS))
}

/// Copies 64 bytes a thread, with an access of every width in turn, read-only and plain.
#[kernel(threads = THREADS, grid = loads_grid)]
pub fn loads_and_stores(bytes: Global<u8>, halves: Global<u16>, words: Global<u32>, longs: Global<u64>, output: GlobalMut<u32>) {
    let t = u64::from(thread::index());
    let row = t * 16;
    let lasting = words.lasting();
    // Bytes that two loads agree on.
    let pair = |[a, b]: [u32; 2], [c, d]: [u32; 2]| [a & c, b & d];
    output.store(row, u32::from(bytes.load(t)));
    output.store(row + 1, u32::from(halves.load(t)));
    output.store_pair(row + 2, pair(words.load_pair(2 * t), lasting.load_pair(2 * t)));
    output.store_pair(row + 2, output.load_pair(row + 2));
    let long = longs.load(t);
    output.store_pair(row + 4, [long as u32, (long >> 32) as u32]);
    output.store(row + 6, (words.load_word(t) & lasting.load_word(t)) ^ output.load(row));
    output.store(row + 7, halves.load_word(2 * t));
    let (plain, lasting) = (words.load_vector(4 * t).words(), lasting.load_vector(4 * t).words());
    output.store_vector(row + 8, Vector::from_words(core::array::from_fn(|i| plain[i] & lasting[i])));
    let again: Vector<u32> = output.load_vector(row + 8);
    output.store_vector(row + 12, Vector::from_words(again.words().map(|w| !w)));
}

fn loads_grid(args: &LoadsAndStoresArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", u64::from(THREADS * 16), args.output.len())?;
    LaunchError::check_length("words", u64::from(THREADS * 4), args.words.len())?;
    LaunchError::check_length("bytes", u64::from(THREADS), args.bytes.len())?;
    LaunchError::check_length("halves", u64::from(THREADS * 2), args.halves.len())?;
    LaunchError::check_length("longs", u64::from(THREADS), args.longs.len())?;
    Ok(Grid::x(1))
}

#[derive(SharedStorage)]
struct Arena {
    bytes: SharedArray<u8, 128>,
    words: SharedArray<u32, 128>,
    vectors: SharedArray<u32, 512>,
}

/// Passes words through shared memory of every width, each thread reading a neighbour's.
#[kernel(threads = THREADS, grid = shared_grid, shared = Arena)]
pub fn shared_memory(input: Global<u32>, output: GlobalMut<u32>) {
    let (arena, t) = (Arena::claim(), thread::index());
    let word = input.load(u64::from(t));
    arena.bytes.store(t, word as u8);
    arena.words.store(t, word);
    arena.vectors.store_vector(4 * t, Vector::from_words([word, word + 1, word + 2, word + 3]));
    block::sync();
    let other = (t + 37) % THREADS;
    let vector = arena.vectors.load_vector(4 * other);
    let sum = vector.words().into_iter().fold(0u32, u32::wrapping_add);
    output.store(u64::from(3 * t), u32::from(arena.bytes.load(other)));
    output.store(u64::from(3 * t + 1), arena.words.load(other));
    output.store(u64::from(3 * t + 2), sum);
}

fn shared_grid(args: &SharedMemoryArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(THREADS), args.input.len())?;
    LaunchError::check_length("output", u64::from(3 * THREADS), args.output.len())?;
    Ok(Grid::x(1))
}

/// Raises `maximum[0]`, adds to `sums[0]` and to the exactly representable `floats[0]`, from all threads.
#[kernel(threads = THREADS, grid = atomics_grid)]
pub fn atomics(input: Global<u32>, maximum: GlobalMut<f32>, sums: GlobalMut<u32>, longs: GlobalMut<u64>, floats: GlobalMut<f32>) {
    let word = input.load(u64::from(block::index()[0] * THREADS + thread::index()));
    atomic::max_non_negative(&maximum, 0, (word >> 8) as f32);
    atomic::add_u32(&sums, 0, word);
    atomic::add_u64(&longs, 0, u64::from(word) << 8);
    atomic::add_f32(&floats, 0, (word % 64) as f32);
}

fn atomics_grid(args: &AtomicsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(BLOCKS * THREADS), args.input.len())?;
    Ok(Grid::x(BLOCKS))
}

/// Raises `output[word % 8]` to `word`, from all threads.
#[kernel(threads = THREADS, grid = maxima_grid)]
pub fn maxima(input: Global<u32>, output: GlobalMut<u32>) {
    let word = input.load(u64::from(block::index()[0] * THREADS + thread::index()));
    atomic::max_u32(&output, u64::from(word % 8), word);
}

fn maxima_grid(args: &MaximaArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(BLOCKS * THREADS), args.input.len())?;
    LaunchError::check_length("output", 8, args.output.len())?;
    Ok(Grid::x(BLOCKS))
}

/// The last-block pattern: every block writes its sum, the block with the last ticket adds them up.
#[kernel(threads = THREADS, grid = last_block_grid)]
pub fn last_block(input: Global<u32>, partial: GlobalMut<u32>, ticket: GlobalMut<u32>, output: GlobalMut<u32>) {
    let [block, ..] = block::index();
    if thread::index() != 0 {
        return;
    }
    let mut sum = 0u32;
    for i in 0..THREADS {
        sum = sum.wrapping_add(input.load(u64::from(block * THREADS + i)));
    }
    partial.store(u64::from(block), sum);
    if atomic::take_ticket(&ticket, 0) == BLOCKS - 1 {
        let mut total = 0u32;
        for other in 0..BLOCKS {
            total = total.wrapping_add(partial.load(u64::from(other)));
        }
        output.store(0, total);
    }
}

fn last_block_grid(args: &LastBlockArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("partial", u64::from(BLOCKS), args.partial.len())?;
    LaunchError::check_length("input", u64::from(BLOCKS * THREADS), args.input.len())?;
    Ok(Grid::x(BLOCKS))
}

/// Release and acquire: thread 0 writes a message and sets a flag, thread 64 waits for it (bounded) and reads.
#[kernel(threads = THREADS, grid = message_grid)]
pub fn message(input: Global<u32>, mailbox: GlobalMut<u32>, flag: GlobalMut<u32>, output: GlobalMut<u32>) {
    if thread::index() == 0 {
        mailbox.store(0, input.load(0));
        atomic::store_release(&flag, 0, 1);
    }
    if thread::index() == 64 {
        let mut spins = 0;
        while atomic::load_acquire(&flag, 0) == 0 {
            thread::sleep(100);
            spins += 1;
            if spins > 100_000 {
                thread::trap();
            }
        }
        output.store(0, mailbox.load(0));
    }
}

fn message_grid(args: &MessageArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    if args.input.is_empty() {
        return Err(LaunchError { argument: "input", problem: Problem::Length { expected: 1, found: 0 } });
    }
    Ok(Grid::x(1))
}
