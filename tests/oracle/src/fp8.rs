//! FP8 with f32 scales: one for the tensor, for each 128 neighbours, or for each 128x128 square.
//!
//! Formulas: TransformerEngine `common/recipe/recipe_common.cuh`, `common/recipe/delayed_scaling.cu`. With `max` the largest element value
//! and all steps rounded to f32 as the formulas say,
//!
//! ```text
//! scale   = max / amax                 amax at least epsilon; 1 where it is 0 or Inf; a given value where the quotient is Inf
//! code    = round(x * scale)           nearest even, saturating
//! decoded = value(code) * (1 / scale)
//! ```

use super::amax::amax;
use super::formats::Format;

/// Neighbours that share a scale, and the side of a square.
pub const BLOCK: usize = 128;

/// How a scale follows from an amax.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// What a smaller amax counts as.
    pub epsilon: f32,
    /// Whether the scale is rounded down to a power of two.
    pub power_of_two: bool,
    /// The scale where it would be Inf.
    pub largest: f32,
}

/// A matrix with one scale a block.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized {
    /// Element codes, in the shape of the matrix.
    pub data: Vec<u8>,
    /// The inverses of the scales, [ceil(rows / block rows), ceil(columns / block columns)].
    pub inverses: Vec<f32>,
}

/// The scale of a tensor or block.
pub fn scale(amax: f32, format: &Format, rule: Rule) -> f32 {
    let amax = if amax < rule.epsilon { rule.epsilon } else { amax };
    if amax == 0.0 || !amax.is_finite() {
        return 1.0;
    }
    let scale = format.largest() as f32 / amax;
    let scale = if scale.is_infinite() { rule.largest } else { scale };
    if rule.power_of_two { power_below(scale) } else { scale }
}

/// The largest power of two that is not above `x`.
fn power_below(x: f32) -> f32 {
    let exponent = (-149..=127).rev().find(|&e| 2f64.powi(e) <= f64::from(x)).expect("a positive number");
    2f64.powi(exponent) as f32
}

/// The codes of `x`, values of f32, f16 or bf16 given exactly.
pub fn encode(x: &[f32], scale: f32, format: &Format) -> Vec<u8> {
    x.iter().map(|&value| format.encode(f64::from(product(value, scale))) as u8).collect()
}

/// The values of these codes.
pub fn decode(data: &[u8], inverse: f32, format: &Format) -> Vec<f32> {
    data.iter().map(|&code| product(format.decode(u32::from(code)) as f32, inverse)).collect()
}

/// The cast of `x`, [rows, columns], with one scale for each `block`, rows by columns; those at the edges are smaller.
pub fn quantize(x: &[f32], [rows, columns]: [usize; 2], block: [usize; 2], format: &Format, rule: Rule) -> Quantized {
    assert_eq!(x.len(), rows * columns);
    let mut out = Quantized { data: vec![0; x.len()], inverses: Vec::new() };
    for row in (0..rows).step_by(block[0]) {
        for column in (0..columns).step_by(block[1]) {
            let lines = row..rows.min(row + block[0]);
            let places: Vec<usize> = lines.flat_map(|r| (column..columns.min(column + block[1])).map(move |c| r * columns + c)).collect();
            let values: Vec<f32> = places.iter().map(|&place| x[place]).collect();
            let scale = scale(amax(&values), format, rule);
            out.inverses.push(1.0 / scale);
            places.into_iter().zip(encode(&values, scale, format)).for_each(|(place, code)| out.data[place] = code);
        }
    }
    out
}

/// The values of such a cast.
pub fn dequantize(quantized: &Quantized, [rows, columns]: [usize; 2], block: [usize; 2], format: &Format) -> Vec<f32> {
    let across = columns.div_ceil(block[1]);
    let inverse = |i: usize| quantized.inverses[i / columns / block[0] * across + i % columns / block[1]];
    (0..rows * columns).map(|i| decode(&quantized.data[i..=i], inverse(i), format)[0]).collect()
}

/// A tensor under delayed scaling: its amaxes, the first that of the step at hand, then from the oldest to the newest.
#[derive(Debug, Clone, PartialEq)]
pub struct Delayed {
    /// At least one.
    pub history: Vec<f32>,
    /// What elements are multiplied by.
    pub scale: f32,
}

impl Delayed {
    /// The end of a step, in which the ranks agreed on an amax of `agreed`, or 0 if they did not. `scaled_largest` is what the amax is to
    /// become; without `most_recent` the amax is the largest of the history.
    pub fn update(&mut self, agreed: f32, scaled_largest: f32, most_recent: bool) {
        let latest = if agreed == 0.0 { self.history[0] } else { agreed };
        if latest == 0.0 {
            return;
        }
        self.history.remove(0);
        self.history.push(latest);
        let amax = if most_recent { latest } else { amax(&self.history) };
        self.history[0] = 0.0;
        if amax.is_finite() && amax > 0.0 {
            self.scale = (scaled_largest / amax).min(f32::MAX);
        }
    }
}

