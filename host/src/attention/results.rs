//! The result of the forward kernel, bound.

use oxtile_kernels::attention::{
    Chosen, ChosenArgument, LEFT, RIGHT, RingStep, RingStepArgument, Rounded, RoundedArgument, RowMapsArgument, Running, RunningArgument,
    WARP_ROWS, WARPGROUP_QUERIES,
};
use oxtile_tile::launch::{DeviceViewMut, Parameter};
use oxtile_tile::layout::{Linear, Swizzle128};
use oxtile_tile::register_tile::{RegisterElement, StoredElement};

use super::config::{AttentionConfig, Output};
use super::tensors::{Outputs, Target};
use crate::runtime::{Result, Stream};
use crate::tensor::{MapLayout, TensorMapMut, Uploads};

/// A result between launches.
pub(super) enum BoundResult<'a, T: RegisterElement, const V: usize, const RANK: usize> {
    Rounded { out: TensorMapMut<'a, T, WARPGROUP_QUERIES, V, Swizzle128, RANK>, log_sum_exp: DeviceViewMut<'a, f32> },
    Running { running: RunningArgument<'a, T, true>, rows: Option<Box<BoundRows<'a, RANK>>> },
}

/// The maps of a running result's rows, for steps of a ring.
pub(super) struct BoundRows<'a, const RANK: usize> {
    left: TensorMapMut<'a, f32, WARP_ROWS, LEFT, Linear, RANK>,
    right: TensorMapMut<'a, f32, WARP_ROWS, RIGHT, Linear, RANK>,
}

impl<'a, const RANK: usize> BoundRows<'a, RANK> {
    /// Encodes the maps of the sums of a running result, if rows are aligned for TMA, and those of the rounded one for stores of 16 bytes.
    fn new<T: RegisterElement>(
        uploads: &mut Uploads,
        stream: &Stream,
        running: &mut RunningArgument<'a, T, true>,
        rows: impl MapLayout<RANK>,
    ) -> Result<Option<Self>> {
        let RunningArgument { sums, rounded, size, batch_stride, head_stride, row_stride, .. } = running;
        // Elements of 16 bytes.
        let (elements, addresses) = match rounded {
            Some(rounded) => (16 / size_of::<T>() as u64, [sums.address(), rounded.address()]),
            None => (4, [sums.address(); 2]),
        };
        let strides = [u64::from(*size), *batch_stride, *head_stride, *row_stride];
        if addresses.iter().any(|address| !address.is_multiple_of(16)) || strides.iter().any(|stride| !stride.is_multiple_of(elements)) {
            return Ok(None);
        }
        let access = sums.access("out");
        // SAFETY: the kernel that takes the maps takes the view beside them, and waits for a copy of a row before it reads or writes the row by the view; all three borrow the sums
        // as long.
        let [left, right] = [(); 2].map(|()| unsafe { DeviceViewMut::from_raw(access.address, sums.len(), access.owner) });
        let (left, right) = (TensorMapMut::with(uploads, stream, left, rows)?, TensorMapMut::with(uploads, stream, right, rows)?);
        Ok(Some(Self { left, right }))
    }
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
        let mut running = RunningArgument { sums, log_sum_exp, rounded, begins, size, batch_stride, head_stride, row_stride };
        let rows = BoundRows::new(uploads, stream, &mut running, rows)?.map(Box::new);
        Ok(Self::Running { running, rows })
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

impl<T: RegisterElement + StoredElement, const V: usize, const RANK: usize> ResultTarget<T, V, RANK> for RingStep<T, RANK> {
    fn argument<'s>(result: &'s mut BoundResult<'_, T, V, RANK>) -> Self::Argument<'s> {
        let BoundResult::Running { running, rows } = result else { unreachable!("the output is merged") };
        let rows = rows.as_mut().map(|rows| RowMapsArgument { left: rows.left.view_mut(), right: rows.right.view_mut() });
        RingStepArgument { running: reborrow(running), rows }
    }
}

/// The running result of a launch.
fn reborrow<'s, T: RegisterElement, const STEPS: bool>(running: &'s mut RunningArgument<'_, T, true>) -> RunningArgument<'s, T, STEPS> {
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

/// In a ring each step knows whether it is the first or the last; other launches only merge.
impl<T: RegisterElement, const V: usize, const RANK: usize, const STEPS: bool> ResultTarget<T, V, RANK> for Running<T, STEPS> {
    fn argument<'s>(result: &'s mut BoundResult<'_, T, V, RANK>) -> Self::Argument<'s> {
        let BoundResult::Running { running, .. } = result else { unreachable!("the output is merged") };
        reborrow(running)
    }
}

impl<T: RegisterElement + StoredElement, const V: usize> ResultTarget<T, V, 5> for Chosen<T, V> {
    fn argument<'s>(result: &'s mut BoundResult<'_, T, V, 5>) -> Self::Argument<'s> {
        match result {
            BoundResult::Rounded { .. } => ChosenArgument { running: None, rounded: Some(Rounded::argument(result)) },
            BoundResult::Running { .. } => ChosenArgument { running: Some(Running::argument(result)), rounded: None },
        }
    }
}
