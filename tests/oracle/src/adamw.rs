//! A step of AdamW in f64, from the paper (Loshchilov and Hutter, ICLR 2019, algorithm 2) in PyTorch's form.

/// The numbers of a step.
#[derive(Clone, Copy)]
pub struct Step {
    /// The learning rate.
    pub rate: f64,
    /// The decay of weights, a part of the learning rate.
    pub decay: f64,
    /// The decay of the first and of the second moment.
    pub betas: [f64; 2],
    /// Added to the square root of the second moment.
    pub epsilon: f64,
    /// Which step, from 1 on.
    pub number: i32,
}

/// The weight and its moments after the step.
pub fn step(step: &Step, [weight, first, second]: [f64; 3], gradient: f64) -> [f64; 3] {
    let [beta1, beta2] = step.betas;
    let first = beta1 * first + (1.0 - beta1) * gradient;
    let second = beta2 * second + (1.0 - beta2) * gradient * gradient;
    let (corrected, square) = (first / (1.0 - beta1.powi(step.number)), second / (1.0 - beta2.powi(step.number)));
    [weight - step.rate * step.decay * weight - step.rate * corrected / (square.sqrt() + step.epsilon), first, second]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In the first step the corrected moments are the gradient and its square: the direction is its sign.
    #[test]
    fn the_first_step_is_the_sign_of_the_gradient() {
        let numbers = Step { rate: 0.1, decay: 0.5, betas: [0.9, 0.999], epsilon: 0.0, number: 1 };
        for gradient in [3.0, -1e-5] {
            let [weight, first, second] = step(&numbers, [2.0, 0.0, 0.0], gradient);
            assert!((weight - (2.0 - 0.1 - 0.1 * gradient.signum())).abs() < 1e-12, "{weight}");
            assert!((first - 0.1 * gradient).abs() < 1e-12 && (second - 1e-3 * gradient * gradient).abs() < 1e-12);
        }
    }
}
