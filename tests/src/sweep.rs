//! Roundings over whole ranges: what the casts of the block formats do to every number they can meet.
//!
//! The conversions are those of the emulator, which the conformance kernels hold to the GPU's. With `OXTILE_LONG=1` every number, else one of
//! [`APART`].

use libtest_mimic::Trial;
use oxtile_tests::oracle::formats::{BF16, E2M1, E4M3, E5M2, Format, e8m0};
use oxtile_tile::num::{Float, Fp8, e2m1, e2m1x8, e4m3, e5m2, ue8m0};

use crate::backend::long;
use crate::times;

/// Numbers from one that is tried to the next, a prime.
const APART: usize = 251;

pub fn trials() -> Vec<Trial> {
    let trial = |name: &str, run: fn() -> Result<(), String>| times::trial(format!("sweep::{name}"), move || run().map_err(Into::into));
    vec![trial("e8m0", e8m0_of_all_magnitudes), trial("e2m1", e2m1_of_all_bf16), trial("fp8", fp8_of_all_bf16)]
}

fn apart() -> usize {
    if long() { 1 } else { APART }
}

/// All 2^31 non-negative `f32`: the code's value is the least that is no smaller.
fn e8m0_of_all_magnitudes() -> Result<(), String> {
    let values: Vec<f64> = (0..=0xfe).map(e8m0::decode).collect();
    for bits in (0..0x8000_0000_u32).step_by(apart()) {
        let (x, code) = (f32::from_bits(bits), ue8m0::from_f32(f32::from_bits(bits)).to_bits());
        let (wide, at) = (f64::from(x), usize::from(code));
        let is_right = match code {
            0xff => x.is_nan(),
            0 => wide <= values[0],
            0xfe => wide > values[0xfd],
            _ => values[at - 1] < wide && wide <= values[at],
        };
        let is_short_form_right = x.is_nan() || ue8m0::from_magnitude(x).to_bits() == code;
        if !(is_right && is_short_form_right) {
            return Err(format!("{bits:#x}: code {code:#x}, of magnitudes {:#x}", ue8m0::from_magnitude(x).to_bits()));
        }
    }
    Ok(())
}

/// Every bf16 number, and every block scale as [`f64`].
fn pairs(scales: impl Iterator<Item = f64> + Clone) -> impl Iterator<Item = (f32, f64)> {
    let numbers = (0..BF16.codes()).map(|code| BF16.decode(code) as f32);
    numbers.flat_map(move |x| scales.clone().map(move |scale| (x, scale))).step_by(apart())
}

/// All bf16 numbers under all E4M3 scales, in a tensor whose encode scale is 1: by the conversion, and by the casts' way.
fn e2m1_of_all_bf16() -> Result<(), String> {
    for (x, scale) in pairs((1..0x7f).map(|code| E4M3.decode(code))) {
        let multiplier = 1.0 / scale as f32;
        let scaled = x * multiplier;
        let expected = E2M1.encode(f64::from(scaled)) as u8;
        let found = e2m1::from_f32(scaled).to_bits();
        let t = [(x.abs() * (multiplier * 256.0)); 8];
        let signs = e2m1x8::signs_of_singles([x.to_bits(); 8]);
        let eight = e2m1x8::from_scaled(t, signs).map(|codes| codes.to_bits());
        let is_fast_right = match eight {
            Some(codes) => codes == u32::from(expected) * 0x1111_1111,
            None => x.is_nan() || scaled.abs() >= 7.0,
        };
        if found != expected || !is_fast_right {
            return Err(format!("{x:e} under {scale:e}: {found:#x} and {eight:x?}, expected {expected:#x}"));
        }
    }
    Ok(())
}

/// All bf16 numbers under all E8M0 scales, in both formats.
fn fp8_of_all_bf16() -> Result<(), String> {
    fp8::<e4m3>(&E4M3)?;
    fp8::<e5m2>(&E5M2)
}

fn fp8<Q: Fp8>(format: &Format) -> Result<(), String> {
    for (x, scale) in pairs((0..=0xfe).map(e8m0::decode)) {
        let scaled = x * (1.0 / scale) as f32;
        let (found, expected) = (Q::encode4([scaled, 0.0, 0.0, 0.0]) as u8, format.encode(f64::from(scaled)) as u8);
        if found != expected {
            return Err(format!("{x:e} under {scale:e}: {} {found:#x}, expected {expected:#x}", format.name));
        }
    }
    Ok(())
}
