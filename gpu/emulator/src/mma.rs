//! Matrix multiplication by a warp (PTX ISA, "Matrix multiply-accumulate operation using mma instruction").
//!
//! Operands and result are in the lanes' registers, in the hardware's fragments; no memory takes part. Products are exact,
//! summed in `f64`, added to the accumulator and rounded to `f32` once; hardware rounds in another way, which is not
//! documented.

use crate::collective;
use crate::format::Format;
use crate::order::Group;
use crate::site::Site;
use crate::thread::Thread;

const ROWS: usize = 16;
const COLUMNS: usize = 8;

/// What a lane brings, and its part of the result.
struct Part {
    sums: [f32; 4],
    left: [u32; 4],
    right: [u32; 2],
}

/// `mma.m16n8k16`, or `k32` for formats of 8 bits: 32 bytes of the sum either way.
pub(crate) fn multiply(thread: &Thread, format: Format, sums: [f32; 4], left: [u32; 4], right: [u32; 2], site: Site) -> [f32; 4] {
    let mut part = Part { sums, left, right };
    collective::meet(thread, Group::Warp(u32::MAX), &mut part, |parts| execute(parts, format), site);
    part.sums
}

fn execute(parts: &mut [&mut Part], format: Format) {
    let depth = format.depth();
    let (mut a, mut b) = (vec![0.0; ROWS * depth], vec![0.0; COLUMNS * depth]);
    for (lane, part) in parts.iter().enumerate() {
        for (i, &word) in part.left.iter().enumerate() {
            let row = lane / 4 + 8 * (i % 2);
            format.spread(word, 4 * (lane % 4) + 16 * (i / 2), &mut a[row * depth..][..depth]);
        }
        for (i, &word) in part.right.iter().enumerate() {
            format.spread(word, 4 * (lane % 4) + 16 * i, &mut b[lane / 4 * depth..][..depth]);
        }
    }
    for (lane, part) in parts.iter_mut().enumerate() {
        for (i, sum) in part.sums.iter_mut().enumerate() {
            let (row, column) = (lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2);
            let products = a[row * depth..][..depth].iter().zip(&b[column * depth..][..depth]);
            *sum = (f64::from(*sum) + products.map(|(a, b)| a * b).sum::<f64>()) as f32;
        }
    }
}
