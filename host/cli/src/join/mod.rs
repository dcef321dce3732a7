//! `oxtile join`: the files of `oxtile shard` in, one checkpoint out.
//!
//! [`shards`] holds the files against one another before anything is written: by what their [`metadata`](crate::shard::metadata) states and
//! by their headers. Then the parts of each tensor are copied to their places, window by window.

mod report;
pub mod shards;

use std::{path::PathBuf, time::Instant};

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
    #[error("{}: it is a shard of {ranks} ranks, and {missing} missing: name the files of all ranks", path(.first))]
    Missing {
        /// A file that is there.
        first: PathBuf,
        /// How many ranks there are.
        ranks: u32,
        /// Which are missing, with the verb.
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
    let specs: Vec<TensorSpec> = joined.iter().map(|joined| joined.spec.clone()).collect();
    let mut writer = Writer::create(&request.output, &inputs, &specs, shards.strings())?;
    progress.expect(shards.files().map(Checkpoint::bytes).sum());
    for tensor in &joined {
        progress.start(&tensor.spec.name);
        match tensor.cuts.is_whole() {
            true => copy_whole(&shards, tensor, &mut writer, progress)?,
            false => copy_parts(&shards, tensor, &mut writer, progress)?,
        }
    }
    progress.clear();
    shards.files().try_for_each(Checkpoint::verify_unchanged)?;
    let output_bytes = writer.bytes();
    let completed = writer.complete()?;
    Ok((Report::new(request, &shards, &joined, output_bytes, begin.elapsed()), completed))
}

/// Copies a tensor that every file has, and holds the files against the first.
fn copy_whole(shards: &Shards, joined: &Joined<'_>, writer: &mut Writer, progress: &mut Progress) -> Result<(), JoinError> {
    let ranks = || shards.files().zip(&joined.parts);
    let Some((first, part)) = ranks().next() else { return Ok(()) };
    for (number, window) in first.windows(part, COPY_BYTES).enumerate() {
        let window = window?;
        let start = number as u64 * COPY_BYTES;
        for (file, part) in ranks() {
            let other = file.window(part, start..start + window.len() as u64)?;
            if *other != *window {
                let reason = format!("differs from that of {}, where all ranks have the same", first.path().display());
                return Err(shards::tensor_error(file, &joined.spec.name, reason));
            }
            progress.advance(other.len() as u64);
        }
        writer.append(&joined.spec.name, &window)?;
    }
    Ok(())
}

/// Copies the parts of a tensor to their places.
fn copy_parts(shards: &Shards, joined: &Joined<'_>, writer: &mut Writer, progress: &mut Progress) -> Result<(), JoinError> {
    for (rank, (file, part)) in shards.files().zip(&joined.parts).enumerate() {
        for (range, runs) in joined.cuts.windows(rank, part.bytes(), COPY_BYTES) {
            let window = file.window(part, range)?;
            writer.write_runs(&joined.spec.name, runs, &window)?;
            progress.advance(window.len() as u64);
        }
    }
    Ok(())
}
