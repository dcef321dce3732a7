//! `cp.async`, bulk copies and the mbarrier pipeline.

use oxtile_tile::global::Cursor;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::pipeline::{self, Pipeline};
use oxtile_tile::prelude::*;
use oxtile_tile::shared::{Chunk, SharedTile};
use oxtile_tile::sync;
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};

use crate::THREADS;

/// Words of a stage.
pub const STAGE: usize = 512;
/// Stages that pass through the ring.
pub const ROUNDS: u32 = 6;

#[derive(SharedStorage)]
struct TwoStages {
    stages: [SharedArray<u32, STAGE>; 2],
}

/// A double buffer of `cp.async`: the next stage is on its way while this one is summed. The last 16
/// bytes of each thread in the last round are only half valid.
#[kernel(threads = THREADS, grid = ring_grid, shared = TwoStages)]
pub fn copy_async_ring(input: Global<u32>, output: GlobalMut<u32>) {
    let (stages, t) = (TwoStages::claim().stages, thread::index());
    let start = |round: u32| {
        let valid = if round + 1 == ROUNDS { 8 } else { 16 };
        pipeline::copy_async(stages[round as usize % 2], 4 * t, &input, u64::from(round * STAGE as u32 + 4 * t), valid);
        pipeline::commit_copies();
    };
    start(0);
    for round in 0..ROUNDS {
        if round + 1 < ROUNDS {
            start(round + 1);
            pipeline::wait_copies::<1>();
        } else {
            pipeline::wait_copies::<0>();
        }
        block::sync();
        let vector = stages[round as usize % 2].load_vector(4 * ((t + 1) % THREADS));
        output.store(u64::from(round * THREADS + t), vector.words().into_iter().fold(0, u32::wrapping_add));
        block::sync();
    }
}

fn ring_grid(args: &CopyAsyncRingArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(ROUNDS) * STAGE as u64, args.input.len())?;
    LaunchError::check_length("output", u64::from(ROUNDS * THREADS), args.output.len())?;
    Ok(Grid::x(1))
}

#[derive(SharedStorage)]
struct Widths {
    words: SharedArray<u32, 128>,
    pairs: SharedArray<u32, 256>,
    quads: SharedArray<u32, STAGE>,
}

/// `cp.async` of 4, 8 and 16 bytes, of the last only the first 0 to 4 words; with none of them valid the source is far
/// beyond the view. Seven words a thread, which reads its own copies alone.
#[kernel(threads = THREADS, grid = widths_grid, shared = Widths)]
pub fn copy_async_widths(input: Global<u32>, output: GlobalMut<u32>) {
    let (Widths { words, pairs, quads }, t) = (Widths::claim(), thread::index());
    quads.store_vector(4 * t, Vector::from_words([!t; 4]));
    pipeline::copy_async_word(words, t, &input, u64::from(5 * t % THREADS));
    pipeline::copy_async_pair(pairs, 2 * t, &input, u64::from(2 * (3 * t % THREADS)));
    let valid = t % 5 * 4;
    let start = if valid == 0 { 1 << 40 } else { u64::from(4 * t) };
    pipeline::copy_async(quads, 4 * t, &input, start, valid);
    pipeline::commit_copies();
    pipeline::wait_copies::<0>();
    let first = u64::from(7 * t);
    output.store(first, words.load(t));
    output.store(first + 1, pairs.load(2 * t));
    output.store(first + 2, pairs.load(2 * t + 1));
    for (i, word) in quads.load_vector(4 * t).words().into_iter().enumerate() {
        output.store(first + 3 + i as u64, word);
    }
}

fn widths_grid(args: &CopyAsyncWidthsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", STAGE as u64, args.input.len())?;
    LaunchError::check_length("output", u64::from(7 * THREADS), args.output.len())?;
    Ok(Grid::x(1))
}

