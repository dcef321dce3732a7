//! `oxtile join`: the files of `oxtile shard` in, one checkpoint out.
//!
//! [`shards`] holds the files against one another before anything is written: by what their [`metadata`](crate::shard::metadata) states and
//! by their headers. Then the parts of each tensor are copied to their places, window by window, and
//! `digests` holds what was read against what each file states.

mod digests;
mod report;
pub mod shards;

use std::{path::PathBuf, time::Instant};

use digests::Digests;
pub use report::Report;
pub use shards::{Joined, Shards};

use crate::{
    arguments,
    output::Completed,
    progress::Progress,
    safetensors::{Checkpoint, ReadError, TensorSpec, WriteError, Writer},
    shard::metadata::StatedError,
    text::{path, printable},
};

/// Bytes that are copied at a time.
const COPY_BYTES: u64 = 8 << 20;

/// Shards that could not be put together; no output is left.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// A file.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// What a file states about itself.
    #[error("{}: {error}", path(.file))]
    Stated {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        error: StatedError,
    },
    /// Files of different runs.
    #[error("{}: it is a shard of {found}, and {} is one of {expected}: name the files of one model", path(.file), path(.first))]
    Other {
        /// The file.
        file: PathBuf,
        /// The one that it is held against.
        first: PathBuf,
        /// What it is of.
        found: String,
        /// What the other is of.
        expected: String,
    },
    /// One file, named twice.
    #[error("{}: is named twice: name each file once", path(.0))]
    Twice(PathBuf),
    /// Data that is not what was written.
    #[error("{}: its data is not what `oxtile shard` wrote (SHA-256 {found}, and its metadata says {expected}): the file is damaged, shard the checkpoint again", path(.file))]
    Data {
        /// The file.
        file: PathBuf,
        /// The digest of its data.
        found: String,
        /// The one that its metadata states.
        expected: String,
    },
    /// Two files of one rank.
    #[error("{}: it is the shard of rank {rank}, as {} is: name one file of each rank", path(.file), path(.first))]
    SameRank {
        /// The file.
        file: PathBuf,
        /// The other one.
        first: PathBuf,
        /// The rank.
        rank: u32,
    },
    /// Ranks without a file.
    #[error("{}: it is a shard of {ranks} ranks, and {missing}: name the files of all ranks", path(.first))]
    Missing {
        /// A file that is there.
        first: PathBuf,
        /// How many ranks there are.
        ranks: u32,
        /// Which are missing, in words.
        missing: String,
    },
    /// A tensor that does not fit what the files state.
    #[error("{}: tensor `{}` {reason}: the file is damaged or another's, shard the checkpoint again", path(.file), printable(.name))]
    Tensor {
        /// The file.
        file: PathBuf,
        /// The tensor's name.
        name: String,
        /// What is found, and what was expected.
        reason: String,
    },
    /// The output.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Carries out a request, but for the name of the file.
///
/// # Errors
/// If a file cannot be read, the files do not belong together, or the output cannot be written.
pub fn run(request: &arguments::Join, progress: &mut Progress) -> Result<(Report, Completed), JoinError> {
    let begin = Instant::now();
    let shards = Shards::open(&request.inputs)?;
    let joined = shards.check()?;
    let inputs: Vec<_> = request.inputs.iter().map(PathBuf::as_path).collect();
    let mut writer = match shards.header(&joined)? {
        Some((text, header)) => Writer::with_header(&request.output, &inputs, &text, &header)?,
        None => {
            let specs: Vec<TensorSpec> = joined.iter().map(|joined| joined.spec.clone()).collect();
            Writer::create(&request.output, &inputs, &specs, shards.strings())?
        }
    };
    let mut data = Digests::of(&shards);
    progress.expect(shards.files().map(Checkpoint::bytes).sum());
    for tensor in &joined {
        progress.start(&tensor.spec.name);
        match tensor.cuts.is_whole() {
            true => copy_whole(&shards, tensor, &mut writer, &mut data, progress)?,
            false => copy_parts(&shards, tensor, &mut writer, &mut data, progress)?,
        }
    }
    progress.clear();
    shards.files().try_for_each(Checkpoint::verify_unchanged)?;
    data.check(&shards)?;
    let output_bytes = writer.bytes();
    let completed = writer.complete()?;
    Ok((Report::new(request, &shards, &joined, output_bytes, begin.elapsed()), completed))
}

/// Copies a tensor that every file has, and holds the files against the first.
fn copy_whole(
    shards: &Shards,
    joined: &Joined<'_>,
    writer: &mut Writer,
    data: &mut Digests,
    progress: &mut Progress,
) -> Result<(), JoinError> {
    let ranks = || shards.files().zip(&joined.parts);
    let Some((first, part)) = ranks().next() else { return Ok(()) };
    for (number, window) in first.windows(part, COPY_BYTES).enumerate() {
        let window = window?;
        let start = number as u64 * COPY_BYTES;
        for (rank, (file, part)) in ranks().enumerate() {
            let other = file.window(part, start..start + window.len() as u64)?;
            if *other != *window {
                let reason = format!("differs from that of {}, where all ranks have the same", first.path().display());
                return Err(shards::tensor_error(file, &joined.spec.name, reason));
            }
            data.read(rank, &other);
            progress.advance(other.len() as u64);
        }
        writer.append(&joined.spec.name, &window)?;
    }
    Ok(())
}

/// Copies the parts of a tensor to their places.
fn copy_parts(
    shards: &Shards,
    joined: &Joined<'_>,
    writer: &mut Writer,
    data: &mut Digests,
    progress: &mut Progress,
) -> Result<(), JoinError> {
    for (rank, (file, part)) in shards.files().zip(&joined.parts).enumerate() {
        for (range, runs) in joined.cuts.windows(rank, part.bytes(), COPY_BYTES) {
            let window = file.window(part, range)?;
            data.read(rank, &window);
            writer.write_runs(&joined.spec.name, runs, &window)?;
            progress.advance(window.len() as u64);
        }
    }
    Ok(())
}
