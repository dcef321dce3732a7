//! The random Hadamard transform of 16 neighbours of a column.
//!
//! `y = 1/4 H (d x)`: TransformerEngine `pytorch/tensor/nvfp4_tensor.py`, with its signs `d`; `H` is Sylvester's matrix, so that
//! `y[j]` is a quarter of the sum of `d[i] x[i]`, negated where `i & j` has an odd number of bits. In `f32`, by a
//! butterfly of four stages whose order is fixed: neighbours at distance 1, 2, 4, 8, each pair to sum and
//! difference, then the product with 1/4.

use oxtile_tile::num::max;

use super::BLOCK;

/// The elements that are negated.
const NEGATIVE: u32 = 0xd7e8;

/// The transform of 16 values.
#[inline(always)]
pub(super) fn transform(x: [f32; BLOCK as usize]) -> [f32; BLOCK as usize] {
    stage::<8>(stage::<4>(stage::<2>(stage::<1>(signed(x))))).map(|y| y * 0.25)
}

/// Element `j` of the transform alone, whatever `j`, by the same additions.
#[inline(always)]
pub(super) fn element(x: [f32; BLOCK as usize], j: u32) -> f32 {
    let mut x = signed(x);
    // After each stage the first elements are those of the butterfly whose number has the low bits of `j`.
    for (stage, pairs) in [8, 4, 2, 1].into_iter().enumerate() {
        let sign = j >> stage << 31;
        for i in 0..pairs {
            x[i] = x[2 * i] + f32::from_bits(x[2 * i + 1].to_bits() ^ sign);
        }
    }
    x[0] * 0.25
}

/// With the signs of the transform.
#[inline(always)]
fn signed(x: [f32; BLOCK as usize]) -> [f32; BLOCK as usize] {
    core::array::from_fn(|i| if NEGATIVE >> i & 1 == 1 { -x[i] } else { x[i] })
}

/// Sums and differences of neighbours at this distance.
#[inline(always)]
fn stage<const DISTANCE: usize>(x: [f32; BLOCK as usize]) -> [f32; BLOCK as usize] {
    core::array::from_fn(|i| if i & DISTANCE == 0 { x[i] + x[i + DISTANCE] } else { x[i - DISTANCE] - x[i] })
}

/// The largest magnitude of the transform of 16 values, NaN dropped, as [`amax`] of [`transform`] has it, without its last stage: the larger
/// magnitude of a sum and a difference is the sum of the magnitudes, and rounding and the product with 1/4 keep the order.
#[inline(always)]
pub(super) fn transformed_amax(x: [f32; BLOCK as usize]) -> f32 {
    let x = stage::<4>(stage::<2>(stage::<1>(signed(x))));
    let largest = (0..8).fold(0.0, |running, i| max(running, x[i].abs() + x[i + 8].abs()));
    largest * 0.25
}

/// The largest magnitude, NaN dropped.
#[inline(always)]
pub(super) fn amax(values: &[f32; BLOCK as usize]) -> f32 {
    values.iter().fold(0.0, |running, x| max(running, x.abs()))
}
