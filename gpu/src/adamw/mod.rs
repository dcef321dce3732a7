//! AdamW: one step of all weights of a tensor, with decoupled weight decay.
//!
//! Floor: 24 bytes a weight, 2 or 4 for its gradient, and 2 for the rounded copy: the gradient is read, weights and both moments are read and written. A thread has four weights,
//! so that the loads and stores of a warp have no gaps.
//!
//! `gradient` has the elements that gradients may have.

use oxtile_tile::prelude::*;

mod gradient;

pub use gradient::*;

const THREADS: u32 = 256;
/// Weights of a thread.
const WEIGHTS: usize = 4;

/// The numbers of a step.
#[derive(Clone, Copy, Debug, Parameter)]
pub struct Step {
    /// The learning rate.
    pub rate: f32,
    /// What is taken off the weights: the part `rate * decay` of them.
    pub decay: f32,
    /// The part of the first moment that stays.
    pub beta1: f32,
    /// The part of the second moment that stays.
    pub beta2: f32,
    /// What is added to the square root of the second moment.
    pub epsilon: f32,
    /// `1 / (1 - beta1^t)` of step `t`.
    pub correction1: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    pub correction2: f32,
    /// What gradients are multiplied by first.
    pub gradient_scale: f32,
}

/// A weight and its moments.
#[derive(Clone, Copy)]
struct Weight {
    value: f32,
    first: f32,
    second: f32,
}

impl Step {
    #[inline(always)]
    fn update(&self, Weight { value, first, second }: Weight, gradient: f32) -> Weight {
        let g = gradient * self.gradient_scale;
        let first = num::fma(self.beta1, first, (1.0 - self.beta1) * g);
        let second = num::fma(self.beta2, second, (1.0 - self.beta2) * (g * g));
        let direction = first * self.correction1 * num::reciprocal(num::fma(num::sqrt(second), self.correction2, self.epsilon));
        let decayed = num::fma(-self.rate * self.decay, value, value);
        Weight { value: num::fma(-self.rate, direction, decayed), first, second }
    }
}

/// Updates weights and moments in place, in `f32`, and writes the weights rounded to `T`, if that is wanted.
///
/// `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g^2`, `w = w - rate (decay w + m correction1 / (sqrt(v) correction2 + epsilon))`.
#[kernel(threads = THREADS, grid = grid)]
#[instances(T = [bf16], G = [bf16, f32])]
#[instances(T = [f16], G = [f16, f32])]
pub fn adamw<T: Half, G: Gradient>(
    gradient: Global<G>,
    weights: GlobalMut<f32>,
    first: GlobalMut<f32>,
    second: GlobalMut<f32>,
    rounded: Option<GlobalMut<T>>,
    step: Step,
) {
    let at = (u64::from(block::index()[0]) * u64::from(THREADS) + u64::from(thread::index())) * WEIGHTS as u64;
    if at + WEIGHTS as u64 <= weights.len() {
        let (g, [w, m, v]) = (G::load_four(&gradient, at), [&weights, &first, &second].map(|tensor| tensor.load_vector(at).to_f32()));
        let new: [Weight; WEIGHTS] = core::array::from_fn(|i| step.update(Weight { value: w[i], first: m[i], second: v[i] }, g[i]));
        weights.store_vector(at, Vector::<f32>::from_f32(new.map(|weight| weight.value)));
        first.store_vector(at, Vector::<f32>::from_f32(new.map(|weight| weight.first)));
        second.store_vector(at, Vector::<f32>::from_f32(new.map(|weight| weight.second)));
        if let Some(rounded) = rounded {
            let [a, b, c, d] = new.map(|weight| weight.value);
            rounded.store_pair(at, [[a, b], [c, d]].map(|pair| T::X2::from_f32(pair).to_bits()));
        }
    } else {
        for at in at..weights.len() {
            let weight = Weight { value: weights.load(at), first: first.load(at), second: second.load(at) };
            let new = step.update(weight, gradient.load(at).to_f32());
            weights.store(at, new.value);
            first.store(at, new.first);
            second.store(at, new.second);
            if let Some(rounded) = rounded {
                rounded.store(at, T::from_f32(new.value));
            }
        }
    }
}

fn grid<T: Half, G: Gradient>(args: &AdamwArgs<'_, T, G>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let count = args.weights.len();
    LaunchError::check_length("gradient", count, args.gradient.len())?;
    LaunchError::check_alignment("gradient", 16, args.gradient.address())?;
    for (name, tensor) in [("weights", &args.weights), ("first", &args.first), ("second", &args.second)] {
        LaunchError::check_length(name, count, tensor.len())?;
        LaunchError::check_alignment(name, 16, tensor.address())?;
    }
    if let Some(rounded) = &args.rounded {
        LaunchError::check_length("rounded", count, rounded.len())?;
        LaunchError::check_alignment("rounded", 16, rounded.address())?;
    }
    Grid::cover("weights", count, THREADS * WEIGHTS as u32)
}
