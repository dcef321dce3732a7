//! Packed number types and the methods of single ones, on whatever values the host sends.

use oxtile_tile::num::{
    self, Fp8, Half, HalfPair, bf16x2, e2m1, e2m1x2, e2m1x8, e4m3, e4m3x2, e4m3x4, e5m2, e5m2x2, e5m2x4, ue8m0, ue8m0x2,
};
use oxtile_tile::prelude::*;

use crate::THREADS;

/// Values that a thread of these kernels takes.
pub const VALUES: u32 = 8;
/// Words a thread that [`small_formats`](fn@small_formats) writes.
pub const SMALL_WORDS: u32 = 38;
/// Words a thread that [`half_formats`](fn@half_formats) writes.
pub const HALF_WORDS: u32 = 16;

/// Writes words one after the other.
struct Words {
    output: GlobalMut<u32>,
    next: u64,
}

impl Words {
    #[inline(always)]
    fn put(&mut self, word: u32) {
        self.output.store(self.next, word);
        self.next += 1;
    }

    /// The payload of a NaN is not specified, so it is not compared.
    #[inline(always)]
    fn put_f32(&mut self, x: f32) {
        self.put(if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() });
    }
}

macro_rules! fp8 {
    ($words:ident, $x:ident, $t:ident, $x2:ident, $x4:ident) => {
        let pair = $x2::from_f32([$x[0], $x[1]]);
        $words.put(pair.to_bits().into());
        $words.put(pair.to_f16x2().to_bits());
        pair.to_f32().into_iter().for_each(|value| $words.put_f32(value));
        let four = $x4::from_f32([$x[2], $x[3], $x[4], $x[5]]);
        $words.put($x4::new(four.elements()).to_bits());
        four.to_f32().into_iter().for_each(|value| $words.put_f32(value));
        $words.put($t::decode4(four.to_bits()).map(|value| if value.is_nan() { 1.0 } else { value }).into_iter().sum::<f32>().to_bits());
        let one = $t::from_f32($x[6]).abs();
        $words.put(one.abs_bits() | u32::from(one.to_bits()) << 8 | u32::from($t::MAX.to_bits()) << 16);
    };
}

/// The 8-bit and 4-bit formats: [`SMALL_WORDS`] words for each [`VALUES`] values.
#[kernel(threads = THREADS, grid = small_grid)]
pub fn small_formats(input: Global<f32>, output: GlobalMut<u32>) {
    let index = u64::from(block::index()[0] * THREADS + thread::index());
    if index * u64::from(VALUES) >= input.len() {
        return;
    }
    let x: [f32; 8] = core::array::from_fn(|i| input.load(index * u64::from(VALUES) + i as u64));
    let mut words = Words { output, next: index * u64::from(SMALL_WORDS) };
    fp8!(words, x, e4m3, e4m3x2, e4m3x4);
    fp8!(words, x, e5m2, e5m2x2, e5m2x4);

    let eight = e2m1x8::from_f32(x);
    words.put(e2m1x8::new(eight.elements()).to_bits());
    words.put(eight.to_f32().into_iter().fold(0.0, |sum, value| sum * 2.0 + value).to_bits());
    let signs = e2m1x8::signs_of_singles(x.map(f32::to_bits));
    words.put(e2m1x8::from_scaled(x.map(|x| x.abs() * 256.0), signs).map_or(0xdead_beef, e2m1x8::to_bits));
    words.put(e2m1x8::signs_of_halves(core::array::from_fn(|i| bf16x2::from_f32([x[2 * i], x[2 * i + 1]]).to_bits())));
    words.put(num::permute_bytes(x[0].to_bits(), x[1].to_bits(), x[2].to_bits()));
    words.put_f32(e2m1::round_scaled(num::min(x[0].abs(), 1791.0)));
    let one = e2m1::from_bits(eight.to_bits() as u8);
    words.put(u32::from(one.to_bits()) | one.abs_bits() << 8 | u32::from(one.abs().to_bits()) << 16);
    words.put_f32(one.to_f32());
    words.put(e2m1x2::from_bits(eight.to_bits() as u8).to_f32()[1].to_bits());

    let scales = ue8m0x2::from_f32([x[0].abs(), x[1].abs()]);
    words.put(scales.to_bits().into());
    words.put(scales.to_bf16x2().to_bits());
    let scale = ue8m0::from_magnitude(num::max(x[2].abs(), 0.0));
    words.put(u32::from(scale.to_bits()) | u32::from(scale.reciprocal_bf16().to_bits()) << 16);
    words.put(u32::from(scale.to_bf16().to_bits()) | scale.abs_bits() << 16);
    words.put_f32(scale.reciprocal());
    words.put_f32(scale.to_f32());
    words.put(u32::from(ue8m0::from_f32(x[3].abs()).to_bits()) | u32::from(scale.abs().to_bits()) << 8);
}

fn small_grid(args: &SmallFormatsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    grid(args.input.len(), args.output.len(), SMALL_WORDS)
}

/// The 16-bit formats, alone and in pairs: [`HALF_WORDS`] words for each [`VALUES`] values.
#[kernel(threads = THREADS, grid = half_grid)]
pub fn half_formats(input: Global<f32>, output: GlobalMut<u32>) {
    let index = u64::from(block::index()[0] * THREADS + thread::index());
    if index * u64::from(VALUES) >= input.len() {
        return;
    }
    let x: [f32; 8] = core::array::from_fn(|i| input.load(index * u64::from(VALUES) + i as u64));
    let mut words = Words { output, next: index * u64::from(HALF_WORDS) };
    halves::<bf16>(&mut words, x, |half| half.is_nan());
    halves::<f16>(&mut words, x, |half| half.is_nan());
}

#[inline(always)]
fn halves<T: Half>(words: &mut Words, x: [f32; 8], is_nan: impl Fn(T) -> bool) {
    let (a, b) = (T::X2::from_f32([x[0], x[1]]), T::X2::from_f32([x[2], x[3]]));
    words.put(T::X2::new(a.elements()).to_bits());
    a.to_f32().into_iter().for_each(|value| words.put_f32(value));
    // As above, a NaN is only said to be one.
    let magnitudes = b.abs().elements().map(|half| if is_nan(half) { T::MAX } else { half });
    words.put(T::X2::new(magnitudes).to_bits());
    words.put(a.max(b).to_bits() ^ a.min(b).to_bits().rotate_left(7) ^ a.max_nan(b).to_bits().rotate_left(13));
    words.put_f32(T::from_f32(x[4]).abs().to_f32());
    let code = T::from_f32(x[5]);
    words.put(if is_nan(code) { 0x7fff } else { code.abs_bits() });
    words.put(T::X2::from_bits(x[6].to_bits()).to_bits());
}

fn half_grid(args: &HalfFormatsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    grid(args.input.len(), args.output.len(), HALF_WORDS)
}

fn grid(input: u64, output: u64, words: u32) -> Result<Grid, LaunchError> {
    LaunchError::check_multiple("input", VALUES.into(), input)?;
    LaunchError::check_length("output", input / u64::from(VALUES) * u64::from(words), output)?;
    Grid::cover("input", input / u64::from(VALUES), THREADS)
}
