//! Softmax cross entropy: the loss of each row of logits and, by the same launch, its gradient.
//!
//! Logits are `bf16` or `f16`, losses and all sums `f32`. Any width at any address is right. Rows of whole 16-byte vectors that begin at multiples of 16
//! bytes are fast: up to 57344 logits they are read once, beyond that twice.
//!
//! ```
//! use oxtile::cross_entropy::{CrossEntropy, Rule};
//! use oxtile::num::bf16;
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! let logits = Buffer::<bf16>::zeros(&stream, 2 * 4)?;
//! let targets = Buffer::from_slice(&stream, &[3, -100])?;
//! let mut gradient = Buffer::<bf16>::uninitialised(&stream, 2 * 4)?;
//! let mut losses = Buffer::uninitialised(&stream, 2)?;
//!
//! let entropy = CrossEntropy::<bf16>::new(&runtime, 4, Rule::default())?;
//! entropy.gradient(&stream, logits.view(), targets.view(), gradient.view_mut(), losses.view_mut())?;
//! assert!((losses.to_vec(&stream)?[0] - 4_f32.ln()).abs() < 1e-6);
//! let gradient: Vec<f32> = gradient.to_vec_as::<half::bf16>(&stream)?.iter().map(|x| x.to_f32()).collect();
//! assert_eq!(gradient, [0.25, 0.25, 0.25, -0.75, 0.0, 0.0, 0.0, 0.0]);
//! # Ok(()) }
//! ```

use std::fmt;
use std::marker::PhantomData;

use oxtile_kernels::cross_entropy::{self as kernels, CrossEntropyArgs, Elements, Once, Reading, Twice};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::{Half, bf16, f16};

use crate::runtime::{Error, Result, Runtime, Stream};
use crate::tensor::shape::row_width;

/// What the loss is besides cross entropy. Made complete by `..Rule::default()`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// The target of rows that count for nothing: their losses and gradients are 0. -100 by default.
    pub ignored: i32,
    /// The part of the target's weight that all logits share alike: 0 by default, less than 1.
    pub smoothing: f32,
    /// The factor of the gradients, not of the losses: 1 by default, `1 / rows` for the mean of all rows.
    pub scale: f32,
}

impl Default for Rule {
    fn default() -> Self {
        Self { ignored: -100, smoothing: 0.0, scale: 1.0 }
    }
}

/// Losses and gradients of rows of logits of one width.
pub struct CrossEntropy<T: CrossEntropyElement> {
    width: u32,
    rule: Rule,
    /// One for each way of reading rows: the first that takes the rows at hand is launched. The last one takes all.
    entries: Vec<Entry<T>>,
}

impl<T: CrossEntropyElement> CrossEntropy<T> {
    /// Loads the kernels, for rows of `width` logits.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a width of 0, or of 2^31 and more, and for smoothing outside of `0.0..1.0`; as [`Runtime::load`].
    pub fn new(runtime: &Runtime, width: u64, rule: Rule) -> Result<Self> {
        let width = row_width("CrossEntropy", width)?;
        if !(0.0..1.0).contains(&rule.smoothing) {
            let why = format!("smoothing by {}: give 0 or more, and less than 1", rule.smoothing);
            return Err(Error::Invalid { what: "CrossEntropy", why });
        }
        Ok(Self { width, rule, entries: T::entries(runtime)? })
    }

    /// Enqueues the losses of `[rows, width]` logits alone; there is a target and a loss for each row. A target outside of the row, which is not
    /// [ignored](Rule::ignored), makes the loss NaN.
    ///
    /// # Errors
    /// As [`Loaded::launch`](crate::runtime::Loaded::launch): [`Error::Argument`] names what does not fit.
    pub fn losses(
        &self,
        stream: &Stream,
        logits: DeviceView<'_, T>,
        targets: DeviceView<'_, i32>,
        losses: DeviceViewMut<'_, f32>,
    ) -> Result<()> {
        self.launch(stream, Some(logits), None, targets, losses)
    }

