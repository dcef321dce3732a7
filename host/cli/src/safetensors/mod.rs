//! The safetensors container: a strict reader and a streaming writer, both by pieces.
//!
//! A file is an 8-byte little-endian header length, that many bytes of JSON, and the tensors' bytes.
//! The JSON maps each tensor's name to its dtype, shape and `[begin, end)` in the data section, and may hold one
//! `__metadata__` object of strings. The tensors cover the data section without holes or overlaps.
//! Source: the format's README and `safetensors/src/tensor.rs`, version 0.8.0.
//!
//! | file | what it holds |
//! |---|---|
//! | `header` | the JSON header, with every rule of the format checked |
//! | `dtype` | element types by their names |
//! | `read`, `write` | files, read by windows and written piece by piece |
//! | `frame` | a header without its strings |
//! | `index` | a checkpoint of several files |
//! | `object` | JSON objects in which no key stands twice |
//! | `error` | what can be wrong with a file, and where |

mod dtype;
mod error;
mod frame;
mod header;
mod index;
mod object;
mod read;
mod write;

pub use dtype::Dtype;
pub use error::{Fault, Field, ReadError, WriteError};
pub(crate) use frame::{filled, frame};
pub use header::{Header, MAX_HEADER_BYTES, Tensor};
pub use index::Index;
pub(crate) use object::Object;
pub(crate) use read::kind_if_not_file;
pub use read::{Checkpoint, Window};
pub use write::{Runs, TensorSink, TensorSpec, Writer};
pub(crate) use write::{header_bytes, hex};

/// The header's key that holds the free-form strings instead of a tensor.
const METADATA_KEY: &str = "__metadata__";
