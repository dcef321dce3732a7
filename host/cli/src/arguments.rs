//! The command line, as clap parses it: one file a command.
//!
//! | file | what it holds |
//! |---|---|
//! | `error` | a command line that makes no sense, in one line |
//! | `values` | the values that options take |
//! | `quantize`, `dequantize`, `compare`, `inspect`, `attention`, `overlap`, `shard`, `join`, `launch`, `timeline`, `doctor`, `new`, `build`, `explain`, `completions`, `man` | the options of each command, and its help |
//! | `demo` | the options of `oxtile demo-checkpoint` |
//! | `tests` | what the command line takes and refuses |

mod attention;
mod build;
mod compare;
mod completions;
mod demo;
mod dequantize;
mod doctor;
mod error;
mod explain;
mod inspect;
mod join;
mod launch;
mod man;
mod new;
mod overlap;
mod quantize;
mod shard;
#[cfg(test)]
mod tests;
mod timeline;
pub(crate) mod values;

use std::{ffi::OsString, iter};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum, builder::StyledStr, error::ErrorKind};

pub use attention::{Attention, Causal};
pub use build::Build;
pub use compare::Compare;
pub use completions::Completions;
pub use demo::DemoCheckpoint;
pub use dequantize::Dequantize;
pub use doctor::Doctor;
pub use error::UsageError;
pub use explain::Explain;
pub use inspect::Inspect;
pub use join::Join;
pub use launch::Launch;
pub use man::Man;
pub use new::New;
pub use overlap::{Operation, Overlap};
pub use quantize::Quantize;
pub use shard::Shard;
pub use timeline::Timeline;

/// Low-precision checkpoints with GPU kernels written in Rust
#[derive(Parser)]
#[command(name = "oxtile", version, term_width = 140, after_help = MORE)]
struct CommandLine {
    #[command(subcommand)]
    request: Request,
}

const MORE: &str = "\
`oxtile COMMAND --help` shows a command's options and examples. To begin:
  oxtile demo-checkpoint --output model.safetensors
  oxtile quantize --input model.safetensors --output mxfp8.safetensors
  oxtile inspect mxfp8.safetensors";

/// What the user asks for.
#[derive(Debug, PartialEq, Subcommand)]
pub enum Request {
    /// Quantize the matrices of a safetensors file to MXFP8, NVFP4 or FP8
    Quantize(Quantize),
    /// Turn what quantize wrote back into plain numbers
    Dequantize(Dequantize),
    /// Measure how far the tensors of two safetensors files are apart
    Compare(Compare),
    /// Show the tensors of a safetensors file and what their values are like
    Inspect(Inspect),
    /// Attend: queries, keys and values in, softmax(scale Q K^T + mask) V out, and gradients
    Attention(Attention),
    /// Say how a product would be done of which ranks gather an operand, and why: by a model, without a GPU
    Overlap(Overlap),
    /// Divide the tensors of a safetensors file among ranks, a file each, quantized or as they are
    Shard(Shard),
    /// Put the files of shard together again
    Join(Join),
    /// Run a program as several ranks on this host, which live and end together
    Launch(Launch),
    /// Draw what a program's streams did when, as OXTILE_TRACE=FILE recorded it
    Timeline(Timeline),
    /// List the driver, GPUs, libraries and kernels that there are, and how to mend what is missing
    Doctor(Doctor),
    /// Make a crate with a kernel and its test, which builds and passes as it is
    New(New),
    /// Compile the kernels of a Rust crate for the GPU, check them and assemble them
    Build(Build),
    /// Say what a kernel takes of a GPU, and what its runs on the emulator have shown of its memory
    Explain(Explain),
    /// Make a 22.7 M-parameter checkpoint from a seed, to try the others on
    DemoCheckpoint(DemoCheckpoint),
    /// Print a script that completes commands and options in a shell
    Completions(Completions),
    /// Print a command's manual page, or write those of all commands
    Man(Man),
    /// Print a help text, or the version.
    #[command(skip)]
    Text(StyledStr),
}

/// `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, ValueEnum)]
pub enum Device {
    /// A GPU if there is one, else the emulator.
    #[default]
    Auto,
    /// The first GPU.
    Cuda,
    /// The emulator.
    Emulated,
}

impl Device {
    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Device::Auto => "auto",
            Device::Cuda => "cuda",
            Device::Emulated => "emulated",
        }
    }
}

impl Request {
    /// What clap cannot know: values that do not go together.
    fn check(&self) -> Result<(), String> {
        match self {
            Self::Quantize(request) => request.recipe.check(),
            Self::Inspect(request) => request.check(),
            Self::Attention(request) => request.check(),
            Self::Shard(request) => request.check(),
            Self::Timeline(request) => request.check(),
            Self::Launch(request) => request.check(),
            _ => Ok(()),
        }
    }
}

/// The whole command line: its commands and their options.
pub fn command_line() -> clap::Command {
    CommandLine::command()
}

/// Parses a command line without the program's name.
///
/// # Errors
/// A [`UsageError`] with the reason.
pub fn parse(arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Request, UsageError> {
    let mut words: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    if words.first().is_some_and(|word| word == "help") {
        // What is asked for is a help already.
        words.retain(|word| word != "--help" && word != "-h");
    }
    let mut command = command_line();
    let matches = command.try_get_matches_from_mut(iter::once("oxtile".into()).chain(words.iter().cloned()));
    let name = words.first().and_then(|word| word.to_str()).unwrap_or_default();
    match matches.and_then(|matches| CommandLine::from_arg_matches(&matches)) {
        Ok(CommandLine { request }) => match request.check() {
            Ok(()) => Ok(request),
            Err(reason) => Err(UsageError::new(&mut command, name, reason)),
        },
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(Request::Text(error.render())),
            // Without a word there is nothing wrong.
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => Ok(Request::Text(command.render_help())),
            _ => Err(UsageError::of(&error, &mut command, &words)),
        },
    }
}
