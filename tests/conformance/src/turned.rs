//! 8-bit tiles transposed in shared memory, multiplied by operands out of registers.

use oxtile_tile::layout::{Swizzle64, Swizzle128};
use oxtile_tile::matrix;
use oxtile_tile::num::e4m3;
use oxtile_tile::pipeline::Pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{OperandTile, RegisterTile};
use oxtile_tile::shared::SharedTile;

use crate::THREADS;
use crate::matrix::{MATRIX_INPUT, RESULT, fill, write};

/// Products, one more than the ring has stages.
const ROUNDS: u32 = 3;
/// Words that [`turned_products`](fn@turned_products) writes.
pub const TURNED_OUTPUT: u32 = (ROUNDS + 1) * RESULT + 64 * 128 / 4;

#[derive(SharedStorage)]
struct Shared {
    q: SharedTile<e4m3, 64, 64, Swizzle64>,
    k: SharedTile<e4m3, 128, 64, Swizzle64>,
    v: SharedTile<e4m3, 128, 64, Swizzle64>,
    ring: Pipeline<SharedTile<e4m3, 64, 128, Swizzle128>, 2>,
}

/// The steps of 8-bit attention without its exponentials: scores of registers and shared memory are the left operand for
/// values that the four warps have transposed. The transpose is written last.
#[kernel(threads = THREADS, grid = grid, shared = Shared, requires = sm_90a)]
pub fn turned_products(input: Global<u32>, output: GlobalMut<u32>) {
    let Shared { q, k, v, ring } = Shared::claim();
    if thread::index() == 0 {
        ring.init_between(4, 4);
    }
    fill(q, &input, 1);
    fill(k, &input, 2);
    sync::fence_proxy_async();
    block::sync();
    let mut scores = matrix::multiply(OperandTile::load(q), k.k_major()).wait();
    // Whole numbers up to 8 are exact.
    scores.map(|x| x.clamp(-8.0, 8.0));
    let weights = scores.to_turned_operand();
    let (mut producer, mut consumer) = (ring.producer(), ring.consumer());
    let mut sum = RegisterTile::<64>::zero();
    for round in 0..ROUNDS {
        fill(v, &input, 3 + round);
        block::sync();
        let filling = producer.wait();
        v.turn(filling.memory(), thread::warp() * 32);
        filling.publish();
        let stage = consumer.wait();
        sum = sum.multiply_add(weights, stage.memory().k_major()).wait();
        write(&output, round, &sum);
        if round + 1 == ROUNDS {
            let mut i = thread::index();
            while i < 64 * 128 / 4 {
                let byte = |j: u32| u32::from(stage.memory().load(i / 32, i % 32 * 4 + j).to_bits()) << (8 * j);
                output.store(u64::from((ROUNDS + 1) * RESULT + i), byte(0) | byte(1) | byte(2) | byte(3));
                i += THREADS;
            }
        }
        stage.release_after_wait();
        block::sync();
    }
    let mut half = RegisterTile::<64>::zero();
    half.map_pairs(|row, pair, _| scores.pair(row, pair));
    write(&output, ROUNDS, &half);
}

fn grid(args: &TurnedProductsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(MATRIX_INPUT), args.input.len())?;
    LaunchError::check_length("output", u64::from(TURNED_OUTPUT), args.output.len())?;
    Ok(Grid::x(1))
}
