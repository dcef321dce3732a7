//! Reads the golden vectors beside this file, which `make_ml_dtypes.py` wrote.

use std::collections::BTreeMap;

use serde::Deserialize;

/// `formats.json`.
#[derive(Deserialize)]
pub struct Formats {
    /// f32 bits of the value of every code, `None` for NaN.
    pub decode: BTreeMap<String, Vec<Option<u32>>>,
    /// Codes of all f32 patterns, run-length coded: first pattern of the run, code.
    pub f32: BTreeMap<String, Vec<(u32, u8)>>,
    /// Codes of all bf16 patterns.
    pub bf16: BTreeMap<String, Vec<(u32, u8)>>,
    /// Codes of all f16 patterns.
    pub f16: BTreeMap<String, Vec<(u32, u8)>>,
    /// FNV-1a 64 of conversions with too many runs.
    pub hash: BTreeMap<String, String>,
}

/// The committed tables of formats.
pub fn formats() -> Formats {
    serde_json::from_str(include_str!("formats.json")).expect("formats.json is as make_ml_dtypes.py writes it")
}

/// The code that a run-length coded table gives to `pattern`.
pub fn look_up(runs: &[(u32, u8)], pattern: u32) -> u8 {
    runs[runs.partition_point(|&(first, _)| first <= pattern) - 1].1
}

/// FNV-1a 64 over the little-endian bytes of `codes`, as the file spells it.
pub fn hash(codes: impl Iterator<Item = u16>) -> String {
    let step = |h: u64, byte: u8| (h ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let h = codes.flat_map(u16::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, step);
    format!("{h:016x}")
}

/// `sample.bin`: f32 bits, bf16 code, f16 code.
pub fn sample() -> Vec<(u32, u16, u16)> {
    let (records, rest) = include_bytes!("sample.bin").as_chunks::<8>();
    assert!(rest.is_empty(), "sample.bin holds records of 8 bytes");
    let record =
        |r: &[u8; 8]| (u32::from_le_bytes([r[0], r[1], r[2], r[3]]), u16::from_le_bytes([r[4], r[5]]), u16::from_le_bytes([r[6], r[7]]));
    records.iter().map(record).collect()
}

/// The patterns at which a conversion may go wrong: both sides of every run boundary, two patterns deep.
pub fn boundaries(runs: &[(u32, u8)]) -> impl Iterator<Item = u32> + '_ {
    runs.iter().flat_map(|&(first, _)| (-2..=2).map(move |ulps| first.wrapping_add_signed(ulps)))
}
