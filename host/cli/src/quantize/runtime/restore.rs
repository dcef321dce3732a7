//! The way back: codes and scales to numbers.

use oxtile::{
    Buffer, Error, HostElement, Result, Runtime, Stream,
    num::{e4m3, ue8m0},
    quantize::{BlockScaling, CurrentScaling, Fp8BlockTensor, Fp8Tensor, Mxfp8, Mxfp8Tensor, Nvfp4, ScaleBlock, ScaleOptions},
};

use super::{
    casts::{Kernels, device_scales},
    from_bytes, loaded,
    number::Number,
    nvfp4::upload,
};
use crate::{
    quantize::{Direction, Format, Recipe, Side, matrix},
    safetensors::Dtype,
};

/// A part of a quantized matrix, as it lies in the file.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedPiece<'a> {
    /// Format, direction and shape `[rows, columns]` of the part, which is whole rows, or whole columns where the codes are transposed.
    pub side: Side,
    /// Whether the columns are transformed ones.
    pub hadamard: bool,
    /// The codes.
    pub codes: &'a [u8],
    /// The compact scales.
    pub scales: &'a [u8],
    /// The largest magnitude that the tensor was cast with.
    pub amax: f32,
}

impl<T: Number> Kernels<T> {
    /// Restores a piece, row-major, as little-endian bytes of `H`.
    pub fn dequantize<H>(&mut self, runtime: &Runtime, stream: &Stream, piece: &QuantizedPiece<'_>) -> Result<Vec<u8>>
    where
        H: HostElement<Device = T> + bytemuck::Pod + Default,
    {
        Ok(bytemuck::cast_slice(&self.restore::<H>(runtime, stream, piece)?).to_vec())
    }

    fn restore<H>(&mut self, runtime: &Runtime, stream: &Stream, piece: &QuantizedPiece<'_>) -> Result<Vec<H>>
    where
        H: HostElement<Device = T> + bytemuck::Pod + Default,
    {
        let (side, shape) = (piece.side, piece.side.shape);
        let mut wide = Buffer::<T>::uninitialised(stream, shape[0] * shape[1])?;
        match side.format {
            Format::Mxfp8 => {
                let data = from_bytes(stream, piece.codes, e4m3::from_bits)?;
                let scales = from_bytes(stream, piece.scales, ue8m0::from_bits)?;
                let tensor: Mxfp8Tensor = Mxfp8Tensor { data, scales, amax: (), shape, direction: side.direction };
                loaded(&mut self.mxfp8, || Mxfp8::new(runtime))?.dequantize(stream, &tensor, wide.view_mut())?;
            }
            Format::Nvfp4 | Format::Nvfp4Squares => {
                let tensor = upload(stream, piece)?;
                match side.direction {
                    Direction::Rows => {
                        let casts = loaded(&mut self.nvfp4_rows, || Nvfp4::new(runtime))?;
                        casts.dequantize(stream, &tensor, wide.view_mut())?;
                    }
                    // The way back is the same for every recipe.
                    Direction::Columns => {
                        let casts = loaded(&mut self.nvfp4, || T::nvfp4(runtime, &Recipe::of(Format::Nvfp4)))?;
                        casts.columns.dequantize(stream, &tensor, &mut wide)?;
                    }
                }
            }
            Format::Fp8 => {
                let inverse = piece.scales.first_chunk().copied().map(f32::from_le_bytes).ok_or_else(|| Error::Invalid {
                    what: "the scale of the tensor",
                    why: format!("{} bytes, not 4", piece.scales.len()),
                })?;
                let tensor = Fp8Tensor {
                    data: from_bytes(stream, piece.codes, e4m3::from_bits)?,
                    scales: Buffer::from_slice(stream, &[inverse])?,
                    amax: (),
                    shape,
                    direction: Direction::Rows,
                };
                let casts = loaded(&mut self.fp8, || CurrentScaling::new(runtime, ScaleOptions::default()))?;
                casts.dequantize(stream, &tensor, wide.view_mut())?;
            }
            Format::Fp8Block => {
                let scales = device_scales(piece.scales, side.compact_scales());
                let tensor = Fp8BlockTensor {
                    data: from_bytes(stream, piece.codes, e4m3::from_bits)?,
                    scales: Buffer::from_slice(stream, &scales)?,
                    amax: (),
                    shape: side.lines(),
                    direction: ScaleBlock::Row,
                };
                let casts = loaded(&mut self.blocks, || BlockScaling::new(runtime, ScaleOptions::default()))?;
                casts.dequantize(stream, &tensor, wide.view_mut())?;
            }
        }
        let values = wide.to_vec_as::<H>(stream)?;
        // The FP8 kernels restore the transpose; that of NVFP4 turns it back itself.
        let is_turned = side.is_transposed() && !side.format.is_nvfp4();
        Ok(if is_turned { matrix::transpose(&values, shape[0] as usize) } else { values })
    }
}

impl Kernels<f32> {
    /// Restores a piece whose columns are transformed ones.
    pub fn restore_transformed(&mut self, runtime: &Runtime, stream: &Stream, piece: &QuantizedPiece<'_>, dtype: Dtype) -> Result<Vec<u8>> {
        let [rows, columns] = piece.side.shape.map(|n| n as usize);
        let mut by_columns = matrix::transpose(&self.restore::<f32>(runtime, stream, piece)?, columns);
        matrix::invert_transform(&mut by_columns);
        Ok(matrix::to_bytes(&matrix::transpose(&by_columns, rows), dtype))
    }
}
