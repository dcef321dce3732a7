//! `oxtile attention`: queries, keys and values in, the result and its log-sum-exp out, and the gradients if asked for.
//!
//! | file | what it holds |
//! |---|---|
//! | `plan` | the configuration that a file asks for |
//! | `parts` | the rows of a file that each rank has |
//! | `seat` | the ranks that a process drives |
//! | `context` | attention by ranks that share the sequences |
//! | `report` | what was done |
//! | `tests` | ranks that are apart |

mod context;
mod parts;
mod plan;
mod report;
mod seat;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, path::Path, time::Instant};

use half::{bf16, f16};
use oxtile::{
    Buffer, HostElement, Kind, Runtime, Stream,
    attention::{Attention, AttentionBackward, BackwardElement, BackwardInputs, Gradients, Inputs, Order, Outputs, Padding, Sequences},
    comm::{
        Rank, WorldSize,
        bootstrap::{BootstrapError, Environment},
    },
    context_parallel::Schedule,
};

use parts::Parts;
pub use plan::{Plan, PlanError};
pub use report::{Passes, Report};
use seat::{Link, Needs, Seat};

use crate::{
    Error, arguments,
    output::Completed,
    progress::Progress,
    safetensors::{Checkpoint, Dtype, ReadError, Tensor, WriteError, Writer},
    text::path,
};

/// A job that failed; no output is left.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The input.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// What the input holds.
    #[error("{file}: {error}")]
    Plan {
        /// The file.
        file: String,
        /// What is wrong.
        error: PlanError,
    },
    /// The device, or a combination of sizes and options that no kernel has.
    #[error(transparent)]
    Device(#[from] oxtile::Error),
    /// The same, of a file.
    #[error("{file}: {error}")]
    Problem {
        /// The file.
        file: String,
        /// What is wrong.
        error: Box<oxtile::Error>,
    },
    /// The output.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// Nothing says how many ranks there are.
    #[error(
        "--context-parallel takes ranks, and no launcher has started this process: give --ranks RANKS --device emulated, or start a rank a GPU by \
         oxtile launch -n RANKS -- oxtile attention ..."
    )]
    NoRanks,
    /// A rank of a launcher that is to play all ranks.
    #[error("--ranks plays all ranks in one process, and a launcher made this one {rank} of {world}: leave out --ranks, or the launcher")]
    Ranks {
        /// The launcher's.
        rank: Rank,
        /// How many it started.
        world: WorldSize,
    },
    /// A rank of a launcher without a GPU.
    #[error(
        "{rank} of {world}: {why}; ranks that a launcher starts take a GPU each, and on the emulator one process plays all: leave out the launcher, and give \
         --ranks {} --device emulated", .world.get()
    )]
    NoGpu {
        /// The rank.
        rank: Rank,
        /// How many there are.
        world: WorldSize,
        /// Why it has none.
        why: String,
    },
    /// Groups that do not make up the world.
    #[error("--context-parallel {schedule} on {world}: the neighbours that trade heads divide the ranks, and are one of {}", divisors(*.world))]
    Neighbours {
        /// What was asked for.
        schedule: Schedule,
        /// How many ranks there are.
        world: WorldSize,
    },
}

fn divisors(world: WorldSize) -> String {
    let divisors: Vec<_> = (1..=world.get()).filter(|size| world.get().is_multiple_of(*size)).map(|size| size.to_string()).collect();
    divisors.join(", ")
}

/// What was done, and the output, which lacks its name.
pub type Done = (Report, Completed);

/// Attends as a request says. `None` where another rank writes the output.
///
/// # Errors
/// [`JobError`]; [`Error::Device`] if the device asked for is not there.
pub fn run(request: &arguments::Attention, progress: &mut Progress) -> Result<Option<Done>, Error> {
    let done = match request.context_parallel {
        Some(schedule) => run_ranks(request, schedule, progress).map_err(Error::from),
        None => run_alone(request, progress),
    };
    done.map_err(|error| match error {
        Error::Attention(JobError::Device(error)) => JobError::Problem { file: path(&request.input), error: error.into() }.into(),
        other => other,
    })
}

