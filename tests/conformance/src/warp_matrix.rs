//! Matrix multiplication by warps: fragments of operands in every direction and format.
//!
//! Operands are whole numbers from -2 to 2, so that every sum is exact and no tensor core's rounding shows.

use oxtile_tile::layout::{Swizzle64, Swizzle128};
use oxtile_tile::num::{Pod, e4m3, e5m2};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{OperandTile, RegisterElement, RegisterTile};
use oxtile_tile::shared::SharedTile;
use oxtile_tile::warp_matrix::{self, KMajor, NMajor, RightTile};

use crate::THREADS;
use crate::matrix::{MATRIX_INPUT, RESULT, fill, write};

/// Words that [`warp_products`](fn@warp_products) writes.
pub const PRODUCTS_OUTPUT: u32 = 8 * RESULT;
/// Words that [`warp_chunks`](fn@warp_chunks) writes.
pub const CHUNKS_OUTPUT: u32 = 4 * RESULT;
/// Words that [`warp_products_8`](fn@warp_products_8) writes.
pub const PRODUCTS_8_OUTPUT: u32 = 2 * RESULT;

#[derive(SharedStorage)]
struct Operands<T: Pod> {
    a: SharedTile<T, 64, 64, Swizzle128>,
    b: SharedTile<T, 64, 64, Swizzle128>,
}

/// Four products of two 64 by 64 matrices, which are stored as they are or as their transposes.
#[inline(always)]
fn products<T: RegisterElement + Float>(input: &Global<u32>, output: &GlobalMut<u32>, first: u32) {
    let Operands { a, b } = Operands::<T>::claim();
    fill(a, input, first);
    fill(b, input, first + 77);
    block::sync();
    let left = [OperandTile::load(a), OperandTile::load_transposed(a)];
    let mut sums = [RegisterTile::zero(); 2];
    warp_matrix::multiply_add(&mut sums, &left, KMajor(b));
    write(output, first, &sums[0]);
    write(output, first + 1, &sums[1]);
    // On top of the others.
    warp_matrix::multiply_add(&mut sums, &left, NMajor(b));
    write(output, first + 2, &sums[0]);
    write(output, first + 3, &sums[1]);
    block::sync();
}

/// Products of 16-bit elements in every direction: the operation is `fragments` of either order, and `multiply_add`.
#[kernel(threads = THREADS, grid = products_grid, shared = Operands<bf16>)]
pub fn warp_products(input: Global<u32>, output: GlobalMut<u32>) {
    products::<bf16>(&input, &output, 0);
    products::<f16>(&input, &output, 4);
}

/// The products of [`warp_products`](fn@warp_products) of bf16, an instruction's depth at a time, from chunks that constants follow.
#[kernel(threads = THREADS, grid = chunks_grid, shared = Operands<bf16>)]
pub fn warp_chunks(input: Global<u32>, output: GlobalMut<u32>) {
    let Operands { a, b } = Operands::<bf16>::claim();
    fill(a, &input, 0);
    fill(b, &input, 77);
    block::sync();
    let (along, across) = (OperandTile::<bf16, 16>::chunk(), OperandTile::<bf16, 16>::chunk_transposed());
    let (k_major, n_major) = (RightTile::<bf16, 64>::chunk(), RightTile::<bf16, 64>::chunk_transposed());
    let mut sums = [[RegisterTile::zero(); 2]; 2];
    for step in 0..4 {
        let deeper = 16 * step;
        let left = [OperandTile::load_chunk(a, along.beside(deeper)), OperandTile::load_chunk_transposed(a, across.below(deeper))];
        let [k_sums, n_sums] = &mut sums;
        warp_matrix::multiply_add::<_, 64, 16, 2>(k_sums, &left, RightTile::load_chunk(b, k_major.beside(deeper)));
        warp_matrix::multiply_add::<_, 64, 16, 2>(n_sums, &left, RightTile::load_chunk_transposed(b, n_major.below(deeper)));
    }
    let [[along_k, across_k], [along_n, across_n]] = &sums;
    write(&output, 0, along_k);
    write(&output, 1, across_k);
    write(&output, 2, along_n);
    write(&output, 3, across_n);
}

fn chunks_grid(args: &WarpChunksArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(MATRIX_INPUT), args.input.len())?;
    LaunchError::check_length("output", u64::from(CHUNKS_OUTPUT), args.output.len())?;
    Ok(Grid::x(1))
}

fn products_grid(args: &WarpProductsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(MATRIX_INPUT), args.input.len())?;
    LaunchError::check_length("output", u64::from(PRODUCTS_OUTPUT), args.output.len())?;
    Ok(Grid::x(1))
}

#[derive(SharedStorage)]
struct Bytes<T: Pod> {
    a: SharedTile<T, 64, 64, Swizzle64>,
    b: SharedTile<T, 64, 64, Swizzle64>,
}

/// Products of 8-bit elements, which lie along K.
#[kernel(threads = THREADS, grid = products_8_grid, shared = Bytes<e4m3>, requires = sm_89)]
pub fn warp_products_8(input: Global<u32>, output: GlobalMut<u32>) {
    let Bytes { a, b } = Bytes::<e4m3>::claim();
    fill(a, &input, 3);
    fill(b, &input, 5);
    block::sync();
    let mut sums = [RegisterTile::zero()];
    warp_matrix::multiply_add(&mut sums, &[OperandTile::load(a)], KMajor(b));
    write(&output, 0, &sums[0]);
    block::sync();
    let Bytes { a, b } = Bytes::<e5m2>::claim();
    fill(a, &input, 7);
    fill(b, &input, 9);
    block::sync();
    warp_matrix::multiply_add(&mut sums, &[OperandTile::load(a)], KMajor(b));
    write(&output, 1, &sums[0]);
}

fn products_8_grid(args: &WarpProducts8Args<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", u64::from(MATRIX_INPUT), args.input.len())?;
    LaunchError::check_length("output", u64::from(PRODUCTS_8_OUTPUT), args.output.len())?;
    Ok(Grid::x(1))
}
