//! Matrix multiplication: layouts of operands, fragments in registers, what is in flight.
//!
//! Operands are whole numbers from -2 to 2, so that every sum is exact and no tensor core's rounding shows.

use oxtile_tile::arch::MatrixElement;
use oxtile_tile::layout::{Swizzle, Swizzle32, Swizzle64, Swizzle128};
use oxtile_tile::matrix::{self, Operand};
use oxtile_tile::num::{Pod, e4m3, e5m2};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, OperandTile, RegisterElement, RegisterTile, quad_max, quad_sum};
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::{sync, warpgroup};

use crate::THREADS;

/// Words of input: enough for the largest operand.
pub const MATRIX_INPUT: u32 = 64 * 128;
/// Words of a 64 by 64 result.
pub(crate) const RESULT: u32 = 64 * 64;
/// Products that [`matrix_layouts`](fn@matrix_layouts) writes.
const LAYOUTS: u32 = 19;
/// Words that it writes.
pub const LAYOUTS_OUTPUT: u32 = LAYOUTS * RESULT;
/// Words that [`matrix_registers`](fn@matrix_registers) writes.
pub const REGISTERS_OUTPUT: u32 = 5 * RESULT + 5 * THREADS;
/// Words that [`matrix_stacks`](fn@matrix_stacks) writes.
pub const STACKS_OUTPUT: u32 = 4 * RESULT + 2;

/// A left operand of 64 rows and a right one of 64 columns, stored as they are or transposed.
#[derive(SharedStorage)]
struct Operands<T: Pod, S: Swizzle, const AR: usize, const AC: usize, const BR: usize, const BC: usize> {
    a: SharedTile<T, AR, AC, S>,
    b: SharedTile<T, BR, BC, S>,
}

/// Fills a tile; its elements differ from those at the same place of one of another salt.
#[inline(always)]
pub(crate) fn fill<T: Float + Pod, const R: usize, const C: usize, S: Swizzle>(
    tile: SharedTile<T, R, C, S>,
    input: &Global<u32>,
    salt: u32,
) {
    let mut i = thread::index() % THREADS;
    while i < (R * C) as u32 {
        let word = input.load(u64::from((i + salt) % MATRIX_INPUT)) >> 7;
        tile.store(i / C as u32, i % C as u32, T::from_f32((word % 5) as f32 - 2.0));
        i += THREADS;
    }
}

/// Writes a 64 by 64 tile as words, row by row.
#[inline(always)]
pub(crate) fn write(output: &GlobalMut<u32>, number: u32, tile: &RegisterTile<64>) {
    for half in 0..2 {
        for pair in 0..RegisterTile::<64>::PAIRS {
            let at = number * RESULT + register_tile::row(half as u32) * 64 + register_tile::column(pair as u32);
            output.store_pair(u64::from(at), tile.pair(half, pair).map(f32::to_bits));
        }
    }
}

/// One product of operands in shared memory, `K` deep; the block waits before the memory is written again.
#[inline(always)]
fn product<
    T: MatrixElement + Float,
    S: Swizzle,
    const K: usize,
    const AR: usize,
    const AC: usize,
    const BR: usize,
    const BC: usize,
    const A_MN: bool,
    const B_MN: bool,
>(
    input: &Global<u32>,
    output: &GlobalMut<u32>,
    number: u32,
) {
    let Operands { a, b } = Operands::<T, S, AR, AC, BR, BC>::claim();
    fill(a, input, number);
    fill(b, input, number + 77);
    sync::fence_proxy_async();
    block::sync();
    let (a, b) = (Operand::<T, 64, K, A_MN>::of(a), Operand::<T, 64, K, B_MN>::of(b));
    write(output, number, &matrix::multiply(a, b).wait());
    block::sync();
}

