//! Clusters: blocks that fill, and write to, each other's shared memory.

use oxtile_tile::pipeline::Pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::scheduler::PersistentTiles;
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::tensor_map::TensorMap;
use oxtile_tile::vector::Vector;
use oxtile_tile::{cluster, warp};

/// Blocks of a cluster.
const CLUSTER: u32 = 2;
/// Blocks of the grid.
const BLOCKS: u32 = 2 * CLUSTER;
/// Pairs of boxes that the clusters share out, more than the stages of a ring.
const PAIRS: u32 = 11;
/// Rows and columns of the input: each pair has a box for each block of a cluster.
pub const CLUSTER_INPUT: [u32; 2] = [PAIRS * CLUSTER * 8, 32];
/// Words of output: for each pair a word a lane and block, and each block's rank.
pub const CLUSTER_OUTPUT: u32 = PAIRS * CLUSTER * warp::LANES + BLOCKS;

#[derive(SharedStorage)]
struct Shared {
    ring: Pipeline<Tiles<SharedTile<u32, 8, 32>, 2>, 3>,
}

/// Each block of a cluster loads one box of a pair for both; a warp of each sums both boxes, in an order of its own.
#[kernel(threads = 64, grid = grid, shared = Shared, cluster = CLUSTER, requires = sm_90a)]
pub fn cluster_share(input: TensorMap<u32, 8, 32>, output: GlobalMut<u32>) {
    let (Shared { ring }, rank) = (Shared::claim(), cluster::rank());
    if thread::index() == 0 {
        ring.init(CLUSTER);
        output.store(u64::from(CLUSTER_OUTPUT - BLOCKS + block::index()[0]), rank);
    }
    cluster::sync();
    let mut pairs = PersistentTiles::<4>::of_clusters::<CLUSTER>(PAIRS, 1);
    if thread::index() == 0 {
        let mut producer = ring.producer();
        while let Some([pair, _]) = pairs.next_tile() {
            let (boxes, full) = producer.acquire(CLUSTER * TensorMap::<u32, 8, 32>::BYTES);
            input.load_multicast(boxes.tile(rank), [(pair * CLUSTER + rank) * 8, 0], full, 0b11);
        }
    } else if thread::warp() == 1 {
        let mut consumer = ring.consumer();
        while let Some([pair, _]) = pairs.next_tile() {
            let stage = consumer.wait();
            let mut sum = rank;
            for row in 0..8 {
                for tile in 0..CLUSTER {
                    sum = sum.rotate_left(3).wrapping_add(stage.memory().tile((tile + rank) % CLUSTER).load(row, thread::lane()));
                }
            }
            warp::sync();
            stage.release_to_cluster::<CLUSTER>();
            output.store(u64::from((pair * CLUSTER + rank) * warp::LANES + thread::lane()), sum);
        }
    }
    cluster::sync();
}

fn grid(args: &ClusterShareArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", u64::from(CLUSTER_OUTPUT), args.output.len())?;
    Ok(Grid::x(BLOCKS))
}

/// Blocks of a cluster that is made at launch.
const WRITERS: u32 = 3;
/// Words of output: four for each lane of each block.
pub const CLUSTER_WRITE_OUTPUT: u32 = 2 * WRITERS * 4 * warp::LANES;

#[derive(SharedStorage)]
struct Words {
    words: SharedArray<u32, { (WRITERS * 4 * warp::LANES) as usize }>,
}

/// Each block of a cluster writes 16 bytes a lane to all of them; each then folds what it got, in an order of its own.
#[kernel(threads = 32, grid = write_grid, shared = Words, requires = sm_90a)]
pub fn cluster_write(output: GlobalMut<u32>) {
    let (Words { words }, rank) = (Words::claim(), cluster::rank());
    let at = |rank: u32| 4 * (rank * warp::LANES + thread::lane());
    cluster::sync();
    for to in 0..WRITERS {
        let seed = 2_654_435_761_u32.wrapping_mul((block::index()[0] * WRITERS + to) * warp::LANES + thread::lane() + 1);
        words.store_vector_to(to, at(rank), Vector::from_words(core::array::from_fn(|i| seed.rotate_left(8 * i as u32))));
    }
    cluster::sync();
    let mut folded = [rank; 4];
    for i in 0..WRITERS {
        let found = words.load_vector(at((rank + i) % WRITERS)).words();
        folded = core::array::from_fn(|word| folded[word].rotate_left(3).wrapping_add(found[word]));
    }
    output.store_vector(u64::from(block::index()[0] * 4 * warp::LANES + at(0)), Vector::from_words(folded));
}

fn write_grid(args: &ClusterWriteArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", u64::from(CLUSTER_WRITE_OUTPUT), args.output.len())?;
    Ok(Grid::x(2 * WRITERS).in_clusters(WRITERS))
}
