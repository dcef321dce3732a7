//! NVFP4 by other rules: four over six, and an amax for each row.
//!
//! [Four over six](FourOverSix) casts each block with two scales, which take its largest element to 6 or to 4, and keeps the one with the smaller error.
//! [`Nvfp4ScaledRows`] gives each row an amax of its own, found in the pass that casts.
//!
//! ```
//! use oxtile::quantize::nvfp4_mapped::{FourOverSix, Nvfp4FourOverSix, Nvfp4ScaledRows, ToSix};
//! use oxtile::quantize::Direction;
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! let x = Buffer::from_slice(&stream, &[[24.0_f32, 18.0, -18.0, 18.0].repeat(4), vec![48.0; 16]].concat())?;
//! let mut restored = Buffer::<f32>::uninitialised(&stream, 32)?;
//!
//! // 18 is 3 of the 4 that 24 becomes; of the 6 it would be between 4 and 6. (The block of the tensor's largest element has no
//! // choice: no scale beyond 448 would take it to 4.)
//! let better = Nvfp4FourOverSix::<f32, FourOverSix>::new(&runtime)?;
//! let tensor = better.quantize(&stream, x.view(), [2, 16], Direction::Rows)?;
//! better.dequantize(&stream, &tensor, restored.view_mut())?;
//! assert_eq!(tensor.data.to_vec(&stream)?[0].to_bits(), 0x56);
//!
//! let rows = Nvfp4ScaledRows::<f32, ToSix>::new(&runtime)?.quantize(&stream, x.view(), [2, 16])?;
//! assert_eq!(rows.amax.to_vec(&stream)?, [24.0, 48.0]);
//! # Ok(()) }
//! ```

use std::fmt;
use std::marker::PhantomData;

use oxtile_kernels::matrix::MatrixArgument;
use oxtile_kernels::nvfp4::*;
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};

use super::amax::Amax;
use super::format::{Direction, Format, Nvfp4MappedFormat};
use super::nvfp4::Nvfp4Number;
use super::split_phase::GlobalAmax;
use super::tensor::Nvfp4MappedTensor;
use crate::runtime::{Error, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::numel;

pub use oxtile_kernels::nvfp4::{FourOverSix, FourOverSix256, FourOverSixSquared, FourOverSixSquared256, Mapping, ToSix};

impl<M: Mapping> Nvfp4MappedTensor<M> {
    fn dequantize_by<T: Nvfp4Number>(
        &self,
        stream: &Stream,
        kernel: &Loaded<Nvfp4DequantizeScaledRows<T>>,
        output: DeviceViewMut<'_, T>,
    ) -> Result<()>
    where
        Nvfp4DequantizeScaledRows<T>: Kernel,
    {
        let [rows, columns] = Nvfp4MappedFormat::<M>::SHAPES.lines(self.shape, self.direction);
        let (data, scales, amaxes) = (self.data.view(), self.scales.view(), self.amax.view());
        let factor = 1.0 / (6.0 * M::LARGEST_SCALE);
        kernel.launch(stream, Nvfp4DequantizeScaledRowsArgs { data, scales, amaxes, output, factor, rows, columns })
    }
}

/// The casts of `T` by four over six. `M` is [`FourOverSix`], or for `bf16` one of the others: by the squares of the errors, or with
/// scales up to 256 before that of a block is expanded, so that none is cut off.
pub struct Nvfp4FourOverSix<T: Nvfp4Number, M: Mapping = FourOverSix>
where
    Nvfp4CastRows4over6<T, M>: Kernel,
    Nvfp4CastColumns4over6<T, M>: Kernel,
    Nvfp4DequantizeScaledRows<T>: Kernel,
{
    amax: Amax<T>,
    rows: Loaded<Nvfp4CastRows4over6<T, M>>,
    columns: Loaded<Nvfp4CastColumns4over6<T, M>>,
    dequantize: Loaded<Nvfp4DequantizeScaledRows<T>>,
}

impl<T: Nvfp4Number, M: Mapping> Nvfp4FourOverSix<T, M>
where
    Nvfp4CastRows4over6<T, M>: Kernel,
    Nvfp4CastColumns4over6<T, M>: Kernel,
    Nvfp4DequantizeScaledRows<T>: Kernel,
{
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self { amax: Amax::new(runtime)?, rows: runtime.load()?, columns: runtime.load()?, dequantize: runtime.load()? })
    }

    /// Quantizes a matrix into new buffers: finds its amax, then casts. The amax stays on the device.
    ///
    /// # Errors
    /// As [`Nvfp4MappedTensor::uninitialised`] and [`cast`](Self::cast).
    pub fn quantize(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        shape: [u64; 2],
        direction: Direction,
    ) -> Result<Nvfp4MappedTensor<M>> {
        let mut tensor = Nvfp4MappedTensor::uninitialised(stream, shape, direction)?;
        self.amax.raise(stream, input, &mut tensor.amax)?;
        self.cast(stream, input, &mut tensor)?;
        Ok(tensor)
    }

    /// Casts this rank's part of a matrix to a tensor that is there, whose amax becomes what all ranks agreed on: the second phase.
    ///
    /// # Errors
    /// [`Error::Length`] unless there is one amax; as [`cast`](Self::cast).
    pub fn cast_shard(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        amax: &GlobalAmax,
        tensor: &mut Nvfp4MappedTensor<M>,
    ) -> Result<()> {
        amax.give("Nvfp4FourOverSix::cast_shard, amax", stream, [0, 1], &mut tensor.amax)?;
        self.cast(stream, input, tensor)
    }

    /// Casts a matrix of the tensor's shape, in its direction, with its amax: its own, or that of a larger one that it is a part of.
    ///
    /// # Errors
    /// [`Error::Length`] if `input` does not have the tensor's shape; as [`Loaded::launch`], also where a dimension along which a
    /// block lies is not a multiple of 16, or, columnwise, either, or `input` does not start at a multiple of 16 bytes.
    pub fn cast(&self, stream: &Stream, input: DeviceView<'_, T>, tensor: &mut Nvfp4MappedTensor<M>) -> Result<()> {
        Error::check_length("Nvfp4FourOverSix::cast, input", numel(&tensor.shape)?, input.len())?;
        let (amax, data, scales) = (tensor.amax.view(), tensor.data.view_mut(), tensor.scales.view_mut());
        let marker = PhantomData;
        match tensor.direction {
            Direction::Rows => self.rows.launch(stream, Nvfp4CastRows4over6Args { input, amax, data, scales, marker }),
            Direction::Columns => {
                let input = MatrixArgument::new(input, tensor.shape);
                self.columns.launch(stream, Nvfp4CastColumns4over6Args { input, amax, data, scales, marker })
            }
        }
    }

    /// The matrix back in `T`, rounded to nearest even; of a columnwise one the transpose.
    ///
    /// # Errors
    /// As [`Loaded::launch`], also where `output` is not as long as the tensor or does not start at a multiple of 16 bytes.
    pub fn dequantize(&self, stream: &Stream, tensor: &Nvfp4MappedTensor<M>, output: DeviceViewMut<'_, T>) -> Result<()> {
        tensor.dequantize_by(stream, &self.dequantize, output)
    }
}

