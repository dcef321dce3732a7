//! The job itself: the device quantizes one piece while the host measures and writes the one before.

use std::{
    path::Path,
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
    time::{Duration, Instant},
};

use oxtile::quantize::nvfp4::encode_scale;

use super::{
    DeviceError, Fidelity, Format, Plan, PlanError, QuantizeDevice, QuantizedRows, Scheme,
    device::AlignedElements,
    plan::{Action, Reason, amax_name, data_name, global_scale_name, scale_name},
};
use crate::{
    progress::Progress,
    safetensors::{Checkpoint, ReadError, Tensor, Window, WriteError, Writer},
    text::printable,
};

/// Elements that a device gets at a time: enough to fill it, few enough that memory stays small and Ctrl-C quick.
const PIECE_ELEMENTS: u64 = 1 << 20;

/// Bytes of a passed-through tensor that are copied at a time.
const COPY_BYTES: u64 = 8 << 20;

/// What a job did.
#[derive(Debug)]
pub struct Outcome {
    /// What the tensors were quantized to.
    pub format: Format,
    /// What became of each tensor, in file order.
    pub tensors: Vec<TensorOutcome>,
    /// Size of the input in bytes.
    pub input_bytes: u64,
    /// Size of the output in bytes.
    pub output_bytes: u64,
    /// Wall time of the whole job.
    pub elapsed: Duration,
}

/// What became of one tensor.
#[derive(Debug)]
pub struct TensorOutcome {
    /// The tensor in the input.
    pub tensor: Tensor,
    /// Its fate.
    pub result: TensorResult,
}

/// A quantized tensor's numbers, or why there are none.
#[derive(Debug)]
pub enum TensorResult {
    /// Quantized.
    Quantized {
        /// Largest magnitude of the input; NaN elements do not count.
        amax: f32,
        /// What it cost.
        fidelity: Fidelity,
        /// Time spent in the device's calls.
        elapsed: Duration,
    },
    /// Copied as it is.
    PassedThrough(Reason),
}

/// A job that failed; no output is left.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The input.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The output's layout.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The output.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The device.
    #[error("tensor `{}` on device {device}: {error}", printable(.tensor))]
    Device {
        /// The tensor at hand.
        tensor: String,
        /// The device's name.
        device: String,
        /// Its error.
        error: DeviceError,
    },
}

/// Quantizes the checkpoint at `input` into a new one at `output`.
///
/// At most three pieces of 2^20 elements (or of one row, where that is longer) are in memory at a time.
///
/// # Errors
/// If the input cannot be read or laid out, the device fails or the output cannot be written; no output is left then.
pub fn run(
    input: &Path,
    output: &Path,
    format: Format,
    device: &mut dyn QuantizeDevice,
    progress: &mut Progress,
) -> Result<Outcome, JobError> {
    let begin = Instant::now();
    let checkpoint = Checkpoint::open(input)?;
    let plan = Plan::new(&checkpoint, format)?;
    let writer = Writer::create(output, Some(input), &plan.outputs, &plan.metadata)?;
    let output_bytes = writer.bytes();
    progress.expect(plan.actions.iter().map(|(tensor, action)| tensor.bytes() * action.passes(format)).sum());

    let (send, receive) = sync_channel(1);
    let tensors = thread::scope(|scope| {
        let sink = Sink { writer, fidelity: vec![Fidelity::default(); plan.actions.len()] };
        let sink = scope.spawn(|| sink.drain(receive, &plan));
        let fed = Source { checkpoint: &checkpoint, device, progress, sink: send }.feed(&plan);
        let drained = sink.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let (writer, fidelity) = drained?;
        let results = fed.map_err(|halt| match halt {
            Halt::Failed(error) => error,
            Halt::SinkFailed => unreachable!("a sink that hangs up has returned its error"),
        })?;
        checkpoint.verify_unchanged()?;
        writer.finish()?;
        Ok::<_, JobError>(outcomes(&plan, results, fidelity))
    })?;
    Ok(Outcome { format, tensors, input_bytes: checkpoint.bytes(), output_bytes, elapsed: begin.elapsed() })
}

/// One step of the output, on its way from the device to the file.
enum Step<'a> {
    /// A piece of the tensor at this index of the plan, and what the device made of it.
    Quantized(usize, Window, QuantizedRows),
    /// The tensor's amax over all pieces.
    Amax(&'a str, f32),
    /// A piece that is copied.
    Copy(&'a str, Window),
}

/// The half that reads and keeps the device busy.
struct Source<'a> {
    checkpoint: &'a Checkpoint,
    device: &'a mut dyn QuantizeDevice,
    progress: &'a mut Progress,
    sink: SyncSender<Step<'a>>,
}

/// A tensor's amax and device time; `None` for one that was copied.
type SourceResult = Option<(f32, Duration)>;

/// Why the source stops early.
enum Halt {
    /// The sink hung up; its error says why.
    SinkFailed,
    /// The source's own failure.
    Failed(JobError),
}

impl<E: Into<JobError>> From<E> for Halt {
    fn from(error: E) -> Self {
        Halt::Failed(error.into())
    }
}

impl<'a> Source<'a> {
    fn feed(mut self, plan: &'a Plan<'a>) -> Result<Vec<SourceResult>, Halt> {
        let mut results = Vec::with_capacity(plan.actions.len());
        for (index, &(tensor, action)) in plan.actions.iter().enumerate() {
            self.progress.start(&tensor.name);
            results.push(match action {
                Action::PassThrough(_) => self.copy(tensor).map(|()| None)?,
                Action::Quantize { rows: _, columns } => Some(self.quantize(index, tensor, columns, plan.format)?),
            });
        }
        self.progress.clear();
        Ok(results)
    }

