//! AdamW: steps of `f32` weights and moments by gradients of 16 or 32 bits, with decoupled weight decay.
//!
//! ```
//! use oxtile::adamw::{Adamw, AdamwConfig, Weights};
//! use oxtile::num::bf16;
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! let gradient = Buffer::from_slice(&stream, &[half::bf16::from_f32(0.5); 100])?;
//! let (mut values, mut first, mut second) = (Buffer::zeros(&stream, 100)?, Buffer::zeros(&stream, 100)?, Buffer::zeros(&stream, 100)?);
//! let weights = Weights { values: values.view_mut(), first: first.view_mut(), second: second.view_mut(), rounded: None };
//!
//! let adamw = Adamw::<bf16>::new(&runtime, AdamwConfig { rate: 0.1, ..AdamwConfig::default() })?;
//! adamw.step(&stream, 1, gradient.view(), weights)?;
//! // The first step goes by the sign of the gradient.
//! assert!(values.to_vec(&stream)?.iter().all(|weight| (weight + 0.1).abs() < 1e-6));
//! # Ok(()) }
//! ```

use std::fmt;

use oxtile_kernels::adamw::{self as kernels, AdamwArgs, Gradient, Step};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel, Signature};
use oxtile_tile::num::{Half, bf16, f16};

use crate::runtime::{Error, Loaded, Result, Runtime, Stream};

/// The numbers of the optimizer. Made complete by `..AdamwConfig::default()`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwConfig {
    /// The learning rate: 1e-3 by default.
    pub rate: f32,
    /// The weight decay: in each step `rate * decay` of a weight is taken off. 0.01 by default.
    pub decay: f32,
    /// What stays of both moments in a step: 0.9 and 0.999 by default.
    pub betas: [f32; 2],
    /// What is added to the square root of the second moment: 1e-8 by default. The root of a second moment below 1.2e-38 counts as 0, not as up to
    /// 1.1e-19, which shows where `epsilon` is below about 1e-18.
    pub epsilon: f32,
    /// What gradients are multiplied by first, such as the factor that clips them: 1 by default.
    pub gradient_scale: f32,
}

impl Default for AdamwConfig {
    fn default() -> Self {
        Self { rate: 1e-3, decay: 0.01, betas: [0.9, 0.999], epsilon: 1e-8, gradient_scale: 1.0 }
    }
}

/// Weights with their moments, which are zeros before the first step.
pub struct Weights<'a, T> {
    /// The weights.
    pub values: DeviceViewMut<'a, f32>,
    /// First moments.
    pub first: DeviceViewMut<'a, f32>,
    /// Second moments.
    pub second: DeviceViewMut<'a, f32>,
    /// Where the weights go rounded, for the next forward pass.
    pub rounded: Option<DeviceViewMut<'a, T>>,
}

/// The optimizer, of weights that are rounded to `T` and gradients of `G`, the same type or `f32`. Its numbers are plain values: another learning rate is another
/// [`AdamwConfig`], and loads nothing.
pub struct Adamw<T: AdamwElement<G>, G: Gradient = T> {
    /// The numbers of the next step.
    pub config: AdamwConfig,
    kernel: Loaded<T::Kernel>,
}

impl<T: AdamwElement<G>, G: Gradient> Adamw<T, G> {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime, config: AdamwConfig) -> Result<Self> {
        Ok(Self { config, kernel: runtime.load()? })
    }

    /// Enqueues step `number`, counted from 1, of all weights, given a gradient for each. All tensors begin at multiples of 16 bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for step 0; as [`Loaded::launch`]: [`Error::Argument`] names what does not fit.
    pub fn step(&self, stream: &Stream, number: u32, gradient: DeviceView<'_, G>, weights: Weights<'_, T>) -> Result<()> {
        if number == 0 {
            return Err(Error::Invalid { what: "Adamw::step", why: "step 0: count steps from 1".to_owned() });
        }
        let AdamwConfig { rate, decay, betas: [beta1, beta2], epsilon, gradient_scale } = self.config;
        // In f64, since what stays after one step is nearly all.
        let gone = |beta: f32| 1.0 - f64::from(beta).powf(number.into());
        let (correction1, correction2) = ((1.0 / gone(beta1)) as f32, (1.0 / gone(beta2).sqrt()) as f32);
        let step = Step { rate, decay, beta1, beta2, epsilon, correction1, correction2, gradient_scale };
        let Weights { values: weights, first, second, rounded } = weights;
        self.kernel.launch(stream, AdamwArgs { gradient, weights, first, second, rounded, step })
    }
}

impl<T: AdamwElement<G>, G: Gradient> fmt::Debug for Adamw<T, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adamw").field("config", &self.config).finish_non_exhaustive()
    }
}

/// What weights are rounded to: `bf16` or `f16`, by gradients `G` of the same type or of `f32`.
pub trait AdamwElement<G: Gradient>: Half {
    /// The kernel.
    #[doc(hidden)]
    type Kernel: Kernel + for<'a> Signature<Args<'a> = AdamwArgs<'a, Self, G>>;
}

impl AdamwElement<Self> for bf16 {
    type Kernel = kernels::Adamw<Self, Self>;
}

impl AdamwElement<f32> for bf16 {
    type Kernel = kernels::Adamw<Self, f32>;
}

impl AdamwElement<Self> for f16 {
    type Kernel = kernels::Adamw<Self, Self>;
}

impl AdamwElement<f32> for f16 {
    type Kernel = kernels::Adamw<Self, f32>;
}
