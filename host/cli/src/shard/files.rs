//! The files of all shards, as one place for the tensors of the whole.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsString,
    fs::File,
    io,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::{
    Cuts, Division, Layout, ShardError,
    metadata::{DATA_KEY, MODEL_KEY, Stated},
};
use crate::{
    output::{self, Completed},
    quantize::{Direction, Format, side::Names},
    safetensors::{Checkpoint, Fault, ReadError, Runs, TensorSink, TensorSpec, WriteError, Writer, hex},
};

/// A file a rank, each without its name until all are complete.
pub struct ShardFiles {
    writers: Vec<Writer>,
    tensors: HashMap<String, Place>,
    /// Of all bytes in the order in which they come, which is that of the input.
    model: Sha256,
}

/// A tensor of the whole.
struct Place {
    cuts: Cuts,
    /// Where [`TensorSink::append`] goes on.
    next: u64,
}

/// The file of a rank.
pub fn path(prefix: &Path, rank: u32, ranks: u32) -> PathBuf {
    let mut path = OsString::from(prefix);
    path.push(format!("-{:05}-of-{ranks:05}.safetensors", rank + 1));
    path.into()
}

/// Whether a file is a shard all of whose tensors are made of these, whatever the format: `NAME_scale` and the like are made of `NAME`.
///
/// # Errors
/// If the process may open no more files, so that it is not known.
fn is_shard_of(path: &Path, inputs: &HashSet<&str>) -> io::Result<bool> {
    let file = match Checkpoint::open(path) {
        Err(ReadError { fault: Fault::Io { error, .. }, .. }) if is_too_many(&error) => return Err(error),
        file => file.ok(),
    };
    let Some(Stated { tensors, .. }) = file.and_then(|file| Stated::read(file.metadata()).ok()) else { return Ok(false) };
    let ends: Vec<Names> = [Format::Mxfp8, Format::Nvfp4]
        .into_iter()
        .flat_map(|format| [Direction::Rows, Direction::Columns].map(|direction| Names::of("", format, direction)))
        .collect();
    let ends =
        ends.iter().flat_map(|names| [Some(&names.codes), Some(&names.scales), names.global_scale.as_ref(), Some(&names.amax)]).flatten();
    let is_made = |name: &String| ends.clone().any(|end| name.strip_suffix(end.as_str()).is_some_and(|name| inputs.contains(name)));
    // A shard of nothing is made of nothing.
    Ok(if tensors.is_empty() { inputs.is_empty() } else { tensors.keys().all(is_made) })
}

/// Whether the process may open no more files.
fn is_too_many(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EMFILE)
}

impl ShardFiles {
    /// Begins the files of a layout.
    ///
    /// # Errors
    /// As [`Writer::create`]; if the process may not open as many files, or a file that is there is no shard of the same tensors.
    pub fn create(layout: &Layout<'_>, prefix: &Path, input: &Path) -> Result<Self, ShardError> {
        let ranks = layout.world.get();
        let inputs = layout.inputs();
        let writer = |rank: u32| {
            let (specs, strings) = (layout.specs(rank as usize), layout.strings(rank as usize));
            let path = path(prefix, rank, ranks);
            let writer = Writer::create(&path, &[input], &specs, &strings).map_err(|error| match File::open(input) {
                Err(also) if is_too_many(&also) => ShardError::Files { error, ranks },
                _ => error.into(),
            })?;
            if !path.exists() {
                return Ok(writer);
            }
            match is_shard_of(&path, &inputs) {
                Ok(true) => Ok(writer),
                Ok(false) => Err(ShardError::Taken(path)),
                Err(error) => Err(ShardError::Files { error: WriteError::Io { file: path, action: "open", error }, ranks }),
            }
        };
        let mut model = Sha256::new();
        let place = |(spec, division): &(TensorSpec, Division)| (spec.name.clone(), Place { cuts: division.cuts(spec.dtype), next: 0 });
        for (spec, _) in &layout.tensors {
            model.update(format!("{:?} {} {:?};", spec.name, spec.dtype, spec.shape));
        }
        let tensors = layout.tensors.iter().map(place).collect();
        let writers = (0..ranks).map(writer).collect::<Result<Vec<_>, _>>()?;
        output::check_apart(writers.iter().map(Writer::output))?;
        Ok(Self { writers, tensors, model })
    }

    /// The size of each file in bytes.
    pub fn bytes(&self) -> Vec<u64> {
        self.writers.iter().map(Writer::bytes).collect()
    }

    /// Completes all files, which still lack their names. Returns the fingerprint of what was divided, too.
    ///
    /// # Errors
    /// If a tensor is not complete or the system refuses; nothing is left then.
    pub fn complete(mut self) -> Result<(String, Vec<Completed>), WriteError> {
        let model = hex(self.model);
        for writer in &mut self.writers {
            let data = writer.data_digest()?;
            writer.restate(&[(MODEL_KEY, &model), (DATA_KEY, &data)])?;
        }
        let completed = self.writers.into_iter().map(Writer::complete);
        Ok((model, completed.collect::<Result<_, _>>()?))
    }

    /// Writes bytes of the whole from `offset` on.
    fn put(&mut self, tensor: &str, offset: u64, data: &[u8]) -> Result<(), WriteError> {
        self.model.update(offset.to_le_bytes());
        self.model.update(data);
        let Self { writers, tensors, .. } = self;
        let run = |offset, bytes: usize| Runs { offset, bytes: bytes as u64, stride: 0 };
        match tensors.get(tensor).filter(|place| !place.cuts.is_whole()) {
            Some(place) => place
                .cuts
                .divide(offset, data.len(), |rank, offset, range| writers[rank].write_runs(tensor, run(offset, range.len()), &data[range])),
            None => writers.iter_mut().try_for_each(|writer| writer.write_runs(tensor, run(offset, data.len()), data)),
        }
    }
}

impl TensorSink for ShardFiles {
    fn append(&mut self, tensor: &str, data: &[u8]) -> Result<(), WriteError> {
        let mut offset = 0;
        if let Some(place) = self.tensors.get_mut(tensor) {
            offset = place.next;
            place.next += data.len() as u64;
        }
        self.put(tensor, offset, data)
    }

    fn write_runs(&mut self, tensor: &str, runs: Runs, data: &[u8]) -> Result<(), WriteError> {
        let runs = runs.joined(data.len() as u64);
        let mut offset = runs.offset;
        for run in data.chunks(runs.bytes.max(1) as usize) {
            self.put(tensor, offset, run)?;
            offset += runs.stride;
        }
        Ok(())
    }
}
