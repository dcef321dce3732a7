//! NVFP4 by columns, and in both directions by one pass: to the nearest value or by stochastic rounding, plain or after the random
//! Hadamard transform.
//!
//! A cast by columns is that of the transpose: codes `[columns, rows / 2]`, scales `[columns, rows / 16]`. The casts take the amax
//! that is in their output. Ranks that share a matrix agree on it before: the local amaxes of [`Amax`](super::Amax), with `HADAMARD` of
//! [`HadamardAmax`], reduced, are the argument of the casts of shards.
//!
//! ```
//! use oxtile::quantize::{Amax, Direction, Nvfp4Columns, Nvfp4Tensor, RandomState};
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! let weights = Buffer::from_slice(&stream, &[[3.0_f32, -1.5, 0.75, 0.0]; 64].concat())?;
//!
//! let mut tensor = Nvfp4Tensor::uninitialised(&stream, [16, 16], Direction::Columns)?;
//! Amax::new(&runtime)?.run(&stream, weights.view(), &mut tensor.amax)?;
//! let casts = Nvfp4Columns::<f32>::new(&runtime)?;
//! casts.cast_columns(&stream, weights.view(), &RandomState::none(&stream)?, &mut tensor)?;
//!
//! let mut restored = Buffer::<f32>::uninitialised(&stream, 256)?;
//! casts.dequantize_columns(&stream, &tensor, restored.view_mut())?;
//! assert_eq!(restored.to_vec(&stream)?, weights.to_vec(&stream)?);
//! # Ok(()) }
//! ```

use std::fmt;
use std::marker::PhantomData;

use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_kernels::nvfp4::*;
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::bf16;

use super::format::Direction;
use super::nvfp4::Nvfp4Number;
use super::random::RandomState;
use super::split_phase::{GlobalAmax, LocalAmax};
use super::tensor::{Nvfp4Pair, Nvfp4Tensor};
use crate::runtime::{Buffer, Loaded, Result, Runtime, Stream};

pub use oxtile_kernels::nvfp4::{Nearest, Rounding, Stochastic8, Stochastic16};

/// The casts of `T` to NVFP4 that go by columns. `R` is [`Nearest`], or for `bf16` [`Stochastic8`] or [`Stochastic16`];
/// `HADAMARD`, of `bf16` alone, transforms the columns before.
pub struct Nvfp4Columns<T: Nvfp4Number, R: Rounding = Nearest, const HADAMARD: bool = false>
where
    Nvfp4CastColumns<T, R, HADAMARD>: Kernel,
    Nvfp4CastBoth<T, R, HADAMARD>: Kernel,
    Nvfp4DequantizeColumns<T>: Kernel,
{
    columns: Loaded<Nvfp4CastColumns<T, R, HADAMARD>>,
    both: Loaded<Nvfp4CastBoth<T, R, HADAMARD>>,
    dequantize: Loaded<Nvfp4DequantizeColumns<T>>,
}

/// The largest magnitudes of a matrix before and after the Hadamard transform of its columns.
pub struct HadamardAmax(Loaded<Nvfp4HadamardAmax>);

