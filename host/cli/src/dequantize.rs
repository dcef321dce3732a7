//! `oxtile dequantize`: a file of `oxtile quantize` in, plain numbers out.
//!
//! The file's [`metadata`](crate::quantize::metadata) and its header tell which tensors belong together. The codes go through the
//! device by pieces of whole rows, or of whole columns where they are transposed, so that memory stays small whatever the
//! tensor's size. The scales of one tensor are read as a whole.

mod plan;
mod report;

use std::{
    ops::Range,
    time::{Duration, Instant},
};

pub use plan::{Matrix, Plan, PlanError};
pub use report::Report;

use crate::{
    arguments::Dequantize,
    output::Completed,
    progress::Progress,
    quantize::{
        DeviceError, Direction, Recipe, Side,
        runtime::{QuantizedPiece, RuntimeDevice},
    },
    safetensors::{Checkpoint, ReadError, Runs, Tensor, TensorSpec, WriteError, Writer},
    text::{path, printable},
};

/// Elements that a device gets at a time.
const PIECE_ELEMENTS: u64 = 1 << 20;
/// The same where codes are transposed: long enough that each write has hundreds of bytes.
const TRANSPOSED_PIECE_ELEMENTS: u64 = 1 << 22;
/// Columns of a piece of transposed codes, and rows of one of codes by columns: whole blocks of every format.
const BLOCK_LINES: u64 = 128;
/// Bytes of a passed-through tensor that are copied at a time.
const COPY_BYTES: u64 = 8 << 20;

/// What a job did.
#[derive(Debug)]
pub struct Outcome {
    /// What the tensors were quantized to, and how.
    pub recipe: Recipe,
    /// Which codes they were restored from.
    pub direction: Direction,
    /// The matrices that were restored, as they are now.
    pub restored: Vec<TensorSpec>,
    /// How many tensors were copied.
    pub copied: usize,
    /// Sizes of the input and the output in bytes.
    pub bytes: [u64; 2],
    /// Wall time of the whole job.
    pub elapsed: Duration,
}

/// A job that failed; no output is left.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The input.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// What the input holds.
    #[error("{file}: {error}")]
    Plan {
        /// The input.
        file: String,
        /// Why it cannot be restored.
        error: Box<PlanError>,
    },
    /// The output.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The device.
    #[error("tensor `{}`: {error}", printable(.tensor))]
    Device {
        /// The tensor at hand.
        tensor: String,
        /// The device's error.
        error: DeviceError,
    },
}

/// Restores the checkpoint of a request into a new one, which lacks its name: its matrices as the type asked for, or the one that they had.
///
/// # Errors
/// If the input cannot be read or is not a file of `oxtile quantize`, the device fails or the output cannot be written.
pub fn run(request: &Dequantize, device: &mut RuntimeDevice, progress: &mut Progress) -> Result<(Outcome, Completed), JobError> {
    let begin = Instant::now();
    let Dequantize { input, output, dtype, direction, .. } = request;
    let checkpoint = Checkpoint::open(input)?;
    let plan = Plan::new(&checkpoint, *dtype, *direction).map_err(|error| JobError::Plan { file: path(input), error: error.into() })?;
    let writer = Writer::create(output, &[input], &plan.outputs, &plan.metadata)?;
    progress.expect(checkpoint.tensors().iter().map(Tensor::bytes).sum());
    let bytes = [checkpoint.bytes(), writer.bytes()];
    let mut job = Job { checkpoint: &checkpoint, device, progress, writer };
    plan.matrices.iter().try_for_each(|matrix| job.restore(matrix))?;
    plan.copies.iter().try_for_each(|tensor| job.copy(tensor))?;
    job.progress.clear();
    let writer = job.writer;
    checkpoint.verify_unchanged()?;
    let completed = writer.complete()?;
    let restored = plan.matrices.iter().map(|matrix| matrix.output.clone()).collect();
    let (recipe, direction) = (plan.recipe, plan.direction);
    Ok((Outcome { recipe, direction, restored, copied: plan.copies.len(), bytes, elapsed: begin.elapsed() }, completed))
}

struct Job<'a> {
    checkpoint: &'a Checkpoint,
    device: &'a mut RuntimeDevice,
    progress: &'a mut Progress,
    writer: Writer,
}

impl Job<'_> {
    fn restore(&mut self, matrix: &Matrix<'_>) -> Result<(), JobError> {
        let name = &matrix.output.name;
        self.progress.start(name);
        restore(self.checkpoint, matrix, self.device, |runs, wide, read| {
            self.progress.advance(read);
            Ok(self.writer.write_runs(name, runs, &wide)?)
        })
    }

    fn copy(&mut self, tensor: &Tensor) -> Result<(), JobError> {
        self.progress.start(&tensor.name);
        for window in self.checkpoint.windows(tensor, COPY_BYTES) {
            let window = window?;
            self.writer.append(&tensor.name, &window)?;
            self.progress.advance(window.len() as u64);
        }
        Ok(())
    }
}

