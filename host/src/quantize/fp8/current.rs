//! One scale for a tensor, from its own amax.

use std::fmt;

use oxtile_kernels::fp8::{Fp8CastArgs, Fp8CastTransposeArgs, Fp8DequantizeArgs, Fp8TransposeArgs};
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::{Fp8, e4m3};

use super::{Fp8Number, ScaleOptions, has_whole_vectors};
use crate::quantize::amax::Amax;
use crate::quantize::format::Direction;
use crate::quantize::split_phase::GlobalAmax;
use crate::quantize::tensor::{Fp8Tensor, check_shape};
use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::numel;

/// The casts between `T` and FP8 elements `Q` with one scale for a tensor, which the device makes of the tensor's amax.
///
/// A cast is two passes over the tensor, one for its amax. The host waits for neither.
///
/// ```
/// use oxtile::quantize::{CurrentScaling, ScaleOptions};
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?; // or Runtime::cuda()
/// let stream = runtime.device(0)?.stream()?;
/// let casts = CurrentScaling::<f32>::new(&runtime, ScaleOptions::default())?;
///
/// let activations = Buffer::from_slice(&stream, &[224.0_f32, -1.03, 0.0, 5.0])?;
/// let quantized = casts.quantize(&stream, activations.view())?;
/// let mut restored = Buffer::<f32>::uninitialised(&stream, 4)?;
/// casts.dequantize(&stream, &quantized, restored.view_mut())?;
///
/// assert_eq!(quantized.scales.to_vec(&stream)?, [0.5]);
/// assert_eq!(restored.to_vec(&stream)?, [224.0, -1.0, 0.0, 5.0]);
/// # Ok(()) }
/// ```
pub struct CurrentScaling<T: Fp8Number<Q>, Q: Fp8 = e4m3> {
    amax: Amax<T>,
    cast: Loaded<T::Cast>,
    cast_transpose: Loaded<T::CastTranspose>,
    transpose: Loaded<T::Transpose>,
    dequantize: Loaded<T::Dequantize>,
    options: ScaleOptions,
}

/// A matrix quantized for products from both sides.
#[derive(Debug)]
pub struct Fp8Pair<Q: Fp8 = e4m3> {
    /// The matrix, `[rows, columns]`.
    pub tensor: Fp8Tensor<Q>,
    /// The codes of its transpose, `[columns, rows]`, with the same scale.
    pub transposed: Buffer<Q>,
}

impl<Q: Fp8> Fp8Pair<Q> {
    /// A matrix to be quantized into, and its transpose.
    ///
    /// # Errors
    /// As [`Fp8Tensor::uninitialised`].
    pub fn uninitialised(stream: &Stream, shape: [u64; 2]) -> Result<Self> {
        let tensor = Fp8Tensor::uninitialised(stream, shape, Direction::Rows)?;
        Ok(Self { transposed: Buffer::uninitialised(stream, tensor.data.len())?, tensor })
    }
}

