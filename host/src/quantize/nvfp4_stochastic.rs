//! NVFP4 by rows with stochastic rounding, which does not give a sum of gradients the bias of rounding to nearest.
//!
//! ```
//! use oxtile::quantize::nvfp4_columns::Stochastic16;
//! use oxtile::quantize::{Nvfp4StochasticRows, RandomState};
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! let casts = Nvfp4StochasticRows::<f32, Stochastic16>::new(&runtime)?;
//!
//! // 2.5 lies between 2 and 3 of the scale that takes 6 to 6.
//! let gradients = Buffer::from_slice(&stream, &[6.0_f32, 2.5].repeat(16))?;
//! let draw = |seed| casts.quantize(&stream, gradients.view(), [2, 16], &RandomState::new(&stream, seed, 0)?)?.data.to_vec(&stream);
//! assert!(draw(1)?.iter().all(|pair| [0x47, 0x57].contains(&pair.to_bits())));
//! assert_eq!(draw(1)?, draw(1)?);
//! # Ok(()) }
//! ```

use std::fmt;
use std::marker::PhantomData;

use oxtile_kernels::nvfp4::{Nvfp4CastRowsStochastic, Nvfp4CastRowsStochasticArgs};
use oxtile_tile::launch::{DeviceView, Kernel};

use super::amax::Amax;
use super::format::Direction;
use super::nvfp4::Nvfp4Number;
use super::nvfp4_columns::{Rounding, Stochastic16};
use super::random::RandomState;
use super::split_phase::GlobalAmax;
use super::tensor::Nvfp4Tensor;
use crate::runtime::{Loaded, Result, Runtime, Stream};

/// The rowwise cast of `T`, `bf16` or `f32`, to NVFP4 by stochastic rounding: `R` is [`Stochastic8`](super::nvfp4_columns::Stochastic8) or [`Stochastic16`].
/// [`Nvfp4`](super::Nvfp4) decodes its tensors.
pub struct Nvfp4StochasticRows<T: Nvfp4Number, R: Rounding = Stochastic16>
where
    Nvfp4CastRowsStochastic<T, R>: Kernel,
{
    amax: Amax<T>,
    cast: Loaded<Nvfp4CastRowsStochastic<T, R>>,
}

impl<T: Nvfp4Number, R: Rounding> Nvfp4StochasticRows<T, R>
where
    Nvfp4CastRowsStochastic<T, R>: Kernel,
{
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self { amax: Amax::new(runtime)?, cast: runtime.load()? })
    }

    /// Quantizes a matrix into new buffers: finds its amax, then casts. The amax stays on the device.
    ///
    /// # Errors
    /// As [`Nvfp4Tensor::uninitialised`] and [`cast`](Self::cast).
    pub fn quantize(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2], random: &RandomState) -> Result<Nvfp4Tensor> {
        let mut tensor = Nvfp4Tensor::uninitialised(stream, shape, Direction::Rows)?;
        self.amax.raise(stream, input, &mut tensor.amax)?;
        self.cast(stream, input, random, &mut tensor)?;
        Ok(tensor)
    }

    /// Casts this rank's rows of a matrix to a tensor that is there, whose amax becomes what all ranks agreed on: the second phase. An
    /// element's random number follows from its number in these rows: ranks with the same state draw the same numbers.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) unless there is one amax; as [`cast`](Self::cast).
    pub fn cast_shard(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        random: &RandomState,
        amax: &GlobalAmax,
        tensor: &mut Nvfp4Tensor,
    ) -> Result<()> {
        amax.give("Nvfp4StochasticRows::cast_shard, amax", stream, [0, 1], &mut tensor.amax)?;
        self.cast(stream, input, random, tensor)
    }

    /// Casts a matrix of the tensor's shape with the tensor's amax.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the tensor is a columnwise one; [`Error::Length`](crate::Error::Length) if `input` does not have its shape; as
    /// [`Loaded::launch`], also where `random` has no offset or `input` does not start at a multiple of 16 bytes.
    pub fn cast(&self, stream: &Stream, input: DeviceView<'_, T>, random: &RandomState, tensor: &mut Nvfp4Tensor) -> Result<()> {
        tensor.check("Nvfp4StochasticRows::cast", Direction::Rows, input.len())?;
        let args = Nvfp4CastRowsStochasticArgs {
            input,
            amax: tensor.amax.view(),
            data: tensor.data.view_mut(),
            scales: tensor.scales.view_mut(),
            random: random.argument(),
            marker: PhantomData,
        };
        self.cast.launch(stream, args)
    }
}

impl<T: Nvfp4Number, R: Rounding> fmt::Debug for Nvfp4StochasticRows<T, R>
where
    Nvfp4CastRowsStochastic<T, R>: Kernel,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvfp4StochasticRows").field("cast", &self.cast).finish_non_exhaustive()
    }
}
