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
    let signed = core::array::from_fn(|i| if NEGATIVE >> i & 1 == 1 { -x[i] } else { x[i] });
    stage::<8>(stage::<4>(stage::<2>(stage::<1>(signed)))).map(|y| y * 0.25)
}

/// Sums and differences of neighbours at this distance.
#[inline(always)]
fn stage<const DISTANCE: usize>(x: [f32; BLOCK as usize]) -> [f32; BLOCK as usize] {
    core::array::from_fn(|i| if i & DISTANCE == 0 { x[i] + x[i + DISTANCE] } else { x[i - DISTANCE] - x[i] })
}

/// The largest magnitude, NaN dropped.
#[inline(always)]
pub(super) fn amax(values: &[f32; BLOCK as usize]) -> f32 {
    values.iter().fold(0.0, |running, x| max(running, x.abs()))
}
