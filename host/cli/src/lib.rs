//! The command line of Oxtile: `oxtile quantize`, `dequantize`, `compare`, `inspect`, `overlap`, `shard`, `join`, `launch`, `timeline`, `doctor`, `new`, `build`,
//! `explain`, `demo-checkpoint`, `completions` and `man`.
//!
//! The binary is a thin shell over this library, so that tests can call its parts one by one. Only the commands print;
//! [`safetensors`] and [`quantize`] return values and typed errors.
//!
//! | file | what it holds |
//! |---|---|
//! | `arguments`, `command` | the command line, parsed; from a request to what is printed |
//! | `quantize`, `dequantize`, `compare`, `inspect`, `attention`, `overlap`, `shard`, `join`, `launch`, `timeline`, `doctor`, `new`, `build`, `explain`, `completions`, `man` | the commands of these names |
//! | `summed`, `gradients` | `overlap` of products whose sum the ranks share, and of the gradients of a product |
//! | `demo` | `oxtile demo-checkpoint` |
//! | `safetensors` | files of tensors, read and written |
//! | `output`, `interrupt` | files that appear only when complete, after Ctrl-C too |
//! | `message`, `progress`, `text` | lines and bars on standard error; text for people |
//! | `error` | what can end a command |
#![deny(missing_docs)]

pub mod arguments;
pub mod attention;
pub mod build;
pub mod command;
pub mod compare;
pub mod completions;
pub mod demo;
pub mod dequantize;
pub mod doctor;
pub mod error;
pub mod explain;
pub mod gradients;
pub mod inspect;
pub mod interrupt;
pub mod join;
pub mod launch;
pub mod man;
pub mod message;
pub mod new;
pub mod output;
pub mod overlap;
pub mod progress;
pub mod quantize;
pub mod safetensors;
pub mod shard;
pub mod summed;
pub mod text;
pub mod timeline;

pub use error::Error;
