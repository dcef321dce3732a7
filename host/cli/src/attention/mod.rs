//! `oxtile attention`: queries, keys and values in, the result and its log-sum-exp out, and the gradients if asked for.

mod plan;
mod report;

use std::{collections::BTreeMap, path::Path, time::Instant};

use half::{bf16, f16};
use oxtile::{
    Buffer, HostElement, Kind, Runtime, Stream,
    attention::{Attention, AttentionBackward, BackwardElement, BackwardInputs, Gradients, Inputs, Order, Outputs, Padding, Sequences},
};

pub use plan::{Plan, PlanError};
pub use report::Report;

use crate::{
    Error, arguments,
    safetensors::{Checkpoint, Dtype, ReadError, Tensor, WriteError, Writer},
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
    /// The output.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Attends as a request says.
///
/// # Errors
/// [`JobError`]; [`Error::Device`] if the device asked for is not there.
pub fn run(request: &arguments::Attention) -> Result<Report, Error> {
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
    Ok(job(request, &runtime, &stream, reason.unwrap_or(name))?)
}

fn job(request: &arguments::Attention, runtime: &Runtime, stream: &Stream, device: String) -> Result<Report, JobError> {
    let begin = Instant::now();
    let input = Checkpoint::open(&request.input)?;
    let at = |error| JobError::Plan { file: request.input.display().to_string(), error };
    let mut plan = Plan::new(&input, request).map_err(at)?;
    let arrays = plan.arrays.iter().map(|tensor| read(&input, tensor)).collect::<Result<Vec<Vec<u32>>, _>>()?;
    plan.check_arrays(&arrays).map_err(at)?;
    let (kernels, tensors) = match plan.q.dtype {
        Dtype::F16 => attend::<f16>(runtime, stream, &input, &plan, &arrays)?,
        _ => attend::<bf16>(runtime, stream, &input, &plan, &arrays)?,
    };
    write(&request.output, &request.input, &plan, &tensors)?;
    input.verify_unchanged()?;
    plan.arrays.clear();
    Ok(Report {
        device,
        kernels,
        input: request.input.clone(),
        output: request.output.clone(),
        plan,
        seconds: begin.elapsed().as_secs_f64(),
    })
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

/// The whole of a tensor.
fn read<N: Number>(input: &Checkpoint, tensor: &Tensor) -> Result<Vec<N>, ReadError> {
    if tensor.bytes() == 0 {
        return Ok(Vec::new());
    }
    let window = input.window(tensor, 0..tensor.bytes())?;
    Ok(window.chunks_exact(N::BYTES).map(N::from_bytes).collect())
}

fn bytes_of<N: Number>(numbers: &[N]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(numbers.len() * N::BYTES);
    numbers.iter().for_each(|number| number.push(&mut bytes));
    bytes
}

/// The kernels that were taken, and why; and the bytes of [`Plan::outputs`]. Rows that belong to no sequence are zeros, and -inf in the
/// log-sum-exp.
fn attend<H>(
    runtime: &Runtime,
    stream: &Stream,
    input: &Checkpoint,
    plan: &Plan,
    arrays: &[Vec<u32>],
) -> Result<(Vec<String>, Vec<Vec<u8>>), JobError>
where
    H: Number + HostElement<Device: BackwardElement>,
{
    let upload = |tensor| -> Result<Buffer<H::Device>, JobError> { Ok(Buffer::from_slice(stream, &read::<H>(input, tensor)?)?) };
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
    attention.forward(stream, inputs(), Outputs::new(out.view_mut(), log_sum_exp.view_mut()))?;
    let download = |buffer: &Buffer<H::Device>| -> Result<Vec<u8>, JobError> { Ok(bytes_of::<H>(&buffer.to_vec_as(stream)?)) };
    let mut tensors = vec![download(&out)?, bytes_of(&log_sum_exp.to_vec(stream)?)];
    if let Some((backward, grad_out)) = backward {
        let zeros = |length: u64| Buffer::<H::Device>::zeros(stream, length);
        let (mut dq, mut dk, mut dv) = (zeros(q.len())?, zeros(k.len())?, zeros(v.len())?);
        let inputs =
            BackwardInputs { forward: inputs(), out: out.view().into(), log_sum_exp: log_sum_exp.view(), grad_out: grad_out.view().into() };
        backward.backward(stream, inputs, Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut()))?;
        for gradient in [&dq, &dk, &dv] {
            tensors.push(download(gradient)?);
        }
    }
    Ok((kernels, tensors))
}

fn write(path: &Path, input: &Path, plan: &Plan, tensors: &[Vec<u8>]) -> Result<(), WriteError> {
    let specs = plan.outputs();
    let mut writer = Writer::create(path, Some(input), &specs, &BTreeMap::new())?;
    for (spec, bytes) in specs.iter().zip(tensors) {
        writer.append(&spec.name, bytes)?;
    }
    writer.finish()
}
