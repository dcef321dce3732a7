//! Matrix multiplication by a warp: each lane's part of the result, in every format (PTX ISA, figures of the fragments of `mma.m16n8k16` and `k32`).

mod common;
use common::*;
use oxtile_emulator::{Format, Options, device};

const FORMATS: [Format; 4] = [Format::Bf16, Format::F16, Format::E4m3, Format::E5m2];

fn a(row: u32, k: u32) -> i32 {
    ((row * 7 + k * 3) % 5).cast_signed() - 2
}

fn b(column: u32, k: u32) -> i32 {
    ((column * 5 + k * k) % 7).cast_signed() - 3
}

/// Bytes of an element, and the codes of 0 to 3 and of a sign.
fn codes(format: Format) -> (u32, [u32; 4], u32) {
    match format {
        Format::Bf16 => (2, [0, 0x3f80, 0x4000, 0x4040], 0x8000),
        Format::F16 => (2, [0, 0x3c00, 0x4000, 0x4200], 0x8000),
        Format::E4m3 => (1, [0, 0x38, 0x40, 0x44], 0x80),
        Format::E5m2 => (1, [0, 0x3c, 0x40, 0x42], 0x80),
    }
}

/// The register that holds 4 bytes of a row.
fn word(format: Format, first_byte: u32, element: impl Fn(u32) -> i32) -> u32 {
    let (bytes, codes, sign) = codes(format);
    let code = |k: u32| codes[element(k).unsigned_abs() as usize] | if element(k) < 0 { sign } else { 0 };
    (0..4 / bytes).map(|i| code(first_byte / bytes + i) << (8 * bytes * i)).sum()
}

#[test]
fn every_lane_has_its_part_of_the_product() {
    let job = || {
        Job::new("products", 1, 32, 32, 0, |_| {
            let (group, lane) = (thread() / 4, thread() % 4);
            for format in FORMATS {
                let left = [0, 1, 2, 3].map(|i: u32| word(format, 4 * lane + 16 * (i / 2), |k| a(group + 8 * (i % 2), k)));
                let right = [0, 1].map(|i: u32| word(format, 4 * lane + 16 * i, |k| b(group, k)));
                let sums = [0, 1, 2, 3].map(|i: u32| (100 * i + thread()) as f32);
                let found = device::mma(format, sums, left, right);
                let expected = [0, 1, 2, 3].map(|i: u32| {
                    let (row, column) = (group + 8 * (i / 2), 2 * lane + i % 2);
                    let product: i32 = (0..32 / codes(format).0).map(|k| a(row, k) * b(column, k)).sum();
                    sums[i as usize] + product as f32
                });
                assert_eq!(found, expected, "{format:?}, lane {}", thread());
            }
        })
    };
    for seed in SEEDS {
        job().run(Options::check(seed)).expect("a right product");
    }
}
