//! The job itself: the device quantizes one piece while the host measures and writes the one before.

use std::{
    path::Path,
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
    time::{Duration, Instant},
};

use oxtile::quantize::nvfp4::encode_scale;

use super::{
    DeviceError, Fidelity, Names, Piece, Plan, PlanError, QuantizeDevice, Quantized, Recipe, Side,
    device::AlignedElements,
    direction_name,
    plan::{Action, Reason},
};
use crate::{
    output::Completed,
    progress::Progress,
    safetensors::{Checkpoint, ReadError, Runs, Tensor, TensorSink, Window, WriteError, Writer},
    text::printable,
};

/// Elements that a device gets at a time: enough to fill it, few enough that memory stays small and Ctrl-C quick.
const PIECE_ELEMENTS: u64 = 1 << 20;

/// The same where the output is transposed: long enough that each write has hundreds of bytes.
const TRANSPOSED_PIECE_ELEMENTS: u64 = 1 << 22;

/// Bytes that an element of a piece takes: as it is read, as F32, and as codes, on the host and on its way to the device, and in the piece before.
const PIECE_MEMORY: u64 = 24;

/// Rows of a piece where columns are quantized: whole blocks of every format.
const BLOCK_ROWS: u64 = 128;

/// Bytes of a passed-through tensor that are copied at a time.
const COPY_BYTES: u64 = 8 << 20;

/// What a job did.
#[derive(Debug)]
pub struct Outcome {
    /// What the tensors were quantized to, and how.
    pub recipe: Recipe,
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
        /// Its directions, with the largest magnitude that each was cast with (NaN elements do not count) and what it cost.
        sides: Vec<(Side, f32, Fidelity)>,
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
    /// Rows too wide for the memory that there is.
    #[error(
        "tensor `{}`: its rows are so wide that a piece takes {} of memory, which is not to be had; raise the limit (ulimit -v), or quantize it by rows \
         (--direction row), whose pieces are smaller", printable(.tensor), crate::text::bytes(*.bytes)
    )]
    Memory {
        /// The tensor at hand.
        tensor: String,
        /// What a piece takes.
        bytes: u64,
    },
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

/// As [`complete`], with its name for the output.
///
/// # Errors
/// As [`complete`].
pub fn run(
    input: &Path,
    output: &Path,
    recipe: Recipe,
    device: &mut dyn QuantizeDevice,
    progress: &mut Progress,
) -> Result<Outcome, JobError> {
    let (outcome, completed) = complete(input, output, recipe, device, progress)?;
    completed.publish()?;
    Ok(outcome)
}

/// Quantizes the checkpoint at `input` into a new one that is to be `output`.
///
/// At most three pieces of 2^20 elements, or of 2^22 where the output is transposed (more where 128 rows have more), are in
/// memory at a time, and one tensor's scales where they are interleaved.
///
/// # Errors
/// If the input cannot be read or laid out, the device fails or the output cannot be written; no output is left then.
pub fn complete(
    input: &Path,
    output: &Path,
    recipe: Recipe,
    device: &mut dyn QuantizeDevice,
    progress: &mut Progress,
) -> Result<(Outcome, Completed), JobError> {
    let begin = Instant::now();
    let checkpoint = Checkpoint::open(input)?;
    let plan = Plan::new(&checkpoint, recipe)?;
    let writer = Writer::create(output, &[input], &plan.outputs, &plan.metadata)?;
    let output_bytes = writer.bytes();
    let (writer, tensors) = run_into(&checkpoint, &plan, writer, device, progress)?;
    let completed = writer.complete()?;
    Ok((Outcome { recipe, tensors, input_bytes: checkpoint.bytes(), output_bytes, elapsed: begin.elapsed() }, completed))
}

