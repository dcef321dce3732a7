//! NVFP4 by other rules: four over six, and an amax for each row.
//!
//! Formulas of four over six: TransformerEngine `common/cast/nvfp4/quantize_4over6_nvfp4.cuh`. A block is cast with two scales,
//! and that is kept whose error is less, the first if both are the same; all steps rounded to f32:
//!
//! ```text
//! base   = amax(block) / 6 * encode                    encode as ever, of the largest scale L instead of 448
//! scales = e4m3(min(base, 448)), e4m3(min(base * 1.5, 448))
//! error  = sum, from the first element on, of |d| or d^2, with d = value(code) * value(scale) * amax / (6 L) - x
//! ```

use super::amax::amax;
use super::formats::{E2M1, E4M3};
use super::nvfp4::{BLOCK, Quantized, at_most_max, block_multiplier, encode_scale_of, product, quantize, quotient};

/// How a block's scale is found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// The block's amax becomes 6.
    ToSix,
    /// It becomes 6 or 4.
    FourOverSix {
        /// By the squares of the errors.
        squared: bool,
        /// The largest scale, 448 or 256.
        largest_scale: f32,
    },
}

impl Rule {
    /// The largest scale that a tensor's amax is mapped to.
    pub fn largest_scale(self) -> f32 {
        match self {
            Self::ToSix => 448.0,
            Self::FourOverSix { largest_scale, .. } => largest_scale,
        }
    }

    /// The cast of whole blocks of a tensor with this amax.
    pub fn quantize(self, x: &[f32], tensor_amax: f32) -> Quantized {
        let Self::FourOverSix { squared, largest_scale } = self else { return quantize(x, tensor_amax) };
        let encode = encode_scale_of(largest_scale, tensor_amax);
        let mut out = Quantized { data: Vec::new(), scales: Vec::new(), amax: tensor_amax };
        for block in x.chunks(BLOCK) {
            let base = product(quotient(amax(block), 6.0), encode);
            let candidate = |wanted: f32| {
                let scale = E4M3.encode(f64::from(if wanted <= 448.0 { wanted } else { 448.0 })) as u8;
                let multiplier = at_most_max(block_multiplier(scale, encode));
                let codes: Vec<u8> = block.iter().map(|&x| E2M1.encode(f64::from(product(x, multiplier))) as u8).collect();
                let error = codes.iter().zip(block).fold(0.0_f32, |error, (&code, x)| {
                    let scaled = product(E2M1.decode(code.into()) as f32, E4M3.decode(scale.into()) as f32);
                    let lost = quotient(product(scaled, tensor_amax), 6.0 * largest_scale) - x;
                    error + if squared { product(lost, lost) } else { lost.abs() }
                });
                (scale, codes, error)
            };
            let (six, four) = (candidate(base), candidate(product(base, 1.5)));
            let (scale, codes, _) = if four.2 < six.2 { four } else { six };
            out.scales.push(scale);
            out.data.extend(codes.chunks(2).map(|pair| pair[0] | pair[1] << 4));
        }
        out
    }

    /// The cast of each row with its own amax; and those.
    pub fn quantize_rows(self, x: &[f32], columns: usize) -> (Quantized, Vec<f32>) {
        let mut out = Quantized { data: Vec::new(), scales: Vec::new(), amax: 0.0 };
        let mut amaxes = Vec::new();
        for row in x.chunks(columns.max(1)) {
            let of_row = amax(row);
            let cast = self.quantize(row, of_row);
            out.data.extend(cast.data);
            out.scales.extend(cast.scales);
            amaxes.push(of_row);
        }
        (out, amaxes)
    }
}

/// The values of a cast, `blocks` of them a row, one amax for each row or one for all.
pub fn dequantize_rows(data: &[u8], scales: &[u8], amaxes: &[f32], blocks: usize, largest_scale: f32) -> Vec<f32> {
    let reciprocal = (1.0 / (6.0 * f64::from(largest_scale))) as f32;
    let factor = |block: usize| {
        let amax = amaxes[if amaxes.len() == 1 { 0 } else { block / blocks }];
        product(product(E4M3.decode(scales[block].into()) as f32, amax), reciprocal)
    };
    let codes = data.iter().flat_map(|&pair| [pair & 0xf, pair >> 4]);
    codes.enumerate().map(|(i, code)| product(E2M1.decode(code.into()) as f32, factor(i / BLOCK))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden_nvfp4_reference as golden;
    use crate::nvfp4::{hadamard, quantize_shared, squares, transpose};

    fn rule_of(name: &str) -> Rule {
        let largest_scale = if name.ends_with("256") { 256.0 } else { 448.0 };
        if name.contains("4over6") { Rule::FourOverSix { squared: name.contains("squared"), largest_scale } } else { Rule::ToSix }
    }

    /// TransformerEngine's own reference gives these bytes.
    #[test]
    fn reference_tensors() {
        for tensor in golden::tensors() {
            let (x, columns) = (tensor.input(), tensor.columns);
            for cast in &tensor.casts {
                let (x, of_squares) = match cast.direction.as_str() {
                    "rows" => (x.clone(), squares(&x, columns)),
                    _ => (transpose(&x, columns), transpose(&squares(&x, columns), columns)),
                };
                let x = if cast.name == "hadamard" && cast.direction == "columns" { hadamard(&x) } else { x };
                let (ours, amaxes) = match cast.name.as_str() {
                    name if name.contains("scaled rows") => rule_of(name).quantize_rows(&x, columns),
                    "squares" => (quantize_shared(&x, &of_squares, amax(&x), |_, x| E2M1.encode(f64::from(x)) as u8), vec![amax(&x)]),
                    name => (rule_of(name).quantize(&x, amax(&x)), vec![amax(&x)]),
                };
                let name = format!("{} of {}, {}", cast.name, tensor.name, cast.direction);
                assert_eq!(amaxes, cast.amax(), "amax: {name}");
                assert_eq!(ours.scales, cast.scales(), "scales: {name}");
                assert_eq!(ours.data, cast.data(), "data: {name}");
            }
        }
    }

    #[test]
    fn four_wins_where_it_loses_less() {
        // Encode scale 1. By 6: scale 4, 16 becomes 4. By 4: scale 6, 24 and 18 are 4 and 3 times it.
        let mut x = [18.0; 32];
        (x[0], x[16]) = (24.0, 2688.0);
        let cast = |rule: Rule| rule.quantize(&x, 2688.0);
        let four = cast(Rule::FourOverSix { squared: false, largest_scale: 448.0 });
        assert_eq!((four.scales[0], four.data[0], four.data[1]), (9 << 3 | 4, 0x56, 0x55));
        assert_eq!(cast(Rule::ToSix).scales[0], 9 << 3);
        let back = dequantize_rows(&four.data, &four.scales, &[2688.0], 2, 448.0);
        assert!((back[0] - 24.0).abs() < 1e-5 && (back[1] - 18.0).abs() < 1e-5, "{back:?}");
    }
}
