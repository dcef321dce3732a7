//! One scale for a tensor, from the amaxes of earlier steps.

use std::fmt;

use oxtile_kernels::fp8::{Fp8CastDelayedArgs, Fp8CastTransposeDelayedArgs, Fp8TransposeArgs, Fp8UpdateScales, Fp8UpdateScalesArgs};
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::{Fp8, e4m3};

use super::{Fp8Number, Fp8Pair, has_whole_vectors};
use crate::quantize::format::Direction;
use crate::quantize::tensor::{Fp8Tensor, check_shape};
use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::numel;

/// Which amax of a history a new scale is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AmaxAlgorithm {
    /// The largest.
    Max,
    /// The latest.
    MostRecent,
}

/// Casts to FP8 elements `Q` by scales of earlier steps, in one pass that records the amax. The update of all scales at
/// the end of a step is one launch.
///
/// ```
/// use oxtile::quantize::{AmaxAlgorithm, DelayedScaling, DelayedScales};
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?; // or Runtime::cuda()
/// let stream = runtime.device(0)?.stream()?;
/// let casts = DelayedScaling::<f32>::new(&runtime, AmaxAlgorithm::Max, 0)?;
/// let mut scales = DelayedScales::new(&stream, 2, 16)?; // two tensors, a history of 16 steps
///
/// let activations = Buffer::from_slice(&stream, &[224.0_f32, -1.0])?;
/// casts.quantize(&stream, &mut scales, 0, activations.view())?;
/// casts.update(&stream, &mut scales, None)?;
/// // The second tensor was not used: its scale stays.
/// assert_eq!(scales.scales().to_vec(&stream)?, [2.0, 1.0]);
/// # Ok(()) }
/// ```
pub struct DelayedScaling<T: Fp8Number<Q>, Q: Fp8 = e4m3> {
    cast: Loaded<T::CastDelayed>,
    cast_transpose: Loaded<T::CastTransposeDelayed>,
    transpose: Loaded<T::Transpose>,
    update: Loaded<Fp8UpdateScales>,
    algorithm: AmaxAlgorithm,
    scaled_largest: f32,
}

/// Scales and histories of any number of tensors, in device memory.
#[derive(Debug)]
pub struct DelayedScales {
    /// `[length, tensors]`; row 0 collects the amaxes of the step at hand.
    history: Buffer<f32>,
    scales: Buffer<f32>,
    scale_inverses: Buffer<f32>,
    length: u64,
}

impl DelayedScales {
    /// Scales of 1 and empty histories of `length` steps.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a length of 0; as [`Buffer::zeros`].
    pub fn new(stream: &Stream, tensors: u64, length: u64) -> Result<Self> {
        if length == 0 {
            return Err(Error::Invalid { what: "DelayedScales::new, length", why: "a history has at least one step".into() });
        }
        let history = Buffer::zeros(stream, numel(&[length, tensors])?)?;
        let ones = vec![1.0_f32; tensors as usize];
        Ok(Self { history, scales: Buffer::from_slice(stream, &ones)?, scale_inverses: Buffer::from_slice(stream, &ones)?, length })
    }

    /// The amaxes, `[length, tensors]`: row 0 of the step at hand, then from the oldest to the newest. Ranks may take the maximum of
    /// row 0 among them before the update.
    pub fn history(&self) -> &Buffer<f32> {
        &self.history
    }

    /// What elements are multiplied by, one a tensor.
    pub fn scales(&self) -> &Buffer<f32> {
        &self.scales
    }

    /// What codes are multiplied by, one a tensor.
    pub fn scale_inverses(&self) -> &Buffer<f32> {
        &self.scale_inverses
    }

    /// Where the scale of a tensor is, and where its amax is collected.
    fn of_tensor(&self, tensor: u64) -> Result<std::ops::Range<u64>> {
        let tensors = self.scales.len();
        if tensor < tensors {
            return Ok(tensor..tensor + 1);
        }
        let why = format!("there is no tensor {tensor}: the scales are those of {tensors}");
        Err(Error::Invalid { what: "DelayedScaling, tensor", why })
    }
}

impl<T: Fp8Number<Q>, Q: Fp8> DelayedScaling<T, Q> {
    /// Loads the kernels. A scale takes the amax to the largest element times 2^-`margin`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a margin by which that is no normal number of `f32`; as [`Runtime::load`].
    pub fn new(runtime: &Runtime, algorithm: AmaxAlgorithm, margin: i32) -> Result<Self> {
        let scaled_largest = Q::LARGEST * 2_f32.powi(margin.saturating_neg());
        if !scaled_largest.is_normal() {
            let why = format!("by a margin of {margin} the largest element becomes {scaled_largest:e}: take 0, or a few powers of two");
            return Err(Error::Invalid { what: "DelayedScaling::new", why });
        }
        Ok(Self {
            cast: runtime.load()?,
            cast_transpose: runtime.load()?,
            transpose: runtime.load()?,
            update: runtime.load()?,
            algorithm,
            scaled_largest,
        })
    }