/// Quantizes the checkpoint of a plan into a sink, which is returned with what became of each tensor. Memory is as with [`run`].
///
/// # Errors
/// If the input cannot be read or the device or the sink fails.
pub fn run_into<S: TensorSink + Send>(
    checkpoint: &Checkpoint,
    plan: &Plan<'_>,
    sink: S,
    device: &mut dyn QuantizeDevice,
    progress: &mut Progress,
) -> Result<(S, Vec<TensorOutcome>), JobError> {
    let recipe = plan.recipe;
    progress.expect(plan.actions.iter().map(|(tensor, action)| tensor.bytes() * action.passes(&recipe)).sum());

    let (send, receive) = sync_channel(1);
    thread::scope(|scope| {
        let sink = Sink { sink, recipe, fidelity: vec![Default::default(); plan.actions.len()] };
        let sink = scope.spawn(|| sink.drain(receive, plan));
        let fed = Source { checkpoint, recipe, device, progress, sink: send }.feed(plan);
        let drained = sink.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let (sink, fidelity) = drained?;
        let results = fed.map_err(|halt| match halt {
            Halt::Failed(error) => error,
            Halt::SinkFailed => unreachable!("a sink that hangs up has returned its error"),
        })?;
        checkpoint.verify_unchanged()?;
        Ok((sink, outcomes(plan, results, fidelity)))
    })
}

/// One step of the output, on its way from the device to the file.
enum Step<'a> {
    /// Rows from this one on of the tensor at this index of the plan, what the device made of them, and with which amaxes.
    Quantized(usize, u64, Window, Quantized, [f32; 2]),
    /// Bytes that are next in the output's tensor of this name.
    Append(String, Vec<u8>),
    /// A piece that is copied.
    Copy(&'a str, Window),
}

/// The half that reads and keeps the device busy.
struct Source<'a> {
    checkpoint: &'a Checkpoint,
    recipe: Recipe,
    device: &'a mut dyn QuantizeDevice,
    progress: &'a mut Progress,
    sink: SyncSender<Step<'a>>,
}

