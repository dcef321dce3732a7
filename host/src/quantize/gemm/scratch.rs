//! The memory of a multiplication beside its operands.

use std::marker::PhantomData;

use oxtile_tile::launch::{BufferAccess, DeviceView, DeviceViewMut};
use oxtile_tile::num::{Pod, bf16, e4m3, ue8m0};

use super::choice::{OperandFormat, Path, QuantizedGemmConfig};
use crate::quantize::format::{Direction, Format, Mxfp8Format, Nvfp4Format, Shapes};
use crate::runtime::matmul::WORKSPACE_BYTES;
use crate::runtime::{Buffer, Error, Result, Stream};
use crate::tensor::shape::numel;

/// Memory that the stages of a multiplication write and read: dequantized operands, interleaved scales, the library's workspace. Made by
/// [`QuantizedGemm::scratch`](super::QuantizedGemm::scratch); one multiplication at a time uses it.
#[derive(Debug)]
pub struct Scratch {
    wide: [Buffer<bf16>; 2],
    mxfp8_scales: [Buffer<ue8m0>; 2],
    nvfp4_scales: [Buffer<e4m3>; 2],
    factors: Buffer<f32>,
    workspace: Buffer<u8>,
}

/// How many elements each of them has.
#[derive(PartialEq)]
struct Sizes {
    wide: [u64; 2],
    mxfp8_scales: [u64; 2],
    nvfp4_scales: [u64; 2],
    factors: u64,
    workspace: u64,
}

impl Sizes {
    fn of(config: &QuantizedGemmConfig, path: Path) -> Result<Self> {
        let QuantizedGemmConfig { m, n, k, a, b, .. } = *config;
        let is_wide = matches!(path, Path::Dequantize | Path::DequantizeCublasLt | Path::DequantizePortable);
        let is_library = matches!(path, Path::CublasLt | Path::DequantizeCublasLt);
        let scales = |is_used: bool, shapes: Shapes, outer: u64| {
            if path == Path::CublasLt && is_used { shapes.interleaved_scales([outer, k], Direction::Rows).iter().product() } else { 0 }
        };
        let mxfp8_scales = |format, outer| scales(matches!(format, OperandFormat::Mxfp8(_)), <Mxfp8Format>::SHAPES, outer);
        let nvfp4_scales = |format, outer| scales(matches!(format, OperandFormat::Nvfp4(_)), Nvfp4Format::SHAPES, outer);
        let nvfp4 = nvfp4_scales(a, m);
        Ok(Self {
            wide: if is_wide { [numel(&[m, k])?, numel(&[n, k])?] } else { [0; 2] },
            mxfp8_scales: [mxfp8_scales(a, m), mxfp8_scales(b, n)],
            nvfp4_scales: [nvfp4, nvfp4_scales(b, n)],
            factors: if nvfp4 == 0 { 0 } else { 2 },
            workspace: if is_library { WORKSPACE_BYTES } else { 0 },
        })
    }
}

impl Scratch {
    pub(super) fn new(stream: &Stream, config: &QuantizedGemmConfig, path: Path) -> Result<Self> {
        let Sizes { wide: [a, b], mxfp8_scales, nvfp4_scales, factors, workspace } = Sizes::of(config, path)?;
        Ok(Self {
            wide: [Buffer::uninitialised(stream, a)?, Buffer::uninitialised(stream, b)?],
            mxfp8_scales: [Buffer::uninitialised(stream, mxfp8_scales[0])?, Buffer::uninitialised(stream, mxfp8_scales[1])?],
            nvfp4_scales: [Buffer::uninitialised(stream, nvfp4_scales[0])?, Buffer::uninitialised(stream, nvfp4_scales[1])?],
            factors: Buffer::uninitialised(stream, factors)?,
            workspace: Buffer::uninitialised(stream, workspace)?,
        })
    }

    /// Lends it all.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it was made for another configuration.
    pub(super) fn pads(&mut self, config: &QuantizedGemmConfig, path: Path) -> Result<Pads<'_>> {
        let lengths = Sizes {
            wide: self.wide.each_ref().map(Buffer::len),
            mxfp8_scales: self.mxfp8_scales.each_ref().map(Buffer::len),
            nvfp4_scales: self.nvfp4_scales.each_ref().map(Buffer::len),
            factors: self.factors.len(),
            workspace: self.workspace.len(),
        };
        if lengths != Sizes::of(config, path)? {
            let why = "the scratch memory is of another configuration: take that of `QuantizedGemm::scratch`".to_owned();
            return Err(Error::Invalid { what: "QuantizedGemm::bind, scratch", why });
        }
        Ok(Pads {
            wide: self.wide.each_mut().map(Pad::of),
            mxfp8_scales: self.mxfp8_scales.each_mut().map(Pad::of),
            nvfp4_scales: self.nvfp4_scales.each_mut().map(Pad::of),
            factors: Pad::of(&mut self.factors),
            workspace: Pad::of(&mut self.workspace),
        })
    }
}

/// The memory that a [`Scratch`] lends.
pub(super) struct Pads<'a> {
    pub wide: [Pad<'a, bf16>; 2],
    pub mxfp8_scales: [Pad<'a, ue8m0>; 2],
    pub nvfp4_scales: [Pad<'a, e4m3>; 2],
    pub factors: Pad<'a, f32>,
    pub workspace: Pad<'a, u8>,
}

/// Memory that the stages of one multiplication write and read in turn.
pub(super) struct Pad<'a, T> {
    memory: BufferAccess<'a>,
    length: u64,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for Pad<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Pad<'_, T> {}

impl<'a, T: Pod> Pad<'a, T> {
    fn of(buffer: &'a mut Buffer<T>) -> Self {
        let view = buffer.view_mut();
        Self { memory: view.access("scratch"), length: view.len(), element: PhantomData }
    }

    /// For a stage that reads it.
    pub fn view(self) -> DeviceView<'a, T> {
        // SAFETY: a buffer of so many elements, borrowed for `'a`, lent it.
        unsafe { DeviceView::from_raw(self.memory.address, self.length, self.memory.owner) }
    }

    /// For a stage that writes it.
    pub fn view_mut(self) -> DeviceViewMut<'a, T> {
        // SAFETY: as above; the borrow is exclusive, and the only other views are those of stages of the same multiplication, which are
        // enqueued one after the other.
        unsafe { DeviceViewMut::from_raw(self.memory.address, self.length, self.memory.owner) }
    }
}
