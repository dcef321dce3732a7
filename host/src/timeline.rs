//! What ran when: kernels, copies, collectives, signals and waits of every stream, recorded and written down.
//!
//! ```
//! use oxtile::timeline::{Activity, Timeline};
//! use oxtile::{Buffer, Runtime};
//!
//! # fn main() -> oxtile::Result<()> {
//! let runtime = Runtime::checked(1)?; // or Runtime::cuda()
//! let timeline = Timeline::start(&runtime)?;
//! let stream = runtime.device(0)?.stream()?;
//! let mut zeros = Buffer::<u32>::uninitialised(&stream, 4)?;
//! zeros.fill_zero(&stream)?;
//! stream.synchronize()?;
//!
//! let recording = timeline.finish()?;
//! assert_eq!((recording.spans[0].activity, recording.spans[0].bytes), (Activity::Fill, Some(16)));
//! let json = recording.to_json(); // or recording.write(path): for Perfetto, and for `oxtile timeline FILE --svg OUT`
//! # assert!(json.contains("traceEvents"));
//! # Ok(()) }
//! ```
//!
//! With `OXTILE_TRACE=FILE` in the environment every runtime of a program is recorded, without a change to it, and the file is written
//! when a runtime's last handle, stream or buffer is gone: not after `std::process::exit` or an abort. A process that a launcher gave a
//! rank (`RANK`, or as mpirun and srun say it) inserts the rank into the name: `trace.json` becomes `trace.rank3.json`. A file that cannot be written, or that holds
//! something else than a recording, is an error of the runtime's creation. Where writing it fails in the end, [`take_trace_failure`] says why.
//!
//! **On GPUs** a span is the time between two device events around the work, in microseconds. They are not waited for, but read when
//! they are done. The two events lengthen each piece of work by some microseconds of host time, and leave that gap between pieces of one stream. The
//! clocks of devices and of processes are aligned by the host's, to some tens of microseconds, so finer statements cannot be made
//! about two ranks. What a graph replays is one span; captured work gives none. A group of NCCL calls is one span a stream.
//! All runtimes of a process share the GPUs, and a recording holds them all: ranks that are threads are in one.
//!
//! **On the virtual cluster** a unit is one *step*: one operation that the scheduler has done, of any stream. A span begins when nothing
//! of its stream is left before it and ends when it is done. So two spans overlap if the scheduler could have taken either first, and
//! how long one is says only how many steps others were given meanwhile. Frees and records of events take a step and are not
//! shown. The branches of a replayed graph are streams of their own.
//!
//! What is not recorded costs one branch for each operation.

use std::fmt;
use std::sync::Arc;

pub use crate::runtime::trace::{take_trace_failure, trace_file};

pub use crate::recording::{Activity, Clock, Lane, Recording, Span, TimelineError};
pub use crate::recording::{BoxRecord, FieldRecord, KernelRecord, LineRecord, PhaseRecord};

use crate::runtime::runtime::Inner;
use crate::runtime::{Error, Result, Runtime};

/// A recording under way; dropping it ends it.
pub struct Timeline {
    runtime: Arc<Inner>,
}

impl Timeline {
    /// Records from now on: of a virtual cluster what its streams do, of GPUs what any runtime of the process enqueues.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is recorded already, by another `Timeline` or for `OXTILE_TRACE`.
    pub fn start(runtime: &Runtime) -> Result<Self> {
        if runtime.0.backend.start_recording() {
            return Ok(Self { runtime: Arc::clone(&runtime.0) });
        }
        let why = "the runtime is recorded already: finish the other Timeline first, or unset OXTILE_TRACE".to_owned();
        Err(Error::Invalid { what: "Timeline::start", why })
    }

    /// The spans recorded so far. Work under way is in it, not [finished](Span::is_finished); work that has not begun is left out. Does
    /// not wait.
    ///
    /// # Errors
    /// A driver error.
    pub fn recording(&self) -> Result<Recording> {
        self.runtime.backend.recorded()
    }

    /// Ends the recording and returns it, as [`recording`](Self::recording) does: wait for the streams before.
    ///
    /// # Errors
    /// A driver error.
    pub fn finish(self) -> Result<Recording> {
        self.recording()
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        self.runtime.backend.stop_recording();
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline").finish_non_exhaustive()
    }
}
