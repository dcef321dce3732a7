//! The row sums of `O dO`, which need no keys.

use std::sync::Arc;

use oxtile_kernels::attention::{AttentionBackwardDeltas, AttentionBackwardDeltasArgs, ResultRowsArgument};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::{Float, Pod};

use super::config::{AttentionConfig, Layout};
use crate::runtime::{Buffer, Device, Error, Result, Runtime, Stream};
use crate::tensor::Heads;

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
    /// Batches of which each has no gaps, where there are gaps between them, and elements from one to the next, of both tensors.
    apart: Option<(u64, [u64; 2])>,
}

impl<'a, T> ResultRows<'a, T> {
    /// Refuses tensors that have gaps within a batch.
    pub(super) fn new(config: &AttentionConfig, out: Heads<'a, T>, grad_out: Heads<'a, T>) -> Result<Self> {
        let (whole, sbhd) = (config.whole_result(), config.layout == Layout::Sbhd);
        let [out, grad_out] = [("AttentionBackward, out", out), ("AttentionBackward, grad_out", grad_out)].map(|(what, tensor)| {
            let (tensor, mut batches) = (tensor.shaped(what, whole)?, whole);
            if !sbhd {
                batches.strides[0] = tensor.layout().strides[0];
            }
            if tensor.layout().lies_as(&batches) {
                return Ok(tensor);
            }
            let [found, without] = [tensor.layout(), whole].map(|tensor| [tensor.strides[1], tensor.strides[2]]);
            let why = format!(
                "[row, head] strides of {found:?} elements, but the kernel that sums rows takes those of a batch without gaps, \
                 {without:?}: copy the tensor"
            );
            Err(Error::Invalid { what, why })
        });
        let (out, grad_out) = (out?, grad_out?);
        let is_whole = [out, grad_out].iter().all(|tensor| tensor.layout().lies_as(&whole));
        let apart = (!is_whole).then(|| (config.batches, [out, grad_out].map(|tensor| tensor.strides()[0])));
        let heads = if sbhd { config.heads * config.batches } else { config.heads };
        let [rows, heads, size] = [config.queries, heads, config.value_size()].map(|count| count as u32);
        Ok(Self { out: out.view(), grad_out: grad_out.view(), rows, heads, size, apart })
    }

    /// Whether neither tensor has gaps.
    pub(super) fn is_whole(&self) -> bool {
        self.apart.is_none()
    }

    /// The parts without gaps.
    fn parts(&self) -> impl Iterator<Item = [DeviceView<'a, T>; 2]> {
        let (batches, strides) = self.apart.unwrap_or((1, [0; 2]));
        let len = |view: DeviceView<'a, T>| {
            self.apart.map_or(view.len(), |_| u64::from(self.rows) * u64::from(self.heads) * u64::from(self.size))
        };
        let tensors = [(self.out, strides[0], len(self.out)), (self.grad_out, strides[1], len(self.grad_out))];
        (0..batches).map(move |batch| tensors.map(|(view, stride, len)| view.slice(batch * stride, batch * stride + len)))
    }
}

/// The loaded kernel: writes the sums of a result.
#[doc(hidden)]
pub type DeltaKernel<T> = Arc<dyn Fn(&Stream, &ResultRows<'_, T>, DeviceViewMut<'_, f32>) -> Result<()> + Send + Sync>;

/// Loads it on a device, for all who have found it: they share what is loaded.
pub(super) fn prepare<T: Float + Pod>(device: &Device) -> Result<()>
where
    AttentionBackwardDeltas<T>: Kernel,
{
    device.runtime().load::<AttentionBackwardDeltas<T>>()?.prepare(device)
}

/// Finds it.
pub(super) fn load<T: Float + Pod>(runtime: &Runtime) -> Result<DeltaKernel<T>>
where
    AttentionBackwardDeltas<T>: Kernel,
{
    let kernel = runtime.load::<AttentionBackwardDeltas<T>>()?;
    Ok(Arc::new(move |stream, result, mut deltas| {
        if deltas.is_empty() {
            return Ok(());
        }
        let &ResultRows { rows, heads, size, .. } = result;
        let mut first = 0;
        for [out, grad_out] in result.parts() {
            let end = first + out.len() / u64::from(size);
            // Lanes that share a row, 8 elements each.
            let result = ResultRowsArgument { out, grad_out, rows, heads, size, lanes: (size / 8).next_power_of_two() };
            kernel.launch(stream, AttentionBackwardDeltasArgs { result, deltas: deltas.slice_mut(first, end) })?;
            first = end;
        }
        Ok(())
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
