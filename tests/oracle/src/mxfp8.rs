//! MXFP8: blocks of 32 along the last dimension or, columnwise, along the first, one power of two a block.
//!
//! Formulas: TransformerEngine `common/cast/mxfp8/quantize_mxfp8.cuh`, OCP Microscaling Formats 1.0. With `max` the
//! largest element value and all steps rounded to f32 as the formulas say,
//!
//! ```text
//! scale   = round_up(amax(block) * (1 / max))        to a power of two, 2^-127 ..= 2^127
//! code    = round(x * (1 / scale))                   nearest even, saturating
//! decoded = value(code) * scale
//! ```

use super::amax::amax;
use super::formats::{Format, e8m0};

/// Elements that share a scale.
pub const BLOCK: usize = 32;

/// A tensor [M, K] in MXFP8, rowwise or columnwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantized {
    /// Element codes [M, K].
    pub data: Vec<u8>,
    /// E8M0 codes [M, ceil(K / 32)] or, columnwise, [ceil(M / 32), K], compact.
    pub scales: Vec<u8>,
}

/// The cast of `x`, [rows, columns] row-major, values of f32, f16 or bf16 given exactly; the last block of a row
/// may be short. `format` is `E4M3` or `E5M2`.
pub fn quantize(x: &[f32], rows: usize, columns: usize, format: &Format) -> Quantized {
    assert_eq!(x.len(), rows * columns);
    let mut out = Quantized { data: Vec::with_capacity(x.len()), scales: Vec::new() };
    for row in 0..rows {
        for block in x[row * columns..(row + 1) * columns].chunks(BLOCK) {
            let scale = block_scale(block, format);
            out.scales.push(scale);
            out.data.extend(block.iter().map(|&value| encode(value, scale, format)));
        }
    }
    out
}

/// The values of a cast, [rows, columns], in f32.
pub fn dequantize(quantized: &Quantized, rows: usize, columns: usize, format: &Format) -> Vec<f32> {
    let blocks = columns.div_ceil(BLOCK);
    let mut out = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            let scale = e8m0::decode(quantized.scales[row * blocks + column / BLOCK]);
            let value = format.decode(u32::from(quantized.data[row * columns + column]));
            // Two factors of at most 4 significant bits: exact in f64, rounded once.
            out.push((value * scale) as f32);
        }
    }
    out
}

/// The columnwise cast of `x`, [rows, columns] row-major: 32 rows of one column share a scale, the last of them fewer.
pub fn quantize_columns(x: &[f32], rows: usize, columns: usize, format: &Format) -> Quantized {
    assert_eq!(x.len(), rows * columns);
    let mut out = Quantized { data: vec![0; x.len()], scales: vec![0; rows.div_ceil(BLOCK) * columns] };
    for first in (0..rows).step_by(BLOCK) {
        for column in 0..columns {
            let places: Vec<usize> = (first..rows.min(first + BLOCK)).map(|row| row * columns + column).collect();
            let block: Vec<f32> = places.iter().map(|&place| x[place]).collect();
            let scale = block_scale(&block, format);
            out.scales[first / BLOCK * columns + column] = scale;
            places.into_iter().zip(block).for_each(|(place, value)| out.data[place] = encode(value, scale, format));
        }
    }
    out
}

/// The values of a columnwise cast, [rows, columns], in f32.
pub fn dequantize_columns(quantized: &Quantized, rows: usize, columns: usize, format: &Format) -> Vec<f32> {
    let value = |row: usize, column: usize| {
        let scale = e8m0::decode(quantized.scales[row / BLOCK * columns + column]);
        (format.decode(u32::from(quantized.data[row * columns + column])) * scale) as f32
    };
    (0..rows * columns).map(|i| value(i / columns, i % columns)).collect()
}

