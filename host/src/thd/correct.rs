//! What a step of a ring adds to a rank's log-sum-exps, results and gradients.

use std::fmt;

use oxtile_kernels::sum_parts::Summed;
use oxtile_kernels::thd as kernels;
use oxtile_kernels::thd::{
    Change, Changes, GradCorrectArgs, Half, HeadRows, LseCorrectArgs, LseReadHalfArgs, OutCorrectArgs, Part, StepRowsArgument,
};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel, Signature};
use oxtile_tile::num::{bf16, f16};

use super::share::narrow;
use crate::rank::WorldSize;
use crate::runtime::{Loaded, Result, Runtime, Stream};

fn step_rows(cu_seqlens_padded: DeviceView<'_, u32>, world: WorldSize, part: Part) -> StepRowsArgument<'_> {
    StepRowsArgument { cu_seqlens_padded, world: world.get(), part: part as u32 }
}

/// Log-sum-exps of attention, a number for each row and head: halves of them, and what a step adds.
pub struct LogSumExps {
    read: Loaded<kernels::LseReadHalf>,
    correct: Loaded<kernels::LseCorrect>,
    world: WorldSize,
}

impl LogSumExps {
    /// Loads the kernels, for tensors that the ranks of a world share.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime, world: WorldSize) -> Result<Self> {
        Ok(Self { read: runtime.load()?, correct: runtime.load()?, world })
    }

    /// Enqueues the numbers of one half of each sequence, of the sizes in `rows`. Other elements of `half` stay as they are.
    ///
    /// # Errors
    /// As [`Loaded::launch`]: [`Error::Argument`](crate::Error::Argument) names what does not fit.
    pub fn read_half(
        &self,
        stream: &Stream,
        cu_seqlens_padded: DeviceView<'_, u32>,
        which: Half,
        whole: DeviceView<'_, f32>,
        half: DeviceViewMut<'_, f32>,
        rows: HeadRows,
    ) -> Result<()> {
        let part = if which == Half::Late { Part::Late } else { Part::Early };
        let sequences = step_rows(cu_seqlens_padded, self.world, part);
        self.read.launch(stream, LseReadHalfArgs { whole, part: half, sequences, rows })
    }

    /// Enqueues the change of `whole` to the log-sum-exps of its scores and of a step's: of all rows of each sequence or of a half. Where both are -inf, the
    /// sum is -inf too.
    ///
    /// # Errors
    /// As [`read_half`](Self::read_half).
    pub fn correct(
        &self,
        stream: &Stream,
        cu_seqlens_padded: DeviceView<'_, u32>,
        part: Part,
        whole: DeviceViewMut<'_, f32>,
        step: DeviceView<'_, f32>,
        rows: HeadRows,
    ) -> Result<()> {
        let sequences = step_rows(cu_seqlens_padded, self.world, part);
        self.correct.launch(stream, LseCorrectArgs { whole, step, sequences, rows })
    }
}

impl fmt::Debug for LogSumExps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogSumExps").field("world", &self.world).finish_non_exhaustive()
    }
}

/// The tensors of an addition to a result.
pub struct Corrected<'a, Out, Step> {
    /// The result, `[rows, heads, size]`.
    pub out: DeviceViewMut<'a, Out>,
    /// The step's, `[its rows, heads, size]`.
    pub step: DeviceView<'a, Step>,
    /// The log-sum-exps of all steps.
    pub lse: DeviceView<'a, f32>,
    /// Those of the step.
    pub step_lse: DeviceView<'a, f32>,
}

/// Adds the results of steps, each by the share of its scores. `Out` is `f32`, or the element of the step; the sum is rounded in each step.
pub struct OutCorrection<Out: Summed, Step: AddedTo<Out>> {
    kernel: Loaded<Step::Kernel>,
    world: WorldSize,
}

impl<Out: Summed, Step: AddedTo<Out>> OutCorrection<Out, Step> {
    /// Loads the kernel, for tensors that the ranks of a world share.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime, world: WorldSize) -> Result<Self> {
        Ok(Self { kernel: runtime.load()?, world })
    }

    /// Enqueues `out += step exp(step_lse - lse)`, for all rows of each sequence or for a half, of heads of `size` elements. An element of the step that is
    /// 0 adds 0.
    ///
    /// # Errors
    /// As [`LogSumExps::read_half`].
    pub fn run(
        &self,
        stream: &Stream,
        cu_seqlens_padded: DeviceView<'_, u32>,
        part: Part,
        Corrected { out, step, lse, step_lse }: Corrected<'_, Out, Step>,
        rows: HeadRows,
        size: u32,
    ) -> Result<()> {
        let sequences = step_rows(cu_seqlens_padded, self.world, part);
        self.kernel.launch(stream, OutCorrectArgs { out, step, lse, step_lse, sequences, rows, size })
    }
}

