//! Copies device memory, 16 bytes a thread and step: the smallest kernel, and the ceiling that
//! memory-bound kernels are held against.

use oxtile_tile::prelude::*;

const THREADS: u32 = 256;
/// Vectors a thread keeps in flight.
const UNROLL: u32 = 4;
/// Words a block copies.
const TILE: u32 = THREADS * UNROLL * 4;

/// `target[i] = source[i]`, any length.
#[kernel(threads = THREADS, grid = grid)]
pub fn copy_words(source: Global<u32>, target: GlobalMut<u32>) {
    let tile = u64::from(block::index()[0]) * u64::from(TILE);
    if tile + u64::from(TILE) <= source.len() {
        let first = tile + u64::from(thread::index() * 4);
        let step = |i: u32| first + u64::from(i * THREADS * 4);
        let vectors: [_; UNROLL as usize] = core::array::from_fn(|i| source.load_vector(step(i as u32)));
        for i in 0..UNROLL {
            target.store_vector(step(i), vectors[i as usize]);
        }
    } else {
        let mut i = tile + u64::from(thread::index());
        while i < source.len() {
            target.store(i, source.load(i));
            i += u64::from(THREADS);
        }
    }
}

fn grid(args: &CopyWordsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("target", args.source.len(), args.target.len())?;
    LaunchError::check_alignment("source", 16, args.source.address())?;
    LaunchError::check_alignment("target", 16, args.target.address())?;
    Grid::cover("source", args.source.len(), TILE)
}
