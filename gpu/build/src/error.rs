//! What can go wrong, where, and how to mend it.

use std::{fmt, io, path::PathBuf};

/// An error of the kernel build.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No compiler fit for device code was found.
    #[error("{what}\n  mend: {mend}")]
    Missing {
        /// What is missing and where it was looked for.
        what: String,
        /// The command or variable that mends it.
        mend: String,
    },
    /// An architecture name that ptxas does not know.
    #[error("unknown architecture `{name}`\n  mend: write it as ptxas does, for example sm_90a, sm_80, sm_100a or sm_120a")]
    Arch {
        /// The name as given.
        name: String,
    },
    /// A program could not be started.
    #[error("cannot run {program}: {source}")]
    Spawn {
        /// The program's path.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// A program ended with an error.
    #[error("{what} failed\n{}\n  command: {command}", output.trim_end())]
    Failed {
        /// The step.
        what: String,
        /// The command line.
        command: String,
        /// What the program wrote.
        output: String,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// `read`, `write`, ...
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is there but says something that does not make sense.
    #[error("{}: {why}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong and how to mend it.
        why: String,
    },
    /// The crate, or crates that it depends on, cannot be compiled for the GPU: a line for each, with its mend.
    #[error("{}", .0.join("\n"))]
    NeedsStd(Vec<String>),
    /// The compiled PTX is not what `#[kernel]` makes.
    #[error("PTX of {families}: {why}")]
    Ptx {
        /// What was compiled: a family by its name, or how many.
        families: String,
        /// What is wrong and how to mend it.
        why: String,
    },
    /// Two families have a kernel of one name, by which programs find it.
    #[error("kernel `{kernel}` is in the families `{}` and `{}`: rename one", families[0], families[1])]
    Twice {
        /// The name of both.
        kernel: String,
        /// The families.
        families: [String; 2],
    },
    /// The kernels compiled, but may not be used as they are.
    #[error("{}", crate::lint::describe(findings, command))]
    Lint {
        /// Why, with the source lines where they are known.
        findings: Vec<crate::lint::Finding>,
        /// The command that builds these kernels, for the architectures whose figures are not accepted.
        command: String,
    },
    /// The source hash could not be computed.
    #[error(transparent)]
    SourceHash(#[from] crate::source_hash::SourceHashError),
    /// The build was asked for from within the build script of the kernel crate itself.
    #[error(
        "the build script of a kernel crate cannot build that crate for the GPU: it would run itself again\n  \
         mend: call Builder::build from the build script of the crate that launches the kernels"
    )]
    Nested,
}

/// As it is displayed: what `fn main() -> Result<(), Error>` and a test that returns it print.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }

    pub(crate) fn content(path: impl Into<PathBuf>, why: impl ToString) -> Self {
        Self::Content { path: path.into(), why: why.to_string() }
    }
}
