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

/// An operand's rows along K.
type Rows<const COUNT: usize> = [[f64; Format::DEEPEST]; COUNT];

/// Not inlined: 31 lanes wait in [`multiply`], and these operands would add 7 KiB to the frame of each (a tenth of the time of attention's tests).
#[inline(never)]
fn execute(parts: &mut [&mut Part], format: Format) {
    let (mut a, mut b): (Rows<ROWS>, Rows<COLUMNS>) = ([[0.0; Format::DEEPEST]; ROWS], [[0.0; Format::DEEPEST]; COLUMNS]);
    for (lane, part) in parts.iter().enumerate() {
        for (i, &word) in part.left.iter().enumerate() {
            format.unpack(word, 4 * (lane % 4) + 16 * (i / 2), &mut a[lane / 4 + 8 * (i % 2)]);
        }
        for (i, &word) in part.right.iter().enumerate() {
            format.unpack(word, 4 * (lane % 4) + 16 * i, &mut b[lane / 4]);
        }
    }
    let products = products(&a, &b, format.depth());
    for (lane, part) in parts.iter_mut().enumerate() {
        for (i, sum) in part.sums.iter_mut().enumerate() {
            *sum = (f64::from(*sum) + products[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2]) as f32;
        }
    }
}

/// Each row's products with all columns, with the widest vectors that the machine has: the operations and their order are the same, and so are the bits.
#[multiversion::multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn products(a: &Rows<ROWS>, b: &Rows<COLUMNS>, depth: usize) -> [[f64; COLUMNS]; ROWS] {
    // Columns innermost, so that the loop over them is a vector's.
    let turned: [[f64; COLUMNS]; Format::DEEPEST] = std::array::from_fn(|k| std::array::from_fn(|n| b[n][k]));
    // A sum of nothing but -0 is -0.
    let mut products = [[-0.0; COLUMNS]; ROWS];
    for (row, sums) in a.iter().zip(&mut products) {
        for (a, columns) in row[..depth].iter().zip(&turned) {
            for (sum, b) in sums.iter_mut().zip(columns) {
                *sum += a * b;
            }
        }
    }
    products
}
