//! Amaxes in two phases: each rank's own, and all ranks'.
//!
//! A tensor that ranks share is cast with one amax. The types keep the order of its phases: the amaxes of this rank's
//! part are a [`LocalAmax`], one reduction makes it a [`GlobalAmax`], and only with that is a part cast. A rank with an empty part
//! takes part. Local amaxes are found by [`Amax`](super::Amax) of a tensor, [`MultiAmax`](super::MultiAmax) of a group,
//! [`HadamardAmax`](super::HadamardAmax) before and after the transform, [`ShardCasts`](super::ShardCasts) of squares. Ranks then exchange tensors with [`Compact`](super::Compact) scales.

use std::sync::Arc;

use crate::comm::ReduceMax;
use crate::runtime::{Buffer, Error, Result, Stream};

/// The largest magnitudes of this rank's parts of tensors, which are only to be [reduced](Self::reduce).
///
/// No cast takes it, only the amax on which all ranks agreed:
///
/// ```compile_fail,E0308
/// use oxtile::quantize::{CurrentScaling, Fp8Tensor, LocalAmax};
/// # use oxtile::{Buffer, Stream};
///
/// fn cast(casts: &CurrentScaling<f32>, stream: &Stream, part: &Buffer<f32>, amax: &LocalAmax, tensor: &mut Fp8Tensor) {
///     casts.cast_shard(stream, part.view(), amax, tensor).unwrap();
/// }
/// ```
///
/// ```
/// use oxtile::comm::SingleRank;
/// use oxtile::quantize::{Amax, CurrentScaling, Direction, Fp8Tensor, ScaleOptions};
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?; // or Runtime::cuda()
/// let (device, stream) = (runtime.device(0)?, runtime.device(0)?.stream()?);
/// let ranks = SingleRank::new(&device); // or a communicator of more
/// let casts = CurrentScaling::<f32>::new(&runtime, ScaleOptions::default())?;
///
/// let part = Buffer::from_slice(&stream, &[224.0_f32, -1.0, 0.0, 5.0])?;
/// let agreed = Amax::new(&runtime)?.local_amax(&stream, part.view())?.reduce(&ranks, &stream)?;
/// let mut tensor = Fp8Tensor::uninitialised(&stream, [1, 4], Direction::Rows)?;
/// casts.cast_shard(&stream, part.view(), &agreed, &mut tensor)?;
/// assert_eq!(tensor.scales.to_vec(&stream)?, [0.5]);
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "the other ranks wait for this one in `reduce`"]
pub struct LocalAmax(Buffer<f32>);

/// The largest magnitudes of tensors, the same on all ranks. Clones are handles on one.
#[derive(Debug, Clone)]
pub struct GlobalAmax(Arc<Buffer<f32>>);

impl LocalAmax {
    pub(super) fn new(slots: Buffer<f32>) -> Self {
        Self(slots)
    }

    /// Agrees with the other ranks on all tensors, or blocks of one, by one collective. Every rank takes part, one without elements too.
    ///
    /// # Errors
    /// As [`ReduceMax::reduce_max`].
    pub fn reduce(mut self, ranks: &impl ReduceMax, stream: &Stream) -> Result<GlobalAmax> {
        ranks.reduce_max(stream, &mut self.0)?;
        Ok(GlobalAmax(Arc::new(self.0)))
    }
}

impl GlobalAmax {
    /// The amax of each tensor, or of each block of one.
    pub fn slots(&self) -> &Buffer<f32> {
        &self.0
    }

    /// Copies number `slot` of so many `slots` as the cast `what` takes to the amax of a tensor.
    pub(super) fn give(&self, what: &'static str, stream: &Stream, [slot, slots]: [u64; 2], amax: &mut Buffer<f32>) -> Result<()> {
        self.check(what, slots)?;
        Error::check_length("the amax of a shard's tensor", 1, amax.len())?;
        amax.copy_part(stream, &self.0, slot)
    }

    /// Fails unless there are `expected` amaxes.
    pub(super) fn check(&self, what: &'static str, expected: u64) -> Result<()> {
        Error::check_length(what, expected, self.0.len())
    }
}
