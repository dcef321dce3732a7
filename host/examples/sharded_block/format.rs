//! Formats of weights, and what a product reads of them.

use oxtile::num::bf16;
use oxtile::quantize::nvfp4_columns::Nearest;
use oxtile::quantize::{self, Direction, Nvfp4Columns};
use oxtile::sharded::{Bf16, Mxfp8, Nvfp4, WeightFormat};
use oxtile::{Buffer, Result, Stream};
use oxtile_tile::launch::DeviceView;

/// A format whose weights a product in bf16 takes.
pub trait Format: WeightFormat {
    /// Turns weights into matrices of bf16.
    type Reader;

    /// Loads it, with memory for a matrix of so many elements.
    fn reader(stream: &Stream, elements: u64) -> Result<Self::Reader>;

    /// The matrix, `[rows, columns]`.
    fn matrix<'a>(reader: &'a mut Self::Reader, stream: &Stream, tensor: &'a Self::Tensor) -> Result<DeviceView<'a, bf16>>;
}

impl Format for Bf16 {
    type Reader = ();

    fn reader(_: &Stream, _: u64) -> Result<()> {
        Ok(())
    }

    fn matrix<'a>((): &'a mut (), _: &Stream, tensor: &'a Self::Tensor) -> Result<DeviceView<'a, bf16>> {
        Ok(tensor.data.view())
    }
}

/// A quantized weight is dequantized into one matrix that all weights use in turn. The activations are not quantized.
pub struct Dequantize<K> {
    kernels: K,
    matrix: Buffer<bf16>,
}

impl Format for Mxfp8 {
    type Reader = Dequantize<quantize::Mxfp8<bf16>>;

    fn reader(stream: &Stream, elements: u64) -> Result<Self::Reader> {
        Ok(Dequantize { kernels: quantize::Mxfp8::new(&stream.device().runtime())?, matrix: Buffer::uninitialised(stream, elements)? })
    }

    fn matrix<'a>(
        Dequantize { kernels, matrix }: &'a mut Self::Reader,
        stream: &Stream,
        tensor: &'a Self::Tensor,
    ) -> Result<DeviceView<'a, bf16>> {
        let elements = tensor.shape[0] * tensor.shape[1];
        kernels.dequantize(stream, tensor, matrix.view_mut().split_at(elements).0)?;
        Ok(matrix.view().slice(0, elements))
    }
}

impl Format for Nvfp4 {
    type Reader = Dequantize<(quantize::Nvfp4<bf16>, Nvfp4Columns<bf16, Nearest, false>)>;

    fn reader(stream: &Stream, elements: u64) -> Result<Self::Reader> {
        let runtime = stream.device().runtime();
        let kernels = (quantize::Nvfp4::new(&runtime)?, Nvfp4Columns::new(&runtime)?);
        Ok(Dequantize { kernels, matrix: Buffer::uninitialised(stream, elements)? })
    }

    fn matrix<'a>(
        Dequantize { kernels, matrix }: &'a mut Self::Reader,
        stream: &Stream,
        tensor: &'a Self::Tensor,
    ) -> Result<DeviceView<'a, bf16>> {
        let elements = tensor.shape[0] * tensor.shape[1];
        let output = matrix.view_mut().split_at(elements).0;
        match tensor.direction {
            Direction::Rows => kernels.0.dequantize(stream, tensor, output)?,
            Direction::Columns => kernels.1.dequantize_columns(stream, tensor, output)?,
        }
        Ok(matrix.view().slice(0, elements))
    }
}
