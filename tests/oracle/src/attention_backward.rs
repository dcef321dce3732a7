//! The gradients of attention in f64.

use super::attention::Problem;
use super::rows::{add, dot, magnitudes, wide};

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
    let (v, [q, k, grad_out]) = (wide(v), [q, k, grad_out].map(wide));
    let sizes = [&q, &k, &grad_out].map(|values| magnitudes(values));
    for (batch, head) in (0..batches).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
        for i in 0..queries {
            let row = ((batch * queries + i) * heads + head) * head_size;
            let row = row..row + head_size;
            let delta = dot(&forward.out[row.clone()], &grad_out[row.clone()]);
            let log_sum_exp = forward.log_sum_exp[(batch * heads + head) * queries + i];
            for j in (0..keys).filter(|&j| problem.sees(i, j)) {
                let key = ((batch * keys + j) * key_heads + head * key_heads / heads) * head_size;
                let key = key..key + head_size;
                let weight = (dot(&q[row.clone()], &k[key.clone()]) * scale - log_sum_exp).exp();
                let of_weight = dot(&grad_out[row.clone()], &v[key.clone()]);
                let of_score = weight * (of_weight - delta) * scale;
                let size = weight * (of_weight.abs() + delta.abs()) * scale;
                let terms = [
                    (0, &row, [of_score, size], [&k, &sizes[1]], &key),
                    (1, &key, [of_score, size], [&q, &sizes[0]], &row),
                    (2, &key, [weight; 2], [&grad_out, &sizes[2]], &row),
                ];
                for (tensor, to, factors, values, from) in terms {
                    add(&mut found.values[tensor][to.clone()], factors[0], &values[0][from.clone()]);
                    add(&mut found.magnitudes[tensor][to.clone()], factors[1], &values[1][from.clone()]);
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