/// Attends on one device.
fn run_alone(request: &arguments::Attention, progress: &mut Progress) -> Result<Option<Done>, Error> {
    let failed = |error| Error::Device { requested: request.device.name(), error };
    let (runtime, reason) = match request.device {
        arguments::Device::Auto => Runtime::auto().map(|choice| (choice.runtime, Some(choice.reason))),
        arguments::Device::Cuda => Runtime::cuda().map(|runtime| (runtime, None)),
        arguments::Device::Emulated => Runtime::emulated_fast(1).map(|runtime| (runtime, None)),
    }
    .map_err(failed)?;
    let device = runtime.device(0).map_err(failed)?;
    let name = if runtime.kind() == Kind::Cuda { device.name().to_owned() } else { "CPU emulator".to_owned() };
    let stream = device.stream().map_err(failed)?;
    let job = Job::open(request)?;
    let (kernels, tensors) = match job.plan.q.dtype {
        Dtype::F16 => attend::<f16>(&runtime, &stream, &job, progress)?,
        _ => attend::<bf16>(&runtime, &stream, &job, progress)?,
    };
    Ok(Some(job.finish(request, reason.unwrap_or(name), kernels, None, &tensors)?))
}

/// Attends by ranks: all of them, or the one that a launcher made this process.
fn run_ranks(request: &arguments::Attention, schedule: Schedule, progress: &mut Progress) -> Result<Option<Done>, JobError> {
    let environment = match Environment::read() {
        Ok(environment) => Some(environment),
        Err(BootstrapError::NoLauncher) => None,
        Err(error) => return Err(oxtile::Error::from(error).into()),
    };
    match (request.ranks, environment) {
        (Some(_), Some(Environment { rank, world, .. })) if world > WorldSize::ONE => Err(JobError::Ranks { rank, world }),
        (Some(world), _) => {
            let (job, parts) = Job::open_shared(request, world)?;
            let needs = Needs::new(parts.context(schedule), world, request.fp8)?;
            let runtime = Runtime::emulated_fast(world.get())?;
            let device = format!("CPU emulator, {world}");
            job.attend(request, &parts, seat::emulated(&runtime, needs)?, schedule, device, progress)
        }
        (None, Some(environment)) => {
            let Environment { rank, world, local_rank, .. } = environment;
            let no_gpu = |why: String| JobError::NoGpu { rank, world, why };
            if request.device == arguments::Device::Emulated {
                return Err(no_gpu("it is told --device emulated".to_owned()));
            }
            let (job, parts) = Job::open_shared(request, world)?;
            let needs = Needs::new(parts.context(schedule), world, request.fp8)?;
            let runtime = Runtime::cuda().map_err(|error| no_gpu(error.to_string()))?;
            let device = runtime.device(local_rank).map_err(|error| no_gpu(error.to_string()))?;
            let name = format!("{}, {world}", device.name());
            job.attend(request, &parts, vec![seat::launched(&device, &environment, needs)?], schedule, name, progress)
        }
        (None, None) => Err(JobError::NoRanks),
    }
}

/// A file, and what it asks for.
struct Job {
    begin: Instant,
    input: Checkpoint,
    plan: Plan,
    /// The numbers of [`Plan::arrays`].
    arrays: Vec<Vec<u32>>,
}

impl Job {
    fn open(request: &arguments::Attention) -> Result<Self, JobError> {
        let begin = Instant::now();
        let input = Checkpoint::open(&request.input)?;
        let at = |error| JobError::Plan { file: path(&request.input), error };
        let plan = Plan::new(&input, request).map_err(at)?;
        let arrays =
            plan.arrays.iter().map(|tensor| read(&input, tensor, &mut Progress::hidden())).collect::<Result<Vec<Vec<u32>>, _>>()?;
        plan.check_arrays(&arrays).map_err(at)?;
        Ok(Self { begin, input, plan, arrays })
    }

