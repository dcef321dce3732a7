//! The kernels for one number type, and the casts on them.

use oxtile::{
    Buffer, HostElement, Result, Runtime, Stream,
    kernels::fp8::row_of_scales,
    num::{e4m3, ue8m0},
    quantize::{Amax, BlockScaling, CurrentScaling, Fp8BlockTensor, Mxfp8, Mxfp8Tensor, Nvfp4, ScaleBlock, ScaleOptions},
};

use super::{bytes, loaded, number::Number, nvfp4::Nvfp4Casts};
use crate::quantize::{Codes, Direction, Directions, Format, Piece, Quantized, Recipe, matrix};

/// The kernels for one number type, each loaded when it is first needed.
#[derive(Debug)]
pub struct Kernels<T: Number> {
    amax: Option<Amax<T>>,
    pub(super) mxfp8: Option<Mxfp8<T>>,
    pub(super) nvfp4_rows: Option<Nvfp4<T>>,
    /// For the recipe of the job.
    pub(super) nvfp4: Option<Nvfp4Casts<T>>,
    pub(super) fp8: Option<CurrentScaling<T>>,
    pub(super) blocks: Option<BlockScaling<T>>,
}

impl<T: Number> Default for Kernels<T> {
    fn default() -> Self {
        Self { amax: None, mxfp8: None, nvfp4_rows: None, nvfp4: None, fp8: None, blocks: None }
    }
}

impl<T: Number> Kernels<T> {
    /// The kernel for the largest magnitude.
    pub fn amax(&mut self, runtime: &Runtime) -> Result<&Amax<T>> {
        loaded(&mut self.amax, || Amax::new(runtime))
    }

    /// The largest magnitude.
    pub fn amax_of<H: HostElement<Device = T>>(&mut self, runtime: &Runtime, stream: &Stream, input: &[H]) -> Result<f32> {
        let input = Buffer::<T>::from_slice(stream, input)?;
        self.amax_on_device(runtime, stream, &input)
    }

    fn amax_on_device(&mut self, runtime: &Runtime, stream: &Stream, input: &Buffer<T>) -> Result<f32> {
        let mut amax = Buffer::uninitialised(stream, 1)?;
        self.amax(runtime)?.run(stream, input.view(), &mut amax)?;
        Ok(amax.to_vec(stream)?[0])
    }

    /// Quantizes a piece as the recipe says.
    pub fn quantize<H: HostElement<Device = T>>(
        &mut self,
        runtime: &Runtime,
        stream: &Stream,
        recipe: &Recipe,
        piece: &Piece,
        input: &[H],
    ) -> Result<Quantized> {
        let input = Buffer::<T>::from_slice(stream, input)?;
        let sides = match recipe.format {
            Format::Mxfp8 => self.mxfp8(runtime, stream, recipe.directions, piece, &input)?,
            Format::Nvfp4 | Format::Nvfp4Squares => {
                let casts = loaded(&mut self.nvfp4, || T::nvfp4(runtime, recipe))?;
                return casts.quantize(stream, recipe, piece, &input);
            }
            Format::Fp8 => return self.fp8(runtime, stream, recipe.directions, piece, &input),
            Format::Fp8Block => self.blocks(runtime, stream, recipe.directions, piece, &input)?,
        };
        Ok(Quantized { sides, amax: self.amax_on_device(runtime, stream, &input)? })
    }

    fn mxfp8(
        &mut self,
        runtime: &Runtime,
        stream: &Stream,
        directions: Directions,
        piece: &Piece,
        input: &Buffer<T>,
    ) -> Result<[Option<Codes>; 2]> {
        let casts = loaded(&mut self.mxfp8, || Mxfp8::new(runtime))?;
        let codes = |tensor: &Mxfp8Tensor| -> Result<Option<Codes>> {
            let (data, scales) = (bytes(stream, &tensor.data, e4m3::to_bits)?, bytes(stream, &tensor.scales, ue8m0::to_bits)?);
            Ok(Some(Codes { data, scales }))
        };
        let one = |direction| codes(&casts.quantize(stream, input.view(), piece.shape, direction)?);
        Ok(match directions {
            Directions::Rows => [one(Direction::Rows)?, None],
            Directions::Columns => [None, one(Direction::Columns)?],
            Directions::Both => {
                let pair = casts.quantize_both(stream, input.view(), piece.shape)?;
                [codes(&pair.rows)?, codes(&pair.columns)?]
            }
        })
    }

