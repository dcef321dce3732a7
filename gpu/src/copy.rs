//! Copies device memory, 16 bytes a thread: the smallest kernel, and the ceiling that
//! memory-bound kernels are held against.

use oxtile_tile::prelude::*;

const THREADS: u32 = 256;
/// Words a block copies: one vector a thread. On an H200 that equals the driver's own copy; two or more
/// vectors a thread, whose writes then lie further apart, lose 4 to 6 %.
const TILE: u32 = THREADS * 4;

/// `target[i] = source[i]`, any length.
#[kernel(threads = THREADS, grid = grid)]
pub fn copy_words(source: Global<u32>, target: GlobalMut<u32>) {
    let first = u64::from(block::index()[0]) * u64::from(TILE) + u64::from(thread::index() * 4);
    if first + 4 <= source.len() {
        target.store_vector(first, source.load_vector(first));
    } else {
        let mut i = first;
        while i < source.len() {
            target.store(i, source.load(i));
            i += 1;
        }
    }
}

fn grid(args: &CopyWordsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("target", args.source.len(), args.target.len())?;
    LaunchError::check_alignment("source", 16, args.source.address())?;
    LaunchError::check_alignment("target", 16, args.target.address())?;
    Grid::cover("source", args.source.len(), TILE)
}
