//! The result of the forward kernel, bound.

use oxtile_kernels::attention::{Chosen, ChosenArgument, Rounded, RoundedArgument, Running, RunningArgument, WARPGROUP_QUERIES};
use oxtile_tile::launch::{DeviceViewMut, Parameter};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::config::{AttentionConfig, Output};
use super::tensors::{Outputs, Target};
use crate::runtime::{Result, Stream};
use crate::tensor::{MapLayout, TensorMapMut, Uploads};

/// A result between launches.
pub(super) enum BoundResult<'a, T: RegisterElement, const V: usize, const RANK: usize> {
    Rounded { out: TensorMapMut<'a, T, WARPGROUP_QUERIES, V, Swizzle128, RANK>, log_sum_exp: DeviceViewMut<'a, f32> },
    Running(RunningArgument<'a, T, true>),
}

impl<'a, T: RegisterElement, const V: usize, const RANK: usize> BoundResult<'a, T, V, RANK> {
    /// Binds a result with this layout of rows, and its strides from one batch, head and row to the next.
    pub(super) fn new(
        uploads: &mut Uploads,
        stream: &Stream,
        config: &AttentionConfig,
        Outputs { out, log_sum_exp, .. }: Outputs<'a, T>,
        (rows, [batch_stride, head_stride, row_stride]): (impl MapLayout<RANK>, [u64; 3]),
    ) -> Result<Self> {
        let (sums, rounded) = match out {
            Target::Rounded(out) => {
                return Ok(Self::Rounded { out: TensorMapMut::with(uploads, stream, out.into_view(), rows)?, log_sum_exp });
            }
            Target::Merged(sums) => (sums.into_view(), None),
            Target::Last { running, out } => {
                let running = running.view();
                let access = running.access("running");
                // SAFETY: the kernel only reads the running result of a step that rounds; the view borrows it as long.
                (unsafe { DeviceViewMut::from_raw(access.address, running.len(), access.owner) }, Some(out.into_view()))
            }
        };
        let (begins, size) = (config.output == Output::First, config.value_size() as u32);
        Ok(Self::Running(RunningArgument { sums, log_sum_exp, rounded, begins, size, batch_stride, head_stride, row_stride }))
    }
}

/// A kernel's target, which takes a bound result. Both follow from the configuration's output, for which the tensors are checked.
pub(super) trait ResultTarget<T: RegisterElement, const V: usize, const RANK: usize>: Parameter + 'static {
    /// The argument of a launch.
    fn argument<'s>(result: &'s mut BoundResult<'_, T, V, RANK>) -> Self::Argument<'s>;
}

impl<T: RegisterElement + StoredElement, const V: usize, const RANK: usize> ResultTarget<T, V, RANK> for Rounded<T, V, RANK> {
    fn argument<'s>(result: &'s mut BoundResult<'_, T, V, RANK>) -> Self::Argument<'s> {
        let BoundResult::Rounded { out, log_sum_exp } = result else { unreachable!("the output is rounded") };
        RoundedArgument { out: out.view_mut(), log_sum_exp: log_sum_exp.reborrow() }
    }
}

/// In a ring each step knows whether it is the first or the last; other launches only merge.
impl<T: RegisterElement, const V: usize, const RANK: usize, const STEPS: bool> ResultTarget<T, V, RANK> for Running<T, STEPS> {
    fn argument<'s>(result: &'s mut BoundResult<'_, T, V, RANK>) -> Self::Argument<'s> {
        let BoundResult::Running(running) = result else { unreachable!("the output is merged") };
        RunningArgument {
            sums: running.sums.reborrow(),
            log_sum_exp: running.log_sum_exp.reborrow(),
            rounded: running.rounded.as_mut().map(DeviceViewMut::reborrow),
            begins: running.begins,
            size: running.size,
            batch_stride: running.batch_stride,
            head_stride: running.head_stride,
            row_stride: running.row_stride,
        }
    }
}

impl<T: RegisterElement + StoredElement, const V: usize> ResultTarget<T, V, 5> for Chosen<T, V> {
    fn argument<'s>(result: &'s mut BoundResult<'_, T, V, 5>) -> Self::Argument<'s> {
        match result {
            BoundResult::Rounded { .. } => ChosenArgument { running: None, rounded: Some(Rounded::argument(result)) },
            BoundResult::Running(_) => ChosenArgument { running: Some(Running::argument(result)), rounded: None },
        }
    }
}
