//! Activations and their derivatives in f64.
//!
//! Formulas: TransformerEngine `common/util/math.h`. `0.5 + 0.5 tanh(u)` is written `1 / (1 + exp(-2 u))`: the same number, without
//! the cancellation for negative `u`.

/// Which activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x (0.5 + 0.5 tanh(x (0.79788456 + 0.03567741 x^2)))`
    Gelu,
    /// `x sigmoid(x)`
    Silu,
    /// `x sigmoid(1.702 x)`
    QuickGelu,
    /// `max(x, 0)`
    Relu,
    /// `max(x, 0)^2`
    SquaredRelu,
}

impl Activation {
    /// The function.
    pub fn value(self, x: f64) -> f64 {
        match self {
            Self::Gelu => x * sigmoid(2.0 * gelu_argument(x)),
            Self::Silu => x * sigmoid(x),
            Self::QuickGelu => x * sigmoid(1.702 * x),
            Self::Relu => x.max(0.0),
            Self::SquaredRelu => x.max(0.0).powi(2),
        }
    }

    /// Its derivative.
    pub fn slope(self, x: f64) -> f64 {
        match self {
            Self::Gelu => {
                let s = sigmoid(2.0 * gelu_argument(x));
                // 1 - tanh^2 = 4 s (1 - s).
                0.5 * x * 4.0 * s * (1.0 - s) * (0.797_884_56 + 0.107_032_224_3 * x * x) + s
            }
            Self::Silu => x * sigmoid(x) * (1.0 - sigmoid(x)) + sigmoid(x),
            Self::QuickGelu => {
                let s = sigmoid(1.702 * x);
                1.702 * x * s * (1.0 - s) + s
            }
            Self::Relu => f64::from(u8::from(x > 0.0)),
            Self::SquaredRelu => 2.0 * x.max(0.0),
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn gelu_argument(x: f64) -> f64 {
    x * (0.797_884_56 + 0.035_677_41 * x * x)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Activation; 5] = [Activation::Gelu, Activation::Silu, Activation::QuickGelu, Activation::Relu, Activation::SquaredRelu];

    #[test]
    fn slopes_are_difference_quotients() {
        for activation in ALL {
            for i in -40..=40 {
                let (x, h) = (f64::from(i) * 0.2 + 0.05, 1e-6);
                let quotient = (activation.value(x + h) - activation.value(x - h)) / (2.0 * h);
                assert!((activation.slope(x) - quotient).abs() < 1e-7, "{activation:?} at {x}: {} {quotient}", activation.slope(x));
            }
        }
    }

    /// The forms as the source writes them.
    #[test]
    fn known_values() {
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-8, "{a} {b}");
        near(Activation::Gelu.value(1.0), 0.5 + 0.5 * (0.797_884_56_f64 + 0.035_677_41).tanh());
        near(Activation::Gelu.value(-3.0), -1.5 - 1.5 * (-3.0 * (0.797_884_56_f64 + 9.0 * 0.035_677_41)).tanh());
        near(Activation::Silu.value(2.0), 1.761_594_155_955_765);
        near(Activation::QuickGelu.value(-1.0), -1.0 / (1.0 + 1.702_f64.exp()));
        near(Activation::SquaredRelu.value(3.0), 9.0);
        near(Activation::Relu.value(-3.0), 0.0);
    }
}