/// A tensor's amaxes and device time; `None` for one that was copied.
type SourceResult = Option<([f32; 2], Duration)>;

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
                Action::Quantize(shape) => Some(self.quantize(index, tensor, shape)?),
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

    fn quantize(&mut self, index: usize, tensor: &'a Tensor, shape: [u64; 2]) -> Result<([f32; 2], Duration), Halt> {
        let [rows, columns] = shape;
        let row_bytes = columns * tensor.dtype.bits() / 8;
        let piece_bytes = piece_rows(&self.recipe, columns) * row_bytes;
        check_memory(tensor, piece_bytes / row_bytes.max(1) * columns)?;
        let (mut amax, mut elapsed) = ([0f32; 2], Duration::ZERO);
        if self.recipe.format.has_tensor_amax() {
            (amax, elapsed) = self.amax(tensor, columns, piece_bytes)?;
        }
        let sides: Vec<_> = Side::each(&self.recipe, shape).collect();
        let mut compact = sides.iter().map(|_| Vec::new()).collect::<Vec<_>>();
        let mut row = 0;
        for (number, window) in self.checkpoint.windows(tensor, piece_bytes).enumerate() {
            let window = window?;
            let piece = Piece { shape: [window.len() as u64 / row_bytes, columns], amax, sequence: (index as u64) << 32 | number as u64 };
            let begin = Instant::now();
            let output = self.quantize_piece(tensor, &piece, &window)?;
            elapsed += begin.elapsed();
            if !self.recipe.format.has_tensor_amax() {
                // `f32::max` drops a NaN, as the kernel does.
                amax = amax.map(|amax| amax.max(output.amax));
            }
            for (side, compact) in sides.iter().zip(&mut compact).filter(|(side, _)| side.interleave) {
                keep_scales(side, row, piece.shape[0], &output, compact);
            }
            self.progress.advance(window.len() as u64);
            self.send(Step::Quantized(index, row, window, output, piece.amax))?;
            row += piece.shape[0];
        }
        debug_assert_eq!(row, rows);
        for (side, compact) in sides.iter().zip(compact) {
            let names = Names::of(&tensor.name, side.format, side.direction);
            if side.interleave {
                let begin = Instant::now();
                let interleaved = self.device.interleave(side, &compact).map_err(|error| self.failed(tensor, error))?;
                elapsed += begin.elapsed();
                self.send(Step::Append(names.scales, interleaved))?;
            }
            let amax = amax[side.direction as usize];
            if let Some(name) = names.global_scale {
                self.send(Step::Append(name, encode_scale(amax).to_le_bytes().into()))?;
            }
            self.send(Step::Append(names.amax, amax.to_le_bytes().into()))?;
        }
        Ok((amax, elapsed))
    }

    /// The largest magnitudes of a whole tensor, and the device's time for them.
    fn amax(&mut self, tensor: &Tensor, columns: u64, piece_bytes: u64) -> Result<([f32; 2], Duration), Halt> {
        let (mut amax, mut elapsed) = ([0f32; 2], Duration::ZERO);
        for window in self.checkpoint.windows(tensor, piece_bytes) {
            let window = window?;
            let rows = window.len() as u64 / (columns * tensor.dtype.bits() / 8);
            let begin = Instant::now();
            let piece = self.device.amax(&self.recipe, [rows, columns], elements(tensor, &window).elements());
            let piece = piece.map_err(|error| self.failed(tensor, error))?;
            amax = std::array::from_fn(|i| amax[i].max(piece[i]));
            elapsed += begin.elapsed();
            self.progress.advance(window.len() as u64);
        }
        Ok((amax, elapsed))
    }

    fn quantize_piece(&mut self, tensor: &Tensor, piece: &Piece, window: &Window) -> Result<Quantized, JobError> {
        let output = self.device.quantize(&self.recipe, piece, elements(tensor, window).elements());
        let output = output.map_err(|error| self.failed(tensor, error))?;
        for side in Side::each(&self.recipe, piece.shape) {
            let ([rows, columns], direction) = (piece.shape, direction_name(side.direction));
            let Some(codes) = &output.sides[side.direction as usize] else {
                return Err(
                    self.failed(tensor, DeviceError::new(format!("returned nothing by {direction}s for {rows}x{columns} elements")))
                );
            };
            let sizes = (codes.data.len() as u64, codes.scales.len() as u64 / side.scale_bytes());
            if sizes != (side.codes().iter().product(), side.compact_scales().iter().product()) {
                let text = format!("returned {} bytes of codes and {} scales for {rows}x{columns} elements", sizes.0, sizes.1);
                return Err(self.failed(tensor, DeviceError::new(text)));
            }
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

/// Refuses a tensor whose pieces do not fit memory: those of wide rows are as large as the rows. An allocation that fails later would end the process.
fn check_memory(tensor: &Tensor, piece_elements: u64) -> Result<(), JobError> {
    let elements = piece_elements.min(tensor.elements());
    if elements <= TRANSPOSED_PIECE_ELEMENTS {
        return Ok(());
    }
    let bytes = elements.saturating_mul(PIECE_MEMORY);
    let is_there = usize::try_from(bytes).is_ok_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
    if is_there { Ok(()) } else { Err(JobError::Memory { tensor: tensor.name.clone(), bytes }) }
}

/// Rows that a device gets at a time.
fn piece_rows(recipe: &Recipe, columns: u64) -> u64 {
    let mut directions = recipe.directions.each().iter();
    let rows = |elements: u64| (elements / columns).max(1);
    if directions.clone().any(|&direction| recipe.format.shapes().is_transposed(direction)) {
        rows(TRANSPOSED_PIECE_ELEMENTS).next_multiple_of(BLOCK_ROWS)
    } else if recipe.format.is_square() || directions.any(|&direction| direction == super::Direction::Columns) {
        rows(PIECE_ELEMENTS).next_multiple_of(BLOCK_ROWS)
    } else {
        rows(PIECE_ELEMENTS)
    }
}

/// Puts the scales of a piece, `count` rows from `row` on, to those of the whole matrix.
fn keep_scales(side: &Side, row: u64, count: u64, output: &Quantized, compact: &mut Vec<u8>) {
    let Some(codes) = &output.sides[side.direction as usize] else { return };
    compact.resize((side.compact_scales().iter().product::<u64>() * side.scale_bytes()) as usize, 0);
    let Runs { offset, bytes, stride } = side.scale_runs(row, count);
    for (i, run) in codes.scales.chunks(bytes as usize).enumerate() {
        compact[offset as usize + i * stride as usize..][..run.len()].copy_from_slice(run);
    }
}

/// The elements of a piece of a tensor that is quantized.
fn elements<'a>(tensor: &Tensor, window: &'a Window) -> AlignedElements<'a> {
    AlignedElements::new(tensor.dtype, window).expect("the plan quantizes f32, f16 and bf16")
}