impl<T: Fp8Number<Q>, Q: Fp8> CurrentScaling<T, Q> {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime, options: ScaleOptions) -> Result<Self> {
        Ok(Self {
            amax: Amax::new(runtime)?,
            cast: runtime.load()?,
            cast_transpose: runtime.load()?,
            transpose: runtime.load()?,
            dequantize: runtime.load()?,
            options,
        })
    }

    /// Quantizes a tensor into new buffers: finds its amax, then casts.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`] and [`quantize_into`](Self::quantize_into).
    pub fn quantize(&self, stream: &Stream, input: DeviceView<'_, T>) -> Result<Fp8Tensor<Q>> {
        let mut tensor = Fp8Tensor::uninitialised(stream, [1, input.len()], Direction::Rows)?;
        self.quantize_into(stream, input, &mut Buffer::uninitialised(stream, 1)?, &mut tensor)?;
        Ok(tensor)
    }

    /// As [`quantize`](Self::quantize), into buffers that are there; `amax`, of one element, becomes the tensor's. A graph can hold it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a columnwise tensor; as [`Loaded::launch`], if a length does not match.
    pub fn quantize_into(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        amax: &mut Buffer<f32>,
        tensor: &mut Fp8Tensor<Q>,
    ) -> Result<()> {
        tensor.direction.check("CurrentScaling::quantize_into, tensor", Direction::Rows)?;
        self.amax.run(stream, input, amax)?;
        self.cast(stream, input, amax.view(), tensor.data.view_mut(), tensor.scales.view_mut())
    }

    /// Quantizes this rank's part of a tensor into buffers that are there: the second phase. The codes of all ranks, one after the other,
    /// are those that [`quantize`](Self::quantize) makes of the whole, and all ranks have its scale.
    ///
    /// # Errors
    /// [`Error::Length`] unless there is one amax; as [`quantize_into`](Self::quantize_into).
    pub fn cast_shard(&self, stream: &Stream, input: DeviceView<'_, T>, amax: &GlobalAmax, tensor: &mut Fp8Tensor<Q>) -> Result<()> {
        amax.check("CurrentScaling::cast_shard, amax", 1)?;
        tensor.direction.check("CurrentScaling::cast_shard, tensor", Direction::Rows)?;
        self.cast(stream, input, amax.slots().view(), tensor.data.view_mut(), tensor.scales.view_mut())
    }

    /// The same of this rank's rows of a matrix, and of their transpose.
    ///
    /// # Errors
    /// As [`cast_shard`](Self::cast_shard) and [`quantize_both`](Self::quantize_both).
    pub fn cast_both_shard(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        shape: [u64; 2],
        amax: &GlobalAmax,
        pair: &mut Fp8Pair<Q>,
    ) -> Result<()> {
        amax.check("CurrentScaling::cast_both_shard, amax", 1)?;
        Error::check_length("CurrentScaling::cast_both_shard, input", numel(&shape)?, input.len())?;
        self.cast_both(stream, input, shape, amax.slots().view(), pair)
    }

    /// Quantizes a tensor, or a part of one, whose amax, of one element, is on the device: its own, or that of a larger tensor.
    /// Ranks that share a tensor call [`cast_shard`](Self::cast_shard), whose argument is an amax on which they have agreed.
    ///
    /// # Errors
    /// As [`Loaded::launch`], if a length does not match.
    pub fn cast(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        amax: DeviceView<'_, f32>,
        data: DeviceViewMut<'_, Q>,
        scale_inverse: DeviceViewMut<'_, f32>,
    ) -> Result<()> {
        self.cast.launch(stream, Fp8CastArgs { input, amax, data, scale_inverse, options: self.options })
    }

    /// Quantizes a matrix and its transpose into new buffers: finds the amax, then casts both by one pass over rows of whole
    /// 16-byte vectors at 16-byte aligned addresses; others are cast and then transposed.
    ///
    /// # Errors
    /// [`Error::Length`] unless `input` has the shape; as [`quantize`](Self::quantize).
    pub fn quantize_both(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2]) -> Result<Fp8Pair<Q>> {
        let mut pair = Fp8Pair::uninitialised(stream, shape)?;
        self.quantize_both_into(stream, input, shape, &mut Buffer::uninitialised(stream, 1)?, &mut pair)?;
        Ok(pair)
    }

    /// As [`quantize_both`](Self::quantize_both), into buffers that are there; `amax`, of one element, becomes the matrix's. A graph can
    /// hold it.
    ///
    /// # Errors
    /// [`Error::Length`] unless `input` has the shape; [`Error::Invalid`] for a pair of another shape; as [`quantize_into`](Self::quantize_into).
    pub fn quantize_both_into(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        shape: [u64; 2],
        amax: &mut Buffer<f32>,
        pair: &mut Fp8Pair<Q>,
    ) -> Result<()> {
        Error::check_length("CurrentScaling::quantize_both, input", numel(&shape)?, input.len())?;
        self.amax.run(stream, input, amax)?;
        self.cast_both(stream, input, shape, amax.view(), pair)
    }

    /// As [`cast`](Self::cast), of a matrix and its transpose.
    pub(crate) fn cast_both(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        shape: [u64; 2],
        amax: DeviceView<'_, f32>,
        Fp8Pair { tensor, transposed }: &mut Fp8Pair<Q>,
    ) -> Result<()> {
        tensor.direction.check("CurrentScaling, pair", Direction::Rows)?;
        check_shape("CurrentScaling, pair", tensor.shape, shape)?;
        let Fp8Tensor { data, scales, .. } = tensor;
        let (view, scale_inverse) = (data.view_mut(), scales.view_mut());
        if has_whole_vectors::<T>(shape, input.address(), view.address()) {
            let (input, transposed) = (MatrixArgument::new(input, shape), transposed.view_mut());
            let args = Fp8CastTransposeArgs { input, amax, data: view, transposed, scale_inverse, options: self.options };
            self.cast_transpose.launch(stream, args)
        } else {
            self.cast(stream, input, amax, view, scale_inverse)?;
            self.transpose(stream, data.view(), shape, transposed.view_mut())
        }
    }

    /// The transpose of codes `[rows, columns]`. Multiples of 16 at 16-byte aligned addresses are moved in vectors.
    ///
    /// # Errors
    /// As [`Loaded::launch`], if a length does not match.
    pub fn transpose(&self, stream: &Stream, data: DeviceView<'_, Q>, shape: [u64; 2], transposed: DeviceViewMut<'_, Q>) -> Result<()> {
        self.transpose.launch(stream, Fp8TransposeArgs { input: MatrixArgument::new(data, shape), transposed })
    }

    /// The tensor back in `T`, each element its code times the inverse of the scale, rounded to nearest even.
    ///
    /// # Errors
    /// [`Error::Length`] unless `output` is as long as the tensor; as [`Loaded::launch`].
    pub fn dequantize(&self, stream: &Stream, tensor: &Fp8Tensor<Q>, output: DeviceViewMut<'_, T>) -> Result<()> {
        Error::check_length("CurrentScaling::dequantize, output", tensor.data.len(), output.len())?;
        self.dequantize_at(stream, tensor.data.view(), tensor.scales.view(), output)
    }

    /// The same of views.
    pub(crate) fn dequantize_at(
        &self,
        stream: &Stream,
        data: DeviceView<'_, Q>,
        scale_inverse: DeviceView<'_, f32>,
        output: DeviceViewMut<'_, T>,
    ) -> Result<()> {
        self.dequantize.launch(stream, Fp8DequantizeArgs { data, scale_inverse, output })
    }
}

impl<T: Fp8Number<Q>, Q: Fp8> fmt::Debug for CurrentScaling<T, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CurrentScaling").field("options", &self.options).finish_non_exhaustive()
    }
}