    /// The same for ranks that share the sequences.
    fn open_shared(request: &arguments::Attention, world: WorldSize) -> Result<(Self, Parts), JobError> {
        let job = Self::open(request)?;
        let at = |error| JobError::Plan { file: path(&request.input), error };
        let parts = Parts::new(&job.plan, &job.arrays, world).map_err(at)?;
        Ok((job, parts))
    }

    /// Attends by the ranks that this process drives. Rank 0 writes the output.
    fn attend<C: Link>(
        self,
        request: &arguments::Attention,
        parts: &Parts,
        seats: Vec<Seat<C>>,
        schedule: Schedule,
        device: String,
        progress: &mut Progress,
    ) -> Result<Option<Done>, JobError> {
        // Of each tensor the part of these ranks; rank 0 writes all of the output.
        let read = self.plan.input_bytes() / u64::from(parts.world().get()) * seats.len() as u64;
        let written = if seats.iter().any(|seat| seat.rank() == Rank::ZERO) { self.plan.output_bytes() } else { 0 };
        progress.expect(read + written);
        let joined = match self.plan.q.dtype {
            Dtype::F16 => context::attend::<f16, C>(&seats, &self.input, &self.plan, parts, schedule, progress)?,
            _ if request.fp8 => context::attend_fp8(&seats, &self.input, &self.plan, parts, schedule, progress)?,
            _ => context::attend::<bf16, C>(&seats, &self.input, &self.plan, parts, schedule, progress)?,
        };
        progress.clear();
        Seat::close_all(seats)?;
        joined.map(|(passes, tensors)| self.finish(request, device, Vec::new(), Some(passes), &tensors)).transpose()
    }

    /// Writes the output, but for its name.
    fn finish(
        mut self,
        request: &arguments::Attention,
        device: String,
        kernels: Vec<String>,
        context_parallel: Option<Passes>,
        tensors: &[Vec<u8>],
    ) -> Result<Done, JobError> {
        self.input.verify_unchanged()?;
        let completed = write(&request.output, &request.input, &self.plan, tensors)?;
        self.plan.arrays.clear();
        let (input, output, seconds) = (request.input.clone(), request.output.clone(), self.begin.elapsed().as_secs_f64());
        Ok((Report { device, kernels, context_parallel, input, output, plan: self.plan, seconds }, completed))
    }
}

/// A number of the file.
trait Number: Sized + Copy {
    const BYTES: usize;
    fn from_bytes(bytes: &[u8]) -> Self;
    fn push(self, bytes: &mut Vec<u8>);
}

macro_rules! numbers {
    ($($t:ty)*) => { $(
        impl Number for $t {
            const BYTES: usize = size_of::<$t>();
            fn from_bytes(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().expect("a number's bytes"))
            }
            fn push(self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_le_bytes());
            }
        }
    )* };
}
numbers! { bf16 f16 f32 u32 }

/// Bytes that are read at a time; a multiple of every number's.
const WINDOW_BYTES: u64 = 8 << 20;

/// The whole of a tensor.
fn read<N: Number>(input: &Checkpoint, tensor: &Tensor, progress: &mut Progress) -> Result<Vec<N>, ReadError> {
    let mut numbers = input.room(tensor.elements())?;
    progress.start(&tensor.name);
    for window in input.windows(tensor, WINDOW_BYTES) {
        let window = window?;
        numbers.extend(window.chunks_exact(N::BYTES).map(N::from_bytes));
        progress.advance(window.len() as u64);
    }
    Ok(numbers)
}

fn numbers_of<N: Number>(bytes: &[u8]) -> Vec<N> {
    bytes.chunks_exact(N::BYTES).map(N::from_bytes).collect()
}

fn bytes_of<N: Number>(numbers: &[N]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(numbers.len() * N::BYTES);
    numbers.iter().for_each(|number| number.push(&mut bytes));
    bytes
}