    /// Enqueues the losses of `[rows, width]` logits and their gradients, of the same shape.
    ///
    /// # Errors
    /// As [`losses`](Self::losses).
    pub fn gradient(
        &self,
        stream: &Stream,
        logits: DeviceView<'_, T>,
        targets: DeviceView<'_, i32>,
        gradient: DeviceViewMut<'_, T>,
        losses: DeviceViewMut<'_, f32>,
    ) -> Result<()> {
        self.launch(stream, Some(logits), Some(gradient), targets, losses)
    }

    /// As [`gradient`](Self::gradient), written over the logits.
    ///
    /// # Errors
    /// As [`losses`](Self::losses).
    pub fn gradient_in_place(
        &self,
        stream: &Stream,
        logits: DeviceViewMut<'_, T>,
        targets: DeviceView<'_, i32>,
        losses: DeviceViewMut<'_, f32>,
    ) -> Result<()> {
        self.launch(stream, None, Some(logits), targets, losses)
    }

    fn launch(
        &self,
        stream: &Stream,
        logits: Option<DeviceView<'_, T>>,
        gradient: Option<DeviceViewMut<'_, T>>,
        targets: DeviceView<'_, i32>,
        losses: DeviceViewMut<'_, f32>,
    ) -> Result<()> {
        let addresses =
            [logits.map(|logits| logits.address()), gradient.as_ref().map(DeviceViewMut::address)].map(|address| address.unwrap_or(0));
        let takes = self.entries.iter().find(|entry| (entry.takes)(self.width.into(), &addresses));
        let entry = takes.or(self.entries.last()).expect("an element has kernels");
        let Rule { ignored, smoothing, scale } = self.rule;
        let rule = kernels::Rule { ignored, smoothing, scale };
        (entry.launch)(stream, Problem { logits, gradient, targets, losses, width: self.width, rule })
    }
}

impl<T: CrossEntropyElement> fmt::Debug for CrossEntropy<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CrossEntropy").field("width", &self.width).field("rule", &self.rule).finish_non_exhaustive()
    }
}

/// An element of logits: `bf16` or `f16`.
pub trait CrossEntropyElement: Half {
    /// The kernel for each way of reading rows.
    #[doc(hidden)]
    fn entries(runtime: &Runtime) -> Result<Vec<Entry<Self>>>;
}

/// The arguments of a launch.
#[doc(hidden)]
pub struct Problem<'a, T> {
    logits: Option<DeviceView<'a, T>>,
    gradient: Option<DeviceViewMut<'a, T>>,
    targets: DeviceView<'a, i32>,
    losses: DeviceViewMut<'a, f32>,
    width: u32,
    rule: kernels::Rule,
}

/// Launches a kernel.
type Launch<T> = Box<dyn Fn(&Stream, Problem<'_, T>) -> Result<()> + Send + Sync>;

/// The kernel for one way of reading rows.
#[doc(hidden)]
pub struct Entry<T> {
    takes: fn(u64, &[u64]) -> bool,
    launch: Launch<T>,
}

fn entry<T: Half, R: Reading>(runtime: &Runtime) -> Result<Entry<T>>
where
    kernels::CrossEntropy<T, R>: Kernel,
{
    let kernel = runtime.load::<kernels::CrossEntropy<T, R>>()?;
    let launch: Launch<T> = Box::new(move |stream, Problem { logits, gradient, targets, losses, width, rule }| {
        kernel.launch(stream, CrossEntropyArgs { logits, gradient, targets, losses, width, rule, marker: PhantomData })
    });
    Ok(Entry { takes: R::takes, launch })
}

macro_rules! elements {
    ($($t:ty)*) => { $(
        impl CrossEntropyElement for $t {
            fn entries(runtime: &Runtime) -> Result<Vec<Entry<Self>>> {
                Ok(vec![entry::<Self, Once>(runtime)?, entry::<Self, Twice>(runtime)?, entry::<Self, Elements>(runtime)?])
            }
        }
    )* };
}
elements! { bf16 f16 }
