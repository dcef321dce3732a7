//! Block scales to and from the layout of block-scaled matrix multiplication.

use std::fmt;

use oxtile_kernels::interleave::*;
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};
use oxtile_tile::num::{Fp8, e4m3, ue8m0};

use super::format::Direction;
use super::layout::{Compact, Interleaved, InterleavedScales};
use super::tensor::{Mxfp8Tensor, Nvfp4Tensor};
use crate::runtime::{Buffer, Loaded, Result, Runtime, Stream};

/// Interleaves scales that are compact as `[outer, blocks]`, row-major: rowwise ones of MXFP8 (`ue8m0`) and both of NVFP4
/// (`e4m3`).
pub struct Interleave<S: ScaleCode> {
    forward: Loaded<InterleaveRows<S>>,
    inverse: Loaded<DeinterleaveRows<S>>,
}

impl<S: ScaleCode> Interleave<S>
where
    InterleaveRows<S>: Kernel,
    DeinterleaveRows<S>: Kernel,
{
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self { forward: runtime.load()?, inverse: runtime.load()? })
    }

    /// Writes [`interleaved_len`] scales, the padding 0.
    ///
    /// # Errors
    /// As [`Loaded::launch`].
    pub fn run(
        &self,
        stream: &Stream,
        compact: DeviceView<'_, S>,
        [outer, blocks]: [u64; 2],
        interleaved: DeviceViewMut<'_, S>,
    ) -> Result<()> {
        self.forward.launch(stream, InterleaveRowsArgs { compact, interleaved, outer, blocks })
    }

    /// The inverse: writes `outer * blocks` compact scales.
    ///
    /// # Errors
    /// As [`Loaded::launch`].
    pub fn invert(
        &self,
        stream: &Stream,
        interleaved: DeviceView<'_, S>,
        [outer, blocks]: [u64; 2],
        compact: DeviceViewMut<'_, S>,
    ) -> Result<()> {
        self.inverse.launch(stream, DeinterleaveRowsArgs { interleaved, compact, outer, blocks })
    }
}

/// Changes the layout of the scales of MXFP8 tensors of either direction.
#[derive(Debug)]
pub struct InterleaveMxfp8 {
    rows: Interleave<ue8m0>,
    columns: Loaded<InterleaveColumns<ue8m0>>,
    inverse_columns: Loaded<DeinterleaveColumns<ue8m0>>,
}

impl InterleaveMxfp8 {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self { rows: Interleave::new(runtime)?, columns: runtime.load()?, inverse_columns: runtime.load()? })
    }

    /// The tensor with interleaved scales; its codes stay where they are.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`] and [`Loaded::launch`].
    pub fn interleave<Q: Fp8>(&self, stream: &Stream, tensor: Mxfp8Tensor<Q, Compact>) -> Result<Mxfp8Tensor<Q, Interleaved>> {
        let [outer, blocks] = tensor.extents();
        let mut scales = InterleavedScales::uninitialised(stream, interleaved_len(outer, blocks))?;
        let compact = tensor.scales.view();
        match tensor.direction {
            Direction::Rows => self.rows.run(stream, compact, [outer, blocks], scales.view_mut())?,
            Direction::Columns => {
                let args = InterleaveColumnsArgs { compact, interleaved: scales.view_mut(), outer, blocks };
                self.columns.launch(stream, args)?;
            }
        }
        Ok(tensor.with_scales(scales))
    }

    /// The tensor with compact scales again.
    ///
    /// # Errors
    /// As [`interleave`](Self::interleave).
    pub fn compact<Q: Fp8>(&self, stream: &Stream, tensor: Mxfp8Tensor<Q, Interleaved>) -> Result<Mxfp8Tensor<Q, Compact>> {
        let [outer, blocks] = tensor.extents();
        let mut scales = Buffer::uninitialised(stream, outer * blocks)?;
        let interleaved = tensor.scales.view();
        match tensor.direction {
            Direction::Rows => self.rows.invert(stream, interleaved, [outer, blocks], scales.view_mut())?,
            Direction::Columns => {
                let args = DeinterleaveColumnsArgs { interleaved, compact: scales.view_mut(), outer, blocks };
                self.inverse_columns.launch(stream, args)?;
            }
        }
        Ok(tensor.with_scales(scales))
    }
}

/// Changes the layout of the scales of NVFP4 tensors of either direction.
#[derive(Debug)]
pub struct InterleaveNvfp4(Interleave<e4m3>);

impl InterleaveNvfp4 {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Interleave::new(runtime).map(Self)
    }

    /// The tensor with interleaved scales; its codes stay where they are.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`] and [`Loaded::launch`].
    pub fn interleave(&self, stream: &Stream, tensor: Nvfp4Tensor<Compact>) -> Result<Nvfp4Tensor<Interleaved>> {
        let [outer, blocks] = tensor.extents();
        let mut scales = InterleavedScales::uninitialised(stream, interleaved_len(outer, blocks))?;
        self.0.run(stream, tensor.scales.view(), [outer, blocks], scales.view_mut())?;
        Ok(tensor.with_scales(scales))
    }

    /// The tensor with compact scales again.
    ///
    /// # Errors
    /// As [`interleave`](Self::interleave).
    pub fn compact(&self, stream: &Stream, tensor: Nvfp4Tensor<Interleaved>) -> Result<Nvfp4Tensor<Compact>> {
        let [outer, blocks] = tensor.extents();
        let mut scales = Buffer::uninitialised(stream, outer * blocks)?;
        self.0.invert(stream, tensor.scales.view(), [outer, blocks], scales.view_mut())?;
        Ok(tensor.with_scales(scales))
    }
}

impl<S: ScaleCode> fmt::Debug for Interleave<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interleave").field("forward", &self.forward).finish_non_exhaustive()
    }
}
