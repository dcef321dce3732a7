//! What can be wrong with a file, and where.

use std::{fmt, io, path::PathBuf};

use super::{MAX_HEADER_BYTES, METADATA_KEY};
use crate::text::{path, printable};

/// A file that cannot be read as safetensors.
#[derive(Debug, thiserror::Error)]
#[error("{}: {fault}", path(.file))]
pub struct ReadError {
    /// The file at fault.
    pub file: PathBuf,
    /// What is wrong with it.
    pub fault: Fault,
}

/// One defect of a file: what, where, and how to mend it.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The operating system refused.
    #[error("cannot {action}: {error}")]
    Io {
        /// What was tried, as a verb: `open`, `read`, `map`.
        action: &'static str,
        /// The system's answer.
        error: io::Error,
    },
    /// A directory, pipe or device.
    #[error("is a {0}, not a regular file; name a .safetensors file")]
    NotAFile(&'static str),
    /// An index, where a file of tensors is read.
    #[error("is an index by its name, no file of tensors: name one of the files that its `weight_map` names")]
    NamedIndex,
    /// An index that cannot be one.
    #[error("is not the index of a checkpoint: {0}; an index has a `weight_map` of tensors and their files")]
    Index(String),
    /// Not even a header length.
    #[error(
        "has {0} bytes, and a safetensors file begins with an 8-byte header length; \
         the file is empty or cut short: fetch it again"
    )]
    TooShort(u64),
    /// The header is longer than the file.
    #[error(
        "declares a header of {declared} bytes, but {available} bytes follow the header length; \
         the file is cut short or is not safetensors: fetch it again"
    )]
    HeaderBeyondFile {
        /// The length the file's first 8 bytes give.
        declared: u64,
        /// Bytes after the header length.
        available: u64,
    },
    /// The header is longer than any sane one.
    #[error("declares a header of {0} bytes, more than the format's limit of 100000000")]
    HeaderTooLong(u64),
    /// The header's first byte is not a brace.
    #[error("header does not begin with '{{' (found byte 0x{0:02x}); this is not a safetensors file")]
    HeaderStart(u8),
    /// The header has no byte.
    #[error("header is empty (declared length 0); this is not a safetensors file")]
    HeaderEmpty,
    /// The header is no text.
    #[error("header is not UTF-8 from its byte {0} on; the file is damaged: fetch it again")]
    HeaderUtf8(usize),
    /// The header is no JSON object, or repeats a key.
    #[error("header is not the JSON object the format asks for: {0}")]
    HeaderJson(String),
    /// `__metadata__` is not an object of strings.
    #[error("header key `__metadata__`: {0}; the format allows an object of strings")]
    Metadata(String),
    /// One tensor's entry is wrong.
    #[error("tensor `{}`, {field}: {reason}", printable(.name))]
    Tensor {
        /// The tensor's name.
        name: String,
        /// The part of its entry.
        field: Field,
        /// What is wrong with it.
        reason: String,
    },
    /// Bytes that belong to no tensor follow the last one.
    #[error(
        "the tensors end at data byte {covered}, but the file holds {available} data bytes; \
         {} to no tensor: fetch the file again or write it anew", belong(.available - .covered)
    )]
    TrailingBytes {
        /// Where the last tensor ends.
        covered: u64,
        /// Size of the data section.
        available: u64,
    },
    /// The file was written to during the run.
    #[error("changed while it was being read; wait until its writer is done and run again")]
    Changed,
}

/// The part of a tensor's header entry that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// The entry as a whole.
    Entry,
    /// `dtype`.
    Dtype,
    /// `shape`.
    Shape,
    /// `data_offsets`.
    DataOffsets,
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Field::Entry => "its header entry",
            Field::Dtype => "field dtype",
            Field::Shape => "field shape",
            Field::DataOffsets => "field data_offsets",
        })
    }
}

/// `3 bytes belong`.
fn belong(bytes: u64) -> String {
    if bytes == 1 { "1 byte belongs".to_owned() } else { format!("{bytes} bytes belong") }
}

/// A file that could not be written. Whatever the cause, neither the output nor a temporary file is left behind.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {error}", path(.file))]
    Io {
        /// The output.
        file: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// The system's answer.
        error: io::Error,
    },
    /// The folder of the output is not there.
    #[error("{}: there is no folder {}: make it, or name another", path(.file), path(.folder))]
    NoFolder {
        /// The output.
        file: PathBuf,
        /// Its folder.
        folder: PathBuf,
    },
    /// The output would replace something that is no file.
    #[error("{}: is a {kind}; name a file for the output", path(.file))]
    NotAFile {
        /// The output.
        file: PathBuf,
        /// What stands there.
        kind: &'static str,
    },
    /// The output is the input.
    #[error(
        "{}: is the input file itself{}; choose another name for the output",
        path(.file), if *.linked { " (by a link)" } else { "" }
    )]
    SameFile {
        /// The output.
        file: PathBuf,
        /// Whether the two paths differ.
        linked: bool,
    },
    /// The output is the recording of this process.
    #[error("{}: is the file that OXTILE_TRACE names for a recording; choose another name for one of them", path(.0))]
    Trace(PathBuf),
    /// Two outputs are one file.
    #[error("{}: is the file that {} is; name two files for the outputs", path(.file), path(.other))]
    Twice {
        /// An output.
        file: PathBuf,
        /// The other one.
        other: PathBuf,
    },
    /// Two tensors of one name.
    #[error("{}: two tensors would be named `{}`; rename one of them", path(.file), printable(.name))]
    DuplicateName {
        /// The output.
        file: PathBuf,
        /// The name.
        name: String,
    },
    /// A tensor by the name of the header's strings.
    #[error("{}: no tensor can be named `{METADATA_KEY}`, which is the header's key for free-form strings; rename it", path(.file))]
    ReservedName {
        /// The output.
        file: PathBuf,
    },
    /// A header longer than any reader takes.
    #[error(
        "{}: the header of its {tensors} tensors would have {bytes} bytes, more than the format's limit of {MAX_HEADER_BYTES}; write fewer tensors to a \
         file, or shorten their names or the metadata", path(.file)
    )]
    HeaderTooLong {
        /// The output.
        file: PathBuf,
        /// What it would have.
        bytes: u64,
        /// How many tensors.
        tensors: usize,
    },
    /// A tensor's size does not fit its declaration.
    #[error("{}: tensor `{}`: {reason}", path(.file), printable(.name))]
    Size {
        /// The output.
        file: PathBuf,
        /// The tensor's name.
        name: String,
        /// What does not fit.
        reason: String,
    },
}
