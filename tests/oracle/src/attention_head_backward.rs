//! The gradients of attention of one head of one sequence in f64, with everything that scores can be subject to.

use super::attention_head::Head;
use super::rows::{add, dot, magnitudes, rows};

/// The gradients of `sum(out * grad_out)`, and for each element the sum of the magnitudes of its terms, which errors are measured
/// by.
pub struct Gradients {
    /// The gradients of `Q`, `K` and `V`: rows of the head's sizes.
    pub values: [Vec<f64>; 3],
    /// The same sums of magnitudes.
    pub magnitudes: [Vec<f64>; 3],
    /// The gradient of the sink, and the sum of magnitudes; 0 without one.
    pub sink: [f64; 2],
}

/// Gives element `l` of row `i`.
pub type Rows<'a> = &'a dyn Fn(usize, usize) -> f64;

impl Head {
    /// Differentiates, one query at a time. `out` and the log-sum-exp may be those of more keys than these.
    pub fn differentiate(&self, [q, k, v, grad_out]: [Rows<'_>; 4], out: Rows<'_>, log_sum_exp: &[f64]) -> Gradients {
        let ([queries, keys], [size, value_size]) = (self.rows, self.sizes);
        let zeros = || [queries * size, keys * size, keys * value_size].map(|elements| vec![0.0; elements]);
        let mut found = Gradients { values: zeros(), magnitudes: zeros(), sink: [0.0; 2] };
        let (q, k, v) = (rows(queries, size, q), rows(keys, size, k), rows(keys, value_size, v));
        let [grad_out, out] = [grad_out, out].map(|tensor| rows(queries, value_size, tensor));
        let sizes = [&q, &k, &grad_out].map(|values| magnitudes(values));
        for (i, &log_sum_exp) in log_sum_exp[..queries].iter().enumerate() {
            let (of_query, of_result) = (i * size..(i + 1) * size, i * value_size..(i + 1) * value_size);
            let delta = dot(&out[of_result.clone()], &grad_out[of_result.clone()]);
            if let Some(sink) = self.sink {
                let taken = (sink - log_sum_exp).exp() * delta;
                found.sink = [found.sink[0] - taken, found.sink[1] + taken.abs()];
            }
            for j in (0..keys).filter(|&j| self.sees(i, j)) {
                let (of_key, of_value) = (j * size..(j + 1) * size, j * value_size..(j + 1) * value_size);
                let scaled = self.scale * dot(&q[of_query.clone()], &k[of_key.clone()]);
                let (score, slope) = match self.cap {
                    None => (scaled, 1.0),
                    Some(cap) => (cap * (scaled / cap).tanh(), (scaled / cap).cosh().powi(-2)),
                };
                let weight = (score - log_sum_exp).exp();
                let of_weight = dot(&grad_out[of_result.clone()], &v[of_value.clone()]);
                let of_score = weight * (of_weight - delta) * slope * self.scale;
                let magnitude = weight * (of_weight.abs() + delta.abs()) * slope * self.scale;
                let terms = [
                    (0, &of_query, [of_score, magnitude], [&k, &sizes[1]], &of_key),
                    (1, &of_key, [of_score, magnitude], [&q, &sizes[0]], &of_query),
                    (2, &of_value, [weight; 2], [&grad_out, &sizes[2]], &of_result),
                ];
                for (tensor, to, factors, values, from) in terms {
                    add(&mut found.values[tensor][to.clone()], factors[0], &values[0][from.clone()]);
                    add(&mut found.magnitudes[tensor][to.clone()], factors[1], &values[1][from.clone()]);
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against differences of the forward pass, for every input and the sink, with a mask and a cap.
    #[test]
    fn they_are_derivatives() {
        let head =
            Head { rows: [3, 4], sizes: [2, 3], top_left: false, window: [Some(2), Some(0)], scale: 0.7, cap: Some(1.5), sink: Some(0.3) };
        let waves = |count: usize, step: f64| (0..count).map(|i| (i as f64 * step).sin()).collect::<Vec<f64>>();
        let mut inputs = [waves(6, 0.7), waves(8, 1.3), waves(12, 2.1), vec![0.3]];
        let grad_out = waves(9, 0.4);
        let attend = |[q, k, v, sink]: &[Vec<f64>; 4]| {
            let head = Head { sink: Some(sink[0]), ..head };
            head.attend(|i, l| q[2 * i + l], |j, l| k[2 * j + l], |j, l| v[3 * j + l])
        };
        let value = |inputs: &[Vec<f64>; 4]| attend(inputs).out.iter().zip(&grad_out).map(|(a, b)| a * b).sum::<f64>();
        let forward = attend(&inputs);
        let [q, k, v, _] = inputs.clone();
        let found = head.differentiate(
            [&|i, l| q[2 * i + l], &|j, l| k[2 * j + l], &|j, l| v[3 * j + l], &|i, l| grad_out[3 * i + l]],
            &|i, l| forward.out[3 * i + l],
            &forward.log_sum_exp,
        );
        for tensor in 0..4 {
            for at in 0..inputs[tensor].len() {
                let there = inputs[tensor][at];
                inputs[tensor][at] = there + 1e-4;
                let above = value(&inputs);
                inputs[tensor][at] = there - 1e-4;
                let slope = (above - value(&inputs)) / 2e-4;
                inputs[tensor][at] = there;
                let gradient = if tensor == 3 { found.sink[0] } else { found.values[tensor][at] };
                assert!((gradient - slope).abs() < 1e-7, "tensor {tensor} at {at}: {gradient}, differences give {slope}");
            }
        }
    }
}