/// Products under every swizzle, in every direction and format, of operands of one panel and of several.
#[kernel(threads = THREADS, grid = layouts_grid, shared = Operands<bf16, Swizzle128, 64, 128, 128, 64>, requires = sm_90a)]
pub fn matrix_layouts(input: Global<u32>, output: GlobalMut<u32>) {
    let (i, o) = (&input, &output);
    product::<bf16, Swizzle128, 64, 64, 64, 64, 64, false, false>(i, o, 0);
    product::<bf16, Swizzle128, 64, 64, 64, 64, 64, false, true>(i, o, 1);
    product::<bf16, Swizzle128, 64, 64, 64, 64, 64, true, false>(i, o, 2);
    product::<bf16, Swizzle128, 64, 64, 64, 64, 64, true, true>(i, o, 3);
    product::<bf16, Swizzle64, 64, 64, 64, 64, 64, false, false>(i, o, 4);
    product::<bf16, Swizzle64, 64, 64, 64, 64, 64, false, true>(i, o, 5);
    product::<bf16, Swizzle64, 64, 64, 64, 64, 64, true, false>(i, o, 6);
    product::<bf16, Swizzle64, 64, 64, 64, 64, 64, true, true>(i, o, 7);
    product::<bf16, Swizzle32, 64, 64, 64, 64, 64, false, false>(i, o, 8);
    product::<bf16, Swizzle32, 64, 64, 64, 64, 64, false, true>(i, o, 9);
    product::<bf16, Swizzle32, 64, 64, 64, 64, 64, true, false>(i, o, 10);
    product::<bf16, Swizzle32, 64, 64, 64, 64, 64, true, true>(i, o, 11);
    product::<bf16, Swizzle128, 128, 64, 128, 64, 128, false, false>(i, o, 12);
    product::<bf16, Swizzle128, 128, 128, 64, 128, 64, true, true>(i, o, 13);
    product::<f16, Swizzle128, 64, 64, 64, 64, 64, false, false>(i, o, 14);
    product::<f16, Swizzle128, 64, 64, 64, 64, 64, true, true>(i, o, 15);
    product::<e4m3, Swizzle128, 128, 64, 128, 64, 128, false, false>(i, o, 16);
    product::<e5m2, Swizzle64, 128, 64, 128, 64, 128, false, false>(i, o, 17);
    product::<e4m3, Swizzle32, 64, 64, 64, 64, 64, false, false>(i, o, 18);
}

fn layouts_grid(args: &MatrixLayoutsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(MATRIX_INPUT), args.input.len())?;
    LaunchError::check_length("output", u64::from(LAYOUTS_OUTPUT), args.output.len())?;
    Ok(Grid::x(1))
}

#[derive(SharedStorage)]
struct Registers {
    q: SharedTile<bf16, 64, 64, Swizzle128>,
    k: SharedTile<bf16, 64, 64, Swizzle128>,
    v: SharedTile<bf16, 64, 64, Swizzle128>,
    halves: SharedTile<bf16, 64, 64, Swizzle128>,
    words: SharedTile<f32, 64, 32, Swizzle128>,
}

