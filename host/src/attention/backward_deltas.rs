//! The row sums of `O dO`, of which no key is a part.

use oxtile_kernels::attention::{AttentionBackwardDeltas, AttentionBackwardDeltasArgs, ResultRowsArgument};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::{Float, Pod};

use super::config::{AttentionConfig, Layout};
use crate::runtime::{Buffer, Loaded, Result, Stream};

/// A result and its gradient.
#[doc(hidden)]
pub struct OfResult<'a, T> {
    pub(super) out: DeviceView<'a, T>,
    pub(super) grad_out: DeviceView<'a, T>,
    rows: u32,
    heads: u32,
    size: u32,
}

impl<'a, T> OfResult<'a, T> {
    pub(super) fn new(config: &AttentionConfig, out: DeviceView<'a, T>, grad_out: DeviceView<'a, T>) -> Self {
        let (rows, size) = (config.queries as u32, config.value_size() as u32);
        Self { out, grad_out, rows, heads: tensor_heads(config) as u32, size }
    }
}

/// Query heads of a row of a dense tensor: row by row, the heads of all sequences of sbhd are those of one.
pub(super) fn tensor_heads(config: &AttentionConfig) -> u64 {
    if config.layout == Layout::Sbhd { config.heads * config.batches } else { config.heads }
}

/// The loaded kernel.
#[doc(hidden)]
pub trait DeltaKernel<T>: Send + Sync {
    fn launch(&self, stream: &Stream, result: &OfResult<'_, T>, deltas: DeviceViewMut<'_, f32>) -> Result<()>;
}

impl<T: Float + Pod> DeltaKernel<T> for Loaded<AttentionBackwardDeltas<T>>
where
    AttentionBackwardDeltas<T>: Kernel,
{
    fn launch(&self, stream: &Stream, result: &OfResult<'_, T>, deltas: DeviceViewMut<'_, f32>) -> Result<()> {
        let OfResult { out, grad_out, rows, heads, size } = *result;
        if deltas.is_empty() {
            return Ok(());
        }
        // Lanes that share a row, 8 elements each.
        let result = ResultRowsArgument { out, grad_out, rows, heads, size, lanes: (size / 8).next_power_of_two() };
        self.launch(stream, AttentionBackwardDeltasArgs { result, deltas })
    }
}

/// The sums, one for each element of the log-sum-exp.
pub(super) enum Deltas<'a, T> {
    /// Computed before.
    Given(DeviceView<'a, f32>),
    /// Computed by each run, of this result.
    Computed { kernel: &'a dyn DeltaKernel<T>, result: OfResult<'a, T>, sums: Buffer<f32> },
}

impl<T> Deltas<'_, T> {
    /// The sums, computed if need be.
    pub(super) fn run(&mut self, stream: &Stream) -> Result<DeviceView<'_, f32>> {
        match self {
            Self::Given(deltas) => Ok(*deltas),
            Self::Computed { kernel, result, sums } => {
                kernel.launch(stream, result, sums.view_mut())?;
                Ok(sums.view())
            }
        }
    }
}
