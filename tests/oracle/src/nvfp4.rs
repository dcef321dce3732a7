//! Rowwise NVFP4: blocks of 16 along the last dimension, one E4M3 scale a block, one f32 a tensor.
//!
//! Formulas: TransformerEngine `common/cast/nvfp4/core_nvfp4.cuh`, `dequantize_nvfp4.cuh`. All steps rounded to f32
//! as the formulas say,
//!
//! ```text
//! encode     = min(2688 / amax, MAX)           1 where that is 0 or amax is
//! scale      = e4m3(min(amax(block) * (encode * (1/6)), MAX))
//! multiplier = min(1 / (value(scale) * (1 / encode)), MAX)
//! code       = e2m1(x * multiplier)            nearest, ties to even, saturating; NaN is +6
//! decoded    = value(code) * (value(scale) * amax * (1/2688))
//! ```

use super::amax::amax;
use super::formats::{E2M1, E4M3};

/// Elements that share a scale.
pub const BLOCK: usize = 16;

/// A tensor [M, K] in NVFP4.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized {
    /// Pairs of codes [M, K / 2], the even element in the low nibble.
    pub data: Vec<u8>,
    /// E4M3 codes [M, K / 16], compact.
    pub scales: Vec<u8>,
    /// The amax that the tensor was cast with.
    pub amax: f32,
}

/// The cast of `x`, whole blocks, values of f32, f16 or bf16 given exactly, of a tensor with this amax.
pub fn quantize(x: &[f32], tensor_amax: f32) -> Quantized {
    quantize_by(x, tensor_amax, |_, x| E2M1.encode(f64::from(x)) as u8)
}

/// The same with another rounding: the code of an element and its scaled value.
pub fn quantize_by(x: &[f32], tensor_amax: f32, round: impl Fn(usize, f32) -> u8) -> Quantized {
    quantize_shared(x, x, tensor_amax, round)
}

/// The same with the scales of other elements, `scaling`, which are as many.
pub fn quantize_shared(x: &[f32], scaling: &[f32], tensor_amax: f32, round: impl Fn(usize, f32) -> u8) -> Quantized {
    assert!(x.len().is_multiple_of(BLOCK));
    let encode = encode_scale(tensor_amax);
    let mut out = Quantized { data: Vec::new(), scales: Vec::new(), amax: tensor_amax };
    for (index, block) in x.chunks(BLOCK).enumerate() {
        let scale = block_scale(&scaling[index * BLOCK..][..BLOCK], encode);
        let multiplier = block_multiplier(scale, encode);
        let code = |i: usize| round(index * BLOCK + i, product(block[i], multiplier));
        out.scales.push(scale);
        out.data.extend((0..BLOCK).step_by(2).map(|i| code(i) | code(i + 1) << 4));
    }
    out
}

/// What a block's scale is found from where 16 by 16 elements of `[rows, columns]` share one: the same largest magnitude in
/// every block of a square, in the place of the elements.
pub fn squares(x: &[f32], columns: usize) -> Vec<f32> {
    let square = |i: usize| {
        let (row, column) = (i / columns / BLOCK * BLOCK, i % columns / BLOCK * BLOCK);
        let rows = (row..row + BLOCK).flat_map(|row| x[row * columns + column..][..BLOCK].iter().copied());
        amax(&rows.collect::<Vec<_>>())
    };
    (0..x.len()).map(square).collect()
}

/// The transpose of `[rows, columns]`: what the columnwise cast is the cast of.
pub fn transpose<T: Copy>(x: &[T], columns: usize) -> Vec<T> {
    (0..columns).flat_map(|column| x.iter().skip(column).step_by(columns.max(1)).copied()).collect()
}

/// The random Hadamard transform of whole blocks: `H (d x) / 4`, signs `d` of TransformerEngine
/// `pytorch/tensor/nvfp4_tensor.py`, where `H [a; b] = [H a + H b; H a - H b]`, in f32.
pub fn hadamard(x: &[f32]) -> Vec<f32> {
    const SIGNS: [i8; BLOCK] = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1];
    fn transform(x: &[f32]) -> Vec<f32> {
        if x.len() == 1 {
            return x.to_vec();
        }
        let (a, b) = x.split_at(x.len() / 2);
        let (a, b) = (transform(a), transform(b));
        let sums = a.iter().zip(&b).map(|(a, b)| a + b);
        sums.chain(a.iter().zip(&b).map(|(a, b)| a - b)).collect()
    }
    let signed = |block: &[f32]| block.iter().zip(SIGNS).map(|(x, sign)| x * f32::from(sign)).collect::<Vec<_>>();
    x.chunks(BLOCK).flat_map(|block| transform(&signed(block))).map(|y| y * 0.25).collect()
}

/// The values of a cast in f32.
pub fn dequantize(quantized: &Quantized) -> Vec<f32> {
    let reciprocal = (1.0 / 2688.0_f64) as f32;
    let factor = |scale: u8| product(product(E4M3.decode(u32::from(scale)) as f32, quantized.amax), reciprocal);
    let factors: Vec<f32> = quantized.scales.iter().map(|&scale| factor(scale)).collect();
    let codes = quantized.data.iter().flat_map(|&pair| [pair & 0xf, pair >> 4]);
    codes.enumerate().map(|(i, code)| product(E2M1.decode(u32::from(code)) as f32, factors[i / BLOCK])).collect()
}

/// The tensor's encode scale.
pub fn encode_scale(amax: f32) -> f32 {
    encode_scale_of(448.0, amax)
}