/// The kernels that were taken, and why; and the bytes of [`Plan::outputs`]. Rows that belong to no sequence are zeros, and -inf in the
/// log-sum-exp.
fn attend<H>(runtime: &Runtime, stream: &Stream, job: &Job, progress: &mut Progress) -> Result<(Vec<String>, Vec<Vec<u8>>), JobError>
where
    H: Number + HostElement<Device: BackwardElement>,
{
    let Job { input, plan, arrays, .. } = job;
    // What is read and what is written; the kernels come between them.
    progress.expect(plan.input_bytes() + plan.output_bytes());
    let mut upload =
        |tensor: &Tensor| -> Result<Buffer<H::Device>, JobError> { Ok(Buffer::from_slice(stream, &read::<H>(input, tensor, progress)?)?) };
    let (q, k, v) = (upload(&plan.q)?, upload(&plan.k)?, upload(&plan.v)?);
    let arrays = arrays.iter().map(|array| Buffer::from_slice(stream, array)).collect::<Result<Vec<Buffer<u32>>, _>>()?;
    let sequences = match &*arrays {
        [q, kv, rest @ ..] => Some(Sequences {
            cu_seqlens_q_padded: rest.first().map(Buffer::view),
            cu_seqlens_kv_padded: rest.get(1).map(Buffer::view),
            // What is made here holds padding already, wherever the sequences lie.
            padding: Padding::Kept,
            ..Sequences::new(q.view(), kv.view())
        }),
        _ => None,
    };
    let (out_elements, rows) = (plan.out_shape().iter().product(), plan.statistics_shape().iter().product::<u64>());
    let mut out = Buffer::<H::Device>::zeros(stream, out_elements)?;
    let mut log_sum_exp = Buffer::from_slice(stream, &vec![f32::NEG_INFINITY; rows as usize])?;
    let inputs = || Inputs { sequences, ..Inputs::new(q.view(), k.view(), v.view()) };
    let attention = Attention::<H::Device>::new(runtime, plan.config)?;
    let mut kernels = vec![attention.choice().to_string()];
    // Before anything runs, so that what has no kernel is refused at once.
    let backward = match &plan.grad_out {
        None => None,
        Some(grad_out) => {
            let backward = AttentionBackward::<H::Device>::new(runtime, plan.config, Order::Deterministic)?;
            kernels.push(backward.choice().to_string());
            Some((backward, upload(grad_out)?))
        }
    };
    progress.wait_for("attention forward");
    attention.forward(stream, inputs(), Outputs::new(out.view_mut(), log_sum_exp.view_mut()))?;
    let download = |buffer: &Buffer<H::Device>, progress: &mut Progress| -> Result<Vec<u8>, JobError> {
        let bytes = bytes_of::<H>(&buffer.to_vec_as(stream)?);
        progress.advance(bytes.len() as u64);
        Ok(bytes)
    };
    let mut tensors = vec![download(&out, progress)?, bytes_of(&log_sum_exp.to_vec(stream)?)];
    progress.advance(tensors[1].len() as u64);
    if let Some((backward, grad_out)) = backward {
        let zeros = |length: u64| Buffer::<H::Device>::zeros(stream, length);
        let (mut dq, mut dk, mut dv) = (zeros(q.len())?, zeros(k.len())?, zeros(v.len())?);
        let inputs =
            BackwardInputs { forward: inputs(), out: out.view().into(), log_sum_exp: log_sum_exp.view(), grad_out: grad_out.view().into() };
        progress.wait_for("attention backward");
        backward.backward(stream, inputs, Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut()))?;
        for gradient in [&dq, &dk, &dv] {
            tensors.push(download(gradient, progress)?);
        }
    }
    progress.clear();
    Ok((kernels, tensors))
}

fn write(output: &Path, input: &Path, plan: &Plan, tensors: &[Vec<u8>]) -> Result<Completed, WriteError> {
    let specs = plan.outputs();
    let mut writer = Writer::create(output, &[input], &specs, &BTreeMap::new())?;
    for (spec, bytes) in specs.iter().zip(tensors) {
        writer.append(&spec.name, bytes)?;
    }
    writer.complete()
}
