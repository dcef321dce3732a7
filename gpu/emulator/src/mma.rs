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
    // The right operand's columns are innermost, so that the loop over them is a vector's.
    let (mut a, mut b) = ([[0.0; Format::DEEPEST]; ROWS], [[0.0; COLUMNS]; Format::DEEPEST]);
    for (lane, part) in parts.iter().enumerate() {
        for (i, &word) in part.left.iter().enumerate() {
            let row = &mut a[lane / 4 + 8 * (i % 2)];
            format.elements(word, 4 * (lane % 4) + 16 * (i / 2)).for_each(|(k, value)| row[k] = value);
        }
        for (i, &word) in part.right.iter().enumerate() {
            format.elements(word, 4 * (lane % 4) + 16 * i).for_each(|(k, value)| b[k][lane / 4] = value);
        }
    }
    let products = a.map(|row| {
        // A sum of nothing but -0 is -0.
        let mut sums = [-0.0; COLUMNS];
        for (a, columns) in row[..depth].iter().zip(&b) {
            for (sum, b) in sums.iter_mut().zip(columns) {
                *sum += a * b;
            }
        }
        sums
    });
    for (lane, part) in parts.iter_mut().enumerate() {
        for (i, sum) in part.sums.iter_mut().enumerate() {
            *sum = (f64::from(*sum) + products[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2]) as f32;
        }
    }
}
