//! Clusters: blocks that fill each other's shared memory.

use oxtile_tile::pipeline::Pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::scheduler::PersistentTiles;
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::tensor_map::TensorMap;
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
