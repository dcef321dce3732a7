//! Number conversions and arithmetic, on whatever bits the host sends.

use oxtile_tile::num::{self, Fp8, HalfPair, bf16x2, e2m1x2, e4m3, e5m2, f16x2, ue8m0};
use oxtile_tile::prelude::*;

use crate::THREADS;

/// Words a value that [`convert_from_f32`](fn@convert_from_f32) writes.
pub const FROM_F32_WORDS: u32 = 6;
/// Words a byte that [`convert_from_bytes`](fn@convert_from_bytes) writes.
pub const FROM_BYTES_WORDS: u32 = 6;

/// The codes of each input value in every format, and the reciprocal of its scale.
#[kernel(threads = THREADS, grid = from_f32_grid)]
pub fn convert_from_f32(input: Global<f32>, output: GlobalMut<u32>) {
    let index = block::index()[0] * THREADS + thread::index();
    if u64::from(index) >= input.len() {
        return;
    }
    let x = input.load(u64::from(index));
    let scale = ue8m0::from_f32(x.abs());
    let words = [
        u32::from(bf16::from_f32(x).to_bits()) | u32::from(f16::from_f32(x).to_bits()) << 16,
        e4m3::encode4([x, -x, x * 0.5, 1.0]),
        e5m2::encode4([x, -x, x * 0.5, 1.0]),
        u32::from(e2m1x2::from_f32([x, -x]).to_bits()),
        u32::from(scale.to_bits()),
        scale.reciprocal().to_bits(),
    ];
    for (i, word) in words.into_iter().enumerate() {
        output.store(u64::from(index * FROM_F32_WORDS) + i as u64, word);
    }
}

fn from_f32_grid(args: &ConvertFromF32Args<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", args.input.len() * u64::from(FROM_F32_WORDS), args.output.len())?;
    Grid::cover("input", args.input.len(), THREADS)
}

/// The values of each input byte, read as every 8-bit format, and of the half-word it makes with its complement.
#[kernel(threads = THREADS, grid = from_bytes_grid)]
pub fn convert_from_bytes(input: Global<u8>, output: GlobalMut<u32>) {
    let index = block::index()[0] * THREADS + thread::index();
    if u64::from(index) >= input.len() {
        return;
    }
    let byte = input.load(u64::from(index));
    let half = u16::from(byte) << 8 | u16::from(!byte);
    let words = [
        e4m3::from_bits(byte).to_f32(),
        e5m2::from_bits(byte).to_f32(),
        e2m1x2::from_bits(byte).to_f32()[1],
        ue8m0::from_bits(byte).to_f32(),
        bf16::from_bits(half).to_f32(),
        f16::from_bits(half).to_f32(),
    ];
    for (i, word) in words.into_iter().enumerate() {
        // The payload of a NaN is not specified, so it is not compared.
        let bits = if word.is_nan() { 0x7fc0_0000 } else { word.to_bits() };
        output.store(u64::from(index * FROM_BYTES_WORDS) + i as u64, bits);
    }
}

fn from_bytes_grid(args: &ConvertFromBytesArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", args.input.len() * u64::from(FROM_BYTES_WORDS), args.output.len())?;
    Grid::cover("input", args.input.len(), THREADS)
}

/// `max`, `min` and `max.NaN` of magnitudes of packed halves, both types: six words a pair of words.
#[kernel(threads = THREADS, grid = half_pairs_grid)]
pub fn half_pairs(input: Global<u32>, output: GlobalMut<u32>) {
    let index = block::index()[0] * THREADS + thread::index();
    if u64::from(index) * 2 >= input.len() {
        return;
    }
    let [a, b] = input.load_pair(u64::from(index) * 2);
    let b16 = (bf16x2::from_bits(a), bf16x2::from_bits(b));
    let f = (f16x2::from_bits(a), f16x2::from_bits(b));
    let words = [
        b16.0.max(b16.1).to_bits(),
        b16.0.min(b16.1).to_bits(),
        b16.0.max_nan(b16.1).to_bits(),
        f.0.max(f.1).to_bits(),
        f.0.min(f.1).to_bits(),
        f.0.max_nan(f.1).to_bits(),
    ];
    for (i, word) in words.into_iter().enumerate() {
        output.store(u64::from(index * 6) + i as u64, word);
    }
}

fn half_pairs_grid(args: &HalfPairsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_multiple("input", 2, args.input.len())?;
    LaunchError::check_length("output", args.input.len() * 3, args.output.len())?;
    Grid::cover("input", args.input.len() / 2, THREADS)
}

/// Each pair of values rounded towards zero to halves, and the product of their bits: three words.
#[kernel(threads = THREADS, grid = truncation_grid)]
pub fn truncation(input: Global<f32>, output: GlobalMut<u32>) {
    let index = u64::from(block::index()[0] * THREADS + thread::index());
    if index * 2 >= input.len() {
        return;
    }
    let [a, b] = [0, 1].map(|i| input.load(index * 2 + i));
    let [low, high] = num::multiply_wide(a.to_bits(), b.to_bits());
    for (i, word) in [f16x2::from_f32_toward_zero([a, b]).to_bits(), low, high].into_iter().enumerate() {
        output.store(index * 3 + i as u64, word);
    }
}

fn truncation_grid(args: &TruncationArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_multiple("input", 2, args.input.len())?;
    LaunchError::check_length("output", args.input.len() / 2 * 3, args.output.len())?;
    Grid::cover("input", args.input.len() / 2, THREADS)
}

/// `fma`, `max`, `min`, and a product and a sum that must not be contracted: four words for each three values.
#[kernel(threads = THREADS, grid = arithmetic_grid)]
pub fn arithmetic(input: Global<f32>, output: GlobalMut<f32>) {
    let index = u64::from(block::index()[0] * THREADS + thread::index());
    if index * 3 >= input.len() {
        return;
    }
    let [a, b, c] = [0, 1, 2].map(|i| input.load(index * 3 + i));
    let results = [num::fma(a, b, c), num::max(a, b), num::min(a, b), a * b + c];
    for (i, x) in results.into_iter().enumerate() {
        output.store(index * 4 + i as u64, if x.is_nan() { f32::from_bits(0x7fc0_0000) } else { x });
    }
}

fn arithmetic_grid(args: &ArithmeticArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_multiple("input", 3, args.input.len())?;
    LaunchError::check_length("output", args.input.len() / 3 * 4, args.output.len())?;
    Grid::cover("input", args.input.len() / 3, THREADS)
}
