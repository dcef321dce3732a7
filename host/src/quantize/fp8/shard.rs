//! One scale for a 128x128 square of a matrix of which each rank holds a shard.

use std::fmt;

use oxtile_kernels::fp8::{Fp8PartialAmaxArgs, Fp8PartialCastArgs, SIDE, ShardArgument};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::{Fp8, Pod, e4m3};

use super::{Fp8Number, ScaleOptions};
use crate::quantize::format::{Format, Fp8BlockFormat, ScaleBlock};
use crate::quantize::layout::Compact;
use crate::quantize::split_phase::{GlobalAmax, LocalAmax};
use crate::runtime::{Buffer, Loaded, Result, Runtime, Stream};
use crate::tensor::shape::numel;

/// The place of a shard in its matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shard {
    /// Rows and columns of the matrix.
    pub shape: [u64; 2],
    /// The number of the shard's first element in the matrix, row by row.
    pub start: u64,
}

impl Shard {
    /// The shard of these elements, as kernels take it.
    fn of<T: Pod>(self, values: DeviceView<'_, T>) -> ShardArgument<'_, T> {
        let Self { shape: [rows, columns], start } = self;
        ShardArgument { values, start, rows, columns }
    }
}

/// The casts of shards of master weights. A shard is any run of a matrix's elements, or none.
///
/// Each rank calls [`local_amax`](Self::local_amax), all [reduce](LocalAmax::reduce) the results, and each calls [`cast`](Self::cast), which
/// writes only the codes of its own shard. Together they are the codes that [`BlockScaling`](super::BlockScaling) makes of the
/// whole matrix in squares.
pub struct ShardCasts<T: Fp8Number<Q>, Q: Fp8 = e4m3> {
    amaxes: Loaded<T::PartialAmax>,
    cast: Loaded<T::PartialCast>,
    options: ScaleOptions,
}

impl<T: Fp8Number<Q>, Q: Fp8> ShardCasts<T, Q> {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime, options: ScaleOptions) -> Result<Self> {
        Ok(Self { amaxes: runtime.load()?, cast: runtime.load()?, options })
    }

    /// The largest magnitude of each square in the shard, `[ceil(rows / 128), ceil(columns / 128)]`; 0 for a square without
    /// elements in the shard. An empty shard takes part: its amaxes are 0.
    ///
    /// # Errors
    /// As [`Loaded::launch`], if the shard reaches beyond the matrix.
    pub fn local_amax(&self, stream: &Stream, values: DeviceView<'_, T>, shard: Shard) -> Result<LocalAmax> {
        let mut amaxes = Buffer::uninitialised(stream, numel(&shard.shape.map(|side| side.div_ceil(SIDE)))?)?;
        self.amaxes.launch(stream, Fp8PartialAmaxArgs { shard: shard.of(values), amaxes: amaxes.view_mut() })?;
        Ok(LocalAmax::new(amaxes))
    }

    /// Casts the shard to `data`, of the same length: the rank's part of the whole matrix's codes. Returns the inverses of all the
    /// matrix's scales, laid out as [`ScaleBlock::Square`] says.
    ///
    /// # Errors
    /// As [`Loaded::launch`], if a length does not match or the shard reaches beyond the matrix.
    pub fn cast(
        &self,
        stream: &Stream,
        values: DeviceView<'_, T>,
        shard: Shard,
        amaxes: &GlobalAmax,
        data: DeviceViewMut<'_, Q>,
    ) -> Result<Buffer<f32>> {
        let mut inverses = Buffer::zeros(stream, Fp8BlockFormat::<Q>::scale_count::<Compact>(shard.shape, ScaleBlock::Square)?)?;
        self.cast_into(stream, values, shard, amaxes, data, &mut inverses)?;
        Ok(inverses)
    }

    /// As [`cast`](Self::cast), with the inverses in an existing buffer, zeros at first: the padding of their lines is not written. A graph can
    /// hold it.
    ///
    /// # Errors
    /// As [`Loaded::launch`], if a length does not match or the shard reaches beyond the matrix.
    pub fn cast_into(
        &self,
        stream: &Stream,
        values: DeviceView<'_, T>,
        shard: Shard,
        amaxes: &GlobalAmax,
        data: DeviceViewMut<'_, Q>,
        inverses: &mut Buffer<f32>,
    ) -> Result<()> {
        let args = Fp8PartialCastArgs {
            shard: shard.of(values),
            amaxes: amaxes.slots().view(),
            data,
            scale_inverses: inverses.view_mut(),
            options: self.options,
        };
        self.cast.launch(stream, args)
    }
}

impl<T: Fp8Number<Q>, Q: Fp8> fmt::Debug for ShardCasts<T, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardCasts").field("options", &self.options).finish_non_exhaustive()
    }
}