/// The transpose of a matrix [rows, columns].
pub fn transpose<T: Copy>(x: &[T], [rows, columns]: [usize; 2]) -> Vec<T> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| x[row * columns + column])).collect()
}

/// An f32 product: exact in f64, rounded once.
fn product(a: f32, b: f32) -> f32 {
    (f64::from(a) * f64::from(b)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{E4M3, E5M2};
    use crate::golden_fp8 as golden;
    use crate::inputs::Dtype;

    #[test]
    fn golden_tensors() {
        for tensor in golden::tensors() {
            let shape = [tensor.rows, tensor.columns];
            let dtype = Dtype::ALL.into_iter().find(|dtype| dtype.name() == tensor.dtype).expect("a known type");
            for casts in &tensor.casts {
                let format = if casts.format == "e4m3" { &E4M3 } else { &E5M2 };
                let rule = |largest| Rule { epsilon: casts.epsilon, power_of_two: casts.power_of_two, largest };
                let of_type = rule(dtype.largest());
                let scaled = [
                    ("tensor", &casts.tensor, shape, rule(f32::MAX)),
                    ("row blocks", &casts.row_blocks, [1, BLOCK], of_type),
                    ("squares", &casts.squares, [BLOCK, BLOCK], of_type),
                ];
                for (what, cast, block, rule) in scaled {
                    let title = format!("{what} of {} in {}, {rule:?}", tensor.name, casts.format);
                    let ours = quantize(&tensor.input(), shape, block, format, rule);
                    assert_eq!(ours.inverses, cast.inverses(), "inverses, {title}");
                    assert_eq!(ours.data, cast.data(), "data, {title}");
                }
            }
        }
    }

    const PLAIN: Rule = Rule { epsilon: 0.0, power_of_two: false, largest: f32::MAX };

    #[test]
    fn corners_of_the_scale() {
        for amax in [0.0, f32::INFINITY, f32::NAN] {
            assert_eq!(scale(amax, &E4M3, PLAIN), 1.0);
        }
        assert_eq!(scale(448.0, &E4M3, PLAIN), 1.0);
        assert_eq!(scale(1e-38, &E4M3, PLAIN), f32::MAX);
        assert_eq!(scale(1e-38, &E4M3, Rule { largest: 65504.0, power_of_two: true, ..PLAIN }), 32768.0);
        assert_eq!(scale(0.0, &E5M2, Rule { epsilon: 2.0, ..PLAIN }), 28672.0);
        assert_eq!(scale(3.0, &E4M3, Rule { power_of_two: true, ..PLAIN }), 128.0);
    }

    #[test]
    fn delayed_steps_by_hand() {
        let mut tensor = Delayed { history: vec![4.0, 1.0, 2.0], scale: 1.0 };
        tensor.update(0.0, 448.0, false);
        // The 1 of three steps ago has left; 4 is the newest.
        assert_eq!(tensor, Delayed { history: vec![0.0, 2.0, 4.0], scale: 112.0 });
        tensor.update(0.0, 448.0, false);
        assert_eq!(tensor, Delayed { history: vec![0.0, 2.0, 4.0], scale: 112.0 });
        tensor.update(7.0, 448.0, true);
        assert_eq!(tensor, Delayed { history: vec![0.0, 4.0, 7.0], scale: 64.0 });
        tensor.update(f32::INFINITY, 448.0, false);
        assert_eq!(tensor, Delayed { history: vec![0.0, 7.0, f32::INFINITY], scale: 64.0 });
        tensor.update(1e-39, 448.0, true);
        assert_eq!(tensor.scale, f32::MAX);
    }

    #[test]
    fn a_tensor_by_hand() {
        // amax 224: the scale is 2; -1.03 * 2 = -2.06 is nearest to -2, and Inf beside it would be the largest code.
        let cast = quantize(&[224.0, -1.03, 0.0, f32::NAN], [2, 2], [2, 2], &E4M3, PLAIN);
        assert_eq!(cast, Quantized { data: vec![0x7e, 0xc0, 0, 0x7f], inverses: vec![0.5] });
        assert_eq!(dequantize(&cast, [2, 2], [2, 2], &E4M3)[..3], [224.0, -1.0, 0.0]);
        assert_eq!(transpose(&cast.data, [2, 2]), [0x7e, 0, 0xc0, 0x7f]);
        assert_eq!(quantize(&[f32::INFINITY, 3.0], [1, 2], [1, 2], &E5M2, PLAIN).data, [0x7b, 0x42]);
    }
}
