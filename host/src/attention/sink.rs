//! The score that the softmax counts beside the keys, bound.

use oxtile_tile::launch::DeviceView;

use super::config::{AttentionConfig, Sink};
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
