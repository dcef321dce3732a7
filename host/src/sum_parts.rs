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
use std::marker::PhantomData;

use oxtile_kernels::sum_parts::{self as kernels, AddPartsArgs, Kept, LargestPartArgs, Places, SumPartsArgs, Summed, Zero};
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

    /// Loads it on a device, which the first run there does else.
    ///
    /// # Errors
    /// As [`Loaded::prepare`].
    pub fn prepare(&self, device: &Device) -> Result<()> {
        self.0.prepare(device)
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
/// use oxtile::sum_parts::{AddParts, Before, PartApart, RankParts};
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?; // or Runtime::cuda()
/// let stream = runtime.device(0)?.stream()?;
/// let parts = Buffer::from_slice(&stream, &[1.0_f32, 2.0, 3.0, 5.0])?;
/// let mut gradient = Buffer::from_slice(&stream, &[0.5_f32, 0.25])?;
///
/// // The mean of two parts of 2 elements.
/// let add = AddParts::new(&runtime)?;
/// add.run(&stream, parts.view(), 2, 2, 0.5, gradient.view_mut())?;
/// assert_eq!(gradient.to_vec(&stream)?, [2.5, 3.75]);
///
/// // The second of three parts lies apart, and what the gradient held is not wanted.
/// let own = Buffer::from_slice(&stream, &[10.0_f32, 20.0])?;
/// let apart = Some(PartApart { rank: 1, part: own.view(), width: 2, pitch: 2 });
/// let of = RankParts { parts: parts.view(), count: 3, stride: 2, apart };
/// add.add(&stream, of, 1.0, Before::Zero, gradient.view_mut())?;
/// assert_eq!(gradient.to_vec(&stream)?, [14.0, 27.0]);
/// # Ok(()) }
/// ```
///
/// Memory-bound where all parts and the target begin at multiples of 16 bytes, slower otherwise. A run allocates nothing and may be captured.
pub struct AddParts<In: Addend> {
    to_kept: Loaded<In::ToKept>,
    to_zero: Loaded<In::ToZero>,
}

/// Parts of a target `[rows, width]`, one of each rank.
#[derive(Clone, Copy)]
pub struct RankParts<'a, In> {
    /// The parts that follow one another: of all ranks, or of all but the one whose part lies apart.
    pub parts: DeviceView<'a, In>,
    /// How many parts there are.
    pub count: u32,
    /// Elements from one of [`parts`](Self::parts) to the next one.
    pub stride: u64,
    /// The part that lies apart.
    pub apart: Option<PartApart<'a, In>>,
}

/// A part that lies apart from the others, in rows: as that of the rank itself, among the rows of the whole that it computed.
#[derive(Clone, Copy)]
pub struct PartApart<'a, In> {
    /// Its number among all parts.
    pub rank: u32,
    /// Its rows.
    pub part: DeviceView<'a, In>,
    /// Elements of a row.
    pub width: u64,
    /// Elements from a row to the next one.
    pub pitch: u64,
}

/// What a sum is added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// What the target holds.
    Kept,
    /// Zero: the target is written, and not read. It has the bits of a target that was filled with zeros first.
    Zero,
}

impl<In: Addend> AddParts<In> {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self { to_kept: runtime.load()?, to_zero: runtime.load()? })
    }

    /// Loads them on a device, which the first run there does else.
    ///
    /// # Errors
    /// As [`Loaded::prepare`].
    pub fn prepare(&self, device: &Device) -> Result<()> {
        self.to_kept.prepare(device)?;
        self.to_zero.prepare(device)
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
        self.add(stream, RankParts { parts, count, stride, apart: None }, scale, Before::Kept, target)
    }

    /// The same of parts of which one may lie apart, added to what the target holds or to zero. The order of the sum is that of the parts' numbers, wherever they lie.
    ///
    /// # Errors
    /// As [`SumParts::run`]; the same for a part apart whose number is none of `count`, which has too few elements, or whose rows do not divide the target, or are more than 65535.
    pub fn add(&self, stream: &Stream, of: RankParts<'_, In>, scale: f32, before: Before, target: DeviceViewMut<'_, f32>) -> Result<()> {
        let RankParts { parts, count, stride, apart } = of;
        let all = Places { count, rank: 0, stride, width: target.len(), pitch: 0 };
        let places = apart.map_or(all, |PartApart { rank, width, pitch, .. }| Places { rank, width, pitch, ..all });
        let apart = apart.map(|apart| apart.part);
        match before {
            Before::Kept => self.to_kept.launch(stream, AddPartsArgs { parts, apart, target, places, scale, marker: PhantomData }),
            Before::Zero => self.to_zero.launch(stream, AddPartsArgs { parts, apart, target, places, scale, marker: PhantomData }),
        }
    }
}

impl<In: Addend> fmt::Debug for AddParts<In> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddParts").finish_non_exhaustive()
    }
}

/// An element of parts whose sum is added to a target: `f32` or `bf16`.
pub trait Addend: Summed {
    /// The kernel that adds to what the target holds.
    #[doc(hidden)]
    type ToKept: Kernel + for<'a> Signature<Args<'a> = AddPartsArgs<'a, Self, Kept>>;
    /// The kernel that adds to zero.
    #[doc(hidden)]
    type ToZero: Kernel + for<'a> Signature<Args<'a> = AddPartsArgs<'a, Self, Zero>>;
}

impl<In: Summed> Addend for In
where
    kernels::AddParts<In, Kept>: Kernel,
    kernels::AddParts<In, Zero>: Kernel,
{
    type ToKept = kernels::AddParts<In, Kept>;
    type ToZero = kernels::AddParts<In, Zero>;
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

    /// Loads it on a device, which the first run there does else.
    ///
    /// # Errors
    /// As [`Loaded::prepare`].
    pub fn prepare(&self, device: &Device) -> Result<()> {
        self.0.prepare(device)
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
