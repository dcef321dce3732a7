//! Scales to and from the layout of block-scaled matrix multiplication.

use oxtile::{
    Buffer, Error, Result, Runtime, Stream,
    num::{e4m3, ue8m0},
    quantize::{Interleave, InterleaveMxfp8, InterleavedScales, Layout, Mxfp8Tensor},
};

use super::{bytes, from_bytes, loaded};
use crate::quantize::{Format, Side};

/// The kernels of either format.
#[derive(Debug, Default)]
pub struct Interleaving {
    mxfp8: Option<InterleaveMxfp8>,
    nvfp4: Option<Interleave<e4m3>>,
}

impl Interleaving {
    /// Compact scales, interleaved.
    pub fn interleave(&mut self, runtime: &Runtime, stream: &Stream, side: &Side, compact: &[u8]) -> Result<Vec<u8>> {
        match side.format {
            Format::Mxfp8 => {
                let kernels = loaded(&mut self.mxfp8, || InterleaveMxfp8::new(runtime))?;
                let compact = from_bytes(stream, compact, ue8m0::from_bits)?;
                let interleaved = kernels.interleave(stream, scales_alone(stream, side, compact)?)?.scales.to_vec(stream)?;
                Ok(interleaved.into_iter().map(ue8m0::to_bits).collect())
            }
            Format::Nvfp4 | Format::Nvfp4Squares => {
                let compact = from_bytes(stream, compact, e4m3::from_bits)?;
                let mut interleaved = Buffer::uninitialised(stream, side.scale_shape().iter().product())?;
                let kernels = loaded(&mut self.nvfp4, || Interleave::new(runtime))?;
                kernels.run(stream, compact.view(), side.extents(), interleaved.view_mut())?;
                bytes(stream, &interleaved, e4m3::to_bits)
            }
            Format::Fp8 | Format::Fp8Block => Err(not_interleaved(side)),
        }
    }

    /// Interleaved scales, compact.
    pub fn compact(&mut self, runtime: &Runtime, stream: &Stream, side: &Side, interleaved: &[u8]) -> Result<Vec<u8>> {
        match side.format {
            Format::Mxfp8 => {
                let kernels = loaded(&mut self.mxfp8, || InterleaveMxfp8::new(runtime))?;
                let interleaved: Vec<_> = interleaved.iter().copied().map(ue8m0::from_bits).collect();
                let interleaved = InterleavedScales::from_slice(stream, &interleaved)?;
                bytes(stream, &kernels.compact(stream, scales_alone(stream, side, interleaved)?)?.scales, ue8m0::to_bits)
            }
            Format::Nvfp4 | Format::Nvfp4Squares => {
                let interleaved = from_bytes(stream, interleaved, e4m3::from_bits)?;
                let mut compact = Buffer::uninitialised(stream, side.compact_scales().iter().product())?;
                let kernels = loaded(&mut self.nvfp4, || Interleave::new(runtime))?;
                kernels.invert(stream, interleaved.view(), side.extents(), compact.view_mut())?;
                bytes(stream, &compact, e4m3::to_bits)
            }
            Format::Fp8 | Format::Fp8Block => Err(not_interleaved(side)),
        }
    }
}

/// A tensor whose codes stay where they are, on the host.
fn scales_alone<L: Layout>(stream: &Stream, side: &Side, scales: L::Scales<ue8m0>) -> Result<Mxfp8Tensor<e4m3, L>> {
    Ok(Mxfp8Tensor { data: Buffer::uninitialised(stream, 0)?, scales, amax: (), shape: side.shape, direction: side.direction })
}

fn not_interleaved(side: &Side) -> Error {
    Error::Invalid {
        what: "interleave",
        why: format!("{} has no interleaved scales: use mxfp8, nvfp4 or nvfp4-squares", side.format.name()),
    }
}
