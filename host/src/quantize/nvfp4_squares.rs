//! NVFP4 with one scale for 16 by 16 elements: a weight and its transpose get the same values.
//!
//! Both directions are written by one pass. Either is an ordinary tensor: its scales are repeated for the 16 rows, or columns, of a
//! square, so that [`Nvfp4`](super::Nvfp4) and [`Nvfp4Columns`](super::Nvfp4Columns) decode them.
//!
//! ```
//! use oxtile::quantize::{Nvfp4, Nvfp4Columns, Nvfp4Squares};
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let stream = runtime.device(0)?.stream()?;
//! let weights: Vec<f32> = (0..512).map(|i| (i % 37) as f32 - 18.0).collect();
//! let weights = Buffer::from_slice(&stream, &weights)?;
//!
//! let pair = Nvfp4Squares::<f32>::new(&runtime)?.quantize(&stream, weights.view(), [16, 32])?;
//! let mut by_rows = Buffer::<f32>::uninitialised(&stream, 512)?;
//! let mut by_columns = Buffer::<f32>::uninitialised(&stream, 512)?;
//! Nvfp4::<f32>::new(&runtime)?.dequantize(&stream, &pair.rows, by_rows.view_mut())?;
//! Nvfp4Columns::<f32>::new(&runtime)?.dequantize_columns(&stream, &pair.columns, by_columns.view_mut())?;
//! assert_eq!(by_rows.to_vec(&stream)?, by_columns.to_vec(&stream)?);
//! # Ok(()) }
//! ```

use std::fmt;

use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_kernels::nvfp4::{Nvfp4CastSquares, Nvfp4CastSquaresArgs};
use oxtile_tile::launch::{DeviceView, Kernel};

use super::amax::Amax;
use super::nvfp4::Nvfp4Number;
use super::split_phase::GlobalAmax;
use super::tensor::Nvfp4Pair;
use crate::runtime::{Loaded, Result, Runtime, Stream};

/// The cast of `T` to NVFP4 in squares.
pub struct Nvfp4Squares<T: Nvfp4Number>
where
    Nvfp4CastSquares<T>: Kernel,
{
    amax: Amax<T>,
    cast: Loaded<Nvfp4CastSquares<T>>,
}

impl<T: Nvfp4Number> Nvfp4Squares<T>
where
    Nvfp4CastSquares<T>: Kernel,
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
    /// As [`Nvfp4Pair::uninitialised`] and [`cast`](Self::cast).
    pub fn quantize(&self, stream: &Stream, input: DeviceView<'_, T>, shape: [u64; 2]) -> Result<Nvfp4Pair> {
        let mut pair = Nvfp4Pair::uninitialised(stream, shape)?;
        self.amax.raise(stream, input, &mut pair.rows.amax)?;
        self.cast(stream, input, &mut pair)?;
        Ok(pair)
    }

    /// Casts this rank's part of a matrix, whole squares of it, to a pair that is there, whose amaxes become what all ranks agreed on:
    /// the second phase.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) unless there is one amax; as [`cast`](Self::cast).
    pub fn cast_shard(&self, stream: &Stream, input: DeviceView<'_, T>, amax: &GlobalAmax, pair: &mut Nvfp4Pair) -> Result<()> {
        amax.give("Nvfp4Squares::cast_shard, amax", stream, [0, 1], &mut pair.rows.amax)?;
        self.cast(stream, input, pair)
    }

    /// Casts a matrix of the pair's shape with the amax of its rows, which becomes that of its columns.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the pair's tensors are not one of each direction and of one shape;
    /// [`Error::Length`](crate::Error::Length) if `input` does not have their shape; as [`Loaded::launch`], also where a dimension is
    /// not a multiple of 16 or `input` does not start at a multiple of 16 bytes.
    pub fn cast(&self, stream: &Stream, input: DeviceView<'_, T>, pair: &mut Nvfp4Pair) -> Result<()> {
        let shape = pair.check("Nvfp4Squares::cast", input.len())?;
        let Nvfp4Pair { rows: by_rows, columns: by_columns } = pair;
        let args = Nvfp4CastSquaresArgs {
            input: MatrixArgument::new(input, shape),
            amax: by_rows.amax.view(),
            rows: CodesArgument { data: by_rows.data.view_mut(), scales: by_rows.scales.view_mut() },
            columns: CodesArgument { data: by_columns.data.view_mut(), scales: by_columns.scales.view_mut() },
        };
        self.cast.launch(stream, args)?;
        by_columns.amax.copy_from(stream, &by_rows.amax)
    }
}

impl<T: Nvfp4Number> fmt::Debug for Nvfp4Squares<T>
where
    Nvfp4CastSquares<T>: Kernel,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvfp4Squares").field("cast", &self.cast).finish_non_exhaustive()
    }
}
