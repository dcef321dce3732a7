//! RMS norm: `y = x / sqrt(mean(x^2) + epsilon) * weight`, row by row, and its gradients.
//!
//! Rows are of `bf16` or `f16`, statistics and sums in `f32`. Any width at any address is right; fast are rows of whole 16-byte vectors that begin
//! at multiples of 16 bytes, up to 16384 elements.
//!
//! ```
//! use oxtile::num::bf16;
//! use oxtile::rms_norm::RmsNorm;
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! let input = Buffer::from_slice(&stream, &[half::bf16::from_f32(-3.0); 4 * 64])?;
//! let weight = Buffer::from_slice(&stream, &[half::bf16::from_f32(0.5); 64])?;
//! let mut output = Buffer::<bf16>::uninitialised(&stream, 4 * 64)?;
//! RmsNorm::<bf16>::new(&runtime, 64, 0.0)?.forward(&stream, input.view(), weight.view(), output.view_mut(), None)?;
//! assert!(output.to_vec_as::<half::bf16>(&stream)?.iter().all(|y| y.to_f32() == -0.5));
//! # Ok(()) }
//! ```

use std::fmt;
use std::marker::PhantomData;

use oxtile_kernels::column_sums::{ColumnSums, ColumnSumsArgs};
use oxtile_kernels::rms_norm::{self as kernels, RmsNormArgs, RmsNormBackward, RmsNormBackwardArgs};
use oxtile_kernels::row::{ByBlock, ByElements, ByWarp, Split};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel, Signature};
use oxtile_tile::num::{Half, bf16, f16};

use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::{numel, row_width};

/// RMS norm of rows of one width.
pub struct RmsNorm<T: RmsNormElement> {
    width: u32,
    epsilon: f32,
    /// The kernels of each policy, the first that takes the rows at hand is launched. The last one takes all.
    kernels: Vec<Box<dyn Kernels<T>>>,
    sums: Loaded<T::Sums>,
}

/// What the gradients are computed of.
#[derive(Clone, Copy)]
pub struct Saved<'a, T> {
    /// The input of the forward pass, `[rows, width]`.
    pub input: DeviceView<'a, T>,
    /// The weight, `[width]`.
    pub weight: DeviceView<'a, T>,
    /// The `1 / rms` of each row, as the forward pass wrote it.
    pub inverse_rms: DeviceView<'a, f32>,
}

/// The gradient of a weight, and memory for the partial sums that it is made of: made once, used any number of times.
#[derive(Debug)]
pub struct WeightGradient<T> {
    /// One sum a column.
    pub sums: Buffer<T>,
    partial_sums: Buffer<f32>,
}

impl<T: RmsNormElement> RmsNorm<T> {
    /// Loads the kernels, for rows of `width` elements. With an `epsilon` of 0, rows whose root mean square is below about 1.1e-19 become infinite,
    /// and NaN where they are 0.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a width of 0, or of 2^31 and more; as [`Runtime::load`].
    pub fn new(runtime: &Runtime, width: u64, epsilon: f32) -> Result<Self> {
        let width = row_width("RmsNorm", width)?;
        Ok(Self { width, epsilon, kernels: T::kernels(runtime)?, sums: runtime.load()? })
    }

    /// Enqueues `output = input / rms(input) * weight` of `[rows, width]`, and writes `1 / rms(input)` of each row for the backward pass, if there is
    /// a place for it.
    ///
    /// # Errors
    /// As [`Loaded::launch`]: [`Error::Argument`] names what does not fit.
    pub fn forward(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        weight: DeviceView<'_, T>,
        output: DeviceViewMut<'_, T>,
        inverse_rms: Option<DeviceViewMut<'_, f32>>,
    ) -> Result<()> {
        let kernels = self.kernels_of(&[input.address(), weight.address(), output.address()]);
        kernels.forward(stream, Forward { input, weight, output, inverse_rms, width: self.width, epsilon: self.epsilon })
    }

    /// A place for the gradient of the weight, for calls of up to `rows` rows on the stream's device.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`].
    pub fn weight_gradient(&self, stream: &Stream, rows: u64) -> Result<WeightGradient<T>> {
        let multiprocessors = stream.device().limits().multiprocessors;
        let partial_rows = self.kernels.iter().map(|kernels| kernels.partial_rows(rows, multiprocessors)).max().unwrap_or(0);
        let partial_sums = Buffer::named(stream, "partial sums", numel(&[partial_rows, self.width.into()])?)?;
        Ok(WeightGradient { sums: Buffer::uninitialised(stream, self.width.into())?, partial_sums })
    }

    /// Enqueues the gradients of the input, `[rows, width]`, and of the weight, given the output's. The weight's is summed in `f32`, always in the
    /// same order for tensors of the same alignment on devices with the same number of multiprocessors, and rounded once. Allocates nothing, so that a graph can hold it.
    ///
    /// # Errors
    /// [`Error::Length`] for a place of a weight gradient that was made for another width or fewer rows; as [`Loaded::launch`].
    pub fn backward(
        &self,
        stream: &Stream,
        gradient: DeviceView<'_, T>,
        saved: Saved<'_, T>,
        input_gradient: DeviceViewMut<'_, T>,
        weight_gradient: &mut WeightGradient<T>,
    ) -> Result<()> {
        let Saved { input, weight, inverse_rms } = saved;
        let kernels = self.kernels_of(&[gradient.address(), input.address(), weight.address(), input_gradient.address()]);
        let WeightGradient { sums, partial_sums } = weight_gradient;
        Error::check_length("RmsNorm::backward, weight_gradient.sums", self.width.into(), sums.len())?;
        let rows = kernels.partial_rows(input.len() / u64::from(self.width), stream.device().limits().multiprocessors);
        let needed = rows * u64::from(self.width);
        if partial_sums.len() < needed {
            return Err(Error::Length { what: "RmsNorm::backward, weight_gradient", expected: needed, found: partial_sums.len() });
        }
        let partial = partial_sums.view_mut().split_at(needed).0;
        kernels.backward(
            stream,
            Backward { gradient, saved: Saved { input, weight, inverse_rms }, input_gradient, partial, width: self.width },
        )?;
        let matrix = partial_sums.view().slice(0, needed);
        self.sums.launch(stream, ColumnSumsArgs { matrix, output: sums.view_mut() })
    }