/// Restores a matrix piece by piece: `each` gets the place of a piece in the output, its bytes, and how many of the codes' were read.
///
/// # Errors
/// If the input cannot be read, the device fails, or `each` does.
pub fn restore(
    checkpoint: &Checkpoint,
    matrix: &Matrix<'_>,
    device: &mut RuntimeDevice,
    mut each: impl FnMut(Runs, Vec<u8>, u64) -> Result<(), JobError>,
) -> Result<(), JobError> {
    let (side, dtype) = (matrix.side, matrix.output.dtype);
    let failed = |error| JobError::Device { tensor: matrix.output.name.clone(), error };
    let amax = matrix.amax(checkpoint)?;
    let scales = matrix.compact_scales(checkpoint, device)?;
    let ([lines, length], [_, code_bytes], [scale_lines, _]) = (side.lines(), side.codes(), side.compact_scales());
    let scale_bytes = scales.len() as u64 / scale_lines;
    let (step, element_bytes) = (piece_lines(&side), dtype.bits() / 8);
    for line in (0..lines).step_by(step as usize) {
        let count = step.min(lines - line);
        let codes = checkpoint.window(matrix.codes, line * code_bytes..(line + count) * code_bytes)?;
        let [first, end] = scales_of(&side, line..line + count).map(|line| (line * scale_bytes).min(scales.len() as u64) as usize);
        let shape = if side.is_transposed() { [length, count] } else { [count, length] };
        let scales = &scales[first..end];
        let piece = QuantizedPiece { side: Side { shape, ..side }, hadamard: matrix.hadamard, codes: &codes, scales, amax };
        let wide = device.dequantize(&piece, dtype).map_err(failed)?;
        let runs = match side.is_transposed() {
            true => Runs { offset: line * element_bytes, bytes: count * element_bytes, stride: lines * element_bytes },
            false => Runs { offset: line * length * element_bytes, bytes: wide.len() as u64, stride: 0 },
        };
        each(runs, wide, codes.len() as u64)?;
    }
    Ok(())
}

impl Matrix<'_> {
    /// The largest magnitude that it was cast with.
    ///
    /// # Errors
    /// If the input cannot be read.
    pub fn amax(&self, checkpoint: &Checkpoint) -> Result<f32, ReadError> {
        let amax = checkpoint.window(self.amax, 0..4)?;
        Ok(f32::from_le_bytes(amax.first_chunk().copied().unwrap_or_default()))
    }

    /// Its scales, compact, however they lie in the file.
    ///
    /// # Errors
    /// If the input cannot be read or the device fails.
    pub fn compact_scales(&self, checkpoint: &Checkpoint, device: &mut RuntimeDevice) -> Result<Vec<u8>, JobError> {
        let scales = checkpoint.whole(self.scales)?;
        if !self.side.interleave {
            return Ok(scales);
        }
        let failed = |error| JobError::Device { tensor: self.output.name.clone(), error };
        device.compact(&self.side, &scales).map_err(failed)
    }
}

/// Lines of codes that a device gets at a time.
fn piece_lines(side: &Side) -> u64 {
    let [_, length] = side.lines();
    let lines = |elements: u64| (elements / length).max(1);
    match side.direction {
        Direction::Rows => lines(PIECE_ELEMENTS),
        Direction::Columns if side.is_transposed() => lines(TRANSPOSED_PIECE_ELEMENTS).next_multiple_of(BLOCK_LINES),
        Direction::Columns => lines(PIECE_ELEMENTS).next_multiple_of(BLOCK_LINES),
    }
}

/// Where the compact scales of some lines of codes begin and end, in lines of scales. One scale for the tensor is that of every line.
fn scales_of(side: &Side, lines: Range<u64>) -> [u64; 2] {
    match (side.format.shapes().block, side.direction) {
        (None, _) => [0, 1],
        (Some(block), Direction::Columns) if !side.is_transposed() => [lines.start, lines.end].map(|line| line.div_ceil(block)),
        (Some(_), _) => [lines.start, lines.end],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize::Format;

    #[test]
    fn lines_have_the_scales_of_their_blocks() {
        let side = |format, direction| Side { format, direction, shape: [256, 512], interleave: false };
        let [rows, columns] = [Direction::Rows, Direction::Columns];
        // One scale for all lines, whichever piece they are in.
        assert_eq!(scales_of(&side(Format::Fp8, rows), 128..256), [0, 1]);
        assert_eq!(scales_of(&side(Format::Fp8, columns), 384..512), [0, 1]);
        // A line of scales for each of codes, or for 32 where the blocks lie down the columns.
        assert_eq!(scales_of(&side(Format::Mxfp8, rows), 128..256), [128, 256]);
        assert_eq!(scales_of(&side(Format::Mxfp8, columns), 128..256), [4, 8]);
        assert_eq!(scales_of(&side(Format::Fp8Block, columns), 128..256), [128, 256]);
    }
}