/// The cast of `T` with an amax for each row, by [`ToSix`] or, for `bf16`, by four over six; rowwise alone.
pub struct Nvfp4ScaledRows<T: Nvfp4Number, M: Mapping = ToSix>
where
    Nvfp4CastScaledRows<T, M>: Kernel,
    Nvfp4DequantizeScaledRows<T>: Kernel,
{
    cast: Loaded<Nvfp4CastScaledRows<T, M>>,
    dequantize: Loaded<Nvfp4DequantizeScaledRows<T>>,
}

impl<T: Nvfp4Number, M: Mapping> Nvfp4ScaledRows<T, M>
where
    Nvfp4CastScaledRows<T, M>: Kernel,
    Nvfp4DequantizeScaledRows<T>: Kernel,
{
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self { cast: runtime.load()?, dequantize: runtime.load()? })
    }

    /// Quantizes a matrix into new buffers; `amax` has an element for each row. Ranks that share a matrix by rows need no agreement.
    ///
    /// # Errors
    /// As [`Nvfp4MappedTensor::of_scaled_rows`] and [`quantize_into`](Self::quantize_into).
    pub fn quantize(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2]) -> Result<Nvfp4MappedTensor<M>> {
        let mut tensor = Nvfp4MappedTensor::of_scaled_rows(stream, shape)?;
        self.quantize_into(stream, input, &mut tensor)?;
        Ok(tensor)
    }

    /// Quantizes a matrix into a tensor that is there, one [of scaled rows](Nvfp4MappedTensor::of_scaled_rows). A graph can hold it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the tensor is a columnwise one; as [`Loaded::launch`], also where `input` does not have the tensor's shape, the
    /// tensor not an amax for each row, or `input` does not start at a multiple of 16 bytes.
    pub fn quantize_into(&self, stream: &Stream, input: DeviceView<'_, T>, tensor: &mut Nvfp4MappedTensor<M>) -> Result<()> {
        tensor.direction.check("Nvfp4ScaledRows::quantize_into, tensor", Direction::Rows)?;
        let (amaxes, data, scales) = (tensor.amax.view_mut(), tensor.data.view_mut(), tensor.scales.view_mut());
        let args = Nvfp4CastScaledRowsArgs { input, amaxes, data, scales, columns: tensor.shape[1], marker: PhantomData };
        self.cast.launch(stream, args)
    }

    /// The matrix back in `T`, rounded to nearest even.
    ///
    /// # Errors
    /// As [`Nvfp4FourOverSix::dequantize`].
    pub fn dequantize(&self, stream: &Stream, tensor: &Nvfp4MappedTensor<M>, output: DeviceViewMut<'_, T>) -> Result<()> {
        tensor.dequantize_by(stream, &self.dequantize, output)
    }
}

impl<T: Nvfp4Number, M: Mapping> fmt::Debug for Nvfp4FourOverSix<T, M>
where
    Nvfp4CastRows4over6<T, M>: Kernel,
    Nvfp4CastColumns4over6<T, M>: Kernel,
    Nvfp4DequantizeScaledRows<T>: Kernel,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvfp4FourOverSix").field("rows", &self.rows).finish_non_exhaustive()
    }
}

impl<T: Nvfp4Number, M: Mapping> fmt::Debug for Nvfp4ScaledRows<T, M>
where
    Nvfp4CastScaledRows<T, M>: Kernel,
    Nvfp4DequantizeScaledRows<T>: Kernel,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvfp4ScaledRows").field("cast", &self.cast).finish_non_exhaustive()
    }
}
