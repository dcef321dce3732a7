//! The command line, parsed: one file a command.
//!
//! | file | what it holds |
//! |---|---|
//! | `words` | one word after another, and the values that options take |
//! | `help` | the help texts |
//! | `quantize`, `dequantize`, `compare`, `inspect`, `attention`, `overlap`, `shard`, `launch`, `timeline`, `doctor`, `new`, `build`, `explain` | the options of each command; `join` is in `shard` |
//! | `demo` | the options of `oxtile demo-checkpoint` |
//! | `tests` | what the command line takes and refuses |

mod attention;
mod build;
mod compare;
mod demo;
mod dequantize;
mod doctor;
mod explain;
mod help;
mod inspect;
mod launch;
mod new;
mod overlap;
mod quantize;
mod shard;
#[cfg(test)]
mod tests;
mod timeline;
mod words;

use std::ffi::OsString;

use lexopt::Parser;

pub use attention::{Attention, Causal};
pub use build::Build;
pub use compare::Compare;
pub use demo::DemoCheckpoint;
pub use dequantize::Dequantize;
pub use doctor::Doctor;
pub use explain::Explain;
pub use help::HELP;
pub use inspect::{Histogram, Inspect};
pub use launch::Launch;
pub use new::New;
pub use overlap::Overlap;
pub use quantize::Quantize;
pub use shard::{Join, Shard};
pub use timeline::Timeline;
use words::{Word, Words};

use crate::safetensors::Dtype;

/// What the user asks for.
#[derive(Debug, PartialEq)]
pub enum Request {
    /// Print a help text.
    Help(&'static str),
    /// Print the version.
    Version,
    /// Quantize a checkpoint.
    Quantize(Quantize),
    /// Turn a quantized file back into numbers.
    Dequantize(Dequantize),
    /// Show what is in a file.
    Inspect(Inspect),
    /// Measure how far apart two files are.
    Compare(Compare),
    /// Attend.
    Attention(Attention),
    /// Say how a gathered product would be done.
    Overlap(Overlap),
    /// Divide a checkpoint among ranks.
    Shard(Shard),
    /// Put shards together.
    Join(Join),
    /// Run a program as several ranks.
    Launch(Launch),
    /// Draw recordings.
    Timeline(Timeline),
    /// List what the machine has.
    Doctor(Doctor),
    /// Make a crate.
    New(New),
    /// Compile kernels.
    Build(Build),
    /// Say what a kernel takes and does.
    Explain(Explain),
    /// Make a checkpoint to try things on.
    DemoCheckpoint(DemoCheckpoint),
}

/// `--device`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Device {
    /// A GPU if there is one, else the emulator.
    Auto,
    /// The first GPU.
    Cuda,
    /// The emulator.
    Emulated,
}

impl Device {
    /// Every choice, by its name.
    const CHOICES: [(&'static str, Self); 3] =
        [(Self::Auto.name(), Self::Auto), (Self::Cuda.name(), Self::Cuda), (Self::Emulated.name(), Self::Emulated)];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Device::Auto => "auto",
            Device::Cuda => "cuda",
            Device::Emulated => "emulated",
        }
    }
}

/// The types of wide numbers, by their names on the command line.
const WIDE: [(&str, Dtype); 3] = [("f32", Dtype::F32), ("bf16", Dtype::Bf16), ("f16", Dtype::F16)];

/// A command line that makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("{reason}; `oxtile {}--help` shows the usage", .command.map_or(String::new(), |command| format!("{command} ")))]
pub struct UsageError {
    command: Option<&'static str>,
    reason: String,
}

/// Parses a command line without the program's name.
///
/// # Errors
/// A [`UsageError`] with the reason.
pub fn parse(arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Request, UsageError> {
    let mut parser = Parser::from_args(arguments);
    let mut words = Words { parser: &mut parser, command: None, seen: Vec::new() };
    let command = match words.next()? {
        None | Some(Word::Help) => return Ok(Request::Help(HELP)),
        Some(Word::Flag(flag)) if flag == "version" => return Ok(Request::Version),
        Some(word @ Word::Flag(_)) => return Err(words.unexpected(&word)),
        Some(Word::Value(command)) => command,
    };
    type Parse = fn(&mut Words<'_>) -> Result<Request, UsageError>;
    const COMMANDS: [(&str, Parse); 15] = [
        ("quantize", quantize::parse),
        ("dequantize", dequantize::parse),
        ("inspect", inspect::parse),
        ("compare", compare::parse),
        ("attention", attention::parse),
        ("overlap", overlap::parse),
        ("shard", shard::parse),
        ("join", shard::parse_join),
        ("launch", launch::parse),
        ("timeline", timeline::parse),
        ("doctor", doctor::parse),
        ("new", new::parse),
        ("build", build::parse),
        ("explain", explain::parse),
        ("demo-checkpoint", demo::parse),
    ];
    // `help COMMAND` is `COMMAND --help`.
    let mut help = Parser::from_args(["--help"]);
    let command = match command {
        word if word != "help" => word,
        _ => match words.next()? {
            None | Some(Word::Help) => return Ok(Request::Help(HELP)),
            Some(word @ Word::Flag(_)) => return Err(words.unexpected(&word)),
            Some(Word::Value(command)) => {
                words.parser = &mut help;
                command
            }
        },
    };
    let Some((name, parse)) = COMMANDS.iter().find(|(name, _)| command == *name) else {
        let names: Vec<&str> = COMMANDS.iter().map(|(name, _)| *name).collect();
        return Err(words.error(format!("no command is named {command:?}{}", words::meant(&command.to_string_lossy(), &names, "commands"))));
    };
    parse(&mut Words { command: Some(name), ..words })
}