    /// Quantizes tensor number `tensor` by its scale into new buffers, and records its amax.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such tensor; as [`Buffer::uninitialised`] and [`Loaded::launch`].
    pub fn quantize(&self, stream: &Stream, scales: &mut DelayedScales, tensor: u64, input: DeviceView<'_, T>) -> Result<Fp8Tensor<Q>> {
        let mut output = Fp8Tensor::uninitialised(stream, [1, input.len()], Direction::Rows)?;
        self.quantize_into(stream, scales, tensor, input, &mut output)?;
        Ok(output)
    }

    /// As [`quantize`](Self::quantize), into buffers that are there. A graph can hold it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such tensor, and for a columnwise output; as [`Loaded::launch`], if a length does not match.
    pub fn quantize_into(
        &self,
        stream: &Stream,
        scales: &mut DelayedScales,
        tensor: u64,
        input: DeviceView<'_, T>,
        output: &mut Fp8Tensor<Q>,
    ) -> Result<()> {
        output.direction.check("DelayedScaling::quantize_into, output", Direction::Rows)?;
        let (data, scale_inverse) = (output.data.view_mut(), output.scales.view_mut());
        let place = scales.of_tensor(tensor)?;
        let scale = scales.scales.view().slice(place.start, place.end);
        let mut history = scales.history.view_mut();
        let amax = history.slice_mut(place.start, place.end);
        self.cast.launch(stream, Fp8CastDelayedArgs { input, scale, data, scale_inverse, amax })
    }

    /// Quantizes a matrix and its transpose so, by one pass over rows of whole 16-byte vectors at 16-byte aligned addresses; others
    /// are cast and then transposed.
    ///
    /// # Errors
    /// [`Error::Length`] unless `input` has the shape; as [`quantize`](Self::quantize).
    pub fn quantize_both(
        &self,
        stream: &Stream,
        scales: &mut DelayedScales,
        tensor: u64,
        input: DeviceView<'_, T>,
        [rows, columns]: [u64; 2],
    ) -> Result<Fp8Pair<Q>> {
        let mut output = Fp8Pair::uninitialised(stream, [rows, columns])?;
        self.quantize_both_into(stream, scales, tensor, input, [rows, columns], &mut output)?;
        Ok(output)
    }

    /// As [`quantize_both`](Self::quantize_both), into buffers that are there. A graph can hold it.
    ///
    /// # Errors
    /// [`Error::Length`] unless `input` has the shape; [`Error::Invalid`] for a pair of another shape; as [`quantize_into`](Self::quantize_into).
    pub fn quantize_both_into(
        &self,
        stream: &Stream,
        scales: &mut DelayedScales,
        tensor: u64,
        input: DeviceView<'_, T>,
        shape: [u64; 2],
        Fp8Pair { tensor: output, transposed }: &mut Fp8Pair<Q>,
    ) -> Result<()> {
        Error::check_length("DelayedScaling::quantize_both, input", numel(&shape)?, input.len())?;
        check_shape("DelayedScaling::quantize_both", output.shape, shape)?;
        if !has_whole_vectors::<T>(shape, input.address(), output.data.address()) {
            self.quantize_into(stream, scales, tensor, input, output)?;
            let args = Fp8TransposeArgs { input: MatrixArgument::new(output.data.view(), shape), transposed: transposed.view_mut() };
            return self.transpose.launch(stream, args);
        }
        output.direction.check("DelayedScaling::quantize_both_into, output", Direction::Rows)?;
        let place = scales.of_tensor(tensor)?;
        let mut history = scales.history.view_mut();
        let args = Fp8CastTransposeDelayedArgs {
            input: MatrixArgument::new(input, shape),
            scale: scales.scales.view().slice(place.start, place.end),
            data: output.data.view_mut(),
            transposed: transposed.view_mut(),
            scale_inverse: output.scales.view_mut(),
            amax: history.slice_mut(place.start, place.end),
        };
        self.cast_transpose.launch(stream, args)
    }

    /// The end of a step: rolls all histories and makes new scales, in one launch. `agreed` holds one amax a tensor that the ranks agreed
    /// on; 0 there, or nothing, leaves this rank's own. A tensor whose amax is 0 was not used, and keeps its history and scale; one whose
    /// amax is Inf keeps its scale, with [`AmaxAlgorithm::Max`] until the Inf has left the history. A graph can hold it.
    ///
    /// # Errors
    /// As [`Loaded::launch`], if a length does not match.
    pub fn update(&self, stream: &Stream, scales: &mut DelayedScales, agreed: Option<DeviceView<'_, f32>>) -> Result<()> {
        let most_recent = self.algorithm == AmaxAlgorithm::MostRecent;
        let (length, scaled_largest) = (scales.length, self.scaled_largest);
        let args = Fp8UpdateScalesArgs {
            history: scales.history.view_mut(),
            agreed,
            scales: scales.scales.view_mut(),
            scale_inverses: scales.scale_inverses.view_mut(),
            length,
            scaled_largest,
            most_recent,
        };
        self.update.launch(stream, args)
    }
}

impl<T: Fp8Number<Q>, Q: Fp8> fmt::Debug for DelayedScaling<T, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { algorithm, scaled_largest, .. } = self;
        f.debug_struct("DelayedScaling").field("algorithm", algorithm).field("scaled_largest", scaled_largest).finish_non_exhaustive()
    }
}