/// Words of input and of output of [`copy_async_tile`](fn@copy_async_tile).
pub const TILE_WORDS: u32 = 16 * 64;

#[derive(SharedStorage)]
struct Swizzled {
    tile: SharedTile<u32, 16, 64, Swizzle128>,
}

/// `cp.async` into a swizzled tile of two panels, each 16 bytes by another thread than reads them; every fifth is half valid.
#[kernel(threads = THREADS, grid = swizzled_grid, shared = Swizzled)]
pub fn copy_async_tile(input: Global<u32>, output: GlobalMut<u32>) {
    let (tile, t) = (Swizzled::claim().tile, thread::index());
    for round in 0..2 {
        let chunk = t + round * THREADS;
        let valid = if chunk.is_multiple_of(5) { 8 } else { 16 };
        pipeline::copy_async_to_tile(tile, [chunk / 16, chunk % 16 * 4], &input, u64::from(4 * chunk), valid);
    }
    pipeline::commit_copies();
    pipeline::wait_copies::<0>();
    block::sync();
    let mut i = t;
    while i < TILE_WORDS {
        output.store(i.into(), tile.load(i / 64, i % 64));
        i += THREADS;
    }
}

fn swizzled_grid(args: &CopyAsyncTileArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(TILE_WORDS), args.input.len())?;
    LaunchError::check_length("output", u64::from(TILE_WORDS), args.output.len())?;
    Ok(Grid::x(1))
}

/// The same tile by chunks that follow from each thread's first, of places that follow from a cursor; the last row is beyond an edge.
#[kernel(threads = THREADS, grid = chunks_grid, shared = Swizzled)]
pub fn copy_async_chunks(input: Global<u32>, output: GlobalMut<u32>) {
    let (tile, t) = (Swizzled::claim().tile, thread::index());
    let (row, column) = (t / 16, t % 16 * 4);
    // Neighbours change places.
    let first = Chunk::new(row, column).anew(t).beside(4);
    let start = Cursor::new(input, u64::from(64 * row + (column ^ 4)));
    pipeline::copy_async_to_chunk(tile, first, start, true);
    pipeline::copy_async_to_chunk(tile, first.below(8), start.further(8 * 64), row < 7);
    pipeline::commit_copies();
    pipeline::wait_copies::<0>();
    block::sync();
    let mut i = t;
    while i < TILE_WORDS {
        output.store(i.into(), tile.load(i / 64, i % 64) ^ start.load(0));
        i += THREADS;
    }
}

fn chunks_grid(args: &CopyAsyncChunksArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(TILE_WORDS), args.input.len())?;
    LaunchError::check_length("output", u64::from(TILE_WORDS), args.output.len())?;
    Ok(Grid::x(1))
}

#[derive(SharedStorage)]
struct Stages {
    ring: Pipeline<SharedArray<u32, STAGE>, 2>,
}

/// Warp 0 fills a ring of two stages by bulk copies, the other three warps sum them.
#[kernel(threads = THREADS, grid = pipeline_grid, shared = Stages, requires = sm_90)]
pub fn bulk_pipeline(input: Global<u32>, output: GlobalMut<u32>) {
    let ring = Stages::claim().ring;
    if thread::index() == 0 {
        ring.init(3);
    }
    block::sync();
    if thread::warp() == 0 {
        if thread::lane() == 0 {
            let mut producer = ring.producer();
            for round in 0..ROUNDS {
                let (stage, full) = producer.acquire(STAGE as u32 * 4);
                full.load(stage, &input, u64::from(round) * STAGE as u64);
            }
        }
    } else {
        let mut consumer = ring.consumer();
        for round in 0..ROUNDS {
            let stage = consumer.wait();
            let mut sum = 0u32;
            let mut i = thread::index() - 32;
            while i < STAGE as u32 {
                sum = sum.wrapping_add(stage.memory().load(i));
                i += 96;
            }
            stage.release();
            output.store(u64::from(round * 96 + thread::index() - 32), sum);
        }
    }
}

