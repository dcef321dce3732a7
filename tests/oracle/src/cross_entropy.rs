//! Softmax cross entropy and its gradient in f64, from the definition.

/// The loss of one row and its gradient. The target has `1 - smoothing` of the weight, and all logits share the rest alike.
pub fn row(logits: &[f64], target: usize, smoothing: f64) -> (f64, Vec<f64>) {
    let maximum = logits.iter().fold(f64::NEG_INFINITY, |maximum, &x| if x.is_nan() { x } else { maximum.max(x) });
    let sum: f64 = logits.iter().map(|x| (x - maximum).exp()).sum();
    let alike = smoothing / logits.len() as f64;
    let weight = |j: usize| alike + if j == target { 1.0 - smoothing } else { 0.0 };
    let of = |j: usize| (logits[j] - maximum - sum.ln(), weight(j));
    // A weight of 0 takes nothing, of a logit of -Inf either.
    let loss = (0..logits.len()).map(of).filter(|(_, weight)| *weight != 0.0).map(|(log, weight)| -weight * log).sum();
    (loss, (0..logits.len()).map(|j| (logits[j] - maximum).exp() / sum - weight(j)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_difference_quotients() {
        let x = [0.3, -1.2, 2.0, 0.7];
        for (target, smoothing) in [(0, 0.0), (2, 0.0), (1, 0.2)] {
            let (_, gradient) = row(&x, target, smoothing);
            for j in 0..4 {
                let moved = |by: f64| {
                    let mut x = x;
                    x[j] += by;
                    row(&x, target, smoothing).0
                };
                let quotient = (moved(1e-6) - moved(-1e-6)) / 2e-6;
                assert!((gradient[j] - quotient).abs() < 1e-8, "{j}: {} {quotient}", gradient[j]);
            }
        }
        assert!((row(&[0.0; 8], 3, 0.1).0 - 8f64.ln()).abs() < 1e-15);
    }
}
