//! `OXTILE_TRACE=FILE`: every runtime of the process is recorded, and the file written when each is gone.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use super::backend::Backend;
use super::error::{Error, Result};
use super::runtime::lock;
use crate::rank::launcher::process_rank;
use crate::recording::{Clock, Recording};

/// The variable that names the file.
const VARIABLE: &str = "OXTILE_TRACE";

/// What the runtimes of the process have recorded.
static PROCESS: Mutex<Process> = Mutex::new(Process { first: None, gpus: None, clusters: None });

/// The last failure.
static FAILURE: Mutex<Option<String>> = Mutex::new(None);

struct Process {
    /// The clock that was recorded first takes the file's name; the other, if there is one, a name beside it.
    first: Option<Clock>,
    /// The GPUs are one back end, whose recording goes on.
    gpus: Option<Recording>,
    /// Virtual clusters come one after another.
    clusters: Option<Recording>,
}

/// The file that a runtime's recording is for.
pub(crate) struct Trace {
    file: PathBuf,
}

impl Trace {
    /// Begins to record if the variable is set.
    pub fn from_environment(backend: &dyn Backend) -> Result<Option<Self>> {
        let Some(file) = trace_file() else { return Ok(None) };
        let refused =
            |why: String| Error::Invalid { what: VARIABLE, why: format!("{} cannot be written: {why}; name another file", file.display()) };
        Recording::check_target(&file).map_err(refused)?;
        let opened = std::fs::OpenOptions::new().create(true).append(true).open(&file);
        opened.map_err(|error| refused(error.to_string()))?;
        // A file beside it takes its place in the end.
        let folder = file.canonicalize().ok().and_then(|file| Some(file.parent()?.to_owned())).unwrap_or_default();
        let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
        rustix::fs::access(&folder, access).map_err(|error| refused(format!("no file can be made in its folder: {error}")))?;
        // That the GPUs are recorded already is what other runtimes of this process have asked for.
        backend.start_recording();
        Ok(Some(Self { file }))
    }

    /// Adds what the runtime did to the file.
    pub fn write(&self, backend: &dyn Backend) {
        let written = backend.recorded().map_err(|error| error.to_string()).and_then(|recording| {
            let clock = recording.clock;
            // Held until it is written: runtimes of other threads write the same file.
            let mut process = lock(&PROCESS);
            let (file, whole) = process.add(&self.file, recording);
            // Another program, or this one, may have put something else there meanwhile.
            Recording::check_target(&file)?;
            tracing::debug!(clock = clock.name(), file = %file.display(), "a timeline is written");
            whole.write(&file).map_err(|error| error.to_string())
        });
        if let Err(error) = written {
            tracing::warn!(error, "{VARIABLE}: the timeline was not written");
            *lock(&FAILURE) = Some(format!("{VARIABLE}: {}: the timeline was not written: {error}", self.file.display()));
        }
    }
}

/// Why a recording of `OXTILE_TRACE` was not written, if so, since the last call. A program that has dropped its runtimes asks here, since that is when
/// recordings are written, where no error can be returned.
pub fn take_trace_failure() -> Option<String> {
    lock(&FAILURE).take()
}

/// The file that `OXTILE_TRACE` names for this process, if it is set.
pub fn trace_file() -> Option<PathBuf> {
    let file = std::env::var_os(VARIABLE).filter(|file| !file.is_empty())?;
    Some(file_of(Path::new(&file), process_rank()))
}

impl Process {
    fn add(&mut self, file: &Path, recording: Recording) -> (PathBuf, Recording) {
        let clock = recording.clock;
        // A GPU that was only looked at claims nothing.
        if self.first.is_none() && !recording.spans.is_empty() {
            self.first = Some(clock);
        }
        let first = self.first.unwrap_or(clock);
        let file = if clock == first { file.to_owned() } else { with_inserted(file, clock.name()) };
        let whole = match clock {
            Clock::Device => self.gpus.insert(recording),
            Clock::Steps => {
                let whole = match self.clusters.take() {
                    Some(before) => before.append(recording),
                    None => recording,
                };
                self.clusters.insert(whole)
            }
        };
        (file, whole.clone())
    }
}

/// `trace.json` of rank 3 is `trace.rank3.json`.
fn file_of(file: &Path, rank: Option<u32>) -> PathBuf {
    rank.map_or_else(|| file.to_owned(), |rank| with_inserted(file, &format!("rank{rank}")))
}

fn with_inserted(file: &Path, word: &str) -> PathBuf {
    match file.extension() {
        Some(extension) => file.with_extension(format!("{word}.{}", extension.to_string_lossy())),
        None => file.with_extension(word),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::{Activity, Work};

    #[test]
    fn ranks_that_are_processes_have_a_file_each() {
        let file = |name: &str, rank| file_of(Path::new(name), rank).to_string_lossy().into_owned();
        assert_eq!(file("a/trace.json", None), "a/trace.json");
        assert_eq!(file("a/trace.json", Some(3)), "a/trace.rank3.json");
        assert_eq!(file("trace", Some(0)), "trace.rank0");
    }

    #[test]
    fn the_second_clock_has_a_file_beside() {
        let mut process = Process { first: None, gpus: None, clusters: None };
        let work = || Work::new(Activity::Fill, "fill", None, None).spanning(0, 0, 1, [0.0, 1.0], true);
        let recording = |clock, spans| Recording::new(clock, 0, spans, 1);
        assert_eq!(process.add(Path::new("t.json"), recording(Clock::Device, Vec::new())).0, Path::new("t.json"));
        let mut add = |clock| process.add(Path::new("t.json"), recording(clock, vec![work()]));
        assert_eq!(add(Clock::Steps).0, Path::new("t.json"), "nothing was recorded on the other");
        assert_eq!(add(Clock::Device).0, Path::new("t.device.json"));
        assert_eq!(add(Clock::Device).1.spans.len(), 1, "a recording that goes on is not added twice");
        let (file, whole) = add(Clock::Steps);
        assert_eq!((file.as_path(), whole.spans.len(), whole.dropped), (Path::new("t.json"), 2, 2));
    }
}
