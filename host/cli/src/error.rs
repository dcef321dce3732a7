//! Everything that can end a command.

use std::{io, process::ExitCode};

use crate::{
    arguments::UsageError,
    attention,
    compare::TooFar,
    dequantize,
    doctor::Broken,
    explain::ExplainError,
    inspect::HistogramError,
    join::JoinError,
    launch::LaunchError,
    new::NewError,
    quantize::job::JobError,
    safetensors::{ReadError, WriteError},
    shard::ShardError,
    timeline::DrawError,
};

/// A command that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// A file that cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A file that cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A quantization.
    #[error(transparent)]
    Quantize(#[from] JobError),
    /// A way back.
    #[error(transparent)]
    Dequantize(#[from] dequantize::JobError),
    /// A histogram.
    #[error(transparent)]
    Histogram(#[from] HistogramError),
    /// Files too far apart.
    #[error(transparent)]
    TooFar(#[from] TooFar),
    /// Attention.
    #[error(transparent)]
    Attention(#[from] attention::JobError),
    /// A product that cannot be planned.
    #[error("--plan: {0}")]
    Overlap(oxtile::Error),
    /// A format of what travels where elements do.
    #[error("--format is of gathered operands: leave it out, or take --operation all-gather")]
    Format,
    /// Shards that cannot be made.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// Shards that cannot be put together.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// A launch.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A timeline.
    #[error(transparent)]
    Timeline(#[from] DrawError),
    /// A machine or an environment.
    #[error(transparent)]
    Doctor(#[from] Broken),
    /// A crate that cannot be made.
    #[error(transparent)]
    New(#[from] NewError),
    /// A kernel that cannot be explained.
    #[error(transparent)]
    Explain(#[from] ExplainError),
    /// A build of kernels.
    #[error(transparent)]
    Build(#[from] oxtile_build::Error),
    /// The device asked for.
    #[error("--device {requested}: {error}{}", if *.requested == "cuda" { " (--device emulated)" } else { "" })]
    Device {
        /// What was asked for.
        requested: &'static str,
        /// Why it is not to be had, and what to run.
        error: oxtile::Error,
    },
    /// Standard output.
    #[error("cannot write to standard output: {0}")]
    Output(#[from] io::Error),
}

impl Error {
    /// What a tool has written about it, if that is more than a line, and the line that tells the rest.
    pub fn parts(&self) -> (Option<String>, String) {
        let text = self.to_string();
        match self {
            Error::Build(oxtile_build::Error::Failed { what, command, output }) => {
                (Some(output.clone()), format!("{what} failed, as said above; command: {command}"))
            }
            Error::Build(oxtile_build::Error::Lint { command, .. }) => {
                let line = format!("the kernels may not be used as they are, as said above; {command} builds them again");
                (Some(text), line)
            }
            _ => (None, text),
        }
    }

    /// The process's exit status: 2 for a wrong command line, a rank's own after a launch, 1 for everything else.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Error::Usage(_) => ExitCode::from(2),
            Error::Launch(error) => error.exit_code(),
            _ => ExitCode::FAILURE,
        }
    }
}
