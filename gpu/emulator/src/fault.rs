//! What can go wrong in a run, as one typed error that says what, where and how to mend it.

use std::fmt;
use std::panic::Location;

/// The class of a [`Fault`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultKind {
    /// An access beyond an allocation, the shared memory, or the length of a view.
    OutOfBounds,
    /// An address that is no multiple of the access's size.
    Misaligned,
    /// A read of bytes that were never written.
    Uninitialised,
    /// An access to an allocation that the host freed.
    UseAfterFree,
    /// Two accesses, one a write, with no order between them.
    Race,
    /// A generic access and an asynchronous one with no `fence.proxy.async` between them.
    MissingProxyFence,
    /// Threads that must meet at a collective or a barrier are at different ones, or have ended.
    Divergence,
    /// A named barrier used with a wrong count or id.
    BarrierMisuse,
    /// An mbarrier used against its rules.
    MbarrierMisuse,
    /// An asynchronous copy used against its rules.
    AsyncMisuse,
    /// Another block of the cluster used against the rules.
    ClusterMisuse,
    /// A warpgroup's matrix instruction used against its rules.
    MatrixMisuse,
    /// A thread or block ended with asynchronous work in flight.
    InFlightAtExit,
    /// Every thread is blocked.
    Deadlock,
    /// Threads poll for something that does not come.
    NoProgress,
    /// The run took more steps than [`Options::step_limit`](crate::Options::step_limit).
    StepLimit,
    /// The kernel trapped.
    Trap,
    /// An assumption stated by the kernel does not hold.
    Assumption,
    /// The kernel panicked.
    Panic,
    /// The launch itself is not possible.
    Launch,
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OutOfBounds => "out of bounds",
            Self::Misaligned => "misaligned access",
            Self::Uninitialised => "uninitialised read",
            Self::UseAfterFree => "use after free",
            Self::Race => "race",
            Self::MissingProxyFence => "missing proxy fence",
            Self::Divergence => "divergence",
            Self::BarrierMisuse => "barrier misuse",
            Self::MbarrierMisuse => "mbarrier misuse",
            Self::AsyncMisuse => "asynchronous copy misuse",
            Self::ClusterMisuse => "cluster misuse",
            Self::MatrixMisuse => "matrix instruction misuse",
            Self::InFlightAtExit => "work in flight at exit",
            Self::Deadlock => "deadlock",
            Self::NoProgress => "no progress",
            Self::StepLimit => "step limit",
            Self::Trap => "trap",
            Self::Assumption => "assumption",
            Self::Panic => "panic",
            Self::Launch => "launch",
        })
    }
}

/// A source line that took part in a fault, with what happened there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Involved {
    /// The kernel's source line.
    pub location: &'static Location<'static>,
    /// What was done there, and by which thread.
    pub action: String,
}

/// Why a run ended early: the emulator's report of a bug in a kernel or its launch. `Debug` writes the same text as `Display`, so that it can be read
/// where a test or `main` returns it.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub struct Fault {
    /// The class.
    pub kind: FaultKind,
    /// The kernel's name.
    pub kernel: String,
    /// Block and thread index of the thread that was stopped, if one was.
    pub thread: Option<([u32; 3], [u32; 3])>,
    /// What happened, with the tensor's name where memory is concerned.
    pub message: String,
    /// Source lines, the stopped thread's first.
    pub involved: Vec<Involved>,
    /// How to mend it; empty where the message says it.
    pub mend: &'static str,
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}\n  in kernel `{}`", self.kind, self.message, self.kernel)?;
        if let Some((block, thread)) = self.thread {
            write!(f, ", block {}, thread {}", Coordinates(block), Coordinates(thread))?;
        }
        for Involved { location, action } in &self.involved {
            write!(f, "\n  at {location}")?;
            if !action.is_empty() {
                write!(f, ": {action}")?;
            }
        }
        if !self.mend.is_empty() {
            write!(f, "\n  mend: {}", self.mend)?;
        }
        Ok(())
    }
}

/// Prints an index as `(x, y, z)`.
pub(crate) struct Coordinates(pub [u32; 3]);

impl fmt::Display for Coordinates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.0;
        write!(f, "({x}, {y}, {z})")
    }
}
