//! `oxtile timeline`: recordings of ranks, merged and drawn.

mod picture;

use std::{
    fmt, io,
    io::Write as _,
    path::{Path, PathBuf},
};

use oxtile::timeline::{Clock, Recording, TimelineError};

use crate::{
    arguments,
    output::{self, Completed, Output},
    safetensors::{WriteError, kind_if_not_file},
    text::{count, path, printable},
};

pub use picture::Picture;

/// A recording that cannot be read, or that does not go with the others.
#[derive(Debug, thiserror::Error)]
pub enum DrawError {
    /// A file.
    #[error("{}: {}", path(.file), printable(&.error.to_string()))]
    File {
        /// Which.
        file: PathBuf,
        /// What is wrong with it.
        error: TimelineError,
    },
    /// A directory, pipe or device.
    #[error("{}: is a {kind}, not a regular file; name a recording", path(.file))]
    NotAFile {
        /// Which.
        file: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// Nothing to draw.
    #[error("nothing was recorded: the program enqueued no work, or ended before a Runtime was dropped")]
    Empty,
    /// A file that cannot be read at all.
    #[error(transparent)]
    Read(TimelineError),
    /// A picture or file that cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// What is said of a recording.
#[derive(Debug)]
pub struct Report {
    recording: Recording,
    outputs: Vec<PathBuf>,
}

/// Reads, merges, draws and writes, but for the names of the files.
///
/// # Errors
/// [`DrawError`]: a file that is no recording, files that do not go together, a target that cannot be written.
pub fn run(request: &arguments::Timeline) -> Result<(Report, Vec<Completed>), DrawError> {
    let inputs: Vec<_> = request.files.iter().map(PathBuf::as_path).collect();
    let recording = read(&inputs)?;
    if recording.spans.is_empty() {
        return Err(DrawError::Empty);
    }
    let create = |file: &Option<PathBuf>| file.as_ref().map(|file| Output::create(file, &inputs)).transpose();
    let (svg, merged) = (create(&request.svg)?, create(&request.merged)?);
    output::check_apart(svg.iter().chain(&merged))?;
    let outputs = svg.iter().chain(&merged).map(|output| output.path().into()).collect();
    let completed =
        [svg.map(|output| write(output, &Picture::of(&recording).to_string())), merged.map(|output| write(output, &recording.to_json()))];
    let completed = completed.into_iter().flatten().collect::<Result<_, _>>()?;
    Ok((Report { recording, outputs }, completed))
}

fn read(files: &[&Path]) -> Result<Recording, DrawError> {
    let mut merged: Option<Recording> = None;
    for file in files {
        let wrong = |error| match error {
            // It names the file itself.
            error @ TimelineError::Io { .. } => DrawError::Read(error),
            error => DrawError::File { file: file.to_path_buf(), error },
        };
        // Before it is read: a pipe would be waited for, and a device has no end.
        if let Some(kind) = std::fs::metadata(file).ok().and_then(|metadata| kind_if_not_file(metadata.file_type())) {
            return Err(DrawError::NotAFile { file: file.to_path_buf(), kind });
        }
        let recording = Recording::read(file).map_err(wrong)?;
        merged = Some(match merged {
            None => recording,
            Some(before) => before.merge(recording).map_err(wrong)?,
        });
    }
    merged.ok_or(DrawError::Empty)
}

fn write(output: Output, text: &str) -> Result<Completed, WriteError> {
    let written: io::Result<()> = output.file().write_all(text.as_bytes());
    written.map_err(|error| output.error("write it", error))?;
    output.complete()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { recording, outputs } = self;
        let (ranks, streams, spans) = (recording.ranks().len(), recording.lanes().len(), recording.spans.len());
        let unit = match recording.clock {
            Clock::Device => "microseconds",
            Clock::Steps => "steps of the scheduler",
        };
        writeln!(f, "ranks   {ranks}, streams {streams}")?;
        writeln!(f, "spans   {}, {:.0} {unit}", count(spans as u64), recording.end())?;
        let unfinished = recording.spans.iter().filter(|span| !span.is_finished).count();
        if unfinished > 0 {
            writeln!(f, "        {unfinished} under way when the recording ended")?;
        }
        if recording.dropped > 0 {
            writeln!(f, "        {} more were left out: there were too many", count(recording.dropped))?;
        }
        outputs.iter().try_for_each(|file| writeln!(f, "output  {}", path(file)))
    }
}