    fn fp8(&mut self, runtime: &Runtime, stream: &Stream, directions: Directions, piece: &Piece, input: &Buffer<T>) -> Result<Quantized> {
        let casts = loaded(&mut self.fp8, || CurrentScaling::new(runtime, ScaleOptions::default()))?;
        // Codes by columns are those by rows, transposed.
        let amax = Buffer::from_slice(stream, &[piece.amax[Direction::Rows as usize]])?;
        let (mut data, mut inverse) = (Buffer::uninitialised(stream, input.len())?, Buffer::uninitialised(stream, 1)?);
        casts.cast(stream, input.view(), amax.view(), data.view_mut(), inverse.view_mut())?;
        let scales = f32_bytes(&inverse.to_vec(stream)?);
        let codes =
            |data: &Buffer<e4m3>| -> Result<Codes> { Ok(Codes { data: bytes(stream, data, e4m3::to_bits)?, scales: scales.clone() }) };
        let mut output = Quantized::default();
        if directions.contains(Direction::Rows) {
            output.sides[0] = Some(codes(&data)?);
        }
        if directions.contains(Direction::Columns) {
            let mut transposed = Buffer::uninitialised(stream, input.len())?;
            casts.transpose(stream, data.view(), piece.shape, transposed.view_mut())?;
            output.sides[1] = Some(codes(&transposed)?);
        }
        Ok(output)
    }

    fn blocks(
        &mut self,
        runtime: &Runtime,
        stream: &Stream,
        directions: Directions,
        piece: &Piece,
        input: &Buffer<T>,
    ) -> Result<[Option<Codes>; 2]> {
        let casts = loaded(&mut self.blocks, || BlockScaling::new(runtime, ScaleOptions::default()))?;
        let codes = |tensor: &Fp8BlockTensor| -> Result<Option<Codes>> {
            let scales = file_scales(&tensor.scales.to_vec(stream)?, tensor.shape[0]);
            Ok(Some(Codes { data: bytes(stream, &tensor.data, e4m3::to_bits)?, scales }))
        };
        if directions == Directions::Rows {
            return Ok([codes(&casts.quantize(stream, input.view(), piece.shape, ScaleBlock::Row)?)?, None]);
        }
        let [rows, columns] = casts.quantize_both(stream, input.view(), piece.shape, ScaleBlock::Row)?;
        Ok([if directions == Directions::Both { codes(&rows)? } else { None }, codes(&columns)?])
    }
}

/// Scales `[lines, blocks]` of a file from the device's `[blocks, lines]`, whose rows are filled up.
fn file_scales(scales: &[f32], lines: u64) -> Vec<u8> {
    let stride = row_of_scales(lines) as usize;
    let filled = matrix::transpose(scales, stride);
    let blocks = scales.len() / stride.max(1);
    f32_bytes(&filled[..lines as usize * blocks])
}

/// The inverse of [`file_scales`].
pub fn device_scales(scales: &[u8], [lines, blocks]: [u64; 2]) -> Vec<f32> {
    let mut filled: Vec<f32> = scales.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect();
    filled.resize((row_of_scales(lines) * blocks) as usize, 0.0);
    matrix::transpose(&filled, blocks as usize)
}

fn f32_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_of_blocks_to_the_file_and_back() {
        // Five lines of two blocks, filled up to eight.
        let device: Vec<f32> =
            (0..2).flat_map(|block| (0..8).map(move |line| if line < 5 { (line * 10 + block) as f32 } else { 0.0 })).collect();
        let file = file_scales(&device, 5);
        assert_eq!(file, f32_bytes(&[0.0, 1.0, 10.0, 11.0, 20.0, 21.0, 30.0, 31.0, 40.0, 41.0]));
        assert_eq!(device_scales(&file, [5, 2]), device);
    }
}
