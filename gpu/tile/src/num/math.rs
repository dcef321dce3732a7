//! Scalar operations whose bits are pinned: the same on every target.

use crate::arch::{Convert, Target};

/// `a * b + c`, rounded once (`fma.rn.f32`). A plain `a * b + c` is never contracted.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    Target::fma(a, b, c)
}

/// The larger value; a NaN loses to a number, two NaN give 0x7FFFFFFF, and +0 is above -0 (`max.f32`).
#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    Target::max(a, b)
}

/// The smaller value; a NaN loses to a number, two NaN give 0x7FFFFFFF, and -0 is below +0 (`min.f32`).
#[inline(always)]
pub fn min(a: f32, b: f32) -> f32 {
    Target::min(a, b)
}

/// The low and the high half of `a * b` (`mul.wide.u32`).
#[inline(always)]
pub fn multiply_wide(a: u32, b: u32) -> [u32; 2] {
    let product = Target::multiply_wide(a, b);
    [product as u32, (product >> 32) as u32]
}

/// The same number, opaque to the compiler: it then keeps no pointers, for loops, into the array that the number indexes. One instruction
/// (`prmt.b32`).
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    Target::permute_bytes(value, 0, 0x3210)
}

/// The same number, which for the compiler depends on `changing`: in a loop where that changes, what follows from it is computed anew, and kept in
/// no registers. One instruction (`prmt.b32`).
#[inline(always)]
pub fn anew(value: u32, changing: u32) -> u32 {
    Target::permute_bytes(value, changing, 0x3210)
}

/// Four of the eight bytes of `b:a`, those of `a` being numbers 0 to 3: byte `i` of the result is the one that nibble `i` of
/// `selector` numbers, or eight times its sign where the nibble has its high bit (`prmt.b32`).
#[inline(always)]
pub fn permute_bytes(a: u32, b: u32, selector: u32) -> u32 {
    Target::permute_bytes(a, b, selector)
}