    fn copy(&mut self, tensor: &'a Tensor) -> Result<(), Halt> {
        for window in self.checkpoint.windows(tensor, COPY_BYTES) {
            let window = window?;
            self.progress.advance(window.len() as u64);
            self.send(Step::Copy(&tensor.name, window))?;
        }
        Ok(())
    }

    fn quantize(&mut self, index: usize, tensor: &'a Tensor, columns: u64, format: Format) -> Result<(f32, Duration), Halt> {
        let row_bytes = columns * tensor.dtype.bits() / 8;
        let piece_bytes = (PIECE_ELEMENTS / columns).max(1) * row_bytes;
        let (scheme, mut amax, mut elapsed) = match format {
            Format::Mxfp8 => (Scheme::Mxfp8, 0f32, Duration::ZERO),
            Format::Nvfp4 => {
                let (amax, elapsed) = self.amax(tensor, piece_bytes)?;
                (Scheme::Nvfp4 { amax }, amax, elapsed)
            }
        };
        for window in self.checkpoint.windows(tensor, piece_bytes) {
            let window = window?;
            let rows = window.len() as u64 / row_bytes;
            let begin = Instant::now();
            let output = self.quantize_piece(tensor, scheme, [rows, columns], &window)?;
            elapsed += begin.elapsed();
            // `f32::max` drops a NaN, as the kernel does.
            amax = amax.max(output.amax);
            self.progress.advance(window.len() as u64);
            self.send(Step::Quantized(index, window, output))?;
        }
        self.send(Step::Amax(&tensor.name, amax))?;
        Ok((amax, elapsed))
    }

    /// The largest magnitude of a whole tensor, and the device's time for it.
    fn amax(&mut self, tensor: &Tensor, piece_bytes: u64) -> Result<(f32, Duration), Halt> {
        let (mut amax, mut elapsed) = (0f32, Duration::ZERO);
        for window in self.checkpoint.windows(tensor, piece_bytes) {
            let window = window?;
            let begin = Instant::now();
            let piece = self.device.amax(elements(tensor, &window).elements());
            amax = amax.max(piece.map_err(|error| self.failed(tensor, error))?);
            elapsed += begin.elapsed();
            self.progress.advance(window.len() as u64);
        }
        Ok((amax, elapsed))
    }

    fn quantize_piece(
        &mut self,
        tensor: &Tensor,
        scheme: Scheme,
        [rows, columns]: [u64; 2],
        window: &Window,
    ) -> Result<QuantizedRows, JobError> {
        let output = self.device.quantize(scheme, rows as usize, columns as usize, elements(tensor, window).elements());
        let output = output.map_err(|error| self.failed(tensor, error))?;
        let (format, sizes) = (scheme.format(), (output.data.len() as u64, output.scales.len() as u64));
        if sizes != (format.data_bytes(rows * columns), rows * columns / format.block()) {
            let text = format!("returned {} bytes of codes and {} scales for {rows}x{columns} elements", sizes.0, sizes.1);
            return Err(self.failed(tensor, DeviceError::new(text)));
        }
        Ok(output)
    }

    fn failed(&self, tensor: &Tensor, error: DeviceError) -> JobError {
        JobError::Device { tensor: tensor.name.clone(), device: self.device.name(), error }
    }

    fn send(&self, step: Step<'a>) -> Result<(), Halt> {
        self.sink.send(step).map_err(|_| Halt::SinkFailed)
    }
}

/// The elements of a piece of a tensor that is quantized.
fn elements<'a>(tensor: &Tensor, window: &'a Window) -> AlignedElements<'a> {
    AlignedElements::new(tensor.dtype, window).expect("the plan quantizes f32, f16 and bf16")
}

/// The half that measures and writes.
struct Sink {
    writer: Writer,
    fidelity: Vec<Fidelity>,
}

impl Sink {
    fn drain(mut self, steps: Receiver<Step<'_>>, plan: &Plan<'_>) -> Result<(Writer, Vec<Fidelity>), WriteError> {
        for step in steps {
            match step {
                Step::Copy(name, window) => self.writer.append(name, &window)?,
                Step::Amax(name, amax) => {
                    if plan.format == Format::Nvfp4 {
                        self.writer.append(&global_scale_name(name), &encode_scale(amax).to_le_bytes())?;
                    }
                    self.writer.append(&amax_name(name), &amax.to_le_bytes())?;
                }
                Step::Quantized(index, window, output) => {
                    let tensor = plan.actions[index].0;
                    self.fidelity[index].add_piece(plan.format, elements(tensor, &window).elements(), &output);
                    self.writer.append(&data_name(&tensor.name, plan.format), &output.data)?;
                    self.writer.append(&scale_name(&tensor.name), &output.scales)?;
                }
            }
        }
        Ok((self.writer, self.fidelity))
    }
}

fn outcomes(plan: &Plan<'_>, results: Vec<SourceResult>, fidelity: Vec<Fidelity>) -> Vec<TensorOutcome> {
    let tensors = plan.actions.iter().zip(results).zip(fidelity);
    let outcomes = tensors.map(|((&(tensor, action), result), fidelity)| {
        let result = match action {
            Action::PassThrough(reason) => TensorResult::PassedThrough(reason),
            Action::Quantize { .. } => {
                let (amax, elapsed) = result.unwrap_or_default();
                TensorResult::Quantized { amax, fidelity, elapsed }
            }
        };
        TensorOutcome { tensor: tensor.clone(), result }
    });
    outcomes.collect()
}
