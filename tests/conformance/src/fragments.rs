//! Products of parts of tiles, stored transposed, and register tiles that leave as fragments.

use oxtile_tile::fragment_tile::FragmentTile;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::matrix;
use oxtile_tile::pipeline::{self, Mbarrier};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterTile;
use oxtile_tile::shared::{Overlay, SharedTile, Tiles};

use crate::THREADS;
use crate::matrix::{MATRIX_INPUT, RESULT, fill, write};

/// Words that [`fragment_sums`](fn@fragment_sums) writes.
pub const FRAGMENTS_OUTPUT: u32 = 3 * RESULT + THREADS;
/// Numbers that are added up.
pub const FRAGMENTS_SUMS: u32 = 2 * RESULT;

#[derive(SharedStorage)]
struct Shared {
    keys: SharedTile<bf16, 128, 128, Swizzle128>,
    rows: SharedTile<bf16, 64, 128, Swizzle128>,
    turned: SharedTile<bf16, 64, 128, Swizzle128>,
    memory: Overlay<Tiles<FragmentTile<64>, 1>, SharedArray<f32, { THREADS as usize }>>,
    done: Mbarrier,
}

/// The gradients of queries in attention, without a softmax: products of two halves of the keys are stored transposed and
/// multiplied by a panel of the keys' transpose. The result is stored, added to twice, and loaded again.
#[kernel(threads = THREADS, grid = grid, shared = Shared, requires = sm_90a)]
pub fn fragment_sums(input: Global<u32>, output: GlobalMut<u32>, sums: GlobalMut<f32>) {
    let Shared { keys, rows, turned, memory, done } = Shared::claim();
    if thread::index() == 0 {
        done.init(THREADS / warp::LANES);
        pipeline::publish_barriers();
    }
    fill(keys, &input, 1);
    fill(rows, &input, 2);
    sync::fence_proxy_async();
    block::sync();
    for half in 0..2 {
        let scores = matrix::multiply(keys.k_major_rows::<64>(64 * half), rows.k_major()).wait();
        write(&output, half, &scores);
        scores.to_operand::<bf16>().store_transposed(turned, [0, 64 * half]);
    }
    sync::fence_proxy_async();
    block::sync();
    let product = matrix::multiply(keys.mn_major_panel::<64>(1), turned.k_major_rows::<64>(0)).wait();
    product.store_fragments(memory.first().tile(0));
    sync::fence_proxy_async();
    warp::sync();
    done.arrive_if(thread::lane() == 0);
    done.wait(0);
    if thread::index() == 0 {
        memory.first().store_to(&sums, RESULT.into());
        pipeline::commit_stores();
        pipeline::wait_stores::<0>();
        memory.first().add_to(&sums, RESULT.into());
        memory.first().add_to(&sums, 0);
        pipeline::commit_stores();
        pipeline::wait_stores::<0>();
    }
    block::sync();
    write(&output, 2, &RegisterTile::load_fragments(&sums, RESULT.into()));
    memory.second().store(thread::index(), thread::index() as f32);
    block::sync();
    let [a, b] = memory.second().load_pair(thread::index() * 6 % THREADS);
    output.store(u64::from(3 * RESULT + thread::index()), (a * 1000.0 + b).to_bits());
}

fn grid(args: &FragmentSumsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(MATRIX_INPUT), args.input.len())?;
    LaunchError::check_length("output", u64::from(FRAGMENTS_OUTPUT), args.output.len())?;
    LaunchError::check_length("sums", u64::from(FRAGMENTS_SUMS), args.sums.len())?;
    Ok(Grid::x(1))
}