/// That of a tensor whose amax is mapped to 6 times this scale.
pub(super) fn encode_scale_of(largest_scale: f32, amax: f32) -> f32 {
    let scale = at_most_max(quotient(6.0 * largest_scale, amax));
    if amax == 0.0 || scale == 0.0 { 1.0 } else { scale }
}

/// The E4M3 code of a block.
pub fn block_scale(block: &[f32], encode: f32) -> u8 {
    let sixth = (1.0 / 6.0_f64) as f32;
    E4M3.encode(f64::from(at_most_max(product(amax(block), product(encode, sixth))))) as u8
}

/// What the elements of a block are multiplied by.
pub(super) fn block_multiplier(scale: u8, encode: f32) -> f32 {
    at_most_max(quotient(1.0, product(E4M3.decode(u32::from(scale)) as f32, quotient(1.0, encode))))
}

/// CUDA's `fminf(x, FLT_MAX)`: a NaN loses.
pub(super) fn at_most_max(x: f32) -> f32 {
    if x <= f32::MAX { x } else { f32::MAX }
}

/// An f32 product: exact in f64, rounded once.
pub(super) fn product(a: f32, b: f32) -> f32 {
    (f64::from(a) * f64::from(b)) as f32
}

/// An f32 quotient.
pub(super) fn quotient(a: f32, b: f32) -> f32 {
    a / b
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden_nvfp4 as golden;

    #[test]
    fn golden_tensors() {
        for tensor in golden::tensors() {
            let input = tensor.input();
            assert_eq!(amax(&input).to_bits(), tensor.amax().to_bits(), "amax of {}", tensor.name);
            let ours = quantize(&input, tensor.amax());
            assert_eq!(encode_scale(ours.amax).to_bits(), tensor.encode_scale().to_bits(), "encode scale of {}", tensor.name);
            assert_eq!(ours.scales, tensor.scales(), "scales of {}", tensor.name);
            assert_eq!(ours.data, tensor.data(), "data of {}", tensor.name);
            let bits = |values: Vec<f32>| values.into_iter().map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() }).collect::<Vec<_>>();
            assert_eq!(bits(dequantize(&ours)), bits(tensor.dequantized()), "values of {}", tensor.name);
        }
    }

    #[test]
    fn a_block_by_hand() {
        // amax 2688: the encode scale is 1. Block amax 24: scale 24 / 6 = 4, multiplier 1 / 4.
        let mut x = [0.0; 32];
        x[..8].copy_from_slice(&[24.0, -24.0, 1.0, -1.0, 3.0, 5.0, 7.0, 10.0]);
        x[8..12].copy_from_slice(&[14.0, 20.0, f32::NAN, -f32::NAN]);
        x[16] = -2688.0;
        let quantized = quantize(&x, 2688.0);
        // 4 is 1.0 * 2^2: exponent 2 + 7, mantissa 0. 448 is the largest.
        assert_eq!(quantized.scales, [9 << 3, 0x7e]);
        // Quarters: 6, -6, .25 (ties to 0), -.25, .75 (ties to 1), 1.25 (to 1), 1.75 (to 2), 2.5 (to 2), 3.5 (to 4), 5 (to 4).
        assert_eq!(quantized.data[..6], [0xf7, 0x80, 0x22, 0x44, 0x66, 0x77]);
        assert_eq!(quantized.data[6..], [0, 0, 0x0f, 0, 0, 0, 0, 0, 0, 0]);
        let decoded = dequantize(&quantized);
        let expected = [24.0, -24.0, 0.0, -0.0, 4.0, 4.0, 8.0, 8.0, 16.0, 16.0, 24.0, 24.0];
        for (found, expected) in decoded.iter().zip(expected) {
            assert!((found - expected).abs() <= expected.abs() * f32::EPSILON, "{found} {expected}");
        }
    }

    #[test]
    fn hadamard_is_orthogonal_but_for_its_signs() {
        let x: Vec<f32> = (0..16).map(|i| (i * i % 23) as f32).collect();
        let y = hadamard(&x);
        let square = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>();
        assert_eq!(square(&x), square(&y));
        // The first is a quarter of the signed sum, the second alternates.
        let signs = 0xd7e8_u32;
        let signed = |i: usize| if signs >> i & 1 == 1 { -x[i] } else { x[i] };
        assert_eq!(y[0], (0..16).map(signed).sum::<f32>() / 4.0);
        assert_eq!(y[1], (0..16).map(|i| if i % 2 == 1 { -signed(i) } else { signed(i) }).sum::<f32>() / 4.0);
    }

    #[test]
    fn corners_of_the_encode_scale() {
        assert_eq!(encode_scale(0.0), 1.0);
        assert_eq!(encode_scale(f32::INFINITY), 1.0);
        assert_eq!(encode_scale(1e-38), f32::MAX);
        assert_eq!(encode_scale(f32::NAN), f32::MAX);
        assert_eq!(encode_scale(2688.0), 1.0);
        // A block that is nothing beside its tensor: scale 0, what is not nearly zero saturates and decodes to 0.
        let mut x = [1e-9_f32; 32];
        (x[0], x[17]) = (0.0, 1.0);
        let quantized = quantize(&x, 1.0);
        assert_eq!((quantized.scales[0], quantized.data[0], quantized.data[1]), (0, 0x70, 0x77));
        assert!(dequantize(&quantized)[..16].iter().all(|&value| value == 0.0));
    }
}
