//! What can go wrong, where, and how to mend it.

use std::fmt;
use std::panic::Location;
use std::path::PathBuf;

use oxtile_emulator::Fault;
use oxtile_tile::launch::{LaunchError, ParameterName};

use super::emulated::StreamRace;
use super::library::{build_command, mend, or_feature};
use crate::rank::{BootstrapError, Rank, SymmetricError};

/// The result of a runtime call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the runtime. `Debug` writes the same text as `Display`, so that it can be read where a test or `main` returns it.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call of the CUDA driver failed.
    #[error("{call} failed: {name} ({code}): {description}{mend}")]
    Cuda {
        /// The driver's function.
        call: &'static str,
        /// The number of the error.
        code: u32,
        /// Its name, such as `CUDA_ERROR_OUT_OF_MEMORY`.
        name: &'static str,
        /// What the driver says of it.
        description: &'static str,
        /// How to mend it, where that is known.
        mend: &'static str,
    },
    /// CUDA was asked for and is not there.
    #[error("CUDA is not available: {reason}")]
    NoCuda {
        /// What is missing, and what to run.
        reason: String,
    },
    /// There is no device of this number.
    #[error("there is no device {index}: this runtime has {count}, numbered from 0")]
    NoDevice {
        /// The number asked for.
        index: u32,
        /// How many devices there are.
        count: u32,
    },
    /// An emulated kernel misbehaved. Nothing runs on its runtime any more, as on a GPU after such an error.
    #[error("{0}")]
    Fault(Box<Fault>),
    /// On a checked emulator the host read what no kernel, copy or fill wrote. Nothing runs on the runtime any more.
    #[error(
        "unwritten memory: the host reads `{buffer}`, of which element {element} (of {elements}) was never written{given}\n  at {at}\n  mend: let a kernel, \
         a copy or a fill write every element before the read, begin with Buffer::zeros, or read only what is written"
    )]
    Unwritten {
        /// The buffer's name.
        buffer: String,
        /// The first element that was not written, from the start of what was read.
        element: u64,
        /// How many elements were read.
        elements: u64,
        /// The kernel that it was last given to, and the parameter: `, last given to kernel `sum` as `sums``; empty if there is none.
        given: String,
        /// Where the read was asked for.
        at: &'static Location<'static>,
    },
    /// An argument does not fit its kernel. Nothing was enqueued.
    #[error("kernel `{kernel}`: {error}")]
    Argument {
        /// The kernel's entry.
        kernel: &'static str,
        /// Which argument, and why.
        error: LaunchError,
    },
    /// Memory was used on a stream that was not let in: a gather's place, without the epoch's [`Ready`](crate::symmetric::Ready), or memory that was lent to another stream
    /// ([`Buffer::scoped`](super::Buffer::scoped)). Nothing was enqueued.
    #[error("{what}: {why}")]
    NotReady {
        /// The call.
        what: String,
        /// What it lacks, and how to mend it.
        why: String,
    },
    /// A launch asks for more than the device has. Nothing was enqueued.
    #[error("kernel `{kernel}`: {what}")]
    Limit {
        /// The kernel's entry.
        kernel: &'static str,
        /// What it asks for, what there is, and how to mend it.
        what: String,
    },
    /// A view was lent by another runtime.
    #[error(
        "kernel `{kernel}`: `{parameter}` was not lent by the runtime of the stream: allocate it there (a clone of a Runtime is the same runtime)"
    )]
    ForeignMemory {
        /// The kernel's entry.
        kernel: &'static str,
        /// The parameter, or a field of one.
        parameter: ParameterName,
    },
    /// Memory of one device was used on a stream of another.
    #[error(
        "{what}: buffer `{buffer}` is on device {found}, the stream on device {expected}: use a stream of device {found}, or copy the buffer"
    )]
    WrongDevice {
        /// The operation, or the kernel and its parameter.
        what: String,
        /// The buffer's name.
        buffer: String,
        /// The stream's device.
        expected: u32,
        /// The buffer's device.
        found: u32,
    },
    /// A stream or event of one runtime was used with another's.
    #[error("{what}: the operands belong to different runtimes: create both from one Runtime or its clones")]
    ForeignRuntime {
        /// The operation.
        what: &'static str,
    },
    /// A host slice or a buffer has the wrong number of elements.
    #[error("{what}: {found} elements where {expected} are needed")]
    Length {
        /// The operation and operand.
        what: &'static str,
        /// How many are needed.
        expected: u64,
        /// How many there are.
        found: u64,
    },
    /// A size does not fit.
    #[error("{what}: {count} elements of {element_bytes} bytes are more than an address can reach")]
    TooLarge {
        /// The operation.
        what: &'static str,
        /// How many elements.
        count: u64,
        /// The size of one.
        element_bytes: u64,
    },
    /// An operation that a graph cannot hold was called during its capture. Nothing was enqueued.
    #[error("{what} cannot be captured in a graph: {mend}")]
    NotCapturable {
        /// The operation.
        what: &'static str,
        /// What to do instead.
        mend: &'static str,
    },
    /// A shape, a rank or another argument of the library is not allowed.
    #[error("{what}: {why}")]
    Invalid {
        /// The operation and operand.
        what: &'static str,
        /// What is wrong, and how to mend it.
        why: String,
    },
    /// Ranks of one group called different collectives, or one with different arguments. Nothing runs on the runtime any more.
    #[error(
        "call {sequence} of {group}: {rank} called {found}, {other} called {expected}: every rank calls the same collectives with the same arguments, in one order"
    )]
    Mismatch {
        /// Which ranks belong together.
        group: String,
        /// The number of the call in the group, from 0.
        sequence: u64,
        /// The rank that came later.
        rank: Rank,
        /// What it called.
        found: String,
        /// The rank that came first.
        other: Rank,
        /// What that one called.
        expected: String,
    },
    /// No stream of the virtual cluster can go on. Nothing runs on it any more.
    #[error("no stream can go on: record, signal or call what these wait for{waits}")]
    Stuck {
        /// What each stream waits for, a line each.
        waits: String,
    },
    /// The virtual cluster found two uses of memory that nothing orders. Nothing runs on it any more.
    #[error("{0}")]
    Race(Box<StreamRace>),
    /// A run of [`explore`](crate::runtime::explore) came to a state that another run has gone through: return it.
    #[error("this state was explored before")]
    SeenBefore,
    /// Symmetric memory, or a rank that shares it, failed.
    #[error("{0}")]
    Symmetric(SymmetricError),
    /// Ranks could not find one another, or lost one another.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// No folder holds compiled kernels of the package.
    #[error(
        "no compiled kernels of `{package}` for `{kernel}`: run {}{}, or name their folder in OXTILE_KERNELS{}",
        build_command(package, ""),
        or_feature(package),
        looked_in(searched)
    )]
    NoKernels {
        /// The Cargo package.
        package: &'static str,
        /// The kernel's entry.
        kernel: &'static str,
        /// Where they were looked for.
        searched: Vec<PathBuf>,
    },
    /// The package was compiled without this kernel.
    #[error("{} has no kernel `{kernel}`: {}", manifest.display(), mend(manifest))]
    UnknownKernel {
        /// The kernel's entry.
        kernel: &'static str,
        /// The manifest.
        manifest: PathBuf,
    },
    /// The compiled kernels are of other sources than this program.
    #[error(
        "the kernels in {} are stale: they were built from sources {found}, this program from {expected}: {}, or take them with \
         OXTILE_STALE_KERNELS=1",
        manifest.display(),
        mend(manifest)
    )]
    StaleKernels {
        /// The manifest.
        manifest: PathBuf,
        /// The source hash compiled into the program.
        expected: String,
        /// The one in the manifest.
        found: String,
    },
    /// The program does not know the hash of its kernels' sources, so that it cannot tell whether the compiled ones are of them.
    #[error(
        "kernel `{kernel}`: `{package}` has no hash of its sources, so that stale kernels would run unseen: add `oxtile_tile::source_hash!();` to src/lib.rs \
         and the build script that prints oxtile_build::source_hash::cargo_directives (`oxtile new` writes both), or take them with OXTILE_STALE_KERNELS=1"
    )]
    UnhashedKernels {
        /// The Cargo package.
        package: &'static str,
        /// The kernel's entry.
        kernel: &'static str,
    },
    /// The compiled kernel has other launch facts than this program's.
    #[error(
        "kernel `{kernel}` in {} has {what} {found}, this program expects {expected}: build both from the same sources: {}",
        manifest.display(),
        mend(manifest)
    )]
    KernelMismatch {
        /// The kernel's entry.
        kernel: &'static str,
        /// The manifest.
        manifest: PathBuf,
        /// Which fact: threads, cluster, shared bytes, parameters or their words.
        what: &'static str,
        /// The program's.
        expected: String,
        /// The manifest's.
        found: String,
    },
    /// The kernel was not compiled for the device's architecture.
    #[error("kernel `{kernel}` is compiled for {}, none of which runs on sm_{device}: {mend}", list(found))]
    WrongArchitecture {
        /// The kernel's entry.
        kernel: &'static str,
        /// The device's compute capability, such as `90`.
        device: u32,
        /// The architectures that it is compiled for.
        found: Vec<String>,
        /// What to do.
        mend: String,
    },
    /// A shared library that is loaded at run time is missing or not usable.
    #[error("{library} is not available: {why}")]
    NoLibrary {
        /// The library's usual name.
        library: &'static str,
        /// What was found, and how to mend it.
        why: String,
    },
    /// A call of NCCL failed. Its communicator was aborted.
    #[error("{communicator}: {call} failed with code {code}, {meaning}{}", after(detail))]
    Nccl {
        /// The function, or what it was to do.
        call: &'static str,
        /// The communicator, rank and world.
        communicator: String,
        /// The `ncclResult_t`.
        code: i32,
        /// What NCCL says of the code.
        meaning: String,
        /// What NCCL says of this error; may be empty.
        detail: String,
    },
    /// An operation with other ranks did not end in time. Its communicator or arena cannot be used any more.
    #[error("{what} did not end within {limit:?}: {mend}")]
    Deadline {
        /// What waited, and for what.
        what: String,
        /// How long.
        limit: std::time::Duration,
        /// What to look for.
        mend: &'static str,
    },
    /// The host waited for a stream until the runtime's deadline. The work goes on, and can be waited for again.
    #[error(
        "stream {stream:#x} of device {device} was not done within {limit:?}, after {last}: see what it waits for, or raise the deadline (OXTILE_DEADLINE, in seconds, or the runtime's options)"
    )]
    StreamDeadline {
        /// The stream, as [`Stream::raw`](super::Stream::raw).
        stream: u64,
        /// Its device.
        device: u32,
        /// What was enqueued last, and where.
        last: String,
        /// The deadline.
        limit: std::time::Duration,
    },
    /// It was aborted before.
    #[error("{what} was aborted: {why}")]
    Aborted {
        /// What cannot be used any more.
        what: String,
        /// The reason given.
        why: String,
    },
    /// A file of the compiled kernels cannot be read.
    #[error("cannot read {}: {why}: {}", path.display(), mend(path))]
    KernelFile {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

impl Error {
    /// Fails with [`Error::Length`] unless there are as many elements as are needed.
    pub(crate) fn check_length(what: &'static str, expected: u64, found: u64) -> Result<()> {
        if expected == found { Ok(()) } else { Err(Self::Length { what, expected, found }) }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<SymmetricError> for Error {
    fn from(error: SymmetricError) -> Self {
        Self::Symmetric(error)
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self::Fault(Box::new(fault))
    }
}

fn after(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(": {detail}") }
}

fn looked_in(folders: &[PathBuf]) -> String {
    if folders.is_empty() {
        return String::new();
    }
    let names: Vec<_> = folders.iter().map(|f| f.display().to_string()).collect();
    format!(" (looked in {})", names.join(", "))
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "no architecture".to_owned() } else { names.join(", ") }
}