fn pipeline_grid(args: &BulkPipelineArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(ROUNDS) * STAGE as u64, args.input.len())?;
    LaunchError::check_alignment("input", 16, args.input.address())?;
    LaunchError::check_length("output", u64::from(ROUNDS * 96), args.output.len())?;
    Ok(Grid::x(1))
}

#[derive(SharedStorage)]
struct Tile {
    tile: SharedArray<u32, STAGE>,
}

/// Writes a tile in shared memory and stores it by TMA, twice through the same memory.
#[kernel(threads = THREADS, grid = store_grid, shared = Tile, requires = sm_90)]
pub fn bulk_store(input: Global<u32>, output: GlobalMut<u32>) {
    let (tile, t) = (Tile::claim().tile, thread::index());
    for round in 0..2 {
        let mut i = t;
        while i < STAGE as u32 {
            tile.store(i, input.load(u64::from(i)).rotate_left(round));
            i += THREADS;
        }
        sync::fence_proxy_async();
        block::sync();
        if t == 0 {
            pipeline::store_bulk(&output, u64::from(round) * STAGE as u64, tile, STAGE as u32);
            pipeline::commit_stores();
            if round == 0 { pipeline::wait_stores_read::<0>() } else { pipeline::wait_stores::<0>() }
        }
        block::sync();
    }
}

fn store_grid(args: &BulkStoreArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", STAGE as u64, args.input.len())?;
    LaunchError::check_length("output", 2 * STAGE as u64, args.output.len())?;
    LaunchError::check_alignment("output", 16, args.output.address())?;
    Ok(Grid::x(1))
}

/// Rows and columns of the box.
pub const BOX: [usize; 2] = [8, 32];

#[derive(SharedStorage)]
struct Boxes {
    source: SharedTile<u32, 8, 32>,
    target: SharedTile<u32, 8, 32>,
    full: Mbarrier,
}

/// Loads one box a block by TMA, turns every word over and stores the box elsewhere, loads it from there and stores it again. The last
/// boxes hang over both edges of the matrix: zero inside, clipped outside.
#[kernel(threads = THREADS, grid = boxes_grid, shared = Boxes, requires = sm_90)]
pub fn tensor_boxes(input: TensorMap<u32, 8, 32>, output: TensorMapMut<u32, 8, 32>, rows: u32, columns: u32) {
    let (Boxes { source, target, full }, t) = (Boxes::claim(), thread::index());
    let [x, y, _] = block::index();
    let origin = [y * BOX[0] as u32, x * BOX[1] as u32];
    if t == 0 {
        full.init(1);
        pipeline::publish_barriers();
    }
    block::sync();
    if t == 0 {
        full.arrive_expect(TensorMap::<u32, 8, 32>::BYTES);
        input.load(source, origin, full);
    }
    full.wait(0);
    let mut i = t;
    while i < (BOX[0] * BOX[1]) as u32 {
        let (row, column) = (i / BOX[1] as u32, i % BOX[1] as u32);
        let outside = origin[0] + row >= rows || origin[1] + column >= columns;
        let word = source.load(row, column);
        target.store(row, column, if outside { word } else { !word });
        i += THREADS;
    }
    sync::fence_proxy_async();
    block::sync();
    if t == 0 {
        output.store(origin, target);
        pipeline::commit_stores();
        pipeline::wait_stores::<0>();
        full.arrive_expect(TensorMap::<u32, 8, 32>::BYTES);
        output.load(source, origin, full);
    }
    full.wait(1);
    if t == 0 {
        output.store(origin, source);
        pipeline::commit_stores();
        pipeline::wait_stores::<0>();
    }
}

fn boxes_grid(args: &TensorBoxesArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::xy(args.columns.div_ceil(BOX[1] as u32), args.rows.div_ceil(BOX[0] as u32)))
}