/// The casts along rows and along columns where 32 by 32 elements share a scale: one of both in either direction, and the
/// same data.
pub fn quantize_squares(x: &[f32], rows: usize, columns: usize, format: &Format) -> [Quantized; 2] {
    let (row_blocks, column_blocks) = (rows.div_ceil(BLOCK), columns.div_ceil(BLOCK));
    let square = |i: usize, j: usize| {
        let places = (i * BLOCK..rows.min((i + 1) * BLOCK))
            .flat_map(|row| (j * BLOCK..columns.min((j + 1) * BLOCK)).map(move |c| row * columns + c));
        block_scale(&places.map(|place| x[place]).collect::<Vec<_>>(), format)
    };
    let scales: Vec<u8> = (0..row_blocks * column_blocks).map(|at| square(at / column_blocks, at % column_blocks)).collect();
    let scale = |row: usize, column: usize| scales[row / BLOCK * column_blocks + column / BLOCK];
    let data: Vec<u8> = (0..x.len()).map(|at| encode(x[at], scale(at / columns, at % columns), format)).collect();
    let by_rows = (0..rows * column_blocks).map(|at| scale(at / column_blocks, at % column_blocks * BLOCK)).collect();
    let by_columns = (0..row_blocks * columns).map(|at| scale(at / columns * BLOCK, at % columns)).collect();
    [Quantized { data: data.clone(), scales: by_rows }, Quantized { data, scales: by_columns }]
}

/// The E8M0 code of a block.
pub fn block_scale(block: &[f32], format: &Format) -> u8 {
    let reciprocal = (1.0 / format.largest()) as f32;
    e8m0::round_up(f64::from(product(amax(block), f64::from(reciprocal))))
}

fn encode(x: f32, scale: u8, format: &Format) -> u8 {
    format.encode(f64::from(product(x, e8m0::multiplier(scale)))) as u8
}

/// An f32 product: exact in f64, rounded once.
fn product(a: f32, b: f64) -> f32 {
    (f64::from(a) * b) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{E4M3, E5M2};
    use crate::golden_mxfp8 as golden;

    /// Bits with any NaN as one.
    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| if v.is_nan() { 0x7fff_ffff } else { v.to_bits() }).collect()
    }

    #[test]
    fn golden_tensors() {
        for tensor in golden::tensors() {
            for (format, cast) in [(&E4M3, &tensor.e4m3), (&E5M2, &tensor.e5m2)] {
                let title = format!("{} ({}) in {}", tensor.name, tensor.dtype, format.name);
                let (rows, columns) = (tensor.rows, tensor.columns);
                let ours = quantize(&tensor.input(), rows, columns, format);
                assert_eq!(ours.scales, cast.scales(), "scales of {title}");
                assert_eq!(ours.data, cast.data(), "data of {title}");
                let values = dequantize(&ours, rows, columns, format);
                assert_eq!(bits(&values), bits(&cast.dequantized()), "values of {title}");
            }
        }
    }

    /// 33 rows of two columns by hand. 448 needs the scale 1 (code 127), 3.5 the scale 2^-7, and 896 the scale 2.
    #[test]
    fn columns_by_hand() {
        let (mut x, mut data) = ([0.0; 66], [0; 66]);
        (x[0], x[62], x[64]) = (448.0, -1.0, 896.0); // column 0: rows 0 and 31 share a block, row 32 has its own
        (x[3], x[63], x[65]) = (3.5, 0.0, -0.0); // column 1: row 1, and zeros
        (data[0], data[62], data[64]) = (0x7e, 0xb8, 0x7e);
        (data[3], data[65]) = (0x7e, 0x80);
        let expected = Quantized { data: data.to_vec(), scales: vec![127, 120, 128, 0] };
        let found = quantize_columns(&x, 33, 2, &E4M3);
        assert_eq!(found, expected);
        assert_eq!(dequantize_columns(&found, 33, 2, &E4M3), x);
    }

    #[test]
    fn empty_tensors() {
        for (rows, columns) in [(0, 32), (3, 0), (0, 0)] {
            let empty = quantize(&[], rows, columns, &E4M3);
            assert!(empty.data.is_empty() && empty.scales.is_empty());
            assert!(dequantize(&empty, rows, columns, &E4M3).is_empty());
            let empty = quantize_columns(&[], rows, columns, &E4M3);
            assert!(empty.data.is_empty() && empty.scales.is_empty());
            assert!(dequantize_columns(&empty, rows, columns, &E4M3).is_empty());
        }
    }

    #[test]
    fn a_finite_block_never_saturates() {
        // The scale rounds up: the largest element stays within the format, even just above a power of two.
        for format in [&E4M3, &E5M2] {
            for exponent in -100..100 {
                for ulps in -8..=8 {
                    let edge = (format.largest() * 2f64.powi(exponent)) as f32;
                    let x = f32::from_bits(edge.to_bits().wrapping_add_signed(ulps));
                    let scaled = f64::from(x) * e8m0::multiplier(block_scale(&[x], format));
                    assert!(scaled <= format.largest(), "{x:e} in {}", format.name);
                }
            }
        }
    }
}
