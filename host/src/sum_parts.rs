//! The sum of equal parts, one of each rank, in the order of the ranks: the same bits in every run.
//!
//! ```
//! use oxtile::num::bf16;
//! use oxtile::sum_parts::SumParts;
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! // Two parts of 3 elements, the second one 4 elements after the first.
//! let parts = Buffer::from_slice(&stream, &[1.0_f32, 2.0, 3.0, f32::NAN, 0.5, 0.5, 0.5])?;
//! let mut sum = Buffer::<bf16>::uninitialised(&stream, 3)?;
//!
//! SumParts::new(&runtime)?.run(&stream, parts.view(), 2, 4, sum.view_mut())?;
//! assert_eq!(sum.to_vec_as::<half::bf16>(&stream)?, [1.5, 2.5, 3.5].map(half::bf16::from_f32));
//! # Ok(()) }
//! ```

use std::fmt;

use oxtile_kernels::sum_parts::{self as kernels, AddPartsArgs, LargestPartArgs, SumPartsArgs, Summed};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel, Signature};

use crate::runtime::{Device, Loaded, Result, Runtime, Stream};

/// Adds parts of `In`, which is `f32` or `bf16`, to a sum of `Out`, which is `f32`, `bf16` or `f16`.
///
/// Memory-bound where all parts and the sum begin at multiples of 16 bytes, slower otherwise. A run allocates nothing and may be captured.
pub struct SumParts<In: Summand<Out>, Out: Summed>(Loaded<In::Kernel>);

impl<In: Summand<Out>, Out: Summed> SumParts<In, Out> {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self(runtime.load()?))
    }

    /// Enqueues `sum[i] = parts[i] + parts[stride + i] + ...`, over `count` parts, added in this order in `f32` and rounded once to nearest even. The sum
    /// of no parts is 0.
    ///
    /// # Errors
    /// As [`Loaded::launch`]: [`Error::Argument`](crate::Error::Argument) for a stride below the elements of the sum, or too few elements in `parts`.
    pub fn run(&self, stream: &Stream, parts: DeviceView<'_, In>, count: u32, stride: u64, sum: DeviceViewMut<'_, Out>) -> Result<()> {
        self.0.launch(stream, SumPartsArgs { parts, sum, count, stride })
    }

    /// Enqueues the rounding of each of the first elements of `values`: the sum of one part.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn round(&self, stream: &Stream, values: DeviceView<'_, In>, rounded: DeviceViewMut<'_, Out>) -> Result<()> {
        self.run(stream, values, 1, 0, rounded)
    }
}

impl<In: Summand<Out>, Out: Summed> fmt::Debug for SumParts<In, Out> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SumParts").finish_non_exhaustive()
    }
}

/// An element of parts whose sum is rounded to `Out`.
pub trait Summand<Out: Summed>: Summed {
    /// The kernel.
    #[doc(hidden)]
    type Kernel: Kernel + for<'a> Signature<Args<'a> = SumPartsArgs<'a, Self, Out>>;
}

impl<In: Summed, Out: Summed> Summand<Out> for In
where
    kernels::SumParts<In, Out>: Kernel,
{
    type Kernel = kernels::SumParts<In, Out>;
}

/// Adds parts of `In`, which is `f32` or `bf16`, scales their sum and adds it to a target: the gradients that all ranks found, to those that their owner keeps.
///
/// ```
/// use oxtile::sum_parts::AddParts;
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?; // or Runtime::cuda()
/// let stream = runtime.device(0)?.stream()?;
/// let parts = Buffer::from_slice(&stream, &[1.0_f32, 2.0, 3.0, 5.0])?;
/// let mut gradient = Buffer::from_slice(&stream, &[0.5_f32, 0.25])?;
///
/// // The mean of two parts of 2 elements.
/// AddParts::new(&runtime)?.run(&stream, parts.view(), 2, 2, 0.5, gradient.view_mut())?;
/// assert_eq!(gradient.to_vec(&stream)?, [2.5, 3.75]);
/// # Ok(()) }
/// ```
///
/// Memory-bound where all parts and the target begin at multiples of 16 bytes, slower otherwise. A run allocates nothing and may be captured.
pub struct AddParts<In: Addend>(Loaded<In::Kernel>);

impl<In: Addend> AddParts<In> {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self(runtime.load()?))
    }

    /// Loads it on a device, which the first run there does else.
    ///
    /// # Errors
    /// As [`Loaded::prepare`].
    pub fn prepare(&self, device: &Device) -> Result<()> {
        self.0.prepare(device)
    }

    /// Enqueues `target[i] += scale * (parts[i] + parts[stride + i] + ...)`, over `count` parts, added in this order in `f32`. The product and the last addition are
    /// rounded to nearest even, each by itself. The sum of no parts is 0.
    ///
    /// # Errors
    /// As [`SumParts::run`].
    pub fn run(
        &self,
        stream: &Stream,
        parts: DeviceView<'_, In>,
        count: u32,
        stride: u64,
        scale: f32,
        target: DeviceViewMut<'_, f32>,
    ) -> Result<()> {
        self.0.launch(stream, AddPartsArgs { parts, target, count, stride, scale })
    }
}

impl<In: Addend> fmt::Debug for AddParts<In> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddParts").finish_non_exhaustive()
    }
}

/// An element of parts whose sum is added to a target: `f32` or `bf16`.
pub trait Addend: Summed {
    /// The kernel.
    #[doc(hidden)]
    type Kernel: Kernel + for<'a> Signature<Args<'a> = AddPartsArgs<'a, Self>>;
}

impl<In: Summed> Addend for In
where
    kernels::AddParts<In>: Kernel,
{
    type Kernel = kernels::AddParts<In>;
}

/// Finds the largest of parts, number by number: the largest scores of a head among those that each rank, or each step, has found.
///
/// ```
/// use oxtile::sum_parts::LargestPart;
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?; // or Runtime::cuda()
/// let stream = runtime.device(0)?.stream()?;
/// let parts = Buffer::from_slice(&stream, &[1.0_f32, -2.0, -3.0, f32::NAN])?;
/// let mut largest = Buffer::<f32>::uninitialised(&stream, 2)?;
///
/// // Of two parts of 2 numbers.
/// LargestPart::new(&runtime)?.run(&stream, parts.view(), 2, 2, largest.view_mut())?;
/// assert_eq!(largest.to_vec(&stream)?, [1.0, -2.0]);
/// # Ok(()) }
/// ```
///
/// A run allocates nothing and may be captured.
pub struct LargestPart(Loaded<kernels::LargestPart>);

impl LargestPart {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self(runtime.load()?))
    }

    /// Enqueues `largest[i] = max(parts[i], parts[stride + i], ...)`, over `count` parts, NaN left out. The largest of no parts is -inf.
    ///
    /// # Errors
    /// As [`SumParts::run`].
    pub fn run(&self, stream: &Stream, parts: DeviceView<'_, f32>, count: u32, stride: u64, largest: DeviceViewMut<'_, f32>) -> Result<()> {
        self.0.launch(stream, LargestPartArgs { parts, largest, count, stride })
    }
}

impl fmt::Debug for LargestPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LargestPart").finish_non_exhaustive()
    }
}
