//! RMS norm and its gradients in f64, from the definition.

/// `x / sqrt(mean(x^2) + epsilon) * weight` of one row, and `1 / sqrt(mean(x^2) + epsilon)`.
pub fn forward(x: &[f64], weight: &[f64], epsilon: f64) -> (Vec<f64>, f64) {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let inverse = 1.0 / (mean + epsilon).sqrt();
    (x.iter().zip(weight).map(|(x, w)| x * inverse * w).collect(), inverse)
}

/// The gradients of one row's input and, of this row alone, of the weight.
///
/// `y_j = x_j w_j r`, where `r` depends on all `x`: `dr/dx_i = -x_i r^3 / n`.
pub fn backward(gradient: &[f64], x: &[f64], weight: &[f64], epsilon: f64) -> [Vec<f64>; 2] {
    let (_, inverse) = forward(x, weight, epsilon);
    let total: f64 = (0..x.len()).map(|j| gradient[j] * weight[j] * x[j]).sum();
    let of_input = |i: usize| gradient[i] * weight[i] * inverse - x[i] * inverse.powi(3) / x.len() as f64 * total;
    let of_weight = |j: usize| gradient[j] * x[j] * inverse;
    [(0..x.len()).map(of_input).collect(), (0..x.len()).map(of_weight).collect()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_equal_numbers_has_rms_one() {
        let (y, inverse) = forward(&[3.0, -3.0], &[1.0, 2.0], 0.0);
        assert!((y[0] - 1.0).abs() < 1e-15 && (y[1] + 2.0).abs() < 1e-15 && (inverse - 1.0 / 3.0).abs() < 1e-15);
    }

    #[test]
    fn gradients_are_difference_quotients() {
        let (x, w, g) = ([0.3, -1.2, 2.0], [1.5, 0.7, -0.4], [0.2, 1.0, -0.6]);
        let loss = |x: &[f64], w: &[f64]| forward(x, w, 1e-3).0.iter().zip(g).map(|(y, g)| y * g).sum::<f64>();
        let [of_input, of_weight] = backward(&g, &x, &w, 1e-3);
        for i in 0..3 {
            let moved = |values: &[f64; 3], by: f64| {
                let mut values = *values;
                values[i] += by;
                values
            };
            let h = 1e-6;
            let quotient = (loss(&moved(&x, h), &w) - loss(&moved(&x, -h), &w)) / (2.0 * h);
            assert!((of_input[i] - quotient).abs() < 1e-8, "{i}: {} {quotient}", of_input[i]);
            let quotient = (loss(&x, &moved(&w, h)) - loss(&x, &moved(&w, -h))) / (2.0 * h);
            assert!((of_weight[i] - quotient).abs() < 1e-8, "{i}: {} {quotient}", of_weight[i]);
        }
    }
}
