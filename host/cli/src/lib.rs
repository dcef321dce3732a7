//! The command line of Oxtile: `oxtile quantize`, `dequantize`, `compare`, `inspect`, `launch`, `timeline`, `doctor`, `new`, `build`
//! and `demo-checkpoint`.
//!
//! The binary is a thin shell over this library, so that tests can call its parts one by one. Only the commands print;
//! [`safetensors`] and [`quantize`] return values and typed errors.
#![deny(missing_docs)]

pub mod arguments;
pub mod attention;
pub mod build;
pub mod command;
pub mod compare;
pub mod demo;
pub mod dequantize;
pub mod doctor;
pub mod error;
pub mod inspect;
pub mod interrupt;
pub mod launch;
pub mod message;
pub mod new;
pub mod output;
pub mod progress;
pub mod quantize;
pub mod safetensors;
pub mod text;
pub mod timeline;

pub use error::Error;
