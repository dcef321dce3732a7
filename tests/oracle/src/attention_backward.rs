//! The gradients of attention in f64.

use super::attention::Problem;

/// The gradients of `sum(out * grad_out)`, and for each element the sum of the magnitudes of its terms, which errors are measured
/// by.
pub struct Gradients {
    /// The gradients of `Q`, `K` and `V`, laid out as they are.
    pub values: [Vec<f64>; 3],
    /// The same sums of magnitudes.
    pub magnitudes: [Vec<f64>; 3],
}

/// What the forward pass gives, possibly of more keys than these: `[batches, queries, heads, head_size]`, and the log-sum-exp,
/// `[batches, heads, queries]`.
#[derive(Clone, Copy)]
pub struct Forward<'a> {
    /// The result.
    pub out: &'a [f64],
    /// Its log-sum-exp.
    pub log_sum_exp: &'a [f64],
}

/// Differentiates, one query at a time.
pub fn attention_backward(problem: &Problem, [q, k, v, grad_out]: [&[f32]; 4], forward: Forward<'_>) -> Gradients {
    let Problem { batches, queries, keys, heads, key_heads, head_size, scale, .. } = *problem;
    let zeros = || [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]];
    let mut found = Gradients { values: zeros(), magnitudes: zeros() };
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    for (batch, head) in (0..batches).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
        for i in 0..queries {
            let row = ((batch * queries + i) * heads + head) * head_size;
            let row = row..row + head_size;
            let delta: f64 = row.clone().map(|at| forward.out[at] * f64::from(grad_out[at])).sum();
            let log_sum_exp = forward.log_sum_exp[(batch * heads + head) * queries + i];
            for j in (0..keys).filter(|&j| problem.sees(i, j)) {
                let key = ((batch * keys + j) * key_heads + head * key_heads / heads) * head_size;
                let key = key..key + head_size;
                let weight = (dot(&q[row.clone()], &k[key.clone()]) * scale - log_sum_exp).exp();
                let of_weight = dot(&grad_out[row.clone()], &v[key.clone()]);
                let of_score = weight * (of_weight - delta) * scale;
                let size = weight * (of_weight.abs() + delta.abs()) * scale;
                for (at_row, at_key) in row.clone().zip(key) {
                    let terms = [
                        (0, at_row, of_score, k[at_key], size),
                        (1, at_key, of_score, q[at_row], size),
                        (2, at_key, weight, grad_out[at_row], weight),
                    ];
                    for (tensor, at, factor, value, size) in terms {
                        found.values[tensor][at] += factor * f64::from(value);
                        found.magnitudes[tensor][at] += size * f64::from(value).abs();
                    }
                }
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::attention::attention;
    use super::*;

    /// Against differences of the forward pass, for every input.
    #[test]
    fn they_are_derivatives() {
        let problem = Problem { batches: 2, queries: 3, keys: 4, heads: 4, key_heads: 2, head_size: 2, diagonal: Some(1), scale: 0.7 };
        let waves = |count: usize, step: f32| (0..count).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();
        let mut inputs = [waves(48, 0.7), waves(32, 1.3), waves(32, 2.1)];
        let grad_out = waves(48, 0.3);
        let value = |[q, k, v]: &[Vec<f32>; 3]| {
            let out = attention(&problem, q, k, v).out;
            out.iter().zip(&grad_out).map(|(out, &grad)| out * f64::from(grad)).sum::<f64>()
        };
        let forward = attention(&problem, &inputs[0], &inputs[1], &inputs[2]);
        let forward = Forward { out: &forward.out, log_sum_exp: &forward.log_sum_exp };
        let found = attention_backward(&problem, [&inputs[0], &inputs[1], &inputs[2], &grad_out], forward);
        for tensor in 0..3 {
            for at in 0..inputs[tensor].len() {
                let there = inputs[tensor][at];
                let [above, below] = [there + 1e-3, there - 1e-3];
                inputs[tensor][at] = above;
                let rise = value(&inputs);
                inputs[tensor][at] = below;
                let slope = (rise - value(&inputs)) / (f64::from(above) - f64::from(below));
                inputs[tensor][at] = there;
                let gradient = found.values[tensor][at];
                assert!((gradient - slope).abs() < 1e-5, "tensor {tensor} at {at}: {gradient}, differences give {slope}");
                assert!(gradient.abs() <= found.magnitudes[tensor][at] + 1e-12);
            }
        }
    }
}
