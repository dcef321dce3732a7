//! `oxtile shard`: a checkpoint in, a file a rank out.
//!
//! [`layout`] decides from the header what each file holds. Tensors are copied, or quantized by the job of [`quantize`], into
//! [`files`], which cuts the bytes of each tensor as its [`division`] says. `oxtile join` needs the files alone: each has
//! [`metadata`] that states what of which whole it is.
//!
//! | file | what it holds |
//! |---|---|
//! | `format` | what becomes of the tensors, and the rows of each rank |
//! | `division` | how the bytes of one tensor are divided |
//! | `layout` | what the files hold, from the header alone |
//! | `metadata` | what a shard states about itself |
//! | `files` | the files of all shards, as one place for the tensors of the whole |
//! | `plan`, `order` | the memory and traffic of weights that are gathered on demand; the order in which a model uses them |
//! | `report` | the outcome as JSON or as a table |

pub mod division;
pub mod files;
pub mod format;
pub mod layout;
pub mod metadata;
mod order;
pub mod plan;
pub mod report;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

pub use division::{By, Cuts, Division};
pub use files::ShardFiles;
pub use format::ShardFormat;
pub use layout::Layout;
pub use order::Embedding;
pub use plan::Gathers;
pub use report::Report;

use crate::{
    Error, arguments,
    output::Completed,
    progress::Progress,
    quantize::{
        self, PlanError,
        device::AlignedElements,
        job::{JobError, TensorOutcome},
        matrix,
        plan::refuse_made,
        report::DeviceChoice,
        runtime,
    },
    safetensors::{Checkpoint, Index, Tensor, TensorSink, TensorSpec, WriteError},
    text::path,
};

/// Bytes of a tensor that are copied at a time.
const COPY_BYTES: u64 = 8 << 20;

/// A checkpoint that could not be divided; no output is left.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// The input, or the device.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The output.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// More files than the process may open.
    #[error("{error}; {ranks} ranks are as many files at a time: raise `ulimit -n`")]
    Files {
        /// The file that could not be created.
        error: WriteError,
        /// How many there are.
        ranks: u32,
    },
    /// A file that would be replaced, and is no shard of the same tensors.
    #[error("{}: is there, and is no shard of the same tensors: choose another --output-prefix, or remove it", path(.0))]
    Taken(PathBuf),
    /// An option about an embedding that is not there.
    #[error("--embedding {0}: no weight has the name of an embedding of tokens (a word with `embed`, or `wte`): leave the option out")]
    NoEmbedding(&'static str),
    /// The index of several files.
    #[error(
        "{}: is the index of {parts} files: shard each of them, with an --output-prefix of its own; --plan reads the index", path(.file)
    )]
    Index {
        /// The index.
        file: PathBuf,
        /// How many files it names.
        parts: usize,
    },
    /// Weights whose sizes are too large to add up.
    #[error(transparent)]
    Slots(#[from] oxtile::Error),
}

impl From<PlanError> for ShardError {
    fn from(error: PlanError) -> Self {
        Self::Job(error.into())
    }
}

impl From<crate::safetensors::ReadError> for ShardError {
    fn from(error: crate::safetensors::ReadError) -> Self {
        Self::Job(error.into())
    }
}

/// What was written.
#[derive(Debug)]
pub struct Outcome {
    /// The file of each rank, and its bytes.
    pub files: Vec<(PathBuf, u64)>,
    /// The fingerprint of what was divided.
    pub model: String,
    /// What was quantized, and what it cost.
    pub quantized: Vec<TensorOutcome>,
    /// On what.
    pub device: Option<DeviceChoice>,
    /// Wall time of the whole job.
    pub elapsed: Duration,
}

/// Carries out a request, but for the names of the files.
///
/// # Errors
/// A [`ShardError`], or that of the device.
pub fn run(request: &arguments::Shard, progress: &mut Progress) -> Result<(Report, Vec<Completed>), Error> {
    let begin = Instant::now();
    let Some(prefix) = &request.output_prefix else { return Ok((plan(request)?, Vec::new())) };
    if Index::is_named(&request.input) {
        let parts = Index::open(&request.input)?.parts().len();
        return Err(ShardError::Index { file: request.input.clone(), parts }.into());
    }
    let checkpoint = Checkpoint::open(&request.input)?;
    let layout = Layout::new(&checkpoint, request.format, request.directions(), request.world)?;
    let mut device = layout.plan.is_some().then(|| runtime::open(request.device)).transpose()?;
    let files = ShardFiles::create(&layout, prefix, &request.input)?;
    let paths = (0..request.world.get()).map(|rank| files::path(prefix, rank, request.world.get()));
    let sizes: Vec<_> = paths.zip(files.bytes()).collect();
    let (files, quantized) = match (&layout.plan, &mut device) {
        (Some(plan), Some((device, _))) => quantize::job::run_into(&checkpoint, plan, files, device, progress).map_err(ShardError::from)?,
        _ => (copy(&checkpoint, &layout, files, progress)?, Vec::new()),
    };
    let (model, completed) = files.complete().map_err(ShardError::from)?;
    let device = device.map(|(_, choice)| choice);
    let outcome = Outcome { files: sizes, model, quantized, device, elapsed: begin.elapsed() };
    Ok((Report::written(request, &checkpoint, &layout, outcome), completed))
}

/// Plans how ranks would hold the weights of a file, or of all files of an index.
fn plan(request: &arguments::Shard) -> Result<Report, ShardError> {
    let (index, file);
    let parts = if Index::is_named(&request.input) {
        index = Index::open(&request.input)?;
        index.parts()
    } else {
        file = Checkpoint::open(&request.input)?;
        std::slice::from_ref(&file)
    };
    parts.iter().try_for_each(|part| refuse_made(part, request.format == ShardFormat::Keep))?;
    let gathers = Gathers::new(parts, request)?;
    Ok(Report::planned(request, parts.iter().map(Checkpoint::bytes).sum(), gathers))
}

/// Copies all tensors, rounded where the layout has another type.
fn copy(checkpoint: &Checkpoint, layout: &Layout<'_>, mut files: ShardFiles, progress: &mut Progress) -> Result<ShardFiles, ShardError> {
    progress.expect(checkpoint.tensors().iter().map(Tensor::bytes).sum());
    for (tensor, (spec, _)) in checkpoint.tensors().iter().zip(&layout.tensors) {
        progress.start(&tensor.name);
        for window in checkpoint.windows(tensor, COPY_BYTES) {
            let window = window?;
            match rounded(tensor, spec, &window) {
                Some(rounded) => files.append(&tensor.name, &rounded)?,
                None => files.append(&tensor.name, &window)?,
            }
            progress.advance(window.len() as u64);
        }
    }
    progress.clear();
    checkpoint.verify_unchanged()?;
    Ok(files)
}

/// Elements in the type that the layout has; none where it is their own.
fn rounded(tensor: &Tensor, spec: &TensorSpec, bytes: &[u8]) -> Option<Vec<u8>> {
    let elements = AlignedElements::new(tensor.dtype, bytes).filter(|_| tensor.dtype != spec.dtype)?;
    Some(matrix::to_bytes(&elements.elements().to_f32(), spec.dtype))
}