/// The steps of attention without its exponentials: `q` from registers, one product used as the next one's left
/// operand, rows scaled and folded, results stored through shared memory.
#[kernel(threads = THREADS, grid = registers_grid, shared = Registers, requires = sm_90a)]
pub fn matrix_registers(input: Global<u32>, output: GlobalMut<u32>) {
    let Registers { q, k, v, halves, words } = Registers::claim();
    fill(q, &input, 1);
    fill(k, &input, 2);
    fill(v, &input, 3);
    sync::fence_proxy_async();
    block::sync();
    let left = OperandTile::load(q);
    let first = matrix::multiply(left, k.k_major());
    let second = matrix::multiply(q.k_major(), v.mn_major());
    let mut scores = first.wait_leaving::<1>();
    let mut sum = second.wait();
    write(&output, 0, &scores);
    write(&output, 1, &sum);
    let largest = scores.fold_rows([-9.0; 2], |a, b| if a < b { b } else { a }, quad_max);
    let total = scores.fold_rows([0.0; 2], |a, b| a + b, quad_sum);
    for half in 0..2 {
        let at = 5 * RESULT + 4 * thread::index() + 2 * half as u32;
        output.store_pair(u64::from(at), [largest[half], total[half]].map(f32::to_bits));
    }
    scores.map(|x| x * 0.5);
    scores.map_pairs(|_, pair, [a, b]| [a, b + pair as f32]);
    scores.scale_rows([2.0, -1.0]);
    let [a, b] = scores.pair(1, 3);
    scores.set_pair(1, 3, [b, a]);
    // Whole numbers up to 256 survive bf16.
    scores.map(|x| {
        if x > 255.0 {
            255.0
        } else if x < -255.0 {
            -255.0
        } else {
            x as i32 as f32
        }
    });
    write(&output, 2, &scores);
    sum = sum.multiply_add(scores.to_operand::<bf16>(), v.mn_major()).wait();
    write(&output, 3, &sum);

    scores.store_columns(0, halves);
    scores.store_columns(32, words);
    block::sync();
    let mut i = thread::index();
    while i < RESULT / 2 {
        let (row, column) = (i / 32, i % 32);
        let pair = bf16::pack([halves.load(row, 2 * column).to_f32(), halves.load(row, 2 * column + 1).to_f32()]);
        output.store_pair(u64::from(4 * RESULT + 2 * i), [pair, words.load(row, column).to_bits()]);
        i += THREADS;
    }
    block::sync();
    let (row, column) = (thread::index() / 2, 16 * (thread::index() % 2));
    words.store_pair(row, column + 2, [row as f32, column as f32]);
    output.store(u64::from(5 * RESULT + 4 * THREADS + thread::index()), words.load(row, column + 3).to_bits());
}

fn registers_grid(args: &MatrixRegistersArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(MATRIX_INPUT), args.input.len())?;
    LaunchError::check_length("output", u64::from(REGISTERS_OUTPUT), args.output.len())?;
    Ok(Grid::x(1))
}

#[derive(SharedStorage)]
struct Stacks {
    a: Tiles<SharedTile<bf16, 64, 64, Swizzle128>, 4>,
    b: Tiles<SharedTile<bf16, 64, 64, Swizzle128>, 2>,
}

/// Two warpgroups with operands of their own, right operands stacked, groups that follow each other in flight.
#[kernel(threads = 2 * THREADS, grid = stacks_grid, shared = Stacks, requires = sm_90a)]
pub fn matrix_stacks(input: Global<u32>, output: GlobalMut<u32>) {
    let (Stacks { a, b }, warpgroup) = (Stacks::claim(), warpgroup::index());
    let mine = [a.tile(2 * warpgroup), a.tile(2 * warpgroup + 1)];
    fill(mine[0], &input, 5 + warpgroup);
    fill(mine[1], &input, 11 + warpgroup);
    fill(b.tile(warpgroup), &input, 23 + warpgroup);
    sync::fence_proxy_async();
    warpgroup::sync(warpgroup);
    block::sync();
    let right = Operand::<bf16, 128, 64, true>::stacked(b);
    let product = RegisterTile::<128>::zero().multiply_add(mine[0].k_major(), right);
    let product = product.multiply_add(mine[1].mn_major(), right);
    product.wait_earlier();
    let product = product.multiply_add(mine[0].mn_major(), Operand::<bf16, 128, 64, false>::stacked(b)).wait();
    for half in 0..2 {
        for pair in 0..RegisterTile::<128>::PAIRS {
            let row = warpgroup * 64 + register_tile::row(half as u32);
            let at = row * 128 + register_tile::column(pair as u32);
            output.store_pair(u64::from(at), product.pair(half, pair).map(f32::to_bits));
        }
    }
    if warpgroup::is_leader() {
        // Where the tiles lie, so that the order of stacks is fixed.
        let placed = b.tile(warpgroup).address() - b.address() + a.tile(0).address_of(8, 8) - a.address();
        output.store(u64::from(STACKS_OUTPUT - 2 + warpgroup), placed);
    }
}

fn stacks_grid(args: &MatrixStacksArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(MATRIX_INPUT), args.input.len())?;
    LaunchError::check_length("output", u64::from(STACKS_OUTPUT), args.output.len())?;
    Ok(Grid::x(1))
}