impl<T: Nvfp4Number, R: Rounding, const HADAMARD: bool> Nvfp4Columns<T, R, HADAMARD>
where
    Nvfp4CastColumns<T, R, HADAMARD>: Kernel,
    Nvfp4CastBoth<T, R, HADAMARD>: Kernel,
    Nvfp4DequantizeColumns<T>: Kernel,
{
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self { columns: runtime.load()?, both: runtime.load()?, dequantize: runtime.load()? })
    }

    /// Casts a matrix of the tensor's shape with the tensor's amax; with `HADAMARD` that of [`HadamardAmax`].
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::runtime::Error::Invalid) if the tensor is a rowwise one; [`Error::Length`](crate::runtime::Error::Length) if `input` does not have its shape; as
    /// [`Loaded::launch`], also where a dimension is not a multiple of 16 or `input` does not start at a multiple of 16 bytes.
    pub fn cast_columns(&self, stream: &Stream, input: DeviceView<'_, T>, random: &RandomState, tensor: &mut Nvfp4Tensor) -> Result<()> {
        tensor.check("Nvfp4Columns::cast_columns", Direction::Columns, input.len())?;
        let args = Nvfp4CastColumnsArgs {
            input: MatrixArgument::new(input, tensor.shape),
            amax: tensor.amax.view(),
            data: tensor.data.view_mut(),
            scales: tensor.scales.view_mut(),
            random: random.argument(),
            marker: PhantomData,
        };
        self.columns.launch(stream, args)
    }

    /// Casts a matrix of the pair's shape in both directions by one pass over it, each with its tensor's amax.
    ///
    /// # Errors
    /// As [`cast_columns`](Self::cast_columns); [`Error::Invalid`](crate::Error::Invalid) for tensors of two shapes.
    pub fn cast_both(&self, stream: &Stream, input: DeviceView<'_, T>, random: &RandomState, pair: &mut Nvfp4Pair) -> Result<()> {
        let shape = pair.check("Nvfp4Columns::cast_both", input.len())?;
        let Nvfp4Pair { rows: by_rows, columns: by_columns } = pair;
        let args = Nvfp4CastBothArgs {
            input: MatrixArgument::new(input, shape),
            row_amax: by_rows.amax.view(),
            column_amax: by_columns.amax.view(),
            rows: CodesArgument { data: by_rows.data.view_mut(), scales: by_rows.scales.view_mut() },
            columns: CodesArgument { data: by_columns.data.view_mut(), scales: by_columns.scales.view_mut() },
            random: random.argument(),
            marker: PhantomData,
        };
        self.both.launch(stream, args)
    }

    /// Casts this rank's rows of a matrix, whole blocks, to a tensor that is there, whose amax becomes what all ranks agreed on: the second
    /// phase. The shards of all ranks, [joined](super::JoinShards), are the cast of the whole; but stochastic rounding takes an element's number in
    /// these rows.
    ///
    /// # Errors
    /// [`Error::Length`](crate::runtime::Error::Length) unless there is one amax, or with `HADAMARD` those of before and after; as [`cast_columns`](Self::cast_columns).
    pub fn cast_columns_shard(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        random: &RandomState,
        amax: &GlobalAmax,
        tensor: &mut Nvfp4Tensor,
    ) -> Result<()> {
        amax.give("Nvfp4Columns::cast_columns_shard, amax", stream, [Self::AMAXES - 1, Self::AMAXES], &mut tensor.amax)?;
        self.cast_columns(stream, input, random, tensor)
    }

    /// The same in both directions by one pass. The rows of all ranks, one after the other, are those of the whole.
    ///
    /// # Errors
    /// As [`cast_columns_shard`](Self::cast_columns_shard).
    pub fn cast_both_shard(
        &self,
        stream: &Stream,
        input: DeviceView<'_, T>,
        random: &RandomState,
        amax: &GlobalAmax,
        pair: &mut Nvfp4Pair,
    ) -> Result<()> {
        const WHAT: &str = "Nvfp4Columns::cast_both_shard, amax";
        amax.give(WHAT, stream, [0, Self::AMAXES], &mut pair.rows.amax)?;
        amax.give(WHAT, stream, [Self::AMAXES - 1, Self::AMAXES], &mut pair.columns.amax)?;
        self.cast_both(stream, input, random, pair)
    }

    /// The amaxes on which ranks agree: that of the matrix, and with `HADAMARD` after it that of the transformed columns.
    const AMAXES: u64 = if HADAMARD { 2 } else { 1 };

    /// A columnwise tensor back in `T`, `[rows, columns]`, rounded to nearest even; one cast with `HADAMARD` stays transformed.
    ///
    /// # Errors
    /// As [`cast_columns`](Self::cast_columns).
    pub fn dequantize_columns(&self, stream: &Stream, tensor: &Nvfp4Tensor, output: DeviceViewMut<'_, T>) -> Result<()> {
        tensor.check("Nvfp4Columns::dequantize_columns", Direction::Columns, output.len())?;
        let ([rows, columns], data, scales) = (tensor.shape, tensor.data.view(), tensor.scales.view());
        self.dequantize.launch(stream, Nvfp4DequantizeColumnsArgs { data, scales, amax: tensor.amax.view(), output, rows, columns })
    }
}

impl HadamardAmax {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        runtime.load().map(Self)
    }

    /// Sets `amax` to the largest magnitude of a matrix and `transformed` to that of its transformed columns.
    ///
    /// # Errors
    /// As [`Loaded::launch`], also where a dimension is not a multiple of 16. The amaxes are then as they were.
    pub fn run(
        &self,
        stream: &Stream,
        input: DeviceView<'_, bf16>,
        shape: [u64; 2],
        amax: &mut Buffer<f32>,
        transformed: &mut Buffer<f32>,
    ) -> Result<()> {
        let (input, amax, transformed_amax) = (MatrixArgument::new(input, shape), amax.view_mut(), transformed.view_mut());
        let args = Nvfp4HadamardAmaxArgs { input, amax, transformed_amax };
        let raised = [args.amax.access("amax"), args.transformed_amax.access("transformed_amax")];
        self.0.launch_on_zeros(stream, args, &raised)
    }

    /// Both of this rank's rows of a matrix that ranks share: the first phase. One reduction serves both directions of all ranks.
    ///
    /// # Errors
    /// As [`Buffer::zeros`] and [`run`](Self::run).
    pub fn local_amax(&self, stream: &Stream, input: DeviceView<'_, bf16>, shape: [u64; 2]) -> Result<LocalAmax> {
        let mut slots = Buffer::zeros(stream, 2)?;
        let both = slots.view_mut().access("amax");
        // SAFETY: one slot each, which nothing else uses before the launch is enqueued.
        let slot = |slot: u64| unsafe { DeviceViewMut::from_raw(both.address + slot * size_of::<f32>() as u64, 1, both.owner) };
        let input = MatrixArgument::new(input, shape);
        self.0.launch(stream, Nvfp4HadamardAmaxArgs { input, amax: slot(0), transformed_amax: slot(1) })?;
        Ok(LocalAmax::new(slots))
    }
}

impl<T: Nvfp4Number, R: Rounding, const HADAMARD: bool> fmt::Debug for Nvfp4Columns<T, R, HADAMARD>
where
    Nvfp4CastColumns<T, R, HADAMARD>: Kernel,
    Nvfp4CastBoth<T, R, HADAMARD>: Kernel,
    Nvfp4DequantizeColumns<T>: Kernel,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvfp4Columns").field("both", &self.both).finish_non_exhaustive()
    }
}

impl fmt::Debug for HadamardAmax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HadamardAmax").field(&self.0).finish()
    }
}
