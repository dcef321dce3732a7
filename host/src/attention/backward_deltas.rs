//! The row sums of `O dO`, which need no keys.

use std::sync::Arc;

use oxtile_kernels::attention::{AttentionBackwardDeltas, AttentionBackwardDeltasArgs, ResultRowsArgument};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::{Float, Pod};

use super::config::{AttentionConfig, Layout};
use crate::runtime::{Buffer, Result, Runtime, Stream};

/// A result and its gradient.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct ResultRows<'a, T> {
    pub(super) out: DeviceView<'a, T>,
    pub(super) grad_out: DeviceView<'a, T>,
    pub(super) rows: u32,
    /// Query heads of a row of a dense tensor: row by row, the heads of all sequences of sbhd are those of one.
    pub(super) heads: u32,
    size: u32,
}

impl<'a, T> ResultRows<'a, T> {
    pub(super) fn new(config: &AttentionConfig, out: DeviceView<'a, T>, grad_out: DeviceView<'a, T>) -> Self {
        let heads = if config.layout == Layout::Sbhd { config.heads * config.batches } else { config.heads };
        let [rows, heads, size] = [config.queries, heads, config.value_size()].map(|count| count as u32);
        Self { out, grad_out, rows, heads, size }
    }
}

/// The loaded kernel: writes the sums of a result.
#[doc(hidden)]
pub type DeltaKernel<T> = Arc<dyn Fn(&Stream, &ResultRows<'_, T>, DeviceViewMut<'_, f32>) -> Result<()> + Send + Sync>;

/// Loads it.
pub(super) fn load<T: Float + Pod>(runtime: &Runtime) -> Result<DeltaKernel<T>>
where
    AttentionBackwardDeltas<T>: Kernel,
{
    let kernel = runtime.load::<AttentionBackwardDeltas<T>>()?;
    Ok(Arc::new(move |stream, &ResultRows { out, grad_out, rows, heads, size }, deltas| {
        if deltas.is_empty() {
            return Ok(());
        }
        // Lanes that share a row, 8 elements each.
        let result = ResultRowsArgument { out, grad_out, rows, heads, size, lanes: (size / 8).next_power_of_two() };
        kernel.launch(stream, AttentionBackwardDeltasArgs { result, deltas })
    }))
}

/// Where the sums come from.
#[derive(Clone, Copy)]
pub(super) enum DeltaSource<'a, T> {
    /// They are computed in each run, of this result.
    Of(ResultRows<'a, T>),
    /// They were computed before.
    Given(DeviceView<'a, f32>),
}

/// The sums, laid out as the log-sum-exp.
pub(super) struct Deltas<'a, T> {
    source: DeltaSource<'a, T>,
    kernel: DeltaKernel<T>,
    sums: Buffer<f32>,
}

impl<'a, T> Deltas<'a, T> {
    pub(super) fn new(stream: &Stream, kernel: &DeltaKernel<T>, source: DeltaSource<'a, T>, rows: u64) -> Result<Self> {
        let sums = Buffer::uninitialised(stream, if matches!(source, DeltaSource::Of(_)) { rows } else { 0 })?;
        Ok(Self { source, kernel: Arc::clone(kernel), sums })
    }

    /// The sums, computed if need be.
    pub(super) fn run(&mut self, stream: &Stream) -> Result<DeviceView<'_, f32>> {
        match &self.source {
            DeltaSource::Given(deltas) => Ok(*deltas),
            DeltaSource::Of(result) => {
                (self.kernel)(stream, result, self.sums.view_mut())?;
                Ok(self.sums.view())
            }
        }
    }
}