    /// The first kernels that take tensors at these addresses.
    fn kernels_of(&self, addresses: &[u64]) -> &dyn Kernels<T> {
        let takes = self.kernels.iter().find(|kernels| kernels.takes(self.width.into(), addresses));
        takes.or(self.kernels.last()).expect("an element has kernels").as_ref()
    }
}

impl<T: RmsNormElement> fmt::Debug for RmsNorm<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RmsNorm").field("width", &self.width).field("epsilon", &self.epsilon).finish_non_exhaustive()
    }
}

/// An element of rows: `bf16` or `f16`.
pub trait RmsNormElement: Half {
    /// The kernel that adds up partial sums.
    #[doc(hidden)]
    type Sums: Kernel + for<'a> Signature<Args<'a> = ColumnSumsArgs<'a, Self>>;

    /// The kernels of each policy.
    #[doc(hidden)]
    fn kernels(runtime: &Runtime) -> Result<Vec<Box<dyn Kernels<Self>>>>;
}

/// The arguments of a forward pass.
#[doc(hidden)]
pub struct Forward<'a, T> {
    input: DeviceView<'a, T>,
    weight: DeviceView<'a, T>,
    output: DeviceViewMut<'a, T>,
    inverse_rms: Option<DeviceViewMut<'a, f32>>,
    width: u32,
    epsilon: f32,
}

/// The arguments of a backward pass.
#[doc(hidden)]
pub struct Backward<'a, T> {
    gradient: DeviceView<'a, T>,
    saved: Saved<'a, T>,
    input_gradient: DeviceViewMut<'a, T>,
    partial: DeviceViewMut<'a, f32>,
    width: u32,
}

/// The kernels of one policy of rows.
#[doc(hidden)]
pub trait Kernels<T>: Send + Sync {
    /// Whether they take rows of this width at these addresses.
    fn takes(&self, width: u64, addresses: &[u64]) -> bool;
    /// The rows of partial sums of a backward pass.
    fn partial_rows(&self, rows: u64, multiprocessors: u32) -> u64;
    /// Launches the forward pass.
    fn forward(&self, stream: &Stream, forward: Forward<'_, T>) -> Result<()>;
    /// Launches the backward pass, the last sums excepted.
    fn backward(&self, stream: &Stream, backward: Backward<'_, T>) -> Result<()>;
}

/// The kernels of the policy `S`.
struct Of<T: Half, S: Split> {
    forward: Loaded<kernels::RmsNorm<T, S>>,
    backward: Loaded<RmsNormBackward<T, S>>,
}

impl<T: Half, S: Split> Of<T, S>
where
    kernels::RmsNorm<T, S>: Kernel,
    RmsNormBackward<T, S>: Kernel,
{
    fn load(runtime: &Runtime) -> Result<Box<dyn Kernels<T>>> {
        Ok(Box::new(Self { forward: runtime.load()?, backward: runtime.load()? }))
    }
}

impl<T: Half, S: Split> Kernels<T> for Of<T, S>
where
    kernels::RmsNorm<T, S>: Kernel,
    RmsNormBackward<T, S>: Kernel,
{
    fn takes(&self, width: u64, addresses: &[u64]) -> bool {
        S::takes(width, addresses)
    }

    fn partial_rows(&self, rows: u64, multiprocessors: u32) -> u64 {
        kernels::partial_rows::<S>(rows, multiprocessors)
    }

    fn forward(&self, stream: &Stream, forward: Forward<'_, T>) -> Result<()> {
        let Forward { input, weight, output, inverse_rms, width, epsilon } = forward;
        self.forward.launch(stream, RmsNormArgs { input, weight, output, inverse_rms, width, epsilon, marker: PhantomData })
    }

    fn backward(&self, stream: &Stream, backward: Backward<'_, T>) -> Result<()> {
        let Backward { gradient, saved: Saved { input, weight, inverse_rms }, input_gradient, partial: partial_sums, width } = backward;
        let marker = PhantomData;
        let args = RmsNormBackwardArgs { gradient, input, weight, inverse_rms, input_gradient, partial_sums, width, marker };
        self.backward.launch(stream, args)
    }
}

macro_rules! elements {
    ($($t:ty)*) => { $(
        impl RmsNormElement for $t {
            type Sums = ColumnSums<Self>;

            fn kernels(runtime: &Runtime) -> Result<Vec<Box<dyn Kernels<Self>>>> {
                Ok(vec![
                    Of::<Self, ByWarp<2>>::load(runtime)?,
                    Of::<Self, ByBlock<128, 2>>::load(runtime)?,
                    Of::<Self, ByBlock<256, 2>>::load(runtime)?,
                    Of::<Self, ByBlock<256, 4>>::load(runtime)?,
                    Of::<Self, ByBlock<512, 4>>::load(runtime)?,
                    Of::<Self, ByElements>::load(runtime)?,
                ])
            }
        }
    )* };
}
elements! { bf16 f16 }
