//! `oxtile dequantize`: a file of `oxtile quantize` in, plain numbers out.
//!
//! Which tensors belong together, [`plan`](crate::quantize::plan) says; the codes and scales go through the device by
//! pieces of whole rows, so that memory stays small whatever the tensor's size.

mod plan;
mod report;

use std::path::Path;
use std::time::{Duration, Instant};

pub use plan::{Matrix, Plan, PlanError};
pub use report::Report;

use crate::{
    progress::Progress,
    quantize::{DeviceError, Format, Scheme, runtime::RuntimeDevice},
    safetensors::{Checkpoint, Dtype, ReadError, Tensor, WriteError, Writer},
    text::printable,
};

/// Elements that a device gets at a time.
const PIECE_ELEMENTS: u64 = 1 << 20;
/// Bytes of a passed-through tensor that are copied at a time.
const COPY_BYTES: u64 = 8 << 20;

/// What a job did.
#[derive(Debug)]
pub struct Outcome {
    /// What the tensors were quantized to.
    pub format: Format,
    /// The matrices that were restored: name and shape.
    pub restored: Vec<(String, Vec<u64>)>,
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

/// Restores the checkpoint at `input` into a new one at `output`, its matrices as `dtype`: F32, F16 or BF16.
///
/// # Errors
/// If the input cannot be read or is not a file of `oxtile quantize`, the device fails or the output cannot be written.
pub fn run(input: &Path, output: &Path, dtype: Dtype, device: &mut RuntimeDevice, progress: &mut Progress) -> Result<Outcome, JobError> {
    let begin = Instant::now();
    let checkpoint = Checkpoint::open(input)?;
    let plan = Plan::new(&checkpoint, dtype).map_err(|error| JobError::Plan { file: input.display().to_string(), error: error.into() })?;
    let writer = Writer::create(output, Some(input), &plan.outputs, &plan.metadata)?;
    progress.expect(checkpoint.tensors().iter().map(Tensor::bytes).sum());
    let bytes = [checkpoint.bytes(), writer.bytes()];
    let mut job = Job { checkpoint: &checkpoint, format: plan.format, dtype, device, progress, writer };
    plan.matrices.iter().try_for_each(|matrix| job.restore(matrix))?;
    plan.copies.iter().try_for_each(|tensor| job.copy(tensor))?;
    job.progress.clear();
    let writer = job.writer;
    checkpoint.verify_unchanged()?;
    writer.finish()?;
    let restored = plan.matrices.iter().map(|matrix| (matrix.name.clone(), matrix.shape.clone())).collect();
    Ok(Outcome { format: plan.format, restored, copied: plan.copies.len(), bytes, elapsed: begin.elapsed() })
}

struct Job<'a> {
    checkpoint: &'a Checkpoint,
    format: Format,
    dtype: Dtype,
    device: &'a mut RuntimeDevice,
    progress: &'a mut Progress,
    writer: Writer,
}

impl Job<'_> {
    fn restore(&mut self, matrix: &Matrix<'_>) -> Result<(), JobError> {
        self.progress.start(&matrix.name);
        let scheme = self.scheme(matrix)?;
        let [rows, columns] = matrix.dimensions;
        let (code_bytes, scale_bytes) = (self.format.data_bytes(columns), columns / self.format.block());
        let step = (PIECE_ELEMENTS / columns).max(1);
        let mut row = 0;
        while row < rows {
            let count = step.min(rows - row);
            let codes = self.checkpoint.window(matrix.codes, row * code_bytes..(row + count) * code_bytes)?;
            let scales = self.checkpoint.window(matrix.scales, row * scale_bytes..(row + count) * scale_bytes)?;
            let wide = self.device.dequantize(scheme, [count, columns], &codes, &scales, self.dtype);
            let wide = wide.map_err(|error| JobError::Device { tensor: matrix.name.clone(), error })?;
            self.writer.append(&matrix.name, &wide)?;
            self.progress.advance((codes.len() + scales.len()) as u64);
            row += count;
        }
        Ok(())
    }

    fn scheme(&self, matrix: &Matrix<'_>) -> Result<Scheme, JobError> {
        let amax = self.checkpoint.window(matrix.amax, 0..4)?;
        let amax = f32::from_le_bytes(amax.first_chunk().copied().unwrap_or_default());
        Ok(match self.format {
            Format::Mxfp8 => Scheme::Mxfp8,
            Format::Nvfp4 => Scheme::Nvfp4 { amax },
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