impl<Out: Summed, Step: AddedTo<Out>> fmt::Debug for OutCorrection<Out, Step> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutCorrection").field("world", &self.world).finish_non_exhaustive()
    }
}

/// An element of a step's result, which is added to a result of `Out`.
pub trait AddedTo<Out: Summed>: Summed {
    /// The kernel.
    #[doc(hidden)]
    type Kernel: Kernel + for<'a> Signature<Args<'a> = OutCorrectArgs<'a, Out, Self>>;
}

impl<Out: Summed, Step: Summed> AddedTo<Out> for Step
where
    kernels::OutCorrect<Out, Step>: Kernel,
{
    type Kernel = kernels::OutCorrect<Out, Step>;
}

/// What the gradient of a step does to the halves of each sequence. A step that changes one half has no rows of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientHalves {
    /// It is added to the early half.
    AddEarly,
    /// It replaces the early half.
    CopyEarly,
    /// It is added to the late half.
    AddLate,
    /// It replaces the late half.
    CopyLate,
    /// It is added to the early half and replaces the late one.
    AddEarlyCopyLate,
    /// It replaces the early half and is added to the late one.
    CopyEarlyAddLate,
}

impl GradientHalves {
    fn changes(self) -> (Part, Changes) {
        let (part, early, late) = match self {
            Self::AddEarly => (Part::Early, Change::Add, Change::None),
            Self::CopyEarly => (Part::Early, Change::Copy, Change::None),
            Self::AddLate => (Part::Late, Change::None, Change::Add),
            Self::CopyLate => (Part::Late, Change::None, Change::Copy),
            Self::AddEarlyCopyLate => (Part::Whole, Change::Add, Change::Copy),
            Self::CopyEarlyAddLate => (Part::Whole, Change::Copy, Change::Add),
        };
        (part, Changes { early: early as u32, late: late as u32 })
    }
}

/// Brings the gradients of steps into those of the rank.
pub struct GradientCorrection<T: GradientElement> {
    kernel: Loaded<T::Kernel>,
    world: WorldSize,
}

impl<T: GradientElement> GradientCorrection<T> {
    /// Loads the kernel, for tensors that the ranks of a world share.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime, world: WorldSize) -> Result<Self> {
        Ok(Self { kernel: runtime.load()?, world })
    }

    /// Enqueues the change of `gradient`, `[groups, rows, width]`, by that of a step, `[groups, step_rows, width]`, of which `[step_rows, width]` are given:
    /// all rows, or half of them. Sums are rounded to nearest even. Rows after the last sequence stay as they are.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for 2^32 rows or elements; as [`Loaded::launch`].
    pub fn run(
        &self,
        stream: &Stream,
        cu_seqlens_padded: DeviceView<'_, u32>,
        halves: GradientHalves,
        gradient: DeviceViewMut<'_, T>,
        step: DeviceView<'_, T>,
        [rows, width]: [u64; 2],
    ) -> Result<()> {
        let (part, changes) = halves.changes();
        let [step_rows, width] = [narrow(WHAT, "rows", rows)?, narrow(WHAT, "elements a row", width)?];
        let sequences = self::step_rows(cu_seqlens_padded, self.world, part);
        self.kernel.launch(stream, GradCorrectArgs { gradient, step, sequences, changes, step_rows, width })
    }
}

const WHAT: &str = "GradientCorrection";

impl<T: GradientElement> fmt::Debug for GradientCorrection<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GradientCorrection").field("world", &self.world).finish_non_exhaustive()
    }
}

/// An element of gradients: `f32`, `bf16` or `f16`.
pub trait GradientElement: Summed {
    /// The kernel.
    #[doc(hidden)]
    type Kernel: Kernel + for<'a> Signature<Args<'a> = GradCorrectArgs<'a, Self>>;
}

macro_rules! elements {
    ($($t:ty)*) => { $(
        impl GradientElement for $t {
            type Kernel = kernels::GradCorrect<Self>;
        }
    )* };
}
elements! { f32 bf16 f16 }
