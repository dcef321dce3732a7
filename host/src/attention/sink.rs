//! The score that the softmax counts beside the keys, and its gradient, bound.

use oxtile_kernels::attention::{AttentionBackwardSink, AttentionBackwardSinkArgs};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::config::{AttentionConfig, Sink};
use super::sequences::BoundSequences;
use crate::runtime::{Loaded, Result, Stream};
use crate::tensor::{UploadedArray, Uploads};

/// Where scores of sinks come from.
pub(super) enum BoundSink<'a> {
    /// There are none.
    None,
    /// One of 0 for all heads.
    OffByOne(UploadedArray),
    /// One for each head.
    Learnable(DeviceView<'a, f32>),
}

impl<'a> BoundSink<'a> {
    /// The configuration's; `given` with the tensors if it is learnable.
    pub(super) fn new(uploads: &mut Uploads, config: &AttentionConfig, given: Option<DeviceView<'a, f32>>) -> Self {
        match (config.sink, given) {
            (Sink::OffByOne, _) => Self::OffByOne(uploads.add_array(&[0.0_f32.to_bits()])),
            (_, Some(given)) => Self::Learnable(given),
            (_, None) => Self::None,
        }
    }

    /// The argument of a launch.
    pub(super) fn argument(&self) -> Option<DeviceView<'_, f32>> {
        match self {
            Self::None => None,
            Self::OffByOne(zero) => {
                let access = zero.view().access("sink");
                // SAFETY: the bits of one `f32` lie there, which live as long as the view's owner.
                Some(unsafe { DeviceView::from_raw(access.address, 1, access.owner) })
            }
            Self::Learnable(given) => Some(*given),
        }
    }
}

/// Writes the gradient of a learnable sink, if it is wanted.
pub(super) fn differentiate_sink(
    kernel: &Loaded<AttentionBackwardSink>,
    stream: &Stream,
    sequences: &BoundSequences<'_>,
    [log_sum_exp, deltas]: [DeviceView<'_, f32>; 2],
    sink: Option<DeviceView<'_, f32>>,
    grad_sink: &mut Option<DeviceViewMut<'_, f32>>,
) -> Result<()> {
    let (Some(sink), Some(grad_sink)) = (sink, grad_sink) else { return Ok(()) };
    let (grad_sink, statistics) = (grad_sink.reborrow(), sequences.statistics(log_sum_exp, deltas));
    let (sequences, batches) = (sequences.argument(), sequences.heads.batches);
    kernel.launch(stream, AttentionBackwardSinkArgs { sink, grad_sink, statistics, sequences, batches })
}
