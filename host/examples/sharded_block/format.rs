//! Formats of weights, and what a product reads of them.

use oxtile::num::bf16;
use oxtile::quantize::nvfp4_columns::Nearest;
use oxtile::quantize::{self, Direction, Nvfp4Columns};
use oxtile::sharded::{Bf16, Mxfp8, Nvfp4, WeightFormat};
use oxtile::{Buffer, Result, Stream};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::kernels::lend;

/// A format whose weights a product in bf16 takes.
pub trait Format: WeightFormat {
    /// Turns weights into matrices of bf16.
    type Reader;

    /// Loads it, with memory for a matrix of so many elements.
    fn reader(stream: &Stream, elements: u64) -> Result<Self::Reader>;

    /// Turns a weight that was taken into its matrix.
    fn read(reader: &Self::Reader, stream: &Stream, tensor: &Self::Tensor) -> Result<()>;

    /// Where the matrix is, `[rows, columns]`, once the weight is read.
    fn matrix<'m>(reader: &'m Self::Reader, tensor: &'m Self::Tensor) -> DeviceView<'m, bf16>;
}

impl Format for Bf16 {
    type Reader = ();

    fn reader(_: &Stream, _: u64) -> Result<()> {
        Ok(())
    }

    fn read((): &(), _: &Stream, _: &Self::Tensor) -> Result<()> {
        Ok(())
    }

    fn matrix<'m>((): &'m (), tensor: &'m Self::Tensor) -> DeviceView<'m, bf16> {
        tensor.data.view()
    }
}

/// A quantized weight is dequantized into one matrix that all weights use in turn. The activations are not quantized.
pub struct Dequantize<K> {
    kernels: K,
    matrix: Buffer<bf16>,
}

impl<K> Dequantize<K> {
    fn to_write(&self, [rows, columns]: [u64; 2]) -> DeviceViewMut<'_, bf16> {
        lend(&self.matrix).split_at(rows * columns).0
    }

    fn to_read(&self, [rows, columns]: [u64; 2]) -> DeviceView<'_, bf16> {
        self.matrix.view().slice(0, rows * columns)
    }
}

impl Format for Mxfp8 {
    type Reader = Dequantize<quantize::Mxfp8<bf16>>;

    fn reader(stream: &Stream, elements: u64) -> Result<Self::Reader> {
        Ok(Dequantize { kernels: quantize::Mxfp8::new(&stream.device().runtime())?, matrix: Buffer::uninitialised(stream, elements)? })
    }

    fn read(reader: &Self::Reader, stream: &Stream, tensor: &Self::Tensor) -> Result<()> {
        reader.kernels.dequantize(stream, tensor, reader.to_write(tensor.shape))
    }

    fn matrix<'m>(reader: &'m Self::Reader, tensor: &'m Self::Tensor) -> DeviceView<'m, bf16> {
        reader.to_read(tensor.shape)
    }
}

impl Format for Nvfp4 {
    type Reader = Dequantize<(quantize::Nvfp4<bf16>, Nvfp4Columns<bf16, Nearest, false>)>;

    fn reader(stream: &Stream, elements: u64) -> Result<Self::Reader> {
        let runtime = stream.device().runtime();
        let kernels = (quantize::Nvfp4::new(&runtime)?, Nvfp4Columns::new(&runtime)?);
        Ok(Dequantize { kernels, matrix: Buffer::uninitialised(stream, elements)? })
    }

    fn read(reader: &Self::Reader, stream: &Stream, tensor: &Self::Tensor) -> Result<()> {
        let (by_rows, by_columns) = &reader.kernels;
        let output = reader.to_write(tensor.shape);
        match tensor.direction {
            Direction::Rows => by_rows.dequantize(stream, tensor, output),
            Direction::Columns => by_columns.dequantize_columns(stream, tensor, output),
        }
    }

    fn matrix<'m>(reader: &'m Self::Reader, tensor: &'m Self::Tensor) -> DeviceView<'m, bf16> {
        reader.to_read(tensor.shape)
    }
}