/// The half that measures and writes.
struct Sink<S> {
    sink: S,
    recipe: Recipe,
    /// A tensor's, by direction.
    fidelity: Vec<[Fidelity; 2]>,
}

impl<S: TensorSink> Sink<S> {
    fn drain(mut self, steps: Receiver<Step<'_>>, plan: &Plan<'_>) -> Result<(S, Vec<[Fidelity; 2]>), WriteError> {
        for step in steps {
            match step {
                Step::Copy(name, window) => self.sink.append(name, &window)?,
                Step::Append(name, bytes) => self.sink.append(&name, &bytes)?,
                Step::Quantized(index, row, window, output, amax) => self.put(plan, index, row, &window, &output, amax)?,
            }
        }
        Ok((self.sink, self.fidelity))
    }

    fn put(
        &mut self,
        plan: &Plan<'_>,
        index: usize,
        row: u64,
        window: &Window,
        output: &Quantized,
        amax: [f32; 2],
    ) -> Result<(), WriteError> {
        let (tensor, Action::Quantize(shape)) = plan.actions[index] else { unreachable!("only what the plan quantizes comes as codes") };
        let input = elements(tensor, window).elements().to_f32();
        let count = input.len() as u64 / shape[1];
        for (side, codes) in
            Side::each(&self.recipe, shape).filter_map(|side| Some((side, output.sides[side.direction as usize].as_ref()?)))
        {
            let piece = Side { shape: [count, shape[1]], ..side };
            let direction = side.direction as usize;
            let hadamard = self.recipe.hadamard && side.is_transposed();
            self.fidelity[index][direction].add(&piece, hadamard, &input, codes, amax[direction]);
            let names = Names::of(&tensor.name, side.format, side.direction);
            self.sink.write_runs(&names.codes, side.code_runs(row, count), &codes.data)?;
            // One scale for the tensor comes with every piece, the same.
            let is_new = side.format.shapes().block.is_some() || row == 0;
            if is_new && !side.interleave {
                self.sink.write_runs(&names.scales, side.scale_runs(row, count), &codes.scales)?;
            }
        }
        Ok(())
    }
}

fn outcomes(plan: &Plan<'_>, results: Vec<SourceResult>, fidelity: Vec<[Fidelity; 2]>) -> Vec<TensorOutcome> {
    let tensors = plan.actions.iter().zip(results).zip(fidelity);
    let outcomes = tensors.map(|((&(tensor, action), result), fidelity)| {
        let result = match action {
            Action::PassThrough(reason) => TensorResult::PassedThrough(reason),
            Action::Quantize(shape) => {
                let (amax, elapsed) = result.unwrap_or_default();
                let of = |side: Side| (side, amax[side.direction as usize], fidelity[side.direction as usize]);
                TensorResult::Quantized { sides: Side::each(&plan.recipe, shape).map(of).collect(), elapsed }
            }
        };
        TensorOutcome { tensor: tensor.clone(), result }
    });
    outcomes.collect()
}
